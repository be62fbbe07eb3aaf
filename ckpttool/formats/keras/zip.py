"""Keras's own file, ``.keras``: a zip of the model's config and of its variables in HDF5.

Source: Keras ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

from typing import ClassVar

from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.errors import CheckpointError
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.sidecar import ENTRY, apply_sidecar

_CONFIG = "config.json"
_OTHERS = frozenset({"metadata.json", "model.weights.h5", "model.weights.npz"})


class KerasZip(Format):
    """A model that ``model.save("m.keras")`` wrote."""

    name: ClassVar[str] = "keras"
    suffixes = (".keras",)

    def matches(self, probe: Probe) -> bool:
        if not probe.is_zip:
            return False
        try:
            names = set(probe.archive.names)
        except CheckpointError:  # what is left of a damaged one begins like this
            length = int.from_bytes(probe.head[26:28], "little")
            return probe.head[30 : 30 + length] in (b"metadata.json", b"config.json")
        return _CONFIG in names and not names.isdisjoint(_OTHERS)

    def open(self, probe: Probe) -> Checkpoint:
        # Every zip is shown to this format; only Keras's own pay for what reads them.
        from ckpttool.formats.keras.layout import training_of
        from ckpttool.formats.keras.members import Model, spans_of

        model = Model(probe)
        tensors = model.read()

        checkpoint = Checkpoint(
            path=probe.path,
            format=self.name,
            variant=None,
            tensors=tensors,
            files=(FileEntry(probe.path, probe.source.size),),
            spans=lambda: spans_of(model.archive, probe.path),
            metadata=lambda: model.metadata,
            training=lambda: training_of(model.metadata, tensors, probe.name),
            layers=lambda: model.layers(tensors),
            native=lambda: model.native(tensors),
            producer=Producer("keras", model.version),
            findings=tuple(dict.fromkeys(model.findings)),
            safety=tuple(dict.fromkeys(model.safety)),
            complete=model.complete and not model.archive.is_cut,
            close=probe.close if model.weights is None else model.weights.close_then(probe.close),
        )
        sidecar = model.sidecar()
        return checkpoint if sidecar is None else apply_sidecar(checkpoint, sidecar, ENTRY)
