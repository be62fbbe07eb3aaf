"""Damage beyond the contract suite: every record, every bit of the headers, and pickles that go astray."""

from __future__ import annotations

import io
import json
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import Checkpoint, CheckpointError, Safety, inspect, open_checkpoint, verify
from ckpttool.testing import described, digest, flipped, no_file_left_open, outcome_of
from tests.support.rendering import inspect_json, text_of, verify_json

FILES = Path(__file__).parents[1] / "fixtures" / "files"
ZIPS = ("guide.pth", "dtypes.pth", "views.pth", "alignment4096.pth", "module.pth", "protocol4.pth")
MIB = 1 << 20
UNREAD_BYTES = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one path that many short-lived checkpoints share."""
    return tmp_path_factory.mktemp("damage") / "damaged.pth"


def records(path: Path) -> list[tuple[str, int, int]]:
    """Return name, offset and bytes of each stored record, as Python's zipfile sees them."""
    found = []
    with ZipFile(path) as archive, open(path, "rb") as file:
        for record in archive.infolist():
            file.seek(record.header_offset + 26)
            lengths = file.read(4)
            name_length, extra_length = (
                int.from_bytes(lengths[:2], "little"),
                int.from_bytes(lengths[2:], "little"),
            )
            start = record.header_offset + 30 + name_length + extra_length
            found.append((record.filename, start, record.file_size))
    return found


def held(checkpoint: Checkpoint) -> object:
    """Return all that a checkpoint's tensors are."""
    return described(checkpoint), {tensor.path: digest(tensor) for tensor in checkpoint.tensors}


# Flipped bits ---------------------------------------------------------------------------------------


def test_one_flipped_byte_in_a_tensor_record_is_found_1000_times_of_1000(place: Path) -> None:
    chance = random.Random(1000)
    whole = {name: (FILES / "pytorch" / name).read_bytes() for name in ZIPS}
    targets = [
        (name, *record)
        for name in ZIPS
        for record in records(FILES / "pytorch" / name)
        if "/data/" in record[0] and record[2]
    ]
    found = 0
    for _ in range(1000):
        name, record, start, nbytes = chance.choice(targets)
        data = bytearray(whole[name])
        data[start + chance.randrange(nbytes)] ^= chance.randrange(1, 256)
        place.write_bytes(data)
        verification = verify(place, jobs=1)
        (mismatch,) = [one for one in verification.findings if one.code == "checksum-mismatch"]
        found += not verification.is_valid and mismatch.where == record
    assert found == 1000


def test_bits_outside_the_payloads_is_noticed_or_means_nothing(tmp_path: Path) -> None:
    """Headers, directory and padding: a flipped bit is invalid, or the tensors are the same."""
    path = tmp_path / "guide.pth"
    path.write_bytes((FILES / "pytorch" / "guide.pth").read_bytes())
    with open_checkpoint(path) as checkpoint:
        truth = held(checkpoint)
    payloads = {at for _, start, nbytes in records(path) for at in range(start, start + nbytes)}
    unnoticed, chance = 0, random.Random(0)
    with no_file_left_open():
        for offset in sorted(set(range(path.stat().st_size)) - payloads):
            bit = chance.randrange(8)
            told = f"bit {bit} of byte {offset}"
            with flipped(path, offset, bit):
                outcome = outcome_of(path, told)
                if isinstance(outcome, CheckpointError) or not outcome.is_valid:
                    continue
                unnoticed += 1
                with open_checkpoint(path) as checkpoint:
                    assert held(checkpoint) == truth, told
    # Of each record: who made it, and its attributes but for those that make it no file; nothing reads them.
    assert unnoticed <= len(records(path)) * UNREAD_BYTES


# Every way to lie in a pickle -----------------------------------------------------------------------

PICKLES = ("guide.pth", "values.pth", "quantized.pth", "sparse.pth", "nested.pth", "module.pth")
OPCODES = b"(.0123456789FIJKLMNPQRSTUVXabcdeghijloqprstu}])" + bytes(range(0x80, 0x99))


def with_pickle(path: Path, data: bytes) -> bytes:
    """Return a checkpoint with another data.pkl, all checksums right."""
    out = io.BytesIO()
    with ZipFile(path) as old, ZipFile(out, "w") as new:
        for record in old.infolist():
            content = data if record.filename.endswith("/data.pkl") else old.read(record)
            new.writestr(ZipInfo(record.filename), content)
    return out.getvalue()


def pickle_of(path: Path) -> bytes:
    with ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return archive.read(name)


@st.composite
def astray(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return the name of a fixture, and its pickle with a few bytes replaced, removed or repeated."""
    name = draw(st.sampled_from(PICKLES))
    data = bytearray(pickle_of(FILES / "pytorch" / name))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        length = draw(st.integers(0, 12))
        match draw(st.sampled_from(["opcode", "bit", "remove", "repeat", "number"])):
            case "opcode":
                data[at] = draw(st.sampled_from(OPCODES))
            case "bit":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "remove":
                del data[at : at + length]
            case "repeat":
                data[at:at] = data[at : at + length]
            case "number":
                data[at : at + 4] = draw(st.sampled_from([b"\0\0\0\0", b"\xff" * 4, b"\xff\xff\xff\x7f"]))
        data = data or bytearray(b".")
    return name, bytes(data)


def look_at_all(path: Path) -> None:
    """Ask all that can be answered without reading endless tensors; nothing but our errors comes out."""
    for answer in (verified, inspected):
        try:
            answer(path)
        except CheckpointError as error:
            assert str(error)


def verified(path: Path) -> None:
    verification = verify(path, jobs=1)
    assert verify_json(verification)
    assert text_of([verification], verbose=True)


def inspected(path: Path) -> None:
    inspection = inspect(str(path))
    assert inspect_json(inspection)
    assert text_of(inspection)


@given(astray())
def test_pickle_gone_astray_is_an_error_or_an_answer(place: Path, drawn: tuple[str, bytes]) -> None:
    name, data = drawn
    place.write_bytes(with_pickle(FILES / "pytorch" / name, data))
    with no_file_left_open():
        look_at_all(place)


HEADS = (
    b"",
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"\x80\x02",
    b"\x80\x04\x95",
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
    b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ",
    b'\x40\x00\x00\x00\x00\x00\x00\x00{"a":',
    b"(dp0\n",
    b"\x89HDF\r\n\x1a\n",
    b"version https://git-lfs.github.com/spec/",
)


@given(
    st.sampled_from(HEADS),
    st.binary(max_size=400),
    st.sampled_from([".pth", ".safetensors", ".pkl", ".pt", ""]),
)
def test_any_bytes_are_an_error_or_an_answer(place: Path, head: bytes, tail: bytes, suffix: str) -> None:
    path = place.with_suffix(suffix)
    path.write_bytes(head + tail)
    with no_file_left_open():
        look_at_all(path)
    path.unlink()


WORDS = st.none() | st.booleans() | st.integers(-5, 1 << 66) | st.sampled_from(["F32", "I8", "x"])
FIELDS = st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w", ""])
HEADERS = st.recursive(
    WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=15,
)


@given(HEADERS, st.binary(max_size=40))
def test_any_json_as_a_safetensors_header(place: Path, header: object, data: bytes) -> None:
    path = place.with_suffix(".safetensors")
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with no_file_left_open():
        look_at_all(path)


STATE_KEYS = st.sampled_from(
    ["epoch", "global_step", "log_history", "best_metric", "weight_map", "metadata", "step", "x"]
)
STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STATE_KEYS, inner, max_size=4),
    max_leaves=12,
).map(lambda tree: json.dumps(tree).encode())


@pytest.mark.parametrize("sidecar", ["config.json", "trainer_state.json", "model.safetensors.index.json"])
@given(content=STATES | st.binary(max_size=60))
@settings(max_examples=30)
def test_any_content_of_a_sidecar(
    tmp_path_factory: pytest.TempPathFactory, sidecar: str, content: bytes
) -> None:
    directory = trainer_directory(tmp_path_factory)
    (directory / sidecar).write_bytes(content)
    try:
        with no_file_left_open():
            look_at_all(directory)
    finally:
        (directory / sidecar).unlink()


def trainer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of a Trainer directory, made once a session."""
    import shutil

    directory = tmp_path_factory.getbasetemp() / "sidecars" / "checkpoint-2"
    if not directory.exists():
        shutil.copytree(FILES / "safetensors" / "trainer" / "checkpoint-2", directory)
    return directory


# What is large, or only says so ---------------------------------------------------------------------

PROBE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
from ckpttool.cli import run
sys.exit(run(sys.argv[1:]))
"""


def in_little_memory(*arguments: object, limit: int = 2048 * MIB) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of bounded memory and time."""
    command = [sys.executable, "-c", PROBE.format(limit=limit), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


needs_limits = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems don't hold a process to RLIMIT_AS"
)


def pickled_tensors(count: int, nbytes: int) -> bytes:
    """Return the pickle of a list of byte tensors, each over a storage of its own."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    size = b"J" + struct.pack("<i", nbytes)
    before = b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nByteStorage\n"
    behind = text("cpu") + size + b"tQK\x00" + size + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRa"
    return b"\x80\x02]" + b"".join(before + text(str(key)) + behind for key in range(count)) + b"."


def zipped(members: Iterable[tuple[str, bytes, int, int]]) -> bytes:
    """Return an archive of packed members: name, packed bytes, checksum, and unpacked size."""
    body, directory, count = bytearray(), bytearray(), 0
    for name, packed, crc, nbytes in members:
        method = 0 if len(packed) == nbytes else 8
        shared = struct.pack("<4H3I2H", 0, method, 0, 0, crc, len(packed), nbytes, len(name), 0)
        place = struct.pack("<3H2I", 0, 0, 0, 0, len(body))
        directory += b"PK\1\2" + bytes(4) + shared + place + name.encode()
        body += b"PK\3\4" + bytes(2) + shared + name.encode() + packed
        count += 1
    end = struct.pack("<4H2IH", 0, 0, count, count, len(directory), len(body), 0)
    return bytes(body + directory) + b"PK\5\6" + end


@needs_limits
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_many_compressed_records_are_not_inflated_all_at_once(command: str, tmp_path: Path) -> None:
    """Each is below the limit for one; together they take 4 GB."""
    count, nbytes = 40, 100 * MIB
    content, pickled = bytes(nbytes), pickled_tensors(count, nbytes)
    squeeze = zlib.compressobj(1, zlib.DEFLATED, -15)
    packed, crc = squeeze.compress(content) + squeeze.flush(), zlib.crc32(content)
    members = [("bomb/data.pkl", pickled, zlib.crc32(pickled), len(pickled))]
    members += [(f"bomb/data/{key}", packed, crc, nbytes) for key in range(count)]
    path = tmp_path / "bomb.pth"
    path.write_bytes(zipped(members))
    done = in_little_memory(command, "--json", path)
    assert done.returncode in (0, 1, 2), done.stderr
    assert "internal error" not in done.stderr and "Traceback" not in done.stderr


@needs_limits
def test_statistics_of_an_expanded_terabyte() -> None:
    """2^40 elements that are one stored element: its statistics are known from that one."""
    done = in_little_memory("inspect", "--json", "--stats", FILES / "hostile" / "tensor_expanded.pth")
    assert done.returncode == 0, done.stderr


def test_what_was_not_looked_at_is_not_safe(tmp_path: Path) -> None:
    """However many pickles lie before it, one that calls something is not passed over as harmless."""
    path = tmp_path / "many.pkl"
    path.write_bytes(b"\x80\x02}." * 20_000 + b"cos\nsystem\n(Vtrue\ntR.")
    verification = verify(path, only=("structure", "safety"))
    assert not verification.is_fine
    assert verification.safety is not Safety.SAFE


def test_other_record_of_an_archive_is_looked_at_too(place: Path) -> None:
    """No framework loads it by itself; who ships it has a use for it."""
    place.write_bytes((FILES / "hostile" / "call_other_record.pth").read_bytes())
    verification = verify(place)
    assert verification.findings or verification.safety is not Safety.SAFE


def test_overlong_line_is_not_called_truncated(place: Path) -> None:
    data = b"\x80\x02I" + b"1" * (2 * MIB) + b"\n."
    place.write_bytes(with_pickle(FILES / "pytorch" / "guide.pth", data))
    (finding,) = (finding for finding in verify(place).findings if finding.check == "structure")
    assert finding.code == "pickle-damaged"
