"""Directories of checkpoints over time: what is there, which is newest, and which can go.

``surveying`` finds checkpoints and groups them into series: one directory, one format, one name once its
fields are blanked, weights of the same names and shapes. ``members`` orders each by epoch, step, numbers in
the name and times, each only if all of a series have it. ``pointers`` tells who names a checkpoint, pins
among them, and ``metrics`` what was measured beside it. ``retention`` is a pure function from series to
keep and remove, with reasons: **add a rule there**, one row of ``Policy``. ``pruning``, ``renaming``,
``resuming``, ``listing`` and ``undo`` are the commands; ``ckpttool.transaction`` moves and removes files for
all of them. ``scope`` says which checkpoints a command looks at, ``reasons`` what keeps one.

A ``Unit`` is a checkpoint as discovery finds it, an ``Entry`` one that was looked at, a ``Group`` a series.
"""
