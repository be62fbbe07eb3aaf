"""The help of each command: headings, placeholders, examples, exit statuses, and what fits a terminal."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ckpttool.cli.commands import COMMANDS, Commands
from ckpttool.cli.examples import CLOSINGS, ROOT
from tests.support.commands import run_redirected

HEADINGS = {
    "inspect": ["Output"],
    "verify": [
        *("Checks", "Prediction", "Expected results of the prediction", "Reports"),
        *("Selection", "Execution", "Output"),
    ],
    "latest": ["Selection", "Execution", "Output"],
    "diff": ["Comparison", "Execution", "Output"],
    "convert": ["Conversion", "Execution", "Output"],
    "merge": ["Conversion", "Execution", "Output"],
    "rename": ["Naming", "Selection", "Execution", "Output"],
    "undo": ["Selection", "Execution", "Output"],
}


def headings(help: str) -> list[str]:
    """Return the headings of a help text."""
    return [line.removesuffix(":") for line in help.splitlines() if re.match(r"\S.*:$", line)]


@pytest.mark.parametrize("command", HEADINGS)
def test_options_stand_under_headings(run, command: str) -> None:
    assert headings(run(command, "--help").out)[: 1 + len(HEADINGS[command])] == [
        "Arguments",
        *HEADINGS[command],
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_heading_of_its_own(run, command: str) -> None:
    assert "Options" not in headings(run(command, "--help").out)


@pytest.mark.parametrize("command", COMMANDS)
def test_placeholders_have_one_style(run, command: str) -> None:
    out = run(command, "--help").out
    usage, *lines = out.splitlines()
    assert re.fullmatch(
        rf"Usage: ckpttool {command} \[OPTIONS\](?: \[?[A-Z]+(?: [A-Z]+)*(?:\.\.\.)?\]?)*", usage
    )
    assert [line for line in lines if re.match(r"  -.*(?:<|\brange\b)", line)] == []
    assert re.findall(r"\[(?:required|x>|\d<).*", out) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal_of_80_columns(run, command: str) -> None:
    assert max(map(len, run(command, "--help").out.splitlines())) < 80


# Examples -------------------------------------------------------------------------------------------

_EXAMPLES = [(name, one.line) for name, closing in CLOSINGS.items() for one in closing.examples]
_NEEDS_MORE = ("--model", "xargs", "s3:", "ckpttool watch", "config --trust")
"""Parts of examples that need a framework, another program, a store, a file or a signal to end them."""


def arguments_in(line: str) -> list[list[str]]:
    """Return the arguments of each ckpttool in a line of a shell."""
    return [shlex.split(found) for found in re.findall(r"ckpttool ([^|)>]*)", line)]


def test_every_command_has_examples() -> None:
    assert CLOSINGS.keys() == COMMANDS.keys()
    for name, closing in CLOSINGS.items():
        assert 2 <= len(closing.examples) <= 4
        assert all(f"ckpttool {name}" in one.line for one in closing.examples if "undo" not in one.line)


@pytest.mark.parametrize(("command", "line"), _EXAMPLES, ids=[line for _, line in _EXAMPLES])
def test_an_example_is_a_valid_command_line(command: str, line: str) -> None:
    group = Commands(name="ckpttool")
    for name, *rest in arguments_in(line):
        parsed = group.get_command(None, name).make_context(name, rest)
        assert parsed.params


def test_each_practice_is_a_valid_command_line() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "practices.md"
    commands = re.findall(r"`(ckpttool [^`]+)`", page.read_text("utf-8"))
    assert len(commands) > 20
    group = Commands(name="ckpttool")
    for name, *rest in (shlex.split(command)[1:] for command in commands):
        assert group.get_command(None, name).make_context(name, rest).params


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory with the files that examples name the working directory."""
    (tmp_path / "project").mkdir()
    for name in ("model.pth", "old.pth", "new.pth", "runs/best.pth"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(files / "pytorch" / "guide.pth", tmp_path / name)
    shutil.copytree(files / "series", tmp_path / "runs" / "exp1")
    for path in (files / "series").iterdir():
        shutil.copy(path, tmp_path / "runs" / path.name.removeprefix("model_"))
    content = (files / "pytorch" / "guide.pth").read_bytes()
    (tmp_path / "damaged.pth").write_bytes(content[: len(content) // 2])
    shutil.copy(next((files / "keras").glob("*.keras")), tmp_path / "model.keras")
    for pattern in ("safetensors/sharded/*", "ranks/old-fsdp-2/*"):
        for path in files.glob(pattern):
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "line", [line for _, line in _EXAMPLES if not any(part in line for part in _NEEDS_MORE)]
)
def test_an_example_runs(run, folder: Path, line: str) -> None:
    (arguments,) = arguments_in(line)
    is_glob = {one: "*" in one and f"'{one}'" not in line for one in arguments}
    done = run(*(path for one in arguments for path in (sorted(folder.glob(one)) if is_glob[one] else [one])))
    assert done.status in (0, 1), done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples_statuses_and_the_page(run, command: str) -> None:
    closing, out = CLOSINGS[command], run(command, "--help").out
    assert headings(out)[-2:] == ["Examples", "Exit status"]
    assert all(f"  # {one.purpose}\n  $ {one.line}\n" in out for one in closing.examples)
    assert all(f"\n  {status}  {meaning[:40]}" in out for status, meaning in closing.statuses.items())
    assert out.endswith(f"\nDocumentation: {closing.page}\n")
    assert (Path(__file__).parents[2] / closing.page).is_file()


def test_help_of_the_program_ends_alike(run) -> None:
    out = run("--help").out
    assert headings(out) == ["Options", "Commands", "Examples", "Exit status", "Environment"]
    assert out.endswith(f"\nDocumentation: {ROOT.page}\n")
    for example in ROOT.examples:
        assert arguments_in(example.line)[0][0] in {*COMMANDS, "help"}


# Manual pages ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of all manual pages."""
    directory = tmp_path_factory.mktemp("man") / "man1"
    done = run_redirected("help", "--man", directory)
    names = ["ckpttool.1", *(f"ckpttool-{name}.1" for name in COMMANDS)]
    assert done == (0, "".join(f"{directory / name}\n" for name in names), "")
    return directory


@pytest.mark.parametrize("command", COMMANDS)
def test_a_manual_page_has_every_option_and_example(run, pages: Path, command: str) -> None:
    page = (pages / f"ckpttool-{command}.1").read_text().replace("\\-", "-").replace("\\e", "\\")
    options = re.findall(r"^  (-.*?)(?:  |$)", run(command, "--help").out, re.MULTILINE)
    assert options and all(f"\n.B {option}\n" in page for option in options)
    for example in CLOSINGS[command].examples:
        assert f"\n{example.line}\n" in page
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


def test_the_manual_needs_one_directory(run) -> None:
    for arguments in ((), ("a", "b")):
        said = "ckpttool: error: help --man takes one DIR, for the manual pages\n"
        assert run("help", "--man", *arguments) == (2, "", said)


def test_a_directory_for_the_manual_that_cannot_be_made(run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, out, err = run("help", "--man", tmp_path / "file")
    assert (status, out, err) == (2, "", f"ckpttool: error: {tmp_path}/file: file exists\n")
