"""Which checkpoints are a series, and which is newest."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool import NotACheckpoint, NotFound
from ckpttool.formats.globs import Globs
from ckpttool.formats.interface import Unit
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.order import (
    group,
    may_be_newest,
    newest_first,
    newest_otherwise,
    order_by_numbers,
    order_entries,
    written_last,
)
from ckpttool.runs.members.runs import apply_series_globs, keep_run_settings
from ckpttool.runs.members.series_doubts import SETTINGS, doubt_of
from ckpttool.runs.surveying.newest import newest_in
from tests.support.directories import damaged, incomplete

DAY = 86_400 * 10**9
HOUR = 3600 * 10**9


def _names(entries) -> list[str]:
    return [one.name for one in entries]


def test_numbers_are_compared_as_numbers(entry) -> None:
    ordered, warnings = order_entries([entry("step_2500.pt"), entry("step_500.pt"), entry("step_10000.pt")])
    assert _names(ordered) == ["step_500.pt", "step_2500.pt", "step_10000.pt"]
    assert warnings == []


def test_what_is_inside_comes_before_the_name(entry) -> None:
    ordered, _ = order_entries(
        [entry("m_epoch_9.pt", inside=(1, None)), entry("m_epoch_2.pt", inside=(5, None))]
    )
    assert _names(ordered) == ["m_epoch_9.pt", "m_epoch_2.pt"]


def test_what_only_some_have_inside_orders_nothing(entry) -> None:
    ordered, _ = order_entries([entry("m_3.pt", inside=(9, None)), entry("m_4.pt", inside=(None, None))])
    assert _names(ordered) == ["m_3.pt", "m_4.pt"]


def test_the_time_inside_comes_before_the_file_s(entry) -> None:
    early = entry("a.pt", saved_at=1.0, modified=5)
    late = entry("b.pt", saved_at=2.0, modified=4)
    assert _names(order_entries([late, early])[0]) == ["a.pt", "b.pt"]


def test_the_file_s_time_is_the_last_resort_with_a_warning(entry) -> None:
    ordered, warnings = order_entries([entry("b.pt", modified=1), entry("a.pt", modified=2)])
    assert _names(ordered) == ["b.pt", "a.pt"]
    assert warnings == ["no number tells all checkpoints apart; the files' own times decide"]


def test_numbers_alone_may_decide(entry) -> None:
    epochs = [entry("m_epoch_10.pt", modified=1), entry("m_epoch_2.pt", modified=2)]
    assert _names(order_by_numbers(epochs) or ()) == ["m_epoch_2.pt", "m_epoch_10.pt"]
    assert order_by_numbers([entry("a.pt", modified=1), entry("b.pt", modified=2)]) is None
    assert order_by_numbers([entry("a.pt", saved_at=1.0), entry("b.pt", saved_at=2.0)]) is None
    assert order_by_numbers([entry("m_1.pt"), entry("m_2.pt", fault=damaged("short"))]) is None


def test_an_epoch_that_all_share_leaves_it_to_the_step_in_the_name(entry) -> None:
    entries = [entry(f"m_step_{step}.pt", inside=(0, None)) for step in (500, 2500, 10_000)]
    assert _names(order_entries(entries[::-1])[0]) == _names(entries)


def test_a_step_that_begins_anew_each_epoch(entry) -> None:
    entries = [entry("a.pt", inside=(1, 900), modified=1), entry("b.pt", inside=(2, 100), modified=2)]
    ordered, warnings = order_entries(entries)
    assert _names(ordered) == ["a.pt", "b.pt"]
    assert warnings == ["epochs and steps disagree about the order; epochs decide"]


def test_an_epoch_that_begins_anew_while_steps_go_on(entry) -> None:
    entries = [entry("a.pt", inside=(9, 100)), entry("b.pt", inside=(0, 200), modified=DAY)]
    ordered, warnings = order_entries(entries)
    assert _names(ordered) == ["a.pt", "b.pt"]
    assert warnings == ["epochs and steps disagree about the order; steps decide"]


def test_a_restarted_run_is_a_warning(entry) -> None:
    entries = [entry("m_epoch_9.pt", modified=0), entry("m_epoch_1.pt", modified=DAY)]
    ordered, warnings = order_entries(entries)
    assert _names(ordered) == ["m_epoch_1.pt", "m_epoch_9.pt"]
    assert warnings == ["m_epoch_9.pt comes last, but m_epoch_1.pt was written later; was the run restarted?"]


def test_an_unsound_one_does_not_spoil_the_order(entry) -> None:
    broken = entry("m_epoch_3.pt", inside=(None, None), fault=damaged("cut"), is_complete=False)
    entries = [entry("m_epoch_2.pt"), broken, entry("m_epoch_10.pt")]
    assert _names(order_entries(entries)[0]) == ["m_epoch_2.pt", "m_epoch_3.pt", "m_epoch_10.pt"]


def test_series_are_told_apart(entry) -> None:
    entries = [
        entry("a_epoch_1.pt"),
        entry("a_epoch_2.pt", signature="other"),
        entry("b_epoch_1.pt"),
        entry("b_epoch_2.pt"),
        entry("b_epoch_3.pt", fault=damaged("cut"), signature=None),
    ]
    assert {one.key: _names(one.entries) for one in group(entries)} == {
        "run/a_epoch_*.pt (kind 2)": ["a_epoch_2.pt"],
        "run/a_epoch_*.pt (kind 1)": ["a_epoch_1.pt"],
        "run/b_epoch_*.pt": ["b_epoch_1.pt", "b_epoch_2.pt", "b_epoch_3.pt"],
    }


def test_the_newest_of_several_series_comes_first(entry) -> None:
    entries = [entry("a_epoch_1.pt"), entry("a_epoch_9.pt"), entry("b_epoch_5.pt")]
    assert _names(newest_first(group(entries))) == ["a_epoch_9.pt", "b_epoch_5.pt", "a_epoch_1.pt"]


# newest_in ------------------------------------------------------------------------------------------


def test_a_file_stands_for_itself_at_once(series: Path) -> None:
    path = str(series / "model_epoch_3.pth")
    newest_in(path)
    before = time.process_time()
    for _ in range(100):
        chosen = newest_in(path)
    assert time.process_time() - before < 0.1
    assert (chosen.path, chosen.others) == (path, 0)


def test_a_directory_stands_for_its_newest(series: Path) -> None:
    chosen = newest_in(str(series))
    assert (os.path.basename(chosen.path), chosen.others) == ("model_epoch_10.pth", 9)


def test_a_directory_that_is_a_checkpoint_stands_for_itself(trainer: Path) -> None:
    path = str(trainer / "checkpoint-4")
    assert newest_in(path).path == path
    assert newest_in(str(trainer)).path == str(trainer / "checkpoint-10")


def test_what_lies_deeper_counts_where_nothing_is_above(series: Path) -> None:
    shutil.copytree(series, series.parent / "outer" / "inner")
    assert newest_in(str(series.parent / "outer")).path.endswith("inner/model_epoch_10.pth")


def test_a_damaged_one_stands_back(series: Path) -> None:
    (series / "model_epoch_10.pth").write_bytes(b"PK\3\4 and no more")
    assert newest_in(str(series)).path.endswith("model_epoch_9.pth")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        newest_in(str(tmp_path))
    with pytest.raises(NotFound):
        newest_in(str(tmp_path / "missing"))


def test_numpy_is_not_needed(series: Path) -> None:
    import subprocess

    code = "import sys; from ckpttool.runs.surveying.newest import newest_in; newest_in(sys.argv[1]); "
    code += "assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(series)], check=True)


# What is doubtful -----------------------------------------------------------------------------------


def test_an_unsound_one_stands_where_its_name_belongs(entry) -> None:
    sound = [entry(f"ckpt_{number}.pth", inside=(number - 1, None)) for number in (1, 2, 4)]
    cut = {"inside": (None, None), "fault": damaged("cut"), "is_complete": False}
    broken = [entry(f"ckpt_{number}.pth", **cut) for number in (0, 3, 5, 6)]
    assert _names(order_entries([*broken[::-1], *sound])[0]) == [f"ckpt_{number}.pth" for number in range(7)]


def test_an_unsound_one_that_no_name_places_is_newest(entry) -> None:
    broken = entry("a.pth", fault=damaged("cut"))
    assert _names(order_entries([broken, entry("b.pth", inside=(7, None), modified=5)])[0]) == [
        "b.pth",
        "a.pth",
    ]


@pytest.mark.parametrize("apart", [0, 10 * 10**9])
def test_times_that_are_too_close_swap_nothing(entry, apart: int) -> None:
    counters = [(1, 500), (2, 100), (2, 300)]
    entries = [
        entry(f"{epoch}-{step}.pt", inside=(epoch, step), modified=apart * step // 100)
        for epoch, step in counters
    ]
    ordered, _ = order_entries(entries)
    assert ordered[-1].inside == (2, 300)
    assert [(one.inside, count) for one, count in newest_otherwise(ordered)] == [((1, 500), "step")]


def test_nothing_is_newest_twice(entry) -> None:
    entries = [entry(f"{step}.pt", inside=(step, step)) for step in (1, 2)]
    assert not list(newest_otherwise(entries))
    assert written_last(entries) == []


def _begun_again(entry, apart: int, kind: str = "epoch") -> list[Entry]:
    """Return saves 1 to 20, in which an epoch, or a step, begins again after the 14th."""
    counted = [(number, number if number < 15 else number - 14) for number in range(1, 21)]
    return [
        entry(
            f"m_{kind}_{number}.pt",
            inside=(at, None) if kind == "epoch" else (None, at),
            modified=number * apart,
        )
        for number, at in counted
    ]


@pytest.mark.parametrize("kind", ["epoch", "step"])
@pytest.mark.parametrize("apart", [0, 5 * 10**8, HOUR])
def test_names_that_go_on_while_what_is_inside_begins_again(entry, kind: str, apart: int) -> None:
    saves = _begun_again(entry, apart, kind)
    ordered, warnings = order_entries(saves[::-1])
    assert _names(ordered) == [f"m_{kind}_{number}.pt" for number in range(1, 21)]
    assert warnings == ["the names and what is inside disagree about the order; the names decide"]
    others = [(one.name, count) for one, count in newest_otherwise(ordered)]
    assert others == [(f"m_{kind}_14.pt", "what is inside")]
    for left in ([saves[13], *saves[18:]], [saves[13], saves[19]]):  # of which none repeats another
        assert order_entries(left[::-1])[0] == tuple(left)


@pytest.mark.parametrize(
    ("times", "last", "kept"),
    [
        ((0, 0, 0), "m_epoch_2.pt", ("m_epoch_3.pt", "its name")),
        ((1, 2, 3), "m_epoch_3.pt", ("m_epoch_2.pt", "what is inside")),
        ((2, 3, 1), "m_epoch_2.pt", ("m_epoch_3.pt", "its name")),
        ((1, 3, 2), "m_epoch_2.pt", ("m_epoch_3.pt", "its name")),
    ],
)
def test_times_settle_which_of_names_and_what_is_inside_is_right(entry, times, last: str, kept) -> None:
    told = zip((1, 2, 3), (8, 9, 7), times, strict=True)
    saves = [
        entry(f"m_epoch_{at}.pt", inside=(inside, None), modified=when * HOUR) for at, inside, when in told
    ]
    ordered, (warning, *_) = order_entries(saves)
    assert ordered[-1].name == last
    assert warning.startswith("the names and what is inside disagree about the order; ")
    assert [(one.name, count) for one, count in newest_otherwise(ordered)] == [kept]


def test_times_may_bear_out_what_begins_again(entry) -> None:
    """Two epochs of several saves each, numbered by a count of batches that begins again with each epoch."""
    told = [(1, 500), (1, 1000), (2, 499), (2, 999)]
    saves = [
        entry(f"m_iter_{step}.pt", inside=(epoch, None), modified=at * HOUR)
        for at, (epoch, step) in enumerate(told)
    ]
    ordered, _ = order_entries(saves)
    assert _names(ordered) == _names(saves)
    assert ("m_iter_1000.pt", "step") in [(one.name, count) for one, count in newest_otherwise(ordered)]


def test_names_of_other_series_say_nothing_of_order(entry) -> None:
    saves = [entry("a_epoch_9.pt", inside=(5, None)), entry("b_epoch_8.pt", inside=(5, None))]
    saves.append(entry("c_epoch_1.pt", inside=(7, None)))
    assert _names(order_entries(saves)[0])[-1] == "c_epoch_1.pt"
    told = [entry(f"digit{number}.pt", inside=(at, None)) for number, at in ((1, 8), (2, 8), (3, 7))]
    assert _names(order_entries(told)[0]) == ["digit3.pt", "digit1.pt", "digit2.pt"]


def test_what_may_be_the_newest(entry) -> None:
    cut = {"inside": (None, None), "fault": incomplete("cut"), "is_complete": False}
    saves = [entry(f"m_epoch_{epoch}.pt", modified=epoch * HOUR) for epoch in (1, 2, 3)]
    cut_short = entry("m_epoch_4.pt", modified=4 * HOUR, **cut)
    assert _names(may_be_newest([*saves, cut_short])) == ["m_epoch_4.pt"]
    begun_again = entry("m_epoch_1.pt", modified=5 * HOUR)
    assert _names(may_be_newest([begun_again, *saves[1:], cut_short])) == ["m_epoch_4.pt", "m_epoch_1.pt"]
    copied = [replace(one, contents=entry(one.name, modified=-at).contents) for at, one in enumerate(saves)]
    assert _names(may_be_newest(copied)) == ["m_epoch_3.pt"]


def test_what_a_restarted_run_wrote_is_written_last(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pt", modified=DAY * (epoch <= 3) + epoch) for epoch in range(1, 11)]
    assert _names(written_last(entries))[:3] == ["m_epoch_3.pt", "m_epoch_2.pt", "m_epoch_1.pt"]


def _keys(entries) -> dict[str, list[str]]:
    return {one.key: _names(one.entries) for one in group(entries)}


def test_epochs_that_begin_again_on_another_date_are_another_run(entry) -> None:
    first = [f"2026-01-01_model_e{epoch:02d}.pt" for epoch in (1, 2, 3)]
    second = [f"2026-01-02_model_e{epoch:02d}.pt" for epoch in (1, 2)]
    entries = [entry(name) for name in second + first]
    assert _keys(entries) == {
        "run/*_model_e*.pt@2026-01-01": first,
        "run/*_model_e*.pt@2026-01-02": second,
    }


def test_epochs_that_go_on_on_another_date_are_the_same_run(entry) -> None:
    names = [f"2026-01-0{day}_model_e0{epoch}.pt" for day, epoch in ((1, 1), (1, 2), (2, 3), (3, 4))]
    assert _keys([entry(name) for name in names]) == {"run/*_model_e*.pt": names}


@pytest.mark.parametrize(
    ("stem", "values"),
    [
        ("llama_acc{}", (2, 4)),
        ("yolo_iou{}", (0.5, 0.7)),
        ("gan_perceptual_loss_{}", (0.1, 0.2)),
        ("l2_{}", ("1e-4", "1e-3")),
        ("loss_{}w", (0.1, 0.3)),
        ("psnr{}", (4, 6)),
    ],
)
def test_what_looks_like_a_metric_and_tells_runs_apart_is_a_setting(entry, stem: str, values) -> None:
    one, other = ([f"{stem.format(value)}_epoch_{epoch}.pt" for epoch in (1, 2, 3)] for value in values)
    names = {f"run/{stem.format(value)}_epoch_*.pt" for value in values}
    for told in ([*one, *other], [*one, other[0]]):
        entries = keep_run_settings([entry(name) for name in told])
        assert set(_keys(entries)) == names


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
def test_what_may_be_a_setting_is_doubted_without_two_of_an_epoch(entry, form: str, is_doubted: bool) -> None:
    names = [form.format(value, epoch) for value, epoch in ((2, 2), (2, 4), (4, 7), (4, 8))]
    (found,) = group(keep_run_settings([entry(name) for name in names]))
    assert (doubt_of(found) == SETTINGS) == is_doubted
    assert doubt_of(found, [found.entries[0].fields.blank]) is None


@pytest.mark.parametrize(
    "told", [{1: (0.5,), 2: (0.6,), 3: (0.6,), 4: (0.6,)}, {1: (0.5, 0.51), 2: (0.6, 0.62), 3: (0.6,)}]
)
def test_what_was_measured_is_no_setting(entry, told) -> None:
    names = [f"m_epoch_{epoch}_acc_{value}.pt" for epoch, values in told.items() for value in values]
    entries = keep_run_settings([entry(name) for name in names])
    assert list(_keys(entries)) == ["run/m_epoch_*_acc_*.pt"]


@pytest.mark.parametrize(
    "form",
    [
        "Conformer--val_wer={}-epoch={}.ckpt",
        "val_wer_{}_epoch_{}.pt",
        "teacher_val_wer_{}_epoch_{}.pt",
        "BLEU-4={}-epoch={}.pt",
        "acc{}_epoch_{}.pt",
    ],
)
def test_equal_measurements_before_the_epoch_part_no_series(entry, form: str) -> None:
    names = [form.format(value, epoch) for epoch, value in enumerate(("0.05", "0.05", "0.04"), 1)]
    (found,) = group(keep_run_settings([entry(name) for name in names]))
    assert _names(found.entries) == names


@pytest.mark.parametrize(
    ("directories", "names"),
    [
        (("run/step_100", "run/step_20"), ["run/step_20", "run/step_100"]),
        (("run/iter_0000100/mp", "run/iter_0000020/mp"), ["run/iter_0000020/mp", "run/iter_0000100/mp"]),
        (("run/fold_2", "run/fold_1"), None),
        (("run/model_2", "run/model_1"), None),
        (("a/step_2", "b/step_1"), None),
        (("run/step_2", "run/deep/step_1"), None),
        (("run/step_2", "run/epoch_1"), None),
    ],
)
def test_directories_may_order_what_has_one_name(entry, directories, names) -> None:
    saves = [
        replace(
            entry("model.pt"), unit=Unit(f"{place}/model.pt", ("model.pt",), None), path=f"{place}/model.pt"
        )
        for place in directories
    ]
    (one,) = group(saves, by="none")
    assert (doubt_of(one) is None) == (names is not None)
    if names is not None:
        assert [one.directory for one in one.entries] == names
        assert one.entries[-1].step == 100
    assert all(len(group(saves, by)) == 2 for by in (None, "prefix", "format", "parent"))


def test_a_name_in_each_of_several_directories_is_a_series_if_somebody_says_so(entry) -> None:
    """Of those beside each other: what lies in another directory may be another trial's."""
    places = [f"run/trial_{trial}/{number}" for trial in (1, 2) for number in (100, 20)]
    saves = [
        replace(entry("m.pt"), unit=Unit(f"{place}/m.pt", ("m.pt",), None), path=f"{place}/m.pt")
        for place in places
    ]
    for glob in ("m.pt", "*/*/m.pt", "trial_*/*/m.pt"):
        found = group(apply_series_globs(saves, Globs([glob], "run")))
        assert [one.key for one in found] == ["run/trial_1/*/m.pt", "run/trial_2/*/m.pt"]
        assert [os.path.basename(two.directory) for one in found for two in one.entries] == ["20", "100"] * 2
        assert [doubt_of(one, ("m.pt",)) for one in found] == [None, None]
    assert len(group(apply_series_globs(saves, Globs(["m*.pt"], "run")))) == 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_settings_only_ever_part_series(entry, data: st.DataObject) -> None:
    numbers = st.sampled_from(["1", "2", "0.5", "1e-4", "nan", "-3"])
    words = st.sampled_from(["acc", "epoch_", "_loss", "-", "*", "l2_", "step", "best_", "20260101", " "])
    parts = data.draw(st.lists(words, min_size=1, max_size=4))
    drawn = data.draw(st.lists(st.tuples(*([numbers] * len(parts))), min_size=1, max_size=8, unique=True))
    names = ["".join(word + number for word, number in zip(parts, one, strict=True)) + ".pt" for one in drawn]
    plain = [entry(name) for name in dict.fromkeys(names)]
    parted = keep_run_settings(plain)
    assert [one.name for one in parted] == [one.name for one in plain]
    homes: dict[str, set[str]] = {}
    for one, other in zip(plain, parted, strict=True):
        assert other == replace(one, fields=replace(one.fields, blank=other.fields.blank))
        homes.setdefault(other.fields.blank, set()).add(one.fields.blank)
    assert all(len(blanks) == 1 for blanks in homes.values())


def test_what_somebody_calls_a_series_has_no_settings(entry) -> None:
    names = [f"llama_acc{value}_epoch_{epoch}.pt" for value in (2, 4) for epoch in (1, 2)]
    entries = apply_series_globs([entry(name) for name in names], Globs(["llama_acc*_epoch_*.pt"], "run"))
    assert list(_keys(entries)) == ["run/llama_acc*_epoch_*.pt"]


def test_two_numbers_that_grow_together_are_epoch_and_step(entry) -> None:
    names = [f"checkpoint_{epoch}_{epoch * 100}.pt" for epoch in range(1, 12)]
    (one,) = group([entry(name) for name in names])
    assert (one.key, _names(one.entries)) == ("run/checkpoint_*_*.pt", names)
    assert (one.entries[-1].epoch, one.entries[-1].step) == (11, 1100)


def test_two_numbers_that_do_not_are_two_series(entry) -> None:
    names = [f"checkpoint_{fold}_{epoch}.pt" for fold in (1, 2) for epoch in (10, 20)]
    assert set(_keys([entry(name) for name in names])) == {"run/checkpoint_1_*.pt", "run/checkpoint_2_*.pt"}
