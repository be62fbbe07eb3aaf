"""Runs a checkpoint with its own framework, in a child process: the only package that imports frameworks.

The way of a prediction, from ``verify --predict`` to the framework:

- ``request``: the options, and the job for the child;
- ``jobs``: the framework and the loader for a checkpoint, chosen in the command's process, which imports
  neither NumPy nor a framework;
- ``run``: the child process, started while the file is still being checked, so that importing the framework
  takes no extra time; it gets its job only if no finding forbids it, and its crash or time-out is a finding;
- ``child``: loads and runs the model in a session of its own, and answers on a pipe that prints can't reach;
- ``guard``: refuses code from a checkpoint without ``--trust``, and imports the user's own;
- an adapter (``torch_models``, ``keras_models``, …): a table ``LOADERS`` of ``load(job) -> Loaded``;
  without ``--trust`` no real unpickler runs: ``weights_only``, ``safe_mode`` and our own readers come first;
- ``prediction``: runs the model on ``inputs``, and checks the outputs.
"""
