"""The sidecar ``ckpttool.content``: a JSON document of all content that a format has no place for.

docs/reference/sidecar.md describes it. It has the paths and roles of the tensors, the ties between them,
the format whose conventions they follow, and either the whole tree or the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from isal import isal_zlib

from ckpttool.containers.jsontext import MAX_VALUES, DuplicateKeyObject, parse_json
from ckpttool.containers.zip_reader import Archive, Member
from ckpttool.core.checkpoint import Checkpoint, TrainingState
from ckpttool.core.errors import CheckpointError, LimitExceeded
from ckpttool.core.report import Finding, Sentence, not_scanned, warning
from ckpttool.core.tensor import Role, Tensor, role_of, role_of_module
from ckpttool.formats.content.assembly import training_of
from ckpttool.formats.content.tree import flatten, replace_tensors
from ckpttool.formats.content.tree_json import decode_tree, encode_tree
from ckpttool.formats.layer_documents import kind_document, kind_of_document
from ckpttool.formats.torch.tree_nodes import metadata_of, read_out
from ckpttool.storage.source import Source

if TYPE_CHECKING:
    from ckpttool.formats.writer import Content

ENTRY = "ckpttool.content"
"""Name of the record, key or file of the sidecar."""
SCHEMA = "ckpttool.content/1"
MAX_DOCUMENT = 1 << 26
"""Maximum size of a document in bytes."""
_MAX_INTEGER_BITS = 4096
"""Maximum length of an integer in metadata, as in ``plain_data``; a tree may have longer ones."""
_PLAIN = frozenset({dict, list, str, int, float, bool, type(None)})
_COUNTS = ("epoch", "step")
_NUMBERS = (*_COUNTS, "loss", "learning_rate", "best", "seed")
_MOST = 1 << 63
"""Limit on a count of epochs or steps, which also excludes NaN and infinities."""
_MOST_BITS = 1024
"""Maximum length of an integer that may represent a float; a seed may be longer than 64 bits."""
_MODELS = ("keras.config", "keras.training_config")
_ASSET, _ARRAYS = "keras.asset:", ".npz"


def apply_sidecar(checkpoint: Checkpoint, document: bytes | str, where: str) -> Checkpoint:
    """Return the checkpoint with the content of its sidecar.

    Tensors get their paths, roles and ties, and conventions, metadata, training state, tree and native parts
    are those of the document. If the document doesn't fit, the checkpoint is unchanged, with a warning
    ``content-entry``.

    Args:
        checkpoint: The checkpoint without the sidecar; use and close only the new one.
        document: The text of the sidecar.
        where: Its place in the file, for the warning.
    """
    try:
        return _apply_document(checkpoint, document)
    except CheckpointError as failure:
        reason = failure.reason
    except (ValueError, TypeError) as failure:
        reason = str(failure)
    finding = warning("content-entry", f"the entry {ENTRY} is not used: {reason}", where)
    return checkpoint.replace(findings=(*checkpoint.findings, finding))


def apply_sidecar_record(checkpoint: Checkpoint, archive: Archive, member: Member | None) -> Checkpoint:
    """Return the checkpoint with the sidecar in a record, or with a warning if that can't be read.

    Use and close only the new checkpoint.
    """
    if member is None:
        return checkpoint
    if member.size > MAX_DOCUMENT:
        return _add_unread_warning(checkpoint, _too_long(member.size), member.name)
    try:
        document = archive.read(member)
    except CheckpointError as failure:
        return _add_unread_warning(checkpoint, failure.reason, member.name)
    # Checksums are verified later, with all other records, but the sidecar is used at once: a flipped bit in
    # a name or a role would be taken for the content.
    if archive.has_checksums and isal_zlib.crc32(document) != member.crc32:
        return _add_unread_warning(checkpoint, "its checksum does not match", member.name)
    return apply_sidecar(checkpoint, document, member.name)


def apply_sidecar_file(checkpoint: Checkpoint, source: Source | None) -> Checkpoint:
    """Return the checkpoint with the sidecar in a file next to it; see ``apply_sidecar_record``."""
    if source is None:
        return checkpoint
    if source.size > MAX_DOCUMENT:
        return _add_unread_warning(checkpoint, _too_long(source.size), ENTRY)
    return apply_sidecar(checkpoint, source.read(0, source.size, ENTRY), ENTRY)


def _add_unread_warning(checkpoint: Checkpoint, reason: str, where: str) -> Checkpoint:
    checkpoint.findings += (warning("content-entry", f"it was not used: {reason}", where),)
    return checkpoint


def _too_long(nbytes: int) -> str:
    return f"{nbytes:,} bytes; at most {MAX_DOCUMENT:,} are read"


def _apply_document(checkpoint: Checkpoint, document: bytes | str) -> Checkpoint:
    data = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document
    if len(data) > MAX_DOCUMENT:
        raise ValueError(f"{len(data):,} bytes; at most {MAX_DOCUMENT:,} are read")
    parsed = parse_json(checkpoint.path, data, "entry")
    if type(parsed) is not dict or parsed.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    # A document has all tensors if the format lost their paths or ties, else only the roles that differ. The
    # native parts and the safety findings are added to the format's own, since a sidecar is as untrusted as
    # the file, and a model may be written from its native parts.
    tensors = checkpoint.tensors
    by_name = {tensor.name: tensor for tensor in reversed(tensors)}
    changes: dict[str, Any] = {}
    if parsed.get("tensors") is not None:
        tensors = _tensors_of_document(parsed.pop("tensors"), by_name)
        by_name = {tensor.name: tensor for tensor in tensors}
        changes["tree"] = lambda: None
    elif parsed.get("roles") is not None:
        changed = _change_roles(parsed.pop("roles"), by_name)
        tensors = tuple(changed.get(id(tensor), tensor) for tensor in tensors)
        changes["tree"] = lambda: replace_tensors(checkpoint.tree, changed)
    content = decode_tree(parsed.get("content"), parsed.get("shared", []), by_name.__getitem__)
    if not isinstance(content, dict):
        raise ValueError("it has no content")
    tree = content.get("tree")
    metadata = _metadata(content, tree, tensors, checkpoint)
    if tree is not None:
        changes["tree"] = lambda: tree
    if (conventions := parsed.get("conventions")) is not None:
        layers = parsed.get("layers", {})
        if not isinstance(conventions, str) or not isinstance(layers, dict):
            raise ValueError("invalid conventions or layers")
        kinds = {name: kind_of_document(kind) for name, kind in layers.items()}
        changes |= {"conventions": conventions, "layers": lambda: kinds}
    native = content.get("native", {})
    if not isinstance(native, dict) or not all(
        isinstance(key, str) and isinstance(part, bytes) for key, part in native.items()
    ):
        raise ValueError("invalid native parts")
    training = content.get("training", {})
    check_training(training)
    name = checkpoint.path.replace("\\", "/").rpartition("/")[2]
    return checkpoint.replace(
        tensors=tensors,
        metadata=lambda: metadata,
        training=lambda: merge_training(training_of(metadata, tensors, name), training),
        native=lambda: {**checkpoint.native, **native},
        safety=(
            *checkpoint.safety,
            *native_safety(native, ENTRY, sum(file.nbytes for file in checkpoint.files)),
        ),
        **changes,
    )


def _metadata(
    content: dict[str, Any], tree: object, tensors: tuple[Tensor, ...], checkpoint: Checkpoint
) -> Mapping[str, object]:
    """Return the metadata of the tree if there is one, or else of the document."""
    metadata = content.get("metadata")
    if metadata is not None:
        flatten(metadata, _require_plain, checkpoint.path)
        if not isinstance(metadata, dict):
            raise ValueError("the metadata is not a dictionary")
    if tree is not None:
        of_tree = metadata_of(tree, tensors, checkpoint.path)
        # JSON texts are compared, because in Python a NaN differs from itself, and 1 equals True.
        if metadata is not None and json.dumps(metadata) != json.dumps(of_tree):
            raise ValueError("the metadata differs from that of the tree")
        return of_tree
    if metadata is None:
        return {name: value for name, value in checkpoint.metadata.items() if name != ENTRY}
    return metadata


def _require_plain(node: object) -> None:
    """Raise ``ValueError`` if a node can't be in metadata."""
    kind = type(node)
    for item in node if isinstance(node, list) else (node,):
        if isinstance(item, int) and item.bit_length() > _MAX_INTEGER_BITS:
            raise ValueError(f"the metadata has an integer of {item.bit_length():,} bits")
    if kind not in _PLAIN:
        raise ValueError(f"the metadata has a {kind.__name__}")
    if isinstance(node, dict) and not all(type(key) is str for key in node):
        raise ValueError("the metadata has a key that is not text")


# Tensors --------------------------------------------------------------------------------------------


def _tensors_of_document(entries: object, stored: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors of a document, in its order."""
    # A stored tensor gets its path and role. One that isn't stored shares the values of another before it.
    # Formats may store a tie as two names of one tensor: the first name in the document owns the values.
    # Every stored tensor with values must be in the document.
    if type(entries) is not dict:
        raise ValueError(
            "the tensors are not a dictionary"
            if not isinstance(entries, DuplicateKeyObject)
            else "a duplicate tensor"
        )
    described: dict[str, Tensor] = {}
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        if type(entry) is not dict:
            raise ValueError(f"invalid entry of the tensor {name}")
        path = entry.get("path", [name])
        if not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
            raise ValueError(f"invalid path of the tensor {name}")
        if ".".join(map(str, path)) != name:
            raise ValueError(f"the path of the tensor {name} is that of another")
        role, owner = Role(entry.get("role", "other")), entry.get("shares_with")
        if name in stored:
            first = owners.setdefault(stored[name].shares_with or name, name)
            shares_with = None if first == name else first
            described[name] = replace(stored[name], path=tuple(path), role=role, shares_with=shares_with)
        elif isinstance(owner, str) and owner in described and described[owner].shares_with is None:
            described[name] = replace(described[owner], path=tuple(path), role=role, shares_with=owner)
        else:
            raise ValueError(f"unknown tensor {name}")
    remaining = [tensor for name, tensor in stored.items() if name not in described]
    if missing := next((tensor for tensor in remaining if tensor.values is not None), None):
        raise ValueError(f"it omits the tensor {missing.name}")
    return (*described.values(), *remaining)


def _change_roles(roles: object, stored: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return the tensors with changed roles, by the ``id`` of the original ones."""
    if type(roles) is not dict:
        raise ValueError("the roles are not a dictionary")
    if missing := next((name for name in roles if name not in stored), None):
        raise ValueError(f"unknown tensor {missing}")
    return {id(stored[name]): replace(stored[name], role=Role(role)) for name, role in roles.items()}


# The training state ---------------------------------------------------------------------------------


def training_document(state: TrainingState) -> dict[str, object]:
    """Return a training state without hyper-parameters, which are in the metadata."""
    fields = {name: getattr(state, name) for name in (*_NUMBERS, "saved_at")}
    document: dict[str, object] = {name: value for name, value in fields.items() if _is_valid(name, value)}
    if state.metrics:
        document["metrics"] = dict(state.metrics)
    if document:
        document["origin"] = dict(state.origin)
    return document


def check_training(document: object) -> None:
    """Raise ``ValueError`` for a document that ``training_document`` doesn't write."""
    if not isinstance(document, dict):
        raise ValueError("the training state is not a dictionary")
    for name, value in document.items():
        if not _is_valid(name, value):
            raise ValueError(f"the training state has an invalid {name!r:.40}")


def merge_training(state: TrainingState, document: Mapping[str, Any]) -> TrainingState:
    """Return a training state whose fields are replaced by those of a sidecar."""
    if not document:
        return state
    return replace(state, **{**document, "origin": {**state.origin, **document.get("origin", {})}})


def _is_valid(name: object, value: object) -> bool:
    """Return whether a value is valid for a field of a training state; NaN is a valid loss."""
    if name in _NUMBERS:
        return _is_number(value) and (name not in _COUNTS or -_MOST < value < _MOST)
    if name in ("metrics", "origin"):
        return isinstance(value, Mapping) and all(
            type(key) is str and (_is_number(item) if name == "metrics" else type(item) is str)
            for key, item in value.items()
        )
    return name == "saved_at" and type(value) is str


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) is float or (type(value) is int and value.bit_length() <= _MOST_BITS)


# Native parts ---------------------------------------------------------------------------------------


def native_safety(native: Mapping[str, bytes], where: str, nbytes: int) -> tuple[Finding, ...]:
    """Return the safety findings for native parts, as readers of their formats would return them.

    Args:
        native: As ``Checkpoint.native``.
        where: Name of the entry that holds them.
        nbytes: Size of the files in bytes.
    """
    findings: list[Finding] = []
    for key, data in native.items():
        place = f"{where}.{key}"
        try:
            if key in _MODELS:
                from ckpttool.formats.keras.config import judge, read_config

                findings += judge(read_config("", data), place, nbytes)
            elif key.startswith(_ASSET) and key.endswith(_ARRAYS):
                message = "arrays, in which pickles were not checked"
                findings.append(not_scanned(place, message))
            elif key.startswith(_ASSET):
                from ckpttool.core.readable import Buffer
                from ckpttool.formats.keras.config import judge_record

                findings += judge_record(key.removeprefix(_ASSET), Buffer("", data), 0, len(data), place)
        except CheckpointError:
            findings.append(not_scanned(place))
    return tuple(
        finding._replace(message=Sentence(f"in a model that is written from it: {finding.message}"))
        for finding in findings
    )


def sidecar_of(content: Content, *, tree: bool = True, names: bool = False) -> bytes | None:
    """Return the sidecar of a content as JSON text in ASCII, or None if it would be empty.

    Args:
        content: The content to write, with the names that the reader of the target will give to its tensors.
        tree: False if the format holds the tree itself, and the ties; the sidecar then has only the rest.
        names: Whether it has the names of tensors even if nothing else is in it.
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
        roles, training = _missing_from_tree(content)
    if training:
        parts["training"] = training
    needs_tensors = has_tensors and (names or any(map(_is_more_than_its_name, content.tensors)))
    if not (parts or roles or content.conventions or needs_tensors):
        return None
    form, shared = encode_tree(parts)
    sidecar: dict[str, object] = {"schema": SCHEMA, "source": content.source_format}
    if content.conventions:
        layers = {name: kind_document(kind) for name, kind in content.layers.items()}
        sidecar |= {"conventions": content.conventions, "layers": layers}
    if has_tensors:
        sidecar["tensors"] = {tensor.name: _tensor_entry(tensor) for tensor in content.tensors}
    if roles:
        sidecar["roles"] = roles
    sidecar |= {"shared": shared, "content": form}
    text = json.dumps(sidecar, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_DOCUMENT or sum(map(text.count, "[{,")) > MAX_VALUES:
        raise LimitExceeded(ENTRY, f"{len(text):,} bytes of JSON", expected=f"at most {MAX_DOCUMENT:,}")
    return text.encode("ascii")


def _missing_from_tree(content: Content) -> tuple[dict[str, str], dict[str, object]]:
    """Return the roles and the training state that a reader of the tree alone wouldn't find."""
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
    """Return whether a tensor has a path, tie or role that doesn't follow from its name."""
    if len(tensor.path) != 1 or tensor.shares_with is not None:
        return True
    if tensor.role is Role.WEIGHTS:
        return role_of(tensor.path, tensor.shape) in (Role.OPTIMIZER, Role.TRAINING)
    return tensor.role is Role.OTHER and role_of_module(tensor.path) is Role.WEIGHTS
