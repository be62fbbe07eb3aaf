"""TensorFlow checkpoints: ``<prefix>.index`` and ``<prefix>.data-00000-of-00001``; nothing in them can run.

Source: tensorflow/tensorflow ``core/util/tensor_bundle/``, ``python/checkpoint/``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import ClassVar

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.interface import Probe, SetFormat, Unit, scan
from ckpttool.formats.tf_prefix import (
    DATA,
    INDEX,
    Entries,
    bundles,
    is_stage,
    is_table_source,
    old_tables,
    prefix_of,
    stages,
)


class TensorFlow(SetFormat):
    """A checkpoint of TensorFlow, by its prefix or any of its files."""

    name: ClassVar[str] = "tensorflow"
    suffixes = (INDEX,)

    def matches(self, probe: Probe) -> bool:
        if probe.is_directory:
            return is_stage(probe.path) or self._only(probe) is not None
        return is_table_source(probe.source) or self._is_named(probe)

    def _is_named(self, probe: Probe) -> bool:
        """Tell whether a file belongs to a prefix by its name: then it is one, however damaged."""
        path = probe.source.path
        if not path.endswith(INDEX):
            return DATA.fullmatch(probe.name) is not None
        stem = os.path.basename(path).removesuffix(INDEX)
        directory = os.path.dirname(path) or os.curdir
        try:
            return any(name.startswith(f"{stem}.data-") for name in os.listdir(directory))
        except OSError:
            return False

    def _only(self, probe: Probe) -> Unit | None:
        """Return the checkpoint in a directory that holds just one."""
        units = [unit for unit in self.units(probe.path, probe.entries) if not is_stage(unit.path)]
        return units[0] if len(units) == 1 else None

    def open(self, probe: Probe) -> Checkpoint:
        if probe.is_directory:
            unit = Unit(probe.path, (), self) if is_stage(probe.path) else self._only(probe)
            return self.open_unit(unit or Unit(probe.path, (), self))
        path = probe.source.path
        probe.close()
        prefix = prefix_of(probe.path) or prefix_of(path)
        if prefix is None:
            return self._old(probe.path)
        return self._whole(prefix)

    def open_unit(self, unit: Unit) -> Checkpoint:
        if is_stage(unit.path):
            from ckpttool.formats.tf_opening import open_stage

            return open_stage(unit.path)
        if not any(map(prefix_of, [unit.path, *unit.members])) and os.path.isfile(unit.path):
            return self._old(unit.path)
        if os.path.isdir(unit.path) and not os.path.lexists(unit.path + INDEX):
            return super().open_unit(unit)
        return self._whole(prefix_of(unit.path) or unit.path)

    def unit_of(self, probe: Probe) -> Unit | None:
        if probe.is_directory:
            return Unit(probe.path, (probe.name,), self) if is_stage(probe.path) else None
        prefix = prefix_of(probe.path) or prefix_of(probe.source.path) or probe.path
        directory = os.path.dirname(prefix)
        found = self.units(directory, scan(directory or os.curdir))
        return next((unit for unit in found if unit.path == prefix), Unit(probe.path, (probe.name,), self))

    @staticmethod
    def _whole(prefix: str) -> Checkpoint:
        from ckpttool.formats.tf_opening import open_prefix

        return open_prefix(prefix)

    @staticmethod
    def _old(path: str) -> Checkpoint:
        from ckpttool.formats.tf_v1 import open_old

        return open_old(path)

    def units(self, directory: str, entries: Entries) -> Iterable[Unit]:
        for prefix, names in bundles(directory, entries).items():
            yield Unit(os.path.join(directory, prefix), names, self)
        for prefix, meta in old_tables(directory, entries):
            yield Unit(os.path.join(directory, prefix), (prefix, meta), self)
        for name in stages(directory, entries):
            yield Unit(os.path.join(directory, name), (name,), self)
