"""Written safetensors: byte for byte what the library and Hugging Face write, and read back as it was."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save

import ckpttool.formats.safetensors.writer as under_test
from ckpttool import Role, Tensor, TrainingState, open_checkpoint, verify
from ckpttool.core.dtypes import BY_NAME, BY_SAFETENSORS
from ckpttool.core.values import in_memory
from ckpttool.formats import sharded
from ckpttool.formats.safetensors.reader import MAX_HEADER
from ckpttool.formats.safetensors.writer import SafetensorsWriter
from ckpttool.formats.writer import Content, WriteOptions
from ckpttool.ops.conversion_plan import content_of
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.limits import few_files

ENTRY = "ckpttool.content"
TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
AWKWARD = [
    "",
    " ",
    "é",
    'a"b\\c',
    "tab\tnew\nline",
    "\x7f\x00\x1f",
    "\u2028",
    "\U0001f600",
    "a/b",
    "x" * 3000,
]


def made(name: str, dtype: str, shape: tuple[int, ...], data: bytes, **more: Any) -> Tensor:
    return Tensor((name,), BY_NAME[dtype], shape, Role.WEIGHTS, in_memory(data), **more)


def of_torch(name: str, value: torch.Tensor) -> Tensor:
    data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return made(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of any bits whatever."""
    chosen = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:
        return torch.from_numpy(chosen.integers(0, 2, count).astype(bool)).reshape(shape)
    return (
        torch.from_numpy(chosen.integers(0, 256, count * dtype.itemsize, np.uint8)).view(dtype).reshape(shape)
    )


def written(path: Path, content: Content, shard_size: int | None = None) -> Path:
    options = WriteOptions(shard_size=shard_size, name=path.name)
    assert list(SafetensorsWriter().refusals(content, options)) == []
    with StagedOutput(path, "file" if shard_size is None else "directory") as target:
        SafetensorsWriter().write(content, target, options)
        target.settle()
        target.commit()
    return path


def refused(tensors: Sequence[Tensor], shard_size: int | None = None, **more: Any) -> list[str]:
    return list(
        SafetensorsWriter().refusals(Content(tuple(tensors), **more), WriteOptions(shard_size=shard_size))
    )


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    assert length % 8 == 0
    found: dict[str, Any] = json.loads(data[8 : 8 + length])
    return found


def sound(path: Path) -> None:
    """Require that the reader finds nothing to say, and that it is valid."""
    with open_checkpoint(path) as opened:
        assert opened.findings == ()
        assert opened.complete
    assert verify(path).is_valid


# The bytes --------------------------------------------------------------------------------------------


@pytest.mark.framework
def test_it_is_byte_for_byte_what_the_library_writes(tmp_path: Path) -> None:
    state = {
        f"{name}.{shape}": bits(dtype, shape, seed)
        for seed, (name, dtype) in enumerate(TORCH.items())
        for shape in ((), (3, 5), (0, 4), (2, 0), (1,) * 9, (70_001,))
    }
    state |= {name: bits(torch.float32, (2,), seed) for seed, name in enumerate(AWKWARD)}
    tensors = tuple(of_torch(name, value) for name, value in state.items())
    path = written(tmp_path / "m.safetensors", Content(tensors))
    assert path.read_bytes() == save(state, {"format": "pt"})
    with open_checkpoint(path) as opened:
        assert opened.complete
        assert {finding.code for finding in opened.findings} == {"empty-name"}
        for tensor in tensors:
            assert opened[tensor.name].tobytes() == tensor.tobytes()


@pytest.mark.framework
def test_every_type_of_the_format_can_be_written(tmp_path: Path) -> None:
    tensors = []
    for number, dtype in enumerate(BY_SAFETENSORS.values()):
        data = np.random.default_rng(number).integers(0, 2, 8 * dtype.bits // 8, np.uint8).tobytes()
        tensors.append(made(dtype.name, dtype.name, (2, 4), data))
    assert SafetensorsWriter.dtypes == {tensor.dtype.name for tensor in tensors}
    path = written(tmp_path / "m.safetensors", Content(tuple(tensors)))
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert {name: bytes(one["data"]) for name, one in found.items()} == {
        tensor.name: tensor.tobytes() for tensor in tensors
    }
    assert all(tuple(one["shape"]) == (2, 4) for one in found.values())
    sound(path)


@pytest.mark.framework
@pytest.mark.parametrize("name", ["strided.pth", "tied.pth", "big_endian.npy", "fortran.npy"])
def test_what_lies_otherwise_in_the_source(files: Path, tmp_path: Path, name: str) -> None:
    source = files / ("numpy" if name.endswith("npy") else "pytorch") / name
    if not source.exists():
        source = tmp_path / name
        base = torch.arange(60_000, dtype=torch.float32).reshape(200, 300)
        torch.save(
            {"turned": base.T, "part": base[3:9, ::7], "same": base.T, "wide": base[:1].expand(5, 300)},
            source,
        )
    if name.endswith("npy"):
        expected = {"tensor": np.load(source)}
    else:
        expected = {
            key: value.numpy() for key, value in torch.load(source).items() if isinstance(value, torch.Tensor)
        }
    with open_checkpoint(source) as opened:
        content = content_of(opened)
        path = written(tmp_path / "m.safetensors", content)
        names = {tensor.path[-1] if tensor.path else "tensor": tensor.name for tensor in content.owned}
    with safetensors.safe_open(path, "np") as found:
        assert set(found.keys()) == set(names.values())
        for key, full in names.items():
            if key in expected:
                np.testing.assert_array_equal(found.get_tensor(full), expected[str(key)])
    sound(path)


@pytest.mark.framework
def test_ten_thousand_tensors(tmp_path: Path) -> None:
    tensors = tuple(made(f"layer.{n}.w", "float32", (1,), n.to_bytes(4, "little")) for n in range(10_000))
    path = written(tmp_path / "m.safetensors", Content(tensors))
    with safetensors.safe_open(path, "pt") as found:
        assert len(found.keys()) == 10_000
        assert found.get_tensor("layer.9999.w").view(torch.int32).item() == 9_999


# What can't be written --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (
            made("__metadata__", "int8", (1,), b"1"),
            "__metadata__: safetensors stores its metadata under this name",
        ),
        (made("a\ud800", "int8", (1,), b"1"), "its name is not valid text"),
        (
            made("w", "float4_e2m1fn", (3,), b"12"),
            "w: float4_e2m1fn [3] has 12 bits; safetensors holds whole",
        ),
        (made("w", "float6_e2m3fn", (2, 3), b"12345"), "w: float6_e2m3fn [2, 3] has 36 bits"),
    ],
)
def test_what_the_format_can_not_hold_is_refused(tensor: Tensor, why: str) -> None:
    (told,) = refused([tensor])
    assert why in told


def test_a_header_is_as_long_as_the_library_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensors = [made(f"é{n}", "int8", (1, 1, 1), b"1") for n in range(50)]
    path = written(tmp_path / "m.safetensors", Content(tuple(tensors)))
    (length,) = struct.unpack_from("<Q", path.read_bytes())
    monkeypatch.setattr(under_test, "MAX_HEADER", length)
    assert refused(tensors) == []
    monkeypatch.setattr(under_test, "MAX_HEADER", length - 1)
    assert refused(tensors) == [f"the header would have {length:,} bytes; safetensors allows {length - 1:,}"]
    assert refused(tensors, 10) == []
    assert MAX_HEADER == 100_000_000


# What lies around the tensors -------------------------------------------------------------------------


def test_text_is_metadata_of_the_file(tmp_path: Path) -> None:
    one = made("w", "int8", (1,), b"1")
    told = {"epoch": "3", "tool": 'a "b"\n', "format": "tf"}
    path = written(tmp_path / "m.safetensors", Content((one,), metadata=told, source_format="safetensors"))
    assert header(path)["__metadata__"] == told
    with open_checkpoint(path) as opened:
        assert opened.metadata == told
        assert opened.training.epoch == 3
    sound(path)


@pytest.mark.parametrize(("value", "native"), [("tf", "tf"), ("netcdf", "pt"), ("", "pt")])
def test_a_format_that_no_reader_knows_is_none_of_the_file(tmp_path: Path, value: str, native: str) -> None:
    one = made("w", "int8", (1,), b"1")
    path = written(
        tmp_path / "m.safetensors", Content((one,), metadata={"format": value}, source_format="hdf5")
    )
    assert header(path)["__metadata__"]["format"] == native
    with open_checkpoint(path) as opened:
        assert opened.metadata == {"format": value}


@pytest.mark.parametrize("shard_size", [None, 10])
def test_what_is_no_text_travels_in_the_entry(tmp_path: Path, shard_size: int | None) -> None:
    told = {"epoch": 3, "note": "text", "loss": float("inf"), "list": [1, None, {"a": True}], "bad": "\ud800"}
    tensors = tuple(made(name, "int8", (6,), b"123456") for name in "ab")
    content = Content(tensors, metadata=told, source_format="keras")
    path = written(tmp_path / "m.safetensors", content, shard_size)
    with open_checkpoint(path) as opened:
        assert dict(opened.metadata) == told
        assert opened.training.epoch == 3
        assert opened.producer.framework == "pytorch"
    first = path if shard_size is None else path / "model-00001-of-00002.safetensors"
    native = header(first)["__metadata__"]
    assert native.pop(ENTRY, None) is not None or shard_size is not None
    assert native == {"format": "pt", "note": "text"}
    sound(path)


@pytest.mark.parametrize("shard_size", [None, 10])
def test_a_training_state_that_only_the_source_could_tell(tmp_path: Path, shard_size: int | None) -> None:
    state = TrainingState(
        epoch=1.5, step=7, loss=0.5, metrics={"acc": 0.9}, origin={"epoch": "file epoch_id"}
    )
    tensors = (made("a", "int8", (2,), b"12"), made("b", "int8", (9,), b"123456789"))
    content = Content(tensors, metadata={"trainers": {}}, training=state)
    path = written(tmp_path / "m.safetensors", content, shard_size)
    with open_checkpoint(path) as opened:
        assert opened.training == state


@pytest.mark.framework
@pytest.mark.parametrize("shard_size", [None, 100])
def test_a_training_checkpoint_is_told_like_the_original(tmp_path: Path, shard_size: int | None) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    source = tmp_path / "a.pth"
    torch.save(
        {
            "epoch": 7,
            "loss": 0.25,
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "tied": (model.weight, {5: model.weight}),
            "global_step": torch.tensor(11),
        },
        source,
    )
    with open_checkpoint(source) as opened:
        path = written(tmp_path / "b.safetensors", content_of(opened), shard_size)
        with open_checkpoint(path) as copy:
            assert copy.format == "safetensors"
            assert (copy.metadata, copy.training) == (opened.metadata, opened.training)
            assert copy.granularity is opened.granularity
            assert copy.parameters == opened.parameters
            assert [(one.path, one.role, one.shares_with, one.dtype, one.shape) for one in copy.tensors] == [
                (one.path, one.role, one.shares_with, one.dtype, one.shape) for one in opened.tensors
            ]
            for one in opened.tensors:
                assert copy[one.name].tobytes() == one.tobytes()
            assert copy.tree["tied"][1][5] is copy["tied.0"] or copy.tree["tied"][1].keys() == {5}  # type: ignore[index]
    sound(path)


def test_ties_are_stored_once_and_come_back(tmp_path: Path) -> None:
    owner = made("a", "int8", (2,), b"12")
    tied = made("b", "int8", (2,), b"12", shares_with="a")
    path = written(tmp_path / "m.safetensors", Content((owner, tied)))
    assert header(path).keys() == {"__metadata__", "a"}
    with open_checkpoint(path) as opened:
        assert [(one.name, one.shares_with) for one in opened.tensors] == [("a", None), ("b", "a")]
        assert opened["b"].tobytes() == b"12"
    sound(path)


@pytest.mark.parametrize(
    "entry", ["", "{", "[]", '{"schema": "ckpttool.content/1"}', "null", '{"schema": 7}']
)
def test_a_damaged_entry_is_told_and_the_tensors_stay(tmp_path: Path, entry: str) -> None:
    text = json.dumps(
        {"__metadata__": {ENTRY: entry, "a": "b"}, "w": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}
    ).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"1")
    with open_checkpoint(path) as opened:
        assert [finding.code for finding in opened.findings] == ["content-entry"]
        assert opened["w"].tobytes() == b"1"
        assert opened.metadata == {"a": "b"}


def test_an_entry_of_an_index_that_is_no_text_is_what_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "m", Content((made("w", "int8", (1,), b"1"),)), 10)
    told = json.loads((path / "model.safetensors.index.json").read_bytes())
    told["metadata"][ENTRY] = {"schema": "ckpttool.content/1"}
    (path / "model.safetensors.index.json").write_text(json.dumps(told))
    with open_checkpoint(path) as opened:
        assert opened.metadata[ENTRY] == {"schema": "ckpttool.content/1"}
        assert opened["w"].tobytes() == b"1"


# Shards -----------------------------------------------------------------------------------------------


def state_of(sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    return {
        name: torch.full((size,), number, dtype=torch.int8)
        for number, (name, size) in enumerate(sizes.items())
    }


@pytest.mark.framework
def test_shards_are_byte_for_byte_those_of_hugging_face(tmp_path: Path) -> None:
    """Theirs counts the bytes of tensors, ours those of files: here both cut at the same places."""
    sizes = {"z.é": 600, "a": 600, "huge": 5000, "m": 200, "k": 600, "empty": 0, "b": 200, "c": 210}
    state = state_of({name: size * 100 for name, size in sizes.items()})
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    save_torch_state_dict(state, theirs, max_shard_size=100_000, filename_pattern="model{suffix}.safetensors")
    tensors = tuple(of_torch(name, value) for name, value in state.items())
    ours = written(tmp_path / "ours", Content(tensors), 100_500)
    assert sorted(os.listdir(ours)) == sorted(os.listdir(theirs))
    for name in os.listdir(theirs):
        written_bytes, expected = ((root / name).read_bytes() for root in (ours, theirs))
        assert written_bytes == expected or json.loads(written_bytes) == json.loads(expected), name
    sound(ours)


@pytest.mark.framework
def test_transformers_loads_shards(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    model = BertModel(config)
    source = tmp_path / "source"
    model.save_pretrained(source)
    with open_checkpoint(source / "model.safetensors") as opened:
        path = written(tmp_path / "sharded", content_of(opened), 4000)
    assert len(list(path.glob("*.safetensors"))) > 3
    config.save_pretrained(path)
    loaded, told = BertModel.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_one_shard_has_an_index_too(tmp_path: Path) -> None:
    path = written(tmp_path / "m", Content((made("w", "int8", (1,), b"1"),)), 10)
    assert sorted(os.listdir(path)) == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert load_file(path / "model-00001-of-00001.safetensors")["w"].item() == ord("1")
    sound(path)


def test_no_tensors_are_no_shards(tmp_path: Path) -> None:
    path = written(tmp_path / "m", Content((), metadata={"epoch": 3}), 10)
    with open_checkpoint(path) as opened:
        assert (opened.tensors, opened.training.epoch, opened.findings) == ((), 3, ())


@pytest.fixture
def limited_files() -> Iterator[None]:
    with few_files(140):
        yield


@pytest.mark.usefixtures("limited_files")
def test_more_shards_than_files_can_be_open(tmp_path: Path) -> None:
    tensors = tuple(made(f"w{n}", "int8", (70_000,), bytes([n % 256]) * 70_000) for n in range(200))
    path = written(tmp_path / "m", Content(tensors), 70_000)
    with open_checkpoint(path) as opened:
        for one in tensors:
            assert opened[one.name].tobytes() == one.tobytes()


def test_too_many_shards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [made(f"w{n}", "int8", (1,), b"1") for n in range(12)]
    monkeypatch.setattr(sharded, "MAX_SHARDS", 11)
    assert refused(tensors, 1) == ["there would be 12 shards; at most 11 are read (--shard-size)"]
    assert refused(tensors, 300) == []


def test_too_long_an_index_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensors = tuple(made(f"w{n}", "int8", (1,), b"1") for n in range(12))
    written(tmp_path / "m", Content(tensors), 4)
    nbytes = (tmp_path / "m" / "model.safetensors.index.json").stat().st_size
    monkeypatch.setattr(sharded, "MAX_INDEX", nbytes)
    assert refused(tensors, 4) == []
    monkeypatch.setattr(sharded, "MAX_INDEX", nbytes - 1)
    assert refused(tensors, 4) == [f"the index would have {nbytes:,} bytes; at most {nbytes - 1:,} are read"]


def test_the_set_that_a_source_was_is_not_told_of_another(files: Path, tmp_path: Path) -> None:
    with open_checkpoint(files / "safetensors" / "sharded") as opened:
        one = written(tmp_path / "one.safetensors", content_of(opened))
        many = written(tmp_path / "many", content_of(opened), 500)
        nbytes = sum(tensor.nbytes for tensor in opened.tensors)
    assert header(one)["__metadata__"] == {"format": "pt"}
    told = json.loads((many / "model.safetensors.index.json").read_bytes())
    assert told["metadata"] == {"total_size": nbytes}
    sound(one)
    sound(many)
