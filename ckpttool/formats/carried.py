"""The entry ``ckpttool.content``: what a format has no place for, as one JSON document beside its tensors.

docs/entry.md describes it. It holds the paths and roles of the tensors, the ties between them, and either
the whole tree or what was said beside the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from ckpttool.checkpoint import Checkpoint, Path, Role, Tensor
from ckpttool.errors import CheckpointError
from ckpttool.formats.assembly import training_of
from ckpttool.formats.carried_training import check_training, with_training
from ckpttool.formats.objects import NDARRAY, REQUIRES_GRAD, Opaque
from ckpttool.formats.telling import plain
from ckpttool.formats.torch_leaves import with_attributes
from ckpttool.formats.torch_objects import TensorParts, TorchObjects
from ckpttool.formats.tree_decoding import decoded
from ckpttool.formats.tree_encoding import encoded
from ckpttool.formats.trees import Leaf, flatten
from ckpttool.report import warning
from ckpttool.wire.jsontext import Doubled, parse_json
from ckpttool.wire.pickled import Call, Global
from ckpttool.wire.tensor_pickling import FROM_TYPE, MASKED, QUANTIZED

__all__ = ["ENTRY", "MAX_DOCUMENT", "SCHEMA", "decoded", "encoded", "restored"]

ENTRY = "ckpttool.content"
"""The name of the entry, wherever it lies."""
SCHEMA = "ckpttool.content/1"
MAX_DOCUMENT = 1 << 26
"""The most bytes of a document."""


def restored(checkpoint: Checkpoint, document: bytes | str, where: str) -> Checkpoint:
    """Return a checkpoint with all that its entry says of it.

    Its tensors get their paths and roles, those that were tied come back, and metadata, training state, tree
    and native parts come from the document. A document that does not fit leaves the checkpoint as it is, with
    a warning ``content-entry``.

    Args:
        checkpoint: What the format holds, by its own names; a tensor that is the entry itself is left out.
            Only the new one is to be used, and closed.
        document: The entry.
        where: Where it lies in the file, for the warning.
    """
    try:
        return _restored(checkpoint, document)
    except CheckpointError as failure:
        return _warned(checkpoint, failure.reason, where)
    except (ValueError, TypeError) as failure:
        return _warned(checkpoint, str(failure), where)


def _warned(checkpoint: Checkpoint, why: str, where: str) -> Checkpoint:
    message = f"the entry {ENTRY} is not used: {why}"
    tensors = _without_entry(checkpoint.tensors)
    return _like(
        checkpoint, tensors=tensors, findings=(*checkpoint.findings, warning("content-entry", message, where))
    )


def _without_entry(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor.name != ENTRY)


def _restored(checkpoint: Checkpoint, document: bytes | str) -> Checkpoint:
    """Return the checkpoint with its entry.

    Raises:
        CheckpointError, ValueError, TypeError: The document is damaged, or does not fit.
    """
    data = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document
    if len(data) > MAX_DOCUMENT:
        raise ValueError(f"{len(data):,} bytes, where at most {MAX_DOCUMENT:,} are read")
    parsed = parse_json(checkpoint.path, data, "entry")
    if type(parsed) is not dict or parsed.get("schema") != SCHEMA:
        raise ValueError(f"it does not say that it is {SCHEMA}")
    told = parsed.get("tensors")
    tensors = _without_entry(checkpoint.tensors)
    named = {tensor.name: tensor for tensor in reversed(tensors)}
    if told is not None:
        tensors, named = _renamed(told, named), {}
        named.update({tensor.name: tensor for tensor in tensors})
    content = decoded(parsed.get("content"), parsed.get("shared", []), named.__getitem__)
    if not isinstance(content, dict):
        raise ValueError("it has no content")
    has_tree = "tree" in content
    tree = content.get("tree")
    native = _native(content.get("native", {}))
    metadata = content.get("metadata")
    if metadata is None:
        metadata = _metadata(tree, checkpoint.path) if has_tree else _without_own(checkpoint.metadata)
    if not isinstance(metadata, Mapping):
        raise ValueError("the metadata is no dictionary")
    changes: dict[str, Any] = {"tensors": tensors, "metadata": lambda: metadata}
    if has_tree or told is not None:
        changes["tree"] = lambda: tree
    name = checkpoint.path.replace("\\", "/").rpartition("/")[2]
    training = content.get("training", {})
    check_training(training)
    changes["training"] = lambda: with_training(training_of(metadata, tensors, name), training)
    return _like(checkpoint, native=lambda: {**checkpoint.native, **native}, **changes)


def _without_own(metadata: Mapping[str, object]) -> Mapping[str, object]:
    return {name: value for name, value in metadata.items() if name != ENTRY}


def _native(told: object) -> Mapping[str, bytes]:
    if not isinstance(told, dict) or not all(
        isinstance(name, str) and isinstance(data, bytes) for name, data in told.items()
    ):
        raise ValueError("the native parts are no bytes by name")
    return told


def _like(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    """Return a checkpoint of the same files, in which some things are others."""
    same: dict[str, Any] = {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "variant": checkpoint.variant,
        "tensors": checkpoint.tensors,
        "files": checkpoint.files,
        "spans": checkpoint.spans,
        "metadata": lambda: checkpoint.metadata,
        "training": lambda: checkpoint.training,
        "layers": lambda: checkpoint.layers,
        "own_names": lambda: checkpoint.own_names,
        "tree": lambda: checkpoint.tree,
        "native": lambda: checkpoint.native,
        "producer": checkpoint.producer,
        "findings": checkpoint.findings,
        "safety": checkpoint.safety,
        "complete": checkpoint.complete,
        "close": checkpoint.close,
    }
    return Checkpoint(**{**same, **changes})


# Tensors --------------------------------------------------------------------------------------------


def _renamed(told: object, stored: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors that a document tells of, in its order.

    Raises:
        ValueError: They are not those of the file.
    """
    if type(told) is not dict:
        raise ValueError(
            "the tensors are no dictionary" if not isinstance(told, Doubled) else "a tensor twice"
        )
    found: dict[str, Tensor] = {}
    owners: dict[str, str] = {}
    for name, one in told.items():
        if type(one) is not dict:
            raise ValueError(f"nothing is said of the tensor {name}")
        path, role = _path(name, one.get("path", [name])), Role(one.get("role", "other"))
        owner = one.get("shares_with")
        if name in stored:
            first = owners.setdefault(stored[name].shares_with or name, name)
            shares_with = None if first == name else first
            found[name] = replace(stored[name], path=path, role=role, shares_with=shares_with)
        elif isinstance(owner, str) and owner in found and found[owner].shares_with is None:
            found[name] = replace(found[owner], path=path, role=role, shares_with=owner)
        else:
            raise ValueError(f"the tensor {name} is not there")
    left = [tensor for name, tensor in stored.items() if name not in found]
    if untold := next((tensor for tensor in left if tensor.values is not None), None):
        raise ValueError(f"it does not tell of the tensor {untold.name}")
    return (*found.values(), *left)


def _path(name: str, parts: Any) -> Path:
    if not isinstance(parts, list) or not all(type(part) in (str, int) for part in parts):
        raise ValueError(f"the path of the tensor {name} is none")
    if ".".join(map(str, parts)) != name:
        raise ValueError(f"the path of the tensor {name} is another's")
    return tuple(parts)


# What is said beside the tensors ---------------------------------------------------------------------


class _TreeObjects(TorchObjects):
    """Reads the nodes of a tree, in which tensors stand instead of what rebuilds them."""

    def __init__(self, path: str) -> None:
        super().__init__(path, _no_storage)

    def leaf(self, node: object) -> Leaf[TensorParts] | None:
        if isinstance(node, Tensor):
            parts = TensorParts(node.dtype, node.shape, node.values, node.extent, node.storage)
            return Leaf((((), parts),))
        if isinstance(node, Opaque):
            return Leaf(plain=f"<{node.what}>") if node.content is None else None
        if isinstance(node, complex):
            return Leaf(plain=plain(Call(Global("builtins", "complex"), (node.real, node.imag))))
        if isinstance(node, bytearray):
            return Leaf(plain=plain(Call(Global("builtins", "bytearray"), (bytes(node),))))
        if not isinstance(node, Call) or not node.args:
            return super().leaf(node)
        return self._around(node) or super().leaf(node)

    def _around(self, call: Call) -> Leaf[TensorParts] | None:
        """Return what stands around a tensor and has no arguments of PyTorch's or NumPy's, None elsewhere."""
        first, function = call.args[0], call.function
        if function == FROM_TYPE and len(call.args) == 3:
            if isinstance(first, Call) and first.function == FROM_TYPE:
                raise ValueError("a tensor of a class in a class")
            found = self.leaf(first)
            return found and with_attributes(found, self._attributes(call.args[2]))
        if not isinstance(first, Tensor):
            return None
        if function == QUANTIZED:
            return self._scheme(call, first)
        if function == MASKED:
            return Leaf((*self._of(first), *self._of(call.args[1])), {"fill_value": call.args[2]})
        is_storage = str(function).endswith("Storage")
        return Leaf(self._of(first)) if function in (NDARRAY, REQUIRES_GRAD) or is_storage else None

    def _of(self, tensor: object) -> tuple[tuple[Path, TensorParts], ...]:
        found = self.leaf(tensor)
        return found.tensors if found else ()

    def _scheme(self, call: Call, tensor: Tensor) -> Leaf[TensorParts]:
        return self.quantized(self._of(tensor), call.args[1])


def _no_storage(persistent_id: Any) -> NoReturn:
    raise TypeError("no storage")


def _unwrapped(node: object) -> object:
    return node.content if isinstance(node, Opaque) and node.content is not None else node


def _metadata(tree: object, path: str) -> Mapping[str, object]:
    """Return what a tree holds beside tensors, as plain data.

    Raises:
        CheckpointError: It is too large, or makes no sense.
    """
    told = flatten(tree, _TreeObjects(path).leaf, path, _unwrapped).plain
    return told if isinstance(told, dict) else {} if told is None else {"": told}
