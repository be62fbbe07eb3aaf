"""Directories of checkpoints over time: what is there, which is newest, and which can go.

``surveying`` finds checkpoints and groups them into series: one directory, one format, one name once its
fields are blanked, weights of the same names and shapes. ``members`` orders each by epoch, step, numbers in
the name and times, each only if all of a series have it. ``pointers`` tells who names a checkpoint, pins
among them, and ``metrics`` what was measured beside it. ``retention`` is a pure function from series to
keep and remove, with reasons: **add a rule there**, one row in ``RULES``. ``pruning``, ``renaming``,
``resuming`` and ``undoing`` are the commands; ``changing`` moves and removes files for all of them.

How a change survives a kill
    One journal a directory, ``.ckpttool-<id>/journal.json``, is written whole and synced before anything is
    touched. What goes is renamed into that directory and unlinked only there. What a kill left is finished
    if a part of it is gone or its survivors are still there, and put back otherwise. When checkpoints move
    (rename, trash, undo), each gets its new names before it loses the old ones, and pointers change in
    between: at no moment is it whole in no place.

    Everything happens below open directories, never through a symlink. A checkpoint's fingerprint (device,
    inode, size, time) is compared before it is renamed, after, and before each unlink. A copied directory's
    journal is known by its inodes, which no copy has. What another user could have planted stays as it is.
"""
