"""The options of ``verify``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckpttool.cli.options import (
    config_option,
    executor_option,
    json_option,
    quiet_option,
    strict_option,
    verbose_option,
)
from ckpttool.cli.report_files import Reports
from ckpttool.core.options import (
    CHECK_PANEL,
    PREDICTION_PANEL,
    SELECTION_PANEL,
    argument,
    group,
    jobs_option,
    option,
    options_of,
    same_option,
)
from ckpttool.ops.workload import Workload
from ckpttool.predict.request import PredictionRequest
from ckpttool.runs.scope import Scope

_check = partial(option, panel=CHECK_PANEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCommand:
    """The options of ``verify``.

    Attributes:
        checks: Names of the checks to run, without those of a prediction.
        settings: The ``VerifyConfig`` that applies, or None.
    """

    paths: Sequence[str] = argument(
        "[PATH...]",
        "Files, or directories of checkpoints. [default: paths in ckpttool.toml]",
        default=(),
    )
    quick: bool = _check("--quick", help="Check only structure and safety; read no values.", default=False)
    only: str | None = _check(
        "--only",
        metavar="NAME,...",
        complete="check",
        help="Run only these checks: structure, checksum, values, safety, manifest, load, predict.",
    )
    strict: bool = strict_option()
    against: str | None = _check(
        "--against", metavar="COPY", help="Also compare every file with this copy, byte for byte."
    )
    write_manifest: bool = _check(
        "--write-manifest",
        help="Write NAME.sha256 and NAME.digests.json for each valid checkpoint.",
        default=False,
    )
    force: bool = _check("--force", help="Replace an existing manifest or recording.", default=False)
    predict: bool = option(
        "--predict",
        help="Load and run each checkpoint with its framework, in a separate process.",
        panel=PREDICTION_PANEL,
        default=False,
    )
    prediction: Mapping[str, Any] = group(PredictionRequest)
    reports: Reports = group(Reports, is_record=True)
    config: str | None = config_option(
        "Read the rules from this file; auto: from the one nearest to PATH.", SELECTION_PANEL
    )
    exclude: Sequence[str] = same_option(Scope, "exclude")
    max_depth: int | None = same_option(Scope, "max_depth")
    jobs: int | None = jobs_option()
    workload: Workload = group(Workload, is_record=True)
    executor: str | None = executor_option()
    merge: bool = option(
        "--merge",
        help="Merge the JSON documents of all parts (PATH...) into the result of one run.",
        panel=SELECTION_PANEL,
        default=False,
    )
    json: bool = json_option()
    quiet: bool = quiet_option("Print only problems.")
    verbose: bool = verbose_option("Show every check of each checkpoint.")
    checks: tuple[str, ...] = ()
    settings: Any = None


# The others, such as --rtol, --seed or --batch-size, only adjust a prediction, and need --predict.
_IMPLYING = (
    "model",
    "optimizer",
    "input",
    "input_shapes",
    "signature",
    "record",
    "expect",
    "labels",
    "resume_step",
)
"""Attributes that request a prediction without ``--predict``."""


def implies_prediction(options: Mapping[str, Any]) -> bool:
    """Return whether options imply a prediction without ``--predict``."""
    return any(name in _IMPLYING for name in options)


def flag_of(name: str) -> str:
    """Return the option that gives an attribute of a ``PredictionRequest``."""
    return options_of(PredictionRequest)[name].flags[0]
