"""What holds for every command: options, exit statuses, streams, colours, and what is imported."""

from __future__ import annotations

import io
import json
import os
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
from tests.support.commands import TIMEOUT, Terminal, ckpttool, python, run_here
from tests.support.moments import before_each_thread_scans, fail_inspecting, fail_reading
from tests.support.stores import Answer, Asked, WebServer


@pytest.fixture
def guide(files: Path) -> Path:
    return files / "pytorch" / "guide.pth"


# Options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(run, option: str) -> None:
    assert run(option) == (0, f"ckpttool {version('ckpttool')}\n", "")


def test_help_as_a_command(run) -> None:
    assert run("help") == run("--help")
    assert run("help", "verify") == run("verify", "--help")


@pytest.mark.parametrize(
    ("word", "hint"), [("inspct", "did you mean inspect?"), ("frobnicate", "see 'ckpttool --help'")]
)
def test_a_command_that_there_is_not(run, word: str, hint: str) -> None:
    for arguments in ([word, "a.pth"], ["help", word]):
        assert run(*arguments) == (2, "", f"ckpttool: error: no command {word!r} ({hint})\n")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_the_commands(run, option: str) -> None:
    status, out, err = run(option)
    assert (status, err) == (0, "")
    assert out.startswith("Usage: ")
    assert "inspect" in out and "verify" in out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_help_of_a_command(run, command: str) -> None:
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert "--json" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "--no-such-option", "a.pth"),
        ("verify", "--no-such-option", "a.pth"),
        ("verify",),
        ("inspect",),
        ("no-such-command",),
        ("inspect", "--filter"),
        ("verify", "--jobs", "x", "a.pth"),
        ("--no-such-option",),
    ],
)
def test_misuse_is_one_line_and_exit_2(run, arguments: tuple[str, ...]) -> None:
    status, out, err = run(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("ckpttool: error: ")


def test_misuse_points_to_the_help_of_the_command(run) -> None:
    assert run("inspect", "--no-such-option").err.endswith("inspect --help')\n")


def test_no_command_is_misuse(run) -> None:
    assert run().status == 2


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


@pytest.mark.parametrize("failure", [ValueError("surprise"), RecursionError("deep")])
def test_bug_of_ours_is_one_line_too(
    run, guide: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    fail_inspecting(monkeypatch, failure)
    status, out, err = run("inspect", guide)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"ckpttool: error: internal error: {type(failure).__name__}")
    assert "CKPTTOOL_DEBUG=1" in err


def test_lack_of_memory_is_no_bug(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_inspecting(monkeypatch, MemoryError())
    assert run("inspect", guide) == (2, "", "ckpttool: error: there is not enough memory\n")


def test_error_of_several_lines_is_one(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_inspecting(monkeypatch, CheckpointError("a\nb.pth", "line one\nline two\x1b[31m"))
    assert run("inspect", guide) == (
        2,
        "",
        "ckpttool: error: a\\nb.pth: line one\\nline two\\x1b[31m\n",
    )


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
@pytest.mark.parametrize("command", [("inspect", "--all"), ("inspect", "--json"), ("verify", "--json")])
def test_reader_that_has_seen_enough(files: Path, command: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        path = files / "pytorch" / "dtypes.pth"
        done = ckpttool(*command, path, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("name", ["pipe", "pipe.pth"])
def test_named_pipe_does_not_hang(command: str, name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    done = ckpttool(command, tmp_path / name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ckpttool: error: {tmp_path}/{name}: not a regular file\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_named_pipe_in_a_directory_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    done = ckpttool("verify", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no endless device")
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_device_is_no_checkpoint(run, command: str) -> None:
    status, out, err = run(command, "/dev/zero")
    assert (status, out, err) == (2, "", "ckpttool: error: /dev/zero: not a regular file\n")


# Colour and width -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("verify", "-v"), ("inspect", "--stats")])
def test_no_escape_codes_where_nobody_looks(run, files: Path, command: tuple[str, ...]) -> None:
    for name in ("guide.pth", "nan.pth"):
        assert "\x1b" not in "".join(run(*command, files / "pytorch" / name)[1:])


def answer_on_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: object, term: str = "xterm") -> str:
    for name in ("CKPTTOOL_DEBUG", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", term)
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        run_here(*arguments)
    return terminal.getvalue()


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_colour_on_a_terminal_only(command: str, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in answer_on_terminal(monkeypatch, command, guide)


@pytest.mark.parametrize("command", [("inspect",), ("verify",)])
def test_no_colour_with_no_color(
    command: tuple[str, ...], guide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in answer_on_terminal(monkeypatch, *command, guide)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_colour_in_json(command: str, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    json.loads(answer_on_terminal(monkeypatch, command, "--json", guide))


def test_no_colour_on_a_dumb_terminal(guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert "\x1b" not in answer_on_terminal(monkeypatch, "inspect", guide, term="dumb")


def test_colour_does_not_change_the_words(run, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.chdir(guide.parent)
    coloured = answer_on_terminal(monkeypatch, "verify", guide.name)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == run("verify", guide.name).out


@pytest.mark.parametrize("before", [True, False])
def test_colour_as_one_says(run, before: bool, guide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    def colour(choice: str, *arguments: object) -> bool:
        option, command = ["--color", choice], [str(one) for one in arguments]
        return "\x1b[" in "".join(run(*(option + command if before else command + option))[1:])

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


@pytest.mark.parametrize("option", [(), ("--json",), ("--field", "training.epoch"), ("--all",)])
def test_inspect_imports_no_framework_and_no_numpy(files: Path, option: tuple[str, ...]) -> None:
    found = imported_by(*(("inspect", *option, files / name) for name in LIGHT))
    for name, modules in zip(LIGHT, found, strict=True):
        assert not modules & (FRAMEWORKS | NUMERIC), name


@pytest.mark.parametrize("command", [("inspect", "--json"), ("verify", "--json"), ("verify",)])
def test_rich_is_imported_for_tables_alone(files: Path, command: tuple[str, ...]) -> None:
    assert "rich" not in imported(*command, files / "pytorch" / "guide.pth")


def test_inspect_of_a_pickle_imports_no_framework(files: Path) -> None:
    assert not imported("inspect", files / "pickle" / "protocol4.pkl") & FRAMEWORKS


def test_verify_imports_no_framework(files: Path) -> None:
    assert not imported("verify", files / "pytorch" / "dtypes.pth") & FRAMEWORKS


def test_quick_verify_needs_no_numpy(files: Path) -> None:
    assert not imported("verify", "--quick", files / "pytorch" / "guide.pth") & NUMERIC


def test_library_imports_no_command_line(files: Path) -> None:
    done = python("-c", "import ckpttool, sys; print(*sys.modules)")
    modules = set(done.stdout.split())
    assert not {name.partition(".")[0] for name in modules} & (FRAMEWORKS | NUMERIC | {"typer", "rich"})
    assert not {name for name in modules if name.startswith("ckpttool.cli")}


def test_package_never_imports_the_contract_suite() -> None:
    done = python("-c", "import ckpttool, ckpttool.cli, sys; print(*[n for n in sys.modules if 'test' in n])")
    assert "pytest" not in done.stdout and "ckpttool.testing" not in done.stdout
