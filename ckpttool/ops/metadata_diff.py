"""Compares all content but tensors: epoch, step, loss, settings, optimizer groups, config, signatures."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Origin
from ckpttool.core.tensor import Path, Role, role_of
from ckpttool.core.text import counted
from ckpttool.formats.content.plain_data import KeyText
from ckpttool.formats.traits import traits_of
from ckpttool.ops.difference import ABSENT, ValueChange

_PRODUCER_KEYS = frozenset(
    {
        "keras_version",
        "pytorch-lightning_version",
        "ds_version",
        "transformers_version",
        "torch_version",
        "tensorflow_version",
        "shared_object_id",
        "saved_at",
        "created_at",
        "timestamp",
        "datetime",
        "date_saved",
    }
)
"""Keys, at any depth, of the producer's version and of the time of writing."""
_TIMES = frozenset({"time", "date"})
"""Keys of the time of writing at the root only."""
_INDEX_KEYS = frozenset({"total_size", "total_parameters"})
"""Keys at the root that the index of a sharded checkpoint adds."""
_LIBRARIES = ("pt", "tf", "np", "flax", "mlx", "jax", "paddle")
"""Values of ``format`` in safetensors files: the library that they are for."""
_INNER_NAME = re.compile(r"(^|\.)signatures\..*\.name$")
"""Paths of the names of a signature's tensors in the graph, which callers never see."""
_FIELDS = ("epoch", "step", "loss", "learning_rate", "best", "seed", "saved_at")


_SHOWN_ITEMS = 16
"""Limit on the items of a shown container; of larger ones, such as a generator's state, the size is shown."""
_MANGLED = "___torch_mangle_"
_MANGLE = re.compile(rf"{_MANGLED}\d+\.")
"""Part of TorchScript's class names if a class of the name was compiled before; the number is arbitrary."""
_NOTHING = ("none", "null")
"""Texts for None."""
_LONGEST_NUMBER = 400
"""Limit on the characters of a number; float64 needs no more."""
_UNREAD = re.compile(
    r"[<: ][\d,]+ bytes of "
    r"(data|text|a record without a checksum|a file that was not read|constants that were not read)>"
)
_CUT = re.compile(r"[\w.]+\(…\)|<[A-Z]\w*[a-z]\w*>")
"""Descriptions without a checksum, for content of too many bytes, or objects too large for a line."""
_DIGEST = re.compile(r"CRC-32 [0-9a-f]{8}")
"""Checksum that makes a description one of the whole content."""


class _TrainingValue(NamedTuple):
    """A value of the training state, and its origin."""

    value: object
    origin: Origin


def compare_metadata(a: Checkpoint, b: Checkpoint) -> tuple[list[ValueChange], list[ValueChange]]:
    """Return the differences, and those that don't count: format, producer, versions, times.

    Formats that can hold the same metadata are compared key by key. Of others, only the training state and
    keys that both have are compared, and a number equals the text that spells it. Content of one side alone
    is ignored then, unless it belongs to the weights and the other side could hold it. Values from the names
    of files are never compared.
    """
    ours, theirs = _training_values(a), _training_values(b)
    single: list[ValueChange] = []
    # A bare state dict has no place for the other content of a nested checkpoint.
    is_partial = (_is_bare(a) and _is_nested(b)) or (_is_bare(b) and _is_nested(a))
    if _dialect(a) == _dialect(b) and not is_partial:
        differing = _merge_training([*tree_changes(a.metadata, b.metadata)], ours, theirs)
    else:
        both = [
            change
            for name, said in ours.items()
            if name in theirs and not _agree(said, theirs[name], spelled=True)
            for change in tree_changes(said.value, theirs[name].value, name, spelled=True)
        ]
        both += _shared_key_changes(a, b, ours, theirs)
        differing = [one for one in both if _has_both(one)]
        single = [*_one_sided_changes(a, b, ours, theirs), *(one for one in both if not _has_both(one))]
    formats = (a.format, b.format)
    is_of_a, is_of_b = _weights_test(a), _weights_test(b)

    def marked(change: ValueChange) -> ValueChange:
        is_inside = (change.a is not ABSENT and is_of_a(change.path)) or (
            change.b is not ABSENT and is_of_b(change.path)
        )
        return replace(change, of_weights=is_inside and not _is_bookkeeping(change, formats))

    differing, single = [*map(marked, differing)], [*map(marked, single)]
    if _dialect(a) == _dialect(b):  # both can hold values next to their weights
        differing += [one for one in single if one.of_weights]
        single = [one for one in single if not one.of_weights]
    is_sharded = "sharded" in (a.variant, b.variant)
    counts = [
        not (_is_bookkeeping(one, formats) or (is_sharded and one.path in _INDEX_KEYS)) for one in differing
    ]
    return [*compress(differing, counts)], [
        *_checkpoint_changes(a, b),
        *(one for one in single if not _is_bookkeeping(one, formats)),
        *(one for one, is_counted in zip(differing, counts, strict=True) if not is_counted),
    ]


def partly_known(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Return the values of both sides that couldn't be compared, with the reason."""
    notes = []
    traits = traits_of(a.format)
    program = traits.program if a.format == b.format and not traits.program_variants else None
    if program is not None and not all(has_digest(one.metadata.get(program.key)) for one in (a, b)):
        notes.append(program.name)
    return notes + [f"{path}: known only in part" for path in described_in_part(a.metadata, b.metadata)]


def _dialect(checkpoint: Checkpoint) -> str:
    traits = traits_of(checkpoint.format)
    if traits.varies:
        return f"{checkpoint.format} {checkpoint.variant}"
    return traits.dialect or checkpoint.format


def _is_bare(checkpoint: Checkpoint) -> bool:
    """Return whether it is a state dict and nothing else."""
    says_nothing = all(
        _is_bookkeeping(ValueChange(key, value, value), (checkpoint.format, checkpoint.format))
        for key, value in checkpoint.metadata.items()
    )
    return says_nothing and bool(checkpoint.tensors) and not _is_nested(checkpoint)


def _is_nested(checkpoint: Checkpoint) -> bool:
    """Return whether its tensors are in a dict inside the outermost one."""
    return any(len(tensor.path) > 1 for tensor in checkpoint.tensors)


def _checkpoint_changes(a: Checkpoint, b: Checkpoint) -> Iterator[ValueChange]:
    kinds = [" ".join(filter(None, (one.format, one.variant))) for one in (a, b)]
    if kinds[0] != kinds[1]:
        yield ValueChange("format", *kinds)
    makers = [one.producer for one in (a, b)]
    if (
        makers[0] != makers[1]
        and all(maker.framework for maker in makers)
        and any(maker.version for maker in makers)
    ):
        yield ValueChange(
            "producer", *(" ".join(filter(None, (one.framework, one.version))) for one in makers)
        )


def _is_bookkeeping(change: ValueChange, formats: tuple[str, str]) -> bool:
    """Return whether a value describes how a file was written, rather than its content."""
    first, _, _ = change.path.partition(".")
    _, _, last = change.path.rpartition(".")
    if last in _PRODUCER_KEYS or first in _TIMES or _INNER_NAME.search(change.path):
        return True
    sides = zip((change.a, change.b), formats, strict=True)
    if any(side is not ABSENT and first in traits_of(format).own_keys for side, format in sides):
        return True
    return change.path == "format" and all(
        side is ABSENT or side in _LIBRARIES for side in (change.a, change.b)
    )


def _has_both(change: ValueChange) -> bool:
    return change.a is not ABSENT and change.b is not ABSENT


# The training state ---------------------------------------------------------------------------------


def _training_values(checkpoint: Checkpoint) -> dict[str, _TrainingValue]:
    """Return the values of a checkpoint's training state, by field."""
    state = checkpoint.training
    found = {name: getattr(state, name) for name in _FIELDS}
    found |= {f"metrics.{name}": value for name, value in state.metrics.items()}
    values = {
        name: _TrainingValue(value, state.origin_of(name))
        for name, value in found.items()
        if value is not None
    }
    settings = _TrainingValue(None, state.origin_of("hyper_parameters"))
    values |= {
        f"hyper_parameters.{key}": settings._replace(value=value)
        for key, value in state.hyper_parameters.items()
    }
    return {name: said for name, said in values.items() if said.origin.kind != "name"}


def _shared_key_changes(
    a: Checkpoint, b: Checkpoint, ours: Mapping[str, _TrainingValue], theirs: Mapping[str, _TrainingValue]
) -> Iterator[ValueChange]:
    """Yield changes under keys that both have, except for those of the training state."""
    known = {
        key
        for name in ours.keys() & theirs.keys()
        if (key := ours[name].origin.key) is not None
        and key == theirs[name].origin.key
        and not ours[name].origin.is_last
    }
    for key in a.metadata:
        if key in b.metadata:
            for change in tree_changes(a.metadata[key], b.metadata[key], key, spelled=True):
                if not any(change.path == one or change.path.startswith(f"{one}.") for one in known):
                    yield change


def _one_sided_changes(
    a: Checkpoint, b: Checkpoint, ours: Mapping[str, _TrainingValue], theirs: Mapping[str, _TrainingValue]
) -> Iterator[ValueChange]:
    """Yield training values and outermost keys that only one side has."""
    for name in ours:
        if name not in theirs:
            yield ValueChange(name, summarize(ours[name].value), ABSENT)
    for name in theirs:
        if name not in ours:
            yield ValueChange(name, ABSENT, summarize(theirs[name].value))
    known = {said.origin.key for said in (*ours.values(), *theirs.values())}
    for key, value in a.metadata.items():
        if key not in b.metadata and key not in known:
            yield ValueChange(key, summarize(value), ABSENT)
    for key, value in b.metadata.items():
        if key not in a.metadata and key not in known:
            yield ValueChange(key, ABSENT, summarize(value))


def _merge_training(
    changes: list[ValueChange], ours: Mapping[str, _TrainingValue], theirs: Mapping[str, _TrainingValue]
) -> list[ValueChange]:
    """Return the changes with epoch, step and the like once, first, and under these names."""
    # A step may be stored under several keys, and under others in each file: a change of it is reported once,
    # and the changes at the keys that it came from are left out. If it is the last item of
    # a list, the list's own change is left out only if that item changed.
    named: list[ValueChange] = []
    covered: set[str | None] = set()
    for name in _FIELDS:
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            continue
        is_changed = not _agree(one, other)
        if is_changed:
            named.append(ValueChange(name, one.value, other.value))
        covered |= {said.origin.key for said in (one, other) if is_changed or not said.origin.is_last}
    rest = []
    for change in changes:
        if change.path in covered:
            continue
        if not _has_both(change):  # one side alone has it: under the training state's word, if there is one
            said = ours if change.b is ABSENT else theirs
            words = (name for name in _FIELDS if name in said and said[name].origin.key == change.path)
            change = replace(change, path=next(words, change.path))
        rest.append(change)
    return [*named, *rest]


def _agree(one: _TrainingValue, other: _TrainingValue, *, spelled: bool = False) -> bool:
    """Return whether two values are equal; a tensor's is compared in the precision of float32."""
    numbers = isinstance(one.value, float | int) and isinstance(other.value, float | int)
    if numbers and "tensor" in (one.origin.kind, other.origin.kind):
        return same_value(_single(one.value), _single(other.value))
    return not any(tree_changes(one.value, other.value, spelled=spelled))


def _single(number: Any) -> float:
    """Return a number rounded to float32."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return float(number)


# Values among the weights -----------------------------------------------------------------------------


def _weights_test(checkpoint: Checkpoint) -> Callable[[str], bool]:
    """Return a test whether a value at a path belongs to the weights.

    Those below a weight, next to one, or with weights in them do.
    """
    paths = {tensor.path for tensor in checkpoint.tensors if tensor.role is Role.WEIGHTS}
    parents = {path[:-1] for path in paths}
    if not traits_of(checkpoint.format).nests_state_dicts:
        parents -= {()}  # such a format keeps its metadata apart from the tensors
    above = {_dotted(path[:length]) for path in parents for length in range(1, len(path) + 1)}
    inside = set(map(_dotted, paths | parents))

    def is_of_weights(path: str) -> bool:
        keys = path.split(".")
        prefixes = {".".join(keys[:count]) for count in range(1, len(keys) + 1)}
        if path in above or not prefixes.isdisjoint(inside):
            return True
        # Next to weights at the root, all keys but those of the training's objects count.
        return "" in inside and role_of((keys[0],), ()) not in (Role.OPTIMIZER, Role.TRAINING)

    return is_of_weights


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


# Trees of plain data --------------------------------------------------------------------------------


def tree_changes(a: object, b: object, path: str = "", *, spelled: bool = False) -> Iterator[ValueChange]:
    """Yield where two trees of plain data differ, by dotted path, in their order; without recursion.

    Args:
        a: The first tree.
        b: The second tree.
        path: Path of both.
        spelled: Whether a text equals the number, boolean or JSON that it spells, as one side has only texts.
    """
    pending = [(path, a, b)]
    while pending:
        here, x, y = pending.pop()
        if spelled:
            x, y = _json_tree(x, y), _json_tree(y, x)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            if not spelled:
                yield from _key_type_changes(here, x, y)
            keys = [*x, *(key for key in y if key not in x)]
            below = [(path_below(here, key), x.get(key, ABSENT), y.get(key, ABSENT)) for key in keys]
            pending += reversed(below)
        elif isinstance(x, list) and isinstance(y, list):
            if _is_flat(x) and _is_flat(y):
                yield from _list_changes(here, x, y, spelled=spelled)
                continue
            if len(x) != len(y):
                yield ValueChange(here, _item_count(x), _item_count(y))
            pending += reversed(
                [(path_below(here, at), *pair) for at, pair in enumerate(zip(x, y, strict=False))]
            )
        elif not same_value(x, y, spelled=spelled):
            yield ValueChange(here, summarize(x), summarize(y))


def _key_type_changes(path: str, x: Mapping[Any, Any], y: Mapping[Any, Any]) -> Iterator[ValueChange]:
    """Yield the keys that are a text on one side, and a number with this spelling on the other."""
    sides = [{key for key in side if isinstance(key, KeyText)} for side in (x, y)]
    others = sides[0] ^ sides[1]
    for key in x if others else ():
        if key in others and key in y:
            one, other = (f"key {key} (not a string)" if key in side else f"key '{key}'" for side in sides)
            yield ValueChange(path_below(path, key), one, other)


def _list_changes(path: str, x: list[Any], y: list[Any], *, spelled: bool) -> Iterator[ValueChange]:
    """Yield the difference of two lists of plain values; of long lists, the number of differing items."""
    apart = [at for at, pair in enumerate(zip(x, y, strict=False)) if not same_value(*pair, spelled=spelled)]
    if not apart and len(x) == len(y):
        return
    if max(len(x), len(y)) <= _SHOWN_ITEMS:
        yield ValueChange(path, x, y)
        return
    first = f"{len(apart):,} differ, the first at {apart[0]}" if apart else "the first are the same"
    yield ValueChange(path, _item_count(x), f"{_item_count(y)}, {first}")


def same_value(x: object, y: object, *, spelled: bool = False) -> bool:
    """Return whether two plain values are the same: NaN equals NaN, 1 equals 1.0, True differs from 1."""
    if spelled and isinstance(x, str) is not isinstance(y, str):
        return _spells(x, y) if isinstance(x, str) else _spells(str(y), x)
    if isinstance(x, bool) or isinstance(y, bool):
        return x is y
    if isinstance(x, float) and isinstance(y, float) and x != x and y != y:
        return True
    if isinstance(x, str) and isinstance(y, str) and _MANGLED in x + y:
        return _MANGLE.sub("", x) == _MANGLE.sub("", y)
    return x == y


def _spells(text: str, value: object) -> bool:
    """Return whether a text spells a value."""
    text = text.strip()
    if value is None or isinstance(value, bool):
        return text.lower() in (_NOTHING if value is None else (str(value).lower(),))
    if not isinstance(value, int | float) or len(text) > _LONGEST_NUMBER:
        return False
    try:
        number = int(text) if isinstance(value, int) and text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        return False
    return same_value(number, value)


def _json_tree(value: object, other: object) -> object:
    """Return JSON text parsed if the other side is a container; other values unchanged."""
    if not isinstance(value, str) or not isinstance(other, Mapping | list):
        return value
    try:
        tree = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return tree if isinstance(tree, Mapping | list) else value


def _is_flat(values: list[Any]) -> bool:
    return not any(isinstance(value, Mapping | list) for value in values)


def summarize(value: object) -> object:
    """Return a value, or a summary of a large one."""
    if isinstance(value, Mapping):
        is_small = len(value) <= _SHOWN_ITEMS and _is_flat([*value.values()])
        return dict(value) if is_small else counted(len(value), "key")
    if isinstance(value, list):
        return value if len(value) <= _SHOWN_ITEMS and _is_flat(value) else _item_count(value)
    return value


def _item_count(values: list[Any]) -> str:
    return counted(len(values), "item")


def path_below(path: str, key: object) -> str:
    """Return the dotted path of a key's value."""
    return f"{path}.{key}" if path else str(key)


def described_in_part(a: object, b: object, path: str = "") -> Iterator[str]:
    """Yield the paths of values with equal but partial descriptions on both sides."""
    # Large or unread content is described by its size, with a checksum if it was read. Two equal descriptions
    # without a checksum don't prove that the content is equal.
    pending = [(path, a, b)]
    while pending:
        here, x, y = pending.pop()
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            # An array that holds something, described without a checksum of it.
            is_array = x.get("<class>") == "numpy.ndarray" or "<dataset>" in x
            shape = x.get("shape")
            has_elements = isinstance(shape, list) and 0 not in shape
            if is_array and has_elements and "CRC-32" not in x and x == y:
                yield here
            pending += reversed([(path_below(here, key), x[key], y[key]) for key in x if key in y])
        elif isinstance(x, list) and isinstance(y, list):
            pending += reversed(
                [(path_below(here, at), *pair) for at, pair in enumerate(zip(x, y, strict=False))]
            )
        elif isinstance(x, str) and x == y and (_UNREAD.search(x) or _CUT.fullmatch(x)):
            yield here


def has_digest(tree: object) -> bool:
    """Return whether a tree has a description with a checksum of the whole content."""
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str) and _DIGEST.search(value):
            return True
    return False
