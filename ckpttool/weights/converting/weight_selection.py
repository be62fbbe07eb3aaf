"""Selects a model's weights, under the names that its state dict has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from ckpttool.core.checkpoint import Checkpoint, TrainingState
from ckpttool.core.errors import UsageError
from ckpttool.core.tensor import WHOLE_WEIGHTS, Path, Role, Tensor
from ckpttool.core.text import counted
from ckpttool.formats.paddle.parts import HEIGHTS, heights_of
from ckpttool.formats.traits import traits_of
from ckpttool.formats.writer import Content
from ckpttool.weights.converting.ties import carry_ties
from ckpttool.weights.pairing.notes import training_tensors
from ckpttool.weights.pairing.variable_names import WRAPPER_STEPS

_WRAPPERS = ("module.", *(f"{name}." for name in sorted(WRAPPER_STEPS)))
"""Prefixes that DistributedDataParallel, torch.compile and FSDP add to a model's names."""
_FILES = ("checkpoint", "ckpt", "snapshot")
"""Keys, in lower case, of a container of the whole checkpoint."""
_SHOWN = 3


def only_weights(content: Content, checkpoint: Checkpoint) -> tuple[Content, list[str]]:
    """Return only the weights of a content, and notes.

    Keys of containers and prefixes of wrappers that all weights share are removed from their names.
    """
    weights = [tensor for tensor in content.tensors if tensor.role is Role.WEIGHTS]
    if not weights:
        raise UsageError(f"{checkpoint.path}: no weights among its {counted(len(content.tensors), 'tensor')}")
    rest = [tensor for tensor in content.tensors if tensor.role is not Role.WEIGHTS]
    notes = [f"left out {training_tensors(rest)}"] if rest else []
    paths, containers = [tensor.path for tensor in weights], ""
    traits = traits_of(checkpoint.format)
    if not traits.holds_layers:
        paths, containers = _strip_containers(paths, is_tree=traits.nests_state_dicts)
    notes += [f"removed the prefix {containers!r} from all names"] if containers else []
    if traits.nests_state_dicts:
        models = list(dict.fromkeys(path[0] if len(path) > 1 else None for path in paths))
        if len(models) > 1 and None not in models:
            shown = ", ".join(map(str, models[:_SHOWN])) + (", …" if len(models) > _SHOWN else "")
            notes.append(f"{len(models):,} models, with their prefixes kept: {shown}")
    paths, wrappers = _strip_wrappers(paths)
    notes += [f"removed the prefix {wrappers!r} from all names"] if wrappers else []
    renamed = [replace(tensor, path=path) for tensor, path in zip(weights, paths, strict=True)]
    known: set[str] = set()
    for tensor in renamed:
        if tensor.name in known:
            raise UsageError(f"{tensor.name}: two weights would have this name (--map renames one of them)")
        known.add(tensor.name)
    tensors = carry_ties(zip(weights, renamed, strict=True))
    native, native_notes = _native(content, tensors, is_renamed=bool(containers or wrappers))
    selected = replace(
        content, tensors=tensors, tree=None, metadata={}, native=native, training=TrainingState()
    )
    return selected, notes + native_notes


def _strip_containers(paths: Sequence[Path], *, is_tree: bool) -> tuple[list[Path], str]:
    """Return paths without their common keys of containers, and these keys with dots.

    In a tree, every key around a known container is one, too.
    """
    # Only keys at the same depth of all paths can be containers. Without a tree, names are flat and the first
    # key that is no known container ends the search; in a tree, keys up to the last known container go.
    columns = (set(column) for column in zip(*(path[:-1] for path in paths), strict=False))
    shared = [column.pop() for column in takewhile(lambda column: len(column) == 1, columns)]
    are_containers = []
    for key in shared:
        if isinstance(key, int):
            are_containers.append(is_tree)
        else:
            is_file = is_tree and key.lower() in _FILES
            are_containers.append(is_file or key == "module" or WHOLE_WEIGHTS.search(key) is not None)
    count = len(list(takewhile(bool, are_containers)))
    if is_tree and True in are_containers:
        count = len(are_containers) - are_containers[::-1].index(True)
    return [path[count:] for path in paths], "".join(f"{key}." for key in shared[:count])


def _strip_wrappers(paths: Sequence[Path]) -> tuple[list[Path], str]:
    """Return paths without their common prefixes of wrappers, and these prefixes."""

    def begins_with(path: Path, wrapper: str) -> bool:
        first = path[0]
        if not isinstance(first, str):
            return False
        return (len(path) > 1 and first == wrapper[:-1]) or (first.startswith(wrapper) and first != wrapper)

    def strip(path: Path, wrapper: str) -> Path:
        first = str(path[0])
        return path[1:] if first == wrapper[:-1] else (first.removeprefix(wrapper), *path[1:])

    stripped, prefix = list(paths), ""
    while wrapper := next(
        (one for one in _WRAPPERS if all(begins_with(path, one) for path in stripped)), None
    ):
        stripped, prefix = [strip(path, wrapper) for path in stripped], prefix + wrapper
    return stripped, prefix


def _native(
    content: Content, tensors: Iterable[Tensor], *, is_renamed: bool
) -> tuple[Mapping[str, bytes], list[str]]:
    """Return the format-specific parts that are still valid for the selected tensors, and notes.

    TensorFlow's object graph is invalid once tensors are renamed.
    """
    kept = {
        name: data
        for name, data in content.native.items()
        if "optimizer" not in name and not (is_renamed and name.startswith("tensorflow."))
    }
    if heights := heights_of(kept):
        rows = (tensor.path for tensor in tensors if tensor.path[-1] == "rows")
        stems = {".".join(map(str, path[:-1])) for path in rows}
        of_weights = {name: height for name, height in heights.items() if name in stems}
        kept = {**kept, HEIGHTS: json.dumps(of_weights).encode()}
        if not of_weights:
            del kept[HEIGHTS]
    is_gone = (
        is_renamed and traits_of(content.source_format).has_object_graph and len(kept) < len(content.native)
    )
    return kept, ["TensorFlow's object graph left out: its names differ"] if is_gone else []
