"""Calls PyTorch's operators with sizes, strides, offsets and indices out of range: which of them check them?

``python -m tests.security.operator_sweep [--dry] [--after OPERATOR] [OPERATOR...]`` calls all operators of
the list, or the named ones, in forked processes. It prints those that die of a signal or give a view that
reaches behind its storage, and records them. An operator with sizes or indices that took no arguments at all
was not checked, and is recorded, too. All memory of tensors lies between guard pages (``guarded_malloc.c``),
so that reading or writing outside is a signal. A sweep that was stopped goes on with ``--after``.

For each overload, a random search finds arguments that it accepts, besides those of ``examples``; then each
argument, and pairs of arguments, are replaced by odd ones. The search starts from the overload's name, so
that each run makes the same calls.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import mmap
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from ckpttool.core.name_lists import lines_of
from ckpttool.formats.torch import torch_operators
from ckpttool.formats.torch.torch_operators import OPERATORS

SEARCHED, ACCEPTED, PAIRS = 400, 3, 60
"""How many arguments are tried until some are accepted, how many accepted are varied, how many pairs."""
SECONDS_OF_ONE, SECONDS_OF_ALL, SECONDS_STUCK = 2, 6, 60
"""What a call, and all calls of one overload, may take of the processor; when a call waits for something."""
MEMORY = 2 << 30
FATAL = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGILL, signal.SIGTRAP}
SKIPPED = ("c10d::", "_c10d_functional", "symm_mem::", "_dtensor::", "cuda::", "prim::rpc", "higher_order::")
"""Operators of several processes, other devices and functions."""
OUTSIDE = "a view that reaches behind its storage"
NEVER_CALLED = "took none of the arguments tried"
_SIZES = frozenset({"int", "List[int]", "Optional[int]", "Optional[List[int]]"})
_OF_INDICES = re.compile("ind|offset|len|size|stride")
KEPT = frozenset(
    {
        "aten::linear",
        "aten::_convolution",
        "aten::_upsample_nearest_exact1d",
        "aten::_upsample_nearest_exact3d",
        "aten::affine_grid_generator",
        "aten::embedding_bag",
        "aten::view",
        "aten::floordiv",
        "aten::gcd",
        "aten::gru",
        "aten::lstm",
        "aten::remainder",
        "aten::rnn_relu",
        "aten::rnn_tanh",
        "aten::native_group_norm",
        "aten::_native_batch_norm_legit",
        "aten::_upsample_bilinear2d_aa",
        "aten::_fft_c2c",
        "aten::_fft_c2r",
        "aten::_fft_r2c",
        "aten::fft_ifft2",
    }
)
"""Operators that ordinary layers call: what is wrong with them is PyTorch's to mend."""
LIST = Path(torch_operators.__file__).with_name("lists") / "torch_unchecked_ops.txt"
HEADER = """\
# Operators of PyTorch that crash, or read or write memory that isn't their tensors', if sizes or indices are
# wrong, with what was seen, or that took none of the arguments tried: written by
# `python -m tests.security.operator_sweep`, which removes none.
"""
RESTARTS = 1
QUINT8 = 13
"""The number of an element type: of whole numbers from 0 to 255 with a scale."""
ENUMERATIONS = {
    "dtype": (0, 1, 4, 6, 7, 11, 15),
    "out_dtype": (6, 7),
    "output_dtype": (6, 7),
    "layout": (0,),
    "memory_format": (0, 1, 2),
}
"""Numbers of element types and layouts, which no operator checks: all of them go wrong with other numbers."""
NULL_PAGES, STACK = 1 << 16, 0x7FF000000000
_FAULT_AT = 2048
DEFAULT = -1
_HEAD = struct.Struct("QQQ")
_FAULT = struct.Struct("QQ")
_PRELOADED = "CKPTTOOL_SWEEP_PRELOADED"

INTEGERS = [
    0,
    1,
    2,
    3,
    -1,
    -2,
    4,
    7,
    -7,
    100,
    -100,
    4096,
    5000,
    1 << 20,
    1 << 31,
    1 << 40,
    -(1 << 40),
    (1 << 62),
    (1 << 63) - 1,
    -(1 << 63),
]
FLOATS = [0.0, 1.0, 0.5, -1.0, 2.0, 1e30, float("inf"), float("nan"), -1e9]
LISTS = [
    [],
    [0],
    [1],
    [2],
    [4],
    [1, 1],
    [2, 2],
    [2, 3],
    [0, 0],
    [1, 1, 1],
    [2, 2, 2],
    [0, 1],
    [1, 0],
    [-1],
    [-1, -1],
    [0, 0, 0],
    [1, 2, 3, 4],
    [4096],
    [100, 100],
    [-100],
    [-5, 3],
    [1 << 40],
    [1 << 31, 1 << 31],
    [-(1 << 62)],
    [1 << 62, 4],
    [3, 1 << 20],
    [4, 0, 4],
    [2, 1, 1, 1],
]
TEXTS = [
    "",
    "mean",
    "sum",
    "linear",
    "none",
    "ij,jk->ik",
    "reflect",
    "floor",
    "trunc",
    "relu",
    "cpu",
    "abc",
    "xy",
    "max",
    "prod",
    "amax",
    "lengths",
    "fro",
    "%s{}",
]


def tensors() -> list[Callable[[], Any]]:
    """Return makers of tensors of all shapes and kinds, among them indices out of range."""
    import torch

    def quantized(*shape: int) -> Any:
        return torch.quantize_per_tensor(torch.ones(*shape), 0.1, 0, torch.quint8)

    def channels(*shape: int) -> Any:
        scales, points = torch.ones(shape[0]), torch.zeros(shape[0], dtype=torch.long)
        return torch.quantize_per_channel(torch.ones(*shape), scales, points, 0, torch.qint8)

    makers: list[Callable[[], Any]] = [
        lambda shape=shape: torch.ones(shape)
        for shape in (
            (4,),
            (2, 3),
            (1, 2, 4),
            (1, 2, 4, 4),
            (1, 2, 3, 4, 4),
            (),
            (0,),
            (3, 3),
            (2, 2),
            (1,),
            (8, 8),
            (0, 3),
            (1, 1, 4096),
        )
    ]
    for values in (
        [0, 1, 2, 3],
        [5000, -5000, 1, 0],
        [0, 2, 4],
        [1 << 40, -(1 << 40)],
        [-1],
        [1],
        [0],
        [],
        [100],
        [4096, 4096],
        [(1 << 63) - 1],
        [0, 4, 2, 1000],
    ):
        makers += [lambda v=values: torch.tensor(v, dtype=torch.long)]
        if all(abs(one) < 1 << 31 for one in values):
            makers += [lambda v=values: torch.tensor(v, dtype=torch.int32)]
    makers += [
        lambda: torch.tensor([[0, 1], [5000, -7]]),
        lambda: torch.tensor([[[0, 5000], [-5000, 1]]]),
        lambda: torch.tensor([[[[0, 5000], [-5000, 1]]]]),
        lambda: torch.full((1, 2, 4, 4), 70000, dtype=torch.long),
        lambda: torch.full((1, 2, 2, 2, 2), 70000, dtype=torch.long),
        lambda: torch.zeros(2, 3, dtype=torch.long),
        lambda: torch.zeros(1, 2, 2, 2, dtype=torch.long),
        lambda: torch.ones(4, dtype=torch.bool),
        lambda: torch.ones(2, 3, dtype=torch.bool),
        lambda: torch.ones(4, dtype=torch.uint8),
        lambda: torch.ones(4, 8, dtype=torch.uint8),
        lambda: torch.ones(8, 8, dtype=torch.int8),
        lambda: torch.full((8, 8), 200, dtype=torch.int32),
        lambda: torch.ones(2, 3, dtype=torch.float64),
        lambda: torch.ones(8, 8, dtype=torch.bfloat16),
        lambda: torch.ones(2, 2, dtype=torch.complex64),
        lambda: torch.full((4,), 1e9),
        lambda: torch.full((1, 4, 4, 2), float("nan")),
        lambda: torch.full((1, 4, 4, 2), -1e18),
        lambda: torch.ones(8, 8)[::2, ::2],
        lambda: torch.ones(4).expand(3, 4),
        lambda: torch.ones(1, 2, 4, 4).contiguous(memory_format=torch.channels_last),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(2, 3).to_mkldnn(),
        lambda: quantized(2, 3),
        lambda: quantized(1, 2, 4, 4),
        lambda: channels(2, 3),
        lambda: channels(2, 2, 1, 1),
        lambda: torch.ones(4, requires_grad=True),
        lambda: torch.ones(2, 3, device="meta"),
    ]  # fmt: skip
    return makers


def objects(kind: str) -> list[Callable[[], Any]]:
    """Return makers of packed parameters and other objects of C++."""
    import torch

    q = torch.ops.quantized

    def weight(*shape: int) -> Any:
        return torch.quantize_per_tensor(torch.ones(*shape), 0.1, 0, torch.qint8)

    found = {
        "Conv2dPackedParamsBase": [
            lambda: q.conv2d_prepack(weight(2, 2, 1, 1), None, [1, 1], [0, 0], [1, 1], 1),
            lambda: q.conv2d_prepack(weight(2, 2, 3, 3), torch.ones(2), [2, 2], [1, 1], [1, 1], 1),
        ],
        "Conv3dPackedParamsBase": [
            lambda: q.conv3d_prepack(weight(2, 2, 1, 1, 1), None, [1] * 3, [0] * 3, [1] * 3, 1)
        ],
        "quantized.LinearPackedParamsBase": [
            lambda: q.linear_prepack(weight(3, 3), None),
            lambda: q.linear_prepack_fp16(torch.ones(3, 3), None),
        ],
        "EmbeddingPackedParamsBase": [
            lambda: q.embedding_bag_prepack(
                torch.quantize_per_channel(torch.ones(4, 8), torch.ones(4), torch.ones(4), 0, torch.quint8)
            )
        ],
    }
    return next((makers for name, makers in found.items() if kind.endswith(name)), [])


def examples() -> dict[str, Callable[[], dict[str, Any]]]:
    """Return makers of arguments that overloads accept which layers call, and a search hardly ever finds."""
    import torch
    from torch import arange, ones

    def recurrent(gates: int, **sequence: Any) -> dict[str, Any]:
        hidden, rows = ones(1, 2, 4), 4 * gates
        return {
            **sequence,
            "hx": [hidden, hidden] if gates == 4 else hidden,
            "params": [ones(rows, 3), ones(rows, 4), ones(rows), ones(rows)],
            "has_biases": True,
            "num_layers": 1,
            "dropout": 0.0,
            "train": False,
            "bidirectional": False,
        }

    kinds = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}
    rows = {"dim": 0, "index": arange(2)}
    resized = {"output_size": [4, 4, 4], "scale_factors": None}
    return {
        **{
            f"aten::{name}.input": lambda gates=gates: recurrent(
                gates, input=ones(5, 2, 3), batch_first=False
            )
            for name, gates in kinds.items()
        },
        **{
            f"aten::{name}.data": lambda gates=gates: recurrent(
                gates, data=ones(3, 3), batch_sizes=arange(2, 0, -1)
            )
            for name, gates in kinds.items()
        },
        **{
            f"aten::{name}": lambda: {"self": ones(3, 2), "source": ones(2, 2), **rows}
            for name in ("index_add", "index_add_", "index_copy", "index_copy_")
        },
        "aten::col2im": lambda: {
            "self": ones(1, 8, 9),
            "output_size": [4, 4],
            "kernel_size": [2, 2],
            "dilation": [1, 1],
            "padding": [0, 0],
            "stride": [1, 1],
        },
        "aten::conv3d": lambda: {"input": ones(1, 2, 3, 4, 4), "weight": ones(2, 2, 1, 2, 2)},
        "aten::conv_tbc": lambda: {"self": ones(5, 1, 2), "weight": ones(3, 2, 4), "bias": ones(4)},
        "aten::conv_transpose1d": lambda: {"input": ones(1, 2, 4), "weight": ones(2, 3, 2)},
        "aten::conv_transpose3d.input": lambda: {
            "input": ones(1, 2, 3, 4, 4),
            "weight": ones(2, 2, 1, 2, 2),
        },
        "aten::convolution": lambda: {
            "input": ones(1, 2, 4, 4),
            "weight": ones(2, 2, 2, 2),
            "bias": ones(2),
            "stride": [1, 1],
            "padding": [0, 0],
            "dilation": [1, 1],
            "transposed": False,
            "output_padding": [0, 0],
            "groups": 1,
        },
        "aten::ctc_loss.IntList": lambda: {
            "log_probs": ones(5, 1, 4),
            "targets": arange(1, 3),
            "input_lengths": [5],
            "target_lengths": [2],
        },
        "aten::fake_quantize_per_channel_affine": lambda: {
            "self": ones(3, 2),
            "scale": ones(3),
            "zero_point": ones(3),
            "axis": 0,
            "quant_min": 0,
            "quant_max": 255,
        },
        "aten::fractional_max_pool2d": lambda: {
            "self": ones(1, 2, 4, 4),
            "kernel_size": [2, 2],
            "output_size": [2, 2],
            "random_samples": ones(1, 2, 2),
        },
        "aten::fractional_max_pool3d": lambda: {
            "self": ones(1, 2, 4, 4, 4),
            "kernel_size": [2, 2, 2],
            "output_size": [2, 2, 2],
            "random_samples": ones(1, 2, 3),
        },
        "aten::grid_sampler_3d": lambda: {
            "input": ones(1, 1, 2, 2, 2),
            "grid": ones(1, 2, 2, 2, 3),
            "interpolation_mode": 0,
            "padding_mode": 0,
            "align_corners": False,
        },
        "aten::istft": lambda: {
            "self": ones(3, 4, dtype=torch.complex64),
            "n_fft": 4,
            "window": ones(4),
        },
        "aten::max_unpool2d": lambda: {
            "self": ones(1, 1, 2, 2),
            "indices": arange(4).view(1, 1, 2, 2),
            "output_size": [4, 4],
        },
        "aten::max_unpool3d": lambda: {
            "self": ones(1, 1, 2, 2, 2),
            "indices": arange(8).view(1, 1, 2, 2, 2),
            "output_size": [4, 4, 4],
            "stride": [2, 2, 2],
            "padding": [0, 0, 0],
        },
        "aten::native_layer_norm": lambda: {
            "input": ones(2, 3),
            "normalized_shape": [3],
            "weight": ones(3),
            "bias": ones(3),
            "eps": 1e-5,
        },
        **{
            f"aten::{name}": lambda: {"self": ones(2, 4), "target": arange(2)}
            for name in ("nll_loss", "nll_loss_nd")
        },
        "aten::nll_loss2d": lambda: {"self": ones(1, 4, 2, 2), "target": arange(4).view(1, 2, 2)},
        "aten::quantize_per_channel": lambda: {
            "self": ones(3, 2),
            "scales": ones(3),
            "zero_points": arange(3),
            "axis": 0,
            "dtype": QUINT8,
        },
        **{
            f"aten::{name}": lambda: {"self": ones(1, 2, 3, 3, 3), "padding": [1] * 6}
            for name in ("reflection_pad3d", "replication_pad3d")
        },
        "aten::scatter_add": lambda: {
            "self": ones(3, 2),
            "dim": 0,
            "index": arange(4).view(2, 2) % 3,
            "src": ones(2, 2),
        },
        "aten::scatter_reduce_.two": lambda: {
            "self": ones(3, 2),
            "dim": 0,
            "index": arange(4).view(2, 2) % 3,
            "src": ones(2, 2),
            "reduce": "sum",
        },
        "aten::thnn_conv2d": lambda: {
            "self": ones(1, 2, 4, 4),
            "weight": ones(2, 2, 2, 2),
            "kernel_size": [2, 2],
        },
        "aten::upsample_nearest3d.vec": lambda: {**resized, "input": ones(1, 1, 2, 2, 2)},
        "aten::upsample_trilinear3d.vec": lambda: {
            **resized,
            "input": ones(1, 1, 2, 2, 2),
            "align_corners": False,
        },
    }


class Arguments:
    """Values for the arguments of a schema, by their types; whole calls, by the names of overloads."""

    def __init__(self) -> None:
        self._tensors = tensors()
        self.examples = examples()

    def pool(self, kind: str) -> list[Callable[[], Any]]:
        """Return makers of values of a type, as a schema writes it."""
        import torch

        def each(values: list[Any]) -> list[Callable[[], Any]]:
            return [lambda v=v: list(v) if isinstance(v, list) else v for v in values]

        if kind.startswith("Optional["):
            return [lambda: None, *self.pool(kind[9:-1])]
        if kind == "Tensor":
            return self._tensors
        if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            some = [list]
            for one in self._tensors:
                some += [lambda m=one: [m()], lambda m=one: [m(), m()]]
            some.append(lambda: [torch.ones(12, 3), torch.ones(12, 3), torch.ones(12), torch.ones(12)])
            return some
        if kind == "int":
            return each([*INTEGERS, 6, 5, 13])
        if kind in ("number", "t", "Any"):
            return each([*INTEGERS, *FLOATS, True, 1j])
        if kind in ("List[int]", "List[number]", "List[t]"):
            return each(LISTS)
        if kind == "List[float]":
            return each([[], [1.0], [2.0, 2.0], [-1.0], [1e30], [float("nan")] * 2, [0.0, 0.0]])
        if kind == "List[bool]":
            return each([[], [True], [True, False], [True] * 3, [False] * 3])
        makers = {
            "float": each(FLOATS),
            "bool": each([False, True]),
            "str": each(TEXTS),
            "complex": each([0j, 1j]),
            "Device": each(["cpu", "meta"]),
            "List[str]": each([[], ["a"]]),
            "Generator": [lambda: torch.Generator()],
            "List[List[Tensor]]": [lambda m=one: [[m()], [m()]] for one in self._tensors],
            "List[List[str]]": each([[["a"]]]),
            "Dict[str, t]": each([{}, {"a": 1}]),
            "Dict[int, t]": each([{}, {1: 1}]),
            "Storage": [lambda: torch.ones(4).untyped_storage()],
        }
        return makers.get(kind) or objects(kind)


class OutsideError(Exception):
    """A view reaches behind its storage."""


def consume(result: Any) -> None:
    """Read all elements of a result.

    Raises:
        OutsideError: It is a view that reaches behind its storage.
    """
    import torch

    if isinstance(result, list | tuple):
        for one in result:
            consume(one)
    if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return
    if result.layout is torch.strided and not result.is_quantized and result.numel():
        last = result.storage_offset() + sum(
            (size - 1) * stride for size, stride in zip(result.shape, result.stride(), strict=True)
        )
        held = result.untyped_storage().nbytes()
        if (last + 1) * result.element_size() > held or result.storage_offset() < 0:
            raise OutsideError
    if result.numel() < 1 << 20:
        (result.to_dense() if result.layout is not torch.strided else result).clone()


class Trial:
    """The calls of one overload."""

    def __init__(self, schema: Any, arguments: Arguments) -> None:
        import torch

        self.name = f"{schema.name}.{schema.overload_name}".rstrip(".")
        self._call = torch._C._get_operation_overload(schema.name, schema.overload_name)[0]
        self._arguments = schema.arguments
        self._pools = [
            [lambda number=number: number for number in ENUMERATIONS[argument.name]]
            if argument.name in ENUMERATIONS and str(argument.type) in ("int", "Optional[int]")
            else arguments.pool(str(argument.type))
            for argument in schema.arguments
        ]
        self.is_possible = all(self._pools)
        make = arguments.examples.get(self.name, dict)
        given, names = make().keys(), [argument.name for argument in schema.arguments]
        example = [
            len(pool) if name in given else DEFAULT for name, pool in zip(names, self._pools, strict=True)
        ]
        self._examples = [example] if given else []
        self._pools = [
            [*pool, lambda name=name: make()[name]] if name in given else pool
            for name, pool in zip(names, self._pools, strict=True)
        ]
        kinds = {argument.name: str(argument.type) for argument in schema.arguments}
        self.takes_sizes = any("Tensor" in kind for kind in kinds.values()) and any(
            (kind in _SIZES and name not in ENUMERATIONS) or ("Tensor" in kind and _OF_INDICES.search(name))
            for name, kind in kinds.items()
        )
        self.accepted = 0

    def run(self, skipped: set[int], begin: Callable[[int, str], None]) -> None:
        """Make the calls, but those that took too long, and count those that were accepted.

        ``begin`` is told the number and the arguments of each call before it is made.
        """
        chance = random.Random(crc32(self.name.encode()))
        accepted: list[list[int]] = []
        count = itertools.count()

        def is_accepted(chosen: list[int]) -> bool:
            number = next(count)
            if number in skipped or not self._is_accepted(chosen, lambda text: begin(number, text)):
                return False
            self.accepted += 1
            return True

        searched = (self._first_choice(chance) for _ in range(SEARCHED))
        for chosen in itertools.chain(self._examples, searched):
            if is_accepted(chosen):
                accepted.append(chosen)
            if len(accepted) == ACCEPTED:
                break
        for base in accepted:
            for at, pool in enumerate(self._pools):
                for other in range(len(pool)):
                    is_accepted([*base[:at], other, *base[at + 1 :]])
            for _ in range(PAIRS if len(self._pools) > 1 else 0):
                chosen = list(base)
                for at in chance.sample(range(len(chosen)), 2):
                    chosen[at] = chance.randrange(len(self._pools[at]))
                is_accepted(chosen)

    def _first_choice(self, chance: random.Random) -> list[int]:
        """Return a choice for each argument that is likely to be accepted: defaults, and equal tensors."""
        of_kind: dict[int, int] = {}
        chosen = []
        for argument, pool in zip(self._arguments, self._pools, strict=True):
            at = chance.randrange(len(pool))
            if argument.has_default_value() and chance.random() < 0.7:
                at = DEFAULT
            elif chance.random() < 0.5:
                at = of_kind.setdefault(len(pool), at)
            chosen.append(at)
        return chosen

    def _is_accepted(self, chosen: list[int], begin: Callable[[str], None]) -> bool:
        pairs = [
            (argument, pool[at]())
            for argument, pool, at in zip(self._arguments, self._pools, chosen, strict=True)
            if at != DEFAULT
        ]
        begin(", ".join(f"{argument.name}={_shown(value)}" for argument, value in pairs))
        signal.setitimer(signal.ITIMER_PROF, SECONDS_OF_ONE)
        signal.alarm(SECONDS_STUCK)
        try:
            result = self._call(
                **{argument.name: value for argument, value in pairs},
            )
            consume([result, *(value for _, value in pairs)])
        except OutsideError:
            raise
        except Exception:  # noqa: BLE001 (operators raise anything)
            return False
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
        return True


def _shown(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        small = not value.is_meta and value.layout is torch.strided and not value.is_quantized
        held = value.tolist() if small and value.numel() < 5 else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{held}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)[:60]


@dataclass(frozen=True)
class Ending:
    """How the calls of one overload ended: ``what`` is empty if nothing was wrong."""

    name: str
    accepted: int
    what: str = ""
    arguments: str = ""


def tried(schema: Any, arguments: Arguments) -> Ending:
    """Try one overload in forked processes, as many as calls take too long."""
    trial = Trial(schema, arguments)
    nothing = NEVER_CALLED if trial.takes_sizes else ""
    if not trial.is_possible:
        return Ending(trial.name, -1, nothing)
    skipped: set[int] = set()
    shared = mmap.mmap(-1, 4096)
    while True:
        _FAULT.pack_into(shared, _FAULT_AT, 0, 0)
        child = os.fork()
        if child == 0:
            _run_child(trial, skipped, shared)
        status = os.waitpid(child, 0)[1]
        number, length, accepted = _HEAD.unpack_from(shared)
        text = shared[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        if os.WIFSIGNALED(status):
            died_of = signal.Signals(os.WTERMSIG(status))
            if died_of in (signal.SIGALRM, signal.SIGPROF, signal.SIGXCPU) and len(skipped) < RESTARTS:
                skipped.add(number)
                continue
            if died_of in FATAL:
                return Ending(
                    trial.name, accepted, _cause(died_of, *_FAULT.unpack_from(shared, _FAULT_AT)), text
                )
            return Ending(trial.name, accepted, "" if accepted else nothing)
        if os.WEXITSTATUS(status) == 3:
            return Ending(trial.name, accepted, OUTSIDE, text)
        return Ending(trial.name, accepted, "" if accepted else nothing)


def _cause(died_of: signal.Signals, address: int, is_write: int) -> str:
    """Return what killed a child: an access outside of tensors, a null pointer, or another signal."""
    if died_of not in (signal.SIGSEGV, signal.SIGBUS) or not address:
        return died_of.name
    if address < NULL_PAGES:
        return "null pointer"
    if address >> 40 == 0x7F and address > STACK:
        return f"stack at {address:#x}"
    return f"{'writes' if is_write else 'reads'} outside at {address:#x}"


def _run_child(trial: Trial, skipped: set[int], shared: mmap.mmap) -> None:
    def begin(number: int, text: str) -> None:
        data = text.encode()[:1000]
        _HEAD.pack_into(shared, 0, number, len(data), trial.accepted)
        shared[_HEAD.size : _HEAD.size + len(data)] = data

    fault = ctypes.addressof(ctypes.c_char.from_buffer(shared, _FAULT_AT))
    ctypes.CDLL(None).report_fault(ctypes.c_void_p(fault))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS_OF_ALL, SECONDS_OF_ALL + 5))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    status = 0
    try:
        trial.run(skipped, begin)
        _HEAD.pack_into(shared, 0, 0, 0, trial.accepted)
    except OutsideError:
        status = 3
    except BaseException:  # noqa: BLE001 (a child must not go on as its parent)
        status = 4
    os._exit(status)


def sweep(names: Iterable[str] = (), after: str = "") -> Iterator[Ending]:
    """Try all overloads of the listed operators behind one, or of the named ones."""
    import torch

    torch.set_num_threads(1)
    torch.set_warn_always(False)
    with contextlib.suppress(
        RuntimeError
    ):  # a process's first error takes seconds, as a call that hangs does
        torch.ones(2) + torch.ones(3)
    arguments = Arguments()
    wanted = frozenset(names)
    for schema in sorted(torch._C._jit_get_all_schemas(), key=lambda one: (one.name, one.overload_name)):
        is_wanted = schema.name in wanted if wanted else OPERATORS.danger(schema.name) is None
        is_twin = (
            len(wanted) != 1 and "out" in schema.overload_name
        )  # the same code, writing to a given tensor
        if is_wanted and not is_twin and schema.name > after and not schema.name.startswith(SKIPPED):
            with contextlib.suppress(RuntimeError):  # no operator of the interpreter's
                yield tried(schema, arguments)


def record(endings: Iterable[Ending]) -> None:
    """Add the operators that fell to the list, and those of which no overload was ever called."""
    lines = lines_of(LIST) if LIST.exists() else []
    seen = dict(line.partition(" ")[::2] for line in lines)
    of_operator: dict[str, list[Ending]] = {}
    for ending in endings:
        of_operator.setdefault(ending.name.partition(".")[0], []).append(ending)
    for name, overloads in of_operator.items():
        is_called = any(ending.accepted > 0 for ending in overloads)
        for what in sorted((ending.what for ending in overloads), key=NEVER_CALLED.__eq__):
            if what and name not in KEPT and not (is_called and what == NEVER_CALLED):
                seen.setdefault(name, re.sub(r" at 0x\w+", "", what))
    LIST.write_text(HEADER + "".join(f"{name} {seen[name]}\n" for name in sorted(seen)), encoding="utf-8")


def main() -> None:
    """Print what fell, and record it unless it is a dry run."""
    if _PRELOADED not in os.environ:
        _start_again(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    parser.add_argument("--after", default="", help="the last operator that is not called again")
    parser.add_argument("names", nargs="*")
    wanted = parser.parse_args()
    untried = accepting = 0
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        endings = sweep(wanted.names, wanted.after)
        for _, overloads in itertools.groupby(endings, lambda ending: ending.name.partition(".")[0]):
            found = list(overloads)
            for ending in found:
                untried += ending.accepted < 1 and ending.what in ("", NEVER_CALLED)
                accepting += ending.accepted > 0
                if ending.what:
                    print(f"{ending.name}\t{ending.what}\t{ending.arguments}", flush=True)
            if not wanted.dry:
                record(found)
    print(f"{accepting} overloads took some of the arguments, {untried} none")


def _start_again(names: list[str]) -> None:
    """Start this module again with guarded memory."""
    source = Path(__file__).with_name("guarded_malloc.c")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # LD_PRELOAD ends at a space
        library = Path(directory) / "guarded_malloc.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), _PRELOADED: "1"}
        command = [sys.executable, "-W", "ignore", "-m", "tests.security.operator_sweep", *names]
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
