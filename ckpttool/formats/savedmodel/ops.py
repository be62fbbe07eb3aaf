"""TensorFlow's ops: the lists of known and unsafe ones, and checks of single nodes.

Some ops touch files or not depending on their input: a data set is cached in memory if the file name is
empty; ``PrintV2`` writes to the terminal, the log or a file. Only attributes and constants in the same body
count as evidence.

Source: tensorflow/tensorflow ``core/kernels/data/cache_dataset_ops.cc``, ``core/kernels/logging_ops.cc``,
``core/kernels/range_sampler.cc``, ``core/util/proto/descriptors.cc``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from ckpttool.core.name_lists import lines_of
from ckpttool.core.report import Severity
from ckpttool.formats.savedmodel.body import Body, attribute_values
from ckpttool.formats.savedmodel.walk import MAX_NAME, Message

_LISTS = Path(__file__).with_name("lists")
_TEXT = 2  # field of AttrValue
_TERMINALS = frozenset({b"", b"stderr", b"stdout", b"log(info)", b"log(warning)", b"log(error)"})
_IN_MEMORY = re.compile(rb"$|local://$|bytes://", re.DOTALL)


@cache
def known_ops() -> dict[str, frozenset[str]]:
    """Return the outputs' names of each op of TensorFlow; none for an op that was removed from it."""
    lines = (line.split() for line in lines_of(_LISTS / "tf_ops.txt"))
    return {op: frozenset(outputs) for op, *outputs in lines}


def severity_of(op: str) -> Severity | None:
    """Return the severity of an unsafe op; None for an op that only computes."""
    return next((severity for severity, glob in _unsafe() if fnmatchcase(op, glob)), None)


@cache
def _unsafe() -> tuple[tuple[Severity, str], ...]:
    pairs = (line.split() for line in lines_of(_LISTS / "tf_unsafe_ops.txt"))
    return tuple((Severity(severity), glob) for severity, glob in pairs)


@cache
def stateful_ops() -> frozenset[str]:
    """Return the unsafe ops that run only if their function is called.

    Source: tensorflow/tensorflow ``core/common_runtime/eval_const_tensor.cc``.
    """
    # TensorFlow infers the shapes in all functions while it loads a model, and may run stateless ops for
    # that, even in functions that nothing calls. It never runs stateful ones then.
    return frozenset(lines_of(_LISTS / "tf_stateful_ops.txt"))


# Ops that touch files depending on their input ------------------------------------------------------


def _string_attribute(node: Message, name: str) -> bytes | None:
    """Return a string attribute, ``b""`` if absent; None if it isn't one string, or is too long."""
    values = attribute_values(node, name)
    if not values:
        return b""
    fields = list(values[0].fields())
    (number, _, text), *_ = fields or [(0, None, None)]
    is_text = len(values) == len(fields) == 1 and number == _TEXT
    return text.data(MAX_NAME) if is_text and text is not None and text.nbytes <= MAX_NAME else None


def _is_cached_in_memory(node: Message, body: Body) -> bool:
    inputs = [part for number, part in node.parts() if number == 3]
    return len(inputs) > 1 and body.string_constant(inputs[1].text().partition(":")[0]) == b""


def _is_described_in_memory(node: Message, body: Body) -> bool:
    source = _string_attribute(node, "descriptor_source")
    return source is not None and _IN_MEMORY.match(source) is not None


HARMLESS_IF: Mapping[str, Callable[[Message, Body], bool]] = {
    "CacheDataset": _is_cached_in_memory,
    "CacheDatasetV2": _is_cached_in_memory,
    "FixedUnigramCandidateSampler": lambda node, body: _string_attribute(node, "vocab_file") == b"",
    "DecodeProtoV2": _is_described_in_memory,
    "EncodeProto": _is_described_in_memory,
    "PrintV2": lambda node, body: _string_attribute(node, "output_stream") in _TERMINALS,
}
"""Checks by op that return whether a node, in its body, touches no file."""
