"""Evaluates the calls of a pickle in a closed type system: which of them make plain data.

Each constructor that a safe pickle may call is a row of ``lists/constructors.txt``, with the kinds of its
arguments and the kind of its result. There is no kind for a function, a class instance or a stored name, so
that no row can be made to call anything. A pickle that makes one of these is not safe, whatever it does with
it; hence a row looks at its own arguments alone, and never into what they hold.

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
    Global,
    Mapped,
    Payload,
    Persistent,
    Trust,
    is_dunder,
    is_object,
    stranger,
    value_kind,
    words_in,
)
from ckpttool.core.name_lists import lines_of
from ckpttool.core.tensor import Tensor

OPAQUE = "opaque"
"""The kind of everything that is not plain data: instances of classes, functions, stored names."""

NDARRAY_CLASS = Global("numpy", "ndarray")
JOBLIB_ARRAY = "joblib-array"
"""The kind of what represents an array in joblib's pickles, which follows it in the file."""

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
_FRACTION = re.compile(r"[+-]?\d{1,4000}(/\d{1,4000})?")
_ATTRIBUTES = frozenset({"__doc__", "__module__", "__name__", "__orig_class__", "__qualname__"})
"""Attributes with two underscores on each side that honest objects have, and that steer nothing."""
_OF_OBJECTS = _ATTRIBUTES | {"__overloads__"}
"""Those of objects of classes nobody knows: `torch.jit.script` notes names in modules, and alone reads them.

Source: PyTorch ``torch/jit/_recursive.py``.
"""
_FILLERS = frozenset({"append", "extend", "add"})
"""Methods that an unpickler looks up on an object to fill it."""


def kind_of(node: object) -> str:
    """Return the kind of a node, ``OPAQUE`` if it is no plain data."""
    kind = _KIND_OF_TYPE.get(type(node))
    if kind is not None:
        return kind
    if isinstance(node, Call):
        return node.kind or OPAQUE
    if isinstance(node, Global):
        return value_kind(node.module, node.name) or OPAQUE
    if isinstance(node, Mapped):
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
        return not isinstance(node, Mapped) or node.state is None
    return isinstance(node, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in node
    )


def is_shape(node: object) -> bool:
    """Return whether a node is a shape that NumPy and PyTorch take."""
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
    """Return whether a node is tensors, a shape, and whether it is coalesced, which old versions omit."""
    if not isinstance(node, tuple) or not 3 <= len(node) <= 5:
        return False
    is_long = node[-1] is None or type(node[-1]) is bool
    tensors, shape = (node[:-2], node[-2]) if is_long else (node[:-1], node[-1])
    return is_shape(shape) and len(tensors) > 1 and all(kind_of(part) == "tensor" for part in tensors)


def _attributes(state: object) -> list[Any] | None:
    """Return the names in a state of attributes, which may be a dictionary and a second one of slots."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    are_dicts = all(part is None or isinstance(part, dict) for part in parts)
    return [name for part in parts if isinstance(part, dict) for name in part] if are_dicts else None


def has_plain_attributes(state: object) -> bool:
    """Return whether a state is attributes of which none steers what Python does with an object."""
    names = _attributes(state)
    return names is not None and all(map(is_attribute, names))


def _are_tensor_attributes(state: object) -> bool:
    """Return whether none is a property: code runs when one is set, and it may change the values."""
    properties = words_in("tensor_properties.txt")
    return has_plain_attributes(state) and properties.isdisjoint(_attributes(state) or ())


def is_attribute(name: object) -> bool:
    """Return whether a name is that of a plain attribute."""
    return type(name) is str and name not in _FILLERS and (not is_dunder(name) or name in _ATTRIBUTES)


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
    """What an argument may be: of some types, or what meets a condition; most arguments have such a type."""

    types: frozenset[type]
    meets: Callable[[Any], bool]


class Row(NamedTuple):
    """One way to call a constructor; ``most`` exceeds the number of parameters if the last repeats."""

    result: str
    parameters: tuple[Parameter, ...]
    least: int
    most: int

    def accepts(self, arguments: Sequence[object]) -> bool:
        """Return whether the constructor may be called with these."""
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
"""Functions that would do anything: honest pickles call them as their rows say, and never store them."""
_BUILT_IN = frozenset({"builtins", "collections", "array", "_io", "io"})
_NEVER_HANDED = frozenset({OPAQUE, "namespace", "attribute-dict", "record", "int", "range"})


def is_constructor(name: Global) -> bool:
    """Return whether a name is one that a safe pickle may call."""
    return (name.module, name.name) in constructors()


# Evaluation -------------------------------------------------------------------------------------------


def evaluate(call: Call, charge: Callable[[int], None] | None = None) -> Trust:
    """Return what it means to make a call, and note the kind of its result in it.

    ``charge`` is told the bytes of memory that the result may take besides the call itself.
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
    return _judge_misfit(call, function, rows)


_OF_ONE_SIZE = frozenset({"view", "parameter"})
"""The results of constructors that go through none of their arguments: most calls are of these."""
_COST_OF_ITEM = 64
_SIZED = (list, tuple, dict, set, frozenset)


def size_of(node: object) -> int:
    """Return about how many bytes of memory a copy of a node takes: of its text, or of its entries."""
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
    """Note the kind that a call's result has, which may depend on its arguments."""
    args = call.args
    if (call.is_new and args and result in _MADE_BY_INIT) or (result == "record" and not call.is_new):
        return Trust.UNKNOWN
    if result == "view":
        result = "tensor" if _is_paid(args[0], args[2]) else "view"
    elif result == "quantized":  # made with memory of its own
        if not _is_paid(args[0], args[2]):
            return Trust.UNKNOWN
        result = "tensor"
    elif result == "retyped":
        if not isinstance(args[2], tuple):
            return Trust.UNKNOWN
        inner = Call(args[0], args[2])
        if (meaning := evaluate(inner)) is not Trust.PLAIN:
            return meaning
        if inner.kind == "attributed":
            return Trust.UNKNOWN  # its attributes would be taken for methods
        is_bare = call.is_of("torch._tensor", "_rebuild_from_type_v2") and not any(args[3:])
        result = inner.kind if is_bare else "attributed"
    elif result == "dtype":
        result = numpy_types.kind_without_state(call)
    call.kind = result
    return Trust.PLAIN


def _is_paid(storage: object, shape: Any) -> bool:
    """Return whether a tensor has no more elements than the storage that it is a view of."""
    if isinstance(storage, Persistent) and type(storage.id[4]) is int:
        lengths = shape.args[0] if isinstance(shape, Call) else shape
        return bool(math.prod(lengths) <= _MOST_PACKED * storage.id[4])
    return False


def _judge_misfit(call: Call, function: Global, rows: Sequence[Row]) -> Trust:
    """Judge a call that no row allows: some are no accident.

    Python's own pickler hands its built-in containers neither objects nor numbers, and to nothing the
    functions that would do anything.
    """
    is_odd = rows and (call.kwargs or function in EXACT_ONLY)
    if is_odd or any(map(_holds_function, call.args)) or _rebuilds_otherwise(call, rows):
        return Trust.DANGEROUS
    if function == _GETATTR:  # what it finds is judged by its name
        return Trust.DANGEROUS if attribute_name(call) is None else Trust.KNOWN
    if is_object(function.module, function.name):
        return Trust.UNKNOWN
    if not rows:
        meaning = stranger(function.module, function.name)
        # `__new__` alone makes an empty object: code of the class runs, but not what the pickle chooses.
        is_empty = call.is_new and not call.args and not call.kwargs
        return meaning if meaning is not Trust.KNOWN else Trust.UNKNOWN if is_empty else Trust.DANGEROUS
    is_built_in = function.module in _BUILT_IN and function.name != "defaultdict"
    is_forged = is_built_in and any(kind_of(argument) in _NEVER_HANDED for argument in call.args)
    return Trust.DANGEROUS if is_forged else Trust.UNKNOWN


def _holds_function(argument: object) -> bool:
    """Return whether an argument is a function that is never stored, or a short row of such."""
    parts = argument[: numpy_types.MAX_AXES] if isinstance(argument, list | tuple) else (argument,)
    return any(isinstance(part, Global) and part in EXACT_ONLY for part in parts)


def _rebuilds_otherwise(call: Call, rows: Sequence[Row]) -> bool:
    """Return whether a constructor that calls what it is given is given no function for tensors."""
    if not rows or rows[0].result != "retyped" or not call.args:
        return False
    function = call.args[0]
    return not isinstance(function, Global) or not (
        function.module == "torch._utils"
        or is_object(function.module, function.name)
        or stranger(function.module, function.name) is Trust.UNKNOWN
    )


def attribute_name(call: Call) -> Global | None:
    """Return the name of what ``getattr`` finds on a class or on an object of it, if both are plain."""
    target, name = call.args if call.function == _GETATTR and len(call.args) == 2 else (None, None)
    owner = target.function if isinstance(target, Call) else target
    if not isinstance(owner, Global) or not isinstance(name, str) or not name.isidentifier():
        return None
    return Global(owner.module, f"{owner.name}.{name}")


def class_to_create(call: Call) -> Global | None:
    """Return the class of which a call makes an object, if that is known."""
    function = call.function
    if not isinstance(function, Global) or call.is_new:
        return function if isinstance(function, Global) else None
    names = (
        argument for argument in call.args if isinstance(argument, Global) and kind_of(argument) == OPAQUE
    )
    return next((name for name in names if name.name.rpartition(".")[2].lstrip("_")[:1].isupper()), None)


# What a result is filled with -------------------------------------------------------------------------


def takes_items(call: Call) -> bool:
    """Return whether APPENDS may fill what a call makes; of an object of a class nobody knows."""
    return call.kind in ("deque", OPAQUE)


def takes_pairs(call: Call, pairs: Iterable[tuple[Any, Any]]) -> bool:
    """Return whether SETITEMS may fill what a call makes.

    A dictionary that gives its values for attributes must hide no method that the unpickler looks up.
    """
    if call.kind == "attribute-dict":
        return all(is_attribute(key) for key, _ in pairs)
    return call.kind == OPAQUE and all(_is_plain_key(key) for key, _ in pairs)


def _is_plain_key(key: object) -> bool:
    return kind_of(key) not in (OPAQUE, "tagged") and key != "__setstate__" and not isinstance(key, Payload)


def judge_state(call: Call | Mapped, state: object) -> Trust:
    """Return what it means that BUILD sets a state on what a call makes, and note the kind that it then has.

    Attributes of an object of a class nobody knows are as unknown as the object, but for those that steer
    Python itself.
    """
    if isinstance(call, Mapped):
        return Trust.PLAIN if has_plain_attributes(state) else Trust.DANGEROUS
    kind = call.kind
    if kind == OPAQUE:
        names = (name for name in _attributes(state) or () if isinstance(name, str))
        steers = any(is_dunder(name) and name not in _OF_OBJECTS for name in names)
        is_shared = call.is_of("numpy", "dtype")  # such as NumPy's own type, in place of a copy
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
        kind = "properties"  # values in their order instead of attributes
    if kind in ("namespace", "record"):
        return Trust.PLAIN if has_plain_attributes(state) else Trust.DANGEROUS
    return Trust.PLAIN if kind in _STATES and _STATES[kind](state) else Trust.DANGEROUS


def _is_joblib_array(state: object) -> bool:
    """Return whether a state describes an array that follows; one of a subclass is made by the subclass."""
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
    """Return whether a state is ``(version, shape, dtype, is_fortran, elements)`` with objects that fit.

    Those of a string type are texts; elements of other types are converted, whatever that takes.
    """
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
    """Return whether a state is attributes whose values are of some kinds."""
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
    """Return whether what a call makes, and is filled with, is data that may be carried elsewhere."""
    if evaluate(call) is not Trust.PLAIN:
        return False
    if (call.items and not takes_items(call)) or (call.pairs and not takes_pairs(call, call.pairs)):
        return False
    return call.state is None or judge_state(call, call.state) is Trust.PLAIN
