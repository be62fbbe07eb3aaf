"""``ckpttool merge``: one whole out of the parts that a distributed job wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli.converting import (
    ByOrder,
    DryRun,
    DtypeOption,
    Force,
    Layout,
    LayoutOption,
    Map,
    Model,
    Only,
    OnlyOption,
    ShardSize,
    Strict,
    To,
    finish,
    size_of,
)
from ckpttool.cli.options import Jobs, Json, Quiet


def merge(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC…", readable=False, help="The parts: files, directories, an index, a prefix."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", readable=False, help="What is to be written.")],
    to: To = None,
    only: OnlyOption = Only.ALL,
    dtype: DtypeOption = None,
    layout: LayoutOption = Layout.AS_IS,
    map: Map = None,
    model: Model = None,
    by_order: ByOrder = False,
    shard_size: ShardSize = None,
    dry_run: DryRun = False,
    force: Force = False,
    strict: Strict = False,
    json: Json = False,
    jobs: Jobs = None,
    quiet: Quiet = False,
) -> int:
    """Put the parts of a distributed job together into one whole.

    Parts that are missing, there twice, or of another save are refused. DST appears whole or not at all.
    Exit status: 0 written and compared, 1 what was written differed and was removed, 2 not possible.
    """
    from ckpttool.cli.diffing import chosen
    from ckpttool.ops.conversion import ConvertWishes
    from ckpttool.ops.merge import plan_merge
    from ckpttool.ops.merging.gathered import gathered

    wishes = ConvertWishes(
        to=to,
        only=only.value,
        dtype=None if dtype is None else dtype.value,
        layout=layout.value,
        mapping=map,
        model=model,
        by_order=by_order,
        shard_size=size_of(shard_size),
        strict=strict,
        force=force,
        dry_run=dry_run,
        jobs=jobs,
    )
    with gathered([chosen(str(path)) for path in sources]) as whole:
        return finish(
            lambda following: plan_merge(whole, str(target), wishes, following),
            str(target),
            wishes,
            json=json,
            quiet=quiet,
        )
