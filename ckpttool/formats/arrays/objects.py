"""NumPy's arrays and scalars in a pickle, read without calling NumPy's constructors.

As the pickle machine records them::

    _reconstruct(ndarray, (0,), b"b")      state ([version,] shape, dtype, is Fortran, data)     protocols 0-4
    _frombuffer(data, dtype, shape, order[, axes])                                               protocol 5
    scalar(dtype, data)
    _mareconstruct(...)                    state (_, shape, dtype, is Fortran, data, mask, fill value)
    dtype("f8", ...)                       state (version, byte order, ...)

``data`` is bytes in the file, or text in which each character is a byte (Python 2, and protocols 0 to 2).

Source: NumPy ``numpy/_core/src/multiarray/methods.c`` (``__reduce__``), ``descriptor.c``.
"""

from __future__ import annotations

import codecs
import math
import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.containers.npy import itemsize
from ckpttool.containers.pickle.numpy_types import is_known_version
from ckpttool.containers.pickle.pickle_nodes import MASKED, NDARRAY, Call, Global, Payload, Persistent
from ckpttool.core.dtypes import BY_NAME, DType
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.readable import swap_bytes, swap_width
from ckpttool.core.tensor import Extent, Values
from ckpttool.core.values import Computed, Contiguous, Strided, in_memory, is_contiguous
from ckpttool.formats.content.plain_data import PayloadChecksums, describe, describe_bytes, shortest_decimal
from ckpttool.formats.content.tree import Leaf, NodeParts
from ckpttool.storage.source import Source

if TYPE_CHECKING:
    from ckpttool.formats.content.assembly import TreeBuilder

_RECONSTRUCT = ("_reconstruct", "_frombuffer")
"""Functions that make an array."""
# NumPy 2 renamed its module ``core`` to ``_core``.
_MULTIARRAY = frozenset({"numpy.core.multiarray", "numpy._core.multiarray"})
_MASKED = frozenset({"numpy.ma.core", "numpy.ma"})
_NUMERIC = frozenset({"numpy.core.numeric", "numpy._core.numeric"})
_MAX_AXES = 32
_ARRAY_VERSIONS = (0, 1)
_BYTES = frozenset({Global("builtins", "bytes"), Global("builtins", "bytearray")})
_BOOL = Call(Global("numpy", "dtype"), ("b1",))  # the type of a mask
_SCALARS = {  # codes of ``struct``
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "bool": "?",
}
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
ByteOrder = Literal["little", "big"]


def _decoded_blocks(payload: Payload, nbytes: int, swap: int, limit: int) -> Iterator[memoryview]:
    """Yield array bytes that a pickle has as text; ``nbytes`` is their number once decoded."""
    # Blocks must end between elements to be swapped: 16 is a multiple of every element's size.
    step = max(16, limit - limit % 16)
    ready = b""
    for data in _decode(payload, nbytes, step):
        ready += data
        while len(ready) >= step:
            yield swap_bytes(memoryview(ready)[:step], swap)
            ready = ready[step:]
    if ready:
        yield swap_bytes(memoryview(ready), swap)


def _decode(payload: Payload, nbytes: int, step: int) -> Iterator[bytes]:
    # Protocol 2 has no bytes, so they are text: each byte is a Latin-1 character, stored as UTF-8, and takes
    # two bytes from 0x80 on. A character may be cut at the end of a block, so the decoder is incremental.
    source, end = payload.source, payload.offset + payload.nbytes
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    for start in range(payload.offset, end, step):
        length = min(step, end - start)
        try:
            data = decoder.decode(source.read(start, length), start + length == end).encode("latin-1")
        except UnicodeError as error:
            found = f"array bytes that are not 8-bit text: {error}"
            raise DamagedCheckpoint(source.path, found, where=f"byte {start:,}") from error
        done += len(data)
        yield data
    if done != nbytes:
        found = f"{done:,} bytes of an array"
        raise DamagedCheckpoint(source.path, found, expected=f"{nbytes:,}", code="tensor-damaged")


def numpy_leaf(
    call: Call, path: str, make: Callable[..., Any], sums: PayloadChecksums | None = None
) -> Leaf[Any] | None:
    """Return the array or scalar that a call makes, or None if it makes neither.

    Args:
        call: A call in a pickle, with its arguments and state.
        path: The file, for errors.
        make: Builds the tensor from ``dtype, shape, values, extent, storage, byteorder``.
        sums: Reads checksums of arrays that are no tensors.
    """
    function, sums = call.function, sums or PayloadChecksums()
    if not isinstance(function, Global):
        return None
    try:
        if function.name == "scalar" and function.module in _MULTIARRAY:
            return Leaf(plain=_scalar(call, sums))
        if function.name == "_mareconstruct" and function.module in _MASKED and call.state is not None:
            return _masked_array_leaf(path, call.state, make, sums)
        if function.name == "_reconstruct" and function.module in _MULTIARRAY and call.state is not None:
            # The state of ``ndarray.__setstate__`` begins with a version, which may be absent. The flag after
            # the type says whether the elements are in Fortran's order.
            *version, shape, dtype, fortran, data = tuple(call.state)
            if len(version) > 1 or any(number not in _ARRAY_VERSIONS for number in version):
                raise ValueError(f"version {describe(version)!s:.40}, which NumPy doesn't read")
            return _array_leaf(path, dtype, *_layout(shape, "F" if fortran else "C"), data, make, sums)
        if function.name == "_frombuffer" and function.module in _NUMERIC:
            data, dtype, *layout = call.args
            return _array_leaf(path, dtype, *_layout(*layout), data, make, sums)
        return None
    except (IndexError, TypeError, ValueError, struct.error) as error:
        message = f"invalid arguments of an array: {error}"
        raise DamagedCheckpoint(path, message, where=str(function), code="tensor-damaged") from error


def _layout(shape: Any, order: object, axes: Any = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape in storage order, and for each axis of the array its index in that shape."""
    # Order "C" is the array's own. "F" stores the axes in reverse. "K" (of ``_frombuffer`` in later releases
    # of NumPy) keeps the order in memory, and has the axes as a further argument.
    if not isinstance(shape, tuple) or len(shape) > _MAX_AXES:
        raise ValueError("not a shape")
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"shape {describe(shape)}")
    in_order = tuple(range(len(shape)))
    if order == "F":
        return shape[::-1], in_order[::-1]
    if order != "K" or axes is None:
        return shape, in_order
    if not isinstance(axes, tuple) or not all(type(axis) is int for axis in axes):
        raise ValueError("not axes")
    if tuple(sorted(axes)) != in_order:
        raise ValueError(f"axes {axes}")
    return shape, axes


def _array_leaf(
    path: str,
    dtype: object,
    stored_shape: tuple[int, ...],
    axes: tuple[int, ...],
    data: object,
    make: Callable[..., Any],
    sums: PayloadChecksums,
) -> Leaf[Any] | None:
    shape = tuple(stored_shape[axis] for axis in axes)
    typed = element_type(dtype)
    if typed is None:
        # An array of objects has a list as data; None lets the caller walk into it.
        if isinstance(data, list):
            return None
        order = "" if axes == tuple(range(len(axes))) else f", stored by axes {axes}"
        description = _describe_content(_content(data), sums)
        return Leaf(plain=f"<NumPy array of {_dtype_text(dtype)}, shape {list(shape)}{order}: {description}>")
    element, byteorder = typed
    content = _content(data)
    nbytes = element.nbytes(math.prod(stored_shape))
    # Text in UTF-8 has 1 or 2 bytes per byte of the array; ``_decode`` compares the exact number as it reads.
    stored = content.nbytes if isinstance(content, Payload) else len(content)
    if isinstance(content, Payload) and content.kind == "latin1" and nbytes <= stored <= 2 * nbytes:
        stored = nbytes
    if stored != nbytes:
        raise ValueError(f"{stored:,} bytes for an array that takes {nbytes:,}")
    values, extent = _values(path, content, element, byteorder, stored_shape, axes)
    in_order = None if isinstance(values, Strided) else extent
    return Leaf((((), make(element, shape, values, in_order, extent, byteorder)),))


def _masked_array_leaf(
    path: str, state: Any, make: Callable[..., Any], sums: PayloadChecksums
) -> Leaf[Any] | None:
    """Return the values of a masked array, and its mask as a tensor ``mask``; true elements are hidden."""
    _, shape, dtype, fortran, data, mask, fill = state
    layout = _layout(shape, "F" if fortran else "C")
    values = _array_leaf(path, dtype, *layout, data, make, sums)
    if values is None:
        return None
    hidden = _array_leaf(path, _BOOL, *layout, mask, make, sums)
    masks = [(("mask",), parts) for _, parts in (hidden.tensors if hidden is not None else ())]
    fields = {"values": values.plain, "fill_value": None if fill is None else describe(fill)}
    plain = {name: form for name, form in fields.items() if form is not None}
    return Leaf((*values.tensors, *masks), plain or None)


def _values(
    path: str,
    data: bytes | Payload,
    element: DType,
    byteorder: ByteOrder,
    stored_shape: tuple[int, ...],
    axes: tuple[int, ...],
) -> tuple[Values, Extent | None]:
    """Return the lazy values of an array in C order, and their extent if the file has them as they are."""
    # Elements that are stored in another order of axes are read through strides where they are in the file.
    # Those in memory are transposed at once, and those in text when they are read, which needs all of them.
    swap = swap_width(element.word_bytes, byteorder)
    strides = tuple(math.prod(stored_shape[axis + 1 :]) for axis in axes)
    shape = tuple(stored_shape[axis] for axis in axes)
    moved = not is_contiguous(shape, strides) and 0 not in shape
    if not isinstance(data, Payload):
        content = _transpose(data, element, stored_shape, axes) if moved else data
        return in_memory(content, swap), None
    if data.kind == "latin1":
        decoded = Computed(partial(_decoded_blocks, data, element.nbytes(math.prod(shape)), swap))
        if not moved:
            return decoded, None

        def put_in_order(limit: int) -> Iterator[memoryview]:
            content = b"".join(map(bytes, decoded.blocks(limit)))
            return in_memory(_transpose(content, element, stored_shape, axes)).blocks(limit)

        return Computed(put_in_order), None
    # Data that had to be inflated is in memory only, and has no extent.
    extent = Extent(path, data.offset, data.nbytes) if isinstance(data.source, Source) else None
    if moved:
        return Strided(data.source, data.offset, element.itemsize, shape, strides, swap), extent
    return Contiguous(data.source, data.offset, data.nbytes, swap), extent


def _content(data: object) -> bytes | Payload:
    """Return the bytes of an array, unwrapped from 8-bit text and from calls of ``bytes``."""
    while isinstance(data, Call) and isinstance(data.function, Global):
        if data.function not in _BYTES or len(data.args) > 2:
            break
        data = data.args[0] if data.args else b""
    if isinstance(data, str):
        return data.encode("latin-1")
    if isinstance(data, Payload) and data.kind != "text":
        return data
    if not isinstance(data, bytes):
        raise TypeError("not bytes")
    return data


def _transpose(data: bytes, element: DType, shape: tuple[int, ...], axes: tuple[int, ...]) -> bytes:
    import numpy as np

    items = np.frombuffer(data, f"V{element.itemsize}").reshape(shape)
    in_order: bytes = items.transpose(axes).tobytes("C")
    return in_order


def _scalar(call: Call, sums: PayloadChecksums) -> object:
    """Return a NumPy scalar as a Python number, or as a description if it is none."""
    dtype = call.args[0]
    typed = element_type(dtype)
    code = None if typed is None else _SCALARS.get(typed[0].name)
    if typed is None or code is None:
        name = _dtype_text(dtype) if typed is None else typed[0].name
        try:
            content = _content(call.args[1])
        except TypeError:  # a scalar of dtype ``object`` has any object as its content
            return f"<NumPy scalar of {name}: {describe(call.args[1])}>"
        return f"<NumPy scalar of {name}: {_describe_content(content, sums)}>"
    element, byteorder = typed
    content = _content(call.args[1])
    if isinstance(content, Payload):
        raise TypeError(f"{content.nbytes:,} bytes of a scalar")
    (number,) = struct.unpack(("<" if byteorder == "little" else ">") + code, content)
    return shortest_decimal(number) if element.name in ("float16", "float32") else number


def _describe_content(content: bytes | Payload, sums: PayloadChecksums) -> str:
    description = sums.describe(content) if isinstance(content, Payload) else describe_bytes(content)
    return description[1:-1]


def element_type(dtype: object) -> tuple[DType, ByteOrder] | None:
    """Return element type and byte order of a pickled ``numpy.dtype``; None for types that are no numbers."""
    if not isinstance(dtype, Call) or not dtype.is_of("numpy", "dtype") or not dtype.args:
        return _extension(dtype)
    if dtype.state is not None and not is_known_version(dtype.state):
        raise ValueError(f"a numpy.dtype of {describe(dtype.state)!s:.60}, a version that NumPy doesn't read")
    text = dtype.args[0]
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    if isinstance(text, Global):
        return _extension(text)
    if text == "b1":
        return BY_NAME["bool"], "little"
    if not isinstance(text, str):
        return None
    itemsize(text)  # raises ValueError for types that NumPy refuses, too
    if text[:1] not in _KINDS or not text[1:].isdigit():
        return None
    element = BY_NAME.get(f"{_KINDS[text[0]]}{8 * int(text[1:])}")
    return None if element is None else (element, "big" if order == ">" else "little")


def _extension(dtype: object) -> tuple[DType, ByteOrder] | None:
    """Return a type of ml_dtypes, such as bfloat16, which is pickled as a global name."""
    if not isinstance(dtype, Global) or dtype.module != "ml_dtypes":
        return None
    # ml_dtypes stores each number of a narrow type in a byte, unlike the packed type of that name here. Such
    # arrays are bytes whose values no check understands; as metadata they would not even be counted.
    element = BY_NAME.get(dtype.name)
    if (element is None or element.bits < 8) and re.fullmatch(r"(float|u?int)[1-8](_\w+)?", dtype.name):
        element = BY_NAME["bits8"]
    return None if element is None else (element, "little")


def _dtype_text(dtype: object) -> str:
    """Return the code of a pickled dtype, with byte order, unit of dates, or fields of a structure."""
    if not isinstance(dtype, Call) or not dtype.args or not isinstance(dtype.args[0], str):
        return str(describe(dtype))
    name, state = dtype.args[0], dtype.state
    if not isinstance(state, tuple) or len(state) < 5:
        return name
    order = ">" if state[1] == ">" else ""
    if state[2:5] == (None, None, None) and len(state) <= 8:
        return f"{order}{name}"
    if name in ("M8", "m8") and (unit := _date_unit(state)) is not None:
        return f"{order}{name}[{unit}]"
    return f"{order}{name} {describe(state[2:])}"


def _date_unit(state: tuple[Any, ...]) -> str | None:
    """Return the unit of a date in NumPy's notation: ``s``, or ``25ms`` for 25 milliseconds."""
    try:
        code, count, one, event = state[8][1]
        return f"{count if count != 1 else ''}{code.decode('ascii')}" if (one, event) == (1, 1) else None
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


# Arrays in a tree -----------------------------------------------------------------------------------


def array_node(builder: TreeBuilder, call: Call, leaf: Leaf[Any]) -> object:
    """Return the node of an array in frameworks that have tensors as well; a ``FrameworkNode``."""
    module, name = _function_name(call)
    if name == MASKED.name:
        return _masked_array_node(builder, call, leaf)
    if not module.startswith("numpy.") or name not in _RECONSTRUCT:
        return builder.object_node(call)
    tensor = builder.tensor(leaf)
    made = builder.remember(Call(NDARRAY, (tensor,)), [tensor])
    kind = call.args[0] if call.args and name == _RECONSTRUCT[0] else None
    if isinstance(kind, Global) and kind != Global("numpy", "ndarray"):
        return builder.opaque(f"the class {kind} of an array", made)
    return made


def array_as_tensor(builder: TreeBuilder, node: Call | Persistent, leaf: Leaf[Any]) -> object:
    """Return the node of an array in formats whose tensors are arrays; a ``FrameworkNode``."""
    if isinstance(node, Persistent):
        return builder.tensor(leaf)
    module, name = _function_name(node)
    is_array = module.startswith("numpy.") and name in _RECONSTRUCT
    return builder.tensor(leaf) if is_array else array_node(builder, node, leaf)


def _function_name(call: Call) -> tuple[str, str]:
    assert isinstance(call.function, Global)  # ``numpy_leaf`` makes tensors of no other call
    return call.function.module, call.function.name


def _masked_array_node(builder: TreeBuilder, call: Call, leaf: Leaf[Any]) -> object:
    tensors = {path: builder.tensor_of(parts) for path, parts in leaf.tensors}
    values, mask = tensors.get(()), tensors.get(("mask",))
    if values is None or mask is None:
        return builder.opaque("a masked array", builder.content_of(leaf))
    fill = call.state[6] if isinstance(call.state, tuple) and len(call.state) > 6 else None
    return NodeParts([fill], lambda done: builder.call_or_opaque(Call(MASKED, (values, mask, done[0])), leaf))
