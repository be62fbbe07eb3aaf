"""Keras in HDF5: ``.weights.h5`` with variables by number, and whole models in ``.h5`` with lists of weights.

Source: Keras ``src/saving/saving_lib.py``, ``src/legacy/saving/legacy_h5_format.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ckpttool.formats.content.carried import ENTRY
from ckpttool.formats.keras.layout import Groups, top_of
from ckpttool.formats.keras.native import ASSET, CONFIGS, h5_native, object_of
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.hdf5_writer import Plan, draw
from ckpttool.wire.staged_output import StagedOutput
from ckpttool.writing.content import Content
from ckpttool.writing.hdf5 import planned, refusals
from ckpttool.writing.interface import WriteOptions, Writer
from ckpttool.writing.keras_configs import attribute_configs, attribute_metadata, has_model
from ckpttool.writing.keras_entry import Held, entry_of
from ckpttool.writing.keras_listing import in_lists
from ckpttool.writing.keras_numbering import numbered
from ckpttool.writing.keras_places import Places

KERAS_TYPES = frozenset(
    (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
)
"""Names of the types that Keras reads: what else h5py stores comes back to it as bytes without a type."""

_WEIGHTS = ".weights.h5"
_NO_MODEL = (
    "a whole model needs its architecture, which the source does not have "
    "(--model FILE gives it; .weights.h5 holds weights alone)"
)


class KerasH5(Writer):
    """A model, or weights, in HDF5; the target's name says which."""

    name: ClassVar[str] = "keras-h5"
    dtypes: ClassVar[frozenset[str]] = KERAS_TYPES

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        if not _is_weights(options) and not has_model(content.native):
            yield _NO_MODEL
            return
        places = _places(content, options)
        yield from places.problems or refusals(places.paths, content.tensors)
        if not _is_weights(options):
            yield from _model_refusals(content)

    def named(self, tensor: Tensor) -> str:
        return ".".join(map(str, self._paths.get(tensor.name, tensor.path)))

    def write(self, content: Content, target: StagedOutput, options: WriteOptions) -> None:
        places = _places(content, options)
        self._paths = places.named(content.tensors)
        plan = keras_plan(content, places)
        if not _is_weights(options):
            _describe(plan, content)
        entry = entry_of(content, self._paths, _held(plan.groups))
        if entry is not None:
            plan.texts[(ENTRY,)] = entry
        draw(plan).stream(target.create())


def _model_refusals(content: Content) -> Iterator[str]:
    """Yield what Keras can't read out of an ``.h5`` with lists."""
    for tensor in content.tensors:
        if tensor.dtype.name == "bfloat16":
            yield f"{tensor.name}: Keras reads no bfloat16 out of an .h5 (.keras holds it, --dtype casts)"
    for key in content.native:
        if key.startswith(ASSET):
            yield f"{key.removeprefix(ASSET)}: an .h5 has no place for a file of the model (.keras has)"


def _is_weights(options: WriteOptions) -> bool:
    return options.name.lower().endswith(_WEIGHTS)


def _places(content: Content, options: WriteOptions) -> Places:
    return numbered(content) if _is_weights(options) else in_lists(content)


def keras_plan(content: Content, places: Places) -> Plan:
    """Return a file with the variables of a model in their places."""
    plan = planned(places.paths, content.tensors)
    plan.groups = dict(places.groups)
    return plan


def _describe(plan: Plan, content: Content) -> None:
    """Let a file say which model its weights are of."""
    metadata = attribute_metadata(content.native)
    plan.groups[()] = {**plan.groups.get((), {}), **metadata, **attribute_configs(content.native)}
    top = top_of(plan.groups)
    if top:
        plan.groups[top] = {**metadata, **plan.groups[top]}


def _held(groups: Groups) -> Held:
    told = {**groups.get((), {}), **groups.get(("model_weights",), {})}
    metadata = {key: told[key] for key in told if not key.startswith(("layer_names", *CONFIGS))}
    configs = {key: object_of(told[key].encode()) for key in CONFIGS if key in told}
    return Held({**metadata, **configs}, h5_native(groups, ()))
