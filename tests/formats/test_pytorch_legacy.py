"""The old format: what its parts say of each other, and what happens to damaged ones."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpttool import CheckpointError, DamagedCheckpoint, Truncated, open_checkpoint
from tests.support.thorough import spread

MAGIC = 0x1950A86A20F9469CFC6C
INFO = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
STORAGE = b"((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0%sX\3\0\0\0cpuK%s%stQ"
OBJECT = b"\x80\2}X\1\0\0\0wctorch._utils\n_rebuild_tensor\n%sK\0K\2\x85K\1\x85tRs."


def stored(key: bytes = b"7", count: int = 2, view: bytes = b"N") -> bytes:
    """Return the opcodes of a mark and a storage behind it."""
    return STORAGE % (key, bytes([count]), view)


def write(path: Path, content: bytes, keys: Sequence[str], tail: bytes, *, head: bytes | None = None) -> Path:
    """Write a file of the old format around a pickled object."""
    start = b"".join(pickle.dumps(part, 2) for part in (MAGIC, 1001, INFO)) if head is None else head
    path.write_bytes(start + content + pickle.dumps(list(keys), 2) + tail)
    return path


TWO = struct.pack("<q2f", 2, 1.0, 2.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "old.pth"


def refused(path: Path) -> DamagedCheckpoint:
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(path)
    return caught.value


def test_the_least_file_opens(path: Path) -> None:
    with open_checkpoint(write(path, OBJECT % stored(), ["7"], TWO)) as checkpoint:
        assert checkpoint["w"].tobytes() == TWO[8:]
        assert [(span.extent.nbytes, span.dtype and span.dtype.name) for span in checkpoint.spans()] == [
            (8, "float32")
        ]
        assert checkpoint.findings == checkpoint.safety == ()


def test_keys_and_sizes_must_be_the_announced_ones(path: Path) -> None:
    cases = [
        ([], b"", "storage-missing"),
        (["7", "8"], TWO + TWO, "storage-unknown"),
        (["7", "7"], TWO + TWO, "storage-missing"),
        (["8"], TWO, "storage-missing"),
        (["7"], struct.pack("<q3f", 3, 1, 2, 3), "storage-size"),
        (["7"], struct.pack("<q2f", -2, 1, 2), "storage-size"),
        (["7"], struct.pack(">q2f", 2, 1, 2), "storage-size"),
    ]
    for keys, tail, code in cases:
        assert refused(write(path, OBJECT % stored(), keys, tail)).code == code, code


def test_truncated_storage(path: Path) -> None:
    for kept in range(len(TWO)):
        assert isinstance(refused(write(path, OBJECT % stored(), ["7"], TWO[:kept])), Truncated), kept


def test_trailing_bytes(path: Path) -> None:
    with open_checkpoint(write(path, OBJECT % stored(), ["7"], TWO + b"abc")) as checkpoint:
        assert [finding.code for finding in checkpoint.findings] == ["trailing-bytes"]


def test_head_must_be_as_torch_writes_it(path: Path) -> None:
    cases = [
        [MAGIC, 1002, INFO],
        [MAGIC, None, INFO],
        [MAGIC, 1001, [INFO]],
        [[MAGIC], 1001, INFO],
    ]
    for head in cases:
        start = b"".join(pickle.dumps(part, 2) for part in head)
        assert refused(write(path, OBJECT % stored(), ["7"], TWO, head=start)).code == "damaged", head


def test_views_of_storages_stay_inside(path: Path) -> None:
    cases = [
        b"X\1\0\0\0vK\1K\2\x87",  # one element too far
        b"X\1\0\0\0vJ\xff\xff\xff\xffK\2\x87",  # from -1 on
        b"X\1\0\0\0vK\0N\x87",
        b"X\1\0\0\x007K\0K\2\x87",  # its own key
        b"K\1K\0K\2\x87",
        b"X\1\0\0\0vK\0\x86",
        b"K\1",
    ]
    for view in cases:
        refused(write(path, OBJECT % stored(view=view), ["7"], TWO))


def test_one_storage_announced_in_two_sizes(path: Path) -> None:
    both = b"\x80\2" + stored() + stored(count=1) + b"t."
    assert refused(write(path, both.replace(b"((", b"(", 1), ["7"], TWO)).code == "storage-size"


CLASS = b"(X\6\0\0\0modulec__main__\nNet\nX\6\0\0\0net.pyX\x0d\0\0\0class Net: xxtQ"


def test_source_text_is_told_and_not_shown(path: Path) -> None:
    content = b"\x80\2" + CLASS + b")\x81}b."
    with open_checkpoint(write(path, content, [], b"")) as checkpoint:
        assert checkpoint.metadata["embedded source"] == {"__main__.Net": "net.py, 13 characters"}
        assert "class Net" not in repr(checkpoint.metadata)
        assert [finding.code for finding in checkpoint.safety] == ["unknown-class"]


def test_calling_anything_but_a_class_is_no_honest_pickle(path: Path) -> None:
    target = b"cbuiltins\ngetattr\nctorch._C\n_VariableFunctionsClass\nX\x09\0\0\0from_file\x86R"
    named = b"(X\6\0\0\0module" + target + b"NNtQ"
    with open_checkpoint(write(path, b"\x80\2" + named + b")R.", [], b"")) as checkpoint:
        assert "unsafe-call" in {finding.code for finding in checkpoint.safety}
    for content in (stored()[1:] + b")R.", b"K\1Q)R."):
        error = refused(write(path, b"\x80\2" + content, [], b""))
        assert "unsafe-pickle" in {finding.code for finding in error.safety}


def test_what_was_seen_before_the_damage_is_told(path: Path) -> None:
    call = b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R."
    assert {f.code for f in refused(write(path, call, ["7"], TWO)).safety} == {"unsafe-import"}


def test_any_flipped_byte_is_answered(files: Path, path: Path) -> None:
    whole = bytearray((files / "pytorch-legacy" / "storage_views_legacy.pth").read_bytes())
    for at in range(len(whole)):
        for mask in (0x01, 0x80):
            whole[at] ^= mask
            path.write_bytes(whole)
            whole[at] ^= mask
            answer(path)


@pytest.mark.parametrize("name", ["storage_views_legacy.pth", "views_legacy.pth"])
def test_every_truncation_is_noticed(files: Path, path: Path, name: str) -> None:
    whole = (files / "pytorch-legacy" / name).read_bytes()
    for kept in spread(range(len(whole)), 120):
        path.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def answer(path: Path) -> None:
    """Open and read a file as far as it goes."""
    try:
        with open_checkpoint(path) as checkpoint:
            assert all(len(tensor.tobytes()) == tensor.nbytes for tensor in checkpoint.tensors)
            assert checkpoint.metadata is not None
            assert checkpoint.training is not None
    except CheckpointError:
        pass


@pytest.mark.framework
@pytest.mark.parametrize("protocol", range(1, 6))
def test_every_pickle_protocol_that_torch_writes(path: Path, protocol: int) -> None:
    torch = pytest.importorskip("torch")
    saved = {"epoch": 3, "w": torch.arange(5.0), "tied": torch.ones(2, 3).t()}
    torch.save(saved, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.variant, checkpoint.training.epoch) == ("legacy", 3)
        for name in ("w", "tied"):
            assert checkpoint[name].tobytes() == saved[name].contiguous().numpy().tobytes()


@pytest.mark.framework
def test_persistent_ids_of_protocol_0_are_text_that_torch_refuses_too(path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(1)}, path, pickle_protocol=0, _use_new_zipfile_serialization=False)
    with pytest.raises(AssertionError):
        torch.load(path, weights_only=False)
    assert refused(path).code == "tensor-damaged"


@pytest.mark.framework
def test_values_are_little_endian_whatever_machine_wrote_them(path: Path) -> None:
    torch = pytest.importorskip("torch")
    head = b"".join(pickle.dumps(part, 2) for part in (MAGIC, 1001, INFO | {"little_endian": False}))
    write(path, OBJECT % stored(), ["7"], TWO, head=head)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["w"].tobytes() == torch.load(path)["w"].numpy().tobytes()
