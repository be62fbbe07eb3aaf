"""A pointer that can't be read may name anything: what it could name stays, and the status says so."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import prune
from ckpttool.storage import fs
from tests.support.commands import Run
from tests.support.faults import path_at
from tests.support.runs import make_run

NUMBERS = (errno.EIO, errno.ESTALE, errno.EACCES)


class Pointer(NamedTuple):
    """What makes a pointer in a directory of ten epochs, the calls on it that can fail, and the epoch."""

    name: str
    calls: Collection[str]
    epoch: int
    make: Callable[[Path, str], object]


def _text(template: str) -> Callable[[Path, str], object]:
    """Return what writes a text with a name in the place of ``NAME``."""

    def write(path: Path, name: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(template.replace("NAME", name))

    return write


def _link(directory: str) -> Callable[[Path, str], object]:
    """Return what makes a symlink to a name in a directory."""

    def make(path: Path, name: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(os.path.join(directory, name))

    return make


READ = ("open", "read")
POINTERS = [
    Pointer("best.txt", READ, 1, _text("NAME")),
    Pointer("best.json", READ, 1, _text('{"best": {"path": "NAME"}}')),
    Pointer("README.md", READ, 2, _text("Take **NAME**.")),
    Pointer("../notes.txt", (*READ, "lstat"), 3, _text("run/NAME")),
    Pointer("paper/figures.yaml", READ, 4, _text("figure: ../NAME")),
    Pointer("latest", READ, 5, _text("NAME")),
    Pointer("last_checkpoint", READ, 5, _text("NAME")),
    Pointer("trainer_state.json", READ, 6, _text('{"best_model_checkpoint": "NAME"}')),
    Pointer("checkpoint", READ, 6, _text('model_checkpoint_path: "NAME"')),
    Pointer(".ckpttool-pins.toml", (*READ, "lstat"), 7, _text('pinned = ["NAME"]')),
    Pointer("../.ckpttool-pins.toml", (*READ, "lstat"), 7, _text('pinned = ["run/NAME"]')),
    Pointer("good", ("readlink",), 8, _link("")),
    Pointer("../published", ("readlink",), 8, _link("run")),
    Pointer("paper/link", ("readlink",), 8, _link("..")),
]


@contextmanager
def _failing(call: str, path: Path, number: int) -> Iterator[None]:
    """Let a call fail wherever it is about a path, or reading what is opened there."""

    def fault() -> OSError:
        return OSError(number, os.strerror(number), str(path))

    class Unreadable(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise fault()

    if call == "read":
        opened = fs.open_regular

        def open_regular(name: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
            is_it = os.path.abspath(name) == str(path)
            return cast("BinaryIO", Unreadable()) if is_it else opened(name, buffering)

        replaced: tuple[Any, str, Any] = (fs, "open_regular", open_regular)
    else:
        real = getattr(os, call)

        def refuse(name: Any = os.curdir, *arguments: Any, **options: Any) -> Any:
            if os.path.abspath(path_at(name, options.get("dir_fd"))) == str(path):
                raise fault()
            return real(name, *arguments, **options)

        replaced = (os, call, refuse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*replaced)
        yield


def _pruned(directory: Path) -> tuple[set[str], int]:
    """Return the names that would go, and how many series are left alone."""
    result = prune(directory, keep_last=1, depth="quick", dry_run=True)
    left = sum("left alone" in problem.message for problem in result.problems)
    return {entry.name for entry in result.plan.removals}, left


_FAULTS = [(pointer, call) for pointer in POINTERS for call in pointer.calls]


@pytest.mark.parametrize(
    ("pointer", "call", "numbers"),
    [
        pytest.param(*fault, NUMBERS[at % 3 : at % 3 + 1], id=f"{fault[1]}-{fault[0].name}")
        for at, fault in enumerate(_FAULTS)
    ]
    + [pytest.param(*fault, NUMBERS, marks=pytest.mark.thorough) for fault in _FAULTS],
)
def test_what_it_could_name_stays(
    tmp_path: Path, pointer: Pointer, call: str, numbers: Collection[int]
) -> None:
    series = make_run(tmp_path / "run", pointer.epoch, 10)
    named = f"model_epoch_{pointer.epoch}.pth"
    assert named in _pruned(series)[0]
    path = Path(os.path.normpath(series / pointer.name))
    pointer.make(path, named)
    assert named not in _pruned(series)[0]
    for number in numbers:
        with _failing(call, path, number):
            assert _pruned(series) == (set(), 1)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("place", ["..", "paper"])
def test_a_directory_around_or_below_that_can_not_be_listed(short: Path, place: str, number: int) -> None:
    (short / "paper").mkdir()
    assert len(_pruned(short)[0]) == 3
    with _failing("scandir", Path(os.path.normpath(short / place)), number):
        assert _pruned(short) == (set(), 1)


@pytest.mark.parametrize(
    ("call", "name", "number"),
    [
        *(("open", "trainer_state.json", number) for number in NUMBERS),
        ("read", "trainer_state.json", errno.EIO),
        ("scandir", "", errno.EACCES),
    ],
)
def test_the_newest_that_says_which_is_the_best(trainer: Path, call: str, name: str, number: int) -> None:
    """The one before it says so, too, and may be out of date: a series is left alone with its newest."""
    assert _pruned(trainer) == ({"checkpoint-2", "checkpoint-6", "checkpoint-8"}, 0)
    with _failing(call, trainer / "checkpoint-10" / name, number):
        assert _pruned(trainer) == (set(), 1)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_newest_that_can_not_even_be_opened_may_name_the_best(short: Path, number: int) -> None:
    """It is longer than a text that would be read for what it says."""
    newest = short / "model_epoch_11.pth"
    newest.write_bytes((short / "model_epoch_10.pth").read_bytes() + bytes(8192))
    with _failing("open", newest, number):
        assert _pruned(short) == (set(), 1)


@pytest.mark.parametrize("call", ["open", "scandir"])
def test_an_index_above_that_can_not_be_read(short: Path, call: str) -> None:
    index = short.parent / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "run/model_epoch_7.pth"}}')
    assert "model_epoch_7.pth" not in _pruned(short)[0]
    path = index if call == "open" else index.parent
    with _failing(call, path, errno.EIO):
        assert _pruned(short) == (set(), 1)


def test_only_the_run_of_a_pointer_is_left_alone(short: Path) -> None:
    other = Path(shutil.copytree(short, short.parent / "other"))
    (other / "trainer_state.json").write_text('{"best_model_checkpoint": "model_epoch_8.pth"}')
    with _failing("open", other / "trainer_state.json", errno.EACCES):
        result = prune(short.parent, keep_last=1, depth="quick", dry_run=True)
    assert {Path(entry.path).parent.name for entry in result.plan.removals} == {"run"}
    assert [problem.message for problem in result.problems] == [
        f"left alone: {other}/trainer_state.json: permission denied; it may name any checkpoint "
        "(--exclude trainer_state.json ignores it)"
    ]


def test_one_line_and_the_status_say_so(short: Path, run: Run) -> None:
    (short / "best.txt").write_text("model_epoch_8.pth")
    with _failing("open", short / "best.txt", errno.ESTALE):
        status, _, err = run("prune", short, "--keep", 1, "--yes")
        assert status == 1
        assert err == (
            f"ckpttool: error: {short}/model_epoch_*.pth: left alone: {short}/best.txt: "
            f"{os.strerror(errno.ESTALE).lower()}; it may name any checkpoint "
            "(--exclude best.txt ignores it)\n"
        )
        assert len(list(short.glob("*.pth"))) == 4
        assert run("prune", short, "--keep", 1, "--yes", "--exclude", "best.txt").status == 0
    assert [path.name for path in short.glob("*.pth")] == ["model_epoch_10.pth"]


@pytest.mark.parametrize("call", ["open", "lstat"])
def test_a_manifest_that_can_not_be_read_may_tell_of_what_would_be_slimmed(short: Path, call: str) -> None:
    (short / "SHA256SUMS").write_text(f"{'0' * 64}  model_epoch_8.pth\n")

    def slimmed() -> set[str]:
        result = prune(short, full=1, depth="quick", dry_run=True)
        return {entry.name for entry in result.plan.slimmed}

    assert slimmed() == {f"model_epoch_{epoch}.pth" for epoch in (7, 9)}
    for number in NUMBERS:
        with _failing(call, short / "SHA256SUMS", number):
            assert slimmed() == set()


@pytest.mark.parametrize(("call", "number"), [("open", errno.ENOENT), ("lstat", errno.ENOTDIR)])
def test_what_has_just_gone_names_nothing(short: Path, call: str, number: int) -> None:
    notes = short.parent / "notes.txt"
    notes.write_text("run/model_epoch_8.pth")
    assert len(_pruned(short)[0]) == 2
    with _failing(call, notes, number):
        assert len(_pruned(short)[0]) == 3


@settings(max_examples=settings.default.max_examples // 4)
@given(faults=st.lists(st.tuples(st.sampled_from(_FAULTS), st.sampled_from(NUMBERS)), max_size=4))
def test_an_error_never_removes_more(
    tmp_path_factory: pytest.TempPathFactory, files: Path, faults: list[tuple[tuple[Pointer, str], int]]
) -> None:
    series = Path(shutil.copytree(files / "series", tmp_path_factory.mktemp("some") / "run"))
    pointers = {pointer.name: pointer for (pointer, _), _ in faults}
    for pointer in pointers.values():
        pointer.make(Path(os.path.normpath(series / pointer.name)), f"model_epoch_{pointer.epoch}.pth")
    named = {f"model_epoch_{pointer.epoch}.pth" for pointer in pointers.values()}
    others = {f"model_epoch_{epoch}.pth" for epoch in range(1, 10)} - named
    assert _pruned(series)[0] == others
    with ExitStack() as stack:
        for (pointer, call), number in faults:
            stack.enter_context(_failing(call, Path(os.path.normpath(series / pointer.name)), number))
        assert _pruned(series)[0] == (set() if faults else others)


@pytest.mark.parametrize("name", ["latest", "last_checkpoint", "checkpoint", "trainer_state.json"])
def test_a_symlink_in_a_circle_may_name_anything(run: Run, series: Path, name: str) -> None:
    (series / name).symlink_to(name)
    status, _, err = run("prune", series, "--keep", "1", "--yes")
    assert (status, len(list(series.glob("*.pth")))) == (1, 10)
    assert f"left alone: {series}/{name}: " in err
    assert run("list", series).status == 0
    assert run("rename", series, "--template", "e{epoch}", "--yes").status == 0
