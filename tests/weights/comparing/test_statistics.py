"""The numbers of a comparison, against exact arithmetic and NumPy's widest floats, for all element types."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.dtypes import BY_NAME, DType
from ckpttool.weights.comparing.kernels import BLOCK_ELEMENTS as BLOCK
from tests.support.tensors import Array, Parts, compared, elements, expected, measured, require, tensor_of

FLOATS = ["float16", "bfloat16", "float32", "float64"]
CODED = sorted(name for name, dtype in BY_NAME.items() if dtype.kind == "float" and dtype.bits <= 8)
INTEGERS = sorted(name for name, dtype in BY_NAME.items() if dtype.kind == "integer")
COMPLEX = ["complex32", "complex64", "complex128"]
STORED = {"qint8": "int8", "quint8": "uint8", "qint32": "int32", "quint4x2": "uint8", "quint2x4": "uint8"}
"""Quantized types, and the integers that are stored of them."""
EXAMPLES = settings().max_examples // 4
"""Of each type."""
NUMBERS = [*FLOATS, *CODED, *INTEGERS, *COMPLEX, "bool"]


def numpy_type(name: str) -> np.dtype[Any]:
    """Return the type of NumPy or ml_dtypes; of complex32, that of a part."""
    if name == "complex32":
        return np.dtype("f2")
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def exact(array: Array, name: str) -> list[Parts]:
    """Return the elements of an array that stands for a type, codes of sub-byte types among them."""
    if name == "complex32":
        return [tuple(map(float, pair)) for pair in array.view("f2").reshape(-1, 2)]
    if BY_NAME[name].bits <= 8 and BY_NAME[name].kind == "float":
        return elements(array.view(numpy_type(name)))
    return elements(array)


@st.composite
def arrays(draw: st.DrawFn, dtype: DType, size: int) -> Array:
    """Return an array of any bits, which favours those at the ends of the range."""
    bits = dtype.bits
    if bits < 8 or dtype.kind == "boolean":
        top = (1 << bits) - 1 if bits < 8 else 1
        codes = draw(st.lists(st.integers(0, top), min_size=size, max_size=size))
        return np.array(codes, bool if dtype.kind == "boolean" else np.uint8)
    words = size * (2 if dtype.kind == "complex" else 1)
    width = bits // 2 if dtype.kind == "complex" else bits
    ends = [0, 1, 2, 1 << (width - 1), (1 << width) - 1, (1 << (width - 1)) - 1, (1 << (width - 1)) + 1]
    one = st.integers(0, (1 << width) - 1) | st.sampled_from(ends)
    raw = np.array(draw(st.lists(one, min_size=words, max_size=words)), f"u{width // 8}")
    if dtype.name in CODED:
        return raw
    if dtype.name == "complex32":
        return raw.view(np.uint32)
    return raw.view(numpy_type(dtype.name))


@st.composite
def pairs(draw: st.DrawFn, a: str, b: str) -> tuple[Array, Array]:
    """Return arrays of one length, of which some elements are the same where the types are."""
    size = draw(st.integers(1, 6))
    first, second = draw(arrays(BY_NAME[a], size)), draw(arrays(BY_NAME[b], size))
    if a == b:
        kept = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        second[np.array(kept)] = first[np.array(kept)]
    return first, second


def check(a: Array, b: Array, names: tuple[str, str]) -> None:
    """Compare two arrays, and require what exact arithmetic says."""
    wanted = expected(exact(a, names[0]), exact(b, names[1]))
    found = compared(tensor_of(a, names[0]), tensor_of(b, names[1]))
    assert found.equal is (wanted.count == 0)
    assert (found.statistics is None) is found.equal
    if found.statistics is None:
        return
    require(found.statistics, wanted)
    (index,) = found.statistics.where
    lengths = [-1.0 if length is None else length for length in wanted.lengths]
    if max(lengths) > 0:
        assert math.isclose(lengths[index], max(lengths), rel_tol=1e-15)
        assert index == lengths.index(lengths[index])
    else:
        assert index == wanted.first


@pytest.mark.parametrize("name", NUMBERS)
def test_any_bits_of_one_type(name: str) -> None:
    @settings(max_examples=EXAMPLES)
    @given(pairs(name, name))
    def run(both: tuple[Array, Array]) -> None:
        with np.errstate(all="ignore"):
            check(*both, (name, name))

    run()


MIXED = [
    ("int64", "float64"),
    ("uint64", "float64"),
    ("uint64", "int64"),
    ("int64", "uint64"),
    ("int64", "int32"),
    ("bool", "int64"),
    ("bool", "uint8"),
    ("float32", "float64"),
    ("float32", "bfloat16"),
    ("float16", "bfloat16"),
    ("float8_e4m3fn", "float32"),
    ("float8_e5m2", "float16"),
    ("float4_e2m1fn", "bfloat16"),
    ("float6_e2m3fn", "float6_e3m2fn"),
    ("float64", "complex64"),
    ("complex128", "int64"),
    ("complex32", "complex64"),
    ("uint64", "float8_e8m0fnu"),
]


@pytest.mark.parametrize("names", MIXED, ids="-".join)
def test_any_bits_of_two_types(names: tuple[str, str]) -> None:
    @settings(max_examples=EXAMPLES)
    @given(pairs(*names))
    def run(both: tuple[Array, Array]) -> None:
        with np.errstate(all="ignore"):
            check(*both, names)

    run()


def test_neighbours_of_large_integers_are_told_apart() -> None:
    for names in (("int64", "float64"), ("uint64", "float64"), ("int64", "complex128")):
        near = [2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2, 2**62 + 1, 2**62 + 512, 2**63 - 1, 2**63 - 1024, 0, 1]
        integers = np.array(near, names[0])
        floats = integers.astype(np.float64).astype(names[1])
        check(integers, floats, names)
        check(floats, integers, (names[1], names[0]))
        assert not compared(tensor_of(integers[2:3]), tensor_of(floats[2:3])).equal
        assert compared(tensor_of(integers[1:2]), tensor_of(floats[1:2])).equal


def test_the_difference_of_integers_is_exact() -> None:
    a, b = np.array([-(2**63), 5, 7]), np.array([2**63 - 1, 5, 4])
    found = measured(tensor_of(a), tensor_of(b))
    assert found.max_abs == float(2**64 - 1) and found.where == (0,)
    assert (found.at_a, found.at_b) == (-(2**63), 2**63 - 1)
    mixed = measured(tensor_of(a), tensor_of(np.array([2**64 - 1, 5, 4], np.uint64)))
    assert mixed.max_abs == float(2**64 - 1 + 2**63)


def test_int64_and_uint64_of_the_same_bits_are_two_values() -> None:
    bits = np.array([-1])
    assert not compared(tensor_of(bits), tensor_of(bits.view(np.uint64))).equal


def test_quantized_types_are_compared_by_what_is_stored() -> None:
    for name, stored in STORED.items():
        top = min(200, (1 << BY_NAME[name].bits) - 1) if stored[0] == "u" else 100
        a = np.arange(0, top, max(1, top // 20)).astype(stored)
        b = a.copy()
        b[-1] += 1
        found = measured(tensor_of(a, name), tensor_of(b, name))
        assert (found.count, found.max_abs, found.where) == (1, 1.0, (len(a) - 1,))
        assert (found.at_a, found.at_b) == (int(a[-1]), int(b[-1]))
        assert compared(tensor_of(a, name), tensor_of(a.copy(), name)).equal


def test_bits_are_compared_as_unsigned_integers() -> None:
    for name in ("bits8", "bits1x8", "bits2x4", "bits4x2", "bits16", "float4_e2m1fn_x2"):
        a = np.array([0, 255, 7], f"u{BY_NAME[name].itemsize}")
        found = measured(tensor_of(a, name), tensor_of(a[::-1].copy(), name))
        assert (found.count, found.max_abs, found.at_a, found.at_b) == (2, 7.0, 0, 7)


# Large arrays ---------------------------------------------------------------------------------------


def check_large(a: Array, b: Array, **options: Any) -> None:
    """Require what NumPy says in its widest float type."""
    found = measured(tensor_of(a), tensor_of(b), **options)
    x, y = a.astype(np.longdouble).reshape(-1), b.astype(np.longdouble).reshape(-1)
    d = np.abs(y - x)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(d == 0, 0, d / np.abs(x))
    norms = [np.sqrt((one * one).sum()) for one in (x, y, d)]
    wanted = {
        "count": np.count_nonzero(a != b),
        "max_abs": d.max(),
        "mean_abs": d.mean(),
        "max_rel": ratios.max(),
        "norm_a": norms[0],
        "norm_b": norms[1],
        "l2": norms[2],
    }
    for name, value in wanted.items():
        assert math.isclose(getattr(found, name), float(value), rel_tol=1e-12), name
    cosine = float((x * y).sum() / norms[0] / norms[1]) if norms[0] and norms[1] else math.nan
    assert math.isclose(found.cosine, cosine, rel_tol=1e-12, abs_tol=1e-12) or math.isnan(cosine)
    assert found.where == tuple(map(int, np.unravel_index(int(d.argmax()), a.shape)))
    assert (found.at_a, found.at_b) == (a[found.where].item(), b[found.where].item())


def randoms(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_blocks_of_every_length(dtype: str) -> None:
    for size in (1, 2, 8191, 8192, 8193, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 9000):
        a = randoms(size).astype(dtype)
        check_large(a, (a + 0.01 + randoms(size, seed=1) / 100).astype(dtype))


def test_changes_of_every_size() -> None:
    for dtype, scale in product(("float32", "float64"), (1e-7, 1e-3, 1.0, 1e3)):
        a = randoms(300, 500)
        check_large(a.astype(dtype), (a + scale * randoms(300, 500, seed=1)).astype(dtype))


def test_unrelated_and_opposite_values() -> None:
    for dtype in ("float32", "float64"):
        a = randoms(150_000).astype(dtype)
        check_large(a, randoms(150_000, seed=1).astype(dtype))
        check_large(a, -a)
        check_large(a, (a * 1000).astype(dtype))


def test_values_of_another_size() -> None:
    for dtype, factor in product(("float32", "float64"), (15.9, 16.1, 1 / 15.9, 1 / 16.1, 1e-30)):
        a, other = randoms(150_000).astype(dtype), randoms(150_000, seed=1)
        check_large(a, (other * factor).astype(dtype))
        check_large(a, ((a + other / 50) * factor).astype(dtype))


def test_cancellation() -> None:
    for dtype in ("float32", "float64"):
        a = (1 + randoms(150_000) * 1e-3).astype(dtype) * np.array([1, -1] * 75_000, dtype)
        check_large(a, np.nextafter(a, np.array(2, dtype)))


def test_huge_and_tiny_values() -> None:
    for dtype, exponent in (("float32", 37), ("float64", 307), ("float64", 160)):
        a = randoms(100_000)
        for scale in (10.0**exponent / 8, 10.0**-exponent):
            check_large(
                (a * scale).astype(dtype), (a * scale + randoms(100_000, seed=1) * scale / 9).astype(dtype)
            )
        mixed = np.where(np.arange(100_000) % 2, 10.0**exponent, 10.0**-exponent) * a / 8
        check_large(mixed.astype(dtype), (mixed * 1.01).astype(dtype))


def test_tiny_changes_of_usual_values() -> None:
    for dtype in ("float32", "float64"):
        a = randoms(150_000).astype(dtype)
        a[::7] = 0
        b = a.copy()
        b[::7] = np.finfo(dtype).smallest_subnormal
        check_large(a, b)


def test_one_change_among_many() -> None:
    for dtype, at in product(("float32", "float64"), (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 99)):
        a = randoms(2 * BLOCK + 100).astype(dtype)
        b = a.copy()
        b[at] += np.array(1e-3, dtype)
        check_large(a, b)
        assert measured(tensor_of(a), tensor_of(b)).count == 1


def test_zeros_become_values() -> None:
    for dtype in ("float32", "float64", "int64", "uint8"):
        zeros, values = np.zeros(150_000, dtype), (randoms(150_000) * 20).astype(np.int8).astype(dtype)
        check_large(zeros, values)
        check_large(values, zeros)
        assert math.isnan(measured(tensor_of(zeros), tensor_of(values)).cosine)


def test_integers() -> None:
    for dtype in ("int8", "int32", "int64", "uint16", "uint64"):
        info = np.iinfo(dtype)
        generator = np.random.default_rng(0)
        a = generator.integers(info.min, info.max, 150_000, dtype)
        check_large(a, generator.integers(info.min, info.max, 150_000, dtype))


def test_the_first_of_equal_changes_is_told() -> None:
    for places in ((2_500_000, 2_100_001, 2_999_999), (2_500_000, 1_900_000), (7, 5)):
        a = np.zeros(3_000_000, np.float32)
        b = a.copy()
        b[list(places)] = -1
        b[places[0]] = 1
        assert measured(tensor_of(a), tensor_of(b)).where == (min(places),)


def test_a_larger_relative_change_in_a_later_block() -> None:
    for more in (1.0001, 1.9, 3.0):
        a = np.ones(3 * BLOCK, np.float32)
        b = a.copy()
        a[5], b[5] = 0.01, 0.06
        a[2 * BLOCK + 9] = 0.1 / 5 / more
        b[2 * BLOCK + 9] = a[2 * BLOCK + 9] + np.float32(0.1)
        check_large(a, b)


# NaN and infinity -----------------------------------------------------------------------------------


def test_nan_equals_nan_and_zero_equals_minus_zero() -> None:
    for dtype in FLOATS:
        kind = numpy_type(dtype)
        a = np.array([math.nan, 0.0, -0.0, math.inf, 1.0]).astype(kind)
        b = np.array([-math.nan, -0.0, 0.0, math.inf, 1.0]).astype(kind)
        assert compared(tensor_of(a), tensor_of(b)).equal
        assert not compared(tensor_of(a), tensor_of(b), bitwise=True).equal
        assert compared(tensor_of(a), tensor_of(a.copy()), bitwise=True).equal


def test_what_is_not_finite_is_told_apart() -> None:
    for dtype in ("float32", "float64"):
        a = randoms(4 * BLOCK).astype(dtype)
        b = (a * 1.5).astype(dtype)
        places = [3, 2 * BLOCK, 3 * BLOCK + 5]
        a[places], b[places] = [math.nan, 1, math.inf], [math.nan, math.inf, -math.inf]
        found = measured(tensor_of(a), tensor_of(b))
        finite = np.isfinite(a) & np.isfinite(b)
        inside = measured(tensor_of(a[finite]), tensor_of(b[finite]))
        assert (found.count, found.non_finite) == (inside.count + 2, 2)
        for name in ("max_abs", "max_rel", "l2", "cosine", "norm_a", "norm_b"):
            assert math.isclose(getattr(found, name), getattr(inside, name), rel_tol=1e-14), name


def test_what_is_nan_or_infinite_on_both_sides_has_not_changed() -> None:
    for dtype, size in product(("float16", "float32", "float64", "complex64"), (8, 3 * BLOCK)):
        a = np.zeros(size, dtype)
        a[: size // 2], a[-2] = math.nan, math.inf
        b = a.copy()
        b[-1] = 2
        found = measured(tensor_of(a), tensor_of(b))
        assert (found.count, found.non_finite, found.max_abs, found.l2) == (1, 0, 2, 2)
        assert found.mean_abs == 2 / size


def test_nothing_finite_has_no_distance() -> None:
    a, b = np.array([1.0, math.nan, math.nan]), np.array([math.nan, math.inf, math.nan])
    found = measured(tensor_of(a), tensor_of(b))
    assert (found.count, found.non_finite, found.where, found.at_a) == (2, 2, (0,), 1.0)
    assert math.isnan(found.max_abs) and math.isnan(found.mean_abs) and math.isnan(found.max_rel)


def test_a_bit_alone_has_a_place() -> None:
    found = measured(tensor_of(np.array([1.0, 0.0])), tensor_of(np.array([1.0, -0.0])), bitwise=True)
    assert (found.count, found.max_abs, found.where) == (1, 0.0, (1,))


# Tolerances -----------------------------------------------------------------------------------------

TOLERANCES = st.sampled_from([0.0, 1e-300, 1e-9, 1e-3, 0.5, 2.0])


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_tolerances_are_those_of_isclose(dtype: str) -> None:
    @settings(max_examples=EXAMPLES)
    @given(pairs(dtype, dtype), TOLERANCES, TOLERANCES)
    def run(both: tuple[Array, Array], rtol: float, atol: float) -> None:
        wide = "complex128" if dtype == "complex64" else "float64"
        a, b = both
        if dtype == "complex64":  # of which NumPy takes all with a NaN for equal
            a, b = (np.where(np.isfinite(one), one, 0) for one in both)
        with np.errstate(all="ignore"):
            # Of NumPy, the second argument is the reference.
            wanted = ~np.isclose(b.astype(wide), a.astype(wide), rtol=rtol, atol=atol, equal_nan=True)
        found = compared(tensor_of(a), tensor_of(b), rtol=rtol, atol=atol)
        assert found.equal is not wanted.any()
        assert found.statistics is None or found.statistics.count == np.count_nonzero(wanted)

    run()


def test_tolerances_of_large_blocks() -> None:
    a = randoms(150_000).astype(np.float32)
    b = (a + randoms(150_000, seed=1) * 1e-3).astype(np.float32)
    x, y = a.astype(np.float64), b.astype(np.float64)
    found = measured(tensor_of(a), tensor_of(b), rtol=1e-3, atol=1e-4)
    assert found.count == np.count_nonzero(np.abs(y - x) > 1e-4 + 1e-3 * np.abs(x))
    assert math.isclose(found.max_abs, np.abs(y - x).max(), rel_tol=1e-15)
    assert compared(tensor_of(a), tensor_of(b), atol=0.1).equal


def test_a_tolerance_is_relative_to_the_first_side() -> None:
    a, b = np.array([100.0]), np.array([110.0])
    assert not compared(tensor_of(a), tensor_of(b), rtol=0.095).equal
    assert compared(tensor_of(b), tensor_of(a), rtol=0.095).equal


# Complex numbers ------------------------------------------------------------------------------------


def test_complex_numbers_have_lengths() -> None:
    for dtype in ("complex64", "complex128"):
        a = (randoms(100_000) + 1j * randoms(100_000, seed=1)).astype(dtype)
        b = (a + randoms(100_000, seed=2) * 1e-2j).astype(dtype)
        x, y = a.astype(np.complex128), b.astype(np.complex128)
        found = measured(tensor_of(a), tensor_of(b))
        distance = np.abs(y - x)
        assert math.isclose(found.max_abs, distance.max(), rel_tol=1e-12)
        assert math.isclose(found.mean_abs, distance.mean(), rel_tol=1e-12)
        assert math.isclose(found.max_rel, (distance / np.abs(x)).max(), rel_tol=1e-12)
        assert math.isclose(found.l2, np.linalg.norm(y - x), rel_tol=1e-12)
        assert math.isclose(found.norm_b, np.linalg.norm(y), rel_tol=1e-12)
        cosine = np.vdot(x, y).real / np.linalg.norm(x) / np.linalg.norm(y)
        assert math.isclose(found.cosine, cosine, rel_tol=1e-12)
        assert found.where == (int(distance.argmax()),) and found.at_b == complex(b[found.where])


def test_the_expectations_are_exact() -> None:
    wanted = expected([(3.0,), (0.0,)], [(0.0,), (4.0,)])
    assert (wanted.l2, wanted.max_abs, wanted.mean_abs, wanted.max_rel) == (5.0, 4.0, 3.5, math.inf)
    assert wanted.lengths == [3.0, 4.0] and Fraction(wanted.cosine) == 0
