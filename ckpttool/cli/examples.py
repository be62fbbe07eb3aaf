"""End of each command's help: examples, exit statuses, and its page of the documentation.

Imported only when help is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Closing(NamedTuple):
    """End of a command's help.

    Attributes:
        examples: Command lines by their purpose.
        statuses: The meaning of each exit status.
        page: Path of the command's page in the documentation.
        environment: The effect of each environment variable.
    """

    examples: Mapping[str, str]
    statuses: Mapping[int, str]
    page: str
    environment: Mapping[str, str] = {}


_REFERENCE = "docs/reference"
"""The directory of the pages in the source, as long as the project has no site."""
_CONVERTED = {
    0: "the checkpoint was written, and is equal to the source",
    1: "the result differed from the source, and was removed",
    2: "it could not be converted",
}
_NOT_LISTED = "a directory can't be read"

ROOT = Closing(
    {
        "Show what a checkpoint contains": "ckpttool inspect model.pth",
        "Check all checkpoints in a directory": "ckpttool verify runs",
        "Show what a policy would remove": "ckpttool prune runs --keep 3 --dry-run",
        "Show the options of a command, with examples": "ckpttool help prune",
    },
    {
        0: "success",
        1: "something needs attention, such as damage or a difference",
        2: "the command failed, or its arguments are invalid",
        130: "interrupted by Ctrl-C",
        143: "terminated by SIGTERM",
    },
    "docs/index.md",
    {
        "CKPTTOOL_PAGER, PAGER": "Program that shows output longer than the screen; empty for none. "
        "[default: less]",
        "NO_COLOR, FORCE_COLOR": "Never or always use colour.",
        "CKPTTOOL_DEBUG=1": "Show the traceback of an error.",
    },
)
"""The closing of ``ckpttool --help``."""

CLOSINGS: Mapping[str, Closing] = {
    "inspect": Closing(
        {
            "Show format, epoch, step, loss and tensors": "ckpttool inspect model.pth",
            "Print one value, for a script": "ckpttool inspect --field training.epoch model.pth",
            "Show statistics of some tensors": "ckpttool inspect --stats --filter '*weight' model.pth",
        },
        {
            0: "the checkpoint was read",
            1: "it is damaged or dangerous to load, or no tensor matches --filter",
            2: "it can't be read",
        },
        f"{_REFERENCE}/inspect.md",
    ),
    "verify": Closing(
        {
            "Check every byte of all checkpoints in a directory": "ckpttool verify runs",
            "Check a download before loading it": "ckpttool verify --quick model.pth",
            "Fail in CI, and write a report": "ckpttool verify --strict --sarif out.sarif runs",
            "Check that a model predicts as recorded": (
                "ckpttool verify model.pth --model models.py:Net --expect golden.npz"
            ),
        },
        {
            0: "all checkpoints are valid, and none is unsafe",
            1: "a checkpoint is invalid or unsafe, or has warnings (--strict)",
            2: "a path can't be read, or there is no checkpoint",
        },
        f"{_REFERENCE}/verify.md",
    ),
    "explain": Closing(
        {
            "Explain a finding of verify": "ckpttool explain unknown-class",
            "List all findings": "ckpttool explain",
        },
        {0: "the finding was explained", 2: "no finding has this code"},
        f"{_REFERENCE}/explain.md",
    ),
    "list": Closing(
        {
            "List all runs, and mark the best of each": "ckpttool list runs --best loss",
            "List the largest first": "ckpttool list runs --flat --sort size --reverse",
            "Show what a policy would keep": "ckpttool list runs --keep 3",
            "Plot the loss of all runs": "ckpttool list runs --best loss --plot runs.svg",
        },
        {
            0: "everything was listed, or there was nothing to list",
            1: "a checkpoint is damaged, unsafe or can't be read",
            2: _NOT_LISTED,
        },
        f"{_REFERENCE}/list.md",
    ),
    "report": Closing(
        {
            "Write report.html about all runs": "ckpttool report runs",
            "Also show the space that a policy would free": (
                "ckpttool report runs --keep-best 2 --best loss -o runs.html"
            ),
        },
        {
            0: "the page was written",
            1: "it was written, and a checkpoint is damaged, unsafe or can't be read",
            2: f"{_NOT_LISTED}, or the page can't be written",
        },
        f"{_REFERENCE}/report.md",
    ),
    "latest": Closing(
        {
            "Print the checkpoint to resume from": "ckpttool latest runs",
            "Resume a training from it": 'python train.py --resume "$(ckpttool latest runs/exp1)"',
            "Print the best by a metric": "ckpttool latest runs --best loss",
        },
        {
            0: "the path is on stdout",
            1: "no checkpoint matches",
            2: "DIR doesn't exist or can't be read, or every intact checkpoint is unsafe",
        },
        f"{_REFERENCE}/latest.md",
    ),
    "diff": Closing(
        {
            "Compare two checkpoints": "ckpttool diff old.pth new.pth",
            "Compare across formats": "ckpttool diff model.pth model.keras --only weights",
            "Allow rounding, and summarise by module": "ckpttool diff --rtol 1e-3 --stat old.pth new.pth",
            "Follow the series in a directory": "ckpttool diff runs/exp1",
        },
        {
            0: "they are equal",
            1: "they differ, or could not be shown to be equal",
            2: "something can't be read",
        },
        f"{_REFERENCE}/diff.md",
    ),
    "convert": Closing(
        {
            "Convert to the format of DST's name": "ckpttool convert model.pth model.safetensors",
            "Write the weights alone, in bfloat16": (
                "ckpttool convert model.pth w.safetensors --only weights --dtype bfloat16"
            ),
            "Write shards of at most 5 GB": (
                "ckpttool convert model.pth shards --to safetensors --shard-size 5GB"
            ),
            "Show what would be written": "ckpttool convert -n model.pth model.h5",
        },
        _CONVERTED,
        f"{_REFERENCE}/convert.md",
    ),
    "merge": Closing(
        {
            "Merge the shards of an index": "ckpttool merge model.safetensors.index.json whole.safetensors",
            "Merge the files of all ranks": "ckpttool merge model_world_size_2_rank_*.pt whole.pth",
        },
        {
            **_CONVERTED,
            1: "the result differed from the parts, and was removed",
            2: "the parts could not be merged",
        },
        f"{_REFERENCE}/merge.md",
    ),
    "salvage": Closing(
        {
            "Save the intact tensors": "ckpttool salvage damaged.pth salvaged.pth",
            "List the lost tensors as JSON": "ckpttool salvage -n damaged.pth salvaged.pth --json",
        },
        {
            0: "nothing is lost",
            1: "something is lost, and the rest was written",
            2: "nothing could be salvaged",
        },
        f"{_REFERENCE}/salvage.md",
    ),
    "log": Closing(
        {
            "Record all checkpoints for TensorBoard": "ckpttool log runs/exp1 --to tensorboard:tb",
            "Record one in an MLflow experiment": "ckpttool log model.pth --to mlflow:digits",
        },
        {
            0: "all are valid, none is unsafe, and all are recorded",
            1: "some are invalid, unsafe or can't be read; the others are recorded",
            2: "there is no checkpoint, or the tracker can't be reached",
        },
        f"{_REFERENCE}/log.md",
    ),
    "card": Closing(
        {
            "Write a model card for the Hugging Face Hub": "ckpttool card model.pth -o README.md",
            "Record its training data": "ckpttool card model.pth --set data=CIFAR-10",
        },
        {0: "the card was written", 2: "the checkpoint can't be read, or FILE exists"},
        f"{_REFERENCE}/card.md",
    ),
    "average": Closing(
        {
            "Average the five newest": "ckpttool average --last 5 runs/exp1 average.safetensors",
            "Average the three best": "ckpttool average --best 3 --metric loss runs/exp1 average.pth",
            "Give the last twice the weight": "ckpttool average old.pth new.pth average.pth --weights 1,2",
        },
        {
            0: "the average was written, and read back",
            1: "the result differed when read back, and was removed",
            2: "the checkpoints could not be averaged",
        },
        f"{_REFERENCE}/average.md",
    ),
    "copy": Closing(
        {
            "Copy all checkpoints in a directory to a bucket": "ckpttool copy runs s3://bucket/runs",
            "Keep the newest 5 of each run there": "ckpttool copy runs s3://bucket/runs --keep 5",
            "Fetch a checkpoint": "ckpttool copy s3://bucket/runs/exp1/checkpoint-500 .",
            "Show what would be copied": "ckpttool copy -n runs /mnt/backup/runs",
        },
        {
            0: "DST has every checkpoint, byte for byte",
            1: "a checkpoint is invalid, or DST has a different one of the same name",
            2: "something can't be read or written",
        },
        f"{_REFERENCE}/copy.md",
    ),
    "prune": Closing(
        {
            "Show what would be removed": "ckpttool prune runs --keep 3 --dry-run",
            "Keep the newest 3 and the best 2 of each run; undo restores the rest": (
                "ckpttool prune runs --keep 3 --keep-best 2 --metric loss --trash"
            ),
            "Keep one per day of the last week, without asking": "ckpttool prune runs --keep-daily 7 --yes",
            "Explain the plan for one checkpoint": "ckpttool prune runs --keep 3 --explain runs/epoch_4.pth",
        },
        {
            0: "all was done, or there was nothing to do",
            1: "something was damaged, left alone, declined, or would be removed (--check)",
            2: "a directory can't be read, or more than --max-delete would be removed",
        },
        f"{_REFERENCE}/prune.md",
    ),
    "rename": Closing(
        {
            "Show the new names": "ckpttool rename runs -t '{run}-e{epoch:04d}' --dry-run",
            "Put a metric into the names": "ckpttool rename runs -t '{run}-e{epoch:04d}-loss={loss:.4f}'",
            "Restore the old names": "ckpttool undo runs",
        },
        {
            0: "all names fit the template",
            1: "something kept its name, was declined, or would be renamed (--check)",
            2: "nothing could be renamed",
        },
        f"{_REFERENCE}/rename.md",
    ),
    "watch": Closing(
        {
            "Verify checkpoints as a training saves them": "ckpttool watch runs",
            "Also run the steps of a configuration": "ckpttool watch --config ckpttool.toml",
            "Once, from cron or at the end of a job": "ckpttool watch runs --once",
        },
        {
            0: "the watch ended, and all verified checkpoints are valid",
            1: "a checkpoint is damaged, or the last attempt at a step failed",
            2: "the directory doesn't exist, or another process watches it",
        },
        f"{_REFERENCE}/watch.md",
    ),
    "undo": Closing(
        {
            "Show what would be restored": "ckpttool undo runs --dry-run",
            "Undo the last prune --trash or rename": "ckpttool undo runs",
        },
        {
            0: "everything was restored, or there was nothing to undo",
            1: "something could not be restored",
            2: "the directory can't be read or changed",
        },
        f"{_REFERENCE}/undo.md",
    ),
    "init": Closing(
        {
            "Write a ckpttool.toml to start from": "ckpttool init",
            "Write one for the directory runs": "ckpttool init runs",
        },
        {0: "the file was written", 2: "a configuration already exists, or can't be written"},
        f"{_REFERENCE}/config.md",
    ),
    "config": Closing(
        {
            "Show the configuration in force": "ckpttool config",
            "Show the one that applies in a directory": "ckpttool config runs",
            "Trust it, once you have read it": "ckpttool config --trust",
            "Print the JSON schema of ckpttool.toml": "ckpttool config --schema",
        },
        {0: "the configuration is valid, or there is none", 2: "it is invalid, or others can write to it"},
        f"{_REFERENCE}/config.md",
    ),
    "pin": Closing(
        {
            "Protect a checkpoint from prune": "ckpttool pin runs/best.pth",
            "List all pins": "ckpttool pin --list runs",
        },
        {
            0: "the checkpoints are pinned",
            1: "--list found pins of missing checkpoints",
            2: "a path isn't a checkpoint",
        },
        f"{_REFERENCE}/pin.md",
    ),
    "unpin": Closing(
        {
            "Unpin a checkpoint": "ckpttool unpin runs/best.pth",
            "Unpin all": "ckpttool pin --list -0 runs | xargs -0 ckpttool unpin",
        },
        {0: "the checkpoints are not pinned", 2: "the pins can't be read or changed"},
        f"{_REFERENCE}/pin.md",
    ),
}
