"""``python watched_child.py PLACES``: do jobs as the child does, and tell what was unpickled for each.

Orders come a line each: ``{"job": …}`` is done and answered with its stages and what the interpreter was
asked for meanwhile; ``{"run": CODE, "names": …}`` is run, as whoever loads a file without ckpttool would;
``{"adapters": FRAMEWORKS}`` names all loaders.
"""

from __future__ import annotations

import importlib._bootstrap_external as importing
import io
import json
import os
import sys
import zipfile
from importlib import import_module
from pathlib import Path

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path[:0] = json.loads(sys.argv[1])

from ckpttool.predict.child import answer  # noqa: E402 - found by the line above
from ckpttool.predict.request import from_json  # noqa: E402
from ckpttool.predict.run import FRAMEWORKS  # noqa: E402

asked: list[str] = []


def watch(event, args) -> None:
    """Note each name that a pickle looks up, and each object that marshal makes for any but an import."""
    if event == "pickle.find_class":
        asked.append(f"{args[0]}.{args[1]}")
    elif event == "marshal.loads" and sys._getframe(1).f_globals is not vars(importing):
        asked.append("marshal")


sys.addaudithook(watch)


class Evil:
    """An object whose pickle makes a directory."""

    def __init__(self, mark) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def rewrite(path, ending, change) -> None:
    """Change one member of a zip file, the one whose name ends so."""
    with zipfile.ZipFile(path) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    (name,) = (one for one in members if one.endswith(ending))
    members[name] = change(members[name])
    with zipfile.ZipFile(path, "w") as archive:
        for one, data in members.items():
            archive.writestr(one, data)


def module_beside(mark) -> str:
    """Write a module that makes a directory when it is imported, and return its name."""
    name = f"beside_{mark.parent.name}"
    (mark.parent / f"{name}.py").write_text(f"import os; os.mkdir({str(mark)!r})")
    sys.path.append(str(mark.parent))
    return name


def adapters(families):
    """Return the loaders of some frameworks, those of state dicts with each of their readers."""
    for name in families:
        for loader in import_module(FRAMEWORKS[name].module).LOADERS:
            is_read = (name, loader) == ("torch", "state")
            readers = import_module("ckpttool.predict.torch_state")._READERS if is_read else (None,)
            yield from ((name, loader, reader) for reader in readers)


def done(order):
    """Do one job, and return what a child would tell, with what was asked for."""
    job = from_json(order)
    module = import_module(FRAMEWORKS[job.framework].module)
    import_module(FRAMEWORKS[job.framework].package)
    if job.framework == "paddle":
        module.paddle.disable_static()
    asked.clear()
    told = io.BytesIO()
    answer(module, job, told)
    stages = [json.loads(line) for line in told.getvalue().splitlines()]
    return {"stages": stages, "asked": list(asked)}


def run(order):
    """Run some code, and return what it raised, if anything."""
    names = {key: Path(value) for key, value in order["names"].items()}
    try:
        exec(order["run"], {**globals(), **names})
    except Exception as failure:  # noqa: BLE001 - a framework that ran a payload may raise anything
        return {"raised": f"{type(failure).__name__}: {failure}"[:2000]}
    return {"raised": None}


for line in sys.stdin:
    order = json.loads(line)
    if "job" in order:
        answered = done(order["job"])
    else:
        answered = run(order) if "run" in order else list(adapters(order["adapters"]))
    print(json.dumps(answered), file=answers, flush=True)
