"""The contract suite: tests that a format passes by one subclass of ``FormatContract``.

::

    class TestMyFormat(FormatContract):
        format = "my-format"
        fixtures = sorted(Path("fixtures").glob("*.mine"))

A fixture is a file or a directory, with ``<fixture>.expected.json`` next to it: the values that the framework
which wrote it reports. ``write_truth`` writes it from arrays. Its keys are ``format``, ``variant``,
``tensors`` (``path``, ``dtype``, ``shape``, ``sha256`` of the elements in C order, little-endian), and if
known ``values``, ``training``, ``parameters``, ``granularity`` and ``ties``.

This package needs pytest; no other package of ckpttool imports it.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "ckpttool.testing.contract", "ckpttool.testing.damage", "ckpttool.testing.reads"
)

from ckpttool.testing.contract import FormatContract  # noqa: E402 - its assertions are rewritten
from ckpttool.testing.damage import (  # noqa: E402
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
from ckpttool.testing.reads import no_file_left_open, open_files, recorded_reads  # noqa: E402
from ckpttool.testing.truth import (  # noqa: E402
    Description,
    Truth,
    described,
    digest,
    expected_digests,
    read_truth,
    write_truth,
)

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
    "write_truth",
]
