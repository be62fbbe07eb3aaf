"""Fluid's directories: what is whole, what is not, and what lies in them."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import Checkpoint, CheckpointError, NotACheckpoint, Severity, open_checkpoint, verify
from ckpttool.core.text import counted
from tests.support.limits import few_files
from tests.support.opening import hold_open, paths_in


@pytest.fixture
def serial(files: Path, tmp_path: Path) -> Path:
    """Return a serial with two trainers and a lookup table of two servers, alone in its root."""
    source = files / "fluid" / "generation-c" / "checkpoint_0"
    return Path(shutil.copytree(source, tmp_path / "root" / "checkpoint_0"))


def opened(path: Path) -> Checkpoint:
    with open_checkpoint(path) as checkpoint:
        _ = checkpoint.training
        return checkpoint


def codes(path: Path) -> list[str]:
    return [finding.code for finding in opened(path).findings]


def test_a_root_is_no_checkpoint_and_its_serials_are(files: Path) -> None:
    root = files / "fluid" / "root"
    with pytest.raises(NotACheckpoint):
        open_checkpoint(root)
    assert [path.name for path in paths_in(root)] == [f"checkpoint_{number}" for number in range(5)]


def test_parts_of_a_serial_are_no_checkpoints(serial: Path) -> None:
    for name in ("__model__", "__lookup_table__", "trainer_0"):
        with pytest.raises(NotACheckpoint):
            open_checkpoint(serial / name)


def test_tables_in_a_root_do_not_hide_its_serials(serial: Path) -> None:
    root = serial.parent
    shutil.copytree(serial / "__lookup_table__", root / "__lookup_table__")
    assert serial in paths_in(root)


def test_a_serial_is_named_anything(serial: Path) -> None:
    best = serial.rename(serial.with_name("best"))
    checkpoint = opened(best)
    assert (checkpoint.format, checkpoint.variant, checkpoint.complete) == ("fluid", "checkpoint", True)
    assert "serial" not in checkpoint.metadata


def test_both_spellings_of_tables_are_one(files: Path) -> None:
    checkpoint = opened(files / "fluid" / "guide" / "checkpoint_0")
    assert "__lookup_table__.table_pserver_1.values" in checkpoint


def test_where_epoch_and_step_come_from(serial: Path) -> None:
    (serial / "trainer_1" / "lr").write_text("fast")
    checkpoint = opened(serial)
    assert checkpoint.training.origin == {
        "epoch": "file trainer_0/epoch_id",
        "step": "file trainer_0/step_id",
        "learning_rate": "tensor learning_rate_0",
    }
    assert checkpoint.metadata["trainers"]["1"] == {"epoch_id": 1, "step_id": 8, "lr": "fast"}


def test_a_trainer_alone_is_incomplete(serial: Path) -> None:
    shutil.rmtree(serial / "__model__")
    shutil.rmtree(serial / "__lookup_table__")
    shutil.rmtree(serial / "trainer_0")
    checkpoint = opened(serial)
    assert not checkpoint.complete
    assert codes(serial) == ["no-model"]
    assert (checkpoint.training.epoch, checkpoint.training.step) == (1, 8)
    assert checkpoint.training.origin["step"] == "file trainer_1/step_id"


def test_no_marker_anywhere_is_judged_by_content(serial: Path) -> None:
    (serial / "__model__" / "_SUCCESS").unlink()
    assert codes(serial) == ["no-marker-anywhere"]
    assert opened(serial).complete
    assert verify(serial).is_valid


@pytest.mark.parametrize("sibling", ["generation-a/checkpoint_3", "generation-b/checkpoint_4"])
def test_no_marker_where_a_sibling_has_one(files: Path, serial: Path, sibling: str) -> None:
    (serial / "__model__" / "_SUCCESS").unlink()
    shutil.copytree(files / "fluid" / sibling, serial.with_name("checkpoint_7"))
    assert codes(serial) == ["no-marker"]
    assert not opened(serial).complete


def test_a_trainer_without_marker_is_noted(serial: Path) -> None:
    (serial / "trainer_1" / "_SUCCESS").unlink()
    assert codes(serial) == ["trainer-no-marker"]
    assert opened(serial).complete


@pytest.mark.parametrize("text", ["", "one", "1.5", "0x10", "1" * 30])
def test_a_counter_that_is_no_number(serial: Path, text: str) -> None:
    (serial / "trainer_0" / "epoch_id").write_text(text)
    assert codes(serial) == ["trainer-argument"]
    assert not verify(serial).is_valid


def test_a_huge_argument_is_not_read(serial: Path) -> None:
    (serial / "trainer_0" / "notes").write_bytes(b"x" * 5000)
    assert codes(serial) == ["trainer-argument"]
    assert verify(serial).is_valid


def test_the_shard_of_a_parameter_server_is_missing(serial: Path) -> None:
    (serial / "__lookup_table__" / "embedding_0.w_0_0").unlink()
    checkpoint = opened(serial)
    assert codes(serial) == ["table-shard-missing"]
    assert not checkpoint.complete


def test_shards_that_are_bare_numbers(serial: Path) -> None:
    tables = serial / "__lookup_table__"
    for number in range(2):
        (tables / f"embedding_0.w_0_{number}").rename(tables / str(number))
    assert codes(serial) == []
    assert "__lookup_table__.1.rows" in opened(serial)


def test_a_huge_index_of_a_shard_costs_nothing(serial: Path) -> None:
    tables = serial / "__lookup_table__"
    (tables / "embedding_0.w_0_1").rename(tables / "embedding_0.w_0_999999999")
    assert codes(serial) == ["table-shard-missing"]


def test_rows_in_two_shards(serial: Path) -> None:
    tables = serial / "__lookup_table__"
    shutil.copyfile(tables / "embedding_0.w_0_0", tables / "embedding_0.w_0_1")
    assert codes(serial) == ["rows-twice"]
    assert not verify(serial).is_valid


def test_an_accumulator_of_another_shape(serial: Path) -> None:
    model = serial / "__model__"
    shutil.copyfile(model / "fc_0.b_0", model / "fc_0.w_0_moment1_0")
    (finding,) = opened(serial).findings
    assert (finding.code, finding.where) == ("accumulator-shape", "fc_0.w_0_moment1_0")


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: b"", "truncated"),
        (lambda data: data + b"\0", "trailing-bytes"),
        (lambda data: b"\1" + data[1:], "tensor-version"),
        (lambda data: data[:20] + b"\x08\x07" + data[22:], "unknown-dtype"),
        (lambda data: data[:16] + struct.pack("<i", -1) + data[20:], "tensor-description"),
        (lambda data: data[:4] + b"\xff" * 8 + data[12:], "limit-exceeded"),
    ],
)
def test_a_damaged_variable(serial: Path, damage: Callable[[bytes], bytes], code: str) -> None:
    variable = serial / "__model__" / "fc_0.w_0"
    variable.write_bytes(damage(variable.read_bytes()))
    finding = opened(serial).findings[0]
    assert (finding.code, finding.where) == (code, "__model__/fc_0.w_0")
    assert not verify(serial).is_valid
    assert "fc_1.w_0" in opened(serial)


def test_links_are_not_followed_out_of_a_serial(serial: Path, tmp_path: Path) -> None:
    outside = shutil.copyfile(serial / "__model__" / "fc_0.w_0", tmp_path / "outside")
    (serial / "__model__" / "fc_0.w_0").unlink()
    (serial / "__model__" / "fc_0.w_0").symlink_to(outside)
    (serial / "trainer_0" / "secret").symlink_to(outside)
    (serial / "__model__" / "same").symlink_to("fc_1.w_0")
    checkpoint = opened(serial)
    assert codes(serial) == ["link-outside"] * 2
    assert "fc_0.w_0" not in checkpoint
    assert "same" in checkpoint


def test_a_linked_model_is_not_followed(serial: Path, tmp_path: Path) -> None:
    (serial / "__model__").rename(tmp_path / "model")
    (serial / "__model__").symlink_to(tmp_path / "model")
    assert "link-outside" in codes(serial)


def test_a_variable_with_slashes_in_its_name(serial: Path) -> None:
    model = serial / "__model__"
    (model / "encoder" / "deep").mkdir(parents=True)
    (model / "fc_1.w_0").rename(model / "encoder" / "deep" / "w")
    assert opened(serial)["encoder/deep/w"].shape == (4, 1)
    assert codes(serial) == []


def test_what_is_no_part_is_told(serial: Path) -> None:
    (serial / "notes.txt").write_text("hello")
    (serial / "__model__" / ".nfs0001").write_bytes(b"")
    assert codes(serial) == ["not-part", "not-part"]


def test_more_variables_than_a_process_may_open(serial: Path) -> None:
    model = serial / "__model__"
    data = (model / "fc_0.w_0").read_bytes()
    for number in range(300):
        (model / f"fc_{number}.w_9").write_bytes(data)
    with few_files():
        assert verify(serial, jobs=2).is_valid


def test_a_file_that_is_replaced_while_it_is_read(serial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_open(monkeypatch, 1)
    variable = serial / "__model__" / "fc_0.w_0"
    with open_checkpoint(serial) as checkpoint:
        copy = shutil.copyfile(variable, variable.with_name("other"))
        os.replace(copy, variable)
        with pytest.raises(CheckpointError, match="replaced"):
            checkpoint["fc_0.w_0"].tobytes()


def test_the_variables_of_a_program_have_files(files: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(files / "fluid" / "inference-separate", tmp_path / "model"))
    (place / "fc_0.w_0").unlink()
    shutil.copyfile(place / "fc_0.b_0", place / "fc_1.b_0")
    assert codes(place) == ["variable-missing", "program-mismatch"]


def test_a_combined_file_has_as_many_tensors_as_the_program(files: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(files / "fluid" / "inference-combined", tmp_path / "model"))
    one = (files / "fluid" / "variables" / "fc_0.w_0").read_bytes()
    with open(place / "__params__", "ab") as file:
        file.write(one)
    assert codes(place) == ["program-mismatch"]
    assert list(opened(place)) == ["#0", "#1", "#2", "#3", "#4"]


def test_files_that_are_no_variables_make_no_checkpoint(files: Path, tmp_path: Path) -> None:
    shutil.copyfile(files / "fluid" / "variables" / "fc_0.w_0", tmp_path / "w")
    (tmp_path / "readme").write_text("hello")
    with pytest.raises(NotACheckpoint):
        open_checkpoint(tmp_path)


def test_directories_that_are_merely_called_trainer(tmp_path: Path) -> None:
    (tmp_path / "trainer_0").mkdir()
    with pytest.raises(NotACheckpoint):
        open_checkpoint(tmp_path)


@pytest.fixture
def before(files: Path, serial: Path) -> Path:
    """Return the serial as number 1, behind a whole number 0."""
    later = serial.rename(serial.with_name("checkpoint_1"))
    shutil.copytree(files / "fluid" / "generation-c" / "checkpoint_0", serial)
    return later


def test_what_is_told_of_lookup_tables(serial: Path) -> None:
    table = {"shards": 2, "rows": 20, "height": 20, "row_shape": [4]}
    shards = [opened(serial)[f"__lookup_table__.embedding_0.w_0_{one}.values"] for one in range(2)]
    table |= {"rows": sum(one.shape[0] for one in shards), "row_shape": list(shards[0].shape[1:])}
    found = opened(serial).metadata["lookup_tables"]
    assert {**found["embedding_0.w_0"], "height": 20} == table


def test_a_shard_that_the_serial_before_has(before: Path) -> None:
    (before / "__lookup_table__" / "embedding_0.w_0_1").unlink()
    (finding,) = opened(before).findings
    assert (finding.code, finding.where) == ("table-shard-missing", "embedding_0.w_0_1")
    assert finding.message == "missing shard of a lookup table, which checkpoint_0 has"
    assert not opened(before).complete
    assert codes(before.with_name("checkpoint_0")) == []


def test_tables_that_the_serial_before_has(before: Path) -> None:
    shutil.rmtree(before / "__lookup_table__")
    assert codes(before) == ["table-shard-missing"]


def test_what_is_no_shard_in_the_serial_before(before: Path) -> None:
    tables = before.with_name("checkpoint_0") / "__lookup_table__"
    (tables / "embedding_0.w_0_2.tmp").write_bytes(b"")
    assert codes(before) == []


def test_the_other_spelling_in_the_serial_before(before: Path) -> None:
    (before / "__lookup_table__").rename(before / "__lockup_table__")
    assert codes(before) == []


def test_a_trainer_that_the_serial_before_has(before: Path) -> None:
    shutil.rmtree(before / "trainer_1")
    (finding,) = opened(before).findings
    assert (finding.code, finding.where) == ("trainer-missing", "trainer_1")
    assert opened(before).complete


@pytest.mark.parametrize("is_marked", [True, False])
def test_variables_that_the_serial_before_has(before: Path, is_marked: bool) -> None:
    for marker in () if is_marked else before.parent.rglob("_SUCCESS"):
        marker.unlink()
    lost = sorted(path for path in (before / "__model__").iterdir() if "moment2" in path.name)
    for path in lost:
        path.unlink()
    (finding,) = (one for one in opened(before).findings if one.severity is Severity.ERROR)
    assert (finding.code, finding.where) == ("variable-missing", lost[0].name)
    told = f"missing variable, and {counted(len(lost) - 1, 'other')}, which checkpoint_0 has"
    assert finding.message == told
    assert not opened(before).complete
    assert opened(before.with_name("checkpoint_0")).complete


def test_the_nearest_serial_is_compared_however_far(before: Path) -> None:
    far = before.rename(before.with_name("checkpoint_70"))
    next(path for path in (far / "__model__").iterdir() if path.name != "_SUCCESS").unlink()
    assert codes(far) == ["variable-missing"]


def test_another_network_has_other_variables(before: Path) -> None:
    first, second, *_ = sorted((before / "__model__").glob("fc_*"))
    first.unlink()
    second.rename(second.with_name("another"))
    assert "variable-missing" not in codes(before)


def test_flat_serials_are_compared(files: Path, tmp_path: Path) -> None:
    for number in (3, 4):
        shutil.copytree(files / "fluid" / "generation-a" / "checkpoint_3", tmp_path / f"checkpoint_{number}")
    assert codes(tmp_path / "checkpoint_4") == codes(tmp_path / "checkpoint_3") == []
    next(path for path in (tmp_path / "checkpoint_4").iterdir() if path.name != "_SUCCESS").unlink()
    assert codes(tmp_path / "checkpoint_4") == ["variable-missing"]
    assert codes(tmp_path / "checkpoint_3") == []


def test_no_variable_at_all(serial: Path) -> None:
    for path in (serial / "__model__").iterdir():
        path.unlink()
    assert codes(serial) == ["no-marker-anywhere", "no-variables"]
    assert not opened(serial).complete


def test_no_trainer_is_left(before: Path) -> None:
    for number in (0, 1):
        shutil.rmtree(before / f"trainer_{number}")
    assert codes(before) == ["trainer-missing"] * 2
    assert not opened(before).complete


def test_a_counter_that_one_trainer_lacks(serial: Path) -> None:
    (serial / "trainer_1" / "step_id").unlink()
    (finding,) = opened(serial).findings
    assert (finding.code, finding.where) == ("trainer-argument", "trainer_1")
    assert finding.message == "no step_id, which other trainers have"


def test_rows_of_another_length_in_a_shard(serial: Path) -> None:
    tables = serial / "__lookup_table__"
    shutil.copyfile(serial / "__model__" / "fc_1.w_0", tables / "embedding_0.w_0_1")
    assert "table-shard-mismatch" in codes(serial)


@pytest.mark.parametrize("generation", ["a3", "b4", "c0"])
def test_its_own_manifests_are_no_strangers(files: Path, tmp_path: Path, generation: str) -> None:
    source = files / "fluid" / f"generation-{generation[0]}" / f"checkpoint_{generation[1]}"
    place = Path(shutil.copytree(source, tmp_path / source.name))
    told = codes(place)
    for ending in (".sha256", ".digests.json"):
        (place / f".{place.name}{ending}").write_text("")
    assert codes(place) == told
    (place / ".checkpoint_999.sha256").write_text("")
    assert codes(place) == [*told, "not-part"]


# Beside a program ------------------------------------------------------------------------------------

STRAYS = {
    "README.md": b"# A model\n",
    "one": b"x",
    "zero": b"\0",
    "model.yml": b"",
    "sub/notes.txt": b"later",
}


@pytest.mark.parametrize("name", STRAYS)
@pytest.mark.parametrize("kind", ["separate", "combined"])
def test_a_stray_file_beside_a_program_is_a_note(files: Path, tmp_path: Path, kind: str, name: str) -> None:
    place = Path(shutil.copytree(files / "fluid" / f"inference-{kind}", tmp_path / "model"))
    if kind == "combined":
        name = name.replace("/", "-")
        (place / "__params__").rename(place / "weights")  # under a name of the user's, it is still found
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_bytes(STRAYS.get(name, b"later"))
    found = verify(place)
    assert found.is_valid
    assert [(one.code, one.severity, one.where) for one in found.findings] == [
        ("not-part", Severity.NOTE, name)
    ]
    with open_checkpoint(place) as checkpoint:
        assert set(checkpoint) == {"fc_0.w_0", "fc_0.b_0", "fc_1.w_0", "fc_1.b_0"}


@pytest.mark.parametrize("left", [("fc_0.w_0", "fc_1.w_0", "fc_1.b_0"), ("fc_0.w_0",), ()])
@pytest.mark.parametrize("stray", [None, "README.md"])
def test_variables_without_a_file_are_missing(
    files: Path, tmp_path: Path, left: tuple[str, ...], stray: str | None
) -> None:
    place = Path(shutil.copytree(files / "fluid" / "inference-separate", tmp_path / "model"))
    for path in place.iterdir():
        if path.name not in ("__model__", *left):
            path.unlink()
    if stray is not None:
        (place / stray).write_text("# A model\n", "utf-8")
    found = [one for one in opened(place).findings if one.severity is Severity.ERROR]
    told = f"no file for {counted(4 - len(left), 'variable')} of the program, like 'fc_0.b_0'"
    assert [(one.code, one.message) for one in found] == [("variable-missing", told)]


def test_a_missing_marker_is_named_with_its_path(files: Path, serial: Path) -> None:
    (serial / "trainer_1" / "_SUCCESS").unlink()
    assert [one.message for one in opened(serial).findings] == ["no trainer_1/_SUCCESS"]
    (serial / "__model__" / "_SUCCESS").unlink()
    messages = {one.code: one.message for one in opened(serial).findings}
    assert messages["no-marker-anywhere"].startswith(f"no {serial.name}/__model__/_SUCCESS, ")
    shutil.copytree(files / "fluid" / "generation-b" / "checkpoint_4", serial.with_name("checkpoint_7"))
    messages = {one.code: one.message for one in opened(serial).findings}
    assert messages["no-marker"].startswith(f"no {serial.name}/__model__/_SUCCESS: ")
