"""The documentation says what is true: its examples are run, and it names every command and option."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ckpttool.cli.commands import COMMANDS
from ckpttool.runs.retention.rules import RULES
from tests.support.commands import Run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_MODULE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""A block of Python that begins with a file's name: the examples of the page find it there."""
_PAGES = {"unpin": "pin"}
"""Commands that stand on another one's page."""


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps(page: Path) -> list[tuple[str, str]]:
    """Return the commands in a page's console blocks, each with the output that follows it."""
    found = []
    for block in _CONSOLE.findall(page.read_text("utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output.rstrip()))
    return found


def pattern(expected: str) -> str:
    """Return the regular expression of an expected output, in which a line of … stands for any lines."""
    lines = [
        r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line.rstrip()) + r"\n"
        for line in expected.splitlines()
    ]
    return "".join(lines)


@pytest.mark.parametrize("page", [page for page in PAGES if steps(page)], ids=lambda page: page.stem)
def test_examples_print_what_the_page_shows(
    page: Path, tmp_path: Path, pictures: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures.prepare(tmp_path)
    for name, code in _MODULE.findall(page.read_text("utf-8")):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    for command, expected in steps(page):
        program, *arguments = shlex.split(command)
        assert program == "ckpttool"
        done = run(*arguments)
        assert done.status in (0, 1), done.err
        printed = "".join(f"{line.rstrip()}\n" for line in (done.out + done.err).splitlines())
        if expected:
            assert re.fullmatch(pattern(expected), printed), f"$ {command}\n{printed}"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "docs" / "library.md"], ids=lambda page: page.stem
)
def test_python_examples_run(page: Path, tmp_path: Path, pictures: ModuleType) -> None:
    pictures.prepare(tmp_path)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE))
    assert "import ckpttool" in code
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_stands_in_the_docs(command: str, run: Run) -> None:
    shown = run(command, "--help").out
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown))
    assert "--help" in options
    page = (ROOT / "docs" / f"{_PAGES.get(command, command)}.md").read_text("utf-8")
    assert sorted(option for option in options - {"--help"} if option not in page) == []


@pytest.mark.parametrize("flag", [rule.flags[-1] for rule in RULES.values()])
def test_every_rule_stands_among_the_policies(flag: str) -> None:
    page = (ROOT / "docs" / "policies.md").read_text("utf-8")
    assert re.search(rf"{flag}(?![\w-])", page)


def test_every_command_has_a_page(run: Run) -> None:
    shown = run("--help").out
    commands = re.findall(r"^  ([a-z]+)  ", shown.partition("Commands:")[2], re.MULTILINE)
    assert commands == list(COMMANDS)


def test_every_finding_code_is_documented() -> None:
    page = (ROOT / "docs" / "findings.md").read_text("utf-8")
    assert sorted(code for code in finding_codes() if f"`{code}`" not in page) == []


def finding_codes() -> set[str]:
    """Return the codes in the source: of findings, and of errors."""
    codes: set[str] = set()
    for module in (ROOT / "ckpttool").rglob("*.py"):
        source = module.read_text("utf-8")
        codes |= set(re.findall(r"""\b(?:error|warning|note)\(\s*"([a-z][a-z0-9-]+)",""", source))
        codes |= set(re.findall(r"""\bcode(?::\s*str)?\s*=\s*"([a-z][a-z0-9-]+)\"""", source))
    return codes - {"error"}


def test_pictures_are_what_the_commands_print(pictures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--check"])
    assert pictures.main() == 0
