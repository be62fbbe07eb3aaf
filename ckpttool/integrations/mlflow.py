"""MLflow: runs and registered models in a directory, a SQLite file or a server, and records of checkpoints.

A directory and a SQLite file are read here; MLflow's own client asks servers, and writes all records.

Source: mlflow/mlflow ``mlflow/store/tracking/file_store.py``, ``mlflow/store/model_registry/file_store.py``,
``mlflow/store/tracking/dbmodels/models.py``, ``mlflow/store/model_registry/dbmodels/models.py``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from ckpttool.core.errors import DamagedCheckpoint, NotFound, UsageError, from_os_error
from ckpttool.core.urls import is_url, without_signatures
from ckpttool.integrations.clients import client_errors_as_unsupported, client_module
from ckpttool.runs.logs import Log, numbered_lines
from ckpttool.runs.run_directories import parse_yaml
from ckpttool.runs.trackers import (
    LoggedCheckpoint,
    Record,
    TrackedModel,
    TrackedRun,
    Tracker,
    run_to_record_in,
)
from ckpttool.storage import fs
from ckpttool.storage.http_requests import paged

PREFIX = "mlflow:"
DATABASE, DIRECTORY = "mlflow.db", "mlruns"
URI, REGISTRY_URI = "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"
_DATABRICKS = ("databricks", "databricks-uc")
"""Servers whose names look like a directory's."""

_SQLITE = "sqlite:///"
_DATABASE_SECONDS = 5
_META = "meta.yaml"
_LOGGED_MODEL = re.compile(r"\bm-[0-9a-f]{32}\b")
"""Name that MLflow 3 gives to a model of a run, and to the directory of its files."""
_MAX_META_BYTES = 1 << 20
_VALUES_PER_PAGE = 25_000
"""Values of a metric that a server is asked for at once; MLflow's client asks for as many."""
_PLAIN_URL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_NOT_IN_KEYS = re.compile(r"[^\w\-. /:]", re.ASCII)
"""Characters that MLflow refuses in the key of a tag."""
_MAX_KEY = 240


class MLflow(Tracker):
    """MLflow as a tracker: ``mlflow:EXPERIMENT`` and ``mlflow:EXPERIMENT/RUN``.

    A checkpoint is recorded as a tag of its run, and as an artifact.
    """

    one_run = "mlflow:EXPERIMENT/RUN names one"
    target = "mlflow:EXPERIMENT"

    def runs(self, name: str, places: Sequence[str]) -> list[TrackedRun]:
        return find_runs(stores_around(places), name)

    def models(self, places: Sequence[str]) -> Iterator[TrackedModel]:
        for store in stores_around(places):
            yield from store.models()

    @contextmanager
    def recorder(self, name: str, places: Sequence[str]) -> Iterator[Record]:
        to = f"{PREFIX}{name}"
        stores = stores_around(places)
        found = experiment_runs(stores, name)
        store, runs, is_of_one = found or (next(iter(stores), None), [], False)
        client = mlflow_client(None if store is None else store.uri)
        named = runs[0] if is_of_one else None
        ids: dict[str, str] = {}

        def run_id(one: LoggedCheckpoint) -> str:
            if one.run not in ids:
                owner = named or run_to_record_in(runs, one, to)
                # A new run is ended at once, or MLflow would show it as running forever.
                ids[one.run] = _new_run(client, name, one.run_name) if owner is None else owner.id
            return ids[one.run]

        def record(one: LoggedCheckpoint) -> bool:
            with client_errors_as_unsupported(to):
                identity, key, text = run_id(one), f"ckpttool/{_tag_name(one.name)}", one.text
                if client.get_run(identity).data.tags.get(key) == text:
                    return False
                client.log_text(identity, text, f"{key}.json")
                client.set_tag(identity, key, text)
            return True

        yield record


def _new_run(client: Any, experiment: str, name: str) -> str:
    known = client.get_experiment_by_name(experiment)
    place = client.create_experiment(experiment) if known is None else known.experiment_id
    identity: str = client.create_run(place, run_name=name).info.run_id
    client.set_terminated(identity)
    return identity


def _tag_name(name: str) -> str:
    """Return a name in the characters that MLflow allows; a changed one ends with a digest."""
    plain = _NOT_IN_KEYS.sub("_", name)
    if plain == name and len(name) <= _MAX_KEY:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{plain[-_MAX_KEY + 9 :]}-{digest}"


# Stores ---------------------------------------------------------------------------------------------


class Store(Protocol):
    """A store of experiments and registered models."""

    name: str
    uri: str

    def runs(self, experiment: str) -> list[TrackedRun] | None:
        """Return the runs of an experiment; None if there is no such experiment."""

    def models(self) -> Iterator[TrackedModel]:
        """Yield the registered models."""


def stores_around(directories: Sequence[str]) -> list[Store]:
    """Return the stores that the environment names and those in some directories, the nearest first."""
    stores = [store_at(uri) for name in (URI, REGISTRY_URI) if (uri := os.environ.get(name))]
    for directory in directories:
        database, folder = os.path.join(directory, DATABASE), os.path.join(directory, DIRECTORY)
        if fs.exists(database) and fs.isfile(database):
            stores.append(SqliteStore(database))
        if fs.exists(folder) and fs.isdir(folder):
            stores.append(FileStore(folder))
    return list({store.name: store for store in stores}.values())


def store_at(uri: str) -> Store:
    """Return the store at a tracking URI."""
    if uri.startswith(_SQLITE):
        return SqliteStore(uri.removeprefix(_SQLITE).partition("?")[0])
    if uri.startswith("file:") or not (_PLAIN_URL.match(uri) or uri in _DATABRICKS):
        return FileStore(path_of(uri, os.curdir))
    return ServerStore(uri)


def find_runs(stores: list[Store], wanted: str) -> list[TrackedRun]:
    """Return the runs of an experiment, or the one that follows its name: ``digits``, ``digits/slow``.

    Raises:
        NotFound: There is no store, no such experiment, or no such run in it.
    """
    label = f"{PREFIX}{wanted}"
    if not stores:
        expected = f"{DATABASE} or {DIRECTORY} here or above the checkpoints, or {URI}"
        raise NotFound(label, f"no MLflow store found ({expected})")
    if (found := experiment_runs(stores, wanted)) is None:
        names = ", ".join(store.name for store in stores)
        raise NotFound(label, f"no such experiment in {names}")
    _, runs, _ = found
    return runs


def experiment_runs(stores: list[Store], wanted: str) -> tuple[Store, list[TrackedRun], bool] | None:
    """Return the store that has an experiment or a run, and its runs; None without such an experiment.

    The third value is whether one run was named, and no other has the name.

    Raises:
        NotFound: The experiment has no run of that name.
    """
    if without_signatures(wanted) != wanted:
        raise UsageError(f"{PREFIX}{wanted}: credentials are not allowed here; put them in {URI}")
    experiment, _, run = wanted.rpartition("/")
    for store in stores:
        if (runs := store.runs(wanted)) is not None:
            return store, runs, False
        if experiment and (runs := store.runs(experiment)) is not None:
            named = [one for one in runs if run in (one.name, one.id)]
            if not named:
                problem = f"the experiment {experiment} has no run {run} in {store.name}"
                raise NotFound(f"{PREFIX}{wanted}", problem)
            return store, named, len(named) == 1
    return None


def path_of(uri: str, base: str) -> str:
    """Return the local path of a URI, relative to a store; a URI of another machine is returned as it is."""
    if uri.startswith("file:"):
        return unquote(urlsplit(uri).path)
    return uri if _PLAIN_URL.match(uri) or is_url(uri) else os.path.normpath(os.path.join(base, uri))


def _model(
    store: Store, name: object, version: object, aliases: list[str], stage: object, place: str, run: object
) -> TrackedModel:
    """Return a registered model; ``place`` is its location, or ``models:/m-…``, which MLflow resolves."""
    # MLflow 3 registers models of a run by an identifier, ``models:/m-…``, which is also the name of their
    # directory in the run's artifacts; older versions by the path of the run. Either is found again in the
    # path of a checkpoint if the whole store was moved.
    named = [*aliases, *([str(stage)] if stage not in (None, "None", "") else [])]
    reason = f"registered as {name} version {version}" + (f" ({', '.join(named)})" if named else "")
    logged = _LOGGED_MODEL.search(place)
    identity = logged[0] if logged else str(run or "")
    base = os.path.dirname(store.name)
    return TrackedModel(reason, store.name, path_of(place, base), identity)


# A directory ----------------------------------------------------------------------------------------


class FileStore:
    """A directory ``mlruns``."""

    def __init__(self, path: str) -> None:
        self.name = path
        self.uri = f"file://{quote(os.path.abspath(path))}"

    def runs(self, experiment: str) -> list[TrackedRun] | None:
        found: list[TrackedRun] | None = None
        for folder, meta in self._metas(self.name):
            if meta.get("name") == experiment and _is_active(meta) and "experiment_id" in meta:
                runs = (self._run(experiment, *run) for run in self._metas(folder))
                found = [*(found or ()), *(run for run in runs if run is not None)]
        return found

    def models(self) -> Iterator[TrackedModel]:
        for folder, model in self._metas(os.path.join(self.name, "models")):
            aliases = model.get("aliases")
            named = aliases if isinstance(aliases, Mapping) else {}
            for _, meta in self._metas(folder):
                version = str(meta.get("version"))
                if str(meta.get("current_stage")).startswith("Deleted"):
                    continue
                names = [str(alias) for alias, one in named.items() if str(one) == version]
                place = str(meta.get("storage_location") or meta.get("source") or "")
                stage, run = meta.get("current_stage"), meta.get("run_id")
                yield _model(self, model.get("name"), version, names, stage, place, run)

    def _run(self, experiment: str, folder: str, meta: Mapping[str, Any]) -> TrackedRun | None:
        identity = meta.get("run_id") or meta.get("run_uuid")
        if not isinstance(identity, str) or not _is_active(meta):
            return None
        tags = self._texts(folder, "tags")
        name = str(meta.get("run_name") or tags.get("mlflow.runName") or identity)
        return TrackedRun(
            f"{PREFIX}{experiment}/{name}",
            identity,
            name,
            fs.realpath(folder),
            self._texts(folder, "params"),
            lambda log: _read_metric_files(os.path.join(folder, "metrics"), log),
        )

    def _metas(self, directory: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the directories in one that have a ``meta.yaml``, with its content."""
        for name in _sorted_names(directory):
            path = os.path.join(directory, name, _META)
            if fs.isfile(path):
                yield os.path.join(directory, name), _meta(path)

    def _texts(self, folder: str, kind: str) -> dict[str, str]:
        directory = os.path.join(folder, kind)
        return {
            name: _read(os.path.join(directory, name)).decode("utf-8", "backslashreplace").strip()
            for name in _files_below(directory)
        }


def _is_active(meta: Mapping[str, Any]) -> bool:
    return meta.get("lifecycle_stage", "active") in ("active", 1)


def _meta(path: str) -> Mapping[str, Any]:
    try:
        meta = parse_yaml(_read(path))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(path, f"invalid YAML: {error!s:.80}") from error
    if not isinstance(meta, Mapping):
        raise DamagedCheckpoint(path, f"a {type(meta).__name__}", expected="a mapping")
    return meta


def _read(path: str) -> bytes:
    try:
        with fs.open_regular(path) as file:
            return file.read(_MAX_META_BYTES)
    except OSError as error:
        raise from_os_error(error, path) from error


def _sorted_names(directory: str) -> list[str]:
    try:
        return sorted(fs.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, directory) from error


def _files_below(directory: str) -> Iterator[str]:
    """Yield the files in a directory and below: the metric ``val/loss`` is in a subdirectory."""
    for parent, folders, names in fs.walk(directory):
        folders.sort()
        for name in sorted(names):
            yield os.path.relpath(os.path.join(parent, name), directory)


def _read_metric_files(directory: str, log: Log) -> None:
    """Read a run's metrics: one file each, in which a line is a time, a value and a step."""
    for name in _files_below(directory):
        path = os.path.join(directory, name)
        try:
            with fs.open_regular(path, 1 << 20) as file:
                for number, line, is_whole in numbered_lines(file, path):
                    _add_line(log, name, path, number, line if is_whole else b"")
        except OSError as error:
            raise from_os_error(error, path) from error


def _add_line(log: Log, name: str, path: str, number: int, line: bytes) -> None:
    if not line.strip():
        return
    parts = line.split()
    try:
        _, value, step = float(parts[0]), float(parts[1]), float(parts[2]) if len(parts) > 2 else 0
    except (ValueError, IndexError) as error:
        expected = "a time, a value and a step"
        raise DamagedCheckpoint(
            path, f"{bytes(line[:40])!r}", expected=expected, where=f"line {number:,}"
        ) from error
    _add(log, name, step, value)


def _add(log: Log, name: str, step: float, value: float) -> None:
    # Trainers log the epoch as a metric.
    if name != "epoch":
        log.add(step, None, {name: value})


# A SQLite file --------------------------------------------------------------------------------------


class SqliteStore:
    """A SQLite file, as ``mlflow.db``."""

    def __init__(self, path: str) -> None:
        self.name = path
        self.uri = f"{_SQLITE}{os.path.abspath(path)}"

    def runs(self, experiment: str) -> list[TrackedRun] | None:
        known = self._rows(
            "experiments",
            "SELECT experiment_id FROM experiments WHERE name = ? AND lifecycle_stage = 'active'",
            experiment,
        )
        ids = [identity for (identity,) in known]
        if not ids:
            return None
        marks = ", ".join("?" * len(ids))
        own = f"SELECT run_uuid FROM runs WHERE experiment_id IN ({marks})"
        parameters: dict[object, dict[str, str]] = {}
        query = f"SELECT run_uuid, key, value FROM params WHERE run_uuid IN ({own})"
        for identity, key, value in self._rows("params", query, *ids):
            parameters.setdefault(identity, {})[str(key)] = str(value)
        query = (
            "SELECT run_uuid, name, artifact_uri FROM runs "
            f"WHERE experiment_id IN ({marks}) AND lifecycle_stage = 'active' ORDER BY start_time"
        )
        return [
            self._run(
                experiment,
                str(identity),
                str(name or identity),
                str(place or ""),
                parameters.get(identity, {}),
            )
            for identity, name, place in self._rows("runs", query, *ids)
        ]

    def models(self) -> Iterator[TrackedModel]:
        aliases: dict[object, list[str]] = {}
        for name, version, alias in self._rows(
            "registered_model_aliases", "SELECT name, version, alias FROM registered_model_aliases"
        ):
            aliases.setdefault((name, version), []).append(str(alias))
        for row in self._rows("model_versions", "SELECT * FROM model_versions", as_mappings=True):
            stage, place = row.get("current_stage"), row.get("storage_location") or row.get("source")
            if not str(stage).startswith("Deleted"):
                name, version = row.get("name"), row.get("version")
                names = aliases.get((name, version), [])
                yield _model(self, name, version, names, stage, str(place or ""), row.get("run_id"))

    def _run(
        self, experiment: str, identity: str, name: str, artifacts: object, parameters: Mapping[str, str]
    ) -> TrackedRun:
        place = path_of(str(artifacts or ""), os.path.dirname(self.name))
        own = fs.realpath(os.path.dirname(place)) if os.path.isabs(place) else ""
        label = f"{PREFIX}{experiment}/{name}"
        return TrackedRun(label, identity, name, own, parameters, self._reader(identity))

    def _reader(self, identity: str) -> Callable[[Log], None]:
        query = "SELECT key, step, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY timestamp"

        def read(log: Log) -> None:
            for key, step, value, is_nan in self._rows("metrics", query, identity):
                try:
                    _add(log, str(key), float(step), float("nan") if is_nan else float(value))
                except (ValueError, TypeError) as error:  # SQLite holds anything in any column
                    found = f"{key} of a run is {value!r:.40} at step {step!r:.40}"
                    raise DamagedCheckpoint(self.name, found, expected="numbers") from error

        return read

    def _rows(self, table: str, query: str, *values: object, as_mappings: bool = False) -> Iterator[Any]:
        """Yield the rows of a query; none if the table or the file doesn't exist."""
        import sqlite3

        # Opened read-only, as a server may be using the file; its locks are waited for.
        if not fs.lexists(self.name):
            return
        uri = f"file:{quote(os.path.abspath(self.name))}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=_DATABASE_SECONDS)) as database:
                if as_mappings:
                    database.row_factory = lambda cursor, row: dict(
                        zip((column[0] for column in cursor.description), row, strict=True)
                    )
                # Only tables are read: a view of that name could compute forever.
                known = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
                there = database.execute(known, (table,)).fetchone()
                if there is not None:
                    yield from database.execute(query, values)
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            raise DamagedCheckpoint(
                self.name, f"it can't be read: {error}", expected="an MLflow database"
            ) from error


# A server -------------------------------------------------------------------------------------------


class ServerStore:
    """A tracking server, asked by MLflow's own client."""

    def __init__(self, uri: str) -> None:
        self.name, self.uri = without_signatures(uri), uri

    def runs(self, experiment: str) -> list[TrackedRun] | None:
        client = mlflow_client(self.uri)
        with client_errors_as_unsupported(self.name):
            known = client.get_experiment_by_name(experiment)
            if known is None:
                return None
            runs = self._pages(lambda token: client.search_runs([known.experiment_id], page_token=token))
            return [
                TrackedRun(
                    f"{PREFIX}{experiment}/{run.info.run_name}",
                    run.info.run_id,
                    run.info.run_name,
                    "",
                    dict(run.data.params),
                    self._reader(client, run.info.run_id, tuple(run.data.metrics)),
                )
                for run in runs
            ]

    def models(self) -> Iterator[TrackedModel]:
        client = mlflow_client(self.uri)
        with client_errors_as_unsupported(self.name):
            versions = list(self._pages(lambda token: client.search_model_versions(page_token=token)))
            models = self._pages(lambda token: client.search_registered_models(page_token=token))
            # Versions in the results of a search have no aliases; registered models have.
            aliases = {model.name: dict(model.aliases) for model in models}
        for version in versions:
            named = aliases.get(version.name, {})
            names = [alias for alias, one in named.items() if str(one) == str(version.version)]
            stage, place = version.current_stage, version.source or ""
            yield _model(self, version.name, version.version, names, stage, place, version.run_id)

    def _reader(self, client: Any, identity: str, names: tuple[str, ...]) -> Callable[[Log], None]:
        # The client's public method follows pages for as long as a server sends tokens; ``_pages`` has a
        # limit.
        history = client._tracking_client.store.get_metric_history

        def read(log: Log) -> None:
            with client_errors_as_unsupported(self.name):
                for name in names:
                    for one in self._pages(partial(history, identity, name, _VALUES_PER_PAGE)):
                        _add(log, name, one.step, float(one.value))

        return read

    def _pages(self, ask: Callable[[str | None], Any]) -> Iterator[Any]:
        """Yield the items of all pages."""

        def page(token: str) -> tuple[Any, str | None]:
            found = ask(token or None)
            return found, found.token or None

        return paged(page, "", self.name)


def mlflow_client(uri: str | None) -> Any:
    """Return MLflow's client of a tracking URI, which prints nothing and gives up on a silent server soon.

    Raises:
        MissingPackage: MLflow is not installed.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    shown = without_signatures(uri or PREFIX)
    with client_errors_as_unsupported(shown):
        return client_module("mlflow.tracking", shown).MlflowClient(uri)
