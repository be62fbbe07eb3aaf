"""Formats of models that ckpttool does not read, with the tools that read them.

They are recognised so that an error can name the format and the tool, and a search can report such files.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ckpttool.core.errors import CheckpointError
from ckpttool.formats.interface import Probe
from ckpttool.formats.readings import CONTENTS
from ckpttool.storage import fs


class Foreign(NamedTuple):
    """A format that is not read.

    Attributes:
        name: Name with its article, for messages.
        reader: Tool that reads it.
        matches: Recognises it by its content.
        suffixes: Suffixes of its files; a search of a directory looks at no others.
        is_suffix_shared: Whether files of other formats have these suffixes, too.
        needs_suffix: Whether other files may have such content, so that a suffix is needed as well.
        is_named: Whether a search of a directory reports it; False for a run, whose checkpoints are reported.
    """

    name: str
    reader: str
    matches: Callable[[Probe], bool]
    suffixes: tuple[str, ...] = ()
    is_suffix_shared: bool = False
    needs_suffix: bool = False
    is_named: bool = True

    def has_suffix(self, probe: Probe) -> bool:
        """Return whether a file has one of its suffixes."""
        return not probe.is_directory and probe.name.lower().endswith(self.suffixes)

    def recognises(self, probe: Probe) -> bool:
        """Return whether a path has this format."""
        return (not self.needs_suffix or self.has_suffix(probe)) and self.matches(probe)

    @property
    def description(self) -> str:
        """Message with its name and tool."""
        return f"{self.name}, which ckpttool does not read; use {self.reader}"


# First bytes. Protobuf has no magic: a file begins with the tag of its first field (field number << 3 | wire
# type), which is a weak sign, so Core ML and Caffe need their suffix as well.
_GGUF, _GZIP, _OCDBT = b"GGUF", b"\x1f\x8b", (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde")
_ORBAX = frozenset({"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"})
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
_IR_VERSIONS = range(1, 32)
_PRODUCER = 0x12
_ONNX_TAGS = frozenset({_PRODUCER, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42})
_TFLITE = b"TFL3"
_EXECUTORCH = re.compile(rb".{4}ET\d\d", re.DOTALL)
_CORE_ML = re.compile(rb"\x08[\x01-\x1f]\x12")  # the version, and a description
_CAFFE = re.compile(rb"[\x0a\x12\x1a]|\xa2\x06")  # the name, a layer of old or an input; a layer
_TENSORRT = (b"ftrt", b"ptrt")
_TAR_BLOCK, _MOST_TAR_NAMES = 512, 16


def _is_onnx(probe: Probe) -> bool:
    """Return whether it begins like a ModelProto."""
    # The IR version (field 1), then a producer, a graph or operator sets. A SavedModel begins alike, with a
    # message in place of the producer's name.
    head = probe.head
    if len(head) < 4 or head[0] != 0x08 or head[1] not in _IR_VERSIONS or head[2] not in _ONNX_TAGS:
        return False
    if head[2] != _PRODUCER:
        return True
    name = head[4 : 4 + head[3]]
    return name.isascii() and name.decode("ascii").isprintable()


def _is_flax(probe: Probe) -> bool:
    """Return whether it begins like a msgpack map with string keys, and has arrays of Flax."""
    # fixmap (0x80 to 0x8f), map16 (0xde) or map32 (0xdf); then a key as fixstr (0xa0 to 0xbf) or str8 (0xd9).
    # Flax stores arrays as extensions: ext8, ext16, ext32 (0xc7 to 0xc9).
    head = probe.head
    if not head or not (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        return False
    start = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    is_key = start < len(head) and (0xA0 <= head[start] <= 0xBF or head[start] == 0xD9)
    return is_key and any(kind in head for kind in (b"\xc7", b"\xc8", b"\xc9"))


def _is_orbax(probe: Probe) -> bool:
    # A checkpoint has Orbax's files, or it is a step (``100``) with items in directories that have them.
    return probe.is_directory and (
        _ORBAX_TEMPORARY in probe.name
        or not _ORBAX.isdisjoint(probe.entries)
        or (probe.name.isdecimal() and _holds_orbax(probe.path))
    )


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
    """Return whether a directory is Paddle's: its ``.distcp`` files are pickles, PyTorch's are zips."""
    names = [name for name in probe.entries if name.endswith(".distcp") and not name.startswith("__")]
    for name in names[:1]:
        try:
            with fs.open_source(probe.entries[name].path) as source:
                return source.read(0, min(1, source.size)) == b"\x80"
        except CheckpointError:
            return False
    return False


def _is_openvino(probe: Probe) -> bool:
    """Return whether these weights have the model's structure next to them, in ``.xml``."""
    return fs.isfile(f"{os.path.splitext(probe.path)[0]}.xml")


def _is_tar_of_models(probe: Probe) -> bool:
    """Return whether a tar has a file with the suffix of a pickle or a checkpoint."""
    return _begins_as_tar(probe.head) and any(
        name.lower().endswith(tuple(CONTENTS)) for name in _tar_names(probe)
    )


def _is_nemo(probe: Probe) -> bool:
    """Return whether it is a tar, compressed or not."""
    head = probe.head
    if head.startswith(_GZIP):
        try:
            head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, _TAR_BLOCK)
        except zlib.error:
            return False
    return _begins_as_tar(head)


def _begins_as_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _tar_names(probe: Probe) -> Iterator[str]:
    """Yield the names of the first files in a tar."""
    # POSIX.1-1988, ustar: a header of 512 bytes has the name first, and the size in octal at 124; the content
    # is padded to 512 bytes.
    at, source = 0, probe.source
    for _ in range(_MOST_TAR_NAMES):
        header = source.read(at, min(_TAR_BLOCK, source.size - at)) if at < source.size else b""
        size = header[124:135].strip(b" \0")
        if len(header) < _TAR_BLOCK or not header[0] or not re.fullmatch(rb"[0-7]*", size):
            return
        yield header[:100].split(b"\0")[0].decode("utf-8", "replace")
        at += _TAR_BLOCK * (1 - -int(size or b"0", 8) // _TAR_BLOCK)


def _is_tensorrt(probe: Probe) -> bool:
    """Return whether it is a TensorRT plan.

    Source: lutzroeder/netron ``source/tensorrt.js``; ultralytics/ultralytics ``engine/exporter.py``.
    """
    # Ultralytics writes JSON in front of the plan, with its length in 4 bytes.
    head, source = probe.head, probe.source
    at = 4 + int.from_bytes(head[:4], "little") if head[3:5] == b"\0{" else 0
    return source.read(at, 4) in _TENSORRT if at + 4 <= source.size else False


def _is_xgboost(probe: Probe) -> bool:
    """Return whether it begins like an object of UBJSON, with the key of all XGBoost models."""
    return probe.head.startswith(b"{") and b"learner" in probe.head


def _is_torchserve(probe: Probe) -> bool:
    return any(name.startswith("MAR-INF/") for name in probe.names)


def _is_graph(probe: Probe) -> bool:
    """Return whether it begins like a GraphDef: with a node, its name, and the name of its operator."""
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


def _begins(pattern: re.Pattern[bytes]) -> Callable[[Probe], bool]:
    return lambda probe: pattern.match(probe.head) is not None


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
        is_suffix_shared=True,
    ),
    Foreign(
        "an agent of stable-baselines 2",
        "stable_baselines of TensorFlow 1",
        _holds("data", "parameter_list"),
        (".zip",),
        is_suffix_shared=True,
    ),
    Foreign(
        "a model of Deeplearning4j",
        "ModelSerializer of Deeplearning4j",
        _holds("configuration.json", "coefficients.bin"),
        (".zip",),
        is_suffix_shared=True,
    ),
    Foreign(
        "a Flax checkpoint (msgpack)",
        "flax.serialization.msgpack_restore",
        _is_flax,
        (".msgpack",),
        is_suffix_shared=True,
    ),
    Foreign("a NeMo checkpoint", "nemo_toolkit", _is_nemo, (".nemo",), needs_suffix=True),
    Foreign("a skops file", "skops.io.load, after skops.io.get_untrusted_types", _is_skops, (".skops",)),
    Foreign("an ExecuTorch program", "executorch", _begins(_EXECUTORCH), (".pte",)),
    Foreign("a Core ML model", "coremltools", _begins(_CORE_ML), (".mlmodel",), needs_suffix=True),
    Foreign("an XGBoost model", "xgboost", _is_xgboost, (".ubj",), is_suffix_shared=True),
    Foreign("a CatBoost model", "catboost", _starts_with(b"CBM1"), (".cbm",)),
    Foreign(
        "a TensorRT engine",
        "tensorrt",
        _is_tensorrt,
        (".engine", ".plan"),
        is_suffix_shared=True,
        needs_suffix=True,
    ),
    Foreign("a Caffe model", "caffe", _begins(_CAFFE), (".caffemodel",), needs_suffix=True),
    Foreign("a TorchServe archive", "torchserve", _is_torchserve, (".mar",), is_suffix_shared=True),
    Foreign(
        "an OpenVINO model", "openvino", _is_openvino, (".bin",), is_suffix_shared=True, needs_suffix=True
    ),
    Foreign("a tar of models", "tar to unpack it", _is_tar_of_models, (".tar",), is_suffix_shared=True),
    Foreign("an Orbax checkpoint", "orbax-checkpoint", _is_orbax),
    Foreign("a run of Orbax checkpoints", "orbax-checkpoint", _is_orbax_run, is_named=False),
    Foreign("a distributed checkpoint of Paddle", "paddle.distributed", _is_paddle_distributed),
)


def recognise_foreign(probe: Probe) -> Foreign | None:
    """Return the unread format of a path, or None; a format with the path's suffix comes first."""
    by_name = sorted(FOREIGN, key=lambda foreign: not foreign.has_suffix(probe))
    return next((foreign for foreign in by_name if foreign.recognises(probe)), None)


def foreign_in_search(probe: Probe) -> Foreign | None:
    """Return the unread format of a path in a searched directory, or None.

    Only files with the suffix of such a format are read.
    """
    candidates = (one for one in FOREIGN if one.is_named and (probe.is_directory or one.has_suffix(probe)))
    return next((foreign for foreign in candidates if foreign.recognises(probe)), None)


SUFFIXES = tuple(suffix for foreign in FOREIGN for suffix in foreign.suffixes)
"""Suffixes of files of these formats."""

_MODELS = (
    *(".bin", ".joblib", ".dill"),
    *(suffix for foreign in FOREIGN if not foreign.is_suffix_shared for suffix in foreign.suffixes),
)
"""Suffixes of files that are reported as models whatever their content is."""


def unread_reason(probe: Probe) -> str | None:
    """Return the reason why a model in a searched directory isn't read; None for any other file."""
    if (foreign := foreign_in_search(probe)) is not None:
        return foreign.description
    return "no format recognises the content" if probe.name.lower().endswith(_MODELS) else None
