"""PyTorch's zip serialization: what ``torch.save`` has written since 1.6.

Source: PyTorch ``torch/serialization.py``, ``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

from typing import ClassVar

from ckpttool.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.formats.content.assembly import assemble
from ckpttool.formats.content.carried import ENTRY
from ckpttool.formats.content.content_entry import restored_from_record
from ckpttool.formats.content.objects import kept
from ckpttool.formats.content.trees import flatten
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.torch.objects import TorchObjects
from ckpttool.formats.torch.records import Records, StorageRecords, trailing
from ckpttool.wire.judgement import keeping

SUFFIXES = (".pth", ".pt", ".ckpt", ".pth.tar", ".bin")


class PytorchZip(Format):
    """A file that ``torch.save`` wrote."""

    name: ClassVar[str] = "pytorch"
    suffixes = SUFFIXES

    def matches(self, probe: Probe) -> bool:
        return "data.pkl" in probe.members and "constants.pkl" not in probe.members

    def open(self, probe: Probe) -> Checkpoint:
        records = Records(probe.archive, probe.path)
        judged = records.judged_pickle("data.pkl")
        with keeping(judged.safety):
            resolve = StorageRecords(records, "data")
            objects = TorchObjects(probe.path, resolve)
            root = judged.pickles[0].root
            flat = flatten(root, objects.leaf, probe.path)
        findings = (*records.findings(), *resolve.findings(flat.tensors), *trailing(judged))
        checkpoint = assemble(
            probe=probe,
            format=self.name,
            variant="zip",
            flat=flat,
            files=(FileEntry(probe.path, probe.source.size),),
            spans=lambda: records.spans(flat.tensors),
            producer=Producer("pytorch"),
            findings=findings,
            safety=(*judged.safety, *records.judged_others("data.pkl")),
            records=records.unknown(lambda name: name in ("data.pkl", ENTRY) or resolve.holds(name)),
            tree=lambda tensors: kept(root, objects.leaf, tensors, probe.path),
        )
        return restored_from_record(checkpoint, probe.archive, records.by_name.get(ENTRY))
