"""What ``convert`` and ``merge`` share: their options, and what is done with them."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool.cli.output import has_colour, print_json, progress, say_error, say_warning

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.ops.conversion import Converted, ConvertWishes
    from ckpttool.ops.conversion_plan import ConversionPlan


class Layout(str, enum.Enum):
    """In which layout weights are written."""

    AS_IS = "as-is"
    TORCH = "torch"
    KERAS = "keras"


class Only(str, enum.Enum):
    """Which tensors are written."""

    WEIGHTS = "weights"
    ALL = "all"


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
        "[default: what DST's name says]",
        show_default=False,
    ),
]
OnlyOption = Annotated[
    Only,
    typer.Option("--only", help="All, or the model's weights under the names that a model expects."),
]
DtypeOption = Annotated[
    Float | None, typer.Option("--dtype", help="Convert floating tensors to it.", show_default=False)
]
LayoutOption = Annotated[
    Layout, typer.Option("--layout", help="Bring weights to a framework's layout and names.")
]
Map = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="FILE",
        help="Say in TOML what tensors become: names, transposes, splits, joins.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FILE",
        help="Take names, layouts and architecture of FILE, another checkpoint of the same network.",
        show_default=False,
    ),
]
ByOrder = Annotated[bool, typer.Option("--by-order", help="Pair layers that are alike by their order.")]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--shard-size",
        metavar="SIZE",
        help="Write a directory of files of at most SIZE: 5GB, 500MiB.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would be written; write nothing.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace the checkpoint that stands at DST.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Refuse where anything can't be carried, or PyTorch needs weights_only=False."
    ),
]


def wishes(parameters: Mapping[str, Any]) -> ConvertWishes:
    """Return what the options ask for.

    Args:
        parameters: The options, by the names of parameters.

    Raises:
        UsageError: The size of a shard is none.
    """
    from ckpttool.ops.conversion import ConvertWishes

    said = {**parameters, "mapping": parameters["map"]}
    said["shard_size"] = None if said["shard_size"] is None else _shard_size(said["shard_size"])
    return ConvertWishes(**{one.name: _plain(said[one.name]) for one in fields(ConvertWishes)})


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _shard_size(text: str) -> int:
    from ckpttool.amounts import nbytes
    from ckpttool.errors import UsageError

    try:
        found = nbytes(text, is_lenient=True)
    except UsageError as failure:
        raise UsageError(f"--shard-size {text}: no size (5GB, 500MiB, 100000)") from failure
    if not found:
        raise UsageError(f"--shard-size {text}: nothing fits into that")
    return found


def finish(
    make: Callable[[Checkpoint | None], ConversionPlan],
    target: str,
    wishes: ConvertWishes,
    *,
    json: bool,
    quiet: bool,
) -> int:
    """Carry out a plan, show what came of it, and return the exit status.

    Args:
        make: Makes the plan, with the model that the wishes name, if any.
        target: The path that was given, for errors.
        wishes: What was asked for.
        json: Whether the document is printed.
        quiet: Whether only warnings are shown.

    Raises:
        CheckpointError: The source or the model can't be read, or the target can't be written.
        UsageError: The wishes can't be followed, or the target can't hold what the source has.
    """
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
    for one in converted.safety:
        say_warning(f"{target}[{one.where}]: {one.message}" if one.where else f"{target}: {one.message}")
    _show(converted, json=json, quiet=quiet)
    return int(bool(converted.mismatches))


def _show(converted: Converted, *, json: bool, quiet: bool) -> None:
    if json:
        from ckpttool.render.json_convert import convert_document

        print_json(convert_document(converted))
    elif quiet:
        for one in converted.dropped:
            say_warning(f"{one.path} is not carried: {one.why}")
    elif not converted.mismatches:
        from ckpttool.render.text_convert import convert_text

        print(convert_text(converted, colour=has_colour(sys.stdout)))
