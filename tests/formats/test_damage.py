"""Damage beyond the contract suite: every record, every bit of the headers, and pickles that go astray."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Checkpoint, CheckpointError, Safety, inspect, open_checkpoint, verify
from ckpttool.testing import described, digest, flipped, no_file_left_open, outcome_of
from tests.support.rendering import inspect_json, text_of, verify_json
from tests.support.thorough import sampled

FILES = Path(__file__).parents[2] / "fixtures" / "files"
ZIPS = ("guide.pth", "dtypes.pth", "views.pth", "alignment4096.pth", "module.pth", "protocol4.pth")
MIB = 1 << 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one path that many short-lived checkpoints share."""
    return tmp_path_factory.mktemp("damage") / "damaged.pth"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of a Trainer's directory."""
    copy = tmp_path_factory.mktemp("sidecars") / "checkpoint-2"
    return shutil.copytree(FILES / "safetensors" / "trainer" / "checkpoint-2", copy)


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


ROUNDS = 22
"""With so many, more than a thousand bytes are flipped."""


@pytest.mark.parametrize("number", sampled(range(ROUNDS), 3))
def test_a_flipped_byte_is_found_in_each_record_that_has_one(number: int, place: Path) -> None:
    """Half of all records have one: the first byte, the last, or one between, a round after the other."""
    chance = random.Random(number)
    for name in ZIPS:
        data = bytearray((FILES / "pytorch" / name).read_bytes())
        values = [one for one in records(FILES / "pytorch" / name) if "/data/" in one[0] and one[2]]
        damaged = set(chance.sample(values, -(-len(values) // 2)))
        for _, start, nbytes in damaged:
            at = chance.choice([0, nbytes - 1, chance.randrange(nbytes)])
            data[start + at] ^= chance.randrange(1, 256)
        place.write_bytes(data)
        verification = verify(place, jobs=1)
        mismatches = [one.where for one in verification.findings if one.code == "checksum-mismatch"]
        assert not verification.is_valid and len(mismatches) == len(damaged), name
        assert set(mismatches) == {record for record, _, _ in damaged}, name


def means_nothing(data: bytes, offset: int) -> bool:
    """Tell whether nothing reads a byte: a record's maker, or its attributes but for those of no file.

    A size of 0 ahead of a record's bytes leaves the size to the directory.
    """
    fields = [found.start() + at for found in re.finditer(b"PK\1\2", data) for at in (4, 5, *range(36, 42))]
    fields += [data.index(b"PK\6\6") + at for at in range(12, 16)]
    sizes = [found.start() + at for found in re.finditer(b"PK\3\4", data) for at in (18, 22)]
    return offset in fields or any(
        size <= offset < size + 4 and not any(data[size : size + 4]) for size in sizes
    )


@pytest.mark.parametrize("part", sampled(range(11), 1))
def test_bits_outside_the_payloads_are_noticed_or_mean_nothing(part: int, tmp_path: Path) -> None:
    """Headers, directory and padding: a flipped bit is invalid, or the tensors are the same."""
    path = tmp_path / "guide.pth"
    whole = (FILES / "pytorch" / "guide.pth").read_bytes()
    path.write_bytes(whole)
    with open_checkpoint(path) as checkpoint:
        truth = held(checkpoint)
    payloads = {at for _, start, nbytes in records(path) for at in range(start, start + nbytes)}
    chance = random.Random(part)
    with no_file_left_open():
        for offset in sorted(set(range(len(whole))) - payloads)[part::11]:
            bit = chance.randrange(8)
            told = f"bit {bit} of byte {offset}"
            with flipped(path, offset, bit):
                outcome = outcome_of(path, told)
                if isinstance(outcome, CheckpointError) or not outcome.is_valid:
                    continue
                assert means_nothing(path.read_bytes(), offset), told
                with open_checkpoint(path) as checkpoint:
                    assert held(checkpoint) == truth, told


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


@given(
    sidecar=st.sampled_from(["config.json", "trainer_state.json", "model.safetensors.index.json"]),
    content=STATES | st.binary(max_size=60),
)
def test_any_content_of_a_sidecar(sidecar: str, content: bytes, trainer: Path) -> None:
    (trainer / sidecar).write_bytes(content)
    try:
        with no_file_left_open():
            look_at_all(trainer)
    finally:
        (trainer / sidecar).unlink()


# What is large, or only says so ---------------------------------------------------------------------

PROBE = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
from ckpttool.cli import run
for arguments in json.loads(sys.argv[1]):
    print("exit status", run(arguments), file=sys.stderr)
"""


def in_little_memory(*commands: tuple[object, ...], limit: int = 2048 * MIB) -> str:
    """Return what commands print to stderr in a process of bounded memory and time, and how each ends."""
    told = json.dumps([[str(argument) for argument in command] for command in commands])
    command = [sys.executable, "-c", PROBE.format(limit=limit), told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


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
def test_many_compressed_records_are_not_inflated_all_at_once(tmp_path: Path) -> None:
    """Each is below the limit for one; together they take 4 GB. One expanded element is 2^40 of them."""
    count, nbytes = 40, 100 * MIB
    content, pickled = bytes(nbytes), pickled_tensors(count, nbytes)
    squeeze = zlib.compressobj(1, zlib.DEFLATED, -15)
    packed, crc = squeeze.compress(content) + squeeze.flush(), zlib.crc32(content)
    members = [("bomb/data.pkl", pickled, zlib.crc32(pickled), len(pickled))]
    members += [(f"bomb/data/{key}", packed, crc, nbytes) for key in range(count)]
    path = tmp_path / "bomb.pth"
    path.write_bytes(zipped(members))
    expanded = FILES / "hostile" / "tensor_expanded.pth"
    told = in_little_memory(
        ("inspect", "--json", path), ("verify", "--json", path), ("inspect", "--json", "--stats", expanded)
    )
    ends = re.findall("exit status (.*)", told)
    assert set(ends[:2]) <= {"0", "1", "2"} and ends[2:] == ["0"], told
    assert "internal error" not in told and "Traceback" not in told


def test_what_was_not_looked_at_is_not_safe(tmp_path: Path) -> None:
    """However many pickles lie before it, one that calls something is not passed over as harmless."""
    path = tmp_path / "many.pkl"
    path.write_bytes(b"\x80\x02}." * 20_000 + b"cos\nsystem\n(Vtrue\ntR.")
    verification = verify(path, only=("structure", "safety"))
    assert not verification.passes()
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
