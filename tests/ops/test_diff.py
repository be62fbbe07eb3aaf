"""How two checkpoints differ as a whole: what counts, what is only told, and what is damaged."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from ckpttool import DamagedCheckpoint, DiffOptions, NotFound, Truncated, UsageError, diff
from tests.support.torch_files import saved

torch = pytest.importorskip("torch")

GOING_ON = DiffOptions(keep_going=True)


@pytest.fixture
def state() -> dict[str, Any]:
    """Return what a run saves: a model, its optimizer, and how far it is."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        "epoch": 3,
        "model_state_dict": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer_state_dict": optimizer.state_dict(),
    }


@pytest.fixture
def pair(tmp_path: Path, state: dict[str, Any]) -> tuple[Path, Path]:
    """Return one checkpoint, twice."""
    return saved(tmp_path / "a.pth", state), saved(tmp_path / "b.pth", state)


def flipped(path: Path, tensor_bytes: bytes) -> Path:
    """Flip a bit of the first element of stored bytes, as a disk does: nobody tells the checksum."""
    content = bytearray(path.read_bytes())
    content[content.index(tensor_bytes)] ^= 1
    path.write_bytes(content)
    return path


def test_the_same_twice_is_equal(pair: tuple[Path, Path], state: dict[str, Any]) -> None:
    found = diff(*pair)

    assert found.equal
    assert found.compared == found.unchanged == 8
    assert (found.a.path, found.a.format, found.a.variant) == (str(pair[0]), "pytorch", "zip")
    assert found.a.parameters == sum(value.numel() for value in state["model_state_dict"].values())


def test_one_element(pair: tuple[Path, Path], tmp_path: Path, state: dict[str, Any]) -> None:
    changed = state["model_state_dict"]["1.weight"]
    before = float(changed[1, 2])
    changed[1, 2] += 1e-3
    found = diff(pair[0], saved(tmp_path / "c.pth", state))

    (change,) = found.changed
    assert not found.equal
    assert (change.name, change.kind, change.how) == ("model_state_dict.1.weight", "values", "name")
    assert change.statistics is not None
    assert (change.statistics.count, change.statistics.where) == (1, (1, 2))
    assert change.statistics.max_abs == abs(float(changed[1, 2]) - before)
    assert found.unchanged == 7


def test_an_epoch_is_a_difference_unless_weights_alone_count(
    pair: tuple[Path, Path], tmp_path: Path, state: dict[str, Any]
) -> None:
    later = saved(tmp_path / "c.pth", {**state, "epoch": 4})

    assert [(value.path, value.a, value.b) for value in diff(pair[0], later).values] == [("epoch", 3, 4)]
    weights = diff(pair[0], later, DiffOptions(only="weights"))
    assert weights.equal
    assert "epoch" in [value.path for value in weights.reported]
    ignoring = diff(pair[0], later, DiffOptions(ignore=("epoch", "epok")))
    assert ignoring.equal
    assert ignoring.notes == (
        "ignored: 1 value that differs",
        "--ignore epok: matches no tensor and no differing value",
    )


def test_a_dtype_is_a_difference_even_where_the_values_are_equal(
    pair: tuple[Path, Path], tmp_path: Path, state: dict[str, Any]
) -> None:
    weights = state["model_state_dict"]
    weights["0.bias"] = weights["0.bias"].double()
    (change,) = diff(pair[0], saved(tmp_path / "c.pth", state)).changed

    assert (change.kind, change.a.dtype.name, change.b.dtype.name) == ("dtype", "float32", "float64")
    assert change.statistics is None


def test_a_shape_with_as_many_elements(
    pair: tuple[Path, Path], tmp_path: Path, state: dict[str, Any]
) -> None:
    weights = state["model_state_dict"]
    weights["0.weight"] = weights["0.weight"].reshape(2, 6)
    (change,) = diff(pair[0], saved(tmp_path / "c.pth", state)).changed

    assert (change.kind, change.a.shape, change.b.shape) == ("shape", (3, 4), (2, 6))
    assert change.statistics is None


@pytest.mark.parametrize("side", ["a", "b"])
def test_what_a_disk_changed_is_damage_and_no_difference(
    pair: tuple[Path, Path], state: dict[str, Any], side: str
) -> None:
    path = pair["ab".index(side)]
    flipped(path, state["model_state_dict"]["1.weight"].numpy().tobytes())

    with pytest.raises(DamagedCheckpoint) as damaged:
        diff(*pair)
    assert (damaged.value.path, damaged.value.where) == (str(path), "model_state_dict.1.weight")
    assert damaged.value.found.startswith("CRC-32 is ")

    found = diff(*pair, GOING_ON)
    (broken,) = found.broken
    assert (broken.name, broken.side) == ("model_state_dict.1.weight", side)
    assert not found.equal
    assert (found.compared, found.unchanged, found.changed) == (7, 7, ())


def test_a_missing_shard(tmp_path: Path) -> None:
    for name, shards in (("whole", 2), ("part", 1)):
        (tmp_path / name).mkdir()
        for shard in range(shards):
            torch.save({f"{shard}.weight": torch.ones(2)}, tmp_path / name / f"pytorch_model-{shard}.bin")
        weights = '{"0.weight": "pytorch_model-0.bin", "1.weight": "pytorch_model-1.bin"}'
        index = tmp_path / name / "pytorch_model.bin.index.json"
        index.write_text(f'{{"metadata": {{"total_size": 16}}, "weight_map": {weights}}}', encoding="utf-8")

    with pytest.raises(DamagedCheckpoint) as damaged:
        diff(tmp_path / "whole", tmp_path / "part")
    assert "pytorch_model-1.bin" in str(damaged.value)
    assert str(damaged.value).startswith(str(tmp_path / "part"))

    found = diff(tmp_path / "whole", tmp_path / "part", GOING_ON)
    assert found.unchanged == 1
    assert {broken.side for broken in found.broken} == {"b"}
    assert not found.equal


def test_a_side_that_cannot_be_opened(pair: tuple[Path, Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.pth"
    cut.write_bytes(pair[0].read_bytes()[:-100])

    with pytest.raises(Truncated, match=r"cut\.pth"):
        diff(pair[0], cut)
    with pytest.raises(NotFound, match=r"nowhere\.pth"):
        diff(tmp_path / "nowhere.pth", pair[0])


def test_who_wrote_the_zip_is_no_difference(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "c.pth"
    with zipfile.ZipFile(pair[0]) as source, zipfile.ZipFile(other, "w") as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))

    assert diff(pair[0], other).equal


def test_nothing_on_both_sides(tmp_path: Path) -> None:
    found = diff(saved(tmp_path / "a.pth", {}), saved(tmp_path / "b.pth", {}))

    assert found.equal
    assert found.compared == 0


def test_nothing_left_to_compare_is_no_success(pair: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="no tensors left to compare"):
        diff(*pair, DiffOptions(ignore=("*",)))


def test_tensors_without_values_are_not_equal(tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"m.weight": torch.empty(2, device="meta"), "m.bias": torch.ones(2)}, tmp_path / name)
    found = diff(tmp_path / "a", tmp_path / "b")

    assert not found.equal
    assert found.unchanged == 1
    assert found.not_compared == ("m.weight: its values can't be read: float32 [2]",)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_the_scale_of_a_quantized_tensor_is_part_of_the_weights(tmp_path: Path) -> None:
    for name, scale in (("a", 0.1), ("b", 0.2)):
        quantized = torch._make_per_tensor_quantized_tensor(torch.ones(2, 2, dtype=torch.int8), scale, 0)
        torch.save({"model_state_dict": {"fc.weight": quantized}, "epoch": scale}, tmp_path / name)
    found = diff(tmp_path / "a", tmp_path / "b", DiffOptions(only="weights"))

    assert not found.equal
    assert [value.path for value in found.values] == ["model_state_dict.fc.weight.scale"]


def test_a_number_as_key_is_not_the_text_that_reads_alike(tmp_path: Path) -> None:
    for name, key in (("a", 0), ("b", "0")):
        torch.save({"state": {key: {"exp_avg": torch.ones(2)}}}, tmp_path / name)
    (value,) = diff(tmp_path / "a", tmp_path / "b").values

    assert (value.path, value.a, value.b) == (
        "state.0.exp_avg (keys)",
        ["state", 0, "exp_avg"],
        ["state", "0", "exp_avg"],
    )
