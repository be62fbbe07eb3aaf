"""Keras 3, imported; ``keras_models`` says how it is asked.

Only the child process imports this module.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

if "KERAS_BACKEND" not in os.environ and find_spec("tensorflow") is None and find_spec("torch") is not None:
    os.environ["KERAS_BACKEND"] = "torch"  # Keras itself would ask for TensorFlow

import keras  # noqa: F401 - it looks at the variable when it is imported

from ckpttool.predict.keras_models import LOADERS as LOADERS
