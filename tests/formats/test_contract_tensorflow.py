"""TensorFlow checkpoints under the contract suite."""

from __future__ import annotations

from pathlib import Path

from ckpttool.core.tensor import Tensor
from tests.support.contracts import Contract

FILES = Path(__file__).parents[2] / "fixtures" / "files" / "tensorflow"


class TestTensorflow(Contract):
    format = "tensorflow"
    fixtures = tuple(sorted(path for path in FILES.iterdir() if path.is_dir() and path.name != "manager"))

    @staticmethod
    def expected_nbytes(tensor: Tensor) -> int:
        """Strings have no fixed size; all else has."""
        if tensor.dtype.kind == "string":
            return tensor.extent.nbytes if tensor.extent else 0
        return Contract.expected_nbytes(tensor)
