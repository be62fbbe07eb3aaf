"""Integrations: what needs a service or a heavy package, in one module each.

The core never imports them. Trackers (MLflow, Weights & Biases, TensorBoard) are loaded by
``core.plugins``, from the list in the package's root; the command line imports the others when an option asks
for them.
"""
