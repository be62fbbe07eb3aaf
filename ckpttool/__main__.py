"""``python -m ckpttool``, and the console script."""

from __future__ import annotations

import gc
import io
import sys
import traceback


def main() -> None:
    """Run the command line and exit with its status."""
    # Imports leave no garbage, and checkpoints are large trees that live until the end: searching them for
    # cycles costs more than it frees. So the collector is off during imports, rare at work, and ``freeze``
    # spares the interpreter the last search at exit.
    gc.disable()
    try:
        from ckpttool.cli import run
        from ckpttool.cli.output import open_closed_descriptors

        open_closed_descriptors()
        gc.enable()
        gc.set_threshold(100_000, 50, 100)
        status = run()
    except KeyboardInterrupt:  # during imports; ``run`` handles later ones
        print("ckpttool: error: interrupted", file=sys.stderr or io.StringIO())
        sys.exit(130)
    except Exception:  # noqa: BLE001 - Python would exit with 1, which means that something was found
        from ckpttool.core.urls import without_signatures

        print(without_signatures(traceback.format_exc()), file=sys.stderr or io.StringIO())
        sys.exit(2)
    gc.freeze()
    sys.exit(status)


if __name__ == "__main__":
    main()
