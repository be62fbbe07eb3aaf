"""The contract suite: a class of tests, with a subclass for each format."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import ClassVar

import pytest

from ckpttool.core.checkpoint import Checkpoint, TrainingState
from ckpttool.core.errors import CheckpointError, UsageError
from ckpttool.core.result import dumps, finite
from ckpttool.core.tensor import Extent, Tensor
from ckpttool.formats import detect, open_checkpoint
from ckpttool.formats.interface import Probe
from ckpttool.formats.writer import WRITABLE
from ckpttool.ops.convert import convert
from ckpttool.ops.verdict import Safety
from ckpttool.ops.verify import verify
from ckpttool.runs.inspecting import inspect
from ckpttool.testing.damage import (
    DAMAGES,
    Outcome,
    copied,
    files_of,
    flipped,
    is_valid,
    nan_of,
    outcome_of,
    overwritten,
    places,
)
from ckpttool.testing.reads import (
    in_little_endian,
    is_inside,
    is_same,
    is_within,
    no_file_left_open,
    recorded_reads,
)
from ckpttool.testing.truth import (
    Description,
    Truth,
    described,
    digest,
    expected_digests,
    read_truth,
    refuse,
)

BLOCK_LIMITS = (1, 16, 100, 1 << 12)
SMALLEST_BLOCK = 16
SMALL = 2400
"""Limit on tensors that are read in blocks of each size, in bytes."""
FOOTER_BYTES = 48
"""Last bytes of a file that detection may read: some formats have their magic number there."""

NAN_SAMPLES = 12
"""Approximate number of tensors of a fixture that get a NaN; fewer if fewer places are damaged."""


class FormatContract:
    """The promises of every format, as tests.

    To run the suite over a store, override ``place`` and ``content``.

    Attributes:
        format: Name of the format, as in ``Checkpoint.format``.
        fixtures: Checkpoints that a framework wrote.
        invalid: Fixtures that ``verify`` must refuse, by file name, with the code of one finding.
        suspected: File names of fixtures of unknown safety, which name a user's own classes.
        damages: Number of places to damage in each fixture; reduce it if opening one takes long.
    """

    format: ClassVar[str]
    fixtures: ClassVar[Iterable[Path]]
    invalid: ClassVar[Mapping[str, str]] = {}
    suspected: ClassVar[frozenset[str]] = frozenset()
    damages: ClassVar[int] = DAMAGES

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "path" in metafunc.fixturenames:
            fixtures = tuple(self.fixtures)
            assert fixtures, f"{type(self).__name__} has no fixtures"
            metafunc.parametrize("path", fixtures, ids=[path.name for path in fixtures])

    def place(self, path: Path) -> str:
        """Return the path or URL to read a fixture or a copy of one from; a suite over a store uploads it."""
        return str(path)

    def content(self, file: str) -> bytes:
        """Return the bytes of a file of a checkpoint by its path, read without ckpttool."""
        return Path(file).read_bytes()

    @staticmethod
    def covered(checkpoint: Checkpoint) -> Iterable[Extent]:
        """Yield the byte ranges with a checksum, in which every change of a byte must be found."""
        return (span.extent for span in checkpoint.spans() if span.crc32 is not None)

    @staticmethod
    def expected(truth: Truth) -> Description:
        """Return the expected dtype and shape of each tensor by path."""
        return {
            tuple(tensor["path"]): (tensor["dtype"], tuple(tensor["shape"])) for tensor in truth["tensors"]
        }

    @staticmethod
    def expected_nbytes(tensor: Tensor) -> int:
        """Return the number of bytes of a tensor's elements, from its dtype and shape."""
        return (math.prod(tensor.shape) * tensor.dtype.bits + 7) // 8

    def test_contract(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check all promises about an intact checkpoint."""
        place, truth = self.place(path), read_truth(path)
        with no_file_left_open():
            self._check_opening(place, monkeypatch)
            with open_checkpoint(place) as checkpoint:
                self._check_format(checkpoint, truth)
                self._check_files(checkpoint)
                self._check_mapping(checkpoint)
                self._check_metadata(checkpoint, truth)
                self._check_tensors(checkpoint, truth)
                self._check_ties(checkpoint, truth)
                self._check_spans(checkpoint)
            self._check_closing(place)
            self._check_verdict(path, place)
            self._check_json(place)

    def _check_opening(self, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check that exactly one format recognises it, and that opening reads no value."""
        probe = Probe(place)
        found = detect(probe)
        assert found is not None, "no format recognises it"
        with recorded_reads(monkeypatch) as reads, found.open(probe) as checkpoint:
            # Detection may read the first and last bytes of any file. The parts of a set are detected while
            # it is opened.
            sizes = {file: len(self.content(file)) for file in {read.file for read in reads}}
            at_open = [read for read in reads if read.offset < sizes[read.file] - FOOTER_BYTES]
            for extent in filter(None, (tensor.storage or tensor.extent for tensor in checkpoint.tensors)):
                assert not [read for read in at_open if is_within(read, extent)], f"opening reads {extent}"

    def _check_format(self, checkpoint: Checkpoint, truth: Truth) -> None:
        assert (checkpoint.format, checkpoint.variant) == (self.format, truth.get("variant"))
        assert checkpoint.format == truth["format"]
        assert checkpoint.complete

    def _check_files(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.files
        for entry in checkpoint.files:
            assert entry.nbytes == len(self.content(entry.path)), entry.path
        assert checkpoint.nbytes == sum(entry.nbytes for entry in checkpoint.files)

    def _check_mapping(self, checkpoint: Checkpoint) -> None:
        assert isinstance(checkpoint, Mapping)
        names = list(checkpoint)
        assert len(names) == len(set(names)) == len(checkpoint)
        assert [checkpoint[name].name for name in names] == names
        assert dict(checkpoint.items()) == dict(zip(names, checkpoint.values(), strict=True))
        assert all(name in checkpoint for name in names)
        assert "no such tensor" not in checkpoint
        with pytest.raises(KeyError):
            checkpoint["no such tensor"]

    def _check_metadata(self, checkpoint: Checkpoint, truth: Truth) -> None:
        values, found = truth.get("values", {}), finite(checkpoint.metadata)
        assert {key: found.get(key) for key in values} == values
        training = checkpoint.training
        known = {field.name for field in fields(TrainingState)} - {"metrics"}
        state = {key: value for key, value in truth.get("training", {}).items() if key in known}
        assert {key: getattr(training, key) for key in state} == state
        metrics = truth.get("training", {}).get("metrics", {})
        # A metric in 32 bits has fewer digits.
        assert {key: training.metrics.get(key) for key in metrics} == pytest.approx(metrics, rel=1e-6)
        if truth.get("parameters") is not None:
            # Keras counts buffers as parameters, and so do the expected values of all formats.
            assert checkpoint.parameters + checkpoint.buffers == truth["parameters"]
        if truth.get("granularity") is not None:
            assert checkpoint.granularity.value == truth["granularity"]

    def _check_tensors(self, checkpoint: Checkpoint, truth: Truth) -> None:
        """Check dtypes, shapes and values, read whole, as arrays and in blocks."""
        assert described(checkpoint) == self.expected(truth)
        digests: dict[tuple[str | int, ...], str] = {}
        contents: dict[str, bytes] = {}
        for tensor in checkpoint.tensors:
            elements = tensor.tobytes()
            digests[tensor.path] = hashlib.sha256(elements).hexdigest()
            assert tensor.nbytes == self.expected_nbytes(tensor), tensor.name
            if tensor.values is not None:
                assert len(elements) == tensor.nbytes, tensor.name
                if tensor.dtype.numpy is not None and tensor.dtype.bits >= 8:
                    array = tensor.array()
                    assert array.shape == tensor.shape, tensor.name
                    assert array.tobytes() == elements, tensor.name
            if tensor.extent is not None:
                # The bytes of the extent are read without the code under test.
                extent = tensor.extent
                if extent.file not in contents:
                    contents[extent.file] = self.content(extent.file)
                raw = contents[extent.file][extent.offset : extent.end]
                assert extent.nbytes == len(raw) == tensor.nbytes, tensor.name
                assert in_little_endian(raw, tensor) == elements, tensor.name
            for limit in BLOCK_LIMITS if tensor.nbytes <= SMALL else BLOCK_LIMITS[-1:]:
                blocks = [bytes(block) for block in tensor.blocks(limit)]
                assert b"".join(blocks) == elements, (tensor.name, limit)
                assert all(len(block) <= max(limit, SMALLEST_BLOCK) for block in blocks), tensor.name
        expected = expected_digests(truth)
        assert {path: digests[path] for path in expected} == expected

    def _check_ties(self, checkpoint: Checkpoint, truth: Truth) -> None:
        expected = {frozenset(map(tuple, group)) for group in truth.get("ties", ())}
        groups: dict[str, list[tuple[str | int, ...]]] = defaultdict(list)
        for tensor in checkpoint.tensors:
            groups[tensor.shares_with or tensor.name].append(tensor.path)
        assert {frozenset(group) for group in groups.values() if len(group) > 1} == expected

    def _check_spans(self, checkpoint: Checkpoint) -> None:
        sizes = {entry.path: entry.nbytes for entry in checkpoint.files}
        ends: dict[str, int] = defaultdict(int)
        for span in checkpoint.spans():
            extent = span.extent
            assert extent.offset >= ends[extent.file], f"{span.where} overlaps the span before it"
            assert extent.end <= sizes[extent.file], span.where
            ends[extent.file] = extent.end

    def _check_closing(self, place: str) -> None:
        checkpoint = open_checkpoint(place)
        checkpoint.close()
        checkpoint.close()
        for tensor in checkpoint.tensors:
            if tensor.extent is not None and tensor.nbytes:
                with pytest.raises(CheckpointError):
                    tensor.tobytes()

    def _check_verdict(self, path: Path, place: str) -> None:
        verification = verify(place, jobs=2)
        if path.name in self.invalid:
            assert not verification.is_valid
            assert self.invalid[path.name] in {finding.code for finding in verification.findings}
            return
        assert verification.is_valid, verification.findings
        expected = Safety.UNKNOWN if path.name in self.suspected else Safety.SAFE
        assert verification.safety is expected, verification.findings

    def _check_json(self, place: str) -> None:
        """Check that the document of ``inspect`` is valid JSON."""
        document = inspect(place).document()
        text = dumps(document)
        assert next(iter(document)) == "schema"
        assert json.loads(text, parse_constant=refuse) == finite(document)
        text.encode()

    def test_conversion(self, path: Path, tmp_path: Path) -> None:
        """Check that a conversion to safetensors, and back with a writer, keeps all values.

        Content that the target can't hold is refused with ``UsageError``. An intact fixture never fails as
        damaged, and one of ``invalid`` is never converted silently.
        """
        expected = expected_digests(read_truth(path))
        converted = self._converted(
            self.place(path), tmp_path / "converted.safetensors", "safetensors", expected
        )
        if converted is not None and self.format in WRITABLE:
            self._converted(converted, tmp_path / "back", self.format, expected)

    def _converted(
        self, place: str, target: Path, format: str, expected: Mapping[tuple[str | int, ...], str]
    ) -> str | None:
        """Return the path of a converted checkpoint with the expected values; None if it is refused."""
        try:
            made = convert(place, target, to=format).target
        except UsageError:
            assert not target.exists()
            return None
        except CheckpointError:
            assert os.path.basename(place) in self.invalid
            assert not target.exists()
            return None
        # Tensors that the framework itself can't read have no expected digest.
        with open_checkpoint(made) as checkpoint:
            digests = {tensor.path: digest(tensor) for tensor in checkpoint.tensors}
        assert digests.items() >= expected.items()
        return made

    # Damage -----------------------------------------------------------------------------------------

    def test_damage(self, path: Path, tmp_path: Path) -> None:
        """Check a copy with damage at one place at a time."""
        copy, truth = copied(path, tmp_path), read_truth(path)
        with open_checkpoint(copy) as checkpoint:
            tensors = [(tensor, tensor.extent) for tensor in checkpoint.tensors if tensor.extent is not None]
            extents = [span.extent for span in checkpoint.spans()]
            covered = sorted(self.covered(checkpoint), key=lambda extent: extent.offset)
        with no_file_left_open():
            self._check_nans(copy, tensors)
            for file, offsets in self._places(copy, extents):
                self._check_truncation(copy, truth, file, offsets)
                self._check_flipped_bits(
                    copy, file, offsets, [extent for extent in covered if is_same(extent.file, file)]
                )

    # Damage is made in place and restored, instead of copying a fixture for each of hundreds of places.
    # Without a checksum, a flipped bit in values is another valid checkpoint: the reader only has to survive
    # it.
    def _check_nans(self, copy: Path, tensors: Sequence[tuple[Tensor, Extent]]) -> None:
        """Check that a NaN in the last element of a contiguous tensor is found, one tensor at a time."""
        for tensor, extent in tensors[:: max(1, len(tensors) // min(NAN_SAMPLES, self.damages))]:
            nan = nan_of(tensor)
            if nan is None or not tensor.size:
                continue
            with overwritten(Path(extent.file), extent.end - len(nan), nan):
                found = verify(self.place(copy), only=("values",), jobs=2).findings
            names = {finding.where for finding in found if finding.code == "nan"}
            assert tensor.name in names or tensor.shares_with in names, (tensor.name, found)

    def _check_truncation(self, copy: Path, truth: Truth, file: Path, offsets: list[int]) -> None:
        """Check that a truncated file is an error, is invalid, or still has all tensors."""
        whole = file.read_bytes()
        for nbytes in reversed(offsets):
            os.truncate(file, nbytes)
            damage = f"{file.name} cut to {nbytes} of {len(whole)} bytes"
            if is_valid(self._outcome(copy, damage)):
                assert self._holds(copy, truth), f"{damage} is valid, with other tensors"
        file.write_bytes(whole)

    def _check_flipped_bits(self, copy: Path, file: Path, offsets: list[int], covered: list[Extent]) -> None:
        """Check that a flipped bit is found if a checksum covers it, and breaks no reader anywhere."""
        # Seeded, so that a failure can be repeated.
        chance = random.Random(file.name)
        for offset in offsets:
            bit = chance.randrange(8)
            damage = f"{file.name} with bit {bit} of byte {offset} flipped"
            with flipped(file, offset, bit):
                outcome = self._outcome(copy, damage)
            if is_inside(offset, covered):
                assert not is_valid(outcome), f"{damage} is valid"

    def _outcome(self, path: Path, damage: str) -> Outcome:
        return outcome_of(self.place(path), damage)

    def _holds(self, path: Path, truth: Truth) -> bool:
        """Return whether a checkpoint holds exactly the expected tensors."""
        expected = expected_digests(truth)
        with open_checkpoint(self.place(path)) as checkpoint:
            digests = {tensor.path: digest(tensor) for tensor in checkpoint.tensors}
            return digests.items() >= expected.items() and described(checkpoint) == self.expected(truth)

    def _places(self, path: Path, extents: Sequence[Extent]) -> list[tuple[Path, list[int]]]:
        """Return each file of a checkpoint with the offsets to damage."""
        offsets, files = [], files_of(path)
        for file in files:
            edges = {
                edge + by
                for extent in extents
                if is_same(extent.file, file)
                for edge in (extent.offset, extent.end)
                for by in (-1, 0)
            }
            offsets.append((file, places(file, edges, self.damages // len(files))))
        return offsets
