"""``ckpttool verify``: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Run, refusals, transcript
from tests.support.golden import Golden
from tests.support.moments import before_scanning, before_verifying, fail_reading, lack_h5py


@pytest.fixture
def guide(files: Path) -> Path:
    return files / "pytorch" / "guide.pth"


@pytest.fixture
def flipped(guide: Path, tmp_path: Path) -> Path:
    """Return a checkpoint with one bit of a tensor's values flipped."""
    path = tmp_path / "flipped.pth"
    data = bytearray(guide.read_bytes())
    data[values_at(guide)] ^= 1
    path.write_bytes(data)
    return path


@pytest.fixture
def infinite(tmp_path: Path) -> Path:
    """Return a safetensors file that holds 1, infinity and minus infinity."""
    return safetensors(tmp_path / "mask.safetensors", struct.pack("<3f", 1, float("inf"), float("-inf")))


def safetensors(path: Path, data: bytes) -> Path:
    header = {"mask": {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def values_at(path: Path) -> int:
    """Return where the first value of a checkpoint lies, in bytes."""
    from ckpttool import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        extent = checkpoint.tensors[0].extent
    assert extent is not None
    return extent.offset


def only(answer) -> dict[str, Any]:
    (told,) = json.loads(answer.out)["checkpoints"]
    return told


def statuses(told: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in told["checks"]}


# The answer -----------------------------------------------------------------------------------------


def test_answers(run: Run, files: Path, guide: Path, flipped: Path, infinite: Path, golden: Golden) -> None:
    pytorch, hostile, unknown = files / "pytorch", files / "hostile", files / "hostile" / "class_unknown.pth"
    golden(
        transcript(
            run,
            (0, f"verify {guide}"),
            (0, f"verify -v {guide}"),
            (0, f"verify -q {guide}"),
            (1, f"verify {flipped}"),
            (1, f"verify --quiet {guide} {flipped}"),
            (1, f"verify {pytorch}/nan.pth"),
            (1, f"verify {hostile}/call_global.pth"),
            (0, f"verify {pytorch}/nocrc.pth"),
            (0, f"verify {files}/safetensors/order.safetensors"),
            (1, f"verify {pytorch}/skipdata.pth"),
            (0, f"verify {infinite}"),
            (1, f"verify --strict {infinite}"),
            (0, f"verify -v {unknown}"),
            (1, f"verify --strict {unknown}"),
            (0, f"verify {files}/series"),
            (1, f"verify {infinite} --only checksum"),
            (0, f"verify {infinite} --only checksum,values"),
        )
    )
    told = json.loads(run("verify", infinite, "--only", "checksum", "--json").out)
    assert (told["verdict"], told["checkpoints"][0]["findings"][0]["code"]) == ("invalid", "nothing-checked")


def test_documents(run: Run, files: Path, guide: Path, flipped: Path, golden: Golden) -> None:
    unknown = files / "hostile" / "class_unknown.pth"
    for status, path in ((0, guide), (1, flipped), (1, files / "pytorch" / "nan.pth"), (0, unknown)):
        answer = run("verify", "--json", path)
        assert (answer.status, answer.err, answer.out.count("\n")) == (status, "", 1)
        golden(json.dumps(json.loads(answer.out), indent=1))
    answer = run("verify", "--strict", "--json", unknown)
    assert (answer.status, answer.err) == (1, "")
    assert statuses(only(answer))["safety"] == "failed"
    assert json.loads(answer.out)["passed"] is False


def test_without_checksums_the_check_is_skipped_and_says_so(run: Run, files: Path) -> None:
    told = only(run("verify", "--json", files / "pytorch" / "nocrc.pth"))
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["checksum"]["status"] == "skipped"
    assert "without checksums" in checks["checksum"]["detail"]


# Options --------------------------------------------------------------------------------------------


def test_quick_reads_no_values(run, guide: Path, flipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("bytes were scanned")

    before_scanning(monkeypatch, refuse)
    answer = run("verify", "--quick", "--json", guide, flipped)
    assert (answer.status, answer.err) == (0, "")
    for told in json.loads(answer.out)["checkpoints"]:
        assert statuses(told) == {
            "structure": "passed",
            "checksum": "skipped",
            "values": "skipped",
            "safety": "passed",
        }


def test_only_runs_the_named_checks(run: Run, guide: Path, flipped: Path) -> None:
    for names, run_checks, status in (
        ("checksum", {"checksum"}, 1),
        ("structure,safety", {"structure", "safety"}, 0),
        (" values , checksum", {"values", "checksum"}, 1),
        ("structure", {"structure"}, 0),
        ("values", {"values"}, 0),
    ):
        answer = run("verify", "--json", "--only", names, guide)
        assert (answer.status, answer.err) == (0, "")
        passed = {name for name, status in statuses(only(answer)).items() if status == "passed"}
        assert passed == run_checks
        assert run("verify", "--only", names, flipped).status == status
    assert only(run("verify", "--json", "--only", "structure", guide))["safety"] == "unknown"


def test_usage(run: Run, guide: Path, golden: Golden) -> None:
    """Nothing looked at is not valid."""
    checks = ("no-such-check", "''", "structure,", "'checksum;values'")
    jobs = ("0", "-1", "many", "1025", "1" + "0" * 20)
    options = (*(f"--only {one}" for one in checks), *(f"--jobs {one}" for one in jobs))
    golden(refusals(run, *(f"verify {one} {guide}" for one in (*options, "--quick --only checksum"))))


def test_strict_does_not_fail_for_what_was_not_asked(run, guide: Path) -> None:
    """Safety is unknown because nobody asked for it; that is no warning."""
    status, _, err = run("verify", "--strict", "--only", "structure", guide)
    assert (status, err) == (0, "")


def test_number_of_threads_makes_no_difference(run: Run, files: Path) -> None:
    for name in ("views.pth", "nan.pth", "dtypes.pth", "bigendian.pth"):
        path = files / "pytorch" / name
        assert run("verify", "--json", "-j1", path) == run("verify", "--json", "--jobs", 4, path)


# Several paths, directories -------------------------------------------------------------------------


def test_highest_status_wins(run, guide: Path, flipped: Path, tmp_path: Path) -> None:
    assert run("verify", guide, guide).status == 0
    assert run("verify", guide, flipped).status == 1
    assert run("verify", flipped, guide).status == 1
    assert run("verify", tmp_path / "missing.pth", flipped, guide).status == 2


def test_what_is_no_checkpoint(run: Run, guide: Path, tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "notes").mkdir()
    for path in ("notes/notes.txt", "notes.txt"):
        (tmp_path / path).write_text("hello")
    (tmp_path / "latest.pth").symlink_to("gone.pth")
    places = [f"{tmp_path}/{name}" for name in ("missing.pth", "latest.pth", "notes.txt", "notes")]
    golden(refusals(run, *(f"verify {place}" for place in places), f"verify -q {places[0]}"))
    for place in places[2:]:
        status, out, err = run("verify", "--json", place)
        assert (status, out, err.count("\n")) == (2, "", 1)
    golden(transcript(run, (2, f"verify {places[0]} {guide}"), (2, f"verify --json {places[0]} {guide}")))


def test_directory_with_one_damaged(run: Run, files: Path, flipped: Path, golden: Golden) -> None:
    shutil.copy(files / "series" / "model_epoch_1.pth", flipped.parent)
    golden(transcript(run, (1, f"verify {flipped.parent}")))
    document = json.loads(run("verify", "--json", flipped.parent).out)
    assert document["verdict"] == "invalid"
    verdicts = {Path(told["path"]).name: told["verdict"] for told in document["checkpoints"]}
    assert verdicts == {"flipped.pth": "invalid", "model_epoch_1.pth": "valid"}


def test_exclude_and_max_depth(run, guide: Path, tmp_path: Path) -> None:
    for place in ("a.pth", "sub/b.pth", "sub/deep/c.pth"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(guide, tmp_path / place)

    def names(*options: object) -> list[str]:
        document = json.loads(run("verify", "--quick", "--json", *options, tmp_path).out)
        return sorted(Path(told["path"]).name for told in document["checkpoints"])

    assert names() == ["a.pth", "b.pth", "c.pth"]
    assert names("--max-depth", 0) == ["a.pth"]
    assert names("--max-depth", 1) == ["a.pth", "b.pth"]
    assert names("--exclude", "b.*") == ["a.pth", "c.pth"]
    assert names("--exclude", "sub") == ["a.pth"]
    assert names("--exclude", "a.*", "--exclude", "sub/deep/*") == ["b.pth"]


def test_what_is_passed_over_by_its_content_is_said(
    run: Run, guide: Path, tmp_path: Path, golden: Golden
) -> None:
    shutil.copy(guide, tmp_path / "guide.pth")
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"any data")
    verdicts = ((0, f"verify {tmp_path}"), (0, f"verify -v {tmp_path}"), (0, f"verify -q {tmp_path}"))
    golden(transcript(run, *verdicts, (1, f"verify --strict {tmp_path}")))
    golden(run("list", tmp_path).err + run("list", "-v", tmp_path).err)
    assert 'errors="2"' in run("verify", "--strict", "--junit", "-", tmp_path).out
    (tmp_path / "guide.pth").unlink()
    golden(transcript(run, (2, f"verify {tmp_path}")))


def test_a_file_of_two_formats_is_invalid_and_judged(run, tmp_path: Path) -> None:
    path = tmp_path / "both.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("config.json", "metadata.json"):
            archive.writestr(name, "{}")
        archive.writestr("archive/data.pkl", b"cposix\nsystem\n.")
    answer = run("verify", "--json", path)
    (verdict,) = json.loads(answer.out)["checkpoints"]
    assert (answer.status, verdict["verdict"], verdict["safety"]) == (1, "invalid", "unsafe")
    assert verdict["findings"][0]["code"] == "ambiguous-format"


def test_links_in_a_directory_are_not_checked_twice(run, guide: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(guide, tmp_path / "run" / "a.pth")
    (tmp_path / "latest.pth").symlink_to("run/a.pth")
    (tmp_path / "again").symlink_to("run", target_is_directory=True)
    (tmp_path / "dangling.pth").symlink_to("nowhere")
    answer = run("verify", "--json", tmp_path)
    assert (answer.status, answer.err) == (0, "")
    assert only(answer)["path"] == str(tmp_path / "run" / "a.pth")


# Damaged beyond opening, or nothing at all ----------------------------------------------------------


def test_checkpoint_by_its_name_alone_is_invalid(run: Run, tmp_path: Path) -> None:
    for name, content, code in (
        ("empty.pth", b"", "unrecognised-content"),
        ("page.pth", b"<html>404</html>", "unrecognised-content"),
        ("packed.pth", b"\x1f\x8b\x08\x00 and so on", "unrecognised-content"),
        ("pointer.safetensors", b"version https://git-lfs.github.com/spec/v1\noid x\n", "lfs-pointer"),
    ):
        (tmp_path / name).write_bytes(content)
        answer = run("verify", "--json", tmp_path / name)
        told = only(answer)
        assert (answer.status, answer.err, told["verdict"]) == (1, "", "invalid"), name
        assert told["safety"] == "unknown"
        assert [finding["code"] for finding in told["findings"]] == [code]
        assert statuses(told)["structure"] == "failed"


def test_what_is_damaged(run: Run, files: Path, guide: Path, tmp_path: Path, golden: Golden) -> None:
    """It has its size; of what is missing nobody says that it has no checksums."""
    (tmp_path / "cut.pth").write_bytes(guide.read_bytes()[:2000])
    for name in ("ckpt-1.index", "ckpt-1.data-00000-of-00001"):
        (tmp_path / name).write_bytes(bytes(50))
    run_directory = Path(shutil.copytree(files / "tensorflow" / "manager", tmp_path / "run"))
    prefix = sorted(run_directory.glob("*.index"))[0].with_suffix("")
    for shard in run_directory.glob(f"{prefix.name}.data-*"):
        shard.unlink()
    places = (f"{tmp_path}/cut.pth", f"{tmp_path}/ckpt-1", f"-v {prefix}")
    golden(transcript(run, *((1, f"verify {place}") for place in places)))


def test_no_permission(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ckpttool.storage.source.os.open", refuse)
    answer = run("verify", guide)
    monkeypatch.undo()
    assert answer == (2, "", f"ckpttool: error: {guide}: permission denied\n")


def test_no_permission_in_a_directory(
    run, guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be looked at is told, and is not passed over: the status is not 0."""
    for name in ("a.pth", "b.pth"):
        shutil.copy(guide, tmp_path / name)
    really_open = os.open

    def refuse(path, *args, **kwargs) -> int:
        if str(path).endswith("b.pth"):
            raise PermissionError(13, "Permission denied")
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr("ckpttool.storage.source.os.open", refuse)
    status, out, err = run("verify", "--json", tmp_path)
    monkeypatch.undo()
    assert (status, err) == (1, "")
    lost = json.loads(out)["checkpoints"][1]
    assert (lost["path"], lost["verdict"]) == (f"{tmp_path}/b.pth", "invalid")
    assert [finding["code"] for finding in lost["findings"]] == ["access-denied"]


def test_the_only_one_in_a_directory_can_not_be_read(
    run, guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a checkpoint that failed; only what was named itself could not be looked at."""
    shutil.copy(guide, tmp_path / "b.pth")

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ckpttool.storage.source.os.open", refuse)
    status, out, err = run("verify", tmp_path)
    monkeypatch.undo()
    assert (status, err) == (1, "")
    assert out.startswith(f"✗ INVALID  {tmp_path}/b.pth  ")
    assert "error access-denied: permission denied" in out


def test_one_that_needs_a_package_hides_no_other(
    run, guide: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(guide, tmp_path / "a.pth")
    shutil.copy(files / "hdf5" / "mixed.h5", tmp_path / "b.h5")
    lack_h5py(monkeypatch)
    status, out, err = run("verify", tmp_path)
    assert (status, err) == (1, "")
    assert out.startswith(f"✓ valid    {tmp_path}/a.pth") and "1 valid, 1 invalid" in out
    assert "error missing-package: HDF5 needs h5py (pip install" in out


def test_file_that_shrinks_while_it_is_read(
    run, guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shrinks.pth"
    shutil.copy(guide, path)
    before_scanning(monkeypatch, lambda: os.truncate(path, 1000))
    answer = run("verify", "--json", path)
    told = only(answer)
    assert (answer.status, answer.err, told["verdict"]) == (1, "", "invalid")
    assert "truncated" in {finding["code"] for finding in told["findings"]}


def test_file_that_vanishes_between_finding_and_opening(
    run, guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.pth", "b.pth"):
        shutil.copy(guide, tmp_path / name)
    before_verifying(monkeypatch, lambda unit: (tmp_path / "b.pth").unlink(missing_ok=True))
    status, out, err = run("verify", tmp_path)
    told = f"{tmp_path}/b.pth: removed or renamed in the meantime; not verified"
    assert (status, err) == (0, f"ckpttool: warning: {told}\n")
    assert "a.pth" in out and "b.pth" not in out


def test_disk_error_while_reading(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = OSError(5, "Input/output error")
    before_scanning(monkeypatch, lambda: fail_reading(monkeypatch, broken))
    answer = run("verify", "--json", guide)
    assert (answer.status, answer.err) == (1, "")
    assert "input/output error" in answer.out


# Harmlessness ---------------------------------------------------------------------------------------


def test_verify_changes_nothing(run, files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "series", tmp_path / "runs")
    before = {entry: entry.stat().st_mtime_ns for entry in tmp_path.rglob("*")}
    run("verify", tmp_path)
    run("inspect", tmp_path)
    assert {entry: entry.stat().st_mtime_ns for entry in tmp_path.rglob("*")} == before


def test_names_from_files_are_escaped(run, flipped: Path, files: Path, tmp_path: Path) -> None:
    path = tmp_path / "\x1b[2J\u202e.pth"
    flipped.rename(path)
    status, out, err = run("verify", path)
    assert (status, err) == (1, "")
    assert "\\x1b[2J\\u202e.pth" in out
    assert all(character.isprintable() or character == "\n" for character in out)
    answer = run("verify", "--json", path)
    assert only(answer)["path"] == str(path)
    assert all(character.isprintable() or character == "\n" for character in answer.out)


def test_a_directory_is_told_in_the_order_of_names(run, files: Path, guide: Path, tmp_path: Path) -> None:
    shutil.copy(guide, tmp_path / "a.pth")
    for path in (files / "safetensors" / "sharded").iterdir():
        shutil.copy(path, tmp_path)
    told = json.loads(run("verify", tmp_path, "--json").out)["checkpoints"]
    assert [one["path"] for one in told] == sorted(one["path"] for one in told)
