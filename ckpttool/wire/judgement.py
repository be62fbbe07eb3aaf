"""What loading a pickle could run: the interpreter's record, judged by the trust lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import CheckpointError, DamagedCheckpoint, LimitExceeded
from ckpttool.report import Finding, error, warning
from ckpttool.wire.interpreter import Interpreter
from ckpttool.wire.pickled import Call, Global, Payload, Pickle
from ckpttool.wire.readable import Readable
from ckpttool.wire.source import Buffer
from ckpttool.wire.trust import Trust, trust

MAX_PICKLES = 10_000
"""The most pickles, one behind the other, that one file may hold."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Pickles that lie one behind the other, and what loading them could run.

    ``trailing`` is the number of bytes behind the last one that are no pickle.
    """

    pickles: tuple[Pickle, ...]
    safety: tuple[Finding, ...]
    trailing: int = 0


def read_pickles(source: Readable, offset: int, end: int, where: str | None = None) -> Judged:
    """Interpret all pickles between two offsets, in bytes.

    Raises:
        DamagedCheckpoint: The first is not a whole pickle; ``safety`` says what was seen before.
        LimitExceeded: One asks for more than the budgets allow.
    """
    first = read_pickle(source, offset, end, where)
    pickles, safety = [first], list(judge(first, where))
    while pickles[-1].end < end and len(pickles) < MAX_PICKLES:
        interpreter = Interpreter(source, pickles[-1].end, end, where)
        try:
            pickles.append(interpreter.run())
        except DamagedCheckpoint:
            safety += judge(interpreter.pickle, where)
            break
        safety += judge(pickles[-1], where)
    if len(pickles) == MAX_PICKLES and pickles[-1].end < end:
        found = f"more than {MAX_PICKLES:,} pickles one behind the other"
        failure = LimitExceeded(source.path, found, where=where)
        failure.safety = tuple(dict.fromkeys(safety))
        raise failure
    return Judged(tuple(pickles), tuple(dict.fromkeys(safety)), end - pickles[-1].end)


def read_pickle(source: Readable, offset: int, end: int, where: str | None = None) -> Pickle:
    """Interpret the one pickle that starts at an offset, in bytes.

    Raises:
        DamagedCheckpoint: It is not a whole pickle; ``safety`` says what was seen before.
    """
    interpreter = Interpreter(source, offset, end, where)
    try:
        return interpreter.run()
    except DamagedCheckpoint as failure:
        failure.safety = judge(interpreter.pickle, where)
        raise


def judge(pickle: Pickle, where: str | None = None) -> tuple[Finding, ...]:
    """Return an error for all that is known to be dangerous, a warning for what nobody knows."""
    findings = [found for name in pickle.names if (found := _judge_name(name, where))]
    for _, call in pickle.watched:
        if not _is_harmless(call):
            findings.append(
                error("unsafe-call", f"calls {call.function} with arguments that it should not have", where)
            )
    for position, sentence in pickle.misuse:
        place = f"byte {position:,}" if where is None else f"{where}, byte {position:,}"
        findings.append(error("unsafe-pickle", f"{sentence}, which no honest pickle does", place))
    return tuple(dict.fromkeys(findings))


@contextmanager
def keeping(safety: tuple[Finding, ...]) -> Iterator[None]:
    """Let damage that is found after a pickle was read not hide what the pickle could run."""
    try:
        yield
    except DamagedCheckpoint as failure:
        failure.safety = tuple(dict.fromkeys((*safety, *failure.safety)))
        raise


def _judge_name(name: Global, where: str | None) -> Finding | None:
    verdict = trust(name.module, name.name)
    if verdict is Trust.DANGEROUS:
        return error("unsafe-import", f"loading it would import {name}", where)
    if verdict is Trust.UNKNOWN:
        return warning(
            "unknown-class", f"loading it would import {name}, which is not known to be harmless", where
        )
    return None


def _is_harmless(call: Call) -> bool:
    """Tell whether a watched call has exactly the arguments that make it plain data."""
    args = call.args
    if call.kwargs or not isinstance(call.function, Global):
        return False
    shape = _HARMLESS_ARGUMENTS.get((call.function.module, call.function.name))
    return shape is not None and shape(args)


def _is_latin1(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and isinstance(args[0], str | Payload) and args[1] == "latin1"


def _is_bare_object(args: tuple[Any, ...]) -> bool:
    return (
        len(args) == 3
        and isinstance(args[0], Global)
        and args[1] == Global("builtins", "object")
        and args[2] is None
    )


def _is_attribute(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and _is_plain_attribute(args[0], args[1])


def _is_paddle_eval(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and args[0] == "data" and _is_paddle_tensor(args[1])


def _is_stored_tensor(args: tuple[Any, ...]) -> bool:
    """Accept a storage that was pickled without ``torch.save``, if the pickles inside are harmless too.

    It is a whole file of the old serialization: five pickles, then the values.
    """
    if len(args) != 1 or not isinstance(args[0], bytes | Payload):
        return False
    inner: Readable
    if isinstance(args[0], bytes):
        inner, at, end = Buffer("", args[0]), 0, len(args[0])
    else:
        inner, at, end = args[0].source, args[0].offset, args[0].offset + args[0].nbytes
    try:
        for _ in range(_PICKLES_OF_A_STORAGE):
            pickle = Interpreter(inner, at, end).run()
            if _loads_more(pickle) or judge(pickle):
                return False
            at = pickle.end
    except CheckpointError:
        return False
    return True


def _loads_more(pickle: Pickle) -> bool:
    """Tell whether a pickle inside a storage holds storages itself, which no honest one does."""
    return any(call.is_of("torch.storage", "_load_from_bytes") for _, call in pickle.watched)


_HARMLESS_ARGUMENTS: dict[tuple[str, str], Callable[[tuple[Any, ...]], bool]] = {
    ("_codecs", "encode"): _is_latin1,
    ("builtins", "getattr"): _is_attribute,
    ("builtins", "eval"): _is_paddle_eval,
    ("builtins", "type"): lambda args: args == (None,),
    ("copyreg", "_reconstructor"): _is_bare_object,
    ("torch.storage", "_load_from_bytes"): _is_stored_tensor,
}

_PICKLES_OF_A_STORAGE = 5
_READS_FILES = frozenset({"from_file", "frombuffer"})


def _is_plain_attribute(target: object, attribute: object) -> bool:
    """Accept ``getattr(torch._C._VariableFunctionsClass, "relu")`` and members of known enumerations."""
    if not isinstance(target, Global) or not isinstance(attribute, str) or not attribute.isidentifier():
        return False
    is_torch_function = target.module == "torch._C" and target.name in (
        "_VariableFunctionsClass",
        "_VariableFunctions",
    )
    return not attribute.startswith("_") and (
        is_torch_function or trust(target.module, target.name) is Trust.PLAIN
    )


def _is_paddle_tensor(names: object) -> bool:
    """Accept Paddle's ``eval("data", {"data": array})``, which gives the array back."""
    if not isinstance(names, dict) or list(names) != ["data"]:
        return False
    array = names["data"]
    return (
        isinstance(array, Call)
        and isinstance(array.function, Global)
        and array.function.name == "_reconstruct"
    )
