"""What small texts say of checkpoints: ``best.txt``, ``best.json``, a list of the three best.

Whatever such a file is called and however it is written, what stands in it and is a checkpoint's name or path
is meant.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator

from ckpttool.formats.interface import SIDECARS
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.ops.manifest import SHARED
from ckpttool.series.pointers.readers import MAX_POINTER, PINS
from ckpttool.wire.source import open_regular

_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_LOGS = (".log", ".out", ".err", ".csv", ".tsv", ".jsonl", ".ndjson")
"""Endings of what tells of every checkpoint that was written, so that it points at none."""

_LISTS = frozenset({tf_state.NAME, PINS, *SHARED, "trainer_state.json"})
"""What names many, or is read in a way of its own."""

SUMS = re.compile(
    r"(?:.*[._-])?(?:md5|sha(?:1|224|256|384|512)?|b2|check)?sums?(?:\.txt)?"
    r"|.*\.(?:md5|sha(?:1|224|256|384|512)|b2)",
    re.IGNORECASE | re.DOTALL,
)
"""What lists of digests are called, whoever wrote them."""

_QUOTED = re.compile(r"\"([^\"\n]+)\"|'([^'\n]+)'")
_WORD = re.compile(r"[^\s\"'`,;|<>(){}\[\]]+")
_AFTER = re.compile(r"[:=]")
_END = ".!?:,;"
_QUOTES = "\"'`"
_EMPHASIS = "*_~"


def is_note(name: str) -> bool:
    """Tell whether a file of this name may be a note: no list of all, no log, no digests."""
    is_list = name in _LISTS or name.lower().endswith((*_LOGS, *SIDECARS))
    return not is_list and SUMS.fullmatch(name) is None


def said(file: os.DirEntry[str]) -> str | None:
    """Return what a small text file says, or None where it is something else."""
    try:
        if not file.is_file(follow_symlinks=False) or not 0 < file.stat().st_size <= MAX_POINTER:
            return None
        with open_regular(file.path) as opened:
            data = opened.read(MAX_POINTER)
    except OSError:  # it has just gone, or is not for us
        return None
    return decoded(data)


def decoded(data: bytes) -> str | None:
    """Return the text of a note, or None where it is too long for one, or none at all."""
    coding = next((coding for mark, coding in _MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(coding)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text or len(data) > MAX_POINTER else text


def lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, and what stands in them behind a colon or an equals sign; without quotes."""
    for line in text.splitlines():
        bare = line.strip()
        for told in (bare, _AFTER.split(bare, maxsplit=1)[-1].strip()):
            if told.strip(_QUOTES):
                yield told.rstrip(",").strip(_QUOTES)
            if plain := _without_emphasis(told):
                yield plain


def words(text: str) -> Iterator[str]:
    """Yield what a text could name: its lines, what is quoted, and its words."""
    yield from lines(text)
    yield from (one or other for one, other in _QUOTED.findall(text))
    for word in _WORD.findall(text):
        yield word
        yield word.rstrip(_END)
        yield from _AFTER.split(word)[1:]
        yield _without_emphasis(word)


def _without_emphasis(text: str) -> str:
    """Return what Markdown shows of ``**name**`` or ``_name_``, of which the ends may be words apart."""
    return text.rstrip(_END).strip(_EMPHASIS).strip(_QUOTES).rstrip(_END)
