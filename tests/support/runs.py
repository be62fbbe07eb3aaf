"""Runs that commands change: directories of checkpoints of each kind, with what points at some of them."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpttool import open_checkpoint

FILES = Path(__file__).parents[2] / "fixtures" / "files"

Numbers = Sequence[int]
Make = Callable[[Path, Numbers], None]
"""Makes checkpoints of some numbers in an empty directory; 2 is the best, and 3 is pinned, if one is."""


def make_run(
    place: Path,
    *epochs: int,
    name: str = "model_epoch_{}.pth",
    best: int | None = None,
    pinned: int | None = None,
    latest: int | None = None,
) -> Path:
    """Make a directory of files that PyTorch saved, one for each epoch, and return it.

    Args:
        place: The directory, which may be there.
        epochs: Their numbers, 1 to 10, which are in the files, too.
        name: Of each, with its number.
        best: The epoch that the symlink ``best`` leads to.
        pinned: The epoch that is pinned.
        latest: The epoch that the file ``latest`` names.
    """
    place.mkdir(parents=True, exist_ok=True)
    for epoch in epochs:
        shutil.copy2(FILES / "series" / f"model_epoch_{epoch}.pth", place / name.format(epoch))
    if best is not None:
        (place / "best").symlink_to(name.format(best))
    if pinned is not None:
        (place / ".ckpttool-pins.toml").write_text(f'pinned = ["{name.format(pinned)}"]\n')
    if latest is not None:
        (place / "latest").write_text(name.format(latest))
    return place


def flip_value(path: Path) -> None:
    """Flip a bit of a tensor in a file: only who reads its values notices."""
    with open_checkpoint(path) as checkpoint:
        extent = checkpoint.tensors[0].extent
    assert extent is not None
    data = bytearray(path.read_bytes())
    data[extent.offset] ^= 1
    path.write_bytes(data)


def files(run: Path, numbers: Numbers) -> None:
    """One file for each epoch, a symlink to one, a pinned one, and a note of the latest."""
    make_run(run, *numbers, best=2, pinned=3, latest=numbers[-1])


def swapped(run: Path) -> None:
    """Two epochs with each other's names, one with the next one's, and what names them."""
    for number, epoch in {1: 2, 2: 1, 3: 4}.items():
        shutil.copy2(FILES / "series" / f"model_epoch_{epoch}.pth", run / f"model_{number}.pth")
    (run / "latest").write_text("model_3.pth")
    (run / "best").symlink_to("model_1.pth")


def sharded(run: Path, numbers: Numbers, source: str = "safetensors/sharded", stem: str = "model") -> None:
    """Shards behind an index that names them, and a symlink to one set's index."""
    for number in numbers:
        for file in (FILES / source).iterdir():
            name = file.name.replace(stem, f"set-{number}")
            if file.name.endswith(".index.json"):
                told = file.read_text().replace(f'"{stem}-', f'"set-{number}-')
                (run / name).write_text(told)
            elif file.name.startswith(stem):
                shutil.copy2(file, run / name)
    (index,) = run.glob("set-2.*.index.json")
    (run / "best").symlink_to(index.name)


def sharded_bin(run: Path, numbers: Numbers) -> None:
    """The same as pickles, as transformers wrote them before."""
    sharded(run, numbers, "pytorch/pytorch-sharded", "pytorch_model")


def prefixes(run: Path, numbers: Numbers) -> None:
    """What a tf.train.CheckpointManager keeps, with its state file."""
    lines = [f'model_checkpoint_path: "ckpt-{numbers[-1]}"\n']
    for number in numbers:
        for file in (FILES / "tensorflow" / "manager").glob(f"ckpt-{number}.*"):
            shutil.copy2(file, run)
        lines.append(f'all_model_checkpoint_paths: "ckpt-{number}"\n')
    lines += [f"all_model_checkpoint_timestamps: {1_700_000_000 + number}.5\n" for number in numbers]
    (run / "checkpoint").write_text("".join(lines))


def sharded_keras(run: Path, numbers: Numbers) -> None:
    """Weights that Keras cut into shards."""
    for number in numbers:
        for file in (FILES / "keras" / "sharded").iterdir():
            target = run / file.name.replace("model", f"net-{number}")
            if file.suffix == ".json":
                target.write_text(file.read_text().replace("model_0", f"net-{number}_0"))
            else:
                shutil.copy2(file, target)


def paddle(run: Path, numbers: Numbers) -> None:
    """Paddle's static models: a program, its parameters and its optimizer."""
    for number in numbers:
        for file in (FILES / "paddle").glob("static.pd*"):
            if file.suffix != ".json":
                shutil.copy2(file, run / f"net-{number}{file.suffix}")


def old_prefixes(run: Path, numbers: Numbers) -> None:
    """What TensorFlow 1 wrote in shards, with its state file."""
    for number in numbers:
        for file in (FILES / "tensorflow" / "v1-sharded").glob("model.ckpt-7*"):
            shutil.copy2(file, run / file.name.replace("ckpt-7", f"ckpt-{number}"))
    named = [f'"model.ckpt-{number}-?????-of-00003"\n' for number in numbers]
    lines = [f"all_model_checkpoint_paths: {one}" for one in named]
    (run / "checkpoint").write_text("".join([f"model_checkpoint_path: {named[-1]}", *lines]))


def accelerate(run: Path, numbers: Numbers) -> None:
    """What Accelerate saved where it names checkpoints itself."""
    for number in numbers:
        place = run / f"checkpoint_{number}"
        place.mkdir()
        shutil.copy2(FILES / "safetensors" / "metadata.safetensors", place / "model.safetensors")
        shutil.copy2(FILES / "pytorch" / "bare_state_dict.pth", place / "optimizer.bin")
        (place / "random_states_0.pkl").write_bytes(pickle.dumps({"step": number}))


def directories(source: str, name: str) -> Make:
    """Checkpoints that are directories, a symlink to one, and a pinned one."""

    def make(run: Path, numbers: Numbers) -> None:
        for number in numbers:
            shutil.copytree(FILES / source, run / name.format(number))
        (run / "best").symlink_to(name.format(2))
        (run / ".ckpttool-pins.toml").write_text(f'pinned = ["{name.format(3)}"]\n')

    return make


def trainer(run: Path, numbers: Numbers) -> None:
    """A transformers Trainer's run, of which each state names the best."""
    for number in numbers:
        place = run / f"checkpoint-{number}"
        shutil.copytree(FILES / "safetensors" / "trainer" / "checkpoint-4", place)
        state = json.loads((place / "trainer_state.json").read_text())
        state |= {"global_step": number, "best_model_checkpoint": "run/checkpoint-2"}
        (place / "trainer_state.json").write_text(json.dumps(state))


def deepspeed(run: Path, numbers: Numbers) -> None:
    """A DeepSpeed run's steps, and the file that names the latest."""
    for number in numbers:
        shutil.copytree(FILES / "deepspeed" / "zero-2" / "global_step2", run / f"global_step{number}")
    (run / "latest").write_text(f"global_step{numbers[-1]}")


def serials(run: Path, numbers: Numbers) -> None:
    """A Fluid root."""
    for number in numbers:
        shutil.copytree(FILES / "fluid" / "root" / f"checkpoint_{number % 5}", run / f"checkpoint_{number}")


KINDS: dict[str, tuple[Make, str | None]] = {
    "PyTorch": (files, "epoch"),
    "safetensors, sharded": (sharded, "number"),
    "PyTorch, sharded": (sharded_bin, "number"),
    "TensorFlow": (prefixes, "number"),
    "TensorFlow 1": (old_prefixes, "number"),
    "Keras, sharded": (sharded_keras, "number"),
    "Paddle": (paddle, "number"),
    "SavedModel": (directories("savedmodel/module", "model-{}"), "number"),
    "DCP": (directories("torch-dcp/two-ranks", "model-{}"), "number"),
    "DCP in safetensors": (directories("torch-dcp/in-safetensors", "model-{}"), "number"),
    "Accelerate": (accelerate, None),
    "Trainer": (trainer, "step"),
    "DeepSpeed": (deepspeed, None),
    "Fluid": (serials, None),
}
"""What makes a directory, and the field that tells its checkpoints apart under new names.

Paddle and Accelerate find theirs by names alone, which are not changed; DeepSpeed's copies all say one step.
"""
