"""Files that are named after their digests, as the Hugging Face cache and Git LFS have them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ckpttool import Check, Status, verify
from tests.support.commands import Run

NAME = "dtypes.safetensors"


@pytest.fixture
def model(files: Path) -> Path:
    return files / "safetensors" / NAME


def place(model: Path, blob: Path, link: Path) -> Path:
    """Put a model where a cache has it, and link to it as the cache does."""
    blob.parent.mkdir(parents=True)
    shutil.copy(model, blob)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    return link


def git_digest(path: Path) -> str:
    found = subprocess.run(["git", "hash-object", path], capture_output=True, check=True, text=True)
    return found.stdout.strip()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip_last(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def manifest_check(path: Path) -> Check | None:
    return next((one for one in verify(path).checks if one.name == "manifest"), None)


@pytest.mark.parametrize("digest", [sha256, git_digest])
def test_the_cache_of_the_hub(tmp_path: Path, model: Path, run: Run, digest: object) -> None:
    assert callable(digest)
    repository = tmp_path / "hub" / "models--me--m"
    link = place(model, repository / "blobs" / digest(model), repository / "snapshots" / ("0" * 40) / NAME)
    blob = link.resolve()
    assert manifest_check(link) == manifest_check(blob) == Check("manifest", Status.PASSED, "1 file")
    flip_last(blob)
    (finding,) = verify(link, only=("manifest",)).findings
    assert (finding.code, finding.where) == ("content-mismatch", NAME)
    title = "SHA-256" if digest is sha256 else "git's SHA-1"
    is_, was = digest(blob)[:16], blob.name[:16]
    assert finding.message == f"{title} is {is_}… instead of {was}… (its name in the Hugging Face cache)"
    status, out, _ = run("verify", link)
    assert status == 1
    assert "delete it and download it again" in out


def test_objects_of_git_lfs(tmp_path: Path, model: Path) -> None:
    name = sha256(model)
    blob = tmp_path / ".git" / "lfs" / "objects" / name[:2] / name[2:4] / name
    link = place(model, blob, tmp_path / "work" / NAME)
    assert manifest_check(link) == Check("manifest", Status.PASSED, "1 file")
    flip_last(blob)
    (finding,) = verify(link, only=("manifest",)).findings
    assert (finding.code, finding.message.rpartition(" (")[2]) == ("content-mismatch", "its name in Git LFS)")


@pytest.mark.parametrize("digest", [sha256, git_digest])
@pytest.mark.parametrize("name", [NAME, f"deep/er/{NAME}"])
def test_what_was_noted_at_a_download(tmp_path: Path, model: Path, digest: object, name: str) -> None:
    from huggingface_hub._local_folder import write_download_metadata

    assert callable(digest)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(model, path)
    os.utime(path, (1, 1))
    write_download_metadata(tmp_path, name, "0" * 40, digest(model))
    assert manifest_check(path) == Check("manifest", Status.PASSED, "1 file")
    flip_last(path)
    os.utime(path, (1, 1))
    assert [one.code for one in verify(path).findings] == ["content-mismatch"]
    note = tmp_path / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    written = float(note.read_text().split()[2])
    os.utime(path, (written + 60, written + 60))  # changed since, by its owner
    assert manifest_check(path) is None
    os.utime(path, (1, 1))
    for text in ("", "a b", f"{'0' * 40}\nW/etag\n1.0\n", f"{'0' * 40}\n{'0' * 64}\nnever\n", "\xff" * 9000):
        note.write_text(text, "latin-1")
        assert manifest_check(path) is None


def test_other_names_of_64_digits_are_no_addresses(tmp_path: Path, model: Path) -> None:
    for path in ("blobs", "models--x/other", "lfs/objects/11/22"):
        blob = tmp_path / path / ("0" * 64)
        assert manifest_check(place(model, blob, tmp_path / path / "link.safetensors")) is None


def test_a_manifest_counts_besides(tmp_path: Path, model: Path) -> None:
    repository = tmp_path / "models--me--m"
    link = place(model, repository / "blobs" / sha256(model), repository / "snapshots" / "main" / NAME)
    Path(f"{link}.sha256").write_text("0" * 64)
    assert [one.code for one in verify(link).findings] == ["manifest-mismatch"]
