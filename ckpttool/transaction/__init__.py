"""Crash-safe changes to directories: removals, renames, trash, undo and outputs.

Before a command changes anything, it writes a journal with all its operations (``journal``), in
``.ckpttool-<id>/journal.json``. ``operations`` executes, commits and reverts them, relative to the open
directories of ``open_roots``. ``transaction`` carries out one list of operations from the journal to its
removal, and ``removal`` builds on it. After a kill, ``settling`` reverts what wasn't committed, and completes
the rest. ``history`` records how lists are undone, ``record_undo`` undoes them, and ``trash`` empties the
trash. ``stored_journals`` reads journals, with ``journal_documents``, and ``old_journals`` converts those of
earlier versions.

All this is the engine for disks, one of two (``engine``). The other one executes the same lists of operations
in a store, by conditional requests (``store_engine``, ``store_operations``). ``engines.engine_of`` returns
the engine of a directory.

An output (``staged_output``) appears whole or not at all: it is written into a locked directory next to its
target, under its final names, synced, and renamed. After a kill this directory has no lock any more; the next
command that stages an output there removes it, along with half-written files (``storage.directories``).

Every path is resolved from an open directory, never through a symlink. A file's fingerprint (device, inode,
size, time; ``files``) is compared before and after a move, and before each unlink. Files that another user
may have planted are left alone (``state_dir``).
"""
