"""Keras's own file, ``.keras``: a zip of the model's config and its variables in HDF5, as Keras 3 writes it.

Source: Keras ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ckpttool.checkpoint import Path, Tensor
from ckpttool.formats.carried import ENTRY
from ckpttool.formats.keras_native import ASSET
from ckpttool.wire.hdf5_writing import draw
from ckpttool.wire.staged import Staged
from ckpttool.wire.zip_writing import NumpyZip
from ckpttool.writing.content import Content
from ckpttool.writing.hdf5 import refusals
from ckpttool.writing.interface import WriteOptions, Writer
from ckpttool.writing.keras_configs import archive_config, archive_metadata, has_model
from ckpttool.writing.keras_entry import entry_of
from ckpttool.writing.keras_h5 import KERAS_TYPES, keras_plan
from ckpttool.writing.keras_numbering import numbered

_CONFIG, _METADATA, _WEIGHTS = "config.json", "metadata.json", "model.weights.h5"
_NO_MODEL = (
    "a .keras file is a model, and the source does not have its architecture "
    "(--model FILE gives it; .weights.h5 holds weights alone)"
)


class Keras(Writer):
    """A model as ``model.save("m.keras")`` writes it."""

    name: ClassVar[str] = "keras"
    dtypes: ClassVar[frozenset[str]] = KERAS_TYPES

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        if not has_model(content.native):
            yield _NO_MODEL
            return
        places = numbered(content)
        yield from places.problems or refusals(places.paths, content.tensors)

    def named(self, tensor: Tensor) -> str:
        return ".".join(map(str, self._paths.get(tensor.name, tensor.path)))

    def write(self, content: Content, target: Staged, options: WriteOptions) -> None:
        places = numbered(content)
        self._paths = places.named(content.tensors)
        archive = NumpyZip(target.create())
        archive.add(_METADATA, archive_metadata(content.native))
        archive.add(_CONFIG, archive_config(content.native))
        weights = draw(keras_plan(content, places))
        archive.assemble(_WEIGHTS, weights.size, weights.stream_summed)
        for key, data in content.native.items():
            if key.startswith(ASSET):
                archive.add(key.removeprefix(ASSET), data)
        entry = entry_of(content, self._paths, holds_model=True, holds_assets=True)
        if entry is not None:
            archive.add(ENTRY, entry)
        archive.finish()
        archive.seal()
