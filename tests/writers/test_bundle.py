"""What goes wrong while a bundle is written: nothing is left, and it is said."""

from __future__ import annotations

import errno
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ckpttool import CheckpointError, Tensor, open_checkpoint
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import in_memory
from ckpttool.formats.savedmodel.writer import SavedModelWriter
from ckpttool.formats.tensorflow.writer import TensorFlowWriter
from ckpttool.formats.writer import Content, Writer
from ckpttool.storage import sink
from tests.support.writing import OPTIONS, require_same, tensor, write

CHECKSUM = b"\0\0\0\0"


def text(name: str, kind: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    return Tensor((name,), BY_NAME[kind], shape, values=in_memory(data))


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("string", b"\3\1" + CHECKSUM + b"abc", "elements that end too early"),
        ("string", b"\3", "elements that end too early"),
        ("string", b"\1\1" + CHECKSUM + b"abc", "bytes after the last element"),
        ("string", b"\xff" * 11, "a length that doesn't end"),
        ("variant", b"\2ab" + CHECKSUM + b"\2a", "elements that end too early"),
        ("variant", b"\1a" + CHECKSUM + b"\1b" + CHECKSUM + b"\0", "bytes after the last element"),
        ("variant", b"\1a" + CHECKSUM + b"\1b\0", "elements that end too early"),
    ],
)
def test_strings_that_do_not_fit_are_told(tmp_path: Path, kind: str, data: bytes, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        write(TensorFlowWriter(), Content((text("a", kind, (2,), data),)), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_strings_get_checksums_of_their_own(tmp_path: Path, raw: ModuleType) -> None:
    """The checksums are those of lengths of four bytes each, whatever stood there."""
    made = text("a", "string", (2,), b"\2\0" + CHECKSUM + b"xy")
    target = write(TensorFlowWriter(), Content((made,)), tmp_path / "c")
    lengths = raw.masked(bytes([2, 0, 0, 0, 0, 0, 0, 0])).to_bytes(4, "little")
    with open_checkpoint(target) as opened:
        assert opened["a"].tobytes() == b"\2\0" + lengths + b"xy"
        (span,) = (span for span in opened.spans() if span.where == "a")
        data = bytearray(span.nbytes)
        span.read(0, memoryview(data))
        assert data == bytes([2, 0, 0, 0, 0, 0, 0, 0]) + lengths + b"xy"
        assert span.crc32 is not None
        assert raw.masked(bytes(data)) == ((span.crc32 >> 15 | span.crc32 << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize("writer", [TensorFlowWriter(), SavedModelWriter()])
@pytest.mark.parametrize("written", range(4))
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Writer, written: int
) -> None:
    real, left = sink._write_at, [written]

    def full(*arguments: object) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, "no space left")
        left[0] -= 1
        real(*arguments)

    made = tuple(tensor(f"a.{at}", np.zeros(200_000, np.uint8)) for at in range(3))
    with monkeypatch.context() as patch:
        patch.setattr(sink, "_write_at", full)
        with pytest.raises(OSError, match="no space left"):
            write(writer, Content(made), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
    require_same(write(writer, Content(made), tmp_path / "c"), Content(made))


def test_another_entry_of_that_name_is_a_tensor(raw: ModuleType, tmp_path: Path) -> None:
    """What is no string isn't taken for what a converter left."""
    data = b"\0\0\x80?"
    entries = {b"": raw.header(), b"ckpttool.content": raw.tensor(1, (1,), data)}
    (tmp_path / "c.index").write_bytes(raw.table(entries))
    (tmp_path / "c.data-00000-of-00001").write_bytes(data)
    with open_checkpoint(tmp_path / "c") as opened:
        assert list(opened) == ["ckpttool.content"]
        assert opened["ckpttool.content"].tobytes() == data
        content = Content(opened.tensors, native=opened.native)
        (refusal,) = TensorFlowWriter().refusals(content, OPTIONS)
    assert refusal.startswith("ckpttool.content: ")
