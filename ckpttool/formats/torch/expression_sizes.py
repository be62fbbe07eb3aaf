"""Bounds on the work that evaluating an expression takes.

SymPy computes numbers exactly: a few characters state powers of which no computer holds the digits. It also
expands polynomials to divide them, and compares each argument of a maximum with all others. The bounds here
grow with the syntax tree, and nothing is evaluated: the bits of the numbers, and the terms of the polynomials
that an expression could be expanded to.

Source: ``sympy/core/power.py``, ``sympy/core/evalf.py``, PyTorch ``torch/utils/_sympy/functions.py``.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass

MAX_BITS = 1024
"""Of numbers as they are computed; sizes and their products have 64 to a few hundred."""
MAX_TERMS = 250
MAX_NODES = 2000
MAX_POWER = 64
"""The largest exponent, shift, and number of digits; exponents of honest sizes have one digit."""
_SCALE = re.compile(r"\d\.?[eE][+-]?\d{4,}")
"""A number in scientific notation that is beyond double precision, as Python and SymPy spell it."""
MAX_COMPARED = 16
"""The most arguments of all maxima and minima, of which SymPy compares each with the others."""
_COMPARING = frozenset({"Max", "Min", "max", "min"})
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow"})
_SHIFTS = frozenset({"LShift", "RShift"})
_DIGITS = frozenset({"Float", "RoundDecimal"})
_EXPONENTIALS = frozenset({"exp"})


class UnboundedError(Exception):
    """Evaluating an expression may take any time or memory; the message says why."""


class HugeNumberError(UnboundedError):
    """It computes a number that no size is."""


@dataclass(frozen=True)
class _Bound:
    """Bounds of a value: bits of its numbers, and terms when it is expanded."""

    bits: int
    terms: int

    def __post_init__(self) -> None:
        if self.bits > MAX_BITS:
            raise HugeNumberError("its numbers grow too large")
        if self.terms > MAX_TERMS:
            raise UnboundedError("it has too many terms")

    def __add__(self, other: _Bound) -> _Bound:
        return _Bound(max(self.bits, other.bits) + 1, self.terms + other.terms)

    def __mul__(self, other: _Bound) -> _Bound:
        return _Bound(self.bits + other.bits, self.terms * other.terms)

    def __pow__(self, exponent: int) -> _Bound:
        return _Bound(self.bits * max(exponent, 1), math.comb(self.terms + exponent - 1, exponent))


_UNIT = _Bound(1, 1)


def check_size(text: str, parsed: ast.Expression) -> None:
    """Check that evaluating an expression takes bounded time and memory.

    Raises:
        HugeNumberError: It computes a number that no size is.
        UnboundedError: It may take any time or memory for another reason.
    """
    if _SCALE.search(text):
        raise HugeNumberError("it holds a number of a thousand digits or more")
    if sum(1 for _ in ast.walk(parsed)) > MAX_NODES:
        raise UnboundedError("it is too long")
    calls = (node for node in ast.walk(parsed) if isinstance(node, ast.Call))
    compared = (
        len(call.args) for call in calls if isinstance(call.func, ast.Name) and call.func.id in _COMPARING
    )
    if sum(compared) > MAX_COMPARED:
        raise UnboundedError("it compares too many values")
    try:
        _bound(parsed.body)
    except RecursionError:
        raise UnboundedError("it is nested too deep") from None


def _bound(node: ast.expr) -> _Bound:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return _Bound(4 * len(node.value), 1)
        return _Bound(node.value.bit_length() if isinstance(node.value, int) else 64, 1)
    if isinstance(node, ast.BinOp):
        return _bound_of_operation(node.op, node.left, node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _bound_of_call(node.func.id, node)
    parts = [_bound(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return sum(parts[1:], parts[0]) if parts else _UNIT


def _bound_of_operation(operator: ast.operator, left: ast.expr, right: ast.expr) -> _Bound:
    if isinstance(operator, ast.BitXor):
        raise HugeNumberError("SymPy reads its ^ as a power, which binds otherwise")
    if isinstance(operator, ast.Pow):
        return _bound(left) ** _exponent(right)
    if isinstance(operator, ast.LShift | ast.RShift):
        return _bound(left) * _Bound(_exponent(right), 1)
    if isinstance(operator, ast.Add | ast.Sub | ast.BitAnd | ast.BitOr):
        return _bound(left) + _bound(right)
    return _bound(left) * _bound(right)


def _bound_of_call(name: str, node: ast.Call) -> _Bound:
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    bounds = [_bound(one) for one in given]
    if name in _POWERS | _SHIFTS and len(given) == 2:
        exponent = _exponent(given[1])
        return bounds[0] ** exponent if name in _POWERS else bounds[0] * _Bound(exponent, 1)
    if name in _DIGITS:
        for one in given[1:]:
            _exponent(one)
    if name in _EXPONENTIALS:
        for one in given:
            _exponent(one)
        return _Bound(64, 1)
    return sum(bounds[1:], bounds[0]) if bounds else _UNIT


def _exponent(node: ast.expr) -> int:
    """Return the size of an exponent, a number that stands there or a fraction of two."""
    if isinstance(node, ast.UnaryOp):
        return _exponent(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return max(_exponent(node.left), _exponent(node.right))
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and abs(node.value) <= MAX_POWER
    ):
        return math.ceil(abs(node.value))
    called = {id(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
    if any(isinstance(part, ast.Name) and id(part) not in called for part in ast.walk(node)):
        raise UnboundedError("its exponents depend on its symbols")
    raise HugeNumberError("its exponents are too large")
