"""How tensors are cut into files of a bounded size, and the index that says which file holds which.

Source: huggingface/huggingface_hub ``serialization/_base.py``, ``split_state_dict_into_shards_factory``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckpttool.core.tensor import Tensor
from ckpttool.formats.shard_index import MAX_INDEX, MAX_SHARDS
from ckpttool.formats.writer import Target
from ckpttool.storage.sink import Sink
from ckpttool.storage.work import in_order

_MOST_OPEN = 16
"""How many files of a set are open at once."""
_CLOSING = 8
"""How many of them are made durable at once: a journal takes them together."""


def cut(
    tensors: Sequence[Tensor],
    limit: int,
    *,
    base: int = 0,
    overhead: Callable[[Tensor], int] = lambda _: 0,
) -> list[list[Tensor]]:
    """Return the tensors of each shard: in their order, as many as fit into a file of ``limit`` bytes.

    One that is larger than that has a shard of its own, and one that shares the bytes of another is in the
    other's shard, where its values take no room. There is at least one shard.

    Args:
        tensors: All of them, those that share bytes after those that have them.
        limit: The most bytes of a file.
        base: How many bytes a file has without tensors.
        overhead: The most bytes that a tensor takes beside its values.
    """
    shards: list[list[Tensor]] = []
    current: list[Tensor] = []
    costs = Counter({tensor.name: tensor.nbytes for tensor in tensors if tensor.shares_with is None})
    for tensor in tensors:
        owner = tensor.shares_with
        costs[tensor.name if owner is None or owner not in costs else owner] += overhead(tensor)
    room = limit - base
    shard_of: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.shares_with is not None and tensor.shares_with in shard_of:
            shard_of[tensor.shares_with].append(tensor)
            continue
        if costs[tensor.name] > limit - base:
            shards.append([tensor])
            shard_of[tensor.name] = shards[-1]
            continue
        if costs[tensor.name] > room:
            shards.append(current)
            current, room = [], limit - base
        current.append(tensor)
        shard_of[tensor.name] = current
        room -= costs[tensor.name]
    if current or not shards:
        shards.append(current)
    return shards


def shard_names(stem: str, suffix: str, total: int) -> list[str]:
    """Return what the files of a set are called: ``model-00001-of-00003.safetensors``.

    Args:
        stem: What stands in front of the number, ``model`` or ``pytorch_model``.
        suffix: With its dot.
        total: How many there are.
    """
    return [f"{stem}-{number:05}-of-{total:05}{suffix}" for number in range(1, total + 1)]


def refusals(shards: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, object]) -> Iterator[str]:
    """Yield why no reader would take a set: too many files, or too long an index; see ``index``."""
    if len(shards) > MAX_SHARDS:
        yield f"there would be {len(shards):,} shards, and at most {MAX_SHARDS:,} are read (--shard-size)"
    if (nbytes := len(index(shards, metadata))) > MAX_INDEX:
        yield f"the index would have {nbytes:,} bytes, and at most {MAX_INDEX:,} are read"


def index(shards: Mapping[str, Iterable[Tensor]], metadata: Mapping[str, object] | None = None) -> bytes:
    """Return the index of a set as Hugging Face writes it: text with a line break at its end.

    Args:
        shards: The tensors of each file, by its name. Bytes that several share count once.
        metadata: What it says beside ``total_size``.
    """
    by_file = {name: list(tensors) for name, tensors in shards.items()}
    owned = [tensor for tensors in by_file.values() for tensor in tensors if tensor.shares_with is None]
    weight_map = {tensor.name: name for name, tensors in by_file.items() for tensor in tensors}
    total = {"total_size": sum(tensor.nbytes for tensor in owned)}
    contents = {"metadata": {**(metadata or {}), **total}, "weight_map": weight_map}
    return (json.dumps(contents, indent=2, sort_keys=True) + "\n").encode()


class Files:
    """Files of a target that are written one after the other, so many that few can be open at once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._open: list[Sink] = []

    def create(self, name: str) -> Sink:
        """Return a new file; now and then those created before are closed, and take no more."""
        if len(self._open) == _MOST_OPEN:
            in_order(lambda sink, _: sink.close(), self._open, _CLOSING)
            self._open.clear()
        self._open.append(self._target.create(name))
        return self._open[-1]
