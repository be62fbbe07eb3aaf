"""Every hostile file does run in its framework; here nothing runs, and it is never called safe.

``CKPTTOOL_EVERY_ATTACK=1`` takes each attack over all protocols and containers, not a sample of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.security.corpus import Case, Corpus
from tests.security.truth import GROUPS, load_all
from tests.support.commands import run_redirected

ROOT = Path(__file__).parents[2]
EVERY = bool(os.environ.get("CKPTTOOL_EVERY_ATTACK"))


def lines(names: Iterable[str]) -> str:
    return "\n".join(["", *names])


def safety_of(path: Path) -> str:
    """Return what verify says a checkpoint is: its worst safety, or the error that it ends with."""
    status, out, err = run_redirected("verify", "--json", path)
    assert "internal error" not in err
    if not out:
        return f"refused: {err.strip()}"
    found = {checkpoint["safety"] for checkpoint in json.loads(out)["checkpoints"]}
    worst = next((word for word in ("unsafe", "unknown", "safe") if word in found), "nothing looked at")
    assert worst != "unsafe" or status == 1
    return worst


@pytest.mark.framework
@pytest.mark.parametrize(
    ("groups", "step"),
    [(("torch",), 12), pytest.param(tuple(GROUPS), 1, marks=pytest.mark.thorough)],
    ids=["some of torch", "all"],
)
def test_every_attack_runs_in_its_framework(groups: tuple[str, ...], step: int, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    loaders = {loader for group in groups for loader in GROUPS[group]}
    provable = [case for case in corpus.all(every=EVERY) if case.is_provable and case.loader in loaders]
    cases = provable[::step]
    ends = load_all([case.order for case in cases], corpus.modules)
    idle = [f"{case.name}: {end}" for case, end in zip(cases, ends, strict=True) if not case.has_run]
    assert not idle, lines(idle)


@pytest.fixture
def cases(tmp_path: Path) -> list[Case]:
    """Return the hostile files, none of which was loaded."""
    return list(Corpus(tmp_path).all(every=EVERY))


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.thorough)])
def test_no_attack_is_called_safe_by_any_command_nor_run(
    step: int, cases: list[Case], tmp_path: Path
) -> None:
    """Each is verified; those of each step are given to the other commands, too."""
    wrong = []
    for case in cases:
        said = safety_of(case.judged)
        if said != "unsafe" and not (case.may_be_unknown and said == "unknown"):
            wrong.append(f"{case.name}: {said}")
    for case in cases[::step]:
        wrong += [f"{case.name}: {sentence}" for sentence in _other_commands(case, tmp_path / "out")]
    directories = sorted((tmp_path / "cases").iterdir())
    status, out, err = run_redirected("list", "--json", *directories[::step])
    assert status in (0, 1, 2) and (out or err)
    ran = [f"{case.name} has run" for case in cases if case.has_run]
    assert not ran, lines(ran)
    assert not wrong, lines([f"{len(wrong)} of {len(cases)}", *wrong])


def _other_commands(case: Case, target: Path) -> Iterable[str]:
    """Run the commands that open a checkpoint; yield what they should not say."""
    commands = (
        ("inspect", "--json", case.judged),
        ("diff", "--json", case.judged, case.judged),
        ("convert", "--to", "safetensors", "--force", "--json", case.judged, target),
    )
    for arguments in commands:
        status, out, err = run_redirected(*arguments)
        if "internal error" in err or status not in (0, 1, 2):
            yield f"{arguments[0]} ended with {status}: {err.strip()[-200:]}"
        if arguments[0] == "inspect" and str(case.judged) in safe_paths(out):
            yield "inspect says safe"


def safe_paths(document: str) -> set[str]:
    """Return the checkpoints that inspect calls safe; of a directory it may show one of many."""
    found = json.loads(document)["checkpoints"] if document else []
    return {one["path"] for one in found if one["safety"] == "safe"}


NET = f"{ROOT / 'tests' / 'predict' / 'models' / 'nets.py'}:SimpleModel"
WHOLE = {"torch-dcp/one-rank": ("one-rank/.metadata", "dcp"), "pytorch/guide.pth": ("guide.pth", "torch")}
"""Honest checkpoints, and the file of each that holds a pickle."""
SUBTLE = [
    ("users_names", "function"),
    ("torch_gadgets", "rebuild.tofile"),
    ("torch_gadgets", "rebuild.write_text"),
]
"""Attacks that look harmless: a name that nobody knows, and plain names whose sum is a call."""


@pytest.mark.framework
def test_a_prediction_without_trust_runs_no_attack(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{corpus.modules}")
    cases = [corpus.whole(*subtle, files / name, *WHOLE[name]) for subtle in SUBTLE for name in WHOLE]
    options = ("--json", "--predict", "--model", NET, "--input-shape", "1,4")
    for case in cases:
        status, out, err = run_redirected("verify", *options, case.judged)
        assert "internal error" not in out + err
        assert not case.has_run, case.name
        assert status == 1, out
    load_all([case.order for case in cases], corpus.modules)
    assert [case.name for case in cases if not case.has_run] == []
