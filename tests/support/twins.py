"""The fixtures that lie packed: one network in every framework, and 258 tensors in every format."""

from __future__ import annotations

import tarfile
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures" / "files" / "twins"


def unpacked(name: str, directory: Path) -> Path:
    """Unpack ``others`` or ``many`` into a directory, and return it."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
        tar.extractall(directory)
    return directory
