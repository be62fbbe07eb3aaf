"""The child process itself: imports one framework, loads one checkpoint, runs it, and answers.

Orders arrive through what was its stdin, answers leave through what was its stdout, a line each; whatever the
framework or the model prints goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import BinaryIO

from ckpttool.core.report import Finding, error, has_errors
from ckpttool.core.text import counted
from ckpttool.predict.guard import plain_data_only
from ckpttool.predict.interface import Loaded, LoadFailed, error_finding, error_text
from ckpttool.predict.prediction import NoInputs, Reload, predict
from ckpttool.predict.request import PredictionJob, from_json


def main(name: str) -> None:
    """Import one of our modules, and a framework with it; read one job, answer it, and wait to be ended."""
    orders, answers = _private_pipes()
    # When memory ends, the system is to take this process first.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    try:
        module = _import_adapter(name)
    except BaseException as failure:  # noqa: BLE001 - a broken installation may raise anything
        _send(answers, {"broken": f"{type(failure).__name__}: {error_text(failure)}"})
        return
    if not (line := orders.readline()):
        return
    threading.Thread(target=_watch_parent, args=(orders,), daemon=True).start()
    job = from_json(json.loads(line))
    if job.request.model or job.request.optimizer or job.request.trust:
        with suppress(OSError):
            # The user's own modules may lie there, but nothing there may stand in for what is installed.
            sys.path.append(os.getcwd())
    answer(module, job, answers)
    # Whatever the model started is ended with this process, as long as this process is there.
    threading.Event().wait()


def _import_adapter(name: str) -> ModuleType:
    """Import a module; imports leave no garbage, and looking for it among all that they make takes long."""
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def answer(module: ModuleType, job: PredictionJob, answers: BinaryIO) -> None:
    """Load and run what a job says, and tell of both."""
    request = job.request
    with plain_data_only(is_trusted=request.trust) as refusals:
        loaded = _load(module.LOADERS[job.loader], job, answers, refusals)
    if loaded is not None:
        # A model of the user's may read what it likes when it runs.
        with plain_data_only(is_trusted=request.trust or request.model is not None) as refusals:
            _predict(loaded, job, answers, refusals, partial(_load_again, module, job))


def _load_again(module: ModuleType, job: PredictionJob) -> Loaded:
    """Load it as it was loaded before; what it draws at random, it draws otherwise."""
    with plain_data_only(is_trusted=job.request.trust):
        again = replace(job, request=replace(job.request, seed=job.request.seed + 1))
        loaded: Loaded = module.LOADERS[job.loader](again)
        return loaded


def _load(
    loader: Callable[[PredictionJob], Loaded], job: PredictionJob, answers: BinaryIO, refusals: Sequence[str]
) -> Loaded | None:
    try:
        loaded = loader(job)
    except LoadFailed as failure:
        findings = _refusal_findings(refusals) or failure.findings
        place = f"{findings[0].where}: " if findings[0].where else ""
        more = f"; {counted(len(findings) - 1, 'more finding')}" if len(findings) > 1 else ""
        _send_stage(answers, "load", f"{place}{findings[0].message}{more}", findings)
    except BaseException as failure:  # noqa: BLE001 - other people's code may raise anything
        findings = _refusal_findings(refusals) or [error_finding(failure, "load-failed")]
        _send_stage(answers, "load", findings[0].message, findings)
    else:
        _send_stage(answers, "load", loaded.detail, loaded.findings)
        if not has_errors(loaded.findings):
            return loaded
    _send_stage(answers, "predict", "it was not loaded", is_skipped=True)
    return None


def _refusal_findings(refusals: Sequence[str]) -> list[Finding]:
    """Return the first refusal of the guard, which says more than whatever the framework made of it."""
    return [error("load-refused", refusals[0])] if refusals else []


def _predict(
    loaded: Loaded, job: PredictionJob, answers: BinaryIO, refusals: Sequence[str], load_again: Reload
) -> None:
    try:
        detail, findings = predict(loaded, job, load_again)
    except NoInputs as failure:
        _send_stage(answers, "predict", str(failure), is_skipped=True)
    except BaseException as failure:  # noqa: BLE001 - other people's code may raise anything
        findings = _refusal_findings(refusals) or [error_finding(failure, "predict-failed")]
        _send_stage(answers, "predict", findings[0].message, findings)
    else:
        _send_stage(answers, "predict", detail, findings)


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return what were stdin and stdout; from now on prints go to stderr, and nothing is to be read."""
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
    """End this process when its orders end: whoever started it is gone."""
    try:
        orders.read()
    except (OSError, ValueError):  # the model's code closed it, and the parent may be there
        return
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and what it started
    os._exit(1)
