"""Which checkpoints are a series, in which order, and what is doubtful about that."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpttool import NotACheckpoint, NotFound, Policy, inspect, list_checkpoints
from tests.support.commands import python
from tests.support.retention import dry_run, kept_reasons
from tests.support.saves import DAY, HOUR, Facts, left_alone, save_all, series_in, warnings_in

EPOCHS_DECIDE, STEPS_DECIDE = (
    f"epochs and steps disagree about the order; {one} decide" for one in ("epochs", "steps")
)
NAMES_DECIDE = "the names and the contents disagree about the order; the names decide"
INSIDE_DECIDES = "the names and the contents disagree about the order; the contents decide"
TIMES_DECIDE = "no number distinguishes all checkpoints; file times decide"


def _begun_again(apart: float, kind: str) -> dict[str, Facts]:
    """Return saves 1 to 20, in which an epoch, or a step, begins again after the 14th."""
    return {
        f"m_{kind}_{number}.pt": {
            kind: number if number < 15 else number - 14,
            "modified": number * apart,
        }
        for number in range(1, 21)
    }


ORDERS: dict[str, tuple[dict[str, Facts], list[str], dict[str, str]]] = {
    "numbers are compared as numbers": (
        {"step_500.pt": {}, "step_2500.pt": {}, "step_10000.pt": {}},
        [],
        {},
    ),
    "what is inside comes before the name": (
        {"m_epoch_9.pt": {"epoch": 1}, "m_epoch_2.pt": {"epoch": 5}},
        [INSIDE_DECIDES],
        {"m_epoch_9.pt": "newest by its name"},
    ),
    "what only some have inside orders nothing": (
        {"m_3.pt": {"epoch": 9}, "m_4.pt": {}},
        [],
        {},
    ),
    "the time inside comes before the file's": (
        {
            "a.pt": {"saved_at": "2026-01-01T00:00:01", "modified": 5},
            "b.pt": {"saved_at": "2026-01-01T00:00:02", "modified": 4},
        },
        [],
        {},
    ),
    "the file's time is the last resort": (
        {"b.pt": {"modified": 1}, "a.pt": {"modified": 2}},
        [TIMES_DECIDE],
        {},
    ),
    "an epoch that all share leaves it to the step in the name": (
        {f"m_step_{step}.pt": {"epoch": 0} for step in (500, 2500, 10_000)},
        [],
        {},
    ),
    "a step begins anew each epoch": (
        {"a.pt": {"epoch": 1, "step": 900, "modified": 1}, "b.pt": {"epoch": 2, "step": 100, "modified": 2}},
        [EPOCHS_DECIDE],
        {"a.pt": "newest by step"},
    ),
    "an epoch begins anew while steps go on": (
        {"a.pt": {"epoch": 9, "step": 100}, "b.pt": {"epoch": 0, "step": 200, "modified": DAY}},
        [STEPS_DECIDE],
        {"a.pt": "newest by epoch"},
    ),
    **{
        f"times {apart} s apart are too close to say that steps go on": (
            {
                f"{epoch}-{step}.pt": {"epoch": epoch, "step": step, "modified": apart * step / 100}
                for epoch, step in ((1, 500), (2, 100), (2, 300))
            },
            [EPOCHS_DECIDE],
            {"1-500.pt": "newest by step"},
        )
        for apart in (0, 10)
    },
    "a restarted run": (
        {f"m_epoch_{at}.pt": {"modified": DAY * (at <= 3) + at} for at in range(1, 11)},
        ["m_epoch_10.pt comes last, but m_epoch_3.pt was written later; was the run restarted?"],
        {"m_epoch_3.pt": "written last"},
    ),
    "an unsound one does not spoil the order": (
        {"m_epoch_2.pt": {"epoch": 2}, "m_epoch_3.pt": {"damaged": True}, "m_epoch_10.pt": {"epoch": 10}},
        [],
        {},
    ),
    "unsound ones stand where their names belong": (
        {
            f"ckpt_{number}.pth": {"epoch": number - 1} if number in (1, 2, 4) else {"cut": True}
            for number in range(7)
        },
        [],
        {},
    ),
    "an unsound one that no name places is newest": (
        {"b.pth": {"epoch": 7, "modified": 5}, "a.pth": {"damaged": True}},
        [],
        {},
    ),
    **{
        f"names go on while an {kind} inside begins again, {apart} s apart": (
            _begun_again(apart, kind),
            [NAMES_DECIDE],
            {f"m_{kind}_14.pt": "newest by its contents"},
        )
        for kind in ("epoch", "step")
        for apart in (0, 0.5, HOUR)
    },
    **{
        f"names go on in the few that are left, {apart} s apart": (
            {name: facts for name, facts in _begun_again(apart, "epoch").items() if name in left},
            [NAMES_DECIDE],
            {"m_epoch_14.pt": "newest by its contents"},
        )
        for apart in (0, HOUR)
        for left in [("m_epoch_14.pt", "m_epoch_19.pt", "m_epoch_20.pt")]
    },
    "times may bear out what begins again": (  # two epochs, each of which counts its batches from 1
        {
            f"m_iter_{step}.pt": {"epoch": epoch, "modified": at * HOUR}
            for at, (epoch, step) in enumerate([(1, 500), (1, 1000), (2, 499), (2, 999)])
        },
        [EPOCHS_DECIDE, INSIDE_DECIDES],
        {"m_iter_1000.pt": "newest by step"},
    ),
    "names of other series say nothing of order": (
        {"a_epoch_9.pt": {"epoch": 5}, "b_epoch_8.pt": {"epoch": 6}, "c_epoch_1.pt": {"epoch": 7}},
        [],
        {},
    ),
    "numbers that count no saves say nothing of order": (
        {"digit3.pt": {"epoch": 7}, "digit1.pt": {"epoch": 8}, "digit2.pt": {"epoch": 8}},
        [],
        {},
    ),
}
"""Saves from the oldest to the newest, what is told of their order, and what is the newest else."""


@pytest.mark.parametrize(("saves", "warnings", "others"), ORDERS.values(), ids=ORDERS)
def test_order(saves: dict[str, Facts], warnings: list[str], others: dict[str, str], tmp_path: Path) -> None:
    save_all(tmp_path, dict(reversed(saves.items())))
    (names,) = series_in(tmp_path, group_by="parent").values()
    assert names == [*saves]
    assert warnings_in(tmp_path, group_by="parent") == [f"*: {one}" for one in warnings]
    assert _newest_else(tmp_path, group_by="parent") == others


def _newest_else(directory: Path, **options: Any) -> dict[str, str]:
    """Return what prune keeps for being the newest by time, or by a count that doesn't decide."""
    kept = kept_reasons(dry_run(directory, policy=Policy(keep_last=1), depth="quick", **options))
    told = [(name, why) for name, reasons in kept.items() for why in reasons]
    return {name: why for name, why in told if why.startswith(("newest by", "written last"))}


@pytest.mark.parametrize(
    ("times", "last", "other"),
    [
        ((0, 0, 0), "m_epoch_2.pt", {"m_epoch_3.pt": "newest by its name"}),
        ((1, 2, 3), "m_epoch_3.pt", {"m_epoch_2.pt": "newest by its contents"}),
        ((2, 3, 1), "m_epoch_2.pt", {"m_epoch_3.pt": "newest by its name"}),
        ((1, 3, 2), "m_epoch_2.pt", {"m_epoch_3.pt": "newest by its name"}),
    ],
)
def test_times_settle_which_of_names_and_what_is_inside_is_right(tmp_path: Path, times, last, other) -> None:
    told = zip((1, 2, 3), (8, 9, 7), times, strict=True)
    save_all(
        tmp_path, {f"m_epoch_{at}.pt": {"epoch": one, "modified": when * HOUR} for at, one, when in told}
    )
    (names,) = series_in(tmp_path).values()
    decides = NAMES_DECIDE if last == "m_epoch_3.pt" else INSIDE_DECIDES
    assert (names[-1], warnings_in(tmp_path)) == (last, [f"m_epoch_*.pt: {decides}"])
    assert _newest_else(tmp_path) == other


# The newest of several series -----------------------------------------------------------------------


def test_a_directory_stands_for_its_newest(series: Path, trainer: Path) -> None:
    def chosen(path: Path) -> str:
        return os.path.relpath(inspect(path).checkpoint.path, path)

    assert chosen(series) == "model_epoch_10.pth"
    assert chosen(series / "model_epoch_3.pth") == "."
    assert (chosen(trainer), chosen(trainer / "checkpoint-4")) == ("checkpoint-10", ".")
    shutil.copytree(series, series.parent / "outer" / "inner")  # lies deeper, where nothing is above
    assert chosen(series.parent / "outer") == "inner/model_epoch_10.pth"
    (series / "model_epoch_10.pth").write_bytes(b"PK\3\4 and no more")
    assert chosen(series) == "model_epoch_9.pth"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        inspect(tmp_path)
    with pytest.raises(NotFound):
        inspect(tmp_path / "missing")


def test_a_file_stands_for_itself_and_its_directory_is_not_searched(
    series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        pytest.fail(f"{path} is searched")

    inspect(series / "model_epoch_3.pth")
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        inspect(series / "model_epoch_3.pth")


def test_numpy_is_not_needed(series: Path) -> None:
    code = "import ckpttool, sys; ckpttool.inspect(sys.argv[1]); assert 'numpy' not in sys.modules"
    answer = python("-c", code, series)
    assert (answer.returncode, answer.stderr) == (0, "")


# Series ---------------------------------------------------------------------------------------------

RUN_1 = [f"2026-01-01_model_e{epoch:02d}.pt" for epoch in (1, 2, 3)]
RUN_2 = [f"2026-01-02_model_e{epoch:02d}.pt" for epoch in (1, 2)]
GOES_ON = [f"2026-01-0{day}_model_e0{epoch}.pt" for day, epoch in ((1, 1), (1, 2), (2, 3), (3, 4))]
PAIRS = [f"checkpoint_{epoch}_{epoch * 100}.pt" for epoch in range(1, 12)]
FOLDS = [f"checkpoint_{fold}_{epoch}.pt" for fold in (1, 2) for epoch in (10, 20)]
MEASURED_ONCE = ["m_epoch_1_acc_0.5.pt", *(f"m_epoch_{epoch}_acc_0.6.pt" for epoch in (2, 3, 4))]
MEASURED_TWICE = [
    f"m_epoch_{epoch}_acc_{value}.pt" for epoch, value in ((1, 0.5), (1, 0.51), (2, 0.6), (2, 0.62), (3, 0.6))
]


def _of_equal_measurements(form: str) -> list[str]:
    return [form.format(value, epoch) for epoch, value in enumerate(("0.05", "0.05", "0.04"), 1)]


@pytest.mark.parametrize(
    "expected",
    [
        {"*_model_e*.pt@2026-01-01": RUN_1, "*_model_e*.pt@2026-01-02": RUN_2},
        {"*_model_e*.pt": GOES_ON},
        {"checkpoint_*_*.pt": PAIRS},
        {f"checkpoint_{fold}_*.pt": FOLDS[2 * fold - 2 : 2 * fold] for fold in (1, 2)},
        {"m_epoch_*_acc_*.pt": MEASURED_ONCE},
        {"m_epoch_*_acc_*.pt": MEASURED_TWICE},
        *(
            {form.format("*", "*"): _of_equal_measurements(form)}
            for form in [
                "Conformer--val_wer={}-epoch={}.ckpt",
                "val_wer_{}_epoch_{}.pt",
                "teacher_val_wer_{}_epoch_{}.pt",
                "BLEU-4={}-epoch={}.pt",
                "acc{}_epoch_{}.pt",
            ]
        ),
        *(
            {
                f"{stem.format(value)}_epoch_*.pt": [f"{stem.format(value)}_epoch_{at}.pt" for at in epochs]
                for value, epochs in zip(values, ((1, 2, 3), others), strict=True)
            }
            for stem, values in {
                "llama_acc{}": (2, 4),
                "yolo_iou{}": (0.5, 0.7),
                "gan_perceptual_loss_{}": (0.1, 0.2),
                "l2_{}": ("1e-4", "1e-3"),
                "loss_{}w": (0.1, 0.3),
                "psnr{}": (4, 6),
            }.items()
            for others in ((1, 2, 3), (1,))
        ),
    ],
    ids=lambda expected: " ".join(expected),
)
def test_names_tell_series_apart(expected: dict[str, list[str]], tmp_path: Path) -> None:
    """Runs by date; an epoch and a step, which grow together; settings, which metrics look like."""
    save_all(tmp_path, {name: {} for names in expected.values() for name in names})
    assert series_in(tmp_path) == expected


def test_tensors_tell_series_apart(tmp_path: Path) -> None:
    names = ["a_epoch_1.pt", "a_epoch_2.pt", "b_epoch_1.pt", "b_epoch_2.pt", "b_epoch_3.pt"]
    others = {"a_epoch_2.pt": {"weights": "other"}, "b_epoch_3.pt": {"cut": True}}
    save_all(tmp_path, {name: others.get(name, {}) for name in names})
    holds = "partial, 1 tensor of weights, 6 parameters"
    assert series_in(tmp_path) == {
        f"a_epoch_*.pt ({holds}, kind 1)": names[:1],
        f"a_epoch_*.pt ({holds}, kind 2)": names[1:2],
        "b_epoch_*.pt": names[2:],
    }


SETTINGS = "a number before the epoch or step could be a setting: could be different runs"


@pytest.mark.parametrize(
    ("form", "is_doubted"),
    [
        ("llama_acc{}_epoch_{}.pt", True),
        ("yolo_iou0.{}_epoch_{}.pt", True),
        ("acc_{}_epoch_{}.pt", True),
        ("val_acc_0.{}_epoch_{}.pt", False),
        ("iou=0.{}-epoch={}.pt", False),
        ("m_epoch_{1}_acc{0}.pt", False),
    ],
)
def test_what_may_be_a_setting_is_doubted_without_two_of_an_epoch(
    tmp_path: Path, form: str, is_doubted: bool
) -> None:
    save_all(tmp_path, {form.format(*at): {} for at in ((2, 2), (2, 4), (4, 7), (4, 8))})
    ((key, why),) = left_alone(tmp_path).items()
    assert (why or "").startswith(SETTINGS) == (why is not None) == is_doubted
    assert left_alone(tmp_path, series=(key,)) == {key: None}


def test_what_somebody_calls_a_series_has_no_settings(tmp_path: Path) -> None:
    save_all(tmp_path, {f"llama_acc{value}_epoch_{at}.pt": {} for value in (2, 4) for at in (1, 2)})
    glob = "llama_acc*_epoch_*.pt"
    assert [*series_in(tmp_path, series=(glob,))] == [glob]


NUMBERS = st.sampled_from(["1", "2", "0.5", "1e-4", "nan", "-3"])
WORDS = st.sampled_from(["acc", "epoch_", "_loss", "-", "*", "l2_", "step", "best_", "20260101", " "])
NAMES = st.lists(WORDS, min_size=1, max_size=4).flatmap(
    lambda words: st.lists(st.tuples(*(NUMBERS for _ in words)), min_size=1, max_size=6).map(
        lambda rows: ["".join(word + number for word, number in zip(words, row, strict=True)) for row in rows]
    )
)


@example(["acc1"], ["epoch_1epoch_1", "epoch_1epoch_-3"])
@given(NAMES, NAMES)
def test_names_of_one_series_differ_in_numbers_alone(
    tmp_path_factory: pytest.TempPathFactory, some: list[str], others: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("run")
    save_all(directory, {f"{name}.pt": {} for name in [*some, *others]})
    found = [*series_in(directory).values()]
    parts = {
        os.path.basename(one.path)
        for row in list_checkpoints(directory).checkpoints
        for one in row.entry.parts
    }
    assert sorted({name for names in found for name in names} | parts) == sorted(os.listdir(directory))
    for names in found:
        assert len({re.sub(r"(?:nan|[0-9.e-])+", "#", name) for name in names}) == 1


UNORDERED = "no number in its names or contents shows which is older"


@pytest.mark.parametrize(
    ("directories", "why"),
    [
        (("run/seed1_step_20", "run/seed1_step_100"), None),
        (("run/e20/mp", "run/e100/mp"), None),
        (("run/fold_2", "run/fold_1"), UNORDERED),
        (("run/model_2", "run/model_1"), UNORDERED),
        (("a/e2", "b/e1"), UNORDERED),
        (("run/e2", "run/deep/e1"), UNORDERED),
        (("run/e2", "run/e1_old"), UNORDERED),
    ],
)
def test_directories_may_order_what_has_one_name(tmp_path: Path, directories, why: str | None) -> None:
    names = [f"{place}/m.pt" for place in directories]
    save_all(tmp_path, {name: {"modified": at} for at, name in enumerate(names)})
    assert series_in(tmp_path, group_by="none") == {"all checkpoints": names}
    assert left_alone(tmp_path, group_by="none", recursive=True) == {"all checkpoints": why}
    assert all(len(series_in(tmp_path, group_by=by)) == 2 for by in (None, "prefix", "format", "parent"))


def test_a_name_in_each_of_several_directories_is_a_series_if_somebody_says_so(tmp_path: Path) -> None:
    """Of those beside each other: what lies in another directory may be another trial's."""
    names = [f"trial_{trial}/{number}/m.pt" for trial in (1, 2) for number in (20, 100)]
    save_all(tmp_path, {name: {} for name in names})
    expected = {f"trial_{trial}/*/m.pt": names[2 * trial - 2 : 2 * trial] for trial in (1, 2)}
    for glob in ("m.pt", "*/*/m.pt", "trial_*/*/m.pt"):
        assert series_in(tmp_path, series=(glob,)) == expected
        assert left_alone(tmp_path, series=(glob,), recursive=True) == dict.fromkeys(expected)
    assert len(series_in(tmp_path, series=("m*.pt",))) == 4
