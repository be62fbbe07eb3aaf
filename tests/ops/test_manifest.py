"""Manifests: what sha256sum writes is understood, what is written sha256sum checks, and no write is torn."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from ckpttool import Check, Status, verify
from tests.support.checksums import crc64nvme
from tests.support.commands import run_redirected
from tests.support.faults import hit_call, is_killed_at
from tests.support.manifests import seal, sha256sum_accepts, sums
from tests.support.opening import checkpoints_in, only_checkpoint

ZERO = "0" * 64


@pytest.fixture
def guide(files: Path, tmp_path: Path) -> Path:
    """Return a checkpoint in a directory of its own."""
    (tmp_path / "run").mkdir()
    return Path(shutil.copy(files / "pytorch" / "guide.pth", tmp_path / "run" / "guide.pth"))


@pytest.fixture
def trainer(files: Path, tmp_path: Path) -> Path:
    source = files / "safetensors" / "trainer" / "checkpoint-4"
    return Path(shutil.copytree(source, tmp_path / "run" / "checkpoint-4"))


@pytest.fixture
def sharded(files: Path, tmp_path: Path) -> Path:
    """Return the index of a set of shards."""
    source = Path(shutil.copytree(files / "safetensors" / "sharded", tmp_path / "run"))
    return source / "model.safetensors.index.json"


def manifest_check(path: Path, **options: Any) -> Check:
    verdict = verify(path, **options)
    (check,) = [check for check in verdict.checks if check.name == "manifest"]
    return check


def found(path: Path, **options: Any) -> list[tuple[str, str | None]]:
    return [(one.code, one.where) for one in verify(path, **options).findings if "manifest" in one.code]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# Writing --------------------------------------------------------------------------------------------


def test_a_file(guide: Path) -> None:
    sealed = seal(guide)
    assert sealed.is_valid
    assert sealed.files == (f"{guide}.sha256", f"{guide}.digests.json")
    manifest = Path(sealed.files[0])
    assert manifest.read_bytes() == sums(guide.parent, "guide.pth")
    assert sha256sum_accepts(manifest)
    assert manifest_check(guide) == Check("manifest", Status.PASSED, "1 file")


@pytest.mark.parametrize("name", ["guide.pth", "bigendian.pth", "dtypes.pth", "ema_and_names.pth"])
def test_digests_of_tensors_are_the_frameworks(name: str, files: Path, tmp_path: Path) -> None:
    truth = json.loads((files / "pytorch" / f"{name}.expected.json").read_text())["tensors"]
    copy = Path(shutil.copy(files / "pytorch" / name, tmp_path))
    seal(copy)
    told = json.loads(Path(f"{copy}.digests.json").read_text())
    assert told["schema"] == "ckpttool.digests/1"
    data = copy.read_bytes()
    assert told["files"] == {
        name: {
            "bytes": len(data),
            "block_bytes": 8 << 20,
            "crc32": [f"{zlib.crc32(data):08x}"],
            "crc32c": [f"{google_crc32c.value(data):08x}"],
            "crc64nvme": [f"{crc64nvme(data):016x}"],
        }
    }
    keys = ("path", "dtype", "shape", "sha256")
    expected = {".".join(map(str, one["path"])): {key: one[key] for key in keys} for one in truth}
    assert told["tensors"] == expected


def test_a_directory_has_it_beside(trainer: Path) -> None:
    inside = sorted(os.listdir(trainer))
    sealed = seal(trainer)
    assert sealed.files[0] == f"{trainer}.sha256"
    assert sorted(os.listdir(trainer)) == inside
    names = [line.split(b"  ")[1].decode() for line in Path(sealed.files[0]).read_bytes().splitlines()]
    assert sorted(names) == [f"checkpoint-4/{name}" for name in inside]
    assert sha256sum_accepts(Path(sealed.files[0]))
    assert manifest_check(trainer).status is Status.PASSED


def test_a_directory_named_by_a_dot(trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal(trainer)
    monkeypatch.chdir(trainer)
    assert manifest_check(Path(".")).status is Status.PASSED


def test_shards_have_it_by_their_index(sharded: Path) -> None:
    sealed = seal(sharded)
    assert sealed.files[0] == f"{sharded}.sha256"
    assert sha256sum_accepts(Path(sealed.files[0]))
    count = len(list(sharded.parent.glob("model*.safetensors*"))) - 2
    assert manifest_check(sharded) == Check("manifest", Status.PASSED, f"{count} files")


def test_a_second_time_nothing_is_written(guide: Path) -> None:
    sealed = seal(guide)
    before = [os.stat(path).st_ino for path in sealed.files]
    assert seal(guide) == (True, sealed.files, None, False)
    assert [os.stat(path).st_ino for path in sealed.files] == before


def test_what_sha256sum_wrote_stays(guide: Path) -> None:
    text = sums(guide.parent, "guide.pth", options=("--tag",))
    Path(f"{guide}.sha256").write_bytes(text)
    assert seal(guide).refused is None
    assert Path(f"{guide}.sha256").read_bytes() == text


def test_another_manifest_is_replaced_by_force_alone(guide: Path) -> None:
    manifest = Path(f"{guide}.sha256")
    manifest.write_text(f"{ZERO}  guide.pth\n")
    assert seal(guide) == (False, (), "it is not valid", False)
    assert manifest.read_text().startswith(ZERO)
    sealed = seal(guide, "--force")
    assert (sealed.is_valid, sealed.refused) == (True, None)
    assert sha256sum_accepts(manifest)


def test_a_manifest_that_lists_more_is_told_by_the_name(guide: Path) -> None:
    (guide.parent / "notes").write_bytes(b"notes")
    manifest = Path(f"{guide}.sha256")
    manifest.write_bytes(sums(guide.parent, "guide.pth", "notes"))
    before = manifest.read_bytes()
    refused = "guide.pth.sha256 already exists and differs for notes; --force replaces it"
    assert seal(guide) == (True, (), refused, False)
    assert manifest.read_bytes() == before
    assert not Path(f"{guide}.digests.json").exists()


def test_nothing_is_written_for_what_is_damaged(guide: Path) -> None:
    flip(guide, guide.read_bytes().index(b"data/0") + 128)
    assert seal(guide, "--force") == (False, (), "it is not valid", False)
    assert os.listdir(guide.parent) == ["guide.pth"]


def test_what_changes_while_it_is_read_is_refused(guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(*data: Any, **options: Any) -> Any:
        os.utime(guide, ns=(1, 1))
        return sha256(*data, **options)

    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", meanwhile)
    assert seal(guide) == (True, (), "it changed while it was read", False)
    assert os.listdir(guide.parent) == ["guide.pth"]


CALLS = ("replace", "fsync", "write")


def whole(guide: Path) -> dict[str, bytes]:
    """Return what both files hold once they are written, by their names."""
    copy = guide.parent.parent / "whole"
    copy.mkdir()
    sealed = seal(Path(shutil.copy(guide, copy)))
    return {os.path.basename(path): Path(path).read_bytes() for path in sealed.files}


def test_a_full_disk_leaves_each_file_whole_or_absent(guide: Path) -> None:
    expected = whole(guide)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for number in range(1, 9):
        with pytest.MonkeyPatch.context() as patch:
            hit_call(number, full, CALLS, patch.setattr)
            answer = run_redirected("verify", guide, "--write-manifest")
        assert (answer.status, answer.out) == (2, f"✓ valid    {guide}  pytorch  4.0 kB  8 tensors\n")
        assert answer.err.startswith(f"ckpttool: error: {guide}: no manifest written: ")
        assert answer.err.endswith("no space left on device\n")
        left = {name: (guide.parent / name).read_bytes() for name in os.listdir(guide.parent)}
        assert set(left) <= {"guide.pth", *expected}
        assert {name: expected[name] for name in left if name in expected} == {
            name: data for name, data in left.items() if name in expected
        }
        for name in expected:
            (guide.parent / name).unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        made = hit_call(0, full, CALLS, patch.setattr)
        seal(guide)
    assert made() == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a POSIX system")
@pytest.mark.parametrize("number", range(1, 9))
def test_a_kill_leaves_each_file_whole_or_absent(guide: Path, number: int) -> None:
    expected = whole(guide)
    assert is_killed_at(number, lambda: seal(guide), CALLS)
    for name, data in expected.items():
        path = guide.parent / name
        assert not path.exists() or path.read_bytes() == data
    assert verify(guide).is_valid
    assert only_checkpoint(guide.parent).path == str(guide)
    assert seal(guide).refused is None
    assert {name: (guide.parent / name).read_bytes() for name in expected} == expected


# Checking -------------------------------------------------------------------------------------------


def test_no_manifest_no_check(guide: Path) -> None:
    assert [check.name for check in verify(guide).checks] == ["structure", "checksum", "values", "safety"]
    only = verify(guide, only=("manifest",)).checks[-1]
    assert only == Check("manifest", Status.SKIPPED, "no manifest next to it")


def test_a_flipped_byte_where_the_format_has_no_checksum(sharded: Path) -> None:
    seal(sharded)
    shard = next(iter(sorted(sharded.parent.glob("model-*.safetensors"))))
    flip(shard, shard.stat().st_size - 1)
    assert verify(sharded, only=("structure", "checksum", "values")).is_valid
    told = found(sharded)
    assert told[0] == ("manifest-mismatch", shard.name)
    assert len(told) == 2
    assert told[1][0] == "manifest-mismatch"
    expected = json.loads(sharded.read_text())["weight_map"]
    assert expected[told[1][1]] == shard.name


def test_another_save_under_the_same_name(guide: Path, files: Path) -> None:
    seal(guide)
    shutil.copy(files / "series" / "model_epoch_1.pth", guide)
    messages = [one.message for one in verify(guide).findings]
    assert "instead of" in messages[0] and "bytes" in messages[0]
    assert len(messages) > 1


def test_a_file_that_is_gone(trainer: Path) -> None:
    seal(trainer)
    (trainer / "scheduler.pt").unlink()
    assert ("manifest-missing-file", "checkpoint-4/scheduler.pt") in found(trainer)
    assert not verify(trainer).is_valid


def test_a_file_that_is_not_listed_is_a_warning(trainer: Path) -> None:
    seal(trainer)
    (trainer / "extra.json").write_text("{}")
    assert found(trainer) == [("manifest-unlisted-file", "extra.json")]
    assert verify(trainer).is_valid
    assert not verify(trainer, strict=True).is_valid


def test_one_list_for_a_whole_directory(guide: Path) -> None:
    (guide.parent / "other").write_bytes(b"other")
    for name in ("SHA256SUMS", "sha256sums.txt"):
        listing = guide.parent / name
        listing.write_bytes(sums(guide.parent, "other", "guide.pth", options=("--binary",)))
        (guide.parent / "other").write_bytes(b"changed, and no business of ours")
        assert manifest_check(guide) == Check("manifest", Status.PASSED, "1 file")
        flip(guide, 100)
        assert ("manifest-mismatch", "guide.pth") in found(guide, only=("manifest",))
        flip(guide, 100)
        listing.write_bytes(sums(guide.parent, "other"))
        assert [check.name for check in verify(guide).checks][-1] == "safety"
        listing.unlink()


def test_lists_beside_each_shard(sharded: Path) -> None:
    for shard in sharded.parent.glob("model-*.safetensors"):
        Path(f"{shard}.sha256").write_bytes(sums(shard.parent, shard.name))
    assert found(sharded) == [("manifest-unlisted-file", sharded.name)]
    assert manifest_check(sharded).status is Status.PARTIAL


def test_digests_alone_are_compared_as_well(guide: Path) -> None:
    sealed = seal(guide)
    os.unlink(sealed.files[0])
    assert manifest_check(guide) == Check("manifest", Status.PASSED, "8 tensors")
    document = json.loads(Path(sealed.files[1]).read_text())
    name = next(iter(document["tensors"]))
    document["tensors"][name]["sha256"] = ZERO
    Path(sealed.files[1]).write_text(json.dumps(document))
    assert found(guide) == [("manifest-mismatch", name)]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": "ckpttool.digests/2"}', '{"schema": "ckpttool.digests/1"}', "[" * 9999],
)
def test_digests_that_are_none(guide: Path, text: str) -> None:
    seal(guide)
    Path(f"{guide}.digests.json").write_text(text)
    assert found(guide) == [("manifest-malformed", "guide.pth.digests.json")]


def test_every_flipped_byte_of_the_digests_is_bearable(guide: Path) -> None:
    sealed = seal(guide)
    os.unlink(sealed.files[0])
    path, data = Path(sealed.files[1]), Path(sealed.files[1]).read_bytes()
    for at in range(0, len(data), 23):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        verify(guide, only=("manifest",))
        path.write_bytes(data[:at])
        assert found(guide, only=("manifest",)) == [("manifest-malformed", path.name)]


def test_a_manifest_never_leads_out_of_its_directory(guide: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (guide.parent / "link").symlink_to(secret)
    digest = hashlib.sha256(b"secret").hexdigest()
    text = sums(guide.parent, "guide.pth") + f"{digest}  link\n{digest}  ../secret\n".encode()
    Path(f"{guide}.sha256").write_bytes(text)
    told = found(guide)
    assert told == [("manifest-malformed", "guide.pth.sha256:3"), ("manifest-malformed", "link")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_a_manifest_does_not_block(guide: Path) -> None:
    os.mkfifo(guide.parent / "pipe")
    Path(f"{guide}.sha256").write_bytes(sums(guide.parent, "guide.pth") + f"{ZERO}  pipe\n".encode())
    (finding,) = verify(guide).findings
    assert (finding.code, finding.where, finding.message) == ("access-denied", "pipe", "not a regular file")


def test_what_cannot_be_opened_says_that_the_manifest_was_not_looked_at(guide: Path) -> None:
    seal(guide)
    guide.write_bytes(guide.read_bytes()[:100])
    assert manifest_check(guide) == Check("manifest", Status.SKIPPED, "it is truncated")


# What belongs to a checkpoint -----------------------------------------------------------------------


def test_manifests_are_parts_of_their_checkpoints_and_none_themselves(
    guide: Path, trainer: Path, tmp_path: Path
) -> None:
    for path in (guide, trainer):
        seal(path)
    units = {os.path.basename(unit.path): unit.members for unit in checkpoints_in(tmp_path)}
    assert units == {
        "guide.pth": ("guide.pth", "guide.pth.sha256", "guide.pth.digests.json"),
        "checkpoint-4": ("checkpoint-4", "checkpoint-4.sha256", "checkpoint-4.digests.json"),
    }


def test_shards_without_an_index_have_their_manifests_too(sharded: Path) -> None:
    seal(sharded)
    sharded.unlink()
    unit = only_checkpoint(sharded.parent, exclude=["*.txt", "*.expected.json"])
    assert {f"{sharded.name}.sha256", f"{sharded.name}.digests.json"} < set(unit.members)
    codes = {one.code for one in verify(unit).findings}
    assert codes == {"index-missing", "manifest-missing-file"}


FOLDERS = (
    "deepspeed",
    "fluid",
    "keras",
    "paddle",
    "pickle",
    "safetensors",
    "savedmodel",
    "tensorflow",
    "torch-dcp",
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_kind_of_checkpoint_is_sealed_and_stays_what_it_is(
    folder: str, files: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(files / folder, tmp_path / folder))
    before = {unit.path: unit.format for unit in checkpoints_in(root)}
    sealed = {path: seal(path) for path in before}
    valid = {path: one.files[0] for path, one in sealed.items() if one.files}
    assert valid
    assert {unit.path: unit.format for unit in checkpoints_in(root)} == before
    for unit in checkpoints_in(root):
        if unit.path in valid:
            verdict = verify(unit)
            assert [check.status for check in verdict.checks if check.name == "manifest"] == [Status.PASSED]
            assert not [one for one in verdict.findings if one.code.startswith("manifest")]
            assert sha256sum_accepts(Path(valid[unit.path]))


def test_fluid_has_it_inside_where_its_loader_does_not_stumble(files: Path, tmp_path: Path) -> None:
    source = files / "fluid" / "generation-b" / "checkpoint_4"
    path = Path(shutil.copytree(source, tmp_path / "run" / "checkpoint_4"))
    sealed = seal(path)
    assert sealed.files[0] == f"{path}/.checkpoint_4.sha256"
    assert os.listdir(path.parent) == ["checkpoint_4"]
    flip(path / "__model__" / "fc_1.w_0", -1)
    assert ("manifest-mismatch", "__model__/fc_1.w_0") in found(path)
