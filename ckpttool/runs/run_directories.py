"""Runs: directories, hyper-parameters, and properties of names that several checkpoints share.

The directory is found by names alone: it is the one above those of single saves, and above the folders that
frameworks put between. Hyper-parameters are read from files of the run, or from its newest checkpoint.

Sources: ray-project/ray ``python/ray/tune/result.py`` (``params.json``); lightning
``pytorch/loggers/csv_logs.py`` (``hparams.yaml``); facebookresearch/hydra ``hydra/_internal/utils.py``
(``.hydra/config.yaml``); wandb ``wandb/sdk/lib/config_util.py`` (``config.yaml``);
mlflow ``mlflow/store/tracking/file_store.py`` (``params``).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.errors import CheckpointError
from ckpttool.core.naming import NameFields, is_step_name, pair_fields, parse_name
from ckpttool.formats.discovery import Globs, last_name
from ckpttool.runs.entry import Entry
from ckpttool.storage import fs

_FOLDERS = frozenset(
    {"checkpoints", "checkpoint", "ckpts", "ckpt", "weights", "models", "saved_models", "artifacts", "files"}
)
"""Names of directories between a run's own and its checkpoints."""
_MOST_BYTES, _MOST_PARAMETERS = 1 << 16, 1_000
_LONGEST_LIST = 8
_MLFLOW = frozenset({"meta.yaml", "params", "metrics"})
"""Names in an MLflow run's directory."""

Parameters = Mapping[str, object]


def run_directory(directory: str, root: str) -> str:
    """Return the directory of the run to which the checkpoints of a directory belong.

    Args:
        directory: Directory of checkpoints, in ``root`` or below.
        root: The directory that was searched: no run is looked for above it.
    """
    # ``runs/exp1/checkpoints/step_100`` belongs to ``runs/exp1``: directories of frameworks and of single
    # saves are skipped upwards.
    top = fs.normpath(root)
    while fs.normpath(directory) != top:
        name = os.path.basename(directory)
        if name.lower() not in _FOLDERS and not is_step_name(name):
            break
        directory = os.path.dirname(directory) or os.curdir
    return directory


def hyper_parameters(run: str, entries: Sequence[Entry]) -> Parameters:
    """Return the hyper-parameters of a run by dotted names, from its files or its newest save.

    A file that is damaged, too long or of another syntax is ignored.
    """
    # One listing shows which of the files exist: in a store, asking for each would take a request.
    try:
        names = {one.name for one in fs.entries(run)}
    except OSError:
        names = set()
    for name, parse in _FILES.items():
        exists = name.split("/")[0] in names
        if exists and (text := _read(os.path.join(run, name))) is not None:
            try:
                found = parse(text)
            except (ValueError, RecursionError, CheckpointError):
                continue
            if isinstance(found, Mapping) and found:
                return dict(flatten(found))
    if names >= _MLFLOW and (parameters := _mlflow_parameters(os.path.join(run, "params"))):
        return parameters
    newest = next((entry for entry in reversed(entries) if entry.hyper_parameters), None)
    return {} if newest is None else dict(flatten(newest.hyper_parameters))


def _mlflow_parameters(directory: str) -> Parameters:
    """Return MLflow's parameters of a run, which are one file each."""
    try:
        names = sorted(one.name for one in fs.entries(directory))[:_MOST_PARAMETERS]
    except OSError:
        return {}
    texts = ((name, _read(os.path.join(directory, name))) for name in names)
    return {name: text.decode("utf-8", "replace").strip() for name, text in texts if text is not None}


def _read(path: str) -> bytes | None:
    try:
        with fs.open_regular(path) as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, CheckpointError):
        return None
    return text if len(text) <= _MOST_BYTES else None


def parse_yaml(text: bytes) -> object:
    """Return the content of YAML; an object, such as ``!!python/tuple``, becomes its plain parts."""
    import yaml

    # The safe loader raises for unknown tags. This one reads their plain parts, and constructs no object.
    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_undefined(self, node: Any) -> object:
            if isinstance(node, yaml.MappingNode):
                return self.construct_mapping(node, deep=True)
            if isinstance(node, yaml.SequenceNode):
                return self.construct_sequence(node, deep=True)
            return node.value

    Loader.add_constructor(None, Loader.construct_undefined)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _json(text: bytes) -> object:
    return parse_json("", text, "hyper-parameters", constants=True)


def _wandb(text: bytes) -> object:
    found = parse_yaml(text)
    if not isinstance(found, Mapping):
        return None
    # Each entry is ``{desc: …, value: …}``; names that begin with ``_`` are of Weights & Biases itself.
    values = {name: one.get("value") for name, one in found.items() if isinstance(one, Mapping)}
    return {name: value for name, value in values.items() if not str(name).startswith("_")}


_FILES: Mapping[str, Callable[[bytes], Any]] = {
    "params.json": _json,
    "hparams.yaml": parse_yaml,
    ".hydra/config.yaml": parse_yaml,
    "files/config.yaml": _wandb,
}
"""Parsers of files with a run's hyper-parameters: Ray's, Lightning's, Hydra's, Weights & Biases'."""


def flatten(values: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    """Yield single values and short lists by dotted name, up to a limit."""
    waiting = list(reversed([(str(name), value) for name, value in values.items()]))
    for _ in range(_MOST_PARAMETERS):
        if not waiting:
            return
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += reversed([(f"{name}.{key}", one) for key, one in value.items()])
        elif isinstance(value, str | int | float | bool):
            yield name, value
        elif isinstance(value, list) and all(isinstance(one, str | int | float | bool) for one in value):
            yield name, value[:_LONGEST_LIST]


_NUMBERS = re.compile(r"[0-9]{1,18}(?:\.[0-9]+)?", re.ASCII)


def apply_series_globs(entries: Sequence[Entry], globs: Globs) -> list[Entry]:
    """Return checkpoints; those whose names match a glob get its series, whatever fields their names have.

    A name without a wildcard, ``model.pt``, means one checkpoint in each of several sibling directories.
    """
    applied: list[Entry] = []
    for entry in keep_run_settings(entries):
        glob = next((last_name(glob) for glob in globs.matching(entry.path)), None)
        if glob is not None:
            fields = entry.fields
            stem = os.path.splitext(entry.name)[0]
            numbers = [number for number in _NUMBERS.findall(stem) if number.isdigit()]
            has_position = any(value is not None for value in fields.position)
            number = fields.number if has_position or not numbers else int(numbers[-1])
            is_in_each = glob == entry.name
            series = os.path.join(os.path.dirname(entry.directory), "*", glob) if is_in_each else None
            entry = replace(entry, fields=replace(fields, blank=glob, number=number), series=series)
        applied.append(entry)
    return applied


def keep_run_settings(entries: Sequence[Entry]) -> list[Entry]:
    """Return checkpoints; settings of runs that look like metrics in names aren't blanked.

    A number is a setting if each of its values has several checkpoints, and two checkpoints have the same
    epoch and step: ``llama_acc2_epoch_1.pth`` and ``llama_acc4_epoch_1.pth``. A run that has just begun may
    have one.
    """
    by_name: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        if any(value is not None for value in entry.fields.position):
            by_name[entry.directory, entry.fields.blank].append(entry)
    settings_of_name = {name: _setting_fields(same) for name, same in by_name.items()}
    kept: list[Entry] = []
    for entry in entries:
        if settings := settings_of_name.get((entry.directory, entry.fields.blank)):
            first, *rest = entry.fields.blank.split("*")
            texts = [text if at in settings else "*" for at, text in enumerate(field_texts(entry))]
            blank = first + "".join(text + part for text, part in zip(texts, rest, strict=True))
            entry = replace(entry, fields=replace(entry.fields, blank=blank))
        kept.append(entry)
    return kept


class _Column(NamedTuple):
    """Field of names of one form: the word before it, its texts, and whether it is a count."""

    word: str
    texts: Sequence[str]
    values: Sequence[float | None]
    is_count: bool


def _columns(same: Sequence[Entry]) -> list[_Column]:
    texts = [field_texts(entry) for entry in same]
    if len({len(fields) for fields in texts}) > 1:
        return []
    counts = [list(column) for column in zip(*(entry.fields.position for entry in same), strict=True)]
    words = same[0].fields.blank.split("*")
    columns = [(column, [_number(text) for text in column]) for column in zip(*texts, strict=True)]
    return [
        _Column(word, column, values, values in counts)
        for word, (column, values) in zip(words, columns, strict=False)
    ]


def _setting_fields(same: Sequence[Entry]) -> Collection[int]:
    """Return which of the fields in names of one form, neither epoch nor step, are settings.

    If no two have the same epoch and step, none is: metrics may be equal, too.
    """
    if len({entry.fields.position for entry in same}) == len(same):
        return ()
    columns = enumerate(_columns(same))
    return {at for at, one in columns if not one.is_count and _distinguish_runs(one.values)}


def may_have_settings(same: Sequence[Entry]) -> bool:
    """Return whether a number before the count may be a setting, though no two share an epoch and step.

    ``acc2_epoch_5`` and ``acc4_epoch_8``: it is whole, or nothing separates it from its word, and each of its
    values has several checkpoints. In ``val_acc_0.93_epoch_5`` it was measured.
    """
    before = takewhile(lambda one: not one.is_count, _columns(same))
    return any(
        (one.word[-1:].isalpha() or all(map(str.isdigit, one.texts))) and _distinguish_runs(one.values)
        for one in before
    )


def _distinguish_runs(values: Sequence[float | None]) -> bool:
    """Return whether values are settings: most have several checkpoints each."""
    # A metric rarely has a value twice, a setting has each of its values in a whole run. Runs that have just
    # begun have a single checkpoint: at most one run, or fewer than half of all checkpoints.
    counts = sorted(Counter(values).values())
    singles = counts.count(1)
    are_few = singles <= 1 or 2 * singles < len(values)
    return None not in values and len(counts) > 1 and counts[-1] > 1 and are_few


def _number(text: str) -> float | None:
    try:
        return float(text) if math.isfinite(float(text)) else None
    except ValueError:
        return None


def field_texts(entry: Entry) -> tuple[str, ...]:
    """Return the texts of a name at each ``*`` of its blanked form."""
    match = re.fullmatch("(.+?)".join(map(re.escape, entry.fields.blank.split("*"))), entry.name, re.DOTALL)
    return match.groups() if match else ()


def has_run_setting(entry: Entry) -> bool:
    """Return whether its blanked name contains a setting that would otherwise be taken for a metric."""
    return entry.fields.blank.count("*") < parse_name(entry.name).blank.count("*")


def take_directory_counts(entries: Sequence[Entry], *, everywhere: bool) -> list[Entry]:
    """Return checkpoints; ``step_100/model.pt`` has the step of its directory, if no other part differs."""
    uncounted: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        is_asked_for = everywhere or entry.series is not None
        if is_asked_for and all(value is None for value in entry.fields.position):
            uncounted[entry.fields.blank if everywhere else entry.series or ""].append(entry)
    counted = {
        path: fields for same in uncounted.values() for path, fields in _directory_fields(same).items()
    }
    taken: list[Entry] = []
    for entry in entries:
        if (counts := counted.get(entry.path)) is not None:
            fields = replace(entry.fields, epoch=counts.epoch, step=counts.step, number=counts.number)
            entry = _replace_fields(entry, fields)
        taken.append(entry)
    return taken


def _directory_fields(same: Sequence[Entry]) -> dict[str, NameFields]:
    """Return the fields of the only path component in which directories differ, by checkpoint path."""
    # ``run/step_1/model.pt`` and ``run/step_2/model.pt`` differ in one component, which counts saves. If two
    # components differ, such as a trial and a step, they are of several runs.
    parts = [entry.directory.split(os.sep) for entry in same]
    if len({len(names) for names in parts}) != 1:
        return {}
    differing = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    if len(differing) != 1:
        return {}
    fields = [parse_name(name) for name in differing[0]]
    # Bare numbers may be those of trials, unless the user declared one series.
    is_declared = all(entry.series is not None for entry in same)
    counts = {(one.epoch, one.step, one.number if is_declared else None) for one in fields}
    if len({one.blank for one in fields}) > 1 or (None, None, None) in counts or len(counts) < len(same):
        return {}
    return {entry.path: one for entry, one in zip(same, fields, strict=True)}


def read_number_pairs(entries: Sequence[Entry]) -> list[Entry]:
    """Return checkpoints; ``checkpoint_1_100.pt`` and ``checkpoint_2_200.pt`` have an epoch and a step then.

    A pair is one where both numbers grow together; otherwise the first may be a fold.
    """
    pairs = {entry.path: fields for entry in entries if (fields := pair_fields(entry.name)) is not None}
    by_name: dict[tuple[str, str], list[NameFields]] = defaultdict(list)
    for entry in entries:
        if fields := pairs.get(entry.path):
            by_name[entry.directory, fields.blank].append(fields)
    growing = {name for name, same in by_name.items() if _grow_together(same)}
    return [
        _replace_fields(entry, fields) if fields and (entry.directory, fields.blank) in growing else entry
        for entry, fields in ((entry, pairs.get(entry.path)) for entry in entries)
    ]


def _grow_together(pairs: Sequence[NameFields]) -> bool:
    numbers = sorted((fields.epoch or 0, fields.step or 0) for fields in pairs)
    steps = [step for _, step in numbers]
    is_growing = len(steps) > 1 and all(one < two for one, two in pairwise(steps))
    return is_growing and all(epoch < step for epoch, step in numbers)


def _replace_fields(entry: Entry, fields: NameFields) -> Entry:
    epoch, step = entry.counts_inside
    return replace(
        entry,
        fields=fields,
        epoch=fields.epoch if epoch is None else epoch,
        step=fields.step if step is None else step,
    )


def split_into_runs(entries: list[Entry]) -> list[list[Entry]]:
    """Return the runs among checkpoints of one name: where dates go on, but epochs begin again, is another.

    ``2026-01-01_e1``, ``…_e2`` and ``2026-01-02_e1`` are two runs; ``2026-01-02_e3`` would go on.
    """
    dated = [entry for entry in entries if entry.fields.saved_at and _position(entry) != (-1, -1)]
    if len(dated) < len(entries):
        return [entries]
    ordered = sorted(dated, key=lambda entry: (entry.fields.saved_at or "", _position(entry)))
    runs = [ordered[:1]]
    for before, entry in pairwise(ordered):
        is_later = entry.fields.saved_at != before.fields.saved_at
        if is_later and _position(entry) <= _position(before):
            runs.append([])
        runs[-1].append(entry)
    return runs


def _position(entry: Entry) -> tuple[float, float]:
    return -1 if entry.epoch is None else entry.epoch, -1 if entry.step is None else entry.step
