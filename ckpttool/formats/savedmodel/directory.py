"""Detection of SavedModels, by their directory or the model in it.

Source: tensorflow/tensorflow ``cc/saved_model/constants.h``, ``python/saved_model/loader_impl.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.formats.interface import Probe, SetFormat, Unit
from ckpttool.formats.savedmodel.layout import BINARY, CHUNKED, TEXT, is_without_graph


class SavedModelDirectory(SetFormat):
    """Directory from ``tf.saved_model.save`` or TensorFlow 1's builder, or its ``saved_model.pb``."""

    name: ClassVar[str] = "savedmodel"

    def matches(self, probe: Probe) -> bool:
        if not probe.is_directory:
            return probe.name in (BINARY, TEXT, CHUNKED)
        has_model = not {BINARY, TEXT, CHUNKED}.isdisjoint(probe.entries)
        return has_model or is_without_graph(probe.path, probe.entries)

    def units(self, directory: str, entries: Mapping[str, os.DirEntry[str]]) -> Iterable[Unit]:
        return ()

    def unit_of(self, probe: Probe) -> Unit:
        directory = _directory_of(probe)
        return Unit(directory, (os.path.basename(directory.rstrip(os.sep)),), self)

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.savedmodel.reader import open_model

        probe.close()
        return open_model(_directory_of(probe), (BINARY, TEXT) if probe.is_directory else (probe.name,))


def _directory_of(probe: Probe) -> str:
    return probe.path if probe.is_directory else os.path.dirname(probe.path) or os.curdir
