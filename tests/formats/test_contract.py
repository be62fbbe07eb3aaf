"""Every format that ckpttool ships, under the contract suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from zipfile import ZIP_STORED, ZipFile

from ckpttool import Checkpoint, open_checkpoint
from ckpttool.core.tensor import Extent
from ckpttool.testing import Description, Truth, digest, read_truth
from tests.support.contracts import Contract

FILES = Path(__file__).parents[2] / "fixtures" / "files"
LOCAL_HEADER = 30


def directories(path: Path) -> tuple[Path, ...]:
    return tuple(sorted(entry for entry in path.iterdir() if entry.is_dir()))


def stored_payloads(path: str) -> Iterator[Extent]:
    """Yield the payload of every stored record that has a checksum, as Python's zipfile sees it."""
    with ZipFile(path) as archive, open(path, "rb") as file:
        for record in archive.infolist():
            file.seek(record.header_offset + 26)
            lengths = file.read(4)
            start = record.header_offset + LOCAL_HEADER
            start += int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            if record.compress_type == ZIP_STORED and record.CRC:
                yield Extent(path, start, record.compress_size)


class ZipContract(Contract):
    """No bit of a stored payload changes unnoticed, whatever the reader makes of the archive."""

    @staticmethod
    def covered(checkpoint: Checkpoint) -> Iterator[Extent]:
        return (extent for entry in checkpoint.files for extent in stored_payloads(entry.path))


class TestPytorchZip(ZipContract):
    format = "pytorch"
    fixtures = tuple(sorted([*FILES.glob("pytorch/*.pth"), *FILES.glob("pytorch/lightning/*.ckpt")]))
    invalid = MappingProxyType({"nan.pth": "nan", "skipdata.pth": "values-not-written"})
    suspected = frozenset({"module.pth", "nested.pth"})


class TestPytorchLegacy(Contract):
    format = "pytorch"
    fixtures = tuple(sorted(FILES.glob("pytorch-legacy/*.pth")))
    suspected = frozenset({"module_legacy.pth"})


class TestPytorchSharded(Contract):
    format = "pytorch"
    fixtures = (FILES / "pytorch" / "pytorch-sharded",)


class TestPytorchTrainer(Contract):
    format = "pytorch"
    fixtures = directories(FILES / "pytorch" / "trainer-bin")


class TestTorchScript(ZipContract):
    format = "torchscript"
    fixtures = tuple(sorted(FILES.glob("torchscript/*.pt")))

    @staticmethod
    def expected(truth: Truth) -> Description:
        """Count the tensors that belong to the code, too."""
        constants = [{**told, "path": ["constants", at]} for at, told in enumerate(truth["constants"])]
        return Contract.expected({"tensors": [*truth["tensors"], *constants]})

    def test_constants_are_the_frameworks(self, path: Path) -> None:
        expected = [told["sha256"] for told in read_truth(path)["constants"]]
        with open_checkpoint(self.place(path)) as checkpoint:
            found = [digest(tensor) for tensor in checkpoint.tensors if tensor.path[0] == "constants"]
        assert found == expected


class TestStableBaselines(Contract):
    format = "stable-baselines3"
    fixtures = tuple(sorted(FILES.glob("stable-baselines3/*.zip")))
    suspected = frozenset({"ppo.zip", "sac.zip"})  # spaces of gymnasium


class TestPickle(Contract):
    format = "pickle"
    fixtures = tuple(sorted(FILES.glob("pickle/*.pkl")))


class TestSafetensors(Contract):
    format = "safetensors"
    fixtures = tuple(sorted(FILES.glob("safetensors/*.safetensors")))

    @staticmethod
    def expected(truth: Truth) -> Description:
        """Count single 4-bit values, as the file does; PyTorch counts pairs of them."""
        told = Contract.expected(truth)
        return {path: _unpaired(*description) for path, description in told.items()}


def _unpaired(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    name = dtype.removesuffix("_x2")
    return (dtype, shape) if name == dtype else (name, (*shape[:-1], shape[-1] * 2))


class TestSafetensorsSharded(Contract):
    format = "safetensors"
    fixtures = (FILES / "safetensors" / "sharded",)


class TestSafetensorsTrainer(Contract):
    format = "safetensors"
    fixtures = directories(FILES / "safetensors" / "trainer")
