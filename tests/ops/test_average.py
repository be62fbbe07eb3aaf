"""The average of checkpoints: what NumPy and PyTorch compute, in every type, and what is refused."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file

from ckpttool import CheckpointError, UsageError, average, convert
from tests.support.commands import run_redirected

FILES = Path(__file__).parents[2] / "fixtures" / "files"
SERIES = [FILES / "series" / f"model_epoch_{epoch}.pth" for epoch in (3, 7, 10)]
TWINS = [FILES / "twins" / name for name in ("epoch_3.pth", "epoch_4.pth")]


def weights_of(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    state = torch.load(path, weights_only=False)["model_state_dict"]
    return {name: tensor.numpy() for name, tensor in state.items()}


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    torch.save(tensors, path)
    return path


def averaged(sources: Sequence[Path], target: Path, **options: Any) -> dict[str, torch.Tensor]:
    done = average(sources, target, **options)
    assert done.verified and not done.mismatches
    return torch.load(target) if target.suffix in (".pt", ".pth") else load_file(target)


def test_it_is_what_numpy_rounds_once(tmp_path: Path) -> None:
    expected = [weights_of(path) for path in SERIES]
    got = averaged(SERIES, tmp_path / "average.safetensors")
    assert got.keys() == expected[0].keys()
    for name, tensor in got.items():
        wide = np.stack([one[name].astype(np.float64) for one in expected])
        assert np.array_equal(tensor.numpy(), wide.mean(axis=0).astype(np.float32)), name


def test_it_is_within_a_bit_of_pytorch_s(tmp_path: Path) -> None:
    """``AveragedModel`` rounds after each step, so that its last bit may be another."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    torch.manual_seed(3)
    layers = (torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    uniform = AveragedModel(model, use_buffers=True)
    moving = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    sources = []
    for epoch in range(4):
        model(torch.randn(16, 6)).square().sum().backward()
        optimizer.step()
        uniform.update_parameters(model)
        moving.update_parameters(model)
        path = tmp_path / f"e{epoch}.pth"
        torch.save({"model_state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        sources.append(path)
    for reference, options in ((uniform, {}), (moving, {"ema": 0.8})):
        got = averaged(sources, tmp_path / f"average{len(options)}.pth", **options)
        assert model.load_state_dict(got)
        for name, tensor in reference.module.state_dict().items():
            if tensor.is_floating_point():
                torch.testing.assert_close(got[name], tensor, rtol=4e-7, atol=1e-7)
        assert got["1.num_batches_tracked"] == 4  # the last source's


_TYPES = {
    "float64": (torch.float64, np.float64),
    "float32": (torch.float32, np.float32),
    "float16": (torch.float16, np.float16),
    "bfloat16": (torch.bfloat16, ml_dtypes.bfloat16),
    "float8_e4m3fn": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "float8_e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2),
    "complex64": (torch.complex64, np.complex64),
}


@pytest.mark.parametrize("name", _TYPES)
def test_each_type_is_rounded_once_to_the_nearest(name: str, tmp_path: Path) -> None:
    kind, numpy_type = _TYPES[name]
    generator = np.random.default_rng(5)
    parts = [generator.normal(size=1000) for _ in range(3)]
    if name == "complex64":
        parts = [part + 1j * generator.normal(size=1000) for part in parts]
    stored = [torch.from_numpy(part).to(kind) for part in parts]
    sources = [saved(tmp_path / f"{at}.pt", w=tensor) for at, tensor in enumerate(stored)]
    got = averaged(sources, tmp_path / "average.pt")["w"]
    wide = [
        tensor.to(torch.complex128 if name == "complex64" else torch.float64).numpy() for tensor in stored
    ]
    exact = sum(wide) / 3
    assert got.dtype == kind
    if name == "complex64":
        assert np.array_equal(got.numpy(), exact.astype(np.complex64))
        return
    result = got.to(torch.float64).numpy()
    if got.element_size() > 2:
        assert np.array_equal(result, exact.astype(numpy_type).astype(np.float64))
        return
    codes = np.arange(1 << 8 * got.element_size(), dtype=f"u{got.element_size()}")
    with np.errstate(invalid="ignore"):
        grid = codes.view(numpy_type).astype(np.float64)
    grid = np.sort(grid[np.isfinite(grid)])
    at = np.searchsorted(grid, exact).clip(1, len(grid) - 1)
    nearest = np.minimum(np.abs(grid[at] - exact), np.abs(grid[at - 1] - exact))
    assert np.array_equal(np.abs(result - exact), nearest)


@given(
    arrays=st.lists(
        hnp.arrays(np.float32, 4, elements=st.floats(-(2.0**20), 2.0**20, width=32)), min_size=2, max_size=4
    ),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    scale=st.sampled_from([2.0, 0.5, 8.0]),
    shares=st.none() | st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    same=hnp.arrays(np.float32, st.integers(1, 9), elements=st.floats(-(2.0**90), 2.0**90, width=32)),
)
def test_any_average_is_numpy_s_by_ratios_of_weights_and_that_of_equals_is_the_same(
    arrays: list[np.ndarray[Any, Any]],
    weights: list[int],
    scale: float,
    shares: list[float] | None,
    same: np.ndarray[Any, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, count = tmp_path_factory.mktemp("weighted"), len(arrays)
    sources = [
        saved(folder / f"{at}.pt", w=torch.from_numpy(one), same=torch.from_numpy(same))
        for at, one in enumerate(arrays)
    ]
    ways = (weights[:count], [scale * one for one in weights[:count]], shares and shares[:count])
    by_ratio, scaled, by_share = (
        averaged(sources, folder / f"average{at}.pt", weights=way) for at, way in enumerate(ways)
    )
    expected = np.average(np.stack(arrays).astype(np.float64), axis=0, weights=ways[0])
    np.testing.assert_allclose(by_ratio["w"], expected.astype(np.float32), rtol=2e-7, atol=1e-12)
    assert torch.equal(by_ratio["w"], scaled["w"])
    for got in (by_ratio, scaled, by_share):
        assert np.array_equal(got["same"].numpy().view(np.uint32), (same + np.float32(0)).view(np.uint32))


def test_large_tensors_take_many_blocks(tmp_path: Path) -> None:
    arrays = [torch.randn(700, 311), torch.randn(700, 311)]
    views = [arrays[0].T, arrays[1].T]  # not in C order
    sources = [saved(tmp_path / f"{at}.pt", w=one) for at, one in enumerate(views)]
    got = averaged(sources, tmp_path / "average.pt")["w"]
    assert torch.equal(got, ((views[0].double() + views[1].double()) / 2).float())


def test_ties_stay_and_integers_are_the_last_source_s(tmp_path: Path) -> None:
    for at in range(2):
        w = torch.full((3,), float(at))
        torch.save(
            {"a": w, "b": w, "n": torch.tensor(at), "flag": torch.tensor([at == 1])}, tmp_path / f"{at}.pt"
        )
    done = average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "out.pt")
    got = torch.load(tmp_path / "out.pt")
    assert got["a"].data_ptr() == got["b"].data_ptr()
    assert got["a"].tolist() == [0.5] * 3
    assert (got["n"].item(), got["flag"].tolist()) == (1, [True])
    assert any("other tensors from" in note or "took" in note for note in done.notes)


@pytest.mark.parametrize("kind", ["safetensors", "numpy", "hdf5", "tensorflow", "torch-dcp"])
def test_sources_of_any_format_agree(kind: str, tmp_path: Path) -> None:
    expected = averaged(TWINS, tmp_path / "expected.safetensors")
    names = {"numpy": "{}.npz", "hdf5": "{}.h5", "safetensors": "{}.safetensors"}
    sources = []
    for at, twin in enumerate(TWINS):
        target = tmp_path / names.get(kind, "{}").format(at)
        convert(twin, target, only="weights", to=kind)
        sources.append(target)
    got = averaged(sources, tmp_path / "got.safetensors")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_a_flipped_bit_of_any_source_is_found(tmp_path: Path) -> None:
    sources = [Path(shutil.copy(path, tmp_path)) for path in SERIES]
    for path in sources:
        whole = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            record = next(one for one in archive.infolist() if one.filename.endswith("/data/0"))
            at = whole.index(archive.read(record), record.header_offset)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match="CRC-32"):
            average(sources, tmp_path / "out.pth")
        assert not (tmp_path / "out.pth").exists()
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"v": torch.ones(2)}, "a.pt: missing v .in .*b.pt.; the checkpoints are from different models"),
        (
            {"w": torch.ones(2), "v": torch.ones(1)},
            "a.pt: missing v .in .*b.pt.; the checkpoints are from different models",
        ),
        ({"w": torch.ones(3)}, r"shape \[2\], but \[3\]"),
        ({"w": torch.ones(2, dtype=torch.int64)}, "float32, but int64"),
    ],
)
def test_checkpoints_of_other_models_are_refused(
    other: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    sources = [saved(tmp_path / "a.pt", w=torch.ones(2)), saved(tmp_path / "b.pt", **other)]
    with pytest.raises(UsageError, match=message):
        average(sources, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_other_ties_are_refused(tmp_path: Path) -> None:
    w = torch.ones(2)
    sources = [saved(tmp_path / "a.pt", x=w, y=w), saved(tmp_path / "b.pt", x=w, y=w.clone())]
    with pytest.raises(UsageError, match="its tied weights differ"):
        average(sources, tmp_path / "out.pt")


def test_what_would_spoil_the_average_is_refused(tmp_path: Path) -> None:
    good = saved(tmp_path / "good.pt", w=torch.tensor([1.0, -torch.inf]))
    mask = saved(tmp_path / "mask.pt", w=torch.tensor([3.0, -torch.inf]))
    assert averaged([good, mask], tmp_path / "out.pt")["w"].tolist() == [2.0, -torch.inf]
    for value, what in ((torch.nan, "NaN"), (torch.inf, "an infinity")):
        bad = saved(tmp_path / f"{what}.pt", w=torch.tensor([value, -torch.inf]))
        with pytest.raises(CheckpointError, match=f"{what}.pt.w.: {what} would spoil the average"):
            average([good, bad], tmp_path / "bad.pt")
    large = saved(tmp_path / "large.pt", w=torch.tensor([60_000.0]).half())
    double = saved(tmp_path / "double.pt", w=torch.tensor([600_000.0]))
    with pytest.raises(CheckpointError, match="the average is too large for float16"):
        average([double, large], tmp_path / "bad.pt")
    assert not (tmp_path / "bad.pt").exists()


_MOST = float(np.finfo(np.float64).max)


COLUMNS = [
    [(_MOST, _MOST), (1.5e308, 1e-300)],
    [(-_MOST, -_MOST, -_MOST), (_MOST, _MOST, 1.0), (5e-324, _MOST, _MOST)],
    [(_MOST, _MOST, _MOST, -_MOST)],
    [(1e308, 1.7e308, 1.1e308, 1.2e308, 1.3e308)],
    [(1e308 + 1e308j, 1.5e308 - 1.5e308j, 1e308 + 0j)],
]
"""By the number of sources: what they hold of one element."""


@pytest.mark.parametrize("columns", COLUMNS, ids=str)
def test_finite_numbers_have_a_finite_average(columns: list[tuple[complex, ...]], tmp_path: Path) -> None:
    """Fractions have no largest number."""
    count = len(columns[0])
    dtype = torch.complex128 if isinstance(columns[0][0], complex) else torch.float64
    sources = [
        saved(tmp_path / f"{at}.pt", w=torch.tensor([*row, 0.25], dtype=dtype))
        for at, row in enumerate(zip(*columns, strict=True))
    ]
    decayed = [Fraction(1, 2 ** (count - 1)), *(Fraction(1, 2 ** (count - at)) for at in range(1, count))]
    ways: list[tuple[dict[str, Any], list[Fraction]]] = [({}, [Fraction(1)] * count), ({"ema": 0.5}, decayed)]
    for largest in (1.0, 1e308, 1e-320):
        weights = [largest * (1 + at / 8) for at in range(count)]
        ways.append(({"weights": weights}, [Fraction(one) for one in weights]))

    for way, (options, shares) in enumerate(ways):
        average(sources, tmp_path / f"out-{way}.pt", **options)
        *found, quarter = torch.load(tmp_path / f"out-{way}.pt")["w"].tolist()
        assert quarter == 0.25
        for got, column in zip(found, columns, strict=True):
            exact = [
                float(
                    sum(share * Fraction(one) for share, one in zip(shares, part, strict=True)) / sum(shares)
                )
                for part in ([complex(one).real for one in column], [complex(one).imag for one in column])
            ]
            assert [complex(got).real, complex(got).imag] == pytest.approx(exact, rel=1e-15), options


def test_a_number_too_large_is_found_beside_a_mask(tmp_path: Path) -> None:
    wide = saved(tmp_path / "wide.pt", w=torch.tensor([600_000.0, -torch.inf]))
    half = saved(tmp_path / "half.pt", w=torch.tensor([60_000.0, -torch.inf]).half())
    with pytest.raises(CheckpointError, match="the average is too large for float16"):
        average([wide, half], tmp_path / "out.pt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.pt"], "average needs at least two checkpoints"),
        (["a.pt", "a.pt"], "is given twice"),
        (["a.pt", "b.pt", "--weights", "1"], "--weights: 1 weight for 2 checkpoints"),
        (["a.pt", "b.pt", "--weights", "1,-1"], "each weight must be a positive number"),
        (["a.pt", "b.pt", "--ema", "1"], "the decay must be between 0 and 1"),
        (["a.pt", "b.pt", "--ema", "0.5", "--weights", "1,2"], "mutually exclusive"),
        (["a.pt", "--last", "2", "--best", "2"], "mutually exclusive"),
        (["a.pt", "--last", "2", "--metric", "loss"], "--metric and --mode are only valid with --best N"),
        (["a.pt", "--best", "2", "--metric", "quality"], "no series with several checkpoints with weights"),
        (["a.pt", "b.pt", "--last", "2"], "take one directory"),
        (["a.pt", "b.pt", "--metric", "loss"], "only valid with --last N or --best N"),
        ([".", "--best", "2"], "--best needs --metric NAME"),
    ],
)
def test_what_cannot_be_asked(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.pt", "b.pt"):
        saved(Path(name), w=torch.ones(2))
    answer = run_redirected("average", *arguments, "out.pt")
    assert (answer.status, answer.out) == (2, "")
    assert message in answer.err
    assert not Path("out.pt").exists()


def test_the_newest_and_the_best_of_a_directory(tmp_path: Path) -> None:
    shutil.copytree(FILES / "series", tmp_path / "run")
    truth = json.loads((FILES / "series.expected.json").read_text())
    damaged = tmp_path / "run" / "model_epoch_10.pth"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    answer = run_redirected("average", "--last", 2, tmp_path / "run", tmp_path / "last.pth", "--json")
    assert answer.status == 0, answer.err
    document = json.loads(answer.out)
    assert [Path(path).name for path in document["source"]] == ["model_epoch_8.pth", "model_epoch_9.pth"]
    assert document["shares"] == [0.5, 0.5]
    arguments = ("--best", 2, "--metric", "loss", "--mode", "min")
    answer = run_redirected("average", *arguments, tmp_path / "run", tmp_path / "best.pth", "--json")
    losses = {name: one["loss"] for name, one in truth["files"].items() if name != "model_epoch_10.pth"}
    best = sorted(losses, key=losses.__getitem__)[:2]
    assert {Path(path).name for path in json.loads(answer.out)["source"]} == set(best)


def test_slimmed_ones_are_of_the_same_series(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(1, 5):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(
            {key: state[key] for key in state if epoch > 2 or key != "optimizer"}, tmp_path / f"m_{epoch}.pth"
        )
    answer = run_redirected("average", "--last", 3, tmp_path, tmp_path / "out.pth", "--json")
    assert answer.status == 0, answer.err
    names = [Path(one).name for one in json.loads(answer.out)["source"]]
    assert names == ["m_2.pth", "m_3.pth", "m_4.pth"]


def test_several_series_need_a_choice(tmp_path: Path) -> None:
    shutil.copytree(FILES / "series", tmp_path / "run")
    for epoch in (1, 2):
        saved(tmp_path / "run" / f"other_epoch_{epoch}.pt", w=torch.ones(2))
    answer = run_redirected("average", "--last", 2, tmp_path / "run", tmp_path / "out.pth")
    assert answer.status == 2 and "2 series: " in answer.err and "--series GLOB chooses one" in answer.err
    chosen = ("--series", "other_epoch_*.pt")
    answer = run_redirected("average", "--last", 2, tmp_path / "run", tmp_path / "out.pth", *chosen, "--json")
    assert answer.status == 0, answer.err
    sources = json.loads(answer.out)["source"]
    assert [Path(path).name for path in sources] == ["other_epoch_1.pt", "other_epoch_2.pt"]
    (tmp_path / "run" / "other_epoch_2.pt").unlink()
    answer = run_redirected("average", "--last", 2, tmp_path / "run", tmp_path / "none.pth", *chosen)
    assert answer.status == 2 and "no series with several checkpoints with weights" in answer.err
