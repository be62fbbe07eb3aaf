"""Honest files as real libraries write them, over all protocols: none of them is called anything but safe."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import io
import pathlib
import pickle
import random
import types
import uuid
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.security.assembler import PROTOCOLS


def plain_values() -> dict[str, Any]:
    """Return objects of the standard library that people put into checkpoints."""
    return {
        "numbers": [0, -1, 255, 65_536, 1 << 70, -(1 << 200), 1.5, float("inf"), 2 + 3j, True, None],
        "texts": ["", "a", "ü\n\\", "\U0001f600", "x" * 300, b"", b"\x80\xff", b"y" * 300, bytearray(b"z")],
        "containers": [
            (),
            (1,),
            (1, 2, 3, 4),
            {1, 2},
            frozenset({3}),
            {"a": {"b": [1]}},
            range(3),
            slice(1, 2),
        ],
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "defaults": [collections.defaultdict(list, {"a": [1]}), collections.defaultdict(int, a=1)],
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2], 3),
        "namespace": [Namespace(lr=0.1, names=["a"]), types.SimpleNamespace(a=1)],
        "moments": [
            datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
            datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
            datetime.date(2026, 1, 2),
            datetime.time(1, 2),
            datetime.timedelta(1, 2, 3),
        ],
        "paths": [pathlib.PurePosixPath("a/b"), pathlib.PosixPath("/tmp/x"), pathlib.PureWindowsPath("c:/x")],
        "decimal": [decimal.Decimal("1.50"), fractions.Fraction(1, 3)],
        "uuid": uuid.UUID(int=5),
        "random": random.Random(1).getstate(),
        "shared": _shared(),
    }


def _shared() -> Any:
    inner = ["shared"]
    return {"a": inner, "b": inner, "c": (inner, inner)}


def numpy_values() -> dict[str, Any]:
    """Return what NumPy and pandas make."""
    import numpy as np
    import pandas as pd

    return {
        "array": np.arange(6, dtype="float32").reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalars": [np.float32(1.5), np.int64(2), np.bool_(True)],
        "structured": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "random_state": np.random.RandomState(1).get_state(),
        "rng": [np.random.RandomState(1), np.random.default_rng(1)],
        "times": np.array(["2026-01-01"], dtype="datetime64[D]"),
        "texts": np.array(["a", "bc"]),
        "masked": np.ma.masked_array([1, 2], mask=[0, 1]),
        "records": np.rec.array([(1, "a")], names="a,b"),
        "objects": np.array([(1, None, [2])], dtype=[("a", "i1"), ("b", "O"), ("c", "O", (1,))]),
        "aligned": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        "strings": np.array(["a", "bc"], np.dtypes.StringDType()),
        "frames": [
            pd.DataFrame({"a": [1, 2.5], "b": ["x", "y"], "c": pd.Categorical(["u", "v"])}),
            pd.Series([1, None], index=pd.date_range("2026", periods=2, tz="Europe/Berlin")),
            [pd.Timestamp("2026", tz="UTC"), pd.Timedelta("1s"), pd.Interval(0, 1), pd.offsets.Hour(2)],
        ],
        "generators": [np.random.Generator(kind(1)) for kind in (np.random.Philox, np.random.SFC64)],
    }


def torch_values() -> dict[str, Any]:
    """Return what people save with PyTorch."""
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    shared = torch.arange(6.0)
    return {
        "state_dict": net.state_dict(),
        "training": {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": 3,
            "args": Namespace(lr=0.1),
        },
        "lightning": {
            "epoch": 1,
            "global_step": 2,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": net.state_dict(),
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {"ModelCheckpoint{'monitor': 'x'}": {"best": "x", "kth": torch.tensor(1.0)}},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [scheduler.state_dict()],
            "hyper_parameters": {"lr": 0.1, "when": datetime.timedelta(1)},
        },
        "module": net,
        "modules": _modules(),
        "optimizers": [optimizer, torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters(), 0.1)],
        "schedulers": [scheduler, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)],
        "scaler": torch.amp.GradScaler("cpu"),
        "attributes": _with_attributes(),
        "initialisers": {"weight": torch.nn.init.xavier_uniform_, "bias": torch.nn.init.zeros_},
        "views": {"a": shared, "b": shared[2:], "c": torch.nn.Parameter(shared[:2].clone())},
        "dtypes": [torch.zeros(2, dtype=kind) for kind in (torch.bfloat16, torch.int8, torch.cfloat)],
        "sizes": [torch.Size([1, 2]), torch.float32, torch.device("cpu"), torch.strided],
    }  # fmt: skip


def state_values() -> dict[str, Any]:
    """Return state dicts of all optimizers and schedulers, after a step of each."""
    import torch
    from torch.optim import lr_scheduler

    found = {}
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name)
        if name == "Optimizer" or not isinstance(kind, type):
            continue
        weight = torch.nn.Parameter(torch.ones(2, 2))
        optimizer = kind([weight], lr=0.1)
        weight.grad = torch.ones(2, 2).to_sparse() if name == "SparseAdam" else torch.ones(2, 2)
        optimizer.step(*([lambda w=weight: w.sum()] if name == "LBFGS" else []))
        found[name] = optimizer.state_dict()
    for name, arguments in SCHEDULERS.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1, momentum=0.9)
        scheduler = getattr(lr_scheduler, name)(optimizer, *arguments)
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        found[name] = scheduler.state_dict()
    return found


SCHEDULERS: dict[str, tuple[Any, ...]] = {
    "StepLR": (5,),
    "MultiStepLR": ([1, 3],),
    "ConstantLR": (),
    "LinearLR": (),
    "ExponentialLR": (0.9,),
    "PolynomialLR": (),
    "CosineAnnealingLR": (10,),
    "CosineAnnealingWarmRestarts": (10,),
    "ReduceLROnPlateau": (),
    "OneCycleLR": (0.1, 10),
    "CyclicLR": (0.1, 0.2),
}


def _modules() -> list[Any]:
    """Return modules with states of their own, and functions among their attributes."""
    import torch
    from torch import nn

    return [
        nn.LSTM(2, 2, bidirectional=True),
        nn.TransformerEncoderLayer(4, 2, 8, activation=nn.functional.gelu),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)).state_dict(),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.PReLU()),
        nn.ParameterDict({"a": nn.Parameter(torch.ones(1))}),
        torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)),
    ]


def _with_attributes() -> list[Any]:
    """Return tensors that somebody set attributes on."""
    import torch

    parameter, tensor = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    parameter.activation = torch.relu
    tensor.label = {"name": "a"}
    return [parameter, tensor]


def partial_values() -> dict[str, Any]:
    """Return what nobody can know to be harmless, and honest runs keep: Hydra and Lightning among others."""
    import torch
    from torch import nn

    net, partial = nn.Linear(2, 2), functools.partial
    norm = nn.Linear(2, 2)
    norm.norm_layer = partial(nn.LayerNorm, eps=1e-6)
    return {
        "class": {"optimizer": partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99))},
        "scheduler": {
            "hyper_parameters": {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3)}
        },
        "function": partial(nn.functional.gelu, approximate="tanh"),
        "initialiser": [partial(nn.init.trunc_normal_, std=0.02), partial(torch.zeros, 3)],
        "object": [partial(nn.ReLU()), partial(net.forward), partial(partial(nn.Linear, 4), 5)],
        "default": collections.defaultdict(partial(collections.deque, maxlen=20), {"loss": [1.0]}),
        "attribute": norm,
    }


def write(directory: Path) -> Iterator[Path]:
    """Write the honest files below a directory, and yield their paths."""
    import numpy as np
    import torch

    directory.mkdir()
    for name, value in {**plain_values(), **numpy_values()}.items():
        for protocol in PROTOCOLS:
            path = directory / f"{name}-{protocol}.pkl"
            path.write_bytes(pickle.dumps({"value": value}, protocol))
            yield path
    for name, value in {**torch_values(), **state_values(), **plain_values()}.items():
        for protocol, zipped in ((2, True), (4, True), (2, False)):
            path = directory / f"{name}-{protocol}-{'zip' if zipped else 'legacy'}.pth"
            torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
            yield path
    arrays = numpy_values()
    for name in ("array", "structured", "times"):
        path = directory / f"{name}.npz"
        np.savez_compressed(path, first=arrays[name], second=np.arange(3))
        yield path
    out = io.BytesIO()
    np.save(out, np.array([{"a": 1}, [1, 2]], dtype=object))
    path = directory / "objects.npy"
    path.write_bytes(out.getvalue())
    yield path
