"""Runs a checkpoint with its own framework, in a child process: the only room that imports frameworks.

The command's own process imports neither NumPy nor a framework: it chooses a model, starts the child, and
tells it what to load. All else runs in the child, which leads a session of its own, ends with its parent,
and answers on a pipe that the model's prints can't reach; whatever becomes of it is a finding. It starts
while the file is still being checked, so that importing the framework costs little time of its own, and
loads only if no finding forbids it. Without ``--trust`` no real unpickler runs: our own readers,
``weights_only`` and ``safe_mode`` come first, and an audit hook refuses the rest.
"""
