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
        except CheckpointError:
            # The directory of records, at the end, is damaged. The local header of the first record has the
            # length of its name at 26 and the name at 30; Keras writes metadata.json first.
            length = int.from_bytes(probe.head[26:28], "little")
            return probe.head[30 : 30 + length] in (b"metadata.json", b"config.json")
        return _CONFIG in names and not names.isdisjoint(_OTHERS)

    def open(self, probe: Probe) -> Checkpoint:
        # ``matches`` is called for every zip, so the modules that read Keras's are imported only here.
        from ckpttool.formats.keras.layout import training_of
        from ckpttool.formats.keras.members import KerasArchive, spans_of

        model = KerasArchive(probe)
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
        return apply_sidecar(checkpoint, model.text(ENTRY), ENTRY) if model.has(ENTRY) else checkpoint
