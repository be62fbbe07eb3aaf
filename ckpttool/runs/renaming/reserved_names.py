"""Names that somebody else dictates: which are never changed, and which somebody will look for in vain.

Sources: PaddlePaddle/Paddle ``python/paddle/fluid/io.py`` of 2018 (``_get_dir_serial``); NVIDIA/Megatron-LM
``megatron/training/checkpointing.py`` (``get_checkpoint_name``); huggingface/transformers
``trainer_utils.py`` (``get_last_checkpoint``, ``sort_checkpoints``), ``utils/__init__.py``
(``SAFE_WEIGHTS_NAME``); tensorflow/serving ``file_system_storage_path_source.cc``; huggingface/accelerate
``accelerator.py`` (``save_state``, ``load_state``); keras-team/keras
``keras/src/callbacks/backup_and_restore.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence

from ckpttool.formats.hf_trainer import HfTrainer
from ckpttool.formats.paddle.fluid_serial import SERIAL
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.runs.members.entry import Entry
from ckpttool.storage import fs
from ckpttool.transaction.journal_documents import is_name
from ckpttool.transaction.state_dir import ACCELERATES

TRACKER = "latest_checkpointed_iteration.txt"

_MANAGERS = "ckpt"
"""What names of ``tf.train.CheckpointManager`` begin with where its user chose nothing else."""

_ITERATION = re.compile(r"iter_[0-9]{7}|release|global_step_[0-9]+", re.ASCII)
_TRAINERS = "checkpoint-"
_TRAINER = re.compile(r"checkpoint-[0-9]+", re.ASCII)
_RANDOM_STATES = re.compile(r"random_states_[0-9]+\.pkl", re.ASCII)
_BACKUP = re.compile(r"latest\.weights\.h5(?:\.bkp)?")
_BACKUP_STATE = "training_metadata.json"
_CONFIGS = frozenset({"config.json", "adapter_config.json", "model_index.json", "params.json"})
_FIXED = re.compile(
    r"(?:model|pytorch_model|adapter_model|diffusion_pytorch_model|tf_model|flax_model|consolidated(?:\.\d+)?)"
    r"\.(?:safetensors|bin|h5|msgpack|pth)(?:\.index(?:\.[\w-]+)?\.json)?",
    re.ASCII,
)


def reason_to_leave(entry: Entry, names: Collection[str]) -> str | None:
    """Return why a checkpoint keeps its name whatever a template says, or None."""
    if entry.fault is not None:
        return entry.fault
    if entry.format == "fluid" and SERIAL.fullmatch(entry.name):
        return "Paddle Fluid finds checkpoint_<n> by this name alone, and fails on any other beside it"
    if TRACKER in names and _ITERATION.fullmatch(entry.name):
        owner = "verl finds global_step_<n>" if entry.name.startswith("global") else "Megatron finds iter_<n>"
        return f"{owner} by this name alone: {TRACKER} can hold nothing but the number"
    if _is_written_by_accelerate(entry):
        return (
            "Accelerate goes by the first number in each name beside it: it resumes from the highest, and "
            "its total_limit deletes the lowest"
        )
    if _BACKUP.fullmatch(entry.name) and _BACKUP_STATE in names:
        return "Keras's BackupAndRestore finds it by this name alone, and takes fresh weights without it"
    if _FIXED.fullmatch(entry.name) and not _CONFIGS.isdisjoint(names):
        return "its library finds it by this name alone; rename the directory instead"
    if entry.holds_others:
        return "there are other checkpoints in it"
    if entry.is_link:
        return "it is a symlink, or a part of it is"
    if not all(map(is_name, entry.unit.members)):
        return "parts of it are elsewhere"
    return None


def _is_written_by_accelerate(entry: Entry) -> bool:
    """Tell whether Accelerate wrote a checkpoint where it names them itself."""
    is_home = os.path.basename(fs.realpath(entry.directory)) == ACCELERATES
    if not SERIAL.fullmatch(entry.name) or not is_home:
        return False
    return any(_RANDOM_STATES.fullmatch(os.path.basename(file.path)) for file in entry.contents.files)


def manager_prefixes(directory: str) -> frozenset[str]:
    """Return what the names begin with that TensorFlow's manager goes on to give in a directory.

    That is what stands before a dash in a name in its state file, and what it begins names with by itself.
    """
    try:
        state = tf_state.read_state(os.path.join(directory, tf_state.NAME))
    except (OSError, ValueError):
        return frozenset()
    if state is None:
        return frozenset()
    names = [path.replace("\\", "/").rpartition("/")[-1] for path in (state.latest, *state.paths)]
    prefixes = {name[: dash.start()] for name in names for dash in re.finditer("-", name)}
    return frozenset({_MANAGERS, *prefixes})


def lost_lookups(renamed: Sequence[tuple[Entry, str]]) -> Iterator[str]:
    """Yield what will not find a checkpoint any more that gets a new name, or looks for it in vain."""
    trainer = [
        (entry, name)
        for entry, name in renamed
        if isinstance(entry.unit.format, HfTrainer)
        and _TRAINER.fullmatch(entry.name)
        and not _TRAINER.fullmatch(name)
    ]
    if deleted := [entry for entry, name in trainer if name.startswith(_TRAINERS)]:
        yield _warning(
            deleted,
            "the Hugging Face Trainer's save_total_limit deletes it: from transformers 5 on, all that is "
            f"called {_TRAINERS}… is one of its own; let the template begin with something else",
        )
    if trainer:
        yield _warning(
            [entry for entry, _ in trainer],
            "the Hugging Face Trainer finds checkpoint-<step> alone; with another name it must be given as "
            "resume_from_checkpoint",
        )
    served = [
        entry
        for entry, name in renamed
        if entry.format == "savedmodel" and entry.name.isdigit() and not name.isdigit()
    ]
    if served:
        yield _warning(served, "TensorFlow Serving finds versions whose names are numbers alone")
    last = [entry for entry, _ in renamed if re.fullmatch(r"last(?:-v\d+)?\.ckpt", entry.name)]
    if last:
        yield _warning(last, "Lightning's ckpt_path='last' won't find it any more: it looks for last.ckpt")


def stale_best_paths(entries: Sequence[Entry], renamed: Sequence[Entry]) -> Iterator[str]:
    """Yield what checkpoints call the best of their run in a pickle, which is never rewritten."""
    names = {(entry.directory, entry.name): entry for entry in renamed}
    holders = [
        entry
        for entry in entries
        if any((entry.directory, os.path.basename(path.rstrip("/"))) in names for path in entry.best_paths)
    ]
    if holders:
        yield _warning(
            holders,
            "Lightning's best_model_path in it keeps the old name: it lies in a pickle, which is never "
            "changed, so ckpt_path='best' finds nothing; prune knows what it means until --empty-trash",
        )


def _warning(entries: Sequence[Entry], sentence: str) -> str:
    more = f" (and {len(entries) - 1:,} more)" if len(entries) > 1 else ""
    return f"{entries[0].path}{more}: {sentence}"
