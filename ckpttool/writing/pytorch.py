"""What ``torch.save`` writes: one file, or shards behind an index as Hugging Face cuts them.

Source: PyTorch ``torch/serialization.py``; huggingface/transformers ``modeling_utils.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import ClassVar

from ckpttool.errors import Unsupported
from ckpttool.formats.content.carried import ENTRY
from ckpttool.formats.content.objects import dropped
from ckpttool.tensor import Tensor
from ckpttool.wire.pickler import imported_by
from ckpttool.wire.staged import Staged
from ckpttool.wire.trust import admitted_by_weights_only
from ckpttool.wire.zip_writing import TorchZip
from ckpttool.writing.content import Content
from ckpttool.writing.document import document
from ckpttool.writing.interface import WriteOptions, Writer
from ckpttool.writing.shards import Files, cut, index, refusals, shard_names
from ckpttool.writing.torch_archive import QUANTIZED, WHOLE, name_refusals, root_of, write_archive

_STEM, _SUFFIX = "pytorch_model", ".bin"
_INDEX = f"{_STEM}{_SUFFIX}.index.json"
_MOST_TENSORS = 350_000
"""The most tensors of one file: the pickle of more would be a longer one than any that is read."""
_UNSEALED = 16
"""How many shards may wait for their checksums: to put these in waits until all is copied."""


class Pytorch(Writer):
    """One file of ``torch.save``, or a directory of shards."""

    name: ClassVar[str] = "pytorch"
    suffixes: ClassVar[tuple[str, ...]] = (".pth", ".pt", ".ckpt", ".pth.tar", ".bin")
    dtypes: ClassVar[frozenset[str]] = WHOLE | QUANTIZED
    takes_shards: ClassVar[bool] = True

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        limit = options.shard_size
        if content.tree is None or limit is not None:
            yield from (without_scales(one) for one in content.owned if one.dtype.name in QUANTIZED)
            yield from name_refusals(one.name for one in content.tensors)
        else:
            yield from name_refusals({str(key) for one in content.tensors for key in one.path})
        if limit is not None:
            shards = _shards(content, limit)
            yield from refusals(shards, _told(content))
            for name, tensors in shards.items():
                yield from _too_many(name, tensors)
        else:
            yield from _too_many("", content.owned)

    def strangers(self, content: Content, options: WriteOptions) -> tuple[str, ...]:
        if options.shard_size is not None or content.tree is None:
            return ()
        try:
            names = imported_by(content.tree)
        except ValueError as failure:
            raise Unsupported(options.name, str(failure), where="data.pkl") from failure
        admitted = admitted_by_weights_only()
        return tuple(sorted(str(one) for one in names if (one.module, one.name) not in admitted))

    def write(self, content: Content, target: Staged, options: WriteOptions) -> None:
        if options.shard_size is not None:
            _write_shards(content, target, options.shard_size)
            return
        root = root_of(options.name or os.path.basename(target.target))
        is_whole = next(dropped(content.tree), None) is None
        entry = document(content, tree=not is_whole)
        write_archive(target.create(), root, tree_of(content), entry).seal()


def tree_of(content: Content) -> object:
    """Return all that a content holds as one object: without a tree, its tensors by name."""
    if content.tree is None:
        return {tensor.name: tensor for tensor in content.tensors}
    return content.tree


def without_scales(tensor: Tensor) -> str:
    """Return why a quantized tensor that stands alone can't be written."""
    return f"{tensor.name}: {tensor.dtype} means nothing without the scales that lie around it"


def _too_many(name: str, tensors: list[Tensor] | tuple[Tensor, ...]) -> Iterator[str]:
    if len(tensors) > _MOST_TENSORS:
        told = f"{name}: " if name else ""
        yield f"{told}{len(tensors):,} tensors are more than one file can list (at most {_MOST_TENSORS:,})"


def _shards(content: Content, limit: int) -> dict[str, list[Tensor]]:
    """Return the tensors of each shard by its name; without tensors there is none."""
    shards = [tensors for tensors in cut(content.tensors, limit) if tensors]
    return dict(zip(shard_names(_STEM, _SUFFIX, len(shards)), shards, strict=True))


def _told(content: Content) -> dict[str, str]:
    """Return what the index says beside which shard holds what."""
    entry = document(content)
    return {} if entry is None else {ENTRY: entry.decode()}


def _write_shards(content: Content, target: Staged, limit: int) -> None:
    shards, files = _shards(content, limit), Files(target)
    unsealed: list[TorchZip] = []
    for name, tensors in shards.items():
        tree = {tensor.name: tensor for tensor in tensors}
        unsealed.append(write_archive(files.create(name), root_of(name), tree))
        if len(unsealed) == _UNSEALED:
            _seal(unsealed)
    _seal(unsealed)
    files.create(_INDEX).write(index(shards, _told(content)))


def _seal(archives: list[TorchZip]) -> None:
    for archive in archives:
        archive.seal()
    archives.clear()
