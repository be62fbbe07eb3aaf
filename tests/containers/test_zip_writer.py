"""Zips that are written: byte for byte what PyTorch's writer and NumPy write for the same records."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Tensor, Truncated
from ckpttool.containers.zip_reader import Archive
from ckpttool.containers.zip_writer import NumpyZip, TorchZip, ZipWriter
from ckpttool.core.dtypes import UINT8
from ckpttool.core.values import Contiguous
from ckpttool.storage.sink import Sink, WrittenTensor
from ckpttool.storage.source import Source
from ckpttool.storage.work import Calls, pool_of_calls
from tests.support.numpy_files import same_zips
from tests.support.writing import byte_tensor

torch = pytest.importorskip("torch")

LARGE = 5 << 30
SATURATED = 0xFFFFFFFF


class Hollow(Sink):
    """A file in which the large stays a hole with the checksum 0, as PyTorch's ``skip_data`` leaves it."""

    def _copy(self, tensor: Tensor, written: WrittenTensor) -> None:
        written.elements_checksum = 0


def hole(nbytes: int) -> Tensor:
    return Tensor(("t",), UINT8, (nbytes,))


def torch_wrote(records: Mapping[str, bytes]) -> bytes:
    """Return what PyTorch's own writer makes of records."""
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for name, data in records.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return buffer.getvalue()


def all_of(expected: bytes, records: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return records by their full names, with those that PyTorch's writer added by itself."""
    with zipfile.ZipFile(io.BytesIO(expected)) as archive:
        added = archive.namelist()[len(records) :]
        return {f"archive/{name}": data for name, data in records.items()} | {
            name: archive.read(name) for name in added
        }


def written(
    path: Path, records: Mapping[str, bytes], kind: type[ZipWriter] = TorchZip, *, as_tensors: bool = False
) -> bytes:
    crew = pool_of_calls(2)
    sink = Sink(str(path), crew, lambda nbytes: None)
    archive = kind(sink)
    for name, data in records.items():
        if as_tensors:
            archive.put(name, byte_tensor("t", data))
        else:
            archive.add(name, data)
    archive.finish()
    archive.seal()
    sink.close()
    crew.close()
    return path.read_bytes()


RECORDS = {
    "data.pkl": b"\x80\2}.",
    "data/0": bytes(range(256)) * 300,  # too large to be summed at once
    "data/1": b"",
    "data/2": b"abc",
    "data/é": bytes(64),
}


@pytest.mark.framework
@pytest.mark.parametrize("as_tensors", [False, True])
def test_it_is_what_pytorch_writes(tmp_path: Path, as_tensors: bool) -> None:
    expected = torch_wrote(RECORDS)
    assert written(tmp_path / "a.zip", all_of(expected, RECORDS), as_tensors=as_tensors) == expected


@pytest.mark.framework
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=90),
        st.binary(max_size=200),
        max_size=12,
    )
)
def test_any_records_are_what_pytorch_writes(
    tmp_path_factory: pytest.TempPathFactory, named: Mapping[str, bytes]
) -> None:
    records = {f"r/{at}/{name}.": data for at, (name, data) in enumerate(named.items())}
    expected = torch_wrote(records)
    ours = all_of(expected, records)
    assert written(tmp_path_factory.mktemp("zip") / "a.zip", ours) == expected


@pytest.mark.framework
def test_more_records_than_16_bits_can_count(tmp_path: Path) -> None:
    records = {f"data/{key}": bytes(key % 3) for key in range(65_600)}
    expected = torch_wrote(records)
    ours = all_of(expected, records)
    assert written(tmp_path / "a.zip", ours) == expected


@pytest.mark.framework
def test_records_beyond_32_bits_are_where_pytorch_puts_them(tmp_path: Path, crew: Calls) -> None:
    sizes = {"a": 20, "big": LARGE, "c": 28, "none": 0, "exact": SATURATED, "d": 400, "last": LARGE}
    theirs = tmp_path / "theirs.pt"
    writer = torch._C.PyTorchFileWriter(str(theirs))
    for name, size in sizes.items():
        if size > 1000:
            writer.write_record_metadata(name, size)
        else:
            writer.write_record(name, bytes(size), size)
    writer.write_end_of_file()
    sink = Hollow(str(tmp_path / "ours.pt"), crew, lambda nbytes: None)
    archive = TorchZip(sink)
    for name, size in sizes.items():
        archive.put(f"theirs/{name}", hole(size) if size > 1000 else byte_tensor("t", bytes(size)))
    with zipfile.ZipFile(theirs) as read:
        infos = read.infolist()
        for info in infos[len(sizes) :]:
            archive.add(info.filename, read.read(info))
    archive.finish()
    archive.seal()
    sink.close()
    with theirs.open("rb") as one, (tmp_path / "ours.pt").open("rb") as other:
        nbytes = os.fstat(one.fileno()).st_size
        assert os.fstat(other.fileno()).st_size == nbytes
        for start in (*(max(0, info.header_offset - 32) for info in infos), nbytes - 4096):
            one.seek(start)
            other.seek(start)
            assert one.read(4096) == other.read(4096)


@same_zips
def test_it_is_what_numpy_writes(tmp_path: Path) -> None:
    arrays = {"a/b": np.arange(6.0).reshape(2, 3), "é": np.zeros((0, 2), "f4"), "large": np.ones(30_000)}
    np.savez(tmp_path / "theirs.npz", **arrays)  # type: ignore[arg-type]
    expected = (tmp_path / "theirs.npz").read_bytes()
    with zipfile.ZipFile(io.BytesIO(expected)) as read:
        records = {name: read.read(name) for name in read.namelist()}
    assert written(tmp_path / "a.npz", records, NumpyZip) == expected
    assert written(tmp_path / "b.npz", records, NumpyZip, as_tensors=True) == expected


def test_a_head_counts_for_size_and_checksum(tmp_path: Path, crew: Calls) -> None:
    for kind, nbytes in ((TorchZip, 10), (NumpyZip, 10), (TorchZip, 100_000), (NumpyZip, 100_000)):
        path = tmp_path / f"{kind.__name__}-{nbytes}"
        sink = Sink(str(path), crew, lambda nbytes: None)
        archive = kind(sink)
        archive.put("r/a", byte_tensor("t", bytes(range(200)) * (nbytes // 200) + b"x"), b"before")
        archive.finish()
        archive.seal()
        sink.close()
        with zipfile.ZipFile(path) as read:
            assert read.testzip() is None
            assert read.read("r/a") == b"before" + bytes(range(200)) * (nbytes // 200) + b"x"


def test_numpy_zips_beyond_32_bits_are_read_by_python(tmp_path: Path, crew: Calls) -> None:
    path = tmp_path / "a.npz"
    sink = Hollow(str(path), crew, lambda nbytes: None)
    archive = NumpyZip(sink)
    for name, size in (("big", LARGE), ("two", 0x80000000)):
        archive.put(name, hole(size))
    archive.add("small", b"abc")
    archive.finish()
    archive.seal()
    sink.close()
    with zipfile.ZipFile(path) as read:
        assert [(info.filename, info.file_size) for info in read.infolist()] == [
            ("big", LARGE),
            ("two", 0x80000000),
            ("small", 3),
        ]
        assert read.read("small") == b"abc"


def test_numpy_zips_count_as_many_records_as_16_bits_can_not(tmp_path: Path) -> None:
    data = written(tmp_path / "a.npz", {f"{at}": b"" for at in range(65_535)}, NumpyZip)
    with zipfile.ZipFile(io.BytesIO(data)) as read:
        assert len(read.namelist()) == 65_535
    with Source(tmp_path / "a.npz") as source:
        assert sum(1 for _ in Archive(source).names) == 65_535


def test_zips_behind_each_other_count_from_their_own_start(tmp_path: Path, crew: Calls) -> None:
    alone = written(tmp_path / "alone", {"archive/a": bytes(70_000), "archive/b": b"b"}, as_tensors=True)
    path = tmp_path / "both"
    sink = Sink(str(path), crew, lambda nbytes: None)
    sink.write(b"x" * 13)
    archives = []
    for _ in range(2):
        archives.append(TorchZip(sink))
        archives[-1].put("archive/a", byte_tensor("t", bytes(70_000)))
        archives[-1].put("archive/b", byte_tensor("t", b"b"))
        archives[-1].finish()
    for archive in archives:
        archive.seal()
        assert archive.is_sealed
    sink.close()
    assert path.read_bytes() == b"x" * 13 + alone + alone


def test_a_stream_must_keep_its_word(tmp_path: Path, crew: Calls) -> None:
    sink = Sink(str(tmp_path / "a"), crew, lambda nbytes: None)
    archive = TorchZip(sink)
    with pytest.raises(ValueError, match="r/a: 2 bytes instead of 3"):
        archive.stream("r/a", 3, zlib.crc32(b"ab"), lambda write: write(b"ab"))
    sink.abandon()


def test_a_source_that_became_shorter_is_told(tmp_path: Path, crew: Calls) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(200_000))
    with Source(source) as held:
        gone = Tensor(("t",), UINT8, (200_000,), values=Contiguous(held, 0, 200_000))
        os.truncate(source, 100)
        sink = Sink(str(tmp_path / "a"), crew, lambda nbytes: None)
        archive = TorchZip(sink)
        archive.put("r/a", gone)
        archive.finish()
        assert not archive.is_sealed
        with pytest.raises(Truncated):
            archive.seal()
        sink.abandon()
