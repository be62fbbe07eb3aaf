"""``ckpttool merge``: one whole out of the parts that a distributed job wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli import converting
from ckpttool.cli.options import Jobs, Json, Quiet


def merge(
    context: typer.Context,
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC…", readable=False, help="The parts: files, directories, an index, a prefix."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", readable=False, help="What is to be written.")],
    to: converting.To = None,
    only: converting.OnlyOption = converting.Only.ALL,
    dtype: converting.DtypeOption = None,
    layout: converting.LayoutOption = converting.Layout.AS_IS,
    map: converting.Map = None,
    model: converting.Model = None,
    by_order: converting.ByOrder = False,
    shard_size: converting.ShardSize = None,
    dry_run: converting.DryRun = False,
    force: converting.Force = False,
    strict: converting.Strict = False,
    json: Json = False,
    jobs: Jobs = None,
    quiet: Quiet = False,
) -> int:
    """Put the parts of a distributed job together into one whole.

    Parts that are missing, there twice, or of another save are refused. DST appears whole or not at all.
    Exit status: 0 written and compared, 1 what was written differed and was removed, 2 not possible.
    """
    from ckpttool.cli.diffing import chosen
    from ckpttool.ops.merge import open_parts, plan_merge

    wanted = converting.wishes(context.params)
    with open_parts([chosen(str(path)) for path in sources]) as whole:
        return converting.finish(
            lambda following: plan_merge(whole, str(target), wanted, following),
            str(target),
            wanted,
            json=json,
            quiet=quiet,
        )
