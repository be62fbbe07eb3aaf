"""Texts of an exported program that PyTorch evaluates as Python when it loads or runs the program.

- Symbolic sizes (``expr_str``) are evaluated by ``sympy.sympify``, guards (``guards_code``) by ``exec``.
  Honest ones are arithmetic over a few known names. Here they are parsed and never run. SymPy's functions
  evaluate a text inside an expression again, so it must be a name or a number.
- Names of inputs, nodes and tensors become the source of a module for ``exec``: inputs as parameters of
  ``forward``, tensors as ``getattr(self, "NAME")``, keys of a dictionary of inputs between single quotes.
- The structure of inputs and outputs is JSON in a text, and may name modules that are imported.

Source: PyTorch ``torch/_export/serde/serialize.py``, ``torch/export/_unlift.py``, ``torch/utils/_sympy``,
``torch/utils/_pytree.py`` (``enum_object_hook``, ``_defaultdict_deserialize``), ``torch/fx/graph.py``;
``sympy/core/power.py``, ``sympy/core/evalf.py``.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckpttool.containers.jsontext import objects
from ckpttool.containers.pickle.pickle_nodes import Trust, trust
from ckpttool.core.report import Finding, error, warning

MAX_BITS = 1024
"""Limit on the bits of computed numbers; sizes and their products have 64 to a few hundred."""
MAX_TERMS = 250
MAX_NODES = 2000
MAX_POWER = 64
"""Limit on exponents, shifts, and numbers of digits; exponents of honest sizes have one digit."""
_SCALE = re.compile(r"\d\.?[eE][+-]?\d{4,}")
"""A number in scientific notation beyond the range of doubles, as Python and SymPy spell it."""
MAX_COMPARED = 16
"""Limit on the arguments of all maxima and minima together; SymPy compares each with all others."""
_COMPARING = frozenset({"Max", "Min", "max", "min"})
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow"})
_SHIFTS = frozenset({"LShift", "RShift"})
_DIGITS = frozenset({"Float", "RoundDecimal"})
_EXPONENTIALS = frozenset({"exp"})


# The cost of evaluating an expression ---------------------------------------------------------------


class UnboundedError(Exception):
    """Evaluating an expression may take unbounded time or memory; the message is the reason."""


class HugeNumberError(UnboundedError):
    """An expression computes a number larger than any size."""


@dataclass(frozen=True)
class _Bound:
    """Upper bounds of a value: bits of its numbers, and terms of its expanded polynomial.

    Raises:
        HugeNumberError, UnboundedError: A bound is over its limit.
    """

    # SymPy computes exactly, so a few characters may be a power with more digits than a computer holds. It
    # also expands polynomials to divide them. Neither can be known without evaluating, so both are bounded
    # from the syntax tree: a sum has the terms of both sides and one bit more than the larger, a product
    # multiplies terms and adds bits, and the n-th power of a sum of k terms has as many terms as there are
    # multisets of n out of k.

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
        HugeNumberError: It computes a number larger than any size.
        UnboundedError: It may take unbounded time or memory for another reason.
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
        raise HugeNumberError("SymPy reads its ^ as a power, which has another precedence")
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
    """Return the absolute value, rounded up, of a constant exponent; of a fraction, the larger part."""
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


# Judging the texts of a program ----------------------------------------------------------------------

MAX_TEXT = 20_000
MAX_NESTING = 50

_EVALUATED = frozenset({"expr_str", "guards_code"})
_SYMBOL = re.compile(r"(?!__)[A-Za-z_]\w*")
_WORD = re.compile(rf"{_SYMBOL.pattern}|[+-]?\d*\.?\d*(?:[eE][+-]?\d+)?")
"""A text inside an expression: the name of a symbol, or a number."""
_QUOTABLE = re.compile(r"[^'\"\\\x00-\x1f\x7f\x85\u2028\u2029]*")
"""A text that can't end a string literal of either quote."""
_IDENTIFIER = re.compile(r"[\w.]*")
_IDENTIFIERS = frozenset({"name", "as_name", "forward_arg_names"})
_QUOTED = "_name", "fqn"
"""Endings of the keys whose texts PyTorch puts between quotes, or doesn't use."""
_NAMES = (
    "Abs Add And BitwiseFn_bitwise_and BitwiseFn_bitwise_or CeilToInt CleanDiv Eq Equality Float FloatPow "
    "FloatTrueDiv FloorDiv FloorToInt Ge GreaterThan Gt Identity Integer IntInfinity IntTrueDiv "
    "IsNonOverlappingAndDenseIndicator LShift Le LessThan Lt Max Min Mod ModularIndexing Mul Ne Not "
    "NegativeIntInfinity Or Piecewise Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt "
    "StrictGreaterThan StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Unequality Where ceiling "
    "floor sqrt exp log abs min max int float bool len isinstance sym_max sym_min torch_sym_sqrt"
)
_FUNCTIONS = frozenset(_NAMES.split())
_ATTRIBUTES = frozenset(
    {"size", "stride", "storage_offset", "shape", "ndim", "dim", "numel", "dtype", "device", "is_integer"}
    | {"item", "requires_grad", "layout", "keys", "sym_max", "sym_min", "sym_sqrt", "sym_not", "sym_ite"}
)
_HARMLESS = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
    ast.Subscript,
    ast.Tuple,
    ast.List,
    ast.IfExp,
)


_STRUCTURES = frozenset({"in_spec", "out_spec"})
_FACTORIES = frozenset(("builtins", name) for name in ("dict", "float", "int", "list", "set", "str", "tuple"))
"""Harmless factories of a ``defaultdict``."""


def judge_structures(tree: object, where: str) -> Iterator[Finding]:
    """Judge the modules that loading a program imports for the structure of its inputs and outputs.

    The structure is JSON in a text, which has texts that are JSON again.
    """
    findings: dict[Finding, None] = {}
    pending: list[tuple[str, object]] = [("", tree)]
    while pending:
        key, node = pending.pop()
        if isinstance(node, list):
            pending += ((key, item) for item in node)
        elif isinstance(node, dict):
            findings |= dict.fromkeys(_judge_layout(node, where))
            pending += ((key if key in _STRUCTURES else name, item) for name, item in node.items())
            pending += ((key, name) for name in node)
        elif isinstance(node, str) and node.lstrip()[:1] in ("[", "{"):
            try:
                pending.append((key, json.loads(node)))
            except (ValueError, RecursionError):
                if key in _STRUCTURES:
                    message = f"a layout of inputs that can't be read: {node[:80]!r}"
                    findings[warning("unknown-class", message, where)] = None
        elif isinstance(node, str) and key == "in_spec" and not _QUOTABLE.fullmatch(node):
            findings[_name_as_code(node, where)] = None
    yield from findings


def _judge_layout(node: dict[str, object], where: str) -> Iterator[Finding]:
    """Judge the import of a node: an enumeration for its member, or a factory for a ``defaultdict``."""
    module, _, name = str(node.get("fqn", "")).partition(":")
    is_factory = "default_factory_module" in node
    if is_factory:
        module, name = str(node["default_factory_module"]), str(node.get("default_factory_name"))
    elif "__enum__" not in node:
        return
    meaning = trust(module, name)
    if is_factory and (module, name) in _FACTORIES:
        return
    message = f"loading it would import {module[:60]}.{name[:60]}"
    if meaning is Trust.DANGEROUS or (is_factory and meaning is not Trust.UNKNOWN):
        yield error("unsafe-import", message, where)
    elif meaning is Trust.UNKNOWN or (meaning is Trust.KNOWN and not module.startswith("torch.")):
        yield warning("unknown-class", f"{message}, which is not known to be harmless", where)


def judge_names(tree: object, where: str) -> Iterator[Finding]:
    """Yield an error for each name in a program's JSON that would become more than a name in source code."""
    strange: dict[str, None] = {}
    for node in objects(tree):
        for key, value in node.items():
            allowed = _IDENTIFIER if key in _IDENTIFIERS else _QUOTABLE if key.endswith(_QUOTED) else None
            if allowed is not None:
                texts = value if isinstance(value, list) else [value]
                strange |= dict.fromkeys(t for t in texts if isinstance(t, str) and not allowed.fullmatch(t))
    yield from (_name_as_code(text, where) for text in strange)


def _name_as_code(text: str, where: str) -> Finding:
    message = f"loading or running it makes source code of the name {text[:80]!r}"
    return error("unsafe-expression", message, where)


def judge_expressions(tree: object, where: str) -> Iterator[Finding]:
    """Yield an error for each evaluated text that isn't plain arithmetic.

    If it is arithmetic that may take unbounded time, it is a warning.
    """
    texts: dict[str, None] = {}
    for node in objects(tree):
        for key in _EVALUATED & node.keys():
            held = node[key] if isinstance(node[key], list) else [node[key]]
            texts |= dict.fromkeys(text for text in held if isinstance(text, str))
    for text in texts:
        message = f"loading or running it evaluates {text[:80]!r}"
        try:
            if (why := objection(text)) is not None:
                yield error("unsafe-expression", f"{message}: {why}", where)
        except UnboundedError as failure:
            yield warning("expression-size", f"{message}: {failure}", where)


def objection(text: str) -> str | None:
    """Return the reason if an expression is more than arithmetic over known names, or None.

    Raises:
        UnboundedError: It is arithmetic that may take unbounded time.
    """
    if len(text) > MAX_TEXT or max(map(text.count, "([{")) > MAX_NESTING * 20:
        return "it is too long"
    # Python's parser recurses into brackets, so their nesting is limited before anything is parsed.
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        return "it is nested too deep"
    try:
        parsed = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "it is not an expression"
    # A subscript may be the key of a dictionary of inputs, which a guard has between quotes.
    subscripts = [node.slice for node in ast.walk(parsed) if isinstance(node, ast.Subscript)]
    keys = {
        id(key)
        for key in subscripts
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and _QUOTABLE.fullmatch(key.value)
    }
    for node in ast.walk(parsed):
        if id(node) not in keys and (why := _objection(node)) is not None:
            return why
    try:
        check_size(text, parsed)
    except HugeNumberError as failure:
        return str(failure)
    return None


def _objection(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        # Any other name is a symbol (``s0``); a builtin would be found by ``eval``, and a name with two
        # underscores may lead to one.
        is_known = _SYMBOL.fullmatch(node.id) and (node.id in _FUNCTIONS or not hasattr(builtins, node.id))
        return None if is_known else f"it names {node.id}"
    if isinstance(node, ast.Attribute):
        return None if node.attr in _ATTRIBUTES else f"it takes the attribute {node.attr}"
    if isinstance(node, ast.keyword):
        return None if node.arg and isinstance(node.value, ast.Constant) else "it passes on a function"
    if isinstance(node, ast.Constant):
        is_text = isinstance(node.value, str | bytes)
        is_word = isinstance(node.value, str) and _WORD.fullmatch(node.value)
        return f"it holds the text {node.value!r:.40}" if is_text and not is_word else None
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute):
            return None  # judged as an attribute
        if isinstance(function, ast.Name) and function.id in _FUNCTIONS:
            return None
        return f"it calls {ast.unparse(function)[:40]}"
    return None if isinstance(node, _HARMLESS) else f"it holds a {type(node).__name__}"
