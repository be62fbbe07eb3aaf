"""The files beside a model in its ``.keras``, which loading it unpacks: a vocabulary."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping

from ckpttool.formats.keras.native import ASSET
from ckpttool.wire.zip_writer import MAX_NAME

_DIRECTORY = "assets"


def assets(native: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files by the names of their records."""
    return {key.removeprefix(ASSET): data for key, data in native.items() if key.startswith(ASSET)}


def asset_refusals(native: Mapping[str, bytes]) -> Iterator[str]:
    """Yield why files can't lie beside a model, a sentence each: what unpacks them trusts their names."""
    taken: dict[str, str] = {}
    for name in assets(native):
        if why := _name_refusal(name):
            yield f"the file {name[:100]!r} of the model: {why}"
        elif (other := taken.setdefault(_folded(name), name)) != name:
            yield f"the file {name[:100]!r} of the model: some file systems take its name for {other[:100]!r}"
    for place, name in taken.items():
        parts = place.split("/")
        inner = next(
            (taken[one] for at in range(1, len(parts)) if (one := "/".join(parts[:at])) in taken), None
        )
        if inner is not None:
            yield f"the file {name[:100]!r} of the model: {inner[:100]!r} is a file and no directory"


def _name_refusal(name: str) -> str | None:
    parts = name.split("/")
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        return "its name is no valid text"
    if any(letter in name for letter in "\\\0") or any(part in ("", ".", "..") for part in parts):
        return "its name leads out of where it is unpacked, or is none"
    if parts[0] != _DIRECTORY or len(parts) < 2:
        return f"Keras has such files in {_DIRECTORY}/"
    return f"its name has {nbytes:,} bytes, and at most {MAX_NAME:,} fit" if nbytes > MAX_NAME else None


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
