"""What one run wrote for one step is one save: it is complete or not, and stays or goes whole."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpttool import Policy, UsageError, latest, list_checkpoints, prune
from tests.support.retention import dry_run, kept_reasons
from tests.support.runs import flip_value
from tests.support.saves import DAY, START, Facts, save

WEIGHTS: Facts = {}
STATE: Facts = {"weights": None, "state": True}

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


CASES = [
    *((names, (WEIGHTS, STATE)) for names in PAIRS),
    *((names, (WEIGHTS, WEIGHTS)) for names in SIBLINGS),
]


def _write(run: Path, names: Sequence[str], told: Sequence[Facts], count: int = 5) -> list[Path]:
    """Save a day apart, with the parts of a save seconds apart; return their paths, save by save.

    A number whose name doesn't say that it counts saves is inside, too.
    """
    inside = not any(re.search("epoch|step|iter", name) for name in names)
    return [
        save(
            run / name.format(number),
            **{
                "weights": name,
                "modified": number * DAY + place,
                **({"epoch": number} if inside else {}),
                **known,
            },
        )
        for number in range(1, count + 1)
        for place, (name, known) in enumerate(zip(names, told, strict=True))
    ]


def _write_lines(run: Path, lines: Mapping[str, Iterable[int]], told: Sequence[Facts]) -> None:
    """Save one kind of checkpoint after the other, each of it a day apart."""
    for (form, numbers), known in zip(lines.items(), told, strict=True):
        for number in numbers:
            save(run / form.format(number), **{"weights": form, "modified": number * DAY, **known})


def _saves_in(run: Path) -> list[tuple[int, int, str | None]]:
    """Return epoch, number of parts and fault of each save that ``list`` finds."""
    rows = list_checkpoints(run).document()["checkpoints"]
    return [(row["epoch"], len(row.get("parts", "1")), row["fault"]) for row in rows]


def _left(run: Path, policy: Policy, depth: str = "quick") -> set[str]:
    """Return the names of what a policy leaves."""
    groups = dry_run(run, policy=policy, depth=depth, recursive=True).document()["groups"]
    assert {group["skipped"] for group in groups} == {None}
    removed = {one["path"] for group in groups for one in group["remove"]}
    files = [path for path in run.rglob("*") if path.suffix != ".txt" and path.is_file()]
    return {str(path.relative_to(run)) for path in files if str(path) not in removed}


def _names(names: Sequence[str], numbers: Iterable[int]) -> set[str]:
    return {name.format(number) for name in names for number in numbers}


def _whole_saves(left: set[str], names: Sequence[str], count: int = 5) -> list[int]:
    return [number for number in range(1, count + 1) if _names(names, [number]) <= left]


@contextmanager
def _spoilt(path: Path, how: str) -> Iterator[None]:
    """Have a file missing, cut short, or with a wrong value for a while."""
    data, times = path.read_bytes(), path.stat()
    if how == "missing":
        path.unlink()
    elif how == "cut":
        os.truncate(path, len(data) - 300)
    else:
        flip_value(path)
    if path.exists():
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    yield
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(("names", "told"), CASES, ids=lambda one: str(one[0])[:30])
def test_so_many_complete_saves_stay_whatever_is_wrong_with_the_newest(tmp_path: Path, names, told) -> None:
    _write(tmp_path, names, told)
    for count in (1, 2):
        assert _left(tmp_path, Policy(keep_last=count)) == _names(names, range(6 - count, 6))
        for broken in names if count == 2 else names[:1]:
            path = tmp_path / broken.format(5)
            for how in ("missing", "cut", "flipped") if count == 2 else ("missing",):
                with _spoilt(path, how):
                    left = _left(tmp_path, Policy(keep_last=count), "full" if how == "flipped" else "quick")
                    newest = {name for name in _names(names, [5]) if (tmp_path / name).exists()}
                assert _whole_saves(left, names, 4) == list(range(5 - count, 5))
                assert newest <= left  # it may be being written


@pytest.mark.parametrize("place", range(1, 6))
@pytest.mark.parametrize("missing", [0, 1])
def test_what_belongs_to_an_incomplete_save_goes_as_one(tmp_path: Path, place: int, missing: int) -> None:
    names = PAIRS[0]
    _write(tmp_path, names, (WEIGHTS, STATE))
    (tmp_path / names[missing].format(place)).unlink()
    for policy in (
        Policy(keep_last=1),
        Policy(keep_last=2, incomplete="remove"),
        Policy(keep_every_epochs=2),
    ):
        left = _left(tmp_path, policy)
        halves = {number for number in range(1, 6) if number != place} - set(_whole_saves(left, names))
        assert not _names(names, halves) & left


def test_a_part_that_only_some_saves_have_stays_with_these(tmp_path: Path) -> None:
    _write(tmp_path, PAIRS[0], (WEIGHTS, STATE), 9)
    for number in (3, 6):
        save(tmp_path / f"ema_epoch_{number}.safetensors", weights="ema", modified=number * DAY + 5)
    assert _saves_in(tmp_path) == [(epoch, 3 if epoch in (3, 6) else 2, None) for epoch in range(1, 10)]
    left = _left(tmp_path, Policy(keep_last=1, keep_names=("ema_epoch_3*",)))
    assert left == {*_names(PAIRS[0], (3, 9)), "ema_epoch_3.safetensors"}


def test_what_protects_one_part_protects_all(tmp_path: Path) -> None:
    _write(tmp_path, SIBLINGS[0], (WEIGHTS, WEIGHTS))
    (tmp_path / "best.txt").write_text("D_2.pth")
    assert kept_reasons(dry_run(tmp_path, policy=Policy(keep_last=1))) == {
        "G_5.pth": ("newest", "last 1"),
        "D_5.pth": ("newest", "last 1"),
        "D_2.pth": ("best.txt",),
        "G_2.pth": ("belongs with D_2.pth",),
    }


def _slimming(run: Path, full: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return what of each series would be slimmed, and why the rest stays whole, by the end of its key."""
    groups = dry_run(run, policy=Policy(full=full), depth="quick").document()["groups"]
    return {
        os.path.basename(group["key"]): (
            [os.path.basename(one["path"]) for one in group["slim"]],
            {os.path.basename(one["path"]): one["reason"] for one in group["whole"]},
        )
        for group in groups
    }


def test_of_a_save_only_the_parts_with_a_state_are_slimmed(tmp_path: Path) -> None:
    _write(tmp_path, SIBLINGS[0], ({"state": True}, WEIGHTS), 3)
    assert _slimming(tmp_path, 1) == {"G_*.pth": (["G_2.pth", "G_1.pth"], {}), "D_*.pth": ([], {})}


def test_what_keeps_one_part_whole_keeps_all_whole(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _write(run, SIBLINGS[0], ({"state": True}, {"state": True}), 3)
    os.link(run / "D_2.pth", tmp_path / "another name")
    why = "it has other hard links"
    assert _slimming(run, 1) == {
        "G_*.pth": (["G_1.pth"], {"G_2.pth": why}),
        "D_*.pth": (["D_1.pth"], {"D_2.pth": why}),
    }


def test_a_limit_that_leaves_no_room_for_a_save_says_so_of_each_part(tmp_path: Path) -> None:
    paths = _write(tmp_path, SIBLINGS[0], (WEIGHTS, WEIGHTS), 3)
    limit = sum(path.stat().st_size for path in paths[2:])
    groups = dry_run(tmp_path, policy=Policy(max_size=limit)).document()["groups"]
    gone = {os.path.basename(one["path"]): one["unfitting"] for group in groups for one in group["remove"]}
    assert gone.keys() == {"G_1.pth", "D_1.pth"}
    assert all(why is not None for why in gone.values()) and len(set(gone.values())) == 1


def test_a_metric_of_one_part_is_that_of_the_save(tmp_path: Path) -> None:
    for number, value in enumerate((0.5, 0.1, 0.4, 0.3), 1):
        known: Facts = {"modified": number * DAY}
        save(tmp_path / f"model_epoch_{number}.pt", metrics={"val_loss": value}, **known)
        save(tmp_path / f"optim_epoch_{number}.pt", **STATE, **known)
    left = _left(tmp_path, Policy(keep_best=1, metric="val_loss", mode="min"))
    assert left == _names(PAIRS[0], (2, 4))


# What is no part ------------------------------------------------------------------------------------


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
def test_runs_beside_each_other_are_strangers(tmp_path: Path, names: tuple[str, str]) -> None:
    """They may be trained at the same time, at a pace of their own."""
    for place, path in enumerate(_write(tmp_path, names, (WEIGHTS, WEIGHTS))):
        when = path.stat().st_mtime + place * DAY // 7
        os.utime(path, (when, when))
    (tmp_path / names[1].format(5)).unlink()
    assert [(parts, fault) for _, parts, fault in _saves_in(tmp_path)] == [(1, None)] * 9


FULL: Facts = {"state": True}


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
        # A conversion of all but the newest.
        ({"epoch_{}.pth": range(1, 6), "epoch_{}.safetensors": range(1, 5)}, (WEIGHTS, WEIGHTS)),
    ],
    ids=str,
)
def test_a_save_lacks_nothing_that_others_have_by_chance(tmp_path: Path, lines, told) -> None:
    """Averages now and then, optimizers that were deleted, other runs in step, exports, fewer ranks."""
    _write_lines(tmp_path, lines, told)
    assert {fault for _, _, fault in _saves_in(tmp_path)} == {None}


def test_a_stage_that_follows_another_is_none_of_its_parts(tmp_path: Path) -> None:
    """``decoder_1`` is trained after ``encoder_9``: none of the encoder's saves lacks it."""
    _write_lines(tmp_path, {"encoder_epoch_{}.pt": range(1, 10)}, [WEIGHTS])
    for number in range(1, 7):
        save(tmp_path / f"decoder_epoch_{number}.pt", weights="decoder", modified=(20 + number) * DAY)
    assert {fault for _, _, fault in _saves_in(tmp_path)} == {None}


@pytest.mark.parametrize(("names", "told"), [CASES[0], CASES[10], CASES[18]])
def test_a_copy_without_times_keeps_saves_together(tmp_path: Path, names, told) -> None:
    """It writes one name after the other, some seconds a file."""
    for place, path in enumerate(sorted(_write(tmp_path, names, told), key=lambda path: path.name)):
        os.utime(path, (START + place * 40,) * 2)
    assert [parts for _, parts, _ in _saves_in(tmp_path)] == [2] * 5


def test_the_times_in_names_of_one_save_may_differ(tmp_path: Path) -> None:
    for number in range(1, 5):
        for place, (word, told) in enumerate({"model": WEIGHTS, "optim": STATE}.items()):
            save(tmp_path / f"{word}_2024-01-0{number}_12-00-0{place}_epoch{number}.pt", **told)
    assert [parts for _, parts, _ in _saves_in(tmp_path)] == [2] * 4


def test_a_conversion_that_is_damaged_spoils_nothing(tmp_path: Path) -> None:
    *_, last = _write(tmp_path, ("epoch_{}.pth", "epoch_{}.safetensors"), (FULL, WEIGHTS))
    os.truncate(last, 900)
    assert [(parts, fault) for _, parts, fault in _saves_in(tmp_path)] == [(2, None)] * 5


def test_a_part_elsewhere_keeps_its_save(tmp_path: Path) -> None:
    """An optimizer that was moved away left a symlink, which no rule removes."""
    for path in _write(tmp_path / "run", PAIRS[0], (WEIGHTS, STATE), 3):
        if path.name.startswith("optim"):
            path.rename(tmp_path / path.name)
            path.symlink_to(f"../{path.name}")
    assert _left(tmp_path / "run", Policy(keep_last=1)) == _names(PAIRS[0], (1, 2, 3))


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
    for number in epochs:
        save(directory / f"epoch_{number}.pth", epoch=number, modified=begun + number * apart)


def test_between_runs_the_time_decides(tmp_path: Path) -> None:
    _run(tmp_path / "exp1", range(8, 11), 0)
    _run(tmp_path / "exp2", range(1, 4), 100_000)
    assert latest(tmp_path).path == str(tmp_path / "exp2" / "epoch_3.pth")


def test_where_nothing_says_which_run_is_newer_it_is_asked(tmp_path: Path) -> None:
    _run(tmp_path / "exp1", range(8, 11), 0, apart=1)
    _run(tmp_path / "exp2", range(1, 4), 20, apart=1)
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


def test_random_scenes_keep_what_a_model_of_saves_keeps(tmp_path: Path) -> None:
    """Parts are missing and cut short at any place; the model knows sets of numbers and nothing of names."""
    chance = random.Random(45)
    for scene in range(int(os.environ.get("CKPTTOOL_SCENES", "60"))):
        names, told = chance.choice(CASES)
        count, wanted = chance.randint(5, 12), chance.randint(1, 4)
        run = tmp_path / str(scene)
        paths = _write(run, names, told, count)
        missing = set(chance.sample(range(len(paths)), chance.randint(0, count // 4)))
        cut = set(chance.sample(range(len(paths)), chance.randint(0, 2))) - missing
        for place in missing:
            paths[place].unlink()
        for place in cut:
            times = paths[place].stat()
            os.truncate(paths[place], 900)
            os.utime(paths[place], ns=(times.st_atime_ns, times.st_mtime_ns))
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
        there = {paths[place] for place in {*range(len(paths))} - missing if place // 2 + 1 in stay}
        left = {run / name for name in _left(run, Policy(keep_last=wanted))}
        assert left == there, (names, count, wanted, missing, cut)
