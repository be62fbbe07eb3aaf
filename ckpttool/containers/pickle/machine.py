"""The pickle machine: the stream, stack, memo and budgets that opcodes work on.

An import, a call or a persistent id becomes a node (``Global``, ``Call``, ``Persistent``); the calls of
constructors of containers become the containers themselves. Work and memory are bounded by budgets, and
nothing here recurses.

Source: CPython ``Lib/pickle.py``.
"""

from __future__ import annotations

import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from ckpttool.containers.pickle.constructors import (
    JOBLIB_ARRAY,
    OPAQUE,
    attribute_name,
    class_to_create,
    evaluate,
    is_constructor,
    judge_state,
    size_of,
    takes_items,
    takes_pairs,
)
from ckpttool.containers.pickle.numpy_types import KINDS, fields_of, number_of_parts
from ckpttool.containers.pickle.pickle_nodes import (
    ENTRY,
    Call,
    DictSubclass,
    Global,
    Payload,
    Persistent,
    Pickle,
    Trust,
    python3_name,
    value_kind,
)
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, Truncated
from ckpttool.core.readable import Readable

MAX_STREAM = 1 << 28
"""Limit in bytes on one pickle; large payloads, which are skipped, don't count."""

MAX_LINE = 1 << 26
"""Limit in bytes on a text that is a line, as in protocol 0."""

MAX_OPCODES = 10_000_000
MAX_MADE = 1 << 29
"""Limits on the opcodes of a pickle, and on the bytes of memory of the objects that it makes."""

# Two bytes of a pickle can make an object of 3.7 kB, and deflate makes a thousand bytes of one: 3 kB of a zip
# inflate to 2.9 million objects. So each pickle has a budget in proportion to the bytes that the file really
# stores for it, next to a floor that is enough for any small pickle.
_FLOOR, _FOR_A_BYTE = (1_000_000, 32 << 20), (4, 64)
"""Opcodes, and bytes of memory, that any pickle may take; and the addition for each of its stored bytes."""

_FIRST_WINDOW = 1 << 12
_WINDOW, _LINE = 1 << 20, 1 << 14
"""Bytes read at once; fewer for a line: files in stores that aren't pickles may begin like one."""
_LONGEST_FIXED = 16  # no opcode has more bytes of fixed-size arguments
_COSTS: dict[type, int] = {set: 4 * ENTRY, Call: 4 * ENTRY, DictSubclass: 2 * ENTRY}
_MOST_MISUSE = 100
_MAX_COLLISIONS = 1000
_MAX_KEY_PARTS = 1000
_SLOW_KEYS = frozenset({"decimal", "fraction", "version"})
"""Kinds of objects whose comparison takes time in proportion to the number or text in them."""
_COST_OF_STATE, _COST_OF_LOADING = 80, 1 << 14  # bytes of memory
_MAX_CONTAINERS = 20_000
_HASH_MODULUS = (1 << 61) - 1

_COLLECTIONS: dict[str, Callable[[Any], object]] = {
    kind.__name__: kind for kind in (set, frozenset, list, tuple)
}
_PLAIN_KINDS = _COLLECTIONS.keys() | {
    OPAQUE,
    "bytes",
    "dict",
    "ordered-dict",
    "default-dict",
    "counter",
    "ndarray",
}
"""Kinds of calls that the machine replaces by their result: data, or the name that ``getattr`` finds."""
_OBJECT = Global("builtins", "object")
_BASES = {"AttributeDict": Global("builtins", "dict"), "TorchVersion": Global("builtins", "str")}
"""``base`` in ``copyreg._reconstructor(class, base, state)``, by constructor, if it isn't ``object``."""


class PickleStream:
    """Sequential reader of a pickle, with a window of its bytes in memory.

    Attributes:
        data: The window.
        at: Index of the next byte in the window.
    """

    # The interpreter makes one comparison before each opcode, of ``at`` with ``_stop_at``: beyond it, a frame
    # has ended, or fewer than ``_LONGEST_FIXED`` bytes are left in the window. So opcodes may read their
    # fixed-size arguments from ``data`` without a check, unless the pickle ends there: then an IndexError or
    # a struct.error means that it is truncated.

    def __init__(self, source: Readable, offset: int, end: int, where: str | None = None) -> None:
        """Begin at ``offset``; nothing from ``end`` on is read."""
        self.source = source
        self.where = where
        self._start = self._base = offset
        self.end = end
        self.data = b""
        self.at = 0
        self._stop_at = self._refill_at = -1
        self._frame_end: int | None = None
        self._window = _FIRST_WINDOW
        self._streamed = 0

    def _refill(self, needed: int = _LONGEST_FIXED) -> None:
        """Move the window to the position, with at least ``needed`` bytes unless the pickle ends before."""
        # The window grows from 4 KiB to 1 MiB, so that short pickles take short reads.
        self._base = self.position
        self.at = 0
        length = min(max(self._window, needed), self.end - self._base)
        self._window = min(4 * self._window, _WINDOW)
        self.data = self.source.read(self._base, length, self.where) if length > 0 else b""
        at_end = self._base + len(self.data) >= self.end
        self._refill_at = self.end if at_end else len(self.data) - _LONGEST_FIXED
        self._set_stop()
        if self._base - self._start - self._streamed > MAX_STREAM:
            raise self.excess(f"a pickle of more than {MAX_STREAM:,} bytes")

    # Frames ---------------------------------------------------------------------------------------

    def begin_frame(self, nbytes: int) -> bool:
        """Begin a frame of ``nbytes`` at the position; return whether the last one has ended."""
        is_next = self.is_between_frames
        self._frame_end = self.position + nbytes
        self._set_stop()
        return is_next

    def leave_frame(self) -> bool:
        """Leave the frame if its end is reached; return False if the last opcode ends beyond it."""
        end = self._frame_end
        if end is None or self.position < end:
            return True
        self._frame_end = None
        self._set_stop()
        return self.position == end

    @property
    def is_between_frames(self) -> bool:
        """Return whether no frame has begun, or the last one ends here."""
        return self._frame_end is None or self._frame_end == self.position

    def _set_stop(self) -> None:
        """Set ``_stop_at`` to the end of the frame, or to where the window has to be refilled."""
        frame_end = self.end if self._frame_end is None else self._frame_end
        self._stop_at = min(self._refill_at, frame_end - self._base - 1)

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        if self.at + nbytes > len(self.data):
            self.require(nbytes)
            self._refill(nbytes)
        begin = self.at
        self.at = end = begin + nbytes
        return self.data[begin:end]

    def line(self) -> bytes:
        """Return the bytes before the next line feed; without one, all but the last byte, as in CPython."""
        end, length = self.data.find(b"\n", self.at), _LINE
        while end < 0:
            self._refill(length)
            end = self.data.find(b"\n")
            if end < 0 and self._base + len(self.data) >= self.end:
                end = max(self.at, len(self.data) - 1)
            if end < 0 and length >= MAX_LINE:
                raise self.excess(f"a line of more than {MAX_LINE:,} bytes")
            length *= 2
        line = self.data[self.at : end]
        self.at = min(end + 1, len(self.data))
        return line

    def skip(self, nbytes: int) -> int:
        """Skip a payload and return its offset in the source."""
        self.require(nbytes)
        offset = self.position
        self._streamed += nbytes
        self.at += nbytes
        if self.at > len(self.data):
            self._refill()
        return offset

    def byte(self) -> int:
        """Return the next byte; an IndexError, which ``Interpreter.run`` expects, if the window has none."""
        number = self.data[self.at]
        self.at += 1
        return number

    def unpack(self, layout: struct.Struct) -> int:
        (number,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return number  # type: ignore[no-any-return]  # the layouts in use hold one number each

    @property
    def position(self) -> int:
        """Return the offset of the next byte in the source."""
        return self._base + self.at

    def require(self, nbytes: int) -> None:
        """Raise ``Truncated`` if fewer than ``nbytes`` follow."""
        if nbytes < 0 or self.position + nbytes > self.end:
            found = f"{nbytes:,} bytes announced at byte {self.position:,}"
            available = f"at most {self.end - self.position:,}"
            raise Truncated(self.source.path, found, expected=available, where=self.where)

    # Errors ---------------------------------------------------------------------------------------

    def _place(self) -> str:
        place = f"byte {self.position:,}"
        return place if self.where is None else f"{self.where}, {place}"

    def damage(self, found: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.source.path, found, where=self._place(), code="pickle-damaged")

    def truncation(self) -> Truncated:
        return Truncated(self.source.path, "truncated: the pickle ends early", where=self._place())

    def excess(self, found: str) -> LimitExceeded:
        return LimitExceeded(self.source.path, found, where=self._place())


class PickleBudget:
    """Budget that consecutive pickles share; a few bytes that make gigabytes are no checkpoint.

    Attributes:
        opcodes: Number of opcodes left.
        memory_used: Estimated size of the objects made so far, in bytes.
        memory_limit: Limit on ``memory_used``, in bytes.
    """

    __slots__ = ("memory_limit", "memory_used", "opcodes")

    def __init__(self, source: Readable, nbytes: int) -> None:
        """Allow for ``nbytes`` of a source, or for its stored bytes if it is compressed and has fewer."""
        stored = nbytes if source.stored >= source.size else min(nbytes, source.stored)
        opcodes, memory = (floor + each * stored for floor, each in zip(_FLOOR, _FOR_A_BYTE, strict=True))
        self.opcodes, self.memory_limit = min(opcodes, MAX_OPCODES), min(memory, MAX_MADE)
        self.memory_used = 0


class PickleMachine(PickleStream, ABC):
    """State of reading one pickle; ``pickle`` has its names and calls so far, also after an error."""

    def __init__(
        self,
        source: Readable,
        offset: int,
        end: int,
        where: str | None = None,
        budget: PickleBudget | None = None,
        *,
        has_arrays: bool = False,
    ) -> None:
        """Prepare to read a pickle that starts at ``offset`` and ends before ``end``.

        ``has_arrays``: whether it is read as joblib does, which writes arrays between the opcodes.
        """
        super().__init__(source, offset, end, where)
        self._has_arrays = has_arrays
        self.budget = budget or PickleBudget(source, end - offset)
        self.pickle = Pickle()
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self._globals: dict[tuple[str, str], Global] = {}
        self.functions: set[int] = set()
        """Addresses of functions and unknown classes; to store one in the object is suspicious."""
        self.pushed_functions = 0
        """Pushes of such names minus their calls; if not 0 at the end, the object is searched for them."""
        self._objects: list[object] = []
        """Calls that run unknown code, which could store functions among their arguments."""
        self._dtype_fields: dict[int, object] = {}
        """Field dictionaries of NumPy types by address: to change one would change a type already judged."""
        self._hashes: dict[int, tuple[object, int]] = {}
        self._odd_keys = self._containers = 0
        self.frame_is_cut = False  # set by FRAME if fewer bytes follow than it announces

    # The stack ------------------------------------------------------------------------------------

    def push(self, node: object) -> None:
        """Push a node, and charge its memory."""
        budget = self.budget
        budget.memory_used += _COSTS.get(type(node), ENTRY)
        if budget.memory_used > budget.memory_limit:
            self.charge(0)  # raises
        self.stack.append(node)

    def charge(self, nbytes: int) -> None:
        """Charge bytes of memory to the budget."""
        budget = self.budget
        budget.memory_used += nbytes
        if budget.memory_used > budget.memory_limit:
            raise self.excess(f"the pickle's objects take more than {budget.memory_limit:,} bytes of memory")

    def push_text(self, text: str | bytes) -> None:
        """Push a string or byte string, and charge its memory."""
        self.charge(sys.getsizeof(text))
        self.stack.append(text)

    def push_payload(self, nbytes: int, kind: str) -> None:
        """Skip bytes, and push a ``Payload`` that refers to them."""
        offset = self.skip(nbytes)
        self.push(Payload(self.source, offset, nbytes, kind))

    def remember(self, index: int) -> None:
        """Store the top of the stack in the memo."""
        # CPython's memo in C is an array: LONG_BINPUT with index 0x7fffffff alone makes it allocate 16 GiB.
        # Here the memo is a dictionary, but a pickle with such an index is refused all the same.
        if index > MAX_OPCODES:
            raise self.excess(f"memo index {index:,} is too large")
        self.memo[index] = self.stack[-1]
        self.budget.memory_used += ENTRY  # compared with the limit by the next push, or at the end

    def recall(self, index: int) -> None:
        """Push an entry of the memo."""
        try:
            node = self.memo[index]
        except KeyError:
            raise self.damage(f"the memo has no entry {index}") from None
        if type(node) is Global:
            self.pushed_functions += id(node) in self.functions
        self.stack.append(node)

    def pop_to_mark(self) -> list[Any]:
        """Return the nodes pushed since the last mark, and remove the mark."""
        if not self.marks:
            raise self.damage("an opcode needs a mark, but none is set")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def hashable(self, key: object) -> object:
        """Return a dictionary's key once it is known that hashing it is safe and fast."""
        # Python doesn't cache the hash of a tuple, so nested tuples that share their parts take exponential
        # time. The hash of an integer is its remainder modulo 2^61 - 1, so that keys which all collide are
        # easily made, and a dictionary of n of them takes n^2 comparisons; a thousand are no accident.
        kind = type(key)
        if kind is str or kind is bytes or (kind is int and abs(key) < _HASH_MODULUS):  # type: ignore[arg-type]
            return key
        self._check_key_parts(key)
        if key is None or isinstance(key, Call | Global | Persistent | Payload):
            return key  # the node is hashed by its address, or by a module and a name
        # Only the number of different keys by hash is kept, with the first: equal keys are no collision.
        digest = hash(key)
        first, others = self._hashes.get(digest, (key, 0))
        if key != first:
            others += 1
            if others > _MAX_COLLISIONS:
                raise self.excess(f"more than {_MAX_COLLISIONS:,} keys with the same hash")
        self._hashes[digest] = (first, others)
        return key

    def _check_key_parts(self, key: object) -> None:
        """Raise if a key has too many parts, counting a shared part each time that it is hashed."""
        pending: list[Iterable[Any]] = [(key,)]
        count = -1  # without the key itself
        while pending:
            for part in pending.pop():
                count += 1
                if count > _MAX_KEY_PARTS:
                    raise self.excess(f"a key of more than {_MAX_KEY_PARTS:,} parts")
                if isinstance(part, tuple | frozenset):
                    pending.append(part)
                elif isinstance(part, list | dict | set | bytearray):
                    raise self.damage(f"a {type(part).__name__} in a dictionary's key")
                elif isinstance(part, int):
                    self.charge(part.bit_length())
                elif isinstance(part, Call):
                    pending.append(self._hashed_parts(part))
                elif isinstance(part, Persistent):  # a loader may return a part of the id
                    pending.append((part.id,))
        self.charge(ENTRY * count)

    def _hashed_parts(self, key: Call) -> Iterable[Any]:
        """Return the parts of an object that its hash covers; few objects of most kinds may be keys."""
        if key.kind == "record":
            states = key.state if isinstance(key.state, tuple) else (key.state,)
            return [value for state in states if isinstance(state, dict) for value in state.values()]
        if key.kind in _SLOW_KEYS and isinstance(key.function, Global):
            self.pickle.unknown.setdefault(key.function, "compares")
        self._odd_keys += key.kind not in (OPAQUE, "size")
        if self._odd_keys > _MAX_COLLISIONS:
            raise self.excess(f"more than {_MAX_COLLISIONS:,} objects as keys")
        given = (arg if isinstance(arg, list | tuple | set | frozenset) else (arg,) for arg in key.args)
        return chain.from_iterable(given)

    def set_items(self, target: object, pairs: Sequence[tuple[Any, Any]]) -> None:
        if isinstance(target, dict):
            if self._dtype_fields and id(target) in self._dtype_fields:
                self.note_misuse("the fields of a NumPy type are changed")
            self.charge(ENTRY * len(pairs))
            for key, value in pairs:
                target[key if type(key) is str else self.hashable(key)] = value
        elif isinstance(target, Call):
            if not takes_pairs(target, pairs):
                self.note_misuse(f"items are set on the object made by {_maker(target.function)}")
            target.pairs.extend(pairs)
        elif isinstance(target, list):
            for key, value in pairs:
                if not isinstance(key, int):
                    raise self.damage(f"a list index that is {_kind(key)}")
                target[key] = value
        elif pairs:
            self._refuse_items(target, "set on")

    def extend(self, target: object, items: list[Any]) -> None:
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Call):
            if not takes_items(target):
                self.note_misuse(f"items are appended to the object made by {_maker(target.function)}")
            target.items.extend(items)
            most = target.args[1] if target.kind == "deque" and len(target.args) > 1 else None
            if isinstance(most, int) and len(target.items) > most:
                self.note_misuse(f"more than {most:,} items are appended to a deque of that maximum length")
        elif isinstance(target, set):
            self.charge(ENTRY * len(items))
            target.update(map(self.hashable, items))
        elif items or isinstance(target, DictSubclass):
            self._refuse_items(target, "appended to")

    # Names and calls ------------------------------------------------------------------------------

    def import_name(self, module: str, name: str) -> None:
        self.push(self._name(*python3_name(module, name)))

    def _name(self, module: str, name: str) -> Global:
        """Return the node of a name that is about to be pushed."""
        found = self._globals.get((module, name))
        if found is None:
            found = self._globals[module, name] = Global(module, name)
            self.pickle.names[found] = self.position
            if value_kind(module, name) is None:
                self.functions.add(id(found))
        self.pushed_functions += id(found) in self.functions
        return found

    def call(self, function: object, args: object, kwargs: object = None, *, is_new: bool = False) -> None:
        """Judge a call, and push its result."""
        # The call is judged here and not in the finished object: a pickle can pop the result from the stack.
        if not isinstance(args, tuple):
            self.note_computed(args, "arguments")
            raise self.damage(f"a call with {_kind(args)} instead of arguments")
        self.pushed_functions -= id(function) in self.functions
        if not isinstance(function, Global):
            self.note_misuse(f"{_kind(function)} is called")
        elif function.name == "_reconstructor" and len(args) == 3 and isinstance(args[0], Global):
            # Protocols below 2: `object.__new__(class)`, or `base.__new__(class, state)` for a class with
            # another base. Both are made into the call of the class that later protocols have.
            is_empty = args[1] == _OBJECT and args[2] is None
            base = _BASES.get(args[0].name, _OBJECT) if is_constructor(args[0]) else args[1]
            if is_empty or (args[1] == base != _OBJECT):
                function, args, is_new = args[0], () if is_empty else args[2:], is_empty
        call = Call(function, args, kwargs, is_new=is_new)
        self.pickle.calls += 1
        if isinstance(function, Global):
            self._judge(call, function)
        self.push(self._plain(call) if call.kind in _PLAIN_KINDS else call)

    def _judge(self, call: Call, function: Global) -> None:
        meaning = evaluate(call, self.charge)
        if meaning is Trust.DANGEROUS:
            self.pickle.unsafe.append((self.position, call))
        elif meaning is Trust.UNKNOWN:
            made = class_to_create(call)
            self.pickle.unknown[made or function] = "calls" if made is None else "creates"
            self._objects.append(call)
        elif call.kind in ("deque", "default-dict"):
            self._count_container(function)
        elif function.name == "_load_from_bytes":
            self.charge(_COST_OF_LOADING)
            content = call.args[0]
            place = (content.offset, content.kind) if isinstance(content, Payload) else content
            self.pickle.nested[place] = content
        elif function.name == "eval":
            # Paddle pickles an array as ``eval("data", {"data": array})``. ``eval`` adds ``__builtins__`` to
            # that dictionary, where the pickle could fetch it from: so it counts as stored.
            self.pushed_functions += 1
            call.args[1]["__builtins__"] = function

    def _count_container(self, maker: Any) -> None:
        """Count a container that Python frees recursively: enough nested ones overflow the C stack."""
        self._containers += 1
        if self._containers > _MAX_CONTAINERS:
            self.pickle.unknown.setdefault(maker, "nests")

    def set_state(self, target: object, state: Any) -> None:
        """Set the state of a node for BUILD, and judge it; an object takes one state only."""
        if not isinstance(target, Call | DictSubclass):
            self.note_misuse(f"a state is set on {_kind(target)}")
            return
        if target.state is not None:  # the second could replace one that was judged safe
            self.note_misuse("a state is set twice on one object")
            return
        self.charge(_COST_OF_STATE + sum(map(size_of, state if isinstance(state, tuple) else (state,))))
        target.state = state
        if isinstance(target, Call) and target.kind in KINDS:
            self.charge(ENTRY * number_of_parts(state))
        meaning = judge_state(target, state)
        made = target.kind if isinstance(target, DictSubclass) else target.function
        if meaning is Trust.DANGEROUS:
            self.note_misuse(f"an unexpected state is set on the object made by {_maker(made)}")
        elif meaning is Trust.UNKNOWN and isinstance(made, Global):
            self.pickle.unknown.setdefault(made, "fills")
        elif isinstance(target, Call) and target.kind == "ndarray" and isinstance(state[4], list):
            self._count_container(target.function)
        if isinstance(target, Call) and target.kind == JOBLIB_ARRAY and self._has_arrays:
            self.stack[-1] = self.joblib_array(state)
        if isinstance(target, Call) and (fields := fields_of(target)) is not None:
            self._dtype_fields[id(fields)] = fields

    @abstractmethod
    def joblib_array(self, state: Any) -> object:
        """Read the array that follows in the stream; its wrapper's state describes it.

        Returns:
            The call by which NumPy would pickle the array, or for an array of objects the inner object.
        """

    def _plain(self, call: Call) -> object:
        """Return the result of a call: data, the name that ``getattr`` finds, or the call itself."""
        function, args, kind = call.function, call.args, call.kind
        if kind == OPAQUE:
            found = attribute_name(call)
            return call if found is None else self._name(found.module, found.name)
        if not isinstance(function, Global):
            return call
        if kind in _COLLECTIONS:
            return self._collection(call, function)
        if any(isinstance(arg, Call) for arg in args):
            return call
        if function.name == "eval":
            return args[1]["data"]
        if kind == "bytes":
            return self._latin1_bytes(args[0]) if args else b""
        if kind == "default-dict":
            return DictSubclass(function, factory=args[0] if args else None)
        made: dict[Any, Any] = {} if kind == "dict" else DictSubclass(function)
        for source in args:
            for key, value in source.items() if isinstance(source, dict) else source:
                made[self.hashable(key)] = value
        return made

    def _collection(self, call: Call, maker: Global) -> object:
        """Return the list, tuple or set that a call makes."""
        # Python's ``tuple`` returns a tuple that it is given, and copies nothing. Here ``tuple(t)`` stays a
        # call, and ``tuple`` of that call is the same call again.
        given = call.args[0] if call.args else ()
        items = given.args[0] if isinstance(given, Call) else given
        if call.kind == "tuple" and isinstance(items, tuple):
            return given if given is not items or not call.args else call
        if maker.module != "builtins":
            return items  # ``torch.jit._pickle`` builds typed lists from a list
        return _COLLECTIONS[call.kind](map(self.hashable, items) if "set" in call.kind else items)

    def _latin1_bytes(self, text: Any) -> object:
        """Return the bytes that protocol 2 stores as ``_codecs.encode(text, "latin1")``."""
        if isinstance(text, Payload):
            return Payload(text.source, text.offset, text.nbytes, "latin1")
        self.charge(len(text))
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError:
            raise self.damage("bytes written with characters outside Latin-1") from None

    # Errors ---------------------------------------------------------------------------------------

    def _refuse_items(self, target: object, what: str) -> None:
        """Note that items are added to a node that may take them; raise if it never could."""
        if not isinstance(target, Global | Persistent | DictSubclass):
            raise self.damage(f"items are {what} {_kind(target)}")
        self.note_misuse(f"items are {what} {_kind(target)}")

    def note_computed(self, value: object, what: str) -> None:
        """Note the use of a value that only a call or the loader could compute; the machine can't go on."""
        if isinstance(value, Call | Persistent):
            self.note_misuse(f"{what} are {_kind(value)}")

    def note_misuse(self, sentence: str) -> None:
        """Record an operation that no honest pickle has, up to a limit."""
        if len(self.pickle.misuse) < _MOST_MISUSE:
            self.pickle.misuse.append((self.position, sentence))


def _maker(function: object) -> str:
    """Return the text of a called function; only of a name, as others can be as large as the pickle."""
    return str(function) if isinstance(function, Global) else _kind(function)


_NOUNS = {
    type(None): "None",
    int: "an integer",
    str: "a text",
    dict: "a dictionary",
    DictSubclass: "a dictionary",
    frozenset: "a frozen set",
    object: "a marker",
}


def _kind(node: object) -> str:
    """Return the noun of a node for a message."""
    if isinstance(node, Global):
        return f"the name {node}"
    if isinstance(node, Call):
        return "the result of a call"
    return _NOUNS.get(type(node)) or f"a {type(node).__name__.lower()}"
