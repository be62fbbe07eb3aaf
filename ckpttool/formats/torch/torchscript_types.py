"""Whether a TorchScript archive's objects are of the types that its code declares.

PyTorch reads an attribute by its place in the declared class and doesn't look at the object: of one of
another class, it reads memory behind the object. Loading sets attributes and tags lists without a look at
their types, and ``unchecked_cast`` does what its name says.

Source: PyTorch ``torch/csrc/jit/serialization/import.cpp``, ``import_source.cpp``, ``unpickler.cpp``,
``aten/src/ATen/core/ivalue.h`` (``Object::getSlot``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ckpttool.containers.pickle.pickle_nodes import Call, Global, nodes
from ckpttool.core.report import Finding, warning
from ckpttool.formats.torch.torch_operators import CLASSES

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
"""What only tags a list or a dictionary with its type."""
_TAG = Global("torch.jit._pickle", "restore_type_tag")
_PLAIN = frozenset(
    {"Any", "Device", "Generator", "Layout", "NoneType", "QScheme", "Storage", "Stream", "Tensor"}
    | {"bool", "complex", "float", "int", "number", "str"}
)
"""Types of one value, whose kind PyTorch checks whenever it takes it."""
_CONTAINERS = frozenset({"Dict", "List", "Optional"})
_MAX_DEPTH = 60
_CAST = b"unchecked_cast"
_NAME = re.compile(rb"[A-Za-z_]\w*")
_TOKEN = re.compile(rb"\w+|[^\w\s]")
_TARGETS = frozenset({b"for", b"as"})
_OPERATIONS = frozenset({b"and", b"in", b"is", b"is not", b"not in", b"or"})
_OPENING, _CLOSING = frozenset({b"(", b"[", b"{"}), frozenset({b")", b"]", b"}"})
_SHOWN = 80


class Type(NamedTuple):
    """A type as code writes it: ``Dict[str, Tensor]``."""

    name: str
    parts: tuple[Type, ...] = ()

    @property
    def is_checked(self) -> bool:
        """Whether PyTorch checks each value that it takes out of one."""
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
    """Return the type that begins at a token, None if it is none, and where it ends."""
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
    """Return the classes that files define, by name, from the tokens of each; a name should have one."""
    classes: dict[str, list[Class]] = {}
    for file, tokens in files:
        module = file.removeprefix("code/").removesuffix(".py").replace("/", ".")
        for at, token in enumerate(tokens):
            if token == b"class" and tokens[at + 1 : at + 2]:
                name = f"{module}.{tokens[at + 1].decode('utf-8', 'replace')}"
                has_base = tokens[at + 2 : at + 3] == [b"("]
                base = b"".join(tokens[at + 3 : at + 4]).decode("utf-8", "replace") if has_base else ""
                attributes = tuple(_attributes(tokens, at + 5 if has_base else at + 3))
                classes.setdefault(name, []).append(Class(base, attributes))
    return classes


def _attributes(tokens: Sequence[bytes], start: int) -> Iterator[tuple[str, Type | None]]:
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
        if declared is None or declared.name != "Final":  # a constant is none of the object's attributes
            yield name.decode("utf-8", "replace"), declared


def judge_types(root: object, classes: Mapping[str, Sequence[Class]], where: str) -> Iterator[Finding]:
    """Yield a warning for the first value below the root of a pickle that isn't of its declared type."""
    values = _Values(classes)
    for node in nodes(root):
        for name, value, declared in values.declared(node):
            if declared is None or not values.is_of(value, declared):
                what = "one that its code declares" if declared is None else f"{declared!s:.{_SHOWN}}"
                yield warning("unchecked-ops", f"{name[:_SHOWN]} is not known to be {what}", where)
                return


class _Values:
    """Compares values with types; a value that many places share is looked at once for each type."""

    def __init__(self, classes: Mapping[str, Sequence[Class]]) -> None:
        self._classes = classes
        self._checked: set[tuple[int, Type]] = set()

    def declared(self, node: object) -> Iterator[tuple[str, object, Type | None]]:
        """Yield the name, value and type of each attribute of an object, or of what has a tag."""
        if not isinstance(node, Call):
            return
        name = str(node.function)
        if node.function == _TAG and len(node.args) == 2:
            text = node.args[1]
            tokens = _TOKEN.findall(text.encode("utf-8", "replace")) if isinstance(text, str) else []
            tag, end = read_type(tokens, 0)
            yield "what has a tag", node.args[0], tag if end == len(tokens) else None
        elif isinstance(node.state, dict) and name.startswith("__torch__.") and not name.startswith(CLASSES):
            defined = self._classes.get(name, ())
            attributes = defined[0].attributes if len(defined) == 1 else ()
            types = dict(attributes)
            if types.keys() == node.state.keys() and len(types) == len(attributes):
                yield from ((f"{name}.{key}", value, types[key]) for key, value in node.state.items())
            else:
                yield name, node, None

    def is_of(self, value: object, declared: Type) -> bool:
        """Return whether a value is of a type."""
        if declared.is_checked:
            return True
        while isinstance(value, Call) and value.function in WRAPPERS and value.args:
            value = value.args[0]
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


def unchecked_casts(tokens: Sequence[bytes]) -> Iterator[str]:
    """Yield each type that code casts to and that PyTorch doesn't check.

    What is declared as optional may be cast to what it is if it isn't None, as the printed code does.
    """
    starts = [at for at, token in enumerate(tokens) if token == b"def"]
    for start, end in pairwise([0, *starts, len(tokens)]):
        body = [*tokens[start:end], b"", b"", b"", b""]
        for at in (at for at, token in enumerate(body) if token == _CAST):
            cast, comma = read_type(body, at + 2)
            if cast is None or body[at + 1] != b"(":
                yield "a type that can't be read"
            elif not cast.is_checked and body[comma + 1] not in _optional(body, body[at + 2 : comma]):
                yield str(cast)[:_SHOWN]


def _optional(body: Sequence[bytes], type: Sequence[bytes]) -> set[bytes]:
    """Return the variables of a function that are declared as optional, and hold nothing else."""
    declaration = [b":", b"Optional", b"[", *type, b"]"]
    declared = {at for at in range(1, len(body)) if list(body[at : at + len(declaration)]) == declaration}
    names = {body[at - 1] for at in declared}

    def is_kept(at: int) -> bool:
        before, after = body[at - 1], body[at + 1]
        if after == b"=":
            return body[at + 2] in names and _ends(body, at + 3)
        if before == b"(":  # the first argument of a call, and no target in parentheses
            return body[at - 2] not in _TARGETS and body[_closing(body, at) + 1] != b"="
        is_cast = list(body[at - len(type) - 3 : at]) == [_CAST, b"(", *type, b","]
        return at + 1 in declared or is_cast or (before == b"=" and after != b",")

    while assigned := {name for at, name in enumerate(body) if name in names and not is_kept(at)}:
        names -= assigned
    return names


def _closing(body: Sequence[bytes], at: int) -> int:
    """Return where the parenthesis around a token closes."""
    depth = 1
    while depth and at < len(body) - 2:
        at += 1
        depth += (body[at] in _OPENING) - (body[at] in _CLOSING)
    return at


def _ends(body: Sequence[bytes], at: int) -> bool:
    """Return whether a statement ends before a token."""
    if body[at] != b"if":
        return _NAME.fullmatch(body[at]) is not None and body[at] not in _OPERATIONS
    return next((token for token in body[at:] if token in (b":", b"else")), b"") == b":"
