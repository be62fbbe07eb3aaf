"""The help of each command: headings, placeholders, examples, exit statuses, and what fits a terminal."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ckpttool.cli.commands import COMMANDS, command_named
from ckpttool.cli.examples import CLOSINGS, ROOT
from tests.support.commands import Run, refusals, run_redirected
from tests.support.golden import Golden


def headings(help: str) -> list[str]:
    """Return the headings of a help text."""
    return [line.removesuffix(":") for line in help.splitlines() if re.match(r"\S.*:$", line)]


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """Return the help of each command."""
    answers = {command: run_redirected(command, "--help") for command in COMMANDS}
    assert {(answer.status, answer.err) for answer in answers.values()} == {(0, "")}
    return {command: answer.out for command, answer in answers.items()}


def test_options_stand_under_headings(golden: Golden, helps: dict[str, str]) -> None:
    golden({command: ", ".join(headings(out)) for command, out in helps.items()})
    assert [command for command, out in helps.items() if "Options" in headings(out)] == []


def test_placeholders_have_one_style_and_all_fits_a_terminal_of_80_columns(helps: dict[str, str]) -> None:
    for command, out in helps.items():
        usage, *lines = out.splitlines()
        arguments = r"(?: \[?[A-Z]+(?: [A-Z]+)*(?:\.\.\.)?\]?)*"
        assert re.fullmatch(rf"Usage: ckpttool {command} \[OPTIONS\]{arguments}", usage)
        assert [line for line in lines if re.match(r"  -.*(?:<|\brange\b)", line)] == []
        assert re.findall(r"\[(?:required|x>|\d<).*", out) == []
        assert max(map(len, lines)) < 80


# Examples -------------------------------------------------------------------------------------------

_EXAMPLES = [(name, line) for name, closing in CLOSINGS.items() for line in closing.examples.values()]
_NEEDS_MORE = ("--model", "xargs", "s3:", "ckpttool watch", "config --trust", "mlflow:", "wandb:")
"""Parts of examples that need a framework, a tracker, a program, a store, a file or a signal to end them."""


def arguments_in(line: str) -> list[list[str]]:
    """Return the arguments of each ckpttool in a line of a shell."""
    return [shlex.split(found) for found in re.findall(r"ckpttool ([^|)>]*)", line)]


def test_every_command_has_examples() -> None:
    assert CLOSINGS.keys() == COMMANDS.keys()
    for name, closing in CLOSINGS.items():
        assert 2 <= len(closing.examples) <= 4
        assert all(f"ckpttool {name}" in line for line in closing.examples.values() if "undo" not in line)


def test_examples_are_valid_command_lines() -> None:
    assert len(_EXAMPLES) > 40
    for _, line in _EXAMPLES:
        for name, *rest in arguments_in(line):
            assert command_named(name).make_context(name, rest).params, line


def test_each_practice_is_a_valid_command_line() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "practices.md"
    commands = re.findall(r"`(ckpttool [^`]+)`", page.read_text("utf-8"))
    assert len(commands) > 20
    for name, *rest in (shlex.split(command)[1:] for command in commands):
        assert command_named(name).make_context(name, rest).params


@pytest.fixture(scope="module")
def folder(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with the files that examples name the working directory."""
    place = tmp_path_factory.mktemp("examples")
    (place / "project").mkdir()
    for name in ("model.pth", "old.pth", "new.pth", "runs/best.pth"):
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copy(files / "pytorch" / "guide.pth", place / name)
    shutil.copytree(files / "series", place / "runs" / "exp1")
    for path in (files / "series").iterdir():
        shutil.copy(path, place / "runs" / path.name.removeprefix("model_"))
    content = (files / "pytorch" / "guide.pth").read_bytes()
    (place / "damaged.pth").write_bytes(content[: len(content) // 2])
    shutil.copy(next((files / "keras").glob("*.keras")), place / "model.keras")
    for pattern in ("safetensors/sharded/*", "ranks/old-fsdp-2/*"):
        for path in files.glob(pattern):
            shutil.copy(path, place)
    return place


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_run(
    run: Run, command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, line in enumerate(CLOSINGS[command].examples.values()):
        if any(part in line for part in _NEEDS_MORE):
            continue
        place = tmp_path / f"{number}"
        shutil.copytree(folder, place, symlinks=True, copy_function=os.link)
        monkeypatch.chdir(place)
        (words,) = arguments_in(line)
        globs = {one for one in words if "*" in one and f"'{one}'" not in line}
        done = run(*(path for one in words for path in (sorted(place.glob(one)) if one in globs else [one])))
        assert done.status in (0, 1), (line, done.err)


def test_help_ends_with_examples_statuses_and_the_page(helps: dict[str, str]) -> None:
    for command, out in helps.items():
        closing = CLOSINGS[command]
        assert headings(out)[-2:] == ["Examples", "Exit status"]
        assert all(f"  # {purpose}\n  $ {line}\n" in out for purpose, line in closing.examples.items()), (
            command
        )
        statuses = closing.statuses.items()
        assert all(f"\n  {status}  {meaning[:40]}" in out for status, meaning in statuses), command
        assert out.endswith(f"\nDocumentation: {closing.page}\n")
        assert (Path(__file__).parents[2] / closing.page).is_file()


def test_help_of_the_program_ends_alike(run: Run) -> None:
    out = run("--help").out
    assert headings(out) == ["Options", "Commands", "Examples", "Exit status", "Environment"]
    assert out.endswith(f"\nDocumentation: {ROOT.page}\n")
    for line in ROOT.examples.values():
        assert arguments_in(line)[0][0] in {*COMMANDS, "help"}


# Manual pages ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of all manual pages."""
    directory = tmp_path_factory.mktemp("man") / "man1"
    done = run_redirected("help", "--man", directory)
    names = ["ckpttool.1", *(f"ckpttool-{name}.1" for name in COMMANDS)]
    assert done == (0, "".join(f"{directory / name}\n" for name in names), "")
    return directory


def test_a_manual_page_has_every_option_and_example(helps: dict[str, str], pages: Path) -> None:
    for command, out in helps.items():
        page = (pages / f"ckpttool-{command}.1").read_text().replace("\\-", "-").replace("\\e", "\\")
        options = re.findall(r"^  (-.*?)(?:  |$)", out, re.MULTILINE)
        assert options and all(f"\n.B {option}\n" in page for option in options), command
        for line in CLOSINGS[command].examples.values():
            assert f"\n{line}\n" in page
        assert f"ckpttool-{command} - {COMMANDS[command].summary.rstrip('.')}\n" in page


def test_a_manual_page_is_clean_roff(pages: Path) -> None:
    known = {"TH", "nh", "ad", "SH", "SS", "PP", "TP", "B", "RS", "RE", "nf", "fi"}
    for page in pages.iterdir():
        text = page.read_text()
        assert set(re.findall(r"^\.(\S*)", text, re.MULTILINE)) <= known
        assert set(re.findall(r"\\(.)", text)) <= set("-e&f")
        assert "\n\n" not in text and not re.search(r"^'", text, re.MULTILINE)


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff")
def test_groff_renders_a_manual_page_without_a_warning(pages: Path) -> None:
    for page in pages.iterdir():
        done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", page], capture_output=True, check=True)
        assert done.stderr == b"" and b"EXIT STATUS" in re.sub(rb".\x08", b"", done.stdout)


def test_what_is_no_directory_for_the_manual(run: Run, golden: Golden, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    golden(refusals(run, "help --man", "help --man a b", f"help --man {tmp_path}/file"))
