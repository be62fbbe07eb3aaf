"""Agents of stable-baselines3: a zip of files of ``torch.save``, with settings as JSON in ``data``.

A setting that isn't JSON (a space, a schedule) is an object with a pickle in base64 under ``:serialized:``,
which loading the agent unpickles.

Source: DLR-RM/stable-baselines3 ``stable_baselines3/common/save_util.py``, ``common/base_class.py``.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ckpttool.containers.jsontext import parse_json
from ckpttool.containers.pickle.pickle_detection import is_pickle
from ckpttool.containers.pickle.pickle_safety import pickle_findings
from ckpttool.containers.zip_reader import STORED, Member, with_version_errors
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.errors import DamagedCheckpoint, Unsupported
from ckpttool.core.readable import Buffer, reader_from
from ckpttool.core.report import Finding, not_scanned
from ckpttool.core.tensor import Extent, Span, Tensor
from ckpttool.formats.content.assembly import name_tensors, training_of
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.readings import add_part_name

if TYPE_CHECKING:
    from ckpttool.formats.torch.dcp_items import Item

SETTINGS, VERSION = "data", "_stable_baselines3_version"

_TENSORS = ".pth"
_PICKLED, _TYPE = ":serialized:", ":type:"
_MAX_VERSION = 64


class StableBaselines(Format):
    """A file that ``BaseAlgorithm.save`` of stable-baselines3 wrote."""

    name: ClassVar[str] = "stable-baselines3"

    def matches(self, probe: Probe) -> bool:
        return {SETTINGS, VERSION} <= probe.names and any(name.endswith(_TENSORS) for name in probe.names)

    def open(self, probe: Probe) -> Checkpoint:
        agent = _Agent(probe)
        tensors = name_tensors(
            [((stem, *path), parts) for stem, item in agent.items.items() for path, parts in item.tensors],
            agent.metadata,
        )
        return Checkpoint(
            path=probe.path,
            format=self.name,
            variant=None,
            tensors=tensors,
            files=(FileEntry(probe.path, probe.source.size),),
            spans=agent.spans,
            metadata=lambda: agent.metadata,
            training=lambda: training_of(agent.metadata, tensors, probe.name),
            tree=lambda: agent.tree(tensors),
            producer=Producer("stable-baselines3", agent.version),
            findings=tuple(agent.findings),
            safety=tuple(dict.fromkeys(agent.safety)),
            close=probe.close,
        )


class _Agent:
    """The settings and tensors of the zip."""

    def __init__(self, probe: Probe) -> None:
        """Open every file of tensors, and read the settings."""
        self._path, self._archive = probe.path, probe.archive
        self.findings: list[Finding] = with_version_errors(self._archive.findings)
        self.safety: list[Finding] = []
        self.items: dict[str, Item] = {}
        self._members = {member.name: member for member in self._archive.members}
        try:
            self.settings = self._read_settings()
            for name, member in self._members.items():
                if name.endswith(_TENSORS):
                    self._open_tensors(probe, name.removesuffix(_TENSORS), member)
                elif name not in (SETTINGS, VERSION):
                    # Pickles that no framework loads are judged too: a program may load them.
                    content, start = self._archive.content(member), self._archive.offset(member)
                    if is_pickle(content, start, start + member.size):
                        self.safety += pickle_findings(content, start, start + member.size, name)
        except DamagedCheckpoint as failure:
            failure.safety = (*self.safety, *failure.safety)
            raise
        plain = {stem: item.plain for stem, item in self.items.items() if item.plain is not None}
        self.metadata: dict[str, Any] = {**self.settings, **plain}

    @property
    def version(self) -> str | None:
        member = self._members.get(VERSION)
        text = self._archive.read(member) if member and member.size <= _MAX_VERSION else b""
        return text.decode("ascii", "replace").strip() or None

    def _open_tensors(self, probe: Probe, stem: str, member: Member) -> None:
        from ckpttool.formats.torch.dcp_items import open_item

        if member.method != STORED:
            raise Unsupported(self._path, "compressed files of tensors", where=member.name)
        place = Extent(probe.name, member.payload, member.stored)
        item = self.items[stem] = open_item(probe.source, place, stem)
        self.findings += (add_part_name(finding, member.name) for finding in item.findings)
        self.safety += (add_part_name(finding, member.name) for finding in item.safety)

    def _read_settings(self) -> dict[str, Any]:
        """Return the settings; pickles among them are judged, and represented by their type."""
        data = self._archive.read(self._archive.require(self._members.get(SETTINGS), SETTINGS))
        settings = parse_json(self._path, data, "config", constants=True)
        if not isinstance(settings, dict):
            raise DamagedCheckpoint(self._path, "not a JSON object", where=SETTINGS, code="config-not-json")
        return {key: self._read_setting(key, value) for key, value in settings.items()}

    def _read_setting(self, key: str, value: object) -> object:
        if not isinstance(value, Mapping) or _PICKLED not in value:
            return value
        where = f"{SETTINGS}: {key}"
        try:
            data = base64.b64decode(value[_PICKLED])
        except (TypeError, ValueError):
            self.safety.append(not_scanned(where, "not base64 where a pickle should be"))
        else:
            self.safety += pickle_findings(Buffer(self._path, data), 0, len(data), where)
        return str(value.get(_TYPE, "<a pickle>"))

    def spans(self) -> Iterator[Span]:
        """Yield each record with its checksum, and the records inside the files of tensors."""
        for member in sorted(self._archive.members, key=lambda member: member.payload):
            item = self.items.get(member.name.removesuffix(_TENSORS))
            if item is not None and member.name.endswith(_TENSORS):
                yield from item.spans(member.name)
                continue
            extent = Extent(self._path, member.payload, member.stored)
            read = reader_from(self._archive.content(member), self._archive.offset(member))
            inflated = None if member.method == STORED else member.size
            yield Span(extent, member.name, read, member.crc32, inflated=inflated)

    def tree(self, tensors: tuple[Tensor, ...]) -> object:
        return {**self.settings, **{stem: item.tree(tensors) for stem, item in self.items.items()}}
