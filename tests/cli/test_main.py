"""What holds for every command: options, exit statuses, streams, colours, and what is imported."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from ckpttool import CheckpointError, NotFound
from ckpttool.cli import inspect as inspect_command
from tests.support.commands import TIMEOUT, Run, Terminal, ckpttool, python, refusals, run_here
from tests.support.golden import Golden
from tests.support.moments import before_each_thread_scans, fail_inspecting, fail_reading
from tests.support.stores import Answer, Asked, WebServer


@pytest.fixture
def guide(files: Path) -> Path:
    return files / "pytorch" / "guide.pth"


# Options --------------------------------------------------------------------------------------------


def test_help_and_version(run: Run) -> None:
    for option in ("--version", "-V"):
        assert run(option) == (0, f"ckpttool {version('ckpttool')}\n", "")
    for option in ("--help", "-h", "help"):
        status, out, err = run(option)
        assert (status, err, out[:7]) == (0, "", "Usage: ")
        assert "inspect" in out and "verify" in out
    assert run("help", "verify") == run("verify", "--help")


MISUSE = """
inspect --no-such-option a.pth
verify --no-such-option a.pth
verify
inspect
no-such-command
inspect --filter
verify --jobs x a.pth
--no-such-option
inspct a.pth
frobnicate a.pth
ls
mv a.pth b.pth
missing.pth
help inspct
help frobnicate
"""


def test_misuse_is_one_line_and_exit_2(run: Run, golden: Golden) -> None:
    golden(refusals(run, *MISUSE.split("\n")[1:-1]))
    assert run().status == 2


def test_a_path_in_place_of_a_command_is_inspected(
    run: Run, guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(guide, "--field", "training.epoch") == (0, "10\n", "")
    shutil.copy(guide, tmp_path / "model")
    shutil.copy(guide, tmp_path / "list")
    monkeypatch.chdir(tmp_path)
    assert run("model") == run("inspect", "model")
    assert run("list", "--flat").out.count("guide") == 0  # the command, not the file of this name
    assert run("s3:///") == run("inspect", "s3:///")


@pytest.mark.parametrize("command", ["", "inspect", "verify", "list", "prune --keep 1", "pin"])
def test_a_similar_name_is_proposed_for_a_missing_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "weights.pth").touch()
    told = "ckpttool: error: runs/wieghts.pth: no such file or directory"
    assert run(*command.split(), "runs/wieghts.pth") == (2, "", f"{told} (did you mean runs/weights.pth?)\n")
    (tmp_path / "runs" / "weights.pth").rename(tmp_path / "runs" / "other.pth")
    assert run(*command.split(), "runs/wieghts.pth") == (2, "", f"{told}\n")


def test_python_dash_m(guide: Path) -> None:
    done = ckpttool("inspect", "--field", "training.epoch", guide)
    assert (done.returncode, done.stdout, done.stderr) == (0, "10\n", "")


def test_status_reaches_the_shell(tmp_path: Path) -> None:
    done = ckpttool("verify", tmp_path / "missing.pth")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ckpttool: error: {tmp_path}/missing.pth: no such file or directory\n"


# Errors ---------------------------------------------------------------------------------------------


def test_debug_shows_the_traceback(run, guide: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CKPTTOOL_DEBUG", "1")
    with pytest.raises(NotFound):
        run_here("inspect", tmp_path / "missing.pth")


def test_debug_in_a_shell(tmp_path: Path) -> None:
    done = ckpttool("inspect", tmp_path / "missing.pth", env={"CKPTTOOL_DEBUG": "1"})
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_failures(run: Run, guide: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours is one line, too, and lack of memory is none."""
    for failure in (
        ValueError("surprise"),
        RecursionError("deep"),
        MemoryError(),
        CheckpointError("a\nb.pth", "line one\nline two\x1b[31m"),
    ):
        with monkeypatch.context() as patch:
            fail_inspecting(patch, failure)
            golden(refusals(run, f"inspect {guide}"))


def test_ctrl_c_exits_130(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_inspecting(monkeypatch, KeyboardInterrupt())
    assert_interrupted(run("inspect", guide))


def test_sigterm_is_like_ctrl_c(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(inspect_command, "_newest_in", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert run("inspect", guide) == (143, "", "ckpttool: error: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(os.name == "nt", reason="there are no signals between processes")
def test_sigterm_cleans_up(tmp_path: Path, web: WebServer) -> None:
    """A conversion is told to end while it reads: what it has staged goes, and the target stays away."""
    data = io.BytesIO()
    np.savez(data, **{f"layer{number}": np.full(1 << 18, number, np.float32) for number in range(4)})
    web.files["/m.npz"] = data.getvalue()
    started: list[subprocess.Popen[str]] = []

    def end_late(number: int, asked: Asked, answer: Answer) -> None:
        if list(tmp_path.iterdir()):
            started[0].send_signal(signal.SIGTERM)

    web.misbehave = end_late
    command = [sys.executable, "-m", "ckpttool", "convert", f"{web.url}/m.npz", "m.safetensors"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as child:
        started.append(child)
        _, err = child.communicate(timeout=TIMEOUT)
    assert (child.returncode, err) == (143, "ckpttool: error: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_command_line_is_imported() -> None:
    code = """
        import sys
        import typing

        class Interrupt:
            def find_spec(self, name, *rest):
                if name == "ckpttool.cli":
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interrupt())
        from ckpttool.__main__ import main

        main()
    """
    done = python("-c", textwrap.dedent(code))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ckpttool: error: interrupted\n")


def assert_interrupted(answer) -> None:
    assert answer == (130, "", "ckpttool: error: interrupted\n")


def test_ctrl_c_while_threads_scan(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_each_thread_scans(monkeypatch, lambda: fail_reading(monkeypatch, KeyboardInterrupt()))
    assert_interrupted(run("verify", "-j4", guide))


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
@pytest.mark.parametrize("command", [("inspect", "--all"), ("verify", "--json")])
def test_reader_that_has_seen_enough(files: Path, command: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        path = files / "pytorch" / "dtypes.pth"
        done = ckpttool(*command, path, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


# Colour and width -----------------------------------------------------------------------------------


def test_no_escape_codes_where_nobody_looks(run: Run, files: Path) -> None:
    for command in ("inspect", "verify", "verify -v", "inspect --stats"):
        for name in ("guide.pth", "nan.pth"):
            assert "\x1b" not in "".join(run(*command.split(), files / "pytorch" / name)[1:])


def answer_on_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: object, term: str = "xterm") -> str:
    for name in ("CKPTTOOL_DEBUG", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        run_here(*arguments)
    return terminal.getvalue()


def test_colour_on_a_terminal_only(guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for command in ("inspect", "verify"):
        assert "\x1b[" in answer_on_terminal(monkeypatch, command, guide)
        json.loads(answer_on_terminal(monkeypatch, command, "--json", guide))
        assert "\x1b" not in answer_on_terminal(monkeypatch, command, guide, term="dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    for command in ("inspect", "verify"):
        assert "\x1b" not in answer_on_terminal(monkeypatch, command, guide)


def test_colour_does_not_change_the_words(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.chdir(guide.parent)
    coloured = answer_on_terminal(monkeypatch, "verify", guide.name)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == run("verify", guide.name).out


def test_colour_as_one_says(run: Run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    def colour(choice: str, *arguments: object) -> bool:
        option, command = ["--color", choice], [str(one) for one in arguments]
        both = {"\x1b[" in "".join(run(*line)[1:]) for line in (option + command, command + option)}
        (is_coloured,) = both
        return is_coloured

    assert colour("always", "verify", guide)
    assert colour("always", "verify", guide.with_name("none"))
    assert not colour("auto", "verify", guide)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert colour("auto", "verify", guide)
    assert not colour("never", "verify", guide)


# What is imported -----------------------------------------------------------------------------------

PROBE = """
import json
import sys
import textwrap
from ckpttool.cli import run
for arguments in json.loads(sys.argv[1]):
    status = run(arguments)
    sys.stdout.flush()
    print(status, *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""
FRAMEWORKS = {"torch", "tensorflow", "keras", "paddle", "jax", "flax", "safetensors", "h5py", "onnx"}
NUMERIC = {"numpy", "ml_dtypes"}


def imported_by(*commands: Sequence[object]) -> list[set[str]]:
    """Return the top-level modules imported after each of several commands; all must succeed."""
    done = python("-c", PROBE, json.dumps([[*map(str, arguments)] for arguments in commands]))
    lines = [line.split() for line in done.stderr.splitlines()]
    assert [status for status, *_ in lines] == ["0"] * len(commands), done.stderr
    return [set(modules) for _, *modules in lines]


def imported(*arguments: object) -> set[str]:
    """Return the top-level modules that a command imports; it must succeed."""
    return imported_by(arguments)[0]


LIGHT = (
    "pytorch/guide.pth",
    "pytorch/views.pth",
    "pytorch/lightning/epoch=1-step=4.ckpt",
    "pytorch-legacy/guide_legacy.pth",
    "torchscript/traced.pt",
    "safetensors/dtypes.safetensors",
    "safetensors/sharded",
    "safetensors/trainer/checkpoint-4",
)
"""What is read without NumPy, one of a kind."""


def test_what_is_imported(files: Path) -> None:
    """In one process: what one command has imported stays imported for the next."""
    guide, options = files / "pytorch" / "guide.pth", ("", "--json", "--field training.epoch", "--all")
    light = [("inspect", *option.split(), files / name) for option in options for name in LIGHT]
    light += [("verify", "--quick", guide)]
    heavy = [
        ("inspect", files / "pickle" / "protocol4.pkl"),
        *(("verify", "--json", guide), ("verify", guide), ("verify", files / "pytorch" / "dtypes.pth")),
    ]
    found = imported_by(*light, *heavy)
    for command, modules in zip((*light, *heavy), found, strict=True):
        assert not modules & FRAMEWORKS, command
    assert not found[len(light) - 1] & NUMERIC
    assert "rich" not in imported("inspect", "--json", guide) | imported("verify", guide)


def test_library_imports_no_command_line(files: Path) -> None:
    done = python("-c", "import ckpttool, sys; print(*sys.modules)")
    modules = set(done.stdout.split())
    assert not {name.partition(".")[0] for name in modules} & (FRAMEWORKS | NUMERIC | {"click", "rich"})
    assert not {name for name in modules if name.startswith("ckpttool.cli")}


def test_package_never_imports_the_contract_suite() -> None:
    done = python("-c", "import ckpttool, ckpttool.cli, sys; print(*[n for n in sys.modules if 'test' in n])")
    assert "pytest" not in done.stdout and "ckpttool.testing" not in done.stdout
