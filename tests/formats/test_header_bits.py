"""Single bits of a zip's headers: whatever changes what the framework loads is found.

The checksums of a zip cover what its records hold, and nothing of the headers by which a reader finds them.
"""

from __future__ import annotations

import io
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

from ckpttool import CheckpointError, verify
from tests.support.thorough import spread

FILES = Path(__file__).parents[2] / "fixtures" / "files"
STEP = 7
"""Every so many bits one is flipped; with 1 the answer was the same too."""


def header_bits(data: bytes) -> Iterator[int]:
    """Yield the numbers of the bits outside the contents of records, as Python's zipfile sees them."""
    contents: set[int] = set()
    with ZipFile(io.BytesIO(data)) as archive:
        for record in archive.infolist():
            lengths = struct.unpack_from("<2H", data, record.header_offset + 26)
            start = record.header_offset + 30 + sum(lengths)
            contents |= set(range(start, start + record.compress_size))
    return (8 * offset + bit for offset in range(len(data)) if offset not in contents for bit in range(8))


def is_found(path: Path) -> bool:
    try:
        return not verify(path, jobs=1).is_valid
    except CheckpointError:
        return True


def write_pth(path: Path) -> None:
    import torch

    torch.save({"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3), "step": 7}, path)


def load_pth(path: Path) -> object:
    import torch

    return repr(torch.load(path, weights_only=True))


def write_torchscript(path: Path) -> None:
    import torch

    torch.jit.trace(torch.nn.Linear(2, 3), torch.ones(1, 2)).save(path)


def load_torchscript(path: Path) -> object:
    import torch

    return repr(dict(torch.jit.load(path).state_dict()))


def write_npz(path: Path) -> None:
    np.savez(path, w=np.arange(6.0), b=np.ones(3, "f4"))


def write_packed_npz(path: Path) -> None:
    np.savez_compressed(path, w=np.arange(6.0), b=np.ones(3, "f4"))


def load_npz(path: Path) -> object:
    with np.load(path) as arrays:
        return {name: repr(arrays[name]) for name in arrays.files}


def write_keras(path: Path) -> None:
    shutil.copyfile(FILES / "keras" / "bfloat16.keras", path)


def load_records(path: Path) -> object:
    """Return what Keras's reader of the zip gets."""
    with ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("suffix", "write", "load", "step"),
    [
        ("pth", write_pth, load_pth, STEP),
        ("pt", write_torchscript, load_torchscript, 10 * STEP + 1),
        ("npz", write_npz, load_npz, STEP),
        ("npz", write_packed_npz, load_npz, STEP),
        ("keras", write_keras, load_records, STEP),
    ],
)
def test_header_bits_that_change_what_is_loaded(
    tmp_path: Path, suffix: str, write: Callable[[Path], None], load: Callable[[Path], object], step: int
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / f"m.{suffix}"
    write(path)
    whole = path.read_bytes()
    truth = load(path)
    assert not is_found(path)
    silent: list[Any] = []
    for bit in spread(list(header_bits(whole))[::step], 80):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        if is_found(path):
            continue
        try:
            is_same = load(path) == truth
        except Exception:  # noqa: BLE001 - whatever the loader raises
            is_same = False
        if not is_same:
            silent.append((bit // 8, bit % 8))
    assert silent == []


@pytest.mark.framework
def test_the_bit_that_makes_pytorch_read_nothing(tmp_path: Path) -> None:
    """Bit 4 of the attributes of each record: a directory."""
    path = tmp_path / "m.pth"
    write_pth(path)
    whole, truth = path.read_bytes(), load_pth(path)
    directory = whole.index(b"PK\1\2")
    for entry in (at for at in range(directory, len(whole)) if whole.startswith(b"PK\1\2", at)):
        data = bytearray(whole)
        data[entry + 38] ^= 0x10
        path.write_bytes(data)
        try:
            differs = load_pth(path) != truth
        except Exception:  # noqa: BLE001 - PyTorch unpickles memory that nobody wrote
            differs = True
        verification = verify(path)
        assert not verification.is_valid
        assert {finding.code for finding in verification.findings} == {"zip-header"}
        assert differs or b"m/data/" not in whole[entry + 46 : entry + 70]  # else it is what no tensor is in
