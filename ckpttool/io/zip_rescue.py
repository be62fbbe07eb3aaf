"""The records of a damaged zip that can be proven, wherever they lie: for ``salvage``.

A zip states each record up to three times: in the directory, in a local header before its bytes and, as
PyTorch writes it, in a data descriptor behind them. Damage seldom hits all three, and bytes that came in
between or went move what follows. So every statement in the file is collected, and a record counts if bytes
are found that have a stated checksum. Statements are put together only if that checksum, or their place,
binds them: a record under another's name would be worse than a lost one.

Source: PKWARE APPNOTE 6.3; pytorch ``caffe2/serialize/inline_container.cc``: local headers without sizes.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from isal import isal_zlib

from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, Truncated, Unsupported
from ckpttool.core.readable import Readable, aligned_buffer
from ckpttool.core.report import Finding, error
from ckpttool.io.inflate import Inflated, Inflation
from ckpttool.io.source import Source
from ckpttool.io.zip_headers import SATURATED32, UTF8, ZIP64_EXTRA, Member, extra_fields
from ckpttool.io.zip_reader import (
    DEFLATED,
    MAX_MEMBERS,
    STORED,
    Archive,
    LostRecord,
    Rescue,
    directory_entry,
)

_SIGNATURE = re.compile(rb"PK(?:\x03\x04|\x01\x02|\x07\x08|\x05\x06|\x06\x06)")
_LOCAL, _ENTRY = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END, _END64 = struct.Struct("<10xH"), struct.Struct("<32xQ")
"""How many records the directory has, by the end record and by its ZIP64 twin."""
_DESCRIPTORS = (struct.Struct("<4x3I"), struct.Struct("<4xI2Q"))
_DESCRIPTOR_LENGTHS = (0, 16, 24, 12, 20)
_REFUSED_FLAGS = 0x0021  # encrypted or patched
_WINDOW, _SUMMED_AT_ONCE = 1 << 22, 1 << 20
_LONGEST_NAME, _LONGEST_HEADER = 4096, 30 + 2 * 0xFFFF
_NEARBY = 1200
"""Bytes by which a record's end may lie elsewhere than its header's length says."""
MAX_SIGNATURES = 4 * MAX_MEMBERS
_MAX_PLACES = 48
"""Places that are tried for one record, and below it how many bytes are read for all: for each byte of the
file, in any case, and at least for each place."""
_TRIED_A_BYTE, _MIN_TRIED, _TRIAL = 8, 1 << 26, 64


class _Claim(NamedTuple):
    """What is stated of a record's bytes."""

    crc32: int
    stored: int
    size: int


def rescue_records(source: Source) -> Rescue:
    """Return the records that have their checksums, and what is known of the others."""
    archive = None
    try:
        archive = Archive(source)
        members = archive.members
    except (DamagedCheckpoint, Unsupported) as failure:
        is_cut = archive is None and isinstance(failure, Truncated)  # said by what is lost
        findings = [] if is_cut else [error(failure.code, failure.reason, failure.where)]
    else:
        if not archive.findings:
            return _Search(source).rescue_whole(members)
        findings = archive.findings
    search = _Search(source)
    search.collect()
    return search.rescue(findings)


class _Search:
    """What a file states of its records, and which of it holds."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._buffer = aligned_buffer(min(_SUMMED_AT_ONCE, max(source.size, 1)))
        self._budget = max(_MIN_TRIED, _TRIED_A_BYTE * source.size)
        self._inflation = Inflation(source)
        self._is_summed = True
        self._locals: list[Member] = []
        self._entries: list[tuple[int, Member]] = []
        self._counts: set[int] = set()
        self._headers: list[int] = []  # of records, by the directory
        self._marks: list[int] = []  # offsets of local headers and entries
        self._claims_at: dict[int, list[_Claim]] = defaultdict(list)  # by where the record would begin
        self._places_of: dict[_Claim, list[int]] = defaultdict(list)
        self._taken: list[tuple[int, int]] = []
        self._found: dict[str, Member] = {}
        self._lost: dict[str, LostRecord] = {}

    # What is stated --------------------------------------------------------------------------------

    def collect(self) -> None:
        """Read every statement in the file."""
        count, start = 0, 0
        while start < self._source.size:
            window = self._source.read(start, min(_WINDOW, self._source.size - start))
            for match in _SIGNATURE.finditer(window):
                count += 1
                self._add(window[match.start() : match.end()], start + match.start())
            if count > MAX_SIGNATURES:
                found = f"more than {MAX_SIGNATURES:,} signatures of a zip"
                raise LimitExceeded(self._source.path, found)
            start += max(len(window) - 3, 1) if start + len(window) < self._source.size else len(window)
        claims = [*self._places_of, *(_claim(one) for _, one in self._entries), *map(_claim, self._locals)]
        self._is_summed = any(one.crc32 for one in claims) or not any(one.size for one in claims)
        self._headers = sorted(one.header for _, one in self._entries)

    def _add(self, signature: bytes, at: int) -> None:
        with suppress(Truncated):  # a statement that the end of the file cuts off
            if signature == b"PK\x03\x04":
                self._add_local(at)
            elif signature == b"PK\x01\x02":
                self._add_entry(at)
            elif signature == b"PK\x07\x08":
                self._add_descriptor(at)
            else:
                record = _END if signature == b"PK\x05\x06" else _END64
                self._counts.add(record.unpack(self._source.read(at, record.size))[0])

    def _add_local(self, at: int) -> None:
        fields = _LOCAL.unpack(self._source.read(at, _LOCAL.size))
        _, version, flags, method, time, date, crc, stored, size, name_length, extra_length = fields
        if flags & _REFUSED_FLAGS or not 0 < name_length <= _LONGEST_NAME:
            return
        names = self._source.read(at + _LOCAL.size, name_length + extra_length)
        raw_name, extra = names[:name_length], names[name_length:]
        name = raw_name.decode("utf-8" if flags & UTF8 else "cp437", "backslashreplace")
        stored, size = _wide_sizes(extra, stored, size)
        payload = at + _LOCAL.size + len(names)
        modified = (time, date)
        local = Member(name, raw_name, version, flags, method, modified, crc, stored, size, at, payload)
        self._locals.append(local)
        self._marks.append(at)

    def _add_entry(self, at: int) -> None:
        fields = _ENTRY.unpack(self._source.read(at, _ENTRY.size))
        data = self._source.read(at, _ENTRY.size + sum(fields[10:13]))
        with suppress(DamagedCheckpoint, Unsupported):
            entry, _ = directory_entry(self._source.path, data, 0, [])
            if entry.name:
                self._entries.append((at, entry))
                self._marks.append(at)

    def _add_descriptor(self, at: int) -> None:
        for form in _DESCRIPTORS:
            if at + form.size <= self._source.size:
                claim = _Claim(*form.unpack(self._source.read(at, form.size)))
                if 0 < claim.stored <= at - _LOCAL.size and claim.size:
                    self._claims_at[at - claim.stored].append(claim)
                    self._places_of[claim].append(at - claim.stored)

    # What holds ------------------------------------------------------------------------------------

    def rescue_whole(self, members: Iterable[Member]) -> Rescue:
        """Return the records of a zip whose structure is whole."""
        members = tuple(members)
        self._is_summed = any(one.crc32 for one in members)
        for member in members:
            if self._holds(member):
                self._found[member.name] = member
            else:
                self._lose(member.name, member)
        kept = tuple(one for one in members if one.name not in self._lost)
        return Rescue(kept, {}, self._lost, (), is_cut=False)

    def rescue(self, findings: list[Finding]) -> Rescue:
        """Return the records that hold, from the end: the directory of a zip lies behind all zips in it."""
        aliases: dict[str, Member] = {}
        for is_agreed in (True, False):
            for at, entry, local in self._pairs(is_agreed=is_agreed):
                if not self._is_taken(at):
                    self._take_pair(entry, local, aliases)
        listed = [one for at, one in self._entries if not self._is_taken(at)]
        is_whole = len(listed) in self._counts
        listed_at = {one.payload: one for one in self._found.values()}
        aliases |= {one.name: listed_at[one.payload] for one in self._locals if one.payload in listed_at}
        if not is_whole or self._lost:
            self._take_locals(listed_at)
        own = Counter(one.name for one in (*self._locals, *(entry for _, entry in self._entries)))
        aliases = {name: one for name, one in aliases.items() if own[name] == 1 and name not in self._found}
        findings += [
            error("zip-headers-disagree", f"its own header calls it {name}", member.name)
            for name, member in aliases.items()
        ]
        named = {member.payload: name for name, member in aliases.items() if not member.name.isprintable()}
        by_payload = sorted(self._found.values(), key=lambda one: one.payload)
        renamed = (one._replace(name=named.get(one.payload, one.name)) for one in by_payload)
        members = tuple(one for one in renamed if one.name.isprintable())
        lost = {
            name: one for name, one in self._lost.items() if name not in self._found and name.isprintable()
        }
        has_names = len(members) + len(lost) == len({*self._found, *self._lost})
        return Rescue(members, aliases, lost, tuple(findings), is_cut=not (is_whole and has_names))

    def _pairs(self, *, is_agreed: bool) -> Iterator[tuple[int, Member, list[Member | None]]]:
        """Yield entries of directories and the local headers that may be theirs.

        Those agree that have the same name at the same offset, or a name that no other one has.
        """
        by_name, by_offset = defaultdict(list), {}
        for local in self._locals:
            by_name[local.raw_name].append(local)
            by_offset[local.header] = local
        names = Counter(entry.raw_name for _, entry in self._entries)
        for at, entry in reversed(self._entries):
            alike, there = by_name[entry.raw_name], by_offset.get(entry.header)
            agreed = [one for one in alike if one is there]
            if not agreed and len(alike) == names[entry.raw_name] == 1:
                agreed = alike
            if bool(agreed) == is_agreed:
                others = [there] if there is not None and there not in alike else []
                if agreed or names[entry.raw_name] == 1:
                    yield at, entry, [*agreed, *islice(alike, 8), *others, None]
                elif there is not None and others:  # of two entries with one name, its header tells its own
                    yield at, entry._replace(name=there.name, raw_name=there.raw_name), [there]

    def _take_pair(self, entry: Member, locals: list[Member | None], aliases: dict[str, Member]) -> None:
        if entry.name in self._found:
            return
        for local in locals:
            for place in islice(self._places(entry, local), _MAX_PLACES):
                if self._holds(place):
                    self._take(place)
                    if local is not None and local.name != entry.name:
                        aliases[local.name] = place
                    return
        here = locals[0]
        self._lose(entry.name, entry if here is None else entry._replace(payload=here.payload))

    def _places(self, entry: Member, local: Member | None) -> Iterator[Member]:
        """Yield where a record of a directory may lie: behind its header, or before what ends it."""
        claim = _claim(entry)
        header = entry.header if local is None else local.header
        if local is not None:
            for stated in dict.fromkeys([claim, *self._claims_of(local)]):
                yield _member(entry, stated, header, local.payload)
        if not claim.stored:
            return
        for start in self._places_of.get(claim, ()):
            yield _member(entry, claim, header, start)
        likely = header + _LOCAL.size + len(entry.raw_name) + claim.stored
        low, high = (bisect_left(self._marks, likely + step) for step in (-_NEARBY, _NEARBY))
        for end in (*self._next_headers(entry), *self._marks[low:high]):
            for length in _DESCRIPTOR_LENGTHS:
                yield _member(entry, claim, header, end - length - claim.stored)

    def _next_headers(self, entry: Member) -> list[int]:
        """Return where the directory has the record behind another."""
        at = bisect_right(self._headers, entry.header)
        return self._headers[at : at + 1]

    def _claims_of(self, local: Member | None) -> Iterator[_Claim]:
        """Yield what the descriptor behind a local header's record states, and the header itself."""
        if local is not None:
            yield from self._claims_at.get(local.payload, ())
            yield _claim(local)

    def _take_locals(self, listed_at: Collection[int]) -> None:
        """Take what only local headers name, from the first on; a name that two have is nobody's."""
        names = Counter(one.name for one in self._locals if not self._is_taken(one.header))
        for local in self._locals:
            if local.name in self._found or local.payload in listed_at or self._is_taken(local.header):
                continue
            places = [_member(local, one, local.header, local.payload) for one in self._claims_of(local)]
            place = next((one for one in places if self._holds(one)), None)
            if place is not None and names[local.name] == 1:
                self._take(place)
            elif not self._is_cut_off(local):
                self._lose(local.name, local)
        last = max((one.payload for one in self._found.values()), default=-1)
        for local in filter(self._is_cut_off, self._locals):
            if local.name in self._found or self._is_taken(local.header):
                continue
            if local.payload > last:
                self._take(local)
            else:  # what lies behind shows that its size is wrong
                self._lose(local.name, local)

    def _is_cut_off(self, local: Member) -> bool:
        """Tell whether the file ends in a record of stated size: what lies in it may be whole."""
        return local.method == STORED and local.payload <= self._source.size < local.end

    def _take(self, member: Member) -> None:
        self._found[member.name] = member
        self._place(member)

    def _place(self, member: Member) -> None:
        """Note where a record lies, from its header on if that is here."""
        has_header = 0 <= member.payload - member.header <= _LONGEST_HEADER
        insort(self._taken, (member.header if has_header else member.payload, member.end))

    def _is_taken(self, at: int) -> bool:
        """Tell whether an offset lies inside a record that was placed: what lies there is its content."""
        index = bisect_right(self._taken, (at, self._source.size)) - 1
        return index >= 0 and self._taken[index][0] <= at < self._taken[index][1]

    def _lose(self, name: str, member: Member) -> None:
        """Note why a record is lost, and that what lies in it is none."""
        why = f"its bytes are not in the file, which ends at byte {self._source.size:,}"
        if member.payload >= 0 and member.stored and member.end <= self._source.size:
            try:
                why = f"CRC-32 is {self._sum(member):08x} instead of {member.crc32:08x}"
            except DamagedCheckpoint as failure:
                why = failure.reason
            if self._has_mark(member.end):
                self._place(member)
        elif self._marks and member.payload <= self._marks[-1]:
            why = "nothing states its size and checksum" if not member.stored else "its bytes were not found"
        self._lost.setdefault(name, LostRecord(why, member.crc32))

    def _has_mark(self, end: int) -> bool:
        """Tell whether another statement follows a record, behind its descriptor if it has one."""
        at = bisect_left(self._marks, end)
        return at < len(self._marks) and self._marks[at] - end in _DESCRIPTOR_LENGTHS

    def _holds(self, member: Member) -> bool:
        """Tell whether a record's bytes have the checksum that is stated for them.

        That of no bytes is right everywhere, so that an empty record must end where another statement begins.
        """
        if member.method not in (STORED, DEFLATED) or member.payload < 0 or member.end > self._source.size:
            return False
        if member.method == STORED and member.size != member.stored:
            return False
        if not member.size:
            return not self._marks or member.end in self._marks[bisect_left(self._marks, member.end) :][:1]
        if not self._is_summed:
            return not self._marks or self._has_mark(member.end)
        self._budget -= member.stored + _TRIAL
        if self._budget < 0 or not member.crc32:
            return False
        try:
            return self._sum(member) == member.crc32
        except DamagedCheckpoint:
            return False

    def _sum(self, member: Member) -> int:
        content: Readable = self._source
        start = member.payload
        if member.method == DEFLATED:
            content = Inflated(self._inflation, start, member.stored, member.size, member.name)
            start = 0
        crc, done = 0, 0
        while done < member.size:
            block = self._buffer[: min(len(self._buffer), member.size - done)]
            content.read_into(start + done, block)
            crc, done = isal_zlib.crc32(block, crc), done + len(block)
        return crc


def _claim(member: Member) -> _Claim:
    return _Claim(member.crc32, member.stored, member.size)


def _member(named: Member, claim: _Claim, header: int, payload: int) -> Member:
    """Return a record with a name, what is stated of it, and where it would lie."""
    method = STORED if claim.stored == claim.size and named.method not in (STORED, DEFLATED) else named.method
    return named._replace(
        method=method, crc32=claim.crc32, stored=claim.stored, size=claim.size, header=header, payload=payload
    )


def _wide_sizes(extra: bytes, stored: int, size: int) -> tuple[int, int]:
    """Return the stored and the full size, if need be as the ZIP64 field has them."""
    wide = next((data for kind, data in extra_fields(extra) or () if kind == ZIP64_EXTRA), b"")
    if SATURATED32 not in (stored, size) or len(wide) < 16:
        return stored, size
    wide_size, wide_stored = struct.unpack_from("<2Q", wide)
    return wide_stored, wide_size
