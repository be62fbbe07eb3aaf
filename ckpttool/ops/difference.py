"""Result of a comparison of two checkpoints, and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypedDict

from ckpttool.core.dtypes import DType
from ckpttool.core.options import COMPARISON_PANEL, EXECUTION_PANEL, jobs_option, option
from ckpttool.core.report import Sentence
from ckpttool.core.result import Table, document_of, plain
from ckpttool.core.tensor import Role
from ckpttool.core.text import shape_text
from ckpttool.weights.comparing.compare import EXACT, Side, Statistics, Tolerance

Kind = Literal["values", "shape", "dtype"]
How = Literal["name", "convention", "map", "content", "shape"]
"""Evidence by which two tensors were paired; see ``weights.pairing.pairs``."""
SCHEMA = "ckpttool.diff/1"
_COUNTING = ("integer", "boolean")
_NUMBERS = {
    **{name: f"distance.{name}" for name in ("max_abs", "max_rel", "l2", "cosine")},
    **{name: f"statistics.{name}" for name in ("count", "size")},
    **{name: f"distance.{name}" for name in ("mean_abs", "relative")},
    "non_finite": "statistics.non_finite",
    "norms": "distance.norms",
    **{name: f"statistics.{name}" for name in ("where", "at")},
}
"""Attributes with the numbers of a change, by their keys in its document."""
_ZEROS = ("max_abs", "max_rel", "l2", "count", "mean_abs", "relative", "non_finite")
"""Numbers that are 0 if the values are equal."""


_comparison = partial(option, panel=COMPARISON_PANEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """Options of a comparison.

    Attributes:
        rtol: Relative tolerance, as a share of the first side's value.
        atol: Absolute tolerance.
        bitwise: Whether +0 differs from -0, and one NaN from another.
        layout: Whether layout rules bring both sides to one layout, or tensors are compared as stored.
        mapping: Path of a map file.
        rename: Whether renamed tensors are looked for, by content and by shape.
        only: Whether all is compared, or only the model's weights.
        ignore: Globs of names that are left out on both sides.
        keep_going: Whether an unreadable tensor is recorded, and the others are compared.
        jobs: Number of threads; by default the processors available to this process.
    """

    rtol: float = _comparison(
        "--rtol", metavar="X", minimum=0, help="Allow values to differ by X times A's.", default=0.0
    )
    atol: float = _comparison(
        "--atol", metavar="X", minimum=0, help="Allow values to differ by X.", default=0.0
    )
    bitwise: bool = _comparison(
        "--bitwise", help="Compare bits: +0 differs from -0, and one NaN from another.", default=False
    )
    layout: Literal["auto", "as-is"] = _comparison(
        "--layout", help="Convert both to one layout by known rules, or compare as stored.", default="auto"
    )
    mapping: str | None = _comparison(
        "--map", metavar="FILE", help="Read the pairs of tensors from a TOML file."
    )
    rename: bool = _comparison("--no-rename", help="Don't look for renamed tensors.", default=True)
    only: Literal["weights", "all"] = _comparison(
        "--only", help="Compare only the model's weights, or everything.", default="all"
    )
    ignore: tuple[str, ...] = _comparison(
        "--ignore", metavar="GLOB", help="Ignore matching tensors and values.", default=()
    )
    keep_going: bool = option(
        "--keep-going",
        help="If something can't be read, compare the rest.",
        panel=EXECUTION_PANEL,
        default=False,
    )
    jobs: int | None = jobs_option()


class DiffKeywords(TypedDict, total=False):
    """The attributes of ``DiffOptions``, for type checkers."""

    rtol: float
    atol: float
    bitwise: bool
    layout: Literal["auto", "as-is"]
    mapping: str | None
    rename: bool
    only: Literal["weights", "all"]
    ignore: tuple[str, ...]
    keep_going: bool
    jobs: int | None


class Absent:
    """Marks a value that one side lacks."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Type, shape and size of a tensor on one side, in the layout in which it is compared."""

    name: str
    role: Role
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int

    @property
    def text(self) -> str:
        """Return type and shape."""
        return f"{self.dtype.name} {shape_text(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Tensor that both sides have, and that differs.

    Attributes:
        a: The tensor on the first side.
        b: The tensor on the second side.
        kind: The first difference of: shape, type of the elements, values.
        how: Evidence by which the two were paired.
        statistics: Differences of values; None if shapes differ, or if no value does.
    """

    a: TensorFacts
    b: TensorFacts
    kind: Kind
    how: How = "name"
    statistics: Statistics | None = None

    @property
    def name(self) -> str:
        """Return its name on the first side."""
        return self.a.name

    @property
    def distance(self) -> Statistics | None:
        """Return the distance of values; None for strings, integers and booleans."""
        is_count = self.a.dtype.kind in _COUNTING and self.b.dtype.kind in _COUNTING
        found = self.statistics
        return None if found is None or is_count or isinstance(found.at_a, str) else found

    def document(self) -> dict[str, Any]:
        """Return its document; if only the type differs, numbers are 0."""
        document = document_of(self, "name", "kind", *_NUMBERS, "how", "a", "b", names=_NUMBERS)
        if self.statistics is None and self.kind == "dtype":
            document |= dict.fromkeys(_ZEROS, 0)
        return document


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value other than a tensor that differs; ``ABSENT`` if a side lacks it.

    ``of_weights``: whether it is part of the weights, as the scale of a quantized tensor.
    """

    path: str
    a: object
    b: object
    of_weights: bool = field(default=False, kw_only=True)

    def document(self) -> dict[str, Any]:
        """Return its document; a side without the value is null, and named under ``absent``."""
        sides = {"a": self.a, "b": self.b}
        missing = [name for name, side in sides.items() if side is ABSENT]
        document = {"path": self.path, **sides, **dict.fromkeys(missing)}
        return {**document, "absent": missing[0]} if missing else document


@dataclass(frozen=True, slots=True)
class UnreadableTensor:
    """Tensor that couldn't be read, with its side and the problem."""

    name: str
    side: Side
    why: Sentence


@dataclass(frozen=True, slots=True)
class UndecidedTensor:
    """Tensor whose elements may be in another order on one side than on the other.

    Attributes:
        name: Its name, on the side whose order is unknown.
        seen: Result if the orders are the same: ``equal as stored``.
        why: Why the order is unknown.
    """

    name: str
    seen: str
    why: Sentence

    @property
    def text(self) -> str:
        """Return the name, the result and the reason as a sentence."""
        return f"{self.name}: {self.seen}, but {self.why}"


@dataclass(frozen=True, slots=True)
class SideSummary:
    """Summary of one side; ``state`` has the names of its parts of the training's state."""

    path: str
    format: str
    variant: str | None
    producer: str | None
    nbytes: int
    tensors: int
    parameters: int
    state: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        return document_of(self, *("path", "format", "variant", "producer", "bytes", "tensors", "parameters"))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(Table):
    """Differences of two checkpoints; true if they are equal: ``if ckpttool.diff(a, b):`` asks for ``equal``.

    Attributes:
        a: The first side.
        b: The second side.
        compared: Number of tensors that both sides have and that were compared.
        unchanged: Number of compared tensors that are equal.
        weights: Number of compared tensors that are weights.
        changed: Compared tensors that differ, in the order of the first file.
        added: Tensors that only the second side has.
        removed: Tensors that only the first side has.
        renamed: Both names of tensors that were paired by content or shape.
        rename_counts: Whether a rename is a difference: if both sides use one framework's names.
        values: Differences of other content than tensors.
        reported: Differences that don't count: format, producer, bookkeeping.
        rules: Layout rules that were used, each with the number of tensors.
        notes: Sentences on other steps to make the sides comparable.
        broken: Tensors that couldn't be read, with ``keep_going``.
        not_compared: Sentences on content that could not be compared.
        undecided: Tensors whose order of elements is unknown.
        ignored: Whether ``ignore`` left out anything.
        compared_nbytes: Bytes of the compared tensors, of the larger side.
        tolerance: Limits within which values count as equal.
    """

    a: SideSummary
    b: SideSummary
    compared: int
    unchanged: int
    weights: int = 0
    changed: tuple[Change, ...] = ()
    added: tuple[TensorFacts, ...] = ()
    removed: tuple[TensorFacts, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    rename_counts: bool = True
    values: tuple[ValueChange, ...] = ()
    reported: tuple[ValueChange, ...] = ()
    rules: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    broken: tuple[UnreadableTensor, ...] = ()
    not_compared: tuple[str, ...] = ()
    undecided: tuple[UndecidedTensor, ...] = ()
    ignored: bool = False
    compared_nbytes: int = 0
    tolerance: Tolerance = EXACT

    _ROWS = ("changed",)

    @property
    def summary(self) -> str:
        """Return the number of differences in a few words."""
        counts = ((len(self.changed), "changed"), (len(self.added), "added"), (len(self.removed), "removed"))
        words = ", ".join(f"{count:,} {what}" for count, what in counts if count)
        words = "equal" if self.equal else words or "not equal"
        return f"{self.a.path}, {self.b.path}: {words}"

    def document(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **self.row()}

    def row(self) -> dict[str, Any]:
        """Return the row of a document for these two checkpoints."""
        names = {"a": "a.path", "b": "b.path", "compared_bytes": "compared_nbytes"}
        return {
            **document_of(self, "equal", "a", "b", *("compared", "compared_bytes", "unchanged"), names=names),
            "added": [one.name for one in self.added],
            "removed": [one.name for one in self.removed],
            **document_of(self, *("renamed", "changed", "values", "reported", "rules", "notes", "broken")),
            "not_compared": [*self.not_compared, *(one.text for one in self.undecided)],
            "tolerance": plain(self.tolerance),
            "sides": {"a": self.a.document(), "b": self.b.document()},
        }

    def __bool__(self) -> bool:
        return self.equal

    def _repr_html_(self) -> str:
        """Return a table of the differences, for notebooks."""
        from ckpttool.core.notebook import html_table

        columns = ("what", "name", "A", "B", "largest difference")
        count = sum(map(len, (self.changed, self.added, self.removed, self.renamed, self.values)))
        return html_table(repr(self), columns, self._html_rows(), count)

    def _html_rows(self) -> Iterator[tuple[object, ...]]:
        for one in self.changed:
            largest = None if one.distance is None else one.distance.max_abs
            yield f"{one.kind} changed", one.name, one.a.text, one.b.text, largest
        yield from (("only in A", one.name, one.text, None, None) for one in self.removed)
        yield from (("only in B", one.name, None, one.text, None) for one in self.added)
        yield from (("renamed", a, a, b, None) for a, b in self.renamed)
        yield from (("value", one.path, repr(one.a), repr(one.b), None) for one in self.values)

    @property
    def equal(self) -> bool:
        """Return whether everything was compared, and nothing differs."""
        renamed = self.renamed and self.rename_counts
        missing = self.added or self.removed or renamed
        unsure = self.broken or self.not_compared or self.undecided
        return not (self.changed or missing or self.values or unsure)

    @property
    def has_same_weights(self) -> bool:
        """Return whether all weights, and values that are part of them, were compared and are equal.

        Other content may differ.
        """
        # A tensor that was ignored, not compared or undecided may be a weight, so any of them denies it.
        # Metadata may differ, unless it is part of the weights, as the scale of a quantized tensor is.
        alone = (*self.added, *self.removed)
        renamed = self.renamed and self.rename_counts
        unsure = self.broken or self.not_compared or self.undecided or self.ignored
        if not self.weights or self.changed or renamed or unsure:
            return False
        is_alone = any(facts.role is Role.WEIGHTS for facts in alone)
        return not is_alone and not any(one.of_weights for one in (*self.values, *self.reported))
