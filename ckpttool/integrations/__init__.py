"""Integrations: what needs a service or a heavy package, in one module each.

The core never imports them. ``core.plugins`` loads the trackers (MLflow, Weights & Biases, TensorBoard) from
the list in the package's root; the command line imports ``dask`` for ``--executor``, ``matplotlib`` for
``--plot``.
"""
