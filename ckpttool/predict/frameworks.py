"""The frameworks that the child process can import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from ckpttool.errors import MissingPackage


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that the child can import.

    Attributes:
        package: What must be installed.
        extra: The extra of ckpttool that brings it.
        module: Our module that loads with it; its ``LOADERS`` is a table of functions.
        environment: Variables that keep it quiet; the user's own win.
        forced: Variables that keep it from downloading, whatever the user's own are.
    """

    package: str
    extra: str
    module: str
    environment: Mapping[str, str] = field(default_factory=dict)
    forced: Mapping[str, str] = field(default_factory=dict)

    def require(self, path: str) -> None:
        """Require that the framework is installed.

        Raises:
            MissingPackage: It isn't.
        """
        if find_spec(self.package) is None:
            command = f"pip install 'ckpttool[{self.extra}]'"
            raise MissingPackage(path, f"a prediction needs {self.package}", expected=command)


_QUIET_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": ""}
_QUIET_PADDLE = {"GLOG_minloglevel": "2", "FLAGS_call_stack_level": "0"}
_QUIET_TRANSFORMERS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "USE_HUB_KERNELS": "NO"}
FRAMEWORKS = {
    "torch": Framework("torch", "torch", "ckpttool.predict.torch_models"),
    "transformers": Framework(
        "transformers",
        "transformers",
        "ckpttool.predict.transformers_models",
        _QUIET_TRANSFORMERS,
        _OFFLINE,
    ),
    "tensorflow": Framework(
        "tensorflow", "tensorflow", "ckpttool.predict.tensorflow_models", _QUIET_TENSORFLOW
    ),
    "keras": Framework("keras", "keras", "ckpttool.predict.keras3_models", _QUIET_TENSORFLOW),
    "tf_keras": Framework("tf_keras", "keras", "ckpttool.predict.tf_keras_models", _QUIET_TENSORFLOW),
    "paddle": Framework("paddle", "paddle", "ckpttool.predict.paddle_models", _QUIET_PADDLE),
}
