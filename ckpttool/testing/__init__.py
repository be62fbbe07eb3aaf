"""The contract suite: what every format promises, as tests that a format earns by one subclass.

::

    import pytest

    pytest.register_assert_rewrite("ckpttool.testing")  # in conftest.py, for readable failures

    class TestMyFormat(FormatContract):
        format = "my-format"
        fixtures = sorted(Path("fixtures").glob("*.mine"))

Beside each fixture, which is a file or a directory, lies ``<fixture>.expected.json``: what the framework
that wrote it says it holds. Its keys are ``format``, ``variant``, ``tensors`` (``path``, ``dtype``,
``shape``, ``sha256`` of the elements in C order, little-endian), and if known ``values``, ``training``,
``parameters``, ``granularity`` and ``ties``.

Importing this module needs pytest; nothing else in ckpttool imports it.
"""

from __future__ import annotations

from ckpttool.testing.contract import FormatContract
from ckpttool.testing.damage import (
    Outcome,
    copied,
    files_of,
    flipped,
    is_valid,
    nan_of,
    outcome_of,
    overwritten,
    places,
)
from ckpttool.testing.reads import no_file_left_open, open_files, recorded_reads
from ckpttool.testing.truth import Description, Truth, described, digest, expected_digests, read_truth

__all__ = [
    "Description",
    "FormatContract",
    "Outcome",
    "Truth",
    "copied",
    "described",
    "digest",
    "expected_digests",
    "files_of",
    "flipped",
    "is_valid",
    "nan_of",
    "no_file_left_open",
    "open_files",
    "outcome_of",
    "overwritten",
    "places",
    "read_truth",
    "recorded_reads",
]
