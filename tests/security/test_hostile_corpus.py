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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return what writes the cases."""
    return Corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def cases(corpus: Corpus) -> list[Case]:
    """Return the hostile files, none of which was loaded."""
    return list(corpus.all(every=EVERY))


def worst_safeties(cases: Iterable[Case]) -> dict[Path, str]:
    """Return what one verification of all cases says that the worst of each checkpoint is."""
    found: dict[Path, set[str]] = {case.judged: set() for case in cases}
    status, out, err = run_redirected("verify", "--json", *found)
    assert (status, "internal error" in err) == (1, False), err[-500:]
    for one in json.loads(out)["checkpoints"]:
        path = Path(one["path"])
        found[next(place for place in (path, *path.parents) if place in found)].add(one["safety"])
    words = ("unsafe", "unknown", "safe")
    return {
        path: next((word for word in words if word in said), "nothing looked at")
        for path, said in found.items()
    }


@pytest.mark.parametrize("step", [24, pytest.param(1, marks=pytest.mark.thorough)])
def test_no_attack_is_called_safe_by_any_command_nor_run(
    step: int, cases: list[Case], tmp_path: Path
) -> None:
    """All are verified; those of each step are given to the other commands, too."""
    wrong = []
    for case, said in zip(cases, worst_safeties(cases).values(), strict=True):
        if said != "unsafe" and not (case.may_be_unknown and said == "unknown"):
            wrong.append(f"{case.name}: {said}")
    for case in cases[::step]:
        wrong += [f"{case.name}: {sentence}" for sentence in _other_commands(case, tmp_path / "out")]
    directories = sorted({case.judged.parent for case in cases})
    status, out, err = run_redirected("list", "--json", *directories[::step])
    assert status in (0, 1, 2) and (out or err)
    ran = [f"{case.name} has run" for case in cases if case.has_run]
    assert not ran, lines(ran)
    assert not wrong, lines([f"{len(wrong)} of {len(cases)}", *wrong])


def _other_commands(case: Case, target: Path) -> Iterable[str]:
    """Run the commands that open a checkpoint; yield what they should not say."""
    commands = (
        ("verify", case.judged),
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
@pytest.mark.parametrize(
    ("groups", "step"),
    [(("torch",), 12), pytest.param(tuple(GROUPS), 1, marks=pytest.mark.thorough)],
    ids=["some of torch", "all"],
)
def test_every_attack_runs_in_its_framework_and_in_no_prediction_without_trust(
    groups: tuple[str, ...],
    step: int,
    corpus: Corpus,
    cases: list[Case],
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{corpus.modules}")
    whole = [corpus.whole(*subtle, files / name, *WHOLE[name]) for subtle in SUBTLE for name in WHOLE]
    for case in whole:
        options = ("--json", "--predict", "--model", NET, "--input-shape", "1,4")
        status, out, err = run_redirected("verify", *options, case.judged)
        assert "internal error" not in out + err
        assert not case.has_run, case.name
        assert status == 1, out
    loaders = {loader for group in groups for loader in GROUPS[group]}
    provable = [case for case in cases if case.is_provable and case.loader in loaders]
    loaded = [*provable[::step], *whole]
    ends = load_all([case.order for case in loaded], corpus.modules)
    idle = [f"{case.name}: {end}" for case, end in zip(loaded, ends, strict=True) if not case.has_run]
    assert not idle, lines(idle)
    for case in loaded:
        case.forget()
