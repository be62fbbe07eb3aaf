"""safetensors: the real files, every rule by which the library refuses one, and what nobody foresaw."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool import (
    CheckpointError,
    DamagedCheckpoint,
    LimitExceeded,
    Role,
    Severity,
    Truncated,
    open_checkpoint,
)
from ckpttool.core.dtypes import BY_SAFETENSORS
from tests.support.opening import format_class_of
from tests.support.thorough import spread

FILES = Path(__file__).parents[2] / "fixtures" / "files"
TRUTHS = sorted((FILES / "safetensors").glob("*.safetensors.expected.json"))
ODD = sorted((FILES / "hostile").glob("st_*.safetensors"))
EXPECTED = json.loads((FILES / "hostile" / "hostile.expected.json").read_text(encoding="utf-8"))
MAX_HEADER = 100_000_000
MAX_AXES = 64
GOOD = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def file_of(header: object, data: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def written(directory: Path, content: bytes, name: str = "m.safetensors") -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


def test_reads_what_the_library_wrote() -> None:
    for truth in TRUTHS:
        expected = json.loads(truth.read_text(encoding="utf-8"))
        with open_checkpoint(str(truth).removesuffix(".expected.json")) as opened:
            assert (opened.format, opened.variant) == ("safetensors", None), truth
            assert sorted(opened) == sorted(tensor["path"][0] for tensor in expected["tensors"]), truth
            for told in expected["tensors"]:
                tensor = opened[told["path"][0]]
                shape, dtype = list(told["shape"]), told["dtype"]
                if dtype == "float4_e2m1fn_x2":  # PyTorch counts pairs of elements, the header elements
                    shape[-1] *= 2
                    dtype = "float4_e2m1fn"
                assert (tensor.dtype.name, list(tensor.shape)) == (dtype, shape), truth
                assert hashlib.sha256(tensor.tobytes()).hexdigest() == told["sha256"], truth
            assert opened.metadata == expected["values"], truth
            for field, value in expected["training"].items():
                assert getattr(opened.training, field) == value, truth
            assert expected["parameters"] in (None, opened.parameters), truth
            assert opened.granularity.value == expected["granularity"], truth


def test_judges_hostile_files_as_expected() -> None:
    for path in ODD:
        verdict = EXPECTED[path.name]["expect"]["verdict"]
        if verdict == "invalid":
            with pytest.raises(DamagedCheckpoint):
                open_checkpoint(path)
        else:
            with open_checkpoint(path) as opened:
                assert [tensor.dtype.name for tensor in opened.tensors] == ["float32"], path
                assert all(finding.severity is Severity.WARNING for finding in opened.findings), path


@pytest.mark.framework
def test_refuses_what_the_library_refuses() -> None:
    for path in ODD:
        safetensors = pytest.importorskip("safetensors")
        stricter = "duplicate_name" in path.name or "duplicate_escaped" in path.name
        try:
            safetensors.deserialize(path.read_bytes())
            is_taken = not stricter
        except safetensors.SafetensorError:
            is_taken = False
        assert opens(path) == is_taken, path


def opens(path: Path) -> bool:
    try:
        open_checkpoint(path).close()
    except CheckpointError:
        return False
    return True


REJECTED: dict[str, tuple[type[CheckpointError], str, bytes]] = {
    "length over the limit": (
        LimitExceeded,
        "header-too-large",
        (MAX_HEADER + 1).to_bytes(8, "little") + b"{}",
    ),
    "longer than the file": (Truncated, "truncated", (1000).to_bytes(8, "little") + b'{"'),
    "not UTF-8": (DamagedCheckpoint, "header-not-utf8", file_of(b'{"\xff":1}')),
    "not JSON": (DamagedCheckpoint, "header-not-json", file_of(b'{"x":')),
    "NaN": (DamagedCheckpoint, "header-not-json", file_of(b'{"x":NaN}')),
    "nested": (LimitExceeded, "header-too-deep", file_of(b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}")),
    "too many values": (LimitExceeded, "limit-exceeded", file_of(b'{"x":[' + b"0," * 10_000_001 + b"0]}")),
    "metadata": (DamagedCheckpoint, "metadata-not-text", file_of({"__metadata__": {"a": 1}}, b"")),
    "name twice": (DamagedCheckpoint, "duplicate-key", file_of(b'{"x":1,"x":1}')),
    "entry": (DamagedCheckpoint, "entry-not-object", file_of({"x": 1})),
    "field missing": (DamagedCheckpoint, "field-missing", file_of({"x": {"dtype": "F32"}})),
    "dtype": (DamagedCheckpoint, "unknown-dtype", file_of({"x": GOOD | {"dtype": "f32"}})),
    "dtype is a list": (DamagedCheckpoint, "unknown-dtype", file_of({"x": GOOD | {"dtype": []}})),
    "dimension": (DamagedCheckpoint, "number-out-of-range", file_of({"x": GOOD | {"shape": [2**64]}})),
    "boolean": (DamagedCheckpoint, "number-out-of-range", file_of({"x": GOOD | {"shape": [True, 4]}})),
    "minus zero": (
        DamagedCheckpoint,
        "number-out-of-range",
        file_of(b'{"x":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', b""),
    ),
    "digits": (
        DamagedCheckpoint,
        "number-out-of-range",
        file_of(b'{"x":{"dtype":"F32","shape":[' + b"9" * 99_999 + b'],"data_offsets":[0,16]}}'),
    ),
    "three offsets": (
        DamagedCheckpoint,
        "offsets-not-two",
        file_of({"x": GOOD | {"data_offsets": [0, 8, 16]}}),
    ),
    "reversed": (DamagedCheckpoint, "offsets-reversed", file_of({"x": GOOD | {"data_offsets": [16, 0]}})),
    "overflow": (DamagedCheckpoint, "shape-overflow", file_of({"x": GOOD | {"shape": [2**63, 4, 0]}})),
    "axes": (LimitExceeded, "too-many-axes", file_of({"x": GOOD | {"shape": [1] * (MAX_AXES + 1)}})),
    "size": (DamagedCheckpoint, "size-mismatch", file_of({"x": GOOD | {"shape": [5]}})),
    "half a byte": (
        DamagedCheckpoint,
        "sub-byte-size",
        file_of({"x": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"\0"),
    ),
    "gap": (
        DamagedCheckpoint,
        "offsets-gap",
        file_of({"x": GOOD, "y": GOOD | {"data_offsets": [20, 36]}}, bytes(36)),
    ),
    "overlap": (
        DamagedCheckpoint,
        "offsets-overlap",
        file_of({"x": GOOD, "y": GOOD | {"data_offsets": [12, 28]}}, bytes(28)),
    ),
    "alias": (DamagedCheckpoint, "offsets-overlap", file_of({"x": GOOD, "y": GOOD})),
    "trailing": (DamagedCheckpoint, "trailing-bytes", file_of({"x": GOOD}, bytes(17))),
    "cut": (Truncated, "truncated", file_of({"x": GOOD}, bytes(15))),
}


def test_gives_each_rule_its_own_code(tmp_path: Path) -> None:
    for kind in REJECTED:
        error, code, content = REJECTED[kind]
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint(written(tmp_path, content))
        assert (type(raised.value), raised.value.code) == (error, code), kind


def test_reads_as_many_axes_as_arrays_have(tmp_path: Path) -> None:
    content = file_of({"x": GOOD | {"shape": [1] * (MAX_AXES - 1) + [4]}})
    with open_checkpoint(written(tmp_path, content)) as opened:
        assert opened["x"].shape == safetensors.numpy.load(content)["x"].shape


def test_tells_truncated_from_trailing(tmp_path: Path) -> None:
    cases = [
        (file_of({"x": GOOD}, bytes(9)), "truncated: 81 of 88 bytes"),
        (file_of({"x": GOOD}, bytes(17)), "trailing bytes after the last tensor: 1 (88 in all)"),
        (file_of({"x": GOOD})[:40], "truncated: 40 bytes (72 for the header alone)"),
    ]
    for content, message in cases:
        path = written(tmp_path, content)
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint(path)
        assert str(raised.value) == f"{path}: {message}"


def test_names_the_tensor_in_the_message(tmp_path: Path) -> None:
    path = written(tmp_path, file_of({"fc.weight": GOOD | {"shape": [5]}}))
    with pytest.raises(DamagedCheckpoint) as raised:
        open_checkpoint(path)
    assert str(raised.value) == f"{path}[fc.weight]: bytes 0..16 are 16 (20 for F32 [5])"


def test_warns_of_what_the_library_takes(tmp_path: Path) -> None:
    cases = [
        (file_of(b' {"x":' + json.dumps(GOOD).encode() + b"}"), "header-whitespace"),
        (file_of(b'{"x":' + json.dumps(GOOD).encode() + b"}\n"), "header-whitespace"),
        (file_of({"": GOOD}), "empty-name"),
        (file_of({"x": GOOD | {"more": 1}}), "unknown-field"),
        (file_of(b'{"__metadata__":{"a":"1","a":"2"}}', b""), "metadata-duplicate-key"),
    ]
    for content, code in cases:
        with open_checkpoint(written(tmp_path, content)) as opened:
            assert [(found.code, found.severity) for found in opened.findings] == [
                (code, Severity.WARNING)
            ], content


def test_lists_tensors_and_spans_in_the_order_of_the_file(tmp_path: Path) -> None:
    header = {
        "b": GOOD | {"data_offsets": [16, 32]},
        "optimizer.exp_avg": GOOD | {"data_offsets": [32, 48]},
        "a": GOOD,
    }
    with open_checkpoint(written(tmp_path, file_of(header, bytes(range(48))))) as opened:
        roles = [(tensor.name, tensor.role) for tensor in opened.tensors]
        assert roles == [("a", Role.WEIGHTS), ("b", Role.WEIGHTS), ("optimizer.exp_avg", Role.OPTIMIZER)]
        for span, tensor in zip(opened.spans(), opened.tensors, strict=True):
            content = bytearray(span.extent.nbytes)
            span.read(0, memoryview(content))
            assert (span.where, span.dtype, bytes(content)) == (tensor.name, tensor.dtype, tensor.tobytes())


def test_does_not_claim_other_files(tmp_path: Path) -> None:
    cases = [
        b"",
        b"\0" * 8,
        b'{"a": [{"b": 1}]}',
        b'{"abc":[{"d": {}}]}',
        b"PK\x03\x04\x14\0\0\0{\0",
        b"\x10" + bytes(7),
    ]
    for content in cases:
        assert format_class_of(written(tmp_path, content, "file")) != "Safetensors", content


def test_claims_a_truncated_file_whatever_its_name(tmp_path: Path) -> None:
    assert format_class_of(written(tmp_path, file_of({"x": GOOD})[:20], "file")) == "Safetensors"


def test_survives_every_truncation_and_every_flipped_bit_of_the_header(tmp_path: Path) -> None:
    whole = file_of(
        {"__metadata__": {"epoch": "3"}, "x": GOOD, "y": GOOD | {"data_offsets": [16, 32]}}, bytes(32)
    )
    path = tmp_path / "m.safetensors"
    for size in spread(range(len(whole)), 60):
        path.write_bytes(whole[:size])
        assert not opens(path), size
    for bit in spread(range(8 * (len(whole) - 32)), 300):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        opens(path)  # any right answer, or a CheckpointError


NUMBERS = st.one_of(st.integers(-2, 70), st.sampled_from([2**63, 2**64, 1.0, True, None, "4", [], -0.0]))
ENTRIES = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*BY_SAFETENSORS, "f32", "F128", 3, None]),
            "shape": st.lists(NUMBERS, max_size=3),
            "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
        },
        optional={"more": st.just({"a": []})},
    ),
    st.just([]),
)
ANY_TEXT = st.text(max_size=8)
HEADERS = st.dictionaries(ANY_TEXT | st.just("__metadata__"), ENTRIES, max_size=4)


@st.composite
def valid_files(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(ANY_TEXT.filter(lambda name: name != "__metadata__"), unique=True, max_size=6)):
        dtype = draw(st.sampled_from(sorted(BY_SAFETENSORS)))
        shape = [*draw(st.lists(st.integers(0, 5), max_size=3)), 8]
        end = at + BY_SAFETENSORS[dtype].nbytes(8 * _product(shape[:-1]))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    shuffled = dict(draw(st.permutations(list(header.items()))))
    return shuffled, draw(st.binary(min_size=at, max_size=at))


def _product(numbers: list[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


RUNS = settings(suppress_health_check=list(HealthCheck))


@pytest.mark.framework
@RUNS
@given(file=valid_files())
def test_agrees_with_the_library_on_valid_files(
    tmp_path_factory: pytest.TempPathFactory, file: tuple[dict[str, Any], bytes]
) -> None:
    safetensors = pytest.importorskip("safetensors")
    content = file_of(*file)
    path = written(tmp_path_factory.getbasetemp(), content, "valid.safetensors")
    with open_checkpoint(path) as opened:
        ours = {name: (list(tensor.shape), tensor.tobytes()) for name, tensor in opened.items()}
    theirs = {name: (told["shape"], bytes(told["data"])) for name, told in safetensors.deserialize(content)}
    assert ours == theirs


@pytest.mark.framework
@RUNS
@given(header=HEADERS, size=st.integers(0, 80))
def test_agrees_with_the_library_on_random_headers(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], size: int
) -> None:
    safetensors = pytest.importorskip("safetensors")
    content = file_of(header, bytes(size))
    try:
        safetensors.deserialize(content)
        is_taken = True
    except safetensors.SafetensorError:
        is_taken = False
    assert opens(written(tmp_path_factory.getbasetemp(), content, "random.safetensors")) == is_taken


@RUNS
@given(header=st.binary(max_size=200), length=st.one_of(st.none(), st.integers(0, 2**64 - 1)))
def test_raises_nothing_but_its_own_errors(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, length: int | None
) -> None:
    size = len(header) + 1 if length is None else length
    content = size.to_bytes(8, "little") + b"{" + header
    opens(written(tmp_path_factory.getbasetemp(), content, "bytes.safetensors"))
