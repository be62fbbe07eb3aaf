"""The options of ``prune``: all reach what they are for, and the same words stand in a configuration."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from ckpttool import Policy, PruneRequest
from ckpttool.cli.commands import command_named
from ckpttool.cli.config_keys import keys
from ckpttool.cli.prune import PruneCommand
from ckpttool.cli.retention_config import Retention, retention_for
from tests.support.commands import Run, refusals
from tests.support.golden import Golden
from tests.support.retention import policies

SHOWN = {"dry_run", "check", "explain", "json", "quiet", "verbose"}
CARRIED_OUT = {"trash", "yes"}
COMMAND_LINE_ALONE = {"directory", "config", "empty_trash", *SHOWN}


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")


def _epochs(directory: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("_")[2]) for path in directory.glob("*.pth"))


def test_every_attribute_has_an_option_and_a_key() -> None:
    asked = {one.name for one in (*fields(Policy), *fields(PruneRequest))} - {
        "directory",
        "policy",
        "policies",
    }
    options = set(command_named("prune").rows) - COMMAND_LINE_ALONE - CARRIED_OUT
    assert options == asked
    known = {row.name for row in keys(Retention).values()} - CARRIED_OUT - {"paths", "path_rules"}
    # A configuration that was downloaded with checkpoints makes no command ask anywhere.
    assert known == asked - {"require_copy"}


def test_an_option_offers_what_the_library_knows(run: Run) -> None:
    shown = run("prune", "--help").out
    for flag, owner, name in (
        ("--mode", Policy, "mode"),
        ("--incomplete", Policy, "incomplete"),
        ("--failed", PruneRequest, "failed"),
        ("--verify", PruneRequest, "depth"),
        ("--group-by", PruneRequest, "group_by"),
    ):
        (offered,) = re.findall(rf"^  {flag} (\S+)", shown, re.MULTILINE)
        assert offered.split("|") == [*words(get_type_hints(owner)[name])]


def words(hint: object) -> Iterator[str]:
    """Yield the words that a type allows."""
    for one in get_args(hint):
        if isinstance(one, str):
            yield one
        yield from words(one)


def test_what_was_not_given_is_left_to_the_defaults() -> None:
    wanted, _ = options_from("runs --keep 3 --max-depth 0")
    assert wanted.policies == policies(Policy(keep_last=3))
    assert wanted.requests() == [
        PruneRequest(directory="runs", policies=wanted.policies, exclude=(), max_depth=0),
    ]
    assert (wanted.trash, wanted.yes) == (False, False)


def options_from(arguments: str) -> tuple[Retention, PruneCommand]:
    """Return what a command line asks for, and its options."""
    command = command_named("prune")
    taken: PruneCommand = command.record_of(command.make_context("prune", shlex.split(arguments)))
    return retention_for([] if taken.directory is None else [taken.directory], taken.given), taken


def test_what_is_given_counts_even_if_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ckpttool.toml").write_text("[retention]\nkeep-last = 3\nverify = 'quick'\nmin-age = '2h'\n")
    Path("ckpttool.toml").chmod(0o644)
    asked = [options_from(options)[0].requests()[0] for options in ("", "--verify full --min-age 0")]
    assert [(one.depth, one.min_age) for one in asked] == [("quick", 7200), ("full", 0)]


def test_the_first_mistake_of_the_command_line_is_told(run, series: Path) -> None:
    mistakes = [("--min-age", "soon"), ("--max-size", "huge"), ("--keep-within", "3m")]
    for first, second in itertools.permutations(mistakes, 2):
        status, out, err = run("prune", series, *first, *second)
        assert (status, out, err.startswith(f"ckpttool: error: {first[0]}: ")) == (2, "", True)


LOSSES = "epoch,val_loss\n" + "".join(f"{epoch},{abs(epoch - 4)}\n" for epoch in range(1, 11))


RULES = [
    ("--keep 2", [9, 10]),
    ("--keep-last 2", [9, 10]),
    ("--keep-best 2 --metric loss --mode max", [1, 2, 10]),
    ("--keep-best 1 --metric val_loss --mode min --metrics losses.csv", [4, 10]),
    ("--keep-every-epochs 4", [1, 4, 8, 10]),
    ("--keep-hourly 2", [9, 10]),
    ("--keep-daily 2", [1, 10]),
    ("--keep-weekly 1", [10]),
    ("--keep-monthly 1", [10]),
    ("--keep-yearly 1", [10]),
    ("--keep-within 2h", [8, 9, 10]),
    ("--older-than 1d", [10]),
    ("--older-than 3000w", list(range(1, 11))),
    ("--keep-name *_3*", [3, 10]),
    ("--keep-name *_3* --keep-name *_5*", [3, 5, 10]),
    ("--max-size 10kB", [9, 10]),
    ("--max-total-size 10kB", [9, 10]),
    ("--keep 2 --max-size 13kB", [8, 9, 10]),
    ("--keep-name *_3* --max-total-size 10kB", [3, 9, 10]),
    ("--keep 1 --keep-name *_2.pth --keep-every-epochs 5", [1, 2, 5, 10]),
    ("--keep 1 --exclude *_4.pth", [4, 10]),
    ("--keep 1 --series model_*", [10]),
    ("--keep 1 --group-by parent", [10]),
    ("--keep 1 --max-delete 9", [10]),
    ("--keep 1 --max-delete 90%", [10]),
    ("--keep 1 --verify quick --jobs 1", [10]),
]


def test_rules_from_the_shell(run: Run, series: Path) -> None:
    Path("losses.csv").write_text(LOSSES)
    for epoch in range(1, 11):  # hourly, and the first of them on the day before
        when = time.mktime((2025, 10, 10 - (epoch == 1), epoch, 0, 0, 0, 0, -1))
        os.utime(series / f"model_epoch_{epoch}.pth", (when, when))
    for options, kept in RULES:
        answer = run("prune", series, *options.split(), "-n", "--json")
        removed = [Path(one["path"]) for group in json.loads(answer.out)["groups"] for one in group["remove"]]
        left = sorted({*range(1, 11)} - {int(path.stem.rpartition("_")[2]) for path in removed})
        assert (answer.status, answer.err, left) == (0, "", kept), options


def test_young_ones_stay(run, series: Path) -> None:
    for epoch in range(1, 6):
        os.utime(series / f"model_epoch_{epoch}.pth", (1_760_000_000, 1_760_000_000))
    assert run("prune", series, "--keep", 2, "--min-age", "1d").status == 0
    assert _epochs(series) == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(("fate", "left"), [(None, [4, 9, 10]), ("keep", [4, 9, 10]), ("remove", [9, 10])])
def test_older_incomplete_ones(run, series: Path, fate: str | None, left: list[int]) -> None:
    path = series / "model_epoch_4.pth"
    path.write_bytes(path.read_bytes()[:900])
    os.utime(path, (1_760_000_000, 1_760_000_000))
    status = run("prune", series, "--keep", 2, *(["--incomplete", fate] if fate else [])).status
    assert (status, _epochs(series)) == (int(4 in left), left)


def test_the_document_has_the_rules(run, series: Path) -> None:
    rules = (
        "--keep 3 --keep-best 2 --metric loss --mode min --keep-within 7d --keep-name final* --max-size 1GB"
        " --max-total-size 1.5TB"
    )
    document = json.loads(run("prune", series, *rules.split(), "-n", "--json").out)
    assert document["policy"] == {
        "keep_last": 3,
        "keep_best": 2,
        "metric": "loss",
        "mode": "min",
        "keep_within": 7 * 86_400,
        "keep_names": ["final*"],
        "max_size": 10**9,
        "max_total_size": 15 * 10**11,
    }
    assert document["groups"][0]["policy"] == document["policy"]


WRONG = """
--keep-best 2
--keep-best 2 --metric accuracy --mode max
--keep-within 3m
--max-size plenty
--max-total-size 2
--keep 2 --max-delete 101%
--keep-daily 0
--keep 1 --incomplete maybe
--keep 1 --metrics nowhere.csv
--keep 0
--keep 2 --min-age soon
--keep 3 --keep 2
--keep-last 3 --keep=2
"""


def test_usage(run: Run, series: Path, golden: Golden) -> None:
    """Of a rule that is given twice none wins."""
    lines = [f"prune run {options}" for options in ("", *WRONG.split("\n")[1:-1])]
    golden(refusals(run, *lines, "list run --keep 3 --keep 2", "list run --keep-last 3 --keep=2"))
    assert len(_epochs(series)) == 10


# The recipes ----------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "policies.md").read_text("utf-8")
_BLOCKS = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
_COMMANDS = re.findall(r"(?:^|[ /])ckpttool prune((?: [^|#\n&]*)?)", _BLOCKS, re.MULTILINE)
_CELLS = re.findall(r"\| `(--[^`]+)`(?=[ :;|])[^|]*\|$", PAGE, re.MULTILINE)


def test_the_recipes_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (len(_COMMANDS), len(_CELLS)) == (_BLOCKS.count("ckpttool prune"), PAGE.count("| `--")) == (21, 14)
    monkeypatch.chdir(tmp_path)
    Path("ckpttool.toml").write_text("[retention]\nkeep-last = 3\n")
    Path("ckpttool.toml").chmod(0o644)
    for options in (*_COMMANDS, *(f"DIR {cell}" for cell in _CELLS)):
        wanted, taken = options_from(options)
        if not taken.empty_trash:
            (request,) = wanted.requests()
            assert request.directory == (taken.directory or "."), options
