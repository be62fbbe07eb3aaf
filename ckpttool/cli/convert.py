"""``ckpttool convert``: the same tensors in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli import converting
from ckpttool.cli.options import Jobs, Json, Quiet


def convert(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="SRC", readable=False, help="A checkpoint.")],
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
    """Write a checkpoint in another format, and compare every bit.

    DST appears whole or not at all. What is not a tensor travels too: epoch, optimizer groups, containers.
    Exit status: 0 written and compared, 1 what was written differed and was removed, 2 not possible.
    """
    from ckpttool.cli.diffing import chosen
    from ckpttool.formats import open_checkpoint
    from ckpttool.ops.conversion_plan import plan_conversion

    wanted = converting.wishes(context.params)
    with open_checkpoint(chosen(str(source))) as checkpoint:
        return converting.finish(
            lambda following: plan_conversion(checkpoint, str(target), wanted, following),
            str(target),
            wanted,
            json=json,
            quiet=quiet,
        )
