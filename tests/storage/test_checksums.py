"""Checksums of files, by blocks that combine, against hashlib, zlib, google-crc32c and S3's own way."""

from __future__ import annotations

import base64
import builtins
import hashlib
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.ops.digests import sums_of_file
from ckpttool.storage.checksums import CRCS, Checksum, FileSums, combined_crc, crc_functions
from tests.support.checksums import crc64nvme

TRUTHS = {"crc32": zlib.crc32, "crc32c": google_crc32c.value, "crc64nvme": crc64nvme}
WIDTHS = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}
DATA = bytes(range(256)) * 40 + b"the end"
BLOCK = 1024


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


def composite(data: bytes, sizes: Sequence[int], algorithm: str) -> str:
    """Return what S3 makes of the parts of an upload: the checksum of their checksums."""
    joined, begin = b"", 0
    for size in sizes:
        joined += TRUTHS[algorithm](data[begin : begin + size]).to_bytes(WIDTHS[algorithm], "big")
        begin += size
    return TRUTHS[algorithm](joined).to_bytes(WIDTHS[algorithm], "big").hex()


def test_the_check_values_of_the_catalogue() -> None:
    values = {name: crc(memoryview(b"123456789"), 0) for name, crc in crc_functions().items()}
    assert values == {"crc32": 0xCBF43926, "crc32c": 0xE3069283, "crc64nvme": 0xAE8B14860A799888}


@given(st.binary(max_size=300), st.binary(max_size=300), st.sampled_from(CRCS))
def test_crcs_combine(first: bytes, second: bytes, algorithm: str) -> None:
    truth = TRUTHS[algorithm]
    crcs = truth(first), truth(second)
    assert combined_crc(*crcs, len(second), algorithm) == truth(first + second)


def test_a_file_is_read_once_for_all(file: Path) -> None:
    sums = sums_of_file(str(file), ("sha256", "md5", "sha1", "git-sha1", *CRCS), block_bytes=BLOCK)
    assert sums.nbytes == len(DATA)
    git = subprocess.run(["git", "hash-object", file], capture_output=True, check=True, text=True)
    assert sums.digests == {
        "sha256": hashlib.sha256(DATA).hexdigest(),
        "md5": hashlib.md5(DATA).hexdigest(),
        "sha1": hashlib.sha1(DATA).hexdigest(),
        "git-sha1": git.stdout.strip(),
    }
    for algorithm in CRCS:
        blocks = [DATA[at : at + BLOCK] for at in range(0, len(DATA), BLOCK)]
        assert sums.blocks[algorithm] == tuple(map(TRUTHS[algorithm], blocks))
        whole = TRUTHS[algorithm](DATA).to_bytes(WIDTHS[algorithm], "big").hex()
        assert sums.value_like(Checksum(algorithm, "")) == whole


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c"])
@pytest.mark.parametrize("part", [BLOCK, 2 * BLOCK, 5 * BLOCK, 100 * BLOCK])
def test_blocks_become_the_parts_of_an_upload(file: Path, algorithm: str, part: int) -> None:
    sums = sums_of_file(str(file), CRCS, block_bytes=BLOCK)
    sizes = [min(part, len(DATA) - at) for at in range(0, len(DATA), part)]
    expected = composite(DATA, sizes, algorithm)
    assert sums.value_like(Checksum(algorithm, "", tuple(sizes))) == expected


def test_what_cannot_be_known_is_not_told(file: Path) -> None:
    sums = sums_of_file(str(file), ("sha256", *CRCS), block_bytes=BLOCK)
    half = BLOCK // 2
    for parts in ((half, len(DATA) - half), (BLOCK, BLOCK), (BLOCK, len(DATA))):
        assert sums.value_like(Checksum("crc32c", "", parts)) is None
    assert sums.value_like(Checksum("sha256", "", (len(DATA),))) is None
    assert sums.value_like(Checksum("md5", "")) is None
    assert FileSums(None).value_like(Checksum("crc32c", "")) is None


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sums = sums_of_file(str(tmp_path / "file"), ("sha256", *CRCS))
    assert sums.value_like(Checksum("crc64nvme", "")) == "0" * 16
    assert sums.digests["sha256"] == hashlib.sha256().hexdigest()


def test_crc64_is_left_out_without_its_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **options: Any) -> Any:
        if name.startswith("awscrt"):
            raise ImportError(name)
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert list(sums_of_file(str(file), CRCS).blocks) == ["crc32", "crc32c"]


def test_the_vector_of_an_upload_in_parts() -> None:
    """Two parts of an upload, with the value that S3 states: CRC-32C of "4waSgw==" twice, decoded."""
    part = base64.b64decode("4waSgw==")  # CRC-32C of 123456789, as boto3 sends it
    sums = FileSums(18, blocks={"crc32c": (0xE3069283, 0xE3069283)}, block_bytes=9)
    expected = google_crc32c.value(part + part).to_bytes(4, "big").hex()
    assert sums.value_like(Checksum("crc32c", "", (9, 9))) == expected
