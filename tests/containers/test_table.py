"""Tables of keys and values: whole, in pieces, and damaged in every way that can be told."""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path
from types import ModuleType

import cramjam
import google_crc32c
import pytest

from ckpttool import CheckpointError, DamagedCheckpoint, LimitExceeded, open_checkpoint
from ckpttool.containers.table import Table, begins_with_empty_key
from ckpttool.storage.checksums import combined_crc32, crc32c, mask_crc, unmask_crc
from ckpttool.storage.source import Source
from tests.support.commands import Run
from tests.support.containers import entries_of_table
from tests.support.frameworks import python_with_frameworks

WORDS = {f"key-{number:03}".encode(): bytes([number % 256]) * (number % 40) for number in range(60)}


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_masks_are_undone() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720, B.4
    assert mask_crc(crc32c(b"")) == 0xA282EAD8
    assert all(unmask_crc(mask_crc(crc)) == crc for crc in (0, 1, 0xFFFFFFFF, 0xE3069283))


def test_checksums_of_pieces_combine() -> None:
    data = random.Random(1).randbytes(5000)
    for cut in (0, 1, 17, 4096, 5000):
        first, second = google_crc32c.value(data[:cut]), google_crc32c.value(data[cut:])
        whole = combined_crc32(first, second, len(data) - cut, 0x82F63B78)
        assert whole == google_crc32c.value(data)


def test_keys_of_several_blocks(raw: ModuleType, tmp_path: Path) -> None:
    names = list(WORDS)
    halves = [{name: WORDS[name] for name in half} for half in (names[:25], names[25:])]
    path = written(tmp_path / "t", raw.table(*halves))
    assert entries_of_table(path) == WORDS
    with Source(path) as source:
        table = Table(source)
        for name, value in WORDS.items():
            found = table.find(name)
            assert found is not None
            assert bytes(found[1]) == value
        assert table.find(b"key-0005") is None
        assert table.find(b"zzz") is None


def test_keys_that_share_a_start(raw: ModuleType, tmp_path: Path) -> None:
    entries = raw.entry(b"model/a", b"1") + bytes([6, 1, 1]) + b"b2" + bytes([3, 1, 0]) + b"x"
    assert entries_of_table(written(tmp_path / "t", raw.table(raw.block(entries)))) == {
        b"model/a": b"1",
        b"model/b": b"2",
        b"modx": b"",
    }


def test_what_the_framework_wrote(files: Path) -> None:
    for path in sorted(files.glob("tensorflow/*/*.index")):
        assert b"" in entries_of_table(path), path


def compressed(raw: ModuleType, path: Path) -> bytes:
    """Return a table with every block of it, and of its index, compressed."""
    with Source(path) as source:
        table = Table(source)
        blocks = [bytes(source.read(handle.offset, handle.nbytes)) for _, handle in table.blocks]
        lasts = [last for last, _ in table.blocks]
    data, index = b"", b""
    places = []
    for last, contents in zip([*lasts, None, None], [*blocks, raw.block(b""), None], strict=True):
        packed = bytes(cramjam.snappy.compress_raw(raw.block(index) if contents is None else contents))
        place = raw.varint(len(data)) + raw.varint(len(packed))
        data += packed + raw.trailer(packed, 1)
        if last is None:
            places.append(place)
        else:
            index += raw.entry(last, place)
    return bytes(data + b"".join(places).ljust(40, b"\0") + raw.MAGIC)


def test_snappy(raw: ModuleType, files: Path, tmp_path: Path) -> None:
    for path in sorted(files.glob("tensorflow/*/*.index")):
        packed = written(tmp_path / "t", compressed(raw, path))
        assert entries_of_table(packed) == entries_of_table(path), path
        assert begins_with_empty_key(packed.read_bytes()[:16]), path


SUMS = """
import json, sys, zlib
import tensorflow as tf
reader = tf.train.load_checkpoint(sys.argv[1])
names = [name for name, dtype in reader.get_variable_to_dtype_map().items() if dtype != tf.string]
print(json.dumps({name: zlib.crc32(reader.get_tensor(name).tobytes()) for name in names}))
"""


@pytest.mark.framework
def test_snappy_as_the_framework_reads_it(raw: ModuleType, files: Path, tmp_path: Path, run: Run) -> None:
    for source in sorted((files / "tensorflow/saver").iterdir()):
        is_index = source.suffix == ".index"
        (tmp_path / source.name).write_bytes(compressed(raw, source) if is_index else source.read_bytes())
    (index,) = tmp_path.glob("*.index")
    told = python_with_frameworks("-c", SUMS, index.with_suffix(""))
    with open_checkpoint(index) as checkpoint:
        numbers = [tensor for tensor in checkpoint.tensors if tensor.dtype.kind != "string"]
        found = {tensor.name: zlib.crc32(tensor.array().tobytes()) for tensor in numbers}
    assert found == json.loads(told.splitlines()[-1])
    assert run("verify", tmp_path).status == 0


def test_an_index_alone_is_recognised_though_compressed(
    raw: ModuleType, files: Path, tmp_path: Path, run: Run
) -> None:
    """Its blocks begin with their size, and a literal that holds the empty key."""
    (index,) = (files / "tensorflow/saver").glob("*.index")
    (tmp_path / "lonely.index").write_bytes(compressed(raw, index))
    answer = run("inspect", tmp_path / "lonely.index")
    assert "tensorflow" in answer.out.lower()
    assert "no such file" in answer.out


def test_a_compressed_index_without_its_data_is_no_damage_of_the_index(
    raw: ModuleType, files: Path, tmp_path: Path, run: Run
) -> None:
    sources = {path.name: path for path in files.rglob("*.index")}  # those of a SavedModel, too
    assert "variables.index" in sources
    for source in sources.values():
        place = tmp_path / source.stem
        place.mkdir()
        written(place / source.name, compressed(raw, source))
        (told,) = json.loads(run("verify", place / source.name, "--json").out)["checkpoints"]
        assert {finding["code"] for finding in told["findings"]} == {"shard-missing"}, source
        with open_checkpoint(source) as whole, open_checkpoint(place / source.name) as alone:
            shapes = [sorted(one.shape for one in opened.tensors) for opened in (whole, alone)]
            assert shapes[0] == shapes[1], source
            assert not alone.complete


def test_snappy_that_is_no_snappy(raw: ModuleType, tmp_path: Path) -> None:
    path = written(tmp_path / "t", _typed(raw, b"\xff" * 9, 1))
    with pytest.raises(DamagedCheckpoint):
        entries_of_table(path)
    written(path, _typed(raw, raw.varint(1 << 40) + b"bomb", 1))
    with pytest.raises(LimitExceeded):
        entries_of_table(path)


def _typed(raw: ModuleType, contents: bytes, kind: int, last: bytes = b"z") -> bytes:
    """Return a table of one block of a kind; its index, which is plain, states the last key."""
    data = contents + raw.trailer(contents, kind)
    meta = raw.block(b"")
    index = raw.block(raw.entry(last, raw.varint(0) + raw.varint(len(contents))))
    places = raw.varint(len(data)) + raw.varint(len(meta))
    data += meta + raw.trailer(meta)
    places += raw.varint(len(data)) + raw.varint(len(index))
    data += index + raw.trailer(index)
    return bytes(data + places.ljust(40, b"\0") + raw.MAGIC)


def test_an_unknown_compression(raw: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="compression type 7"):
        entries_of_table(written(tmp_path / "t", _typed(raw, b"", 7)))


@pytest.mark.parametrize(
    ("entries", "restarts", "said"),
    [
        (b"\x05\x01\x00x", (0,), "doesn't fit"),
        (b"\x00\x01\x7fx", (0,), "doesn't fit"),
        (b"\x00\x01\x00b\x00\x01\x00a", (0,), "out of order"),
        (b"\x00\x01\x00b\x00\x01\x00b", (0,), "out of order"),
        (b"\x80\x00\x01\x00b", (0,), "an overlong varint"),
        (b"\x00\x01\x00b", (1,), "restart"),
        (b"\x00\x01\x00b", (0, 9), "restart"),
        (b"\x00\x01\x00b", (0, 0), "restart"),
        (b"\x80", (0,), "varint"),
    ],
)
def test_a_block_that_contradicts_itself(
    raw: ModuleType, tmp_path: Path, entries: bytes, restarts: tuple[int, ...], said: str
) -> None:
    with pytest.raises(DamagedCheckpoint, match=said):
        entries_of_table(written(tmp_path / "t", raw.table(raw.block(entries, restarts))))


def test_a_key_behind_the_one_that_the_index_states(raw: ModuleType, tmp_path: Path) -> None:
    """Whoever looks for it goes by the index, and doesn't find it."""
    block = raw.block(raw.entry(b"b", b""))
    assert entries_of_table(written(tmp_path / "t", _typed(raw, block, 0, b"b"))) == {b"b": b""}
    with pytest.raises(DamagedCheckpoint, match="keys after the last one in the index"):
        entries_of_table(written(tmp_path / "t", _typed(raw, block, 0, b"a")))


def test_more_restarts_than_bytes(raw: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="restart points"):
        entries_of_table(written(tmp_path / "t", raw.table(struct.pack("<II", 0, 1 << 30))))


def test_every_bit_counts(raw: ModuleType, tmp_path: Path) -> None:
    """Each byte is covered by a checksum, has to be zero, or has one spelling only."""
    halves = [{b"": b"x", b"a": b"yy"}, {b"b": b"z" * 20}]
    data = raw.table(*halves)
    for at in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            with pytest.raises(CheckpointError):
                entries_of_table(written(tmp_path / "t", bytes(broken)))


def test_every_cut(raw: ModuleType, tmp_path: Path) -> None:
    data = raw.table(WORDS)
    for nbytes in range(len(data)):
        with pytest.raises(CheckpointError):
            entries_of_table(written(tmp_path / "t", data[:nbytes]))


def test_what_lies_in_front_or_between(raw: ModuleType, tmp_path: Path) -> None:
    data = raw.table(WORDS)
    for broken in (b"garbage" + data, data + data, data + b"\0", data[:-48] + b"\0" + data[-48:]):
        with pytest.raises(DamagedCheckpoint):
            entries_of_table(written(tmp_path / "t", broken))
