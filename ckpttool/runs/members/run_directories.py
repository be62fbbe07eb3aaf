"""The run of a checkpoint: the directory into which one training, or one trial of a search, wrote.

It is found by names alone, so that telling it costs nothing: the directory above those of single saves, and
above the folders that frameworks put between. The hyper-parameters stand in the run's files, or inside.

Sources: ray-project/ray ``python/ray/tune/result.py`` (``params.json``); lightning
``pytorch/loggers/csv_logs.py`` (``hparams.yaml``); facebookresearch/hydra ``hydra/_internal/utils.py``
(``.hydra/config.yaml``); wandb ``wandb/sdk/lib/config_util.py`` (``config.yaml``);
mlflow ``mlflow/store/tracking/file_store.py`` (``params``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.errors import CheckpointError
from ckpttool.core.naming import is_step_name
from ckpttool.runs.members.entry import Entry
from ckpttool.storage import fs

_FOLDERS = frozenset(
    {"checkpoints", "checkpoint", "ckpts", "ckpt", "weights", "models", "saved_models", "artifacts", "files"}
)
"""Names of directories that stand between a run's own and its checkpoints."""
_MOST_BYTES, _MOST_PARAMETERS = 1 << 16, 1_000
_LONGEST_LIST = 8
_MLFLOW = frozenset({"meta.yaml", "params", "metrics"})
"""What lies in a run of MLflow's, where it keeps runs as files."""

Parameters = Mapping[str, object]


def run_directory(directory: str, root: str) -> str:
    """Return the directory of the run to which the checkpoints of a directory belong.

    Args:
        directory: Where they lie, in ``root`` or below.
        root: The directory that was searched: no run is looked for above it.
    """
    top = fs.normpath(root)
    while fs.normpath(directory) != top:
        name = os.path.basename(directory)
        if name.lower() not in _FOLDERS and not is_step_name(name):
            break
        directory = os.path.dirname(directory) or os.curdir
    return directory


def hyper_parameters(run: str, entries: Sequence[Entry]) -> Parameters:
    """Return what a run was started with, nested names with dots: from its files, else from its newest save.

    A file that is damaged, too long or written in another language tells nothing.
    """
    try:
        names = {one.name for one in fs.entries(run)}
    except OSError:
        names = set()
    for name, parse in _FILES.items():
        is_there = name.split("/")[0] in names
        if is_there and (text := _read(os.path.join(run, name))) is not None:
            try:
                found = parse(text)
            except (ValueError, RecursionError, CheckpointError):
                continue
            if isinstance(found, Mapping) and found:
                return dict(flatten(found))
    if names >= _MLFLOW and (parameters := _read_each(os.path.join(run, "params"))):
        return parameters
    newest = next((entry for entry in reversed(entries) if entry.hyper_parameters), None)
    return {} if newest is None else dict(flatten(newest.hyper_parameters))


def _read_each(directory: str) -> Parameters:
    """Return MLflow's parameters of a run: a file each."""
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
    """Return what a text in YAML holds; of an object, such as ``!!python/tuple``, what it is made of."""
    import yaml

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
    values = {name: one.get("value") for name, one in found.items() if isinstance(one, Mapping)}
    return {name: value for name, value in values.items() if not str(name).startswith("_")}


_FILES: Mapping[str, Callable[[bytes], Any]] = {
    "params.json": _json,
    "hparams.yaml": parse_yaml,
    ".hydra/config.yaml": parse_yaml,
    "files/config.yaml": _wandb,
}
"""The files of a run that hold its hyper-parameters: Ray's, Lightning's, Hydra's, Weights & Biases'."""


def flatten(values: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    """Yield single values and short lists, by their names; the first so many, of however much there is."""
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
