"""Paddle's files: what tells them from others, what they could run, and how they are damaged."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpttool import Checkpoint, CheckpointError, DamagedCheckpoint, Role, Safety, open_checkpoint, verify
from ckpttool.testing import described, digest, expected_digests, is_valid, outcome_of, read_truth
from tests.formats.paddle_programs import field, operator, program
from tests.support.limits import lower_limits
from tests.support.opening import only_checkpoint
from tests.support.thorough import spread

NAMES = "StructuredToParameterName@@"


def opened(path: Path) -> Checkpoint:
    with open_checkpoint(path) as checkpoint:
        _ = checkpoint.training
        return checkpoint


def codes(path: Path) -> list[str]:
    return [finding.code for finding in opened(path).findings]


@pytest.fixture
def pair(files: Path, tmp_path: Path) -> Path:
    """Return the program of a pair."""
    for ending in (".pdmodel", ".pdiparams"):
        shutil.copyfile(files / "paddle" / f"net{ending}", tmp_path / f"net{ending}")
    return tmp_path / "net.pdmodel"


# Pairs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["net.pdmodel", "net.pdiparams"])
def test_either_file_opens_the_pair(files: Path, name: str) -> None:
    truth = read_truth(files / "paddle" / name)
    with open_checkpoint(files / "paddle" / name) as checkpoint:
        assert {tensor.path: digest(tensor) for tensor in checkpoint.tensors} == expected_digests(truth)
        assert (checkpoint.format, checkpoint.variant, checkpoint.complete) == ("paddle", "inference", True)
        assert sorted(Path(file.path).name for file in checkpoint.files) == ["net.pdiparams", "net.pdmodel"]
        assert checkpoint.producer.version == "2.6.2"
        assert checkpoint.parameters == truth["parameters"]
    assert verify(files / "paddle" / name).is_valid


def test_a_pair_is_one_unit(pair: Path) -> None:
    pair.with_suffix(".pdiparams.info").write_bytes(pickle.dumps({}))
    assert only_checkpoint(pair.parent).members == ("net.pdmodel", "net.pdiparams", "net.pdiparams.info")


def test_parameters_without_a_program_have_numbers(files: Path) -> None:
    path = files / "paddle" / "nameless.pdiparams"
    truth = read_truth(path)
    with open_checkpoint(path) as checkpoint:
        assert {tensor.path: digest(tensor) for tensor in checkpoint.tensors} == expected_digests(truth)
        assert list(checkpoint) == ["#0", "#1", "#2", "#3"]
    assert codes(path) == ["no-program"]
    assert verify(path).is_valid


def test_a_program_without_its_parameters(pair: Path) -> None:
    pair.with_suffix(".pdiparams").unlink()
    assert codes(pair) == ["parameters-missing"]
    assert not opened(pair).complete


@pytest.mark.parametrize("ending", [".pdiparams", ".pdmodel"])
def test_a_pair_cut_anywhere(pair: Path, ending: str) -> None:
    truth = read_truth(Path(__file__).parents[2] / "fixtures" / "files" / "paddle" / "net.pdmodel")
    file = pair.with_suffix(ending)
    whole = file.read_bytes()
    places = range(len(whole)) if ending == ".pdiparams" else range(0, len(whole), 41)
    for nbytes in places:
        file.write_bytes(whole[:nbytes])
        told = f"{ending} cut to {nbytes}"
        if is_valid(outcome_of(pair, told)):
            assert described(opened(pair)).keys() == expected_digests(truth).keys(), told


@pytest.mark.parametrize("ending", [".pdiparams", ".pdmodel"])
def test_a_pair_with_a_flipped_bit(pair: Path, ending: str) -> None:
    file, chance = pair.with_suffix(ending), random.Random(ending)
    whole = file.read_bytes()
    for _ in spread(range(300), 60):
        at, bit = chance.randrange(len(whole)), chance.randrange(8)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        outcome_of(pair, f"{ending} with bit {bit} of byte {at} flipped")


def test_parameters_that_the_program_declares_otherwise(pair: Path) -> None:
    parameters = pair.with_suffix(".pdiparams")
    head, _, values = parameters.read_bytes().rpartition(b"\x10\x04\x10\x02")
    assert len(values) == 4 * 2 * 4
    parameters.write_bytes(head + b"\x10\x02\x10\x04" + values)  # [4, 2] becomes [2, 4]
    assert codes(pair) == ["program-mismatch"]


def test_a_program_with_pickles_beside_it(files: Path, tmp_path: Path) -> None:
    """As ``paddle.static.save`` writes them."""
    for ending in (".pdmodel", ".pdparams", ".pdopt"):
        shutil.copyfile(files / "paddle" / f"static{ending}", tmp_path / f"static{ending}")
    path = tmp_path / "static.pdmodel"
    truth = read_truth(files / "paddle" / path.name)
    with open_checkpoint(path) as checkpoint:
        assert {tensor.path: digest(tensor) for tensor in checkpoint.tensors} == expected_digests(truth)
        assert (checkpoint.variant, checkpoint.granularity.value) == ("training", "full")
        assert checkpoint.parameters == truth["parameters"]
    assert verify(path).is_valid
    assert only_checkpoint(tmp_path).members == ("static.pdmodel", "static.pdparams", "static.pdopt")
    optimizer = tmp_path / "static.pdopt"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    assert not verify(path).is_valid
    assert verify(path).safety is Safety.UNKNOWN
    optimizer.unlink()
    assert codes(path) == ["variable-missing"]


# Programs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["py_func", "save", "load", "save_combine", "load_combine"])
def test_operators_that_touch_the_world_are_unsafe(tmp_path: Path, name: str) -> None:
    attribute = field(1, b"file_path") + field(2, 2) + field(5, b"/etc/passwd")
    path = tmp_path / "evil.pdmodel"
    path.write_bytes(program(operator(name, attribute)))
    verdict = verify(path)
    assert verdict.safety is Safety.UNSAFE
    (finding,) = [one for one in verdict.findings if one.code == "unsafe-op"]
    assert name in finding.message
    assert "/etc/passwd" in finding.message


def test_operators_in_any_block_are_seen(tmp_path: Path) -> None:
    inner = field(1, b"\x08\x01\x10\x00" + operator("py_func"))
    path = tmp_path / "evil.pdmodel"
    path.write_bytes(program() + inner)
    assert verify(path).safety is Safety.UNSAFE


def test_ordinary_programs_are_safe(files: Path) -> None:
    assert verify(files / "paddle" / "net.pdmodel").safety is Safety.SAFE


def test_the_pickle_beside_the_parameters_is_judged(pair: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.system, ("false",)

    pair.with_suffix(".pdiparams.info").write_bytes(pickle.dumps(Evil()))
    assert verify(pair).safety is Safety.UNSAFE


def test_programs_are_told_from_other_messages(tmp_path: Path) -> None:
    path = tmp_path / "p.pdmodel"
    path.write_bytes(program())
    assert codes(path) == []
    for other in (b"\x08\x01\x12\x04", b"\x0a\x04abcd"):
        path.write_bytes(other)
        with pytest.raises(DamagedCheckpoint) as caught:
            open_checkpoint(path)
        assert caught.value.code == "unrecognised-content"
    path.write_bytes(program() + b"\x52\x00")
    assert codes(path) == ["damaged"]


def test_programs_of_tiny_fields_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, fields_of_a_program=1000)
    path = tmp_path / "p.pdmodel"
    for tiny in (b"\x28\x00" * 1001, field(4, b"\x28\x00" * 1001), b"\x1a\x00" * 1001):
        path.write_bytes(program(tiny))
        assert "more than 1,000 fields" in opened(path).findings[0].message


# Streams --------------------------------------------------------------------------------------------


def test_sequences_that_do_not_fit_are_told(files: Path, tmp_path: Path) -> None:
    data = bytearray((files / "paddle" / "sequences.lodtensor").read_bytes())
    data[4 + 8 + 8 + 8] = 9  # [0, 1, 3] becomes [0, 9, 3]
    path = tmp_path / "sequences"
    path.write_bytes(data)
    assert codes(path) == ["lod-inconsistent"]


def test_zeros_are_no_tensor(tmp_path: Path) -> None:
    path = tmp_path / "zeros"
    path.write_bytes(bytes(5000))
    with pytest.raises(CheckpointError, match=r"not a checkpoint.* the bytes 00 00"):
        open_checkpoint(path)


# Pickles --------------------------------------------------------------------------------------------


def test_a_plain_pickle_stays_one(files: Path) -> None:
    for path in (files / "pickle").glob("*.pkl"):
        assert opened(path).format == "pickle"


def test_roles_and_rate_of_an_optimizer(files: Path) -> None:
    checkpoint = opened(files / "paddle" / "adam.pdopt")
    assert {tensor.role for tensor in checkpoint.tensors} == {Role.OPTIMIZER}
    assert checkpoint.training.origin["learning_rate"] == "key LR_Scheduler.last_lr"


def test_uint16_is_bfloat16_and_said_to_be(files: Path) -> None:
    assert codes(files / "paddle" / "bfloat16.pdparams") == ["uint16-is-bfloat16"]


def test_pieces_that_make_no_tensor(tmp_path: Path) -> None:
    for shape, names in (((3, 3), ["w@@.0"]), ((2,), ["w@@.1"]), ((2,), 7), ("ab", ["w@@.0"])):
        held = {"w@@.0": np.ones(2), "UnpackBigParamInfor@@": {"w": {"OriginShape": shape, "slices": names}}}
        path = tmp_path / "pieces.pdparams"
        path.write_bytes(pickle.dumps(held, 2))
        with pytest.raises(DamagedCheckpoint) as caught:
            open_checkpoint(path)
        assert caught.value.code == "piece-missing"


class Eval:
    """Pickled as a call of eval."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return eval, self.arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ("__import__('os')", {"data": np.ones(2)}),
        ("data", {"data": 1}),
        ("data", {"data": np.ones(2), "__builtins__": {}}),
        ("data", {}, {"data": np.ones(2)}),
    ],
)
def test_any_other_eval_is_unsafe(tmp_path: Path, arguments: tuple[object, ...]) -> None:
    path = tmp_path / "evil.pdparams"
    held = {"w": np.ones(3), "x": Eval(*arguments), NAMES: {"w": "w"}}
    path.write_bytes(pickle.dumps(held, 4))
    assert opened(path).format == "paddle"
    assert verify(path).safety is Safety.UNSAFE


def test_the_eval_of_paddle_is_safe(files: Path) -> None:
    assert verify(files / "paddle" / "evaluated.pd").safety is Safety.SAFE


def test_pickles_behind_the_first_are_judged(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "two.pdparams"
    path.write_bytes((files / "paddle" / "protocol4.pdparams").read_bytes() + pickle.dumps(Eval("1"), 4))
    assert "more-pickles" in codes(path)
    assert verify(path).safety is Safety.UNSAFE


# In Paddle itself -----------------------------------------------------------------------------------


@pytest.mark.framework
def test_paddle_takes_a_cut_file_for_whole_and_we_do_not(files: Path, tmp_path: Path) -> None:
    """Why sizes are checked to the byte."""
    path = tmp_path / "cut.lodtensor"
    path.write_bytes((files / "paddle" / "fp32.lodtensor").read_bytes()[:-4])
    told = run_paddle(f"print(list(paddle.load({str(path)!r}).shape))")
    assert told.endswith("[2, 3]\n")
    assert not is_valid(outcome_of(path, "cut by 4 bytes"))


def run_paddle(code: str) -> str:
    """Return what a program prints that may use Paddle; it shares no process with other frameworks."""
    done = subprocess.run(
        [sys.executable, "-c", f"import paddle\n{code}"], capture_output=True, text=True, check=True
    )
    return done.stdout


# Programs of Paddle 3 -------------------------------------------------------------------------------


def pir(*operators: object) -> dict[str, object]:
    program = {"regions": [{"#": "region_0", "blocks": [{"#": "block_0", "args": [], "ops": operators}]}]}
    return {"base_code": {"magic": "pir", "trainable": True, "version": 1}, "program": program}


@pytest.fixture
def pir_pair(files: Path, tmp_path: Path) -> Path:
    """Return the program of a pair that Paddle 3 wrote."""
    for ending in (".json", ".pdiparams"):
        shutil.copyfile(files / "paddle" / f"pir{ending}", tmp_path / f"pir{ending}")
    return tmp_path / "pir.json"


@pytest.mark.parametrize("name", ["pir.json", "pir.pdiparams"])
def test_either_file_of_paddle_3_opens_the_pair(files: Path, name: str) -> None:
    truth = read_truth(files / "paddle" / name)
    with open_checkpoint(files / "paddle" / name) as checkpoint:
        assert {tensor.path: digest(tensor) for tensor in checkpoint.tensors} == expected_digests(truth)
        assert (checkpoint.format, checkpoint.variant, checkpoint.complete) == ("paddle", "inference", True)
        assert (checkpoint.findings, checkpoint.safety) == ((), ())


def test_a_pair_of_paddle_3_is_one_checkpoint(pir_pair: Path) -> None:
    (pir_pair.parent / "other.json").write_text("{}")
    unit = only_checkpoint(pir_pair.parent)
    assert (unit.path, sorted(unit.members)) == (str(pir_pair), ["pir.json", "pir.pdiparams"])


def test_other_json_beside_parameters_is_no_program(pir_pair: Path) -> None:
    pir_pair.write_text("{}")
    assert codes(pir_pair.with_suffix(".pdiparams")) == ["no-program"]


def test_a_program_in_another_order_is_not_safe(pir_pair: Path) -> None:
    program = json.loads(pir_pair.read_text())
    pir_pair.write_text(json.dumps(dict(reversed(program.items()))))
    assert verify(pir_pair.with_suffix(".pdiparams")).safety is Safety.UNKNOWN


def test_a_second_program_is_not_safe(pir_pair: Path, files: Path) -> None:
    shutil.copyfile(files / "paddle" / "net.pdmodel", pir_pair.with_suffix(".pdmodel"))
    assert verify(pir_pair.with_suffix(".pdmodel")).safety is Safety.UNKNOWN
    assert verify(pir_pair.with_suffix(".pdiparams")).safety is Safety.UNKNOWN


def test_parameters_of_paddle_3_are_missing(pir_pair: Path) -> None:
    pir_pair.with_suffix(".pdiparams").unlink()
    assert codes(pir_pair) == ["parameters-missing"]


def test_a_program_of_paddle_3_that_reads_a_file(pir_pair: Path) -> None:
    load = {"#": "1.load_combine", "A": [{"AT": {"#": "0.a_str", "D": "/etc/x"}, "N": "file_path"}]}
    branch = {"#": "1.if", "A": [], "regions": [{"blocks": [{"ops": [load]}]}]}
    pir_pair.write_text(json.dumps(pir(branch)))
    (finding,) = opened(pir_pair).safety
    assert (finding.code, finding.message) == (
        "unsafe-op",
        "running it calls load_combine, which reads a file: /etc/x",
    )


@pytest.mark.parametrize(
    "operator",
    [1, {}, {"#": 1}, {"#": "p"}, {"#": "p", "A": [0, 0, 0, 1], "O": {"TT": {"D": [{"#": "0.t_f32"}, [2]]}}}],
)
def test_a_malformed_operator(pir_pair: Path, operator: object) -> None:
    pir_pair.write_text(json.dumps(pir(operator)))
    assert codes(pir_pair)[0] == "damaged"
    assert verify(pir_pair).safety is Safety.UNKNOWN


def test_a_key_twice_in_a_program(pir_pair: Path) -> None:
    text = pir_pair.read_text().replace('{"#":"region_0"', '{"#":"region_1","#":"region_0"', 1)
    pir_pair.write_text(text)
    assert codes(pir_pair)[0] == "damaged"


def test_a_program_of_paddle_3_cut_at_each_byte(pir_pair: Path) -> None:
    content = pir_pair.read_bytes()
    for length in range(60, len(content), 23):
        pir_pair.write_bytes(content[:length])
        assert not opened(pir_pair).complete


def test_a_variables_name_measures_nothing(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "fc_0.w_0_beta2_pow_acc_0"
    shutil.copyfile(files / "paddle" / "fp32.lodtensor", path)
    assert opened(path).training.metrics == {}
