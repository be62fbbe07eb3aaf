"""``ckpttool convert`` and ``ckpttool merge``: write a checkpoint in another format, or from its parts."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool.cli.options import Jobs, Json, Quiet, TensorSelection
from ckpttool.cli.output import has_colour, print_json, progress, say_error, say_warning

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.ops.conversion import ConvertWishes
    from ckpttool.ops.conversion_plan import ConversionPlan


class TargetLayout(str, enum.Enum):
    """In which layout weights are written."""

    AS_IS = "as-is"
    TORCH = "torch"
    KERAS = "keras"


class Float(str, enum.Enum):
    """What floating tensors become."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="pytorch, safetensors, tensorflow, savedmodel, keras, keras-h5, hdf5, numpy, fluid, torch-dcp. "
        "[default: by DST's name]",
        show_default=False,
    ),
]
OnlyOption = Annotated[
    TensorSelection,
    typer.Option("--only", help="Everything, or only the weights, under the names that a model expects."),
]
DtypeOption = Annotated[
    Float | None,
    typer.Option("--dtype", help="Convert floating-point tensors to this type.", show_default=False),
]
LayoutOption = Annotated[
    TargetLayout, typer.Option("--layout", help="Convert weights to a framework's layout and names.")
]
Map = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="FILE",
        help="Read names, transposes, splits and joins of tensors from a TOML file.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FILE",
        help="Take names, layouts and architecture from another checkpoint of the same network.",
        show_default=False,
    ),
]
ByOrder = Annotated[bool, typer.Option("--by-order", help="Pair similar layers by their order.")]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--shard-size",
        metavar="SIZE",
        help="Write a directory of files of at most SIZE each: 5GB, 500MiB.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be written; write nothing.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace an existing checkpoint at DST.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Fail if anything can't be carried over, or PyTorch needs weights_only=False."
    ),
]


def convert(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="SRC", readable=False, help="The checkpoint to convert.")],
    target: Annotated[Path, typer.Argument(metavar="DST", readable=False, help="The path to write.")],
    to: To = None,
    only: OnlyOption = TensorSelection.ALL,
    dtype: DtypeOption = None,
    layout: LayoutOption = TargetLayout.AS_IS,
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
    """Convert a checkpoint to another format and compare every bit.

    DST is written completely or not at all. Epoch, optimizer groups, containers and other metadata are
    carried along. Exit status: 0 written and equal, 1 the result differed and was removed, 2 not possible.
    """
    from ckpttool.cli.paths import single_checkpoint
    from ckpttool.formats import open_checkpoint
    from ckpttool.ops.conversion_plan import plan_conversion

    wanted = _conversion_wishes(context.params)
    with open_checkpoint(single_checkpoint(str(source))) as checkpoint:
        return _plan_and_convert(
            lambda following: plan_conversion(checkpoint, str(target), wanted, following),
            str(target),
            wanted,
            json=json,
            quiet=quiet,
        )


def merge(
    context: typer.Context,
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC…", readable=False, help="The parts: files, directories, an index or a prefix."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", readable=False, help="The path to write.")],
    to: To = None,
    only: OnlyOption = TensorSelection.ALL,
    dtype: DtypeOption = None,
    layout: LayoutOption = TargetLayout.AS_IS,
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
    """Merge the parts that a distributed job wrote into one checkpoint.

    Missing parts, duplicates and parts of another save are errors. DST is written completely or not at all.
    Exit status: 0 written and equal, 1 the result differed and was removed, 2 not possible.
    """
    from ckpttool.cli.paths import single_checkpoint
    from ckpttool.ops.merge import open_parts, plan_merge

    wanted = _conversion_wishes(context.params)
    with open_parts([single_checkpoint(str(path)) for path in sources]) as whole:
        return _plan_and_convert(
            lambda following: plan_merge(whole, str(target), wanted, following),
            str(target),
            wanted,
            json=json,
            quiet=quiet,
        )


def _conversion_wishes(parameters: Mapping[str, Any]) -> ConvertWishes:
    """Return the options as the engine knows them, whatever the command is called."""
    from ckpttool.ops.conversion import ConvertWishes

    values = {**parameters, "mapping": parameters["map"]}
    values["shard_size"] = None if values["shard_size"] is None else _parse_shard_size(values["shard_size"])
    chosen = {field.name: values[field.name] for field in fields(ConvertWishes)}
    return ConvertWishes(
        **{name: value.value if isinstance(value, enum.Enum) else value for name, value in chosen.items()}
    )


def _parse_shard_size(text: str) -> int:
    from ckpttool.amounts import nbytes
    from ckpttool.errors import UsageError

    try:
        size = nbytes(text, is_lenient=True)
    except UsageError as failure:
        raise UsageError(f"--shard-size {text}: no size (5GB, 500MiB, 100000)") from failure
    if not size:
        raise UsageError(f"--shard-size {text}: nothing fits into that")
    return size


def _plan_and_convert(
    make: Callable[[Checkpoint | None], ConversionPlan],
    target: str,
    wishes: ConvertWishes,
    *,
    json: bool,
    quiet: bool,
) -> int:
    """Plan with the model that the wishes name, convert, print the result, and return the exit status."""
    from ckpttool.ops.conversion_plan import model_of
    from ckpttool.ops.convert import carry_out

    with model_of(wishes) as model:
        planned = make(model)
        with progress("writing", 0 if wishes.dry_run else planned.work) as advance:
            converted = carry_out(planned, advance=advance)
    for failure in converted.mismatches:
        say_error(f"{target}: {failure} (nothing was written)")
    for warning in converted.warnings:
        say_warning(warning)
    for finding in converted.safety:
        place = f"{target}[{finding.where}]" if finding.where else target
        say_warning(f"{place}: {finding.message}")
    if json:
        from ckpttool.render.json import convert_document

        print_json(convert_document(converted))
    elif quiet:
        for value in converted.dropped:
            say_warning(f"{value.path} is not carried: {value.why}")
    elif not converted.mismatches:
        from ckpttool.render.text_convert import convert_text

        print(convert_text(converted, colour=has_colour(sys.stdout)))
    return int(bool(converted.mismatches))
