"""Adapter of transformers: a directory with ``config.json``, loaded by the class that it names.

Only the child process imports this module. Nothing is downloaded, and no code in the directory runs.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
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
from ckpttool.predict.torch_models import arrays_in, module_with_optimizer

# A configuration may name a repository of compiled code, which transformers downloads and runs with this
# package. It looks for the package with the first model's class.
sys.modules["kernels"] = None  # type: ignore[assignment]  # which makes its import fail


def _load_pretrained(job: PredictionJob) -> Loaded:
    """Load the model of a directory's configuration with the directory's weights."""
    directory = job.options["directory"]
    model, loading_info = _class_of(directory).from_pretrained(
        directory,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # all of them become findings
        # The default implementations, in PyTorch alone, instead of those of the configuration.
        attn_implementation=None,
        experts_implementation=None,
        use_safetensors=job.options["files"][0].endswith(".safetensors"),
    )
    findings = list(_misfit_findings(loading_info))
    if any(finding.code != "unexpected-key" for finding in findings):
        raise LoadFailed(*first_findings(findings))
    detail = f"{type(model).__name__}, {counted(model.num_parameters(), 'parameter')}"
    loaded = module_with_optimizer(job, model, {}, detail, tuple(findings))
    return replace(
        loaded,
        detail=f"transformers {transformers.__version__}, {loaded.detail}",
        versions={"transformers": transformers.__version__, **loaded.versions},
        examples=partial(_dummy_inputs, model),
    )


def _dummy_inputs(model: Any) -> Arrays:
    """Return the dummy inputs of a model for images or texts; empty for other models."""
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
    # The dummy inputs of transformers have fixed token IDs, which may exceed a small model's vocabulary.
    words = getattr(model.config.get_text_config(), "vocab_size", None)
    parameters = inspect.signature(model.forward).parameters
    inputs = {name: one for name, one in model.dummy_inputs.items() if name in parameters}
    for name, one in inputs.items():
        if words and not one.is_floating_point():
            inputs[name] = one % words
    return arrays_in(inputs)


def _class_of(directory: str) -> Any:
    """Return the model class in a directory's configuration."""
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
    """Yield a finding for each weight that transformers initialised at random, or ignored."""
    for key in sorted(loading_info["missing_keys"]):
        yield missing_finding(key)
    for key, theirs, own in sorted(loading_info["mismatched_keys"]):
        yield shape_finding(key, theirs, own)
    for key in sorted(loading_info["unexpected_keys"]):
        yield unexpected_finding(key)._replace(severity=Severity.WARNING)


LOADERS: Mapping[str, Callable[[PredictionJob], Loaded]] = {"pretrained": _load_pretrained}
