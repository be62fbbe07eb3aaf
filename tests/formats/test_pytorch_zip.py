"""PyTorch zips: what the records say of each other, and objects of which the fixtures hold none."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

from ckpttool import DamagedCheckpoint, LimitExceeded, Role, open_checkpoint
from tests.support.limits import lower_limits

STORAGE = b"(X\7\0\0\0storagectorch\n%sStorage\nX\1\0\0\x000X\3\0\0\0cpuK%stQ"
FLOATS = bytes.fromhex("0000803f000000400000404000008040")


def storage(count: int = 4, kind: bytes = b"Float") -> bytes:
    return STORAGE % (kind, bytes([count]))


def tensor(
    shape: bytes = b"K\4\x85", strides: bytes = b"K\1\x85", *, stored: bytes = b"", offset: bytes = b"K\0"
) -> bytes:
    """Return the opcodes of a float32 tensor over the storage "0"."""
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + (stored or storage())
        + offset
        + shape
        + strides
        + b"\x89}tR"
    )


Written = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Written:
    """Return what writes an archive around an object, given as opcodes, and storages."""

    def archive(opcodes: bytes, storages: Mapping[str, bytes] | None = None, **records: bytes) -> Path:
        path = tmp_path / "some.pth"
        held = {"data.pkl": b"\x80\2" + opcodes + b".", "byteorder": b"little", "version": b"3\n"} | records
        data = {"0": FLOATS} if storages is None else storages
        with ZipFile(path, "w") as written:
            for name, content in (held | {f"data/{key}": content for key, content in data.items()}).items():
                written.writestr(f"some/{name}", content)
        return path

    return archive


def refused(path: Path) -> DamagedCheckpoint:
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(path)
    return caught.value


def named(opcodes: bytes) -> bytes:
    """Return a dictionary that holds one object under "w"."""
    return b"}X\1\0\0\0w" + opcodes + b"s"


def test_the_least_archive_opens(write: Written) -> None:
    with open_checkpoint(write(named(tensor()))) as checkpoint:
        assert checkpoint["w"].tobytes() == FLOATS
        assert checkpoint.findings == checkpoint.safety == ()


@pytest.mark.parametrize(
    ("opcodes", "code"),
    [
        (tensor(shape=b"K\5\x85"), "tensor-bounds"),
        (tensor(offset=b"K\1"), "tensor-bounds"),
        (tensor(offset=b"J\xff\xff\xff\xff"), "tensor-bounds"),
        (tensor(strides=b"J\xff\xff\xff\xff\x85"), "tensor-bounds"),
        (tensor(strides=b"K\2\x85"), "tensor-bounds"),
        (tensor(strides=b")"), "tensor-bounds"),
        (tensor(shape=b"N\x85"), "tensor-bounds"),
        (tensor(shape=b"N"), "tensor-damaged"),
        (tensor(shape=b"(" + b"K\1" * 65 + b"t", strides=b"(" + b"K\1" * 65 + b"t"), "tensor-bounds"),
        (tensor(stored=b"N"), "tensor-damaged"),
        (tensor(stored=storage(5)), "storage-size"),
        (tensor(stored=storage(4, b"Double")), "storage-size"),
        (tensor(stored=storage(4, b"Some")), "tensor-damaged"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R", "tensor-damaged"),
        (b"ctorch._utils\n_rebuild_nested_tensor\n(NNNNtR", "tensor-damaged"),
        (b"ctorch.nested._internal.nested_tensor\n_rebuild_njt\nN\x85R", "tensor-damaged"),
        (b"ctorch._utils\n_rebuild_sparse_tensor\n(X\1\0\0\0xNtR", "tensor-damaged"),
        (b"K\7Q", "tensor-damaged"),
        (b"X\1\0\0\0aQ", "tensor-damaged"),
    ],
)
def test_tensors_that_contradict_themselves(write: Written, opcodes: bytes, code: str) -> None:
    assert refused(write(named(opcodes))).code == code


def test_a_shape_that_explodes_when_printed(write: Written) -> None:
    """Errors describe what they found, and lists that hold each other twice have no end."""
    laughs = b"]" + b"q\0](h\0h\0e" * 60
    refused(write(named(tensor(shape=laughs + b"\x85"))))


def test_expanded_and_empty_tensors(write: Written) -> None:
    with open_checkpoint(write(named(tensor(b"K\3K\4\x86", b"K\0K\1\x86")))) as checkpoint:
        assert checkpoint["w"].tobytes() == FLOATS * 3
    with open_checkpoint(write(named(tensor(b"K\0\x85")))) as checkpoint:
        assert checkpoint["w"].tobytes() == b""


def test_records_that_no_tensor_uses(write: Written) -> None:
    with open_checkpoint(write(named(tensor()), {"0": FLOATS, "1": bytes(5)})) as checkpoint:
        assert [finding.code for finding in checkpoint.findings] == ["unused-storage"]


def test_a_missing_record(write: Written) -> None:
    assert refused(write(named(tensor()), {})).code == "storage-missing"


@pytest.mark.parametrize("tail", [b"x", pickle.dumps(1)])
def test_bytes_behind_the_object(write: Written, tail: bytes) -> None:
    path = write(b"", **{"data.pkl": b"\x80\2" + named(tensor()) + b"." + tail})
    with open_checkpoint(path) as checkpoint:
        assert {finding.code for finding in checkpoint.findings} == {"pickle-trailing"}


@pytest.mark.parametrize("order", [b"big", b"middle"])
def test_byte_order(write: Written, order: bytes) -> None:
    path = write(named(tensor()), byteorder=order)
    if order == b"middle":
        refused(path)
        return
    with open_checkpoint(path) as checkpoint:
        words = [FLOATS[at : at + 4][::-1] for at in range(0, 16, 4)]
        assert checkpoint["w"].tobytes() == b"".join(words)


# Modules --------------------------------------------------------------------------------------------


class Net:
    """Has the state of a module."""

    def __init__(self, modules: Mapping[str, Any], **more: object) -> None:
        self.__dict__ |= {"_parameters": {}, "_buffers": {}, "_modules": dict(modules)} | more


def pickled(value: object) -> bytes:
    """Return the opcodes of a value, without protocol and STOP."""
    return pickle.dumps(value, 2)[2:-1]


def test_modules_that_hold_themselves(write: Written) -> None:
    net = Net({})
    net.__dict__["_modules"]["self"] = net
    assert isinstance(refused(write(pickled(net))), LimitExceeded)


def test_modules_that_multiply(write: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, modules=1000)
    net = Net({})
    for _ in range(40):
        net = Net({"a": net, "b": net})
    assert isinstance(refused(write(pickled(net))), LimitExceeded)


STATE = b"c__main__\nNet\n)\x81}(X\x0b\0\0\0_parameters}X\x08\0\0\0_buffers}X\x08\0\0\0_modules}%sub"


def test_what_modules_hold_besides_their_state_is_used(write: Written) -> None:
    path = write(STATE % (b"X\4\0\0\0mine](" + tensor() + b"e"))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.findings == ()
        assert [(tensor.path, tensor.role) for tensor in checkpoint.tensors] == [(("mine", 0), Role.OTHER)]


def test_modules_in_attributes(write: Written) -> None:
    """A part, the whole and another module are told of; a circle ends."""
    part, other = Net({}, size=1), Net({}, size=2)
    whole = Net({"part": part}, list=[part, other], also={"part": part})
    part.__dict__["up"] = other.__dict__["up"] = whole
    with open_checkpoint(write(pickled(whole))) as checkpoint:
        found = checkpoint.metadata["attributes"]
    name = f"{__name__}.Net"
    circle = {
        "<class>": name,
        "modules": {"": name},
        "attributes": {"size": 2, "up": "<the module ''>"},
    }
    assert found == {
        "list": ["<the module 'part'>", circle],
        "also": {"part": "<the module 'part'>"},
        "part.size": 1,
        "part.up": "<the module ''>",
    }


def test_attributes_with_dots_in_their_names(write: Written) -> None:
    net = Net({"a": Net({}, b=1)}, **{"a.b": 2})
    with open_checkpoint(write(pickled(net))) as checkpoint:
        assert checkpoint.metadata["attributes"] == {"a.b": 2, "<a.b>": 1}


def test_attributes_of_modules_that_multiply(write: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """All modules have one list, which is told with each."""
    lower_limits(monkeypatch, visits=10_000)
    shared = [{"a": number} for number in range(1000)]
    nets = [Net({}, all=shared) for _ in range(20)]
    assert isinstance(refused(write(pickled(nets))), LimitExceeded)


def test_modules_that_are_met_often(write: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, visits=10_000)
    net = Net({}, all=[{"a": number} for number in range(1000)])
    assert isinstance(refused(write(pickled([net] * 20))), LimitExceeded)


@pytest.mark.framework
def test_attributes_of_modules(tmp_path: Path) -> None:
    """Whatever makes a module another one makes another description, or another tensor."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    def parts(model: Any) -> tuple[object, object]:
        torch.save(model, tmp_path / "some.pth")
        with open_checkpoint(tmp_path / "some.pth") as checkpoint:
            tensors = {tensor.name: (tensor.role, tensor.tobytes()) for tensor in checkpoint.tensors}
            return checkpoint.metadata, tensors

    def model(slope: float = 0.1, p: float = 0.5, eps: float = 1e-5, stride: int = 1) -> Any:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(2, eps=eps)
        norm.register_buffer("hidden", torch.ones(2), persistent=False)
        norm.mask = torch.zeros(3)
        norm.table = {"a": [1], "b": torch.ones(1)}
        conv = nn.Conv1d(2, 2, 1, stride=stride)
        return nn.Sequential(conv, nn.LeakyReLU(slope), nn.Dropout(p), norm, nn.LSTM(2, 2))

    def changed(name: str, value: object) -> Any:
        made = model()
        setattr(made[3], name, value)
        return made

    before, tensors = parts(model())
    assert parts(model()) == (before, tensors)
    assert isinstance(tensors, dict)
    assert isinstance(before, dict)
    state = model().state_dict()
    assert {name for name, (role, _) in tensors.items() if role is Role.WEIGHTS} == set(state)
    ours = {name: raw for name, (role, raw) in tensors.items() if role is Role.OTHER}
    assert {name: np.frombuffer(raw, "<f4").tolist() for name, raw in ours.items()} == {
        "3.hidden": [1, 1],
        "3.mask": [0, 0, 0],
        "3.table.b": [1],
    }
    slopes = {"1.training": True, "1.negative_slope": 0.1, "1.inplace": False}
    assert {name: told for name, told in before["attributes"].items() if name[:2] == "1."} == slopes
    assert before["attributes"]["3.table"] == {"a": [1]}
    others = [
        *(model(slope=0.2), model(p=0.25), model(eps=1e-3), model(stride=2), model().eval()),
        changed("mask", torch.ones(3)),
        changed("hidden", torch.zeros(2)),
        changed("table", {"a": [2], "b": torch.ones(1)}),
        changed("note", "another"),
    ]
    for other in others:
        assert parts(other) != (before, tensors)


def test_what_modules_hold_besides_their_state_must_be_there(write: Written) -> None:
    assert refused(write(STATE % (b"X\4\0\0\0mine" + tensor()), {})).code == "storage-missing"


# Tensors in tensors ---------------------------------------------------------------------------------


def test_tensors_that_nest_without_end(write: Written) -> None:
    parameter = b"ctorch._utils\n_rebuild_parameter\n"
    path = write(named(parameter * 3000 + tensor() + b"\x85R" * 3000))
    assert isinstance(refused(path), LimitExceeded)


def test_attributes_that_multiply(write: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor has the one before it as two attributes."""
    lower_limits(monkeypatch, tensors_in_tensors=10_000)
    rebuild = b"ctorch._utils\n_rebuild_parameter_with_state\n(h\0\x89N}(X\1\0\0\0ah\0X\1\0\0\0bh\0utRq\0"
    path = write(named(tensor() + b"q\0" + rebuild * 40))
    assert isinstance(refused(path), LimitExceeded)


@pytest.mark.framework
def test_attributes_that_are_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.mean = torch.arange(3.0)  # type: ignore[attr-defined]
    plain = torch.zeros(2)
    plain.label, plain.scale = "some", torch.tensor(0.5)  # type: ignore[attr-defined]
    torch.save({"weight": weight, "plain": plain}, tmp_path / "some.pth")
    with open_checkpoint(tmp_path / "some.pth") as checkpoint:
        assert {tensor.path: tensor.role for tensor in checkpoint.tensors} == {
            ("weight",): Role.WEIGHTS,
            ("weight", "mean"): Role.OTHER,
            ("plain",): Role.WEIGHTS,
            ("plain", "scale"): Role.OTHER,
        }
        assert checkpoint["weight.mean"].tobytes() == weight.mean.numpy().tobytes()  # type: ignore[attr-defined]
        assert checkpoint.parameters == 6
        assert checkpoint.findings == ()


@pytest.mark.framework
def test_tensors_of_more_than_one_block(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    large = torch.randn(1000, 700)
    torch.save({"large": large, "turned": large.t()}, tmp_path / "some.pth")
    with open_checkpoint(tmp_path / "some.pth") as checkpoint:
        for name, tensor in (("large", large), ("turned", large.t().contiguous())):
            blocks = b"".join(bytes(block) for block in checkpoint[name].blocks())
            assert blocks == tensor.numpy().tobytes()
            assert checkpoint[name].tobytes() == blocks


@pytest.mark.framework
def test_records_that_torch_does_not_write_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.chdir(tmp_path)  # PyTorch names no root after a file whose path is not ASCII
    path = Path("m.pth")
    torch.save({"w": torch.ones(3), "epoch": 3}, path)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata == {"epoch": 3}
    with ZipFile(path, "a") as archive:
        archive.writestr("m/extra/tok.json", b"abc")
    with open_checkpoint(path) as checkpoint:
        told = {"extra/tok.json": "<3 bytes, CRC-32 352441c2>"}
        assert checkpoint.metadata == {"epoch": 3, "other records": told}
