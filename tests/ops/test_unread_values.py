"""What a check of values has not seen is not passed: tensors without a reader, and bytes of no tensor."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from ckpttool import Check, Status, Verification, open_checkpoint, verify
from tests.support.commands import Run
from tests.support.configs import write
from tests.support.torch_files import saved

pytestmark = pytest.mark.framework

NAN = float("nan")


class Wrapper(torch.Tensor):
    """A subclass that keeps its data in tensors of its own, in whatever way ``keep`` does."""

    @staticmethod
    def __new__(cls, *inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner[0].shape, dtype=inner[0].dtype)

    def __init__(self, *inner: torch.Tensor) -> None:
        self.keep(inner)

    def keep(self, inner: tuple[torch.Tensor, ...]) -> None:
        """Keep nothing."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(str(function))


class InSlots(Wrapper):
    __slots__ = ("held",)

    def keep(self, inner: tuple[torch.Tensor, ...]) -> None:
        self.held = inner


class InContainers(Wrapper):
    def keep(self, inner: tuple[torch.Tensor, ...]) -> None:
        self.held = {"deep": [[inner[0]]]}


def values(verification: Verification) -> Check:
    return next(check for check in verification.checks if check.name == "values")


def codes(verification: Verification) -> list[str]:
    return [finding.code for finding in verification.findings if finding.check != "safety"]


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("kind", [InSlots, InContainers])
def test_what_a_subclass_keeps_is_read_wherever_it_keeps_it(
    kind: type[Wrapper], is_zip: bool, tmp_path: Path
) -> None:
    content = {"a": kind(torch.full((4, 4), NAN)), "b": torch.randn(3)}
    found = verify(saved(tmp_path / "a.pth", content, is_zip=is_zip))
    assert codes(found) == ["nan"]


def test_what_a_parameter_knows_is_read_also_where_it_knows_itself(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.owner = layer
    layer.weight.history = [torch.full((3,), NAN)]
    path = saved(tmp_path / "a.pth", {"w": layer.weight})
    found = verify(path)
    assert codes(found) == ["nan"]
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint) == {"w", "w.owner.bias", "w.history.0"}


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_tensor_without_a_reader_is_not_passed(is_zip: bool, tmp_path: Path, run: Run) -> None:
    content = {"a": Wrapper(torch.ones(4)), "b": Wrapper(torch.ones(2)), "c": torch.randn(3)}
    path = saved(tmp_path / "a.pth", content, is_zip=is_zip)
    found = verify(path)
    assert values(found) == Check("values", Status.SKIPPED, "1 of 3 tensors; 2 not read")
    assert codes(found) == ["values-not-read"]
    strict = verify(path, strict=True)
    assert not strict.is_valid
    assert values(strict).status is Status.FAILED
    rule = 'path = "a.pth"\nignore = [{code = "values-not-read", reason = "known"}]\n'
    config = write(tmp_path / "ckpttool.toml", f"[[verify.rule]]\n{rule}")
    accepted = json.loads(run("verify", "--json", "--strict", "--config", config, path).out)["checkpoints"][0]
    assert {one["name"]: one["status"] for one in accepted["checks"]}["values"] == "skipped"
    assert [one["ignored"] for one in accepted["findings"] if one["code"] == "values-not-read"] == ["known"]


def test_tensors_of_the_meta_device_have_no_values(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"a": torch.empty(3, device="meta"), "b": torch.ones(3)})
    assert values(verify(path)) == Check("values", Status.SKIPPED, "1 of 2 tensors; 1 not read")
    assert not verify(path, strict=True).is_valid


def test_a_record_of_no_tensor_is_not_passed(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"a": torch.ones(3)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/data/7", b"hidden")
    found = verify(path)
    detail = "1 tensor; 1 part not checked (see the findings)"
    assert values(found) == Check("values", Status.SKIPPED, detail)
    assert codes(found) == ["unused-storage"]
    assert not verify(path, strict=True).is_valid


def test_tensors_that_are_views_ties_or_empty_are_all_read(tmp_path: Path) -> None:
    base = torch.randn(4, 4)
    content = {"a": base, "b": base.t(), "c": base[1:], "d": torch.empty(0, 3)}
    for is_zip in (True, False):
        found = verify(saved(tmp_path / "a.pth", content, is_zip=is_zip), strict=True)
        assert found.is_valid
        assert values(found).detail == "4 tensors"


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", ["int2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float8_e4m3fn"])
def test_a_pickled_array_of_a_type_that_no_check_understands(
    name: str, protocol: int, tmp_path: Path
) -> None:
    import ml_dtypes
    import numpy as np

    array = np.ones((2, 3), getattr(ml_dtypes, name))
    (tmp_path / "m.pkl").write_bytes(pickle.dumps({"a": array, "b": np.ones(3)}, protocol))
    with open_checkpoint(tmp_path / "m.pkl") as checkpoint:
        tensors = {one.name: one.tobytes() for one in checkpoint.tensors}
        is_known = not checkpoint.tensors[0].dtype.is_opaque
    assert tensors == {"a": array.tobytes(), "b": np.ones(3).tobytes()}
    verification = verify(tmp_path / "m.pkl")
    assert verification.ok
    assert values(verification).status is (Status.PASSED if is_known else Status.SKIPPED)
    assert is_known == (name == "float8_e4m3fn")
