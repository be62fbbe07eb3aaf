"""Options and arguments that several commands share, as fields of their records."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from ckpttool.core.options import (
    CHECK_PANEL,
    EXECUTION_PANEL,
    OUTPUT_PANEL,
    Reach,
    WrongValue,
    argument,
    option,
)
from ckpttool.core.text import seconds

output_option = partial(option, panel=OUTPUT_PANEL)
_execution_option = partial(option, panel=EXECUTION_PANEL)


def directory_or_paths() -> Any:
    return argument(
        "[DIR]", "Directory of checkpoints. [default: paths in ckpttool.toml, or .]", default=None
    )


def directory_argument() -> Any:
    return argument("[DIR]", "Directory of checkpoints. [default: .]", default=os.curdir)


def json_option(help: str = "Print a JSON document.") -> Any:
    return output_option("--json", help=help, default=False)


def quiet_option(help: str = "Print only errors; see the exit status.") -> Any:
    return output_option("--quiet", "-q", help=help, default=False)


def verbose_option(help: str = "Print more details.") -> Any:
    return output_option("--verbose", "-v", help=help, default=False)


def null_option() -> Any:
    return output_option("--null", "-0", help="End each path with NUL, for xargs -0.", default=False)


def config_option(help: str, panel: str) -> Any:
    return option("--config", metavar="FILE", help=help, panel=panel)


def yes_option() -> Any:
    return _execution_option(
        "--yes", "-y", help="Don't ask for confirmation.", reach=Reach.YES, default=False
    )


def strict_option() -> Any:
    help = "Treat warnings as failures."
    return option("--strict", help=help, panel=CHECK_PANEL, reach=Reach.HARMLESS, default=False)


def trash_option() -> Any:
    help = "Move checkpoints to the trash, from which undo restores them."
    return _execution_option("--trash", help=help, reach=Reach.HARMLESS, default=False)


def interval_option(help: str, default: str | None = None) -> Any:
    return _execution_option(
        "--interval",
        metavar="TIME",
        help=help,
        parse=_checked_interval,
        expected="a time such as 10s or 5min",
        reach=Reach.HARMLESS,
        default=default,
    )


def _checked_interval(text: str) -> str:
    if seconds(text) < 1:  # each look calls ``stat`` for every file
        raise WrongValue("a time of at least 1s")
    return text


def executor_option() -> Any:
    return _execution_option(
        "--executor",
        metavar="dask://HOST:PORT",
        help="Spread the checkpoints over a Dask cluster.",
        parse=_checked_address,
    )


def _checked_address(text: str) -> str:
    from ckpttool.integrations.dask import require_address

    return require_address(text)


def dry_run_option(help: str) -> Any:
    return _execution_option("--dry-run", "-n", help=help, default=False)


def check_option(help: str) -> Any:
    return _execution_option("--check", help=help, default=False)
