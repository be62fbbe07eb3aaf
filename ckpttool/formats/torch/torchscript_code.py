"""The code of a TorchScript archive, as tokens: operators, types, loops, and a description for diffs.

- **Operators** (``judge_text``): the paths in the code that name operators or C++ classes are looked up in
  lists.
- **Types** (``judge_types``, ``unchecked_casts``): PyTorch reads an attribute by its index in the declared
  class and doesn't check the object, so an object of another class makes it read memory out of bounds.
  Loading sets attributes and tags lists without checking types, and ``unchecked_cast`` doesn't check either.
- **Loops** (``judge_loops``): loading runs ``__setstate__``, so a loop there may hang it.
- **Description** (``describe_code``): a process that has loaded a class of the same name gives the next one
  another name, ``__torch__.___torch_mangle_3.Net``, in a file of its own. Classes of one name are numbered
  in the order in which the model reaches them, so that two saves of one model compare equal.

Source: PyTorch ``torch/csrc/jit/serialization/import.cpp``, ``import_source.cpp``, ``unpickler.cpp``,
``python_print.cpp``, ``torch/csrc/jit/api/compilation_unit.h``, ``aten/src/ATen/core/ivalue.h``
(``Object::getSlot``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

from ckpttool.containers.pickle.pickle_nodes import Call, Global, nodes
from ckpttool.core.report import Finding, error, not_scanned, warning
from ckpttool.formats.content.plain_data import describe_content
from ckpttool.formats.torch.torch_operators import CLASSES, OPERATORS, judge_classes

WRAPPERS = frozenset(
    Global("torch.jit._pickle", name)
    for name in (
        "build_intlist",
        "build_tensorlist",
        "build_doublelist",
        "build_boollist",
        "restore_type_tag",
    )
)
"""Calls that tag a list or dictionary with its type."""
_TAG = Global("torch.jit._pickle", "restore_type_tag")
_PLAIN = frozenset(
    {"Any", "Device", "Generator", "Layout", "NoneType", "QScheme", "Storage", "Stream", "Tensor"}
    | {"bool", "complex", "float", "int", "number", "str"}
)
"""Types whose values PyTorch checks whenever it takes one."""
_CONTAINERS = frozenset({"Dict", "List", "Optional"})
_MAX_DEPTH = 60
_CAST = b"unchecked_cast"
_NAME = re.compile(rb"[A-Za-z_]\w*")
_TYPE_TOKEN = re.compile(rb"\w+|[^\w\s]")
_TARGETS = frozenset({b"for", b"as"})
_OPERATIONS = frozenset({b"and", b"in", b"is", b"is not", b"not in", b"or"})
_OPENING, _CLOSING = frozenset({b"(", b"[", b"{"}), frozenset({b")", b"]", b"}"})
_SHOWN_NAMES = 80


# Types of attributes and values --------------------------------------------------------------------


class Type(NamedTuple):
    """A type as code writes it: ``Dict[str, Tensor]``."""

    name: str
    parts: tuple[Type, ...] = ()

    @property
    def is_checked(self) -> bool:
        """Whether PyTorch checks each value that it takes from an object of this type."""
        return self.name in _PLAIN or (
            self.name in _CONTAINERS and all(part.is_checked for part in self.parts)
        )

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.parts))}]" if self.parts else self.name


class Class(NamedTuple):
    """A class that the code defines."""

    base: str
    attributes: tuple[tuple[str, Type | None], ...]


def read_type(tokens: Sequence[bytes], at: int, depth: int = 0) -> tuple[Type | None, int]:
    """Return the type that begins at a token (None if there is none), and the index after it."""
    name: list[bytes] = []
    while at < len(tokens) and _NAME.fullmatch(tokens[at]):
        name.append(tokens[at])
        at += 1
        if tokens[at : at + 1] != [b"."]:
            break
        at += 1
    if not name or depth > _MAX_DEPTH:
        return None, at
    parts: list[Type] = []
    if tokens[at : at + 1] == [b"["]:
        while tokens[at : at + 1] != [b"]"]:
            part, at = read_type(tokens, at + 1, depth + 1)
            if part is None or tokens[at : at + 1] not in ([b","], [b"]"]):
                return None, at
            parts.append(part)
        at += 1
    return Type(b".".join(name).decode(), tuple(parts)), at


def classes_in(files: Iterable[tuple[str, Sequence[bytes]]]) -> dict[str, list[Class]]:
    """Return the classes in the tokens of files, by name; more than one for a name is suspicious."""
    classes: dict[str, list[Class]] = {}
    for file, tokens in files:
        module = file.removeprefix("code/").removesuffix(".py").replace("/", ".")
        for at, token in enumerate(tokens):
            if token == b"class" and tokens[at + 1 : at + 2]:
                name = f"{module}.{tokens[at + 1].decode('utf-8', 'replace')}"
                has_base = tokens[at + 2 : at + 3] == [b"("]
                base = b"".join(tokens[at + 3 : at + 4]).decode("utf-8", "replace") if has_base else ""
                attributes = tuple(_declared_attributes(tokens, at + 5 if has_base else at + 3))
                classes.setdefault(name, []).append(Class(base, attributes))
    return classes


def _declared_attributes(tokens: Sequence[bytes], start: int) -> Iterator[tuple[str, Type | None]]:
    """Yield the attributes that a class declares by ``name : T`` or in ``__annotations__``."""
    depth = 0
    for at in range(start, len(tokens)):
        token = tokens[at]
        depth += (token in _OPENING) - (token in _CLOSING)
        if token in (b"def", b"class"):
            return
        if depth == 0 and token == b":" and _NAME.fullmatch(tokens[at - 1]):
            name = tokens[at - 1]
        elif depth == 0 and token == b"=" and tokens[at - 4 : at - 2] == [b"__annotations__", b"["]:
            name = tokens[at - 2].strip(b"'\"")
        else:
            continue
        declared, _ = read_type(tokens, at + 1)
        if declared is None or declared.name != "Final":  # constants aren't attributes of objects
            yield name.decode("utf-8", "replace"), declared


def judge_types(root: object, classes: Mapping[str, Sequence[Class]], where: str) -> Iterator[Finding]:
    """Yield a warning for the first value in a pickle that isn't of its declared type."""
    values = _Values(classes)
    for node in nodes(root):
        for name, value, declared in values.declared(node):
            if declared is None or not values.is_of(value, declared):
                what = "of a declared type" if declared is None else f"{declared!s:.{_SHOWN_NAMES}}"
                yield warning("unchecked-ops", f"{name[:_SHOWN_NAMES]} isn't known to be {what}", where)
                return


class _Values:
    """Compares values with types; a shared value is compared once with each type."""

    def __init__(self, classes: Mapping[str, Sequence[Class]]) -> None:
        self._classes = classes
        self._checked: set[tuple[int, Type]] = set()

    def declared(self, node: object) -> Iterator[tuple[str, object, Type | None]]:
        """Yield name, value and declared type of each attribute of an object, or of a tagged value."""
        if not isinstance(node, Call):
            return
        name = str(node.function)
        if node.function == _TAG and len(node.args) == 2:
            text = node.args[1]
            tokens = _TYPE_TOKEN.findall(text.encode("utf-8", "replace")) if isinstance(text, str) else []
            tag, end = read_type(tokens, 0)
            yield "a tagged value", node.args[0], tag if end == len(tokens) else None
        elif isinstance(node.state, dict) and name.startswith("__torch__.") and not name.startswith(CLASSES):
            defined = self._classes.get(name, ())
            attributes = defined[0].attributes if len(defined) == 1 else ()
            types = dict(attributes)
            if types.keys() == node.state.keys() and len(types) == len(attributes):
                yield from ((f"{name}.{key}", value, types[key]) for key, value in node.state.items())
            else:
                yield name, node, None

    def is_of(self, value: object, declared: Type) -> bool:
        """Return whether a value is of a type, or its type is one that PyTorch checks itself."""
        if declared.is_checked:
            return True
        while isinstance(value, Call) and value.function in WRAPPERS and value.args:
            value = value.args[0]
        # A value that contains itself, or is shared, is compared once: it counts as matching while it is
        # compared, and a mismatch inside it ends the whole comparison.
        key = (id(value), declared)
        if key in self._checked:
            return True
        self._checked.add(key)
        name, parts = declared
        match name, len(parts):
            case "Optional", 1:
                return value is None or self.is_of(value, parts[0])
            case "List", 1:
                return isinstance(value, list) and all(self.is_of(one, parts[0]) for one in value)
            case "Dict", 2:
                return isinstance(value, dict) and all(
                    self.is_of(key, parts[0]) and self.is_of(one, parts[1]) for key, one in value.items()
                )
            case "Tuple", _:
                return self._is_tuple_of(value, parts)
        defined = self._classes.get(name, ())
        if len(defined) == 1 and defined[0].base == "NamedTuple":
            types = [type for _, type in defined[0].attributes]
            return self._is_tuple_of(value, types)
        is_class = name.startswith(CLASSES) or (len(defined) == 1 and defined[0].base in ("Module", ""))
        return is_class and isinstance(value, Call) and str(value.function) == name

    def _is_tuple_of(self, value: object, types: Sequence[Type | None]) -> bool:
        return (
            isinstance(value, tuple)
            and len(value) == len(types)
            and all(
                type is not None and self.is_of(one, type) for one, type in zip(value, types, strict=True)
            )
        )


# Casts ---------------------------------------------------------------------------------------------


def unchecked_casts(tokens: Sequence[bytes]) -> Iterator[str]:
    """Yield each type of an ``unchecked_cast`` whose values PyTorch doesn't check.

    A variable declared ``Optional[T]`` may be cast to ``T``, as PyTorch's own code does after a check for
    None.
    """
    starts = [at for at, token in enumerate(tokens) if token == b"def"]
    for start, end in pairwise([0, *starts, len(tokens)]):
        body = [*tokens[start:end], b"", b"", b"", b""]
        for at in (at for at, token in enumerate(body) if token == _CAST):
            cast, comma = read_type(body, at + 2)
            if cast is None or body[at + 1] != b"(":
                yield "a type that can't be read"
            elif not cast.is_checked and body[comma + 1] not in _optional_variables(
                body, body[at + 2 : comma]
            ):
                yield str(cast)[:_SHOWN_NAMES]


def _optional_variables(body: Sequence[bytes], type: Sequence[bytes]) -> set[bytes]:
    """Return the variables of a function declared ``Optional`` of a type that only get such values."""
    declaration = [b":", b"Optional", b"[", *type, b"]"]
    # The cast is safe if the variable can only hold None or a value of the type. So after its declaration it
    # may be assigned from other such variables only, and every other use that could assign to it (a target of
    # ``for`` or ``as``, a tuple of targets) takes it out. As that may take out the source of another
    # assignment, this repeats until nothing changes.
    declared = {at for at in range(1, len(body)) if list(body[at : at + len(declaration)]) == declaration}
    names = {body[at - 1] for at in declared}

    def is_kept(at: int) -> bool:
        before, after = body[at - 1], body[at + 1]
        if after == b"=":
            return body[at + 2] in names and _is_statement_end(body, at + 3)
        if before == b"(":  # the first argument of a call, and no target in parentheses
            return body[at - 2] not in _TARGETS and body[_closing(body, at) + 1] != b"="
        is_cast = list(body[at - len(type) - 3 : at]) == [_CAST, b"(", *type, b","]
        return at + 1 in declared or is_cast or (before == b"=" and after != b",")

    while assigned := {name for at, name in enumerate(body) if name in names and not is_kept(at)}:
        names -= assigned
    return names


def _closing(body: Sequence[bytes], at: int) -> int:
    """Return the index of the parenthesis that closes the one around a token."""
    depth = 1
    while depth and at < len(body) - 2:
        at += 1
        depth += (body[at] in _OPENING) - (body[at] in _CLOSING)
    return at


def _is_statement_end(body: Sequence[bytes], at: int) -> bool:
    """Return whether a statement ends before a token."""
    if body[at] != b"if":
        return _NAME.fullmatch(body[at]) is not None and body[at] not in _OPERATIONS
    return next((token for token in body[at:] if token in (b":", b"else")), b"") == b":"


# Descriptions and references -----------------------------------------------------------------------

_PREFIX = "code/"
_DEFINITION = re.compile(rb"^(?=(?:class|def) )", re.MULTILINE)
_METHOD = re.compile(rb"^(?=  def )", re.MULTILINE)
_TEMPORARY = re.compile(rb"(?<![\w.\"'])_\d+\b(?![\"'])")
_DEFINED_NAME = re.compile(rb"(?:class|def) (\w+)")
_REFERENCE = re.compile(rb"__torch__(?:\.\w+)+")
_MANGLE = re.compile(rb"___torch_mangle_\d+\.")
MAX_TEXT = 1 << 23
"""Limit in bytes on code that is cut into tokens; the largest models have a tenth of it."""
# One token of TorchScript, as its lexer accepts it, or else all the rest of the text: a lexer that skipped
# anything it doesn't know could be made to see other code than PyTorch does.
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
    | .+                                       # no token: the rest of the text
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_TOKEN = re.compile(_TOKEN_OR_REST.pattern.replace(b"| .+", b""), re.VERBOSE | re.DOTALL)
_BLANKS = frozenset(b"#\\")
_ROOTS = frozenset({b"torch", b"ops", b"__torch__", b"print"})
_BEFORE_NAMES = frozenset({b".", b"def", b"class", b"import"})
"""A name after one of these isn't a value."""
_AFTER_NAMES = frozenset({b":", b"="})
"""A name before one of these isn't a value: an attribute with its type, an argument, a target."""
_AUTOGRAD = "autograd"
"""``torch.autograd`` means ``torch``, and so it does below any ``ops.NAMESPACE``."""
_CLASS_PATH = ["__torch__", "torch", "classes"]
"""Path of the C++ classes, which continues with namespace and name."""
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
    """Return size and checksum of each class and function, by its name without mangling.

    ``root`` is the name of the model's class.
    """
    # Two saves of one model differ in the mangled names of classes, and in the temporaries (``_0``), which
    # PyTorch numbers through a whole file. Both are replaced by numbers that depend on the model alone.
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
    """Return the text of each class and function by full name, and other text by the name of its file.

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
    numbers: dict[bytes, bytes] = {}
    return _TEMPORARY.sub(lambda match: numbers.setdefault(match[0], b"_%d" % len(numbers)), definition)


def _number_definitions(definitions: Mapping[bytes, bytes], root: bytes) -> dict[bytes, bytes]:
    """Return the description's name of each definition, in the order in which ``root`` reaches them."""
    counts: dict[bytes, int] = {}
    numbers: dict[bytes, bytes] = {}
    # Names are mangled anew in each process, so the numbers follow the references from the root. Definitions
    # that it doesn't reach come afterwards, in the order of their texts without mangled names, which is the
    # same in each save.
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
    """Return a text without mangled parts of names, ``___torch_mangle_3.``"""
    return _MANGLE.sub(b"", text)


def judge_text(text: bytes, where: str) -> Iterator[Finding]:
    """Judge the effects, besides computing, of running a text."""
    if len(text) > MAX_TEXT:
        yield not_scanned(where, f"{len(text):,} bytes of code, too many to search")
        return
    references = CodeReferences(text)
    yield from OPERATORS.judge(references.operators, where, "its code calls")
    yield from judge_classes(references.classes, where)
    if references.unresolved:
        names = ", ".join(sorted(references.unresolved))
        message = f"its code passes {names} on, so its calls are unknown"
        yield error("unsafe-op", message, where)
    if casts := sorted(set(unchecked_casts(references.tokens))):
        message = f"its code casts values to {', '.join(casts[:_SHOWN])} unchecked"
        yield warning("unchecked-ops", message, where)
    if references.readable < len(text):
        message = f"code that PyTorch can't read from byte {references.readable:,} on"
        yield not_scanned(where, message)


def judge_loops(files: Iterable[tuple[str, Sequence[bytes]]]) -> Iterator[Finding]:
    """Yield a warning for each file with a loop that loading the archive may run.

    ``files`` are names and tokens.
    """
    # Reachability by name, from ``__setstate__``: a body reaches every function or method whose name is in
    # it, all special methods, which syntax calls (``__add__``), and if it calls a value, anything that value
    # may be. That is more than it can run, but nothing less.
    bodies: dict[bytes, list[tuple[str, Sequence[bytes]]]] = {}
    values: set[bytes] = set()
    for file, tokens in files:
        values.update(
            name for name, sign in pairwise(tokens) if sign in _AFTER_NAMES and _NAME.fullmatch(name)
        )
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
    """Judge byte code for the lite interpreter, by the operators and classes in its texts."""
    operators: set[str] = set()
    classes: set[str] = set()
    for text in texts:
        if _BYTE_CODE_OPERATOR.fullmatch(text):
            operators.add(text)
        elif _CLASS_PATH[0] in text:
            classes |= CodeReferences(text.encode("utf-8", "surrogatepass")).classes
    message = "byte code, which the lite interpreter runs without checking memory accesses"
    yield warning("unchecked-ops", message, where)
    yield from OPERATORS.judge(operators, where, "its byte code calls")
    yield from judge_classes(classes, where)


class CodeReferences:
    """The operators and C++ classes in a text.

    Attributes:
        operators: Operators that it calls, ``aten::add``.
        classes: C++ classes, as namespace and name.
        unresolved: Paths to operators or classes that don't end in a call or a class.
        tokens: Without blanks and comments.
        readable: Number of bytes that PyTorch could read.
    """

    def __init__(self, text: bytes) -> None:
        self.operators: set[str] = set()
        self.classes: set[str] = set()
        self.unresolved: set[str] = set()
        tokens, self.readable = code_tokens(text)
        self.tokens = tokens
        for index in [index for index, token in enumerate(tokens) if token in _ROOTS]:
            if index == 0 or tokens[index - 1] not in _BEFORE_NAMES:
                self._follow_path(tokens, index)

    def _follow_path(self, tokens: list[bytes], index: int) -> None:
        """Add the operator or class at the end of the path that begins at a token."""
        path = [tokens[index].decode()]
        while tokens[index + 1 : index + 2] == [b"."] and len(path) < _LONGEST_PATH:
            if not _NAME.fullmatch(b"".join(tokens[index + 2 : index + 3])):
                break
            path.append(tokens[index + 2].decode())
            index += 2
        following = b"".join(tokens[index + 1 : index + 2])
        is_called = following == b"("
        if len(path) == 1 and following in _AFTER_NAMES:
            return
        if path[0] == "__torch__":
            if path[:3] == _CLASS_PATH and len(path) >= 5:
                self.classes.add(".".join(path[3:5]))
            elif path[:3] == _CLASS_PATH[: len(path)]:
                self.unresolved.add(".".join(path))
            # All other paths are of the archive's own code.
        elif path[0] == "print":
            self.operators |= {"prim::Print"} if is_called and len(path) == 1 else set()
        elif is_called and (operator := _operator(path)):
            self.operators.add(operator)
        else:
            self.unresolved.add(".".join(path))


def code_tokens(text: bytes) -> tuple[list[bytes], int]:
    """Return the tokens of a text without blanks and comments, and the number of bytes PyTorch could read.

    Text beyond ``MAX_TEXT`` is left out; ``judge_text`` has a finding for that.
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
    """Return the operator at a path; the obsolete ``torch.ops`` means ``ops``."""
    path = path[1:] if path[:2] == ["torch", "ops"] else path
    space, names = ("aten", path[1:]) if path[0] == "torch" else ("".join(path[1:2]), path[2:])
    while names[:1] == [_AUTOGRAD]:
        space, names = "aten", names[1:]
    return f"{space}::{names[0]}" if len(names) == 1 else None
