"""What the code of a TorchScript archive says, class by class, however its classes are called.

A class that a process has met before under its name gets another, ``__torch__.___torch_mangle_3.Net``, and
lies in a file of its own. Here classes of one name are numbered in the order in which the model leads to
them, so that two saves of one model say the same.

Source: PyTorch ``torch/csrc/jit/serialization/python_print.cpp``, ``torch/csrc/jit/api/compilation_unit.h``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from zlib import crc32

from ckpttool.core.report import Finding, error, warning
from ckpttool.formats.content.plain_data import describe_content
from ckpttool.formats.torch.torch_operators import OPERATORS, judge_classes
from ckpttool.formats.torch.torchscript_types import unchecked_casts

_PREFIX = "code/"
_DEFINITION = re.compile(rb"^(?=(?:class|def) )", re.MULTILINE)
_METHOD = re.compile(rb"^(?=  def )", re.MULTILINE)
_TEMPORARY = re.compile(rb"(?<![\w.\"'])_\d+\b(?![\"'])")
_DEFINED_NAME = re.compile(rb"(?:class|def) (\w+)")
_REFERENCE = re.compile(rb"__torch__(?:\.\w+)+")
_MANGLE = re.compile(rb"___torch_mangle_\d+\.")
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
_LONGEST_PATH, _SHOWN = 100, 8
_LOOPS = frozenset({b"for", b"while"})
_DEFINITIONS = frozenset({b"def", b"class"})
_CALLED_VALUES = frozenset({b"getattr", b"fork"})
_SAVING = b"__getstate__"
_LOADING_LOOPS = "loading it runs a loop, which may never end"
_LOADING = b"__setstate__"
"""The method that loading an archive runs, for each object of its class."""
_BYTE_CODE_OPERATOR = re.compile(r"\w+::\w+")


def describe_code(definitions: Mapping[bytes, bytes], root: str) -> dict[str, str]:
    """Return size and checksum of each class and function, by its name without what a process adds.

    ``root`` is the name of the model's class.
    """
    numbers = _number_definitions(definitions, root.encode())
    descriptions = {}
    for name, text in definitions.items():
        canonical = _REFERENCE.sub(
            lambda match: numbers.get(match[0], without_mangles(match[0])), _renumber_temporaries(text)
        )
        description = describe_content(len(canonical), crc32(canonical))
        descriptions[numbers[name].decode("utf-8", "backslashreplace")] = description
    return dict(sorted(descriptions.items()))


def definitions_of(files: Iterable[tuple[str, bytes]]) -> dict[bytes, bytes]:
    """Return the texts of classes and functions, by their full names; what is none, by its file's.

    ``files`` are names like ``code/__torch__.py`` and their texts.
    """
    definitions: dict[bytes, bytes] = {}
    for file, text in files:
        module = file.removeprefix(_PREFIX).removesuffix(".py").replace("/", ".").encode()
        for part in _DEFINITION.split(text):
            match = _DEFINED_NAME.match(part)
            name = module + b"." + match[1] if match else module
            definition = part.strip()
            if definition.startswith(b"class "):
                # Attributes are sorted by name: a class's constants come in the order of a set.
                head, *methods = _METHOD.split(definition, maxsplit=1)
                first, *attributes = head.split(b"\n")
                definition = b"\n".join([first, *sorted(filter(None, attributes)), *methods])
            if definition:
                definitions[name] = definitions.get(name, b"") + definition + b"\n"
    return definitions


def _renumber_temporaries(definition: bytes) -> bytes:
    """Return a definition with its temporaries counted from 0; printing counts through a whole file."""
    numbers: dict[bytes, bytes] = {}
    return _TEMPORARY.sub(lambda match: numbers.setdefault(match[0], b"_%d" % len(numbers)), definition)


def _number_definitions(definitions: Mapping[bytes, bytes], root: bytes) -> dict[bytes, bytes]:
    """Return the names that definitions are told under, in the order in which the first leads to them."""
    counts: dict[bytes, int] = {}
    numbers: dict[bytes, bytes] = {}
    order = sorted((without_mangles(name), without_mangles(text), name) for name, text in definitions.items())
    pending = [*(name for _, _, name in reversed(order)), root]
    while pending:
        name = pending.pop()
        if name in numbers or name not in definitions:
            continue
        plain = without_mangles(name)
        counts[plain] = counts.get(plain, 0) + 1
        numbers[name] = plain if counts[plain] == 1 else b"%s (%d)" % (plain, counts[plain])
        pending += reversed(_REFERENCE.findall(definitions[name]))
    return numbers


def without_mangles(text: bytes) -> bytes:
    """Return a text without what a process adds to the names of classes."""
    return _MANGLE.sub(b"", text)


def judge_text(text: bytes, where: str) -> Iterator[Finding]:
    """Yield what running a text would do besides computing."""
    if len(text) > MAX_TEXT:
        yield warning("not-scanned", f"{len(text):,} bytes of code, more than are searched", where)
        return
    references = CodeReferences(text)
    yield from OPERATORS.judge(references.operators, where, "its code calls")
    yield from judge_classes(references.classes, where)
    if references.unresolved:
        names = ", ".join(sorted(references.unresolved))
        message = f"its code hands on {names}, so that it can't be told what it calls"
        yield error("unsafe-op", message, where)
    if casts := sorted(set(unchecked_casts(references.tokens))):
        message = f"its code takes values for {', '.join(casts[:_SHOWN])} unchecked"
        yield warning("unchecked-ops", message, where)
    if references.readable < len(text):
        message = f"code that PyTorch can't read from byte {references.readable:,} on"
        yield warning("not-scanned", message, where)


def judge_loops(files: Iterable[tuple[str, Sequence[bytes]]]) -> Iterator[Finding]:
    """Yield a warning for each file with a loop that loading the archive may run, and that may never end.

    A method leads to all functions and methods whose names stand in it, and to those that syntax calls.
    ``files`` are names and tokens.
    """
    bodies: dict[bytes, list[tuple[str, Sequence[bytes]]]] = {}
    values: set[bytes] = set()
    for file, tokens in files:
        values.update(name for name, sign in pairwise(tokens) if sign in _NAMED and _NAME.fullmatch(name))
        for name, body in _definitions(tokens):
            bodies.setdefault(name, []).append((file, body))
    pending, seen = [_LOADING], {_LOADING, _SAVING}
    files_with_loops: dict[str, None] = {}
    while pending:
        for file, body in bodies.get(pending.pop(), ()):
            if not _LOOPS.isdisjoint(body):
                files_with_loops[file] = None
            names = {token.strip(b"'\"") for token in body} | {
                name for name in bodies if name.startswith(b"__")
            }
            if not _CALLED_VALUES.isdisjoint(body) or any(
                called == b"(" and name in values for name, called in pairwise(body)
            ):
                names |= bodies.keys() if b"getattr" in body else {b"forward"}
            reached = (names & bodies.keys()) - seen
            seen |= reached
            pending += reached
    yield from (warning("unsafe-op", _LOADING_LOOPS, file) for file in files_with_loops)


def _definitions(tokens: Sequence[bytes]) -> Iterator[tuple[bytes, Sequence[bytes]]]:
    """Yield the name and the tokens of each function and method."""
    starts = [index for index, token in enumerate(tokens) if token in _DEFINITIONS]
    for start, end in pairwise([*starts, len(tokens)]):
        if tokens[start] == b"def" and end - start > 2:
            yield tokens[start + 1], tokens[start + 2 : end]


def judge_byte_code(texts: Iterable[str], where: str) -> Iterator[Finding]:
    """Yield what byte code of a lite archive could do, and what its texts lead to: operators, and types."""
    operators: set[str] = set()
    classes: set[str] = set()
    for text in texts:
        if _BYTE_CODE_OPERATOR.fullmatch(text):
            operators.add(text)
        elif _CLASSES[0] in text:
            classes |= CodeReferences(text.encode("utf-8", "surrogatepass")).classes
    message = "byte code, which the lite interpreter runs without checking what it reads and writes"
    yield warning("unchecked-ops", message, where)
    yield from OPERATORS.judge(operators, where, "its byte code calls")
    yield from judge_classes(classes, where)


class CodeReferences:
    """The operators and classes that a text names.

    Attributes:
        operators: Operators that it calls, ``aten::add``.
        classes: Classes in C++, by namespace and name.
        unresolved: Names that lead to operators or classes, but don't call or name one there.
        tokens: Its tokens, without blanks and comments.
        readable: How many bytes of the text PyTorch could read.
    """

    def __init__(self, text: bytes) -> None:
        self.operators: set[str] = set()
        self.classes: set[str] = set()
        self.unresolved: set[str] = set()
        tokens, self.readable = code_tokens(text)
        self.tokens = tokens
        for index in [index for index, token in enumerate(tokens) if token in _ROOTS]:
            if index == 0 or tokens[index - 1] not in _NAMING:
                self._follow_path(tokens, index)

    def _follow_path(self, tokens: list[bytes], index: int) -> None:
        """Add what the path that begins with a token leads to."""
        path = [tokens[index].decode()]
        while tokens[index + 1 : index + 2] == [b"."] and len(path) < _LONGEST_PATH:
            if not _NAME.fullmatch(b"".join(tokens[index + 2 : index + 3])):
                break
            path.append(tokens[index + 2].decode())
            index += 2
        following = b"".join(tokens[index + 1 : index + 2])
        is_called = following == b"("
        if len(path) == 1 and following in _NAMED:
            return
        if path[0] == "__torch__":
            if path[:3] == _CLASSES and len(path) >= 5:
                self.classes.add(".".join(path[3:5]))
            elif path[:3] == _CLASSES[: len(path)]:
                self.unresolved.add(".".join(path))
            # All other paths lead to the archive's own code.
        elif path[0] == "print":
            self.operators |= {"prim::Print"} if is_called and len(path) == 1 else set()
        elif is_called and (operator := _operator(path)):
            self.operators.add(operator)
        else:
            self.unresolved.add(".".join(path))


def code_tokens(text: bytes) -> tuple[list[bytes], int]:
    """Return the tokens of a text but blanks and comments, and how many bytes PyTorch could read.

    What is behind ``MAX_TEXT`` is left out: ``judge_text`` says so.
    """
    text = text[:MAX_TEXT]
    tokens: list[bytes] = _TOKEN_OR_REST.findall(text)
    while tokens and not tokens[-1]:
        tokens.pop()
    readable = len(text)
    if tokens and not _TOKEN.fullmatch(tokens[-1]):
        readable -= len(tokens.pop())
    return [token for token in tokens if token and token[0] not in _BLANKS], readable


def _operator(path: list[str]) -> str | None:
    """Return the operator that a path leads to; ``torch.ops`` is no longer read, and means ``ops``."""
    path = path[1:] if path[:2] == ["torch", "ops"] else path
    space, names = ("aten", path[1:]) if path[0] == "torch" else ("".join(path[1:2]), path[2:])
    while names[:1] == [_SAME]:
        space, names = "aten", names[1:]
    return f"{space}::{names[0]}" if len(names) == 1 else None
