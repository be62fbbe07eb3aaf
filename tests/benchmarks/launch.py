"""Run one command and write its exit status, times and peak resident memory as one line of JSON.

A child starts with the peak memory of the process that it is forked from. This one is started bare, as
``python -I -S launch.py RESULT ARGUMENT...``, so that the floor is the 9 MB of an empty interpreter instead
of the hundreds of a process that made the data.
"""

from __future__ import annotations

import os
import sys
import time

# The unit of ru_maxrss: bytes on macOS, KiB on Linux and the BSDs.
_RESIDENT_UNIT = 1 if sys.platform == "darwin" else 1024


def main(result: str, arguments: list[str]) -> None:
    """Run the command, found on PATH, and write the result; processor time includes its children."""
    started = time.perf_counter()
    pid = os.posix_spawnp(arguments[0], arguments, os.environ)
    _, status, usage = os.wait4(pid, 0)
    wall = time.perf_counter() - started
    processor = usage.ru_utime + usage.ru_stime
    resident = usage.ru_maxrss * _RESIDENT_UNIT
    with open(result, "w") as stream:
        stream.write(f"[{os.waitstatus_to_exitcode(status)}, {processor:.6f}, {wall:.6f}, {resident}]")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
