"""Writes Keras's files: ``.keras``, and models and weights in HDF5.

``.keras`` is a zip of the model's config, its variables in HDF5 and the files of its layers. ``.weights.h5``
has the same numbered variables; whole models in ``.h5`` have lists of layers and weights.

Source: Keras ``src/saving/saving_lib.py``, ``src/legacy/saving/legacy_h5_format.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from ckpttool.containers.hdf5_writer import Plan, build_structure
from ckpttool.containers.zip_writer import MAX_NAME, NumpyZip
from ckpttool.core.checkpoint import TrainingState
from ckpttool.core.tensor import Path, Tensor
from ckpttool.core.training import depends_only_on
from ckpttool.formats.content.plain_data import RECORDS
from ckpttool.formats.hdf5.writer import hdf5_plan, path_refusals
from ckpttool.formats.keras.config_writer import (
    archive_config,
    archive_metadata,
    attribute_configs,
    attribute_metadata,
    has_model,
)
from ckpttool.formats.keras.layout import top_of
from ckpttool.formats.keras.native import (
    ASSET,
    CONFIG,
    CONFIGS,
    METADATA,
    STORED,
    TRAINING_CONFIG,
    h5_native,
    object_of,
)
from ckpttool.formats.keras.places import Attributes, Places, listed_places, numbered_places
from ckpttool.formats.sidecar import ENTRY, sidecar_of
from ckpttool.formats.writer import Content, Target, WriteOptions, Writer, fold_name

_CONFIG_RECORD, _METADATA_RECORD, _WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
_NO_MODEL = (
    "a .keras file needs the model's architecture, which the source doesn't have "
    "(--model FILE gives it; .weights.h5 holds weights alone)"
)
_WEIGHTS_SUFFIX = ".weights.h5"
_NO_ARCHITECTURE = (
    "a whole model needs its architecture, which the source doesn't have "
    "(--model FILE gives it; .weights.h5 holds weights alone)"
)
_DIRECTORY = "assets"

KERAS_TYPES = frozenset(
    (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
)
"""Names of the types that Keras reads; h5py returns others as bytes without a type."""


class _KerasFileWriter(Writer):
    """A writer that computes the names that the reader will give to tensors while it writes."""

    dtypes: ClassVar[frozenset[str]] = KERAS_TYPES
    own_metadata: ClassVar[frozenset[str]] = frozenset(
        {"backend", "date_saved", "keras_version", "model_config", "name", "training_config", RECORDS}
    )
    own_native: ClassVar[frozenset[str]] = frozenset({CONFIG, METADATA, STORED, TRAINING_CONFIG})

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}

    def reader_name(self, tensor: Tensor) -> str:
        return ".".join(map(str, self._paths.get(tensor.name, tensor.path)))


# The zip .keras -------------------------------------------------------------------------------------


class KerasWriter(_KerasFileWriter):
    """A model as ``model.save("m.keras")`` writes it."""

    name: ClassVar[str] = "keras"

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        if not has_model(content.native):
            yield _NO_MODEL
            return
        places = numbered_places(content)
        yield from places.problems or path_refusals(places.paths, content.tensors)
        for name, why in _faulty_assets(content.native):
            yield f"the file {name[:100]!r} of the model: {why}"

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        config, metadata = archive_config(content.native), archive_metadata(content.native)
        assets = _assets(content.native)
        model = object_of(config)
        places = numbered_places(content)
        places.config = model
        self._paths = places.reader_paths(content.tensors)
        archive = NumpyZip(target.create())
        archive.add(_METADATA_RECORD, metadata)
        archive.add(_CONFIG_RECORD, config)
        weights = build_structure(keras_plan(content, places))
        archive.assemble(_WEIGHTS, weights.size, weights.stream_with_crc)
        for name, data in assets.items():
            archive.add(name, data)
        native = {METADATA: metadata, CONFIG: config}
        native |= {ASSET + name: data for name, data in assets.items()}
        described = {**object_of(metadata), "model_config": model}
        sidecar = _sidecar(content, self._paths, described, native)
        if sidecar is not None:
            archive.add(ENTRY, sidecar)
        archive.finish()
        archive.seal()


# Files of layers ------------------------------------------------------------------------------------


def _assets(native: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of layers (a vocabulary), which Keras unpacks when it loads the model, by name."""
    return {key.removeprefix(ASSET): data for key, data in native.items() if key.startswith(ASSET)}


def _faulty_assets(native: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Yield the assets that can't be stored, with the reason."""
    # Keras unpacks them by their names: two may not be one file on a file system that ignores case, and none
    # may be the directory of another.
    taken: dict[str, str] = {}
    for name in _assets(native):
        if refusal := _asset_name_refusal(name):
            yield name, refusal
        elif (other := taken.setdefault(fold_name(name), name)) != name:
            yield name, f"some file systems don't distinguish its name from {other[:100]!r}"
    for folded, name in taken.items():
        parts = folded.split("/")
        above = ("/".join(parts[:count]) for count in range(1, len(parts)))
        file = next((taken[directory] for directory in above if directory in taken), None)
        if file is not None:
            yield name, f"{file[:100]!r} is a file and no directory"


def _asset_name_refusal(name: str) -> str | None:
    parts = name.split("/")
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        return "its name is not valid text"
    if any(letter in name for letter in "\\\0") or any(part in ("", ".", "..") for part in parts):
        return "its name is empty or points outside the directory where it is unpacked"
    if parts[0] != _DIRECTORY or len(parts) < 2:
        return f"Keras keeps such files in {_DIRECTORY}/"
    return f"its name has {nbytes:,} bytes, and at most {MAX_NAME:,} fit" if nbytes > MAX_NAME else None


# HDF5 -----------------------------------------------------------------------------------------------


class KerasH5Writer(_KerasFileWriter):
    """Weights in HDF5 if the target's name ends in ``.weights.h5``, otherwise a whole model."""

    name: ClassVar[str] = "keras-h5"

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        is_model = not _is_weights(options)
        if is_model and not has_model(content.native):
            yield _NO_ARCHITECTURE
            return
        places = _places_by_name(content, options)
        yield from places.problems or path_refusals(places.paths, content.tensors)
        if not is_model:
            return
        for tensor in content.tensors:
            if tensor.dtype.name == "bfloat16":
                yield f"{tensor.name}: Keras reads no bfloat16 from an .h5 (use .keras or --dtype)"
        for key in content.native:
            if key.startswith(ASSET):
                yield f"{key.removeprefix(ASSET)}: an .h5 can't hold a file of the model (use .keras)"

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        places = _places_by_name(content, options)
        self._paths = places.reader_paths(content.tensors)
        plan = keras_plan(content, places)
        if not _is_weights(options):
            metadata = attribute_metadata(content.native)
            plan.groups[()] = {**plan.groups.get((), {}), **metadata, **attribute_configs(content.native)}
            if top := top_of(plan.groups):
                plan.groups[top] = {**metadata, **plan.groups[top]}
        attributes: Attributes = {**plan.groups.get((), {}), **plan.groups.get(("model_weights",), {})}
        skipped = ("layer_names", *CONFIGS)
        metadata = {key: value for key, value in attributes.items() if not key.startswith(skipped)}
        configs = {key: object_of(attributes[key].encode()) for key in CONFIGS if key in attributes}
        sidecar = _sidecar(content, self._paths, {**metadata, **configs}, h5_native(plan.groups, ()))
        if sidecar is not None:
            plan.texts[(ENTRY,)] = sidecar
        build_structure(plan).stream(target.create())


def _is_weights(options: WriteOptions) -> bool:
    return options.name.lower().endswith(_WEIGHTS_SUFFIX)


def _places_by_name(content: Content, options: WriteOptions) -> Places:
    return numbered_places(content) if _is_weights(options) else listed_places(content)


def keras_plan(content: Content, places: Places) -> Plan:
    """Return the plan of an HDF5 file with the variables of a model in their places."""
    plan = hdf5_plan(places.paths, content.tensors)
    plan.groups = dict(places.groups)
    return plan


# Sidecar --------------------------------------------------------------------------------------------


def _sidecar(
    content: Content,
    paths: Mapping[str, Path],
    held_metadata: Mapping[str, object],
    held_native: Mapping[str, bytes],
) -> bytes | None:
    """Return the sidecar, or None if the file holds everything without it.

    Args:
        content: The content to write.
        paths: The paths that the file's reader gives to tensors, by their names in the content.
        held_metadata: Metadata that the reader finds in the file itself, without digests of records.
        held_native: Native parts that it finds in the file itself, without places of tensors.
    """
    # The content of a Keras file fits into a file of the same kind, without a sidecar. Training state,
    # conventions, ties and trees from elsewhere have no place in it. A sidecar that is needed for one of them
    # has the training state as well.
    native = {
        key: value for key, value in content.native.items() if key != STORED and held_native.get(key) != value
    }
    is_native = STORED in content.native
    for key, value in content.metadata.items() if is_native else ():
        if key == RECORDS and isinstance(value, Mapping):
            is_native &= all(ASSET + name in held_native for name in value)
        else:
            is_native &= key in held_metadata and held_metadata[key] == value
    metadata = {} if is_native else content.metadata
    names = {tensor.name for tensor in content.tensors}
    is_known = content.training == TrainingState() or (is_native and depends_only_on(content.training, names))
    is_tied = any(tensor.shares_with is not None for tensor in content.tensors)
    is_known = is_known and not content.conventions
    if not native and not metadata and is_known and content.tree is None and not is_tied:
        return None
    return sidecar_of(_move_tensors(replace(content, native=native, metadata=metadata), paths))


def _move_tensors(content: Content, paths: Mapping[str, Path]) -> Content:
    """Return the content with the paths that the file's reader will give to its tensors."""
    from ckpttool.formats.content.tree import replace_tensors

    names = {name: ".".join(map(str, path)) for name, path in paths.items()}
    moved = {
        id(tensor): replace(
            tensor,
            path=paths.get(tensor.name, tensor.path),
            shares_with=names.get(tensor.shares_with, tensor.shares_with) if tensor.shares_with else None,
        )
        for tensor in content.tensors
    }
    tree = None if content.tree is None else replace_tensors(content.tree, moved)
    layers = {names.get(name, name): kind for name, kind in content.layers.items()}
    return replace(content, tensors=tuple(moved.values()), tree=tree, layers=layers)
