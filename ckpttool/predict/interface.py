"""What a loaded model is to the child: something with inputs that can be run, and trained for a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from ckpttool.predict.request import InputSpec
from ckpttool.report import Finding

if TYPE_CHECKING:
    import numpy as np

Arrays: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"
"""Inputs or outputs by name; an input whose name is a number goes there by position."""


class LoadFailed(Exception):
    """A checkpoint could not be loaded; ``findings`` say why."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__(*(finding.message for finding in findings))
        self.findings = findings


class CannotTrain(Exception):
    """There is nothing that could make a training step; the text says why."""


class Loaded(ABC):
    """A model in its framework's hands.

    Attributes:
        detail: What was loaded, in a few words.
        findings: What was remarkable.
        versions: Of the packages that loaded it.
    """

    detail: str
    versions: Mapping[str, str]
    findings: tuple[Finding, ...] = ()

    def inputs(self) -> tuple[InputSpec, ...]:
        """Return the inputs that the model itself knows, as far as it knows their sizes; none otherwise."""
        return ()

    def examples(self) -> Arrays:
        """Return example inputs that the checkpoint carries; none where it doesn't."""
        return {}

    @abstractmethod
    def run(self, inputs: Arrays) -> Arrays:
        """Return the outputs for some inputs, without training anything."""

    def train(self, inputs: Arrays) -> str:
        """Make one step forward, backward and with the optimizer, and return what it did, in a few words.

        Raises:
            CannotTrain: There is nothing to train.
        """
        raise CannotTrain("this kind of model is for inference")
