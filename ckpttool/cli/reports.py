"""The reports that CI systems read, beside the answer on stdout."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ckpttool.cli.output import say
from ckpttool.cli.targets import append_report, write_report

if TYPE_CHECKING:
    from ckpttool.errors import CheckpointError
    from ckpttool.ops.verdict import Verification

Junit = Annotated[
    str | None,
    typer.Option("--junit", metavar="FILE", help="Write a JUnit report there.", show_default=False),
]
Sarif = Annotated[
    str | None,
    typer.Option("--sarif", metavar="FILE", help="Write a SARIF 2.1.0 report there.", show_default=False),
]
Github = Annotated[
    bool | None,
    typer.Option(
        "--github/--no-github", help="Write annotations. [default: under GitHub Actions]", show_default=False
    ),
]
Summary = Annotated[
    str | None,
    typer.Option("--summary", metavar="FILE", help="Append a summary in Markdown.", show_default=False),
]


class Reports(NamedTuple):
    """Which reports are wanted, and where."""

    junit: str | None
    sarif: str | None
    github: bool | None
    summary: str | None


def write_reports(
    wanted: Reports,
    verifications: Sequence[Verification],
    failures: Sequence[CheckpointError],
    seconds: Mapping[str, float],
) -> None:
    """Write the reports that are wanted; annotations go to stderr, where GitHub reads them too.

    Raises:
        AccessDenied, NotFound: A file can't be written.
    """
    root = os.environ.get("GITHUB_WORKSPACE")
    if wanted.junit is not None:
        from ckpttool.render.junit import junit

        write_report(wanted.junit, junit(verifications, failures, seconds=seconds).encode())
    if wanted.sarif is not None:
        from ckpttool.render.sarif import sarif

        write_report(wanted.sarif, sarif(verifications, failures, root=root).encode())
    if wanted.summary is not None:
        from ckpttool.render.summary import summary

        append_report(wanted.summary, summary(verifications, failures).encode())
    if _annotates(wanted.github):
        from ckpttool.render.github import workflow_commands

        say(workflow_commands(verifications, failures, root=root).rstrip("\n"))


def _annotates(wanted: bool | None) -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true" if wanted is None else wanted
