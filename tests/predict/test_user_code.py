"""The user's own files of Python: what they import, and what is wrong in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import Finding
from ckpttool.predict.child import _error_finding
from ckpttool.predict.guard import resolve
from ckpttool.predict.interface import first_line


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def failure(tmp_path: Path) -> Callable[[str], Finding]:
    """Return what tells of a model's file, whose text it is given."""

    def failure_of(text: str) -> Finding:
        path = tmp_path / "net.py"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(Exception) as caught:
            resolve(f"{path}:Net")()
        return _error_finding(caught.value, "load-failed")

    return failure_of


def test_what_lies_beside_is_found_after_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text("raise SystemExit", encoding="utf-8")
    (tmp_path / "lies_beside.py").write_text("VALUE = 7", encoding="utf-8")
    text = "import colorsys, lies_beside\ndef Net(): return colorsys.rgb_to_hsv and lies_beside.VALUE"
    (tmp_path / "net_beside.py").write_text(text, encoding="utf-8")

    assert resolve(f"{tmp_path / 'net_beside.py'}:Net")() == 7
    assert sys.path[-1] == str(tmp_path)


def test_what_is_no_python_has_a_place(failure: Callable[[str], Finding]) -> None:
    finding = failure("import os\n\ndef Net(:\n")
    assert finding.where == "net.py:3"
    assert finding.message == "SyntaxError: invalid syntax"


def test_a_package_that_is_not_installed_is_named(failure: Callable[[str], Finding]) -> None:
    finding = failure("\nimport no_such_package.inner\n")
    assert finding.code == "load-failed"
    assert finding.where == "net.py:2"
    assert finding.message == "it needs the package no_such_package, which is not installed"


def test_a_module_that_a_package_lacks_is_named(failure: Callable[[str], Finding]) -> None:
    finding = failure("import numpy.no_such_module\n")
    assert finding.message == "it needs the module numpy.no_such_module, which the installed numpy lacks"


def test_a_module_without_a_name() -> None:
    assert first_line(ModuleNotFoundError("gone")) == "ModuleNotFoundError: gone"
