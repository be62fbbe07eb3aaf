"""Directories of checkpoints over time: survey, order, retention, and the commands that change them.

A survey (``survey``, ``look_workers``) finds checkpoints, looks at each (``look``, ``entry``), and groups
them into series (``scope``, ``series``): one directory, one format, one name once its fields are blanked,
weights of the same names and shapes. A series is ordered by epoch, step, numbers in names and times, each
only if all of its checkpoints have it. Files that a run writes for one step are one save (``saves``).
``metrics`` adds values from logs and trackers.

``pointers`` finds the files that name checkpoints, pins among them, and protects their targets. ``retention``
is a pure function from series to plans, with reasons: **add a rule there**, one row of ``Policy``.
``pruning`` and ``renaming`` carry out plans; ``latest``, ``listing``, ``copying``, ``watching``,
``tracking``, ``card`` and ``undo`` are the other commands. ``ckpttool.transaction`` moves and removes files
for all of them.

A ``Unit`` is a checkpoint as discovery finds it, an ``Entry`` one that was looked at, a ``Group`` a series.
"""
