"""Changes to directories that a kill at any instruction leaves whole: removals, moves, trash, undo, outputs.

One journal a directory, ``.ckpttool-<id>/journal.json``, is written whole and synced before anything is
touched (``journal``). ``removal`` moves what goes into that directory, the stage, and unlinks it only there,
after ``done.json`` was written: before that, a kill has all put back, after it, finished (``operations``).
``move_transaction`` gives checkpoints their new names before they lose the old ones, changes pointers in
between, and records how it is taken back (``history``). ``recovery`` settles what a kill left;
``record_undo`` takes back what was done, ``trash`` puts things aside, and empties itself. Journals of earlier
versions are read by ``stored_journals``.

A target that is written (``staged_output``) appears whole, or not at all: it is written in a locked directory
beside the target, under its final names, made durable, then renamed. A kill leaves that directory without its
lock, and whoever stages next clears it, as it does small files that were being written (``io.atomic``).

Everything happens below open directories, never through a symlink. A checkpoint's fingerprint (device, inode,
size, time; ``files``) is compared before it is renamed, after, and before each unlink. A copied directory's
journal is known by its inodes, which no copy has (``copies``): nothing is unlinked there. What another user
could have planted stays as it is (``state_dir``).
"""
