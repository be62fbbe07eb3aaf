"""Options and arguments that several commands share, as fields of their records."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Literal

from ckpttool.core.options import EXECUTION_PANEL, OUTPUT_PANEL, argument, option

Depth = Literal["quick", "full"]
Mode = Literal["min", "max"]

in_output = partial(option, panel=OUTPUT_PANEL)


def directory_argument() -> Any:
    return argument("[DIR]", "Directory of checkpoints. [default: .]", default=os.curdir)


def json_option(help: str = "Print a JSON document.") -> Any:
    return in_output("--json", help=help, default=False)


def quiet_option(help: str = "Print only errors; see the exit status.") -> Any:
    return in_output("--quiet", "-q", help=help, default=False)


def verbose_option(help: str = "Print more details.") -> Any:
    return in_output("--verbose", "-v", help=help, default=False)


def null_option() -> Any:
    return in_output("--null", "-0", help="End each path with NUL, for xargs -0.", default=False)


def yes_option() -> Any:
    return option("--yes", "-y", help="Don't ask for confirmation.", panel=EXECUTION_PANEL, default=False)


def dry_run_option(help: str) -> Any:
    return option("--dry-run", "-n", help=help, panel=EXECUTION_PANEL, default=False)


def mode_option(panel: str) -> Any:
    help = "Take the lowest or the highest value as the best. [default: by the name]"
    return option("--mode", help=help, panel=panel)
