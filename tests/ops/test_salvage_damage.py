"""Random damage of zips: ``salvage`` saves all that a reader of its own, a few lines long, finds proven.

That reader takes every local header, and what it, a descriptor or the directory state of the bytes behind it.
"""

from __future__ import annotations

import io
import random
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttool import CheckpointError, salvage

Damage = Callable[[bytearray, random.Random], None]
Arrays = dict[str, np.ndarray[Any, Any]]
STATEMENT = re.compile(rb"PK(\x03\x04|\x07\x08|\x01\x02|\x05\x06|\x06\x06|\x06\x07)")


def cut(data: bytearray, rnd: random.Random) -> None:
    del data[rnd.randrange(1, len(data)) :]


def zero(data: bytearray, rnd: random.Random) -> None:
    start, nbytes = rnd.randrange(len(data)), rnd.choice([4, 16, 100, 512])
    end = min(start + nbytes, len(data))
    data[start:end] = bytes(end - start)


def flip(data: bytearray, rnd: random.Random) -> None:
    for _ in range(rnd.choice([1, 4, 16])):
        data[rnd.randrange(len(data))] ^= 1 << rnd.randrange(8)


def insert(data: bytearray, rnd: random.Random) -> None:
    start = rnd.randrange(len(data))
    data[start:start] = rnd.randbytes(rnd.choice([1, 3, 50, 700]))


def remove(data: bytearray, rnd: random.Random) -> None:
    start = rnd.randrange(len(data))
    del data[start : start + rnd.choice([1, 3, 50, 700])]


def flip_statement(data: bytearray, rnd: random.Random) -> None:
    at = rnd.choice([match.start() for match in STATEMENT.finditer(data)]) + rnd.randrange(18)
    data[at] ^= 1 << rnd.randrange(8)


def recovered(data: bytes) -> dict[str, bytes]:
    """Return the records that have a checksum which is stated anywhere, by their local headers' names."""
    stated = [*_entries(data)]
    ends = [
        (at.start() - size, crc, size, size)
        for at in re.finditer(rb"PK\x07\x08", data[:-12])
        for crc, _, size in [struct.unpack_from("<3I", data, at.start() + 4)]
    ]
    found: dict[str, bytes] = {}
    for match in re.finditer(rb"PK\x03\x04", data[:-26]):
        fields = struct.unpack_from("<4s5H3I2H", data, match.start())
        begin = match.start() + 30
        name, start = data[begin : begin + fields[9]], begin + fields[9] + fields[10]
        claims = [(crc, stored, size) for at, crc, stored, size in ends if at == start]
        claims += [(crc, stored, size) for listed, crc, stored, size in stated if listed == name]
        claims += [(fields[6], fields[7], fields[8])]
        for crc, stored, size in claims:
            content = data[start : start + stored]
            if fields[3] == 8:
                try:
                    content = zlib.decompress(content, -15)
                except zlib.error:
                    continue
            if size and len(content) == size and zlib.crc32(content) == crc:
                found.setdefault(name.decode("latin1"), content)
    return found


def _entries(data: bytes) -> Iterator[tuple[bytes, int, int, int]]:
    for match in re.finditer(rb"PK\x01\x02", data[:-42]):
        fields = struct.unpack_from("<4s6H3I5H2I", data, match.start())
        begin = match.start() + 46
        yield data[begin : begin + fields[10]], fields[7], fields[8], fields[9]


def torch_arrays(data: bytes) -> Arrays:
    """Return the tensors whose records are there, if the pickle is that says which are whose."""
    records = {name.partition("/")[2]: content for name, content in recovered(data).items()}
    arrays = {
        f"layer{number}": np.frombuffer(records.get(f"data/{number}", b""), "f4") for number in range(7)
    }
    return {name: one.reshape(-1, 5) for name, one in arrays.items() if one.size and "data.pkl" in records}


def numpy_arrays(data: bytes) -> Arrays:
    records = recovered(data)
    return {
        name.removesuffix(".npy"): np.load(io.BytesIO(content), allow_pickle=False)
        for name, content in records.items()
        if name.endswith(".npy")
    }


def make(path: Path, kind: str) -> Arrays:
    rnd = np.random.default_rng(0)
    arrays = {f"layer{number}": rnd.normal(size=(3 + 7 * number, 5)).astype("f4") for number in range(7)}
    if kind == "torch":
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    elif kind == "stored":
        np.savez(path, **arrays)
    else:
        np.savez_compressed(path, **arrays)
    return arrays


def read(path: Path) -> Arrays:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return dict(arrays)
    return {name: tensor.numpy() for name, tensor in torch.load(path).items()}


@pytest.mark.parametrize("damage", [cut, zero, flip, insert, remove, flip_statement])
@pytest.mark.parametrize("kind", ["torch", "stored", "compressed"])
def test_nothing_is_lost_that_another_reader_finds(kind: str, damage: Damage, tmp_path: Path) -> None:
    suffix = ".pth" if kind == "torch" else ".npz"
    whole = tmp_path / f"whole{suffix}"
    truth, data, rnd = make(whole, kind), whole.read_bytes(), random.Random(kind)
    for number in range(8):
        damaged = bytearray(data)
        damage(damaged, rnd)
        source, target = tmp_path / f"{number}{suffix}", tmp_path / f"{number}.saved{suffix}"
        source.write_bytes(damaged)
        other = (torch_arrays if kind == "torch" else numpy_arrays)(bytes(damaged))
        expected = {name for name in other if name in truth and np.array_equal(other[name], truth[name])}
        try:
            done = salvage(source, target)
        except CheckpointError:
            assert not expected
            continue
        saved = read(target)
        assert expected <= saved.keys()
        # A name that the zip states in two ways is as likely one as the other, and the damage says so.
        doubtful = {str(one.where).removesuffix(".npy") for one in done.damage}
        assert all(np.array_equal(saved[name], truth[name]) for name in saved.keys() - doubtful)
