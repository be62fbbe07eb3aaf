"""The code of TorchScript archives that PyTorch writes here and now, whatever its classes are called."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool import open_checkpoint
from ckpttool.formats.torch.torchscript_code import definitions_of, describe_code

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Block(nn.Module):
    """A linear layer with an activation."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation."""
        return self.act(self.linear(x))


class Net(nn.Module):
    """Blocks of one class that do not compute the same."""

    def __init__(self, *acts: nn.Module) -> None:
        super().__init__()
        self.first, self.other = (Block(act) for act in acts)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two numbers for each row."""
        return self.last(self.other(self.first(x)))


def saved_metadata(path: Path, model: nn.Module, traced: bool = False, **extra: Any) -> dict[str, Any]:
    made = torch.jit.trace(model, torch.ones(1, 4)) if traced else torch.jit.script(model)
    torch.jit.save(made, path, **extra)
    with open_checkpoint(path) as checkpoint:
        return dict(checkpoint.metadata)


@pytest.mark.parametrize("traced", [False, True])
def test_classes_have_other_names_in_every_save_and_say_the_same(tmp_path: Path, traced: bool) -> None:
    # A class of another type under the same name takes the first name, as does another instance in a trace.
    first = saved_metadata(tmp_path / "first.pt", Net(nn.ReLU(), nn.Sigmoid()), traced)
    torch.jit.script(Net(nn.Tanh(), nn.ReLU6()))
    torch._C._jit_clear_class_registry()
    torch.jit._state._clear_class_state()
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    saved_metadata(tmp_path / "between.pt", Net(nn.Sigmoid(), nn.Tanh()), traced)
    again = saved_metadata(tmp_path / "first.pt", Net(nn.ReLU(), nn.Sigmoid()), traced)
    assert first["code"] == again["code"]
    assert len(first["code"]) >= 6


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("other", [(nn.Sigmoid(), nn.ReLU()), (nn.ReLU(), nn.Tanh())])
def test_other_code_is_told(tmp_path: Path, traced: bool, other: tuple[nn.Module, ...]) -> None:
    one = saved_metadata(tmp_path / "one.pt", Net(nn.ReLU(), nn.Sigmoid()), traced)
    assert one["code"] != saved_metadata(tmp_path / "one.pt", Net(*other), traced)["code"]


class Scaled(nn.Module):
    """A factor that is a constant of the code."""

    __constants__ = ("factor",)

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x * self.factor


def test_code_of_one_length_is_told_apart(tmp_path: Path) -> None:
    one, other = (saved_metadata(tmp_path / "one.pt", Scaled(factor))["code"] for factor in (2.5, 3.5))
    assert [text.partition(",")[0] for text in one.values()] == [
        text.partition(",")[0] for text in other.values()
    ]
    assert one != other


def test_byte_code_is_told(tmp_path: Path) -> None:
    found = []
    for acts in ((nn.ReLU(), nn.Sigmoid()), (nn.ReLU(), nn.Sigmoid()), (nn.ReLU(), nn.Tanh())):
        buffer = torch.jit.script(Net(*acts))._save_to_buffer_for_lite_interpreter()
        (tmp_path / "one.ptl").write_bytes(io.BytesIO(buffer).getvalue())
        with open_checkpoint(tmp_path / "one.ptl") as checkpoint:
            found.append(checkpoint.metadata["bytecode"])
    assert found[0] == found[1] != found[2]


def test_attributes_come_in_any_order() -> None:
    # Constants are written in the order of a set, which differs from process to process.
    lines = [b"  in_features : Final[int] = 4", b"  out_features : Final[int] = 2"]
    texts = [
        b"\n".join([b"class A(Module):", *order, b"  def f(self):", b"    b", b"    a"])
        for order in (lines, lines[::-1])
    ]
    one, other = (
        describe_code(definitions_of([("code/__torch__.py", text)]), "__torch__.A") for text in texts
    )
    assert one == other
    swapped = texts[0].replace(b"    b\n    a", b"    a\n    b")
    assert describe_code(definitions_of([("code/__torch__.py", swapped)]), "__torch__.A") != one


def test_classes_of_one_name_are_told_by_where_the_model_leads() -> None:
    def files(first: str, second: str) -> list[tuple[str, bytes]]:
        leads = f"class M(Module):\n  a : __torch__.{first}\n  b : __torch__.{second}\n"
        return [
            ("code/__torch__.py", f"{leads}class A(Module):\n  x : int\n".encode()),
            ("code/__torch__/___torch_mangle_7.py", b"class A(Module):\n  x : str\n"),
        ]

    one = describe_code(definitions_of(files("A", "___torch_mangle_7.A")), "__torch__.M")
    other = describe_code(definitions_of(files("___torch_mangle_7.A", "A")), "__torch__.M")
    assert set(one) == set(other) == {"__torch__.M", "__torch__.A", "__torch__.A (2)"}
    assert one != other
