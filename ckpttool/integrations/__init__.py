"""Integrations with services and heavy packages, one module each.

The core never imports them. ``core.plugins`` loads the trackers (MLflow, Weights & Biases, TensorBoard) from
the list in the package's root; the command line imports ``dask`` for ``--executor``, ``matplotlib`` for
``--plot``.
"""
