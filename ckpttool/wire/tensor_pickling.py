"""Tensors and arrays as they lie in a pickle: the calls that rebuild them.

Source: PyTorch ``torch/_utils.py`` and ``torch/_tensor.py`` (``_reduce_ex_internal``); NumPy
``numpy/_core/src/multiarray/methods.c`` (``array_reduce``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckpttool.dtypes import DType
from ckpttool.errors import Unsupported
from ckpttool.tensor import Tensor
from ckpttool.wire.opcode_text import (
    BINPERSID,
    BUILD,
    EMPTY_TUPLE,
    FALSE,
    MARK,
    NONE,
    REDUCE,
    TRUE,
    TUPLE,
    TUPLES,
    Named,
    Streamed,
    encoded,
    spelled_int,
    text_header,
)
from ckpttool.wire.pickled import NDARRAY, REQUIRES_GRAD, Call, Global

QUANTIZED = Global("torch._utils", "_rebuild_qtensor")
FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
MASKED = Global("numpy.ma.core", "_mareconstruct")

_STORAGES = frozenset(
    {"Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double"}
    | {"ComplexFloat", "ComplexDouble", "QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4"}
)
"""The element types that have a class of storages; the others lie in untyped ones."""
_ARRAY_KINDS = {"float": "f", "integer": "i", "boolean": "b", "complex": "c"}
_STEP = 1 << 20


def spelled_tensor(tensor: Tensor, key: str, requires_grad: bool = False) -> list[Any]:
    """Return the call that rebuilds a tensor as a view of all of its storage."""
    if tensor.dtype.kind in ("quantized", "string"):
        raise Unsupported(tensor.name, f"a tensor of {tensor.dtype} needs more than its elements")
    if tensor.dtype.storage in _STORAGES:
        function, dtype = "_rebuild_tensor_v2", []
    else:
        function, dtype = "_rebuild_tensor_v3", [Named("torch", tensor.dtype.name)]
    flag = TRUE if requires_grad else FALSE
    view = _view(tensor, key)
    made = [MARK, *view, flag, *_no_hooks(), *dtype, TUPLE, REDUCE]
    return [Named("torch._utils", function), *made]


def _view(tensor: Tensor, key: str) -> list[Any]:
    """Return storage, offset, shape and strides."""
    return [*_storage(tensor, key), spelled_int(0), tensor.shape, _strides(tensor.shape)]


def _storage(tensor: Tensor, key: str, kind: str | None = None) -> list[Any]:
    """Return the persistent id of a storage."""
    is_typed = tensor.dtype.storage in _STORAGES and kind != "UntypedStorage"
    name = f"{tensor.dtype.storage}Storage" if is_typed else "UntypedStorage"
    count = tensor.nbytes // (tensor.dtype.itemsize if is_typed else 1)
    module = "torch" if is_typed else "torch.storage"
    fields = ["storage", Named(module, name), key, "cpu", spelled_int(count)]
    return [MARK, *fields, TUPLE, BINPERSID]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of elements in C order, as PyTorch counts them where an axis is empty."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _no_hooks() -> list[Any]:
    return [Named("collections", "OrderedDict"), EMPTY_TUPLE, REDUCE]


# Objects around tensors -----------------------------------------------------------------------------


def spelled_call(call: Call, storage_of: Callable[[Tensor], str]) -> list[Any] | None:
    """Return what stands for a call whose arguments are not those of the function, None for any other."""
    args = call.args
    if not args or not isinstance(call.function, Global):
        return None
    tensor = args[0]
    if call.function == FROM_TYPE and len(args) == 3:
        return _from_type(args, storage_of)
    if not isinstance(tensor, Tensor):
        return None
    if call.function == REQUIRES_GRAD:
        return spelled_tensor(tensor, storage_of(tensor), requires_grad=True)
    if call.function == NDARRAY:
        return spelled_array(tensor)
    if call.function == QUANTIZED and len(args) == 3:
        return _quantized(tensor, storage_of(tensor), args[1], args[2])
    if call.function == MASKED and len(args) == 3 and isinstance(args[1], Tensor):
        return _masked(tensor, args[1], args[2])
    if call.function.name.endswith("Storage") and len(args) == 1:
        return _storage(tensor, storage_of(tensor), call.function.name)
    return None


def is_rewritten(call: Call) -> bool:
    """Tell whether ``spelled_call`` takes a call for what stands for another."""
    args = call.args
    if call.function == FROM_TYPE:
        return len(args) == 3
    if not args or not isinstance(args[0], Tensor) or not isinstance(call.function, Global):
        return False
    if call.function in (QUANTIZED, MASKED):
        return len(args) == 3
    return call.function in (REQUIRES_GRAD, NDARRAY) or call.function.name.endswith("Storage")


def _quantized(tensor: Tensor, key: str, params: object, grad: object) -> list[Any]:
    made = [*_view(tensor, key), params, bool(grad), *_no_hooks()]
    return [Named("torch._utils", "_rebuild_qtensor"), MARK, *made, TUPLE, REDUCE]


def _from_type(args: tuple[Any, ...], storage_of: Callable[[Tensor], str]) -> list[Any]:
    """Return a tensor of a subclass, or with attributes: the parts of its own call stand apart."""
    inner, kind, state = args
    if isinstance(inner, Tensor):
        spelled: list[Any] = spelled_tensor(inner, storage_of(inner))
    elif isinstance(inner, Call) and inner.function != FROM_TYPE:
        special = spelled_call(inner, storage_of)
        spelled = [inner.function, inner.args, REDUCE] if special is None else special
    else:
        raise ValueError("a tensor of a subclass that is made of no tensor")
    if spelled[-1] != REDUCE:
        raise ValueError("a tensor of a subclass that is made of no call")
    function, *arguments = spelled[:-1]
    outer = Named(FROM_TYPE.module, FROM_TYPE.name)
    return [outer, MARK, function, kind, *arguments, state, TUPLE, REDUCE]


# Arrays of NumPy ------------------------------------------------------------------------------------


def spelled_array(tensor: Tensor) -> list[Any]:
    """Return the call that rebuilds an array; its elements lie in the pickle."""
    empty = [Named("numpy", "ndarray"), (0,), b"b", TUPLES[3], REDUCE]
    fields = [spelled_int(1), tensor.shape, *_array_type(tensor), FALSE]
    content = encoded(_latin1(tensor))
    return [Named("numpy.core.multiarray", "_reconstruct"), *empty, MARK, *fields, *content, TUPLE, BUILD]


def _array_type(tensor: Tensor) -> list[Any]:
    """Return the ``numpy.dtype`` of an array of a tensor's elements."""
    outer = Named("numpy", "dtype")
    code = _code(tensor.dtype)
    if code is None:
        if tensor.dtype.numpy != tensor.dtype.name or tensor.dtype.kind != "float":
            raise Unsupported(tensor.name, f"NumPy has no type for {tensor.dtype}")
        return [outer, Named("ml_dtypes", tensor.dtype.name), FALSE, TRUE, TUPLES[3], REDUCE]
    order = "|" if tensor.dtype.itemsize == 1 else "<"
    state = (3, order, None, None, None, -1, -1, 0)
    return [outer, code, FALSE, TRUE, TUPLES[3], REDUCE, state, BUILD]


def _code(dtype: DType) -> str | None:
    """Return the short name of a type that NumPy has of its own, such as ``f4``."""
    is_own = dtype.name.rstrip("0123456789") in ("bool", "int", "uint", "float", "complex")
    if not is_own or dtype.numpy != dtype.name:
        return None
    kind = "u" if dtype.name.startswith("uint") else _ARRAY_KINDS[dtype.kind]
    return f"{kind}{dtype.itemsize}"


def _latin1(tensor: Tensor) -> Streamed:
    """Return the elements as the UTF-8 of the text that has a character for each byte."""

    def blocks() -> Iterator[bytes]:
        high = sum(_high(block) for block in tensor.blocks(_STEP))
        yield text_header(tensor.nbytes + high)
        for block in tensor.blocks(_STEP):
            yield bytes(block).decode("latin-1").encode()

    return Streamed(blocks)


_LOW = bytes(range(0x80))


def _high(block: memoryview) -> int:
    """Return how many bytes take two in UTF-8."""
    return len(bytes(block).translate(None, _LOW))


def _masked(values: Tensor, mask: Tensor, fill: object) -> list[Any]:
    """Return a masked array: its values, which of them are hidden, and what is shown in their place."""
    kinds = [Named("numpy.ma.core", "MaskedArray"), Named("numpy", "ndarray")]
    empty = [MARK, *kinds, (0,), b"b", TUPLE, REDUCE]
    fields = [spelled_int(1), values.shape, *_array_type(values), FALSE]
    contents = [*encoded(_latin1(values)), *encoded(_latin1(mask))]
    state = [MARK, *fields, *contents, fill if fill is not None else NONE, TUPLE, BUILD]
    return [Named(MASKED.module, MASKED.name), *empty, *state]
