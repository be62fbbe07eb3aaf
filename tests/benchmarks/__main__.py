"""``python -m tests.benchmarks``: measure, print the table, exit 1 where a bar is missed or not measured."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from tests.benchmarks.claims import FULL, QUICK
from tests.benchmarks.earlier import against, earlier_tree
from tests.benchmarks.groups import groups
from tests.benchmarks.measure import measure_in_turn
from tests.benchmarks.report import dumps, markdown, print_table
from tests.benchmarks.rows import Row, imports_rows, row

_FOLDER = "ckpttool-benchmarks-"
_INTERRUPTED = 130
_IMPORTS = "imports"


def main() -> int:
    """Run the benchmarks and return the exit status."""
    options = _options()
    # Ended from outside, the data goes as well: gigabytes lie in the temporary folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    notes = Console(stderr=True)
    try:
        rows = list(_rows(options, notes))
    except KeyboardInterrupt:
        notes.print("interrupted; the data is removed")
        return _INTERRUPTED
    if options.markdown:
        print(markdown(rows))
    else:
        print_table(rows)
    if options.json is not None:
        options.json.write_text(dumps(rows), encoding="utf-8")
    missed, unmeasured = sum(row.is_met is False for row in rows), sum(row.is_unmeasured for row in rows)
    untold = f", {unmeasured} not measured" if unmeasured else ""
    notes.print(
        f"{missed} of {sum(row.is_met is not None or row.is_unmeasured for row in rows)} bars missed{untold}"
    )
    if options.size == "quick" and options.against is None:
        notes.print("the bars are for the whole size: quick never fails")
        return 0
    return int(missed + unmeasured > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "size",
        choices=["whole", "quick"],
        nargs="?",
        default="whole",
        help="quick: small data, three minutes",
    )
    parser.add_argument(
        "--against", metavar="REV", help="compare with ckpttool as it was at a commit, instead of with peers"
    )
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help="take the median of N [default: 5; quick: 3]"
    )
    names = [*(make.__name__ for make in groups(FULL)), _IMPORTS]
    parser.add_argument("--only", choices=names, metavar="NAME", help=f"run one of {', '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table for docs/background/performance.md"
    )
    return parser.parse_args()


def _positive(text: str) -> int:
    """Return a number of rounds; without any there is no median."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rounds")
    return int(text)


def _rows(options: argparse.Namespace, notes: Console) -> Iterator[Row]:
    """Yield the rows of each group; its data is made right before and removed right behind."""
    scale, rounds = (QUICK, 3) if options.size == "quick" else (FULL, 5)
    rounds = options.rounds or rounds
    with ExitStack() as stack:
        tree = None if options.against is None else stack.enter_context(earlier_tree(options.against))
        for make in groups(scale):
            if options.only not in (None, make.__name__):
                continue
            with TemporaryDirectory(prefix=_FOLDER) as folder:
                notes.print(f"{make.__name__}: making data")
                group = make(Path(folder), scale)
                group = group if tree is None else against(group, tree)
                notes.print(f"{make.__name__}: {len(group.commands)} commands, {rounds} rounds")
                measured = measure_in_turn(group.commands, rounds)
                yield from (row(claim, measured, group.skipped) for claim in group.claims)
    if options.only in (None, _IMPORTS) and options.against is None:
        with TemporaryDirectory(prefix=_FOLDER) as folder:
            yield from imports_rows(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
