"""Detection of TensorFlow checkpoints by prefix, file or directory; nothing in them can run.

Source: tensorflow/tensorflow ``core/util/tensor_bundle/``, ``python/checkpoint/``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import ClassVar

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import NotACheckpoint
from ckpttool.formats.interface import Probe, SetFormat, Unit, scan
from ckpttool.formats.tensorflow.prefix import (
    DATA,
    INDEX,
    V1_SHARD,
    Entries,
    bundles,
    is_stage,
    is_table_source,
    is_v1,
    prefix_of,
    stages,
    v1_meta,
    v1_name,
    v1_shards,
    v1_tables,
)
from ckpttool.storage import fs


class TensorFlow(SetFormat):
    """TensorFlow checkpoint, named by its prefix or by any of its files."""

    name: ClassVar[str] = "tensorflow"
    suffixes = (INDEX,)

    def matches(self, probe: Probe) -> bool:
        if probe.is_directory:
            return is_stage(probe.path) or self._only_unit(probe) is not None
        path = probe.source.path
        if is_table_source(probe.source):
            return True
        # A file that belongs to a prefix by its name is one, however damaged. Other programs use ``.index``
        # as well: a damaged index needs a shard next to it, maybe an unfinished one.
        if not path.endswith(INDEX):
            return DATA.fullmatch(probe.name) is not None or bool(_sibling_shards(path)) or is_v1(path)
        stem = os.path.basename(path).removesuffix(INDEX)
        directory = os.path.dirname(path) or os.curdir
        try:
            return any(name.startswith(f"{stem}.data-") for name in fs.listdir(directory))
        except OSError:
            return False

    def _only_unit(self, probe: Probe) -> Unit | None:
        """Return the only checkpoint in a directory; None if it has none or several."""
        units = [unit for unit in self.units(probe.path, probe.entries) if not is_stage(unit.path)]
        return units[0] if len(units) == 1 else None

    def open(self, probe: Probe) -> Checkpoint:
        if probe.is_directory:
            unit = Unit(probe.path, (), self) if is_stage(probe.path) else self._only_unit(probe)
            checkpoint = None if unit is None else self.open_unit(unit)
            if checkpoint is None:  # it has changed since it was recognised
                raise NotACheckpoint(probe.path, "no checkpoint in this directory, or several")
            return checkpoint
        path = probe.source.path
        probe.close()
        prefix = prefix_of(probe.path) or prefix_of(path)
        if prefix is None:
            return self._open_v1(path)
        return self._open_prefix(prefix)

    def open_unit(self, unit: Unit, *, allows_losses: bool = False) -> Checkpoint | None:
        if is_stage(unit.path):
            from ckpttool.formats.tensorflow.reader import open_stage

            return open_stage(unit.path)
        # A checkpoint of version 1 is a file of this very name, or shards of it.
        is_v1_checkpoint = fs.isfile(unit.path) or bool(_sibling_shards(unit.path))
        if is_v1_checkpoint and not any(map(prefix_of, [unit.path, *unit.members])):
            return self._open_v1(unit.path)
        if not unit.members or (fs.isdir(unit.path) and not fs.lexists(unit.path + INDEX)):
            return None
        return self._open_prefix(prefix_of(unit.path) or unit.path)

    def unit_of(self, probe: Probe) -> Unit | None:
        if probe.is_directory:
            return Unit(probe.path, (probe.name,), self) if is_stage(probe.path) else None
        prefix = prefix_of(probe.path) or prefix_of(probe.source.path) or probe.source.path
        directory = os.path.dirname(prefix)
        if _sibling_shards(prefix):
            prefix = os.path.join(directory, v1_name(os.path.basename(prefix)))
        units = self.units(directory, scan(directory or os.curdir))
        return next((unit for unit in units if unit.path == prefix), Unit(probe.path, (probe.name,), self))

    @staticmethod
    def _open_prefix(prefix: str) -> Checkpoint:
        from ckpttool.formats.tensorflow.reader import open_prefix

        return open_prefix(prefix)

    @staticmethod
    def _open_v1(path: str) -> Checkpoint:
        from ckpttool.formats.tensorflow.v1 import open_v1

        directory, shards = os.path.dirname(path), _sibling_shards(path)
        if not shards:
            return open_v1(path, [path])
        whole = os.path.join(directory, v1_name(os.path.basename(path)))
        return open_v1(whole, [os.path.join(directory, name) for name in shards])

    def units(self, directory: str, entries: Entries) -> Iterable[Unit]:
        for prefix, names in bundles(directory, entries).items():
            yield Unit(os.path.join(directory, prefix), names, self)
        for names in v1_tables(directory, entries):
            yield Unit(os.path.join(directory, names[0]), names, self)
        for whole, shards in v1_shards(directory, entries).items():
            yield Unit(os.path.join(directory, whole), (*shards, *v1_meta(whole, entries)), self)
        for name in stages(entries):
            yield Unit(os.path.join(directory, name), (name,), self)


def _sibling_shards(path: str) -> tuple[str, ...]:
    """Return all shards of a version 1 checkpoint, given one of them or their ``?????`` name; else none."""
    directory, name = os.path.split(path)
    if V1_SHARD.fullmatch(name) is None or DATA.fullmatch(name) is not None:
        return ()
    return v1_shards(directory, scan(directory or os.curdir)).get(v1_name(name), ())
