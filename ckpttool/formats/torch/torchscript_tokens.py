"""Which operators and classes the code of a TorchScript archive names, read as PyTorch reads it.

The text is cut into tokens by the rules of PyTorch's own lexer, which are not Python's: ``is nottorch`` is
``is not`` and ``torch``. What no rule fits ends what can be told, and what can be loaded.

All operators are reached through three names: ``torch``, ``ops`` and ``__torch__``. ``torch.jit.save`` writes
each call out, ``torch.add(``, ``ops.prim.data(``. The compiler allows more, ``t = torch`` and
``getattr(torch, "add")``, which no archive that PyTorch wrote has; it is not followed but reported.

Source: PyTorch ``torch/csrc/jit/frontend/lexer.h``, ``torch/csrc/jit/serialization/import_source.cpp``,
``python_print.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckpttool.formats.torch.torch_operators import OPERATORS, judge_classes
from ckpttool.report import Finding, error, warning

MAX_TEXT = 1 << 23
"""The longest text, in bytes, that is cut into tokens; the largest models have a tenth of it."""

_TOKEN_OR_REST = re.compile(
    rb"""
    [ \t\r\v\f\n]*
    (
      \\\n | \#\ type: | \#[^\n]*    # blanks, as those above
    | \"{3} [^"\\]* (?: (?: \\. | \"(?!\"\") ) [^"\\]* ){0,1000} \"{3}
    | '{3}  [^'\\]* (?: (?: \\. | '(?!'')    ) [^'\\]* ){0,1000} '{3}
    | \"(?!\"\") [^"\\\n]* (?: \\. [^"\\\n]* ){0,1000} \"
    | '(?!'')    [^'\\\n]* (?: \\. [^'\\\n]* ){0,1000} '
    | (?: \d+\.?\d* | \.\d+ ) (?: [eE][+-]?\d+ )? j? (?!\w)
    | is\ not | not\ in | [A-Za-z_]\w*
    | [-+*/%@()\[\]:,={}><.?!&^|~]
    | \Z
    | .+                                       # what no rule fits, and all behind
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_TOKEN = re.compile(_TOKEN_OR_REST.pattern.replace(b"| .+", b""), re.VERBOSE | re.DOTALL)
_BLANKS = frozenset(b"#\\")
_NAME = re.compile(rb"[A-Za-z_]\w*")

_ROOTS = frozenset({b"torch", b"ops", b"__torch__", b"print"})
_NAMING = frozenset({b".", b"def", b"class", b"import"})
"""Before these a name is no value."""
_NAMED = frozenset({b":", b"="})
"""Behind these, too: an attribute with its type, an argument, what is assigned to."""
_SAME = "autograd"
"""``torch.autograd`` is ``torch``, and so is it below any ``ops.NAMESPACE``."""
_CLASSES = ["__torch__", "torch", "classes"]
"""Where classes in C++ are, each by namespace and name."""
_LONGEST_PATH = 100
_BYTE_CODE_OPERATOR = re.compile(r"\w+::\w+")


def judge_text(text: bytes, where: str) -> Iterator[Finding]:
    """Yield what running a text would do besides computing."""
    if len(text) > MAX_TEXT:
        yield warning("not-scanned", f"{len(text):,} bytes of code, more than are searched", where)
        return
    found = Mentions(text)
    yield from OPERATORS.judge(found.operators, where, "its code calls")
    yield from judge_classes(found.classes, where)
    if found.loose:
        message = (
            f"its code hands on {', '.join(sorted(found.loose))}, so that it can't be told what it calls"
        )
        yield error("unsafe-op", message, where)
    if found.read < len(text):
        message = f"code that PyTorch can't read from byte {found.read:,} on"
        yield warning("not-scanned", message, where)


def judge_byte_code(texts: Iterable[str], where: str) -> Iterator[Finding]:
    """Yield what the texts in the byte code of a lite archive lead to: names of operators, and of types."""
    operators: set[str] = set()
    classes: set[str] = set()
    for text in texts:
        if _BYTE_CODE_OPERATOR.fullmatch(text):
            operators.add(text)
        elif _CLASSES[0] in text:
            classes |= Mentions(text.encode("utf-8", "surrogatepass")).classes
    yield from OPERATORS.judge(operators, where, "its byte code calls")
    yield from judge_classes(classes, where)


class Mentions:
    """What a text names.

    Attributes:
        operators: Operators that it calls, ``aten::add``.
        classes: Classes in C++, by namespace and name.
        loose: Names that lead to operators or classes, but don't call or name one there.
        read: How many bytes of the text PyTorch could read.
    """

    def __init__(self, text: bytes) -> None:
        self.operators: set[str] = set()
        self.classes: set[str] = set()
        self.loose: set[str] = set()
        self.read = 0
        self._walk(text)

    def _walk(self, text: bytes) -> None:
        """Follow each path that begins with a root."""
        tokens: list[bytes] = _TOKEN_OR_REST.findall(text)
        while tokens and not tokens[-1]:
            tokens.pop()
        is_whole = not tokens or _TOKEN.fullmatch(tokens[-1])
        self.read = len(text) if is_whole else len(text) - len(tokens.pop())
        tokens = [token for token in tokens if token and token[0] not in _BLANKS]
        for at in [at for at, token in enumerate(tokens) if token in _ROOTS]:
            if at == 0 or tokens[at - 1] not in _NAMING:
                self._add(tokens, at)

    def _add(self, tokens: list[bytes], at: int) -> None:
        """Take in the path that begins with a token."""
        path = [tokens[at].decode()]
        while tokens[at + 1 : at + 2] == [b"."] and len(path) < _LONGEST_PATH:
            if not _NAME.fullmatch(b"".join(tokens[at + 2 : at + 3])):
                break
            path.append(tokens[at + 2].decode())
            at += 2
        behind = b"".join(tokens[at + 1 : at + 2])
        is_called = behind == b"("
        if len(path) == 1 and behind in _NAMED:
            return
        if path[0] == "__torch__":
            self._add_class(path)
        elif path[0] == "print":
            self.operators |= {"prim::Print"} if is_called and len(path) == 1 else set()
        elif is_called and (operator := _operator(path)):
            self.operators.add(operator)
        else:
            self.loose.add(".".join(path))

    def _add_class(self, path: list[str]) -> None:
        """Take in a class in C++; all other paths lead to the archive's own code."""
        if path[:3] == _CLASSES and len(path) >= 5:
            self.classes.add(".".join(path[3:5]))
        elif path[:3] == _CLASSES[: len(path)]:
            self.loose.add(".".join(path))


def _operator(path: list[str]) -> str | None:
    """Return the operator that a path leads to; ``torch.ops`` is no longer read, and means ``ops``."""
    path = path[1:] if path[:2] == ["torch", "ops"] else path
    space, names = ("aten", path[1:]) if path[0] == "torch" else ("".join(path[1:2]), path[2:])
    while names[:1] == [_SAME]:
        space, names = "aten", names[1:]
    return f"{space}::{names[0]}" if len(names) == 1 else None
