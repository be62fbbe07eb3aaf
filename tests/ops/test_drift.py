"""A series of checkpoints: norms and changes are NumPy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpttool import CheckpointError, Difference, DiffOptions
from ckpttool.ops import drift as module
from ckpttool.ops.drift import drift
from tests.support.rendering import lines_of, text_of
from tests.support.results import change_of_strings

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


@pytest.fixture
def series(tmp_path: Path) -> list[str]:
    """Return the paths of three checkpoints: both weights move, then one alone."""
    return written(tmp_path, states())


def states() -> list[dict[str, np.ndarray[Any, Any]]]:
    random = np.random.default_rng(0)
    first = {"fc.weight": random.normal(size=(64, 32)), "fc.bias": random.normal(size=32)}
    second = {name: one + 0.1 * random.normal(size=one.shape) for name, one in first.items()}
    third = {**second, "fc.bias": second["fc.bias"] * 3}
    return [first, second, third]


def written(directory: Path, states: Sequence[Arrays]) -> list[str]:
    paths = []
    for at, state in enumerate(states):
        path = directory / f"m{at}.safetensors"
        save_file(dict(state), path, {"epoch": str(at), "step": str(10 * at), "loss": str(1 / (at + 1))})
        paths.append(str(path))
    return paths


def flat(state: Arrays) -> np.ndarray[Any, Any]:
    return np.concatenate([state[name].reshape(-1).astype(np.float64) for name in sorted(state)])


def test_numbers_are_those_of_numpy(series: list[str]) -> None:
    found = drift(series, DiffOptions())
    vectors = [flat(state) for state in states()]
    assert [point.norm for point in found.points] == pytest.approx([*map(np.linalg.norm, vectors)], rel=1e-12)
    assert [(point.epoch, point.step) for point in found.points] == [(0, 0), (1, 10), (2, 20)]
    assert [point.loss for point in found.points] == [1, 1 / 2, 1 / 3]
    for step, a, b in zip(found.steps, vectors, vectors[1:], strict=False):
        assert step.l2 == pytest.approx(np.linalg.norm(b - a), rel=1e-12)
        assert step.relative == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-12)
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert step.cosine == pytest.approx(cosine, rel=1e-12)
        assert step.max_abs == np.abs(b - a).max()
    assert [len(step.difference.changed) for step in found.steps] == [2, 1]
    assert found.steps[1].largest == "fc.bias"
    assert not found.equal


def test_order_is_as_given(series: list[str]) -> None:
    found = drift(series[::-1], DiffOptions())
    assert [point.path for point in found.points] == series[::-1]
    assert found.steps[0].largest == "fc.bias"


def test_equal_ones(series: list[str]) -> None:
    found = drift([series[0]] * 3, DiffOptions())
    assert found.equal
    assert [(step.l2, step.relative, step.cosine, step.max_abs, step.largest) for step in found.steps] == [
        (0, 0, pytest.approx(1), 0, None)
    ] * 2
    assert lines_of(found)[0] == "all equal: 3 checkpoints"


def test_what_comes_and_goes_leaves_the_rest_comparable(tmp_path: Path) -> None:
    first, second, third = states()
    del second["fc.bias"]
    third = {**third, "head.weight": np.ones((3, 3))}
    found = drift(written(tmp_path, [first, second, third]), DiffOptions(rename=False))
    a, b = first["fc.weight"].reshape(-1), second["fc.weight"].reshape(-1)
    step = found.steps[0]
    assert step.l2 == pytest.approx(np.linalg.norm(b - a), rel=1e-12)
    assert step.relative == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-12)
    assert step.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)
    assert [len(one.difference.added) for one in found.steps] == [0, 2]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_norms_of_every_kind_of_number(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(1).normal(scale=3, size=1000).astype(dtype)
    paths = written(tmp_path, [{"fc.weight": values}] * 2)
    point = drift(paths, DiffOptions()).points[0]
    wide = values.astype("complex128" if dtype == "complex64" else "float64")
    assert point.norm == pytest.approx(np.linalg.norm(wide), rel=1e-12)


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool"])
def test_integers_have_no_norm(tmp_path: Path, dtype: str) -> None:
    paths = written(tmp_path, [{"fc.weight": np.ones(1000, dtype)}] * 2)
    assert drift(paths, DiffOptions()).points[0].norm is None


def test_what_is_not_finite_has_no_say_in_a_norm(tmp_path: Path) -> None:
    values = np.array([3.0, np.nan, np.inf, 4.0])
    found = drift(written(tmp_path, [{"fc.weight": values}] * 2), DiffOptions())
    assert found.points[0].norm == 5.0
    assert found.steps[0].difference.changed == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"q": np.ones(9, np.int8)}, {"q": np.full(9, 5, np.int8)}),
        ({"q": np.ones(9, np.int8), "scale": np.ones(3)}, {"q": np.full(9, 5, np.int8), "scale": np.ones(3)}),
        ({"mask": np.zeros(9, bool)}, {"mask": np.ones(9, bool)}),
        ({"w": np.ones(4), "b": np.ones(2)}, {"w": np.ones(5), "b": np.ones(2)}),
        ({"w": np.ones(4)}, {"v": np.zeros(5)}),
    ],
)
def test_a_step_without_a_distance_has_no_numbers(before: Arrays, after: Arrays, tmp_path: Path) -> None:
    found = drift(written(tmp_path, [before, after]), DiffOptions())
    (step,) = found.steps
    assert (step.l2, step.relative, step.cosine, step.max_abs, step.largest) == (None,) * 5
    assert lines_of(found, width=120)[4].split()[-1] in ("0", "1", "2")  # how many were compared
    assert "cosine" not in text_of(step.difference, width=120)


def test_strings_have_no_say_in_a_change(series: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.diff_checkpoints

    def with_strings(*opened: Any, **more: Any) -> Difference:
        told = real(*opened, **more)
        return replace(told, changed=(change_of_strings("words"), *told.changed))

    expected = drift(series, DiffOptions()).steps[0]
    monkeypatch.setattr(module, "diff_checkpoints", with_strings)
    step = drift(series, DiffOptions()).steps[0]
    assert (step.l2, step.max_abs, step.largest) == (expected.l2, expected.max_abs, expected.largest)
    assert step.cosine == expected.cosine and step.relative == expected.relative
    text = text_of(drift(series, DiffOptions()))
    assert "nan" not in text.lower()


@pytest.mark.framework
def test_tied_weights_count_once(tmp_path: Path) -> None:
    import torch

    paths = []
    for at in range(2):
        weight = torch.arange(6.0) + at
        path = tmp_path / f"m-{at}.pth"
        torch.save({"embed.weight": weight, "head.weight": weight}, path)
        paths.append(str(path))
    found = drift(paths, DiffOptions())
    a, b = np.arange(6.0), np.arange(6.0) + 1
    assert found.points[0].norm == pytest.approx(np.linalg.norm(a))
    assert found.steps[0].l2 == pytest.approx(np.linalg.norm(b - a))
    assert found.steps[0].cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.framework
def test_expanded_weights_are_read_once(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "m.pth"
    torch.save({"fc.weight": torch.arange(3.0).expand(1000, 3)}, path)
    found = drift([str(path)] * 2, DiffOptions())
    assert found.points[0].norm == pytest.approx(np.linalg.norm(np.tile(np.arange(3.0), 1000)), rel=1e-12)


def test_what_cannot_be_opened_is_an_error(series: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        drift([*series, str(tmp_path / "none.pth")], DiffOptions())


def test_bytes_are_counted(series: list[str]) -> None:
    counted: list[int] = []
    drift(series, DiffOptions(), advance=counted.append)
    sizes = [Path(path).stat().st_size for path in series]
    assert sum(sizes) < sum(counted) <= 3 * sum(sizes)


# As people read it ----------------------------------------------------------------------------------


TABLE = """
3 checkpoints: changes at every step, most at m1.safetensors (relative 0.289)

  checkpoint      epoch  step      loss     norm  changed   L2  relative  max |Δ|  tensor     cosine
  m0.safetensors      0     0         1  1.73205
  m1.safetensors      1    10       0.5  2.06155   1 of 2  0.5     0.289      0.5  fc.bias  0.980196
  m2.safetensors      2    20  0.333333      2.5   0 of 2

  m2.safetensors: 1 added (head.weight), 2 tensors equal
"""


def test_table(tmp_path: Path) -> None:
    ones = {"fc.weight": np.full((2, 2), 0.5, np.float32), "fc.bias": np.ones(2, np.float32)}
    moved = {**ones, "fc.bias": np.array([1, 1.5], np.float32)}
    grown = {**moved, "head.weight": np.ones(2, np.float32)}
    paths = written(tmp_path, [ones, moved, grown])
    assert f"\n{text_of(drift(paths, DiffOptions()), width=120)}\n" == TABLE
    narrow = lines_of(drift(paths, DiffOptions()), width=72)
    assert narrow[6] == "  hidden for lack of width: tensor, cosine, L2, norm"
    narrowest = lines_of(drift(paths, DiffOptions()), width=60)
    assert narrowest[6] == "  hidden for lack of width: tensor, cosine, L2, norm, max |Δ|"
    assert max(map(len, narrowest[2:6])) <= 60
