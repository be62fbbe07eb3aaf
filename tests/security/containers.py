"""Files that hold a pickle: how each is written, and who loads it."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fixtures import zip_raw
from fixtures.zip_raw import DEFLATED, Member
from tests.security.assembler import Build, Call, Code, Name, PersistentId, call, pickled
from tests.security.torch_programs import program

FOUR_FLOATS = struct.pack("<4f", 1, 2, 3, 4)
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
SYSTEM_INFO = {
    "protocol_version": 1001,
    "little_endian": True,
    "type_sizes": {"int": 4, "long": 4, "short": 2},
}


@dataclass(frozen=True)
class Container:
    """`write` turns a pickle into files by name; `target` is loaded by `loader`."""

    name: str
    target: str
    loader: str
    write: Callable[[bytes], dict[str, bytes]]
    holds_tensors: bool = False
    lowest_protocol: int = 0


def in_file(name: str) -> Callable[[bytes], dict[str, bytes]]:
    """Return what writes the pickle itself."""
    return lambda data: {name: data}


def torch_zip(data: bytes, *, method: int = zip_raw.STORED) -> bytes:
    """Return a checkpoint around a pickle."""
    members = zip_raw.torch_members(data, {"0": FOUR_FLOATS})
    return zip_raw.build([Member(one.name, one.data, method=method) for one in members])


def torch_legacy(data: bytes, protocol: int = 2) -> bytes:
    """Return a checkpoint of the old serialization around a pickle."""
    heads = [pickled(value, protocol) for value in (MAGIC, VERSION, SYSTEM_INFO)]
    keys = pickled(["0"], protocol)
    return b"".join([*heads, data, keys, struct.pack("<q", 4), FOUR_FLOATS])


def torch_tar(data: bytes) -> bytes:
    """Return a checkpoint of the oldest serialization around a pickle."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in (
            ("sys_info", pickled(SYSTEM_INFO, 2)),
            ("pickle", data),
            ("tensors", pickled(0, 2)),
            ("storages", pickled(0, 2) + pickled([], 2)),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def npy(data: bytes, shape: tuple[int, ...] = (1,)) -> bytes:
    """Return an array of objects whose content is a pickle."""
    header = f"{{'descr': '|O', 'fortran_order': False, 'shape': {shape}, }}"
    padding = " " * (-(len(header) + 11) % 64)
    header += padding + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + data


def npz(data: bytes) -> bytes:
    """Return an archive that holds such an array, and an honest one."""
    honest = b"\x93NUMPY\1\0\x76\0{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }"
    honest = honest.ljust(127) + b"\n" + FOUR_FLOATS
    return zip_raw.build([Member("w.npy", honest), Member("o.npy", npy(data), method=DEFLATED)])


def trainer(name: str) -> Callable[[bytes], dict[str, bytes]]:
    """Return what writes a Trainer's checkpoint directory, one of whose files is the attack."""

    def write(data: bytes) -> dict[str, bytes]:
        state = b'{"epoch": 1.0, "global_step": 2, "log_history": [], "best_metric": null}'
        header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
        model = struct.pack("<Q", len(header)) + header + FOUR_FLOATS
        files = {"trainer_state.json": state, "config.json": b"{}", "model.safetensors": model}
        return {**{f"checkpoint-2/{key}": value for key, value in files.items()}, name: torch_zip(data)}

    return write


def sharded(data: bytes) -> dict[str, bytes]:
    """Return a sharded checkpoint, one of whose shards is the attack."""
    index = b'{"metadata": {"total_size": 16}, "weight_map": {"weight": "pytorch_model-00001-of-00001.bin"}}'
    return {"sharded/pytorch_model.bin.index.json": index, SHARD: torch_zip(data)}


def distributed(data: bytes) -> dict[str, bytes]:
    """Return a distributed checkpoint, one of whose values is the attack."""
    module, shard = "torch.distributed.checkpoint", torch_zip(data)
    key = _record(f"{module}.metadata", "MetadataIndex", fqn="x", offset=None, index=None)
    where = {
        "relative_path": "__0_0.distcp",
        "offset": 0,
        "length": len(shard),
        "transform_descriptors": None,
    }
    metadata = _record(
        f"{module}.metadata",
        "Metadata",
        state_dict_metadata={"x": _record(f"{module}.metadata", "BytesStorageMetadata")},
        planner_data={"x": ("x",)},
        storage_data={key: _record(f"{module}.filesystem", "_StorageInfo", **where)},
        storage_meta=None,
        version=None,
    )
    return {"dcp/.metadata": pickled(metadata, 2), "dcp/__0_0.distcp": shard}


def _record(module: str, name: str, **fields: Any) -> Build:
    return Build(Call(Name(module, name), how="newobj"), fields)


def exported(data: bytes) -> dict[str, bytes]:
    """Return an exported program, whose example of an input is the attack."""
    return {"a.pt2": program(None, **{"program/data/sample_inputs/model.pt": data})}


SHARD = "sharded/pytorch_model-00001-of-00001.bin"
TRAINER_FILES = ("training_args.bin", "optimizer.pt", "rng_state.pth", "scheduler.pt", "scaler.pt")

CONTAINERS = (
    Container("pkl", "a.pkl", "pickle", in_file("a.pkl")),
    Container("bin", "a.bin", "pickle", in_file("a.bin")),
    Container("zip", "a.pth", "torch", lambda data: {"a.pth": torch_zip(data)}, True),
    Container("deflated", "a.pt", "torch", lambda data: {"a.pt": torch_zip(data, method=DEFLATED)}, True),
    Container("legacy", "a.pt", "torch", lambda data: {"a.pt": torch_legacy(data)}),
    Container("tar", "a.tar", "torch", lambda data: {"a.tar": torch_tar(data)}),
    Container("npy", "a.npy", "numpy", lambda data: {"a.npy": npy(data)}),
    Container("npz", "a.npz", "numpy", lambda data: {"a.npz": npz(data)}),
    Container("pdparams", "a.pdparams", "paddle", in_file("a.pdparams")),
    Container("pdopt", "a.pdopt", "paddle", in_file("a.pdopt")),
    Container("dcp", "dcp/.metadata", "dcp", lambda data: {"dcp/.metadata": data, "dcp/__0_0.distcp": b"x"}),
    Container("ckpt", "a.ckpt", "torch", lambda data: {"a.ckpt": torch_zip(data)}, True),
    Container("sharded", SHARD, "torch", sharded, True),
    *(
        Container(
            name.partition(".")[0], f"checkpoint-2/{name}", "torch", trainer(f"checkpoint-2/{name}"), True
        )
        for name in TRAINER_FILES
    ),
)
BY_NAME = {container.name: container for container in CONTAINERS}
KINDS = (
    *(BY_NAME[name] for name in ("pkl", "zip", "deflated", "legacy", "tar", "npy", "npz", "dcp", "sharded")),
    *(BY_NAME[name] for name in ("training_args", "optimizer")),
    Container("joblib", "a.joblib", "joblib", in_file("a.joblib")),
    Container("distcp", "dcp/__0_0.distcp", "dcp_values", distributed, True),
    Container("pt2", "a.pt2", "exported", exported),
)
"""A container of each kind, for attacks that are tried in each."""


def tensor() -> Any:
    """Return the call that rebuilds a tensor over the storage 0."""
    storage = PersistentId(("storage", Name("torch", "FloatStorage"), "0", "cpu", 4))
    hooks = call("collections", "OrderedDict")
    return call("torch._utils", "_rebuild_tensor_v2", storage, 0, (4,), (1,), False, hooks)


def beside_a_tensor(expression: Any, container: Container, protocol: int) -> Any:
    """Return the content of a checkpoint, one of whose values is the attack."""
    if not container.holds_tensors or protocol == 0:
        return {"epoch": 1, "payload": expression}
    return {"epoch": 1, "weight": tensor(), "payload": expression}


def in_persistent_id(expression: Any) -> Any:
    """Return a tensor within whose persistent id the attack is evaluated and thrown away."""
    storage = PersistentId(("storage", Name("torch", "FloatStorage"), "0", Code(_device(expression)), 4))
    hooks = call("collections", "OrderedDict")
    return call("torch._utils", "_rebuild_tensor_v2", storage, 0, (4,), (1,), False, hooks)


def _device(expression: Any) -> bytes:
    return pickled(expression, 2)[2:-1] + b"0" + pickled("cpu", 2)[2:-1]
