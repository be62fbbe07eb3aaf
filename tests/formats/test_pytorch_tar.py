"""The first format: a tar whose every byte is accounted for."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import CheckpointError, DamagedCheckpoint, Truncated, open_checkpoint
from tests.support.thorough import spread

Members = list[tuple[tarfile.TarInfo, bytes]]
BLOCK = 512


@pytest.fixture
def honest(files: Path) -> bytes:
    return (files / "pytorch-legacy" / "tar.pth").read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "first.pth"


@pytest.fixture
def rebuilt(honest: bytes, path: Path) -> Callable[..., Path]:
    """Return what writes the honest tar again, with its members changed."""

    def rebuild(change: Callable[[Members], object], format: int = tarfile.USTAR_FORMAT) -> Path:
        with tarfile.open(fileobj=io.BytesIO(honest)) as archive:
            members = [(entry, archive.extractfile(entry).read()) for entry in archive]  # type: ignore[union-attr]
        change(members)
        with tarfile.open(path, "w", format=format) as archive:
            for entry, content in members:
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        return path

    return rebuild


def refused(path: Path) -> DamagedCheckpoint:
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(path)
    return caught.value


def codes(path: Path) -> list[str]:
    with open_checkpoint(path) as checkpoint:
        return [finding.code for finding in checkpoint.findings]


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
def test_formats_that_tar_files_had(rebuilt, format: int) -> None:
    assert codes(rebuilt(lambda members: None, format)) == []


def test_the_order_of_the_members_is_free(rebuilt) -> None:
    assert codes(rebuilt(lambda members: members.reverse())) == []


def test_only_regular_files(rebuilt) -> None:
    cases = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, b"S", b"L"]
    for kind in cases:
        path = rebuilt(lambda members, kind=kind: members.append((entry("extra", kind, "/etc/passwd"), b"")))
        assert refused(path).code == "tar-member", kind


def test_a_regular_file_with_a_link(rebuilt) -> None:
    def change(members: Members) -> None:
        members[1][0].linkname = "/etc/passwd"

    assert refused(rebuilt(change)).code == "tar-member"


def test_a_second_or_unknown_member(rebuilt) -> None:
    for name in ["pickle", "other", "../pickle", "x" * 99]:
        assert (
            refused(rebuilt(lambda members, name=name: members.append((entry(name), b"x")))).code
            == "tar-member"
        ), name


def test_a_missing_member(rebuilt) -> None:
    for index in range(4):
        assert refused(rebuilt(lambda members, index=index: members.pop(index))).code == "tar-member", index


def test_bytes_behind_what_a_member_holds(rebuilt) -> None:
    for index in range(4):

        def change(members: Members, index: int = index) -> None:
            members[index] = (members[index][0], members[index][1] + b"more")

        assert codes(rebuilt(change)) == ["trailing-bytes"], index


@pytest.mark.parametrize("index", range(4))
def test_every_truncation_of_a_member(rebuilt, honest: bytes, index: int) -> None:
    with tarfile.open(fileobj=io.BytesIO(honest)) as archive:
        length = archive.getmembers()[index].size
    for kept in spread(range(length), 50):

        def change(members: Members, kept: int = kept) -> None:
            members[index] = (members[index][0], members[index][1][:kept])

        refused(rebuilt(change))


def test_bytes_behind_the_end(honest: bytes, path: Path) -> None:
    path.write_bytes(honest + b"x" * BLOCK)
    assert codes(path) == ["trailing-bytes"]


def test_padding_must_be_zero(honest: bytes, path: Path) -> None:
    changed = bytearray(honest)
    changed[-1] = 1
    with tarfile.open(fileobj=io.BytesIO(honest)) as archive:
        first = archive.getmembers()[0]
    changed[first.offset_data + first.size] = 1
    path.write_bytes(changed)
    assert codes(path) == ["tar-padding", "tar-padding"]


def test_every_byte_of_a_header_is_checked(honest: bytes, path: Path) -> None:
    changed = bytearray(honest)
    for at in range(BLOCK):
        changed[at] ^= 1
        path.write_bytes(changed)
        changed[at] ^= 1
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_truncation_at_every_byte(honest: bytes, path: Path) -> None:
    """Of a tar, what fills the last record may be missing."""
    end = len(honest.rstrip(b"\0"))
    needed = -(-end // BLOCK) * BLOCK + 2 * BLOCK
    for kept in [*range(600), *range(600, needed, 13), needed - 1]:
        path.write_bytes(honest[:kept])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)
    path.write_bytes(honest[:needed])
    assert codes(path) == []


def test_any_flipped_byte_is_answered(honest: bytes, path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(honest)) as archive:
        contents = [range(member.offset_data, member.offset_data + member.size) for member in archive]
    changed = bytearray(honest)
    for at in spread([offset for content in contents for offset in content], 100):
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        changed[at] ^= 1 << at % 8
        try:
            with open_checkpoint(path) as checkpoint:
                assert all(len(tensor.tobytes()) == tensor.nbytes for tensor in checkpoint.tensors)
        except CheckpointError:
            pass


def rows(storages: bytes, tensors: bytes) -> Callable[[Members], None]:
    """Return what replaces the members that hold values."""

    def change(members: Members) -> None:
        held = {"storages": storages, "tensors": tensors}
        members[:] = [(info, held.get(info.name, content)) for info, content in members]

    return change


def storage(key: int = 1, count: int = 4, *, kind: bytes = b"FloatStorage") -> bytes:
    row = b"\x80\2K" + bytes([key]) + b"X\3\0\0\0cpuctorch\n" + kind + b"\n\x87."
    return row + struct.pack("<q", count) + bytes(16)


def tensor(key: int, storage_key: int = 1, shape: tuple[int, ...] = (4,), offset: int = 0) -> bytes:
    row = b"\x80\2K" + bytes([key]) + b"K" + bytes([storage_key]) + b"ctorch\nFloatTensor\n\x87."
    strides = (1,) * len(shape)
    return row + struct.pack(f"<ii{2 * len(shape)}qq", len(shape), 0, *shape, *strides, offset)


ONE = pickle.dumps(1, 2)
FOUR = pickle.dumps(4, 2)
NO_VIEWS = pickle.dumps([], 2)
TENSORS = FOUR + b"".join(tensor(key) for key in range(10, 14))


def test_the_rows_that_these_tests_change_are_honest(rebuilt) -> None:
    assert codes(rebuilt(rows(ONE + storage() + NO_VIEWS, TENSORS))) == []


def test_damaged_storages(rebuilt) -> None:
    cases = [
        pickle.dumps(2, 2) + storage() + storage() + NO_VIEWS,  # one key twice
        pickle.dumps(10**12, 2) + storage() + NO_VIEWS,
        pickle.dumps(-1, 2) + NO_VIEWS,
        pickle.dumps("1", 2) + storage() + NO_VIEWS,
        ONE + storage(count=-4) + NO_VIEWS,
        ONE + storage(count=2**62) + NO_VIEWS,
        ONE + storage(kind=b"Storage") + NO_VIEWS,
        ONE + storage() + pickle.dumps([(2, 1, 3, 2)], 2),  # a view beyond the end
        ONE + storage() + pickle.dumps([(2, 9, 0, 2)], 2),
        ONE + storage() + pickle.dumps([(1, 1, 0, 2)], 2),
        ONE + storage() + pickle.dumps([(2, 1, 0)], 2),
        ONE + storage() + pickle.dumps(7, 2),
    ]
    for storages in cases:
        refused(rebuilt(rows(storages, TENSORS)))


def test_damaged_tensors(rebuilt) -> None:
    cases = [
        tensor(12),  # one key twice
        tensor(1),  # the key of a storage
        tensor(13, storage_key=9),
        tensor(13, shape=(5,)),
        tensor(13, shape=(-1,)),
        tensor(13, offset=1),
        tensor(13, offset=-1),
        tensor(13, shape=(2**31, 2**31)),
        tensor(13, shape=(1,) * 65),
        b"\x80\2N.",
    ]
    for last in cases:
        tensors = FOUR + b"".join(tensor(key) for key in range(10, 13)) + last
        refused(rebuilt(rows(ONE + storage() + NO_VIEWS, tensors)))


def test_a_reference_to_nothing(rebuilt) -> None:
    three = pickle.dumps(3, 2) + b"".join(tensor(key) for key in range(10, 13))
    assert refused(rebuilt(rows(ONE + storage() + NO_VIEWS, three))).code == "tensor-damaged"


def test_every_pickle_is_judged(rebuilt) -> None:
    for index in range(4):

        def change(members: Members, index: int = index) -> None:
            members[index] = (members[index][0], b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R.")

        assert "unsafe-import" in {finding.code for finding in refused_or_opened(rebuilt(change))}, index


def refused_or_opened(path: Path) -> tuple:
    try:
        with open_checkpoint(path) as checkpoint:
            return checkpoint.safety
    except DamagedCheckpoint as error:
        return error.safety


def test_a_tar_that_ends_in_a_member_is_truncated(honest: bytes, path: Path) -> None:
    path.write_bytes(honest[:2000])
    assert isinstance(refused(path), Truncated)
