"""A lack of memory while one checkpoint is read is a finding of that checkpoint; the others are looked at."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
from pathlib import Path

import pytest

from ckpttool import OutOfMemory, open_checkpoint
from ckpttool.core.errors import memory_checked
from ckpttool.formats.interface import Probe
from ckpttool.formats.torch.zip import PytorchZip
from tests.support.commands import python

SAID = "not enough memory to read it"


@pytest.fixture
def two(tmp_path: Path, files: Path) -> Path:
    for name in ("epoch_1.pth", "epoch_2.pth"):
        shutil.copy(files / "pytorch" / "guide.pth", tmp_path / name)
    return tmp_path


@pytest.fixture
def starved(two: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with two checkpoints, of which one can't be opened for want of memory."""
    real = PytorchZip.open

    def fail(self: PytorchZip, probe: Probe) -> object:
        if probe.name == "epoch_1.pth":
            raise MemoryError
        return real(self, probe)

    monkeypatch.setattr(PytorchZip, "open", fail)
    return two


def test_a_file_by_itself_is_an_error(starved: Path, run) -> None:
    with pytest.raises(OutOfMemory, match=SAID):
        open_checkpoint(starved / "epoch_1.pth")
    for command in ("inspect", "verify", "diff"):
        paths = [starved / "epoch_1.pth", starved / "epoch_2.pth"][: 1 + (command == "diff")]
        status, _, err = run(command, *paths)
        assert (status, err) == (2, f"ckpttool: error: {starved / 'epoch_1.pth'}: {SAID}\n"), command


def test_verify_and_list_go_on_with_the_other_files(starved: Path, run) -> None:
    status, out, err = run("verify", "--json", starved)
    bad, good = json.loads(out)["checkpoints"]
    assert status == 1 and "internal error" not in err
    assert [finding["code"] for finding in bad["findings"]] == ["out-of-memory"]
    assert (bad["safety"], bad["verdict"], good["verdict"]) == ("unknown", "invalid", "valid")
    status, out, err = run("list", "--json", starved)
    states = {Path(one["path"]).name: one["state"] for one in json.loads(out)["checkpoints"]}
    assert status == 1 and states["epoch_1.pth"] == "unreadable" != states["epoch_2.pth"]


def test_nothing_is_imported_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 may turn in circles where memory ends in an import."""

    def full(name: str, *_: object) -> None:
        raise MemoryError(name)

    with pytest.raises(OutOfMemory, match=SAID), monkeypatch.context() as patch, memory_checked("m.pth"):
        patch.setattr(builtins, "__import__", full)
        raise MemoryError


LIMITED = """
import resource, sys
from ckpttool.cli import run
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
sys.exit(run(sys.argv[2:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space can be limited on Linux only")
def test_a_real_limit_of_memory(two: Path) -> None:
    (two / "epoch_0.pkl").write_bytes(b"\x80\x02](" + b"G?\xf8\0\0\0\0\0\0" * 5_000_000 + b"e.")
    done = python("-c", LIMITED, 280 << 20, "verify", "--json", two)
    codes = {
        Path(one["path"]).name: [finding["code"] for finding in one["findings"]]
        for one in json.loads(done.stdout)["checkpoints"]
    }
    assert done.returncode == 1 and "internal error" not in done.stderr
    assert codes == {"epoch_0.pkl": ["out-of-memory"], "epoch_1.pth": [], "epoch_2.pth": []}
