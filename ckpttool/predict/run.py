"""The command's side of a prediction: frameworks, the child process, its answers, limits and end.

The child starts while the checkpoint is still being checked, so that importing the framework takes no extra
time, and gets its job only when the checks have passed. Whatever happens to it becomes a finding, and no
process that it started outlives it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen
from typing import IO, Any

from ckpttool.core.errors import MissingPackage
from ckpttool.core.report import Finding, Sentence, Severity, error, has_errors
from ckpttool.predict.request import PredictionJob, PredictionRequest, to_json
from ckpttool.storage.children import close_pipes, start_child

_QUIET_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": ""}
_QUIET_PADDLE = {"GLOG_minloglevel": "2", "FLAGS_call_stack_level": "0"}
_QUIET_TRANSFORMERS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "USE_HUB_KERNELS": "NO"}
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ckpttool.predict.child import main; main(*sys.argv[2:])"
)
_POLL, _FAST_POLL = 0.05, 0.002
"""Seconds between two looks at the child, and at one that is about to end."""
_EXIT_GRACE, _SUPERVISOR_GRACE = 5.0, 2.0
"""Seconds for a child to end that has closed its pipe, and for a supervisor to end its processes."""
_MAX_LINES, _MAX_OUTPUT_BYTES = 40, 1 << 14
"""Limits on the kept output of the child, in lines and bytes."""
_MAX_ANSWERS, _MAX_ANSWER_BYTES = 4, 1 << 24
"""Limits on the number of answers and the bytes of one: a child runs other people's code."""
_READ_BYTES = 1 << 16


# Frameworks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that the child can import.

    Attributes:
        package: Name of the package.
        extra: Extra of ckpttool that installs it; empty if there is none.
        module: Adapter, a module of this package with a table ``LOADERS``.
        environment: Variables that make it quiet, unless the user set them.
        forced: Variables that prevent downloads.
    """

    package: str
    extra: str
    module: str
    environment: Mapping[str, str] = field(default_factory=dict)
    forced: Mapping[str, str] = field(default_factory=dict)

    def require(self, path: str) -> None:
        """Require that the framework is installed.

        Raises:
            MissingPackage: It is not installed.
        """
        if find_spec(self.package) is None:
            from ckpttool.core.plugins import install_command

            command = install_command(self.extra) if self.extra else f"pip install {self.package}"
            raise MissingPackage(path, f"a prediction needs {self.package}", expected=command)


FRAMEWORKS = {
    "torch": Framework("torch", "torch", "ckpttool.predict.torch_models"),
    "transformers": Framework(
        "transformers",
        "transformers",
        "ckpttool.predict.transformers_models",
        _QUIET_TRANSFORMERS,
        _OFFLINE,
    ),
    "tensorflow": Framework(
        "tensorflow", "tensorflow", "ckpttool.predict.tensorflow_models", _QUIET_TENSORFLOW
    ),
    "keras": Framework("keras", "keras", "ckpttool.predict.keras_models", _QUIET_TENSORFLOW),
    "tf_keras": Framework("tf_keras", "", "ckpttool.predict.keras_models", _QUIET_TENSORFLOW),
    "paddle": Framework("paddle", "paddle", "ckpttool.predict.paddle_models", _QUIET_PADDLE),
}


# The child, and its answers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageResult:
    """Result of one stage, ``load`` or ``predict``: ``detail`` describes it, or why it was skipped."""

    name: str
    detail: str
    findings: tuple[Finding, ...] = ()
    is_skipped: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Results of a job; ``output`` has the last lines that the child printed."""

    load: StageResult
    predict: StageResult
    output: tuple[str, ...] = ()

    def skipped_findings(self) -> Iterator[Finding]:
        """Yield a finding if the prediction was skipped, though no stage has errors."""
        for stage in (self.load, self.predict):
            if has_errors(stage.findings):
                return
            if stage.is_skipped:
                yield error("not-predicted", stage.detail)._replace(check=stage.name)
                return


class PredictionChild:
    """A process that imports a framework, then waits for a job.

    Leaving its context ends the process and all that it started. Linux ends it as well when the thread ends
    that created it.

    Raises:
        MissingPackage: The framework is not installed.
    """

    def __init__(self, path: str, framework: str) -> None:
        self._path = path
        self._framework = FRAMEWORKS[framework]
        self._framework.require(path)
        # The user's variables take precedence over those that make a framework quiet, and those that keep it
        # offline over the user's: a prediction downloads nothing.
        self._process = start_child(
            "-c",
            _BOOT,
            arguments=(self._framework.module, self._framework.package),
            environment={**self._framework.environment, **os.environ, **self._framework.forced},
            runs_models=True,
        )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._output = [b""]
        assert self._process.stdout is not None and self._process.stderr is not None  # both are pipes
        self._reader = _start_thread(_read_answers, self._process.stdout, self._lines)
        self._drainer = _start_thread(_drain, self._process.stderr, self._output)

    def __enter__(self) -> PredictionChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, job: PredictionJob) -> Answer:
        """Return the results of a job, even if the child crashes.

        Raises:
            MissingPackage: The framework could not be imported.
        """
        deadline = time.monotonic() + job.request.timeout
        assert self._process.stdin is not None  # a pipe
        # It may be longer than a pipe's buffer, and the child may never read it.
        _start_thread(_write, self._process.stdin, json.dumps(to_json(job)).encode() + b"\n")
        stages: list[StageResult] = []
        for name in ("load", "predict"):
            try:
                message = self._next(deadline, job.request)
                if name == "load" and "broken" in message:
                    why = f"importing {self._framework.package} failed: {_clean(message['broken'])}"
                    raise MissingPackage(self._path, why)
                stages.append(_parse_stage(message, name))
            except _ChildEnded as end:
                finding = self._end_finding(end, "loading it" if name == "load" else "running it")
                stages.append(StageResult(name, str(finding.message), (finding,)))
                break
        if len(stages) < 2:
            stages.append(StageResult("predict", "it was not loaded", is_skipped=True))
        return Answer(stages[0], stages[1], self._output_lines())

    def _next(self, deadline: float, request: PredictionRequest) -> dict[str, Any]:
        """Return the child's next message.

        Raises:
            _ChildEnded: There will be none.
        """
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise _ChildEnded("timeout", f"{request.timeout:g} s")
            ended = has_exited(self._process)  # before looking at the queue, which then has its last answer
            with suppress(queue.Empty):
                line = self._lines.get(timeout=min(remaining, _POLL))
                if line is None:
                    raise _ChildEnded("exit")
                try:
                    message = json.loads(line)
                except (ValueError, RecursionError) as failure:
                    raise _ChildEnded("nonsense") from failure
                if not isinstance(message, dict):
                    raise _ChildEnded("nonsense")
                return message
            if ended:  # a process that it started keeps the pipe open
                raise _ChildEnded("exit")
            if request.memory and resident_bytes(self._process.pid) > request.memory:
                raise _ChildEnded("memory", f"{request.memory / (1 << 20):,.0f} MiB")

    def _end_finding(self, end: _ChildEnded, doing: str) -> Finding:
        if end.why == "timeout":
            return error("child-timeout", f"{doing} took longer than the {end.limit} of --timeout")
        if end.why == "memory":
            return error("child-out-of-memory", f"{doing} took more memory than the {end.limit} of --memory")
        if end.why == "nonsense":
            return error("child-crashed", f"the process sent an invalid answer while {doing}")
        how = _exit_text(self._exit_code())
        last = [f": {line[:300]}" for line in self._output_lines()[-1:]]
        return error("child-crashed", f"the process {how} while {doing}{''.join(last)}")

    def _exit_code(self) -> int | None:
        """Return the exit code of a child that ended by itself, or None, and end the processes it started."""
        # The pipe is closed, so the child is about to end. If it doesn't, it is killed, and the status of
        # that says nothing about the crash.
        ended = _wait_for_exit(self._process, _EXIT_GRACE)
        end_process_tree(self._process)
        code = self._process.wait()
        self._drainer.join(1)
        return code if ended else None

    def _output_lines(self) -> tuple[str, ...]:
        lines = self._output[0].decode("utf-8", "replace").splitlines()
        return tuple(line for line in map(str.strip, lines) if line)[-_MAX_LINES:]

    def stop(self) -> None:
        """End the process and all that it started."""
        end_process_tree(self._process)
        self._process.wait()
        for thread in (self._reader, self._drainer):
            thread.join(1)
        close_pipes(self._process)


class _ChildEnded(Exception):
    """No more answers will come; ``why`` is timeout, memory, exit or nonsense, and ``limit`` was exceeded."""

    def __init__(self, why: str, limit: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.limit = limit


def _start_thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _write(stream: IO[bytes], line: bytes) -> None:
    rest = memoryview(line)
    with suppress(OSError, ValueError):  # the child is gone, which its answer shows
        while rest:
            rest = rest[stream.write(rest) :]


def _read_answers(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    """Put each line from a child into a queue, and None at the end."""
    # The child may run code of the checkpoint, which may write without end, or half a line. So the number of
    # lines and their length are limited; whatever isn't an answer is reported by the thread that takes it.
    unfinished, count = bytearray(), 0
    with suppress(OSError, ValueError):  # the pipe is closed when the child is ended
        while (
            count < _MAX_ANSWERS
            and len(unfinished) < _MAX_ANSWER_BYTES
            and (block := stream.read(_READ_BYTES))
        ):
            *whole, rest = block.split(b"\n")
            for end in whole:
                lines.put(bytes(unfinished + end))
                unfinished.clear()
            unfinished += rest
            count += len(whole)
    lines.put(bytes(unfinished) or None)  # an unfinished line is nonsense


def _drain(stream: IO[bytes], output: list[bytes]) -> None:
    """Keep the last bytes that a child prints, as the only item of a list."""
    with suppress(OSError, ValueError):
        while block := stream.read(_READ_BYTES):
            output[0] = (output[0] + block)[-_MAX_OUTPUT_BYTES:]


def _parse_stage(message: dict[str, Any], name: str) -> StageResult:
    try:
        findings = tuple(
            Finding(
                _clean(code),
                Severity(severity),
                Sentence(_clean(text)),
                None if where is None else _clean(where),
            )
            for code, severity, text, where in message["findings"]
        )
        stage, detail = _clean(message["stage"]), _clean(message["detail"])
        result = StageResult(stage, detail, findings, bool(message["is_skipped"]))
    except (KeyError, ValueError, TypeError) as failure:
        raise _ChildEnded("nonsense") from failure
    if result.name != name:
        raise _ChildEnded("nonsense")
    return result


def _clean(text: object) -> str:
    """Return a printable text: half of a surrogate pair can't be encoded."""
    return str(text).encode("utf-8", "replace").decode()


def _exit_text(code: int | None) -> str:
    """Return the end of a process in words."""
    if code is None:
        return "closed its output"
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    out_of_memory = " (possibly out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{out_of_memory}"


# Process trees --------------------------------------------------------------------------------------


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_KEEPS_NUMBERS = hasattr(os, "waitid")
"""Whether an ended process can be seen before its number is free for another one."""


def has_exited(process: Popen[bytes]) -> bool:
    """Return whether a process has ended, without reaping it where the system allows that."""
    # WNOWAIT leaves an ended process as a zombie, which keeps its number. Once it is reaped, another process
    # may get the number, and would be killed instead.
    if process.returncode is None and _KEEPS_NUMBERS:
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return process.poll() is not None


def _wait_for_exit(process: Popen[bytes], seconds: float) -> bool:
    """Wait for the end of a process, and return whether it came in time."""
    until = time.monotonic() + seconds
    while not (ended := has_exited(process)) and time.monotonic() < until:
        time.sleep(_FAST_POLL)
    return ended


def end_process_tree(process: Popen[bytes]) -> None:
    """End a process that leads its own session, and all that it started."""
    if process.returncode is not None and _KEEPS_NUMBERS:
        return  # another process may have its number by now
    if sys.platform.startswith("linux"):
        # The supervisor ends all: it alone sees processes that are started meanwhile.
        process.send_signal(signal.SIGTERM)
        _wait_for_exit(process, _SUPERVISOR_GRACE)
    started = list(process_tree(process.pid))[1:]
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in started:  # those that left the session
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    process.kill()


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants in bytes; 0 if unknown."""
    pages = 0
    for one in process_tree(pid):
        with suppress(OSError, IndexError, ValueError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * _PAGE


def process_tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants, as far as the system lists them."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError, ValueError):
            for child in map(int, children.read_text().split()):
                yield from process_tree(child)
