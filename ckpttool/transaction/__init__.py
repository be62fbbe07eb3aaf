"""Changes to directories that a kill at any moment leaves whole: removals, moves, trash, undo, outputs.

Each command writes a journal first, ``.ckpttool-<id>/journal.json``: a list of operations (``journal``). They
are done, committed and reverted by ``operations``, in the open directories of ``open_roots``. ``transaction``
carries out one list from its journal to its end, also for ``removal``. After a kill, ``settling`` reverts
what isn't committed, and completes the rest. ``history`` records how lists are undone, ``record_undo`` undoes
them, and ``trash`` empties the trash. ``stored_journals`` reads journals, with ``journal_documents``, and
those of earlier versions with ``old_journals``.

All this is one of two engines (``engine``): that of disks. The other one does the same lists of operations in
a store, by conditional requests (``store_engine``, ``store_operations``). ``recovery`` and whoever else works
on any directory asks ``engines.engine_of``.

A target that is written (``staged_output``) appears whole, or not at all: it is written in a locked directory
beside the target, under its final names, made durable, then renamed. A kill leaves that directory without its
lock, which the next command that stages there clears, with half-written files (``storage.directories``).

Everything happens below open directories, never through a symlink. A checkpoint's fingerprint (device, inode,
size, time; ``files``) is compared before it is moved, after, and before each unlink. What another user could
have planted stays as it is (``state_dir``).
"""
