"""The model's tensors alone, under the names that a model expects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from ckpttool.checkpoint import Checkpoint, TrainingState
from ckpttool.converting.ties import retied
from ckpttool.errors import UsageError
from ckpttool.formats.paddle.fluid_parts import HEIGHTS, heights_of
from ckpttool.pairing.variable_names import INSIDE
from ckpttool.report import counted, first_names
from ckpttool.roles import WHOLE_WEIGHTS
from ckpttool.tensor import Path, Role, Tensor
from ckpttool.writing.interface import Content

_WRAPPERS = ("module.", *(f"{name}." for name in sorted(INSIDE)))
"""What DistributedDataParallel, torch.compile and FSDP put in front of a model's names."""
_TREES = ("pytorch", "pickle", "torch-dcp", "paddle")
"""Formats in which a key is a container that somebody put a state dict into."""
_LAYERS = ("keras", "keras-h5")
"""Formats in which nothing lies around the layers: their names are the model's."""
_FILES = ("checkpoint", "ckpt", "snapshot")
"""Keys, in lower case, of the whole of what was saved."""
_GRAPHS = ("tensorflow", "savedmodel")
_SHOWN = 3


def only_weights(content: Content, checkpoint: Checkpoint) -> tuple[Content, list[str]]:
    """Return the weights of a content without what lies around them, and what there is to say of it.

    Containers that all weights lie in, and prefixes of wrappers that all have, are taken off their names.
    """
    weights = [tensor for tensor in content.tensors if tensor.role is Role.WEIGHTS]
    if not weights:
        raise UsageError(
            f"{checkpoint.path}: none of its {len(content.tensors):,} tensors is a weight of a model"
        )
    notes = _left_out(content.tensors)
    paths, gone = [tensor.path for tensor in weights], ""
    if checkpoint.format not in _LAYERS:
        paths, gone = _without_containers(paths, is_tree=checkpoint.format in _TREES)
    notes += [f"{gone!r} taken off the names of all weights"] if gone else []
    notes += _models(paths) if checkpoint.format in _TREES else []
    paths, wrapper = _without_wrappers(paths)
    notes += [f"{wrapper!r} taken off the names of all weights"] if wrapper else []
    made = [replace(tensor, path=path) for tensor, path in zip(weights, paths, strict=True)]
    _require_single(made)
    tensors = retied(zip(weights, made, strict=True))
    native, told = _native(content, tensors, is_renamed=bool(gone or wrapper))
    left = replace(content, tensors=tensors, tree=None, metadata={}, native=native, training=TrainingState())
    return left, notes + told


def _left_out(tensors: Iterable[Tensor]) -> list[str]:
    rest = [tensor for tensor in tensors if tensor.role is not Role.WEIGHTS]
    if not rest:
        return []
    optimizer = sum(tensor.role is Role.OPTIMIZER for tensor in rest)
    others = [tensor.name for tensor in rest if tensor.role is not Role.OPTIMIZER]
    told = [f"{optimizer:,} of an optimizer"] if optimizer else []
    told += [first_names(others)] if others else []
    are = "that is no weight" if len(rest) == 1 else "that are no weights"
    return [f"{counted(len(rest), 'tensor')} {are} left out: {'; '.join(told)}"]


def _without_containers(paths: Sequence[Path], *, is_tree: bool) -> tuple[list[Path], str]:
    """Return paths without the keys of containers that they all begin with, and those keys.

    In a tree, whatever lies around a container that holds all of them is one, too.
    """
    columns = (set(column) for column in zip(*(path[:-1] for path in paths), strict=False))
    shared = [column.pop() for column in takewhile(lambda column: len(column) == 1, columns)]
    told = [_is_container(key, is_tree=is_tree) for key in shared]
    count = len(list(takewhile(bool, told)))
    if is_tree and True in told:
        count = len(told) - told[::-1].index(True)
    return [path[count:] for path in paths], "".join(f"{key}." for key in shared[:count])


def _is_container(key: str | int, *, is_tree: bool) -> bool:
    if isinstance(key, int):
        return is_tree
    if is_tree and key.lower() in _FILES:
        return True
    return key == "module" or WHOLE_WEIGHTS.search(key) is not None


def _models(paths: Iterable[Path]) -> list[str]:
    """Return that there are several models, if there are."""
    keys = [path[0] if len(path) > 1 else None for path in paths]
    names = list(dict.fromkeys(keys))
    if len(names) < 2 or None in names:
        return []
    shown = ", ".join(map(str, names[:_SHOWN])) + (", …" if len(names) > _SHOWN else "")
    return [f"{len(names):,} models, whose names keep what tells them apart: {shown}"]


def _without_wrappers(paths: Sequence[Path]) -> tuple[list[Path], str]:
    """Return paths without the prefixes of wrappers that they all begin with, and those."""
    left, gone = list(paths), ""
    while wrapper := next((one for one in _WRAPPERS if all(_begins_with(path, one) for path in left)), None):
        left, gone = [_without_wrapper(path, wrapper) for path in left], gone + wrapper
    return left, gone


def _begins_with(path: Path, wrapper: str) -> bool:
    first = path[0]
    if not isinstance(first, str):
        return False
    return (len(path) > 1 and first == wrapper[:-1]) or (first.startswith(wrapper) and first != wrapper)


def _without_wrapper(path: Path, wrapper: str) -> Path:
    first = str(path[0])
    return path[1:] if first == wrapper[:-1] else (first.removeprefix(wrapper), *path[1:])


def _require_single(tensors: Iterable[Tensor]) -> None:
    known: set[str] = set()
    for tensor in tensors:
        if tensor.name in known:
            raise UsageError(f"{tensor.name}: two weights would be called so (--map renames one of them)")
        known.add(tensor.name)


def _native(
    content: Content, tensors: Iterable[Tensor], *, is_renamed: bool
) -> tuple[Mapping[str, bytes], list[str]]:
    """Return what of the format's own still holds: a graph of objects does not, once names are others."""
    kept = {
        name: data
        for name, data in content.native.items()
        if "optimizer" not in name and not (is_renamed and name.startswith("tensorflow."))
    }
    if heights := heights_of(kept):
        rows = (tensor.path for tensor in tensors if tensor.path[-1] == "rows")
        stems = {".".join(map(str, path[:-1])) for path in rows}
        left = {name: height for name, height in heights.items() if name in stems}
        kept = {**kept, HEIGHTS: json.dumps(left).encode()}
        if not left:
            del kept[HEIGHTS]
    is_gone = is_renamed and content.source_format in _GRAPHS and len(kept) < len(content.native)
    return kept, ["TensorFlow's graph of objects left out: its names are others"] if is_gone else []
