"""What a tracking system knows: runs with their parameters and metrics, and models under a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpttool.core.errors import MissingPackage
from ckpttool.core.extras import install_command
from ckpttool.runs.metrics.log import Log


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run of a tracker.

    Attributes:
        label: What it is called in messages: ``mlflow:digits/slow``.
        id: What the tracker calls it.
        name: What people call it.
        directory: The tracker's own directory of it; empty if there is none on this machine.
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


@dataclass(frozen=True, slots=True)
class TrackedModel:
    """A model that a tracker has under a name: prune never takes it.

    Attributes:
        reason: Why it stays: ``registered as net version 3 (champion)``.
        holder: The tracker's file that says so.
        place: Its file or directory; empty if only its content is known.
        run_id: The run that it came from; a moved store is known by it.
        file: The name, size and base64 MD5 of a file of it, where it is known by its content.
    """

    reason: str
    holder: str
    place: str = ""
    run_id: str = ""
    file: tuple[str, int, str] | None = None


def missing_client(tracker: str, what: str) -> MissingPackage:
    """Return the error that says that a tracker's own package is needed."""
    return MissingPackage(
        what, f"it needs {tracker}, which is not installed", expected=install_command(tracker)
    )
