"""Directories of the Hugging Face Trainer: the real ones, and each part missing, damaged or in the way."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from ckpttool import (
    Checkpoint,
    CheckpointError,
    DamagedCheckpoint,
    Granularity,
    NotACheckpoint,
    Role,
    Severity,
    TrainingState,
    open_checkpoint,
    verify,
)
from tests.support.thorough import spread

FILES = Path(__file__).parents[2] / "fixtures" / "files"
REAL = [
    FILES / "safetensors" / "trainer" / "checkpoint-2",
    FILES / "safetensors" / "trainer" / "checkpoint-4",
    FILES / "pytorch" / "trainer-bin" / "checkpoint-1",
]
ERROR, WARNING = Severity.ERROR, Severity.WARNING


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a copy of a real checkpoint."""
    return Path(shutil.copytree(REAL[0], tmp_path / "checkpoint-2"))


def found(opened: Checkpoint) -> list[tuple[str, Severity, str | None]]:
    return [(finding.code, finding.severity, finding.where) for finding in opened.findings]


def is_trainer(path: Path) -> bool:
    try:
        with open_checkpoint(path) as opened:
            return opened.variant == "trainer"
    except NotACheckpoint:
        return False


def training_of(directory: Path, **state: object) -> TrainingState:
    """Return what a directory says of its training, whose state is another and has no arguments."""
    (directory / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    (directory / "training_args.bin").unlink()
    with open_checkpoint(directory) as opened:
        return opened.training


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_reads_what_trainer_wrote(path: Path) -> None:
    expected = json.loads(Path(f"{path}.expected.json").read_text(encoding="utf-8"))
    with open_checkpoint(path) as opened:
        assert (opened.format, opened.variant) == (expected["format"], "trainer")
        assert (opened.findings, opened.safety, opened.complete) == ((), (), True)
        by_path = {tensor.path: tensor for tensor in opened.tensors}
        assert by_path.keys() == {tuple(truth["path"]) for truth in expected["tensors"]}
        for truth in expected["tensors"]:
            tensor = by_path[tuple(truth["path"])]
            assert (tensor.dtype.name, list(tensor.shape)) == (truth["dtype"], truth["shape"])
            assert hashlib.sha256(tensor.tobytes()).hexdigest() == truth["sha256"]
        assert (opened.parameters, opened.granularity) == (expected["parameters"], Granularity.FULL)
        assert {entry.path for entry in opened.files} == {str(file) for file in path.iterdir()}


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_says_where_training_was(path: Path) -> None:
    truth = json.loads(Path(f"{path}.expected.json").read_text(encoding="utf-8"))["training"]
    with open_checkpoint(path) as opened:
        training = opened.training
        for field in ("epoch", "step", "loss", "learning_rate", "metrics"):
            assert getattr(training, field) == truth[field]
        assert training.best == truth["best_metric"]
        assert opened.metadata["trainer_state"]["best_model_checkpoint"] == truth["best_model_checkpoint"]
        assert "log_history" not in opened.metadata["trainer_state"]
        assert training.seed == training.hyper_parameters["seed"] == 42
        assert training.origin["step"] == "trainer_state.json global_step"
        assert training.origin["metrics.eval_loss"] == "trainer_state.json log_history eval_loss"
        assert opened.metadata["scheduler"]["last_epoch"] == truth["step"]
        assert opened.metadata["optimizer"]["param_groups"][0]["initial_lr"] == 0.01
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        assert opened.metadata["config"] == config
        assert opened.producer.framework == "transformers"
        assert opened.producer.version == config["transformers_version"]


def test_gives_each_tensor_its_role() -> None:
    with open_checkpoint(REAL[0]) as opened:
        roles = {tensor.path[0] if len(tensor.path) > 1 else "": tensor.role for tensor in opened.tensors}
    assert roles == {"": Role.WEIGHTS, "optimizer": Role.OPTIMIZER, "rng_state": Role.TRAINING}


PARTS = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_keeps_the_rest_readable_where_a_part_is_damaged(directory: Path, name: str, share: float) -> None:
    with open_checkpoint(directory) as opened:
        whole = {tensor.path for tensor in opened.tensors}
    part = directory / name
    part.write_bytes(part.read_bytes()[: int(part.stat().st_size * share)])
    with open_checkpoint(directory) as opened:
        assert found(opened) == [("part-damaged", ERROR, name)]
        assert not opened.complete
        assert [finding.code for finding in opened.safety] == (
            [] if name == "model.safetensors" else ["not-scanned"]
        )
        key = name.partition(".")[0]
        lost = {path for path in whole if path[0] == key or (key == "model" and len(path) == 1)}
        assert {tensor.path for tensor in opened.tensors} == whole - lost
        assert opened.training.step == 2


def test_says_that_the_weights_are_missing(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with open_checkpoint(directory) as opened:
        assert found(opened) == [("part-missing", ERROR, None)]
        assert not opened.complete


def test_does_not_miss_weights_that_lie_in_a_directory_inside(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (inner := directory / "global_step2").mkdir()
    (inner / "mp_rank_00_model_states.pt").write_bytes(b"x")
    with open_checkpoint(directory) as opened:
        assert found(opened) == [
            ("part-damaged", ERROR, "global_step2: mp_rank_00_model_states.pt"),
            ("part-missing", ERROR, "global_step2"),
        ]
        assert str(inner / "mp_rank_00_model_states.pt") in {entry.path for entry in opened.files}


def test_says_what_it_did_not_look_at(directory: Path) -> None:
    (inner := directory / "somewhere").mkdir()
    (inner / "x.pt").write_bytes(b"x")
    with open_checkpoint(directory) as opened:
        assert found(opened) == [("part-not-checked", WARNING, "somewhere")]


def test_follows_no_link_to_a_directory(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.pt").write_bytes(b"x")
    (directory / "link").symlink_to("../elsewhere")
    (directory / "loop").symlink_to(".")
    with open_checkpoint(directory) as opened:
        assert (opened.findings, len(opened.files)) == ((), len(list(REAL[0].iterdir())))


def test_says_that_the_save_was_interrupted(directory: Path) -> None:
    (directory / "trainer_state.json").unlink()
    with open_checkpoint(directory) as opened:
        assert found(opened) == [("part-missing", ERROR, "trainer_state.json")]
        assert (opened.training.step, opened.training.origin["step"]) == (2, "name checkpoint-2")
        assert not opened.complete


def test_says_that_number_and_step_disagree(directory: Path) -> None:
    moved = directory.rename(directory.with_name("checkpoint-3"))
    with open_checkpoint(moved) as opened:
        assert found(opened) == [("step-disagrees", WARNING, "trainer_state.json")]
        assert (opened.training.step, opened.complete) == (2, True)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{} {}", "state-not-json"),
        ('{"a": 1}\0', "state-not-json"),
        ("[]", "state-not-object"),
        ('{"global_step": 1, "global_step": 2}', "duplicate-key"),
        ("[" * 1000 + "]" * 1000, "state-too-deep"),
        ("", "state-not-json"),
    ],
)
def test_refuses_a_damaged_state(directory: Path, text: str, code: str) -> None:
    (directory / "trainer_state.json").write_text(text, encoding="utf-8")
    with pytest.raises(DamagedCheckpoint) as raised:
        open_checkpoint(directory)
    assert raised.value.code == code


def test_keeps_the_rest_readable_where_the_config_is_damaged(directory: Path) -> None:
    (directory / "config.json").write_text("{", encoding="utf-8")
    with open_checkpoint(directory) as opened:
        assert found(opened) == [("part-damaged", ERROR, "config.json")]
        assert opened.producer.version is None


def test_reads_sharded_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    for file in (FILES / "safetensors" / "sharded").glob("model*"):
        shutil.copy(file, directory)
    assert is_trainer(directory)
    with open_checkpoint(directory) as opened:
        assert (opened.findings, opened.format) == ((), "safetensors")
        assert sum(len(tensor.path) == 1 for tensor in opened.tensors) > 16
    (directory / "model-00002-of-00004.safetensors").unlink()
    with open_checkpoint(directory) as opened:
        place = "model.safetensors.index.json: model-00002-of-00004.safetensors"
        assert (found(opened), opened.complete) == ([("shard-missing", ERROR, place)], False)


def test_warns_of_a_second_set_of_weights(directory: Path) -> None:
    shutil.copy(REAL[2] / "pytorch_model.bin", directory)
    with open_checkpoint(directory) as opened:
        assert found(opened) == [("weights-twice", WARNING, "pytorch_model.bin")]
        assert (opened.format, opened.parameters) == ("safetensors", 348)
        assert any(span.where.startswith("pytorch_model.bin: ") for span in opened.spans())


def test_checks_every_file_that_a_framework_could_load(directory: Path) -> None:
    shutil.copy(FILES / "hostile" / "call_global.pth", directory / "custom.pt")
    (directory / "tokenizer.bin").write_bytes(b"what nobody knows")
    with open_checkpoint(directory) as opened:
        assert found(opened) == [("part-unrecognised", WARNING, "tokenizer.bin")]
        assert {str(finding.where).partition(":")[0] for finding in opened.safety} == {"custom.pt"}


def test_keeps_parts_with_one_stem_apart(directory: Path) -> None:
    shutil.copy(directory / "optimizer.pt", directory / "optimizer.bin")
    with open_checkpoint(directory) as opened:
        keys = {tensor.path[0] for tensor in opened.tensors if tensor.role is Role.OPTIMIZER}
        assert keys == {"optimizer", "optimizer.pt"}


def test_takes_no_directory_of_checkpoints_for_one(tmp_path: Path) -> None:
    shutil.copytree(REAL[0], tmp_path, dirs_exist_ok=True)
    assert is_trainer(tmp_path)
    (tmp_path / "checkpoint-2").mkdir()
    assert not is_trainer(tmp_path)


def test_takes_no_lonely_state_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}", encoding="utf-8")
    assert not is_trainer(tmp_path)


def test_takes_the_last_value_of_each_kind(directory: Path) -> None:
    history = [
        {"step": 1, "loss": 3.0, "learning_rate": 0.1},
        {"step": 1, "eval_a_loss": 2.0, "eval_runtime": 1.0, "eval_a_samples_per_second": 5.0},
        {"step": 2, "loss": float("nan")},
        {"step": 2, "eval_a_loss": 1.5, "eval_accuracy": True},
        "no entry",
    ]
    training = training_of(directory, log_history=history, global_step=True, epoch="1")
    assert training.loss is not None and training.loss != training.loss
    assert (training.learning_rate, training.metrics) == (0.1, {"eval_a_loss": 1.5})
    assert (training.step, training.epoch, training.hyper_parameters) == (2, None, {})


@pytest.mark.parametrize(("step", "metrics"), [(1, {"eval_loss": 2.0}), (2, {"eval_loss": 1.5}), (3, {})])
def test_metrics_are_those_of_its_own_step(directory: Path, step: int, metrics: dict[str, float]) -> None:
    history = [{"step": 1, "eval_loss": 2.0}, {"step": 1, "loss": 0.5}, {"step": 2, "eval_loss": 1.5}]
    moved = directory.rename(directory.with_name(f"checkpoint-{step}"))
    training = training_of(moved, log_history=history, global_step=step, best_metric=1.5)
    assert (training.metrics, training.best, training.loss) == (metrics, 1.5, 0.5)
    is_told = training.origin["loss"].endswith("of an earlier step")
    assert is_told == (step != 1)


def test_survives_every_truncation_of_the_state(directory: Path) -> None:
    state = directory / "trainer_state.json"
    whole = state.read_bytes()
    for size in spread(range(0, len(whole), 7), 25):
        state.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(directory)


def test_safety_is_not_passed_where_a_part_could_not_be_searched(directory: Path) -> None:
    (directory / "optimizer.pt").write_bytes((directory / "optimizer.pt").read_bytes()[:100])
    safety = next(check for check in verify(directory).checks if check.name == "safety")
    assert (safety.status.value, safety.detail) == ("skipped", "1 part could not be searched")
