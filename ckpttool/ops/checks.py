"""The checks on one open checkpoint. Each byte is read once, for its checksum and its values together.

A check covers only the content that it reads: if a format has nothing to check, it is skipped with a reason.

Weights without content (no elements, or all equal) are warnings: a model may be saved before it is trained.
Constants that models are initialised with are no finding: biases and shifts of zero, scales and norms of one,
masks, statistics, and all state of an optimizer.

Hugging Face's directories may hold a second copy of the weights in PyTorch's own format, and each library
loads the one that it prefers: if one copy was saved again, the other has other values. DeepSpeed's universal
checkpoints hold a rounded copy of each weight.

The checks ``load`` and ``predict`` give the checkpoint to its framework if all else is well. The child
process is started first, so that it imports the framework while this one reads the file.

Source: huggingface/transformers ``utils/__init__.py`` (``WEIGHTS_NAME``, ``SAFE_WEIGHTS_NAME``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.errors import CheckpointError, LimitExceeded, error_of
from ckpttool.core.report import Finding, Severity, error, has_errors, warning
from ckpttool.core.tensor import Path, Role, Tensor, role_below
from ckpttool.core.text import counted, first_names
from ckpttool.core.values import regroup, storages_of
from ckpttool.formats import open_checkpoint
from ckpttool.formats.torch.deepspeed_zero import MODULE, is_full_precision
from ckpttool.formats.torch.deepspeed_zero import VARIANT as UNIVERSAL
from ckpttool.formats.traits import traits_of
from ckpttool.ops.digests import why_unproven
from ckpttool.ops.manifest import UNLISTED, compare_manifests, has_statements, manifests_of
from ckpttool.ops.scan_findings import (
    checksum_findings,
    covered_by_checksums,
    loss_findings,
    range_of,
    special_findings,
    unread_findings,
    unread_values,
    why_no_checksums,
    why_no_values,
)
from ckpttool.ops.verdict import (
    CHECKS,
    COPY,
    COPY_UNPROVEN,
    NOT_REQUESTED,
    NOTHING_CHECKED,
    OPTIONAL,
    Check,
    Safety,
    Status,
    Verification,
    asks_for_manifest,
    failing_severities,
    safety_of,
)
from ckpttool.storage import fs
from ckpttool.storage.scan import ScannedSpan, count_specials, scan
from ckpttool.storage.work import Advance

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.ops.ignored_findings import Ignore
    from ckpttool.ops.prediction import Prediction
    from ckpttool.predict.run import StageResult

Element = Callable[[Tensor], bytes | None]
"""Returns the element, little-endian, that a constant tensor repeats; None for others, or if unknown."""

_STATE_DICT = re.compile(r"model|net|network|weights|(\w+_)?state_dict|model_state", re.IGNORECASE)
_ADAPTER = re.compile(r"(^|[._])(lora_B|lora_up|lora_embedding_A)([._]|$)")
"""Names of the factors of a LoRA adapter that are zero until it is trained."""
_NEEDED = re.compile(r"(^|.*[._/])(weight|kernel|embeddings?|bias|w|b|gamma|beta)(_\d+)?")
_NORM = re.compile(r"norm|(^|[._/])(ln|bn|gn)(\d|[._/]|$)", re.IGNORECASE)
_MAY_REPEAT = re.compile(
    r"(?<![a-z])(absmax|alphas?|anchors?|avg|b|beta|bias(es)?|buffer|cache|cell|counts?|grid|hidden|mask(ed|s)?|mean|memory|"
    r"moving|noise|ones|queue|running|scal(e|es|ing)|shifts?|states?|stats?|std|var(iance)?|window|zeros?|zp)(?![a-z])"
)
"""Words in the last part of a name of tensors that may be constant: they don't multiply a layer's input."""
_HAVE_KERNELS = frozenset({"Dense", "Conv1D", "Conv2D", "Conv3D", "Embedding"})


def hollow_findings(checkpoint: Checkpoint, element_of: Element) -> Iterator[Finding]:
    """Yield warnings for weights without content: no tensors, no elements, all zero, or constant matrices.

    Args:
        checkpoint: A checkpoint without errors in its structure.
        element_of: Called with floating-point tensors that have elements.
    """
    traits = traits_of(checkpoint.format)
    is_bare = traits.holds_tensors_alone or (traits.is_container and not checkpoint.metadata)
    if not checkpoint.tensors and is_bare:
        yield warning("no-tensors", "it contains no tensors")
    for key, value in checkpoint.metadata.items():
        is_empty = isinstance(value, Mapping) and not value
        if is_empty and _STATE_DICT.fullmatch(key) and role_below((key,)) is Role.WEIGHTS:
            yield warning("no-tensors", "the state dict contains no tensors", key)
    # A shard may have no elements of a tensor that has some, which is no fault. Tied weights, and those
    # without values, are judged by their owners or not at all. If all weights are zero, that is one
    # warning, not one for each matrix.
    weights = [one for one in checkpoint.tensors if one.role is Role.WEIGHTS and one.dtype.float_code]
    needed = (one for one in weights if not (one.shard is not None and one.shard.is_empty))
    empty = [one.name for one in needed if not one.size and _NEEDED.fullmatch(one.name)]
    if empty:
        message = (
            f"{len(empty):,} of {counted(len(weights), 'weight')} have no elements, as in a model "
            "that is split over processes and was not gathered"
        )
        yield warning("weights-empty", message, first_names(empty))
    filled = [one for one in weights if one.size and one.values is not None and one.shares_with is None]
    repeated = {one.name: element for one in filled if (element := element_of(one)) is not None}
    zero = {name for name, element in repeated.items() if not any(element)}
    if len(zero) == len(filled) and any(map(_must_vary, filled)):
        yield warning("weights-zero", f"all {counted(len(filled), 'weight')} are zero")
        return
    starts = [one.name for one in filled if _ADAPTER.search(one.name)]
    if starts and zero.issuperset(starts):
        message = f"untrained LoRA adapter: all {len(starts):,} of its second factors are zero"
        yield warning("adapter-untrained", message, first_names(starts))
    yield from _constant_matrices(checkpoint, filled, repeated, set(starts))


def _constant_matrices(
    checkpoint: Checkpoint, weights: Sequence[Tensor], repeated: Mapping[str, bytes], adapters: set[str]
) -> Iterator[Finding]:
    """Yield a warning for each matrix whose elements are all equal, unless models are initialised so."""
    shapes = {one.name: one.shape for one in weights}
    for one in weights:
        is_matrix = sum(length > 1 for length in one.shape) > 1
        if one.name not in repeated or one.name in adapters or not is_matrix or not _must_vary(one):
            continue
        if str(one.path[-1]).isdecimal():  # Keras numbers variables: only 0 of some layers is a kernel
            is_first = one.path[-1] in (0, "0") and "activation" not in one.path  # a layer's own PReLU
            kind = checkpoint.layers.get(one.name)
            if not is_first or kind is None or kind.cls not in _HAVE_KERNELS:
                continue
        import numpy as np

        number = np.frombuffer(repeated[one.name], numpy_dtype(one.dtype))[0]
        value = complex(number) if one.dtype.kind == "complex" else float(number)
        # A norm of several axes is a matrix of ones at first; its name shows it, or a bias of its shape.
        bias = f"{one.name.rpartition('.')[0]}.bias"
        is_norm = _NORM.search(one.name) is not None or shapes.get(bias) == one.shape
        if value != value or (value and is_norm):  # the check of values reports NaN
            continue
        yield warning("weights-constant", f"all {one.size:,} values are {value:g}", one.name)


def _must_vary(tensor: Tensor) -> bool:
    """Return whether a constant weight would be useless, by its name."""
    last = str(tensor.path[-1]).rpartition(".")[2].rpartition("/")[2]
    return tensor.size > 1 and _MAY_REPEAT.search(last.lower()) is None


_ELEMENTS = 1 << 20
"""Elements of a weight that are rounded at once."""
_SAFE = re.compile(r"(?P<stem>(?!.*-\d+-of-\d+).+)\.safetensors(\.index\.json)?", re.DOTALL)


def weight_copy_findings(checkpoint: Checkpoint, jobs: int, advance: Advance) -> Iterator[Finding]:
    """Yield a warning for each copy of a checkpoint's weights next to it that has other values.

    Unreadable copies are skipped; they have their own verdict.
    """
    if checkpoint.variant == UNIVERSAL and checkpoint.complete:
        yield from _compare_rounded(checkpoint)
    for path, copy in weight_copies((checkpoint.path, *(entry.path for entry in checkpoint.files))):
        yield from _compare(path, copy, jobs, advance)


def weight_copies(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield files of weights, or indices of them, on this machine with each copy next to them."""
    for path in dict.fromkeys(paths):
        match = _SAFE.fullmatch(os.path.basename(path)) if fs.place_of(path).reads_are_free else None
        if match is None or not fs.isfile(path):
            continue
        for prefix, ending in product(("pytorch_", ""), ("", ".index.json")):
            copy = os.path.join(os.path.dirname(path), f"{prefix}{match['stem']}.bin{ending}")
            if fs.isfile(copy):
                yield path, copy


def _compare(path: str, copy: str, jobs: int, advance: Advance) -> Iterator[Finding]:
    try:
        with open_checkpoint(path) as own, open_checkpoint(copy) as other:
            common = [(own[name], other[name]) for name in own if name in other]
            differing = _differing(common, jobs, advance)
    except CheckpointError:
        return
    if differing:
        amount = f"{len(differing):,} of {counted(len(common), 'tensor')}"
        message = (
            f"{os.path.basename(copy)} next to it{_age(path, copy)} has different values for {amount}: "
            f"{first_names(differing)}"
        )
        yield warning("copies-differ", message, os.path.basename(path))


def _age(path: str, copy: str) -> str:
    try:
        own, other = (fs.stat(one).st_mtime_ns for one in (path, copy))
    except OSError:  # removed since it was read
        return ""
    return "" if own == other else ", which is newer," if other > own else ", which is older,"


def _differing(pairs: list[tuple[Tensor, Tensor]], jobs: int, advance: Advance) -> list[str]:
    """Return the names of tensors of one type that differ in any bit, without unreadable ones."""
    from ckpttool.weights.comparing.compare import Comparison, compare_all

    of_one_type = [(own, other) for own, other in pairs if own.dtype is other.dtype]
    outcomes = compare_all(of_one_type, measures=False, jobs=jobs, advance=advance)
    return [
        own.name
        for (own, _), outcome in zip(of_one_type, outcomes, strict=True)
        if isinstance(outcome, Comparison) and not outcome.equal
    ]


def _compare_rounded(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a warning if weights, in the type of the model states' copy, differ from it."""
    copies = {one.path[1:]: one for one in checkpoint.tensors if one.path[1:2] == (MODULE,)}
    pairs = [
        (weight, copies[weight.path])
        for weight in checkpoint.tensors
        if weight.path in copies and weight.shares_with is None and is_full_precision(weight)
    ]
    whole = [(weight, copy) for weight, copy in pairs if weight.shape == copy.shape]
    differing = [weight.name for weight, copy in whole if not _is_rounded(weight, copy)]
    if differing:
        amount = f"{len(differing):,} of {counted(len(whole), 'tensor')}"
        message = f"the rounded copies in the model states have different values for {amount}"
        yield warning("copies-differ", message, first_names(differing))


def _is_rounded(weight: Tensor, copy: Tensor) -> bool:
    """Return whether a copy has the values of a weight, each rounded to the copy's type."""
    import numpy as np

    # ``astype`` rounds to nearest even, as PyTorch does. Both are compared as float64, which has all values
    # of the narrower types.

    if weight.values is None or copy.values is None or not copy.dtype.float_code:
        return True
    own, other = (_floats(one) for one in (weight, copy))
    try:
        with np.errstate(over="ignore"):  # too large for float16: infinite in the copy, too
            return all(
                np.array_equal(np.float64(one.astype(two.dtype)), np.float64(two), equal_nan=True)
                for one, two in zip(own, other, strict=True)
            )
    except CheckpointError:  # the checks of its file report it
        return True


def _floats(tensor: Tensor) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the values of a tensor in groups."""
    import numpy as np

    dtype = numpy_dtype(tensor.dtype)
    starts = range(0, tensor.size, _ELEMENTS)
    sizes = [min(_ELEMENTS, tensor.size - start) * dtype.itemsize for start in starts]
    return (np.frombuffer(block, dtype) for block in regroup(tensor, sizes))


MIN_REREADS = 1 << 30
REREADS_A_BYTE = 64
"""Limits on bytes read again to count NaN in single tensors: the larger of 1 GiB and 64 times the files."""


class Verifier:
    """Runs the checks on one open checkpoint and collects their findings."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        only: Collection[str],
        strict: bool,
        jobs: int,
        advance: Advance,
        against: str | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._only = only
        self._strict = strict
        self._jobs = jobs
        self._advance = advance
        self._against = against
        self._findings: list[Finding] = []
        self._scanned: list[ScannedSpan] = []
        self._manifests = manifests_of(checkpoint)
        self._rereads = 0
        self._elements: dict[Path, bytes | None] = {}
        """Element that a tensor repeats, or None, of tensors that were read one by one."""
        self._has_manifest = has_statements(checkpoint, self._manifests)
        self._reads_objects = bool({"checksum", "values"} & set(only))
        """Whether objects in a store may be read; the other checks should transfer little."""

    def run(self, prediction: Prediction | None, ignores: Sequence[Ignore]) -> Verification:
        """Run the requested checks, a prediction last."""
        checks = self._own_checks()
        if prediction is not None:
            # Only a checkpoint that passed all other checks is loaded.
            from ckpttool.ops.ignored_findings import apply_ignores

            accepted = apply_ignores(self._verification(checks), ignores, strict=self._strict)
            has_failed = any(check.status is Status.FAILED for check in accepted.checks)
            answer = prediction.answer(has_failed=has_failed)
            if not has_failed:
                self._findings.extend(answer.skipped_findings())
            checks += tuple(self._stage_check(stage) for stage in (answer.load, answer.predict))
        if self._against is not None:
            checks += (self._copy(self._against),)
        return self._verification(checks)

    def _verification(self, checks: tuple[Check, ...]) -> Verification:
        checkpoint = self._checkpoint
        safety = safety_of(checkpoint.safety) if "safety" in self._only else Safety.UNKNOWN
        return Verification(
            checkpoint.path,
            checkpoint.format,
            checkpoint.variant,
            safety,
            checks,
            tuple(self._findings),
            checkpoint.nbytes,
        )

    def _own_checks(self) -> tuple[Check, ...]:
        # One pass over the spans of the files computes checksums and searches for NaN and infinities, as
        # reading is what costs. It doesn't know tensors: a span may hold several, or a larger storage. Only
        # tensors in spans with suspicious words are then read one by one (``_doubtful``).
        if {"checksum", "values"} & set(self._only):
            self._scanned = scan(
                self._checkpoint.spans(),
                jobs=self._jobs,
                checksum="checksum" in self._only,
                values="values" in self._only,
                advance=self._advance,
            )
        runs = (self._structure, self._checksum, self._values, self._safety, self._manifest)
        compares = self._has_manifest or asks_for_manifest(self._only)
        checks = tuple(
            run() if name in self._only else Check(name, Status.SKIPPED, NOT_REQUESTED)
            for name, run in zip(CHECKS, runs, strict=True)
            if name != OPTIONAL or compares
        )
        wanted = [check for check in checks if check.name in self._only]
        if all(check.status is Status.SKIPPED for check in wanted):  # skipped is not passed
            why = "; ".join(f"{check.name} was skipped: {check.detail}" for check in wanted)
            self._findings.append(error(NOTHING_CHECKED, f"no requested check could finish ({why})"))
        return checks

    def _stage_check(self, stage: StageResult) -> Check:
        if stage.is_skipped:
            return Check(stage.name, Status.SKIPPED, stage.detail)
        check = self._check(stage.name, stage.findings, stage.detail)
        return Check(check.name, check.status, stage.detail)

    def _check(
        self, name: str, findings: Iterable[Finding], detail: str, *, is_partial: bool = False
    ) -> Check:
        """Record the findings of a check, and return it."""
        # A user may accept findings later (``ignored_findings``), which makes a failed check what it would be
        # without them: ``unfailed``.
        found = tuple(finding._replace(check=name) for finding in findings)
        self._findings.extend(found)
        unfailed = Check(name, Status.PARTIAL if is_partial else Status.PASSED, detail)
        failures = sum(finding.severity in failing_severities(strict=self._strict) for finding in found)
        if failures:
            return Check(
                name, Status.FAILED, f"{counted(failures, 'finding')} in {detail}", unfailed=unfailed
            )
        return unfailed

    def _structure(self) -> Check:
        files = counted(len(self._checkpoint.files), "file")
        return self._check(
            "structure", self._checkpoint.findings, f"{files}, {counted(len(self._checkpoint), 'tensor')}"
        )

    def _checksum(self) -> Check:
        findings = checksum_findings(self._scanned, self._checkpoint)
        if not findings and all(one.span.crc32 is None for one in self._scanned):
            return Check("checksum", Status.SKIPPED, why_no_checksums(self._checkpoint))
        is_partial = any(one.span.crc32 is None for one in self._scanned)
        return self._check("checksum", findings, covered_by_checksums(self._scanned), is_partial=is_partial)

    def _values(self) -> Check:
        tensors = [tensor for tensor in self._checkpoint.tensors if tensor.values is not None]
        unread = unread_values(self._checkpoint)
        findings = [finding for tensor in self._doubtful(tensors) for finding in self._specials(tensor)]
        findings += unread_findings(self._checkpoint)
        if not has_errors(self._checkpoint.findings):
            findings += hollow_findings(self._checkpoint, self._repeated_element())
        findings += loss_findings(self._checkpoint) if tensors else []
        findings += weight_copy_findings(self._checkpoint, self._jobs, self._advance)
        # Findings count even if some values could not be read; without any, that isn't passed, but skipped.
        check = self._check("values", findings, unread or counted(len(tensors), "tensor"))
        if not tensors:
            unread = why_no_values(self._checkpoint)
        if check.status is Status.PASSED and unread is not None:
            return Check("values", Status.SKIPPED, unread)
        return check

    def _doubtful(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the tensors that the pass over the file hasn't proven to be finite."""
        # A span without suspicious words proves tensors that are exactly that span, in the same type: in
        # another type, the same bytes have other values. Spans that couldn't be read have an error already.
        clean = {
            range_of(s.span): s.span.dtype for s in self._scanned if not s.is_suspicious and s.failure is None
        }
        broken = {range_of(s.span) for s in self._scanned if s.failure is not None}
        doubtful = []
        for tensor in tensors:
            places = [(one.file, one.offset, one.nbytes) for one in storages_of(tensor)]
            if tensor.dtype.float_code is None or tensor.shares_with is not None:
                continue
            if not broken.isdisjoint(places):
                continue
            if not places or any(clean.get(place) is not tensor.dtype for place in places):
                doubtful.append(tensor)
        return doubtful

    def _specials(self, tensor: Tensor) -> list[Finding]:
        assert tensor.values is not None  # selected by the caller
        try:
            nan, infinite, element = count_specials(tensor.values, tensor.dtype, self._reread)
        except CheckpointError as failure:
            return [error_of(failure, tensor.name)]
        self._elements[tensor.path] = element
        return special_findings(nan, infinite, tensor)

    def _repeated_element(self) -> Element:
        """Return the function that looks up a constant tensor's element in the results of the pass."""
        # A span is known to repeat an element of its type. That holds for a tensor of the same type whose
        # bytes are exactly such spans; a view of another type has other elements.
        known = {
            range_of(one.span): (one.span.dtype, one.element)
            for one in self._scanned
            if one.element is not None
        }

        def element_of(tensor: Tensor) -> bytes | None:
            if tensor.path in self._elements:
                return self._elements[tensor.path]
            found = {known.get((one.file, one.offset, one.nbytes)) for one in storages_of(tensor)}
            dtype, element = (found.pop() if len(found) == 1 else None) or (None, b"")
            if dtype is not tensor.dtype:
                return None
            return element if tensor.byteorder == "little" else element[::-1]

        return element_of

    def _reread(self, nbytes: int) -> None:
        """Count bytes read again; raise LimitExceeded for overlapping views that would take too long."""
        # Views of one storage are read one by one if a span has suspicious words. A hostile file of few bytes
        # may have very many views of them, so the total is limited.
        self._rereads += nbytes
        once = sum(one.span.nbytes for one in self._scanned)
        if self._rereads > max(MIN_REREADS, REREADS_A_BYTE * self._checkpoint.nbytes) + once:
            found = "too many overlapping views to check the values of each"
            raise LimitExceeded(self._checkpoint.path, found)

    def _safety(self) -> Check:
        if not self._checkpoint.safety:
            return Check("safety", Status.PASSED, "loading it runs no code")
        check = self._check("safety", self._checkpoint.safety, "code that loading it could run")
        if check.status is not Status.PASSED:
            return check
        if unsearched := sum(finding.code == "not-scanned" for finding in self._checkpoint.safety):
            return Check("safety", Status.SKIPPED, f"{counted(unsearched, 'part')} could not be searched")
        doubts = sum(finding.severity is Severity.WARNING for finding in self._checkpoint.safety)
        if not doubts:
            return Check("safety", Status.PASSED, "loading it runs no code")
        return Check("safety", Status.PASSED, f"nothing known to be unsafe; {counted(doubts, 'warning')}")

    def _manifest(self) -> Check:
        if not self._has_manifest:
            return Check("manifest", Status.SKIPPED, "no manifest next to it")
        findings, compared, unproven = compare_manifests(
            self._checkpoint,
            self._manifests,
            self._jobs,
            self._advance,
            reads_objects=self._reads_objects,
        )
        is_partial = any(one.code == UNLISTED for one in findings)
        check = self._check("manifest", findings, compared, is_partial=is_partial)
        if check.status is not Status.FAILED and unproven:
            return Check("manifest", Status.SKIPPED, why_unproven(unproven))
        return check

    def _copy(self, copy: str) -> Check:
        """Compare the checkpoint with a copy; files that can't be compared are an error."""
        from ckpttool.ops.copy_check import compare_with_copy, copy_findings

        compared = compare_with_copy(
            self._checkpoint, copy, self._jobs, self._advance, reads_objects=self._reads_objects
        )
        findings, proofs, unproven = copy_findings(compared)
        check = self._check(COPY, findings, proofs)
        if not unproven:
            return check
        reason = why_unproven(unproven)
        self._findings.append(error(COPY_UNPROVEN, reason)._replace(check=COPY))
        return check if check.status is Status.FAILED else Check(COPY, Status.SKIPPED, reason)
