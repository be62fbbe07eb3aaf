"""Contents to be written, made of arrays, and what is done with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ckpttool import Checkpoint, Role, Tensor, open_checkpoint, verify
from ckpttool.core.dtypes import BY_NAME, DType
from ckpttool.core.values import in_memory
from ckpttool.formats.content.tree_json import encode_tree
from ckpttool.formats.writer import Content, WriteOptions, Writer
from tests.support.containers import stage

OPTIONS = WriteOptions()


def tensor(name: str, array: np.ndarray[Any, Any], dtype: DType | None = None, **more: Any) -> Tensor:
    """Return a tensor with the elements of an array; its path is the name, cut at dots."""
    values = in_memory(np.ascontiguousarray(array).tobytes())
    more.setdefault("role", Role.WEIGHTS)
    return Tensor(
        tuple(name.split(".")), dtype or BY_NAME[array.dtype.name], array.shape, values=values, **more
    )


def byte_tensor(name: str, data: bytes, **more: Any) -> Tensor:
    """Return a tensor of bytes; its path is the name."""
    more.setdefault("role", Role.WEIGHTS)
    return Tensor((name,), BY_NAME["uint8"], (len(data),), values=in_memory(data), **more)


def array_record(array: np.ndarray[Any, Any]) -> list[object]:
    """Return an array as the frameworks' scripts print it: type, shape, bytes."""
    return [array.dtype.name, list(array.shape), array.tobytes().hex()]


def content_of(checkpoint: Checkpoint) -> Content:
    """Return all that a checkpoint holds, its training state included."""
    tree = checkpoint.tree
    metadata = {} if tree is not None else checkpoint.metadata
    return Content(
        checkpoint.tensors, tree, metadata, checkpoint.native, checkpoint.format, checkpoint.training
    )


def write(writer: Writer, content: Content, target: Path, options: WriteOptions = OPTIONS) -> Path:
    """Write what is not refused."""
    assert [*writer.refusals(content, options)] == []
    shape = writer.shape if options.shard_size is None else "directory"
    return stage(target, lambda staged: writer.write(content, staged, options), shape)


def require_same(target: Path, content: Content) -> None:
    """Require that our reader finds the content, complete and without a finding, and that it is valid."""
    with open_checkpoint(target) as opened:
        assert (opened.findings, opened.complete) == ((), True)
        assert sorted(opened) == sorted(one.name for one in content.tensors)
        for one in content.tensors:
            found = opened[one.name]
            assert (found.path, found.role, found.dtype, found.shape) == (
                one.path,
                one.role,
                one.dtype,
                one.shape,
            )
            assert (found.shares_with, found.tobytes()) == (one.shares_with, one.tobytes()), one.name
    verdict = verify(target)
    assert verdict.is_valid, verdict


def require_same_tree(target: Path, content: Content) -> None:
    """Require that our reader finds the content with its tree, complete, safe and without a finding."""
    with open_checkpoint(target) as opened:
        assert opened.safety == ()
        if content.tree is not None:
            assert encode_tree(opened.tree) == encode_tree(content.tree)
    require_same(target, content)
