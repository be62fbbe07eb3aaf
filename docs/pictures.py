"""Draws the pictures of the documentation: runs the real commands and exports what they print as SVG.

python docs/pictures.py           writes docs/pictures/*.svg
python docs/pictures.py --check   exits 1 if one of them is stale; with WIDTH, only of those widths
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import pkgutil
import pty
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

import ckpttool.cli

HERE = Path(__file__).parent
FILES = HERE.parent / "fixtures" / "files"
PICTURES = HERE / "pictures"
COLUMNS = 96
LETTER = 7.5
"""Width of a letter in pixels, so that pictures of all widths have letters of one size."""
PICTURED = {
    "inspect": ["inspect model_checkpoint.pth"],
    "verify": ["verify model_checkpoint.pth damaged.pth stranger.pth"],
    "diff": [
        "diff runs/model_epoch_9.pth runs/model_epoch_10.pth --only weights",
        "diff torch_model.pth keras_model.keras",
    ],
    "prune": ["prune runs --keep 3 --yes", "latest runs"],
}
"""Commands by the name of their picture."""
SESSION = [
    "verify model_checkpoint.pth damaged.pth stranger.pth",
    "diff runs/model_epoch_9.pth runs/model_epoch_10.pth --only weights",
    "prune runs --keep 3 --trash --yes",
    "undo runs",
]
"""The commands of the moving picture."""
SECONDS = {"typed": 1.2, "answered": 4.0}
"""How long the moving picture shows a command before its answer, and the answer."""
ROWS = 24
_TIME = re.compile(r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d")
WATCH = """
[naming]
template = "{run}-e{epoch:04d}"
[watch]
paths = ["runs"]
copy-to = "archive"
[retention]
keep-last = 7
"""
WIDTHS = (60, 80, 120, 200)
SCREENS = {
    "inspect": "inspect model_checkpoint.pth",
    "verify": "verify model_checkpoint.pth damaged.pth stranger.pth",
    "explain": "explain checksum-mismatch",
    "list": "list runs",
    "runs": "list search --best val_loss --mode min",
    "latest": "latest runs",
    "diff": "diff runs/model_epoch_9.pth runs/model_epoch_10.pth",
    "drift": "diff runs/model_epoch_6.pth runs/model_epoch_8.pth runs/model_epoch_10.pth",
    "convert": "convert model_checkpoint.pth weights.safetensors --only weights --dtype bfloat16 --force",
    "salvage": "salvage damaged.pth salvaged.pth",
    "average": "average --last 5 runs average.safetensors",
    "copy": "copy runs archive --keep 3 --dry-run",
    "prune": "prune runs --keep 2 --keep-best 1 --metric loss --dry-run",
    "slim": "prune runs --keep 5 --full 1 --dry-run",
    "log": "log runs --to tensorboard:tb",
    "rename": "rename runs --template {run}-e{epoch:04d} --dry-run",
    "watch": "watch --config watch.toml --once",
    "pin": "pin runs/model_epoch_4.pth",
}
"""What each command prints, at all widths."""
NEVER_IMPORTED = ("predict", "testing")
"""Rooms of the package that import frameworks, or pytest."""


def main() -> int:
    """Write or check the pictures, and return the exit status."""
    for module in pkgutil.walk_packages(ckpttool.__path__, "ckpttool."):
        if module.name.split(".")[1] not in NEVER_IMPORTED and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    drawn = {f"{name}.svg": draw(name, commands) for name, commands in PICTURED.items()}
    drawn["session.svg"] = draw_session()
    for columns in map(int, sys.argv[2:]) if sys.argv[2:] else WIDTHS:
        for name, command in SCREENS.items():
            drawn[f"screens/{name}-{columns}.svg"] = draw(name, [command], columns)
    if "--check" in sys.argv[1:]:
        stale = [name for name, svg in drawn.items() if (PICTURES / name).read_text("utf-8") != svg]
        print(*(f"stale: docs/pictures/{name}; run python docs/pictures.py" for name in stale), sep="\n")
        return int(bool(stale))
    (PICTURES / "screens").mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        (PICTURES / name).write_text(svg, "utf-8")
    return 0


def draw(name: str, commands: list[str], columns: int = COLUMNS) -> str:
    """Return the picture of some commands, each below its prompt."""
    lines: list[Text] = []
    with prepared() as folder:
        for command in commands:
            lines += [prompt(command), *run(command, folder, columns)]
    svg = svg_of(lines, f"ckpttool-{name}-{columns}", columns)
    return svg.replace("<svg ", f'<svg width="{columns * LETTER}" ', 1)


def draw_session() -> str:
    """Return the moving picture: each command as it is typed, then with its answer, again and again."""
    lines: list[Text] = []
    frames: list[tuple[str, float]] = []
    with prepared() as folder:
        for command in SESSION:
            for more, seconds in (([prompt(command)], "typed"), (run(command, folder, COLUMNS), "answered")):
                lines += more
                shown = lines[-ROWS:]
                padded = [*shown, *[Text()] * (ROWS - len(shown))]
                frames.append((svg_of(padded, f"ckpttool-{len(frames)}", COLUMNS), SECONDS[seconds]))
            lines.append(Text())
    return film(frames)


def film(frames: list[tuple[str, float]]) -> str:
    """Return one SVG that shows each frame for its seconds; without motion, the last one."""
    total = sum(seconds for _, seconds in frames)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', frames[0][0])
    assert size is not None
    rules, start = [".frame { visibility: hidden }"], 0.0
    for number, (_, seconds) in enumerate(frames):
        end = f"{100 * seconds / total:.3f}%"
        rules += [
            f"@keyframes f{number} {{ 0% {{ visibility: visible }} {end}, 100% {{ visibility: hidden }} }}",
            f".f{number} {{ animation: f{number} {total:g}s step-end {start:g}s infinite }}",
        ]
        start += seconds
    still = f".frame {{ animation: none }} .f{len(frames) - 1} {{ visibility: visible }}"
    rules.append(f"@media (prefers-reduced-motion) {{ {still} }}")
    groups = (f'<g class="frame f{number}">{svg}</g>' for number, (svg, _) in enumerate(frames))
    box = f'width="{COLUMNS * LETTER}" viewBox="0 0 {size[1]} {size[2]}"'
    head = f'<svg {box} xmlns="http://www.w3.org/2000/svg">'
    return "\n".join([head, "<style>", *rules, "</style>", *groups, "</svg>", ""])


def prompt(command: str) -> Text:
    return Text.assemble(("$ ", "dim"), (f"ckpttool {command}", "bold"))


def svg_of(lines: list[Text], identity: str, columns: int) -> str:
    """Return a terminal with some lines, and a free one below, which the frame would cut."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    for line in [*lines, Text()]:
        console.print(line)
    return console.export_svg(title="", unique_id=identity)


@functools.cache
def template() -> tempfile.TemporaryDirectory[str]:
    """Return a prepared folder, which lasts as long as the program."""
    folder = tempfile.TemporaryDirectory()
    prepare(Path(folder.name))
    return folder


@contextlib.contextmanager
def prepared() -> Iterator[str]:
    """Lend a folder in which commands may change what they like."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(shutil.copytree(template().name, Path(folder, "work")))


def prepare(folder: Path) -> None:
    """Lay out what the commands speak of: a good, a damaged and a malicious file, a series, and twins."""
    shutil.copy(FILES / "pytorch" / "guide.pth", folder / "model_checkpoint.pth")
    shutil.copytree(FILES / "series", folder / "runs")
    shutil.copytree(FILES / "runs" / "lightning" / "search", folder / "search")
    shutil.copy(FILES / "twins" / "twin.pth", folder / "torch_model.pth")
    with tarfile.open(FILES / "twins" / "others.tar.xz") as twins:
        twin = twins.extractfile("twin.keras")
        assert twin is not None
        (folder / "keras_model.keras").write_bytes(twin.read())
    damaged = bytearray((folder / "model_checkpoint.pth").read_bytes())
    damaged[damaged.index(b"data/0") + 128] ^= 0x10
    (folder / "damaged.pth").write_bytes(damaged)
    shutil.copy(FILES / "hostile" / "call_global.pth", folder / "stranger.pth")
    (folder / "watch.toml").write_text(WATCH)
    three_days_ago = time.time() - 3.5 * 86_400
    for path in folder.rglob("*"):
        os.utime(path, (three_days_ago, three_days_ago))


def run(command: str, folder: str, columns: int) -> list[Text]:
    """Return the lines that a command prints on a terminal, in colour, at a time that never changes."""
    environment = {
        **os.environ,
        "COLUMNS": str(columns),
        "CKPTTOOL_PAGER": "",
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "TZ": "UTC",
    }
    environment.pop("NO_COLOR", None)
    terminal, its_end = pty.openpty()  # a command wraps its lines only there
    with tempfile.TemporaryFile() as problems:
        child = os.fork()  # which need not import all again
        if child == 0:
            os._exit(answer(command.split(), folder, environment, (its_end, problems.fileno())))
        os.close(its_end)
        output = everything(terminal).replace("\r\n", "\n")
        os.waitpid(child, 0)
        problems.seek(0)
        output += problems.read().decode()
    text = _TIME.sub(a_fixed_time, output.rstrip())
    return [Text.from_ansi(line) for line in text.splitlines()]


def answer(arguments: list[str], folder: str, environment: dict[str, str], outputs: tuple[int, int]) -> int:
    """Be the command: print to a terminal and to a file of errors, and return the exit status."""
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
        os.dup2(descriptor, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    status = ckpttool.cli.run(arguments)
    sys.stdout.flush()
    return status


def a_fixed_time(found: re.Match[str]) -> str:
    return "2026-11-23 09:30:00" if found[1] else "09:30:00"


def everything(terminal: int) -> str:
    """Return what a program prints on a terminal until it ends."""
    parts = []
    with contextlib.suppress(OSError):  # Linux's way to say that nobody will write any more
        while part := os.read(terminal, 65_536):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode()


if __name__ == "__main__":
    sys.exit(main())
