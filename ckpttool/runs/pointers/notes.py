"""Notes: small texts of users that name checkpoints, such as ``best.txt``, or a list of the three best.

They may have any name and any syntax: each word in them can be a checkpoint's name or path.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from ckpttool.core.errors import CheckpointError, from_os_error
from ckpttool.formats.interface import MANIFEST_SUFFIXES
from ckpttool.formats.pointer_kind import MAX_POINTER, NO_CHANGES, Changes, Renamer, TextKind
from ckpttool.runs.entry import Entry
from ckpttool.runs.pointers.programs import DigestList
from ckpttool.runs.pointers.search import (
    CheckpointIndex,
    OnError,
    PointerProtections,
    Search,
    SearchedKind,
    exists,
    is_internal,
    names_in,
    path_parts,
    read_small,
    reporting,
)
from ckpttool.runs.reasons import Code, Reason
from ckpttool.storage import fs
from ckpttool.storage.fs import Names, Snapshot

_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


_RAY_RESULT = "result.json"
"""Metrics of each report of a Ray trial, which ``runs/logs.py`` reads."""


class IgnoredTexts(NamedTuple):
    """Kind of texts that name checkpoints without protecting them.

    Attributes:
        what: Description in the reference of ``prune``.
        why: Reason, in the same table.
        names: Pattern of file names.
        start: First characters of such a text, whatever its name; None if only the name counts.
    """

    what: str
    why: str
    names: re.Pattern[str]
    start: str | None = None


IGNORED_TEXTS = (
    IgnoredTexts(
        "logs and outputs of jobs, such as `train.log`, `log.txt`, `stdout`, `job.o1234`",
        "they name files that were written",
        re.compile(
            r"(?:.*[._-])?(?:logs?|nohup|stdout|stderr)(?:\.txt|\.\d+)*"
            r"|(?:out|output|err|errors?|console|terminal)(?:\.txt)?"
            r"|.*\.(?:log|out|err|stdout|stderr|csv|tsv|jsonl|ndjson|mail|mbox|[oe]\d+(?:[-._]\d+)*)(?:\.\d+)?",
            re.IGNORECASE | re.DOTALL,
        ),
    ),
    IgnoredTexts(
        "source code",
        "it names the files that it reads and writes",
        re.compile(
            r".*\.(?:pyi?|ipynb|pyx|c|cc|cpp|cu|h|hpp|java|js|ts|go|rs|jl|r|m|scala|swift|kt|lua)",
            re.IGNORECASE | re.DOTALL,
        ),
    ),
    IgnoredTexts("lists of digests", "they name all files", DigestList.NAMES),
    IgnoredTexts(
        "scripts, such as `eval.sh`, and files that begin with `#!`",
        "they name the files that they read and write",
        re.compile(
            r".*\.(?:sh|bash|zsh|fish|ksh|csh|bat|cmd|ps1|pl|rb|awk|sed|sbatch|slurm|sl|pbs|lsf|qsub|job|mk|cmake)"
            r"|(?:gnu)?makefile|(?:docker|container|snake|just|rake)file",
            re.IGNORECASE | re.DOTALL,
        ),
        "#!",
    ),
)
"""Kinds of texts without protection; the reference of ``prune`` has the same table."""


# A redirected output (``ckpttool prune --dry-run > plan.txt``) names every checkpoint of a run, and would
# protect all of them from the next ``prune``. Lines are matched one by one, as such output may be appended to
# a user's notes. That of ``latest`` names a single choice, as a note does, and protects it.
_OWN = re.compile(
    r"""^(?:.*"schema":[ ]?"ckpttool\.(?!latest/)          # --json
    |.*(?:<testsuites[ ]name="ckpttool|"driver":[ ]\{"name":[ ]"ckpttool")
    |(?:.*[ ])?ckpttool:[ ](?:error|warning):[ ]
    |\d\d:\d\d:\d\d[ ][ ].+[ ][ ](?:valid,|(?:renamed|copied|moved|slimmed)[ ]to|removed,|recorded[ ]in)[ ]
    |[✗!–?✓][ ](?:INVALID|FAILED|DIFFERS|UNSAFE|NOT[ ]RUN|sampled|unknown|valid)[ ]+\S.*[ ][ ]\S
    |[ ][ ](?:keep[ ][ ]|slim[ ][ ]|remove)[ ][ ]\S.*[ ][ ]\S
    |(?:copied|would[ ]copy|already[ ]there|differs|not[ ]copied)[ ][ ].+[ ][ ][\d.]+[ ]k?[A-Z]?B$).*$""",
    re.MULTILINE | re.VERBOSE,
)
"""Lines of ckpttool's own output, except that of ``latest``: they name every checkpoint."""


_QUOTED = re.compile(r"\"([^\"\n]+)\"|'([^'\n]+)'")
_WORD = re.compile(r"[^\s\"'`,;|<>(){}\[\]]+")
_KEY_END = re.compile(r"[:=]")
_PUNCTUATION = ".!?:,;"
_QUOTES = "\"'`"
_EMPHASIS = "*_~"
_STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'")
_LINE = re.compile(r"(?P<mark>\s*(?:[-*]\s+)?)(?P<value>.*?)(?P<end>,?(?:\s+#.*)?\s*)")
_KEYED = re.compile(r"[^:=]*[:=]\s*")
_BOM = "\ufeff"

_MOST_PARTS = 64
"""Limit on the components of a path in a text."""


class Mentions:
    """Finds the checkpoints that a text names: at the paths in it, or else of the same name."""

    # A path is tried relative to the text's directory, to those above it, and as it is. If a file exists
    # there that is no surveyed checkpoint, the path means that file. Only if its directory doesn't exist, as
    # after a move, are its last components tried, and in the text's own directory the name alone.

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._stems: dict[str, list[Entry]] = defaultdict(list)
        self._names: dict[str, list[Entry]] = defaultdict(list)
        for path, entry in index.by_path.items():
            directory, name = os.path.split(path)
            stem = _stem(name)
            self._names[name].append(entry)
            if stem is not None and name == entry.name:
                self._stems[os.path.join(directory, stem)].append(entry)
                self._names[stem].append(entry)

    def of(self, text: str, directory: str, note: str) -> Iterator[Entry]:
        """Yield the checkpoints that a text in a directory names.

        ``note`` is the name of its file: a note named after a checkpoint describes it.
        """
        alone = set(note_lines(text))
        for word in dict.fromkeys(note_words(text)):
            is_alone = word in alone and (_has_letter(word) or word == text.strip())
            yield from self.look_up(word, directory, note, is_alone=is_alone)[1]

    def look_up(
        self, word: str, directory: str, note: str, *, is_alone: bool = False
    ) -> tuple[str, Sequence[Entry]]:
        """Return a checkpoint's name or stem in a word, and the checkpoints that the word means.

        Args as for ``of``; the word may be a path. A word alone in its text needn't look like a name.
        """
        parts = path_parts(word)
        known = next((part for part in reversed(parts) if part in self._names), None)
        if known is None or len(parts) > _MOST_PARTS or _describes(note, known):
            return "", ()
        # ``final`` and ``100`` inside a text are no names.
        looks_like_name = _has_letter(word) and ("." in word or _has_digit(word))
        if len(parts) == 1 and not is_alone and not looks_like_name:
            return "", ()
        return known, self._entries_meant(parts, known, directory, word.startswith(("/", "\\")))

    def _entries_meant(
        self, parts: Sequence[str], known: str, directory: str, is_absolute: bool
    ) -> Sequence[Entry]:
        bases = list(_upwards(fs.abspath(directory)))
        # An absolute path of this machine names nothing in a store.
        roots = [os.sep] if fs.place_of(directory).opens_by_path else []
        for base in roots if is_absolute else bases:
            if entries := self._entries_at(base, parts):
                return entries
            if exists(os.path.join(base, *parts), self._index.snapshot):
                # Another file is there: the checkpoint around it is meant, unless the base is in it, too.
                entry = self._index.find(os.path.join(base, *parts))
                real = os.path.join(self._real_path(base), "")
                if entry is None or real.startswith(self._path_prefix(entry)):
                    return []
                return [entry]
        parts = parts[: len(parts) - parts[::-1].index(known)]  # it may be a directory with a file in it
        if len(parts) > 1 and any(self._is_directory(os.path.join(base, *parts[:-1])) for base in bases):
            return []  # its directory exists, so the checkpoint was removed from it
        # Its tree was moved: the checkpoint with the same end of the path is meant, directories included.
        for start in range(len(parts) - 1):
            for base in bases:
                if entries := self._entries_at(base, parts[start:]):
                    return entries
        if entries := self._entries_at(bases[0], parts[-1:]):  # the note's own directory was renamed
            return entries
        if len(parts) > 1:
            return []
        below = os.path.join(self._real_path(directory), "")
        return [entry for entry in self._names[known] if self._path_prefix(entry).startswith(below)]

    def _entries_at(self, base: str, parts: Sequence[str]) -> list[Entry]:
        """Return the checkpoints at a path, with or without a suffix."""
        path = os.path.join(self._real_path(os.path.join(base, *parts[:-1])), parts[-1])
        entry = self._index.by_path.get(path)
        return list(self._stems.get(path, ())) if entry is None else [entry]

    def _real_path(self, path: str) -> str:
        try:
            return self._index.snapshot.realpath(path)
        except ValueError:  # a NUL in it
            return path

    def _is_directory(self, path: str) -> bool:
        return exists(path, self._index.snapshot) and self._index.snapshot.isdir(path)

    def _path_prefix(self, entry: Entry) -> str:
        """Return the real path of a checkpoint, with a separator at its end."""
        return os.path.join(self._index.snapshot.realpath(entry.directory), entry.name, "")


def _upwards(directory: str) -> Iterator[str]:
    while True:
        yield directory
        above = fs.dirname(directory)
        if above == directory:
            return
        directory = above


def _stem(name: str) -> str | None:
    """Return a name without its suffix, if a number in it shows that it is a checkpoint's."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix and _has_digit(stem) else None


def _describes(name: str, known: str) -> bool:
    """Return whether a file is named after a checkpoint, as ``epoch_3.json`` after ``epoch_3.pt``."""
    stem = _stem(known) or known
    return _has_digit(stem) and name.startswith(stem) and not name[len(stem) : len(stem) + 1].isalnum()


def _has_letter(text: str) -> bool:
    return any(char.isalpha() for char in text)


def _has_digit(text: str) -> bool:
    return any(char.isdigit() for char in text)


def may_protect(name: str) -> bool:
    """Return whether a note of this name may protect checkpoints."""
    return not any(one.names.fullmatch(name) for one in IGNORED_TEXTS)


def protecting_text(text: str) -> str:
    """Return the part of a note that protects checkpoints: no script, no output of ckpttool."""
    if any(one.start is not None and text.startswith(one.start) for one in IGNORED_TEXTS):
        return ""
    return _OWN.sub("", text)


def read_note(file: os.DirEntry[str], snapshot: Snapshot, on_error: OnError) -> str | None:
    """Return the text of a small file, or None if it isn't text."""
    try:
        if not file.is_file(follow_symlinks=False) or not 0 < file.stat().st_size <= MAX_POINTER:
            return None
        data = read_small(file.path, MAX_POINTER, snapshot)
    except OSError as error:
        if not fs.is_absence(error):  # else it was removed since it was listed
            on_error(from_os_error(error, file.path))
        return None
    except CheckpointError as error:
        on_error(error)
        return None
    return None if data is None else decode_note(data)


def decode_note(data: bytes) -> str | None:
    """Return the text of a note; None if it is too long for a note, or isn't text."""
    coding = next((coding for mark, coding in _MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(coding)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text or len(data) > MAX_POINTER else text


def note_lines(text: str) -> Iterator[str]:
    """Yield lines, and the values after a colon or an equals sign in them; without quotes."""
    for line in text.splitlines():
        bare = line.strip()
        for value in (bare, _KEY_END.split(bare, maxsplit=1)[-1].strip()):
            if value.strip(_QUOTES):
                yield value.rstrip(",").strip(_QUOTES)
            if plain := _without_emphasis(value):
                yield plain


def note_words(text: str) -> Iterator[str]:
    """Yield the possible names in a text: its lines, quoted strings, and words."""
    yield from note_lines(text)
    yield from (one or other for one, other in _QUOTED.findall(text))
    yield from _unescaped(text)
    for word in _WORD.findall(text):
        yield word
        yield word.rstrip(_PUNCTUATION)
        yield from _KEY_END.split(word)[1:]
        yield _without_emphasis(word)


def _unescaped(text: str) -> Iterator[str]:
    """Yield the strings of a text without JSON's escapes; ``json.dumps`` escapes all but ASCII."""
    for quoted in _STRING.findall(text):
        if "\\" in quoted:
            with suppress(ValueError):  # no string of JSON, or half of a surrogate pair
                word: str = json.loads(quoted, strict=False)
                word.encode()
                yield word


def _without_emphasis(text: str) -> str:
    """Return a text without Markdown's emphasis, as in ``**name**`` or ``_name_``."""
    return text.rstrip(_PUNCTUATION).strip(_EMPHASIS).strip(_QUOTES).rstrip(_PUNCTUATION)


# Kinds ----------------------------------------------------------------------------------------------


class Notes(SearchedKind):
    """Kind of pointer for small texts of users, with any name."""

    what = "small texts such as `best.txt`"
    where = "DIR, the directory above, all below"

    def find(self, search: Search, found: PointerProtections) -> None:
        index, unread = search.index, search.error_handler(found)
        mentions, tops = Mentions(index), (search.above, search.root)
        around = ((directory, names_in(directory, search.snapshot, unread)) for directory in tops)
        below = directories_below(search.root, index, unread) if search.recursive else ()
        for directory, names in chain(around, below):
            for name, file in names.items():
                if (directory, name) in index.by_name or not (search.is_note(name) and may_protect(name)):
                    continue
                text = read_note(file, search.snapshot, unread)
                with reporting(unread):
                    for entry in mentions.of(protecting_text(text), directory, name) if text else ():
                        found.protect(entry, Reason(Code.NAMED_IN, name), file.path)


class Note(TextKind):
    """Prose, or a program: its names are words in it, and it is never reworded."""

    limit = MAX_POINTER
    is_certain = False

    def matches(self, name: str) -> bool:
        if name == _RAY_RESULT or name.lower().endswith(MANIFEST_SUFFIXES):
            return False
        return not any(one.names.fullmatch(name) for one in IGNORED_TEXTS if one.start is None)

    def names(self, text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note_words(text)))

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        return text


class DataNote(Note):
    """YAML, TOML, INI, or plain lines: a string, a whole line, or the value of a key can be a name."""

    suffixes = frozenset({"", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".txt", ".list", ".lst"})
    _NOT_DATA = frozenset(
        {
            *("readme", "makefile", "gnumakefile", "dockerfile", "containerfile"),
            *("snakefile", "justfile", "rakefile"),
        }
    )

    def matches(self, name: str) -> bool:
        stem, suffix = os.path.splitext(name.lower())
        return suffix in self.suffixes and stem not in self._NOT_DATA and super().matches(name)

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        if text.startswith("#!"):
            return text
        mark = _BOM if text.startswith(_BOM) else ""
        return mark + self._with_values(text.removeprefix(_BOM), new)

    def _with_values(self, text: str, new: Renamer) -> str:
        return "\n".join(_reworded_line(line, new, is_json=False) for line in text.split("\n"))


class JsonNote(DataNote):
    """JSON, with or without comments: only a string can be a name."""

    suffixes = frozenset({".json"})

    def _with_values(self, text: str, new: Renamer) -> str:
        reworded = "\n".join(_reworded_line(line, new, is_json=True) for line in text.split("\n"))
        if reworded == text:
            return text
        # Strings are found by a pattern, line by line, so that layout and comments are preserved. A pattern
        # can be misled, for example by an apostrophe outside a string: plain JSON is parsed again and
        # compared with the document in which every string was replaced.
        try:
            old = json.loads(text)
        except (ValueError, RecursionError):  # JSON with comments, perhaps
            return reworded
        try:
            is_right = json.loads(reworded) == _map_strings(old, new)
        except RecursionError as failure:
            raise ValueError("it is nested too deeply") from failure
        if not is_right:
            raise ValueError("it isn't written as plain JSON")
        return reworded


def _reworded_line(line: str, new: Renamer, *, is_json: bool) -> str:
    """Return a line with new names for its values that are renamed."""
    spans = [(*match.span(), _rewrite_quoted(match[0], new)) for match in _STRING.finditer(line)]
    match = None if is_json else _LINE.fullmatch(line)
    if match is not None and not any(quote in match["value"] for quote in _QUOTES):
        # An unquoted name is the whole line, or the value of a key.
        start, end = match.span("value")
        key = _KEYED.match(line, start, end)
        for begin in (start, *([key.end()] if key else ())):
            if begin < end and (name := new(line[begin:end])) is not None:
                spans.append((begin, end, name))
                break
    # From the end, so that the positions of earlier spans stay valid.
    for start, end, name in sorted(spans, reverse=True):
        if name is not None:
            line = line[:start] + name + line[end:]
    return line


def _rewrite_quoted(quoted: str, new: Renamer) -> str | None:
    """Return the new form of a quoted string, in the same quotes; None if it is unchanged."""
    if quoted.startswith("'"):
        name = new(quoted[1:-1])
        return None if name is None or "'" in name else f"'{name}'"
    try:
        word = json.loads(quoted, strict=False)
    except ValueError:
        return None
    name = new(word)
    return None if name is None else json.dumps(name, ensure_ascii=quoted.isascii())


def _map_strings(tree: Any, new: Renamer) -> Any:
    """Return a JSON document in which strings have their new forms."""
    if isinstance(tree, str):
        return new(tree) or tree
    if isinstance(tree, list):
        return [_map_strings(item, new) for item in tree]
    if isinstance(tree, dict):
        return {new(key) or key: _map_strings(value, new) for key, value in tree.items()}
    return tree


def directories_below(
    directory: str, index: CheckpointIndex, on_error: OnError
) -> Iterator[tuple[str, Names]]:
    """Yield the subdirectories to search for notes, at any depth: no checkpoints, none of ckpttool's own."""
    pending = [directory]
    while pending:
        parent = pending.pop()
        names = names_in(parent, index.snapshot, on_error)
        if parent != directory and (os.path.dirname(parent), os.path.basename(parent)) not in index.by_name:
            yield parent, names
        # The files of a checkpoint that is a directory are no notes, unless other checkpoints are in it, too.
        below = []
        for name, entry in sorted(names.items()):
            is_open = (parent, name) not in index.by_name or index.holds_others(entry.path)
            if is_open and entry.is_dir(follow_symlinks=False) and not is_internal(name):
                below.append(entry.path)
        pending += reversed(below)
