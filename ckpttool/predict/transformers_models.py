"""What transformers loads: a directory with ``config.json``, by the class that the configuration names.

Only the child process imports this module. Nothing is downloaded, and no code beside the weights runs.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers

from ckpttool.core.report import Finding, Severity, error
from ckpttool.core.text import counted
from ckpttool.predict.interface import (
    Arrays,
    Loaded,
    LoadFailed,
    first_findings,
    missing_finding,
    shape_finding,
    unexpected_finding,
)
from ckpttool.predict.request import PredictionJob
from ckpttool.predict.torch_models import TorchModel, arrays_in, make_optimizer

# A configuration may name a repository of compiled code, which transformers fetches and runs by this package;
# it looks for it with the first model's class, and finds none.
sys.modules["kernels"] = None  # type: ignore[assignment]  # which makes its import fail


class Pretrained(TorchModel):
    """A model of transformers, with the inputs that it makes up for itself."""

    def __init__(self, model: Any, seed: int, optimizer: Any) -> None:
        detail = f"{type(model).__name__}, {counted(model.num_parameters(), 'parameter')}"
        if optimizer is not None:
            detail += f"; {type(optimizer).__name__}, state of {counted(len(optimizer.state), 'parameter')}"
        super().__init__(model.eval(), detail, seed, optimizer=optimizer)
        self.detail = f"transformers {transformers.__version__}, {self.detail}"
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def examples(self) -> Arrays:
        model = self._module
        if model.main_input_name == "pixel_values":
            size = getattr(model.config, "image_size", 224)
            height, width = size if isinstance(size, (list, tuple)) else (size, size)
            shape = (1, getattr(model.config, "num_channels", 3), height, width)
            generator = torch.Generator().manual_seed(0)
            image = torch.rand(shape, generator=generator, dtype=torch.float32)
            return arrays_in({"pixel_values": image.to(model.dtype)})
        kinds = getattr(model, "input_modalities", "text")
        if model.main_input_name != "input_ids" or kinds not in ("text", ("text",), ["text"]):
            return {}
        words = getattr(model.config.get_text_config(), "vocab_size", None)
        parameters = inspect.signature(model.forward).parameters
        inputs = {name: one for name, one in model.dummy_inputs.items() if name in parameters}
        for name, one in inputs.items():
            if words and not one.is_floating_point():
                inputs[name] = one % words
        return arrays_in(inputs)


def _load_pretrained(job: PredictionJob) -> Loaded:
    """The model that a directory's configuration names, with the directory's weights."""
    directory = job.options["directory"]
    model, loading_info = _class_of(directory).from_pretrained(
        directory,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they come out as findings, all at once
        # Whatever the configuration names: the usual ones, by PyTorch alone.
        attn_implementation=None,
        experts_implementation=None,
        use_safetensors=job.options["files"][0].endswith(".safetensors"),
    )
    findings = list(_misfit_findings(loading_info))
    if any(finding.code != "unexpected-key" for finding in findings):
        raise LoadFailed(*first_findings(findings))
    optimizer, notes = make_optimizer(job, model, {})
    loaded = Pretrained(model, job.request.seed, optimizer)
    loaded.findings = (*findings, *notes)
    return loaded


def _class_of(directory: str) -> Any:
    """Return the class that a configuration names."""
    path = os.path.join(directory, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as failure:
        raise LoadFailed(error("config-unreadable", f"it can't be read: {failure}", path)) from failure
    names = config.get("architectures") if isinstance(config, dict) else None
    name = names[0] if isinstance(names, list) and names else None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        unknown = f"transformers {transformers.__version__} has no model {name!r}"
        problem = unknown if name else "it names no architecture"
        raise LoadFailed(error("no-such-model", f"{problem}: --model names your own", "config.json"))
    return kind


def _misfit_findings(loading_info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what transformers left as it was made up, or left out."""
    for key in sorted(loading_info["missing_keys"]):
        yield missing_finding(key)
    for key, theirs, own in sorted(loading_info["mismatched_keys"]):
        yield shape_finding(key, theirs, own)
    for key in sorted(loading_info["unexpected_keys"]):
        yield unexpected_finding(key)._replace(severity=Severity.WARNING)


LOADERS: Mapping[str, Callable[[PredictionJob], Loaded]] = {"pretrained": _load_pretrained}
