"""Search for the provable records of a damaged zip, for ``salvage``.

A zip describes each record up to three times: in the directory, in a local header before its bytes and, in
PyTorch's zips, in a data descriptor after them. Damage seldom hits all three, and inserted or missing bytes
move everything after them. So the search has two steps: ``collect`` finds all descriptions in the file by
their signatures, and ``rescue`` tries offsets at which a record may be, from its descriptions, until the
bytes there have the stated checksum. Descriptions are combined only if that checksum, or their offset, is the
same: a record under the name of another would be worse than a lost one.

Source: PKWARE APPNOTE 6.3; pytorch ``caffe2/serialize/inline_container.cc``: local headers without sizes.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from isal import isal_zlib

from ckpttool.containers.compressed import MAX_EXPANSION, Inflated, Inflation
from ckpttool.containers.zip_reader import (
    DEFLATED,
    DESCRIPTOR,
    DESCRIPTOR64,
    DESCRIPTOR_LENGTHS,
    END,
    ENTRY,
    LOCAL,
    MAX_MEMBERS,
    REFUSED_FLAGS,
    SATURATED32,
    STORED,
    UTF8,
    ZIP64_EXTRA,
    Archive,
    LostRecord,
    Member,
    Rescue,
    directory_entry,
    extra_fields,
)
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, Truncated, Unsupported, error_of
from ckpttool.core.readable import Readable, aligned_buffer
from ckpttool.core.report import Finding, error
from ckpttool.storage.source import Source

_SIGNATURE = re.compile(rb"PK(?:\x03\x04|\x01\x02|\x07\x08|\x05\x06|\x06\x06)")
_END, _END64 = struct.Struct("<10xH"), struct.Struct("<32xQ")
"""Number of records in an end record and its ZIP64 twin; the bytes after it may be missing."""
_GAPS = (0, *DESCRIPTOR_LENGTHS)
"""Bytes between the end of a record and the next header: none, or a data descriptor."""
_WINDOW, _SUMMED_AT_ONCE = 1 << 22, 1 << 20
_LONGEST_NAME, _LONGEST_HEADER = 4096, LOCAL.size + 2 * 0xFFFF
_NEARBY = 1200
"""Distance in bytes within which a record's end is searched around where its header implies it."""
MAX_SIGNATURES = 4 * MAX_MEMBERS
_MIN_NAMES, _NAMES_A_BYTE = 1 << 22, 2
"""Limits in bytes on all names and extra fields: the least, and per byte of the file; only hostile ones
overlap."""
_MAX_PLACES, _MAX_NAMESAKES = 48, 8
"""Places tried per local header, and local headers of the same name tried per record."""
# Each trial reads a whole record for its checksum, and a hostile file can describe many records at many
# offsets. So a record may cost ``_TRIED_A_BYTE`` readings of its bytes, and an equal share of
# ``_TRIED_IN_ALL``, which is at least ``_MIN_TRIED``: one large damaged record leaves the others their share.
# ``_set_budget`` limits all records together.
_TRIED_A_BYTE, _TRIED_IN_ALL, _MIN_TRIED, _TRIAL = 8, 1 << 26, 1 << 14, 1 << 10
"""Limits on bytes read: per stored byte, shared by all records, and the least share; the cost of a trial."""


class _StatedSizes(NamedTuple):
    """Stated checksum and sizes of a record."""

    crc32: int
    stored: int
    size: int


def rescue_records(source: Source) -> Rescue:
    """Return the records whose bytes have their checksums, and the lost ones."""
    archive = None
    try:
        archive = Archive(source)
        members = archive.members
    except (DamagedCheckpoint, Unsupported) as failure:
        # A truncated zip has no directory. The lost records and ``Rescue.is_cut`` report that already.
        is_cut = archive is None and isinstance(failure, Truncated)
        findings = [] if is_cut else [error_of(failure)]
    else:
        if not archive.findings:
            return _Search(source).rescue_whole(members)
        findings = archive.findings
    search = _Search(source)
    search.collect()
    return search.rescue(findings)


class _Search:
    """Search of one file: the descriptions of records, and those found or lost."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._buffer = aligned_buffer(min(_SUMMED_AT_ONCE, max(source.size, 1)))
        self._names_left = max(_MIN_NAMES, _NAMES_A_BYTE * source.size)
        self._budget = self._free_bytes = 0
        self._inflation = Inflation(source)
        self._is_summed = True
        # Descriptions, in the order of the file; entries and local headers have the same form.
        self._locals: list[Member] = []
        self._entries: list[tuple[int, Member]] = []
        self._ends: list[tuple[int, int]] = []  # offsets of end records, with their number of entries
        self._entry_ends: dict[int, int] = {}  # end of each entry of a directory by its offset
        self._is_whole = False  # whether ``_entries`` are one complete directory
        self._listed_headers: list[int] = []  # offsets of local headers according to the directory
        self._header_offsets: list[int] = []  # offsets of local headers and entries
        self._claims_at: dict[int, list[_StatedSizes]] = defaultdict(
            list
        )  # descriptors, by start of the content
        self._places_of: dict[_StatedSizes, list[int]] = defaultdict(list)
        self._placed_ranges: list[tuple[int, int]] = []  # ranges that neither overlap nor touch, in order
        self._found: dict[str, Member] = {}
        self._lost: dict[str, LostRecord] = {}

    # Descriptions in the file ----------------------------------------------------------------------

    def collect(self) -> None:
        """Find all local headers, entries, data descriptors and end records in the file."""
        # Windows overlap by 3 bytes, so that a signature of 4 bytes is found in exactly one of them.
        count, start = 0, 0
        while start < self._source.size:
            window = self._source.read(start, min(_WINDOW, self._source.size - start))
            for match in _SIGNATURE.finditer(window):
                count += 1
                if count > MAX_SIGNATURES:
                    found = f"more than {MAX_SIGNATURES:,} zip signatures"
                    raise LimitExceeded(self._source.path, found)
                self._add(match.group(), start + match.start())
            start += max(len(window) - 3, 1) if start + len(window) < self._source.size else len(window)
        claims = [*self._places_of, *(_claim(one) for _, one in self._entries), *map(_claim, self._locals)]
        self._is_summed = any(one.crc32 for one in claims) or not any(one.size for one in claims)
        self._set_budget(claims)
        self._drop_nested_zips()
        self._listed_headers = sorted(one.header for _, one in self._entries)

    def _drop_nested_zips(self) -> None:
        """Remove the descriptions of records of zips inside this one."""
        # If the directory at the end of the file is complete, all other entries are of zips inside. And the
        # descriptions inside a record whose bytes have their checksum are its content.
        directory = self._whole_directory()
        self._entries, self._is_whole = directory or self._entries, bool(directory)
        contents: list[tuple[int, int]] = []
        for local in self._locals:
            if contents and local.header < contents[-1][1]:
                continue
            following = self._header_offsets[bisect_right(self._header_offsets, local.header) :][:1]
            places = (_member(local, one, local.header, local.payload) for one in self._claims_of(local))
            around = ((place, local) for place in places if following and following[0] < place.end)
            proven, _ = self._first_proven(around, local)
            if proven is not None:
                contents.append((local.payload, proven[0].end))

        def is_outside(at: int) -> bool:
            index = bisect_right(contents, at, key=lambda one: one[0]) - 1
            return index < 0 or at >= contents[index][1]

        if contents:
            self._locals = [one for one in self._locals if is_outside(one.header)]
            self._entries = [(at, one) for at, one in self._entries if is_outside(at)]
            self._ends = [(at, count) for at, count in self._ends if is_outside(at)]
            self._header_offsets = [at for at in self._header_offsets if is_outside(at)]

    def _whole_directory(self) -> list[tuple[int, Member]]:
        """Return the entries of the directory at the end of the file; none if it isn't complete."""
        end, count = self._ends[-1] if self._ends else (0, 0)
        own = self._entries[-count:] if count else []
        if len(own) < count or not own or end + END.size > self._source.size:
            return []
        comment = int.from_bytes(self._source.read(end + END.size - 2, 2), "little")
        first_end = next((at for at, _ in self._ends if at > own[-1][0]), -1)
        following = [*(at for at, _ in own[1:]), first_end]
        is_whole = end + END.size + comment == self._source.size
        return own if is_whole and [self._entry_ends[at] for at, _ in own] == following else []

    def _set_budget(self, claims: Collection[_StatedSizes]) -> None:
        """Set the limit on bytes read for all records together, enough for records that don't overlap."""
        expanded = sum(one.size for one in {*claims} if one.size > one.stored)
        most = self._source.size * MAX_EXPANSION
        self._free_bytes = max(_MIN_TRIED, _TRIED_IN_ALL // max(len(claims), 1))
        free = self._free_bytes * len(claims)
        self._budget = 2 * (_TRIED_A_BYTE * self._source.size + min(expanded, most) + free)

    def _add(self, signature: bytes, at: int) -> None:
        with suppress(Truncated):  # the file ends inside the description
            if signature == b"PK\x03\x04":
                self._add_local(at)
            elif signature == b"PK\x01\x02":
                self._add_entry(at)
            elif signature == b"PK\x07\x08":
                self._add_descriptor(at)
            else:
                record = _END if signature == b"PK\x05\x06" else _END64
                self._ends.append((at, record.unpack(self._source.read(at, record.size))[0]))

    def _read_names(self, at: int, nbytes: int) -> bytes:
        self._names_left -= nbytes
        if self._names_left < 0:
            found = "headers whose names and extra fields overlap"
            raise LimitExceeded(self._source.path, found)
        return self._source.read(at, nbytes)

    def _add_local(self, at: int) -> None:
        fields = LOCAL.unpack(self._source.read(at, LOCAL.size))
        _, version, flags, method, time, date, crc, stored, size, name_length, extra_length = fields
        if flags & REFUSED_FLAGS or not 0 < name_length <= _LONGEST_NAME:
            return
        names = self._read_names(at + LOCAL.size, name_length + extra_length)
        raw_name, extra = names[:name_length], names[name_length:]
        name = raw_name.decode("utf-8" if flags & UTF8 else "cp437", "backslashreplace")
        stored, size = _wide_sizes(extra, stored, size)
        payload = at + LOCAL.size + len(names)
        modified = (time, date)
        local = Member(name, raw_name, version, flags, method, modified, crc, stored, size, at, payload)
        self._locals.append(local)
        self._header_offsets.append(at)

    def _add_entry(self, at: int) -> None:
        header = self._source.read(at, ENTRY.size)
        data = header + self._read_names(at + ENTRY.size, sum(ENTRY.unpack(header)[10:13]))
        with suppress(DamagedCheckpoint, Unsupported):
            entry, length = directory_entry(self._source.path, data, 0, [])
            if entry.name:
                self._entry_ends[at] = at + length
                self._entries.append((at, entry))
                self._header_offsets.append(at)

    def _add_descriptor(self, at: int) -> None:
        data = self._source.read(at, min(4 + DESCRIPTOR64.size, self._source.size - at))
        for form in (DESCRIPTOR, DESCRIPTOR64):
            if 4 + form.size <= len(data):
                claim = _StatedSizes(*form.unpack_from(data, 4))
                if 0 < claim.stored <= at - LOCAL.size and claim.size:
                    self._claims_at[at - claim.stored].append(claim)
                    self._places_of[claim].append(at - claim.stored)

    # Records at their offsets ----------------------------------------------------------------------

    def rescue_whole(self, members: Iterable[Member]) -> Rescue:
        """Return the records of a zip whose structure is intact, after checking their bytes."""
        members = tuple(members)
        self._is_summed = any(one.crc32 for one in members)
        for member in members:
            fault = self._fault(member)
            if fault is None:
                self._found[member.name] = member
            else:
                self._record_loss(member.name, member, fault)
        kept = tuple(one for one in members if one.name not in self._lost)
        return Rescue(kept, {}, self._lost, (), is_cut=False)

    def rescue(self, findings: list[Finding]) -> Rescue:
        """Return the records whose bytes have a stated checksum."""
        # In order of certainty: entries that agree with a local header in name and offset, other entries, and
        # records with a local header only. Each record found takes its bytes: descriptions inside them are
        # its content. Entries are tried from the end, as a zip's directory comes after all zips inside it.
        aliases: dict[str, Member] = {}
        for is_agreed in (True, False):
            for at, entry, local in self._pairs(is_agreed=is_agreed):
                if not self._is_in_record(at):
                    self._take_pair(entry, local, aliases)
        listed = [one for at, one in self._entries if not self._is_in_record(at)]
        # A complete directory names all records. If it isn't complete, or some are lost, records that have
        # only a local header are searched, too.
        is_whole = self._is_whole and len(listed) == len(self._entries)
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
        """Yield offsets of entries, the entries, and the local headers that may belong to them.

        ``is_agreed``: whether to yield those that agree with a header, by name and offset, or by a name that
        occurs only once; or the others.
        """
        by_name, by_offset = defaultdict(list), {}
        for local in self._locals:
            by_name[local.raw_name].append(local)
            by_offset[local.header] = local
        names = Counter(entry.raw_name for _, entry in self._entries)
        for at, entry in reversed(self._entries):
            alike, there = by_name[entry.raw_name], by_offset.get(entry.header)
            is_alike = there is not None and there.raw_name == entry.raw_name
            if len(alike) > 1 and not (is_alike and there and _claim(entry) in self._claims_of(there)):
                continue  # one of the headers may be in a zip inside
            agreed: list[Member] = [] if there is None or not is_alike else [there]
            if not agreed and len(alike) == names[entry.raw_name] == 1:
                agreed = alike
            if bool(agreed) == is_agreed:
                if agreed or names[entry.raw_name] == 1:
                    others = [there] if there is not None and not is_alike else []
                    yield at, entry, [*agreed, *alike[:_MAX_NAMESAKES], *others, None]
                elif there is not None and not is_alike:  # two entries have the name: take the header's
                    yield at, entry._replace(name=there.name, raw_name=there.raw_name), [there]

    def _take_pair(self, entry: Member, locals: list[Member | None], aliases: dict[str, Member]) -> None:
        if entry.name in self._found:
            return
        places = (
            (place, local) for local in locals for place in islice(self._places(entry, local), _MAX_PLACES)
        )
        here = locals[0]
        proven, fault = self._first_proven(places, entry)
        if proven is None:
            lies = entry if here is None else entry._replace(payload=here.payload)
            self._record_loss(entry.name, lies, self._absence(entry) if here is None else fault)
            return
        place, local = proven
        self._accept(place)
        if local is not None and local.name != entry.name:
            aliases[local.name] = place

    def _first_proven(
        self, places: Iterable[tuple[Member, Member | None]], record: Member
    ) -> tuple[tuple[Member, Member | None] | None, str]:
        """Return the first place whose bytes have the checksum, or the fault of the first place.

        ``places``: records at possible offsets, each with the local header that it is from, or None.
        """
        # ``_fault`` subtracts the bytes that it reads from the common budget. This record's own limit is the
        # value to which the budget may fall; the same place is never tried twice.
        allowed = _TRIED_A_BYTE * record.stored + record.size + self._free_bytes
        limit = max(self._budget - allowed, 0)
        tried: set[tuple[int, _StatedSizes]] = set()
        first = None
        for place, local in places:
            if self._budget <= limit:
                break
            if (key := (place.payload, _claim(place))) in tried:
                continue
            tried.add(key)
            fault = self._fault(place)
            if fault is None:
                return (place, local), ""
            first = first or fault
        return None, first or "not checked: too many contradictory records"

    def _places(self, entry: Member, local: Member | None) -> Iterator[Member]:
        """Yield possible offsets of an entry's record, the likeliest first."""
        # After its local header; before a data descriptor with the same checksum and sizes; and before the
        # next local header or entry, with a descriptor of any length between them: first of the record that
        # follows in the directory, then of all near where the record should end.
        claim = _claim(entry)
        header = entry.header if local is None else local.header
        if local is not None:
            is_there = local.header == entry.header
            own = (one for one in self._claims_of(local) if is_there or one.crc32 == claim.crc32)
            for stated in (claim, *own):  # other descriptors must agree in offset or checksum
                yield _member(entry, stated, header, local.payload)
        if not claim.stored:
            return
        for start in self._places_of.get(claim, ()):
            yield _member(entry, claim, header, start)
        likely = header + LOCAL.size + len(entry.raw_name) + claim.stored
        low, high = (bisect_left(self._header_offsets, likely + step) for step in (-_NEARBY, _NEARBY))
        for end in (*self._next_headers(entry), *self._header_offsets[low:high]):
            for length in _GAPS:
                yield _member(entry, claim, header, end - length - claim.stored)

    def _next_headers(self, entry: Member) -> list[int]:
        """Return the offset of the record after another in the directory, if there is one."""
        at = bisect_right(self._listed_headers, entry.header)
        return self._listed_headers[at : at + 1]

    def _claims_of(self, local: Member) -> Iterator[_StatedSizes]:
        """Yield the claims of data descriptors after a local header's record, and of the header itself."""
        yield from self._claims_at.get(local.payload, ())[:_MAX_PLACES]
        yield _claim(local)

    def _take_locals(self, listed_at: Collection[int]) -> None:
        """Take records with a local header only; those with the same name as another are lost."""
        names = Counter(one.name for one in self._locals if not self._is_in_record(one.header))
        headers = set(self._listed_headers)
        for local in self._locals:
            if local.name in self._found or local.payload in listed_at or self._is_in_record(local.header):
                continue
            if self._is_whole and local.header not in headers:
                continue  # of a zip inside, or of a removed record
            is_only = names[local.name] == 1 and local.name not in self._lost
            places = (_member(local, one, local.header, local.payload) for one in self._claims_of(local))
            proven, fault = self._first_proven(((place, local) for place in places), local)
            if proven is not None and is_only:
                self._accept(proven[0])
            elif not self._is_cut_off(local):
                self._record_loss(local.name, local, fault or "two records share its name")
        # A truncated file ends inside its last record. That one has no checksum to prove it, but readers of
        # tensors can take its beginning: so it is accepted if no record found comes after it.
        last = max((one.payload for one in self._found.values()), default=-1)
        for local in filter(self._is_cut_off, self._locals):
            if local.name in self._found or self._is_in_record(local.header):
                continue
            if local.payload > last:
                self._accept(local)
            else:  # a later record shows that its size is wrong
                self._record_loss(local.name, local, self._absence(local))

    def _is_cut_off(self, local: Member) -> bool:
        """Return whether the file ends inside a stored record, whose beginning may be intact."""
        return local.method == STORED and local.payload <= self._source.size < local.end

    def _accept(self, member: Member) -> None:
        self._found[member.name] = member
        self._place(member)

    def _place(self, member: Member) -> None:
        """Add a record's range to ``_placed_ranges``, with its header if that is directly before it."""
        # The ranges are sorted, and those that overlap or touch are merged, so that ``_is_in_record`` is a
        # bisection.
        has_header = 0 <= member.payload - member.header <= _LONGEST_HEADER
        start, end = member.header if has_header else member.payload, member.end
        low = bisect_left(self._placed_ranges, start, key=lambda one: one[1])
        high = bisect_right(self._placed_ranges, end, key=lambda one: one[0])
        if low < high:
            start, end = min(start, self._placed_ranges[low][0]), max(end, self._placed_ranges[high - 1][1])
        self._placed_ranges[low:high] = [(start, end)]

    def _is_in_record(self, at: int) -> bool:
        """Return whether an offset is inside a record in ``_placed_ranges``."""
        index = bisect_right(self._placed_ranges, at, key=lambda one: one[0]) - 1
        return index >= 0 and at < self._placed_ranges[index][1]

    def _record_loss(self, name: str, member: Member, why: str) -> None:
        """Record a loss; if the record's position is clear, nothing inside it is a record."""
        is_inside = member.payload >= 0 and member.stored and member.end <= self._source.size
        if is_inside and self._has_mark(member.end):
            self._place(member)
        self._lost.setdefault(name, LostRecord(why, member.crc32))

    def _absence(self, member: Member) -> str:
        """Return the reason why the bytes of a record weren't found."""
        if not self._header_offsets or member.payload > self._header_offsets[-1]:
            return f"its bytes are not in the file, which ends at byte {self._source.size:,}"
        return "its bytes were not found" if member.stored else "its size and checksum are not recorded"

    def _has_mark(self, end: int, gaps: Collection[int] = _GAPS) -> bool:
        """Return whether another header or entry follows a record's end, after one of ``gaps``."""
        at = bisect_left(self._header_offsets, end)
        return at < len(self._header_offsets) and self._header_offsets[at] - end in gaps

    def _fault(self, member: Member) -> str | None:
        """Return the reason why bytes aren't those of a record, or None if they have its checksum."""
        # The checksum of no bytes is right at any offset, so an empty record must end where another header
        # begins. The same is asked of all records if the zip has no checksums at all.
        self._budget -= _TRIAL
        if member.method not in (STORED, DEFLATED):
            return f"zip compression method {member.method} is not supported"
        if member.method == STORED and member.size != member.stored:
            return f"{member.stored:,} stored bytes instead of {member.size:,}"
        if member.payload < 0 or member.end > self._source.size:
            return self._absence(member)
        if not member.size or not self._is_summed:
            is_followed = self._has_mark(member.end, _GAPS if member.size else (0,))
            return None if is_followed or not self._header_offsets else self._absence(member)
        if not member.crc32:
            return "its checksum is not recorded"
        try:
            crc = self._sum(member)
        except DamagedCheckpoint as failure:
            return failure.reason
        return None if crc == member.crc32 else f"CRC-32 is {crc:08x} instead of {member.crc32:08x}"

    def _sum(self, member: Member) -> int:
        content: Readable = self._source
        start = member.payload
        if member.method == DEFLATED:
            content = Inflated(self._inflation, start, member.stored, member.size, member.name)
            start = 0
        crc, done = 0, 0
        while done < member.size:
            block = self._buffer[: min(len(self._buffer), member.size - done)]
            self._budget -= len(block)
            content.read_into(start + done, block)
            crc, done = isal_zlib.crc32(block, crc), done + len(block)
        return crc


def _claim(member: Member) -> _StatedSizes:
    return _StatedSizes(member.crc32, member.stored, member.size)


def _member(named: Member, claim: _StatedSizes, header: int, payload: int) -> Member:
    """Return a record with the name of ``named``, and a claim's checksum and sizes, at these offsets."""
    method = STORED if claim.stored == claim.size and named.method not in (STORED, DEFLATED) else named.method
    return named._replace(
        method=method, crc32=claim.crc32, stored=claim.stored, size=claim.size, header=header, payload=payload
    )


def _wide_sizes(extra: bytes, stored: int, size: int) -> tuple[int, int]:
    """Return the stored size and the size, from the ZIP64 field if one is saturated."""
    wide = next((data for kind, data in extra_fields(extra) or () if kind == ZIP64_EXTRA), b"")
    if SATURATED32 not in (stored, size) or len(wide) < 16:
        return stored, size
    wide_size, wide_stored = struct.unpack_from("<2Q", wide)
    return wide_stored, wide_size
