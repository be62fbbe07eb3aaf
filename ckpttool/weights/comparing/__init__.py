"""Comparison of the values of paired tensors.

``compare`` runs two passes. Threads compare the stored bytes of all pairs (``memcmp``, no NumPy); pairs whose
bytes or dtypes differ are read again and measured in float64 (``kernels``), in child processes
(``remote_worker``) because NumPy's short operations contend for the interpreter lock. Each range of a tensor
gives a ``Tally`` (``statistics``); tallies are merged without rounding, so the number of workers changes no
digit of the result.
"""
