"""Writer of SavedModels that hold variables only.

``tf.saved_model.load`` returns an object with the variables as attributes, along the parts of their names:
``fc.weight`` is ``loaded.fc.weight``. The model has no graph and no signatures, so it can't be called,
served or loaded with TensorFlow 1. Items of lists are attributes named ``0`` and ``1``, for ``getattr``.

Source: tensorflow/tensorflow ``core/protobuf/saved_model.proto``, ``saved_object_graph.proto``,
``python/saved_model/load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from ckpttool.containers.protobuf import bytes_field, number_field, text_field
from ckpttool.core.tensor import Role, Tensor
from ckpttool.formats.savedmodel.layout import BINARY, SIDECAR, VARIABLES
from ckpttool.formats.sidecar import sidecar_of
from ckpttool.formats.tensorflow.bundle_writer import NUMBERS, refused_type, shape_message, write_bundle
from ckpttool.formats.tensorflow.object_graph import (
    GRAPH_KEY,
    graph_of,
    key_of,
    objects_of,
    steps_of_name,
)
from ckpttool.formats.tensorflow.writer import refused_names, without_graph_metadata
from ckpttool.formats.writer import Content, Target, WriteOptions, Writer

_TAG = "serve"
_VERSIONS = number_field(1, 1) + number_field(2, 1)  # producer and min_consumer
_USER_OBJECT = bytes_field(4, text_field(1, "_generic_user_object") + bytes_field(2, _VERSIONS))
_OP_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
"""Names that TensorFlow accepts for the op of a variable; a variable with another name is written unnamed."""
_AT_ROOT = frozenset({"graph_debug_info", "tensorflow_version", "tensorflow_git_version"})
"""Attributes of the root that the loader sets."""
OWN_ATTRIBUTES = frozenset(
    re.findall(
        r"\w+",
        """
        _add_trackable_child _add_variable_with_custom_getter _checkpoint_adapter
        _checkpoint_dependencies _copy_trackable_to_cpu _deferred_dependencies _delete_tracking
        _deserialization_dependencies _deserialize_from_proto _export_to_saved_model_graph
        _gather_saveables_for_checkpoint _handle_deferred_dependencies _lookup_dependency
        _maybe_initialize_trackable _name_based_attribute_restore _name_based_restores _no_dependency
        _object_identifier _preload_simple_restoration _restore_from_tensors _self_name_based_restores
        _self_saveable_object_factories _self_setattr_tracking
        _self_unconditional_checkpoint_dependencies _self_unconditional_deferred_dependencies
        _self_unconditional_dependency_names _self_update_uid _serialize_to_proto _serialize_to_tensors
        _setattr_tracking _tf_api_names _tf_api_names_v1 _track_trackable _trackable_children
        _unconditional_checkpoint_dependencies _unconditional_dependency_names _update_uid
        """,
    )
)
"""Attributes that TensorFlow's trackable objects need themselves; no variable may replace them."""

NO_VARIABLES = frozenset(
    {"variant", "qint16", "quint16", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"}
)
"""Types that TensorFlow's variables can't have."""


class SavedModelWriter(Writer):
    """Writer of a directory that TensorFlow 2 loads as an object with variables."""

    name: ClassVar[str] = "savedmodel"
    dtypes: ClassVar[frozenset[str]] = frozenset(NUMBERS) - NO_VARIABLES
    shape = "directory"

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        yield from refused_names(content)
        objects, numbers = objects_of(tensor.name for tensor in content.tensors)
        for name, number in numbers.items():
            if (inner := next(iter(objects.children[number]), None)) is not None:
                yield (
                    f"{name}: it is a tensor that contains {name}.{inner}, but a variable of a SavedModel "
                    "has no attributes (use --map)"
                )
        for tensor in content.tensors:
            yield from refused_type(tensor)
            steps = steps_of_name(tensor.name)
            for step in steps:
                if step in OWN_ATTRIBUTES or (step.startswith("__") and step.endswith("__")):
                    own = f"an object of TensorFlow needs its attribute {step} itself"
                    yield f"{tensor.name}: {own} (use --map)"
            if steps[0] in _AT_ROOT:
                yield f"{tensor.name}: loading a SavedModel sets {steps[0]} (use --map)"

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        tensors = [(key_of(tensor.name).encode(), tensor) for tensor in content.owned]
        graph = graph_of((tensor.name for _, tensor in tensors), {})
        write_bundle(target, f"{VARIABLES}/{VARIABLES}", tensors, {GRAPH_KEY.encode(): graph})
        sidecar = sidecar_of(without_graph_metadata(content))
        if sidecar is not None:
            target.create(SIDECAR).write(sidecar)
        target.create(BINARY).write(_model_message(content))


def _model_message(content: Content) -> bytes:
    """Return a SavedModel message with one meta graph, which has an object graph only."""
    # Tied tensors are one object that several parents have as a child.
    owned = {tensor.name: tensor for tensor in content.owned}
    objects, numbers = objects_of(owned)
    for tensor in content.tensors:
        if tensor.shares_with is not None:
            objects.tie(tensor.name, numbers[tensor.shares_with])
    variables = {numbers[name]: tensor for name, tensor in owned.items()}
    nodes = []
    for number, children in enumerate(objects.children):
        if number in variables:
            node = _variable_message(variables[number])
        else:
            links = [
                bytes_field(1, number_field(1, child) + text_field(2, name))
                for name, child in children.items()
            ]
            node = b"".join(links) + _USER_OBJECT
        nodes.append(bytes_field(1, node))
    info = bytes_field(4, _TAG.encode())
    graph = bytes_field(1, info) + bytes_field(7, b"".join(nodes))
    return number_field(1, 1) + bytes_field(2, graph)


def _variable_message(tensor: Tensor) -> bytes:
    is_trained = tensor.role is Role.WEIGHTS and tensor.dtype.kind in ("float", "complex")
    variable = (
        number_field(1, NUMBERS[tensor.dtype.name]),
        bytes_field(2, shape_message(tensor.shape)),
        number_field(3, is_trained),
        text_field(6, tensor.name if _OP_NAME.fullmatch(tensor.name) else ""),
    )
    return bytes_field(7, b"".join(variable))
