"""Proofs that attacks work in their frameworks, in processes that import those.

``python -m tests.security.truth GROUP`` proves files: it reads lines of LOADER, PATH, DIRECTORY and ALONE,
with tabs between them. ``python -m tests.security.PROGRAMS DIRECTORY`` writes and proves attacks that only a
framework can write. Both print a line of JSON for each.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

GROUPS = {
    "torch": (
        "pickle",
        "pickles",
        "torch",
        "torchscript",
        "numpy",
        "numpys",
        "dcp",
        "dcp_values",
        "joblib",
        "exported",
    ),
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
        "numpy.testing", "distutils", "logging.handlers", "torch.export", "joblib",
    ),
    "keras": ("tensorflow", "keras", "tf_keras"),
    "paddle": ("paddle",),
}  # fmt: skip
ROOT = Path(__file__).parents[2]
SECONDS, SECONDS_OF_ONE = 900, 30
BYTES_ALONE = 6 << 30
SECONDS_OF_WORK, BYTES_OF_WORK = 8, 3 << 30
"""What a model of a few kilobytes may take to be loaded."""
DOES_HARM = ("ran", "hang", "signal")
"""First words of the ends of attacks that work."""
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


def load_dcp_values(path: str) -> None:
    from torch.distributed import checkpoint

    checkpoint.load({"x": None}, checkpoint_id=str(Path(path).parent))


def load_joblib(path: str) -> None:
    import joblib

    joblib.load(path)


def load_exported(path: str) -> None:
    import torch

    torch.export.load(path)


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


def load_keras_reads(path: str) -> bool:
    return _opens_what_is_beside(path, load_keras)


def load_tf_keras_reads(path: str) -> bool:
    return _opens_what_is_beside(path, load_tf_keras)


def _opens_what_is_beside(path: str, load: Callable[[str], None]) -> bool:
    """Load a file, and return whether that opened the file beside it."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    (Path(path).parent / READ).write_text("one\ntwo\n")
    libc.inotify_add_watch(watch, os.fsencode(Path(path).parent / READ), IN_OPEN)
    with os.fdopen(watch, "rb", buffering=0) as events:
        with contextlib.suppress(Exception):  # hostile files raise anything
            load(path)
        return bool(events.read(4096))


def load_keras_works(path: str) -> bool:
    return _is_endless(path, "keras")


def load_tf_keras_works(path: str) -> bool:
    return _is_endless(path, "tf_keras")


def _is_endless(path: str, loader: str) -> bool:
    """Return whether loading a file takes all of a child's time or memory."""
    signal.alarm(0)
    code = f"import {loader}, tests.security.truth as t; t.load_in_limits({loader!r}, {path!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it has imported the framework
        try:
            return child.wait(SECONDS_OF_WORK) != 0
        except subprocess.TimeoutExpired:
            child.kill()
            return True


def load_in_limits(loader: str, path: str) -> None:
    """Load a file with little memory to spare, and end with 1 if that isn't enough."""
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


LOADERS: dict[str, Callable[[str], object]] = {
    loader: globals()[f"load_{loader}"] for loaders in GROUPS.values() for loader in loaders
}


class Attack(NamedTuple):
    """A file or model, and how it is loaded and used."""

    name: str
    path: Path
    load: Callable[[], object]
    """Returns True if it did what only can be noticed while it loads, such as reading a file outside."""
    directory: Path
    """Where the payload makes a file."""
    is_alone: bool = False
    """Whether it changes or ends the interpreter, or waits for its end: it is loaded in a forked process."""


class End(NamedTuple):
    """``ran``, ``hang`` or ``signal NUMBER`` of an attack that works; else the error, or ``loaded``."""

    name: str
    path: Path
    how: str

    @property
    def does_harm(self) -> bool:
        return self.how.split(" ", 1)[0] in DOES_HARM


def prove_all(attacks: Iterable[Attack], *, seconds: int = SECONDS_OF_ONE) -> None:
    """Print how each attack ended."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGALRM, partial(_give_up, seconds))
    gc.freeze()  # a fork then copies little
    for attack in attacks:
        before = set(attack.directory.iterdir())
        how = _in_fork(attack, seconds) if attack.is_alone else _loaded(attack, seconds)
        has_run = set(attack.directory.iterdir()) - before
        print(json.dumps([attack.name, str(attack.path), "ran" if has_run else how]), file=answers)


def tell_all(attacks: Iterable[Attack]) -> None:
    """Print the attacks as `prove_all` does, without loading any."""
    for attack in attacks:
        print(json.dumps([attack.name, str(attack.path), "written"]))


def _give_up(seconds: int, signum: int, frame: object) -> None:
    raise TimeoutError(f"more than {seconds} seconds")


def _loaded(attack: Attack, seconds: int) -> str:
    """Load an attack, and return how that ended."""
    os.chdir(attack.path.parent)
    signal.alarm(seconds)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = attack.load()
    except BaseException as error:  # noqa: BLE001 (hostile files raise anything)
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        sys.settrace(None)
        sys.setprofile(None)
        signal.alarm(0)
    if found is True:
        (attack.directory / "noticed").touch()
    return "loaded"


def _in_fork(attack: Attack, seconds: int) -> str:
    """Load an attack in a forked process, which ends as an interpreter ends."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # compiled code doesn't return to a handler of Python's
        resource.setrlimit(resource.RLIMIT_AS, (BYTES_ALONE, BYTES_ALONE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(writing, _loaded(attack, seconds).encode(errors="replace"))
        _end(seconds)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    number = os.WTERMSIG(os.waitpid(child, 0)[1])
    return said or ("hang" if number == signal.SIGALRM else f"signal {number}")


def _end(seconds: int) -> None:
    """Run what waits for the interpreter's end, then end without torch's own farewells."""
    import atexit
    import threading

    signal.alarm(seconds)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(2)
    with contextlib.redirect_stderr(io.StringIO()):
        atexit._run_exitfuncs()
    os._exit(0)


def main(group: str) -> None:
    for module in PRELOADED[group]:
        importlib.import_module(module)
    orders = [line.split("\t") for line in sys.stdin.read().splitlines()]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    prove_all(
        Attack(loader, Path(path), partial(LOADERS[loader], path), Path(directory), alone == "alone")
        for loader, path, directory, alone in orders
    )


# The process that asks ------------------------------------------------------------------------------


def load_all(orders: Iterable[tuple[str, Path, Path, bool]], modules: Path) -> list[str]:
    """Return how each load ended; one process a framework loads all files that are its own."""
    orders = list(orders)
    ends: dict[tuple[str, Path, Path, bool], str] = {}
    for group, loaders in GROUPS.items():
        own = [order for order in orders if order[0] in loaders]
        lines = [f"{loader}\t{path}\t{made}\t{'alone' * alone}\n" for loader, path, made, alone in own]
        answers: list[str] = []
        while len(answers) < len(own):  # behind a file that ends the process, the rest goes on
            status, new = run("truth", group, stdin="".join(lines[len(answers) :]), cwd=modules)
            answers += [end.how for end in ends_in(new)]
            if len(answers) < len(own):
                assert status < 0
                answers.append(f"signal {-status}")
        ends.update(zip(own, answers, strict=True))
    return [ends[order] for order in orders]


def ends_in(answers: str) -> list[End]:
    """Return what `prove_all` printed."""
    return [End(name, Path(path), how) for name, path, how in map(json.loads, answers.splitlines())]


def run(module: str, *arguments: str, cwd: Path, stdin: str = "") -> tuple[int, str]:
    """Run a module of these tests, which may die of a signal but not fail; return its status and output."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(cwd),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.security.{module}", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
        cwd=cwd,
        check=False,
    )
    assert done.returncode <= 0, done.stderr[-3000:]
    return done.returncode, done.stdout


if __name__ == "__main__":
    main(sys.argv[1])
