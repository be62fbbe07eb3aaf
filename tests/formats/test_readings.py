"""Files that several loaders take are judged by all of them; the loaders prove that they do take them."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckpttool import Safety, Severity, verify
from tests.support.frameworks import python_with_frameworks

FILES = Path(__file__).parents[2] / "fixtures" / "files"
HDF5 = FILES / "hdf5" / "mixed.h5"
KERAS_H5 = FILES / "keras" / "adam.h5"
NUMBERS = np.arange(12, dtype=np.float32)


class Creates:
    """An object that a pickle holds as a call which creates a file, and does nothing else."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._marker), "w")


def payload(marker: Path, protocol: int) -> bytes:
    """Return a pickle that creates a file; for ``protocol`` 0 and 1 it has no usual head."""
    return pickle.dumps(Creates(marker), protocol=protocol)


def npy(array: Any) -> bytes:
    made = io.BytesIO()
    np.save(made, array, allow_pickle=True)
    return made.getvalue()


def evil_array(marker: Path) -> bytes:
    holder = np.empty(1, dtype=object)
    holder[0] = Creates(marker)
    return npy(holder)


def user_block(content: Path, block: bytes, size: int) -> bytes:
    """Return an HDF5 file with a user block: what is in it, filled up with zeros."""
    import h5py

    made = io.BytesIO()
    with h5py.File(made, "w", userblock_size=size) as target, h5py.File(content) as source:
        for name in source:
            source.copy(name, target)
        target.attrs.update(source.attrs)
    return block.ljust(size, b"\0") + made.getvalue()[size:]


def torch_zip(pickled: bytes, offset: int = 0, **members: bytes) -> bytes:
    """Return an archive as PyTorch writes it, all of whose offsets count from ``offset`` before it."""
    made = io.BytesIO()
    made.write(bytes(offset))
    with zipfile.ZipFile(made, "a" if offset else "w") as archive:
        for name, content in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"archive/{name}", content)
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()[offset:]


def safetensors(data: bytes, metadata: dict[str, str] | None = None) -> bytes:
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = {} if metadata is None else {"__metadata__": metadata}
    text = json.dumps({**header, "values": entry}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def inside_safetensors(make: Callable[[int], bytes]) -> bytes:
    """Return a safetensors file with a tensor whose bytes are made for the place where they lie."""
    plain = make(4096)
    start = len(safetensors(plain)) - len(plain)
    return safetensors(make(start))


def tar_and_safetensors(marker: Path) -> bytes:
    """Return what is a safetensors file whose header is also that of a tar's first member."""
    members = {"storages": payload(marker, 2), "tensors": b"", "pickle": b"", "sys_info": b""}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in members.items():
            one = tarfile.TarInfo(name)
            one.size = len(content)
            archive.addfile(one, io.BytesIO(content))
    data, room = made.getvalue(), 1024
    entry = f'"values":{{"dtype":"U8","shape":[{len(data)}],"data_offsets":[0,{len(data)}]}}}}'
    block = bytearray(struct.pack("<Q", room - 8) + b'{"__metadata__":{"a":"')
    block = block.ljust(100) + b"0000644 " + b"0000000 " * 2 + f"{room - 512:011o} ".encode() + b"0" * 11
    block += b" " + b" " * 8 + b"0"
    block = block.ljust(512)
    block[148:156] = f"{sum(block):06o}  ".encode()
    text = bytes(block) + b'"},' + entry.encode()
    return text.ljust(room) + data


def zip_with_comment(marker: Path) -> bytes:
    front = npy(NUMBERS)
    made = torch_zip(payload(marker, 2), len(front))
    return front + made[:-2] + struct.pack("<H", 300) + bytes(300)


def array_in_zip(marker: Path) -> bytes:
    return torch_zip(SAFE_PICKLE, **{"archive/more.npy": evil_array(marker)})


def two_zips(marker: Path) -> bytes:
    return torch_zip(payload(marker, 2), **{"config.json": b"{}", "metadata.json": b"{}"})


def zip_in_safetensors(marker: Path) -> bytes:
    return inside_safetensors(lambda start: torch_zip(payload(marker, 2), start))


class Case(NamedTuple):
    """A file that two loaders take: its suffix, what it is made of, and how the second one reads it.

    In ``load``, ``path`` is the file.
    """

    suffix: str
    make: Callable[[Path], bytes]
    load: str


_UNPICKLE = "pickle.load(open(path, 'rb'))"
_TORCH = "torch.load(path, weights_only=False)"
_TWICE = "f = open(path, 'rb'); np.load(f); np.load(f, allow_pickle=True)"
_READER = "pickle.loads(torch._C.PyTorchFileReader(path).get_record('data.pkl'))"
_TWICE_OBJECTS = _TWICE.replace("(f)", "(f, allow_pickle=True)")
_MEMBER = "f = zipfile.ZipFile(path).open('a.npy'); [np.lib.format.read_array(f, True) for _ in range(2)]"
SAFE_PICKLE = pickle.dumps({"epoch": 3}, protocol=2)

CASES = {
    "hdf5-user-block-512": Case(".h5", lambda m: user_block(HDF5, payload(m, 0), 512), _UNPICKLE),
    "hdf5-user-block-1024": Case(".h5", lambda m: user_block(HDF5, payload(m, 1), 1024), _TORCH),
    "hdf5-user-block-2048": Case(".pt", lambda m: user_block(HDF5, payload(m, 2), 2048), _TORCH),
    "hdf5-user-block-8192": Case(".h5", lambda m: user_block(HDF5, payload(m, 4), 8192), _UNPICKLE),
    "keras-user-block": Case(".h5", lambda m: user_block(KERAS_H5, payload(m, 0), 512), _UNPICKLE),
    "npy-second-array": Case(".npy", lambda m: npy(NUMBERS) + evil_array(m), _TWICE),
    "npy-after-objects": Case(".npy", lambda m: npy(np.array([None])) + evil_array(m), _TWICE_OBJECTS),
    "npy-pickle-behind": Case(".npy", lambda m: npy(NUMBERS) + payload(m, 0), _TWICE),
    "npz-second-array": Case(".npz", lambda m: _npz(npy(NUMBERS) + evil_array(m)), _MEMBER),
    "pickle-then-zip": Case(
        ".pkl", lambda m: SAFE_PICKLE + torch_zip(payload(m, 2), len(SAFE_PICKLE)), _READER
    ),
    "npy-then-zip": Case(
        ".npy", lambda m: npy(NUMBERS) + torch_zip(payload(m, 2), len(npy(NUMBERS))), _READER
    ),
    "zip-with-comment": Case(".npy", zip_with_comment, _READER),
    "safetensors-and-zip": Case(".safetensors", zip_in_safetensors, _READER),
    "safetensors-and-tar": Case(".pt", tar_and_safetensors, _TORCH),
    "array-in-zip": Case(".pt", array_in_zip, "np.load(path, allow_pickle=True)['archive/more']"),
    "zip-of-two-formats": Case(".pt", two_zips, _READER),
}


def _npz(member: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a.npy", member)
    return made.getvalue()


_LOADER = """
import json, pickle, sys, warnings, zipfile
import numpy as np, torch
warnings.simplefilter("ignore")
for path, load in json.loads(sys.argv[1]):
    try:
        exec(load, {**globals(), "path": path})
    except Exception as failure:
        print(path, type(failure), failure)
"""


@pytest.mark.framework
def test_what_a_second_loader_runs_is_unsafe(tmp_path: Path) -> None:
    loads, verdicts = [], {}
    for name, case in CASES.items():
        path = tmp_path / f"{name}{case.suffix}"
        path.write_bytes(case.make(tmp_path / f"{name}.ran"))
        verdicts[name] = verify(path).safety
        loads.append((str(path), case.load))
    assert not list(tmp_path.glob("*.ran"))
    told = python_with_frameworks("-c", _LOADER, json.dumps(loads))
    assert {path.stem for path in tmp_path.glob("*.ran")} == CASES.keys(), told
    assert verdicts == dict.fromkeys(CASES, Safety.UNSAFE)


def test_a_zip_among_the_bytes_of_a_pickle_leaves_safety_unknown(tmp_path: Path) -> None:
    path = tmp_path / "blob.pkl"
    path.write_bytes(pickle.dumps({"arrays": _npz(npy(NUMBERS))}))
    verification = verify(path)
    assert (verification.safety, verification.is_valid) == (Safety.UNKNOWN, True)
    assert [one.code for one in verification.findings] == ["several-formats"]


def test_a_harmless_user_block_is_safe(tmp_path: Path) -> None:
    for size, block in (
        (512, b"MATLAB 7.3 MAT-file, Platform: GLNXA64"),
        (1024, b""),
        (2048, b"notes\n" * 9),
    ):
        path = tmp_path / f"{size}.h5"
        path.write_bytes(user_block(HDF5, block, size))
        assert verify(path).safety is Safety.SAFE, path


def test_arrays_behind_each_other_are_all_judged_and_safe(tmp_path: Path) -> None:
    path = tmp_path / "many.npy"
    path.write_bytes(npy(NUMBERS) * 3)
    verification = verify(path)
    assert (verification.safety, verification.is_valid) == (Safety.SAFE, True)
    assert [one.code for one in verification.findings] == ["trailing-bytes"]


@pytest.mark.parametrize("tail", [b"\0" * 100, b"hidden" * 50])
def test_bytes_that_nothing_declares_are_never_safe(tmp_path: Path, tail: bytes) -> None:
    for path, content in {
        "a.pkl": SAFE_PICKLE,
        "a.npy": npy(NUMBERS),
        "a.pt": (FILES / "pytorch" / "minimal.pth").read_bytes(),
        "a.safetensors": safetensors(b"12345678"),
    }.items():
        (tmp_path / path).write_bytes(content + tail)
        verification = verify(tmp_path / path)
        assert (verification.safety, verification.is_valid) == (Safety.UNKNOWN, False), path


SUFFIXES = {
    ".bin": safetensors(b"12345678"),
    ".pt": safetensors(b"12345678"),
    ".pth": npy(NUMBERS),
    ".ckpt": npy(NUMBERS),
    ".pkl": HDF5.read_bytes(),
    ".safetensors": (FILES / "pytorch" / "minimal.pth").read_bytes(),
    ".npy": SAFE_PICKLE,
    ".h5": SAFE_PICKLE,
}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_name_that_lies_is_a_warning(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"pytorch_model{suffix}"
    path.write_bytes(SUFFIXES[suffix])
    verification = verify(path)
    found = {one.code: one.severity for one in verification.findings}
    assert found["suffix-mismatch"] is Severity.WARNING
    assert verification.is_valid and not verify(path, strict=True).is_valid


HONEST = {
    "keras.ckpt": KERAS_H5,
    "keras.keras": KERAS_H5,
    "state.pkl": FILES / "pytorch" / "minimal.pth",
    "pytorch_model.bin": FILES / "pytorch" / "minimal.pth",
    "epoch.ckpt": FILES / "pytorch" / "minimal.pth",
}


@pytest.mark.parametrize("name", HONEST)
def test_names_that_frameworks_give_are_fine(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(HONEST[name].read_bytes())
    assert "suffix-mismatch" not in {one.code for one in verify(path).findings}
