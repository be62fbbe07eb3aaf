"""``ckpttool prune`` where a configuration says what it does: when it is read, and several directories."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import Run, refusals, transcript
from tests.support.configs import trusted_config, write
from tests.support.golden import Golden
from tests.support.runs import make_run

pytestmark = pytest.mark.usefixtures("home")

EPOCHS = [1, 2, 3, 5, 9, 10]


@pytest.fixture
def project(files: Path, tmp_path: Path) -> Path:
    """Return the working directory, with two runs of six epochs."""
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, *EPOCHS)
    return tmp_path


def configure(text: str) -> None:
    write(Path("ckpttool.toml"), text)


def epochs(directory: str) -> list[int]:
    return sorted(int(path.stem.rpartition("_")[2]) for path in Path("runs", directory).glob("*.pth"))


def test_plain_prune_does_what_it_says(run: Run, project: Path, golden: Golden) -> None:
    configure("[retention]\npaths = ['runs/a', 'runs/b']\nkeep-last = 2\n")
    golden(transcript(run, (0, "prune")))
    assert (epochs("a"), epochs("b")) == ([9, 10], [9, 10])


def test_it_is_found_from_below(run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("[retention]\npaths = ['runs/a']\nkeep-last = 2\n")
    monkeypatch.chdir(project / "runs" / "b")
    status, out, _ = run("prune", "--dry-run")
    assert status == 0
    assert out.startswith("../../runs/a/model_epoch_*.pth\n")


def test_the_command_line_comes_last(run, project: Path) -> None:
    configure("[retention]\npaths = ['runs']\nkeep-last = 2\nexclude = ['*_1.pth']\n")
    status, out, _ = run("prune", "-r", "--check", "--exclude", "*_2.pth", "--json")
    (a, b) = json.loads(out)["groups"]
    assert (status, len(a["keep"]), len(a["remove"]), len(b["remove"])) == (1, 2, 2, 2)
    assert (epochs("a"), epochs("b")) == (EPOCHS, EPOCHS)


def test_with_a_directory_it_is_not_read(run: Run, project: Path, golden: Golden) -> None:
    configure("this is no TOML")
    golden(refusals(run, "prune runs/a", "prune runs/a --yes"))
    for yes in ([], ["--yes"]):
        assert run("prune", "runs/a", *yes, "--keep", "5").status == 0


def test_with_a_rule_it_is_not_read(run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("this is no TOML")
    monkeypatch.chdir(project / "runs" / "a")
    assert run("prune", "--keep", "5").status == 0
    assert epochs("../runs/a") == []  # nothing lies in runs/a/runs/a
    assert len(list(Path().glob("*.pth"))) == 5


def test_a_named_one_is_read(run: Run, project: Path, golden: Golden) -> None:
    write(Path("other.toml"), "[retention]\npaths = ['runs/a']\nkeep-last = 2\n")
    assert run("prune", "--config", "other.toml", "runs/b").status == 0
    assert (len(epochs("a")), epochs("b")) == (6, [9, 10])
    golden(refusals(run, "prune --config other.toml --keep 1"))
    write(Path("other.toml"), "[retention]\npaths = ['runs/a']\n")
    assert run("prune", "--config", "other.toml", "--keep", 1).status == 0
    assert epochs("a") == [10]
    write(Path("other.toml"), "[verify]\n")
    golden(refusals(run, "prune --config other.toml"))


def test_without_any_rule_nothing_goes(run: Run, project: Path, golden: Golden) -> None:
    golden(refusals(run, "prune"))
    for text in ("[verify]\n", "[retention]\nrecursive = true\n"):
        configure(text)
        golden(refusals(run, "prune"))
    assert len(epochs("a") + epochs("b")) == 12


def test_each_directory_is_pruned_for_itself(run: Run, project: Path, golden: Golden) -> None:
    configure("[retention]\npaths = ['runs/a', 'nowhere', 'runs/b']\nkeep-last = 2\n")
    golden(transcript(run, (2, "prune")))
    assert (epochs("a"), epochs("b")) == ([9, 10], [9, 10])


def test_the_worst_status_counts(run, project: Path) -> None:
    configure("[retention]\npaths = ['runs/a', 'runs/b']\nkeep-last = 2\n")
    path = project / "runs" / "a" / "model_epoch_3.pth"
    path.write_bytes(path.read_bytes()[:900])
    assert run("prune", "-q").status == 1
    assert (epochs("a"), epochs("b")) == ([3, 9, 10], [9, 10])


def test_series_have_the_rules_of_their_paths(run, project: Path) -> None:
    configure(
        """\
        [retention]
        paths = ["runs"]
        recursive = true
        keep-last = 2

        [[retention.rule]]
        path = "runs/b/**"
        keep-every-epochs = 5
        """
    )
    assert run("prune").status == 0
    assert (epochs("a"), epochs("b")) == ([9, 10], [1, 5, 10])


def test_one_of_its_checkpoints_is_explained(run, project: Path) -> None:
    configure("[retention]\npaths = ['runs/a', 'runs']\nrecursive = true\nkeep-last = 2\n")
    for name in ("a", "b"):
        status, out, err = run("prune", "--explain", f"runs/{name}/model_epoch_3.pth")
        assert (status, err) == (0, "")
        assert out.startswith(f"runs/{name}/model_epoch_3.pth would be removed\n")
    said = "ckpttool: error: x/m.pth is in none of these directories: runs/a, runs\n"
    assert run("prune", "--explain", "x/m.pth") == (2, "", said)
    assert len(epochs("a") + epochs("b")) == 12


def test_a_directory_that_is_named_twice_is_pruned_once(run, project: Path) -> None:
    configure("[retention]\npaths = ['runs/a', './runs/a/']\nkeep-last = 2\n")
    assert run("prune").out.endswith("\nremoved 4 of 6 checkpoints, 16 kB freed\n")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what puts somebody before a terminal who types an answer."""

    def put(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)

    return put


def test_the_terminal_is_asked_unless_it_says_yes(run, project: Path, typed: Callable[[str], None]) -> None:
    typed("")
    text = "[retention]\npaths = ['runs/a']\nkeep-last = 2\n"
    configure(text)
    assert run("prune").status == 1
    assert len(epochs("a")) == 6
    trusted_config(f"{text}yes = true\n")
    assert run("prune").status == 0
    assert epochs("a") == [9, 10]


TWO = "[retention]\npaths = ['runs/a', 'runs/b']\nkeep-last = 2\n"


def test_one_directory_may_be_declined(run, project: Path, typed: Callable[[str], None]) -> None:
    configure(TWO)
    typed("y\nn\n")
    status, out, err = run("prune")
    assert (status, len(epochs("a")), len(epochs("b"))) == (1, 2, 6)
    assert err.count("Remove 4 checkpoints (16 kB)? [y/N]") == 2
    assert out.endswith("\n\nremoved 4 of 12 checkpoints, 16 kB freed\n")
    typed("n\n")
    document = json.loads(run("prune", "--json").out)
    assert (document["declined"], document["freed_bytes"]) == (True, 0)
    assert [(len(group["keep"]), group["remove"]) for group in document["groups"]] == [(2, []), (6, [])]


def test_an_answer_in_stdin_is_for_one_directory(run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, left in ((b"y\n", (2, 6)), (b"y\ny\n", (2, 2))):
        configure(TWO)
        reader, writer = os.pipe()
        os.write(writer, text)
        os.close(writer)
        with open(reader) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert run("prune").status == (6 in left)
        assert (len(epochs("a")), len(epochs("b"))) == left


def interrupted() -> str:
    raise KeyboardInterrupt


def test_what_was_done_before_an_interruption_is_told(
    run, project: Path, typed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(TWO)
    typed("y\n")
    answers = iter("y")
    monkeypatch.setattr(sys.stdin, "readline", lambda: f"{next(answers, None) or interrupted()}\n")
    status, _, err = run("prune")
    assert (status, len(epochs("a")), len(epochs("b"))) == (130, 2, 6)
    assert "removed 4 of 6 checkpoints, 16 kB freed\n" in err


def test_what_was_not_asked_about_is_shown_all_the_same(
    run, project: Path, typed: Callable[[str], None]
) -> None:
    for epoch in EPOCHS[2:]:
        Path("runs", "b", f"model_epoch_{epoch}.pth").unlink()
    configure(TWO)
    typed("y\n")
    status, out, _ = run("prune")
    assert status == 0
    assert out.endswith(
        "runs/b/model_epoch_*.pth\n"
        "  keep    model_epoch_2.pth  newest (not verified: nothing is removed), last 2\n"
        "  keep    model_epoch_1.pth  last 2\n"
        "\n"
        "removed 4 of 8 checkpoints, 16 kB freed\n"
    )


def test_where_no_series_has_a_rule_nothing_goes(run: Run, project: Path, golden: Golden) -> None:
    rule = "[[retention.rule]]\npath = 'runs/{}/**'\nkeep-last = 1\n".format
    configure(TWO + rule("b"))
    assert run("prune", "-n").err == ""
    configure(TWO + rule("b") + rule("c"))
    options = ("-n", "-q", "--yes", "--json", "--explain runs/a/model_epoch_3.pth")
    golden(transcript(run, *((1, f"prune {one}") for one in options)))
    assert len(epochs("a") + epochs("b")) == 12


def test_a_rule_of_a_directory_that_is_not_there_stops_no_other(run, project: Path) -> None:
    rule = "[[retention.rule]]\npath = '{}/**'\nkeep-last = 1\n".format
    configure("[retention]\npaths = ['runs/a', 'runs/c']\nkeep-last = 2\n" + rule("runs/c"))
    status, _, err = run("prune")
    assert (status, epochs("a")) == (2, [9, 10])
    assert err.startswith("ckpttool: error: runs/c: no such file or directory\n")
    configure("[retention]\npaths = ['runs/b', 'runs/c']\nkeep-last = 2\n" + rule("runz"))
    assert run("prune", "-q").status == 1
    assert len(epochs("b")) == 6


def test_a_named_directory_needs_no_rules_of_others(run, project: Path) -> None:
    rule = "[[retention.rule]]\npath = '{}'\nkeep-last = 1\n".format
    configure(TWO + rule("runs/b/**") + rule("**/fold_*"))
    assert run("prune", "--config", "ckpttool.toml", "runs/a").status == 0
    assert (epochs("a"), len(epochs("b"))) == ([9, 10], 6)
    configure(TWO + rule("runs/b/x*"))
    status, out, err = run("prune", "--config", "ckpttool.toml", "runs/b")
    assert (status, out, len(epochs("b"))) == (1, "", 6)
    assert "no series matches 'runs/b/x*'" in err


@pytest.mark.parametrize("glob", ["runs/b", "runs/b/", "./runs/b", "runs/?/"])
def test_a_directory_s_name_means_what_lies_in_it_and_below(run, project: Path, glob: str) -> None:
    shutil.copytree(Path("runs/b"), Path("runs/b/deep/er"))
    configure(f"{TWO}recursive = true\n[[retention.rule]]\npath = '{glob}'\nkeep-last = 5\n")
    assert run("prune").status == 0
    assert (epochs("b"), epochs("b/deep/er")) == ([2, 3, 5, 9, 10],) * 2
    assert epochs("a") == ([2, 3, 5, 9, 10] if "?" in glob else [9, 10])


def test_a_glob_of_names_stays_one(run, project: Path) -> None:
    shutil.copytree(Path("runs/a"), Path("runs/b/model_epoch_x/deep"))
    configure(f"{TWO}recursive = true\n[[retention.rule]]\npath = 'runs/b/*'\nkeep-last = 5\n")
    assert run("prune").status == 0
    assert (len(epochs("b")), len(epochs("b/model_epoch_x/deep"))) == (5, 2)


def test_directories_that_overlap_count_once(run, project: Path) -> None:
    (project / "link").symlink_to("runs")
    configure(
        "[retention]\npaths = ['runs/b', 'runs', 'link', 'runs/../runs']\nrecursive = true\nkeep-last = 2\n"
    )
    status, out, err = run("prune", "-n")
    assert (status, err) == (0, "")
    assert out.endswith("\n\nwould remove 8 of 12 checkpoints and free 33 kB\n")
    assert out.count("runs/b/model_epoch_*.pth") == 1
    found = json.loads(run("prune", "-n", "--json").out)
    assert [len(one["remove"]) for one in found["groups"]] == [4, 4]
    assert found["freed_bytes"] == sum(
        removed["bytes"] for one in found["groups"] for removed in one["remove"]
    )
    assert run("prune").out.endswith("\n\nremoved 8 of 12 checkpoints, 33 kB freed\n")
    assert (epochs("a"), epochs("b")) == ([9, 10], [9, 10])


def test_one_that_is_not_read_is_told(run: Run, project: Path, golden: Golden) -> None:
    configure("[retention]\nkeep-last = 1\n")
    said = run("prune", "runs/a", "--keep", 9, "-n").err
    golden(said + refusals(run, "prune runs/a"))
    assert run("prune", "-r", "--keep", 9, "-n").err == said
    assert run("prune", "--explain", "runs/a/model_epoch_3.pth", "--keep", 9).err == said
    assert run("prune", "runs/a", "--keep", 9, "-n", "-q").err == ""
    assert run("prune", "runs/a", "--config", "ckpttool.toml", "-n").err == ""
    configure("[verify]\n")
    assert run("prune", "runs/a", "--keep", 9, "-n").err == ""


def test_one_command_has_one_trash(run: Run, project: Path, golden: Golden) -> None:
    configure(f"{TWO}trash = true\n")
    golden(transcript(run, (0, "prune")))
    names = [os.listdir(Path("runs", name, ".ckpttool-trash")) for name in ("a", "b")]
    assert len(names[0]) == 1
    assert names[0] == names[1]
    assert run("undo", "-r", "runs", "-q").status == 0
    assert (len(epochs("a")), len(epochs("b"))) == (6, 6)
    assert run("prune", "-q").status == 0
    golden(transcript(run, (0, "prune --empty-trash")))
    assert (len(os.listdir("runs/a")), len(os.listdir("runs/b"))) == (2, 2)


def test_a_trash_in_a_directory_that_is_gone(run: Run, project: Path, golden: Golden) -> None:
    configure("[retention]\npaths = ['runs/a', 'nowhere']\nkeep-last = 2\ntrash = true\n")
    assert run("prune", "-q").status == 2
    golden(transcript(run, (2, "prune --empty-trash")))
