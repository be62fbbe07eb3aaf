"""What people read: whole answers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckpttool import Check, Finding, Role, Safety, Status, Tensor, TrainingState, Verification
from ckpttool.core.checkpoint import FileEntry, Producer
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.report import error, note, warning
from tests.support.golden import Golden
from tests.support.rendering import lines_of, text_of
from tests.support.results import inspection

F32, I64 = BY_NAME["float32"], BY_NAME["int64"]
GUIDE = (
    Tensor(("model_state_dict", "fc.weight"), F32, (2, 10), Role.WEIGHTS),
    Tensor(("model_state_dict", "fc.bias"), F32, (2,), Role.WEIGHTS),
    Tensor(("model_state_dict", "head.weight"), F32, (2, 10), Role.WEIGHTS, shares_with="fc"),
    Tensor(("optimizer", "state", 0, "step"), I64, (), Role.OPTIMIZER),
)


def verification(*findings: Finding, **more: Any) -> Verification:
    statuses = {"structure": Status.PASSED, "checksum": Status.PASSED, "values": Status.PASSED}
    statuses |= more.pop("statuses", {})
    safety = more.pop("safety", Safety.SAFE)
    details = {"structure": "1 file, 2 tensors", "checksum": "14 records", "values": "8 tensors"}
    checks = [Check(name, status, details[name]) for name, status in statuses.items()]
    checks.append(Check("safety", Status.FAILED if safety is Safety.UNSAFE else Status.PASSED, "nothing"))
    path = more.pop("path", "m.pth")
    return Verification(path, "pytorch", "zip", safety, tuple(checks), findings, 3953, **more)


# inspect --------------------------------------------------------------------------------------------


def test_checkpoint_of_a_model(golden: Golden) -> None:
    training = TrainingState(
        epoch=10,
        loss=0.02,
        step=1200,
        learning_rate=0.001,
        metrics={"val_loss": 0.5},
        origin={
            "epoch": "key epoch",
            "loss": "key loss",
            "step": "name m.pth",
            "learning_rate": "key optimizer.param_groups[0].lr",
            "metrics.val_loss": "key val_loss",
        },
    )
    golden(text_of(inspection(*GUIDE, training=lambda: training)))


def test_other_checkpoints(golden: Golden) -> None:
    files = (FileEntry("a", 1), FileEntry("b", 2_000_000))
    weight, _, _, step = GUIDE
    shown = {"model_state_dict.fc.weight": (20, 1, 0, 4, -0.25, 1.5, 0.125, 0.5)}
    found = {
        "findings": (error("zip-gap", "bytes lie there", "data/0"),),
        "safety": (warning("unknown-class", "x"),),
    }
    golden(
        {
            "without tensors": text_of(inspection(variant=None, complete=False)),
            "one tensor": text_of(inspection(weight)),
            "several files": text_of(inspection(files=files, producer=Producer("transformers", "4.57"))),
            "findings": text_of(inspection(**found)),
            "statistics": text_of(inspection(weight, step, statistics=shown), width=120),
        }
    )


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_statistics_fit_a_narrow_terminal(width: int) -> None:
    name = "encoder.layers.11.attention.self.a_very_long_name_of_a_module.weight"
    tensors = (Tensor((name,), F32, (1024, 1024)), Tensor(("b",), F32, (2,)))
    numbers = (1 << 20, 0, 0, 1234, -0.00012345, 123456.0, -1.2345e-7, 0.0012345)
    told = text_of(inspection(*tensors, statistics={name: numbers}), width=width).split("\n\n")[1]
    rows = [line for line in told.splitlines() if "weight" in line]
    assert len(rows) == 1
    shown = ("-0.0001234", "1.235e+05", "-1.235e-07", "0.001234")
    assert all(one in rows[0] for one in shown[: 4 if width >= 80 else 2]), rows
    assert all(len(line) <= width for line in told.splitlines())
    assert ("zeros" in told.splitlines()[0]) == (width >= 100)
    assert ("hidden for lack of width: size, type" in told) == (width <= 80)


@pytest.mark.parametrize(("count", "last"), [(40, "w39"), (41, "… and 1 other tensor (8 B); --all")])
def test_table_is_cut_after_40(count: int, last: str) -> None:
    tensors = [Tensor((f"w{index}",), F32, (2,)) for index in range(count)]
    assert lines_of(inspection(*tensors))[-1].strip().startswith(last)
    assert "--all" not in text_of(inspection(*tensors), all_tensors=True)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_long_names_lose_nothing(width: int) -> None:
    name = "".join(chr(ord("a") + index % 26) for index in range(150))
    table = text_of(inspection(Tensor((name,), F32, (2,))), width=width).partition("\n\n")[2]
    assert name in "".join(line.split()[0] for line in table.splitlines() if line.strip())


def test_a_long_path_stays_in_one_line() -> None:
    path = "run/" + "x" * 300 + ".pth"
    assert lines_of(inspection(path=path), width=80)[0] == f"{path}: pytorch (zip)"


HOSTILE = "\x1b[2Ja\nb\u202e[red]c[/red]:smile:"


def test_what_files_say_is_escaped_and_is_no_markup() -> None:
    training = TrainingState(
        saved_at=HOSTILE,
        metrics={HOSTILE: 1.0},
        hyper_parameters={HOSTILE: HOSTILE},
        origin={"saved_at": HOSTILE},
    )
    found = inspection(
        Tensor((HOSTILE, HOSTILE), F32, (2,), shares_with=HOSTILE),
        path=HOSTILE,
        producer=Producer(HOSTILE, HOSTILE),
        training=lambda: training,
        findings=(error("code", HOSTILE, HOSTILE),),
    )
    for colour in (False, True):
        text = re.sub(r"\x1b\[[0-9;]*m", "", text_of(found, colour=colour, width=400))
        assert all(character.isprintable() or character == "\n" for character in text)
        assert "\\x1b[2Ja\\nb\\u202e[red]c[/red]:smile:" in text


def test_colour_only_where_it_is_wanted() -> None:
    found = inspection(*GUIDE, findings=(error("a", "b"),))
    assert "\x1b" not in text_of(found)
    assert "\x1b[" in text_of(found, colour=True)


# verify ---------------------------------------------------------------------------------------------


def test_verdicts(golden: Golden) -> None:
    failed = {"values": Status.FAILED}
    nan = verification(error("nan", "1 of 2 values are NaN", "w"), statuses=failed)
    several = [
        verification(),
        verification(safety=Safety.UNKNOWN),
        verification(safety=Safety.UNSAFE),
        verification(statuses=failed),
        verification(),
    ]
    damaged = {"structure": Status.FAILED}
    golden(
        {
            "valid": text_of([verification()]),
            "valid, in detail": text_of([verification()], verbose=True),
            "skipped": text_of([verification(statuses={"checksum": Status.SKIPPED})]),
            "invalid": text_of([nan]),
            "invalid, in detail": text_of([nan], verbose=True),
            "unknown": text_of([verification(safety=Safety.UNKNOWN)]),
            "unsafe": text_of([verification(safety=Safety.UNSAFE)]),
            "damaged": text_of([verification(statuses=damaged)]),
            "damaged and unsafe": text_of([verification(statuses=damaged, safety=Safety.UNSAFE)]),
            "several": text_of(several),
            "several of unknown safety": text_of(several[1:2] * 2),
        }
    )


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_verdicts_fit_the_terminal_and_break_no_word(width: int) -> None:
    message = "the weights of this layer are not what they were when the manifest was written" * 2
    paths = [f"runs/experiment-{at}/checkpoints/with/a/long/path/epoch_{at}.pth" for at in range(3)]
    found = [
        verification(error("nan", message, "encoder.0.w"), path=path, statuses={"values": Status.FAILED})
        for path in paths
    ]
    told = lines_of(found, width=width)
    assert all(len(line) <= width for line in told)
    assert {*message.split()} <= {*" ".join(told).split()}
    assert len({line for line in told if "INVALID" in line}) == 3


def test_findings_are_gathered_and_cut(golden: Golden) -> None:
    one_place = [warning("unknown-class", f"loading it creates a.C{at}", "data.pkl") for at in range(9)]
    many_places = [error("checksum-mismatch", f"CRC-32 is {at}", f"t{at}") for at in range(24)]
    alike = [error("missing", "there is no such file", f"f{at}") for at in range(5)]
    golden(
        {
            "in one place": text_of([verification(*one_place)]),
            "in many places": text_of([verification(*many_places, note("n", "a note"))]),
            "alike": text_of([verification(*alike)]),
        }
    )
    told = lines_of([verification(*(note("n", f"note {index}") for index in range(45)))])
    assert len(told) == 42
    golden(told[-1])


def test_what_files_say_is_escaped() -> None:
    found = verification(error("code", HOSTILE, HOSTILE), path=HOSTILE, statuses={"values": Status.FAILED})
    text = text_of([found])
    assert all(character.isprintable() or character == "\n" for character in text)
    assert len(text.splitlines()) == 2
