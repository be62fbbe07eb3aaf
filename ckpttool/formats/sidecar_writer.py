"""The sidecar ``ckpttool.content`` of what is to be written."""

from __future__ import annotations

import json

from ckpttool.containers.jsontext import MAX_VALUES
from ckpttool.core.errors import LimitExceeded
from ckpttool.core.tensor import Role, Tensor, role_of, role_of_module
from ckpttool.formats.content.tree_json import encode_tree
from ckpttool.formats.sidecar import ENTRY, MAX_DOCUMENT, SCHEMA, training_document
from ckpttool.formats.torch.tree_nodes import read_out
from ckpttool.formats.writer import Content


def sidecar_of(content: Content, *, tree: bool = True, names: bool = False) -> bytes | None:
    """Return the sidecar of a content as JSON text in ASCII, or None if there is nothing to carry.

    Args:
        content: What is written; the reader of the target must give its tensors their own names.
        tree: False where the format holds the tree itself, and the ties: only what is not to be told from
            these is in it then.
        names: Whether some names are to be stored though nothing else is.
    """
    return content.memoized(("sidecar", tree, names), lambda: _make_sidecar(content, tree, names))


def _make_sidecar(content: Content, tree: bool, names: bool) -> bytes | None:
    parts: dict[str, object] = {}
    if tree and content.tree is not None:
        parts["tree"] = content.tree
    if content.metadata:
        parts["metadata"] = dict(content.metadata)
    if content.native:
        parts["native"] = dict(content.native)
    has_tensors = tree or content.tree is None
    training, roles = training_document(content.training), dict[str, str]()
    if not has_tensors:
        roles, training = _beside_tree(content)
    if training:
        parts["training"] = training
    needs_tensors = has_tensors and (names or any(map(_is_more_than_its_name, content.tensors)))
    if not (parts or roles or content.conventions or needs_tensors):
        return None
    form, shared = encode_tree(parts)
    sidecar: dict[str, object] = {"schema": SCHEMA, "source": content.source_format}
    if content.conventions:
        sidecar |= {"conventions": content.conventions, "layers": dict(content.layers)}
    if has_tensors:
        sidecar["tensors"] = {tensor.name: _tensor_entry(tensor) for tensor in content.tensors}
    if roles:
        sidecar["roles"] = roles
    sidecar |= {"shared": shared, "content": form}
    text = json.dumps(sidecar, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_DOCUMENT or sum(map(text.count, "[{,")) > MAX_VALUES:
        raise LimitExceeded(ENTRY, f"{len(text):,} bytes of JSON", expected=f"at most {MAX_DOCUMENT:,}")
    return text.encode("ascii")


def _beside_tree(content: Content) -> tuple[dict[str, str], dict[str, object]]:
    """Return the roles, and the training state, that are not read out of the tree by itself."""
    tensors, state = read_out(content.tree, ENTRY)
    known = {tensor.name: tensor.role for tensor in tensors}
    roles = {
        tensor.name: tensor.role.value
        for tensor in content.tensors
        if known.get(tensor.name) is not tensor.role
    }
    training, of_tree = training_document(content.training), training_document(state)
    is_known = all(of_tree.get(name) == value for name, value in training.items() if name != "origin")
    return roles, {} if is_known else training


def _tensor_entry(tensor: Tensor) -> dict[str, object]:
    entry: dict[str, object] = {"path": list(tensor.path), "role": tensor.role.value}
    if tensor.shares_with is not None:
        entry["shares_with"] = tensor.shares_with
    return entry


def _is_more_than_its_name(tensor: Tensor) -> bool:
    """Return whether a reader could not tell a tensor's path, tie and role from its name alone."""
    if len(tensor.path) != 1 or tensor.shares_with is not None:
        return True
    if tensor.role is Role.WEIGHTS:
        return role_of(tensor.path, tensor.shape) in (Role.OPTIMIZER, Role.TRAINING)
    return tensor.role is Role.OTHER and role_of_module(tensor.path) is Role.WEIGHTS
