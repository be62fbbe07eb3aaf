"""Models of the tests' own, each of one kind that users have."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


class SimpleModel(nn.Module):
    """The model of the guide."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Wrapped(nn.Module):
    """A model that has another as an attribute, as Lightning modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SimpleModel()


class Tied(nn.Module):
    """Words in, words out, with one matrix for both."""

    def __init__(self, words: int = 7) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 4)
        self.out = nn.Linear(4, words, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        found = self.out(self.words(ids))
        return found if mask is None else found * mask.unsqueeze(-1)


@dataclass
class Answer:
    """An output with names."""

    logits: torch.Tensor
    extra: dict[str, torch.Tensor]
    count: int = 3
    name: str = "an answer"


class Pair(NamedTuple):
    """An output with names, and places too."""

    first: torch.Tensor
    second: torch.Tensor


class Many(SimpleModel):
    """A model whose output has a form of the caller's choice."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> object:
        y = self.fc(x)
        forms = {
            "dict": {"a": y, "b": {"c": y + 1}, "name": "text"},
            "tuple": (y, [y + 1, None]),
            "dataclass": Answer(y, {"e": y}),
            "named": Pair(y, y),
            "ordered": OrderedDict(z=y),
            "number": 3.5,
            "sparse": y.to_sparse(),
            "bfloat16": y.bfloat16(),
            "complex": torch.complex(y, y).conj(),
            "nothing": {"text": "none"},
        }
        return forms[self.form]


class InPlace(SimpleModel):
    """A model that changes what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.fc(x)


class Random(SimpleModel):
    """A model whose dropout nobody switches off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.fc(x) + 1)


class Numbers(SimpleModel):
    """A model of several inputs of different types."""

    def forward(self, x: torch.Tensor, wave: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * wave.abs().sum() * on.sum()


class Forces(SimpleModel):
    """A model that differentiates inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            return torch.autograd.grad(self.fc(x).sum(), x)[0]


class Normed(SimpleModel):
    """A model that can't be trained on a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


def half() -> nn.Module:
    """A model of bfloat16."""
    return SimpleModel().bfloat16()


def bare() -> nn.Module:
    """A model without values, to be filled from the checkpoint."""
    with torch.device("meta"):
        return SimpleModel()


def lazy() -> nn.Module:
    """A model that doesn't know its shapes."""
    return nn.Sequential(OrderedDict(fc=nn.LazyLinear(2)))


def compiled() -> nn.Module:
    """A model in a wrapper that is transparent but for its name."""
    return nn.ModuleDict({"_orig_mod": SimpleModel()})


def failing() -> nn.Module:
    """Raise."""
    raise ValueError("no weather today")


def no_model() -> dict[str, int]:
    """Return something else."""
    return {"not": 1}


class Seq(nn.Sequential):
    """Layers without names of their own, and a buffer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
        self.register_buffer("seen", torch.tensor(0))


class Nested(SimpleModel):
    """A model that takes containers."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(
        self, a: dict[str, torch.Tensor], b: list[torch.Tensor], *, k: torch.Tensor, n: int
    ) -> dict[str, torch.Tensor]:
        return {"y": self.fc(a["x"] + b[0]) * n, "z": k + b[1]}


class Averaging(nn.Module):
    """A model that gives the mean of all that it was given so far."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 2)
        self.register_buffer("mean", torch.zeros(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = (self.mean + self.fc(x)) / 2
        return self.mean


class OnDevice(nn.Module):
    """A model that makes a tensor where it was traced."""

    def __init__(self, device: str = "cuda:0") -> None:
        super().__init__()
        self.device = torch.device(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(10, device=self.device)


class ToDevice(nn.Module):
    """A model that brings its input to where it was traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to("cuda:0") * 2


class Raises(nn.Module):
    """A model that doesn't take what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(0) < 2:
            raise ValueError("too small")
        return x


class Mean(nn.Module):
    """A model of sequences of any length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)
