"""New names of checkpoints by a template: names, conflicts, reserved names, and warnings.

Checkpoints that already have their name, and damaged ones, are left out. If a name can't be made, or two
would be equal, the plan is refused and nothing is renamed.

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
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from ckpttool.core.naming import NameFields, is_named_best, is_step_name, parse_name
from ckpttool.core.report import Problem
from ckpttool.core.text import counted
from ckpttool.formats import sharded
from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.formats.hf_trainer import HfTrainer
from ckpttool.formats.interface import MANIFEST_SUFFIXES
from ckpttool.formats.keras import sharded as keras_sharded
from ckpttool.formats.paddle.fluid_serial import SERIAL
from ckpttool.formats.tensorflow import prefix as tf_prefix
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.runs.entry import Entry
from ckpttool.runs.pointers.search import temporary_for
from ckpttool.runs.renaming.template import (
    FIELDS,
    FieldError,
    Template,
    Value,
    render,
    run_of,
    stem_of,
    values_of,
)
from ckpttool.storage import fs
from ckpttool.transaction.journal_documents import is_name
from ckpttool.transaction.paths import shown
from ckpttool.transaction.state_dir import ACCELERATES

MAX_NAME = 255
"""Bytes of a name, on every file system in use."""

_SHOWN = 3
"""Limit on the names that a message lists; the others are counted."""

RESERVED = frozenset(
    {
        *(tf_state.NAME, "latest", "latest_universal", "last_checkpoint", "trainer_state.json"),
        "checkpoint.pt.index",
    }
)
"""Names of files with pointers."""

_MEANINGS = (
    (sharded.SHARD, "a shard of a set"),
    (sharded.INDEX, "the index of a set"),
    (keras_sharded.SHARD, "a Keras shard"),
    (keras_sharded.INDEX, "the index of Keras shards"),
    (tf_prefix.DATA, "a part of a TensorFlow checkpoint"),
    (tf_prefix.TEMPORARY, "a file that TensorFlow is writing"),
    (tf_prefix.V1_SHARD, "a TensorFlow shard"),
    (tf_prefix.STAGE, "a file that TensorFlow is writing"),
    (SERIAL, "a Paddle Fluid save"),
    (re.compile(r"checkpoint-\d{1,18}"), "a save of the Hugging Face Trainer"),
)
"""Names with a meaning for some program, which a new name must not get by accident."""

_NUMBERED = re.compile(r"(?P<prefix>.+)-(?:0|[1-9][0-9]*)", re.ASCII | re.DOTALL)
"""Names that TensorFlow gives to numbered checkpoints: no leading zeros."""

_PART = re.compile(
    r"\.data-\d{5}-of-\d{5}|\.index|\.meta|-\d+-of-\d+(?:\..*)?|_\d{5}\.weights\.h5|\.pdi?params(?:\.info)?|\.pdopt"
)
"""Rest of a member's name after that of its checkpoint."""


SAVE_TEMPLATES = ("step_{step}", "epoch_{epoch:04d}-step_{step:08d}")
"""Examples of templates whose names of directories are recognised as those of single saves."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """A checkpoint that gets another name.

    Attributes:
        entry: The checkpoint.
        name: Its new name.
        members: The old and the new names of all its members.
        values: Values of the template's fields.
    """

    entry: Entry
    name: str
    members: tuple[tuple[str, str], ...]
    values: Mapping[str, Value] = field(repr=False, default_factory=dict)

    @property
    def to(self) -> str:
        """Return its new path, as the user would write it."""
        return os.path.join(os.path.dirname(self.entry.path), self.name)

    @property
    def names(self) -> dict[str, str]:
        """Return new names by old ones: its own, and those of its members."""
        return {**dict(self.members), self.entry.name: self.name}


@dataclass(frozen=True, slots=True)
class RenamePlan:
    """New names of checkpoints, and those that keep or can't get a name.

    Attributes:
        renamings: Checkpoints with a new name.
        same: Checkpoints that have their name already.
        kept: Checkpoints that keep their name with any template, with reasons.
        refused: Checkpoints that can't get a name, with reasons; then nothing is renamed.
    """

    renamings: tuple[Renaming, ...] = ()
    same: tuple[Entry, ...] = ()
    kept: tuple[Problem, ...] = ()
    refused: tuple[Problem, ...] = ()

    @property
    def count(self) -> int:
        """Return the number of checkpoints of the plan."""
        unnamed = {problem.path for problem in (*self.kept, *self.refused)}
        renamed = {renaming.entry.path for renaming in self.renamings}
        return len(unnamed - renamed) + len(self.renamings) + len(self.same)


def plan_names(
    entries: Sequence[Entry],
    template: Template,
    existing_names: Mapping[str, Collection[str]],
    kept_names: Mapping[str, str],
    managed: Mapping[str, Collection[str]] | None = None,
) -> RenamePlan:
    """Return the plan of new names by a template.

    Args:
        entries: The checkpoints.
        template: The template.
        existing_names: All names in each directory.
        kept_names: Why checkpoints keep their names, by path.
        managed: Prefixes by which TensorFlow's checkpoint manager numbers its saves, by directory.
    """
    renamings: list[Renaming] = []
    same: list[Entry] = []
    refused: list[Problem] = []
    for entry in entries:
        if entry.path in kept_names:
            continue
        try:
            renaming = make_renaming(entry, template)
        except FieldError as failure:
            refused.append(Problem(entry.path, str(failure)))
            continue
        number = _NUMBERED.fullmatch(renaming.name) if entry.format == "tensorflow" else None
        prefixes = () if managed is None else managed.get(entry.directory, ())
        if renaming.name == entry.name:
            same.append(entry)
        elif number is not None and fold_name(number["prefix"]) in map(fold_name, prefixes):
            why = f"which TensorFlow's manager may overwrite: it numbers its saves {number['prefix']}-<n>"
            refused.append(Problem(entry.path, f"its name would be {renaming.name!r:.80}, {why}"))
        else:
            renamings.append(renaming)
    refused += _collisions(renamings, existing_names)
    kept = tuple(Problem(one.path, kept_names[one.path]) for one in entries if one.path in kept_names)
    return RenamePlan(tuple(renamings), tuple(same), kept, tuple(refused))


def make_renaming(entry: Entry, template: Template) -> Renaming:
    """Return the renaming of a checkpoint by a template; the new name may be the old one.

    Raises:
        FieldError: A field of the template is unknown, or the name isn't allowed.
    """
    # All members of a checkpoint (``model.ckpt-100.index``, ``model.ckpt-100.data-00000-of-00001``) begin
    # with its stem, which alone is replaced: their suffixes are how a framework finds them.
    stem = unit_stem(entry)
    apart = [name for name in entry.unit.members if not name.startswith(stem)]
    if apart:
        raise FieldError(f"its part {apart[0]} isn't named after it")
    values = values_of(entry, stem)
    new = render(template, values)
    suffix = entry.name.removeprefix(stem)
    if suffix and new.endswith(suffix):
        new = new.removesuffix(suffix)
    name = new + suffix
    members = tuple((old, new + old.removeprefix(stem)) for old in entry.unit.members)
    for old_name, new_name in ((entry.name, name), *members):
        if new_name != old_name and (why := _name_fault(old_name, new_name)):
            raise FieldError(f"its name would be {new_name!r:.80}, {why}")
    if entry.is_step_directory:
        _require_save_name(name, template, values)
    return Renaming(entry, name, members, values)


def _require_save_name(name: str, template: Template, values: Mapping[str, object]) -> None:
    """Raise FieldError unless a directory's new name is recognised as that of a save, with its counts."""
    fields = parse_name(name)
    read = {"epoch": fields.epoch, "step": fields.step}
    unread = next((one for one in read if one in template.names and read[one] != values.get(one)), None)
    if not is_step_name(name):
        why = "which isn't recognised as a single save"
    elif unread is not None:
        why = f"from which its {unread} can't be read"
    else:
        return
    raise FieldError(f"its name would be {name!r:.80}, {why} (use {' or '.join(SAVE_TEMPLATES)})")


def unit_stem(entry: Entry) -> str:
    """Return the common start of all members' names: the checkpoint's name without its suffix."""
    name = entry.name
    for pattern in (sharded.INDEX, keras_sharded.INDEX, tf_prefix.V1_SHARD):
        match = pattern.fullmatch(name)
        if match is not None and len(entry.unit.parts) > 1:
            return match.groupdict().get("stem") or match.groupdict()["prefix"]
    if entry.unit.format is not None and entry.format == "paddle":
        name = re.sub(r"\.(?:pdmodel|json)$", "", name) if len(entry.unit.parts) > 1 else name
    return stem_of(name, is_directory=bool(entry.contents.directories))


def _name_fault(old: str, new: str) -> str | None:
    """Return why a new name is invalid, or gets a meaning that the old one hadn't; None if it is fine."""
    # Only a change for the worse is refused: a checkpoint whose old name already looks like a shard, say, may
    # get another such name, or it could never be renamed by a template with ``{name}``.
    if "/" in new or os.sep in new or "\0" in new:
        return "which is a path, not a name"
    if not new or new.startswith((".", "-")):
        return "which starts like an option or a hidden file"
    if new.strip() != new and old.strip() == old:
        return "which starts or ends with a space"
    if new.startswith("~") and not old.startswith("~"):
        return "which a shell expands to a home directory"
    if (nbytes := len(os.fsencode(new))) > MAX_NAME:
        return f"which has {nbytes:,} bytes (at most {MAX_NAME})"
    if new in RESERVED:
        return "which is reserved for pointers"
    if temporary_for(new) is not None and temporary_for(old) is None:
        return "which means a file that is being written"
    if any(new.endswith(ending) and not old.endswith(ending) for ending in MANIFEST_SUFFIXES):
        return "which is reserved for manifests"
    for pattern, meaning in _MEANINGS:
        if pattern.fullmatch(new) and not pattern.fullmatch(old):
            return f"which means {meaning}"
    return None


def _collisions(
    renamings: Sequence[Renaming], existing_names: Mapping[str, Collection[str]]
) -> Iterator[Problem]:
    """Yield checkpoints whose new name exists, or is given twice."""
    # Names of checkpoints that are renamed, too, become free (swaps are possible); all others stay. Names are
    # compared folded, as a file system that ignores case would overwrite ``Model.pt`` with ``model.pt``.
    by_directory: dict[str, list[Renaming]] = defaultdict(list)
    for renaming in renamings:
        by_directory[renaming.entry.directory].append(renaming)
    for directory, together in by_directory.items():
        old_names = {old for renaming in together for old, _ in renaming.members}
        stay = {fold_name(name): name for name in existing_names.get(directory, ()) if name not in old_names}
        wanted: dict[str, list[tuple[Renaming, str]]] = defaultdict(list)
        for renaming in together:
            for name in {renaming.name, *(new for _, new in renaming.members)}:
                wanted[fold_name(name)].append((renaming, name))
        for renaming in together:
            if why := _name_conflict(renaming, wanted, stay):
                yield Problem(renaming.entry.path, why)


def _name_conflict(
    renaming: Renaming, wanted: Mapping[str, Sequence[tuple[Renaming, str]]], stay: Mapping[str, str]
) -> str | None:
    """Return why a name isn't free, or None."""
    new_names = sorted({renaming.name, *(new for _, new in renaming.members)})
    for name in new_names:
        claims = wanted[fold_name(name)]
        if len({id(claimant) for claimant, _ in claims}) > 1:
            # The same words for each of them, so that the message is shown once.
            spellings = list(dict.fromkeys(spelling for _, spelling in claims))
            case = " (which differ only in case)" if len(spellings) > 1 else ""
            owners = list(dict.fromkeys(claimant.entry.name for claimant, _ in claims))
            more = f" and {len(owners) - _SHOWN:,} more" if len(owners) > _SHOWN else ""
            names = f"{' and '.join(spellings[:2])}{case}: {', '.join(owners[:_SHOWN])}{more}"
            return f"{len(owners):,} checkpoints would be named {names}"
        existing = stay.get(fold_name(name))
        if existing is not None:
            case = "" if existing == name else f" as {existing} (which differs only in case)"
            return f"its name would be {name}, which already exists{case}"
    # Existing files must not become parts of the renamed checkpoint by their names: a manifest, a shard.
    sidecars = (fold_name(name + ending) for name in new_names for ending in MANIFEST_SUFFIXES)
    parts = [stay[name] for name in sidecars if name in stay]
    if len(new_names) > 1:
        stem = renaming.name.removesuffix(renaming.entry.name.removeprefix(unit_stem(renaming.entry)))
        parts += [
            name
            for name in stay.values()
            if name.startswith(stem) and _PART.fullmatch(name.removeprefix(stem)) is not None
        ]
    if parts:
        return f"its name would be {renaming.name}, and the existing {parts[0]} would become a part of it"
    return None


def fold_name(name: str) -> str:
    """Return a name as file systems compare it that ignore case and normalise Unicode (APFS, NTFS)."""
    # Case folding can decompose a character (``ǰ`` becomes ``j`` and a combining caron), so the result is
    # normalised again.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


_UNNAMED = "value"
"""Name of a metric whose value has no name next to it."""

_WORD_END = re.compile(r"[^0-9A-Za-z]|$")


def name_doubts(renamings: Sequence[Renaming], template: Template) -> list[str]:
    """Return a sentence for each kind of doubt about new names, with the checkpoints it concerns."""
    doubts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for renaming in renamings:
        for kind, sentence in _doubts(renaming, template):
            doubts[kind].append((f"{renaming.entry.path} -> {renaming.name}", sentence or kind))
    warnings = [f"{_first([name for name, _ in cases])}: {cases[0][1]}" for cases in doubts.values()]
    undated = [renaming.entry.path for renaming in renamings if renaming.entry.saved_at is None]
    if undated and not template.names.isdisjoint(("date", "time")):
        warnings.append(
            f"{_first(undated)}: its date is that of its file: neither its content nor its name has another"
        )
    return [*warnings, *_split_series(renamings)]


def _first(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
    return names[0] + more


def _doubts(renaming: Renaming, template: Template) -> Iterator[tuple[str, str]]:
    """Yield doubts about a name: the kind of each, and a sentence on this case, if it differs."""
    # A name may be the only record of an epoch, a step or a metric, and ``prune`` and ``list`` read it back
    # by ``parse_name``. So the new name is parsed as they would, and compared with the values that went into
    # it.
    entry = renaming.entry
    old, new = entry.fields, parse_name(renaming.name)
    for name, read, inside in (
        ("epoch", new.epoch, entry.counts_inside[0]),
        ("step", new.step, entry.counts_inside[1]),
    ):
        value = renaming.values.get(name)
        if read == value:
            continue
        if name in template.names and value is not None:
            yield f"its {name} can't be read from this name (write it as {name}-{{{name}}})", ""
        elif read is not None:
            yield f"read as {name}", f"this name would be read as {name} {read}"
        elif inside is None and getattr(old, name) is not None:
            yield f"its {name} is recorded only in its old name, and the new one lacks it", ""
    orders = (*entry.counts_inside, new.epoch, new.step, new.number)
    if old.number is not None and all(value is None for value in orders):
        is_kept = any(int(digits) == old.number for digits in re.findall(r"[0-9]{1,18}", renaming.name))
        lost = "can't be read from the new one" if is_kept else "isn't in the new one"
        yield f"the number in its old name, which orders it, {lost}", ""
    yield from _metric_doubts(renaming, template, old, new)
    date = renaming.values.get("date")
    moment = f"{date:%Y-%m-%dT%H:%M:%S}" if isinstance(date, datetime) else None
    if new.saved_at is not None and moment is not None and not moment.startswith(new.saved_at):
        yield "read as date", f"this name would be read as the date {new.saved_at}"
    if is_named_best(renaming.name) and not is_named_best(entry.name):
        yield "this name marks it as the best, which is never pruned", ""
    if (again := _name_after_next_rename(renaming, template)) != renaming.name:
        yield "again", f"the next rename by this template would name it {again}"


def _metric_doubts(
    renaming: Renaming, template: Template, old: NameFields, new: NameFields
) -> Iterator[tuple[str, str]]:
    entry = renaming.entry
    # If the known metric equals the one in the old name, the name may be its only source.
    lost = [
        name
        for name, value in old.metrics.items()
        if name not in template.names and entry.metrics.get(name, entry.loss) == value
    ]
    if lost and not set(lost) & new.metrics.keys():
        yield f"{lost[0]} is in its old name, but not in the new one", ""
    bare = [name for name in template.names.difference(FIELDS) if name in renaming.values]
    if _UNNAMED in new.metrics and _UNNAMED not in old.metrics and bare:
        name = next((name for name in bare if name not in new.metrics), bare[0])
        yield f"the new name doesn't label its number as {name} (use {name}={{{name}}})", ""


def _name_after_next_rename(renaming: Renaming, template: Template) -> str:
    """Return the name that the same template would give the renamed checkpoint."""
    # ``watch`` applies the template at each look, and must leave renamed checkpoints alone:
    # ``{name}-e{epoch}`` would add ``-e3`` to the name each time.
    unit = renaming.entry.unit._replace(path=renaming.to)
    stem = unit_stem(replace(renaming.entry, unit=unit))
    values = {**renaming.values, "name": stem, "run": run_of(stem, renaming.entry.directory)}
    try:
        new = render(template, values)
    except FieldError:
        return renaming.name
    suffix = renaming.name.removeprefix(stem)
    return new if suffix and new.endswith(suffix) else new + suffix


def _split_series(renamings: Sequence[Renaming]) -> Iterator[str]:
    """Yield a warning for each series that the new names would split."""
    series: dict[str, list[Renaming]] = defaultdict(list)
    for renaming in renamings:
        series[renaming.entry.group].append(renaming)
    for key, members in series.items():
        old = {renaming.entry.fields.blank for renaming in members}
        new = {parse_name(renaming.name).blank: renaming.name for renaming in members}
        if len(old) == 1 and len(new) > 1:
            names = " and ".join(list(new.values())[:2])
            yield f"{key}: the new names split this series into {len(new)}, such as {names}"


def namesake_warnings(
    renamings: Sequence[Renaming], entries: Sequence[Entry], existing_names: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Yield a warning for each directory with files that begin with an old name, and keep theirs.

    Such are ``epoch_3.json`` and ``epoch_3.pth.md5`` next to ``epoch_3.pth``; only old names with a number
    count.
    """
    # ``epoch_3.json`` belongs to ``epoch_3.pth``, and ``epoch_30.json`` doesn't: the old name, with or
    # without its suffix, must end where a word of the other name does.
    parts = {(entry.directory, name) for entry in entries for name in (entry.name, *entry.unit.members)}
    old_names: dict[str, set[str]] = defaultdict(set)
    for renaming in renamings:
        entry = renaming.entry
        old_names[entry.directory] |= {n for n in (entry.name, unit_stem(entry)) if re.search("[0-9]", n)}
    for directory, stems in old_names.items():
        namesakes = sorted(
            name
            for name in existing_names.get(directory, ())
            if (directory, name) not in parts
            and not name.startswith(OWN_PREFIX)
            and any(name[: end.start()] in stems for end in _WORD_END.finditer(name, 1))
        )
        if namesakes:
            more = f" and {len(namesakes) - _SHOWN:,} more" if len(namesakes) > _SHOWN else ""
            begin, do = ("starts", "isn't") if len(namesakes) == 1 else ("start", "aren't")
            names = f"{', '.join(namesakes[:_SHOWN])}{more}"
            count = counted(len(namesakes), "file")
            yield f"{shown(directory)}{os.sep}: {count} {begin} with an old name and {do} renamed: {names}"


TRACKER = "latest_checkpointed_iteration.txt"

_MANAGERS = "ckpt"
"""Default prefix of names by ``tf.train.CheckpointManager``."""

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
    """Return why a checkpoint keeps its name with any template, or None."""
    # Names that a framework builds itself when it resumes are kept, if the file or the neighbour by which it
    # does so is there: a plain ``iter_0000100`` without a tracker may be renamed. Sources: module docstring.
    if entry.fault is not None:
        return entry.fault
    if entry.format == "fluid" and SERIAL.fullmatch(entry.name):
        return "Paddle Fluid finds only checkpoint_<n>, and fails if any other name is next to it"
    if TRACKER in names and _ITERATION.fullmatch(entry.name):
        is_verl = entry.name.startswith("global")
        finds = "verl finds only global_step_<n>" if is_verl else "Megatron finds only iter_<n>"
        return f"{finds}: {TRACKER} can hold nothing but the number"
    if _is_written_by_accelerate(entry):
        return (
            "Accelerate sorts the names next to it by their first number: it resumes from the highest, and "
            "its total_limit deletes the lowest"
        )
    if _BACKUP.fullmatch(entry.name) and _BACKUP_STATE in names:
        return "Keras's BackupAndRestore finds only this name, and starts with fresh weights without it"
    if _FIXED.fullmatch(entry.name) and not _CONFIGS.isdisjoint(names):
        return "its library finds only this name; rename the directory instead"
    if entry.holds_others:
        return "it contains other checkpoints"
    if entry.is_link:
        return "it is a symlink, or a part of it is"
    if not all(map(is_name, entry.unit.members)):
        return "parts of it are in other directories"
    return None


def _is_written_by_accelerate(entry: Entry) -> bool:
    """Return whether Accelerate named a checkpoint itself."""
    is_home = os.path.basename(fs.realpath(entry.directory)) == ACCELERATES
    if not SERIAL.fullmatch(entry.name) or not is_home:
        return False
    return any(_RANDOM_STATES.fullmatch(os.path.basename(file.path)) for file in entry.contents.files)


def manager_prefixes(directory: str) -> frozenset[str]:
    """Return the prefixes of names that TensorFlow's checkpoint manager may use in a directory.

    These are the parts before a dash of names in its state file, and its default prefix.
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
    """Yield warnings about programs that won't find a renamed checkpoint."""
    # These programs search for a name when no path is given, and take any path. So renaming is allowed, with
    # a warning, unlike in ``reason_to_leave``.
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
            "the Hugging Face Trainer's save_total_limit deletes it: transformers 5 and later take every "
            f"{_TRAINERS}… for one of their own; start the template with another word",
        )
    if trainer:
        yield _warning(
            [entry for entry, _ in trainer],
            "the Hugging Face Trainer finds only checkpoint-<step>; pass any other name as "
            "resume_from_checkpoint",
        )
    served = [
        entry
        for entry, name in renamed
        if entry.format == "savedmodel" and entry.name.isdigit() and not name.isdigit()
    ]
    if served:
        yield _warning(served, "TensorFlow Serving finds only versions whose names are numbers")
    last = [entry for entry, _ in renamed if re.fullmatch(r"last(?:-v\d+)?\.ckpt", entry.name)]
    if last:
        yield _warning(last, "Lightning's ckpt_path='last' will no longer find it: it looks for last.ckpt")


def stale_best_paths(entries: Sequence[Entry], renamed: Sequence[Entry]) -> Iterator[str]:
    """Yield a warning about best paths in pickles, which are never rewritten."""
    names = {(entry.directory, entry.name): entry for entry in renamed}
    holders = [
        entry
        for entry in entries
        if any((entry.directory, os.path.basename(path.rstrip("/"))) in names for path in entry.best_paths)
    ]
    if holders:
        yield _warning(
            holders,
            "Lightning's best_model_path in it keeps the old name, as ckpttool never edits pickles, so "
            "ckpt_path='best' finds nothing; prune follows the rename until --empty-trash",
        )


def _warning(entries: Sequence[Entry], sentence: str) -> str:
    more = f" (and {len(entries) - 1:,} more)" if len(entries) > 1 else ""
    return f"{entries[0].path}{more}: {sentence}"
