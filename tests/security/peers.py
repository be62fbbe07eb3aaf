"""Recall and false alarms of five scanners over the same files, in one run: ``make peers``.

The scanners live in an environment of their own, whose Python is the argument. Each judges all files in one
process through its library; a file that it fails on counts as neither found nor called safe.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.security.corpus import Corpus
from tests.security.honest import write
from tests.security.truth import load_all

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures" / "files"
NOT_HONEST = {"hostile", "hdf5-hostile", "keras-unsafe"}
SECONDS = 3600
SILENT = {
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "NO_ANALYTICS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""modelaudit sends telemetry unless the first is set."""

PREAMBLE = """
import contextlib, io, logging, os, sys, zipfile
logging.disable(logging.CRITICAL)
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def files_of(path):
    if not os.path.isdir(path):
        return [path]
    return [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
"""
ENDING = """
for line in sys.stdin.read().splitlines():
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            said = judge(line)
    except BaseException as error:
        said = "failed"
    print(said, file=answers)
os._exit(0)
"""
PEERS = {
    "picklescan": """
from picklescan.scanner import scan_directory_path, scan_file_path
def judge(path):
    found = scan_directory_path(path) if os.path.isdir(path) else scan_file_path(path)
    if found.issues_count:
        return "unsafe"
    return "failed" if found.scan_err or not found.scanned_files else "safe"
""",
    "modelscan": """
from modelscan.modelscan import ModelScan
def judge(path):
    found = ModelScan().scan(path)
    if found["summary"]["total_issues"]:
        return "unsafe"
    return "failed" if found["errors"] or not found["summary"]["scanned"]["total_scanned"] else "safe"
""",
    "fickling": """
import fickling
def judge(path):
    said = []
    for file in files_of(path):
        scan = fickling.scan_zip_archive if zipfile.is_zipfile(file) else fickling.scan_file
        found = scan(file, graceful=True)
        found = found.values() if isinstance(found, dict) else [found]
        said += ["unsafe" if not one.is_safe else "failed" if one.errors else "safe" for one in found]
    return next((word for word in ("unsafe", "failed", "safe") if word in said), "failed")
""",
    "modelaudit": """
from modelaudit.core import scan_model_directory_or_file
def judge(path):
    found = scan_model_directory_or_file(path, cache_enabled=False)
    if any(issue.severity.value in ("critical", "warning") for issue in found.issues):
        return "unsafe"
    return "failed" if found.has_errors or not found.files_scanned else "safe"
""",
}
OURS = """
import json
from ckpttool.cli import run
def judge(path):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(["verify", "--quick", "--json", path])
    found = {one["safety"] for one in json.loads(out.getvalue())["checkpoints"]} if out.getvalue() else set()
    return next((word for word in ("unsafe", "unknown", "safe") if word in found), "failed")
"""


@dataclass(frozen=True)
class Score:
    """What one scanner said of the hostile and of the honest files; counts, and seconds."""

    hostile: dict[str, int]
    honest: dict[str, int]
    seconds: float


def scored(python: str, script: str, hostile: list[Path], honest: list[Path]) -> Score:
    """Let one scanner judge all files in one process."""
    begun = time.monotonic()
    done = subprocess.run(
        [python, "-c", PREAMBLE + script + ENDING],
        input="".join(f"{path}\n" for path in (*hostile, *honest)),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **SILENT, "PYTHONPATH": str(ROOT) if script is OURS else ""},
        check=False,
    )
    said = done.stdout.split()
    said += ["failed"] * (len(hostile) + len(honest) - len(said))  # what came behind a crash
    seconds = time.monotonic() - begun
    return Score(_counts(said[: len(hostile)]), _counts(said[len(hostile) :]), seconds)


def _counts(words: Iterable[str]) -> dict[str, int]:
    counts = dict.fromkeys(("unsafe", "unknown", "safe", "failed"), 0)
    for word in words:
        counts[word] += 1
    return counts


HEAD = (
    f"{'':12}{'recall':>9}{'unsafe':>8}{'unknown':>9}{'called safe':>13}{'failed':>8}"
    f"{'false alarms':>14}{'seconds':>9}"
)


def row(name: str, score: Score) -> str:
    """Return the figures of one scanner; recall is the share of hostile files that it calls unsafe."""
    found = score.hostile
    return (
        f"{name:12}{found['unsafe'] / sum(found.values()):>9.1%}{found['unsafe']:>8}{found['unknown']:>9}"
        f"{found['safe']:>13}{found['failed']:>8}{score.honest['unsafe']:>14}{score.seconds:>9.1f}"
    )


def main(python: str) -> None:
    """Write the files, prove the hostile ones, and print the table."""
    with tempfile.TemporaryDirectory() as directory:
        corpus = Corpus(Path(directory) / "hostile")
        cases = [
            case
            for case in corpus.all(every=bool(os.environ.get("CKPTTOOL_EVERY_ATTACK")))
            if case.is_provable
        ]
        load_all([case.order for case in cases], corpus.modules)
        proven = [case for case in cases if case.has_run]
        for case in proven:
            for made in case.marker.parent.iterdir():
                made.rename(corpus.root / f"ran-{case.number}-{made.name}")
        honest = [*write(Path(directory) / "honest"), *_fixtures()]
        paths = [case.judged for case in proven]
        print(f"{len(paths)} hostile files, proven in their frameworks; {len(honest)} honest files\n\n{HEAD}")
        print(row("ckpttool", scored(sys.executable, OURS, paths, honest)), flush=True)
        for name, script in PEERS.items():
            try:
                print(row(name, scored(python, script, paths, honest)), flush=True)
            except subprocess.TimeoutExpired:
                print(f"{name:12} took more than {SECONDS} seconds", flush=True)
        ran = [case.name for case in proven if case.has_run]
        print(f"\n{len(ran)} payloads were run by a scanner" + "".join(f"\n  {name}" for name in ran))


def _fixtures() -> list[Path]:
    """Return the fixtures that frameworks have written."""
    return [
        entry
        for room in sorted(FIXTURES.iterdir())
        if room.is_dir() and room.name not in NOT_HONEST
        for entry in sorted(room.iterdir())
        if not entry.name.endswith(".expected.json") and entry.name != "unsafe"
    ]


if __name__ == "__main__":
    main(sys.argv[1])
