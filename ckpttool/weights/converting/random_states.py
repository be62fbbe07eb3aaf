"""Recognises saved states of random number generators of Python, NumPy, PyTorch and JAX.

Sources: CPython ``Lib/random.py`` (``getstate``); NumPy ``numpy/random/mtrand.pyx`` (``get_state``),
``_mt19937.pyx``, ``_pcg64.pyx``, ``_philox.pyx`` and ``_sfc64.pyx`` (``state``); PyTorch
``aten/src/ATen/CPUGeneratorImpl.cpp``, ``cuda/CUDAGeneratorImpl.cpp``, ``mps/MPSGeneratorImpl.mm``
(``get_state``); JAX ``jax/_src/prng.py`` (``threefry_prng_impl``, ``rbg_prng_impl``).
"""

from __future__ import annotations

from collections.abc import Collection

from ckpttool.containers.pickle.pickle_nodes import NDARRAY, Call
from ckpttool.core.tensor import Tensor

_MT_WORDS = 624
"""Words of a Mersenne Twister state; Python appends the position."""
_TENSORS = frozenset(
    {
        ("uint8", 5056),  # PyTorch's CPU generator
        ("uint8", 5048),  # the same before PyTorch 1.0
        ("uint8", 16),  # CUDA's and XPU's: seed and offset
        ("uint8", 816),  # CUDA's before PyTorch 1.9
        ("uint8", 44),  # MPS's: counter and key, seed, offset
        ("uint32", _MT_WORDS),
        ("uint64", 4),  # Philox's counter and buffer, SFC64's state
        ("uint64", 2),  # Philox's key
        ("uint32", 2),  # JAX's threefry2x32, and Keras's SeedGenerator
        ("uint32", 4),  # JAX's rbg
    }
)
"""Dtype and length of vectors that are a random state, or the array in a state of NumPy."""
_NUMPY_KEYS = frozenset({"bit_generator", "state"})
_NUMPY_REST = frozenset({"has_gauss", "gauss", "has_uint32", "uinteger", "buffer", "buffer_pos"})
_NUMPY_STATES: Collection[frozenset[str]] = (
    frozenset({"key", "pos"}),
    frozenset({"state", "inc"}),
    frozenset({"counter", "key"}),
    frozenset({"state"}),
)


def is_random_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor has the dtype and length of a random state."""
    return len(tensor.shape) == 1 and (tensor.dtype.name, tensor.shape[0]) in _TENSORS


def is_random_state(value: object) -> bool:
    """Return whether a value is a random state, or a nested container of nothing else."""
    # The states of several libraries or devices are often saved in one dictionary or list, so a container is
    # a state if all its parts are, apart from None, and there is at least one. A pickle may hold one object
    # many times, or in itself: each is visited once.
    waiting, seen, is_one = [value], set[int](), False
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if _is_random_array(one) or _is_python_state(one) or _is_numpy_state(one):
            is_one = True
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        else:
            return False
    return is_one


def _is_random_array(value: object) -> bool:
    if isinstance(value, Call) and value.function == NDARRAY and value.args:
        value = value.args[0]
    return isinstance(value, Tensor) and is_random_tensor(value)


def _is_python_state(value: object) -> bool:
    """Return whether a value has the form of ``random.getstate()``: (version, words and position, gauss)."""
    if not isinstance(value, list | tuple) or len(value) != 3 or value[0] not in (2, 3):
        return False
    return _are_words(value[1], _MT_WORDS + 1) and isinstance(value[2], float | None)


def _is_numpy_state(value: object) -> bool:
    """Return whether a value has the form of ``numpy.random.get_state()`` or of ``BitGenerator.state``."""
    if isinstance(value, list | tuple):
        is_named = len(value) == 5 and value[0] == "MT19937"
        return (
            is_named and _is_numpy_word(value[1]) and all(isinstance(one, int | float) for one in value[2:])
        )
    if not isinstance(value, dict) or not _NUMPY_KEYS <= value.keys() <= _NUMPY_KEYS | _NUMPY_REST:
        return False
    state = value["state"]
    rest = [part for key, part in value.items() if key not in _NUMPY_KEYS]
    is_state = isinstance(state, dict) and state.keys() in _NUMPY_STATES
    return is_state and all(map(_is_numpy_word, [*state.values(), *rest]))


def _is_numpy_word(value: object) -> bool:
    return isinstance(value, int | float) or _is_random_array(value) or _are_words(value, _MT_WORDS)


def _are_words(value: object, count: int) -> bool:
    if not isinstance(value, list | tuple) or len(value) != count:
        return False
    return all(isinstance(word, int) and 0 <= word < 1 << 32 for word in value)
