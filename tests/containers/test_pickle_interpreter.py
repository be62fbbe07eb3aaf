"""The pickle interpreter against Python's own pickle, and against pickles that nobody honest writes."""

from __future__ import annotations

import math
import pickle
import pickletools
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpttool import CheckpointError, DamagedCheckpoint, LimitExceeded, Truncated, open_checkpoint
from ckpttool.containers.pickle import machine as under_test
from ckpttool.containers.pickle.interpreter import Interpreter
from ckpttool.containers.pickle.opcodes import PAYLOAD_BYTES, TABLE
from ckpttool.containers.pickle.pickle_nodes import Call, Global, Payload, Pickle
from ckpttool.containers.pickle.pickle_safety import findings_of_pickle, run
from ckpttool.core.readable import Buffer
from tests.support.containers import pickles_in

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
NEVER_USED = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
RUN: list[object] = []


def interpreted(data: bytes) -> Pickle:
    source = Buffer("some.pkl", data)
    return run(Interpreter(source, 0, source.size))


def root(data: bytes) -> Any:
    return interpreted(data).root


def plain_form(data: bytes, place: Path) -> Mapping[str, object]:
    """Return what a file with a pickle tells of it."""
    path = place / "some.pkl"
    path.write_bytes(data)
    with open_checkpoint(path) as opened:
        return opened.metadata


# What honest pickles hold ---------------------------------------------------------------------------

numbers = st.integers() | st.floats() | st.integers(-(2**300), 2**300)
texts = st.text(max_size=40) | st.text(st.characters(codec="utf-8"), max_size=300)
hashables = st.none() | st.booleans() | st.integers() | texts | st.tuples(st.integers(), texts)
scalars = st.none() | st.booleans() | numbers | texts | st.binary(max_size=300)
sets = st.sets(hashables, max_size=5) | st.frozensets(hashables, max_size=5)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=6)
    mappings = st.dictionaries(hashables, inner, max_size=6)
    return lists | lists.map(tuple) | mappings | mappings.map(OrderedDict) | sets


data = st.recursive(scalars, containers, max_leaves=30)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(data)
def test_plain_data_is_what_pickle_loads(protocol: int, value: object) -> None:
    pickled = pickle.dumps(value, protocol)
    found = interpreted(pickled)
    assert same(found.root, pickle.loads(pickled))
    assert found.end == len(pickled)
    assert findings_of_pickle(found) == ()


def same(found: Any, expected: Any) -> bool:
    """Compare trees; a NaN equals itself, and the interpreter's mappings equal dictionaries."""
    if isinstance(found, Call) and isinstance(expected, bytes):
        return found.is_of("builtins", "bytes") and not found.args and not expected
    if isinstance(expected, dict):
        return isinstance(found, dict) and same(list(found.items()), list(expected.items()))
    if isinstance(expected, list | tuple):
        return (
            type(found) is type(expected) and len(found) == len(expected) and all(map(same, found, expected))
        )
    if isinstance(expected, float) and math.isnan(expected):
        return isinstance(found, float) and math.isnan(found)
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [Counter("aab"), OrderedDict(b=1, a=2), defaultdict(list, x=[1])], ids=type)
def test_mappings_of_the_standard_library_are_dictionaries(protocol: int, value: dict) -> None:
    assert dict(root(pickle.dumps(value, protocol))) == dict(value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value", ["x" * 70_000, "ö" * 70_000, b"\xff" * 70_000, bytearray(b"a" * 70_000)], ids=type
)
def test_long_strings_are_the_same_where_they_stay_in_the_file(protocol: int, value: Any) -> None:
    found = root(pickle.dumps(value, protocol))
    while isinstance(found, Call):
        (found,) = found.args
    content = found.read() if isinstance(found, Payload) else found
    expected = value.encode() if isinstance(value, str) else bytes(value)
    assert (content.encode() if isinstance(content, str) else content) == expected


def test_shared_and_recursive_objects_stay_so() -> None:
    shared: list[object] = [1]
    found = root(pickle.dumps([shared, shared]))
    assert found[0] is found[1]
    shared.append(shared)
    found = root(pickle.dumps(shared))
    assert found[1] is found


@pytest.mark.parametrize("key", [b"}", b"(}t"])
def test_objects_may_be_given_values_by_keys_that_no_dictionary_has(key: bytes, tmp_path: Path) -> None:
    assert list(plain_form(b"cmine\nThing\n)R" + key + b"Ns.", tmp_path)) == ["<class>", "<pairs>"]


def test_tuples_that_share_parts_are_no_keys_to_hash(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match="repetitions of shared objects"):
        plain_form(b"cmine\nThing\n)R" + b")" + b"2\x86" * 60 + b"Ns.", tmp_path)


def test_integers_as_text() -> None:
    assert root(b"I42\n.") == 42
    assert root(b"L-42L\n.") == -42
    assert (root(b"I01\n."), root(b"I00\n.")) == (True, False)


@pytest.mark.parametrize("text", [rb"'a\x00\n\'\\'", rb'"it\'s"', rb"'\377\1'"])
def test_quoted_strings_of_python_2(text: bytes) -> None:
    assert root(b"S" + text + b"\n.") == pickle.loads(b"S" + text + b"\n.", encoding="latin-1")


# What nobody runs -----------------------------------------------------------------------------------


class Trap:
    """Runs when it is loaded by pickle."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return RUN.append, (1,)


class Reduced:
    """Pickles as a call with everything that a reduction may hold."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("shown",), {"state": 1}, iter([1, 2]), iter({"k": "v"}.items())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_run(protocol: int, capsys: pytest.CaptureFixture[str]) -> None:
    interpreted(pickle.dumps(Trap(), protocol))
    found = root(pickle.dumps(Reduced(), protocol))
    assert RUN == []
    assert capsys.readouterr() == ("", "")
    assert (found.function, found.args) == (Global("builtins", "print"), ("shown",))
    assert (found.state, found.items, found.pairs) == ({"state": 1}, [1, 2], [("k", "v")])


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cos\nsystem\nX\4\0\0\0true\x85R",
        b"cos\nsystem\nX\4\0\0\0true\x85R0N",  # thrown away
        b"(X\4\0\0\0trueios\nsystem\n",
        b"(cos\nsystem\nX\4\0\0\0trueo",
        b"X\2\0\0\0osX\6\0\0\0system\x93X\4\0\0\0true\x85R",
        b"cos\nsystem\nX\4\0\0\0true\x85\x81",
        b"cos\nsystem\nX\4\0\0\0true\x85}\x92",
        b"cos\nsystem\nq\0000Nh\0X\4\0\0\0true\x85R",
        b"ctorch\nos.system\nX\4\0\0\0true\x85R",
        b"}cos\nsystem\nX\4\0\0\0true\x85RNs",
        b"ccollections\nOrderedDict\n}X\1\0\0\0acos\nsystem\nsb",
        b"cposix\nsystem\n",
        b"c__builtin__\neval\nX\1\0\0\x001\x85R",
    ],
)
def test_every_way_to_call_something_is_found(opcodes: bytes) -> None:
    for pickled in (b"\x80\4" + opcodes + b".", b"\x80\4" + opcodes):
        found = findings_of_pickle(partly(pickled))
        assert {finding.code for finding in found} & {"unsafe-import", "unsafe-call"}


def partly(data: bytes) -> Pickle:
    """Return what was seen of a pickle, whole or broken."""
    interpreter = Interpreter(Buffer("some.pkl", data), 0, len(data))
    with suppress(DamagedCheckpoint):
        interpreter.run()
    return interpreter.pickle


def test_what_was_seen_is_told_by_the_error() -> None:
    with pytest.raises(Truncated) as caught:
        interpreted(b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R")
    assert [finding.code for finding in caught.value.safety] == ["unsafe-import"]


def test_pickles_behind_the_first_are_judged() -> None:
    judged = pickles_in(pickle.dumps([1]) + pickle.dumps(Trap()) + b"cos\nsystem\n")
    assert (len(judged.pickles), judged.trailing) == (2, len(b"cos\nsystem\n"))
    assert "loading it would import os.system" in {finding.message for finding in judged.safety}


@pytest.mark.parametrize(
    ("behind", "name"),
    [
        (b"cos\nsystem\n", "os.system"),
        (b"xyzccos\nsystem\n", "os.system"),
        (b"(S'x'\nios\nsystem\n", "os.system"),
        (b"\x8c\2os\x94\x8c\6system\x94\x93", "os.system"),
        (b"U\2osU\6system\x93", "os.system"),
        (b"UU\x8c\x8c\5posix\x8c\6system\x93" + b"\x93" * 1000, "posix.system"),
    ],
)
def test_names_behind_a_break_are_found(behind: bytes, name: str) -> None:
    with pytest.raises(DamagedCheckpoint) as caught:
        interpreted(b"\x80\2cmy\nC\n\xff" + behind)
    assert f"loading it would import {name}" in {finding.message for finding in caught.value.safety}


def misuse(data: bytes) -> list[str]:
    return [sentence for _, sentence in interpreted(data).misuse]


@pytest.mark.parametrize("protocol", range(4, 6))
@pytest.mark.parametrize("size", [1, 1000, 70_000, 3 << 16])
def test_frames_of_pythons_fit(protocol: int, size: int) -> None:
    assert misuse(pickle.dumps([["a" * size], b"b" * size, list(range(size))], protocol)) == []


@pytest.mark.parametrize(
    ("opcodes", "sentence"),
    [
        (b"\x95\4" + bytes(7) + b"X\4\0\0\0text.", "an opcode crosses the end of its frame"),
        (b"\x95\3" + bytes(7) + b"Vtext\n.", "an opcode crosses the end of its frame"),
        (b"\x95\1" + bytes(7) + b"M\1\1.", "an opcode crosses the end of its frame"),
        (b"\x95\3" + bytes(7) + b"N.NN.", "a frame doesn't end with its pickle"),
        (b"\x95\x0c" + bytes(7) + b"N\x95\1" + bytes(7) + b"0N.", "a frame begins within another"),
    ],
)
def test_frames_that_fit_nothing_are_misuse(opcodes: bytes, sentence: str) -> None:
    assert misuse(b"\x80\4" + opcodes) == [sentence]


@pytest.mark.parametrize(
    ("opcodes", "sentence"),
    [
        (b"K\1a", "items are appended to the object made by a list"),
        (b"(K\1K\2u", "items are set on the object made by a list"),
    ],
)
def test_what_is_called_without_a_name_is_not_spelt_out(opcodes: bytes, sentence: str) -> None:
    depth = 100_000  # deeper than Python spells it out
    assert sentence in misuse(b"\x80\2" + b"]" * depth + b"a" * (depth - 1) + b")R" + opcodes + b".")


def test_the_result_of_a_call_is_told_without_its_address() -> None:
    sentences = misuse(b"\x80\2cposix\nsystem\n)R)RK\1a.")
    assert sentences == [
        "the result of a call is called",
        "items are appended to the object made by the result of a call",
    ]


def test_misuse_is_told_a_few_times() -> None:
    assert len(misuse(b"\x80\2N" + b"}b" * 1000 + b".")) == 100


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cargparse\nNamespace\nq\0}(" + b"".join(b"J%bN" % struct.pack("<i", key) for key in range(50_000))
        + b"uq\1](" + b"h\0)\x81h\1b" * 2000 + b"e.",
        b"ccollections\ndeque\nq\0](" + b"]" * 50_000 + b"eq\1" + b"h\0h\1\x85R0" * 2000 + b".",
    ],
    ids=["states", "items"],
)  # fmt: skip
def test_what_is_shared_is_not_searched_at_will(opcodes: bytes) -> None:
    with pytest.raises(LimitExceeded, match="bytes of memory"):
        interpreted(b"\x80\2" + opcodes)


# Every opcode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_every_opcode_is_known(opcode: pickletools.OpcodeInfo) -> None:
    assert TABLE[ord(opcode.code)] is not None
    for argument in (b"", b"\0" * 8, b"1\n", b"a\nb\n", b"\xff" * 8):
        code = opcode.code.encode("latin-1")
        for before in (b"", b"(", b"N", b"(NN", b"}NN", b"]N"):
            with_error = refusal(before + code + argument + b".")
            assert opcode.name not in NEVER_USED or with_error


def refusal(data: bytes) -> CheckpointError | None:
    try:
        interpreted(data)
    except CheckpointError as error:
        return error
    return None


def test_every_other_byte_is_refused() -> None:
    known = {ord(opcode.code) for opcode in pickletools.opcodes}
    for code in set(range(256)) - known:
        with pytest.raises(DamagedCheckpoint):
            interpreted(bytes([code]) + b".")


# Damage ---------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
@example(b"\x80\2.")
def test_random_bytes_are_answered(data: bytes) -> None:
    refusal(data)


OPCODES = st.sampled_from([bytes([code]) for code in range(256) if TABLE[code] is not None])
ARGUMENTS = st.sampled_from(
    [b"", b"\0", b"\1", b"\4\0\0\0", b"os\nsystem\n", b"1\n", b"'a'\n", b"\xff\xff\xff\xff"]
)


@given(st.lists(st.tuples(OPCODES, ARGUMENTS), max_size=40))
def test_random_opcodes_are_answered(opcodes: list[tuple[bytes, bytes]]) -> None:
    refusal(b"".join(code + argument for code, argument in opcodes) + b".")


HONEST = [
    pickle.dumps(value, protocol)
    for protocol in PROTOCOLS
    for value in (
        {"epoch": 3, "w": [0.5, (1, 2, 3)], "s": {1, "b"}, "n": {"k": None, True: b"\0\xff"}},
        OrderedDict(a=Reduced(), b=2**70, c="ö" * 30),
    )
]


@given(st.sampled_from(HONEST), st.data())
def test_mutations_are_answered(pickled: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(pickled) - 1))
    end = draw.draw(st.integers(at, min(len(pickled), at + 8)))
    refusal(pickled[:at] + draw.draw(st.binary(max_size=8)) + pickled[end:])


@pytest.mark.parametrize("pickled", HONEST, ids=lambda pickled: f"{len(pickled)} bytes")
def test_every_truncation_is_noticed(pickled: bytes) -> None:
    for kept in range(len(pickled)):
        assert isinstance(refusal(pickled[:kept]), DamagedCheckpoint)


# Greed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "opcodes",
    [
        b"X" + struct.pack("<I", 2**32 - 1),
        b"B" + struct.pack("<I", 2**31),
        b"T" + struct.pack("<i", 2**31 - 1),
        b"T" + struct.pack("<i", -1),
        b"\x8d" + struct.pack("<Q", 2**64 - 1),
        b"\x8e" + struct.pack("<Q", 2**62),
        b"\x96" + struct.pack("<Q", 2**63),
        b"\x8b" + struct.pack("<i", 2**31 - 1),
        b"\x8b" + struct.pack("<i", -1),
        b"\x95" + struct.pack("<Q", 2**64 - 1),
    ],
)
def test_lengths_are_checked_before_anything_is_allocated(opcodes: bytes) -> None:
    assert isinstance(refusal(opcodes + b"abc."), DamagedCheckpoint)


def test_large_memo_indexes_cost_nothing() -> None:
    """The memo of Python's own unpickler would grow to the largest index."""
    refusal(b"Nr" + struct.pack("<I", 2**32 - 1) + b".")


@pytest.mark.parametrize("digits", [b"9" * 6000, b"-" + b"9" * 5000, b"1" * 100_000])
def test_long_integers_as_text(digits: bytes) -> None:
    assert isinstance(refusal(b"I" + digits + b"\n."), DamagedCheckpoint)
    assert isinstance(refusal(b"L" + digits + b"L\n."), DamagedCheckpoint)


def test_long_integers_as_bytes() -> None:
    """They are as long as the file says, and no longer; a file that is full of them is refused."""
    long = b"\x8b" + struct.pack("<i", 1 << 20) + bytes([1]) * (1 << 20)
    assert root(long + b".") == int.from_bytes(bytes([1]) * (1 << 20), "little")
    assert isinstance(refusal(long[:-1]), Truncated)


@pytest.mark.parametrize(
    ("budget", "value", "pickled"),
    [
        ("MAX_OPCODES", 1000, b"N0" * 1000 + b"N."),
        ("MAX_MADE", 64_000, b"]" * 1001 + b"."),
        ("MAX_MADE", 64_000, b"N" + b"\x94" * 1001 + b"."),
        ("MAX_MADE", 10_000, b"(" * 100 + b"."),
        ("MAX_MADE", 10_000, (b"X" + struct.pack("<I", 1000) + bytes(1000)) * 11 + b"."),
        ("MAX_STREAM", 1 << 20, b"N0" * (1 << 20) + b"N."),
    ],
)
def test_budgets(monkeypatch: pytest.MonkeyPatch, budget: str, value: int, pickled: bytes) -> None:
    monkeypatch.setattr(under_test, budget, value)
    assert isinstance(refusal(pickled), LimitExceeded)


def test_payloads_that_stay_in_the_file_count_for_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "MAX_STREAM", PAYLOAD_BYTES)
    monkeypatch.setattr(under_test, "MAX_MADE", PAYLOAD_BYTES)
    content = bytes(PAYLOAD_BYTES + 1)
    found = root(pickle.dumps([content] * 3 + [bytes([n]) * (PAYLOAD_BYTES + 1) for n in range(60)], 4))
    assert found[0].read() == content


def test_keys_that_collide() -> None:
    """Integers with one hash make a dictionary quadratic."""
    keys = b"".join(b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little") + b"N" for n in range(2000))
    assert isinstance(refusal(b"}(" + keys + b"u."), LimitExceeded)


@pytest.mark.parametrize("add", [b"Ns", b"\x90"])
def test_shared_tuples_as_keys(add: bytes) -> None:
    """Hashing sixty tuples, each of which holds the one before it twice, takes for ever."""
    bomb = b")" + b"2\x86" * 60
    container = b"}" if add == b"Ns" else b"\x8f("
    assert isinstance(refusal(container + bomb + add + b"."), LimitExceeded)


@pytest.mark.parametrize("key", [b"]", b"}", b"\x8f", b"]\x85", b"N]\x86\x85"])
def test_keys_that_python_cannot_hash(key: bytes) -> None:
    assert isinstance(refusal(b"}" + key + b"Ns."), DamagedCheckpoint)


def test_laughs_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match="repetitions of shared objects"):
        plain_form(b"]" + b"q\0](h\0h\0e" * 60 + b".", tmp_path)


def test_nesting_is_no_recursion(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match="nested more than 500 deep"):
        plain_form(b"]" * 100_000 + b"a" * 99_999 + b".", tmp_path)


def test_a_cycle_is_told(tmp_path: Path) -> None:
    value: dict[str, object] = {}
    value["self"] = value
    assert plain_form(pickle.dumps(value), tmp_path) == {"self": "<a cycle>"}


def test_huge_integers_are_described(tmp_path: Path) -> None:
    huge = b"\x8b" + struct.pack("<i", 5000) + b"\x7f" * 5000
    for pickled in (huge, b"}" + huge + b"Ns", b"\x8f(" + huge + b"\x90", b"ca\nb\n" + huge + b"\x85R"):
        assert "<integer of 39,999 bits" in repr(plain_form(b"\x80\2" + pickled + b".", tmp_path))
