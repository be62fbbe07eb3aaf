"""The child process: imports one framework, loads one checkpoint, runs it, and answers.

On Linux a supervisor stays between the command and the process that loads. Whatever loses its parent becomes
the supervisor's child, even outside its session, and the kernel signals the supervisor when the command is
gone: so it can end every process that the model started. It forks before anything starts a thread, so this
module imports NumPy, which starts some, only afterwards.

The job comes through the original stdin. Answers, one JSON object a line, leave through the original stdout;
prints of the framework or the model are redirected to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import BinaryIO, NoReturn

from ckpttool.core.report import Finding, error, has_errors
from ckpttool.core.text import counted
from ckpttool.predict.guard import plain_data_only
from ckpttool.predict.interface import Loaded, LoadFailed, error_finding, error_text
from ckpttool.predict.request import PredictionJob, from_json
from ckpttool.predict.run import process_tree

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_TIMEOUT, _POLL = 3.0, 0.002
"""Seconds to wait for killed processes, since one may wait for a broken disk, and between two looks."""


def main(adapter: str, package: str) -> None:
    """Import an adapter and its framework, answer one job, and wait to be ended."""
    _supervise()
    orders, answers = _private_pipes()
    # If memory runs out, the kernel is to kill this process first.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    try:
        module = _import_quickly(adapter, package)
    except BaseException as failure:  # noqa: BLE001 - a broken installation may raise anything
        _send(answers, {"broken": f"{type(failure).__name__}: {error_text(failure)}"})
        return
    if not (line := orders.readline()):
        return
    threading.Thread(target=_watch_parent, args=(orders,), daemon=True).start()
    job = from_json(json.loads(line))
    if job.request.model or job.request.optimizer or job.request.trust:
        with suppress(OSError):
            # The user's own modules may be there, but must not replace installed ones.
            sys.path.append(os.getcwd())
    answer(module, job, answers)
    # The parent ends the processes that the model started together with this one, so this one must not exit.
    threading.Event().wait()


def _import_quickly(adapter: str, package: str) -> ModuleType:
    """Import an adapter and its framework without garbage collections."""
    # A framework's import creates many objects, which live as long as the process. Each collection would
    # visit all of them and free nothing; ``freeze`` exempts them from later collections, too.
    gc.disable()
    try:
        module = import_module(adapter)
        import_module(package)
        import_module(".prediction", __package__)
        return module
    finally:
        gc.freeze()
        gc.enable()


# The two stages -------------------------------------------------------------------------------------


def answer(module: ModuleType, job: PredictionJob, answers: BinaryIO) -> None:
    """Load and run the checkpoint of a job, and send the result of both stages."""
    request = job.request
    with plain_data_only(is_trusted=request.trust) as refusals:
        loaded = _load(module, job, answers, refusals)
    if loaded is None:
        _send_stage(answers, "predict", "it was not loaded", is_skipped=True)
        return
    # The user's own model may read anything when it runs.
    with plain_data_only(is_trusted=request.trust or request.model is not None) as refusals:
        _predict(loaded, module, job, answers, refusals)


def _load(
    module: ModuleType, job: PredictionJob, answers: BinaryIO, refusals: Sequence[str]
) -> Loaded | None:
    """Load a checkpoint and send the result; return None if it has errors."""
    try:
        loaded: Loaded = module.LOADERS[job.loader](job)
    except LoadFailed as failure:
        findings = _refusal_findings(refusals) or failure.findings
        more = f"; {counted(len(findings) - 1, 'more finding')}" if len(findings) > 1 else ""
        _send_stage(answers, "load", f"{findings[0].placed_message}{more}", findings)
    except BaseException as failure:  # noqa: BLE001 - other people's code may raise anything
        findings = _refusal_findings(refusals) or [error_finding(failure, "load-failed")]
        _send_stage(answers, "load", str(findings[0].message), findings)
    else:
        _send_stage(answers, "load", loaded.detail, loaded.findings)
        return None if has_errors(loaded.findings) else loaded
    return None


def _predict(
    loaded: Loaded, module: ModuleType, job: PredictionJob, answers: BinaryIO, refusals: Sequence[str]
) -> None:
    """Run a model and send the result."""
    from ckpttool.predict.prediction import NoInputs, predict

    def load_again() -> Loaded:
        """Load the checkpoint as before, but with another seed for random values."""
        with plain_data_only(is_trusted=job.request.trust):
            again = replace(job, request=replace(job.request, seed=job.request.seed + 1))
            loaded: Loaded = module.LOADERS[job.loader](again)
            return loaded

    try:
        detail, findings = predict(loaded, job, load_again)
    except NoInputs as failure:
        _send_stage(answers, "predict", str(failure), is_skipped=True)
    except BaseException as failure:  # noqa: BLE001 - other people's code may raise anything
        findings = _refusal_findings(refusals) or [error_finding(failure, "predict-failed")]
        _send_stage(answers, "predict", str(findings[0].message), findings)
    else:
        _send_stage(answers, "predict", detail, findings)


def _refusal_findings(refusals: Sequence[str]) -> list[Finding]:
    """Return the first refusal of the guard, which is more precise than the framework's error about it."""
    return [error("load-refused", refusals[0])] if refusals else []


# Pipes ----------------------------------------------------------------------------------------------


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the original stdin and stdout; replace them by an empty file and by stderr."""
    # Frameworks print from C++ as well, past ``sys.stdout``. So the descriptors themselves are exchanged: no
    # print gets between the answers, and code that reads stdin gets its end instead of the job.
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders, answers


def _send(answers: BinaryIO, message: dict[str, object]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def _send_stage(
    answers: BinaryIO, stage: str, detail: str, findings: Sequence[Finding] = (), *, is_skipped: bool = False
) -> None:
    rows = [(one.code, one.severity.value, one.message, one.where) for one in findings]
    _send(answers, {"stage": stage, "detail": detail, "findings": rows, "is_skipped": is_skipped})


def _watch_parent(orders: BinaryIO) -> None:
    """End this process and its group when the pipe from the command is closed."""
    # After the job, the command writes nothing and keeps the pipe open. So the end of the read means that the
    # command has closed it, or has been killed. On Linux the supervisor notices as well.
    try:
        orders.read()
    except (OSError, ValueError):  # the model's code closed it, and the parent may be there
        return
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


# The supervisor -------------------------------------------------------------------------------------


def _supervise() -> None:
    """Continue in a forked process; the caller's process becomes its supervisor, and exits as it does."""
    if not sys.platform.startswith("linux"):
        return
    # The supervisor gets SIGTERM when the command's thread ends, and adopts descendants that lose their
    # parent. Both settings come before the fork, so that no process can be missed. The worker is killed when
    # the supervisor ends; if that happened before the worker asked for it, its parent is another one by then.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    if worker := os.fork():
        _wait_for_worker(worker)
    os.setsid()  # a signal to its own group doesn't reach the supervisor
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    """Set a property of this process in the Linux kernel."""
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _wait_for_worker(worker: int) -> NoReturn:
    # The supervisor reaps whatever it has adopted, and ends everything once the worker has ended.
    signal.signal(signal.SIGTERM, lambda *_: _end_all(-signal.SIGTERM))
    nothing = os.open(os.devnull, os.O_RDWR)
    for pipe in range(3):  # the worker's alone, so that they are closed when it ends
        os.dup2(nothing, pipe)
    while True:
        with suppress(ChildProcessError):
            pid, status = os.waitpid(-1, 0)
            if pid == worker:
                _end_all(os.waitstatus_to_exitcode(status))


def _end_all(code: int) -> NoReturn:
    """End all descendants, then this process: with a status, or by a signal if the code is negative."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A process may fork while it is being killed, so this is repeated until none is left. A process that
    # waits for a broken disk can't be killed: hence the limit.
    until = time.monotonic() + _KILL_TIMEOUT
    while _end_descendants() and time.monotonic() < until:
        time.sleep(_POLL)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's core dump is the useful one
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _end_descendants() -> bool:
    """Kill all descendants, reap the dead ones, and return whether any is left."""
    for pid in list(process_tree(os.getpid()))[1:]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
