"""Cutting into shards, against what Hugging Face does with the same sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub.serialization._base import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Tensor, open_checkpoint
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import in_memory
from ckpttool.formats.safetensors.writer import SafetensorsWriter
from ckpttool.formats.sharded import shard_index, shard_names, split_into_shards
from ckpttool.formats.torch.writer import PyTorchWriter
from ckpttool.formats.writer import Content, WriteOptions
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.limits import few_files


def sized(sizes: list[int], ties: dict[int, int]) -> list[Tensor]:
    """Return tensors of so many bytes; ``ties`` has the number of the one that a tensor is the same as."""
    made = []
    for number, size in enumerate(sizes):
        owner = ties.get(number)
        shape = (sizes[owner],) if owner is not None else (size,)
        shares_with = f"t{owner}" if owner is not None else None
        made.append(Tensor((f"t{number}",), BY_NAME["int8"], shape, shares_with=shares_with))
    return made


@st.composite
def tied(draw: st.DrawFn) -> tuple[list[Tensor], int]:
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=30))
    ties: dict[int, int] = {}
    for number in range(1, len(sizes)):
        owner = draw(st.integers(-3, number - 1))
        if owner >= 0 and owner not in ties:
            ties[number] = owner
    return sized(sizes, ties), draw(st.integers(1, 60))


@pytest.mark.framework
@given(tied())
def test_it_cuts_where_hugging_face_does(drawn: tuple[list[Tensor], int]) -> None:
    tensors, limit = drawn
    theirs = split_state_dict_into_shards_factory(
        {one.name: one for one in tensors},
        get_storage_size=lambda one: one.nbytes,
        get_storage_id=lambda one: one.shares_with or one.name,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    ours = split_into_shards(tensors, limit)
    found = [sorted(one.name for one in shard) for shard in ours]
    assert found == [sorted(names) for names in theirs.filename_to_tensors.values()]
    names = shard_names("model", ".safetensors", len(ours))
    told = json.loads(shard_index(dict(zip(names, ours, strict=True))))
    assert told["metadata"] == theirs.metadata
    if len(ours) > 1:
        assert list(theirs.filename_to_tensors) == names
        assert told["weight_map"] == theirs.tensor_to_filename


@given(tied())
def test_nothing_is_lost_and_no_shard_is_too_large(drawn: tuple[list[Tensor], int]) -> None:
    tensors, limit = drawn
    shards = split_into_shards(tensors, limit)
    assert sorted(one.name for shard in shards for one in shard) == sorted(one.name for one in tensors)
    for shard in shards:
        owned = [one for one in shard if one.shares_with is None]
        assert sum(one.nbytes for one in owned) <= limit or len(owned) == 1


def test_no_file_is_larger_than_the_limit_but_for_a_single_tensor(tmp_path: Path) -> None:
    sets = [
        [0],
        [10] * 60,
        [990, 10, 980, 20, 1_000, 1_001],
        [1_700, 1_900, 2_000, 1_999],
        [4_900, 5_000, 5_001, 3, 3],
        [30_000, 1, 1, 1, 19_000, 900],
    ]
    for writer in [SafetensorsWriter(), PyTorchWriter()]:
        for limit in [1, 700, 2_000, 5_000, 20_000]:
            for number, sizes in enumerate(sets):
                tensors = tuple(
                    Tensor((f"layer.{at}.é.weight",), BY_NAME["int8"], (size,), values=in_memory(bytes(size)))
                    for at, size in enumerate(sizes)
                )
                path = tmp_path / f"{type(writer).__name__}-{limit}-{number}"
                with StagedOutput(path, "directory") as target:
                    writer.write(Content(tensors), target, WriteOptions(shard_size=limit, name="set"))
                    target.settle()
                    target.commit()
                held = json.loads(next(path.glob("*.index.json")).read_text())["weight_map"]
                assert sorted(held) == sorted(tensor.name for tensor in tensors), sizes
                for name in set(held.values()):
                    count = sum(one == name for one in held.values())
                    assert (path / name).stat().st_size <= limit or count == 1, (name, count)


def test_ties_take_room_beside_their_owner() -> None:
    """The owner's shard gets entries for all that share its bytes, though they come later."""
    owner, other, *ties = sized([100, 100, 100, 100], {2: 0, 3: 0})
    assert split_into_shards([owner, other, *ties], 220, overhead=lambda _: 10) == [[owner, *ties], [other]]
    assert split_into_shards([owner, other, *ties], 240, overhead=lambda _: 10) == [[owner, other, *ties]]


def test_no_tensors_are_one_empty_shard() -> None:
    assert split_into_shards([], 5) == [[]]


def test_an_index_is_text_like_that_of_transformers() -> None:
    shards = {"b.bin": sized([3], {}), "a.bin": []}
    assert shard_index(shards, {"note": "é"}).decode() == (
        "{\n"
        '  "metadata": {\n'
        '    "note": "\\u00e9",\n'
        '    "total_size": 3\n'
        "  },\n"
        '  "weight_map": {\n'
        '    "t0": "b.bin"\n'
        "  }\n"
        "}\n"
    )


def _written(tensors: tuple[Tensor, ...], path: Path) -> None:
    """Write as many shards as there are tensors of four bytes."""
    with StagedOutput(path, "directory") as target:
        SafetensorsWriter().write(Content(tensors), target, WriteOptions(shard_size=4, name=path.name))
        target.settle()
        target.commit()


def test_shards_are_written_from_more_shards_than_files_that_a_process_may_open(tmp_path: Path) -> None:
    values = [number.to_bytes(4, "little") for number in range(150)]
    _written(
        tuple(
            Tensor((f"t{number}",), BY_NAME["uint8"], (4,), values=in_memory(value))
            for number, value in enumerate(values)
        ),
        tmp_path / "a",
    )
    with few_files(110), open_checkpoint(tmp_path / "a") as a:
        _written(a.tensors, tmp_path / "b")
        with open_checkpoint(tmp_path / "b") as b:
            found = [b[f"t{number}"].tobytes() for number in range(150)]
    assert len([*(tmp_path / "b").glob("*.safetensors")]) == 150
    assert found == values
