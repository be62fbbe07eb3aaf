"""Honest models as PyTorch writes them: scripts, traces, lite archives and exported programs.

``python -m tests.security.honest_programs DIRECTORY`` writes them; with ``--few-exported``, it exports the
first model only, which takes longest.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x + self.second(nn.functional.relu(self.norm(self.first(x)))))


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(4, 4, 3, groups=4, stride=2), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Hardsigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * x


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        low = nn.functional.max_pool2d(self.down(x), 2)
        high = nn.functional.interpolate(low, scale_factor=2.0, mode="bilinear", align_corners=False)
        return torch.cat([self.up(high), x], 1)


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = getattr(nn, kind)(4, 6, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(20, 6), nn.LSTMCell(6, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.zeros(ids.size(0), 5)
        c = torch.zeros(ids.size(0), 5)
        for step in range(ids.size(1)):
            h, c = self.cell(self.words(ids[:, step]), (h, c))
        return nn.functional.log_softmax(self.out(h), -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        heads = [one.view(x.size(0), -1, 2, 4).transpose(1, 2) for one in (q, k, v)]
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.size(0), -1, 8))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        size = ids.size(1)
        mask = torch.triu(torch.full((size, size), float("-inf")), 1)
        x = self.words(ids) + self.places(torch.arange(size))
        return self.out(self.layer(x, src_mask=mask))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) if bool(x.sum() > 0) else self.b(x)
        count = 0
        while count < 3:
            y = torch.tanh(y)
            count += 1
        return y


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        index = torch.argsort(x, dim=-1)[..., :2]
        picked = torch.gather(x, -1, index)
        scattered = torch.zeros_like(x).scatter_(-1, index, picked)
        return torch.where(x > 0.5, scattered, x.masked_fill(x < 0, 0.0)).index_select(
            -1, torch.tensor([0, 1])
        )


class Dynamic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return x[:half].view(half * 2, -1) + x.new_zeros(half * 2, 1)


class Boxes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = torch.nonzero(x[:, 0] > 0.2).squeeze(1)
        boxes = x[kept]
        area = (boxes[:, 2] - boxes[:, 0]).clamp(min=0) * (boxes[:, 3] - boxes[:, 1]).clamp(min=0)
        return torch.topk(area, min(2, area.numel())).values


class Spectral(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x, dim=-1).abs().pow(2).log1p()


class Convolution1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(4, 8, 3, padding=2, dilation=2),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.AvgPool1d(2),
            nn.Flatten(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.labels = {"a": 0, "b": 1}
        self.bag = nn.EmbeddingBag(10, 3, mode="mean")

    def forward(self, ids: Tensor) -> Tensor:
        out = self.bag(ids, torch.tensor([0, 1]))
        return out * len(f"n={self.labels['b']}")


@torch.jit.script
class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.shift = torch.ones(1)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = {"a": [Scale(2.0), Scale(3.0)], "b": [Scale(1.0)]}
        self.spans = [((0, 2), 1), ((2, 2), 1)]
        self.first = Scale(0.5)
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Tensor:
        for scale in self.scales["a"]:
            x = x * scale.factor + scale.shift
        for (start, size), repeats in self.spans:
            x = x + x[:, start : start + size].sum() * repeats
        return self.cell(x * self.first.factor, state)[0]


def models() -> Iterator[tuple[str, nn.Module, tuple[Tensor, ...]]]:
    """Yield names, models in evaluation mode, and inputs."""
    torch.manual_seed(0)
    image, ids, row = torch.rand(2, 4, 8, 8), torch.arange(6).view(2, 3), torch.rand(2, 4)
    activations = [
        nn.ReLU(),
        nn.SiLU(),
        nn.Mish(),
        nn.ELU(),
        nn.PReLU(),
        nn.Softplus(),
        nn.LeakyReLU(),
        nn.ReLU6(),
    ]
    yield "mlp", nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.LayerNorm(8), nn.Softmax(-1)), (row,)
    yield "activations", nn.Sequential(*activations, nn.Sigmoid(), nn.Tanh()), (row,)
    yield "residual", nn.Sequential(nn.Conv2d(4, 4, 1), Residual(), Residual(), nn.MaxPool2d(2)), (image,)
    yield "depthwise", Depthwise(), (image,)
    yield "unet", UNet(), (image,)
    for kind in ("LSTM", "GRU", "RNN"):
        yield kind.lower(), Recurrent(kind), (torch.rand(2, 5, 4),)
    yield "tagger", Tagger(), (ids,)
    yield "attention", Attention(), (torch.rand(2, 3, 8),)
    yield "decoder", Decoder(), (ids,)
    yield "branching", Branching(), (row,)
    yield "masked", Masked(), (row,)
    yield "dynamic", Dynamic(), (torch.rand(8, 4),)
    yield "boxes", Boxes(), (torch.rand(6, 4),)
    yield "spectral", Spectral(), (torch.rand(2, 16),)
    yield "convolution1d", Convolution1d(), (torch.rand(2, 4, 12),)
    yield "scales", Scales(), (row,)
    yield "text", Text(), (torch.arange(4),)
    yield "instance", nn.Sequential(nn.InstanceNorm2d(4), nn.ZeroPad2d(1), nn.PixelShuffle(2)), (image,)
    yield (
        "video",
        nn.Sequential(nn.Conv3d(2, 2, 2), nn.BatchNorm3d(2), nn.AdaptiveAvgPool3d(1)),
        (torch.rand(1, 2, 3, 4, 4),),
    )


def _quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), {nn.Linear})


def _statically_quantized() -> nn.Module:
    from torch.ao import quantization as q

    net = nn.Sequential(q.QuantStub(), nn.Conv2d(4, 4, 1), nn.ReLU(), q.DeQuantStub()).eval()
    net.qconfig = q.get_default_qconfig("x86")
    prepared = q.prepare(net)
    prepared(torch.rand(2, 4, 8, 8))
    return q.convert(prepared)


def _traced(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    return torch.jit.trace(model, inputs, check_trace=False)


def write(directory: Path, step: int) -> Iterator[Path]:
    """Write the models below a directory in all ways that they can be, and yield the paths.

    Args:
        step: Of so many models, one is exported.
    """
    from torch.utils.mobile_optimizer import optimize_for_mobile

    warnings.simplefilter("ignore")
    directory.mkdir(exist_ok=True)
    for number, (name, model, inputs) in enumerate(models()):
        model = model.eval()
        for way, make in {"script": torch.jit.script, "trace": _traced}.items():
            given = (inputs,) if way == "trace" else ()
            made: Any = make(model, *given)
            path = directory / f"{name}-{way}.pt"
            made.save(str(path))
            yield path
            if way == "trace":
                yield from _frozen(directory, name, made, optimize_for_mobile)
        if number % step == 0:
            yield from _exported(directory, name, model, inputs)
    for name, model, given in (
        ("dynamic-int8", _quantized(), torch.rand(2, 4)),
        ("static-int8", _statically_quantized(), torch.rand(2, 4, 8, 8)),
    ):
        for way, made in (("script", torch.jit.script(model)), ("trace", torch.jit.trace(model, given))):
            path = directory / f"{name}-{way}.pt"
            made.save(str(path))
            yield path
            path = directory / f"{name}-{way}.ptl"
            made._save_for_lite_interpreter(str(path))
            yield path


def _frozen(directory: Path, name: str, made: Any, optimize: Any) -> Iterator[Path]:
    path = directory / f"{name}-frozen.pt"
    torch.jit.freeze(made).save(str(path))
    yield path
    with contextlib.suppress(RuntimeError):  # no kernels for phones in this build
        path = directory / f"{name}-mobile.ptl"
        optimize(made)._save_for_lite_interpreter(str(path))
        yield path


def _exported(directory: Path, name: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[Path]:
    first = {0: torch.export.Dim.AUTO} if inputs[0].ndim > 1 else None
    for way, shapes in (("fixed", None), ("dynamic", tuple([first, *(None for _ in inputs[1:])]))):
        with contextlib.suppress(Exception):  # data-dependent control flow has no graph
            program = torch.export.export(model, inputs, dynamic_shapes=shapes)
            path = directory / f"{name}-{way}.pt2"
            torch.export.save(program, path)
            yield path
            if way == "fixed":
                path = directory / f"{name}-core.pt2"
                torch.export.save(program.run_decompositions(), path)
                yield path


def main(directory: Path, step: int) -> None:
    """Write the models, and print how many files they are."""
    print(sum(1 for _ in write(directory, step)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), 100 if "--few-exported" in sys.argv else 1)
