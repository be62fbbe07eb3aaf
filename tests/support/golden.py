"""A plugin of pytest: texts that tests compare with files in ``tests/golden``; ``make golden`` rewrites them.

``golden(text)`` compares a text with the section of the test in the file of its module. Whoever changes a
word of an answer runs ``make golden`` and reads the difference, instead of changing a hundred tests.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ckpttool import UsageError

DIRECTORY = Path(__file__).parents[1] / "golden"
FILES = Path(__file__).parents[2] / "fixtures" / "files"
OPTION = "--write-golden"
_HEADING = re.compile(r"^=== (.*) ===\n", re.MULTILINE)
_written: dict[Path, dict[str, str]] = defaultdict(dict)


class Golden:
    """The expected texts of one test, in the order in which it compares."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        module = Path(request.node.path).relative_to(DIRECTORY.parent).with_suffix(".txt")
        self._path = DIRECTORY / module.with_name(module.name.removeprefix("test_"))
        self._name = request.node.name
        self._folder = folder
        self._writes = request.config.getoption(OPTION)
        self._count = 0

    def __call__(self, text: str | Mapping[str, object]) -> None:
        """Compare a text, or several by their names; the test's own folder is ``TMP`` in it."""
        if isinstance(text, Mapping):
            text = "\n".join(_named(name, str(told)) for name, told in text.items())
        self._count += 1
        name = self._name if self._count == 1 else f"{self._name} #{self._count}"
        for folder, word in ((str(self._folder), "TMP"), (str(FILES), "FILES")):
            for spelling in (folder, json.dumps(folder)[1:-1], shlex.quote(folder)[1:-1]):
                text = text.replace(spelling, word)
        text = text.rstrip("\n") + "\n"
        if shlex.quote(str(self._folder)) != str(self._folder):  # so a proposed command quotes it
            text = re.sub(r"(: ckpttool [^\n']*)'(TMP[\w./-]*)'", r"\1\2", text)
        if self._writes:
            _written[self._path][name] = text
        else:
            expected = sections(self._path).get(name, "")
            assert text == expected, f"{self._path} expects another text; make golden rewrites it"


def _named(name: str, text: str) -> str:
    text = text.rstrip("\n")
    return f"# {name}\n{text}\n" if "\n" in text else f"{name}: {text}"


def sections(path: Path) -> dict[str, str]:
    """Return the expected texts in a file by the names of their tests."""
    parts = _HEADING.split(path.read_text("utf-8"))[1:] if path.exists() else []
    return {name: f"{text.rstrip(chr(10))}\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}


def refusal(function: Callable[..., object], *arguments: object) -> str:
    """Return the one line that says what is wrong with arguments."""
    with pytest.raises(UsageError) as refused:
        function(*arguments)
    said = str(refused.value)
    assert "\n" not in said
    return said


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    """Return what compares texts with the expected ones of this test."""
    return Golden(request, tmp_path)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes what is expected."""
    parser.addoption(OPTION, action="store_true", help="write the expected texts instead of comparing them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run only the tests that have expected texts, if these are to be written."""
    if config.getoption(OPTION):
        items[:] = [one for one in items if "golden" in getattr(one, "fixturenames", ())]


def pytest_sessionfinish() -> None:
    """Write what is expected, a file a module."""
    for path, texts in _written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(f"=== {name} ===\n{text}" for name, text in texts.items()), "utf-8")
