"""TensorFlow checkpoints under the contract suite."""

from __future__ import annotations

from pathlib import Path

from ckpttool import open_checkpoint
from ckpttool.testing import FormatContract

FILES = Path(__file__).parents[2] / "fixtures" / "files" / "tensorflow"


class TestTensorflow(FormatContract):
    format = "tensorflow"
    fixtures = tuple(sorted(path for path in FILES.iterdir() if path.is_dir() and path.name != "manager"))

    def test_shape_times_dtype_is_bytes(self, path: Path) -> None:
        """Strings have no fixed size; all else has."""
        with open_checkpoint(self.place(path)) as checkpoint:
            for tensor in checkpoint.tensors:
                stored = tensor.extent.nbytes if tensor.extent else 0
                is_string = tensor.dtype.kind == "string"
                assert tensor.nbytes == (stored if is_string else tensor.size * tensor.dtype.itemsize)
                if tensor.values is not None:
                    assert len(tensor.tobytes()) == tensor.nbytes, tensor.name
