"""Metrics of trackers, and the models that they have under a name: MLflow's in all its stores, and W&B's."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool import (
    CheckpointError,
    DamagedCheckpoint,
    NotFound,
    UsageError,
    list_checkpoints,
    log,
    prune,
    rename,
)
from ckpttool.integrations import mlflow as mlflow_stores
from ckpttool.integrations import wandb as wandb_runs
from ckpttool.runs.listing import Listing
from ckpttool.runs.logs import Log
from ckpttool.runs.pointers import programs
from ckpttool.runs.pruning.prune import Pruned
from tests.support.frameworks import python_with_frameworks
from tests.support.saves import save

pytestmark = pytest.mark.framework

MAKER = Path(__file__).with_name("tracked_runs.py")
QUIET = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "DO_NOT_TRACK": "1"}
LOSSES = {
    f"{name}/step_{step}.pt": rate / step
    for name, rate in (("slow", 0.1), ("fast", 0.5))
    for step in (10, 20, 30)
}


def make(kind: str, directory: Path, *arguments: str, **variables: str) -> Path:
    directory.mkdir(exist_ok=True)
    python_with_frameworks(MAKER, kind, directory, *arguments, env={**QUIET, **variables})
    return directory


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sqlite")
    return make("mlflow", place, f"sqlite:///{place}/mlflow.db")


@pytest.fixture(scope="module")
def files_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("store")
    return make("mlflow", place, f"file://{place}/mlruns", MLFLOW_ALLOW_FILE_STORE="true")


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("wandb", tmp_path_factory.mktemp("offline"))


@pytest.fixture(scope="module")
def server(sqlite: Path) -> Iterator[str]:
    """Start MLflow's own server on the SQLite file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        f"sqlite:///{sqlite}/mlflow.db",
    ]
    command += ["--port", str(port), "--workers", "1", "--artifacts-destination", str(sqlite / "mlartifacts")]
    running = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                with urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                assert running.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        os.killpg(running.pid, signal.SIGKILL)  # it takes seconds to end by itself
        running.wait(30)


@pytest.fixture(params=["database", pytest.param("server", marks=pytest.mark.thorough)])
def asked(request: pytest.FixtureRequest, sqlite: Path) -> str:
    """Return a URI at which MLflow's own client is asked: of a server, or of a database that it opens."""
    if request.param == "server":
        return str(request.getfixturevalue("server"))
    return f"sqlite+pysqlite:///{sqlite}/mlflow.db"  # ckpttool itself reads what is called sqlite:


@pytest.fixture(autouse=True)
def _no_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)


def measured(listing: Listing, metric: str) -> dict[str, float]:
    rows = listing.document()["checkpoints"]
    return {
        "/".join(Path(row["path"]).parts[-2:]): row["metrics"][metric]
        for row in rows
        if metric in row["metrics"]
    }


def kept(root: Path) -> dict[str, list[str]]:
    """Return what a prune that keeps the newest would keep, and why."""
    made = planned(root)
    return {one.entry.path: list(map(str, one.reasons)) for group in made.plan.groups for one in group.keep}


def planned(root: Path) -> Pruned:
    return prune(root, keep_last=1, depth="quick", dry_run=True)


@pytest.mark.parametrize("store", ["sqlite", "files_store"])
def test_metrics_and_parameters_of_mlflow(store: str, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue(store)
    found = list_checkpoints(place / "runs", metrics=["mlflow:digits"])
    assert measured(found, "val/loss") == LOSSES
    assert {run.hyper_parameters["lr"] for run in found.runs} == {"0.1", "0.5"}
    assert measured(found, "epoch") == {}
    bad = measured(found, "bad").values()
    assert len(bad) == len(found.checkpoints) and all(value != value for value in bad)


def test_a_run_of_mlflow_is_named(sqlite: Path) -> None:
    found = list_checkpoints(sqlite / "runs", metrics=["mlflow:digits/slow"])
    assert measured(found, "val/loss") == {name: one for name, one in LOSSES.items() if "slow" in name}
    assert any(
        "mlflow:digits/slow: it is unclear whether its run (slow) wrote" in one for one in found.warnings
    )
    with pytest.raises(NotFound, match="the experiment digits has no run none"):
        list_checkpoints(sqlite / "runs", metrics=["mlflow:digits/none"])
    with pytest.raises(NotFound, match="no such experiment"):
        list_checkpoints(sqlite / "runs", metrics=["mlflow:letters"])


def test_nobody_guesses_whose_run_it_is(
    sqlite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(sqlite / "runs" / "slow", tmp_path / "other")
    monkeypatch.chdir(sqlite)
    with pytest.raises(UsageError, match=r"its 2 runs \(slow, fast\) wrote"):
        list_checkpoints(tmp_path, metrics=["mlflow:digits"])


def test_metrics_of_a_server(asked: str, sqlite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", asked)
    with warnings_of_mlflow():
        found = list_checkpoints(sqlite / "runs", metrics=["mlflow:digits"])
    assert measured(found, "val/loss") == LOSSES


@contextmanager
def warnings_of_mlflow() -> Iterator[None]:
    """Let MLflow's own code warn of what it likes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_metrics_of_wandb(offline: Path) -> None:
    found = list_checkpoints(offline / "runs", metrics=[f"wandb:{offline}"])
    assert measured(found, "val_loss") == LOSSES
    assert measured(found, "val.acc")["slow/step_20.pt"] == 0.2
    assert {run.hyper_parameters["lr"] for run in found.runs} == {0.1, 0.5}
    assert {run.hyper_parameters["opt.name"] for run in found.runs} == {"sgd"}


@pytest.mark.parametrize("store", ["sqlite", "files_store"])
def test_a_registered_model_stays(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place = request.getfixturevalue(store)
    reason = "registered as net version 1 (champion)"
    (held,) = [path for path, reasons in kept(place / "mlruns").items() if reason in reasons]
    assert held.endswith("artifacts/checkpoints/step_20.pt")
    moved = shutil.copytree(place, tmp_path / "moved")  # what is registered names the old place
    there = [path for path, reasons in kept(moved / "mlruns").items() if reason in reasons]
    assert [os.path.relpath(path, moved) for path in there] == [os.path.relpath(held, place)]


def test_a_model_registered_on_a_server_stays(
    asked: str, sqlite: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copied = shutil.copytree(sqlite / "mlruns", tmp_path / "artifacts")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", asked)
    with warnings_of_mlflow():
        reasons = [one for reasons in kept(copied).values() for one in reasons]
    assert "registered as net version 1 (champion)" in reasons


@pytest.mark.parametrize("store", ["sqlite", pytest.param("server", marks=pytest.mark.thorough)])
def test_a_model_that_a_run_logged_stays(
    store: str,
    sqlite: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLflow 3 registers ``models:/m-…``; its files are known by that name, also where they were moved."""
    import mlflow

    place = shutil.copytree(sqlite, tmp_path / "own")
    uri = f"sqlite:///{place}/mlflow.db" if store == "sqlite" else request.getfixturevalue("server")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with warnings_of_mlflow():
        client = mlflow.MlflowClient(uri)
        experiment = client.get_experiment_by_name("digits").experiment_id
        model = client.create_logged_model(experiment, name="deep")
        client.log_model_artifacts(model.model_id, str(place / "runs" / "slow"))
        client.finalize_logged_model(model.model_id, "READY")
        client.create_registered_model(f"deep-{store}")
        client.create_model_version(f"deep-{store}", f"models:/{model.model_id}", model_id=model.model_id)
        directories = [path for path in sqlite.rglob(model.model_id) if path.is_dir()]
        moved = shutil.copytree(directories[0], tmp_path / "moved" / model.model_id)
        held = kept(moved.parent)
    assert [reasons[-1] for reasons in held.values()].count(f"registered as deep-{store} version 1") == 3


def test_an_artifact_with_an_alias_stays(offline: Path) -> None:
    """The alias went from step 10 to 20; one file has another name, and is known by its MD5."""
    reasons = {
        path: why for path, why in kept(offline / "runs").items() if any("Weights" in one for one in why)
    }
    assert sorted(os.path.relpath(path, offline / "runs") for path in reasons) == [
        "fast/step_20.pt",
        "slow/step_20.pt",
    ]
    assert list(reasons.values()).count(["net-fast:best in Weights & Biases"]) == 1


def test_a_registered_model_keeps_its_name(files_store: Path) -> None:
    """MLflow would look for it in vain."""
    planned = rename(files_store / "mlruns", template="s-step_{step}", dry_run=True)
    left = [one.message for one in planned.problems]
    assert left == ["left alone: registered as net version 1 (champion)"]
    assert len(planned.renames) == 5


def test_a_store_that_cant_be_read_keeps_all(sqlite: Path, tmp_path: Path) -> None:
    shutil.copytree(sqlite / "runs", tmp_path / "runs")
    (tmp_path / "mlflow.db").write_bytes(b"SQLite format 3\0" + bytes(4000))
    made = planned(tmp_path / "runs")
    assert not made.plan.removals
    assert all("can't list the registered models" in str(one.skipped) for one in made.plan.groups)


def test_a_database_of_something_else_protects_nothing(sqlite: Path, tmp_path: Path) -> None:
    shutil.copytree(sqlite / "runs", tmp_path / "runs")
    with sqlite3.connect(tmp_path / "mlflow.db") as other:
        other.execute("CREATE TABLE notes (text)")
    other.close()
    assert len(kept(tmp_path / "runs")) == 2


@pytest.mark.parametrize(("column", "value"), [("value", "x"), ("step", "many"), ("key", None)])
def test_a_database_holds_anything(sqlite: Path, tmp_path: Path, column: str, value: object) -> None:
    place = shutil.copytree(sqlite, tmp_path / "own")
    database = sqlite3.connect(place / "mlflow.db")
    with database:
        for table in ("metrics", "params"):
            database.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
            database.execute(f"CREATE TABLE {table} AS SELECT * FROM old_{table}")
        database.execute(f"UPDATE metrics SET {column} = ?", (value,))
        database.execute("UPDATE params SET value = x'ff'")
    database.close()
    if column == "key":
        assert list_checkpoints(place / "runs", metrics=["mlflow:digits"]).checkpoints
        return
    with pytest.raises(DamagedCheckpoint, match=r"mlflow\.db"):
        list_checkpoints(place / "runs", metrics=["mlflow:digits"])


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("databricks", mlflow_stores.ServerStore),
        ("https://host", mlflow_stores.ServerStore),
        ("postgresql://host/db", mlflow_stores.ServerStore),
        ("sqlite:///a.db", mlflow_stores.SqliteStore),
        ("file:///a/mlruns", mlflow_stores.FileStore),
        ("mlruns", mlflow_stores.FileStore),
    ],
)
def test_what_a_uri_means(uri: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        with monkeypatch.context() as patched:
            patched.setenv(name, uri)
            (store,) = mlflow_stores.stores_around([])
            assert type(store) is kind


def test_nothing_but_what_removes_or_renames_asks_trackers(
    sqlite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list, and each look of a watch, would take long else."""
    shutil.copytree(sqlite / "runs", tmp_path / "runs")
    asked: list[str] = []
    monkeypatch.setattr(programs, "tracked_models", lambda root: asked.append(root) or [])
    list_checkpoints(tmp_path / "runs").to_dict()
    assert not asked
    prune(tmp_path / "runs", keep_last=1, depth="quick", dry_run=True)
    rename(tmp_path / "runs", template="s-step_{step}", dry_run=True)
    assert len(asked) == 2


def test_zeros_in_a_wandb_file_are_not_its_end(offline: Path, tmp_path: Path) -> None:
    """An alias may stand behind them."""
    place = tmp_path / "wandb" / log_file(offline).parent.name
    place.mkdir(parents=True)
    data = bytearray(log_file(offline).read_bytes())
    data[200:300] = bytes(100)
    (place / "run-x.wandb").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="doesn't match its checksum"):
        list(wandb_runs.models_in(str(tmp_path / "wandb")))


def log_file(offline: Path) -> Path:
    return min(offline.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("left", [0, 3, 7, 9, 60, 40_000, -1])
def test_a_wandb_file_that_is_cut(offline: Path, tmp_path: Path, left: int) -> None:
    place = tmp_path / log_file(offline).parent.name
    place.mkdir()
    (place / "run-x.wandb").write_bytes(log_file(offline).read_bytes()[:left])
    log = Log("log", frozenset({10, 20, 30}))
    (run,) = wandb_runs.find_runs(str(place))
    run.read(log)
    assert left == 7 or any("ends within a record" in one for one in log.warnings)


@given(at=st.integers(0, 100_000), value=st.integers(0, 255))
@settings(
    max_examples=settings.default.max_examples // 4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_wandb_file_with_a_wrong_byte(offline: Path, tmp_path: Path, at: int, value: int) -> None:
    """It is read as it is, or there is a clear error: every byte of a record is covered by its checksum."""
    data = bytearray(log_file(offline).read_bytes())
    place = tmp_path / "run-20260101_000000-x"
    place.mkdir(exist_ok=True)
    data[at % len(data)] = value
    (place / "run-x.wandb").write_bytes(data)
    try:
        (run,) = wandb_runs.find_runs(str(place))
        run.read(Log("log", frozenset({10, 20, 30})))
    except CheckpointError as failure:
        assert "run-x.wandb" in str(failure)


# What log records -----------------------------------------------------------------------------------


def truth(path: Path, step: int) -> dict[str, object]:
    return {
        "verdict": "valid",
        "safety": "safe",
        "format": "pytorch",
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "files": 1,
        "step": step,
    }


def tags_of(uri: str) -> dict[str, dict[str, object]]:
    """Return what MLflow's own client finds, by run and name."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    return {
        f"{run.info.run_name}/{key.removeprefix('ckpttool/')}": json.loads(value)
        for run in client.search_runs([experiment.experiment_id])
        for key, value in run.data.tags.items()
        if key.startswith("ckpttool/")
    }


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("server", marks=pytest.mark.thorough)])
def test_mlflow_has_what_was_recorded(
    kind: str, sqlite: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "sqlite":
        place = shutil.copytree(sqlite, tmp_path / "own")
        uri = f"sqlite:///{place}/mlflow.db"
    else:
        place, uri = sqlite, request.getfixturevalue("server")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with warnings_of_mlflow():
        first = log([place / "runs"], "mlflow:digits")
        again = log([place / "runs" / "slow" / "step_10.pt"], "mlflow:digits/slow")
        found = tags_of(uri)
    assert [one.is_new for one in first.checkpoints] == [True] * 6 and not again.checkpoints[0].is_new
    assert found == {
        f"{trial}/step_{step}.pt": truth(place / "runs" / trial / f"step_{step}.pt", step)
        for trial in ("slow", "fast")
        for step in (10, 20, 30)
    }


def test_mlflow_gets_an_experiment_and_a_run(
    sqlite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    odd = tmp_path / "trial" / "epoch=1-val_loss=0.25.pt"
    odd.parent.mkdir()
    shutil.copy(sqlite / "runs" / "slow" / "step_10.pt", odd)
    with warnings_of_mlflow():
        assert [log([odd], "mlflow:digits").checkpoints[0].is_new for _ in range(2)] == [True, False]
        ((name, facts),) = tags_of(uri).items()
    assert name.startswith("trial/epoch_1-val_loss_0.25.pt-")  # MLflow takes no equals sign
    assert facts["metrics"] == {"val_loss": 0.25}


def test_wandb_has_what_was_recorded(offline: Path, tmp_path: Path) -> None:
    place = shutil.copytree(offline, tmp_path / "own", symlinks=True)
    first = log([place / "runs"], f"wandb:{place / 'wandb'}")
    assert [one.is_new for one in first.checkpoints] == [True] * 6
    assert not any(one.is_new for one in log([place / "runs"], f"wandb:{place / 'wandb'}").checkpoints)
    new = sorted(
        set(place.glob("wandb/*-run-*"))
        - {place / one.relative_to(offline) for one in offline.glob("wandb/*")}
    )
    known = {path.name.rpartition("-")[2] for path in offline.glob("wandb/*-run-*")}
    assert {path.name.rpartition("-")[2] for path in new} == known  # they are of the runs that were there
    found = wandb_config(next(new[0].glob("*.wandb")))
    assert len(found) == 3
    for name, text in found.items():
        step = int(name[5:7])
        trial = next(
            one for one in ("slow", "fast") if json.loads(text) == truth(place / "runs" / one / name, step)
        )
        assert trial


def wandb_config(path: Path) -> dict[str, str]:
    """Return what a file of W&B's has under ``ckpttool``, parsed by its own protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, str] = {}
    with path.open("rb") as file:
        pieces = list(wandb_runs._pieces(_after_magic(file), str(path), []))
    for kind, data, _ in pieces:
        if kind == 1:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for item in (*record.config.update, *record.run.config.update):
                if item.key == "ckpttool":
                    found |= json.loads(item.value_json)
    return found


def _after_magic(file):  # type: ignore[no-untyped-def]
    file.read(7)
    return file


TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(sys.argv[1]).Reload()
(event,) = read.Tensors("ckpttool/slow/step_20.pt")
(text,) = event.tensor_proto.string_val
kind = read.SummaryMetadata("ckpttool/slow/step_20.pt").plugin_data.plugin_name
print(json.dumps([read.Tags()["tensors"], event.step, text.decode(), kind]))
"""


def test_tensorboard_reads_what_was_recorded(sqlite: Path, tmp_path: Path) -> None:
    target = f"tensorboard:{tmp_path / 'tb'}"
    assert [one.is_new for one in log([sqlite / "runs"], target).checkpoints] == [True] * 6
    assert not any(one.is_new for one in log([sqlite / "runs" / "slow"], target).checkpoints)
    assert not any(one.is_new for one in log([sqlite / "runs"], target).checkpoints)
    tags, step, text, kind = json.loads(python_with_frameworks("-c", TENSORBOARD, tmp_path / "tb"))
    names = [f"{trial}/step_{step}.pt" for trial in ("fast", "slow") for step in (10, 20, 30)]
    assert [f"ckpttool/{name}" in tags for name in names] == [True] * 6
    digest = hashlib.sha256((sqlite / "runs" / "slow" / "step_20.pt").read_bytes()).hexdigest()
    assert (step, kind) == (20, "text") and f"| sha256 | {digest} |" in text


def test_a_damaged_checkpoint_is_recorded_as_such(sqlite: Path, tmp_path: Path) -> None:
    cut = tmp_path / "step_1.pt"
    cut.write_bytes((sqlite / "runs" / "slow" / "step_10.pt").read_bytes()[:700])
    (one,) = log([cut], f"tensorboard:{tmp_path / 'tb'}").checkpoints
    assert (one.passes, one.facts["verdict"], one.facts["bytes"]) == (False, "invalid", 700)


@pytest.mark.parametrize("to", ["", "mlflow:", "neptune:x", "wandb:"])
def test_no_tracker(sqlite: Path, to: str) -> None:
    with pytest.raises(UsageError, match="unknown tracker"):
        log([sqlite / "runs"], to)


def test_a_server_that_isnt_there(sqlite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with warnings_of_mlflow(), pytest.raises(CheckpointError, match="request failed"):
        log([sqlite / "runs"], "mlflow:digits")


def test_the_parameters_of_a_run_kept_as_files(files_store: Path, tmp_path: Path) -> None:
    for folder in Path(shutil.copytree(files_store, tmp_path / "store")).glob("mlruns/*/*/params"):
        name = (folder.parent / "tags" / "mlflow.runName").read_text()
        save(folder.parent / "artifacts" / "m.pt")
        (run,) = list_checkpoints(folder.parent).runs
        assert run.hyper_parameters == {
            "lr": str({"slow": 0.1, "fast": 0.5}[name]),
            "seed": "7",
        }
