"""The zip directory: whatever is stated twice is compared, and every byte is accounted for."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import pytest

from ckpttool import CheckpointError, DamagedCheckpoint, LimitExceeded, Truncated, Unsupported
from ckpttool.containers.zip_reader import Archive, Member, zip64_field_agrees
from ckpttool.core.readable import Buffer

LOCAL, CENTRAL, END = 30, 46, 22
CONTENT = {"r/data.pkl": b"\x80\2}.", "r/data/0": bytes(range(64)), "r/version": b"3\n"}


def written(
    method: int = ZIP_STORED, *, contents: dict[str, bytes] = CONTENT, force_zip64: bool = False
) -> bytes:
    """Return an archive that Python's zipfile wrote."""
    buffer = io.BytesIO()
    with ZipFile(buffer, "w", method) as archive:
        for name, content in contents.items():
            info = ZipInfo(name)
            info.compress_type = method
            with archive.open(info, "w", force_zip64=force_zip64) as record:
                record.write(content)
    return buffer.getvalue()


def opened(data: bytes) -> Archive:
    return Archive(Buffer("some.zip", data))


def codes(data: bytes) -> set[str]:
    """Return the codes of what is wrong with an archive, whether it opens or not."""
    try:
        archive = opened(data)
        for member in archive.members:
            archive.read(member)
        return {finding.code for finding in archive.findings}
    except CheckpointError as error:
        return {error.code}


def mismatches(data: bytes) -> bool:
    """Tell whether the content of any record has another checksum than the directory says."""
    archive = opened(data)
    return any(zlib.crc32(archive.read(member)) != member.crc32 for member in archive.members)


def directory_at(data: bytes) -> int:
    (offset,) = struct.unpack_from("<I", data, len(data) - END + 16)
    return offset


# What zipfile and torch write -----------------------------------------------------------------------


@pytest.mark.parametrize("method", [ZIP_STORED, ZIP_DEFLATED])
@pytest.mark.parametrize("force_zip64", [False, True])
def test_archives_of_the_standard_library(method: int, force_zip64: bool) -> None:
    data = written(method, force_zip64=force_zip64)
    archive = opened(data)
    assert archive.findings == []
    assert {member.name: archive.read(member) for member in archive.members} == CONTENT
    with ZipFile(io.BytesIO(data)) as expected:
        assert [
            (info.filename, info.CRC, info.compress_size, info.file_size) for info in expected.infolist()
        ] == [(member.name, member.crc32, member.stored, member.size) for member in archive.members]


def test_an_archive_without_records() -> None:
    assert opened(written(contents={})).members == ()


@pytest.mark.parametrize(
    "name", ["guide.pth", "alignment4096.pth", "minimal.pth", "deflated.pth", "nocrc.pth"]
)
def test_archives_of_torch(files: Path, name: str) -> None:
    path = files / "pytorch" / name
    archive = opened(path.read_bytes())
    assert archive.findings == []
    with ZipFile(path) as expected:
        for member, info in zip(archive.members, expected.infolist(), strict=True):
            assert (member.name, member.size, member.crc32) == (info.filename, info.file_size, info.CRC)
            if archive.has_checksums:
                assert archive.read(member) == expected.read(info)


def test_many_records_need_zip64() -> None:
    """The end record counts to 65,535."""
    data = written(contents={f"r/{n}": b"" for n in range(66_000)})
    assert len(opened(data).members) == 66_000


@pytest.mark.framework
def test_many_records_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "many.pt"))
    for n in range(70_000):
        writer.write_record(f"data/{n}", b"", 0)
    writer.write_end_of_file()
    archive = opened((tmp_path / "many.pt").read_bytes())
    assert len(archive.members) >= 70_000
    assert archive.findings == []


# Every field ----------------------------------------------------------------------------------------

LOCAL_FIELDS = {
    "magic": (0, 4),
    "version": (4, 2),
    "flags": (6, 2),
    "method": (8, 2),
    "time": (10, 2),
    "date": (12, 2),
    "checksum": (14, 4),
    "stored": (18, 4),
    "size": (22, 4),
    "name length": (26, 2),
    "extra length": (28, 2),
    "name": (30, len("r/data.pkl")),
}
CENTRAL_FIELDS = {
    "magic": (0, 4),
    "version": (6, 2),
    "flags": (8, 2),
    "method": (10, 2),
    "time": (12, 2),
    "date": (14, 2),
    "checksum": (16, 4),
    "stored": (20, 4),
    "size": (24, 4),
    "name length": (28, 2),
    "extra length": (30, 2),
    "comment length": (32, 2),
    "disk": (34, 2),
    "offset": (42, 4),
    "name": (46, len("r/data.pkl")),
}
END_FIELDS = {
    "magic": (0, 4),
    "disk": (4, 2),
    "first disk": (6, 2),
    "count here": (8, 2),
    "count": (10, 2),
    "directory size": (12, 4),
    "directory offset": (16, 4),
    "comment length": (20, 2),
}


LARGE = (1 << 32) + 8


def flips(data: bytes, start: int, field: tuple[int, int]) -> Iterator[bytes]:
    """Yield the data with each bit of a field flipped."""
    offset, width = field
    for bit in range(8 * width):
        changed = bytearray(data)
        changed[start + offset + bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


@pytest.mark.parametrize("method", [ZIP_STORED, ZIP_DEFLATED])
@pytest.mark.parametrize("field", LOCAL_FIELDS)
def test_fields_of_a_local_header(method: int, field: str) -> None:
    for changed in flips(written(method), 0, LOCAL_FIELDS[field]):
        assert codes(changed)


@pytest.mark.parametrize("method", [ZIP_STORED, ZIP_DEFLATED])
def test_sizes_in_the_zip64_field_of_a_local_header(method: int) -> None:
    data = written(method, force_zip64=True)
    sizes = 30 + int.from_bytes(data[26:28], "little") + 4
    assert data[sizes - 4 : sizes] == b"\x01\0\x10\0"
    for changed in flips(data, sizes, (0, 16)):
        assert codes(changed) == {"zip-headers-disagree"}


@pytest.mark.parametrize(
    ("flags", "told", "agrees"),
    [
        (0x0808, (LARGE, 0), True),  # as torch.save writes a tensor of over 4 GiB
        (0x0808, (LARGE, 0, 64), True),
        (0x0808, (64,), True),  # and a small one behind it
        (0x0808, (LARGE + 1, 0), False),
        (0x0808, (65,), False),
        (0, (LARGE, LARGE), True),
        (0, (LARGE, 0), False),
    ],
)
def test_zip64_fields_as_pytorch_writes_them(flags: int, told: tuple[int, ...], agrees: bool) -> None:
    member = Member("a", b"a", 0, flags, ZIP_STORED, (0, 0), 0, LARGE, LARGE, 64)
    wide = struct.pack(f"<{len(told)}Q", *told)
    assert zip64_field_agrees(member, [wide], 0, 0) == agrees


@pytest.mark.parametrize("method", [ZIP_STORED, ZIP_DEFLATED])
@pytest.mark.parametrize("field", CENTRAL_FIELDS)
def test_fields_of_a_central_entry(method: int, field: str) -> None:
    data = written(method)
    for changed in flips(data, directory_at(data), CENTRAL_FIELDS[field]):
        assert codes(changed) or mismatches(changed)


@pytest.mark.parametrize("field", END_FIELDS)
def test_fields_of_the_end_record(field: str) -> None:
    data = written()
    for changed in flips(data, len(data) - END, END_FIELDS[field]):
        assert codes(changed)


def zip64(files: Path) -> bytes:
    """Return an archive with ZIP64 records, data descriptors and padding: what torch writes."""
    return (files / "pytorch" / "guide.pth").read_bytes()


NOT_COMPARED = range(12, 16)
"""Who made the archive, and the version needed: stated once in the ZIP64 record, and used by nobody."""


def test_fields_of_the_zip64_records(files: Path) -> None:
    data = zip64(files)
    record = len(data) - END - 20 - 56
    assert data[record : record + 4] == b"PK\6\6"
    for at in sorted(set(range(56 + 20)) - set(NOT_COMPARED)):
        for changed in flips(data, record, (at, 1)):
            assert codes(changed), f"byte {at} of the ZIP64 record and its locator"


def test_data_descriptors_and_padding(files: Path) -> None:
    data = zip64(files)
    first, second = opened(data).members[:2]
    between = range(first.end, second.header)
    padding = range(LOCAL + len(first.raw_name), first.payload)
    assert len(between) == 16
    for at in (*between, *padding):
        for changed in flips(data, at, (0, 1)):
            assert codes(changed), f"byte {at}"


# What readers obey, and no writer says --------------------------------------------------------------


def changed_entry(offset: int, layout: str, value: int, *, local: int | None = None) -> bytes:
    """Return an archive with a field of its first entry, and maybe of the local header, changed."""
    data = bytearray(written())
    struct.pack_into(layout, data, directory_at(bytes(data)) + offset, value)
    if local is not None:
        struct.pack_into(layout, data, local, value)
    return bytes(data)


def recorded(
    name: str = "r/data/0", content: bytes = b"1234", attributes: int = 0, extra: bytes = b"", method: int = 0
) -> bytes:
    """Return an archive of one record that Python's zipfile wrote as it was told."""
    buffer, info = io.BytesIO(), ZipInfo("placeholder")
    info.filename, info.external_attr, info.extra, info.compress_type = name, attributes, extra, method
    with ZipFile(buffer, "w") as archive:
        archive.writestr(info, content)
    return buffer.getvalue()


def unicode_path(name: bytes, of: bytes) -> bytes:
    return struct.pack("<2HBI", 0x7075, 5 + len(name), 1, zlib.crc32(of)) + name


TIMES = b"UT\5\0\3B\0\x0ck" + b"ux\x0b\0\1\4\0\0\0\0\4\0\0\0\0"
"""What Info-ZIP's zip 3.0 puts into the directory."""


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (changed_entry(38, "<I", 0x01800010), "zip-header"),  # miniz: a directory
        (changed_entry(38, "<I", 0x00000008), "zip-header"),
        (changed_entry(38, "<I", 0o040755 << 16), "zip-header"),
        (changed_entry(38, "<I", 0o120777 << 16), "zip-header"),
        (changed_entry(6, "<H", 64, local=4), "zip-version"),  # zipfile refuses more than 63
        (changed_entry(8, "<H", 0x0010, local=6), "zip-header"),
        (changed_entry(8, "<H", 0x2000, local=6), "zip-encrypted"),  # miniz refuses it
        (changed_entry(8, "<H", 0x0040, local=6), "zip-encrypted"),  # zipfile refuses it
        (recorded("r/data/0/"), "zip-header"),  # miniz reads nothing of it
        (recorded("r/data/0\0.txt"), "zip-header"),  # zipfile ends it at the NUL
        (recorded(extra=unicode_path(b"r/data/1", b"r/data/0")), "zip-header"),  # zipfile takes this name
        (recorded(extra=unicode_path(b"r/data/0", b"r/data/1")), "zip-header"),
        (recorded(extra=b"\x99\x99\1\0x"), "zip-header"),
        (recorded(extra=b"UT\x09\0x"), "zip-header"),
        (recorded(extra=struct.pack("<2HQ", 1, 8, 5)), "zip-headers-disagree"),
    ],
)
def test_values_that_no_writer_sets(data: bytes, code: str) -> None:
    assert code in codes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed_entry(38, "<I", 0x10), "attributes 0x00000010 mark it as a directory; loaders may skip it"),
        (changed_entry(38, "<I", 0x40), "attributes 0x00000040 mark it as a device; loaders may skip it"),
        (
            changed_entry(38, "<I", 0o120777 << 16),
            "attributes 0xa1ff0000 mark it as a symbolic link; loaders may skip it",
        ),
        (recorded(extra=b"UT\x09\0x"), "the directory's extra field is malformed"),
    ],
)
def test_messages_of_values_that_no_writer_sets(data: bytes, message: str) -> None:
    assert message in {one.message for one in opened(data).findings}


@pytest.mark.parametrize(
    "data",
    [
        recorded(attributes=0x81A40000, extra=TIMES),  # zip 3.0
        recorded(attributes=0x81A40000, extra=TIMES, method=ZIP_DEFLATED),
        recorded("r/", b"", 0x41ED0010, extra=TIMES),
        recorded("r/", b"", 0x41ED0010, method=ZIP_DEFLATED),
        recorded(attributes=0x20),  # Windows: to be archived
        recorded(attributes=0o100644 << 16 | 0x4000),  # macOS
        recorded("r/data/\u00e4"),
        recorded(extra=unicode_path(b"r/data/0", b"r/data/0")),
        recorded(extra=b"\xfe\xca\0\0"),  # jar
        recorded(extra=b"\x35\xd9\x06\0\x04\0\0\0\0\0"),  # zipalign
    ],
)
def test_values_that_writers_set(data: bytes) -> None:
    assert codes(data) == set()


# Around the records ---------------------------------------------------------------------------------


def test_trailing_bytes() -> None:
    assert codes(written() + b"more") == {"trailing-bytes"}


def test_a_comment() -> None:
    data = written()
    assert codes(data[:-2] + struct.pack("<H", 3) + b"abc") == {"zip-comment"}


def test_an_end_record_inside_a_comment() -> None:
    data, inner = written(), written(contents={})
    assert codes(data[:-2] + struct.pack("<H", len(inner)) + inner)


def spliced(data: bytes, at: int, more: bytes) -> bytes:
    """Return an archive with bytes inserted before its directory, and all offsets behind them moved."""
    changed = bytearray(data[:at] + more + data[at:])
    directory = directory_at(data) + len(more)
    struct.pack_into("<I", changed, len(changed) - END + 16, directory)
    entry = directory
    while changed[entry : entry + 4] == b"PK\1\2":
        (offset,) = struct.unpack_from("<I", changed, entry + 42)
        struct.pack_into("<I", changed, entry + 42, offset + (len(more) if offset >= at else 0))
        entry += CENTRAL + sum(struct.unpack_from("<3H", changed, entry + 28))
    return bytes(changed)


@pytest.mark.parametrize("length", [1, 12, 16, 24, 4096])
def test_gaps(length: int) -> None:
    data = written()
    second = opened(data).members[1]
    assert codes(spliced(data, second.header, bytes(length))) <= {"zip-gap", "zip-headers-disagree"} != set()
    assert codes(spliced(data, directory_at(data), bytes(length)))
    assert codes(spliced(data, 0, bytes(length))) == {"zip-gap"}


def test_records_that_overlap() -> None:
    data = bytearray(written())
    entry = directory_at(bytes(data))
    lengths = struct.unpack_from("<3H", data, entry + 28)
    struct.pack_into("<I", data, entry + CENTRAL + sum(lengths) + 42, 0)
    assert codes(bytes(data)) == {"zip-overlap"}


def test_a_record_that_reaches_a_byte_into_the_next() -> None:
    data = bytearray(written(contents={"r/data/0": b"first", "r/data/1": b"second"}))
    longer = b"firstP"
    for checksum in (14, directory_at(bytes(data)) + 16):
        struct.pack_into("<3I", data, checksum, zlib.crc32(longer), len(longer), len(longer))
    assert codes(bytes(data)) == {"zip-overlap"}


def test_a_record_inside_the_payload_of_another() -> None:
    inner = written(contents={"r/data/1": b"inner"})
    data = bytearray(written(contents={"r/data/0": inner, "r/data/1": b"outer"}))
    entry = directory_at(bytes(data))
    second = entry + CENTRAL + len("r/data/0")
    struct.pack_into("<I", data, second + 42, LOCAL + len("r/data/0"))
    assert codes(bytes(data)) == {"zip-overlap"}


def test_two_entries_for_one_record() -> None:
    data = bytearray(written(contents={"r/data/0": b"same", "r/data/1": b"same"}))
    second = directory_at(bytes(data)) + CENTRAL + len("r/data/0")
    struct.pack_into("<I", data, second + 42, 0)
    assert codes(bytes(data)) == {"zip-overlap"}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_names_are_both_seen() -> None:
    """Which of them a reader takes differs, so whoever looks names up must refuse them."""
    buffer = io.BytesIO()
    with ZipFile(buffer, "w") as archive:
        archive.writestr("r/data.pkl", b"first")
        archive.writestr("r/data.pkl", b"second")
    archive = opened(buffer.getvalue())
    assert [archive.read(member) for member in archive.members] == [b"first", b"second"]


@pytest.mark.parametrize("kept", range(0, 400, 7))
def test_truncated_archives(kept: int) -> None:
    data = written()
    with pytest.raises(Truncated):
        opened(data[: len(data) - 1 - kept])


# Compression ----------------------------------------------------------------------------------------


def with_size(data: bytes, size: int) -> bytes:
    """Return an archive whose headers of the first record both claim another size."""
    changed = bytearray(data)
    struct.pack_into("<I", changed, 22, size)
    struct.pack_into("<I", changed, directory_at(data) + 24, size)
    return bytes(changed)


BOMB = {"r/data.pkl": bytes(1 << 20)}


@pytest.mark.parametrize("size", [0, 16, (1 << 20) - 1, (1 << 20) + 1])
def test_records_that_inflate_to_another_size(size: int) -> None:
    archive = opened(with_size(written(ZIP_DEFLATED, contents=BOMB), size))
    with pytest.raises(DamagedCheckpoint):
        archive.read(archive.members[0])


def test_records_that_inflate_beyond_all_limits() -> None:
    archive = opened(with_size(written(ZIP_DEFLATED, contents=BOMB), 0xFFFFFFFE))
    with pytest.raises(LimitExceeded):
        archive.read(archive.members[0])


def test_compression_that_nobody_uses() -> None:
    changed = bytearray(written())
    struct.pack_into("<H", changed, 8, 12)
    struct.pack_into("<H", changed, directory_at(bytes(changed)) + 10, 12)
    with pytest.raises(Unsupported):
        opened(bytes(changed))


def test_any_flipped_bit_is_answered(files: Path) -> None:
    for data in (written(), written(ZIP_DEFLATED, force_zip64=True)):
        for at in range(len(data)):
            for changed in flips(data, at, (0, 1)):
                codes(changed)


class Counted(Buffer):
    """Bytes that count how often, and how many of them, are read."""

    __slots__ = ("reads",)

    def __init__(self, path: str, data: bytes) -> None:
        super().__init__(path, data)
        self.reads: list[int] = []

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        self.reads.append(len(buffer))
        super().read_into(offset, buffer, where)


def test_headers_of_small_neighbours_are_read_together_and_large_records_not_at_all() -> None:
    small = {f"r/data/{number}": bytes(100) for number in range(300)}
    large = {f"r/large/{number}": bytes(1 << 20) for number in range(3)}
    source = Counted("some.zip", written(contents={**small, **large, "r/version": b"3\n"}))
    archive = Archive(source)
    source.reads.clear()
    assert [member.name for member in archive.members][:2] == ["r/data/0", "r/data/1"]
    assert not archive.findings
    assert len(source.reads) < 20
    assert sum(source.reads) < 100_000
