"""A run's directory, exchanged by somebody who may write in the one around it, at any moment."""

from __future__ import annotations

import os
import select
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.exchanging import CALLS
from tests.support.commands import run_here

MARK = b"somebody else's"
EPOCHS = range(1, 4)
_NAMES = ("latest", "out.safetensors", "README.md", "report.html", ".ckpttool-pins.toml", "ckpttool.toml")


class Scene:
    """A directory of one run, which is to be changed, and another's directory, which is not.

    Attributes:
        root: The directory that is named.
        run: The run in it.
        other: The directory of somebody else, with all names that a command could write or remove.
    """

    def __init__(self, path: Path, weights: bytes) -> None:
        self.root, self.other, self.path = path / "runs", path / "other", path
        self.run = self.root / "exp1"
        (path / "copies").mkdir(parents=True)
        (path / "aside").mkdir()
        for place, content in ((self.run, weights), (self.other, weights + MARK), (path / "new", weights)):
            place.mkdir(parents=True)
            for epoch in EPOCHS if place != path / "new" else (8, 9):
                file = place / f"model_epoch_{epoch}.pth"
                file.write_bytes(content)
                os.utime(file, (1_700_000_000 + 600 * epoch,) * 2)
        for name in (*_NAMES, *(f"model_epoch_{epoch}.pth.sha256" for epoch in EPOCHS)):
            (self.other / name).write_bytes(MARK)
        shutil.copytree(self.other, self.other / "exp1")
        (path / "watch.toml").write_text(
            f'[watch]\npaths = ["{self.root}"]\ncopy-to = "{path / "copies"}"\n'
            '[naming]\ntemplate = "{run}-e{epoch:04d}"\n[retention]\nkeep-last = 2\n'
        )
        self._node = self.other.stat().st_ino
        self._before = self._states(self.other)

    @staticmethod
    def _states(place: Path) -> dict[str, tuple[object, ...]]:
        found = {}
        for path in sorted(place.rglob("*")):
            status = path.lstat()
            data = path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(place))] = (status.st_ino, status.st_mode, status.st_mtime_ns, data)
        return found

    def require_untouched(self) -> None:
        """Require that all of the other's is as it was, wherever it lies, and is nowhere else."""
        above = (Path(parent) / name for parent, names, _ in os.walk(self.path) for name in names)
        (other,) = (path for path in above if path.lstat().st_ino == self._node)
        assert self._states(other) == self._before
        for path in self.path.rglob("*"):
            if path.is_file() and not path.is_symlink() and not path.is_relative_to(other):
                assert MARK not in path.read_bytes(), path


class Exchange:
    """Brings the other's directory, or a link to it, to the place of one, before the call of some number.

    Calls count once a command has opened one of the directories that it goes by: what was exchanged before
    is what the user named.
    """

    def __init__(
        self,
        patched: pytest.MonkeyPatch,
        scene: Scene,
        place: Path,
        number: int,
        *,
        is_link: bool,
        begins: tuple[Path, ...],
    ) -> None:
        self.count, self.is_done = 0, False
        self._scene, self._place, self._number, self._is_link = scene, place, number, is_link
        self._begins = {(path.stat().st_dev, path.stat().st_ino) for path in begins}
        self._has_begun = False
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            patched.setattr(os, name, self._watched(name))

    def _watched(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                if self._has_begun:
                    self.count += 1
                    if 0 < self._number <= self.count and not self.is_done:
                        self._exchange()
            result = real(*arguments, **options)
            if name in ("open", "listdir", "scandir") and not self._has_begun:
                place = result if name == "open" else (arguments or (os.curdir,))[0]
                status = self._real["fstat" if isinstance(place, int) else "stat"](place)
                self._has_begun = (status.st_dev, status.st_ino) in self._begins
            return result

        return call

    def _exchange(self) -> None:
        self.is_done = True
        try:
            self._real["rename"](self._place, self._scene.path / "aside" / self._place.name)
        except FileNotFoundError:
            return
        if self._is_link:
            self._real["symlink"](self._scene.other, self._place)
        else:
            self._real["rename"](self._scene.other, self._place)


def _file(scene: Scene) -> Path:
    return scene.run / "model_epoch_3.pth"


COMMANDS: dict[str, Callable[[Scene], list[object]]] = {
    "prune": lambda scene: ["prune", scene.root, "--keep", 2, "--yes"],
    "prune to the trash": lambda scene: ["prune", scene.root, "--keep", 2, "--yes", "--trash"],
    "undo": lambda scene: ["undo", scene.root],
    "empty the trash": lambda scene: ["prune", scene.root, "--empty-trash", "--yes"],
    "rename": lambda scene: ["rename", scene.root, "-t", "{run}-e{epoch:04d}"],
    "undo the renaming": lambda scene: ["undo", scene.root],
    "convert": lambda scene: ["convert", _file(scene), scene.run / "out.safetensors"],
    "average": lambda scene: [
        "average",
        _file(scene),
        scene.run / "model_epoch_2.pth",
        scene.run / "out.safetensors",
    ],
    "salvage": lambda scene: ["salvage", _file(scene), scene.run / "out.safetensors"],
    "copy from": lambda scene: ["copy", scene.root, scene.path / "copies"],
    "copy to": lambda scene: ["copy", scene.path / "new", scene.run],
    "watch": lambda scene: ["watch", "--once", "--config", scene.path / "watch.toml"],
    "note": lambda scene: ["card", _file(scene), "--note", "good"],
    "card": lambda scene: ["card", _file(scene), "-o", scene.run / "README.md"],
    "pin": lambda scene: ["pin", _file(scene)],
    "manifest": lambda scene: ["verify", scene.root, "--write-manifest"],
    "report": lambda scene: ["report", scene.root, "-o", scene.run / "report.html"],
}
_FIRST = {
    "undo": "prune to the trash",
    "empty the trash": "prune to the trash",
    "undo the renaming": "rename",
}
_NAMES_THE_RUN = {"convert", "average", "salvage", "copy to", "note", "card", "pin", "report"}
WAYS = ("a link", "a directory", "a link above")
CASES = [(command, WAYS[(at + turn) % 3]) for at, command in enumerate(COMMANDS) for turn in range(3)]


@pytest.mark.parametrize(
    ("command", "way", "moments"),
    [
        *((*case, 3) for case in CASES[::3]),
        *(pytest.param(*case, 50, marks=pytest.mark.thorough) for case in CASES),
    ],
)
def test_nothing_of_the_others_is_read_or_touched_and_nothing_is_lost(
    command: str,
    way: str,
    moments: int,
    files: Path,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """Something is exchanged at about so many moments of a command."""
    weights = (files / "pytorch" / "bare_state_dict.pth").read_bytes()
    kept = 2 if command in ("prune", "empty the trash", "watch") else len(EPOCHS)

    def exchanged_at(number: int) -> int:
        """Run the command, check what it leaves, and return how many calls it made."""
        scene = Scene(tmp_path / str(number), weights)
        if command in _FIRST:
            assert run_here(*COMMANDS[_FIRST[command]](scene)) == 0
        place = scene.root if way == "a link above" else scene.run
        begins = (place,) if way != "a link" or command in _NAMES_THE_RUN else (scene.root, scene.run)
        capfdbinary.readouterr()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(select, "select", lambda *_: ([], [], []))  # watch waits for nothing
            exchange = Exchange(patched, scene, place, number, is_link=way != "a directory", begins=begins)
            status = run_here(*COMMANDS[command](scene))
        said = b"".join(capfdbinary.readouterr())
        assert status in ((0, 1, 2) if number else (0,)), said
        assert MARK not in said and b"internal error" not in said, said
        scene.require_untouched()
        there = [path for path in scene.path.rglob("*.pth") if not path.is_relative_to(scene.other)]
        assert sum(path.read_bytes() == weights for path in there) >= kept
        return exchange.count

    calls = exchanged_at(0)
    for number in sorted({1, *range(1, calls, max(1, calls // moments)), calls - 1}):
        exchanged_at(number)
