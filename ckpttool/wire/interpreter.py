"""The inert pickle interpreter: it builds plain data and described nodes, and runs nothing.

What a real unpickler would import, call or set becomes a node (``Global``, ``Call``, ``Persistent``) that
says so. A few constructors of plain data, with exactly the arguments that make them harmless, become the
data itself: ordered dictionaries, sets, byte strings.

Every opcode of protocols 0 to 5 is known but for the extension registry and out-of-band buffers, which no
checkpoint uses. Work and memory are bounded by budgets. Nothing here recurses.

Source: CPython ``Lib/pickle.py`` and ``Lib/pickletools.py``.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ckpttool.wire.literals import Operation
from ckpttool.wire.opcodes import TABLE
from ckpttool.wire.pickled import Call, Global, Mapped, Payload, Persistent, Pickle
from ckpttool.wire.readable import Readable
from ckpttool.wire.trust import Trust, modern, trust
from ckpttool.wire.window import Window

MAX_OPCODES = 10_000_000
MAX_NODES = 3_000_000
MAX_MEMO = 4_000_000
MAX_MEMORY = 1 << 28
"""The most bytes that decoded strings may take."""

_MAX_COLLISIONS = 1000
_MAX_KEY_PARTS = 1000
_HASH_MODULUS = (1 << 61) - 1

_MAPPINGS = frozenset(
    {("collections", "OrderedDict"), ("collections", "defaultdict"), ("collections", "Counter")}
)
_MASKED = Global("numpy.ma.core", "_mareconstruct")


class Interpreter(Window):
    """Reads one pickle. ``pickle`` holds what was seen so far, also after an error."""

    def __init__(self, source: Readable, offset: int, end: int, where: str | None = None) -> None:
        """Prepare to read a pickle that starts at ``offset`` and lies before ``end``, in bytes."""
        super().__init__(source, offset, end, where)
        self.pickle = Pickle()
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self._globals: dict[tuple[str, str], Global] = {}
        self._nodes = 0
        self._memory = 0
        self._hashes: dict[int, tuple[object, int]] = {}
        self._shaped: dict[Global, int] = {}  # how often each lies on the stack or in an object
        self.frame_end = 0

    def run(self) -> Pickle:
        """Return the pickle, once its STOP has been reached.

        Raises:
            DamagedCheckpoint: It is not a whole pickle.
            Truncated: It ends before STOP.
            LimitExceeded: It asks for more than the budgets allow.
        """
        operations = _OPERATIONS
        self._refill()
        try:
            for _ in range(MAX_OPCODES):
                at = self.at
                if at > self._refill_at:
                    self._refill()
                    at = self.at
                operation = operations[self.data[at]]
                self.at = at + 1
                if operation(self):
                    return self._finished()
        except IndexError as error:
            if self.at >= len(self.data):
                raise self.truncated() from error
            raise self.damaged("an opcode takes more from the stack than lies there") from error
        except struct.error as error:
            raise self.truncated() from error
        raise self.exceeded(f"more than {MAX_OPCODES:,} pickle opcodes")

    # The stack ------------------------------------------------------------------------------------

    def grow(self, node: object) -> None:
        """Push something that takes memory of its own."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise self.exceeded(f"more than {MAX_NODES:,} objects in a pickle")
        self.stack.append(node)

    def charge(self, nbytes: int) -> None:
        """Count memory that strings or copies take, against the budget."""
        self._memory += nbytes
        if self._memory > MAX_MEMORY:
            raise self.exceeded(f"strings and copies of more than {MAX_MEMORY:,} bytes in a pickle")

    def push_text(self, text: str | bytes) -> None:
        """Push a string or byte string that is held in memory."""
        self._memory += sys.getsizeof(text)
        if self._memory > MAX_MEMORY:
            self.charge(0)
        self.stack.append(text)

    def push_payload(self, nbytes: int, kind: str) -> None:
        """Push a reference to bytes that stay in the file, and pass over them."""
        offset = self.skip(nbytes)
        self.grow(Payload(self.source, offset, nbytes, kind))

    def remember(self, index: int) -> None:
        """Store the top of the stack in the memo.

        Python's own unpickler allocates up to the index, whatever lies below.
        """
        if index > MAX_OPCODES:
            raise self.exceeded(f"entry {index:,} of a pickle's memo")
        memo = self.memo
        memo[index] = self.stack[-1]
        if len(memo) > MAX_MEMO:
            raise self.exceeded(f"more than {MAX_MEMO:,} entries in a pickle's memo")

    def recall(self, index: int) -> None:
        """Push what the memo holds."""
        try:
            node = self.memo[index]
        except KeyError:
            raise self.damaged(f"the memo has no entry {index}") from None
        if self._shaped and isinstance(node, Global) and node in self._shaped:
            self._shaped[node] += 1
        self.stack.append(node)

    def to_mark(self) -> list[Any]:
        """Return what was pushed since the last mark, and forget the mark."""
        if not self.marks:
            raise self.damaged("an opcode needs a mark, and there is none")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def hashable(self, key: object) -> object:
        """Return a key that can be hashed safely and fast.

        Hashing a tuple walks it, and shared tuples make that walk explode. Numbers can be made to
        collide in a dictionary at will; a thousand such are no accident.
        """
        kind = type(key)
        if kind is str or kind is bytes or (kind is int and abs(key) < _HASH_MODULUS):  # type: ignore[arg-type]
            return key
        if isinstance(key, tuple):
            self._check_tuple_key(key)
        elif isinstance(key, list | dict | set | bytearray):
            raise self.damaged(f"a {type(key).__name__} as a key")
        elif key is None or isinstance(key, bool | Global | Call | Persistent | Payload):
            if isinstance(key, Global) and key in self._shaped:
                self._shaped[key] -= 1  # a class as a key is called by nobody
            return key
        digest = hash(key)
        first, others = self._hashes.get(digest, (key, 0))
        if key != first:
            others += 1
            if others > _MAX_COLLISIONS:
                raise self.exceeded(f"more than {_MAX_COLLISIONS:,} keys with one hash")
        self._hashes[digest] = (first, others)
        return key

    def _check_tuple_key(self, key: tuple[Any, ...]) -> None:
        pending, parts = [key], 0
        while pending:
            for part in pending.pop():
                parts += 1
                if parts > _MAX_KEY_PARTS:
                    raise self.exceeded(f"a tuple of more than {_MAX_KEY_PARTS:,} parts as a key")
                if isinstance(part, tuple):
                    pending.append(part)
                elif isinstance(part, list | dict | set | bytearray):
                    raise self.damaged(f"a {type(part).__name__} in a key")

    def set_items(self, target: object, pairs: Iterable[tuple[Any, Any]]) -> None:
        if isinstance(target, dict):
            for key, value in pairs:
                target[key if type(key) is str else self.hashable(key)] = value
        elif isinstance(target, Call):
            target.pairs.extend(pairs)
        else:
            self._unfit(target, "set on")

    def extend(self, target: object, items: list[Any]) -> None:
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Call):
            target.items.extend(items)
        elif isinstance(target, set):
            target.update(map(self.hashable, items))
        else:
            self._unfit(target, "appended to")

    # Names and calls ------------------------------------------------------------------------------

    def import_name(self, module: str, name: str) -> None:
        module, name = modern(module, name)
        found = self._globals.get((module, name))
        if found is None:
            found = self._globals[module, name] = Global(module, name)
            self.pickle.names[found] = self.position
            if trust(module, name) is Trust.SHAPED:
                self._shaped[found] = 0
        if found in self._shaped:
            self._shaped[found] += 1
        self.grow(found)

    def call(self, function: object, args: object, kwargs: object = None) -> None:
        if not isinstance(args, tuple):
            raise self.damaged(f"a call with {_kind(args)} in place of arguments")
        if not isinstance(function, Global):
            self.misused(f"{_kind(function)} is called")
        call = Call(function, args, kwargs)
        if self._shaped:
            self._used_up(call)
        self.grow(self._plain(call))

    def _used_up(self, call: Call) -> None:
        """Note that a name is called whose harm depends on its arguments."""
        function, args = call.function, call.args
        if isinstance(function, Global) and function in self._shaped:
            self._shaped[function] -= 1
            self.pickle.watched.append((self.position, call))
        if function == _MASKED and args and isinstance(args[0], Global) and args[0] in self._shaped:
            self._shaped[args[0]] -= 1  # it only makes an empty one

    def _plain(self, call: Call) -> object:
        """Return the data that a harmless constructor makes, or the call itself."""
        function, args = call.function, call.args
        if not isinstance(function, Global) or function.name not in _MAKE_PLAIN or call.kwargs:
            return call
        constructor = (function.module, function.name)
        if constructor in _MAPPINGS:
            mapped = self._mapping(function, args)
            return call if mapped is None else mapped
        if constructor == ("_codecs", "encode") and len(args) == 2 and args[1] == "latin1":
            return self._latin1(args[0], call)
        if constructor in _COLLECTIONS and len(args) <= 1:
            return self._collection(_COLLECTIONS[constructor], args, call)
        return call

    def _mapping(self, kind: Global, args: tuple[Any, ...]) -> Mapped | None:
        mapped = Mapped(kind)
        if not args:
            return mapped
        if kind.name == "defaultdict":
            mapped.factory = args[0]
        source = args[-1] if kind.name != "defaultdict" else ()
        if not isinstance(source, list | tuple | dict):
            return None
        self.charge(64 * len(source))
        for pair in source.items() if isinstance(source, dict) else source:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                return None
            mapped[self.hashable(pair[0])] = pair[1]
        return mapped

    def _collection(self, constructor: Callable[[Any], object], args: tuple[Any, ...], call: Call) -> object:
        items = args[0] if args else ()
        if not isinstance(items, list | tuple):
            return call
        self.charge(64 * len(items))
        return constructor(items if constructor is list else map(self.hashable, items))

    def _latin1(self, text: object, call: Call) -> object:
        """Return the bytes that protocol 2 spells as text."""
        if isinstance(text, Payload):
            return Payload(text.source, text.offset, text.nbytes, "latin1")
        if not isinstance(text, str):
            return call
        self.charge(len(text))
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError:
            return call

    # Errors ---------------------------------------------------------------------------------------

    def _unfit(self, target: object, what: str) -> None:
        """Note items for what Python would ask to take them, or refuse those for what can't."""
        if not isinstance(target, Global | Persistent):
            raise self.damaged(f"items are {what} {_kind(target)}")
        self.misused(f"items are {what} {_kind(target)}")

    def misused(self, sentence: str) -> None:
        self.pickle.misuse.append((self.position, sentence))

    def _finished(self) -> Pickle:
        for name, uses in self._shaped.items():
            if uses > 0:
                self.misused(f"{name} is handed on instead of called")
        self.pickle.root = self.stack.pop()
        self.pickle.end = self.position
        return self.pickle


def _kind(node: object) -> str:
    """Name a node in a sentence."""
    if isinstance(node, Global):
        return f"the name {node}"
    if isinstance(node, Call):
        return "the result of a call"
    return f"a {type(node).__name__.lower()}"


_COLLECTIONS: dict[tuple[str, str], Callable[[Any], object]] = {
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "list"): list,
}


def _unknown(code: int) -> Operation:
    def refuse(vm: Interpreter) -> None:
        raise vm.damaged(f"0x{code:02x} is no pickle opcode")

    return refuse


_OPERATIONS = [operation or _unknown(code) for code, operation in enumerate(TABLE)]
_MAKE_PLAIN = frozenset(name for _, name in (*_MAPPINGS, *_COLLECTIONS, ("_codecs", "encode")))
