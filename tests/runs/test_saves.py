"""What one run wrote for one step is one save: it is complete or not, and stays or goes whole."""

from __future__ import annotations

import json
import os
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ckpttool import Granularity, Policy, UsageError, latest, list_checkpoints, prune
from ckpttool.runs.members.saves import series_of_saves
from tests.support.directories import Entry, damaged
from tests.support.retention import dry_run, plan_of, series_of

DAY = 86_400 * 10**9
WEIGHTS: dict[str, Any] = {"has_weights": True, "granularity": Granularity.PARTIAL}
STATE: dict[str, Any] = {"granularity": Granularity.PARTIAL}

PAIRS = [
    ("model_epoch_{}.pt", "optim_epoch_{}.pt"),
    ("net_{}.pth", "net_{}.opt.pth"),
    ("model-step={}.safetensors", "model-step={}.optim.pt"),
    ("epoch_{}.pdparams", "epoch_{}.pdopt"),
    ("iter_{}_weights.pth", "iter_{}_optimizer.pth"),
    ("checkpoint_{}.pt", "scheduler_{}.pt"),
    ("exp/model/epoch_{}.pt", "exp/optimizer/epoch_{}.pt"),
    ("exp/models/net_g_{}.pth", "exp/training_states/{}.state"),
    ("weights/step_{}.pt", "states/step_{}.pt"),
    ("unet_step_{}.pt", "whatever_step_{}.pt"),
]
"""Weights, and what holds the state of their optimizer."""

SIBLINGS = [
    ("G_{}.pth", "D_{}.pth"),
    ("{}_net_G.pth", "{}_net_D.pth"),
    ("netG_epoch_{}.pth", "netD_epoch_{}.pth"),
    ("generator_epoch_{}.pt", "discriminator_epoch_{}.pt"),
    ("encoder-{}.ckpt", "decoder-{}.ckpt"),
    ("actor_step_{}.pt", "critic_step_{}.pt"),
    ("G/step_{}.pth", "D/step_{}.pth"),
    ("netG/epoch_{}.pth", "netD/epoch_{}.pth"),
    ("step_{}_rank0.pt", "step_{}_rank1.pt"),
    ("rank_0/step_{}.pt", "rank_1/step_{}.pt"),
    ("step_{}_mp_rank_00.pt", "step_{}_mp_rank_01.pt"),
    ("step_{}_tp0.pt", "step_{}_tp1.pt"),
    ("vae_epoch_{}.pt", "unet_epoch_{}.pt"),
    ("model/epoch_{}.pt", "optimizer/epoch_{}.pt"),
    ("{}.pdparams", "{}.pdema"),
]
"""Parts that hold weights, all of them."""


def _entries(
    entry: Any, names: tuple[str, ...], told: tuple[dict[str, Any], ...], count: int = 5
) -> list[Entry]:
    """Return saves a day apart, whose parts were written seconds apart."""
    return [
        entry(
            os.path.basename(name.format(number)),
            directory=os.path.join("run", os.path.dirname(name)).rstrip("/"),
            signature=name,
            modified=number * DAY + place * 10**9,
            **known,
        )
        for number, (place, (name, known)) in product(
            range(1, count + 1), enumerate(zip(names, told, strict=True))
        )
    ]


def _whole_saves(left: set[str], names: tuple[str, ...], count: int = 5) -> list[int]:
    wanted = {
        number: {os.path.join("run", name.format(number)) for name in names} for number in range(1, count + 1)
    }
    return [number for number, paths in wanted.items() if paths <= left]


def _left(entries: list[Entry], policy: Policy, **protections: Any) -> set[str]:
    planned = plan_of(entries, policy, **protections)
    assert [group.skipped for group in planned.groups] == [None] * len(planned.groups)
    return {entry.path for entry in entries} - {entry.path for entry in planned.removals}


CASES = [
    *((names, (WEIGHTS, STATE)) for names in PAIRS),
    *((names, (WEIGHTS, WEIGHTS)) for names in SIBLINGS),
]


@pytest.mark.parametrize(("names", "told"), CASES, ids=lambda one: str(one[0])[:30])
def test_so_many_complete_saves_stay_whatever_is_wrong_with_the_newest(entry, names, told) -> None:
    whole = _entries(entry, names, told)
    for count in (1, 2):
        left = _left(whole, Policy(keep_last=count))
        assert left == {
            os.path.join("run", name.format(number)) for name in names for number in range(6 - count, 6)
        }
        for broken in names:
            path = os.path.join("run", broken.format(5))
            missing = [one for one in whole if one.path != path]
            cut = [entry_with(one, fault=damaged("cut")) if one.path == path else one for one in whole]
            for entries in (missing, cut):
                left = _left(entries, Policy(keep_last=count))
                assert _whole_saves(left, names, 4) == list(range(5 - count, 5))
                assert {one.path for one in entries if "5" in one.name} <= left  # it may be being written
            left = _left(whole, Policy(keep_last=count), faults={path: "damaged"})
            assert _whole_saves(left, names, 4) == list(range(5 - count, 5))


def entry_with(one: Entry, **known: Any) -> Entry:
    from dataclasses import replace

    return replace(one, **known)


@pytest.mark.parametrize("place", range(1, 6))
@pytest.mark.parametrize("missing", [0, 1])
def test_what_belongs_to_an_incomplete_save_goes_as_one(entry, place: int, missing: int) -> None:
    names = PAIRS[0]
    path = os.path.join("run", names[missing].format(place))
    entries = [one for one in _entries(entry, names, (WEIGHTS, STATE)) if one.path != path]
    for policy in (
        Policy(keep_last=1),
        Policy(keep_last=2, incomplete="remove"),
        Policy(keep_every_epochs=2),
    ):
        left = _left(entries, policy)
        halves = {number for number in range(1, 6) if number != place} - set(_whole_saves(left, names))
        assert not any(
            os.path.join("run", name.format(number)) in left for name in names for number in halves
        )


def test_a_part_that_only_some_saves_have_stays_with_these(entry) -> None:
    entries = _entries(entry, PAIRS[0], (WEIGHTS, STATE), 9)
    entries += [
        entry(f"ema_epoch_{number}.safetensors", modified=number * DAY + 5, **WEIGHTS) for number in (3, 6)
    ]
    (saves,) = series_of_saves(series_of(entries))
    assert [(save.fields.epoch, len(save.parts), save.fault) for save in saves.entries] == [
        (epoch, 3 if epoch in (3, 6) else 2, None) for epoch in range(1, 10)
    ]
    left = _left(entries, Policy(keep_last=1, keep_names=("ema_epoch_3*",)))
    assert sorted(left) == sorted(
        f"run/{name}"
        for name in [
            "model_epoch_3.pt",
            "optim_epoch_3.pt",
            "ema_epoch_3.safetensors",
            "model_epoch_9.pt",
            "optim_epoch_9.pt",
        ]
    )


def test_what_protects_one_part_protects_all(entry) -> None:
    entries = _entries(entry, SIBLINGS[0], (WEIGHTS, WEIGHTS))
    planned = plan_of(entries, Policy(keep_last=1), reasons={"run/D_2.pth": ["named in best.txt"]})
    told = {kept.entry.name: kept.reasons for group in planned.groups for kept in group.keep}
    assert told == {
        "G_5.pth": ("newest", "last 1"),
        "D_5.pth": ("newest", "last 1"),
        "D_2.pth": ("named in best.txt",),
        "G_2.pth": ("belongs with D_2.pth",),
    }


def test_a_metric_of_one_part_is_that_of_the_save(entry) -> None:
    entries = _entries(entry, PAIRS[0], (WEIGHTS, STATE), 4)
    values = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3}
    entries = [
        entry_with(one, metrics={"val_loss": values[int(one.fields.epoch or 0)]}) if one.has_weights else one
        for one in entries
    ]
    left = _left(entries, Policy(keep_best=1, metric="val_loss", mode="min"))
    assert _whole_saves(left, PAIRS[0], 4) == [2, 4]
    assert len(left) == 4


@pytest.mark.parametrize(
    "names",
    [
        ("resnet_epoch_{}.pt", "vgg_epoch_{}.pt"),
        ("fold1_epoch_{}.pt", "fold2_epoch_{}.pt"),
        ("exp1/epoch_{}.pt", "exp2/epoch_{}.pt"),
        ("seed_0/model_{}.pt", "seed_1/model_{}.pt"),
        ("gpu_0/step_{}.pt", "gpu_1/step_{}.pt"),
    ],
)
def test_runs_beside_each_other_are_strangers(entry, names: tuple[str, str]) -> None:
    """They may be trained at the same time, at a pace of their own."""
    entries = [
        entry_with(one, contents=entry(one.name, modified=one.modified_ns + number * DAY // 7).contents)
        for number, one in enumerate(_entries(entry, names, (WEIGHTS, WEIGHTS)))
    ]
    alone = [one for one in entries if one.path != os.path.join("run", names[1].format(5))]
    assert len(series_of_saves(series_of(alone))) == 2
    assert all(one.is_sound for series in series_of(alone) for one in series.entries)


def test_a_stage_that_follows_another_is_none_of_its_parts(entry) -> None:
    """``decoder_1`` is trained after ``encoder_9``: none of the encoder's saves lacks it."""
    first = [entry(f"encoder_epoch_{number}.pt", modified=number * DAY, **WEIGHTS) for number in range(1, 10)]
    later = [
        entry(f"decoder_epoch_{number}.pt", modified=(20 + number) * DAY, **WEIGHTS) for number in range(1, 7)
    ]
    assert all(one.is_sound for series in series_of([*first, *later]) for one in series.entries)


def test_a_conversion_of_all_but_the_newest_is_no_part_that_it_lacks(entry) -> None:
    entries = _entries(entry, ("epoch_{}.pth", "epoch_{}.safetensors"), (WEIGHTS, WEIGHTS))
    assert all(one.is_sound for series in series_of(entries[:-1]) for one in series.entries)


def _line(entry: Any, form: str, numbers: Any, told: dict[str, Any], **known: Any) -> list[Entry]:
    return [entry(form.format(number), modified=number * DAY, **told, **known) for number in numbers]


FULL: dict[str, Any] = {"has_weights": True, "granularity": Granularity.FULL}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ({"model_{}.pt": range(1, 12), "ema_{}.pt": [10]}, (WEIGHTS, WEIGHTS)),
        ({"model_{}.pt": range(1, 12), "ema_{}.pt": range(2, 12, 2)}, (WEIGHTS, WEIGHTS)),
        ({"model_{}.pt": range(1, 11), "best_epoch_{}.pt": [8, 9]}, (WEIGHTS, WEIGHTS)),
        ({"adam_epoch_{}.pt": range(1, 7), "sgd_epoch_{}.pt": range(1, 11)}, (WEIGHTS, WEIGHTS)),
        ({"model_{}.pt": range(1, 11), "optim_{}.pt": [5, 9, 10]}, (WEIGHTS, STATE)),
        ({"model_{}.pt": range(1, 10), "optim_{}.pt": range(2, 10, 2)}, (WEIGHTS, STATE)),
        ({"model_{}.pt": range(1, 7), "weights_{}.safetensors": range(1, 6)}, (FULL, WEIGHTS)),
        ({"model_epoch_{}.pt": range(1, 7), "samples_epoch_{}.pt": range(1, 6)}, (FULL, STATE)),
        ({"model_{}.pt": range(1, 6), "ema_{}.pt": range(1, 5)}, (FULL, WEIGHTS)),
        ({"step_{}_rank0.pt": range(1, 9), "step_{}_rank1.pt": range(1, 6)}, (FULL, FULL)),
    ],
)
def test_a_save_lacks_nothing_that_others_have_by_chance(entry, lines, told) -> None:
    """Averages now and then, optimizers that were deleted, other runs in step, exports, fewer ranks."""
    entries = [
        one
        for (form, numbers), known in zip(lines.items(), told, strict=True)
        for one in _line(entry, form, numbers, known, signature=form)
    ]
    assert all(one.is_sound for series in series_of(entries) for one in series.entries)


@pytest.mark.parametrize(("names", "told"), [CASES[0], CASES[10], CASES[18]])
def test_a_copy_without_times_keeps_saves_together(entry, names, told) -> None:
    """It writes one name after the other, some seconds a file."""
    entries = [
        entry_with(one, contents=entry(one.name, modified=number * 40 * 10**9).contents)
        for number, one in enumerate(sorted(_entries(entry, names, told), key=lambda one: one.name))
    ]
    (saves,) = series_of_saves(series_of(entries))
    assert {len(save.parts) for save in saves.entries} == {2}


def test_the_times_in_names_of_one_save_may_differ(entry) -> None:
    entries = [
        entry(f"{word}_2024-01-0{number}_12-00-0{place}_epoch{number}.pt", signature=word, **told)
        for number in range(1, 5)
        for place, (word, told) in enumerate({"model": WEIGHTS, "optim": STATE}.items())
    ]
    (saves,) = series_of_saves(series_of(entries))
    assert {len(save.parts) for save in saves.entries} == {2}


def test_a_conversion_that_is_damaged_spoils_nothing(entry) -> None:
    entries = _entries(entry, ("epoch_{}.pth", "epoch_{}.safetensors"), (FULL, WEIGHTS))
    entries[-1] = entry_with(entries[-1], fault=damaged("cut"))
    (saves,) = series_of_saves(series_of(entries))
    assert all(save.is_sound for save in saves.entries)


def test_a_part_elsewhere_keeps_its_save(entry) -> None:
    """An optimizer that was moved away left a symlink, which no rule removes."""
    entries = _entries(entry, PAIRS[0], (WEIGHTS, STATE), 3)
    links = {one.path: ["is a symlink"] for one in entries if one.name.startswith("optim")}
    assert _left(entries, Policy(keep_last=1), reasons=links) == {one.path for one in entries}


# Whole commands -------------------------------------------------------------------------------------


@pytest.fixture
def gan(tmp_path: Path) -> Path:
    """A generator and a discriminator, of whose newest save the discriminator was cut short."""
    import torch

    for number in range(1, 6):
        for place, name in enumerate(("G", "D")):
            path = tmp_path / f"net{name}_epoch_{number}.pth"
            torch.save(torch.nn.Linear(3, 4).state_dict(), path)
            os.utime(path, (1_700_000_000 + number * 86_400 + place,) * 2)
    os.truncate(tmp_path / "netD_epoch_5.pth", 700)
    return tmp_path


def test_the_latest_is_of_a_complete_save(gan: Path) -> None:
    found = latest(gan)
    assert found.path == str(gan / "netG_epoch_4.pth")
    told = {Path(problem.path).name: problem.message for problem in found.passed_over}
    assert "netD_epoch_5.pth of its save is" in told["netG_epoch_5.pth"]
    (gan / "netD_epoch_5.pth").unlink()
    found = latest(gan)
    assert found.path == str(gan / "netG_epoch_4.pth")
    assert "its save lacks" in next(problem.message for problem in found.passed_over)


def test_a_part_that_only_reading_finds_damaged_spoils_its_save(gan: Path) -> None:
    (gan / "netG_epoch_5.pth").unlink()
    (gan / "netD_epoch_5.pth").unlink()
    data = bytearray((gan / "netD_epoch_4.pth").read_bytes())
    at = data.index(b"data/0") + 80
    data[at : at + 40] = bytes(byte ^ 0x41 for byte in data[at : at + 40])
    (gan / "netD_epoch_4.pth").write_bytes(data)
    os.utime(gan / "netD_epoch_4.pth", (1_700_000_000 + 4 * 86_400 + 1,) * 2)
    assert latest(gan).path == str(gan / "netG_epoch_3.pth")
    planned = dry_run(gan, policy=Policy(keep_last=1))
    assert {entry.name for entry in planned.plan.removals} == {
        f"net{name}_epoch_{number}.pth" for name in "GD" for number in (1, 2)
    }


def test_pruning_again_and_again_keeps_the_last_complete_save(gan: Path) -> None:
    for _ in range(2):
        prune(gan, keep_last=1)
        assert {path.name for path in gan.glob("*.pth")} == {
            f"net{name}_epoch_{number}.pth" for name in "GD" for number in (4, 5)
        }


def test_an_incomplete_save_is_listed_as_one(gan: Path) -> None:
    (gan / "netD_epoch_5.pth").unlink()
    states = {Path(row.entry.path).name: row.state for row in list_checkpoints(gan).checkpoints}
    assert states["netG_epoch_5.pth"] == "incomplete"
    assert states["netG_epoch_4.pth"] == "readable"


# Several runs ---------------------------------------------------------------------------------------


def _run(directory: Path, epochs: range, begun: int, apart: int = 3600) -> None:
    import torch

    directory.mkdir(parents=True)
    for number in epochs:
        path = directory / f"epoch_{number}.pth"
        torch.save({"epoch": number, "state_dict": torch.nn.Linear(2, 2).state_dict()}, path)
        os.utime(path, (begun + number * apart,) * 2)


def test_between_runs_the_time_decides(tmp_path: Path) -> None:
    _run(tmp_path / "exp1", range(8, 11), 1_700_000_000)
    _run(tmp_path / "exp2", range(1, 4), 1_700_100_000)
    assert latest(tmp_path).path == str(tmp_path / "exp2" / "epoch_3.pth")


def test_where_nothing_says_which_run_is_newer_it_is_asked(tmp_path: Path) -> None:
    _run(tmp_path / "exp1", range(8, 11), 1_700_000_000, apart=1)
    _run(tmp_path / "exp2", range(1, 4), 1_700_000_020, apart=1)
    with pytest.raises(UsageError) as raised:
        latest(tmp_path)
    assert "exp1/epoch_10.pth" in str(raised.value)
    assert "exp2/epoch_3.pth" in str(raised.value)
    assert latest(tmp_path / "exp1").path == str(tmp_path / "exp1" / "epoch_10.pth")


def test_arrays_and_stray_shards_are_no_answer_beside_weights(tmp_path: Path) -> None:
    import numpy as np
    import torch
    from safetensors.torch import save_file

    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "model.pth")
    np.save(tmp_path / "preds.npy", np.ones((3, 4)))
    os.utime(tmp_path / "model.pth", (1_700_000_000,) * 2)
    assert latest(tmp_path).path == str(tmp_path / "model.pth")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for number in range(3):
        save_file({f"layers.{number}.weight": torch.ones(3)}, sharded / f"{number}.safetensors")
    shards = {f"layers.{number}.weight": f"{number}.safetensors" for number in range(2)}
    index = {"metadata": {"total_size": 24}, "weight_map": shards}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    os.utime(sharded / "model.safetensors.index.json", (1_700_000_000,) * 2)
    assert latest(sharded).path == str(sharded / "model.safetensors.index.json")


# Random scenes --------------------------------------------------------------------------------------


def test_random_scenes_keep_what_a_model_of_saves_keeps(entry) -> None:
    """Parts are missing and cut short at any place; the model knows sets of numbers and nothing of names."""
    chance = random.Random(45)
    for _ in range(int(os.environ.get("CKPTTOOL_SCENES", "150"))):
        names, told = chance.choice(CASES)
        count, wanted = chance.randint(5, 12), chance.randint(1, 4)
        entries = _entries(entry, names, told, count)
        missing = set(chance.sample(range(len(entries)), chance.randint(0, count // 4)))
        cut = set(chance.sample(range(len(entries)), chance.randint(0, 2))) - missing
        there = [
            entry_with(one, fault=damaged("cut")) if place in cut else one
            for place, one in enumerate(entries)
            if place not in missing
        ]
        numbers = [
            {place // 2 + 1 for place in range(part, 2 * count, 2) if place not in missing} for part in (0, 1)
        ]
        spoilt = {place // 2 + 1 for place in cut}
        saves = sorted(numbers[0] | numbers[1])
        for has in numbers:
            gaps = {number for number in saves if min(has) < number < max(has)} - has
            after = {number for number in saves if number > max(has)}
            if 4 * len(gaps) <= sum(min(has) <= number <= max(has) for number in saves):
                spoilt |= gaps | (after if len(after) < 3 else set())
        whole = [number for number in saves if number not in spoilt]
        stay = {*whole[-wanted:], *spoilt}
        left = _left(there, Policy(keep_last=wanted))
        assert left == {one.path for one in there if _number(one) in stay}, (
            names,
            count,
            wanted,
            missing,
            cut,
        )


def _number(one: Entry) -> object:
    return next(number for number in one.fields.position if number is not None)
