"""``python -m ckpttool``, and the console script."""

from __future__ import annotations

import gc
import io
import sys
import traceback


def main() -> None:
    """Run the command line and exit with its status.

    Imports leave no garbage, and checkpoints are large trees that live until the end: looking for cycles
    among them, at the start, at work or at the end, costs more than it frees.
    """
    gc.disable()
    try:
        from ckpttool.cli import run
        from ckpttool.cli.output import fill_gaps

        fill_gaps()
        gc.enable()
        gc.set_threshold(100_000, 50, 100)
        status = run()
    except KeyboardInterrupt:  # later ones are answered by ``run``
        print("ckpttool: error: interrupted", file=sys.stderr or io.StringIO())
        sys.exit(130)
    except Exception:  # noqa: BLE001 - Python's own status is 1, which means something else here
        from ckpttool.core.urls import without_signatures

        print(without_signatures(traceback.format_exc()), file=sys.stderr or io.StringIO())
        sys.exit(2)
    gc.freeze()
    sys.exit(status)


if __name__ == "__main__":
    main()
