"""Whatever arguments a command is given, it does its work or says what is wrong with them."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from ckpttool.cli.commands import COMMANDS
from tests.support.commands import Run
from tests.support.thorough import sampled

OPTION = re.compile(r"^  (?:-\w, )?(--[a-z-]+)(?:, --[a-z-]+)*( [A-Z|a-z,.:=\[\]]+)?(?=  |$)", re.MULTILINE)
ELSEWHERE = {"--help", "--wait", "--predict", "--executor"}
"""Options that end at once, wait, or need another program."""
METRICS = ("loss", "val_loss", "quality")
VALUES = {
    "N": ("1", "2", "3", "0", "-1", "1.5", "1" + "0" * 20),
    "X": ("0.5", "0", "-1", "nan", "inf", "1e400"),
    "TIME": ("7d", "2w", "1s", "0s", "-1d", "9" * 20 + "d"),
    "SIZE": ("1KB", "0B", "9" * 20 + "TB", "1"),
    "GLOB": ("*", "[", "runs/*", "*.pth", "optimizer.*"),
    "METRIC": METRICS,
    "NAME": METRICS,
    "DATE": ("2099-01-01", "2000-01-01", "90d", "9999-99-99"),
    "TRACKER": ("tensorboard:logs", "wandb:", "none:x"),
    "FORMAT": ("pytorch", "safetensors", "hdf5", "numpy", "tensorflow"),
    "": ("", "{", "é", "\udcff", "x" * 300, "a=b", "1,2", "1,,2", "{epoch}", "{unknown}", "runs", "a.pth"),
}
"""Values by what the help calls them, and what any option might be given."""
TARGETS = (
    *("a.pth", "cut.pth", "empty.pth", "missing.pth", "model.safetensors", "out.pth", "new/out.safetensors"),
    *("runs", "runs/model_epoch_1.pth", "runs/*.pth", "search", "nothing", ".", "-"),
)


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a directory with runs, and with files of which some are no good."""
    shutil.copytree(files / "series", tmp_path / "runs")
    shutil.copytree(files / "runs" / "lightning" / "search", tmp_path / "search")
    shutil.copy(files / "safetensors" / "metadata.safetensors", tmp_path / "model.safetensors")
    data = (files / "pytorch" / "guide.pth").read_bytes()
    for name, content in {"a.pth": data, "cut.pth": data[:1500], "empty.pth": b""}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "nothing").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def value_of(kind: str, chance: random.Random) -> str:
    """Return a value for an option, now and then one of another kind."""
    if chance.random() < 0.1:
        kind = chance.choice(list(VALUES))
    return chance.choice(VALUES.get(kind) or kind.split("|"))


@pytest.mark.parametrize("count", sampled([6, 120], 1))
@pytest.mark.parametrize("command", COMMANDS)
def test_no_arguments_are_an_internal_error(
    command: str, count: int, here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("select.select", lambda *_: ([], [], []))  # a watch looks twice
    options = [found for found in OPTION.findall(run(command, "--help").out) if found[0] not in ELSEWHERE]
    chance = random.Random(command)
    for _ in range(count):
        arguments = ["--once"] if command == "watch" else []
        for name, kind in chance.choices(options, k=chance.randrange(4)):
            arguments += [name, *([value_of(kind.strip(), chance)] if kind else [])]
        arguments += chance.choices(TARGETS, k=chance.choice((0, 1, 1, 2, 3)))
        answer = run(command, *arguments)
        assert answer.status in (0, 1, 2), arguments
        assert "internal error" not in answer.err, (arguments, answer.err)


@pytest.mark.parametrize("command", ["copy", "average", "merge"])
@pytest.mark.parametrize(("paths", "missing"), [([], "SRC..."), (["runs"], "DST")])
def test_the_argument_that_is_missing_is_named(
    command: str, paths: list[str], missing: str, run: Run
) -> None:
    answer = run(command, *paths)
    assert (answer.status, answer.out) == (2, "")
    hint = f"(see 'ckpttool {command} --help')"
    assert answer.err == f"ckpttool: error: Missing argument '{missing}' {hint}\n"
    assert run(command, *paths, "--help").status == 0


@pytest.mark.parametrize(
    "command",
    [
        ("list", "--best", "lr"),
        ("latest", "--best", "lr"),
        ("prune", "--keep-best", "1", "--metric", "lr", "-n"),
    ],
)
def test_a_metric_that_no_checkpoint_has_is_named_before_its_mode(
    command: tuple[str, ...], files: Path, tmp_path: Path, run: Run
) -> None:
    shutil.copytree(files / "series", tmp_path / "runs")
    answer = run(command[0], tmp_path / "runs", *command[1:])
    assert answer.status == (1 if command[0] == "latest" else 2)
    assert "no checkpoint" in answer.err and "metric 'lr'" in answer.err
    assert "--mode" not in answer.err
