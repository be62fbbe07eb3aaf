"""The messages of a ``saved_model.pbtxt``, as far as ``savedmodel_graph`` reads them."""

from __future__ import annotations

from ckpttool.formats.savedmodel.pbtext import Schema, encode
from ckpttool.formats.savedmodel.types import TYPES
from ckpttool.formats.savedmodel.walk import Message, message_in
from ckpttool.wire.source import Buffer, Source

SCHEMA: Schema = {
    "SavedModel": {"saved_model_schema_version": (1, "integer"), "meta_graphs": (2, "MetaGraphDef")},
    "MetaGraphDef": {
        "meta_info_def": (1, "MetaInfoDef"),
        "graph_def": (2, "GraphDef"),
        "saver_def": (3, "SaverDef"),
        "collection_def": (4, "Collection"),
        "signature_def": (5, "Signature"),
        "asset_file_def": (6, "AssetFileDef"),
        "object_graph_def": (7, "SavedObjectGraph"),
    },
    "MetaInfoDef": {"tags": (4, "string"), "tensorflow_version": (5, "string")},
    "SaverDef": {"save_tensor_name": (2, "string"), "restore_op_name": (3, "string")},
    "Collection": {"key": (1, "string"), "value": (2, "CollectionDef")},
    "CollectionDef": {"node_list": (1, "NodeList")},
    "NodeList": {"value": (1, "string")},
    "AssetFileDef": {"filename": (2, "string")},
    "GraphDef": {"node": (1, "NodeDef"), "library": (2, "FunctionDefLibrary")},
    "FunctionDefLibrary": {
        "function": (1, "FunctionDef"),
        "gradient": (2, "GradientDef"),
        "registered_gradients": (3, "RegisteredGradient"),
    },
    "GradientDef": {"gradient_func": (2, "string")},
    "RegisteredGradient": {"gradient_func": (1, "string")},
    "FunctionDef": {"signature": (1, "OpDef"), "node_def": (3, "NodeDef"), "ret": (4, "Returned")},
    "Returned": {"key": (1, "string"), "value": (2, "string")},
    "OpDef": {"name": (1, "string"), "input_arg": (2, "ArgDef")},
    "ArgDef": {"name": (1, "string")},
    "NodeDef": {"name": (1, "string"), "op": (2, "string"), "input": (3, "string"), "attr": (5, "Attr")},
    "Attr": {"key": (1, "string"), "value": (2, "AttrValue")},
    "AttrValue": {
        "list": (1, "ListValue"),
        "s": (2, "string"),
        "tensor": (8, "TensorProto"),
        "placeholder": (9, "string"),
        "func": (10, "NameAttrList"),
    },
    "ListValue": {"func": (9, "NameAttrList")},
    "NameAttrList": {"name": (1, "string"), "attr": (2, "Attr")},
    "TensorProto": {"dtype": (1, "type"), "tensor_content": (4, "string"), "string_val": (8, "string")},
    "Signature": {"key": (1, "string"), "value": (2, "SignatureDef")},
    "SignatureDef": {"inputs": (1, "Argument"), "outputs": (2, "Argument"), "method_name": (3, "string")},
    "Argument": {"key": (1, "string"), "value": (2, "TensorInfo")},
    "TensorInfo": {
        "name": (1, "string"),
        "dtype": (2, "type"),
        "tensor_shape": (3, "TensorShapeProto"),
        "coo_sparse": (4, "CooSparse"),
        "composite_tensor": (5, "CompositeTensor"),
    },
    "CooSparse": {
        "values_tensor_name": (1, "string"),
        "indices_tensor_name": (2, "string"),
        "dense_shape_tensor_name": (3, "string"),
    },
    "CompositeTensor": {"components": (2, "TensorInfo")},
    "TensorShapeProto": {"dim": (2, "Dim"), "unknown_rank": (3, "integer")},
    "Dim": {"size": (1, "integer")},
    "SavedObjectGraph": {"nodes": (1, "SavedObject"), "concrete_functions": (2, "ConcreteFunction")},
    "ConcreteFunction": {"key": (1, "string")},
    "SavedObject": {
        "children": (1, "ObjectReference"),
        "slot_variables": (3, "SlotVariableReference"),
        "user_object": (4, "SavedUserObject"),
        "function": (6, "SavedFunction"),
        "variable": (7, "SavedVariable"),
        "bare_concrete_function": (8, "SavedBareConcreteFunction"),
    },
    "ObjectReference": {"node_id": (1, "integer"), "local_name": (2, "string")},
    "SlotVariableReference": {"slot_variable_node_id": (3, "integer")},
    "SavedUserObject": {"identifier": (1, "string"), "metadata": (3, "string")},
    "SavedFunction": {"concrete_functions": (1, "string")},
    "SavedBareConcreteFunction": {"concrete_function_name": (1, "string")},
    "SavedVariable": {
        "dtype": (1, "type"),
        "shape": (2, "TensorShapeProto"),
        "name": (6, "string"),
        "experimental_distributed_variable_components": (8, "SavedVariable"),
    },
}

_OLD_NAMES = {"float32": "FLOAT", "float64": "DOUBLE", "float16": "HALF", "unknown": "INVALID"}


def _type_numbers() -> dict[str, int]:
    names = {f"DT_{_OLD_NAMES.get(name, name.upper())}": number for number, name in enumerate(TYPES)}
    return names | {f"{name}_REF": number + 100 for name, number in names.items() if number}


def text_message(source: Source) -> Message:
    """Return the message that a text stands for.

    Raises:
        DamagedCheckpoint: It is not the text of a message.
    """
    text = source.read(0, source.size)
    return message_in(Buffer(source.path, encode(source.path, text, SCHEMA, "SavedModel", _type_numbers())))
