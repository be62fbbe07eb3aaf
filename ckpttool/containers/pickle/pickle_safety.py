"""What loading pickles could run: the interpreter's record of names and calls, told as findings."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice, pairwise
from typing import NamedTuple

from ckpttool.containers.pickle.constructors import is_constructor, kind_of
from ckpttool.containers.pickle.interpreter import Interpreter
from ckpttool.containers.pickle.machine import PickleBudget
from ckpttool.containers.pickle.pickle_nodes import (
    Global,
    Payload,
    Persistent,
    Pickle,
    Trust,
    is_object,
    modern,
    stranger,
    value_kind,
)
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.readable import Buffer, Readable
from ckpttool.core.report import Finding, error, not_scanned, warning

MAX_PICKLES = 10_000
"""The most pickles, one after the other, that one file may hold."""

_SEARCHED_BYTES = 1 << 20
"""How many bytes after the place where a pickle broke off are searched for names."""
_MAX_NAMES = 100
_LONGEST_REACH = 600  # module and name, of 255 bytes at most, lie before the opcode that imports them
_LONGEST_NAME = 255
_NAME_BYTES = f"{string.ascii_letters}{string.digits}_.".encode()
_TEXT_OR_IMPORT = re.compile(rb"\x93|[\x8cU](?=(.))", re.DOTALL)
"""STACK_GLOBAL, or a string with its length, wherever one could begin."""
_NAME = re.compile(rb"[A-Za-z_][\w.]*")

_STORAGE_HEAD = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", re.DOTALL
)
"""The magic number of PyTorch's old serialization, after its protocol: ``torch.load`` takes nothing else for
that, and what begins otherwise for a zip."""
_PICKLES_OF_A_STORAGE = 5
_COUNT, _WIDEST_ELEMENT = 8, 16  # bytes of the number of elements, and of one complex128


class PickleSequence(NamedTuple):
    """Pickles that are one after the other, and what loading them could run.

    ``trailing`` is the number of bytes after the last one that are no pickle.
    """

    pickles: tuple[Pickle, ...]
    safety: tuple[Finding, ...]
    trailing: int = 0


def read_pickles(
    source: Readable, offset: int, end: int, where: str | None = None, *, has_arrays: bool = False
) -> PickleSequence:
    """Interpret all pickles between two offsets, in bytes; ``has_arrays`` as ``Interpreter`` has it.

    An error is raised if the first is not a whole pickle, or one asks for more than the budgets allow; its
    ``safety`` has what was seen before and behind.
    """
    budget = PickleBudget(source, end - offset)
    pickles: list[Pickle] = []
    safety: dict[Finding, None] = {}
    at = offset
    while not pickles or at < end:
        try:
            if len(pickles) == MAX_PICKLES:
                found = f"more than {MAX_PICKLES:,} pickles one behind the other"
                raise LimitExceeded(source.path, found, where=where)
            pickle = run(Interpreter(source, at, end, where, budget, has_arrays=has_arrays))
        except DamagedCheckpoint as failure:
            safety |= dict.fromkeys(failure.safety)
            if not pickles or isinstance(failure, LimitExceeded):
                failure.safety = tuple(safety)
                raise
            break
        safety |= dict.fromkeys(judge(pickle, where))
        pickles.append(pickle)
        at = pickle.end
    return PickleSequence(tuple(pickles), tuple(safety), end - at)


def pickle_findings(source: Readable, offset: int, end: int, where: str) -> tuple[Finding, ...]:
    """Return what loading the pickles between two offsets could run; damage is one of the findings."""
    try:
        return read_pickles(source, offset, end, where).safety
    except DamagedCheckpoint as failure:
        return (*failure.safety, not_scanned(where, f"a pickle that breaks off: {failure.reason}"))


def read_joblib(source: Readable) -> PickleSequence:
    """Interpret the pickles of a file as ``joblib.load`` does; errors are those of ``read_pickles``.

    It is judged as ``pickle.load`` reads it, too, which takes the bytes of arrays for opcodes.
    """
    try:
        read = read_pickles(source, 0, source.size, has_arrays=True)
    except DamagedCheckpoint as failure:
        failure.safety = tuple(dict.fromkeys((*failure.safety, *_safety_without_arrays(source, 0))))
        raise
    begins = (0, *(pickle.end for pickle in read.pickles))
    begin = next(
        (at for at, pickle in zip(begins, read.pickles, strict=False) if pickle.arrays), begins[-1]
    )  # up to there both read the same
    safety = _safety_without_arrays(source, begin) if begin < source.size else ()
    return read._replace(safety=tuple(dict.fromkeys((*read.safety, *safety))))


def _safety_without_arrays(source: Readable, begin: int) -> tuple[Finding, ...]:
    """Judge what ``pickle.load`` comes to, which ends where padding of joblib's begins."""
    interpreter = Interpreter(source, begin, source.size)
    with suppress(DamagedCheckpoint):
        interpreter.run()
    return judge(interpreter.pickle)


def run(interpreter: Interpreter) -> Pickle:
    """Run an interpreter, and say what it saw, should it break off."""
    try:
        return interpreter.run()
    except DamagedCheckpoint as failure:
        # Without a name or a protocol it could be anything, and names in it chance.
        pickle, where = interpreter.pickle, interpreter.where
        behind = _names_after_break(interpreter) if pickle.names or pickle.protocol else ()
        dangerous = (name for name in behind if _import_trust(name) is Trust.DANGEROUS)
        found = (_dangerous_import(name, where) for name in islice(dangerous, _MAX_NAMES))
        failure.safety = tuple(dict.fromkeys((*judge(pickle, where), *found)))
        raise


def judge(pickle: Pickle, where: str | None = None) -> tuple[Finding, ...]:
    """Return an error for all that is known to be dangerous, a warning for all code of which nobody knows."""
    findings: dict[Finding, None] = {}
    misfits: dict[Finding, None] = {}
    called = {call.function for _, call in pickle.unsafe if isinstance(call.function, Global)}
    for name in pickle.names:
        meaning = _import_trust(name)
        if meaning is Trust.DANGEROUS:
            findings[_dangerous_import(name, where)] = None
        elif name in called:
            how = "" if meaning is Trust.KNOWN else " with arguments that it should not have"
            findings[error("unsafe-call", f"loading it would call {name}{how}", where)] = None
        elif pickle.unknown.get(name) in ("calls", "creates") and is_constructor(name):
            message = f"loading it calls {name} with arguments that are not known to be harmless"
            misfits[warning("unknown-class", message, where)] = None
        elif name in pickle.unknown or meaning is not Trust.PLAIN:
            verb = pickle.unknown.get(name, "imports")
            message = f"loading it {verb} {name}: {_CODE[verb]}"
            findings[warning("unknown-class", message, where)] = None
    if not all(map(_is_storage, pickle.stored.values())):
        found = error("unsafe-call", "loading it would load bytes that hold no mere storage", where)
        findings[found] = None
    for position, sentence in pickle.misuse:
        place = f"byte {position:,}" if where is None else f"{where}, byte {position:,}"
        findings[error("unsafe-pickle", f"{sentence}, which no honest pickle does", place)] = None
    # The arguments are what is unknown, where something else is.
    return tuple(findings or misfits)


_CODE = {
    "creates": "code of the class runs",
    "calls": "its code runs",
    "fills": "what it is filled with is not known to be plain",
    "compares": "where these are keys, it may take very long to compare them",
    "nests": "so many of these, if one holds the other, end the process",
    "stores": "it is a function or class, whose code may run",
    "imports": "code of its module runs",
}


@contextmanager
def attach_safety(safety: Iterable[Finding]) -> Iterator[None]:
    """Let the error that ends the reading say what loading could run, as far as it is known by then."""
    try:
        yield
    except DamagedCheckpoint as failure:
        failure.safety = tuple(dict.fromkeys((*safety, *failure.safety)))
        raise


def _dangerous_import(name: Global, where: str | None) -> Finding:
    return error("unsafe-import", f"loading it would import {name}", where)


def _import_trust(name: Global) -> Trust:
    """Return what it means that loading imports a name, whatever is done with it then."""
    is_listed = (
        is_constructor(name) or value_kind(name.module, name.name) or is_object(name.module, name.name)
    )
    return Trust.PLAIN if is_listed else stranger(name.module, name.name)


# Storages within pickles --------------------------------------------------------------------------------


def _is_storage(content: object) -> bool:
    """Return whether bytes are one storage in PyTorch's old serialization, with harmless pickles."""
    if isinstance(content, Payload) and content.kind != "latin1":
        inner, at, end = content.source, content.offset, content.offset + content.nbytes
    else:
        data = content.read() if isinstance(content, Payload) else content
        if not isinstance(data, bytes):
            return False  # a text of other characters
        inner, at, end = Buffer("", data), 0, len(data)
    if _STORAGE_HEAD.match(inner.read(at, min(32, end - at))) is None:
        return False
    budget = PickleBudget(inner, end - at)
    roots: list[object] = []
    try:
        for _ in range(_PICKLES_OF_A_STORAGE):
            pickle = Interpreter(inner, at, end, budget=budget).run()
            if pickle.stored or judge(pickle):
                return False
            roots.append(pickle.root)
            at = pickle.end
    except DamagedCheckpoint:
        return False
    *_, storage, keys = roots
    if not isinstance(storage, Persistent) or kind_of(storage) != "storage" or keys != [storage.id[2]]:
        return False
    # Elements that the file doesn't have would be whatever the memory holds.
    count = int.from_bytes(inner.read(at, _COUNT), "little")
    return bool(count == storage.id[4] and count <= end - at - _COUNT <= _WIDEST_ELEMENT * count)


# Behind the place where a pickle broke off ----------------------------------------------------------------


def _names_after_break(interpreter: Interpreter) -> Iterable[Global]:
    """Return the names that opcodes after the break import: another reader may come so far."""
    at = interpreter.position
    nbytes = min(interpreter.end - at, _SEARCHED_BYTES)
    data = interpreter.source.read(at, nbytes) if nbytes > 0 else b""
    found = chain(_names_in_lines(data), _names_on_the_stack(data))
    return dict.fromkeys(Global(*modern(*name)) for name in found)


def _names_in_lines(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield each two lines that could be names behind GLOBAL or INST, wherever that could be in the first."""
    *lines, _ = data.split(b"\n")
    for before, line in pairwise(lines):
        if len(line) > _LONGEST_NAME or not _NAME.fullmatch(line):
            continue
        end = before[-_LONGEST_NAME - 1 :]
        letters = end[len(end.rstrip(_NAME_BYTES)) :]
        for at, letter in enumerate(letters):
            if letter in b"ci" and _NAME.fullmatch(letters, at + 1):
                yield letters[at + 1 :].decode(), line.decode()


def _names_on_the_stack(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield each two short strings that could be names and lie last before what imports from the stack."""
    (module_at, module), (name_at, name) = (-_LONGEST_REACH, ""), (-_LONGEST_REACH, "")
    for match in _TEXT_OR_IMPORT.finditer(data):
        at = match.start()
        if match[1] is None:
            if at - module_at < _LONGEST_REACH and module:
                yield module, name
        elif at + 2 + match[1][0] <= len(data):
            text = data[at + 2 : at + 2 + match[1][0]]
            if _NAME.fullmatch(text):
                (module_at, module), (name_at, name) = (name_at, name), (at, text.decode())
