"""Draws the pictures of README: runs the real commands on a terminal and exports what they print as SVG.

python docs/pictures.py           writes docs/pictures/*.svg
python docs/pictures.py --check   exits 1 where one of them is stale
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
FILES = HERE.parent / "fixtures" / "files"
PICTURES = HERE / "pictures"
COLUMNS = 96
PICTURED = {
    "inspect": ["inspect model_checkpoint.pth"],
    "verify": ["verify model_checkpoint.pth damaged.pth stranger.pth"],
    "diff": [
        "diff runs/model_epoch_9.pth runs/model_epoch_10.pth --only weights",
        "diff torch_model.pth keras_model.keras",
    ],
    "prune": ["prune runs --keep 3 --yes", "latest runs"],
}


def main() -> int:
    """Write or check the pictures, and return the exit status."""
    drawn = {f"{name}.svg": draw(name, commands) for name, commands in PICTURED.items()}
    if "--check" in sys.argv[1:]:
        stale = [name for name, svg in drawn.items() if (PICTURES / name).read_text("utf-8") != svg]
        print(*(f"stale: docs/pictures/{name}; run python docs/pictures.py" for name in stale), sep="\n")
        return int(bool(stale))
    PICTURES.mkdir(exist_ok=True)
    for name, svg in drawn.items():
        (PICTURES / name).write_text(svg, "utf-8")
    return 0


def draw(name: str, commands: list[str]) -> str:
    """Return the picture of some commands, each below its prompt."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for command in commands:
            console.print(Text.assemble(("$ ", "dim"), (f"ckpttool {command}", "bold")))
            console.print(Text.from_ansi(run(command, folder)))
    return console.export_svg(title="", unique_id=f"ckpttool-{name}")


def prepare(folder: Path) -> None:
    """Lay out what the commands speak of: a good, a damaged and a malicious file, a series, and twins."""
    shutil.copy(FILES / "pytorch" / "guide.pth", folder / "model_checkpoint.pth")
    shutil.copytree(FILES / "series", folder / "runs")
    shutil.copy(FILES / "twins" / "twin.pth", folder / "torch_model.pth")
    with tarfile.open(FILES / "twins" / "others.tar.xz") as twins:
        twins.extract("twin.keras", folder, filter="data")
    (folder / "twin.keras").rename(folder / "keras_model.keras")
    damaged = bytearray((folder / "model_checkpoint.pth").read_bytes())
    damaged[damaged.index(b"data/0") + 128] ^= 0x10
    (folder / "damaged.pth").write_bytes(damaged)
    shutil.copy(FILES / "hostile" / "call_global.pth", folder / "stranger.pth")
    three_days_ago = time.time() - 3.5 * 86_400
    for path in folder.rglob("*"):
        os.utime(path, (three_days_ago, three_days_ago))


def run(command: str, folder: str) -> str:
    """Return what a command prints on a terminal of our width, escape codes and all."""
    environment = {
        **os.environ,
        "COLUMNS": str(COLUMNS),
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "TZ": "UTC",
    }
    environment.pop("NO_COLOR", None)
    program = [sys.executable, "-m", "ckpttool", *command.split()]
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).rstrip()


if __name__ == "__main__":
    sys.exit(main())
