"""The documentation says what is true: its examples are run, and it names every command and option."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from ckpttool.cli.commands import COMMANDS
from ckpttool.runs.retention.rules import RULES
from tests.support.commands import Run, python
from tests.support.frameworks import python_with_frameworks
from tests.support.thorough import sampled

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_MODULE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""A block of Python that begins with a file's name: the examples of the page find it there."""
_PAGES = {"unpin": "pin", "init": "config"}
"""Commands that stand on another one's page."""


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prepared(pictures: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the examples speak of, to be copied."""
    folder = tmp_path_factory.mktemp("prepared")
    pictures.prepare(folder)
    return folder


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


def starts_frameworks(page: Path) -> bool:
    """Tell whether an example on a page trains, or has a model predict."""
    return any(command.startswith("python ") or "--predict" in command for command, _ in steps(page))


EXAMPLES = [page for page in PAGES if steps(page)]
LIGHT = [page for page in EXAMPLES if not starts_frameworks(page)]
HEAVY = sampled([page for page in EXAMPLES if starts_frameworks(page)], 2)


@pytest.mark.parametrize("page", [*LIGHT, *HEAVY], ids=lambda page: page.stem)
def test_examples_print_what_the_page_shows(
    page: Path, tmp_path: Path, prepared: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(command.startswith("python ") for command, _ in steps(page)):  # else it trains its own
        shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    for name, code in _MODULE.findall(page.read_text("utf-8")):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    for command, expected in steps(page):
        program, *arguments = shlex.split(command)
        if program == "python":
            if page.stem == "paddle":  # it crashes beside PyTorch
                python(*arguments, check=True)
            else:
                python_with_frameworks(*arguments)
            continue
        assert program == "ckpttool"
        done = run(*arguments)
        assert done.status in (0, 1), done.err
        printed = "".join(f"{line.rstrip()}\n" for line in (done.out + done.err).splitlines())
        if expected:
            assert re.fullmatch(pattern(expected), printed), f"$ {command}\n{printed}"


def test_python_examples_run(tmp_path: Path, prepared: Path) -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "reference" / "library.md"):
        text = page.read_text("utf-8")
        code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
        assert "import ckpttool" in code
        place = shutil.copytree(prepared, tmp_path / page.stem)
        python_with_frameworks("-c", code, cwd=place)


_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Return what a link into a page may name: its headings, as the site and GitHub spell them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_link_leads_somewhere() -> None:
    known: dict[Path, set[str]] = {}
    broken = []
    for page in PAGES:
        for target, anchor in _LINK.findall(page.read_text("utf-8")):
            path = (page.parent / target).resolve() if target else page
            if anchor and path.exists() and path not in known:
                known[path] = anchors(path)
            if not path.exists() or (anchor and anchor not in known[path]):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert broken == []


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell's last expression is shown, in few characters."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    notebook = json.loads((ROOT / "docs" / "reference" / "notebook.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    shown = []
    for cell in cells:
        *statements, last = ast.parse(cell).body
        is_shown = isinstance(last, ast.Expr)
        exec(compile(ast.Module([*statements, *([] if is_shown else [last])], []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(repr(eval(compile(ast.Expression(last.value), "cell", "eval"), names)))
    assert len(shown) == 10 and max(map(len, shown)) < 2000
    assert shown[3] == "<All keys matched successfully>"
    assert shown[6] == "('epoch_4.pth', 'epoch_5.pth')"


def test_every_option_stands_in_the_docs(run: Run) -> None:
    page = (ROOT / "docs" / "reference" / "options.md").read_text("utf-8")
    common = set(re.findall(r"`(--[a-z][a-z-]+)", page))
    lacking = []
    for command in COMMANDS:
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", run(command, "--help").out))
        assert {"--help", "--color"} <= options, command
        page = (ROOT / "docs" / "reference" / f"{_PAGES.get(command, command)}.md").read_text("utf-8")
        lacking += [f"{command} {option}" for option in options - common if option not in page]
    assert lacking == []


def test_every_rule_stands_among_the_policies() -> None:
    page = (ROOT / "docs" / "reference" / "policies.md").read_text("utf-8")
    flags = [rule.flags[-1] for rule in RULES.values()]
    assert [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", page)] == []


def test_every_command_has_a_page(run: Run) -> None:
    shown = run("--help").out
    commands = re.findall(r"^  ([a-z]+)  ", shown.partition("Commands:")[2], re.MULTILINE)
    assert commands == list(COMMANDS)


def test_every_finding_code_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "findings.md").read_text("utf-8")
    assert sorted(code for code in finding_codes() if f"`{code}`" not in page) == []


def finding_codes() -> set[str]:
    """Return the codes in the source: of findings, and of errors."""
    codes: set[str] = set()
    for module in (ROOT / "ckpttool").rglob("*.py"):
        source = module.read_text("utf-8")
        codes |= set(re.findall(r"""\b(?:error|warning|note)\(\s*"([a-z][a-z0-9-]+)",""", source))
        codes |= set(re.findall(r"""\bcode(?::\s*str)?\s*=\s*"([a-z][a-z0-9-]+)\"""", source))
    return codes - {"error"}


@pytest.mark.parametrize("widths", sampled([["80"], []], 1), ids=["80", "all"])
def test_pictures_are_what_the_commands_print(widths: list[str]) -> None:
    """A program of its own may fork, which it does for each picture."""
    done = python(ROOT / "docs" / "pictures.py", "--check", *widths, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
