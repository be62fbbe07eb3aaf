"""Evaluates the calls of a pickle in a closed type system: which of them make plain data.

Each constructor that a safe pickle may call is a row of ``lists/constructors.txt``, with the kinds of its
arguments and the kind of its result. No kind exists for a function, a class instance or a stored name, so no
row can be made to call anything. A pickle that makes one of these isn't safe, whatever it does with it; hence
a row checks its own arguments only, and not the nodes inside them.

Lists of trusted names aren't enough: an object can call a function that is only stored in it, and an
attribute that BUILD sets can replace a method that a trusted constructor calls, such as ``keys`` for
``dict(x)``.

Source: CPython ``Lib/pickle.py``, ``Lib/copyreg.py``; NumPy ``numpy/_core/_internal.py``; PyTorch
``torch/_utils.py``, ``torch/_tensor.py``, ``torch/_weights_only_unpickler.py``; Paddle
``python/paddle/framework/io.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from ckpttool.containers.pickle import numpy_types
from ckpttool.containers.pickle.pickle_nodes import (
    LISTS,
    Call,
    DictSubclass,
    Global,
    Payload,
    Persistent,
    Trust,
    is_dunder,
    is_object,
    trust_of_unlisted,
    value_kind,
    words_in,
)
from ckpttool.core.name_lists import lines_of
from ckpttool.core.tensor import Tensor

OPAQUE = "opaque"
"""Kind of all nodes that aren't plain data: instances of classes, functions, stored names."""

NDARRAY_CLASS = Global("numpy", "ndarray")
JOBLIB_ARRAY = "joblib-array"
"""Kind of joblib's wrapper of an array; the array follows the wrapper in the file."""

_KIND_OF_TYPE: dict[type, str] = {
    type(None): "none",
    **{kind: kind.__name__ for kind in (bool, int, float, complex, bytes, bytearray)},
    **{kind: kind.__name__ for kind in (list, tuple, dict, set, frozenset)},
    str: "text",
    Tensor: "tensor",
}
_KIND_OF_MAPPED = {"OrderedDict": "ordered-dict", "defaultdict": "default-dict", "Counter": "counter"}
_GROUPS = {
    "real": ("bool", "int", "float"),
    "scalar": ("none", "bool", "int", "float", "text"),
    "sequence": ("list", "tuple", "set", "frozenset"),
    "any-tensor": ("tensor", "view", "meta-tensor", "parameter"),
    "fixed-dtype": ("dtype",),
}
_MADE_BY_INIT = frozenset(
    {"list", "set", "dict", "ordered-dict", "counter", "default-dict", "deque", "bytearray", "attribute-dict"}
    | {"bytes-io"}
)
"""Kinds whose ``__new__`` ignores its arguments."""
_MAX_INT64 = (1 << 63) - 1
_INT = frozenset({int})
_MOST_PACKED = 4  # quint2x4 has four elements in one of its storage

# Conditions on arguments ------------------------------------------------------------------------------

_DECIMAL = re.compile(
    r"[+-]?(\d{1,4000}(\.\d{0,4000})?|\.\d{1,4000})(E[+-]?\d{1,4})?|[+-]?(Infinity|s?NaN)", re.I
)
_MEMBER = re.compile(r"[A-Z][A-Z0-9_]*")
_FRACTION = re.compile(r"[+-]?\d{1,4000}(/\d{1,4000})?")
_ATTRIBUTES = frozenset({"__doc__", "__module__", "__name__", "__orig_class__", "__qualname__"})
"""Dunder attributes that honest objects have; Python's behaviour doesn't depend on them."""
_OF_OBJECTS = _ATTRIBUTES | {"__overloads__"}
"""The same for objects of unknown classes: `torch.jit.script` adds names to modules, and alone reads them.

Source: PyTorch ``torch/jit/_recursive.py``.
"""
_FILLERS = frozenset({"append", "extend", "add"})
"""Methods that an unpickler looks up on an object to fill it."""


def kind_of(node: object) -> str:
    """Return the kind of a node; ``OPAQUE`` if it isn't plain data."""
    kind = _KIND_OF_TYPE.get(type(node))
    if kind is not None:
        return kind
    if isinstance(node, Call):
        return node.kind or OPAQUE
    if isinstance(node, Global):
        return value_kind(node.module, node.name) or OPAQUE
    if isinstance(node, DictSubclass):
        return _KIND_OF_MAPPED[node.kind.name] if node.state is None else OPAQUE
    if isinstance(node, Payload):
        return "text" if node.kind in ("text", "8-bit") else "bytes"
    return "storage" if _is_storage(node) else OPAQUE


def _is_storage(node: object) -> bool:
    """Return whether a node is a persistent id for which each of PyTorch's loaders returns a storage."""
    if not isinstance(node, Persistent):
        return isinstance(node, Call) and node.kind == "storage"
    parts = node.id
    return (
        isinstance(parts, tuple)
        and 5 <= len(parts) <= 6
        and parts[0] == "storage"
        and type(parts[3]) is str
        and parts[3] != "meta"  # such a storage has no values, whatever the file holds
        and isinstance(parts[1], Global)
        and value_kind(parts[1].module, parts[1].name) == "storage-type"
    )


def _is_pairs(node: object) -> bool:
    if isinstance(node, dict):
        return not isinstance(node, DictSubclass) or node.state is None
    return isinstance(node, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in node
    )


def is_shape(node: object) -> bool:
    """Return whether a node is a shape that NumPy and PyTorch accept; lengths may be negative."""
    if type(node) is not tuple:
        node = node.args[0] if isinstance(node, Call) and node.kind == "size" and node.args else node
        if not isinstance(node, tuple | list):
            return False
    if len(node) > numpy_types.MAX_AXES or not _INT.issuperset(map(type, node)):
        return False
    return not node or (max(node) <= _MAX_INT64 and min(node) >= -_MAX_INT64)


def _is_metadata(node: object) -> bool:
    return node is None or (
        type(node) is dict
        and len(node) <= numpy_types.MAX_AXES
        and {*map(type, node)} <= {str}
        and {*map(type, node.values())} <= {bool}
    )


def _is_row(node: object, *kinds: tuple[str, ...]) -> bool:
    """Return whether a node is a tuple of values of these kinds."""
    if not isinstance(node, tuple) or len(node) != len(kinds):
        return False
    return all(kind_of(part) in each for part, each in zip(node, kinds, strict=True))


def _is_quantizer(node: object) -> bool:
    scale = ("int", "float", "tensor")
    return _is_row(node, ("flag",), scale, scale) or _is_row(node, ("flag",), scale, scale, scale)


def _is_sparse(node: object) -> bool:
    """Return whether a node is ``(*tensors, shape[, is_coalesced])``; old versions omit the last."""
    if not isinstance(node, tuple) or not 3 <= len(node) <= 5:
        return False
    is_long = node[-1] is None or type(node[-1]) is bool
    tensors, shape = (node[:-2], node[-2]) if is_long else (node[:-1], node[-1])
    return is_shape(shape) and len(tensors) > 1 and all(kind_of(part) == "tensor" for part in tensors)


def _attributes(state: object) -> list[Any] | None:
    """Return the names in a state of attributes: one dictionary, or one with a second for slots."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    are_dicts = all(part is None or isinstance(part, dict) for part in parts)
    return [name for part in parts if isinstance(part, dict) for name in part] if are_dicts else None


def has_plain_attributes(state: object) -> bool:
    """Return whether a state consists of plain attributes, without dunder names that steer Python."""
    names = _attributes(state)
    return names is not None and all(map(is_attribute, names))


def _are_tensor_attributes(state: object) -> bool:
    """Return whether a state consists of plain attributes of a tensor, without properties."""
    # Setting a property runs code, which may change the values: ``data``, for one.
    properties = words_in("tensor_properties.txt")
    return has_plain_attributes(state) and properties.isdisjoint(_attributes(state) or ())


def is_attribute(name: object) -> bool:
    """Return whether a name is a plain attribute."""
    return type(name) is str and name not in _FILLERS and (not is_dunder(name) or name in _ATTRIBUTES)


def _is_enum(name: Global) -> bool:
    return any(row.result == "member" for row in constructors().get((name.module, name.name), ()))


_CONDITIONS: dict[str, Callable[[Any], bool]] = {
    "array-class": lambda node: node == Global("array", "array"),
    "arrays": lambda node: type(node) is dict and {*node} == {"data"} and kind_of(node["data"]) == "ndarray",
    "attribute-pairs": lambda node: type(node) is dict and all(map(is_attribute, node)),
    "data": lambda node: node == "data",
    "decimal": lambda node: isinstance(node, str) and _DECIMAL.fullmatch(node) is not None,
    "factory": lambda node: node is None or (isinstance(node, Global) and kind_of(node) == "type"),
    "fraction": lambda node: isinstance(node, str) and _FRACTION.fullmatch(node) is not None,
    "int64": lambda node: type(node) is int and abs(node) <= _MAX_INT64,
    "latin-1": lambda node: node in ("latin1", "latin-1"),
    "letter-b": lambda node: node in (b"b", "b"),
    "member-class": lambda node: isinstance(node, Global) and _is_enum(node),
    "member-name": lambda node: isinstance(node, str) and _MEMBER.fullmatch(node) is not None,
    "metadata": _is_metadata,
    "ndarray-class": lambda node: node == NDARRAY_CLASS,
    "no-hooks": lambda node: node is None or (node == {} and (type(node) is dict or node.state is None)),
    "no-name": lambda node: not isinstance(node, Global),
    "pairs": _is_pairs,
    "quantizer": _is_quantizer,
    "rebuild": lambda node: isinstance(node, Global) and node.module == "torch._utils",
    "tensor-attributes": _are_tensor_attributes,
    "shape": is_shape,
    "sparse": _is_sparse,
    "storage": _is_storage,
    "typecode": numpy_types.is_typecode,
    "zero-shape": lambda node: node in ((0,), [0]),
}
"""Conditions that parameters may name in place of a kind."""

# The table --------------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """Condition on an argument: its type is in ``types``, which is checked first, or ``meets`` holds."""

    types: frozenset[type]
    meets: Callable[[Any], bool]


class Row(NamedTuple):
    """Signature of a constructor.

    Attributes:
        result: Kind of the result.
        least: Number of required arguments.
        most: Limit on arguments; above ``len(parameters)`` if the last one repeats.
    """

    result: str
    parameters: tuple[Parameter, ...]
    least: int
    most: int

    def accepts(self, arguments: Sequence[object]) -> bool:
        """Return whether the constructor may be called with these arguments."""
        count = len(arguments)
        if not self.least <= count <= self.most:
            return False
        parameters = self.parameters
        if count > len(parameters):
            parameters += parameters[-1:] * (count - len(parameters))
        for parameter, argument in zip(parameters, arguments, strict=False):
            if type(argument) not in parameter.types and not parameter.meets(argument):
                return False
        return True


# A line of the file is ``result module name name …: parameter parameter …``. A parameter is kinds, groups of
# kinds or conditions, separated by ``|``; a ``?`` after it marks an optional argument, a ``*`` any number.


def _row(result: str, words: Sequence[str]) -> Row:
    parameters = tuple(_parameter(word.rstrip("?*")) for word in words)
    least = sum(word[-1] not in "?*" for word in words)
    return Row(result, parameters, least, 1000 if words and words[-1].endswith("*") else len(words))


def _parameter(word: str) -> Parameter:
    names = word.split("|")
    kinds = frozenset(
        kind for name in names for kind in _GROUPS.get(name, (name,)) if name not in _CONDITIONS
    )
    types = frozenset(found for found, kind in _KIND_OF_TYPE.items() if kind in kinds)
    conditions = [_CONDITIONS[name] for name in names if name in _CONDITIONS]
    if len(conditions) == 1 and not kinds:
        return Parameter(types, conditions[0])
    return Parameter(
        types, lambda argument: kind_of(argument) in kinds or any(c(argument) for c in conditions)
    )


@cache
def constructors() -> dict[tuple[str, str], tuple[Row, ...]]:
    """Return the rows of each constructor, by module and name."""
    table: dict[tuple[str, str], tuple[Row, ...]] = {}
    for line in lines_of(LISTS / "constructors.txt"):
        head, _, parameters = line.partition(":")
        result, module, *names = head.split()
        row = _row(result, parameters.split())
        for name in names:
            table[module, name] = (*table.get((module, name), ()), row)
    return table


_GETATTR = Global("builtins", "getattr")
EXACT_ONLY = frozenset(
    {_GETATTR, Global("builtins", "eval"), Global("builtins", "type"), Global("_codecs", "encode")}
    | {Global("copyreg", "_reconstructor"), Global("torch.storage", "_load_from_bytes")}
)
"""Functions that can run anything: honest pickles call them as their rows allow, and never store them."""
_BUILT_IN = frozenset({"builtins", "collections", "array", "_io", "io"})
_NEVER_HANDED = frozenset({OPAQUE, "namespace", "attribute-dict", "record", "int", "range"})


def is_constructor(name: Global) -> bool:
    """Return whether a safe pickle may call a name."""
    return (name.module, name.name) in constructors()


# Evaluation -------------------------------------------------------------------------------------------


def evaluate(call: Call, charge: Callable[[int], None] | None = None) -> Trust:
    """Judge a call, and set its ``kind`` to the kind of its result.

    ``charge`` is called with the bytes of memory that the result may take besides the node of the call.
    """
    function = call.function
    call.kind = OPAQUE
    if not isinstance(function, Global):
        return Trust.DANGEROUS
    rows = constructors().get((function.module, function.name), ())
    if charge is not None and rows and rows[0].result not in _OF_ONE_SIZE:
        charge(sum(map(size_of, call.args)))
    if not call.kwargs:
        for row in rows:
            if row.accepts(call.args):
                return _judge_result(call, row.result)
    return _judge_unlisted_call(call, function, rows)


_OF_ONE_SIZE = frozenset({"view", "parameter"})
"""Results of constructors that copy no argument, and aren't charged for any; most calls are of these."""
_COST_OF_ITEM = 64
_SIZED = (list, tuple, dict, set, frozenset)


def size_of(node: object) -> int:
    """Return the estimated bytes of memory that a copy of a node takes: of its text, or of its entries."""
    if isinstance(node, _SIZED):
        return _COST_OF_ITEM * len(node)
    if isinstance(node, str | bytes):
        return len(node)
    if isinstance(node, Payload):
        return node.nbytes
    if isinstance(node, Call) and node.kind in ("bytearray", "tuple") and node.args:
        return size_of(node.args[0])
    return 0


def _judge_result(call: Call, result: str) -> Trust:
    """Set the kind of a call's result, which may depend on the arguments."""
    # A ``tensor`` has no more elements than its storage. Strides of 0 make a ``view`` of 2^40 elements out of
    # one, and rows that take memory for each element don't accept it; a quantized tensor has memory of its
    # own at once. ``_rebuild_from_type_v2`` calls its first argument, so that this call is judged in turn.
    args = call.args
    if (call.is_new and args and result in _MADE_BY_INIT) or (result == "record" and not call.is_new):
        return Trust.UNKNOWN
    if result == "view":
        result = "tensor" if _fits_in_storage(args[0], args[2]) else "view"
    elif result == "quantized":  # made with memory of its own
        if not _fits_in_storage(args[0], args[2]):
            return Trust.UNKNOWN
        result = "tensor"
    elif result == "retyped":
        if not isinstance(args[2], tuple):
            return Trust.UNKNOWN
        inner = Call(args[0], args[2])
        if (meaning := evaluate(inner)) is not Trust.PLAIN:
            return meaning
        if inner.kind == "attributed":
            return Trust.UNKNOWN  # attributes of the inner tensor could replace its methods
        is_bare = call.is_of("torch._tensor", "_rebuild_from_type_v2") and not any(args[3:])
        result = inner.kind if is_bare else "attributed"
    elif result == "dtype":
        result = numpy_types.kind_without_state(call)
    call.kind = result
    return Trust.PLAIN


def _fits_in_storage(storage: object, shape: Any) -> bool:
    """Return whether a tensor has no more elements than its storage."""
    if isinstance(storage, Persistent) and type(storage.id[4]) is int:
        lengths = shape.args[0] if isinstance(shape, Call) else shape
        return bool(math.prod(lengths) <= _MOST_PACKED * storage.id[4])
    return False


def _judge_unlisted_call(call: Call, function: Global, rows: Sequence[Row]) -> Trust:
    """Judge a call that no row allows: dangerous if no pickler would write it, else mostly unknown."""
    # Python's pickler passes neither objects nor numbers to built-in containers (``bytearray(10**10)`` takes
    # ten gigabytes), and functions that can run anything to no function at all.
    is_odd = rows and function != _GETATTR and (call.kwargs or function in EXACT_ONLY)
    if is_odd or any(map(_holds_function, call.args)) or _rebuilds_otherwise(call, rows):
        return Trust.DANGEROUS
    if function == _GETATTR:  # the result is judged by its own name
        return Trust.DANGEROUS if attribute_name(call) is None else Trust.KNOWN
    if is_object(function.module, function.name):
        return Trust.UNKNOWN
    if not rows:
        meaning = trust_of_unlisted(function.module, function.name)
        # `__new__` without arguments makes an empty object: code of the class runs, on no data of the pickle.
        is_empty = call.is_new and not call.args and not call.kwargs
        return meaning if meaning is not Trust.KNOWN else Trust.UNKNOWN if is_empty else Trust.DANGEROUS
    is_built_in = function.module in _BUILT_IN and function.name != "defaultdict"
    is_forged = is_built_in and any(kind_of(argument) in _NEVER_HANDED for argument in call.args)
    return Trust.DANGEROUS if is_forged else Trust.UNKNOWN


def _holds_function(argument: object) -> bool:
    """Return whether an argument is, or directly contains, a function that can run anything."""
    parts = argument[: numpy_types.MAX_AXES] if isinstance(argument, list | tuple) else (argument,)
    return any(isinstance(part, Global) and part in EXACT_ONLY for part in parts)


def _rebuilds_otherwise(call: Call, rows: Sequence[Row]) -> bool:
    """Return whether a constructor calls its first argument, and that isn't known to rebuild tensors."""
    if not rows or rows[0].result != "retyped" or not call.args:
        return False
    function = call.args[0]
    return not isinstance(function, Global) or not (
        function.module == "torch._utils"
        or is_object(function.module, function.name)
        or trust_of_unlisted(function.module, function.name) is Trust.UNKNOWN
    )


def attribute_name(call: Call) -> Global | None:
    """Return the qualified name that ``getattr`` finds on a class or its object; None if not plain."""
    target, name = call.args if call.function == _GETATTR and len(call.args) == 2 else (None, None)
    owner = target.function if isinstance(target, Call) else target
    if not isinstance(owner, Global) or not isinstance(name, str) or not name.isidentifier():
        return None
    return Global(owner.module, f"{owner.name}.{name}")


def class_to_create(call: Call) -> Global | None:
    """Return the class of the object that a call makes, if it is known."""
    function = call.function
    if not isinstance(function, Global) or call.is_new:
        return function if isinstance(function, Global) else None
    names = (
        argument for argument in call.args if isinstance(argument, Global) and kind_of(argument) == OPAQUE
    )
    return next((name for name in names if name.name.rpartition(".")[2].lstrip("_")[:1].isupper()), None)


# Items, pairs and states of results -------------------------------------------------------------------


def takes_items(call: Call) -> bool:
    """Return whether APPENDS may fill the result of a call; it may for objects of unknown classes."""
    return call.kind in ("deque", OPAQUE)


def takes_pairs(call: Call, pairs: Iterable[tuple[Any, Any]]) -> bool:
    """Return whether SETITEMS may fill the result of a call."""
    # An attribute dictionary has its keys as attributes: none may hide a method that the unpickler calls.
    if call.kind == "attribute-dict":
        return all(is_attribute(key) for key, _ in pairs)
    return call.kind == OPAQUE and all(_is_plain_key(key) for key, _ in pairs)


def _is_plain_key(key: object) -> bool:
    return kind_of(key) not in (OPAQUE, "tagged") and key != "__setstate__" and not isinstance(key, Payload)


def judge_state(call: Call | DictSubclass, state: object) -> Trust:
    """Judge the state that BUILD sets on the result of a call, and set the kind that it has afterwards.

    An object of an unknown class remains unknown; dangerous are attributes such as ``__class__``.
    """
    if isinstance(call, DictSubclass):
        return Trust.PLAIN if has_plain_attributes(state) else Trust.DANGEROUS
    kind = call.kind
    if kind == OPAQUE:
        names = (name for name in _attributes(state) or () if isinstance(name, str))
        steers = any(is_dunder(name) and name not in _OF_OBJECTS for name in names)
        is_shared = call.is_of("numpy", "dtype")  # it could be NumPy's own type, instead of a copy
        return Trust.DANGEROUS if steers or is_shared else Trust.UNKNOWN
    if kind in numpy_types.KINDS:
        call.kind = numpy_types.kind_with_state(call, state) or OPAQUE
        return Trust.PLAIN if call.kind != OPAQUE else Trust.DANGEROUS
    if kind == "new-ndarray":
        call.kind = "ndarray" if _is_array_state(state) else OPAQUE
        return Trust.PLAIN if call.kind == "ndarray" else Trust.UNKNOWN
    if kind == JOBLIB_ARRAY:
        return Trust.PLAIN if _is_joblib_array(state) else Trust.UNKNOWN
    if kind == "record" and isinstance(call.function, Global) and call.function.name == "TensorProperties":
        kind = "properties"  # its state is a tuple of values, not attributes
    if kind in ("namespace", "record"):
        return Trust.PLAIN if has_plain_attributes(state) else Trust.DANGEROUS
    return Trust.PLAIN if kind in _STATES and _STATES[kind](state) else Trust.DANGEROUS


def _is_joblib_array(state: object) -> bool:
    """Return whether a state describes an array of NumPy's own classes; a subclass would run its code."""
    return (
        type(state) is dict
        and state.keys() <= _JOBLIB_ATTRIBUTES
        and state.get("subclass") in _ARRAY_CLASSES
        and kind_of(state.get("allow_mmap", False)) == "bool"
    )


_JOBLIB_ATTRIBUTES = frozenset(
    {"subclass", "shape", "order", "dtype", "allow_mmap", "numpy_array_alignment_bytes"}
)
_ARRAY_CLASSES = (NDARRAY_CLASS, Global("numpy", "memmap"))
_TEXT_ELEMENTS = frozenset({str, type(None)})


def _is_array_state(state: object) -> bool:
    """Return whether a state is ``(version, shape, dtype, is_fortran, elements)`` that fit each other."""
    # Elements are bytes, or a list for types with pointers: of any objects for type O, of texts for a string
    # type. For other types NumPy would convert each object of the list, which may run code.
    if not isinstance(state, tuple) or len(state) != 5 or not is_shape(state[1]):
        return False
    _, shape, dtype, _, elements = state
    if not isinstance(elements, list):
        return kind_of(dtype) == "dtype" and kind_of(elements) in ("bytes", "text")
    are_objects = numpy_types.kind_without_state(dtype) == "object-dtype"
    is_string = kind_of(dtype) == "dtype" and not dtype.is_of("numpy", "dtype")
    is_plain = are_objects or (is_string and _TEXT_ELEMENTS.issuperset(map(type, elements)))
    return is_plain and kind_of(dtype) in ("object-dtype", "dtype") and math.prod(shape) == len(elements)


def _is_filled(state: object, kinds: tuple[str, ...], names: Callable[[object], bool] = is_attribute) -> bool:
    """Return whether a state is a dictionary of attributes whose values have these kinds."""
    return type(state) is dict and all(
        names(name) and kind_of(value) in kinds for name, value in state.items()
    )


_STATES: dict[str, Callable[[object], bool]] = {
    "storage": lambda state: _is_filled(state, ("storage", "torch-dtype", "bool", "none")),
    "uuid": lambda state: _is_filled(state, ("int",), lambda name: name in ("int", "is_safe")),
    "bytes-io": lambda state: _is_row(state, ("bytes",), ("int",), ("none",)),
    # dtype, layout, gradient, memory format and pinning of a tensor
    "properties": lambda state: _is_row(state, *5 * (("torch-dtype", "flag", "bool", "member", "none"),)),
}


def is_plain(call: Call) -> bool:
    """Return whether a call with its items and state makes plain data, which may be written to a pickle."""
    if evaluate(call) is not Trust.PLAIN:
        return False
    if (call.items and not takes_items(call)) or (call.pairs and not takes_pairs(call, call.pairs)):
        return False
    return call.state is None or judge_state(call, call.state) is Trust.PLAIN
