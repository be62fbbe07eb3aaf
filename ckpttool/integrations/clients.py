"""Clients of trackers: their packages, which may be missing, and their errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ckpttool.core.errors import CheckpointError, MissingPackage, Unsupported, UsageError
from ckpttool.core.plugins import install_command
from ckpttool.core.urls import without_signatures


def client_module(name: str, tracker: str) -> Any:
    """Import a module of a tracker's own package, such as ``mlflow.tracking``.

    Args:
        name: Full name of the module.
        tracker: Name of the tracker, for the error.

    Raises:
        MissingPackage: The package is not installed.
    """
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError as error:
        found = f"it needs {package}, which is not installed"
        raise MissingPackage(tracker, found, expected=install_command(package)) from error


@contextmanager
def client_errors_as_unsupported(tracker: str) -> Iterator[None]:
    """Turn the errors of a client into ``Unsupported``, and ignore its warnings, which are for developers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (CheckpointError, UsageError):
        raise
    except Exception as error:  # clients raise errors of many packages
        # Only the first line, as some have a server's page. Credentials are removed before it is cut: the
        # half of a URL wouldn't be recognised.
        text = getattr(error, "strerror", None) or str(error)
        first = without_signatures((text.strip().splitlines() or [type(error).__name__])[0])
        raise Unsupported(tracker, f"request failed: {first:.200}") from error
