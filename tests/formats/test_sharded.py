"""Sets of shards: the real ones, and each way in which an index and its shards can disagree."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool import (
    AccessDenied,
    Checkpoint,
    CheckpointError,
    DamagedCheckpoint,
    NotACheckpoint,
    NotDownloaded,
    Severity,
    open_checkpoint,
    verify,
)
from tests.support.limits import few_files
from tests.support.opening import checkpoints_in, only_checkpoint, open_found

FILES = Path(__file__).parents[2] / "fixtures" / "files"
REAL = [FILES / "safetensors" / "sharded", FILES / "pytorch" / "pytorch-sharded"]
EXPECTED = json.loads((FILES / "hostile" / "hostile.expected.json").read_text(encoding="utf-8"))
HOSTILE = sorted(path for path in (FILES / "hostile").glob("shards-*") if path.name != "shards-no-index")
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(*names: str) -> bytes:
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(4 * len(names))


def index(weight_map: object, **metadata: object) -> bytes:
    return json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()


def laid_out(directory: Path, files: Mapping[str, bytes | None]) -> Path:
    """Return a directory with two honest shards and their index, some of them replaced."""
    honest = {INDEX: index({"a": FIRST, "b": SECOND}, total_size=8), FIRST: shard("a"), SECOND: shard("b")}
    for name, data in (honest | files).items():
        if data is not None:
            (directory / name).write_bytes(data)
    return directory


def found(opened: Checkpoint) -> list[tuple[str, Severity, str | None]]:
    return [(finding.code, finding.severity, finding.where) for finding in opened.findings]


def test_reads_real_sets() -> None:
    for directory in REAL:
        for by_index in [False, True]:
            expected = json.loads(Path(f"{directory}.expected.json").read_text(encoding="utf-8"))
            (index_path,) = directory.glob("*.index.json")
            path = index_path if by_index else directory
            with open_checkpoint(path) as opened:
                assert opened.path == str(path), directory
                assert (opened.format, opened.variant) == (expected["format"], "sharded"), directory
                assert (opened.findings, opened.safety, opened.complete) == ((), (), True), directory
                assert {tensor.path for tensor in opened.tensors} == {
                    tuple(t["path"]) for t in expected["tensors"]
                }, directory
                for truth in expected["tensors"]:
                    tensor = opened[truth["path"][0]]
                    assert (tensor.dtype.name, list(tensor.shape)) == (truth["dtype"], truth["shape"]), (
                        directory
                    )
                    assert hashlib.sha256(tensor.tobytes()).hexdigest() == truth["sha256"], directory
                assert (opened.parameters, opened.granularity.value) == (expected["parameters"], "partial"), (
                    directory
                )
                shards = {os.path.basename(t.extent.file) for t in opened.tensors if t.extent}
                assert {os.path.basename(entry.path) for entry in opened.files} == {
                    index_path.name,
                    *shards,
                }, directory
                assert all(span.where.partition(": ")[0] in shards for span in opened.spans()), directory


def test_judges_hostile_sets_as_expected() -> None:
    for path in HOSTILE:
        expected = EXPECTED[path.name]["expect"]
        try:
            with open_checkpoint(path) as opened:
                is_invalid = any(finding.severity is Severity.ERROR for finding in opened.findings)
                is_unsafe = any(finding.severity is Severity.ERROR for finding in opened.safety)
        except DamagedCheckpoint:
            is_invalid, is_unsafe = True, False
        assert expected["verdict"] in (None, "invalid" if is_invalid else "valid"), path
        assert expected["safety"] in (None, "unsafe" if is_unsafe else "safe"), path


ERROR, WARNING = Severity.ERROR, Severity.WARNING
EXTRA = "model-00003-of-00003.safetensors"


@pytest.mark.parametrize(
    ("files", "expected", "names", "complete"),
    [
        ({SECOND: None}, [("shard-missing", ERROR, SECOND)], "a", False),
        ({SECOND: b""}, [("shard-damaged", ERROR, SECOND)], "a", False),
        ({SECOND: shard("b")[:-1]}, [("shard-damaged", ERROR, SECOND)], "a", False),
        ({SECOND: shard()}, [("shard-stale", ERROR, SECOND)], "a", False),
        ({EXTRA: shard("c")}, [("shard-extra", WARNING, EXTRA)], "ab", True),
        ({SECOND: shard("c")}, [("shard-stale", ERROR, SECOND), ("shard-stale", ERROR, SECOND)], "ac", False),
        (
            {SECOND: shard("b", "a"), INDEX: index({"a": FIRST, "b": SECOND})},
            [("shard-stale", ERROR, SECOND)],
            "ab",
            True,
        ),
        (
            {INDEX: index({"a": FIRST, "b": SECOND}, total_size=9)},
            [("shard-total-size", WARNING, INDEX)],
            "ab",
            True,
        ),
        ({INDEX: index({"a": FIRST, "b": SECOND}, total_size=8.0)}, [], "ab", True),
        ({INDEX: index({"a": FIRST}), SECOND: None}, [("shard-count", ERROR, INDEX)], "a", False),
        (
            {INDEX: index({"a": FIRST, "b": EXTRA}), SECOND: None, EXTRA: shard("b")},
            [("shard-count", ERROR, None)],
            "ab",
            False,
        ),
        (
            {
                INDEX: b'{"weight_map":{"a":"' + FIRST.encode() + b'","a":"' + FIRST.encode() + b'"}}',
                SECOND: None,
            },
            [("duplicate-key", ERROR, INDEX), ("shard-count", ERROR, INDEX)],
            "a",
            False,
        ),
    ],
)
def test_tells_disagreements_apart(
    tmp_path: Path,
    files: Mapping[str, bytes | None],
    expected: list[tuple[str, Severity, str | None]],
    names: str,
    complete: bool,
) -> None:
    with open_checkpoint(laid_out(tmp_path, files)) as opened:
        assert (found(opened), "".join(opened), opened.complete) == (expected, names, complete)


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../x", "a//x", ".", "", "C:x", "a\\x", "a\0x", "x" * 256, 7, None, ["x"], "./x"]
)
def test_never_follows_a_name_out_of_the_directory(tmp_path: Path, name: object) -> None:
    directory = laid_out(tmp_path, {INDEX: index({"a": FIRST, "b": name}), SECOND: None})
    with open_checkpoint(directory) as opened:
        assert [finding.code for finding in opened.findings] == ["shard-path"]
        assert (list(opened), opened.complete) == (["a"], False)


def test_follows_a_name_into_the_directory(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.safetensors").write_bytes(shard("b"))
    files = {INDEX: index({"a": FIRST, "b": "sub/x.safetensors"}), SECOND: None}
    with open_checkpoint(laid_out(tmp_path, files)) as opened:
        assert (list(opened), opened.findings) == (["a", "b"], ())


def test_refuses_a_link_out_of_the_directory(tmp_path: Path) -> None:
    (inside := tmp_path / "inside").mkdir()
    (tmp_path / "outside").write_bytes(shard("b"))
    laid_out(inside, {SECOND: None})
    (inside / SECOND).symlink_to("../outside")
    with open_checkpoint(inside) as opened:
        assert (found(opened), list(opened)) == ([("shard-path", ERROR, SECOND)], ["a"])


def test_follows_the_links_of_the_hub_cache(tmp_path: Path) -> None:
    (blobs := tmp_path / "blobs").mkdir()
    (snapshot := tmp_path / "snapshots" / "rev").mkdir(parents=True)
    laid_out(snapshot, {})
    for number, name in enumerate((INDEX, FIRST, SECOND)):
        (snapshot / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    for path in (snapshot, snapshot / INDEX):
        with open_checkpoint(path) as opened:
            assert (list(opened), opened.findings, opened.complete) == (["a", "b"], (), True)


@pytest.mark.parametrize("shards", [{"a": INDEX}, {"a": "."}])
def test_never_opens_itself_again(tmp_path: Path, shards: Mapping[str, str]) -> None:
    (tmp_path / INDEX).write_bytes(index(shards))
    with open_checkpoint(tmp_path / INDEX) as opened:
        assert len(opened.findings) == 1 and not opened.complete


def test_says_what_loading_a_shard_would_run() -> None:
    with open_checkpoint(FILES / "hostile" / "shards-call") as opened:
        assert [finding.code for finding in opened.safety] == ["unsafe-import"]
        assert str(opened.safety[0].where).startswith("pytorch_model-00002-of-00002.bin: ")


def test_does_not_call_a_damaged_pickle_safe(tmp_path: Path) -> None:
    for source in (FILES / "pytorch" / "pytorch-sharded").iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    second = tmp_path / "pytorch_model-00002-of-00002.bin"
    second.write_bytes(second.read_bytes()[:-30])
    with open_checkpoint(tmp_path) as opened:
        assert found(opened) == [("shard-damaged", ERROR, second.name)]
        assert [finding.code for finding in opened.safety] == ["not-scanned"]


def test_says_that_a_shard_has_another_format(tmp_path: Path) -> None:
    pickled = (FILES / "pytorch" / "minimal.pth").read_bytes()
    with open_checkpoint(laid_out(tmp_path, {SECOND: pickled})) as opened:
        assert ("shard-format", ERROR, SECOND) in found(opened)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"[]", "index-malformed"),
        (b"{}", "index-malformed"),
        (b'{"weight_map": []}', "index-malformed"),
        (b'{"weight_map": {}, "metadata": []}', "index-malformed"),
        (b"{", "index-not-json"),
        (b"\xff", "index-not-utf8"),
        (b"[" * 1000 + b"]" * 1000, "index-too-deep"),
        (b"version https://git-lfs.github.com/spec/v1\n", NotDownloaded.code),
    ],
)
def test_refuses_a_damaged_index(tmp_path: Path, data: bytes, code: str) -> None:
    with pytest.raises(DamagedCheckpoint) as raised:
        open_checkpoint(laid_out(tmp_path, {INDEX: data}))
    assert raised.value.code == code


@pytest.mark.parametrize("other", ["model.safetensors", "x-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_leaves_a_directory_with_other_weights_alone(tmp_path: Path, other: str) -> None:
    directory = laid_out(tmp_path, {other: shard("x")})
    with pytest.raises(NotACheckpoint):
        open_checkpoint(directory)
    open_checkpoint(directory / INDEX).close()


def test_leaves_a_directory_of_checkpoints_alone(tmp_path: Path) -> None:
    laid_out(tmp_path, {})
    (tmp_path / "tokenizer").mkdir()
    open_checkpoint(tmp_path).close()
    (inner := tmp_path / "runs" / "checkpoint-5").mkdir(parents=True)
    (inner / "model.safetensors").write_bytes(shard("x"))
    with pytest.raises(NotACheckpoint):
        open_checkpoint(tmp_path)


def test_leaves_a_directory_with_two_indexes_alone(tmp_path: Path) -> None:
    directory = laid_out(tmp_path, {"pytorch_model.bin.index.json": index({"a": "pytorch_model.bin"})})
    with pytest.raises(NotACheckpoint):
        open_checkpoint(directory)


def test_notes_what_lies_beside_and_was_not_looked_at(tmp_path: Path) -> None:
    with open_checkpoint(laid_out(tmp_path, {"training_args.bin": b""})) as opened:
        assert found(opened) == [("not-part", Severity.NOTE, "training_args.bin")]


def test_finds_the_sets_in_a_directory(tmp_path: Path) -> None:
    laid_out(
        tmp_path,
        {
            "other-00002-of-00003.safetensors": shard("x"),
            "other-00001-of-00003.safetensors": shard("y"),
            "whole-00001-of-00001.safetensors": shard("z"),
            EXTRA: shard("c"),
        },
    )
    whole, orphans, alone = checkpoints_in(tmp_path)
    assert alone.members == ("whole-00001-of-00001.safetensors",)
    assert (whole.path, whole.members) == (str(tmp_path / INDEX), (INDEX, FIRST, SECOND, EXTRA))
    assert orphans.path == str(tmp_path / "other.safetensors.index.json")
    assert orphans.format is not None
    with open_found(orphans) as opened:
        assert (list(opened), opened.complete) == (["y", "x"], False)
        assert [finding.code for finding in opened.findings] == ["index-missing", "shard-missing"]


def test_finds_no_unit_that_the_unit_does_not_open(tmp_path: Path) -> None:
    unit = only_checkpoint(laid_out(tmp_path, {}))
    assert unit.format is not None
    with open_found(unit) as opened:
        assert list(opened) == ["a", "b"]


def test_reads_an_index_of_a_variant(tmp_path: Path) -> None:
    name = "model.safetensors.index.fp16.json"
    shards = {"a": "model.fp16-00001-of-00002.safetensors", "b": "model.fp16-00002-of-00002.safetensors"}
    files = {name: index(shards), **{file: shard(tensor) for tensor, file in shards.items()}}
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    with open_checkpoint(tmp_path) as opened:
        assert (list(opened), opened.findings) == (["a", "b"], ())


def test_says_that_a_shard_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out(tmp_path, {})
    open_any = os.open

    def open_all_but_one(path: str, *arguments: int, **more: Any) -> int:
        if str(path).endswith(SECOND):
            raise PermissionError(13, "Permission denied")
        return open_any(path, *arguments, **more)

    monkeypatch.setattr(os, "open", open_all_but_one)
    with pytest.raises(AccessDenied):
        open_checkpoint(tmp_path)


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_raises_nothing_but_its_own_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("set")
    names = st.one_of(st.sampled_from([FIRST, SECOND, EXTRA, INDEX]), st.text(max_size=5), st.integers())
    content = index(data.draw(st.dictionaries(st.text(max_size=3), names, max_size=4)))
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    laid_out(directory, {INDEX: data.draw(st.sampled_from([content, bytes(damaged)]))})
    for path in (directory, directory / INDEX):
        with suppress(CheckpointError):
            open_checkpoint(path).close()


def test_more_shards_than_files_that_a_process_may_open(tmp_path: Path) -> None:
    names = [f"model-{at:05d}-of-00300.safetensors" for at in range(1, 301)]
    for at, name in enumerate(names):
        text = json.dumps({f"t{at}": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
        (tmp_path / name).write_bytes(len(text).to_bytes(8, "little") + text + at.to_bytes(4, "little"))
    weight_map = {f"t{at}": name for at, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with few_files():
        with open_checkpoint(tmp_path) as checkpoint:
            held = [checkpoint[f"t{at}"].tobytes() for at in range(300)]
        assert held == [at.to_bytes(4, "little") for at in range(300)]
        assert verify(tmp_path).is_valid
