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

from tests.support.moments import before_scanning, before_verifying, fail_reading, lack_h5py

KEYS = ["path", "format", "variant", "verdict", "safety", "checks", "findings"]


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


def test_text_is_one_line_where_all_is_well(run, guide: Path) -> None:
    status, out, err = run("verify", guide)
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    assert out == f"✓ valid    {guide}  pytorch  4.0 kB  8 tensors\n"


def test_json_has_the_keys_of_the_contract(run, guide: Path) -> None:
    status, out, err = run("verify", "--json", guide)
    assert (status, err) == (0, "")
    assert out.startswith(
        '{"schema": "ckpttool.verify/1", "verdict": "valid", "passed": true, "checkpoints": ['
    )
    assert out.count("\n") == 1
    (told,) = json.loads(out)["checkpoints"]
    assert [key for key in told if key in KEYS] == KEYS
    assert (told["path"], told["verdict"], told["safety"]) == (str(guide), "valid", "safe")
    names = [check["name"] for check in told["checks"]]
    assert names[:4] == ["structure", "checksum", "values", "safety"]
    assert set(statuses(told).values()) == {"passed"}
    assert told["checks"][1]["detail"] == "14 records"
    assert told["findings"] == []


def test_flipped_bit_is_found_and_named(run, flipped: Path) -> None:
    status, out, err = run("verify", flipped)
    assert (status, err) == (1, "")
    assert out.startswith(f"✗ INVALID  {flipped}  pytorch  4.0 kB  checksum\n")
    assert "error checksum-mismatch [guide/data/0, tensor model_state_dict.fc.weight]: CRC-32 is " in out
    assert "→ use another copy; the place names the record (ckpttool explain checksum-mismatch)\n" in out
    told = only(run("verify", "--json", flipped))
    assert (told["verdict"], told["safety"]) == ("invalid", "safe")
    assert statuses(told)["checksum"] == "failed"
    (finding,) = told["findings"]
    assert (finding["code"], finding["severity"], finding["where"]) == (
        "checksum-mismatch",
        "error",
        "guide/data/0",
    )
    assert finding["tensors"] == ["model_state_dict.fc.weight"]


def test_nan_is_an_error_and_infinity_a_warning(run, files: Path) -> None:
    answer = run("verify", "--json", files / "pytorch" / "nan.pth")
    told = only(answer)
    assert (answer.status, answer.err, told["verdict"]) == (1, "", "invalid")
    severities = {(finding["code"], finding["severity"]) for finding in told["findings"]}
    assert severities == {("nan", "error"), ("infinity", "warning")}
    assert statuses(told) == {
        "structure": "passed",
        "checksum": "passed",
        "values": "failed",
        "safety": "passed",
    }


def test_unsafe_is_not_invalid(run, files: Path) -> None:
    status, out, err = run("verify", files / "hostile" / "call_global.pth")
    assert (status, err) == (1, "")
    assert out.startswith("! UNSAFE   ")
    assert "error unsafe-import" in out and "os.system" in out


def test_without_checksums_the_check_is_skipped_and_says_so(run, files: Path) -> None:
    told = only(run("verify", "--json", files / "pytorch" / "nocrc.pth"))
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["checksum"]["status"] == "skipped"
    assert "without checksums" in checks["checksum"]["detail"]
    status, out, err = run("verify", files / "pytorch" / "nocrc.pth")
    assert (status, err) == (0, "") and ", no checksums\n" in out


def test_safetensors_carry_no_checksums(run, files: Path) -> None:
    status, out, err = run("verify", files / "safetensors" / "order.safetensors")
    assert (status, err) == (0, "") and ", no checksums\n" in out


def test_values_that_were_never_written(run, files: Path) -> None:
    status, out, err = run("verify", files / "pytorch" / "skipdata.pth")
    assert (status, err) == (1, "") and "values-not-written" in out


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


@pytest.mark.parametrize(
    ("names", "run_checks"),
    [
        ("checksum", {"checksum"}),
        ("structure,safety", {"structure", "safety"}),
        (" values , checksum", {"values", "checksum"}),
    ],
)
def test_only_runs_the_named_checks(run, guide: Path, names: str, run_checks: set[str]) -> None:
    answer = run("verify", "--json", "--only", names, guide)
    assert (answer.status, answer.err) == (0, "")
    passed = {name for name, status in statuses(only(answer)).items() if status == "passed"}
    assert passed == run_checks


@pytest.mark.parametrize(
    ("names", "status"), [("structure", 0), ("values", 0), ("checksum", 1), ("checksum,safety", 1)]
)
def test_only_the_named_checks_count(run, flipped: Path, names: str, status: int) -> None:
    assert run("verify", "--only", names, flipped).status == status


def test_only_without_safety_says_nothing_of_safety(run, guide: Path) -> None:
    answer = run("verify", "--json", "--only", "structure", guide)
    assert only(answer)["safety"] == "unknown"


@pytest.mark.parametrize("names", ["no-such-check", "", "structure,", "checksum;values"])
def test_only_of_an_unknown_check(run, guide: Path, names: str) -> None:
    status, out, err = run("verify", "--only", names, guide)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("ckpttool: error: no check ")
    assert "structure, checksum, values, safety" in err


def test_strict_lets_warnings_fail(run, infinite: Path) -> None:
    status, out, err = run("verify", infinite)
    assert (status, err) == (0, "") and "warning infinity [mask]: 2 of 3 values are infinite" in out
    status, out, err = run("verify", "--strict", infinite)
    assert (status, err) == (1, "") and out.startswith("✗ INVALID")


def test_what_nobody_knows_is_not_said_to_be_safe(run, files: Path) -> None:
    told = run("verify", files / "hostile" / "class_unknown.pth", "-v").out.splitlines()
    assert told[0].startswith("? unknown  ")
    assert "    safety     passed   nothing known to be unsafe; 1 warning" in told


def test_strict_takes_no_unknown_class(run, files: Path) -> None:
    path = files / "hostile" / "class_unknown.pth"
    assert run("verify", path).status == 0
    answer = run("verify", "--strict", "--json", path)
    assert (answer.status, answer.err) == (1, "")
    assert statuses(only(answer))["safety"] == "failed"


def test_strict_does_not_fail_for_what_was_not_asked(run, guide: Path) -> None:
    """Safety is unknown because nobody asked for it; that is no warning."""
    status, _, err = run("verify", "--strict", "--only", "structure", guide)
    assert (status, err) == (0, "")


def test_options_that_leave_no_check_are_misuse(run, flipped: Path) -> None:
    """Nothing looked at is not valid."""
    status, out, err = run("verify", "--quick", "--only", "checksum", flipped)
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_quiet_prints_problems_alone(run, guide: Path, flipped: Path) -> None:
    assert run("verify", "-q", guide) == (0, "", "")
    status, out, err = run("verify", "--quiet", guide, flipped)
    assert (status, err) == (1, "") and out.startswith(f"✗ INVALID  {flipped}  ")
    assert str(guide) not in out


def test_strict_says_why_it_failed(run, files: Path) -> None:
    path = files / "hostile" / "class_unknown.pth"
    status, out, _ = run("verify", "--strict", path)
    assert (status, out.splitlines()[-1]) == (1, "failed (--strict): 1 checkpoint of unknown safety")
    assert json.loads(run("verify", "--strict", "--json", path).out)["passed"] is False
    assert json.loads(run("verify", "--json", path).out)["passed"] is True


def test_quiet_prints_errors_all_the_same(run, tmp_path: Path) -> None:
    path = tmp_path / "missing.pth"
    assert run("verify", "-q", path) == (2, "", f"ckpttool: error: {path}: no such file or directory\n")


def test_verbose_shows_every_check(run, guide: Path) -> None:
    status, out, err = run("verify", "-v", guide)
    assert (status, err) == (0, "")
    lines = [line.split()[:2] for line in out.splitlines()[1:]]
    assert lines == [[name, "passed"] for name in ("structure", "checksum", "values", "safety")]


@pytest.mark.parametrize("name", ["views.pth", "nan.pth", "dtypes.pth", "bigendian.pth"])
def test_number_of_threads_makes_no_difference(run, files: Path, name: str) -> None:
    path = files / "pytorch" / name
    assert run("verify", "--json", "-j1", path) == run("verify", "--json", "--jobs", 4, path)


@pytest.mark.parametrize("jobs", ["0", "-1", "many", "1025", "1" + "0" * 20])
def test_number_of_threads_must_be_one(run, guide: Path, jobs: str) -> None:
    status, out, err = run("verify", "--jobs", jobs, guide)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("ckpttool: error: ") and "--jobs" in err


# Several paths, directories -------------------------------------------------------------------------


def test_highest_status_wins(run, guide: Path, flipped: Path, tmp_path: Path) -> None:
    assert run("verify", guide, guide).status == 0
    assert run("verify", guide, flipped).status == 1
    assert run("verify", flipped, guide).status == 1
    assert run("verify", tmp_path / "missing.pth", flipped, guide).status == 2


def test_a_path_that_is_not_there_hides_no_other(run, guide: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pth"
    status, out, err = run("verify", missing, guide)
    assert (status, err) == (2, f"ckpttool: error: {missing}: no such file or directory\n")
    assert out.startswith(f"✓ valid    {guide}  ")
    document = json.loads(run("verify", "--json", missing, guide).out)
    assert [one["path"] for one in document["checkpoints"]] == [str(guide)]
    assert document["errors"] == [{"path": str(missing), "message": "no such file or directory"}]
    assert document["passed"] is False
    assert run("verify", missing).out == ""


def test_directory_stands_for_all_in_it(run, files: Path) -> None:
    status, out, err = run("verify", files / "series")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "10 checkpoints: 10 valid"
    assert len(out.splitlines()) == 11


def test_directory_with_one_damaged(run, files: Path, flipped: Path) -> None:
    shutil.copytree(files / "series", flipped.parent / "more" / "runs")
    status, out, err = run("verify", flipped.parent)
    assert (status, err) == (1, "")
    assert out.splitlines()[-1] == "11 checkpoints: 10 valid, 1 invalid"


def test_json_of_a_directory_is_one_document(run, files: Path, flipped: Path) -> None:
    shutil.copy(files / "series" / "model_epoch_1.pth", flipped.parent)
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


def test_directory_without_checkpoints(run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no checkpoint")
    status, out, err = run("verify", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ckpttool: error: {tmp_path}: no checkpoint")


def test_what_is_passed_over_by_its_content_is_said(run, guide: Path, tmp_path: Path) -> None:
    shutil.copy(guide, tmp_path / "guide.pth")
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"any data")
    answer = run("verify", tmp_path)
    why = "not verified, safety unknown: no format recognises the content"
    said = f"ckpttool: warning: {tmp_path / 'a.bin'} and 1 more: {why}\n"
    assert (answer.status, answer.err) == (0, said)
    assert answer.out.endswith("\n1 checkpoint: 1 valid, 2 not read\n")
    each = "".join(f"ckpttool: warning: {tmp_path / name}: {why}\n" for name in ("a.bin", "b.bin"))
    assert run("verify", "-v", tmp_path).err == each
    assert run("list", tmp_path).err == said.replace("verified, safety unknown", "listed")
    assert run("list", "-v", tmp_path).err == each.replace("verified, safety unknown", "listed")
    assert run("verify", "-q", tmp_path).err == ""
    strict = run("verify", "--strict", tmp_path)
    assert (strict.status, strict.err) == (1, said)
    assert strict.out.endswith("2 not read\nfailed (--strict): 2 models not read\n")
    assert 'errors="2"' in run("verify", "--strict", "--junit", "-", tmp_path).out
    (tmp_path / "guide.pth").unlink()
    alone = run("verify", tmp_path)
    assert (alone.status, alone.err.splitlines()[1:]) == (2, said.splitlines())


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


def test_empty_directory(run, tmp_path: Path) -> None:
    status, out, err = run("verify", "--json", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1)


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


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("empty.pth", b"", "unrecognised-content"),
        ("page.pth", b"<html>404</html>", "unrecognised-content"),
        ("packed.pth", b"\x1f\x8b\x08\x00 and so on", "unrecognised-content"),
        ("pointer.safetensors", b"version https://git-lfs.github.com/spec/v1\noid x\n", "lfs-pointer"),
    ],
)
def test_checkpoint_by_its_name_alone_is_invalid(
    run, tmp_path: Path, name: str, content: bytes, code: str
) -> None:
    (tmp_path / name).write_bytes(content)
    answer = run("verify", "--json", tmp_path / name)
    told = only(answer)
    assert (answer.status, answer.err, told["verdict"]) == (1, "", "invalid")
    assert told["safety"] == "unknown"
    assert [finding["code"] for finding in told["findings"]] == [code]
    assert statuses(told)["structure"] == "failed"


def test_truncated_file_is_invalid(run, guide: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.pth"
    path.write_bytes(guide.read_bytes()[:2000])
    status, out, err = run("verify", path)
    assert (status, err) == (1, "")
    assert out.startswith(f"✗ INVALID  {path}  pytorch") and "error truncated: 2,000 bytes" in out


def test_other_content_is_no_checkpoint(run, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    status, out, err = run("verify", "--json", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(
        f"ckpttool: error: {path}: not a checkpoint: it looks like text that starts with 'hello'"
    )


def test_no_such_file(run, tmp_path: Path) -> None:
    path = tmp_path / "missing.pth"
    assert run("verify", path) == (2, "", f"ckpttool: error: {path}: no such file or directory\n")


def test_broken_symlink(run, tmp_path: Path) -> None:
    link = tmp_path / "latest.pth"
    link.symlink_to("gone.pth")
    assert run("verify", link) == (
        2,
        "",
        f"ckpttool: error: {link}: a link to gone.pth, which does not exist\n",
    )


def test_no_permission(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ckpttool.io.source.os.open", refuse)
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

    monkeypatch.setattr("ckpttool.io.source.os.open", refuse)
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

    monkeypatch.setattr("ckpttool.io.source.os.open", refuse)
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


def test_nothing_that_was_asked_for_could_run(run, infinite: Path) -> None:
    status, out, err = run("verify", infinite, "--only", "checksum")
    assert (status, err) == (1, "")
    assert out.startswith("✗ NOT RUN")
    why = "checksum was skipped: safetensors files carry no checksums"
    assert f"error nothing-checked: no check that was asked for could finish ({why})\n" in out
    told = json.loads(run("verify", infinite, "--only", "checksum", "--json").out)
    assert (told["verdict"], told["checkpoints"][0]["findings"][0]["code"]) == ("invalid", "nothing-checked")
    assert run("verify", infinite, "--only", "checksum,values").status == 0


def test_what_is_damaged_has_its_size(run, guide: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.pth").write_bytes(guide.read_bytes()[:900])
    assert "cut.pth  pytorch  900 B" in run("verify", tmp_path / "cut.pth").out
    for name in ("ckpt-1.index", "ckpt-1.data-00000-of-00001"):
        (tmp_path / name).write_bytes(bytes(50))
    assert "tensorflow  100 B" in run("verify", tmp_path / "ckpt-1").out


def test_what_is_missing_is_not_called_without_checksums(run, files: Path, tmp_path: Path) -> None:
    run_directory = Path(shutil.copytree(files / "tensorflow" / "manager", tmp_path / "run"))
    prefix = sorted(run_directory.glob("*.index"))[0].with_suffix("")
    for shard in run_directory.glob(f"{prefix.name}.data-*"):
        shard.unlink()
    out = run("verify", "-v", prefix).out
    assert "checksum   skipped  what carries them is missing or can't be read" in out
    assert "values     skipped  what holds the values of " in out


def test_a_directory_is_told_in_the_order_of_names(run, files: Path, guide: Path, tmp_path: Path) -> None:
    shutil.copy(guide, tmp_path / "a.pth")
    for path in (files / "safetensors" / "sharded").iterdir():
        shutil.copy(path, tmp_path)
    told = json.loads(run("verify", tmp_path, "--json").out)["checkpoints"]
    assert [one["path"] for one in told] == sorted(one["path"] for one in told)
