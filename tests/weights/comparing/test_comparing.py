"""Comparing pairs: what is equal whatever it lies in, what is not, and what becomes of what can't be read."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpttool import Tensor, Truncated, open_checkpoint
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.readable import Buffer
from ckpttool.core.tensor import Extent, Values
from ckpttool.core.values import Contiguous
from ckpttool.storage.source import Source
from ckpttool.weights.comparing import compare, elements, strings
from ckpttool.weights.comparing.compare import (
    Comparison,
    NotCompared,
    Outcome,
    Side,
    Statistics,
    Unreadable,
    compare_all,
)
from tests.support.faults import ends_all_threads, interrupt_hand_out
from tests.support.opening import paths_in
from tests.support.tensors import Array, compared, measured, tensor_of

FORMATS = ["deepspeed", "fluid", "hdf5", "keras", "numpy", "paddle", "pickle", "pytorch", "pytorch-legacy"]
FORMATS += ["safetensors", "savedmodel", "tensorflow", "torch-dcp", "torch-export", "torchscript"]


def whole_of(a: str | Path, b: str | Path, **options: Any) -> dict[str, Outcome]:
    """Return the outcomes for the tensors of two checkpoints, which have the same names."""
    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        assert list(first) == list(second)
        pairs = [(first[name], second[name]) for name in first]
        return dict(zip(first, compare_all(pairs, **options), strict=True))


def randoms(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# What they lie in -----------------------------------------------------------------------------------


def test_every_checkpoint_equals_itself(files: Path) -> None:
    for format in FORMATS:
        seen = 0
        for path in paths_in(files / format):
            with open_checkpoint(path) as first, open_checkpoint(path) as second:
                outcomes = compare_all(list(zip(first.tensors, second.tensors, strict=True)))
            for tensor, outcome in zip(first.tensors, outcomes, strict=True):
                assert (
                    outcome == Comparison(True) if tensor.values is not None else outcome != Comparison(True)
                ), format
                seen += 1
        assert seen > 0, format


def test_the_same_values_in_other_containers(tmp_path: Path) -> None:
    values = randoms(300, 70)
    np.save(tmp_path / "c.npy", values)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(values))
    np.save(tmp_path / "big.npy", values.astype(">f4"))
    np.save(tmp_path / "both.npy", np.asfortranarray(values.astype(">f4")))
    np.savez(tmp_path / "stored.npz", values)
    np.savez_compressed(tmp_path / "deflated.npz", values)
    save_file({"w": values}, tmp_path / "w.safetensors")
    with h5py.File(tmp_path / "w.h5", "w") as opened:
        opened.create_dataset("w", data=values, chunks=(7, 9), compression="gzip", dtype=">f4")
    names = sorted(os.listdir(tmp_path))
    for one in names:
        for other in names:
            with open_checkpoint(tmp_path / one) as a, open_checkpoint(tmp_path / other) as b:
                pair = next(iter(a.values())), next(iter(b.values()))
                assert compare_all([pair]) == [Comparison(True)], (one, other)


@pytest.mark.parametrize("name", ["c.npy", "fortran.npy", "big.npy", "deflated.npz", "w.h5"])
def test_one_element_differs_in_any_container(tmp_path: Path, name: str) -> None:
    values = randoms(300, 70)
    changed = values.copy()
    changed[211, 13] += np.float32(1e-3)
    for folder, array in (("a", values), ("b", changed)):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / name
        if path.suffix == ".h5":
            with h5py.File(path, "w") as opened:
                opened.create_dataset("w", data=array, chunks=(64, 64), compression="gzip")
        elif path.suffix == ".npz":
            np.savez_compressed(path, array)
        else:
            order, dtype = "F" if name == "fortran.npy" else "C", ">f4" if name == "big.npy" else "<f4"
            np.save(path, np.asarray(array, dtype, order=order))
    ((_, found),) = whole_of(tmp_path / "a" / name, tmp_path / "b" / name).items()
    assert isinstance(found, Comparison) and isinstance(found.statistics, Statistics)
    told = found.statistics
    assert (told.count, told.where, told.size) == (1, (211, 13), 21_000)
    assert told.max_abs == float(changed[211, 13]) - float(values[211, 13])
    assert (told.at_a, told.at_b) == (float(values[211, 13]), float(changed[211, 13]))


def test_exactly_what_changed_is_told(tmp_path: Path) -> None:
    tensors = {f"layers.{index:03}.w": randoms(4, 5, seed=index) for index in range(600)}
    save_file(tensors, tmp_path / "a.safetensors")
    tensors["layers.258.w"][3, 4] = 7
    save_file(tensors, tmp_path / "b.safetensors")
    for jobs in (1, 2, 5):
        found = whole_of(tmp_path / "a.safetensors", tmp_path / "b.safetensors", jobs=jobs)
        changed = {name: one for name, one in found.items() if one != Comparison(True)}
        assert list(changed) == ["layers.258.w"]
        (one,) = changed.values()
        assert isinstance(one, Comparison) and one.statistics is not None
        assert (one.statistics.where, one.statistics.at_b) == ((3, 4), 7.0)


def test_threads_find_the_same_numbers() -> None:
    a = randoms(3000, 2500)
    b = a + randoms(3000, 2500, seed=1) / 100
    pairs = [(tensor_of(a), tensor_of(b)), (tensor_of(a, streamed=True), tensor_of(b))]
    alone = compare_all(pairs, jobs=1)
    assert alone == compare_all(pairs, jobs=2) == compare_all(pairs, jobs=7)
    assert isinstance(alone[0], Comparison) and alone[0].statistics is not None
    assert alone[0].statistics.count == np.count_nonzero(a != b)


def test_equal_bytes_need_no_numpy(tmp_path: Path) -> None:
    save_file({"w": randoms(300, 300), "b": randoms(3)}, tmp_path / "a.safetensors")
    code = f"""
import sys
from ckpttool.formats import open_checkpoint
from ckpttool.weights.comparing.compare import compare_all
with open_checkpoint({str(tmp_path / "a.safetensors")!r}) as a:
    found = compare_all([(tensor, tensor) for tensor in a.values()])
    found += compare_all([(a["w"], a["b"])])
print([one.equal for one in found], "numpy" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n")[0] == "[True, True, False] False"


def test_memory_is_compared_without_the_c_library_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_libc_memcmp", lambda: None)
    a = randoms(700, 300)
    b = a.copy()
    b[-1, -1] += 1
    assert compared(tensor_of(a), tensor_of(a.copy())).equal
    assert measured(tensor_of(a), tensor_of(b)).where == (699, 299)


# Shapes and what has no values ----------------------------------------------------------------------


def test_a_scalar_has_an_empty_index() -> None:
    found = measured(tensor_of(np.array(2.0)), tensor_of(np.array(3.0)))
    assert (found.where, found.size, found.max_abs, found.max_rel) == ((), 1, 1.0, 0.5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_equals_nothing(dtype: str) -> None:
    a = tensor_of(np.zeros((3, 0, 2), np.float32))
    assert compare_all([(a, tensor_of(np.zeros((3, 0, 2), dtype)))]) == [Comparison(True)]
    assert compare_all([(a, tensor_of(np.zeros((3, 2, 0), dtype)))]) == [Comparison(False)]


def test_shapes_are_compared_first() -> None:
    a = randoms(6, 4)
    assert compare_all([(tensor_of(a), tensor_of(a.reshape(4, 6)))]) == [Comparison(False)]
    assert compare_all([(tensor_of(a[0, 0]), tensor_of(a[0, :1]))]) == [Comparison(False)]


def test_what_has_no_values_is_not_compared() -> None:
    there = tensor_of(randoms(3))
    nothing = replace(there, values=None)
    a, b, both = compare_all([(nothing, there), (there, nothing), (nothing, nothing)])
    assert isinstance(a, NotCompared) and a.side is Side.A
    assert isinstance(b, NotCompared) and b.side is Side.B and "float32 [3]" in b.why
    assert isinstance(both, NotCompared)


def test_no_pairs_have_no_outcomes() -> None:
    assert compare_all([]) == []


def test_types_that_differ_are_compared_by_value() -> None:
    a = randoms(500).astype(np.float16)
    assert compared(tensor_of(a), tensor_of(a.astype(np.float64))).equal
    b = a.astype(np.float64)
    b[77] += 2**-30
    found = measured(tensor_of(a), tensor_of(b))
    assert (found.count, found.max_abs, found.where) == (1, 2**-30, (77,))
    assert compared(tensor_of(a), tensor_of(a.astype(np.float32)), bitwise=True).equal


def test_byte_order_means_nothing() -> None:
    for dtype in ["<f4", "<f8", "<i2", "<i8", "<c8", "<c16"]:
        a = (randoms(9000) * 100).astype(dtype)
        b = a.copy()
        b[8999] += 1
        for big in (False, True):
            for streamed in (False, True):
                one = tensor_of(a, big=True, streamed=streamed)
                assert compared(one, tensor_of(a, big=big)).equal, dtype
                found = measured(one, tensor_of(b, big=big))
                assert (found.count, found.where, found.at_b) == (1, (8999,), b[8999].item()), dtype


# Strings --------------------------------------------------------------------------------------------


def strings_of(*texts: str, dtype: str = "string") -> Tensor:
    """Return a tensor as TensorFlow stores it: lengths, a checksum, the strings."""
    data = bytes(map(len, texts)) + bytes(4) + "".join(texts).encode()
    return Tensor(("t",), BY_NAME[dtype], (len(texts),), values=Contiguous(Buffer("m", data), 0, len(data)))


def stored(tensor: Tensor, path: Path) -> Tensor:
    """Return a tensor whose bytes lie in a file, alone."""
    data = tensor.tobytes()
    path.write_bytes(data)
    place = Contiguous(Source(path), 0, len(data))
    return replace(tensor, values=place, extent=Extent(str(path), 0, len(data)))


def test_strings_are_compared_one_by_one(tmp_path: Path) -> None:
    a = stored(strings_of("one", "two", "three"), tmp_path / "a")
    b = stored(strings_of("one", "two and", "3"), tmp_path / "b")
    same = stored(strings_of("one", "two", "three"), tmp_path / "c")
    equal, other = compare_all([(a, same), (a, b)])
    assert equal == Comparison(True)
    assert isinstance(other, Comparison) and other.statistics is not None and not other.equal
    told = other.statistics
    assert (told.count, told.size, told.where, told.at_a, told.at_b) == (2, 3, (1,), "two", "two and")
    assert np.isnan([told.max_abs, told.mean_abs, told.l2, told.cosine]).all()


def test_what_can_not_be_taken_apart_is_not_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = stored(strings_of("one", dtype="variant"), tmp_path / "a")
    other = stored(strings_of("two", dtype="variant"), tmp_path / "b")
    text, same = stored(strings_of("one"), tmp_path / "c"), stored(strings_of("two"), tmp_path / "d")
    number = tensor_of(randoms(1))
    found = compare_all([(variant, other), (text, number), (number, text), (text, variant)])
    assert [type(one) for one in found] == [NotCompared] * 4
    assert compare_all([(variant, variant)]) == [Comparison(True)]
    monkeypatch.setattr(strings, "MAX_STRINGS", 0)
    (too_many,) = compare_all([(text, same)])
    assert isinstance(too_many, NotCompared) and "1 strings" in too_many.why
    nowhere = replace(text, extent=None)
    (unknown,) = compare_all([(nowhere, nowhere)])
    assert isinstance(unknown, NotCompared)


def test_damaged_strings_are_a_failure(tmp_path: Path) -> None:
    a = stored(strings_of("one", "two"), tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    data[0] = 9
    (tmp_path / "b").write_bytes(data)
    place = Contiguous(Source(tmp_path / "b"), 0, len(data))
    (found,) = compare_all([(a, replace(a, values=place))])
    assert isinstance(found, Unreadable) and found.side is Side.B


# What can't be read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [Side.A, Side.B])
@pytest.mark.parametrize("differs", [False, True])
def test_a_file_that_was_cut_fails_on_its_side_alone(tmp_path: Path, side: Side, differs: bool) -> None:
    tensors = {"first": randoms(2000, 100), "last": randoms(2000, 100, seed=1)}
    save_file(tensors, tmp_path / "a.safetensors")
    if differs:
        tensors = {name: array + 1 for name, array in tensors.items()}
    save_file(tensors, tmp_path / "b.safetensors")
    told: list[int] = []
    with (
        open_checkpoint(tmp_path / "a.safetensors") as a,
        open_checkpoint(tmp_path / "b.safetensors") as b,
    ):
        os.truncate(tmp_path / f"{side.value}.safetensors", 1_000_000)
        first, last = compare_all([(a[name], b[name]) for name in ("first", "last")], advance=told.append)
    assert isinstance(first, Comparison) and first.equal is not differs
    assert isinstance(last, Unreadable) and last.side is side and isinstance(last.error, Truncated)
    assert last.error.path == str(tmp_path / f"{side.value}.safetensors")
    assert sum(told) == 4 * 800_000


@dataclass
class Yielding:
    """Values that give these blocks, whatever the tensor says."""

    given: tuple[bytes, ...]

    def blocks(self, limit: int) -> Iterator[memoryview]:
        yield from map(memoryview, self.given)

    def once(self) -> Values:
        return self


def test_values_that_are_not_as_many_as_told_are_a_failure() -> None:
    for given in [(), (b"1234",), (b"1" * 12, b"2" * 5), (b"1" * 17,)]:
        there = tensor_of(np.frombuffer(b"1" * 16, np.float32))
        wrong = replace(there, values=Yielding(given))
        first, second = compare_all([(wrong, there), (there, wrong)])
        assert isinstance(first, Unreadable) and first.side is Side.A, given
        assert isinstance(second, Unreadable) and second.side is Side.B, given
        assert "16 bytes" in str(second.error), given


@pytest.mark.parametrize("given", [(b"1" * 16,), (b"1" * 12, b"", b"1" * 4), (b"1",) * 16])
def test_blocks_of_any_length_are_put_together(given: tuple[bytes, ...]) -> None:
    there = tensor_of(np.frombuffer(b"1" * 16, np.float32))
    assert compared(replace(there, values=Yielding(given)), there).equal


# Work -----------------------------------------------------------------------------------------------


class Counted(Buffer):
    """Bytes in memory that count how many were read of them."""

    def __init__(self, data: bytes) -> None:
        super().__init__("counted", data)
        self.count = 0

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        self.count += len(buffer)
        super().read_into(offset, buffer, where)


def counted(array: Array) -> tuple[Tensor, Counted]:
    data = Counted(array.tobytes())
    return replace(tensor_of(array), values=Contiguous(data, 0, data.size)), data


def test_ties_are_compared_once() -> None:
    a, of_a = counted(randoms(1000))
    b, _ = counted(randoms(1000))
    told: list[int] = []
    assert compare_all([(a, b), (a, b), (a, b)], advance=told.append) == [Comparison(True)] * 3
    assert of_a.count == a.nbytes and sum(told) == 6 * a.nbytes
    reshaped = replace(a, shape=(10, 100)), replace(b, shape=(10, 100))
    assert compare_all([(a, b), reshaped]) == [Comparison(True)] * 2


def test_what_differs_at_once_is_not_read_twice() -> None:
    a, of_a = counted(randoms(2_000_000))
    b, _ = counted(randoms(2_000_000, seed=1))
    (found,) = compare_all([(a, b)], jobs=1)
    assert isinstance(found, Comparison) and not found.equal
    assert of_a.count <= a.nbytes + (1 << 20)


@pytest.mark.parametrize("is_equal", [True, False])
def test_progress_adds_up(is_equal: bool) -> None:
    sizes = [1, 30, 5_000_000, 20_000]
    pairs = []
    for size in sizes:
        a = randoms(size)
        pairs.append((tensor_of(a, streamed=size == 20_000), tensor_of(a if is_equal else a + 1)))
    pairs.append((tensor_of(randoms(4)), tensor_of(randoms(2, 2))))
    told: list[int] = []
    compare_all(pairs, advance=told.append)
    assert sum(told) == sum(a.nbytes + b.nbytes for a, b in pairs)
    assert all(nbytes >= 0 for nbytes in told)


@pytest.mark.parametrize("jobs", [1, 2, 4])
@pytest.mark.parametrize("is_equal", [True, False])
def test_an_interrupt_ends_all_threads(jobs: int, is_equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (
        ("weights.comparing.workers._RANGE_BYTES", 1 << 18),
        ("weights.comparing.workers._RANGE_ELEMENTS", 1 << 15),
        ("weights.comparing.workers._REPORTED_BYTES", 1 << 16),
        ("storage.work._BATCH_BYTES", 1 << 16),
    ):
        monkeypatch.setattr(f"ckpttool.{name}", size)
    a = randoms(190_000)  # several ranges
    b = a if is_equal else a + 1
    seen = []

    def interrupt(nbytes: int) -> None:
        seen.append(nbytes)
        raise KeyboardInterrupt

    with ends_all_threads():
        compare_all([(tensor_of(a), tensor_of(b))], jobs=jobs, advance=interrupt)
    assert sum(seen) < 2 * a.nbytes


def test_an_interrupt_between_two_tasks_ends_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_hand_out(monkeypatch, compare)
    a = tensor_of(randoms(10))
    with ends_all_threads():
        compare_all([(a, a)], jobs=2)


def test_few_tensors_are_put_together_at_once() -> None:
    lock = threading.Lock()
    running, most = 0, 0

    @dataclass
    class Slow:
        data: bytes

        def blocks(self, limit: int) -> Iterator[memoryview]:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            try:
                for start in range(0, len(self.data), 1024):
                    yield memoryview(self.data)[start : start + 1024]
            finally:
                with lock:
                    running -= 1

        def once(self) -> Values:
            return self

    array = randoms(200_000)
    streamed = replace(tensor_of(array), values=Slow(array.tobytes()))
    pairs = [(replace(streamed), tensor_of(array)) for _ in range(12)]
    assert compare_all(pairs, jobs=8) == [Comparison(True)] * 12
    assert most <= compare.MAX_STREAMS


def test_errors_of_other_kinds_are_not_swallowed() -> None:
    class Broken(Buffer):
        def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
            raise ZeroDivisionError

    a = tensor_of(randoms(10))
    with pytest.raises(ZeroDivisionError):
        compare_all([(a, replace(a, values=Contiguous(Broken("m", bytes(40)), 0, 40)))])


def test_what_both_sides_repeat_is_compared_once(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    left, right = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [2.5], [4.0]])
    for name, row in (("a", left), ("b", right), ("same", left)):
        torch.save({"w": row.expand(3, 7), "endless": row[:1].expand(1 << 20, 1 << 20)}, tmp_path / name)
    with open_checkpoint(tmp_path / "a") as a, open_checkpoint(tmp_path / "b") as b:
        found, endless = compare_all([(a["w"], b["w"]), (a["endless"], b["endless"])])
    dense = left.expand(3, 7).double().numpy(), right.expand(3, 7).double().numpy()

    assert isinstance(found, Comparison) and found.statistics is not None
    assert (found.statistics.size, found.statistics.count, found.statistics.where) == (21, 7, (1, 0))
    assert found.statistics.l2 == pytest.approx(np.linalg.norm(dense[1] - dense[0]), rel=1e-12)
    assert found.statistics.norm_b == pytest.approx(np.linalg.norm(dense[1]), rel=1e-12)
    assert found.statistics.mean_abs == pytest.approx(np.abs(dense[1] - dense[0]).mean(), rel=1e-12)
    assert endless == Comparison(True)


def test_what_each_side_repeats_in_its_own_way_is_not_compared_for_ever(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    row = torch.arange(1 << 20).float()
    torch.save({"w": row.expand(1 << 20, 1 << 20)}, tmp_path / "a")
    torch.save({"w": row[:, None].expand(1 << 20, 1 << 20)}, tmp_path / "b")
    with open_checkpoint(tmp_path / "a") as a, open_checkpoint(tmp_path / "b") as b:
        (found,) = compare_all([(a["w"], b["w"])])

    assert isinstance(found, NotCompared)
    assert found.why == "1,099,511,627,776 elements, which repeat few stored ones"
