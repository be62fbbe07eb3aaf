"""Plain HDF5: what leads out of the file or in circles, damage, and what is no array of numbers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckpttool import CheckpointError, Role, Safety, Status, Truncated, open_checkpoint, verify
from ckpttool.formats.hdf5 import tensors as h5_tensors
from tests.support.opening import kinds_of
from tests.support.thorough import sampled, spread

HOSTILE = {
    "external_link.h5": ("hdf5-external-link", "unsafe", True),
    "external_storage.h5": ("hdf5-external-storage", "unsafe", True),
    "virtual.h5": ("hdf5-virtual", "unsafe", True),
    "soft_link.h5": ("hdf5-soft-link", "safe", True),
    "cycle.h5": ("hdf5-cycle", "safe", True),
    "bomb.h5": ("hdf5-shape-bomb", "safe", False),
    "unwritten.h5": ("values-not-written", "safe", True),
    "deep.h5": ("hdf5-limit", "unknown", False),
    "nan.weights.h5": ("nan", "safe", False),
    "code.h5": ("keras-lambda", "unsafe", False),
}


@pytest.fixture
def hostile(files: Path) -> Path:
    return files / "hdf5-hostile"


def test_every_hostile_file_has_an_answer(hostile: Path) -> None:
    assert {path.name for path in hostile.iterdir()} == set(HOSTILE)


def test_hostile(hostile: Path) -> None:
    for name in HOSTILE:
        code, safety, is_valid = HOSTILE[name]
        verification = verify(hostile / name)
        assert code in {finding.code for finding in verification.findings}, name
        assert verification.safety.value == safety, name
        assert verification.is_valid == is_valid, name


@pytest.mark.parametrize("name", ["external_storage.h5", "virtual.h5"])
def test_what_lies_elsewhere_is_not_read(hostile: Path, name: str) -> None:
    with open_checkpoint(hostile / name) as checkpoint:
        assert checkpoint["stolen"].values is None
        assert checkpoint["stolen"].tobytes() == b""


def test_checksums_of_the_file_pass(files: Path) -> None:
    checks = {check.name: check for check in verify(files / "hdf5" / "checksummed.h5").checks}
    assert checks["checksum"].status is Status.PASSED


def test_a_file_without_checksums_says_so(files: Path) -> None:
    for name in ("types.h5", "mixed.h5"):
        checks = {check.name: check for check in verify(files / "hdf5" / name).checks}
        assert checks["checksum"].status is Status.SKIPPED
        assert checks["checksum"].detail == "hdf5 files carry no checksums"


def test_every_flip_in_checksummed_data_is_found(files: Path, tmp_path: Path) -> None:
    data = (files / "hdf5" / "checksummed.h5").read_bytes()
    copy = tmp_path / "copy.h5"
    copy.write_bytes(data)
    with open_checkpoint(copy) as checkpoint:
        extents = [span.extent for span in checkpoint.spans()]
    chance = random.Random(0)
    assert extents
    for _ in spread(range(100), 30):
        extent = chance.choice(extents)
        at = chance.randrange(extent.offset, extent.end)
        copy.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        verification = verify(copy, jobs=1)
        assert "checksum-mismatch" in {finding.code for finding in verification.findings}, at


def test_damaged_integers_are_found_by_their_filter(files: Path, tmp_path: Path) -> None:
    data = bytearray((files / "hdf5" / "mixed.h5").read_bytes())
    copy = tmp_path / "mixed.h5"
    copy.write_bytes(data)
    with open_checkpoint(copy) as checkpoint:
        (extent, *_) = [span.extent for span in checkpoint.spans() if span.where == "/gzip"]
    data[extent.offset : extent.end] = bytes(extent.nbytes)
    copy.write_bytes(data)
    assert not verify(copy).is_valid


def test_truncation_says_how_much_is_left(files: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.h5"
    data = (files / "hdf5" / "types.h5").read_bytes()
    copy.write_bytes(data[:-100])
    with pytest.raises(Truncated) as caught:
        open_checkpoint(copy)
    assert caught.value.reason == f"truncated: {len(data) - 100:,} bytes ({len(data):,} bytes)"


def test_bytes_behind_the_end_are_told(files: Path, tmp_path: Path) -> None:
    for name in ("types.h5", "mixed.h5"):
        copy = tmp_path / name
        copy.write_bytes((files / "hdf5" / name).read_bytes() + b"more")
        assert "trailing-bytes" in {finding.code for finding in verify(copy).findings}, name
        assert "trailing-bytes" not in {finding.code for finding in verify(files / "hdf5" / name).findings}


def test_texts_and_records_are_told_and_not_dropped(files: Path) -> None:
    with open_checkpoint(files / "hdf5" / "types.h5") as checkpoint:
        datasets = checkpoint.metadata["datasets"]
    assert isinstance(datasets, dict)
    assert datasets["/text"] == "hello"
    assert datasets["/texts"] == ["ab", "c"]
    with h5py.File(files / "hdf5" / "types.h5") as file:
        crc = zlib.crc32(file["records"][()].tobytes())
    assert datasets["/records"] == {
        "<dataset>": "compound",
        "shape": [1],
        "members": ["a", "b"],
        "CRC-32": f"{crc:08x}",
    }


RECORD = np.dtype([("a", "<i4"), ("b", "<f8")])
TEXTS = h5py.string_dtype()
NAMED = np.dtype([("a", "<i4"), ("s", TEXTS)])
PAIRS = h5py.vlen_dtype(np.dtype("<i2"))


def ragged(*rows: list[int]) -> np.ndarray[Any, Any]:
    """Return an array of arrays of their own lengths."""
    values = np.empty(len(rows), object)
    values[:] = [np.array(row, "<i2") for row in rows]
    return values


def written(path: Path, **datasets: tuple[object, object]) -> dict[str, object]:
    """Return what is told of a file with datasets of these values and types."""
    with h5py.File(path, "w") as file:
        file["target"], file["other"] = [1.0], [2.0]
        for name, (value, dtype) in datasets.items():
            if dtype is h5py.ref_dtype:
                file.create_dataset(name, data=[file[one].ref for one in value], dtype=dtype)  # type: ignore[attr-defined]
            else:
                file.create_dataset(name, data=value, dtype=dtype)
                file.create_dataset(
                    f"{name}_chunked", data=value, dtype=dtype, chunks=True, compression="gzip"
                )
    with open_checkpoint(path) as checkpoint:
        assert {finding.code for finding in checkpoint.findings} <= {"hdf5-type"}
        datasets = checkpoint.metadata["datasets"]
    assert isinstance(datasets, dict)
    return datasets


@pytest.mark.parametrize(
    ("one", "other", "dtype"),
    [
        (np.array([(1, 2.0)], RECORD), np.array([(1, 3.0)], RECORD), RECORD),
        (["x"] * 2000, ["x"] * 1999 + ["y"], TEXTS),
        (["x", "yz"] * 1000, ["xy", "z"] * 1000, TEXTS),
        (["x" * 100_000], ["x" * 99_999 + "y"], TEXTS),
        ([b"x" * 99] * 2000, [b"x" * 99] * 1999 + [b"y" * 99], "S99"),
        (ragged([1, 2], [3]), ragged([1], [2, 3]), PAIRS),
        (["target", "other"], ["target", "target"], h5py.ref_dtype),
        (
            np.array([(1, "a")], [("a", "<i4"), ("s", TEXTS)]),
            np.array([(1, "b")], [("a", "<i4"), ("s", TEXTS)]),
            None,
        ),
    ],
)
def test_datasets_without_numbers_are_summed(
    tmp_path: Path, one: object, other: object, dtype: object
) -> None:
    found, again = written(tmp_path / "a.h5", d=(one, dtype)), written(tmp_path / "b.h5", d=(one, dtype))
    assert found == again
    for name, description in written(tmp_path / "c.h5", d=(other, dtype)).items():
        assert description != found[name]


def test_checksums_of_datasets_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5_tensors, "MAX_SUMMED", 250)
    datasets = written(tmp_path / "a.h5", a=(["x" * 100] * 2000, TEXTS))
    assert [sorted(found) for found in datasets.values()] == [["<dataset>", "shape"]] * 2  # type: ignore[call-overload]
    monkeypatch.setattr(h5_tensors, "_MAX_SUMS", 1)
    datasets = written(tmp_path / "b.h5", a=(np.zeros(5, RECORD), RECORD), b=(np.zeros(5, RECORD), RECORD))
    assert sum("CRC-32" in found for found in datasets.values()) == 1  # type: ignore[operator]


def test_links_are_told(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/w"] = [1.0]
        file["again"] = file["g"]
        file["soft"] = h5py.SoftLink("/g/w")
        file["out"] = h5py.ExternalLink("other.h5", "/w")
        file.create_dataset("s", data=["a"], dtype=TEXTS)
        file["twin"] = file["s"]
    with open_checkpoint(tmp_path / "a.h5") as checkpoint:
        assert checkpoint.metadata["links"] == {
            "/g": "the same group as /again",
            "/out": "a link to another file, other.h5:/w",
            "/soft": "a link to /g/w",
            "/twin": "the same dataset as /s",
        }


def test_attributes_without_numbers_are_summed(tmp_path: Path) -> None:
    def metadata_with(number: int, text: str) -> object:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["w"] = [1.0]
            file.attrs.create("record", np.array([(number, 2.0)], RECORD))
            file.attrs.create("texts", ragged([number]), dtype=PAIRS)
        with open_checkpoint(tmp_path / "a.h5") as checkpoint:
            return dict(checkpoint.metadata)

    assert metadata_with(1, "a") == metadata_with(1, "a")
    one, other = metadata_with(1, "a"), metadata_with(2, "a")
    assert isinstance(one, dict)
    assert isinstance(other, dict)
    assert one["record"] != other["record"]
    assert one["texts"] != other["texts"]


def test_two_files_are_read_in_turns(files: Path) -> None:
    path = files / "hdf5" / "checksummed.h5"
    with open_checkpoint(path) as one, open_checkpoint(path) as other:
        pairs = zip(one["floats"].blocks(64), other["floats"].blocks(64), strict=True)
        assert all(bytes(left) == bytes(right) for left, right in pairs)


def test_many_attributes_are_read_in_time_and_large_ones_described(tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    with h5py.File(path, "w", libver="latest") as file:
        for number in range(2000):
            file.attrs[f"a{number}"] = number
        file.attrs.create("large", np.zeros(1 << 17))
        file["x"] = [1.0]
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata["a1999"] == 1999
        assert len(checkpoint.metadata) == 2001
        assert checkpoint.metadata["large"] == {
            "<attribute>": "float",
            "elements": 1 << 17,
            "CRC-32": f"{zlib.crc32(b'<f8:1048576:' + bytes(1 << 20)):08x}",
        }


def test_long_names_at_depth_have_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    with h5py.File(path, "w", libver="latest") as file:
        group = file
        for _ in range(60):
            group = group.create_group("n" * 60_000)
        for number in range(50):
            group[f"x{number}"] = 1.0
    verification = verify(path)
    assert {finding.code for finding in verification.findings} == {"hdf5-limit", "not-scanned"}
    assert verification.safety is Safety.UNKNOWN


def test_objects_are_the_same_behind_a_user_block(tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    with h5py.File(path, "w", userblock_size=512) as file:
        file["a/own"] = [1.0]
        file["a/again"] = file["a/own"]
        file["a/up"] = file["/"]
    assert {finding.code for finding in verify(path).findings} == {"hdf5-cycle"}
    with open_checkpoint(path) as checkpoint:
        ties = {name: tensor.shares_with for name, tensor in checkpoint.items()}
    assert ties == {"a.again": None, "a.own": "a.again"}


def test_a_read_only_file_and_directory(files: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.h5"
    copy.write_bytes((files / "hdf5" / "types.h5").read_bytes())
    copy.chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        assert verify(copy).is_valid
        assert os.listdir(tmp_path) == ["copy.h5"]
    finally:
        tmp_path.chmod(0o700)


def test_inspect_imports_neither_numpy_nor_h5py(files: Path) -> None:
    code = (
        "import sys; from ckpttool.cli import run;"
        f"run(['inspect', '--json', {str(files / 'keras' / 'adam.weights.h5')!r}]);"
        "assert not {'numpy', 'h5py', 'keras'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", sampled(range(3), 1))
def test_noise_in_metadata_never_breaks_anything(files: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    copy = tmp_path / "copy.h5"
    for name in ("types.h5", "mixed.h5"):
        data = bytearray((files / "hdf5" / name).read_bytes())
        for _ in range(30):
            damaged = bytearray(data)
            for _ in range(chance.randrange(1, 20)):
                damaged[chance.randrange(len(data))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            copy.write_bytes(damaged)
            try:
                verify(copy, jobs=1)
            except CheckpointError:
                continue


@pytest.mark.parametrize(
    ("names", "role"),
    [
        (("a", "loss_of_a"), Role.WEIGHTS),
        (("g0/0", "g0/1"), Role.WEIGHTS),
        (("optimizer/m", "optimizer/v"), Role.OPTIMIZER),
    ],
)
def test_arrays_are_weights_where_no_name_tells(tmp_path: Path, names: tuple[str, ...], role: Role) -> None:
    with h5py.File(tmp_path / "m.h5", "w") as file:
        for name in names:
            file[name] = [1.0, 2.0] if "loss" in name else 1.0
    with open_checkpoint(tmp_path / "m.h5") as checkpoint:
        assert {one.role for one in checkpoint.tensors} == {role}


def test_formats_of_text_are_not_asked(tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    with h5py.File(path, "w") as file:
        file["{"] = 1.0
    assert b"{" in path.read_bytes()[:4096]
    assert kinds_of(path) == {"hdf5"}
