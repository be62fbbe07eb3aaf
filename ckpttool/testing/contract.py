"""The suite itself: one class, of which a format's tests are a subclass."""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import ClassVar

import pytest

from ckpttool.cli.render.json import dumps, finite, inspect_document
from ckpttool.core.checkpoint import Checkpoint, TrainingState
from ckpttool.core.errors import CheckpointError
from ckpttool.core.tensor import Extent
from ckpttool.formats import detect, open_checkpoint
from ckpttool.formats.interface import Probe
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
    lies_inside,
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
"""Tensors of up to so many bytes are read in blocks of each size."""
FOOTER_BYTES = 48
"""How many last bytes of any file recognising it looks at: where some formats have their magic number."""

NAN_SAMPLES = 12
"""In how many tensors of a fixture, about, a NaN is put; fewer if fewer places are damaged."""


class FormatContract:
    """What every format promises.

    Everything is read from where ``place`` says, so that a suite can run over a store: it overrides ``place``
    and ``content``.

    Attributes:
        format: Name of the format, as ``Checkpoint.format`` has it.
        fixtures: Checkpoints that a framework wrote.
        invalid: Fixtures that ``verify`` must refuse, by file name, with the code of one finding.
        suspected: File names of fixtures whose safety nobody can know: they name a user's own classes.
        damages: At how many places each fixture is damaged; fewer do where opening it takes long.
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
        """Return where a fixture, or a copy of one as it is now, is read from: a path, or a store's URL.

        A suite over a store uploads it.
        """
        return str(path)

    def content(self, file: str) -> bytes:
        """Return the bytes of a file, by its path in a checkpoint, read with nothing of ckpttool."""
        return Path(file).read_bytes()

    @staticmethod
    def covered(checkpoint: Checkpoint) -> Iterable[Extent]:
        """Yield the bytes of which none may change unnoticed: those that a checksum stands for."""
        return (span.extent for span in checkpoint.spans() if span.crc32 is not None)

    @staticmethod
    def expected(truth: Truth) -> Description:
        """Return dtype and shape of each tensor, by path, from what the framework tells."""
        return {
            tuple(tensor["path"]): (tensor["dtype"], tuple(tensor["shape"])) for tensor in truth["tensors"]
        }

    # What it is -------------------------------------------------------------------------------------

    def test_is_recognised_by_exactly_one_format(self, path: Path) -> None:
        probe = Probe(self.place(path))
        try:
            found = detect(probe)
        finally:
            probe.close()
        assert found is not None

    def test_format_and_variant(self, path: Path) -> None:
        truth = read_truth(path)
        with open_checkpoint(self.place(path)) as checkpoint:
            assert (checkpoint.format, checkpoint.variant) == (self.format, truth.get("variant"))
            assert checkpoint.format == truth["format"]
            assert checkpoint.complete

    def test_files(self, path: Path) -> None:
        with open_checkpoint(self.place(path)) as checkpoint:
            assert checkpoint.files
            for entry in checkpoint.files:
                assert entry.nbytes == len(self.content(entry.path)), entry.path
            assert checkpoint.nbytes == sum(entry.nbytes for entry in checkpoint.files)

    def test_is_a_mapping(self, path: Path) -> None:
        with open_checkpoint(self.place(path)) as checkpoint:
            assert isinstance(checkpoint, Mapping)
            names = list(checkpoint)
            assert len(names) == len(set(names)) == len(checkpoint)
            assert [checkpoint[name].name for name in names] == names
            assert dict(checkpoint.items()) == dict(zip(names, checkpoint.values(), strict=True))
            assert all(name in checkpoint for name in names)
            assert "no such tensor" not in checkpoint
            with pytest.raises(KeyError):
                checkpoint["no such tensor"]

    # What it holds ----------------------------------------------------------------------------------

    def test_names_shapes_and_dtypes_are_the_frameworks(self, path: Path) -> None:
        with open_checkpoint(self.place(path)) as checkpoint:
            assert described(checkpoint) == self.expected(read_truth(path))

    def test_values_are_the_frameworks(self, path: Path) -> None:
        expected = expected_digests(read_truth(path))
        with open_checkpoint(self.place(path)) as checkpoint:
            digests = {tensor.path: digest(tensor) for tensor in checkpoint.tensors}
            assert {path: digests[path] for path in expected} == expected

    def test_shape_times_dtype_is_bytes(self, path: Path) -> None:
        with open_checkpoint(self.place(path)) as checkpoint:
            for tensor in checkpoint.tensors:
                bits = tensor.dtype.bits
                for length in tensor.shape:
                    bits *= length
                assert tensor.nbytes == (bits + 7) // 8, tensor.name
                if tensor.values is not None:
                    assert len(tensor.tobytes()) == tensor.nbytes, tensor.name
                if tensor.extent is not None:
                    assert tensor.extent.nbytes == tensor.nbytes, tensor.name

    def test_extents_hold_the_values(self, path: Path) -> None:
        """Read the bytes where a tensor says that it lies, past the code under test."""
        with open_checkpoint(self.place(path)) as checkpoint:
            stored = [(tensor, tensor.extent) for tensor in checkpoint.tensors if tensor.extent is not None]
            contents = {file: self.content(file) for file in {extent.file for _, extent in stored}}
            for tensor, extent in stored:
                raw = contents[extent.file][extent.offset : extent.end]
                assert in_little_endian(raw, tensor) == tensor.tobytes(), tensor.name

    def test_ties(self, path: Path) -> None:
        expected = {frozenset(map(tuple, group)) for group in read_truth(path).get("ties", ())}
        groups: dict[str, list[tuple[str | int, ...]]] = defaultdict(list)
        with open_checkpoint(self.place(path)) as checkpoint:
            for tensor in checkpoint.tensors:
                groups[tensor.shares_with or tensor.name].append(tensor.path)
        assert {frozenset(group) for group in groups.values() if len(group) > 1} == expected

    def test_other_values(self, path: Path) -> None:
        expected = read_truth(path).get("values", {})
        with open_checkpoint(self.place(path)) as checkpoint:
            found = finite(checkpoint.metadata)
        assert {key: found.get(key) for key in expected} == expected

    def test_training_state(self, path: Path) -> None:
        known = {field.name for field in fields(TrainingState)}
        truth = read_truth(path).get("training", {})
        expected = {key: value for key, value in truth.items() if key in known - {"metrics"}}
        with open_checkpoint(self.place(path)) as checkpoint:
            training = checkpoint.training
        assert {key: getattr(training, key) for key in expected} == expected
        metrics = truth.get("metrics", {})
        # A metric that is stored in 32 bits is told with the digits that those have.
        assert {key: training.metrics.get(key) for key in metrics} == pytest.approx(metrics, rel=1e-6)

    def test_parameters_and_granularity(self, path: Path) -> None:
        truth = read_truth(path)
        with open_checkpoint(self.place(path)) as checkpoint:
            if truth.get("parameters") is not None:
                # Keras counts buffers among its parameters, and so do the expected values of all formats.
                assert checkpoint.parameters + checkpoint.buffers == truth["parameters"]
            if truth.get("granularity") is not None:
                assert checkpoint.granularity.value == truth["granularity"]

    # How it is read ---------------------------------------------------------------------------------

    def test_opening_reads_no_values(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Recognising may look at the first and last bytes of any file; opening must not touch a value."""
        probe = Probe(self.place(path))
        found = detect(probe)
        assert found is not None
        with recorded_reads(monkeypatch) as reads, found.open(probe) as checkpoint:
            # The parts of a set are recognised while it is opened, by their last bytes among others.
            sizes = {file: len(self.content(file)) for file in {read.file for read in reads}}
            at_open = [read for read in reads if read.offset < sizes[read.file] - FOOTER_BYTES]
            stored = [tensor.storage or tensor.extent for tensor in checkpoint.tensors]
            for extent in filter(None, stored):
                assert not [read for read in at_open if lies_inside(read, extent)], extent

    def test_blocks_of_any_size_make_the_same_bytes(self, path: Path) -> None:
        with open_checkpoint(self.place(path)) as checkpoint:
            for tensor in checkpoint.tensors:
                whole = tensor.tobytes()
                for limit in BLOCK_LIMITS if tensor.nbytes <= SMALL else BLOCK_LIMITS[-1:]:
                    blocks = [bytes(block) for block in tensor.blocks(limit)]
                    assert b"".join(blocks) == whole, (tensor.name, limit)
                    assert all(len(block) <= max(limit, SMALLEST_BLOCK) for block in blocks), tensor.name

    def test_arrays_hold_the_values(self, path: Path) -> None:
        with open_checkpoint(self.place(path)) as checkpoint:
            for tensor in checkpoint.tensors:
                if tensor.values is None or tensor.dtype.numpy is None or tensor.dtype.bits < 8:
                    continue
                array = tensor.array()
                assert array.shape == tensor.shape, tensor.name
                assert array.tobytes() == tensor.tobytes(), tensor.name

    def test_spans_lie_in_the_files_and_in_order(self, path: Path) -> None:
        with open_checkpoint(self.place(path)) as checkpoint:
            sizes = {entry.path: entry.nbytes for entry in checkpoint.files}
            ends: dict[str, int] = defaultdict(int)
            for span in checkpoint.spans():
                extent = span.extent
                assert extent.offset >= ends[extent.file], f"{span.where} lies before the span before it"
                assert extent.end <= sizes[extent.file], span.where
                ends[extent.file] = extent.end

    def test_closing_twice_is_allowed(self, path: Path) -> None:
        with no_file_left_open():
            checkpoint = open_checkpoint(self.place(path))
            checkpoint.close()
            checkpoint.close()
            for tensor in checkpoint.tensors:
                if tensor.extent is not None and tensor.nbytes:
                    with pytest.raises(CheckpointError):
                        tensor.tobytes()

    # What is said about it --------------------------------------------------------------------------

    def test_verify_passes(self, path: Path) -> None:
        verification = verify(self.place(path), jobs=2)
        if path.name in self.invalid:
            assert not verification.is_valid
            assert self.invalid[path.name] in {finding.code for finding in verification.findings}
            return
        assert verification.is_valid, verification.findings
        expected = Safety.UNKNOWN if path.name in self.suspected else Safety.SAFE
        assert verification.safety is expected, verification.findings

    def test_a_nan_is_found_in_any_tensor(self, path: Path, tmp_path: Path) -> None:
        """The last element of each tensor that lies in one piece becomes a NaN, one tensor at a time."""
        copy = copied(path, tmp_path)
        with open_checkpoint(copy) as checkpoint:
            places = [(tensor, tensor.extent) for tensor in checkpoint.tensors if tensor.extent is not None]
        for tensor, extent in places[:: max(1, len(places) // min(NAN_SAMPLES, self.damages))]:
            nan = nan_of(tensor)
            if nan is None or not tensor.size:
                continue
            with overwritten(Path(extent.file), extent.end - len(nan), nan):
                found = verify(self.place(copy), only=("values",), jobs=2).findings
            names = {finding.where for finding in found if finding.code == "nan"}
            assert tensor.name in names or tensor.shares_with in names, (tensor.name, found)

    def test_json_says_the_same_when_read_again(self, path: Path) -> None:
        document = inspect_document([inspect(self.place(path))])
        text = dumps(document)
        assert next(iter(document)) == "schema"
        assert json.loads(text, parse_constant=refuse) == finite(document)
        text.encode()

    # Damage -----------------------------------------------------------------------------------------

    def test_truncation_at_any_byte(self, path: Path, tmp_path: Path) -> None:
        """A cut file is an error, is invalid, or lacks nothing that matters."""
        copy, truth = copied(path, tmp_path), read_truth(path)
        with no_file_left_open():
            for file, offsets in self._places(copy):
                whole = file.read_bytes()
                for nbytes in reversed(offsets):
                    os.truncate(file, nbytes)
                    damage = f"{file.name} cut to {nbytes} of {len(whole)} bytes"
                    if is_valid(self._outcome(copy, damage)):
                        assert self._holds(copy, truth), f"{damage} is valid, and holds something else"
                file.write_bytes(whole)

    def test_flipped_bit_in_any_byte(self, path: Path, tmp_path: Path) -> None:
        """Where a checksum stands for a byte, no flipped bit stays unseen; elsewhere nothing breaks."""
        copy = copied(path, tmp_path)
        with no_file_left_open():
            for file, offsets in self._places(copy):
                with open_checkpoint(copy) as checkpoint:
                    covered = [extent for extent in self.covered(checkpoint) if is_same(extent.file, file)]
                covered.sort(key=lambda extent: extent.offset)
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
        """Tell whether a checkpoint holds exactly the tensors that the framework tells of."""
        expected = expected_digests(truth)
        with open_checkpoint(self.place(path)) as checkpoint:
            digests = {tensor.path: digest(tensor) for tensor in checkpoint.tensors}
            return digests.items() >= expected.items() and described(checkpoint) == self.expected(truth)

    def _places(self, path: Path) -> list[tuple[Path, list[int]]]:
        """Return each file of a checkpoint with the offsets at which it is damaged."""
        with open_checkpoint(path) as checkpoint:
            extents = [span.extent for span in checkpoint.spans()]
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
