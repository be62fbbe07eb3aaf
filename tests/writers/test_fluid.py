"""Written Fluid checkpoints: Paddle loads them, and nothing of them is passed over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool import Role, Tensor, TrainingState, open_checkpoint, verify
from ckpttool.containers.pickle.pickle_nodes import DictSubclass, Global
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import in_memory
from ckpttool.formats.discovery import discover
from ckpttool.formats.paddle.fluid_writer import FluidWriter
from ckpttool.formats.writer import Content, WriteOptions
from ckpttool.ops.conversion_plan import content_of
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.limits import few_files

LOADER = """
import json, sys
import numpy as np
import paddle
from paddle.base import core

paddle.enable_static()
for line in sys.stdin:
    directory, wanted = json.loads(line)
    scope, program = paddle.static.Scope(), paddle.static.Program()
    variables = []
    for name, (dtype, shape, is_rows) in wanted.items():
        kind = core.VarDesc.VarType.SELECTED_ROWS if is_rows else core.VarDesc.VarType.LOD_TENSOR
        variables.append(program.global_block().create_var(
            name=name, type=kind, dtype=dtype, shape=shape, persistable=True))
    found = {}
    with paddle.static.scope_guard(scope):
        executor = paddle.static.Executor(paddle.CPUPlace())
        paddle.static.load_vars(executor, directory, program, vars=variables)
        for name, (_, _, is_rows) in wanted.items():
            told = {}
            variable = scope.find_var(name)
            if is_rows:
                rows = variable.get_selected_rows()
                told = {"rows": list(rows.rows()), "height": rows.height()}
                tensor = rows.get_tensor()
            else:
                tensor = variable.get_tensor()
                told["lod"] = tensor.lod()
            values = np.asarray(tensor)
            told |= {"dtype": str(values.dtype), "shape": list(tensor.shape())}
            found[name] = {**told, "data": values.tobytes().hex()}
    print("ANSWER", json.dumps(found), flush=True)
"""
TYPES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


Loaded = Callable[[Path, Mapping[str, tuple[str, tuple[int, ...], bool]]], dict[str, Any]]


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    """Return what tells what Paddle, in a process of its own, loads from a directory."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "ignore", "-c", LOADER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        orders, lines = process.stdin, process.stdout

        def ask(directory: Path, wanted: Mapping[str, tuple[str, tuple[int, ...], bool]]) -> dict[str, Any]:
            print(json.dumps([str(directory), wanted]), file=orders, flush=True)
            line = next(line for line in lines if line.startswith("ANSWER"))
            found: dict[str, Any] = json.loads(line.removeprefix("ANSWER"))
            return found

        yield ask
        orders.close()


def made(name: str, dtype: str, shape: tuple[int, ...], data: bytes, **more: Any) -> Tensor:
    return Tensor((name,), BY_NAME[dtype], shape, Role.WEIGHTS, in_memory(data), **more)


def written(path: Path, content: Content) -> Path:
    assert list(FluidWriter().refusals(content, WriteOptions())) == []
    with StagedOutput(path, "directory") as target:
        FluidWriter().write(content, target, WriteOptions())
        target.settle()
        target.commit()
    return path


def refused(*tensors: Tensor, **more: Any) -> list[str]:
    return list(FluidWriter().refusals(Content(tensors, **more), WriteOptions()))


def named(*names: str, **more: Any) -> list[str]:
    return refused(*(made(name, "int8", (1,), b"1") for name in names), **more)


def sound(root: Path) -> None:
    """Require that the reader finds nothing to say, and that the one serial is valid."""
    with open_checkpoint(root) as opened:
        assert opened.findings == ()
        assert opened.complete
    (unit,) = discover(root)
    assert verify(unit.path).is_valid


def files_of(root: Path) -> dict[str, bytes]:
    """Return what lies in a directory, but the times in markers."""
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if os.path.basename(name) != "_SUCCESS"}


# Paddle loads it --------------------------------------------------------------------------------------


@pytest.mark.framework
def test_paddle_loads_every_type_and_shape(loaded: Loaded, tmp_path: Path) -> None:
    assert FluidWriter.dtypes == TYPES.keys()
    tensors = []
    for number, (dtype, nbytes) in enumerate(TYPES.items()):
        for shape in ((), (2, 3), (0, 4), (40_000,)):
            count = 1
            for length in shape:
                count *= length
            data = bytes((n * 7 + number) % (2 if dtype == "bool" else 60) for n in range(count * nbytes))
            tensors.append(made(f"{dtype}_{len(shape)}_{count}", dtype, shape, data))
    long = "n" * 255
    tensors.append(made(long, "float32", (1,), b"1234"))
    tensors += [made(name, "float32", (1,), b"abcd") for name in ("é.w", "a b", "fc_0.w_0@x", "-", "x.")]
    root = written(tmp_path / "root", Content(tuple(tensors)))
    wanted = {one.name: (one.dtype.name, one.shape, False) for one in tensors}
    found = loaded(root / "checkpoint_0" / "__model__", wanted)
    for one in tensors:
        told = found[one.name]
        assert bytes.fromhex(told["data"]) == one.tobytes(), one.name
        assert tuple(told["shape"]) == one.shape
        assert told["dtype"] == {"bfloat16": "uint16"}.get(one.dtype.name, one.dtype.name)
    sound(root)
    with open_checkpoint(root) as opened:
        assert {one.name: (one.dtype, one.shape, one.tobytes()) for one in opened.tensors} == {
            one.name: (one.dtype, one.shape, one.tobytes()) for one in tensors
        }


@pytest.mark.framework
def test_paddle_loads_tables_and_sequences_of_another_checkpoint(
    loaded: Loaded, files: Path, tmp_path: Path
) -> None:
    source = files / "fluid" / "generation-c" / "checkpoint_0"
    rows, sequences = tmp_path / "rows", tmp_path / "sequences"
    for directory, name in ((rows, "rows.selected"), (sequences, "sequences.lodtensor")):
        directory.mkdir()
        (directory / "v").write_bytes((files / "paddle" / name).read_bytes())
        (directory / "other").write_bytes((files / "paddle" / "fp32.lodtensor").read_bytes())
    roots = []
    for number, path in enumerate((source, rows, sequences)):
        with open_checkpoint(path) as opened:
            roots.append(written(tmp_path / f"root-{number}", content_of(opened)) / "checkpoint_0")
    truth = json.loads((files / "paddle" / "rows.selected.expected.json").read_text())
    assert truth
    shard = ("float32", (3, 4), True)
    tables = {"embedding_0.w_0_0": shard, "embedding_0.w_0_1": shard}
    asked = [
        (source / "__lookup_table__", tables),
        (roots[0] / "__lookup_table__", tables),
        (rows, {"v": ("float32", (3, 4), True)}),
        (roots[1] / "__model__", {"v": ("float32", (3, 4), True)}),
        (sequences, {"v": ("float32", (3, 4), False)}),
        (roots[2] / "__model__", {"v": ("float32", (3, 4), False)}),
    ]
    found = [loaded(directory, wanted) for directory, wanted in asked]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[3]["v"]["rows"] == [5, 1, 7]
    assert found[3]["v"]["height"] == 9
    assert found[4] == found[5]
    assert found[5]["v"]["lod"]


# What is written --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["generation-b/checkpoint_4", "generation-c/checkpoint_0", "guide/checkpoint_0"]
)
def test_a_serial_is_written_as_it_was(files: Path, tmp_path: Path, name: str) -> None:
    source = files / "fluid" / name
    with open_checkpoint(source) as opened:
        root = written(tmp_path / "root", content_of(opened))
        told = opened.metadata, opened.training
    serial = root / source.name
    assert os.listdir(root) == [source.name]
    expected = {path.replace("__lockup_", "__lookup_"): data for path, data in files_of(source).items()}
    assert files_of(serial) == expected
    for directory in (serial / "__model__", *serial.glob("trainer_*")):
        assert (directory / "_SUCCESS").stat().st_size > 0
    with open_checkpoint(root) as copy:
        assert (copy.metadata, copy.training) == told
    sound(root)


@pytest.mark.parametrize("name", ["generation-b/checkpoint_4", "generation-c/checkpoint_0"])
def test_it_comes_back_from_another_format(files: Path, tmp_path: Path, name: str) -> None:
    from ckpttool.formats.safetensors.writer import SafetensorsWriter

    source = files / "fluid" / name
    between = tmp_path / "between.safetensors"
    with open_checkpoint(source) as opened:
        with StagedOutput(between) as target:
            SafetensorsWriter().write(content_of(opened), target, WriteOptions())
            target.settle()
            target.commit()
        with open_checkpoint(between) as copy:
            assert (copy.metadata, copy.training) == (opened.metadata, opened.training)
            root = written(tmp_path / "root", content_of(copy))
    assert files_of(root / source.name) == files_of(source)
    sound(root)


def test_what_the_trainer_knows(tmp_path: Path) -> None:
    cases = [
        ({"metadata": {"epoch": 3, "global_step": 120}}, {"epoch_id": b"3", "step_id": b"120"}),
        ({"metadata": {"epoch": 2.0}}, {"epoch_id": b"2"}),
        ({"metadata": {"epoch": 2.5, "step": 7}}, {"step_id": b"7"}),
        ({"tree": {"epoch": 4, "trainer": [{"step": 5}], 7: "x"}}, {"epoch_id": b"4"}),
        ({"tree": {"training": {"epoch": 4, "step": 9}}}, {"epoch_id": b"4", "step_id": b"9"}),
        (
            {"training": TrainingState(epoch=6, step=8), "metadata": {"epoch": 1}},
            {"epoch_id": b"6", "step_id": b"8"},
        ),
        ({"metadata": {"trainers": {"0": {"epoch": 5}}}}, {}),
        ({}, {}),
    ]
    for at, (content, expected) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        root = written(folder / "root", Content((made("w", "int8", (1,), b"1"),), **content))
        found = files_of(root / "checkpoint_0")
        trainer = {
            path.removeprefix("trainer_0/"): data for path, data in found.items() if "trainer_" in path
        }
        assert trainer == expected, content
        assert (root / "checkpoint_0" / "trainer_0" / "_SUCCESS").exists() == bool(expected), content


def test_an_ordered_dictionary_is_looked_into(tmp_path: Path) -> None:
    tree = DictSubclass(Global("collections", "OrderedDict"))
    tree["epoch"] = 3
    root = written(tmp_path / "root", Content((made("w", "int8", (1,), b"1"),), tree=tree))
    assert (root / "checkpoint_0" / "trainer_0" / "epoch_id").read_bytes() == b"3"


@pytest.mark.framework
def test_a_training_checkpoint_is_told_like_the_original(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    source = tmp_path / "a.pth"
    state = {"epoch": 7, "loss": 0.25, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "tied": model.weight}, source)
    with open_checkpoint(source) as opened:
        root = written(tmp_path / "root", content_of(opened))
        with open_checkpoint(root) as copy:
            assert copy.format == "fluid"
            assert (copy.metadata, copy.training) == (opened.metadata, opened.training)
            assert copy.granularity is opened.granularity
            assert [(one.path, one.role, one.shares_with) for one in copy.tensors] == [
                (one.path, one.role, one.shares_with) for one in opened.tensors
            ]
            for one in opened.tensors:
                assert copy[one.name].tobytes() == one.tobytes()
            assert copy.native == {}
    assert not (root / "checkpoint_0" / "__model__" / "tied").exists()
    sound(root)


@pytest.fixture
def limited_files() -> Iterator[None]:
    with few_files(90):
        yield


@pytest.mark.usefixtures("limited_files")
def test_more_variables_than_files_can_be_open(tmp_path: Path) -> None:
    tensors = tuple(made(f"w_{n}", "int32", (1,), n.to_bytes(4, "little")) for n in range(100))
    root = written(tmp_path / "root", Content(tensors))
    with open_checkpoint(root) as opened:
        assert {one.name: one.tobytes() for one in opened.tensors} == {
            one.name: one.tobytes() for one in tensors
        }


# What can't be written --------------------------------------------------------------------------------


def test_names_that_no_variable_s_file_can_have() -> None:
    cases = [
        ("fc/weight", "a Fluid variable is a file, and its name can't have '/' (use --map)"),
        ("a\0b", "a Fluid variable is a file, and its name can't have NUL (use --map)"),
        ("", "a Fluid variable is a file, and needs a name (use --map)"),
        ("n" * 256, "a Fluid variable is a file, and its name has 256 bytes (at most 255) (use --map)"),
        ("é" * 128, "a Fluid variable is a file, and its name has 256 bytes (at most 255) (use --map)"),
        ("a\ud800", "a Fluid variable is a file, and its name is not valid text (use --map)"),
        (".", "a Fluid variable's name can't begin with a dot (use --map)"),
        ("..", "a Fluid variable's name can't begin with a dot (use --map)"),
        (".w", "a Fluid variable's name can't begin with a dot (use --map)"),
        ("_SUCCESS", "Paddle has its marker under this name (use --map)"),
        ("w@GRAD", "Paddle neither saves nor loads a variable with '@GRAD' in its name (use --map)"),
        ("w.trainer_0", "Paddle neither saves nor loads a variable with '.trainer_' in its name (use --map)"),
        ("w.block0", "Paddle neither saves nor loads a variable with '.block' in its name (use --map)"),
    ]
    for name, why in cases:
        assert named("fc_0.w_0", name) == [f"{name}: {why}"], name


def test_names_that_some_file_systems_take_for_one() -> None:
    cases = [("fc.w", "FC.w"), ("é", "e\u0301"), ("straße", "STRASSE"), ("a", "A")]
    for pair in cases:
        first, second = pair
        (told,) = named(first, second)
        assert told == f"{second}: some file systems don't distinguish its name from {first} (use --map)", (
            pair
        )


def test_a_variable_s_directory_is_no_other_variable(tmp_path: Path) -> None:
    assert named("a/b", "c", source_format="fluid") == []
    assert named("a/b", "A", source_format="fluid") == ["A: a file, but a directory for a/b (use --map)"]
    for name in ("a//b", "/a", "a/", "../a", "a/../b"):
        assert len(named(name, source_format="fluid")) == 1
    content = Content((made("a/b", "int8", (1,), b"1"),), source_format="fluid")
    root = written(tmp_path / "root", content)
    assert (root / "checkpoint_0" / "__model__" / "a" / "b").exists()
    sound(root)


def test_what_an_optimizer_would_have_of_a_parameter() -> None:
    tensors = (made("fc", "int8", (4,), b"1234"), made("fc_moment1_0", "int8", (3,), b"123"))
    (told,) = refused(*tensors)
    assert told.startswith("fc_moment1_0: by its name it belongs to fc's optimizer, but its shape [3] is not")


def test_no_variable_is_no_checkpoint() -> None:
    (told,) = refused(metadata={"epoch": 3})
    assert told == "it has no tensors; a Fluid checkpoint needs variables"


def test_more_axes_than_can_be_read() -> None:
    (told,) = refused(made("w", "int8", (1,) * 65, b"1"))
    assert told == "w: 65 axes; at most 64 are read (use --map)"


# The entry --------------------------------------------------------------------------------------------


@pytest.fixture
def with_entry(tmp_path: Path) -> Path:
    """Return a serial with an entry."""
    content = Content((made("w", "int8", (1,), b"1"),), metadata={"epoch": 3, "note": "text"})
    return written(tmp_path / "root", content) / "checkpoint_0"


def cut_short(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-1])


def too_large(entry: Path) -> None:
    with entry.open("r+b") as file:
        file.truncate(1 << 33)


@pytest.mark.parametrize("damage", [cut_short, too_large])
def test_a_damaged_entry_is_told_and_the_tensors_stay(
    with_entry: Path, damage: Callable[[Path], None]
) -> None:
    damage(with_entry / "ckpttool.content")
    with open_checkpoint(with_entry) as opened:
        assert [finding.code for finding in opened.findings] == ["content-entry"]
        assert opened["w"].tobytes() == b"1"
        assert opened.metadata == {"serial": 0, "trainers": {"0": {"epoch_id": 3}}}


def test_a_link_in_the_place_of_an_entry_is_not_followed(with_entry: Path) -> None:
    entry = with_entry / "ckpttool.content"
    outside = entry.rename(with_entry.parent.parent / "outside")
    entry.symlink_to(outside)
    with open_checkpoint(with_entry) as opened:
        assert [finding.code for finding in opened.findings] == ["link-outside"]
        assert "note" not in opened.metadata


def test_strange_heights_make_variables_of_rows_and_values(tmp_path: Path) -> None:
    cases = [b"", b"[]", b'{"t": -1}', b'{"t": "9"}', b'{"t": 1e400}', b"[" * 9000]
    for at, heights in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        rows = Tensor(("t", "rows"), BY_NAME["int64"], (1,), values=in_memory(bytes(8)))
        values = Tensor(("t", "values"), BY_NAME["int8"], (1,), values=in_memory(b"1"))
        root = written(folder / "root", Content((rows, values), native={"fluid.heights": heights}))
        assert {"t.rows", "t.values"} <= set(os.listdir(root / "checkpoint_0" / "__model__")), heights


def test_strange_trainers_write_no_strange_files(tmp_path: Path) -> None:
    cases = [
        {"../0": {"epoch_id": 1}},
        {"0": {"../../x": 1}},
        {"0": {"_SUCCESS": "1"}},
        {"0": {"epoch_id": [1]}},
        {"0": {"note": " text "}},
        {"0": {"note": "x" * 5000}},
        {"0": 7},
        7,
    ]
    for at, trainers in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        one = made("w", "int8", (1,), b"1")
        root = written(
            folder / "root", Content((one,), metadata={"trainers": trainers}, source_format="fluid")
        )
        assert os.listdir(folder) == ["root"], trainers
        assert set(files_of(root)) == {"checkpoint_0/__model__/w", "checkpoint_0/ckpttool.content"}, trainers
        with open_checkpoint(root) as opened:
            assert opened.metadata == {"trainers": trainers}, trainers


def test_a_root_with_two_serials_is_no_checkpoint(with_entry: Path) -> None:
    from ckpttool import NotACheckpoint

    root = with_entry.parent
    with open_checkpoint(root) as opened:
        assert opened.path == str(with_entry)
    (root / "checkpoint_1").mkdir()
    with pytest.raises(NotACheckpoint):
        open_checkpoint(root)
