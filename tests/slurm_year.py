"""A year of batch jobs, by hand: 300 jobs of the Slurm page, each killed at a random moment or told to end.

Usage: ``python -m tests.slurm_year [JOBS [SEED]]``, in the project's directory. It ends with status 1 as soon
as a job resumes from another checkpoint than the newest that torch loads, as what is there after a prune is
not what the policy keeps, or as a loss differs from that of one long job.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.runs.pruning.slurm_jobs import Queue, fault, forking

STEPS_A_JOB = 14
"""More than a job makes on average before it is killed: the year never ends early."""


def main(jobs: int, seed: int) -> int:
    """Run the jobs; print what was seen."""
    random = Random(seed)
    begun = time.monotonic()
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with forking(directory) as address:
            killed, whole = (_queue(directory / name, address, jobs) for name in ("killed", "whole"))
            for number in range(jobs):
                told = fault(random)
                wrong = _wrong(killed, told, seen)
                if wrong:
                    print(f"job {number} ({told}): {wrong}")
                    return 1
            last, alone = killed.job(), whole.job()
            is_same = killed.losses() == whole.losses() and killed.pinned() == whole.pinned() != []
        seconds = time.monotonic() - begun
    print(f"{jobs} jobs, seed {seed}, {seconds:.0f} s: {dict(sorted(seen.items()))}")
    print(f"the last job: status {last.status} and {alone.status} of one long job, losses equal: {is_same}")
    return int(not (is_same and last.status == alone.status == 0))


def _queue(directory: Path, address: str, jobs: int) -> Queue:
    directory.mkdir()
    queue = Queue(directory, address)
    training = directory / "train.py"
    text = training.read_text()
    longer = text.replace("STEPS, EVERY = 60, 4", f"STEPS, EVERY = {jobs * STEPS_A_JOB}, 4")
    assert longer != text
    training.write_text(longer)
    return queue


def _wrong(queue: Queue, told: str, seen: Counter[str]) -> str | None:
    """Run a job; return what is wrong about it, or None."""
    kind = told.split(":")[0]
    expected = queue.newest()
    job = queue.job(told)
    if job.resumed != expected:
        return f"it resumed from {job.resumed}, not from {expected}\n{job.said}"
    if job.was_requeued == (kind == "all"):
        return f"it was{'' if job.was_requeued else ' not'} requeued\n{job.said}"
    intact = queue.intact()
    cut = [path for path in queue.saved() if path not in intact]
    seen[f"{kind}"] += 1
    seen["left cut short"] += bool(cut)
    seen["most files"] = max(seen["most files"], len(queue.saved()))
    if kind == "all":
        return None
    if {path.name for path in intact} != queue.kept():
        return f"{sorted(intact)} are there, and the policy keeps {queue.kept()}\n{job.said}"
    if len(cut) > 1 or (cut and cut[0] != queue.saved()[-1]):
        return f"cut short, and still there: {cut}\n{job.said}"
    return None


if __name__ == "__main__":
    sys.exit(main(*map(int, [*sys.argv[1:], *("300", "1")[len(sys.argv) - 1 :]])))
