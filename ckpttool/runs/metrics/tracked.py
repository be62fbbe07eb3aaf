"""What a tracker knows, runs and models under a name, and how its client is asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from ckpttool.core.errors import CheckpointError, MissingPackage, Unsupported, UsageError
from ckpttool.core.extras import install_command
from ckpttool.core.secrets import without_signatures
from ckpttool.runs.metrics.log import Log


class TrackedRun(NamedTuple):
    """A run of a tracker.

    Attributes:
        label: What it is called in messages: ``mlflow:digits/slow``.
        id: What the tracker calls it.
        name: What people call it.
        directory: The real path of the tracker's own directory of it; empty if there is none here.
        parameters: What it was started with.
        read: Reads its metrics into a log.
        project: What it is a part of.
    """

    label: str
    id: str
    name: str
    directory: str
    parameters: Mapping[str, object]
    read: Callable[[Log], None]
    project: str = ""


class TrackedModel(NamedTuple):
    """A model that a tracker has under a name: prune never takes it.

    Attributes:
        reason: Why it stays: ``registered as net version 3 (champion)``.
        holder: The tracker's file that says so.
        place: Its file or directory; empty if only its content is known.
        identity: What the tracker calls its run, or itself; it stands in its place, and in a moved one, too.
        file: The name, size and base64 MD5 of a file of it, where it is known by its content.
    """

    reason: str
    holder: str
    place: str = ""
    identity: str = ""
    file: tuple[str, int, str] | None = None


def client_module(name: str, what: str) -> Any:
    """Return a module of a tracker's own package, as ``mlflow.tracking``.

    Raises:
        MissingPackage: It is not installed.
    """
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError as error:
        found = f"it needs {package}, which is not installed"
        raise MissingPackage(what, found, expected=install_command(package)) from error


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Say of a tracker whatever goes wrong in its client, which raises errors of many packages.

    Its warnings are for who wrote it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (CheckpointError, UsageError):
        raise
    except Exception as error:  # clients raise errors of many packages
        text = getattr(error, "strerror", None) or str(error)
        first = without_signatures((text.strip().splitlines() or [type(error).__name__])[0])  # before the cut
        raise Unsupported(what, f"it can't be asked: {first:.200}") from error
