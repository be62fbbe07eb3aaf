"""Carries out one pickle with the interpreter and with CPython's own unpicklers, and compares what each did.

CPython's hooks are inert: what it would import is a class that notes what is done with it. Run by itself, it
compares as many streams as one likes: ``python -m tests.security.differential 1000000``.
"""

from __future__ import annotations

import io
import pickle
import random
import re
import resource
import sys
from collections.abc import Sequence
from typing import Any

from ckpttool import CheckpointError
from ckpttool.containers.pickle.interpreter import Interpreter
from ckpttool.containers.pickle.pickle_nodes import Call, Global, Payload, Persistent, python3_name
from ckpttool.core.readable import Buffer
from tests.security.pickle_streams import mutated, stream

MAX_BYTES = 1 << 30
MAX_INDEX = 1 << 20
"""CPython's unpickler in C allocates as much memo as the largest index asks for."""

STOPS_EARLIER = re.compile(
    r"instead of arguments"  # C wants a tuple, Python's takes any sequence
    r"|an extension code|an out-of-band buffer|a read-only view of a non-bytes object"
    r"|is not a pickle opcode|memo index .* is too large|is not an integer|is not UTF-8"
    r"|a name to import that is not text|a frame that extends past the end"
    r"|items are set on a list"  # which takes numbers for keys
)
"""Why ours may stop where one of CPython's goes on; whatever is behind is searched for names then."""


class Record:
    """What one machine did.

    Attributes:
        names: What it imported, in its order.
        calls: What it called, as (name, whether ``__new__`` alone, arguments, keyword arguments) by then.
        made: What the calls made, as the machine has it in the end.
        error: Why it stopped before STOP.
        is_torn: Whether it said that frames and opcodes don't fit, of which there are several readings.
    """

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []
        self.calls: list[tuple[object, ...]] = []
        self.made: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.root: object = None
        self.memo: dict[int, object] = {}
        self.error: str | None = None
        self.is_torn = False

    def note(self, name: object, is_new: bool, args: object, kwargs: object, made: object) -> None:
        """Note a call."""
        self.calls.append((self.describe(name), is_new, self.describe(args), self.describe(kwargs or {})))
        self.numbers[id(made)] = len(self.made)
        self.made.append(made)

    def describe(self, value: object) -> object:
        """Return a description of a value as it is now, in which the machines' own objects look alike."""
        return self._described(value, {})

    def _described(self, value: Any, seen: dict[int, int]) -> object:
        kind = type(value)
        if id(value) in self.numbers:
            return ("made", self.numbers[id(value)])
        if isinstance(value, Name):
            return ("name", *value.place)
        if kind is Global:
            return ("name", value.module, value.name)
        if kind is Call:  # the only one that no call made
            (content,) = value.args
            content = content.read() if isinstance(content, Payload) else content
            return ("bytearray", content + b"".join(map(_byte, value.items)))
        if kind in (Reference, Persistent):
            return ("reference", self._described(value.id, seen))
        if kind is Payload:
            return self._described(_content(value), seen)
        if kind is bytearray:
            return ("bytearray", bytes(value))
        if kind not in (list, tuple, set, frozenset, dict):
            return (kind.__name__, repr(value))
        if id(value) in seen:
            return ("again", seen[id(value)])
        seen[id(value)] = len(seen)
        parts: list[object] = list(value.items()) if kind is dict else list(value)
        if kind in (set, frozenset):
            parts.sort(key=lambda part: repr(self._described(part, dict(seen))))
        return (kind.__name__, [self._described(part, seen) for part in parts])


def _byte(item: object) -> bytes:
    return bytes([item]) if isinstance(item, int) and 0 <= item < 256 else b"?"


def _content(payload: Payload) -> str | bytes:
    """Return the text or bytes that stayed in the stream."""
    codecs = {"text": "utf-8", "8-bit": "latin-1"}
    data = payload.read()
    return data.decode(codecs[payload.kind], "surrogatepass") if payload.kind in codecs else data


# CPython's ----------------------------------------------------------------------------------------------


class Name(type):
    """The class of what stands for a name: to call it is noted."""

    record: Record
    place: tuple[str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._made(False, args, kwargs)

    def _made(cls, is_new: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = object.__new__(cls)
        made.states, made.items, made.pairs = [], [], []
        cls.record.note(cls, is_new, args, kwargs, made)
        return made


class Made:
    """What a call made: what it is given is noted."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._made(True, args, kwargs)

    def __getinitargs__(self) -> tuple[()]:
        """Make INST and OBJ call a class without arguments, as they call a function."""
        raise NotImplementedError

    def __setstate__(self, state: object) -> None:
        self.states.append(state)

    def append(self, item: object) -> None:
        self.items.append(item)

    def extend(self, items: Sequence[object]) -> None:
        self.items.extend(items)

    def add(self, item: object) -> None:
        self.items.append(item)

    def __setitem__(self, key: object, value: object) -> None:
        self.pairs.append((key, value))

    @property
    def state(self) -> object:
        """Return the first state that it was given, which the interpreter keeps, too."""
        return next((state for state in self.states if state is not None), None)


class Reference:
    """What a persistent id stands for."""

    def __init__(self, id: object) -> None:
        self.id = id


def hooks(record: Record) -> dict[str, Any]:
    """Return the methods of an unpickler that imports nothing."""
    found: dict[tuple[str, str], Name] = {}

    def find_class(self: object, module: str, name: str) -> Name:
        place = python3_name(module, name)
        if place not in found:
            record.names.append(place)
            found[place] = Name("Inert", (Made,), {"record": record, "place": place})
        return found[place]

    def persistent_load(self: object, id: object) -> Reference:
        return Reference(id)

    return {"find_class": find_class, "persistent_load": persistent_load}


def of_cpython(base: type, data: bytes) -> Record:
    """Return what an unpickler of CPython's did."""
    record = Record()
    unpickler = type("Inert", (base,), hooks(record))(io.BytesIO(data), encoding="latin-1")
    try:
        record.root = unpickler.load()
    except Exception as error:  # noqa: BLE001  # a broken pickle may raise anything
        record.error = f"{type(error).__name__}: {error}"
    memo = unpickler.memo
    record.memo = memo if isinstance(memo, dict) else memo.copy()
    return record


# Ours ---------------------------------------------------------------------------------------------------


class Noting(Interpreter):
    """The interpreter, which makes nothing plain."""

    def __init__(self, data: bytes) -> None:
        super().__init__(Buffer("stream", data), 0, len(data))
        self.record = Record()

    def call(self, function: object, args: object, kwargs: object = None, *, is_new: bool = False) -> None:
        super().call(function, args, kwargs, is_new=is_new)
        self.record.note(function, is_new, args, kwargs, self.stack[-1])

    def _plain(self, call: Call) -> object:
        return call


def of_ours(data: bytes) -> Record:
    """Return what the interpreter did."""
    interpreter = Noting(data)
    record = interpreter.record
    try:
        record.root = interpreter.run().root
    except CheckpointError as error:
        record.error = str(error)
    record.names = [(name.module, name.name) for name in interpreter.pickle.names]
    record.memo = interpreter.memo
    record.is_torn = any("frame" in sentence for _, sentence in interpreter.pickle.misuse)
    return record


# Compared -----------------------------------------------------------------------------------------------


def disagreement(data: bytes) -> str | None:
    """Return how the interpreter and CPython differ on a pickle, or None."""
    ours = of_ours(data)
    if ours.is_torn:
        return None
    machines: list[type] = [pickle._Unpickler]  # type: ignore[attr-defined]
    if not _asks_for_much(data):
        machines.append(pickle.Unpickler)
    for machine in machines:
        difference = _difference(ours, of_cpython(machine, data))
        if difference:
            return f"{machine.__module__}: {difference}"
    return None


def _asks_for_much(data: bytes) -> bool:
    wide = any(
        int.from_bytes(match[1], "little") > MAX_INDEX for match in re.finditer(rb"(?s)(?=r(....))", data)
    )
    return wide or re.search(rb"p\s*\d{7}", data) is not None


def _difference(ours: Record, theirs: Record) -> str | None:
    names = min(len(ours.names), len(theirs.names))
    if ours.names[:names] != theirs.names[:names]:
        return f"other names: {ours.names} and {theirs.names}"
    for mine, other in zip(ours.calls, theirs.calls, strict=False):
        if mine != other:
            return f"another call: {mine} and {other}"
    done = len(ours.names), len(ours.calls)
    theirs_done = len(theirs.names), len(theirs.calls)
    if ours.error is not None and STOPS_EARLIER.search(ours.error):
        return None
    if theirs.error is not None:  # what CPython refuses runs no further; ours may
        return None if all(map(int.__ge__, done, theirs_done)) else f"ours stops earlier: {ours.error}"
    if ours.error is not None:
        return f"only ours stops: {ours.error}"
    return _difference_of_objects(ours, theirs) if done == theirs_done else f"{done} and {theirs_done} done"


def _difference_of_objects(ours: Record, theirs: Record) -> str | None:
    if ours.memo.keys() != theirs.memo.keys():
        return f"other memo: {sorted(ours.memo)} and {sorted(theirs.memo)}"
    pairs = [("root", ours.root, theirs.root)]
    pairs += [(f"memo {at}", ours.memo[at], theirs.memo[at]) for at in ours.memo]
    for at, (made, other) in enumerate(zip(ours.made, theirs.made, strict=True)):
        pairs += [(f"{part} of {at}", getattr(made, part), getattr(other, part)) for part in PARTS]
    for what, mine, another in pairs:
        if ours.describe(mine) != theirs.describe(another):
            return f"{what}: {ours.describe(mine)} and {theirs.describe(another)}"
    return None


PARTS = ("state", "items", "pairs")


def compare(count: int, seed: int) -> list[tuple[bytes, str]]:
    """Return the streams, of so many, on which the machines differ."""
    choose = random.Random(seed)
    found = []
    for at in range(count):
        data = (stream if at % 2 else mutated)(choose)
        difference = disagreement(data)
        if difference:
            found.append((data, difference))
    return found


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))  # CPython makes what a pickle announces
    wrong = compare(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for data, difference in wrong[:20]:
        print(data, difference, sep="\n  ")
    print(f"{sys.argv[1]} streams, {len(wrong)} differ")
    sys.exit(bool(wrong))
