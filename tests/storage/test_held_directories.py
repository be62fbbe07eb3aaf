"""Directories that are held: what lies below is what it was, whatever is put in its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import AccessDenied
from ckpttool.storage import fs, held
from ckpttool.storage.directories import OpenDirectory, rename, write_atomically
from ckpttool.storage.held import PathReplaced, adopt_roots, held_roots, holding

pytestmark = pytest.mark.skipif(not held.IS_SUPPORTED, reason="the system can't work below open directories")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a directory with two others in it, beside that of somebody else."""
    for path in ("root/a/b", "root/c", "other/b"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "file").write_text(path)
    return tmp_path / "root"


def put_link(root: Path) -> None:
    (root / "a").rename(root / "away")
    (root / "a").symlink_to(root.parent / "other")


def put_directory(root: Path) -> None:
    (root / "a").rename(root / "away")
    (root.parent / "other").rename(root / "a")


def put_file(root: Path) -> None:
    (root / "a").rename(root / "away")
    (root / "a").write_text("")


@pytest.fixture(params=[64, 1])
def few_open(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so many directories stay open."""
    monkeypatch.setattr(held, "MAX_OPEN", request.param)


def look_into(root: Path) -> list[str]:
    return [entry.name for entry in fs.entries(str(root / "a"))]


@pytest.mark.usefixtures("few_open")
@pytest.mark.parametrize("exchange", [put_link, put_directory, put_file])
@pytest.mark.parametrize(
    "use",
    [
        look_into,
        lambda root: fs.listdir(str(root / "a" / "b")),
        lambda root: write_atomically(str(root / "a" / "file"), b""),
        lambda root: OpenDirectory(str(root / "a")).close(),
        lambda root: fs.makedirs(str(root / "a" / "new")),
    ],
)
def test_another_one_is_never_entered(
    use: Callable[[Path], object], exchange: Callable[[Path], None], root: Path
) -> None:
    with holding(root):
        assert look_into(root) == ["b"]
        fs.listdir(str(root / "c"))
        exchange(root)
        with pytest.raises((PathReplaced, FileNotFoundError)):
            use(root)
            look_into(root)
    assert not any(path.name == "new" for path in root.parent.rglob("*"))


def test_a_link_that_takes_the_place_of_what_was_listed_is_not_followed(root: Path) -> None:
    with holding(root):
        assert {entry.name for entry in fs.entries(str(root)) if entry.is_dir()} == {"a", "c"}
        put_link(root)
        assert not fs.isdir(str(root / "a"))
        assert fs.realpath(str(root / "a")) == str(root / "a")
        with pytest.raises(AccessDenied, match="another process has replaced a since"):
            fs.open_source(str(root / "a" / "b" / "file"))
    assert fs.listdir(str(root / "a")) == ["b"]  # it is what it is for whoever holds nothing


def test_a_link_that_takes_the_place_of_a_file_is_not_followed(root: Path) -> None:
    with holding(root):
        assert [entry.is_file() for entry in fs.entries(str(root / "c"))] == [True]
        (root / "c" / "file").unlink()
        (root / "c" / "file").symlink_to(root.parent / "other" / "b" / "file")
        assert not fs.isfile(str(root / "c" / "file"))
        with pytest.raises(AccessDenied, match="another process has replaced file since"):
            fs.open_source(str(root / "c" / "file"))


def test_the_directory_itself_may_be_exchanged(root: Path) -> None:
    with holding(root):
        root.rename(root.parent / "away")
        root.symlink_to(root.parent / "other")
        with pytest.raises(PathReplaced, match="has replaced root since"):
            fs.listdir(str(root))
        with fs.open_source(str(root / "c" / "file")) as source:  # of the one that was named
            assert source.read(0, source.size) == b"root/c"


def test_a_link_that_was_named_is_followed_and_no_other(root: Path) -> None:
    (root / "named").symlink_to("a")
    (root / "c" / "link").symlink_to(root.parent / "other")
    (root / "c" / "file link").symlink_to("../a/b/file")
    with holding(root / "named", root):
        write_atomically(str(root / "named" / "new"), b"1")
        assert (root / "a" / "new").read_bytes() == b"1"
        assert fs.realpath(str(root / "named" / "new")) == str(root / "a" / "new")
        assert fs.listdir(str(root / "c" / "link")) == ["b"]  # a link from the first look on
        with pytest.raises(OSError, match="through a symlink"):
            write_atomically(str(root / "c" / "link" / "new"), b"1")
        with fs.open_source(str(root / "c" / "file link")) as source:
            assert source.read(0, source.size) == b"root/a/b"
        assert fs.realpath(str(root / "c" / "file link")) == str(root / "a" / "b" / "file")
    assert os.listdir(root.parent / "other") == ["b"]


def test_what_we_move_make_and_remove_ourselves_is_known(root: Path) -> None:
    """Two directories change their names, and one is made where another one was."""
    with holding(root), OpenDirectory(str(root)) as place:
        assert (fs.listdir(str(root / "a")), fs.listdir(str(root / "c"))) == (["b"], ["file"])
        for old, new in (("a", "aside"), ("c", "a"), ("aside", "c")):
            rename(old, place.descriptor, new, place.descriptor)
        assert (fs.listdir(str(root / "a")), fs.listdir(str(root / "c"))) == (["file"], ["b"])
        place.remove("a")
        place.make("a").close()
        assert fs.listdir(str(root / "a")) == []


def test_it_is_found_under_each_spelling(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    outwards = os.path.join(os.pardir, root.parent.name, "root")
    with holding("root"):
        fs.entries("root")
        put_link(root)
        for spelling in (str(root), f"{root}/", f"{root}/.", f"{root}/a/..", "root", "./root", outwards):
            with pytest.raises(PathReplaced):
                fs.listdir(os.path.join(spelling, "a"))


def test_another_process_knows_what_was_seen(root: Path) -> None:
    with holding(root):
        look_into(root)
        roots = held_roots([str(root / "a" / "b" / "file")])
    with adopt_roots(roots):
        assert look_into(root) == ["b"]
    put_directory(root)
    with adopt_roots(roots), pytest.raises(PathReplaced):
        look_into(root)


def test_nothing_stays_open(root: Path) -> None:
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for _ in range(3):
        with holding(root, root / "a" / "b" / "file"):
            look_into(root)
    assert len(os.listdir("/proc/self/fd") if before else []) == len(before)
    assert fs.listdir(str(root / "a")) == ["b"]
