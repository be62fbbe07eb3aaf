"""Chunks of distributed checkpoints in safetensors: the real ones, and how they can disagree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool import Checkpoint, open_checkpoint, verify
from ckpttool.core.tensor import Extent
from ckpttool.testing import recorded_reads
from tests.support.commands import Run
from tests.support.frameworks import python_with_frameworks
from tests.support.opening import paths_in

FILES = Path(__file__).parents[2] / "fixtures" / "files"
CHUNKS = FILES / "torch-dcp" / "in-safetensors"
FIRST = "shard-00001-model-00001-of-00002.safetensors"
SECOND = "shard-00002-model-00001-of-00002.safetensors"
SHARDING = "DCP_SHARDING_INFO"


def copied(into: Path) -> Path:
    target = into / "saved"
    shutil.copytree(CHUNKS, target)
    return target


def codes(opened: Checkpoint) -> set[str]:
    """Return what was found, but for what is true of all such files."""
    return {finding.code for finding in opened.findings} - {"ranks-unknown"}


def rewritten(into: Path, change: Callable[[dict[str, Any]], object], name: str = SECOND) -> Path:
    """Return a copy of the fixture where one file says something else of its chunks."""
    target = copied(into)
    path = target / name
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    told = json.loads(header["__metadata__"][SHARDING])
    text_instead = change(told)
    header["__metadata__"][SHARDING] = text_instead if isinstance(text_instead, str) else json.dumps(told)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return target


def test_the_directory_is_one_checkpoint(tmp_path: Path) -> None:
    target = copied(tmp_path)
    assert paths_in(tmp_path) == [target]
    with open_checkpoint(target) as opened:
        assert (codes(opened), opened.safety, opened.complete) == (set(), (), True)
        assert opened.findings[0].message.startswith("2 ranks; the files don't record")
        assert len(opened.files) == 4
        assert opened["weight"].extent is None
        assert opened["bias"].extent is not None


def test_chunks_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass over the files has seen every byte of a tensor that lies in several of them."""
    for directory in (CHUNKS, CHUNKS.parent / "two-ranks", FILES / "deepspeed" / "zero-3" / "global_step2"):
        with open_checkpoint(directory) as opened:
            values = [span.extent for span in opened.spans() if span.dtype and span.extent.nbytes > 8]
        with recorded_reads(monkeypatch) as reads:
            assert verify(directory).is_valid
        read = [Extent(one.file, one.offset, one.nbytes) for one in reads]
        assert [read.count(extent) for extent in values] == [1] * len(values)


def test_a_missing_file_of_the_set(tmp_path: Path) -> None:
    target = copied(tmp_path)
    for rank in (1, 2):
        (target / f"shard-0000{rank}-model-00002-of-00002.safetensors").unlink()
    with open_checkpoint(target) as opened:
        assert codes(opened) == {"part-missing"}
        assert not opened.complete
        assert "weight" in opened


def test_a_missing_rank_leaves_holes(tmp_path: Path) -> None:
    target = copied(tmp_path)
    for part in (1, 2):
        (target / f"shard-00001-model-0000{part}-of-00002.safetensors").unlink()
    with open_checkpoint(target) as opened:
        assert {"part-missing", "chunks-wrong"} <= codes(opened)
        assert opened.findings[0].message == "no file of rank 1"
        assert opened["weight"].values is None
        assert opened["bias"].array().shape == (3,)
    assert not verify(target).is_valid


def moved(told: dict[str, Any]) -> None:
    told["weight"]["saved_offsets"] = [3, 0]


def far(told: dict[str, Any]) -> None:
    told["weight"]["saved_offsets"] = [1 << 62, 0]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (moved, "chunks-wrong"),
        (far, "chunks-wrong"),
        (lambda told: told["weight"].update(saved_offsets=[4]), "metadata-malformed"),
        (lambda told: told["weight"].update(saved_offsets=[-4, 0]), "metadata-malformed"),
        (lambda told: told["weight"].update(saved_offsets=[4.0, True]), "metadata-malformed"),
        (lambda told: told["weight"].clear(), "metadata-malformed"),
        (lambda told: told.clear(), "metadata-malformed"),
    ],
)
def test_chunks_that_contradict_each_other(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], code: str
) -> None:
    target = rewritten(tmp_path, change)
    with open_checkpoint(target) as opened:
        assert codes(opened) == {code}
        assert not opened.complete
    assert not verify(target).is_valid


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "metadata-not-json"),
        ("[" * 1000 + "]" * 1000, "metadata-too-deep"),
        ("[]", "metadata-malformed"),
        ('{"weight": {}, "weight": {}}', "duplicate-key"),
    ],
)
def test_what_says_where_chunks_lie_is_no_such_thing(tmp_path: Path, text: str, code: str) -> None:
    with open_checkpoint(rewritten(tmp_path, lambda told: text)) as opened:
        assert codes(opened) == {code}


def test_a_damaged_file_leaves_the_others(tmp_path: Path) -> None:
    target = copied(tmp_path)
    (target / FIRST).write_bytes(b"nothing of the kind")
    with open_checkpoint(target) as opened:
        assert "part-damaged" in codes(opened)
        assert opened["columns"].array().shape == (6, 4)


def test_files_of_two_sets_and_what_lies_beside(tmp_path: Path) -> None:
    target = copied(tmp_path)
    shutil.copy(target / FIRST, target / "shard-00003-model-00001-of-00005.safetensors")
    shutil.copy(target / FIRST, target / "other.safetensors")
    with open_checkpoint(target) as opened:
        assert {"part-count", "part-extra", "chunks-wrong"} <= codes(opened)


def consolidated(into: Path) -> Path:
    """Return shards with their index, above the chunks that they were made of."""
    target = into / "step-1"
    shutil.copytree(FILES / "safetensors" / "sharded", target)
    shutil.copytree(CHUNKS, target / "sharded")
    return target


def test_what_was_put_together_is_one_checkpoint_with_its_chunks(tmp_path: Path, run: Run) -> None:
    target = consolidated(tmp_path)
    assert paths_in(tmp_path) == [target]
    with open_checkpoint(target) as opened:
        assert (opened.format, opened.variant) == ("safetensors", "sharded")
        assert codes(opened) == {"not-part"}
    shutil.copytree(target, tmp_path / "step-2")
    listed = run("list", tmp_path, "--json")
    assert (listed.status, len(json.loads(listed.out)["checkpoints"])) == (0, 2)
    assert run("prune", tmp_path, "--keep-last", "1", "--json").status == 0
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["step-2"]


@pytest.mark.framework
def test_what_torch_puts_together_is_what_we_read(tmp_path: Path) -> None:
    program = """
import sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
state = {"w": torch.arange(15.).reshape(5, 3), "b": torch.ones(2)}
writer = HuggingFaceStorageWriter(sys.argv[1], save_distributed=True, enable_consolidation=True)
dcp.save(state, storage_writer=writer, no_dist=True)
"""
    python_with_frameworks("-c", program, tmp_path / "s")
    for directory in (tmp_path / "s", tmp_path / "s" / "sharded"):
        with open_checkpoint(directory) as opened:
            assert {name: opened[name].array().tolist() for name in sorted(opened)} == {
                "b": [1.0, 1.0],
                "w": [
                    [0.0, 1.0, 2.0],
                    [3.0, 4.0, 5.0],
                    [6.0, 7.0, 8.0],
                    [9.0, 10.0, 11.0],
                    [12.0, 13.0, 14.0],
                ],
            }
