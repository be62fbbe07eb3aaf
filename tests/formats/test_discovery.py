"""Finding the checkpoints in a tree, and telling what a path is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ckpttool import (
    AmbiguousFormat,
    CheckpointError,
    DamagedCheckpoint,
    NotACheckpoint,
    NotDownloaded,
    NotFound,
    open_checkpoint,
)
from ckpttool.formats import _READERS, _load, formats, set_formats
from ckpttool.formats.interface import Format, Probe, SetFormat
from ckpttool.testing import no_file_left_open
from tests.support.faults import close_link
from tests.support.opening import (
    checkpoint_at,
    checkpoints_in,
    format_class_of,
    offer_formats,
    only_checkpoint,
    paths_in,
)

Plant = Callable[..., None]


@pytest.fixture
def plant(files: Path, tmp_path: Path) -> Plant:
    """Return what puts a good checkpoint at places in the tree."""

    def plant(*places: str) -> None:
        for place in places:
            (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(files / "pytorch" / "guide.pth", tmp_path / place)

    return plant


def found(root: Path, **walk: object) -> list[str]:
    with no_file_left_open():
        return sorted(os.path.relpath(path, root) for path in paths_in(root, **walk))


# A path ---------------------------------------------------------------------------------------------


def test_file_stands_for_itself(files: Path) -> None:
    path = files / "pytorch" / "guide.pth"
    unit = only_checkpoint(path)
    assert (unit.path, unit.members) == (str(path), ("guide.pth",))
    assert unit.format is not None and unit.format.name == "pytorch"
    assert (list(unit.files()), unit.nbytes) == ([str(path)], path.stat().st_size)


def test_content_decides_and_the_suffix_is_a_hint(plant: Plant, tmp_path: Path) -> None:
    plant("model.txt", "model")
    (tmp_path / "fake.pth").write_text("text")
    (tmp_path / "fake.txt").write_text("text")
    assert found(tmp_path) == ["fake.pth", "model", "model.txt"]
    fake = checkpoint_at(tmp_path / "fake.pth")
    assert fake is not None and fake.format is None
    assert checkpoint_at(tmp_path / "fake.txt") is None


def test_directory_that_is_no_checkpoint_is_no_unit(tmp_path: Path) -> None:
    assert checkpoint_at(tmp_path) is None
    assert found(tmp_path) == []


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        checkpoints_in(tmp_path / "missing")


# A tree ---------------------------------------------------------------------------------------------


def test_descends_and_can_be_told_not_to(plant: Plant, tmp_path: Path) -> None:
    plant("a.pth", "runs/b.pth", "runs/deep/c.pth")
    assert found(tmp_path) == ["a.pth", "runs/b.pth", "runs/deep/c.pth"]
    assert found(tmp_path, recursive=False) == ["a.pth"]
    assert found(tmp_path, max_depth=0) == ["a.pth"]
    assert found(tmp_path, max_depth=1) == ["a.pth", "runs/b.pth"]


def test_excluded_by_name_or_path(plant: Plant, tmp_path: Path) -> None:
    plant("a.pth", "runs/b.pth", "runs/a.pth", "old/c.pth")
    assert found(tmp_path, exclude=("a.*",)) == ["old/c.pth", "runs/b.pth"]
    assert found(tmp_path, exclude=("runs/*", "old")) == ["a.pth"]


def test_what_ckpttool_left_is_passed_over(plant: Plant, tmp_path: Path) -> None:
    plant("a.pth", ".ckpttool-trash/b.pth", ".ckpttool-x.pth", ".git/c.pth", ".hidden/d.pth")
    assert found(tmp_path) == [".hidden/d.pth", "a.pth"]


def test_links_are_pointers_or_lead_elsewhere(plant: Plant, tmp_path: Path) -> None:
    plant("tree/a.pth", "outside/b.pth")
    tree = tmp_path / "tree"
    (tree / "latest.pth").symlink_to("a.pth")
    (tree / "linked.pth").symlink_to(tmp_path / "outside" / "b.pth")
    (tree / "directory").symlink_to(tmp_path / "outside", target_is_directory=True)
    (tree / "loop").symlink_to(tree, target_is_directory=True)
    (tree / "broken.pth").symlink_to("nowhere")
    assert found(tree) == ["a.pth", "linked.pth"]


def test_sharded_directory_is_one_unit(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "safetensors" / "sharded", tmp_path / "model")
    unit = only_checkpoint(tmp_path)
    whole = sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    assert 0 < unit.nbytes <= whole
    with open_checkpoint(unit.path) as checkpoint:
        assert checkpoint.variant == "sharded"


def test_trainer_directories_are_one_unit_each(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "safetensors" / "trainer", tmp_path / "run")
    assert found(tmp_path) == ["run/checkpoint-2", "run/checkpoint-4"]


def test_what_cannot_be_looked_at_is_told(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("a.pth", "shut/b.pth")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    errors: list[CheckpointError] = []
    paths = paths_in(tmp_path, on_error=errors.append)
    monkeypatch.undo()
    assert paths == [tmp_path / "a.pth"]
    assert [str(error) for error in errors] == [f"{tmp_path / 'shut'}: permission denied"]


def test_links_that_are_no_checkpoints_hide_none(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("run/a.pth")
    (tmp_path / "run" / "inner.pth").symlink_to("a.pth/inner")
    (tmp_path / "run" / "loop.pth").symlink_to("loop.pth")
    close_link(tmp_path / "run" / "data", monkeypatch)
    assert paths_in(tmp_path) == [tmp_path / "run" / "a.pth"]
    assert paths_in(tmp_path / "run") == [tmp_path / "run" / "a.pth"]


def test_a_link_that_may_not_be_followed_hides_no_other_directory(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("a.pth", "run/b.pth")
    close_link(tmp_path / "run" / "a.pth", monkeypatch)
    errors: list[CheckpointError] = []
    assert paths_in(tmp_path, on_error=errors.append) == [tmp_path / "a.pth"]
    assert [str(error) for error in errors] == [f"{tmp_path / 'run' / 'a.pth'}: permission denied"]


def test_order_does_not_depend_on_the_file_system(
    plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(*(f"{name}.pth" for name in "cabed"))
    assert [path.stem for path in paths_in(tmp_path)] == list("abcde")


def test_size_of_what_vanished_is_nothing(plant: Plant, tmp_path: Path) -> None:
    plant("gone.pth")
    unit = only_checkpoint(tmp_path)
    (tmp_path / "gone.pth").unlink()
    assert unit.nbytes == 0


# Formats --------------------------------------------------------------------------------------------


class Anything(Format):
    """Recognises every file that holds the word, and counts as a third party."""

    name = "anything"

    def matches(self, probe: Probe) -> bool:
        return b"anything" in probe.head

    def open(self, probe: Probe):
        raise NotImplementedError


class Other(Anything):
    name = "other"


class Special(Anything):
    name = "special"
    specialises = (Anything, Other)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file that none of the package's own formats recognises."""
    path = tmp_path / "file"
    path.write_bytes(b"this could be anything")
    return path


def test_third_parties_are_asked_last(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_formats(monkeypatch, Anything())
    assert format_class_of(path) == "Anything"


def test_two_that_claim_one_file_are_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_formats(monkeypatch, Anything(), Other())
    with pytest.raises(AmbiguousFormat, match="Anything and Other both recognise it"):
        format_class_of(path)


def test_declared_specialisation_wins(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_formats(monkeypatch, Anything(), Special(), Other())
    assert format_class_of(path) == "Special"


@pytest.mark.parametrize(
    ("name", "content", "kind", "said"),
    [
        ("a.txt", b"hello", NotACheckpoint, "not a checkpoint: it looks like text that starts with 'hello'"),
        ("a.txt", b"", NotACheckpoint, "not a checkpoint: the file is empty"),
        ("a.pth", b"", DamagedCheckpoint, "the file is empty; expected a PyTorch checkpoint"),
        ("A.PTH", b"\xff", DamagedCheckpoint, "starts with the bytes ff; expected a PyTorch"),
        ("a.safetensors", b"", DamagedCheckpoint, "the file is empty; expected a safetensors checkpoint"),
        (
            "pytorch_model.bin",
            b"\x1f\x8b\x08",
            DamagedCheckpoint,
            "it is compressed with gzip; expected a PyTorch checkpoint (decompress it first)",
        ),
        ("a", b"\x28\xb5\x2f\xfd", NotACheckpoint, "it is compressed with zstd (decompress it first)"),
        (
            "a.pt",
            b" <!DOCTYPE html><html>",
            DamagedCheckpoint,
            "an HTML page; expected a PyTorch checkpoint (",
        ),
        ("a.hdf5", b"", DamagedCheckpoint, "the file is empty; expected an HDF5 checkpoint"),
        ("a.pt", b"version https://git-lfs.github.com/spec/v1\n", NotDownloaded, "run 'git lfs pull'"),
    ],
)
def test_why_nothing_is_recognised(
    tmp_path: Path, name: str, content: bytes, kind: type[CheckpointError], said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with no_file_left_open(), pytest.raises(kind) as caught:
        open_checkpoint(tmp_path / name)
    assert said in str(caught.value)


def test_every_format_has_a_name_and_lower_case_suffixes() -> None:
    for format in formats():
        assert format.name
        assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in format.suffixes)


def test_every_format_looks_at_anything_calmly(files: Path, tmp_path: Path) -> None:
    """Being asked is no promise: no format may fail on what another one wrote."""
    strange = [tmp_path, *(path for path in files.rglob("*") if "hostile" in path.parts)]
    for path in strange:
        with Probe(path) as probe:
            for format in formats():
                assert format.matches(probe) in (True, False)


# The table of formats ---------------------------------------------------------------------------------


def test_every_format_of_sets_is_asked_for_sets() -> None:
    sets = {type(format) for format in formats() if isinstance(format, SetFormat)}
    assert {type(format) for format in set_formats()} == sets


def test_the_table_keeps_no_format_from_a_file_that_it_recognises(files: Path) -> None:
    """What a row says of contents and records is cheaper than asking the format, and never stricter."""
    asked = 0
    for path in sorted(path for path in files.rglob("*") if path.is_file()):
        with suppress(CheckpointError), Probe(path) as probe:
            for reader in _READERS:
                with suppress(CheckpointError):
                    asked += reader.may_match(probe)
                    assert reader.may_match(probe) or not _load(reader.class_path).matches(probe), (
                        path,
                        reader.class_path,
                    )
    assert asked > 500
