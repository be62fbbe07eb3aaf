"""Containers of bytes: bounded readers and writers of zips, pickles, tables, HDF5, protocol buffers.

How bytes are read
    Files are read with ``pread``, never through a map (but for ``Tensor.array()``): if a trainer cuts a
    mapped file short, the process dies, and each page that was touched counts as memory. ``source`` keeps
    at most 64 files open; one that was closed meanwhile is opened again and must be the same file.

    What a file can ask for is bounded by what it stores. Deflate makes a thousand bytes of one, and honest
    files of zeros do that. Values are therefore streamed without a limit, but structure, which is kept in
    memory, has one budget for all records of a file.

    ``scan`` reads each byte range once, in chunks that stay in a processor's cache, and computes checksums
    and tests values on several threads. Only tensors in a suspicious range are read again, to name and
    count.

What a pickle does
    ``interpreter`` runs nothing. It is a stack machine that builds plain data, and inert nodes (``Global``,
    ``Call``, ``Persistent``) where a real unpickler would import or call. ``calls`` judges each call when
    it is made, ``states`` what is set on objects, by the lists in ``names/`` that ``trust`` reads;
    ``pickle_safety`` turns what isn't on the lists into findings. Nothing recurses, and what is built has a
    budget in bytes.

What runs beside
    ``work`` is the one pool of threads, or whatever executor is handed to it; ``children`` the one place that
    starts child processes, which end with their parent.
"""
