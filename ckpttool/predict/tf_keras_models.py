"""Keras 2, which lives on as ``tf_keras``, imported; ``keras_models`` says how it is asked.

Only the child process imports this module.
"""

from __future__ import annotations

import tf_keras  # noqa: F401

from ckpttool.predict.keras_models import LOADERS as LOADERS
