"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Number of threads. [default: CPUs]", show_default=False),
]
Exclude = Annotated[
    list[str], typer.Option("--exclude", metavar="GLOB", help="Pass over what matches. May be repeated.")
]
MaxDepth = Annotated[
    int | None,
    typer.Option("--max-depth", min=0, metavar="N", help="Descend N levels at most.", show_default=False),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but errors; the exit status tells.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")]
