"""What is made beside a target, exchanged for something else by the owner of the directory around it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ckpttool import AccessDenied, CheckpointError, ConvertOptions, UsageError, convert, open_checkpoint
from ckpttool.storage.directories import OpenDirectory, PathReplaced, remove_leftover
from ckpttool.transaction.lock import LOCK, lock_directory
from ckpttool.transaction.staged_output import StagedOutput
from tests.exchanging import WAYS, Way, exchanges

NEW, OLD = b"new", b"old"


def found(place: Path) -> dict[str, bytes]:
    """Return what stands in a directory under names that are not ours."""
    names = (one for one in sorted(place.rglob("*")) if one.is_file())
    paths = {str(one.relative_to(place)): one.read_bytes() for one in names}
    return {name: data for name, data in paths.items() if not name.startswith((".ckpttool-", "taken-"))}


SHAPES = {"file": [""], "directory": ["a", "b/c"], "prefix": [".index", ".data"]}


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_whenever_it_is_exchanged_the_old_or_the_new_stands_there(
    shape: Any, way: Way, step: int, tmp_path: Path
) -> None:
    names = SHAPES[shape]
    paths = [f"ckpt/{name}" if shape == "directory" else f"ckpt{name}" for name in names]

    def lay_out(place: Path) -> None:
        for path in paths:
            (place / path).parent.mkdir(exist_ok=True, parents=True)
            (place / path).write_bytes(OLD)

    def write(place: Path) -> None:
        replaces = sorted({path.split("/")[0] for path in paths})
        with StagedOutput(place / "ckpt", shape, replaces=replaces, jobs=1) as target:
            for name in names:
                target.create(name).write(NEW)
            target.settle()
            target.commit()

    ends = set()
    for place, failure in exchanges(tmp_path, way, lay_out, write, step=step):
        assert failure is None or isinstance(failure, (OSError, CheckpointError)), failure
        values = set(found(place).values())
        assert found(place).keys() == set(paths)
        assert values == {NEW} or (values == {OLD} and failure is not None), failure
        ends.add((type(failure), str(failure).rpartition(": ")[2]) if failure else None)
    assert None in ends  # what is exchanged before it is made, or when all is done, changes nothing
    assert len(ends) > 2


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("way", WAYS)
def test_a_conversion_in_which_it_is_exchanged_at_any_call(
    way: Way, step: int, files: Path, tmp_path: Path
) -> None:
    source = files / "safetensors" / "sharded" / "model.safetensors.index.json"
    with open_checkpoint(source) as checkpoint:
        expected = {name: tensor.tobytes() for name, tensor in checkpoint.items()}
    options = ConvertOptions(to="numpy", force=True, jobs=1)

    def lay_out(place: Path) -> None:
        (place / "ckpt.npz").write_bytes(OLD)

    outcomes = Counter[bool]()
    for place, failure in exchanges(
        tmp_path, way, lay_out, lambda place: convert(source, place / "ckpt.npz", options), step=step
    ):
        assert failure is None or isinstance(failure, (CheckpointError, UsageError)), failure
        outcomes[failure is None] += 1
        target = place / "ckpt.npz"
        if target.read_bytes() != OLD:
            with open_checkpoint(target) as checkpoint:
                assert {name: tensor.tobytes() for name, tensor in checkpoint.items()} == expected
        else:
            assert failure is not None
    assert min(outcomes[True], outcomes[False]) > 20 / step


@pytest.mark.parametrize("way", WAYS)
def test_the_error_says_what_happened(way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after it was made: what is opened then is not what was made."""
    bystander = tmp_path / "bystander"
    bystander.mkdir()
    (bystander / "secret").write_bytes(OLD)
    place = tmp_path / "place"
    place.mkdir()
    real = os.mkdir

    def exchanging(name: str, *mode: int, **options: Any) -> None:
        real(name, *mode, **options)
        (place / name).rename(tmp_path / "taken")
        if way == "a link":
            (place / name).symlink_to(bystander)
        else:
            bystander.rename(place / name)

    monkeypatch.setattr(os, "mkdir", exchanging)
    with pytest.raises(AccessDenied, match=r"another process has replaced \.ckpttool-") as caught:
        StagedOutput(place / "ckpt")
    assert caught.value.path == str(place)
    (there,) = place.iterdir()
    assert [one.name for one in there.iterdir()] == ["secret"]
    assert list((tmp_path / "taken").iterdir()) == []


def test_the_directory_of_a_target_may_be_moved_away(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    place.mkdir()
    elsewhere.mkdir()
    with (
        pytest.raises(AccessDenied, match="moved or replaced meanwhile"),
        StagedOutput(place / "ckpt") as target,
    ):
        sink = target.create()
        sink.write(NEW)
        target.settle()
        place.rename(tmp_path / "moved")
        place.symlink_to(elsewhere)
        target.commit()
    assert not list(elsewhere.iterdir())
    assert not list((tmp_path / "moved").iterdir())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_an_empty_directory_of_another_user_is_not_taken_for_what_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def exchanging(name: str, *mode: int, **options: Any) -> None:
        real(name, *mode, **options)
        os.chown(name, 12345, 12345, dir_fd=options["dir_fd"])

    monkeypatch.setattr(os, "mkdir", exchanging)
    with OpenDirectory(str(tmp_path)) as opened, pytest.raises(PathReplaced):
        opened.make("new")
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def test_where_all_is_of_one_user_a_new_directory_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes root for nobody, and a mount without owners, give all to one user."""
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with OpenDirectory(str(tmp_path)) as opened, opened.make("new") as made:
        assert made.names() == []


def test_what_is_closed_reaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened = OpenDirectory(str(tmp_path))
    opened.close()
    opened.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        opened.make("new")
    assert not list(tmp_path.iterdir())


def test_links_in_what_is_removed_are_not_followed(tmp_path: Path) -> None:
    """Whoever owns a part of it puts a link in the place of a directory while it is removed."""
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.mkdir()
    (outside / "secret").write_bytes(OLD)
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "secret").write_bytes(NEW)
    with OpenDirectory(str(tmp_path)) as opened, pytest.MonkeyPatch.context() as patched:
        real = OpenDirectory.open

        def exchanging(self: OpenDirectory, name: str) -> OpenDirectory:
            if name == "b":
                shutil.rmtree(tree / "a" / "b")
                (tree / "a" / "b").symlink_to(outside)
            return real(self, name)

        patched.setattr(OpenDirectory, "open", exchanging)
        with pytest.raises(NotADirectoryError):
            opened.remove("tree")
    assert (outside / "secret").read_bytes() == OLD


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of somebody else's, which must not be opened."""
    path = tmp_path / "secret"
    path.write_bytes(OLD)
    path.chmod(0o600)
    inode, real = path.stat().st_ino, os.open

    def open_another(*arguments: Any, **options: Any) -> int:
        descriptor = real(*arguments, **options)
        assert os.fstat(descriptor).st_ino != inode
        return descriptor

    monkeypatch.setattr(os, "open", open_another)
    return path


def link_once_seen(patch: pytest.MonkeyPatch, name: str, secret: Path) -> None:
    """Put a link in the place of a file as soon as somebody has looked what it is."""
    real = OpenDirectory.status

    def status(self: OpenDirectory, entry: str) -> os.stat_result | None:
        found = real(self, entry)
        if entry == name and not os.path.islink(self.join(name)):
            os.unlink(self.join(name))
            os.symlink(secret, self.join(name))
        return found

    patch.setattr(OpenDirectory, "status", status)


def test_a_link_in_the_place_of_a_leftover_is_not_followed(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leftover").write_bytes(OLD)
    link_once_seen(monkeypatch, "leftover", secret)
    with OpenDirectory(str(tmp_path)) as opened:
        remove_leftover(opened, "leftover")
    assert (tmp_path / "leftover").is_symlink()


def test_a_link_in_the_place_of_what_was_written_is_not_followed(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get the mode of the file that gives way."""
    (tmp_path / "ckpt").write_bytes(OLD)
    with (
        pytest.raises(OSError, match="symbolic"),
        StagedOutput(tmp_path / "ckpt", replaces=["ckpt"]) as target,
    ):
        target.create().write(NEW)
        target.settle()
        link_once_seen(monkeypatch, "ckpt", secret)
        target.commit()
    assert secret.stat().st_mode & 0o777 == 0o600


def test_a_lock_that_is_a_link_is_not_followed(secret: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    (place / LOCK).symlink_to(secret)
    with pytest.raises(AccessDenied, match="symbolic"), lock_directory(str(place)):
        pass


@pytest.mark.parametrize("is_supported", [True, False])
def test_systems_without_descriptors_of_directories_write_by_path(
    is_supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "old").write_bytes(OLD)
    for shape, name in (("directory", "b/c"), ("directory", "d"), ("file", "")):
        with StagedOutput(tmp_path / "ckpt", shape, replaces=["ckpt"]) as target:  # type: ignore[arg-type]
            target.create(name).write(NEW)
            target.settle()
            target.commit()
        assert target.warnings == ()
    assert found(tmp_path) == {"ckpt": NEW}
    assert [one.name for one in tmp_path.iterdir()] == ["ckpt"]
