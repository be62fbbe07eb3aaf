"""Small files that expand: names that share what is long, counts without content, nesting, compression.

Each writer puts one checkpoint of less than 1 MB at a path, or a directory of such.
"""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ckpttool.containers.protobuf import bytes_field, encoded_varint, fixed32_field, number_field, text_field
from ckpttool.storage.checksums import crc32c, mask_crc

BOMBS: dict[str, Callable[[Path], None]] = {}
"""What writes each bomb, by the name of its file."""
MOST_BYTES = 1_000_000
LONG = "n" * 60_000
_TABLE_MAGIC = bytes.fromhex("57fb808b247547db")
_FLOAT = number_field(1, 1)
_LIMIT = 900_000


def bomb(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register a writer under the name of its file."""

    def add(write: Callable[[Path], None]) -> Callable[[Path], None]:
        BOMBS[name] = write
        return write

    return add


def holding(data: bytes) -> Callable[[Path], None]:
    """Return a writer of a file's bytes."""

    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


# TensorFlow -----------------------------------------------------------------------------------------


def table(entries: Iterator[tuple[int, bytes, bytes]]) -> bytes:
    """Return a table of one block; an entry is how much of the key before it shares, the rest, its value."""
    out = bytearray()

    def put(body: bytes) -> bytes:
        handle = encoded_varint(len(out)) + encoded_varint(len(body))
        out.extend(body + b"\0" + struct.pack("<I", mask_crc(crc32c(body + b"\0"))))
        return handle

    def block(*entries: bytes) -> bytes:
        return b"".join(entries) + struct.pack("<II", 0, 1)

    def entry(shared: int, added: bytes, value: bytes) -> bytes:
        return b"".join(map(encoded_varint, (shared, len(added), len(value)))) + added + value

    data = put(block(*(entry(*one) for one in entries)))
    metaindex, index = put(block()), put(block(entry(0, b"\xff", data)))
    return bytes(out) + (metaindex + index).ljust(40, b"\0") + _TABLE_MAGIC


def entries_sharing(prefix: int, count: int) -> Iterator[tuple[int, bytes, bytes]]:
    value = number_field(1, 1) + bytes_field(2, b"") + number_field(5, 4) + fixed32_field(6, 7)
    yield 0, b"", number_field(1, 1) + bytes_field(3, number_field(1, 1))
    yield 0, b"a" * prefix + struct.pack(">I", 0), value
    for number in range(1, count):
        yield prefix, struct.pack(">I", number), value


def write_index(path: Path, entries: Iterator[tuple[int, bytes, bytes]], data: bytes = b"\0" * 4) -> None:
    path.write_bytes(table(entries))
    path.with_name(path.stem + ".data-00000-of-00001").write_bytes(data)


@bomb("many.index")
def _many_long_keys(path: Path) -> None:
    write_index(path, entries_sharing(60_000, 30_000))


@bomb("few.index")
def _few_long_keys(path: Path) -> None:
    write_index(path, entries_sharing(60_000, 100))


@bomb("escaped.index")
def _keys_that_are_no_text(path: Path) -> None:
    """Bytes that are no UTF-8 take four characters each where they are spelled out."""
    value = number_field(1, 1) + bytes_field(2, b"") + number_field(5, 4)
    first = [(0, b"", number_field(1, 1)), (0, b"\xf0" * 60_000 + struct.pack(">I", 0), value)]
    more = ((60_000, struct.pack(">I", number), value) for number in range(1, 100))
    write_index(path, iter([*first, *more]))


@bomb("graph.index")
def _variables_along_long_names(path: Path) -> None:
    """Every variable lies behind the same 60 steps, each with a long name."""
    steps, variables = 60, 10_000
    name = "s" * 10_000
    nodes = [bytes_field(1, number_field(1, at + 1) + text_field(2, name)) for at in range(steps)]
    nodes.append(
        b"".join(
            bytes_field(1, number_field(1, steps + 1 + number) + text_field(2, f"v{number}"))
            for number in range(variables)
        )
    )
    nodes += [
        bytes_field(2, text_field(1, "VARIABLE_VALUE") + text_field(3, f"k{number}"))
        for number in range(variables)
    ]
    graph = b"".join(bytes_field(1, node) for node in nodes)
    lengths = encoded_varint(len(graph))
    sum_of_lengths = struct.pack("<I", mask_crc(crc32c(struct.pack("<I", len(graph)))))
    data = lengths + sum_of_lengths + graph
    summed = struct.pack("<I", len(graph)) + sum_of_lengths + graph
    entry = number_field(1, 7) + bytes_field(2, b"") + number_field(5, len(data))
    entry += fixed32_field(6, mask_crc(crc32c(summed)))
    key = b"_CHECKPOINTABLE_OBJECT_GRAPH"
    write_index(path, iter([(0, b"", number_field(1, 1)), (0, key, entry)]), data)


@bomb("state/checkpoint")
def _state_file(path: Path) -> None:
    path.write_text('model_checkpoint_path: "a"\n' + 'all_model_checkpoint_paths: "a"\n' * 25_000)


@bomb("graphs/saved_model.pb")
def _many_nodes(path: Path) -> None:
    node = bytes_field(1, text_field(1, "n") + text_field(2, "NoOp"))
    path.write_bytes(number_field(1, 1) + bytes_field(2, bytes_field(2, node * 80_000)))


@bomb("shallow/saved_model.pb")
def _nested_messages(path: Path) -> None:
    message = b""
    for _ in range(20_000):
        message = bytes_field(2, message)
    path.write_bytes(number_field(1, 1) + message)


# HDF5 and Keras -------------------------------------------------------------------------------------


def hdf5(fill: Callable[..., None]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import h5py

        with h5py.File(path, "w", libver="latest") as file:
            fill(file)

    return write


def _linked_long(file: object) -> None:
    shared = file.create_group("g" * 30_000).create_group("h" * 30_000)  # type: ignore[attr-defined]
    for number in range(2_000):
        shared[f"d{number}"] = 1.0


def _many_names(file: object) -> None:
    """Each level has two names for the next: 2^40 paths."""
    group = file["/"]  # type: ignore[index]
    for _ in range(40):
        below = group.create_group("a")
        group["b"] = below
        group = below
    group["w"] = 1.0


def _deep(file: object) -> None:
    file.create_group("/".join(["deep" * 500] * 60))["w"] = 1.0  # type: ignore[attr-defined]


def _many_attributes(file: object) -> None:
    for number in range(3_000):
        file.attrs[f"a{number}"] = "x" * 100  # type: ignore[attr-defined]


def _declared(file: object) -> None:
    for number in range(200):
        file.create_dataset(f"d{number}", (1 << 40,), "f8", chunks=(1 << 20,))  # type: ignore[attr-defined]


for _fill in (_linked_long, _many_names, _deep, _many_attributes, _declared):
    BOMBS[f"{_fill.__name__[1:]}.h5"] = hdf5(_fill)
    BOMBS[f"{_fill.__name__[1:]}.weights.h5"] = hdf5(_fill)


def keras(config: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("metadata.json", '{"keras_version": "3.0.0"}')
            archive.writestr("config.json", config)
            archive.writestr("model.weights.h5", b"")

    return write


BOMBS["wide.keras"] = keras(
    '{"class_name": "Sequential", "config": {"layers": [' + "[]," * 20_000_000 + "[]]}}"
)
BOMBS["deep.keras"] = keras('{"class_name": "Sequential", "config": ' + "[" * 400_000 + "]" * 400_000 + "}")
BOMBS["zeros.keras"] = keras('{"class_name": "Sequential", "config": "' + "0" * 100_000_000 + '"}')


# Zips, tars and NumPy -------------------------------------------------------------------------------


def zipped(*members: tuple[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, data in members:
                archive.writestr(name, data)

    return write


_HUGE_PICKLE = b"\x80\x02](" + b"]" * 90_000_000 + b"e."
BOMBS["huge_pickle.pth"] = zipped(("a/data.pkl", _HUGE_PICKLE), ("a/version", b"3\n"))
BOMBS["names.pth"] = zipped(
    *[(f"a/{LONG}{number}", b"") for number in range(7)], ("a/data.pkl", b"\x80\x02}.")
)
BOMBS["records.pth"] = zipped(
    *[(f"a/{number}", b"") for number in range(8_000)], ("a/data.pkl", b"\x80\x02}.")
)
BOMBS["code.pt"] = zipped(
    ("a/data.pkl", b"\x80\x02}."), ("a/constants.pkl", b"\x80\x02)."), ("a/version", b"3\n"),
    ("a/code/__torch__.py", b"a(" * 25_000_000),
)  # fmt: skip
BOMBS["export.pt2"] = zipped(
    ("a/archive_format", b"pt2"), ("a/models/model.json", b'{"a":' + b"[" * 9_000_000 + b"}"),
)  # fmt: skip
_NPY = b"\x93NUMPY\x02\x00"
_HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1," * 400_000 + b"), }\n"
BOMBS["shape.npy"] = holding(_NPY + struct.pack("<I", len(_HEADER)) + _HEADER + bytes(4))
BOMBS["shapes.npz"] = zipped(
    *[(f"m{at}.npy", _NPY + struct.pack("<I", len(_HEADER)) + _HEADER) for at in range(20)]
)
BOMBS["nested.npy"] = holding(_NPY + struct.pack("<I", 800_000) + b"(" * 800_000)


# JSON -----------------------------------------------------------------------------------------------


def _tensors(name: str, count: int) -> dict[str, object]:
    return {f"{name}{at}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for at in range(count)}


@bomb("dots.safetensors")
def _header_of_dots(path: Path) -> None:
    header = json.dumps(_tensors("." * 60_000, 14)).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@bomb("shapes.safetensors")
def _long_shapes(path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1] * 300_000, "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


@bomb("many.safetensors")
def _many_tensors(path: Path) -> None:
    header = json.dumps(_tensors("t", 14_000)).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@bomb("sharded/model.safetensors.index.json")
def _shard_index(path: Path) -> None:
    path.write_text(json.dumps({"weight_map": {f"w{at}": f"s{at}.safetensors" for at in range(25_000)}}))


def _one_tensor(path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


@bomb("trainer/checkpoint-1/trainer_state.json")
def _trainer_state(path: Path) -> None:
    history = [{"step": at, "loss": 0.5} for at in range(25_000)]
    path.write_text(json.dumps({"global_step": 1, "log_history": history}))
    _one_tensor(path.with_name("model.safetensors"))


# Pickles --------------------------------------------------------------------------------------------


def pickled(*opcodes: bytes) -> Callable[[Path], None]:
    return holding(b"\x80\x04" + b"".join(opcodes) + b".")


def _doubling(levels: int, opener: bytes, closer: bytes) -> bytes:
    return b"]\x94" + b"".join(
        opener + b"h" + bytes([at]) + b"h" + bytes([at]) + closer + b"\x94" for at in range(levels)
    )


def _shared_dicts(levels: int) -> bytes:
    """Return a dictionary of two names for another such, level by level, with names of 1,000 letters."""
    names = b"".join(b"\x8c\xc8" + bytes([97 + at]) * 200 + b"\x94" for at in range(2))
    body = b"K\x01\x94"
    for at in range(levels):
        last = bytes([2 + at])
        body += b"}(h\x00h" + last + b"h\x01h" + last + b"u\x94"
    return names + body


BOMBS["lists.pkl"] = pickled(_doubling(100, b"(", b"l"))
BOMBS["tuples.pkl"] = pickled(_doubling(100, b"", b"\x86"))
BOMBS["dicts.pkl"] = pickled(_shared_dicts(40))
BOMBS["deep.pkl"] = pickled(b"]" * 400_000 + b"a" * 399_999)
BOMBS["memo.pkl"] = pickled(b"Nr\xff\xff\xff\xff")
BOMBS["ints.pkl"] = pickled(b"\x8b" + struct.pack("<I", 800_000) + b"\x7f" * 800_000)
BOMBS["decimals.pkl"] = pickled(b"I" + b"9" * 800_000 + b"\n")
_LEGACY_HEAD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
BOMBS["legacy.pth"] = holding(_LEGACY_HEAD + pickle.dumps([0] * 150_000, 2) * 2)
BOMBS["dcp/.metadata"] = pickled(_shared_dicts(40))
BOMBS["model.pdparams"] = pickled(_shared_dicts(40))


# Paddle ---------------------------------------------------------------------------------------------


@bomb("program.pdmodel")
def _paddle_program(path: Path) -> None:
    variable = bytes_field(3, text_field(1, "v") + bytes_field(2, number_field(1, 7)))
    path.write_bytes(bytes_field(1, number_field(1, 0) + variable * 80_000))


# Files beside checkpoints ---------------------------------------------------------------------------


@bomb("noted/best.txt")
def _note(path: Path) -> None:
    path.write_text("model " * 600)
    _one_tensor(path.with_name("model.safetensors"))


@bomb("sums/model.safetensors.sha256")
def _manifest(path: Path) -> None:
    path.write_text(("0" * 64 + "  model.safetensors\n") * 9_000)
    _one_tensor(path.with_name("model.safetensors"))


@bomb("pins/.ckpttool-pins")
def _pins(path: Path) -> None:
    path.write_text("".join(f"p{at}*?*?*?\n" for at in range(60_000)))
    _one_tensor(path.with_name("model.safetensors"))


def write_all(directory: Path, names: Iterable[str]) -> list[Path]:
    """Write bombs into a directory of its own each below one; return the files that they are known by."""
    paths = []
    for name in names:
        path = directory / name.replace("/", "_").replace(".", "_") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        BOMBS[name](path)
        paths.append(path)
    return paths
