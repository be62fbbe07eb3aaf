"""``python -m ckpttool``, and the console script."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line and exit with its status.

    Imports leave no garbage, and checkpoints are large trees that live until the end: looking for cycles
    among them, at the start, at work or at the end, costs more than it frees.
    """
    gc.disable()
    try:
        from ckpttool.cli import run
    except KeyboardInterrupt:  # later ones are answered by ``run``
        print("ckpttool: error: interrupted", file=sys.stderr)
        sys.exit(130)
    gc.enable()
    gc.set_threshold(100_000, 50, 100)
    status = run()
    gc.freeze()
    sys.exit(status)


if __name__ == "__main__":
    main()
