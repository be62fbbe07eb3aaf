"""End of each command's help: examples, exit statuses, and its page of the documentation.

Imported only when help is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Example(NamedTuple):
    """A command line, and its purpose in a few words."""

    purpose: str
    line: str


class Closing(NamedTuple):
    """End of a command's help.

    Attributes:
        statuses: The meaning of each exit status.
        page: The path of its page.
        environment: The effect of each environment variable.
    """

    examples: Sequence[Example]
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
    (
        Example("Show what a checkpoint contains", "ckpttool inspect model.pth"),
        Example("Check all checkpoints in a directory", "ckpttool verify runs"),
        Example("Show what a policy would remove", "ckpttool prune runs --keep 3 --dry-run"),
        Example("Show the options of a command, with examples", "ckpttool help prune"),
    ),
    {
        0: "all is well",
        1: "something needs attention, such as damage or a difference",
        2: "it could not be done, or the command line is wrong",
        130: "interrupted by Ctrl-C",
        143: "ended by SIGTERM, as by Ctrl-C",
    },
    "docs/index.md",
    {
        "CKPTTOOL_PAGER, PAGER": "Show output longer than the screen with this program; empty: with none. "
        "[default: less]",
        "NO_COLOR, FORCE_COLOR": "Never or always use colour.",
        "CKPTTOOL_DEBUG=1": "Show a traceback with an error.",
    },
)
"""The closing of ``ckpttool --help``."""

CLOSINGS: Mapping[str, Closing] = {
    "inspect": Closing(
        (
            Example("Show format, epoch, step, loss and tensors", "ckpttool inspect model.pth"),
            Example("Print one value, for a script", "ckpttool inspect --field training.epoch model.pth"),
            Example(
                "Show statistics of some tensors", "ckpttool inspect --stats --filter '*weight' model.pth"
            ),
        ),
        {
            0: "the checkpoint was read",
            1: "it is damaged or dangerous to load, or no tensor matches --filter",
            2: "it can't be read",
        },
        f"{_REFERENCE}/inspect.md",
    ),
    "verify": Closing(
        (
            Example("Check every byte of all checkpoints in a directory", "ckpttool verify runs"),
            Example("Check a download before loading it", "ckpttool verify --quick model.pth"),
            Example("Fail in CI, and write a report", "ckpttool verify --strict --sarif out.sarif runs"),
            Example(
                "Check that a model predicts as recorded",
                "ckpttool verify model.pth --model models.py:Net --expect golden.npz",
            ),
        ),
        {
            0: "all checkpoints are valid, and none is unsafe",
            1: "a checkpoint is invalid or unsafe, or has warnings (--strict)",
            2: "a path can't be read, or there is no checkpoint",
        },
        f"{_REFERENCE}/verify.md",
    ),
    "explain": Closing(
        (
            Example("Explain a finding of verify", "ckpttool explain unknown-class"),
            Example("List all findings", "ckpttool explain"),
        ),
        {0: "the finding was explained", 2: "no finding has this code"},
        f"{_REFERENCE}/explain.md",
    ),
    "list": Closing(
        (
            Example("List all runs, and mark the best of each", "ckpttool list runs --best loss"),
            Example("List the largest first", "ckpttool list runs --flat --sort size --reverse"),
            Example("Show what a policy would keep", "ckpttool list runs --keep 3"),
            Example("Plot the loss of all runs", "ckpttool list runs --best loss --plot runs.svg"),
        ),
        {
            0: "everything was listed, or there was nothing to list",
            1: "a checkpoint is damaged, unsafe or can't be read",
            2: _NOT_LISTED,
        },
        f"{_REFERENCE}/list.md",
    ),
    "report": Closing(
        (
            Example("Write report.html about all runs", "ckpttool report runs"),
            Example(
                "Also show what a policy would free",
                "ckpttool report runs --keep-best 2 --best loss -o runs.html",
            ),
        ),
        {
            0: "the page was written",
            1: "it was written, and a checkpoint is damaged, unsafe or can't be read",
            2: f"{_NOT_LISTED}, or the page can't be written",
        },
        f"{_REFERENCE}/report.md",
    ),
    "latest": Closing(
        (
            Example("Print the checkpoint to resume from", "ckpttool latest runs"),
            Example("Resume a training from it", 'python train.py --resume "$(ckpttool latest runs/exp1)"'),
            Example("Print the best by a metric", "ckpttool latest runs --best loss"),
        ),
        {
            0: "the path is on stdout",
            1: "there is no such checkpoint",
            2: "DIR doesn't exist or can't be read, or every intact checkpoint is unsafe",
        },
        f"{_REFERENCE}/latest.md",
    ),
    "diff": Closing(
        (
            Example("Compare two checkpoints", "ckpttool diff old.pth new.pth"),
            Example("Compare across formats", "ckpttool diff model.pth model.keras --only weights"),
            Example(
                "Allow rounding, and summarise by module", "ckpttool diff --rtol 1e-3 --stat old.pth new.pth"
            ),
            Example("Follow the series in a directory", "ckpttool diff runs/exp1"),
        ),
        {
            0: "they are equal",
            1: "they differ, or could not be shown to be equal",
            2: "something can't be read",
        },
        f"{_REFERENCE}/diff.md",
    ),
    "convert": Closing(
        (
            Example("Convert to the format of the name", "ckpttool convert model.pth model.safetensors"),
            Example(
                "Write the weights alone, in bfloat16",
                "ckpttool convert model.pth w.safetensors --only weights --dtype bfloat16",
            ),
            Example(
                "Write shards of at most 5 GB",
                "ckpttool convert model.pth shards --to safetensors --shard-size 5GB",
            ),
            Example("Show what would be written", "ckpttool convert -n model.pth model.h5"),
        ),
        _CONVERTED,
        f"{_REFERENCE}/convert.md",
    ),
    "merge": Closing(
        (
            Example(
                "Merge the shards of an index",
                "ckpttool merge model.safetensors.index.json whole.safetensors",
            ),
            Example(
                "Merge the files of all ranks",
                "ckpttool merge model_world_size_2_rank_*.pt whole.pth",
            ),
        ),
        {
            **_CONVERTED,
            1: "the result differed from the parts, and was removed",
            2: "the parts could not be merged",
        },
        f"{_REFERENCE}/merge.md",
    ),
    "salvage": Closing(
        (
            Example("Save what is whole", "ckpttool salvage damaged.pth salvaged.pth"),
            Example("List what is lost, as JSON", "ckpttool salvage -n damaged.pth salvaged.pth --json"),
        ),
        {
            0: "nothing is lost",
            1: "some is lost, and the rest was written",
            2: "nothing could be salvaged",
        },
        f"{_REFERENCE}/salvage.md",
    ),
    "log": Closing(
        (
            Example("Record all checkpoints for TensorBoard", "ckpttool log runs/exp1 --to tensorboard:tb"),
            Example("Record one in an experiment of MLflow", "ckpttool log model.pth --to mlflow:digits"),
        ),
        {
            0: "all are valid, none is unsafe, and all are recorded",
            1: "some are invalid, unsafe or can't be read; the others are recorded",
            2: "there is no checkpoint, or the tracker can't be reached",
        },
        f"{_REFERENCE}/log.md",
    ),
    "card": Closing(
        (
            Example("Write a model card for the Hugging Face Hub", "ckpttool card model.pth -o README.md"),
            Example("Note what it was trained on", "ckpttool card model.pth --set data=CIFAR-10"),
        ),
        {0: "the card was written", 2: "the checkpoint can't be read, or FILE exists"},
        f"{_REFERENCE}/card.md",
    ),
    "average": Closing(
        (
            Example("Average the five newest", "ckpttool average --last 5 runs/exp1 average.safetensors"),
            Example(
                "Average the three best",
                "ckpttool average --best 3 --metric loss runs/exp1 average.pth",
            ),
            Example(
                "Let the last count twice",
                "ckpttool average old.pth new.pth average.pth --weights 1,2",
            ),
        ),
        {
            0: "the average was written, and read back",
            1: "what was read back differed, and was removed",
            2: "the checkpoints could not be averaged",
        },
        f"{_REFERENCE}/average.md",
    ),
    "copy": Closing(
        (
            Example("Copy all checkpoints in a directory to a bucket", "ckpttool copy runs s3://bucket/runs"),
            Example("Keep the newest 5 of each run there", "ckpttool copy runs s3://bucket/runs --keep 5"),
            Example("Fetch one", "ckpttool copy s3://bucket/runs/exp1/checkpoint-500 ."),
            Example("Show what would be copied", "ckpttool copy -n runs /mnt/backup/runs"),
        ),
        {
            0: "DST has every checkpoint, byte for byte",
            1: "one is invalid, or DST has another one of its name",
            2: "something can't be read or written",
        },
        f"{_REFERENCE}/copy.md",
    ),
    "prune": Closing(
        (
            Example("Show what would be removed", "ckpttool prune runs --keep 3 --dry-run"),
            Example(
                "Keep the newest 3 and the best 2 of each run; undo restores the rest",
                "ckpttool prune runs --keep 3 --keep-best 2 --metric loss --trash",
            ),
            Example(
                "Keep one per day of the last week, without asking",
                "ckpttool prune runs --keep-daily 7 --yes",
            ),
            Example(
                "Explain the plan for one checkpoint",
                "ckpttool prune runs --keep 3 --explain runs/epoch_4.pth",
            ),
        ),
        {
            0: "all was done, or there was nothing to do",
            1: "something was damaged, left alone, declined, or would be removed (--check)",
            2: "a directory can't be read, or more than --max-delete would be removed",
        },
        f"{_REFERENCE}/prune.md",
    ),
    "rename": Closing(
        (
            Example("Show the new names", "ckpttool rename runs -t '{run}-e{epoch:04d}' --dry-run"),
            Example(
                "Put a metric into the names", "ckpttool rename runs -t '{run}-e{epoch:04d}-loss={loss:.4f}'"
            ),
            Example("Restore the old names", "ckpttool undo runs"),
        ),
        {
            0: "all names fit the template",
            1: "something kept its name, was declined, or would be renamed (--check)",
            2: "nothing could be renamed",
        },
        f"{_REFERENCE}/rename.md",
    ),
    "watch": Closing(
        (
            Example("Verify what a training saves", "ckpttool watch runs"),
            Example("Do what a configuration says, too", "ckpttool watch --config ckpttool.toml"),
            Example("Once, from cron or at the end of a job", "ckpttool watch runs --once"),
        ),
        {
            0: "it was ended, and all that it verified is valid",
            1: "damage was seen, or something failed the last time that it was tried",
            2: "the directory is not there, or somebody else watches it",
        },
        f"{_REFERENCE}/watch.md",
    ),
    "undo": Closing(
        (
            Example("Show what would be restored", "ckpttool undo runs --dry-run"),
            Example("Undo the last prune --trash or rename", "ckpttool undo runs"),
        ),
        {
            0: "everything was restored, or there was nothing to undo",
            1: "something could not be restored",
            2: "the directory can't be read or changed",
        },
        f"{_REFERENCE}/undo.md",
    ),
    "init": Closing(
        (
            Example("Write a ckpttool.toml to start from", "ckpttool init"),
            Example("Write one for the runs alone", "ckpttool init runs"),
        ),
        {0: "the file was written", 2: "a configuration exists already, or can't be written"},
        f"{_REFERENCE}/config.md",
    ),
    "config": Closing(
        (
            Example("Show the configuration in force", "ckpttool config"),
            Example("Show the one that applies in a directory", "ckpttool config runs"),
            Example("Trust it, once you have read it", "ckpttool config --trust"),
            Example("Print the JSON schema of ckpttool.toml", "ckpttool config --schema"),
        ),
        {0: "the configuration is valid, or there is none", 2: "it is invalid, or others can write to it"},
        f"{_REFERENCE}/config.md",
    ),
    "pin": Closing(
        (
            Example("Protect a checkpoint from prune", "ckpttool pin runs/best.pth"),
            Example("List all pins", "ckpttool pin --list runs"),
        ),
        {
            0: "the checkpoints are pinned",
            1: "--list found pins of missing checkpoints",
            2: "a path is no checkpoint",
        },
        f"{_REFERENCE}/pin.md",
    ),
    "unpin": Closing(
        (
            Example("Unpin a checkpoint", "ckpttool unpin runs/best.pth"),
            Example("Unpin all", "ckpttool pin --list -0 runs | xargs -0 ckpttool unpin"),
        ),
        {0: "the checkpoints are not pinned", 2: "the pins can't be read or changed"},
        f"{_REFERENCE}/pin.md",
    ),
}
