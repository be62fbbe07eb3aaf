"""The child process, whatever becomes of it: an answer, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpttool import Finding, MissingPackage
from ckpttool.core.report import note
from ckpttool.predict.request import PredictionJob, PredictionRequest
from ckpttool.predict.run import FRAMEWORKS, Answer, Framework, PredictionChild, StageResult, process_tree
from tests.support.predictions import done_here
from tests.support.thorough import sampled

HERE = Path(__file__).parent
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
Ask = Callable[..., Answer]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let there be a framework that needs no import, and one that can't be imported."""
    monkeypatch.syspath_prepend(str(HERE))
    environment = {"FAKE_PIDS": str(tmp_path / "pids")}
    for name in ("fake_framework", "broken_framework"):
        monkeypatch.setitem(FRAMEWORKS, name, Framework("numpy", "fake", name, environment))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Require that a test leaves no process of its own, no zombie and no open file."""
    files, children = _open_files(), _children()
    yield
    assert not _open_files() - files  # what other tests left open may be closed meanwhile
    assert _children() <= children  # other tests may have some that are still of use


def _open_files() -> set[tuple[str, str]]:
    """Return all descriptors with what they are of: files, pipes and sockets."""
    opened = set()
    for name in os.listdir("/proc/self/fd") if sys.platform.startswith("linux") else ():
        with suppress(FileNotFoundError):  # that of the listing itself
            opened.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return opened


def _children() -> set[str]:
    """Return the processes that this one started and has not seen the end of, where the system tells."""
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for one in lists for pid in one.read_text().split()}


def job(act: str, when: str = "load", **request_options: Any) -> PredictionJob:
    options = {"act": act, "when": when}
    request_options.setdefault("timeout", 20)
    return PredictionJob(
        path="m",
        framework="fake_framework",
        loader="fake",
        options=options,
        request=PredictionRequest(**request_options),
    )


def ask(act: str, when: str = "load", **request_options: Any) -> Answer:
    with PredictionChild("m", "fake_framework") as child:
        return child.ask(job(act, when, **request_options))


def _left(path: Path) -> list[int]:
    """Return which processes of a file are still there; a killed one may take a moment."""
    pids = [int(line) for line in path.read_text().split()]
    assert pids
    until = time.monotonic() + 5
    while any(map(_is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_model_is_loaded_and_run() -> None:
    answer = ask("nothing")

    assert answer.load.detail == "Fake 1.0"
    assert answer.predict.detail.startswith("output 2×3 from generated input, seed 0")
    assert answer.load.findings == answer.predict.findings == ()
    assert answer.output == ()


@pytest.mark.parametrize(
    ("act", "code", "told"),
    [
        (
            "kill",
            "child-crashed",
            "the process was killed by SIGKILL (possibly out of memory) while loading it",
        ),
        ("segfault", "child-crashed", "the process was killed by SIGSEGV while loading it"),
        ("os-exit", "child-crashed", "the process exited with status 0 while loading it"),
        ("raise", "load-failed", "ValueError: two lines \x1b[31m?"),
    ],
)
def test_what_a_child_dies_of_is_told(act: str, code: str, told: str) -> None:
    answer = ask(act)

    (finding,) = answer.load.findings
    assert finding.code == code
    assert finding.message == told
    assert answer.predict.is_skipped
    assert answer.predict.detail == "it was not loaded"


@pytest.mark.parametrize(
    ("act", "code", "message"),
    [
        ("sys-exit", "load-failed", "SystemExit: 3"),
        ("memory-error", "child-out-of-memory", "out of memory"),
        ("raise-huge", "load-failed", "ValueError: " + "x" * 500),
        ("raise-hostile", "load-failed", "Hostile: (its text raises RuntimeError)"),
        ("raise-interrupt", "load-failed", "KeyboardInterrupt"),
        ("raise-generator-exit", "load-failed", "GeneratorExit"),
        ("raise-last", "load-failed", "Last: gone"),
    ],
)
def test_whatever_code_raises_is_told(act: str, code: str, message: str) -> None:
    load, predict = done_here(job(act))
    assert [(one[0], one[2]) for one in load.findings] == [(code, message)]
    assert (predict.is_skipped, predict.detail) == (True, "it was not loaded")

    load, predict = done_here(job(act, "predict"))
    assert load.findings == []
    assert [(one[0], one[2]) for one in predict.findings] == [(code.replace("load", "predict"), message)]


def test_what_a_prediction_dies_of_is_told() -> None:
    answer = ask("segfault", "predict")

    assert answer.load.findings == ()
    told = "the process was killed by SIGSEGV while running it"
    assert [(one.code, one.message) for one in answer.predict.findings] == [("child-crashed", told)]


@pytest.mark.parametrize(("act", "when"), [("hang", "load"), ("hang-in-c", "predict")])
def test_time_runs_out(act: str, when: str) -> None:
    started = time.monotonic()
    timeout = 1 if when == "load" else 3  # a busy machine takes a second to load
    answer = ask(act, when, timeout=timeout)

    stage = answer.load if when == "load" else answer.predict
    doing = "loading" if when == "load" else "running"
    told = f"{doing} it took longer than the {timeout} s of --timeout"
    assert [one.message for one in stage.findings] == [told]
    assert time.monotonic() - started < timeout + 3


@LINUX
@pytest.mark.parametrize("act", ["allocate", "allocate-in-a-child"])
def test_memory_runs_out(act: str) -> None:
    answer = ask(act, memory=200 << 20)

    assert [one.code for one in answer.load.findings] == ["child-out-of-memory"]
    assert answer.load.detail == "loading it took more memory than the 200 MiB of --memory"


def test_prints_do_not_disturb_the_answer() -> None:
    answer = ask("print")

    assert answer.load.findings == answer.predict.findings == ()
    assert set(answer.output) == {"from Python", "from C", '{"stage": "load"}', "\ufffd\ufffd raw", "again"}


@pytest.mark.parametrize(("act", "last"), [("flood", "x" * (1 << 14)), ("flood-lines", "the last line")])
def test_a_flood_of_words_is_drained(act: str, last: str) -> None:
    answer = ask(act)

    assert answer.load.detail == "Fake 1.0"
    assert answer.output == (last,)


@LINUX
@pytest.mark.parametrize("kind", ["", "-list", "-deep", "-stage", "-finding", "-endless"])
def test_nonsense_is_a_finding(kind: str) -> None:
    answer = ask(f"nonsense{kind}", timeout=10)

    assert [one.code for one in answer.load.findings] == ["child-crashed"]
    assert answer.load.detail == "the process sent an invalid answer while loading it"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    "act",
    [
        "left-behind",
        "left-behind-by-the-dead",
        "left-in-a-session",
        "left-in-a-session-by-the-dead",
        "left-as-a-daemon",
        "left-as-a-daemon-by-the-dead",
        "left-by-one-who-leaves",
    ],
)
@LINUX
def test_no_process_is_left_behind(act: str, tmp_path: Path) -> None:
    started = time.monotonic()
    answer = ask(act)

    assert bool(answer.load.findings) == act.endswith(("by-the-dead", "by-one-who-leaves"))
    assert _left(tmp_path / "pids") == []
    assert time.monotonic() - started < 5  # it does not wait for the pipe that the other holds


def test_closed_files_are_a_crash() -> None:
    answer = ask("close-all")

    (finding,) = answer.load.findings
    assert finding.code == "child-crashed"
    assert finding.message.startswith("the process exited with status 1 while loading it")


@pytest.mark.parametrize("act", ["close-stdin", "read-stdin", "threads"])
def test_harmless_habits_do_no_harm(act: str) -> None:
    answer = ask(act)

    assert answer.load.findings == answer.predict.findings == ()


def test_modules_that_lie_around_are_imported_for_whom_the_user_named_or_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lying_here.py").write_text("VALUE = 1", encoding="utf-8")
    (tmp_path / "colorsys.py").write_text("raise SystemExit", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as for ``python -m``

    assert ask("import-local").load.detail == "it needs the package lying_here, which is not installed"
    assert ask("import-local", model="lying_here:Net").load.detail == "Fake 1.0"
    assert ask("import-local", trust=True).load.detail == "Fake 1.0"


def test_a_broken_installation_is_told() -> None:
    with PredictionChild("m", "broken_framework") as child, pytest.raises(MissingPackage) as missing:
        child.ask(job("nothing"))

    message = "OSError: libtorch.so: cannot open shared object file"
    assert missing.value.reason == f"importing numpy failed: {message}"


def test_a_framework_that_is_not_there_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Framework("no_such_framework", "fake", "fake_framework")
    monkeypatch.setitem(FRAMEWORKS, "absent", absent)

    with pytest.raises(MissingPackage, match="a prediction needs no_such_framework"):
        PredictionChild("m", "absent")


@pytest.mark.parametrize(
    ("load", "owed"), [((), ["not-predicted"]), ((note("tied-key", "a"),), ["not-predicted"])]
)
def test_a_prediction_that_was_not_made_is_owed(load: tuple[Finding, ...], owed: list[str]) -> None:
    answer = Answer(StageResult("load", "Net", load), StageResult("predict", "no inputs", is_skipped=True))

    assert [one.code for one in answer.skipped_findings()] == owed


def test_a_long_job_waits_for_nobody() -> None:
    answer = ask("nothing", model_args={"text": "x" * (1 << 22)})
    with PredictionChild("m", "fake_framework") as child:
        for pid in process_tree(child._process.pid):
            os.kill(pid, signal.SIGSTOP)  # before it reads
        stopped = child.ask(job("nothing", timeout=0.3, model_args={"text": "x" * (1 << 22)}))

    assert answer.predict.findings == ()
    assert [one.code for one in stopped.load.findings] == ["child-timeout"]


def test_a_child_that_is_never_asked_is_ended() -> None:
    with PredictionChild("m", "fake_framework") as child:
        pid = child._process.pid

    assert not _is_alive(pid)


def test_an_interrupt_leaves_no_child() -> None:
    # A shell starts what runs in the background with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    # Named, so that it lives longer: an interrupt is lost in the callback of its weak reference.
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt), PredictionChild("m", "fake_framework") as child:
        timer.start()
        child.ask(job("hang"))

    signal.signal(signal.SIGINT, before)
    assert child._process.returncode is not None
    timer.join()


def test_several_threads_ask_at_once() -> None:
    acts = ["nothing", "kill", "raise", "nothing"]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, acts))

    assert [[one.code for one in answer.load.findings] for answer in answers] == [
        [],
        ["child-crashed"],
        ["load-failed"],
        [],
    ]


SUPERVISE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, a shell has it ignored
sys.path[:0] = sys.argv[1:3]
from ckpttool.predict.run import FRAMEWORKS, Framework
from ckpttool.predict.request import PredictionJob, PredictionRequest
from ckpttool.predict.run import PredictionChild
FRAMEWORKS["fake"] = Framework("numpy", "fake", "fake_framework", {"FAKE_PIDS": sys.argv[3]})
options = {"act": sys.argv[4], "when": "load"}
job = PredictionJob(path="m", framework="fake", loader="fake", options=options, request=PredictionRequest())
with PredictionChild("m", "fake") as child:
    child.ask(job)
"""


@LINUX
@pytest.mark.parametrize(
    ("number", "act"),
    sampled(
        [
            (number, act)
            for act in ("leave-a-daemon-and-hang-in-c", "leave-a-daemon-and-hang", "tell-pid")
            for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
        ],
        4,
    ),
)
def test_nothing_outlives_the_parent(number: int, act: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    arguments = [str(HERE), str(HERE.parents[1]), str(pids), act]
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, *arguments], stderr=subprocess.DEVNULL
    ) as supervisor:
        until = time.monotonic() + 20
        while not (pids.exists() and pids.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        supervisor.send_signal(number)

    assert _left(pids) == []


def test_no_system_is_needed_that_is_not_there() -> None:
    lacking = """
import os, signal, sys
for name in ("killpg", "sysconf", "waitid", "fork", "setsid", "WNOWAIT", "WEXITED", "P_PID"):
    if hasattr(os, name):
        delattr(os, name)
del signal.SIGKILL
import ckpttool.predict.run, ckpttool.predict.child
"""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    subprocess.run([sys.executable, "-c", lacking], check=True, env=environment)
