"""Small files that ask for much: memory and work are bounded by the size of what is stored.

No test looks at a clock: each makes sure that a limit speaks, or how much memory a process took.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import h5py
import numpy as np
import pytest

from ckpttool import list_checkpoints, open_checkpoint, verify
from tests.support.checkpoints import codes
from tests.support.commands import Run
from tests.support.numpy_files import header, npy

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the most memory of a process")

FILE_BYTES, MOST_MIB = 1 << 20, 300
_MEASURE = """
import json, resource, sys
from ckpttool import verify
from ckpttool.containers.hdf5_worker import WORKER
told = {}
for path in sys.argv[1:]:
    told[path] = sorted({finding.code for finding in verify(path).findings})
status = open("/proc/self/status").read()  # the resource module counts what the parent had before it forked
WORKER.stop()
child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([told, int(status.partition("VmHWM:")[2].split()[0]) >> 10, child >> 10]))
"""


def measured(paths: Sequence[Path]) -> tuple[dict[str, list[str]], int, int]:
    """Return the codes of what is found in files, and the most MiB that a process and its child took."""
    assert all(path.stat().st_size < FILE_BYTES for path in paths)
    command = [sys.executable, "-c", _MEASURE, *map(str, paths)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    told, mib, of_child = json.loads(answer.stdout)
    return {Path(path).name: found for path, found in told.items()}, mib, of_child


def zipped(path: Path, records: dict[str, bytes], method: int = ZIP_DEFLATED) -> Path:
    with ZipFile(path, "w", method, compresslevel=9) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return path


def pickled_views(elements: int, views: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> bytes:
    """Return a state dict of tensors with offset, shape and strides in one storage of float32."""

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpu" + number(elements) + b"tQ"
    data = b"\x80\2}("
    for at, (offset, shape, strides) in enumerate(views):
        data += b"X\6\0\0\0%06dctorch._utils\n_rebuild_tensor_v2\n(" % at
        data += storage + number(offset) + numbers(shape) + numbers(strides) + b"\x89NtR"
    return data + b"u."


# What is inflated -----------------------------------------------------------------------------------


@needs_proc
def test_structure_that_is_inflated_has_a_budget_for_the_whole_file(tmp_path: Path) -> None:
    config = b'{"a":[' + b'{"b":0},' * 1_000_000 + b"{}]}"
    layers = b'{"layers":[' + b'{"class_name":"Dense","config":{}},' * 200_000 + b"{}]}"
    fields = npy(header("[" + "('a','<f4')," * 80_000 + "]", "(0,)"), version=2)
    torch = {"a/data.pkl": b"\x80\2}.", "a/version": b"3\n"}
    code = torch | {"a/constants.pkl": b"\x80\2).", "a/code/__torch__.py": b"a=1\n" * 5_000_000}
    paths = [
        zipped(tmp_path / "config.keras", {"metadata.json": b"{}", "config.json": config}),
        zipped(tmp_path / "layers.keras", {"metadata.json": b"{}", "config.json": layers}),
        zipped(tmp_path / "code.pt", code),
        zipped(tmp_path / "fields.npz", {f"{at}.npy": fields for at in range(12)}),
        zipped(
            tmp_path / "pickles.pth",
            torch | {f"a/x{at}": b"\x80\2](" + b"N" * 1_000_000 + b"e." for at in range(12)},
        ),
    ]
    told, mib, _ = measured(paths)
    assert "limit-exceeded" in told["config.keras"]
    assert told["code.pt"] == ["limit-exceeded"]
    assert {"limit-exceeded", "npy-header"} <= set(told["fields.npz"])
    assert told["pickles.pth"] == ["not-scanned"]
    assert mib < MOST_MIB


@needs_proc
def test_many_records_keep_few_streams(tmp_path: Path) -> None:
    path = zipped(
        tmp_path / "many.npz", {f"{at}.npy": npy(header("'<f4'", "(9,)"), bytes(36)) for at in range(4000)}
    )
    told, mib, _ = measured([path])
    assert told == {"many.npz": ["weights-zero"]}
    assert mib < 100


@needs_proc
def test_compressed_weights_of_keras_have_a_budget(tmp_path: Path) -> None:
    records = {"metadata.json": b"{}", "config.json": b"{}", "model.weights.h5": bytes(100_000_000)}
    told, mib, _ = measured([zipped(tmp_path / "m.keras", records)])
    assert "limit-exceeded" in told["m.keras"]
    assert mib < MOST_MIB


# Values ---------------------------------------------------------------------------------------------


def test_views_that_overlap_endlessly(tmp_path: Path) -> None:
    """A storage of 240 kB has views of 4 GB, and a thousand views of all of it."""
    nan = b"\xff" * 240_000
    hankel = {"a/data.pkl": pickled_views(60_000, [(0, (30_000, 30_000), (1, 1))]), "a/version": b"3\n"}
    report = verify(zipped(tmp_path / "hankel.pth", hankel | {"a/data/0": nan}, ZIP_STORED))
    assert codes(report) == {"limit-exceeded"}
    views = [(at % 100, (59_800 - at // 100,), (1,)) for at in range(6000)]
    many = {"a/data.pkl": pickled_views(60_000, views), "a/version": b"3\n"}
    report = verify(zipped(tmp_path / "many.pth", many | {"a/data/0": nan}, ZIP_STORED))
    assert codes(report) == {"nan", "limit-exceeded"}


def test_views_that_go_back_in_a_compressed_record(tmp_path: Path) -> None:
    views = [(49_999_000 - at, (4,), (1,)) for at in range(100)]
    records = {"a/data.pkl": pickled_views(50_000_000, views), "a/version": b"3\n"}
    report = verify(zipped(tmp_path / "back.pth", records | {"a/data/0": b"\xff" * 200_000_000}))
    assert codes(report) == {"nan", "limit-exceeded"}


def test_an_array_in_the_order_of_fortran_is_read_once(tmp_path: Path) -> None:
    values = np.full((300, 200), np.nan, np.float32)
    values[:, :100] = 0
    np.savez_compressed(tmp_path / "f.npz", f=np.asfortranarray(values))
    (finding,) = verify(tmp_path / "f.npz").findings
    assert finding.message == "30,000 of 60,000 values are NaN"


# Messages -------------------------------------------------------------------------------------------


def test_empty_meta_graphs(tmp_path: Path) -> None:
    for name, data in (
        ("saved_model.pb", b"\x08\1" + b"\x12\0" * 450_000),
        ("saved_model.pbtxt", b"saved_model_schema_version: 1\n" + b"meta_graphs{}" * 60_000),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(data)
        findings = verify(tmp_path / name).findings
        (finding,) = (finding for finding in findings if finding.check == "structure")
        assert finding.code == "limit-exceeded"
        assert {finding.code for finding in findings if finding.check == "safety"} == {"not-scanned"}
        assert "more than 1,000 meta graphs" in finding.message


# HDF5 -----------------------------------------------------------------------------------------------


def texts_in_one_place(path: Path, count: int, length: int) -> Path:
    """Write an attribute of texts that all lie at one place of the file, which no library writes."""
    with h5py.File(path, "w") as file:
        texts = np.array(["Q" * length, *["z"] * (count - 1)], object)
        file.attrs.create("texts", texts, dtype=h5py.string_dtype())
    data = bytearray(path.read_bytes())
    first = data.index(struct.pack("<I", length) + data[:0]) if count else 0
    while data[first + 16 : first + 20] != struct.pack("<I", 1):
        first = data.index(struct.pack("<I", length), first + 1)
    for at in range(1, count):
        data[first + 16 * at : first + 16 * at + 16] = data[first : first + 16]
    path.write_bytes(data)
    return path


@needs_proc
def test_the_child_of_hdf5_has_a_limit(tmp_path: Path) -> None:
    """Texts of 1 GB in 455 kB are refused by the child's limit, and the child lives on."""
    path = texts_in_one_place(tmp_path / "texts.h5", 3500, 300_000)
    with h5py.File(path) as file:
        attribute = file.attrs.get_id("texts")
        assert attribute.get_storage_size() == 3500 * 16
    told, mib, of_child = measured([path])
    assert told == {"texts.h5": ["hdf5-attribute", "not-scanned"]}
    assert mib < 100 and 100 < of_child <= 512


def test_a_large_chunk_is_inflated_once(tmp_path: Path) -> None:
    """The dataset stays open between two blocks of it; its values stay right when others are read between."""
    with h5py.File(tmp_path / "chunks.h5", "w") as file:
        for name, more in (("a", 0), ("b", 1)):
            values = np.arange(6_000_000, dtype=np.float32) + more
            file.create_dataset(name, data=values, chunks=(6_000_000,), compression="gzip")
    with open_checkpoint(tmp_path / "chunks.h5") as found:
        pairs = zip(found["a"].values.blocks(1 << 22), found["b"].values.blocks(1 << 22), strict=True)
        for first, second in pairs:
            one, other = (np.frombuffer(block, "<f4") for block in (first, second))
            assert (one + 1 == other).all()


# Depth ----------------------------------------------------------------------------------------------

COMMANDS = (["inspect"], ["inspect", "--json"], ["verify"], ["diff"], ["convert"])


def nested_pickles(levels: int) -> dict[str, bytes]:
    mapping = b"h\0)R"
    return {
        "lists": b"\x80\4" + b"]" * levels + b"a" * (levels - 1) + b".",
        "tuples": b"\x80\4)" + b"\x85" * (levels - 1) + b".",
        "dicts": b"\x80\4" + b"}U\1a" * (levels - 1) + b"}" + b"s" * (levels - 1) + b".",
        "ordered": b"\x80\4ccollections\nOrderedDict\nq\x000"
        + mapping
        + (b"U\1a" + mapping) * (levels - 1)
        + b"s" * (levels - 1)
        + b".",
    }


def answered(run: Run, command: Sequence[str], path: Path) -> tuple[int, str]:
    target = path.parent / "target.pth"
    target.unlink(missing_ok=True)
    more = {"diff": [path], "convert": [target]}.get(command[0], [])
    answer = run(*command, path, *more)
    assert "internal error" not in answer.err
    return answer.status, answer.out + answer.err


KINDS = ("lists", "tuples", "dicts", "ordered")


@pytest.mark.parametrize(
    ("levels", "kinds"),
    [
        (499, KINDS),
        (1000, KINDS),
        (100_000, ("lists",)),
        pytest.param(100, KINDS, marks=pytest.mark.thorough),
        pytest.param(100_000, ("ordered",), marks=pytest.mark.thorough),
    ],
)
def test_trees_of_many_levels(levels: int, kinds: tuple[str, ...], tmp_path: Path, run: Run) -> None:
    pickles = nested_pickles(levels)
    for number, name in enumerate(kinds):
        data = pickles[name]
        if number % 2:
            path = tmp_path / f"{name}.pkl"
            path.write_bytes(data)
        else:
            path = zipped(tmp_path / f"{name}.pth", {"a/data.pkl": data, "a/version": b"3\n"}, ZIP_STORED)
        for command in COMMANDS:
            status, told = answered(run, command, path)
            if levels > 500:
                assert status in (1, 2) and "nested more than 500 deep" in told
            elif command[0] != "convert":
                assert status == 0, told


@pytest.mark.parametrize("levels", [1000, 100_000])
def test_json_and_groups_of_many_levels(levels: int, tmp_path: Path, run: Run) -> None:
    nested = b"[" * levels + b"]" * levels
    text = b'{"__metadata__":{"a":' + nested + b"}}"
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(b'{"metadata":{"a":' + nested + b'},"weight_map":{}}')
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        file["a"] = np.zeros(2, np.float32)
    records = {"metadata.json": b"{}", "model.weights.h5": weights.getvalue()}
    keras = zipped(tmp_path / "a.keras", records | {"config.json": b'{"config":' + nested + b"}"}, ZIP_STORED)
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        group = file
        for _ in range(min(levels, 2000)):
            group = group.create_group("g")
    for path in (tmp_path / "a.safetensors", index, keras, tmp_path / "a.h5"):
        for command in COMMANDS:
            status, told = answered(run, command, path)
            assert status in (1, 2) and "nested more than" in told, (path, command, told)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Return a directory that is removed by a tool that doesn't recurse, as pytest's own way does."""
    path = tmp_path / "root"
    path.mkdir()
    yield path
    subprocess.run(["rm", "-rf", os.fspath(path)], check=True)


@pytest.mark.parametrize(
    "commands",
    [
        (["verify"],),
        pytest.param(
            (["list"], ["latest"], ["prune", "-n", "--keep-last", "1"], ["diff"], ["undo"]),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["verify", "others"],
)
def test_directories_of_many_levels(commands: tuple[list[str], ...], root: Path, run: Run) -> None:
    """As deep as paths can be long; what lies deeper can't be named, and is told."""
    checkpoint = (
        struct.pack("<Q", 56) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  ' + bytes(4)
    )
    for name in ("run-1", "run-2"):
        (root / f"{name}.safetensors").write_bytes(checkpoint)
    place = os.open(root, os.O_RDONLY)
    for level in range(2500):
        os.mkdir("d", dir_fd=place)
        place, above = os.open("d", os.O_RDONLY, dir_fd=place), place
        os.close(above)
        if level == 1500:
            with os.fdopen(
                os.open("deep-1.safetensors", os.O_WRONLY | os.O_CREAT, dir_fd=place), "wb"
            ) as file:
                file.write(checkpoint)
    os.close(place)
    for command in commands:
        told = run(*command, root)
        assert "internal error" not in told.err, told.err
        if command[0] in ("verify", "list"):
            assert "deep-1.safetensors" in told.out
        if command[0] == "verify":
            assert "too long" in told.err + told.out


def test_files_of_a_checkpoint_lie_at_some_depth_only(files: Path, tmp_path: Path) -> None:
    deep = shutil.copytree(files / "savedmodel" / "plain", tmp_path / "model") / "/".join("d" * 98)
    deep.mkdir(parents=True)
    assert [one.state for one in list_checkpoints(tmp_path).checkpoints] == ["readable"]
    (deep / "d").mkdir()
    listing = list_checkpoints(tmp_path)
    assert [one.state for one in listing.checkpoints] == ["unreadable"]
    assert [problem.message for problem in listing.problems] == [
        "unreadable: directories nested more than 100 deep"
    ]
