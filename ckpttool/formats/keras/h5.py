"""Keras in HDF5: whole models (``.h5``) and weights (``.weights.h5``), as Keras 2 and 3 write them.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``, ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ckpttool.containers.hdf5_worker import WORKER
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, error_of, require_at_most
from ckpttool.core.report import Finding, not_scanned
from ckpttool.core.tensor import Tensor
from ckpttool.formats.hdf5.plain import Hdf5, apply_hdf5_sidecar, is_hdf5, opened_hdf5
from ckpttool.formats.interface import Format, Probe
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.formats.hdf5.tensors import OpenedHdf5
    from ckpttool.formats.keras.model import KerasModel, Kinds

_WEIGHTS, _CONFIG = "model.weights.h5", "config.json"
"""Files that Keras loads as a model from a directory."""
_MARKS = (b"keras_version", b"layer_names", b"model_weights")
"""Attributes and groups of Keras's, which are in the first bytes of its files."""


class KerasH5(Format):
    """A model or weights that Keras stored in HDF5: the variants ``model`` and ``weights``."""

    name: ClassVar[str] = "keras-h5"
    suffixes = (".weights.h5", ".h5")
    specialises = (Hdf5,)

    def matches(self, probe: Probe) -> bool:
        if not is_hdf5(probe):
            return False
        WORKER.begin(probe.path)  # it starts while the reader of its answers is imported
        from ckpttool.formats.keras.layout import kind_of_file

        try:
            return kind_of_file(opened_hdf5(probe)) is not None
        except DamagedCheckpoint:
            # Its groups can't be read. Its first bytes or its name can still show that Keras wrote it, so
            # that it is reported as a damaged file of this format, and not as plain HDF5.
            return any(mark in probe.head for mark in _MARKS) or probe.name.endswith(".weights.h5")

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.keras.layout import (
            kind_of_file,
            listed_shapes,
            tensors_with_names,
            training_of,
        )
        from ckpttool.formats.keras.native import h5_native

        opened = opened_hdf5(probe)
        tensors = tensors_with_names(opened)
        metadata, findings, safety = _metadata_of(opened, probe.path, probe.source.size)
        model: KerasModel | None = None
        if "model_config" in metadata:
            from ckpttool.formats.keras.compare import compare_listed_weights
            from ckpttool.formats.keras.model import KerasModel

            model = KerasModel.of_config(metadata["model_config"])
            if opened.complete and model is not None:
                findings += compare_listed_weights(model, listed_shapes(opened))
        version = metadata.get("keras_version")
        checkpoint = Checkpoint(
            path=probe.path,
            format=self.name,
            variant=kind_of_file(opened),
            tensors=tensors,
            files=(FileEntry(probe.path, probe.source.size),),
            spans=opened.spans,
            metadata=lambda: metadata,
            training=lambda: training_of(metadata, tensors, probe.name),
            layers=lambda: _kinds(metadata, model, tensors),
            native=lambda: h5_native(opened.tree.groups, tensors),
            producer=Producer("keras", version if isinstance(version, str) else None),
            findings=(*dict.fromkeys(opened.findings), *findings),
            safety=(*opened.safety, *safety, *_safety_of_next_config(probe)),
            complete=opened.complete,
            close=opened.close_then(probe.close),
        )
        return apply_hdf5_sidecar(checkpoint, opened)


def _kinds(metadata: Mapping[str, Any], model: KerasModel | None, tensors: tuple[Tensor, ...]) -> Kinds:
    """Return the kinds of weights: by the config of a whole model, or by the names of groups."""
    if "model_config" in metadata:
        return {} if model is None else model.kinds_by_name(tensors)
    from ckpttool.formats.keras.model import kinds_of_groups

    return kinds_of_groups(tensors)


def _safety_of_next_config(probe: Probe) -> Iterator[Finding]:
    """Yield the safety findings of the ``config.json`` next to ``model.weights.h5``."""
    # Keras loads a directory with both files as a model, so opening the weights alone must not hide the
    # code that the configuration would run.
    path = os.path.join(os.path.dirname(probe.path), _CONFIG)
    if probe.name != _WEIGHTS or not fs.lexists(path):
        return
    from ckpttool.formats.keras.config import MAX_CONFIG, judge, read_config

    try:
        with fs.open_source(path) as source:
            require_at_most(path, MAX_CONFIG, source.size, "{:,} bytes")
            yield from judge(read_config(path, source.read(0, source.size)), _CONFIG, probe.source.size)
    except CheckpointError:
        yield not_scanned(_CONFIG)


def _metadata_of(
    opened: OpenedHdf5, path: str, nbytes: int
) -> tuple[dict[str, Any], list[Finding], list[Finding]]:
    """Return the metadata, its findings, and its safety findings."""
    from ckpttool.formats.keras.native import CONFIGS

    groups = opened.tree.groups
    root = groups.get((), {})
    metadata: dict[str, Any] = {
        key: value
        for attributes in (root, groups.get(("model_weights",), {}))
        for key, value in attributes.items()
        if not key.startswith(("layer_names", *CONFIGS))
    }
    findings: list[Finding] = []
    safety: list[Finding] = []
    for key in CONFIGS:
        if key not in root:
            continue
        from ckpttool.formats.keras.config import judge, read_config, unknown_arguments

        text = root[key] if isinstance(root[key], str) else ""
        try:
            metadata[key] = read_config(path, text.encode("utf-8", "surrogatepass"))
        except CheckpointError as failure:
            findings.append(error_of(failure, key))
            safety.append(not_scanned(key))
        else:
            safety += judge(metadata[key], key, nbytes)
            findings += unknown_arguments(metadata[key], key)
    if opened.other_content:
        metadata["datasets"] = opened.other_content
    return metadata, findings, safety
