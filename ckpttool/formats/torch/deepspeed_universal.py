"""DeepSpeed's universal checkpoints: a directory for each parameter, whatever ranks wrote them.

``ds_to_universal`` puts ``zero/<parameter>/fp32.pt`` and a file for each state of the optimizer beside copies
of the model states. Those hold rounded weights, and still describe the job whose files they were.

Source: deepspeedai/DeepSpeed ``deepspeed/checkpoint/ds_to_universal.py``, ``universal_checkpoint.py``,
``constants.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.report import warning
from ckpttool.core.tensor import Role, Tensor
from ckpttool.formats.interface import Probe
from ckpttool.formats.parts import OpenedParts, open_file
from ckpttool.formats.torch.deepspeed_zero import shapes_of
from ckpttool.io import fs

VARIANT = "deepspeed-universal"
ZERO, FP32 = "zero", "fp32"
_VALUE = "param"
"""The key under which a file has its tensor; of stage 3 it has the tensor alone, flat."""
_SUFFIX = ".pt"
_OF_ALL = "optimizer_state.pt"
_MAX_NAMED = 10


class UniversalStates:
    """The parameters of a universal checkpoint, and what its optimizer keeps of them.

    Attributes:
        tensors: ``zero.<parameter>.fp32`` and so on, with the shapes of the parameters.
        metadata: What is said of the whole optimizer.
        paths: All files below ``zero``.
    """

    def __init__(self, probe: Probe, parts: OpenedParts) -> None:
        self.tensors: list[Tensor] = []
        self.metadata: Mapping[str, Any] = {}
        self.paths: list[str] = []
        self._parts = parts
        self._states: dict[str, set[str]] = {}
        root = probe.entries[ZERO].path
        for entry in sorted(fs.entries(root), key=lambda one: one.name):
            if entry.is_dir(follow_symlinks=False):
                self._add_parameter(entry)
            else:
                self._add_shared(entry)

    def check(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Note what is missing, given the metadata of the model states, and give tensors their shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for metadata in models.values():
            for group in shapes_of(metadata.get("param_shapes")):
                shapes.update(group)
        missing = [name for name in {**shapes, **self._states} if FP32 not in self._states.get(name, ())]
        for name in missing[:_MAX_NAMED]:
            self._parts.fault("part-missing", "there is no such file", f"{ZERO}/{name}/{FP32}{_SUFFIX}")
        if len(missing) > _MAX_NAMED:
            self._parts.fault("part-missing", f"{len(missing) - _MAX_NAMED:,} more files are not there", None)
        self._check_states()
        is_cut = len(models) > 1  # with tensor parallelism, shapes may be those of each rank's slices
        self.tensors = [
            self._shaped(one, shapes.get(str(one.path[1])), is_cut=is_cut) for one in self.tensors
        ]

    def _check_states(self) -> None:
        """Note states of the optimizer that some parameters lack: it may be theirs, or be lost."""
        states = set().union(*self._states.values()) if self._states else set()
        for name, held in self._states.items():
            for state in sorted(states - held - {FP32}):
                message = "there is no such file, and other parameters have one"
                where = f"{ZERO}/{name}/{state}{_SUFFIX}"
                self._parts.findings.append(warning("part-missing", message, where))

    def _shaped(self, tensor: Tensor, shape: tuple[int, ...] | None, *, is_cut: bool) -> Tensor:
        if shape is None or tensor.shape in (shape, ()):
            return tensor
        flat = replace(tensor, shape=shape)
        if len(tensor.shape) == 1 and flat.size == tensor.size:
            return flat
        if is_cut:
            return tensor
        message = f"shape {list(tensor.shape)}, and the model states say {list(shape)}"
        self._parts.fault("part-damaged", message, "/".join(map(str, tensor.path)) + _SUFFIX)
        return tensor

    def _add_parameter(self, directory: os.DirEntry[str]) -> None:
        states = self._states.setdefault(directory.name, set())
        for entry in sorted(fs.entries(directory.path), key=lambda one: (one.name != f"{FP32}.pt", one.name)):
            place = f"{ZERO}/{directory.name}/{entry.name}"
            if not entry.is_file() or not entry.name.endswith(_SUFFIX):
                self._parts.findings.append(warning("part-not-checked", "it was not looked into", place))
                continue
            state = entry.name.removesuffix(_SUFFIX)
            states.add(state)
            self.paths.append(entry.path)
            part = self._parts.add(place, partial(open_file, entry.path))
            if part is not None:
                self.tensors += self._state_tensors(part, directory.name, state, place)

    def _state_tensors(self, part: Checkpoint, name: str, state: str, place: str) -> Iterator[Tensor]:
        """Yield the one tensor of a file; a step may be a number."""
        values = [one for one in part.tensors if one.path in ((_VALUE,), ("tensor",))]
        if len(values) == 1:
            yield replace(values[0], path=(ZERO, name, state), role=Role.OPTIMIZER, shares_with=None)
        elif values or state == FP32:
            found = f"{len(values)} tensors under {_VALUE!r}, expected one"
            self._parts.fault("part-damaged", found, place)

    def _add_shared(self, entry: os.DirEntry[str]) -> None:
        place = f"{ZERO}/{entry.name}"
        if entry.name != _OF_ALL or not entry.is_file():
            self._parts.findings.append(warning("part-not-checked", "it was not looked into", place))
            return
        self.paths.append(entry.path)
        part = self._parts.add(place, partial(open_file, entry.path))
        if part is not None:
            self.metadata = part.metadata
            owned = (
                replace(one, path=(ZERO, "optimizer_state", *one.path), role=Role.OPTIMIZER, shares_with=None)
                for one in part.tensors
            )
            self.tensors += owned


def is_universal(probe: Probe) -> bool:
    """Tell whether a directory has one for each parameter below ``zero``."""
    entry = probe.entries.get(ZERO)
    if entry is None or not entry.is_dir(follow_symlinks=False):
        return False
    return any(one.is_dir(follow_symlinks=False) or one.name == _OF_ALL for one in fs.entries(entry.path))
