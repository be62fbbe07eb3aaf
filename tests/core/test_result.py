"""What all results of the library have: their document, their rows, a short repr; and options as keywords."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpttool
from ckpttool import DiffOptions, MissingPackage, Policy, PruneRequest, RenameRequest
from ckpttool.core.result import Result
from tests.support.commands import Run


@pytest.fixture
def series(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shutil.copytree(files / "series", tmp_path / "run", ignore=shutil.ignore_patterns("*.json"))
    monkeypatch.chdir(tmp_path)
    return "run"


OLD, NEW = "run/model_epoch_9.pth", "run/model_epoch_10.pth"
CALLS: dict[tuple[str, ...], Callable[[], Result]] = {
    ("inspect", "--stats", NEW): lambda: ckpttool.inspect(NEW, stats=True),
    ("verify", NEW): lambda: ckpttool.verify(NEW),
    ("diff", OLD, NEW): lambda: ckpttool.diff(OLD, NEW),
    ("list", "run"): lambda: ckpttool.list_checkpoints("run"),
    ("latest", "run"): lambda: ckpttool.latest("run"),
    ("convert", NEW, "a.safetensors", "-n"): lambda: ckpttool.convert(NEW, "a.safetensors", dry_run=True),
    ("prune", "run", "--keep", "3", "-n"): lambda: ckpttool.prune("run", keep_last=3, dry_run=True),
    ("rename", "run", "-t", "{epoch}", "-n"): lambda: ckpttool.rename("run", "{epoch}", dry_run=True),
    ("undo", "run", "-n"): lambda: ckpttool.undo("run", dry_run=True),
}


@pytest.mark.parametrize(("command", "call"), CALLS.items(), ids=[command[0] for command in CALLS])
def test_the_document_is_that_of_the_command_line(
    series: str, run: Run, command: tuple[str, ...], call: Callable[[], Result]
) -> None:
    result = call()
    assert result.to_dict() == json.loads(run(*command, "--json").out)
    assert repr(result).startswith(f"<{type(result).__name__} ") and len(repr(result)) < 100


def test_pins_have_their_document(series: str) -> None:
    assert ckpttool.pin([NEW]).to_dict()["changed"] == [NEW]


def test_checkpoints_as_a_frame(series: str) -> None:
    frame = ckpttool.list_checkpoints(series).to_frame()
    assert frame["path"].tolist() == [f"run/model_epoch_{epoch}.pth" for epoch in range(1, 11)]
    assert frame.set_index("epoch")["loss"].idxmin() in range(1, 11)


def test_lists_are_sequences_of_checkpoints(series: str, tmp_path: Path) -> None:
    listing, verdicts = ckpttool.list_checkpoints(series), ckpttool.verify_all(series)
    for result in (listing, verdicts):
        assert (len(result), [*result]) == (10, [*result.checkpoints])
        assert (result[0], result[-1]) == (result.checkpoints[0], result.checkpoints[9])
        assert result[2:4] == result.checkpoints[2:4]
        assert result[3] in result and bool(result)
        with pytest.raises(IndexError):
            result[10]
    (tmp_path / "empty").mkdir()
    assert not ckpttool.list_checkpoints(tmp_path / "empty")


def test_tensors_and_changes_as_a_frame(series: str) -> None:
    frame = ckpttool.inspect(NEW, stats=True).to_frame().set_index("name")
    assert frame.loc["model_state_dict.fc.weight", "stats.zeros"] == 0
    changes = ckpttool.diff(OLD, NEW).to_frame()
    assert "model_state_dict.fc.weight" in set(changes["name"])


def test_a_frame_needs_pandas(series: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match="pip install pandas"):
        ckpttool.list_checkpoints(series).to_frame()


def test_options_are_keywords(series: str) -> None:
    options = DiffOptions(only="weights")
    assert ckpttool.diff(OLD, NEW, options) == ckpttool.diff(OLD, NEW, only="weights")
    assert not ckpttool.diff(OLD, NEW, only="weights").equal
    assert ckpttool.diff(OLD, NEW, options, rtol=1e9, atol=1e9).equal
    request = PruneRequest(directory=series, policy=Policy(keep_last=3), depth="quick")
    planned = ckpttool.prune(request, dry_run=True).plan
    assert ckpttool.prune(Path(series), keep_last=3, depth="quick", dry_run=True).plan == planned
    assert len(ckpttool.prune(request, keep_last=4, dry_run=True).plan.removals) == len(planned.removals) - 1
    renames = ckpttool.rename(RenameRequest(directory=series, template="{epoch:03d}"), dry_run=True).renames
    assert ckpttool.rename(series, "{epoch:03d}", dry_run=True).renames == renames


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: ckpttool.diff(OLD, NEW, rtoll=1), "'rtoll' (did you mean rtol?)"),
        (lambda: ckpttool.convert(OLD, "x.pth", frobnicate=1), "unexpected keyword argument 'frobnicate'$"),
        (lambda: ckpttool.prune("run", keep_lst=1), "'keep_lst' (did you mean keep_last?)"),
        (lambda: ckpttool.rename("run", "{epoch}", excude=()), "'excude' (did you mean exclude?)"),
    ],
)
def test_a_misspelled_keyword_is_an_error(series: str, call: Callable[[], object], hint: str) -> None:
    import re

    with pytest.raises(TypeError, match=re.escape(hint).replace(r"\$", "$")):
        call()


def test_a_directory_is_renamed_by_a_template(series: str) -> None:
    with pytest.raises(ckpttool.UsageError, match="needs a template"):
        ckpttool.rename(series)


@pytest.mark.parametrize("name", [name for name in ckpttool.__all__ if name.islower()])
def test_signatures_show_values_and_not_functions(name: str) -> None:
    signature = inspect.signature(getattr(ckpttool, name))
    assert "<" not in str(signature)
    assert not {one.kind for one in signature.parameters.values()} & {inspect.Parameter.VAR_KEYWORD}
