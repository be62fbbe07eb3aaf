"""A directory for each save, ``step_100``, with whatever a training put into it, as one checkpoint.

``iter_0000100/mp_rank_00/model_optim_rng.pt``, ``step_100/{model,optim}.pt``: what is in it is read by the
formats that recognise it. A directory of that name that is a run of its own, with saves in it, is none.

Sources: NVIDIA/Megatron-LM ``megatron/training/checkpointing.py`` (``get_checkpoint_name``); ray-project/ray
``python/ray/train/_internal/storage.py`` (``_make_checkpoint_dir_name``); volcengine/verl
``verl/trainer/ppo/ray_trainer.py`` (``_save_checkpoint``); mosaicml/composer ``composer/callbacks/
checkpoint_saver.py``; huggingface/lerobot ``src/lerobot/utils/train_utils.py`` (``save_checkpoint``).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import prod
from typing import Any, ClassVar

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.checkpoint import Checkpoint, Producer, TrainingState
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint
from ckpttool.core.naming import NameFields, is_step_name, parse_name
from ckpttool.core.report import warning
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.training import training_state
from ckpttool.formats.interface import Format, Probe, Unit
from ckpttool.formats.opening import MAX_RANKS, OpenedParts, file_entry
from ckpttool.storage import fs

_RANK = re.compile(r"(?<![a-z])(?<!lora[-_])rank[-_]?([0-9]{1,5}(?:_[0-9]{1,5})*)(?![0-9])", re.IGNORECASE)
DATA = frozenset({"numpy", "hdf5", "pickle"})
"""Formats of files that may be no part of a save: predictions, features, a log."""
RANKS = "rank-directory"
"""Variant with the files of several ranks, each with a part of the model or a copy of it."""
_STATE_FILE = re.compile(
    r"(\w+_)?(optim|optimizer|opt|rng)(_?states?)?([-_.]\w*\d+)?\.(pt|pth|bin|pkl|safetensors)"
)
"""Files of optimizers and random states, also those of ranks."""
_BARE_STEP = re.compile(r"[0-9]{6,18}")
_LEROBOT = ("pretrained_model", "training_state")
"""Directories in LeRobot's ``checkpoints/020000``; the directory of a job has other ones."""
_TRAINING_STEP = os.path.join("training_state", "training_step.json")
_MAX_STEP_BYTES = 1 << 10
STEP_VARIANTS = frozenset({"directory", RANKS})
_MEGATRONS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
"""Settings with the numbers of ranks, in the order of the numbers in ``mp_rank_01_003``."""


class StepDirectory(Format):
    """The directory of one save, if no other format recognises it."""

    name: ClassVar[str] = "pytorch"
    takes_in = True

    def matches(self, probe: Probe) -> bool:
        from ckpttool.formats.discovery import Walk, units_inside

        if not is_step_directory(probe.path) or is_run(probe.path):
            return False
        walk = Walk(allows_losses=probe.allows_losses)
        return any(map(_is_of_a_model, units_inside(probe.path, walk)))

    def open(self, probe: Probe) -> Checkpoint:
        directory = probe.path
        with OpenedParts("part", allows_losses=probe.allows_losses) as parts:
            _add_all(parts, directory)
            ranks = _ranks(parts)
            _note_missing_ranks(parts, ranks)
            opened = list(parts.parts.values())
            with_weights = (
                part for part in opened if any(tensor.role is Role.WEIGHTS for tensor in part.tensors)
            )
            first = next(with_weights, opened[0] if opened else None)
            keys = _keys(list(parts.parts))
            record = _training_step(parts, directory)
            common: dict[str, Any] = {
                "path": directory,
                "variant": RANKS if any(len(numbers) > 1 for numbers in ranks.values()) else "directory",
                "files": tuple(file_entry(path) for path in _files(directory) if fs.isfile(path)),
                "spans": parts.spans,
                "training": lambda: _training(parts, record, _own_name(directory)),
            }
            if first is not None and len(opened) == 1:
                return parts.checkpoint(first, **common)
            return parts.checkpoint(
                format=self.name if first is None else first.format,
                tensors=tuple(
                    _below(keys[name], tensor)
                    for name, part in parts.parts.items()
                    for tensor in part.tensors
                ),
                metadata=lambda: {
                    "/".join(keys[name]): dict(part.metadata) for name, part in parts.parts.items()
                },
                producer=next((part.producer for part in opened if part.producer.framework), Producer()),
                **common,
            )

    def state_files(self, names: Iterable[str], proven: Collection[str]) -> Iterable[str]:
        return (one for one in proven if _STATE_FILE.fullmatch(os.path.basename(one)))


# Recognition -----------------------------------------------------------------------------------------


def is_step_directory(path: str) -> bool:
    """Return whether a directory is named by a step and nothing else, as one save's is."""
    name = _own_name(path)
    if _BARE_STEP.fullmatch(name):
        return all(fs.isdir(os.path.join(path, part)) for part in _LEROBOT)
    return is_step_name(name) and fs.isdir(path)


def is_run(path: str) -> bool:
    """Return whether saves that count something else than a directory are in it, one after another."""
    counts = _Counts(_own_name(path), (os.path.relpath(file, path) for file in _files(path)))
    return counts.are_of_a_run


def own_count_inside(name: str, paths: Iterable[str]) -> str | None:
    """Return the name of an entry in a step's directory that counts saves of its own, as in a run.

    ``name`` is the directory's; ``paths`` of the files in it are relative to it.
    """
    return _Counts(name, paths).other


def _is_of_a_model(unit: Unit) -> bool:
    """Return whether it is a model's, rather than arrays that were computed at a step."""
    from ckpttool.formats import suffix_format

    format = unit.format or suffix_format(os.path.basename(unit.path))
    return format is not None and format.name not in DATA


class _Counts:
    """Numbers in the names of a step's directory, besides its own step.

    Attributes:
        are_of_a_run: Whether several saves are in it, or the directory of another.
        other: A name that counts something else than the directory, which may be the only save of a run.
    """

    def __init__(self, name: str, paths: Iterable[str]) -> None:
        self._own = _numbers(parse_name(name))
        self._seen: set[tuple[str, str]] = set()
        self._steps: dict[tuple[str, str], set[tuple[object, object]]] = defaultdict(set)
        self._ordinals: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
        self.are_of_a_run, self.other = False, None
        for path in paths:
            directory, file = os.path.split(path)
            while directory:
                directory, inner = os.path.split(directory)
                self._add_directory(directory, inner)
            self._add_file(os.path.dirname(path), file)
        self.are_of_a_run |= any(len(counts) > 1 for counts in self._steps.values())
        for (directory, _), named in self._ordinals.items():
            if not self._are_parts(directory, named):
                self.other = self.other or max(named.values())

    def _add_directory(self, above: str, name: str) -> None:
        if (above, name) not in self._seen:
            self._seen.add((above, name))
            if is_step_name(name) and self._own.isdisjoint(_numbers(parse_name(name))):
                self.are_of_a_run = True

    def _add_file(self, directory: str, name: str) -> None:
        from ckpttool.formats import suffix_format

        self._seen.add((directory, name))
        format = suffix_format(name)
        if format is None:
            return
        fields = parse_name(name)
        if fields.epoch is not None or fields.step is not None:
            if format.name not in DATA:  # of data nobody knows whether they are saves
                self._steps[directory, fields.blank].add((fields.epoch, fields.step))
            if self._own.isdisjoint(_numbers(fields)):
                self.other = self.other or name
        elif fields.number is not None and fields.is_ordinal:
            self._ordinals[directory, fields.blank][fields.number] = name

    def _are_parts(self, directory: str, named: dict[int, str]) -> bool:
        """Return whether numbers are those of ranks, of models next to a first without one, or the step."""
        if not self._own.isdisjoint(named) and len(named) == 1:
            return True
        last = max(named)
        bare = re.sub(r"[-_.]?0*[0-9]+(?=\.|$)", "", named[last])
        first = 1 if (directory, bare) in self._seen else 0
        return sorted(named) == list(range(first, last + 1))


def _numbers(fields: NameFields) -> set[object]:
    return {number for number in (fields.epoch, fields.step, fields.number) if number is not None}


def _own_name(path: str) -> str:
    return os.path.basename(fs.abspath(path))


def _files(directory: str) -> Iterator[str]:
    for parent, _, names in fs.walk(directory):
        yield from (os.path.join(parent, name) for name in sorted(names))


# Content --------------------------------------------------------------------------------------------


def _add_all(parts: OpenedParts, directory: str) -> None:
    """Open all files in a directory; a file of no known format is a warning."""
    from ckpttool.formats.discovery import Walk, units_inside

    def add_unreadable(failure: CheckpointError) -> None:
        def fail() -> Checkpoint:
            raise failure

        parts.add(os.path.relpath(failure.path, directory), fail)

    def add_unread(path: str, why: str) -> None:
        message = "no format recognises it, so it was not checked"
        parts.findings.append(warning("part-unrecognised", message, os.path.relpath(path, directory)))

    walk = Walk(allows_losses=parts.allows_losses, on_error=add_unreadable, on_unread=add_unread)
    for unit in units_inside(directory, walk):
        parts.add_unit(os.path.relpath(unit.path, directory), unit)


_Ranks = dict[tuple[str, str, int], dict[tuple[int, ...], re.Match[str]]]
"""Matches in names by the numbers of the rank; by the text before and after these, and their count."""


def _ranks(parts: OpenedParts) -> _Ranks:
    ranks: _Ranks = defaultdict(dict)
    for name in parts.parts:
        for match in _RANK.finditer(name):
            numbers = tuple(map(int, match[1].split("_")))
            ranks[name[: match.start(1)], name[match.end(1) :], len(numbers)][numbers] = match
    return ranks


def _note_missing_ranks(parts: OpenedParts, ranks: _Ranks) -> None:
    """Note the ranks that are missing between others, and of Megatron those that its settings speak of."""
    faulty = {finding.where for finding in parts.findings}  # of a damaged one there is a finding already
    for (prefix, suffix, _), matches in ranks.items():
        spans = [range(min(column), max(column) + 1) for column in zip(*matches, strict=True)]
        if prefix.endswith("mp_rank_"):
            settings = parts.parts[next(iter(matches.values())).string].training.hyper_parameters
            for index, key in enumerate(_MEGATRONS[: len(spans)]):
                size = settings.get(key)
                if isinstance(size, int) and size <= MAX_RANKS:
                    spans[index] = range(max(size, spans[index].stop))
        if prod(map(len, spans)) > MAX_RANKS:
            continue
        texts = zip(*(match[1].split("_") for match in matches.values()), strict=True)
        widths = [min(map(len, column)) for column in texts]
        missing = []
        for numbers in product(*spans):
            padded = (f"{number:0{width}}" for number, width in zip(numbers, widths, strict=True))
            if numbers not in matches and (name := f"{prefix}{'_'.join(padded)}{suffix}") not in faulty:
                missing.append(name)
        parts.note_missing(missing, "ranks")


def _keys(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the key of each part, which is the same in all saves: its path without suffix and step."""
    keys = {name: tuple(_key(parse_name(part).blank) or part for part in _split(name)) for name in names}
    if len(set(keys.values())) == len(names):
        return keys
    plain = {name: (*_split(name)[:-1], _key(_split(name)[-1])) for name in names}
    return plain if len(set(plain.values())) == len(names) else {name: _split(name) for name in names}


def _split(name: str) -> tuple[str, ...]:
    return tuple(name.split(os.sep))


def _key(name: str) -> str:
    """Return a name without its suffix, and without separators around a blanked number."""
    stem = os.path.splitext(name)[0] or name
    return re.sub(r"[-_.=]*\*", "", stem).strip("-_.=")


def _below(key: Collection[str], tensor: Tensor) -> Tensor:
    owner = None if tensor.shares_with is None else ".".join((*key, tensor.shares_with))
    return replace(tensor, path=(*key, *tensor.path), shares_with=owner)


def _training_step(parts: OpenedParts, directory: str) -> dict[str, Any]:
    """Return LeRobot's record of the step, ``{"step": 20000}``; empty if there is none."""
    path = os.path.join(directory, _TRAINING_STEP)
    if not fs.isfile(path):
        return {}
    try:
        with fs.open_source(path) as source:
            parsed = parse_json(path, source.read(0, min(source.size, _MAX_STEP_BYTES)), "training step")
        if isinstance(parsed, dict):
            return parsed
        reason = f"a value of type {type(parsed).__name__} instead of an object"
    except DamagedCheckpoint as failure:
        reason = failure.reason
    parts.fault("part-damaged", reason, _TRAINING_STEP)
    return {}


def _training(parts: OpenedParts, record: Mapping[str, Any], name: str) -> TrainingState:
    """Return the training state, each value from the first part that has it, or the directory's name."""
    values: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    origin: dict[str, str] = {}
    states = [(f"{part_name}: ", part.training) for part_name, part in parts.parts.items()]
    states.append((f"{_TRAINING_STEP}: ", training_state(record)))
    for prefix, state in (*states, ("", training_state({}, {}, name))):
        origins = {
            key: where
            for key, where in state.origin.items()
            if not (prefix and state.origin_of(key).kind == "name")
        }
        for field in fields(state):
            if field.name in origins and field.name not in values:
                values[field.name] = getattr(state, field.name)
                origin[field.name] = prefix + origins[field.name]
        for metric, value in state.metrics.items():
            if (key := f"metrics.{metric}") in origins and metric not in metrics:
                metrics[metric] = value
                origin[key] = prefix + origins[key]
    return TrainingState(metrics=metrics, origin=origin, **values)
