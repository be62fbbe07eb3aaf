"""``verify --part`` and ``--merge``: a job array comes to what one process comes to, or to an error."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Run
from tests.support.moments import before_verifying
from tests.support.runs import flip_value
from tests.support.thorough import sampled

PARTS = 3
Documents = Callable[..., list[Path]]


@pytest.fixture
def runs(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with checkpoints, one of them damaged; its parent is the working one."""
    directory = tmp_path / "runs"
    for number in range(1, 12):
        (directory / f"run_{number % 2}").mkdir(parents=True, exist_ok=True)
        shutil.copy(files / "pytorch" / "guide.pth", directory / f"run_{number % 2}" / f"m_{number}.pth")
    shutil.copytree(files / "safetensors" / "sharded", directory / "sharded")
    (directory / "torn.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    monkeypatch.chdir(tmp_path)
    return Path("runs")


@pytest.fixture
def documents(run: Run) -> Documents:
    """Return what verifies in parts and writes their documents."""

    def write(*arguments: object, parts: int = PARTS) -> list[Path]:
        paths = []
        for number in range(1, parts + 1):
            answer = run("verify", *arguments, "--json", "--part", f"{number}/{parts}")
            paths.append(Path(f"part-{number}.json"))
            paths[-1].write_text(answer.out)
        return paths

    return write


ARGUMENTS = (
    *("runs", "runs/run_1 runs --strict", "runs/run_1/m_3.pth missing.pth runs --quick"),
    "runs/run_1/m_3.pth runs/run_1/m_3.pth",
)


@pytest.mark.parametrize(("arguments", "parts"), sampled(itertools.product(ARGUMENTS, (2, 40, 5, 1)), 4))
def test_all_parts_make_the_document_of_one_run(
    run: Run, runs: Path, documents: Documents, arguments: str, parts: int
) -> None:
    given = arguments.split()
    alone = run("verify", *given, "--json")
    merged = run("verify", "--merge", *reversed(documents(*given, parts=parts)), "--json")
    assert json.loads(merged.out) == json.loads(alone.out)
    assert (merged.out, merged.status) == (alone.out, alone.status)


def test_text_and_reports_are_those_of_one_run(run: Run, runs: Path, documents: Documents) -> None:
    flip_value(runs / "run_1" / "m_3.pth")
    alone = run("verify", runs, "--sarif", "alone.sarif", "--summary", "alone.md")
    parts = documents(runs)
    shutil.rmtree(runs)  # what is below these paths here is nobody's business
    merged = run("verify", "--merge", *parts, "--sarif", "all.sarif", "--summary", "all.md")
    assert merged == alone and "ckpttool salvage runs/run_1/m_3.pth DST: 1 of 2 weights saved" in merged.out
    assert Path("all.sarif").read_bytes() == Path("alone.sarif").read_bytes()
    assert Path("all.md").read_bytes() == Path("alone.md").read_bytes()


def test_manifests_of_all_parts_are_told(run: Run, runs: Path, documents: Documents) -> None:
    merged = run("verify", "--merge", *documents(runs, "--write-manifest"), "--json")
    told = json.loads(merged.out)["checkpoints"]
    assert [row["manifest"]["written"] for row in told] == [row["verdict"] == "valid" for row in told]
    assert merged.status == 1


def test_a_part_says_which_it_is(run: Run, runs: Path, documents: Documents) -> None:
    first, *_ = documents(runs)
    document = json.loads(first.read_text())
    assert (document["part"], document["of"], document["found"]) == (1, PARTS, 13)
    text = run("verify", runs, "--part", f"1/{PARTS}").out
    assert text.splitlines()[-1].startswith(
        f"part 1 of {PARTS}: {len(document['checkpoints'])} checkpoints: "
    )


def test_a_part_with_nothing_to_do(run: Run, runs: Path) -> None:
    status, out, err = run("verify", runs / "run_0" / "m_2.pth", "--part", "2/2")
    assert (status, out, err) == (0, "part 2 of 2: 0 checkpoints\n", "")


# Lists ----------------------------------------------------------------------------------------------


@pytest.fixture
def lists(run: Run) -> Documents:
    """Return what lists in parts and writes their documents."""

    def write(*arguments: object, parts: int = PARTS) -> list[Path]:
        paths = []
        Path("report").mkdir(exist_ok=True)  # beside checkpoints, they would be notes that name some
        for number in range(1, parts + 1):
            paths.append(Path(f"report/list-{number}.json"))
            paths[-1].write_text(run("list", *arguments, "--json", "--part", f"{number}/{parts}").out)
        return paths

    return write


LISTS = ("runs", "runs --verify full", "runs/run_1 runs")


@pytest.mark.parametrize(("arguments", "parts"), sampled(itertools.product(LISTS, (3, 1, 30)), 3))
def test_all_parts_of_a_list_make_the_document_of_one_run(
    run: Run, runs: Path, lists: Documents, arguments: str, parts: int
) -> None:
    given = arguments.split()
    flip_value(runs / "run_1" / "m_11.pth")  # the newest, as long as nobody reads it
    alone = run("list", *given, "--json")
    documents = lists(*given, parts=parts)
    read = [row for path in documents for row in json.loads(path.read_text())["checkpoints"]]
    assert len(read) == len(json.loads(alone.out)["checkpoints"])
    merged = run("verify", "--merge", *reversed(documents), "--json")
    assert (merged.status, merged.out) == (alone.status, alone.out)
    assert set(merged.err.splitlines()) == set(alone.err.splitlines())


def test_lists_that_do_not_make_a_whole(run: Run, runs: Path, lists: Documents, documents: Documents) -> None:
    paths = lists(runs)
    refused(run, paths[1:], "1 part of 3 missing: 1")
    refused(run, [documents(runs)[0], *paths[1:]], "list-2.json: not from the same run as part-1.json")
    changed(paths[0], lambda document: document["checkpoints"].pop())
    refused(run, paths, "the parts list 12 of 13 checkpoints")
    paths = lists(runs)
    row = json.loads(paths[0].read_text())["checkpoints"][0]
    changed(paths[1], lambda document: document["checkpoints"].append(row))
    refused(run, paths, f"list-2.json: {row['path']} and {row['path']} have the same position")
    paths = lists(runs)
    changed(paths[2], lambda document: document["checkpoints"][0].pop("fault"))
    refused(run, paths, "list-3.json: an entry is malformed")
    paths = lists(runs)
    changed(paths[2], lambda document: document["series"].pop())
    refused(run, paths, "list-3.json: its series differ from those of report/list-1.json")


def test_lists_are_merged_to_a_document(run: Run, runs: Path, lists: Documents) -> None:
    status, out, err = run("verify", "--merge", *lists(runs))
    assert (status, out) == (2, "")
    assert err == "ckpttool: error: --merge of list documents needs --json, and writes no reports\n"


@pytest.mark.parametrize("more", [(), ("--json", "--sort", "size"), ("--json", "--keep", "3")], ids=" ".join)
def test_a_part_of_a_list_is_a_document_as_it_comes(run: Run, runs: Path, more: tuple[str, ...]) -> None:
    status, out, err = run("list", runs, "--part", "1/2", *more)
    assert (status, out, "--part needs --json" in err) == (2, "", True)


# Parts that don't make a whole ----------------------------------------------------------------------


def refused(run: Run, paths: list[Path], told: str) -> None:
    status, out, err = run("verify", "--merge", *paths, "--json")
    assert (status, out) == (2, "")
    assert told in err


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_part_is_missing(run: Run, runs: Path, documents: Documents) -> None:
    first, *others = documents(runs)
    refused(run, others, "1 part of 3 missing: 1")
    refused(run, [first], "2 parts of 3 missing: 2, 3")


def test_a_part_is_there_twice(run: Run, runs: Path, documents: Documents) -> None:
    first, second, third = documents(runs)
    refused(run, [first, second, second, third], "part-2.json: duplicate part 2 of 3 (also in part-2.json)")


def test_a_part_has_not_ended(run: Run, runs: Path, documents: Documents) -> None:
    paths = documents(runs)
    text = paths[1].read_text()
    paths[1].write_text("")
    refused(run, paths, "part-2.json: an empty file: this part has not finished")
    paths[1].write_text(text[: len(text) // 2])
    refused(run, paths, "part-2.json: the document is not valid JSON")


def test_parts_of_other_runs(run: Run, runs: Path, documents: Documents) -> None:
    first, *others = documents(runs)
    first.write_text(run("verify", runs, "--json", "--quick", "--part", "1/3").out)
    refused(run, [first, *others], "not from the same run as part-1.json")
    shutil.copy(runs / "run_0" / "m_2.pth", runs / "new.pth")
    first.write_text(run("verify", runs, "--json", "--part", "1/3").out)
    refused(run, [first, *others], "not from the same run as part-1.json: ")
    first.write_text(run("verify", runs, "--json", "--part", "1/4").out)
    refused(run, [first, *others], "part-2.json: part 2 of 3, but part-1.json is part 1 of 4")


def test_what_is_no_part(run: Run, runs: Path, documents: Documents) -> None:
    paths = documents(runs)
    text = paths[0].read_text()
    paths[0].write_text(run("verify", runs, "--json").out)
    refused(run, paths, "part-1.json: the document of a whole run (a document of --part --json)")
    paths[0].write_text(run("inspect", runs / "run_0" / "m_2.pth", "--json").out)
    refused(run, paths, "part-1.json: an unknown document")
    paths[0].write_text(text)
    changed(paths[0], lambda document: document["checkpoints"][0].pop("checks"))
    refused(run, paths, "part-1.json: an entry is malformed")
    refused(run, [Path("none.json")], "none.json: no such file")


def test_a_verdict_that_its_checks_do_not_give(run: Run, runs: Path, documents: Documents) -> None:
    paths = documents(runs)
    changed(paths[0], lambda document: document["checkpoints"][0]["checks"][1].update(status="failed"))
    refused(run, paths, "part-1.json: an entry is malformed")


def test_a_part_that_lost_a_verdict(run: Run, runs: Path, documents: Documents) -> None:
    paths = documents(runs)
    changed(paths[0], lambda document: document["checkpoints"].pop())
    refused(run, paths, "the parts cover 12 of 13 checkpoints")


def test_what_is_removed_meanwhile_is_no_gap(
    run: Run, runs: Path, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        before_verifying(patch, lambda unit: (runs / "run_1" / "m_1.pth").unlink(missing_ok=True))
        first = run("verify", runs, "--json", "--part", "1/1")
    assert "m_1.pth: removed or renamed in the meantime" in first.err
    Path("part.json").write_text(first.out)
    assert run("verify", "--merge", "part.json", "--json").out == run("verify", runs, "--json").out


def test_a_checkpoint_in_two_parts(run: Run, runs: Path, documents: Documents) -> None:
    paths = documents(runs)
    row = json.loads(paths[0].read_text())["checkpoints"][0]
    changed(paths[1], lambda document: document["checkpoints"].append(row))
    refused(run, paths, f"part-2.json: {row['path']} is also in part-1.json")


@pytest.mark.parametrize("more", [("--quick",), ("--part", "1/2"), ("--jobs", "2"), ("--exclude", "x")])
def test_merging_takes_documents_alone(run: Run, more: tuple[str, ...]) -> None:
    status, _, err = run("verify", "--merge", "a.json", *more)
    assert (status, "--merge takes JSON documents of --part" in err) == (2, True)
