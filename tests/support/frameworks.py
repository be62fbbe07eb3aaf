"""Programs that import frameworks, each in a fork of one process that has imported them, which takes seconds.

What tells one process from the next, such as the seed of hashes, is the same in all forks. Paddle crashes
beside PyTorch, so its programs are run by themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TextIO
from unittest.mock import patch

TIMEOUT = 300
"""Seconds that a program may take."""
PRELOADED = ["torch", "tensorflow"]
"""TensorFlow imports Keras, on itself."""
STREAMS = ("stdin", "stdout", "stderr")


@cache
def _forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3"):
        forkserver.ensure_running()
    return context


def python_with_frameworks(
    *program: object, stdin: str = "", cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Run a program, given as Python's arguments; require that it succeeds, and return what it printed.

    Args:
        program: A script or ``-c`` with code, and its own arguments.
        env: What its environment has besides this process's.
    """
    with tempfile.TemporaryDirectory() as directory:
        streams = {name: Path(directory, name) for name in STREAMS}
        for name, stream in streams.items():
            stream.write_text(stdin if name == "stdin" else "")
        process = _started(program, streams, cwd or Path.cwd(), env or {})
        _ended(process)
        assert process.exitcode == 0, streams["stderr"].read_text()[-3000:]
        return streams["stdout"].read_text()


@contextmanager
def conversation_with_frameworks(
    *program: object, env: Mapping[str, str] | None = None
) -> Iterator[tuple[TextIO, TextIO]]:
    """Run a program that reads lines until there are no more; yield its stdin and its stdout."""
    with tempfile.TemporaryDirectory() as directory:
        streams = {name: Path(directory, name) for name in STREAMS}
        for name in ("stdin", "stdout"):
            os.mkfifo(streams[name])
        streams["stderr"].touch()
        process = _started(program, streams, Path.cwd(), env or {})
        with open(streams["stdin"], "w") as orders, open(streams["stdout"]) as answers:
            yield orders, answers
            orders.close()
            _ended(process)


def _started(
    program: Sequence[object], streams: Mapping[str, Path], directory: Path, env: Mapping[str, str]
) -> BaseProcess:
    given = list(map(str, program)), list(streams.values()), directory, {**os.environ, **env}
    process = _forks().Process(target=_run, args=given)
    process.start()
    return process


def _ended(process: BaseProcess) -> None:
    process.join(TIMEOUT)
    process.kill()  # where it took longer
    process.join()


def _run(program: list[str], streams: list[Path], directory: Path, environment: Mapping[str, str]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(os.open(stream, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has put /dev/null there
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    first, *rest = program
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(rest[0], main.__dict__)
    else:
        sys.argv = program
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")
