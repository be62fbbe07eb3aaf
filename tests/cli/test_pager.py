"""Output that is longer than the screen goes through a pager; no other does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ckpttool_in_terminal
from tests.support.thorough import sampled

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="terminals as POSIX has them")

MARK = "sed s/^/paged:/"
"""A pager that leaves a mark on each line."""


@pytest.fixture
def series(files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(files / "series", tmp_path / "series"))


def is_paged(shown: str) -> bool:
    return shown.startswith("paged:") and "\npaged:" in shown


@pytest.mark.parametrize("arguments", sampled([["--help"], ["prune", "--help"], ["help", "list"], []], 1))
def test_long_help_is_paged(arguments: list[str]) -> None:
    status, shown = ckpttool_in_terminal(*arguments, env={"CKPTTOOL_PAGER": MARK, "PAGER": "false"})
    assert (status, is_paged(shown)) == (0 if arguments else 2, True)


@pytest.mark.thorough
def test_short_output_starts_no_pager() -> None:
    size = (80, 300)
    assert not is_paged(ckpttool_in_terminal("--help", size=size, env={"PAGER": MARK})[1])


def test_lines_that_the_screen_wraps_count(files: Path) -> None:
    arguments = ("inspect", "--field", "tensors", files / "series/model_epoch_1.pth")
    shown = ckpttool_in_terminal(*arguments, size=(40, 10), env={"PAGER": MARK})[1]
    assert shown.startswith("paged:")


PLAIN = (
    *({"PAGER": ""}, {"PAGER": "no-such-pager"}, {"PAGER": MARK, "CKPTTOOL_PAGER": ""}, {"PAGER": "cat"}),
    *({"PAGER": "less '"}, {"PAGER": MARK, "TERM": "dumb"}, {"PATH": "/nowhere"}),
)


@pytest.mark.parametrize("env", sampled(PLAIN, 2))
def test_without_a_pager_the_output_is_plain(env: dict[str, str]) -> None:
    status, shown = ckpttool_in_terminal("--help", env=env)
    assert (status, shown.splitlines()[0]) == (0, "Usage: ckpttool [OPTIONS] COMMAND [ARGS]...")
    assert shown.endswith("Documentation: docs/index.md\n")


def test_json_is_not_paged(series: Path) -> None:
    shown = ckpttool_in_terminal("list", "--json", series, size=(80, 5), env={"PAGER": MARK})[1]
    assert '"ckpttool.list/' in shown and "paged:" not in shown


def test_a_command_that_removes_is_not_paged(series: Path) -> None:
    arguments = ("prune", series, "--keep", "1", "--dry-run")
    status, shown = ckpttool_in_terminal(*arguments, size=(80, 3), env={"PAGER": MARK})
    assert status == 0 and shown.count("\n") > 3 and "paged:" not in shown


@pytest.mark.thorough
def test_bytes_are_not_paged(series: Path) -> None:
    shown = ckpttool_in_terminal("list", "-0", series, size=(80, 2), env={"PAGER": MARK})[1]
    assert "model_epoch_1.pth\0" in shown and "paged:" not in shown


@pytest.mark.thorough
def test_without_somebody_at_the_keyboard_nothing_is_paged() -> None:
    shown = ckpttool_in_terminal("--help", env={"PAGER": MARK}, stdin=subprocess.DEVNULL)[1]
    assert not is_paged(shown)


def test_the_status_is_the_commands_even_if_the_pager_is_left_at_once(series: Path) -> None:
    (series / "model_epoch_1.pth").write_bytes(b"PK")
    status, shown = ckpttool_in_terminal("verify", series, size=(80, 2), env={"PAGER": "true"})
    assert status == 1 and "valid" not in shown and "error" not in shown


def test_warnings_stand_above_the_pager_and_colour_passes(series: Path) -> None:
    (series / "damaged.pth").write_bytes(b"")
    pager = "sed '1s/^/paged:/'"
    shown = ckpttool_in_terminal("list", series, size=(80, 5), env={"PAGER": pager})[1]
    above, paged = shown.split("paged:")
    assert "damaged.pth: incomplete" in above and "\x1b[" in paged


@pytest.mark.thorough
def test_less_is_told_to_let_colours_pass() -> None:
    pager = "sh -c 'echo LESS=$LESS'"
    assert ckpttool_in_terminal("--help", env={"PAGER": pager}) == (0, "LESS=FRX\n")
    assert ckpttool_in_terminal("--help", env={"PAGER": pager, "LESS": "S"}) == (0, "LESS=S\n")


@pytest.mark.thorough
def test_ctrl_c_is_the_pagers() -> None:
    pager = "sh -c 'trap : INT; kill -INT 0; cat'"
    status, shown = ckpttool_in_terminal("--help", env={"PAGER": pager})
    assert status == 0 and "interrupted" not in shown.splitlines()[-1]
    assert shown.endswith("Documentation: docs/index.md\n")
