"""What PyTorch loads with ``weights_only=True`` is safe, and what is safe besides is of a few known kinds."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support.commands import run_redirected

SUFFIXES = {".pth", ".pt", ".bin", ".ckpt", ".pkl"}
REFUSED_BY_PYTORCH = {
    "deepspeed/*_optim_states.pt": "a record: DeepSpeed's loss scaler",
    "pickle/*.pkl": "arrays of NumPy, containers and dates of the standard library; other protocols than 2",
    "pytorch/protocol*.pth": "the same",
    "pytorch/values.pth": "the same",
    "*/rng_state.pth": "arrays of NumPy: its random state",
    "*/training_args.bin": "a record: the trainer's arguments",
    "ranks/numbered-2/metadata.pkl": "protocol 4",
    "ranks/verl-*/extra_state_*.pt": "arrays of NumPy: its random state",
}
"""Fixtures that are safe and that PyTorch refuses all the same, with the reason."""
OF_OTHER_FORMATS = {
    "pytorch-legacy/tar.pth": "PyTorch's first format",
    "torchscript/*.pt": "TorchScript, which has a loader of its own",
}
"""Fixtures that PyTorch doesn't read with ``weights_only=True`` at all, whatever they hold."""

REFUSAL = re.compile(
    r"^Weights only load failed\..*\sWeightsUnpickler error:\s+Unsupported (global|operand)", re.DOTALL
)
OF_OTHER_CLASSES = ("pytorch/nested.pth", "ranks/*")
"""Tensors of classes that PyTorch loads once their module is imported: code of the class runs."""


def load(path: Path) -> Mapping[str, str] | None:
    """Load a file with ``weights_only=True``; return the table that has the reason if PyTorch refuses it."""
    import torch

    try:
        torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        assert REFUSAL.search(str(error)), f"{path}: {error}"
        return REFUSED_BY_PYTORCH
    except RuntimeError as error:
        assert str(error).startswith("Cannot use ``weights_only=True`` with "), f"{path}: {error}"
        return OF_OTHER_FORMATS
    return None


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")
def test_pytorch_and_the_table_agree_on_the_fixtures(files: Path) -> None:
    unsafe, unexpected, used = [], [], set[str]()
    for path in sorted(files.rglob("*")):
        name = path.relative_to(files).as_posix()
        if path.suffix not in SUFFIXES or not path.is_file() or name.startswith("hostile/"):
            continue
        _, out, _ = run_redirected("verify", "--quick", "--json", path)
        said = [one["safety"] for one in json.loads(out)["checkpoints"]] if out else []
        if any(fnmatch(name, pattern) for pattern in OF_OTHER_CLASSES) and said != ["safe"]:
            continue
        table = load(path)
        if table is None:
            unsafe += [name] if said and said != ["safe"] else []
        elif said == ["safe"]:
            reasons = {pattern for pattern in table if fnmatch(name, pattern)}
            used |= reasons
            unexpected += [] if reasons else [name]
    assert (unsafe, unexpected) == ([], [])
    assert used == REFUSED_BY_PYTORCH.keys() | OF_OTHER_FORMATS.keys()
