"""Every hostile file gets the verdict written down beforehand, in bounded time and memory; nothing is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ckpttool import CheckpointError, open_checkpoint
from ckpttool.testing import no_file_left_open
from tests.support.limits import lower_limits

HOSTILE = Path(__file__).parents[2] / "fixtures" / "files" / "hostile"
EXPECTED: dict[str, dict[str, Any]] = {
    name: case["expect"]
    for name, case in json.loads((HOSTILE / "hostile.expected.json").read_text("utf-8")).items()
}
PAYLOAD = Path("/tmp/ckpttool-was-run")
"""What the commands in the hostile files would create."""
SECONDS = 20.0
MEMORY = 2 << 30
BLOCKS = 100
TERMINAL_CONTROLS = frozenset(map(chr, [*range(32), *range(127, 160), 0x202E, 0x2066, 0x200B])) - {"\n"}


@contextmanager
def harmless() -> Iterator[None]:
    """Require that nothing was run, no file stays open, and it took no long time."""
    assert not PAYLOAD.exists(), f"{PAYLOAD} is left from before"
    started = time.monotonic()
    with no_file_left_open():
        yield
    assert time.monotonic() - started < SECONDS
    assert not PAYLOAD.exists()


def assert_one_error_line(answer) -> None:
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("ckpttool: error: ")
    assert "internal error" not in answer.err


LONG = {"pickle_laughs_list.pth", "pickle_nested_200k.pth"}
"""Files of which ``make thorough`` alone asks every command, and that it verifies at the limit as it is."""


@pytest.mark.parametrize("name", sorted(LONG))
def test_what_takes_long_is_verified(name: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, repeats=20_000)
    assert_verdict(EXPECTED[name], run, name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in LONG else ()) for name in EXPECTED],
)
def test_every_command_answers_as_expected(name: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in LONG:
        assert_verdict(EXPECTED[name], run, name)
    # What multiplies is given up on at a tenth of the limit, with which it was verified as it is.
    lower_limits(monkeypatch, repeats=20_000)
    assert_quick_never_calls_it_safer(EXPECTED[name], run, name)
    assert_terminal_safe(run, name)
    with harmless():
        answer = run("inspect", "--json", HOSTILE / name)
    assert answer.status in (0, 1, 2)
    if answer.status == 2:
        assert_one_error_line(answer)
    else:
        assert json.loads(answer.out)["schema"] == "ckpttool.inspect/1"
        assert "error" not in answer.err
    with harmless():
        try:
            with open_checkpoint(HOSTILE / name) as checkpoint:
                read_a_little(checkpoint)
        except CheckpointError as error:
            assert str(error)


def assert_verdict(expected: dict[str, Any], run, name: str) -> None:
    with harmless():
        answer = run("verify", "--json", HOSTILE / name)
    assert answer.status in (0, 1), answer.err
    assert expected["verify_exit"] in (answer.status, None)
    assert "internal error" not in answer.err
    document = json.loads(answer.out)
    checkpoints = document["checkpoints"]
    assert expected["verdict"] in (document["verdict"], None), checkpoints
    if expected["safety"] is not None:
        assert {checkpoint["safety"] for checkpoint in checkpoints} == {expected["safety"]}, checkpoints
    codes = {finding["code"] for checkpoint in checkpoints for finding in checkpoint["findings"]}
    assert not expected["codes_any"] or codes & set(expected["codes_any"]), codes


def assert_quick_never_calls_it_safer(expected: dict[str, Any], run, name: str) -> None:
    """--quick skips checksums and values; what loading would run, it sees all the same."""
    with harmless():
        answer = run("verify", "--quick", "--json", HOSTILE / name)
    assert answer.status in (0, 1), answer.err
    for checkpoint in json.loads(answer.out)["checkpoints"]:
        if expected["safety"] == "unsafe":
            assert (answer.status, checkpoint["safety"]) == (1, "unsafe")
        if expected["safety"] == "unknown":
            assert checkpoint["safety"] != "safe"


def assert_terminal_safe(run, name: str) -> None:
    for command in ("inspect", "verify"):
        with harmless():
            answer = run(command, HOSTILE / name)
        assert not TERMINAL_CONTROLS & set(answer.out + answer.err)
        assert "internal error" not in answer.err
        if answer.status == 2:
            assert_one_error_line(answer)


def read_a_little(checkpoint) -> None:
    """Read what a curious user would: everything, but of endless tensors only the beginning."""
    assert checkpoint.metadata is not None
    assert checkpoint.training is not None
    for tensor in checkpoint.tensors:
        assert all(len(block) <= 4096 for block in islice(tensor.blocks(4096), BLOCKS))


def test_the_list_is_complete() -> None:
    """No hostile file lies there without an expectation."""
    told = {name.split("/")[0] for name in EXPECTED}
    assert {entry.name for entry in HOSTILE.iterdir()} - {"hostile.expected.json"} == told


BATCH = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
import contextlib, io
from ckpttool.cli import run
for path in sys.argv[1:]:
    for command in ("verify", "inspect"):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run([command, "--json", path])
        print(json.dumps([command, path, status, err.getvalue()]), flush=True)
"""
GREEDY = (
    "pickle_",
    "zip_bomb",
    "tensor_",
    "st_length",
    "st_nested",
    "st_overflow",
    "legacy_",
    "shards-nested",
)


def run_with_little_memory(paths: list[Path]) -> Iterator[tuple[str, Path, int, str]]:
    """Verify and inspect files in one process of 2 GiB; yield command, path, exit status and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", BATCH.format(memory=MEMORY), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        command, path, status, err = json.loads(line)
        yield command, Path(path), status, err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't hold a process to RLIMIT_AS")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in EXPECTED if name.startswith(GREEDY) and name not in LONG], id="short"),
        pytest.param(sorted(LONG), id="long", marks=pytest.mark.thorough),
    ],
)
def test_greedy_files_in_little_memory(names: list[str]) -> None:
    paths = [HOSTILE / name for name in names]
    answers = list(run_with_little_memory(paths))
    assert len(answers) == 2 * len(paths)
    for command, path, status, err in answers:
        assert "internal error" not in err, (command, path.name, err)
        if command == "verify":
            assert EXPECTED[path.name]["verify_exit"] in (status, None), path.name
