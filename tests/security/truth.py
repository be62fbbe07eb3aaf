"""The real loaders, in a process of their own: which of many files do run their payload?

``python -m tests.security.truth GROUP`` reads lines ``LOADER <tab> PATH <tab> ALONE`` and loads each file,
in a forked process those that change the interpreter or wait for its end. It prints how each load ended; the
marker files tell the rest.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

GROUPS = {
    "torch": ("pickle", "pickles", "torch", "torchscript", "numpy", "numpys", "dcp"),
    "keras": (
        "keras",
        "tf_keras",
        "keras_fits",
        "keras_reads",
        "tf_keras_reads",
        "keras_works",
        "tf_keras_works",
    ),
    "paddle": ("paddle",),
}
PRELOADED = {
    "torch": (
        "torch", "numpy", "torch.fx", "torch.hub", "torch.package", "torch.utils.data",
        "torch.distributed.checkpoint", "sympy", "yaml", "h5py", "safetensors.numpy", "numpy.f2py",
        "numpy.testing", "distutils", "logging.handlers",
    ),
    "keras": ("tensorflow", "keras", "tf_keras"),
    "paddle": ("paddle",),
}  # fmt: skip
SECONDS, SECONDS_OF_ONE = 900, 10
SECONDS_OF_WORK, BYTES_OF_WORK = 8, 3 << 30
"""What a model of a few kilobytes may take to be loaded."""
IN_OPEN = 0x20
READ = "read.txt"
"""File in a case's directory that a loader shall not read."""


def load_pickle(path: str) -> None:
    with open(path, "rb") as file:
        pickle.load(file)


def load_pickles(path: str) -> None:
    with open(path, "rb") as file:
        while file.peek(1):
            pickle.load(file)


def load_torch(path: str) -> None:
    import torch

    torch.load(path, weights_only=False)


def load_torchscript(path: str) -> None:
    import torch

    model = torch.jit.load(path)
    model(torch.zeros(1))


def load_numpy(path: str) -> None:
    import numpy as np

    loaded = np.load(path, allow_pickle=True)
    for name in getattr(loaded, "files", ()):
        loaded[name]


def load_numpys(path: str) -> None:
    import numpy as np

    with open(path, "rb") as file:
        while file.peek(1):
            np.load(file, allow_pickle=True)


def load_dcp(path: str) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    FileSystemReader(str(Path(path).parent)).read_metadata()


def load_paddle(path: str) -> None:
    import paddle

    paddle.load(path)


def load_keras(path: str) -> None:
    import numpy as np

    load_model("keras", path).predict(np.zeros((1, 4), "float32"), verbose=0)


def load_tf_keras(path: str) -> None:
    import numpy as np

    load_model("tf_keras", path).predict(np.zeros((1, 4), "float32"), verbose=0)


def load_keras_fits(path: str) -> None:
    import numpy as np

    zeros = np.zeros((1, 4), "float32")
    load_model("keras", path).fit(zeros, zeros, verbose=0)


def load_model(loader: str, path: str) -> Any:
    """Return a model of Keras 3 or 2, loaded without its safe mode."""
    options = {"safe_mode": False} if loader == "keras" or path.endswith(".keras") else {}
    return importlib.import_module(loader).models.load_model(path, **options)


def load_keras_reads(path: str) -> None:
    _mark_if_read(path, load_keras)


def load_tf_keras_reads(path: str) -> None:
    _mark_if_read(path, load_tf_keras)


def _mark_if_read(path: str, load: Callable[[str], None]) -> None:
    """Load a file, and make the marker if the file beside it has been opened."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    (Path(path).parent / READ).write_text("one\ntwo\n")
    libc.inotify_add_watch(watch, os.fsencode(Path(path).parent / READ), IN_OPEN)
    try:
        load(path)
    finally:
        with contextlib.suppress(BlockingIOError):
            if os.read(watch, 4096):
                marker_of(path).touch()
        os.close(watch)


def load_keras_works(path: str) -> None:
    _mark_if_endless(path, "keras")


def load_tf_keras_works(path: str) -> None:
    _mark_if_endless(path, "tf_keras")


def _mark_if_endless(path: str, loader: str) -> None:
    """Make the marker if loading a file takes all of a child's time or memory."""
    signal.alarm(0)
    code = f"import {loader}, tests.security.truth as t; t.load_in_limits({loader!r}, {path!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it has imported the framework
        try:
            if child.wait(SECONDS_OF_WORK) != 0:
                marker_of(path).touch()
        except subprocess.TimeoutExpired:
            child.kill()
            marker_of(path).touch()


def load_in_limits(loader: str, path: str) -> None:
    """Load a file with little memory to spare, and end with 1 if that isn't enough."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + BYTES_OF_WORK
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print("ready", flush=True)
    try:
        load_model(loader, path)
    except MemoryError:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 (hostile files raise anything)
        os._exit(int("OOM" in str(error) or "ResourceExhausted" in type(error).__name__))
    os._exit(0)


def marker_of(path: str) -> Path:
    """Return what the payload of a case makes: see `corpus.Corpus.place`."""
    directory = Path(path).parent
    return directory.parents[1] / "ran" / directory.name / "m"


LOADERS: dict[str, Callable[[str], None]] = {
    loader: globals()[f"load_{loader}"] for loaders in GROUPS.values() for loader in loaders
}


def outcome(loader: str, path: str) -> str:
    """Load a file, and say how that ended."""
    os.chdir(Path(path).parent)
    signal.alarm(SECONDS_OF_ONE)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            LOADERS[loader](path)
    except BaseException as error:  # noqa: BLE001 (hostile files raise anything)
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        sys.settrace(None)
        sys.setprofile(None)
        signal.alarm(0)
    return "loaded"


def in_fork(loader: str, path: str) -> str:
    """Load a file in a forked process, which ends as an interpreter ends."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        said = outcome(loader, path)
        os.write(writing, said.encode(errors="replace"))
        _end()
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return said or "the process died"


def _end() -> None:
    """Run what waits for the interpreter's end, then end without torch's own farewells."""
    import atexit
    import threading

    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(2)
    with contextlib.redirect_stderr(io.StringIO()):
        atexit._run_exitfuncs()
    os._exit(0)


def main(group: str) -> None:
    """Answer each line of stdin with one of stdout."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for module in PRELOADED[group]:
        importlib.import_module(module)
    signal.signal(signal.SIGALRM, _give_up)
    gc.freeze()  # a fork then copies little
    orders = [line.split("\t") for line in sys.stdin.read().splitlines()]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for loader, path, alone in orders:
        load = in_fork if alone == "alone" else outcome
        print(load(loader, path), file=answers)


def _give_up(signum: int, frame: object) -> None:
    raise TimeoutError(f"more than {SECONDS_OF_ONE} seconds")


def load_all(orders: Iterable[tuple[str, Path, bool]], modules: Path, root: Path) -> list[str]:
    """Return how each load ended; one process a framework loads all files that are its own."""
    orders = list(orders)
    ends: dict[tuple[str, Path, bool], str] = {}
    for group, loaders in GROUPS.items():
        own = [order for order in orders if order[0] in loaders]
        if own:
            ends.update(zip(own, _answers(group, own, modules, root), strict=True))
    return [ends[order] for order in orders]


def _answers(group: str, orders: list[tuple[str, Path, bool]], modules: Path, root: Path) -> list[str]:
    """Return one answer for each order; behind a file that ends the process, the rest goes on."""
    answers: list[str] = []
    while len(answers) < len(orders):
        status, new, errors = _answers_of_one_process(group, orders[len(answers) :], modules, root)
        if status > 0 or (status == 0 and len(answers) + len(new) != len(orders)):
            raise RuntimeError(f"the loaders of {group} ended with {status}: {errors[-2000:]}")
        answers += new
        if status < 0:
            answers.append(f"the process died of signal {-status}")
    return answers


def _answers_of_one_process(
    group: str, orders: list[tuple[str, Path, bool]], modules: Path, root: Path
) -> tuple[int, list[str], str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(modules)]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(modules),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.security.truth", group],
        input="".join(f"{loader}\t{path}\t{'alone' * alone}\n" for loader, path, alone in orders),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        cwd=modules,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


if __name__ == "__main__":
    main(sys.argv[1])
