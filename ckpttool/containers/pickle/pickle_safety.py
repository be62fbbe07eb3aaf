"""Safety findings of pickles, from the names and calls that the interpreter records.

Several pickles may follow each other in one file, and ``pickle.load`` reads the next one at each call: so all
are interpreted. If one breaks off, the rest is searched for names.
"""

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
    python3_name,
    trust_of_unlisted,
    value_kind,
)
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.readable import Buffer, Readable
from ckpttool.core.report import Finding, error, not_scanned, warning

MAX_PICKLES = 10_000
"""Limit on consecutive pickles in one file."""

_SEARCHED_BYTES = 1 << 20
"""Number of bytes that are searched for names after the position where a pickle broke off."""
_MAX_NAMES = 100
_LONGEST_REACH = 600  # bytes before STACK_GLOBAL: module and name have at most 255 each
_LONGEST_NAME = 255
_NAME_BYTES = f"{string.ascii_letters}{string.digits}_.".encode()
_TEXT_OR_IMPORT = re.compile(rb"\x93|[\x8cU](?=(.))", re.DOTALL)
"""STACK_GLOBAL, or a string with its length, wherever one could begin."""
_NAME = re.compile(rb"[A-Za-z_][\w.]*")

_STORAGE_HEAD = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", re.DOTALL
)
"""Protocol and magic number of PyTorch's format before zips; ``torch.load`` looks for nothing else before it
tries a zip."""
_PICKLES_OF_A_STORAGE = 5
_COUNT, _WIDEST_ELEMENT = 8, 16  # bytes of the number of elements, and of one complex128


class PickleSequence(NamedTuple):
    """Consecutive pickles with their safety findings.

    ``trailing``: number of bytes after the last pickle.
    """

    pickles: tuple[Pickle, ...]
    safety: tuple[Finding, ...]
    trailing: int = 0


def read_pickles(
    source: Readable, offset: int, end: int, where: str | None = None, *, has_arrays: bool = False
) -> PickleSequence:
    """Interpret all pickles between two offsets; ``has_arrays`` as in ``Interpreter``.

    Raises:
        DamagedCheckpoint: The first isn't a whole pickle, or one exceeds a budget. Its ``safety`` has the
            findings about all names and calls up to there, and about names after it.
    """
    budget = PickleBudget(source, end - offset)
    pickles: list[Pickle] = []
    safety: dict[Finding, None] = {}
    at = offset
    while not pickles or at < end:
        try:
            if len(pickles) == MAX_PICKLES:
                found = f"more than {MAX_PICKLES:,} consecutive pickles"
                raise LimitExceeded(source.path, found, where=where)
            pickle = run(Interpreter(source, at, end, where, budget, has_arrays=has_arrays))
        except DamagedCheckpoint as failure:
            safety |= dict.fromkeys(failure.safety)
            if not pickles or isinstance(failure, LimitExceeded):
                failure.safety = tuple(safety)
                raise
            break
        safety |= dict.fromkeys(findings_of_pickle(pickle, where))
        pickles.append(pickle)
        at = pickle.end
    return PickleSequence(tuple(pickles), tuple(safety), end - at)


def pickle_findings(source: Readable, offset: int, end: int, where: str) -> tuple[Finding, ...]:
    """Return the safety findings of the pickles between two offsets; damage is a finding, too."""
    try:
        return read_pickles(source, offset, end, where).safety
    except DamagedCheckpoint as failure:
        return (*failure.safety, not_scanned(where, f"a damaged pickle: {failure.reason}"))


def read_joblib(source: Readable) -> PickleSequence:
    """Interpret the pickles of a file as ``joblib.load`` does; raises as ``read_pickles``.

    The findings are also those of ``pickle.load``, which interprets the bytes of arrays as opcodes.
    """
    try:
        read = read_pickles(source, 0, source.size, has_arrays=True)
    except DamagedCheckpoint as failure:
        failure.safety = tuple(dict.fromkeys((*failure.safety, *_safety_without_arrays(source, 0))))
        raise
    begins = (0, *(pickle.end for pickle in read.pickles))
    begin = next(
        (at for at, pickle in zip(begins, read.pickles, strict=False) if pickle.arrays), begins[-1]
    )  # both readings agree up to the first pickle with an array
    safety = _safety_without_arrays(source, begin) if begin < source.size else ()
    return read._replace(safety=tuple(dict.fromkeys((*read.safety, *safety))))


def _safety_without_arrays(source: Readable, begin: int) -> tuple[Finding, ...]:
    """Return the findings of ``pickle.load``, which fails at joblib's padding."""
    interpreter = Interpreter(source, begin, source.size)
    with suppress(DamagedCheckpoint):
        interpreter.run()
    return findings_of_pickle(interpreter.pickle)


def run(interpreter: Interpreter) -> Pickle:
    """Run an interpreter; an error that it raises has the safety findings so far."""
    try:
        return interpreter.run()
    except DamagedCheckpoint as failure:
        # Without a name or a protocol, the bytes could be anything, and names in them chance.
        pickle, where = interpreter.pickle, interpreter.where
        behind = _names_after_break(interpreter) if pickle.names or pickle.protocol else ()
        dangerous = (name for name in behind if _import_trust(name) is Trust.DANGEROUS)
        found = (_dangerous_import(name, where) for name in islice(dangerous, _MAX_NAMES))
        failure.safety = tuple(dict.fromkeys((*findings_of_pickle(pickle, where), *found)))
        raise


def findings_of_pickle(pickle: Pickle, where: str | None = None) -> tuple[Finding, ...]:
    """Return the findings of a pickle: errors for dangerous names and calls, warnings for unknown code."""
    findings: dict[Finding, None] = {}
    misfits: dict[Finding, None] = {}
    called = {call.function for _, call in pickle.unsafe if isinstance(call.function, Global)}
    for name in pickle.names:
        meaning = _import_trust(name)
        if meaning is Trust.DANGEROUS:
            findings[_dangerous_import(name, where)] = None
        elif name in called:
            how = "" if meaning is Trust.KNOWN else " with unexpected arguments"
            findings[error("unsafe-call", f"loading it would call {name}{how}", where)] = None
        elif pickle.unknown.get(name) in ("calls", "creates") and is_constructor(name):
            message = f"loading it calls {name} with arguments that are not known to be harmless"
            misfits[warning("unknown-class", message, where)] = None
        elif name in pickle.unknown or meaning is not Trust.PLAIN:
            verb = pickle.unknown.get(name, "imports")
            message = f"loading it {verb} {name}: {_CODE[verb]}"
            findings[warning("unknown-class", message, where)] = None
    if not all(map(_is_storage, pickle.nested.values())):
        found = error("unsafe-call", "loading it would load bytes that are not a plain storage", where)
        findings[found] = None
    for position, sentence in pickle.misuse:
        place = f"byte {position:,}" if where is None else f"{where}, byte {position:,}"
        findings[error("unsafe-pickle", f"{sentence}, which no honest pickle does", place)] = None
    # Constructors with unknown arguments are only reported if nothing else is: otherwise the arguments come
    # from that other code.
    return tuple(findings or misfits)


_CODE = {
    "creates": "code of the class runs",
    "calls": "its code runs",
    "fills": "its content is not known to be plain",
    "compares": "comparing them as keys may take very long",
    "nests": "nesting this many crashes the process",
    "stores": "it is a function or class, whose code may run",
    "imports": "code of its module runs",
}


@contextmanager
def attach_safety(safety: Iterable[Finding]) -> Iterator[None]:
    """Add safety findings to an error that is raised inside."""
    try:
        yield
    except DamagedCheckpoint as failure:
        failure.safety = tuple(dict.fromkeys((*safety, *failure.safety)))
        raise


def _dangerous_import(name: Global, where: str | None) -> Finding:
    return error("unsafe-import", f"loading it would import {name}", where)


def _import_trust(name: Global) -> Trust:
    """Return the trust in the import of a name alone."""
    is_listed = (
        is_constructor(name) or value_kind(name.module, name.name) or is_object(name.module, name.name)
    )
    return Trust.PLAIN if is_listed else trust_of_unlisted(name.module, name.name)


# Storages within pickles --------------------------------------------------------------------------------


def _is_storage(content: object) -> bool:
    """Return whether bytes are one storage in PyTorch's format before zips, with harmless pickles."""
    # Five pickles (magic number, protocol, system, the object, the keys of its storages), then the number of
    # elements in 8 bytes, and the elements. ``_load_from_bytes`` passes such bytes to ``torch.load``.
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
            if pickle.nested or findings_of_pickle(pickle):
                return False
            roots.append(pickle.root)
            at = pickle.end
    except DamagedCheckpoint:
        return False
    *_, storage, keys = roots
    if not isinstance(storage, Persistent) or kind_of(storage) != "storage" or keys != [storage.id[2]]:
        return False
    # A storage with more elements than the bytes have would keep uninitialized memory.
    count = int.from_bytes(inner.read(at, _COUNT), "little")
    return bool(count == storage.id[4] and count <= end - at - _COUNT <= _WIDEST_ELEMENT * count)


# After the position where a pickle broke off --------------------------------------------------------------


def _names_after_break(interpreter: Interpreter) -> Iterable[Global]:
    """Return the names that opcodes after the break seem to import: another reader may get there."""
    at = interpreter.position
    nbytes = min(interpreter.end - at, _SEARCHED_BYTES)
    data = interpreter.source.read(at, nbytes) if nbytes > 0 else b""
    found = chain(_names_in_lines(data), _names_on_the_stack(data))
    return dict.fromkeys(Global(*python3_name(*name)) for name in found)


def _names_in_lines(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield module and name of each GLOBAL or INST that two lines could be."""
    # After damage it is unknown where an opcode begins: the module may follow any ``c`` or ``i`` in the first
    # line, if only characters of a name come after it.
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
    """Yield module and name for each STACK_GLOBAL: the last two short strings that could be names."""
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
