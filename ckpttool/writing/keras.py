"""Keras's own file, ``.keras``: a zip of the model's config and its variables in HDF5, as Keras 3 writes it.

Source: Keras ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ckpttool.formats.content.carried import ENTRY
from ckpttool.formats.keras.native import ASSET, CONFIG, METADATA, object_of
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.hdf5_writer import draw
from ckpttool.wire.staged_output import StagedOutput
from ckpttool.wire.zip_writer import NumpyZip
from ckpttool.writing.content import Content
from ckpttool.writing.hdf5 import refusals
from ckpttool.writing.interface import WriteOptions, Writer
from ckpttool.writing.keras_assets import asset_refusals, assets
from ckpttool.writing.keras_configs import archive_config, archive_metadata, has_model
from ckpttool.writing.keras_entry import Held, entry_of
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
        yield from asset_refusals(content.native)

    def named(self, tensor: Tensor) -> str:
        return ".".join(map(str, self._paths.get(tensor.name, tensor.path)))

    def write(self, content: Content, target: StagedOutput, options: WriteOptions) -> None:
        places = numbered(content)
        held = _held(content.native)
        places.config = held.metadata["model_config"]
        self._paths = places.named(content.tensors)
        archive = NumpyZip(target.create())
        archive.add(_METADATA, held.native[METADATA])
        archive.add(_CONFIG, held.native[CONFIG])
        weights = draw(keras_plan(content, places))
        archive.assemble(_WEIGHTS, weights.size, weights.stream_summed)
        for name, data in assets(content.native).items():
            archive.add(name, data)
        entry = entry_of(content, self._paths, held)
        if entry is not None:
            archive.add(ENTRY, entry)
        archive.finish()
        archive.seal()


def _held(native: Mapping[str, bytes]) -> Held:
    config, metadata = archive_config(native), archive_metadata(native)
    beside = {ASSET + name: data for name, data in assets(native).items()}
    told = {**object_of(metadata), "model_config": object_of(config)}
    return Held(told, {METADATA: metadata, CONFIG: config, **beside})
