"""A class of the user's that Keras finds once this module is imported."""

from __future__ import annotations

import keras


@keras.saving.register_keras_serializable("tests")
class DuplicateKeyObject(keras.Model):
    """A layer whose outputs are doubled."""

    def __init__(self, units: int = 2, **more) -> None:
        super().__init__(**more)
        self.units = units
        self.inner = keras.layers.Dense(units, name="inner")

    def call(self, batch):
        """Return two numbers for each row."""
        return self.inner(batch) * 2

    def get_config(self):
        """Return how it was made."""
        return {**super().get_config(), "units": self.units}
