"""What native parts could run that a checkpoint carries, once a model is written from them and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpttool.errors import CheckpointError
from ckpttool.report import Finding, warning

_MODELS = ("keras.config", "keras.training_config")
_ASSET, _ARRAYS = "keras.asset:", ".npz"


def safety_of_native(native: Mapping[str, bytes], where: str) -> tuple[Finding, ...]:
    """Return what the readers of the formats that native parts come from would say against them.

    Args:
        native: As ``Checkpoint.native``.
        where: Where they are carried.
    """
    return tuple(
        replace(finding, message=f"of a model that is written from it: {finding.message}")
        for key, data in native.items()
        for finding in _judged(key, data, f"{where}.{key}")
    )


def _judged(key: str, data: bytes, where: str) -> Iterator[Finding]:
    try:
        if key in _MODELS:
            yield from _of_config(data, where)
        elif key.startswith(_ASSET):
            yield from _of_asset(key, data, where)
    except CheckpointError:
        yield warning("not-scanned", "it could not be read, so what loading it would run is not known", where)


def _of_config(data: bytes, where: str) -> tuple[Finding, ...]:
    from ckpttool.formats.keras.config import judge, read_config

    return judge(read_config("", data), where)


def _of_asset(key: str, data: bytes, where: str) -> tuple[Finding, ...]:
    """Return what is to be said of a file beside a model: it may hold arrays, or be a pickle."""
    if key.endswith(_ARRAYS):
        message = "arrays, in which there may be pickles that were not looked at"
        return (warning("not-scanned", message, where),)
    from ckpttool.formats.pickles import is_pickle
    from ckpttool.wire.source import Buffer

    content = Buffer("", data)
    if is_pickle(content, 0, content.size):
        from ckpttool.wire.judgement import read_pickles

        return tuple(read_pickles(content, 0, content.size, where).safety)
    from ckpttool.formats.keras.native import is_own_asset

    if is_own_asset(key.removeprefix(_ASSET)):
        return ()
    message = "a record that Keras does not write; what would use it is not known"
    return (warning("not-scanned", message, where),)
