"""The entry ``ckpttool.content`` of what is to be written."""

from __future__ import annotations

import json

from ckpttool.errors import LimitExceeded
from ckpttool.formats.content.sidecar import ENTRY, MAX_DOCUMENT, SCHEMA, training_document
from ckpttool.formats.content.tree_json import encode_tree
from ckpttool.formats.content.tree_reading import read_out
from ckpttool.roles import role_of, role_of_module
from ckpttool.tensor import Role, Tensor
from ckpttool.wire.jsontext import MAX_VALUES
from ckpttool.writing.content import Content


def document(content: Content, *, tree: bool = True, names: bool = False) -> bytes | None:
    """Return the entry of a content as JSON text in ASCII, or None if there is nothing to carry.

    Args:
        content: What is written; the reader of the target must give its tensors their own names.
        tree: False where the format holds the tree itself, and the ties: only what is not to be told from
            these is in it then.
        names: Whether some names are to be told though nothing else is."""
    return content.once(("document", tree, names), lambda: _document(content, tree, names))


def _document(content: Content, tree: bool, names: bool) -> bytes | None:
    own: dict[str, object] = {}
    if tree and content.tree is not None:
        own["tree"] = content.tree
    if content.metadata:
        own["metadata"] = dict(content.metadata)
    if content.native:
        own["native"] = dict(content.native)
    tells_names = tree or content.tree is None
    roles, training = ({}, training_document(content.training)) if tells_names else _untold(content)
    if training:
        own["training"] = training
    if (
        not own
        and not roles
        and not content.conventions
        and not (tells_names and (names or any(map(_is_to_be_told, content.tensors))))
    ):
        return None
    form, shared = encode_tree(own)
    told: dict[str, object] = {"schema": SCHEMA, "source": content.source_format}
    if content.conventions:
        told |= {"conventions": content.conventions, "layers": dict(content.layers)}
    if tells_names:
        told["tensors"] = {tensor.name: _told(tensor) for tensor in content.tensors}
    if roles:
        told["roles"] = roles
    text = json.dumps({**told, "shared": shared, "content": form}, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_DOCUMENT or sum(map(text.count, "[{,")) > MAX_VALUES:
        raise LimitExceeded(ENTRY, f"{len(text):,} bytes of JSON", expected=f"at most {MAX_DOCUMENT:,}")
    return text.encode("ascii")


def _untold(content: Content) -> tuple[dict[str, str], dict[str, object]]:
    """Return the roles, and the training state, that the tree does not tell by itself."""
    tensors, state = read_out(content.tree, ENTRY)
    known = {tensor.name: tensor.role for tensor in tensors}
    roles = {
        tensor.name: tensor.role.value
        for tensor in content.tensors
        if known.get(tensor.name) is not tensor.role
    }
    training, found = training_document(content.training), training_document(state)
    is_told = all(found.get(name) == value for name, value in training.items() if name != "origin")
    return roles, {} if is_told else training


def _is_to_be_told(tensor: Tensor) -> bool:
    """Return whether something of a tensor is not in its name."""
    if len(tensor.path) != 1 or tensor.shares_with is not None:
        return True
    is_named_otherwise = role_of(tensor.path, tensor.shape) in (Role.OPTIMIZER, Role.TRAINING)
    is_named_so = role_of_module(tensor.path) is Role.WEIGHTS
    return is_named_otherwise if tensor.role is Role.WEIGHTS else is_named_so and tensor.role is Role.OTHER


def _told(tensor: Tensor) -> dict[str, object]:
    told: dict[str, object] = {"path": list(tensor.path), "role": tensor.role.value}
    if tensor.shares_with is not None:
        told["shares_with"] = tensor.shares_with
    return told
