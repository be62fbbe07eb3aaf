"""What lies beside a checkpoint's own files is judged as well, whatever the directory is recognised as."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import CheckpointError, Safety, Severity, Verification, open_checkpoint, verify
from ckpttool.formats import readings
from tests.support.faults import close_link
from tests.support.frameworks import python_with_frameworks
from tests.support.opening import checkpoints_in

FILES = Path(__file__).parents[2] / "fixtures" / "files"
DIRECTORIES = (
    "deepspeed/zero-2",
    "fluid/guide/checkpoint_0",
    "fluid/inference-combined",
    "keras/sharded",
    "pytorch/pytorch-sharded",
    "pytorch/trainer-bin/checkpoint-1",
    "safetensors/sharded",
    "safetensors/trainer/checkpoint-2",
    "savedmodel/keras2",
    "savedmodel/plain",
    "tensorflow/saver",
    "torch-dcp/in-safetensors",
    "torch-dcp/two-ranks",
)
"""One of each format that has directories."""


class Creates:
    """An object that a pickle holds as a call which creates a file, and does nothing else."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._marker), "w")


def pickled(marker: Path, protocol: int = 2) -> bytes:
    return pickle.dumps(Creates(marker), protocol=protocol)


def zipped(marker: Path) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(marker))
        archive.writestr("archive/version", b"3\n")
    return made.getvalue()


def array(marker: Path) -> bytes:
    holder, made = np.empty(1, dtype=object), io.BytesIO()
    holder[0] = Creates(marker)
    np.save(made, holder, allow_pickle=True)
    return made.getvalue()


_UNPICKLE, _TORCH = "pickle.load(open(path, 'rb'))", "torch.load(path, weights_only=False)"
BYSTANDERS: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "extra.pkl": (pickled, _UNPICKLE),
    "rng_state.pth": (zipped, _TORCH),
    "optimizer.pt": (lambda marker: pickled(marker, 0), _UNPICKLE),
    "assets.extra/custom.pt": (zipped, _TORCH),
    "a/b/c/no_suffix": (pickled, _UNPICKLE),
    "statistics.npy": (array, "np.load(path, allow_pickle=True)"),
    "scaler.joblib": (lambda marker: pickled(marker, 4), _UNPICKLE),
    ".hidden/state.bin": (zipped, _TORCH),
}
_LOADER = """
import json, pickle, sys
import numpy as np, torch
for path, load in json.loads(sys.argv[1]):
    try:
        exec(load)
    except Exception as failure:
        print(path, type(failure), failure)
"""


def planted(directory: Path, name: str, marker: Path) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(BYSTANDERS[name][0](marker))
    return path


def verdicts(directory: Path) -> list[Verification]:
    """Return the verdicts on all that ``verify DIR`` looks at."""
    return [verify(unit) for unit in checkpoints_in(directory)]


@pytest.mark.framework
def test_the_bystanders_run_when_they_are_loaded(tmp_path: Path) -> None:
    loads = [
        (str(planted(tmp_path / "d", name, tmp_path / f"{at}.ran")), load)
        for at, (name, (_, load)) in enumerate(BYSTANDERS.items())
    ]
    told = python_with_frameworks("-c", _LOADER, json.dumps(loads))
    assert len(list(tmp_path.glob("*.ran"))) == len(BYSTANDERS), told


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_no_format_hides_what_lies_beside(tmp_path: Path, directory: str) -> None:
    copy, marker = tmp_path / Path(directory).name, tmp_path / "ran"
    shutil.copytree(FILES / directory, copy)
    for name in BYSTANDERS:
        planted(copy, name, marker)
    places = [
        f"{one.path}/{finding.where}"
        for one in verdicts(copy)
        for finding in one.findings
        if finding.severity is Severity.ERROR and finding.check == "safety"
    ]
    missed = [name for name in BYSTANDERS if not any(name in place for place in places)]
    assert not missed, places
    assert not marker.exists()


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_what_frameworks_write_stays_as_it_is(directory: str) -> None:
    for verification in verdicts(FILES / directory):
        codes = {one.code for one in verification.findings if one.check == "safety"}
        assert "not-scanned" not in codes, verification.findings


DECOYS = {
    "saved_model.pb": b"\x08\x01",
    ".metadata": b"\x80\x02}.",
    "__model__": b"\n\0",
    "checkpoint": b'model_checkpoint_path: "model"\n',
    "trainer_state.json": b"{}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "mp_rank_00_model_states.pt": b"",
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_a_decoy_hides_nothing(tmp_path: Path, decoy: str) -> None:
    directory = tmp_path / "checkpoint-1"
    directory.mkdir()
    (directory / decoy).write_bytes(DECOYS[decoy])
    planted(directory, "extra.pkl", tmp_path / "ran")
    planted(directory, "rng_state.pth", tmp_path / "ran")
    assert Safety.UNSAFE in {one.safety for one in verdicts(directory)}


def test_an_unknown_file_with_a_checkpoints_name_is_said(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(FILES / "savedmodel" / "plain", copy)
    (copy / "weights.pth").write_bytes(b"nobody knows this")
    (verification,) = verdicts(copy)
    assert verification.safety is Safety.UNKNOWN
    assert [(one.code, one.where) for one in verification.findings if one.check == "safety"] == [
        ("not-scanned", "weights.pth")
    ]


def test_files_that_no_framework_loads_are_of_no_matter(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(FILES / "savedmodel" / "plain", copy)
    texts = ("README.md", "vocab.txt", "(notes)", "config.json", "merges.txt", "model.py", "tokenizer.model")
    for name in texts:
        (copy / name).write_text(f"{name[0]}import this; Very {{honest}} text.\n" * 40)
    (copy / "tokenizer.bin").write_bytes(bytes(range(256)))
    (verification,) = verdicts(copy)
    assert verification.safety is Safety.SAFE, verification.findings


def test_a_nested_model_is_judged(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(FILES / "savedmodel" / "plain", copy)
    shutil.copytree(FILES / "savedmodel" / "unsafe", copy / "assets.extra" / "other")
    (verification,) = verdicts(copy)
    assert verification.safety is Safety.UNSAFE
    unsafe = [one for one in verification.findings if one.code == "unsafe-op"]
    assert unsafe and all("assets.extra/other/saved_model.pb" in str(one.where) for one in unsafe)


def test_a_link_that_may_not_be_followed_hides_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(FILES / "savedmodel" / "plain", copy)
    planted(copy, "extra.pkl", tmp_path / "ran")
    close_link(copy / "data", monkeypatch)
    with open_checkpoint(copy) as opened:
        places = {(one.code, one.where) for one in opened.safety}
    assert places == {("not-scanned", "data"), ("unsafe-import", "extra.pkl")}


def test_links_are_not_followed_out_of_the_checkpoint(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(FILES / "savedmodel" / "plain", copy)
    outside = planted(tmp_path / "outside", "extra.pkl", tmp_path / "ran")
    (copy / "extra.pkl").symlink_to(outside)
    (copy / "assets").mkdir(exist_ok=True)
    (copy / "assets" / "more").symlink_to(outside.parent)
    os.mkfifo(copy / "pipe.pkl")
    (verification,) = verdicts(copy)
    assert verification.safety is Safety.UNKNOWN
    assert {one.where for one in verification.findings if one.code == "not-scanned"} == {
        "extra.pkl",
        os.path.join("assets", "more"),
    }


def test_what_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "model"
    shutil.copytree(FILES / "savedmodel" / "plain", copy)
    planted(copy, "extra.pkl", tmp_path / "ran")
    (copy / "notes").write_text("text")
    (copy / "closed").mkdir()

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str) and os.path.basename(path) in ("extra.pkl", "notes", "closed"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return real(path, *arguments, **options)

        return call

    for name in ("open", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    (verification,) = verdicts(copy)
    assert verification.safety is Safety.UNKNOWN
    denied = [one.where for one in verification.findings if one.message == "permission denied"]
    assert sorted(map(str, denied)) == ["closed", "extra.pkl", "notes"]


def test_a_part_that_was_judged_is_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def count(entry: os.DirEntry[str]) -> Any:
        read.append(entry.name)
        return iter(())

    monkeypatch.setattr(readings, "_safety_of", count)
    for directory in DIRECTORIES:
        list(verdicts(FILES / directory))
    assert read == []


def test_more_files_than_are_looked_at_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "model"
    shutil.copytree(FILES / "savedmodel" / "plain", copy)
    monkeypatch.setattr(readings, "MAX_FILES", 2)
    (verification,) = verdicts(copy)
    assert verification.safety is Safety.UNKNOWN
    assert [one.code for one in verification.findings if one.check == "safety"] == ["not-scanned"]


def test_a_damaged_directory_does_not_hide_them(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-1"
    shutil.copytree(FILES / "safetensors" / "trainer" / "checkpoint-2", directory)
    planted(directory, "extra.pkl", tmp_path / "ran")
    (directory / "trainer_state.json").write_text("[]")
    with pytest.raises(CheckpointError) as failure:
        open_checkpoint(directory)
    assert any("extra.pkl" in str(one.where) for one in getattr(failure.value, "safety", ()))
    (verification,) = verdicts(directory)
    assert (verification.safety, verification.was_opened) == (Safety.UNSAFE, False)
