"""Access to files, object stores and the Hub through one set of functions (``fs``); threads and processes.

How bytes are read
    Files are read with ``pread``, never through a map (but for ``Tensor.array()``): if a trainer cuts a
    mapped file short, the process dies, and each page that was touched counts as memory. ``source`` keeps
    at most 64 files open; one that was closed meanwhile is opened again and must be the same file.

    ``scan`` reads each byte range once, in chunks that stay in a processor's cache, and computes checksums
    and tests values on several threads. Only tensors in a suspicious range are read again, to name and
    count.

Threads and processes
    ``work`` has the only pool of threads, and takes other executors; ``children`` is the only module that
    starts child processes, which end with their parent.
"""
