"""Runs training jobs and ckpttool in children of one process, in which torch is imported once.

Usage: ``python -m tests.runs.pruning.fork_server SOCKET [MODULE …]``, with further modules to import once.
``client`` is the command on the PATH of jobs: it hands over its arguments, environment and open files,
passes signals on, and ends as the child does.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

MOST = 1 << 20

CLIENT = """#!{python} -ISE
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = [{program!r}, *sys.argv[1:]], os.getcwd(), dict(os.environ)
files = array.array("i", [0, 1, 2])
server.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
child = int(server.recv(64))
signal.signal(signal.SIGUSR1, lambda *_: os.kill(child, signal.SIGUSR1))
server.sendall(b"go")
status = int(server.recv(64))
os._exit(status)
"""


def client(program: str, address: str) -> str:
    """Return a program that runs another one on the server."""
    return CLIENT.format(python=os.path.realpath(sys.executable), program=program, address=address)


def serve(address: str, modules: Sequence[str] = ()) -> None:
    """Run what clients ask for, until the process that started this one ends."""
    _import_all()
    for name in modules:
        importlib.import_module(name)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        asked, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            _answer(asked)
        asked.close()


def _import_all() -> None:
    """Do once, for all children, what imports the most of what they use."""
    import torch

    from ckpttool.cli import run

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w") as silence:
        weights = torch.nn.Parameter(torch.zeros(2))
        weights.sum().backward()
        optimizer = torch.optim.Adam([weights])
        optimizer.step()
        for step in (1, 2):
            path = os.path.join(directory, f"step_{step}.pt")
            torch.save({"step": step, "loss": 0.5, "model": {"weights": weights}}, path)
            torch.load(path, weights_only=True)
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            best = ["--best", "loss", "--mode", "min"]
            rules = ["--keep", "1", "--keep-best", "1", "--metric", "loss", "--mode", "min"]
            for arguments in (["latest", *best], ["prune", "-n", *rules], ["pin", "--list"]):
                run([*arguments, directory])


def _answer(asked: socket.socket) -> None:
    data, ancillary, _, _ = asked.recvmsg(MOST, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    files = array.array("i")
    files.frombytes(ancillary[0][2])
    arguments, directory, environment = json.loads(data)
    child = os.fork()
    if child == 0:
        asked.recv(2)
        asked.close()
        for number, descriptor in enumerate(files):
            os.dup2(descriptor, number)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        os._exit(_run(arguments))
    asked.sendall(str(child).encode())
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):  # the job was killed with its training
        asked.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def _run(arguments: list[str]) -> int:
    program, *rest = arguments
    try:
        if program == "ckpttool":
            from ckpttool.cli import run

            status = run(rest)
        else:
            _arrange(os.environ.get("DIE", ""))
            sys.argv = rest
            runpy.run_path(rest[0], run_name="__main__")
            status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - a child's own last words
        import traceback

        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _arrange(fault: str) -> None:
    """Let a training die at the K-th save, of which only a part gets to the disk; or behind its K-th step."""
    if not fault:
        return
    import torch

    kind, count, *part = fault.split(":")
    left = int(count)
    save, step = torch.save, torch.optim.Adam.step

    def dying_save(state: Any, path: str) -> None:
        nonlocal left
        left -= 1
        save(state, path)
        if left == 0:
            with open(path, "r+b") as file:
                file.truncate(int(os.path.getsize(path) * float(part[0])))
            _die(kind)

    def dying_step(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        result = step(self, *given, **named)
        if left == 0:
            _die(kind)
        return result

    if kind in ("save", "all"):
        torch.save = dying_save
    else:
        torch.optim.Adam.step = dying_step


def _die(kind: str) -> None:
    if kind == "signal":
        os.kill(int(os.environ["JOB"]), signal.SIGUSR1)
        return
    if kind == "all":
        os.killpg(int(os.environ["JOB"]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
