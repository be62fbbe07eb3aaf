"""Converter of ``saved_model.pbtxt`` from Protocol Buffers' text format to the binary form.

The schema has the fields that the other modules read. Other fields are checked to be well formed and left
out.

Source: Protocol Buffers documentation, "Text Format Language Specification".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckpttool.containers.protobuf import bytes_field, encoded_varint
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, require_at_most
from ckpttool.core.readable import Buffer
from ckpttool.formats.savedmodel.walk import MAX_DEPTH, MAX_FIELDS, Message, message_in
from ckpttool.formats.tensorflow.bundle import DTYPE_NAMES, REFERENCE
from ckpttool.storage.source import Source

Schema = Mapping[str, Mapping[str, tuple[int, str]]]
"""Number and type of each field, by message. A type is the name of a message, ``string``, ``integer``,
``type`` (an enum whose names the caller knows) or ``skipped``."""

MAX_TEXT = 1 << 26
"""Limit on the bytes of text; larger models are written in the binary form."""

# A name in brackets is an extension, or the URL of a type in an ``Any`` message: hence ``.``, ``/`` and
# ``-``. Numbers are matched loosely here (hexadecimal, octal, floats with a suffix), and checked if the
# schema has the field.
_TOKEN = re.compile(
    rb"""\s+ | \#[^\n]* |
    (?P<name>[A-Za-z_][\w./-]*) | (?P<number>-?(?:\.\d|\d)[\w.+-]*|-\s*inf(?:inity)?|-\s*nan) |
    (?P<text>"(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*') | (?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE | re.DOTALL,
)
_DECIMALS = 40  # more than a number of 64 bits has, also with underscores
_ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
_PLAIN_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
_UNKNOWN = (0, "skipped")
_CLOSING = {b"{": b"}", b"<": b">"}


class _TextToken(NamedTuple):
    kind: str
    text: bytes
    at: int


class _OpenMessage(NamedTuple):
    """Message or list that is being parsed.

    Attributes:
        fields: Fields of the message in the schema.
        number: Field number in the enclosing message; 0 if the message is left out.
        closing: Token that ends it.
        out: Binary form so far; a list appends to that of the enclosing message.
        item: Field number and type of a list's items; None for a message.
    """

    fields: Mapping[str, tuple[int, str]]
    number: int
    closing: bytes
    out: bytearray
    item: tuple[int, str] | None = None


def encode(path: str, text: bytes, schema: Schema, root: str, enum: Mapping[str, int]) -> bytes:
    """Return a message in binary form, with the fields that the schema has.

    Args:
        path: The file, for errors.
        text: The message as text.
        schema: Fields of all messages.
        root: Name of the outermost message.
        enum: Numbers by name, for values of type ``type``.
    """
    require_at_most(path, MAX_TEXT, len(text), "{:,} bytes of text")
    return _Encoder(path, text, schema, enum).run(root)


class _Encoder:
    """Parser of one text, with a stack instead of recursion."""

    def __init__(self, path: str, text: bytes, schema: Schema, enum: Mapping[str, int]) -> None:
        self._path = path
        self._schema = schema
        self._enum = enum
        self._tokens = self._tokens_in(text)
        self._next: _TextToken | None = next(self._tokens, None)
        self._end = len(text)
        self._stack: list[_OpenMessage] = []
        self._fields = 0

    def run(self, root: str) -> bytes:
        """Return the binary form of the outermost message."""
        outermost = _OpenMessage(self._schema[root], 0, b"", bytearray())
        self._stack.append(outermost)
        while self._next is not None:
            token, top = self._take(), self._stack[-1]
            if token.text == top.closing:
                self._stack.pop()
                if top.number:
                    self._stack[-1].out.extend(bytes_field(top.number, bytes(top.out)))
            elif top.item is not None and token.text != b",":
                self._value(*top.item, token)
            elif token.kind == "name" or token.text == b"[":
                self._field(self._field_name(token))
            elif token.text not in (b",", b";"):
                raise self._damage(f"{token.text[:20]!r} where a field should be", token.at)
        if len(self._stack) > 1:
            raise self._damage(f"{len(self._stack) - 1} messages that don't end", self._end)
        return bytes(outermost.out)

    def _tokens_in(self, text: bytes) -> Iterator[_TextToken]:
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._damage(f"{text[at : at + 1]!r} is not text of a message", at)
            if match.lastgroup is not None:
                yield _TextToken(match.lastgroup, match[match.lastgroup], at)
            at = match.end()

    def _take(self) -> _TextToken:
        token = self._next
        if token is None:
            raise self._damage("the text ends within a field", self._end)
        self._next = next(self._tokens, None)
        return token

    def _field_name(self, token: _TextToken) -> str:
        """Return the name of a field; ``[]`` for an extension, whose name is in brackets."""
        if token.kind == "name":
            return token.text.decode()
        while self._take().text != b"]":
            pass
        return "[]"

    def _field(self, name: str) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise LimitExceeded(self._path, f"more than {MAX_FIELDS:,} fields", expected="less")
        number, kind = self._stack[-1].fields.get(name, _UNKNOWN)
        if self._next is not None and self._next.text == b":":
            self._take()
        token = self._take()
        if token.text == b"[":
            self._push(_OpenMessage({}, 0, b"]", self._stack[-1].out, (number, kind)))
        else:
            self._value(number, kind, token)

    def _value(self, number: int, kind: str, token: _TextToken) -> None:
        if token.text in _CLOSING:
            known = number if kind in self._schema else 0
            self._push(_OpenMessage(self._schema.get(kind, {}), known, _CLOSING[token.text], bytearray()))
        else:
            self._scalar(number, kind, token)

    def _push(self, opened: _OpenMessage) -> None:
        if len(self._stack) > MAX_DEPTH:
            found = f"messages nested more than {MAX_DEPTH} deep"
            raise LimitExceeded(self._path, found, expected="less")
        self._stack.append(opened)

    def _scalar(self, number: int, kind: str, token: _TextToken) -> None:
        if token.kind == "mark":
            raise self._damage(f"{token.text!r} where a value should be", token.at)
        texts = [_unescape(token.text[1:-1])] if token.kind == "text" else []
        while texts and self._next is not None and self._next.kind == "text":  # adjacent strings are one
            texts.append(_unescape(self._take().text[1:-1]))
        out = self._stack[-1].out
        if kind == "string" and token.kind == "text":
            out.extend(bytes_field(number, b"".join(texts)))
        elif kind in ("integer", "type"):
            out.extend(encoded_varint(number << 3) + encoded_varint(self._integer(token)))
        elif number and kind != "skipped":
            raise self._damage(f"{token.text[:20]!r} where a {kind} should be", token.at)

    def _integer(self, token: _TextToken) -> int:
        text = token.text.decode("ascii", "replace")
        if text in self._enum or text in ("true", "false"):
            return self._enum.get(text, int(text == "true"))
        # TensorFlow parses the text in Python, which takes octal numbers as in C besides its own literals. To
        # convert millions of decimal digits would take quadratic time; other bases take linear time.
        is_decimal = not text.removeprefix("-").startswith("0")
        try:
            if is_decimal and len(text) > _DECIMALS:
                raise ValueError("too many digits")
            value = int(text, 8) if re.fullmatch(r"-?0[0-7]+", text) else int(text, 0)
        except ValueError as failure:
            raise self._damage(f"{text[:20]!r} where a number should be", token.at) from failure
        if not -(1 << 63) <= value < 1 << 64:
            raise self._damage(f"a number of more than 64 bits: {text[:20]}", token.at)
        return value & (1 << 64) - 1

    def _damage(self, why: str, at: int) -> DamagedCheckpoint:
        return DamagedCheckpoint(self._path, f"{why} (byte {at:,})", code="pbtxt-damaged")


def _unescape(text: bytes) -> bytes:
    return _ESCAPE.sub(_unescape_match, text) if b"\\" in text else text


def _unescape_match(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, short, long, plain = match.groups()
    if octal:
        return bytes([int(octal, 8) & 0xFF])
    if hexadecimal:
        return bytes([int(hexadecimal, 16)])
    if short or long:
        return chr(min(int(short or long, 16), 0x10FFFF)).encode("utf-8", "replace")
    return _PLAIN_ESCAPES.get(plain, plain)


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
    "SaverDef": {
        "filename_tensor_name": (1, "string"),
        "save_tensor_name": (2, "string"),
        "restore_op_name": (3, "string"),
    },
    "Collection": {"key": (1, "string"), "value": (2, "CollectionDef")},
    "CollectionDef": {"node_list": (1, "NodeList")},
    "NodeList": {"value": (1, "string")},
    "AssetFileDef": {"tensor_info": (1, "TensorInfo"), "filename": (2, "string")},
    "GraphDef": {"node": (1, "NodeDef"), "library": (2, "FunctionDefLibrary")},
    "FunctionDefLibrary": {
        "function": (1, "FunctionDef"),
        "gradient": (2, "GradientDef"),
        "registered_gradients": (3, "RegisteredGradient"),
    },
    "GradientDef": {"gradient_func": (2, "string")},
    "RegisteredGradient": {"gradient_func": (1, "string")},
    "FunctionDef": {
        "signature": (1, "OpDef"),
        "node_def": (3, "NodeDef"),
        "ret": (4, "Returned"),
        "attr": (5, "Attr"),
    },
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
    "ConcreteFunction": {"key": (1, "string"), "value": (2, "SavedConcreteFunction")},
    "SavedConcreteFunction": {"bound_inputs": (2, "integer")},
    "SavedObject": {
        "children": (1, "ObjectReference"),
        "slot_variables": (3, "SlotVariableReference"),
        "user_object": (4, "SavedUserObject"),
        "asset": (5, "SavedAsset"),
        "function": (6, "SavedFunction"),
        "variable": (7, "SavedVariable"),
        "bare_concrete_function": (8, "SavedBareConcreteFunction"),
        "constant": (9, "SavedConstant"),
        "resource": (10, "RestoredResource"),
        "captured_tensor": (12, "CapturedTensor"),
    },
    "SavedAsset": {"asset_file_def_index": (1, "integer")},
    "SavedConstant": {"operation": (1, "string")},
    "RestoredResource": {"device": (1, "string")},
    "CapturedTensor": {"name": (1, "string"), "concrete_function": (2, "string")},
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


def text_message(source: Source) -> Message:
    """Return the message in a ``saved_model.pbtxt``."""
    # The text names enum values as the .proto file does: ``DT_FLOAT``, ``DT_INT32``, ``DT_FLOAT_REF``.
    types = {f"DT_{_OLD_NAMES.get(name, name.upper())}": number for number, name in enumerate(DTYPE_NAMES)}
    types |= {f"{name}_REF": number + REFERENCE for name, number in types.items() if number}
    message = encode(source.path, source.read(0, source.size), SCHEMA, "SavedModel", types)
    return message_in(Buffer(source.path, message))
