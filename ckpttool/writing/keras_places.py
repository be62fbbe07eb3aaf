"""Where each tensor goes in a Keras file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.formats.content.carried import ENTRY
from ckpttool.formats.keras.called import called
from ckpttool.formats.keras.layers import Layer, layer_of
from ckpttool.formats.keras.layout import named
from ckpttool.formats.keras.native import CONFIG, METADATA, object_of
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.hdf5_writer import MAX_ATTRIBUTE, MAX_ATTRIBUTES, attribute_fault
from ckpttool.writing.hdf5 import name_refusals

Parts = tuple[str, ...]
Attributes = dict[str, Any]

OPTIMIZER, OPTIMIZER_LIST = "optimizer", "optimizer_weights"
HINT = "(--model FILE gives the names of another checkpoint, --map renames)"
KERAS_2 = "Keras 2 wrote it, and its variables have another order (Keras 3 loads and saves it, if it can)"
KERAS_2_OPTIMIZER = (
    "Keras 2 wrote it, and its optimizer's state has another order (--only weights leaves it out)"
)


@dataclass(slots=True)
class Places:
    """Where tensors go.

    Attributes:
        groups: The attributes of each group.
        paths: The datasets, by the names of their tensors.
        problems: Why others have no place: a sentence each.
        config: That of the model, where the file has it beside the variables.
    """

    groups: dict[Parts, Attributes] = field(default_factory=dict)
    paths: dict[str, Parts] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    config: object = None

    def named(self, tensors: Iterable[Tensor]) -> dict[str, Path]:
        """Return the paths under which a reader will know tensors, by the names that they have."""
        stored = {
            self.paths[one.name]: replace(one, path=self.paths[one.name], shares_with=None)
            for one in tensors
            if one.name in self.paths
        }
        found, _ = named(self.groups, stored, called(self.config, (*self.groups, *stored)))
        keys = (tuple(one.key.split("/")[1:]) if one.key else one.path for one in found)
        given = {key: one.path for key, one in zip(keys, found, strict=True)}
        return {name: given[path] for name, path in self.paths.items()}

    def require_own_paths(self) -> None:
        """Note which tensors would lie where another lies."""
        taken: dict[Parts, str] = {}
        for name, path in self.paths.items():
            if path in taken:
                self.problems.append(f"{name}: it would lie where {taken[path]!r} lies, in /{'/'.join(path)}")
            taken[path] = name

    def require_groups(self) -> None:
        """Note the first group that HDF5 can't hold; the source may tell of any."""
        datasets = {*self.paths.values(), (ENTRY,)}
        for path, attributes in self.groups.items():
            why = next(_group_faults(path, attributes, datasets), None)
            if why is not None:
                self.problems.append(f"the group /{'/'.join(path)}: {why} (--only weights leaves it out)")
                return


def _group_faults(path: Parts, attributes: Attributes, datasets: set[Parts]) -> Iterator[str]:
    if path:
        yield from name_refusals(path)
    if any(path[:at] in datasets for at in range(1, len(path) + 1)):
        yield "a dataset lies there"
    if len(attributes) > MAX_ATTRIBUTES:
        yield f"{len(attributes):,} attributes, and at most {MAX_ATTRIBUTES:,} are written"
    for name, value in attributes.items():
        if why := attribute_fault(name, value):
            yield f"its attribute {name[:100]!r}: {why}"


def in_chunks(key: str, names: list[str]) -> Attributes:
    """Return the attributes that hold a list of names: several where one would be too long."""
    width = max((len(name.encode("utf-8", "surrogateescape")) for name in names), default=1)
    count = max(1, MAX_ATTRIBUTE // max(1, width))
    if len(names) <= count:
        return {key: names}
    starts = range(0, len(names), count)
    return {f"{key}{at}": names[start : start + count] for at, start in enumerate(starts)}


def model_of(native: Mapping[str, bytes]) -> Layer | None:
    """Return the model that a config describes, None where there is none."""
    return layer_of(object_of(native.get(CONFIG, b"")))


def is_keras2(native: Mapping[str, bytes]) -> bool:
    """Tell whether another generation of Keras wrote what a content comes from."""
    version = object_of(native.get(METADATA, b"")).get("keras_version")
    return isinstance(version, str) and version.startswith(("1.", "2."))
