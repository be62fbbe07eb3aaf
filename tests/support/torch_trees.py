"""Python objects as checkpoints hold them, compared in every respect, and written by the pickler."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import math
import pathlib
import struct
import warnings
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch

from ckpttool.containers.pickle.pickler import Storages, dumps


def write_zip(tree: object, path: Path) -> Path:
    """Write an archive of PyTorch around the pickle of a tree."""
    storages = Storages()
    data = dumps(tree, storages)
    with ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        for key, tensor in enumerate(storages.tensors):
            archive.writestr(f"archive/data/{key}", tensor.tobytes())
        archive.writestr("archive/version", "3\n")
    return path


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return where two objects differ: types, order, bits of floats and of tensors, state."""
    if type(a) is not type(b):
        return [f"{path}: {type(a)} and {type(b)}"]
    if isinstance(a, torch.Tensor):
        return [] if _same_tensor(a, b) else [f"{path}: {a} and {b}"]
    if isinstance(a, np.ndarray):
        return [] if (a.dtype, a.tolist()) == (b.dtype, b.tolist()) else [f"{path}: {a} and {b}"]
    if isinstance(a, float):
        same = struct.pack(">d", a) == struct.pack(">d", b) or (math.isnan(a) and math.isnan(b))
        return [] if same else [f"{path}: {a} and {b}"]
    if isinstance(a, dict):
        return _different_dicts(a, b, path)
    if isinstance(a, list | tuple):
        found = [f"{path}: {len(a)} and {len(b)} items"] if len(a) != len(b) else []
        return found + [
            one
            for at, (x, y) in enumerate(zip(a, b, strict=False))
            for one in differences(x, y, f"{path}.{at}")
        ]
    if hasattr(a, "__dict__"):
        return differences(vars(a), vars(b), path)
    return [] if a == b else [f"{path}: {a!r} and {b!r}"]


def _different_dicts(a: dict[Any, Any], b: dict[Any, Any], path: str) -> list[str]:
    found = [] if list(map(repr, a)) == list(map(repr, b)) else [f"{path}: keys {list(a)} and {list(b)}"]
    if getattr(a, "default_factory", None) is not getattr(b, "default_factory", None):
        found.append(f"{path}: other defaults")
    found += differences(getattr(a, "__dict__", None), getattr(b, "__dict__", None), f"{path}.__dict__")
    values = zip(a.values(), b.values(), strict=False)
    return found + [
        one for key, (x, y) in zip(a, values, strict=False) for one in differences(x, y, f"{path}.{key}")
    ]


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape if not a.is_nested else 0, a.layout, a.requires_grad, a.device) != (
        b.dtype,
        b.shape if not b.is_nested else 0,
        b.layout,
        b.requires_grad,
        b.device,
    ):
        return False
    if vars(a).keys() != vars(b).keys():
        return False
    if a.is_nested:
        return all(map(_same_tensor, a.unbind(), b.unbind()))
    if a.is_quantized:
        return torch.equal(a.int_repr(), b.int_repr()) and repr(a) == repr(b)
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return a.device.type == "meta" or _bits(a) == _bits(b)


def _bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


SHARED = [1, 2]


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.ones(5, 3)).sum().backward()
    adam.step()
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 2)
    states = {
        "model": model.state_dict(),
        "optimizer": adam.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    return {**states, "epoch": 3, "loss": 0.5}


def _values() -> dict[str, Any]:
    base = torch.arange(12.0)
    return {
        "training": trained(),
        "order and keys": {
            "b": 1,
            "a": 2,
            1: "number",
            "1": "text",
            (1, ("x", 2)): 3,
            2.5: 4,
            None: 5,
            b"k": 6,
        },
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),)],
        "sets": {"set": {1, "a", (2, 3)}, "frozen": frozenset({1}), "empty": set()},
        "bytes": [b"", b"\0\xff\x80 text", bytearray(b"\xfe"), bytearray()],
        "numbers": [0, 255, 256, 65536, -1, 1 << 31, -(1 << 31), 1 << 200, -(1 << 200), True, False, 1 + 2j],
        "floats": [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-320, 0.1],
        "texts": ["", "é€😀", "\ud800", "$tensor", "x" * 70_000],
        "dollar": {"$tensor": "a", "$dict": [], "$": {"$same": 0}},
        "mappings": [
            collections.OrderedDict(b=1, a=2),
            collections.Counter("abca"),
            collections.defaultdict(list, a=[1]),
            collections.defaultdict(None, {1: 2}),
        ],
        "torch values": [
            torch.Size([2, 3]),
            torch.device("cuda", 1),
            torch.device("cpu"),
            torch.bfloat16,
            torch.Size([]),
        ],
        "shared": [SHARED, {"again": SHARED}, SHARED],
        "parameters": [
            torch.nn.Parameter(torch.ones(2)),
            torch.nn.Parameter(torch.ones(2), requires_grad=False),
        ],
        "gradients": torch.ones(3, requires_grad=True),
        "ties": {"a": base, "b": base.view(3, 4), "c": base, "d": base[3:5]},
        "views": [
            base.view(3, 4).t(),
            base[::2],
            base.view(3, 4).expand(2, 3, 4),
            torch.ones(1, 3, 2, 2).to(memory_format=torch.channels_last),
        ],
        "small": [torch.tensor(3), torch.empty(0), torch.empty(2, 0, 3), torch.tensor(float("nan"))],
        "lazy bits": [
            torch.view_as_complex(torch.ones(3, 2)).conj(),
            torch.ones(2, dtype=torch.complex64).conj().imag,
        ],
        "types": [
            torch.ones(3).to(getattr(torch, name))
            for name in [
                "bool",
                "uint8",
                "int8",
                "int16",
                "int32",
                "int64",
                "float16",
                "bfloat16",
                "float32",
                "float64",
                "complex64",
                "complex128",
                "uint16",
                "uint32",
                "uint64",
                "float8_e4m3fn",
                "float8_e5m2",
                "float8_e4m3fnuz",
                "float8_e5m2fnuz",
            ]
        ],
        "sparse": [
            torch.eye(3).to_sparse(),
            torch.eye(3).to_sparse_csr(),
            torch.eye(3).to_sparse_csc(),
            torch.eye(4).to_sparse_bsr((2, 2)),
            torch.eye(3).to_sparse().coalesce(),
        ],
        "quantized": [
            torch.quantize_per_tensor(torch.arange(6.0).view(2, 3), 0.1, 3, torch.qint8),
            torch.quantize_per_tensor(torch.arange(3.0), 0.1, 0, torch.qint32),
            torch.quantize_per_channel(
                torch.arange(6.0).view(3, 2),
                torch.ones(3) * 0.1,
                torch.zeros(3, dtype=torch.int64),
                0,
                torch.quint8,
            ),
        ],
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
        "no values": {"meta": torch.empty(3, 2, device="meta"), "some": torch.ones(1)},
        "attributes": torch.nn.Buffer(torch.ones(2)),
        "numpy": [
            np.arange(6.0).reshape(2, 3),
            np.asfortranarray(np.arange(6).reshape(2, 3)),
            np.float32(1.5),
            np.int64(-3),
            np.bool_(True),
            np.array(["a", "bc"]),
            np.array([1, "x", None], object),
            np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
            np.array("2020-01-01", "M8[s]"),
            np.empty((0, 3), np.float16),
            np.dtype("f4"),
        ],
        "random states": {"numpy": np.random.RandomState(1).get_state(), "torch": torch.get_rng_state()},
        "records": argparse.Namespace(lr=0.1, layers=[1, 2], weights=torch.ones(2)),
        "library": [
            datetime.datetime(2020, 1, 2, 3),
            pathlib.PurePosixPath("a/b"),
            decimal.Decimal("1.50"),
            slice(1, None),
            range(3),
            collections.deque([1, 2], 5),
        ],
        "bare": torch.ones(2),
        "list": [1, torch.ones(2)],
        "none": None,
    }


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch warns of what it will do without one day
    VALUES = _values()
