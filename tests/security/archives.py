"""Files that hide a pickle from a reader: archives that lie, suffixes, several formats in one, decoys.

A variant is a function, called for the one that is wanted, that puts files in a place and returns who loads
which of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from fixtures import zip_raw
from fixtures.zip_raw import DEFLATED, UTF8, Member
from tests.security.assembler import pickled
from tests.security.calls import Place
from tests.security.containers import FOUR_FLOATS, npy, tensor, torch_legacy, torch_zip, trainer

Loaded: TypeAlias = tuple[str, str]
"""The loader, and the file that it is given."""
Variants: TypeAlias = Iterator[tuple[str, Callable[[], Loaded]]]
FILES: dict[str, Callable[[Place], Variants]] = {}
FIXTURES = Path(__file__).parents[2] / "fixtures" / "files"


def files(generator: Callable[[Place], Variants]) -> Callable[[Place], Variants]:
    """Add a class of attack."""
    FILES[generator.__name__] = generator
    return generator


def honest() -> bytes:
    """Return the pickle of an honest state dict over one storage."""
    return pickled({"weight": tensor()}, 2)


def only(place: Place, name: str, data: bytes, loader: str) -> Callable[[], Loaded]:
    """Return what writes one file."""

    def write() -> Loaded:
        place.beside(name, data)
        return loader, name

    return write


def several(place: Place, target: str, loader: str, contents: dict[str, bytes]) -> Callable[[], Loaded]:
    """Return what writes several files."""

    def write() -> Loaded:
        for name, data in contents.items():
            place.beside(name, data)
        return loader, target

    return write


@files
def zip_tricks(place: Place) -> Variants:
    """Archives whose two views of a record differ, or whose record is not where it seems."""
    evil, good = place.evil(), honest()
    members = zip_raw.torch_members(evil, {"0": FOUR_FLOATS})
    data, rest = members[0], members[1:]
    decoy = Member("archive/data.pkl", good)
    shapes: dict[str, list[Member]] = {
        "wrong_crc": [replace(data, crc=0xDEADBEEF), *rest],
        "zero_crc": [replace(data, crc=0), *rest],
        "flag_encrypted_local": [replace(data, local_flags=UTF8 | 1), *rest],
        "flag_descriptor": [replace(data, flags=UTF8 | 8), *rest],
        "flag_descriptor_local": [replace(data, local_flags=UTF8 | 8), *rest],
        "version_needed": [replace(data, version=255), *rest],
        "local_name": [replace(data, local_name="archive/data.txt"), *rest],
        "local_name_longer": [replace(data, local_name="archive/data.pkl.honest"), *rest],
        "twice_evil_first": [data, decoy, *rest],
        "upper_case": [Member("archive/DATA.PKL", evil), *rest],
        "two_cases": [Member("archive/DATA.PKL", evil), decoy, *rest],
        "deflated": [replace(data, method=DEFLATED), *rest],
        "root_empty": [Member("/data.pkl", evil), Member("/version", b"3\n")],
        "data_first": [*rest, data],
        "padded": [Member("archive/.data/pad", bytes(4096)), data, *rest],
    }
    for name, shape in shapes.items():
        yield name, only(place, "a.pth", zip_raw.build(shape), "torch")
    whole, decoy_zip = torch_zip(evil), torch_zip(good)
    yield "comment", only(place, "a.pth", zip_raw.build(members, comment=b"x" * 300), "torch")
    yield "archive_in_comment", only(place, "a.pth", zip_raw.build(members, comment=decoy_zip[:500]), "torch")
    yield "trailing", only(place, "a.pth", whole + bytes(100), "torch")
    array = npy(evil)
    good_array = npy(pickled([1], 2))
    twice = zip_raw.build([Member("o.npy", good_array), Member("o.npy", array)])
    yield "npz_twice", only(place, "a.npz", twice, "numpy")
    yield (
        "npz_second_archive",
        only(place, "a.npz", zip_raw.build([]) + zip_raw.build([Member("o.npy", array)]), "numpy"),
    )
    yield (
        "npz_prefix",
        only(place, "a.npz", b"PK\3\4" + bytes(8) + zip_raw.build([Member("o.npy", array)]), "numpy"),
    )
    yield "npz_no_suffix", only(place, "a.npz", zip_raw.build([Member("o", array)]), "numpy")
    yield "npz_pickle", only(place, "a.npz", evil, "numpy")


@files
def suffix_lies(place: Place) -> Variants:
    """Content under the name of something else, which the loaders don't ask for."""
    evil = place.evil()
    for suffix in (
        "safetensors",
        "json",
        "txt",
        "h5",
        "keras",
        "onnx",
        "npy",
        "npz",
        "gguf",
        "pb",
        "zip",
        "dat",
        "model",
    ):
        yield f"pickle.{suffix}", only(place, f"model.{suffix}", evil, "pickle")
        if suffix != "safetensors":  # torch.load hands such a name to another reader
            yield f"torch.{suffix}", only(place, f"model.{suffix}", torch_zip(evil), "torch")
    for suffix in ("json", "h5", "npz", "onnx"):
        yield f"legacy.{suffix}", only(place, f"model.{suffix}", torch_legacy(evil), "torch")
        yield f"protocol0.{suffix}", only(place, f"model.{suffix}", place.evil(0), "pickle")
    yield "nameless", only(place, "model", evil, "pickle")
    yield "nameless.protocol0", only(place, "model", place.evil(0), "pickle")
    yield "hidden", only(place, ".model.pkl", evil, "pickle")
    yield "npy.pkl", only(place, "a.pkl", npy(evil), "numpy")


@files
def several_formats(place: Place) -> Variants:
    """Files that two formats recognise, each in its own part."""
    evil = place.evil()
    hdf5 = (FIXTURES / "hdf5" / "types.h5").read_bytes()
    block = 1 << (max(512, len(evil)) - 1).bit_length()
    yield "hdf5_user_block", only(place, "a.h5", evil.ljust(block, b"\0") + hdf5, "pickle")
    yield "hdf5_user_block.legacy", only(place, "a.h5", torch_legacy(evil).ljust(2048, b"\0") + hdf5, "torch")
    plain = (FIXTURES / "numpy" / "plain.npy").read_bytes()
    yield "npy_twice", only(place, "a.npy", plain + npy(evil), "numpys")
    yield "npy_thrice", only(place, "a.npy", plain + plain + npy(evil), "numpys")
    yield "npy_then_pickle", only(place, "a.npy", plain + evil, "numpys")
    yield "pickle_then_zip", only(place, "a.pth", evil + torch_zip(honest()), "pickle")
    yield "pickle_then_npz", only(place, "a.npz", evil + zip_raw.build([Member("w.npy", plain)]), "pickle")
    tensors = (FIXTURES / "safetensors" / "metadata.safetensors").read_bytes()
    yield "pickle_then_safetensors", only(place, "a.safetensors", evil + tensors, "pickle")
    header = b'{"__metadata__":{}}'
    # The length of a header whose first byte is a pickle's PROTO, its second the protocol.
    length = struct.pack("<Q", 0x0280)
    yield "safetensors_pickle", only(place, "a.safetensors", length[:2] + evil[2:] + header, "pickle")
    yield "tar_then_pickle", only(place, "a.pkl", evil + bytes(10_240), "pickle")


@files
def decoys(place: Place) -> Variants:
    """Directories that look like one format and hold a file of another."""
    evil = place.evil()
    zipped = torch_zip(evil)
    shapes = {
        "saved_model": {"d/saved_model.pb": b"", "d/variables/x": b""},
        "saved_model_whole": tree(FIXTURES / "savedmodel" / "plain", "d"),
        "dcp": tree(FIXTURES / "torch-dcp" / "one-rank", "d"),
        "fluid": tree(FIXTURES / "fluid" / "variables", "d"),
        "model_program": {"d/__model__": b""},
        "trainer": {
            name.replace("checkpoint-2", "d"): data for name, data in trainer("d/none")(honest()).items()
        },
        "sharded": tree(FIXTURES / "safetensors" / "sharded", "d"),
        "trainer_whole": tree(FIXTURES / "safetensors" / "trainer" / "checkpoint-2", "d"),
        "metadata_empty": {"d/.metadata": b""},
    }
    hidden = {
        "pickle": ("d/extra.pkl", evil, "pickle"),
        "torch": ("d/pytorch_model.bin", zipped, "torch"),
        "nameless": ("d/state", evil, "pickle"),
        "deep": ("d/sub/more/model.pt", zipped, "torch"),
        "protocol0": ("d/extra.bin", place.evil(0), "pickle"),
    }
    for shape, contents in shapes.items():
        for how, (name, data, loader) in hidden.items():
            yield f"{shape}.{how}", several(place, name, loader, {**contents, name: data})


def tree(directory: Path, prefix: str) -> dict[str, bytes]:
    """Return the files of a fixture below another name."""
    return {
        f"{prefix}/{path.relative_to(directory).as_posix()}": path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
