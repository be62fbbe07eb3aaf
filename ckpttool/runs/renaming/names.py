"""Which checkpoint gets which name. Pure: no file is touched here.

What has its name already is left, and so is what is damaged. Where a name can't be made, or two would be one,
that is refused, and then nothing is renamed.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool.core.naming import is_step_name, parse_name
from ckpttool.formats import shard_index
from ckpttool.formats.interface import SIDECARS
from ckpttool.formats.keras import sharded as keras_sharded
from ckpttool.formats.paddle.fluid_serial import SERIAL
from ckpttool.formats.tensorflow import prefix as tf_prefix
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.pointers.readers import temporary_for
from ckpttool.runs.renaming.template import FieldError, Template, Value, render, stem_of, values_of
from ckpttool.transaction.paths import Problem

MAX_NAME = 255
"""Bytes of a name, on every file system in use."""

_SHOWN = 3
"""How many checkpoints are named that would have one name."""

RESERVED = frozenset(
    {
        *(tf_state.NAME, "latest", "latest_universal", "last_checkpoint", "trainer_state.json"),
        "checkpoint.pt.index",
    }
)
"""Names that pointers have."""

_MEANINGS = (
    (shard_index.SHARD, "a shard of a set"),
    (shard_index.INDEX, "the index of a set"),
    (keras_sharded.SHARD, "a shard of Keras's"),
    (keras_sharded.INDEX, "an index of Keras's"),
    (tf_prefix.DATA, "a part of TensorFlow's"),
    (tf_prefix.TEMPORARY, "what TensorFlow is writing"),
    (tf_prefix.OLD_SHARD, "a shard of TensorFlow's"),
    (tf_prefix.STAGE, "what TensorFlow is writing"),
    (SERIAL, "a serial of Paddle Fluid"),
    (re.compile(r"checkpoint-\d{1,18}"), "a save of the Hugging Face Trainer"),
)
"""Names that are read in a way of their own."""

_NUMBERED = re.compile(r"(?P<prefix>.+)-(?:0|[1-9][0-9]*)", re.ASCII | re.DOTALL)
"""How TensorFlow numbers checkpoints; a number with zeros before it is none that it writes."""

_PART = re.compile(
    r"\.data-\d{5}-of-\d{5}|\.index|\.meta|-\d+-of-\d+(?:\..*)?|_\d{5}\.weights\.h5|\.pdi?params(?:\.info)?|\.pdopt"
)
"""How what belongs to a checkpoint goes on behind its name."""


SAVE_TEMPLATES = ("step_{step}", "epoch_{epoch:04d}-step_{step:08d}")
"""Templates after which directories for one save each are a series still."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """A checkpoint that gets another name.

    Attributes:
        entry: The checkpoint.
        name: Its new name.
        members: The old and the new names of all its members.
        values: What the template could say of it.
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
    """What a template makes of checkpoints.

    Attributes:
        renamings: What gets another name.
        same: What has its name already.
        left: What keeps its name whatever the template says, and why.
        refused: What can't get a name, and why; then nothing is renamed.
    """

    renamings: tuple[Renaming, ...] = ()
    same: tuple[Entry, ...] = ()
    left: tuple[Problem, ...] = ()
    refused: tuple[Problem, ...] = ()

    @property
    def count(self) -> int:
        """Return the number of checkpoints that were looked at."""
        unnamed = {problem.path for problem in (*self.left, *self.refused)}
        renamed = {renaming.entry.path for renaming in self.renamings}
        return len(unnamed - renamed) + len(self.renamings) + len(self.same)


def plan_names(
    entries: Sequence[Entry],
    template: Template,
    standing: Mapping[str, Collection[str]],
    left: Mapping[str, str],
    managed: Mapping[str, Collection[str]] | None = None,
) -> RenamePlan:
    """Return what a template makes of checkpoints.

    ``standing`` has all names in each directory, ``left`` why some keep theirs, and ``managed`` the prefixes
    under which TensorFlow's manager numbers its saves in a directory.
    """
    renamings: list[Renaming] = []
    same: list[Entry] = []
    refused: list[Problem] = []
    for entry in entries:
        if entry.path in left:
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
            why = f"which TensorFlow's manager may write over: it numbers its saves {number['prefix']}-<n>"
            refused.append(Problem(entry.path, f"its name would be {renaming.name!r:.80}, {why}"))
        else:
            renamings.append(renaming)
    refused += _collisions(renamings, standing)
    problems = tuple(Problem(entry.path, left[entry.path]) for entry in entries if entry.path in left)
    return RenamePlan(tuple(renamings), tuple(same), problems, tuple(refused))


def make_renaming(entry: Entry, template: Template) -> Renaming:
    """Return the name that a template gives a checkpoint, which may be the one that it has."""
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
    """Require that a directory's name says that it holds one save, and which: else it is of no series."""
    fields = parse_name(name)
    read = {"epoch": fields.epoch, "step": fields.step}
    unread = next((one for one in read if one in template.names and read[one] != values.get(one)), None)
    if not is_step_name(name):
        why = "which doesn't say that it holds one save"
    elif unread is not None:
        why = f"out of which its {unread} would not be read"
    else:
        return
    raise FieldError(f"its name would be {name!r:.80}, {why} ({' or '.join(SAVE_TEMPLATES)} does)")


def unit_stem(entry: Entry) -> str:
    """Return what the names of all members of a checkpoint begin with: its name without its suffix."""
    name = entry.name
    for pattern in (shard_index.INDEX, keras_sharded.INDEX, tf_prefix.OLD_SHARD):
        match = pattern.fullmatch(name)
        if match is not None and len(entry.unit.parts) > 1:
            return match.groupdict().get("stem") or match.groupdict()["prefix"]
    if entry.unit.format is not None and entry.format == "paddle":
        name = re.sub(r"\.(?:pdmodel|json)$", "", name) if len(entry.unit.parts) > 1 else name
    return stem_of(name, is_directory=bool(entry.contents.directories))


def _name_fault(old: str, new: str) -> str | None:
    """Return why a new name can't stand in a directory, or would mean there what the old one didn't."""
    if "/" in new or os.sep in new or "\0" in new:
        return "which is no name but a path"
    if not new or new.startswith((".", "-")):
        return "which begins like an option or a hidden file"
    if new.strip() != new and old.strip() == old:
        return "which begins or ends with a blank"
    if new.startswith("~") and not old.startswith("~"):
        return "which a shell takes for somebody's home directory"
    if (nbytes := len(os.fsencode(new))) > MAX_NAME:
        return f"which has {nbytes:,} bytes (at most {MAX_NAME})"
    if new in RESERVED:
        return "which pointers have"
    if temporary_for(new) is not None and temporary_for(old) is None:
        return "which says that it is being written"
    if any(new.endswith(ending) and not old.endswith(ending) for ending in SIDECARS):
        return "which a manifest has"
    for pattern, meaning in _MEANINGS:
        if pattern.fullmatch(new) and not pattern.fullmatch(old):
            return f"which says that it is {meaning}"
    return None


def _collisions(renamings: Sequence[Renaming], standing: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    """Yield what would get a name that another gets, or has."""
    by_directory: dict[str, list[Renaming]] = defaultdict(list)
    for renaming in renamings:
        by_directory[renaming.entry.directory].append(renaming)
    for directory, together in by_directory.items():
        old_names = {old for renaming in together for old, _ in renaming.members}
        stay = {fold_name(name): name for name in standing.get(directory, ()) if name not in old_names}
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
            # In the same words for each of them: it is said once.
            spellings = list(dict.fromkeys(spelling for _, spelling in claims))
            case = ", which differ in case alone" if len(spellings) > 1 else ""
            owners = list(dict.fromkeys(claimant.entry.name for claimant, _ in claims))
            more = f" and {len(owners) - _SHOWN:,} more" if len(owners) > _SHOWN else ""
            names = f"{' and '.join(spellings[:2])}{case}: {', '.join(owners[:_SHOWN])}{more}"
            return f"{len(owners):,} checkpoints would be called {names}"
        there = stay.get(fold_name(name))
        if there is not None:
            case = "" if there == name else f", as {there}, which differs in case alone"
            return f"its name would be {name}, which already exists{case}"
    sidecars = (fold_name(name + ending) for name in new_names for ending in SIDECARS)
    parts = [stay[name] for name in sidecars if name in stay]
    if len(new_names) > 1:
        stem = renaming.name.removesuffix(renaming.entry.name.removeprefix(unit_stem(renaming.entry)))
        parts += [
            name
            for name in stay.values()
            if name.startswith(stem) and _PART.fullmatch(name.removeprefix(stem)) is not None
        ]
    if parts:
        return f"its name would be {renaming.name}, and {parts[0]}, which already exists, would belong to it"
    return None


def fold_name(name: str) -> str:
    """Return a name as file systems compare it that know no case, and take accents apart."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
