"""Formats of models that ckpttool does not read, so that it can say what they are and what reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ckpttool.core.errors import CheckpointError
from ckpttool.formats.interface import Probe
from ckpttool.formats.readings import CONTENTS
from ckpttool.io import fs


class Foreign(NamedTuple):
    """A format that is not read.

    Attributes:
        name: What to call it.
        reader: What reads it.
        matches: Recognises it by its content.
        suffixes: How its files are called; those of no format in a directory are not named.
        needs_content: Whether other files are called so, too.
        is_named: Whether it is named when a directory is searched; a run is not, its checkpoints are.
    """

    name: str
    reader: str
    matches: Callable[[Probe], bool] = lambda probe: False
    suffixes: tuple[str, ...] = ()
    needs_content: bool = False
    is_named: bool = True

    def recognises(self, probe: Probe) -> bool:
        """Tell whether a path looks like one."""
        has_suffix = not self.needs_content and probe.name.lower().endswith(self.suffixes)
        return self.matches(probe) or (has_suffix and not probe.is_directory)

    def is_in_search(self, probe: Probe) -> bool:
        """Tell whether a path that looks like one is named when its directory is searched."""
        return self.is_named and (probe.is_directory or probe.name.lower().endswith(self.suffixes))

    @property
    def description(self) -> str:
        """Say what it is and what to do."""
        return f"{self.name}, which ckpttool does not read; use {self.reader}"


_GGUF, _OCDBT = b"GGUF", (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde")
_ORBAX = frozenset({"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"})
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
_IR_VERSIONS = range(1, 32)
_PRODUCER = 0x12
_ONNX_TAGS = frozenset({_PRODUCER, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42})
_TFLITE = b"TFL3"
_TAR_BLOCK, _MOST_TAR_NAMES = 512, 1000


def _is_onnx(probe: Probe) -> bool:
    """Tell whether it begins as a ModelProto does: its version, then a producer, a graph or operator sets."""
    head = probe.head
    if len(head) < 4 or head[0] != 0x08 or head[1] not in _IR_VERSIONS or head[2] not in _ONNX_TAGS:
        return False
    if head[2] != _PRODUCER:
        return True
    name = head[4 : 4 + head[3]]  # of a SavedModel, which begins alike, this is a message
    return name.isascii() and name.decode("ascii").isprintable()


def _is_flax(probe: Probe) -> bool:
    """Tell whether it begins as a msgpack map with text keys does, and holds Flax's arrays."""
    head = probe.head
    if not head or not (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        return False
    start = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    is_key = start < len(head) and (0xA0 <= head[start] <= 0xBF or head[start] == 0xD9)
    return is_key and any(kind in head for kind in (b"\xc7", b"\xc8", b"\xc9"))


def _is_orbax(probe: Probe) -> bool:
    return probe.is_directory and (
        _ORBAX_TEMPORARY in probe.name or not _ORBAX.isdisjoint(probe.entries) or _holds_items(probe)
    )


def _holds_items(probe: Probe) -> bool:
    """Tell whether it is a step whose items, in directories, have the marks of Orbax."""
    return probe.name.isdecimal() and _holds_orbax(probe.path)


def _is_orbax_run(probe: Probe) -> bool:
    if not probe.is_directory:
        return False
    steps = [entry for name, entry in probe.entries.items() if name.isdecimal() and entry.is_dir()]
    return any(_holds_orbax(entry.path) for entry in steps[:4])


def _holds_orbax(path: str) -> bool:
    try:
        names = set(fs.listdir(path))
        inner = [item for name in sorted(names)[:8] if fs.isdir(item := os.path.join(path, name))]
        return not _ORBAX.isdisjoint(names) or any(not _ORBAX.isdisjoint(fs.listdir(item)) for item in inner)
    except OSError:
        return False


def _is_paddle_distributed(probe: Probe) -> bool:
    """Tell Paddle's directories from PyTorch's: theirs hold pickles where PyTorch's hold zips."""
    names = [name for name in probe.entries if name.endswith(".distcp") and not name.startswith("__")]
    for name in names[:1]:
        try:
            with fs.open_source(probe.entries[name].path) as source:
                return source.read(0, min(1, source.size)) == b"\x80"
        except CheckpointError:
            return False
    return False


def _is_openvino(probe: Probe) -> bool:
    """Tell whether the file of a model's structure lies beside these weights."""
    return (
        probe.name.endswith(".bin")
        and not probe.is_directory
        and fs.isfile(f"{os.path.splitext(probe.path)[0]}.xml")
    )


def _is_tar_of_models(probe: Probe) -> bool:
    """Tell whether a tar holds a file that is called like a pickle or a checkpoint."""
    return probe.head[257:262] == b"ustar" and any(
        name.lower().endswith(tuple(CONTENTS)) for name in _tar_names(probe)
    )


def _tar_names(probe: Probe) -> Iterator[str]:
    """Yield the names of the first files in a tar.

    Source: POSIX.1-1988, ustar: a header of 512 bytes has the name first, and the size in octal at 124.
    """
    at, source = 0, probe.source
    for _ in range(_MOST_TAR_NAMES):
        header = source.read(at, min(_TAR_BLOCK, source.size - at)) if at < source.size else b""
        size = header[124:135].strip(b" \0")
        if len(header) < _TAR_BLOCK or not header[0] or not re.fullmatch(rb"[0-7]*", size):
            return
        yield header[:100].split(b"\0")[0].decode("utf-8", "replace")
        at += _TAR_BLOCK * (1 - -int(size or b"0", 8) // _TAR_BLOCK)


def _is_graph(probe: Probe) -> bool:
    """Tell whether it begins as a GraphDef does: with a node, its name, and the name of its operator."""
    node = re.match(rb"\x0a[\x80-\xff]{0,4}[\x00-\x7f]", probe.head)
    name = None if node is None else _text_field(probe.head, node.end(), b"\x0a")
    operator = None if name is None else _text_field(probe.head, name.end(), b"\x12")
    return operator is not None and operator[1][:1].isalpha()


def _text_field(head: bytes, offset: int, tag: bytes) -> re.Match[bytes] | None:
    """Return the printable text of a field of less than 128 bytes; None if there is none."""
    if head[offset : offset + 1] != tag or len(head) <= offset + 1:
        return None
    return re.compile(rb"([\x21-\x7e]{%d})" % (head[offset + 1] or 1)).match(head, offset + 2)


def _is_skops(probe: Probe) -> bool:
    return "schema.json" in probe.names and probe.name.lower().endswith((".skops", ".zip"))


def _starts_with(*magics: bytes) -> Callable[[Probe], bool]:
    return lambda probe: probe.head.startswith(magics)


def _holds(*names: str) -> Callable[[Probe], bool]:
    return lambda probe: probe.names.issuperset(names)


FOREIGN = (
    Foreign("a GGUF file", "llama.cpp, or gguf-dump of the gguf package", _starts_with(_GGUF), (".gguf",)),
    Foreign("an OCDBT file of Orbax", "orbax-checkpoint, given its directory", _starts_with(*_OCDBT)),
    Foreign("a TensorFlow Lite model", "tensorflow", lambda probe: probe.head[4:8] == _TFLITE, (".tflite",)),
    Foreign("an ONNX model", "onnx.checker, or onnxruntime", _is_onnx, (".onnx",)),
    Foreign(
        "a frozen graph (GraphDef)",
        "tf.compat.v1.import_graph_def",
        _is_graph,
        (".pb",),
        needs_content=True,
    ),
    Foreign(
        "an agent of stable-baselines 2",
        "stable_baselines of TensorFlow 1",
        _holds("data", "parameter_list"),
        (".zip",),
        needs_content=True,
    ),
    Foreign(
        "a model of Deeplearning4j",
        "ModelSerializer of Deeplearning4j",
        _holds("configuration.json", "coefficients.bin"),
        (".zip",),
        needs_content=True,
    ),
    Foreign("a Flax checkpoint (msgpack)", "flax.serialization.msgpack_restore", _is_flax, (".msgpack",)),
    Foreign("a NeMo checkpoint", "nemo_toolkit", suffixes=(".nemo",)),
    Foreign("a skops file", "skops.io.load, after skops.io.get_untrusted_types", _is_skops, (".skops",)),
    Foreign("an ExecuTorch program", "executorch", suffixes=(".pte",)),
    Foreign("a Core ML model", "coremltools", suffixes=(".mlmodel",)),
    Foreign("an XGBoost model", "xgboost", suffixes=(".ubj",)),
    Foreign("a CatBoost model", "catboost", suffixes=(".cbm",)),
    Foreign("a TensorRT engine", "tensorrt", suffixes=(".engine", ".plan")),
    Foreign("a Caffe model", "caffe", suffixes=(".caffemodel",)),
    Foreign("a TorchServe archive", "torchserve", suffixes=(".mar",)),
    Foreign("an OpenVINO model", "openvino", _is_openvino, (".bin",), needs_content=True),
    Foreign("a tar of models", "tar to unpack it", _is_tar_of_models, (".tar",), needs_content=True),
    Foreign("an Orbax checkpoint", "orbax-checkpoint", _is_orbax),
    Foreign("a run of Orbax checkpoints", "orbax-checkpoint", _is_orbax_run, is_named=False),
    Foreign("a distributed checkpoint of Paddle", "paddle.distributed", _is_paddle_distributed),
)


def recognise_foreign(probe: Probe) -> Foreign | None:
    """Return the format that a path has and ckpttool does not read, or None; its name decides between two."""
    found = [foreign for foreign in FOREIGN if foreign.recognises(probe)]
    named = (foreign for foreign in found if probe.name.lower().endswith(foreign.suffixes))
    return next(named, found[0] if found else None)
