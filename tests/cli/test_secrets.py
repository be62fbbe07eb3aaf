"""Credentials are in no output: whatever a server answers, and however a command says it."""

from __future__ import annotations

import base64
import gc
import io
from pathlib import Path
from types import ModuleType

import pytest

from ckpttool import CheckpointError, MissingPackage, Unsupported, UsageError, verify
from ckpttool.__main__ import main
from ckpttool.cli.output import SafeStderr
from ckpttool.core.urls import without_secrets, without_signatures
from ckpttool.integrations import clients
from ckpttool.integrations.clients import client_errors_as_unsupported
from ckpttool.integrations.mlflow import ServerStore, experiment_runs, mlflow_client
from ckpttool.storage import remote
from ckpttool.storage.stores import as_os_errors
from tests.support.commands import ckpttool, run_here
from tests.support.stores import Answer, Asked, WebServer

CANARY = "canary7391"
SECRETS = {
    "AWS_ACCESS_KEY_ID": f"AKIA{CANARY}",
    "AWS_SECRET_ACCESS_KEY": f"secret-{CANARY}",
    "AWS_SESSION_TOKEN": f"session-{CANARY}",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_ACCOUNT_KEY": "Y2FuYXJ5NzM5MQ==",
    "HF_TOKEN": f"hf_{CANARY}",
    "MLFLOW_TRACKING_USERNAME": f"user-{CANARY}",
    "MLFLOW_TRACKING_PASSWORD": f"password-{CANARY}",
    "MLFLOW_TRACKING_TOKEN": f"token-{CANARY}",
    "WANDB_API_KEY": f"wandb-{CANARY}",
}
BASIC = base64.b64encode(f"user-{CANARY}:password-{CANARY}".encode()).decode()
"""What HTTP makes of MLflow's name and password."""
BASIC_OF_URL = base64.b64encode(f"name-{CANARY}".encode()).decode()
"""How that of the name and password in a URL begins."""
COMMANDS = [
    ("inspect", "{url}"),
    ("inspect", "{url}", "--json"),
    ("list", "{url}"),
    ("list", "{url}", "--json"),
    ("list", "{dir}", "--metrics", "mlflow:digits"),
    ("list", "{dir}", "--metrics", "mlflow:digits@http://u:canary7391@127.0.0.1:1"),
    ("verify", "{url}"),
    ("verify", "{url}", "--json"),
    ("verify", "{url}", "--format", "sarif"),
    ("verify", "{url}", "--format", "github"),
    ("verify", "{url}", "--format", "junit"),
    ("latest", "{url}"),
    ("diff", "{url}", "{dir}/m.safetensors"),
    ("convert", "{url}", "{dir}/other.npz"),
    ("convert", "{dir}/m.safetensors", "{url}", "--force"),
    ("copy", "{url}", "{dir}/there"),
    ("copy", "{dir}/m.safetensors", "{url}"),
    ("prune", "{url}", "--keep", "1", "--yes"),
    ("prune", "{dir}", "--keep", "1", "--yes", "--json"),
    ("undo", "{url}"),
    ("pin", "{url}"),
    ("card", "{url}"),
    ("report", "{dir}", "--metrics", "mlflow:digits", "-o", "{dir}/page.html"),
    ("log", "{dir}", "--to", "mlflow:digits"),
    ("log", "{dir}", "--to", "mlflow:digits", "--json"),
    ("log", "{dir}", "--to", "mlflow:digits@http://u:canary7391@127.0.0.1:1"),
    ("average", "{url}", "{url}", "{dir}/mean.safetensors"),
    ("salvage", "{url}", "{dir}/saved.safetensors"),
]
URLS = {
    "refused": "s3://bucket/m.safetensors",
    "unreachable": "s3://bucket/m.safetensors",
    "hub": "hf://me/m/m.safetensors",
    "azure": "az://box/m.safetensors",
    "proxy": "s3://bucket/m.safetensors",
}


@pytest.fixture
def mirror(web: WebServer) -> WebServer:
    """Return a server that refuses everything, and repeats what it was sent."""

    def repeat(number: int, asked: Asked, answer: Answer) -> None:
        answer.status = 400
        answer.body = f"<Error><Code>Bad</Code>{asked.path} {asked.headers}</Error>".encode()

    web.misbehave = repeat
    return web


def environment_of(case: str, mirror: WebServer) -> dict[str, str]:
    """Return variables with a canary each: user names and passwords in all URLs, and all secrets."""
    there = mirror.url.replace("://", f"://name-{CANARY}:word-{CANARY}@")
    nowhere = f"http://name-{CANARY}:word-{CANARY}@127.0.0.1:1"
    return {
        **SECRETS,
        "AWS_ENDPOINT_URL": nowhere if case == "unreachable" else there,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AZURE_STORAGE_ENDPOINT": f"{there}/account",
        "HF_ENDPOINT": there,
        "MLFLOW_TRACKING_URI": there,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        **({"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "http_proxy": nowhere} if case == "proxy" else {}),
        "CKPTTOOL_DEBUG": "1",
    }


def test_no_canary_is_printed(
    mirror: WebServer,
    tmp_path: Path,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in (environment_of("refused", mirror) | {"CKPTTOOL_DEBUG": ""}).items():
        monkeypatch.setenv(name, value)
    failed = 0
    for number, command in enumerate(COMMANDS):
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        weights = place / "m.safetensors"
        weights.write_bytes((files / "safetensors" / "dtypes.safetensors").read_bytes())
        remote.forget()
        failed += run_here(*(one.format(url=URLS["refused"], dir=place) for one in command)) != 0
        assert_silent("".join(capfd.readouterr()))
        for path in place.rglob("*"):
            if path.is_file() and path != weights:
                assert_silent(path.read_text(errors="replace"))
    assert failed >= len(COMMANDS) * 2 // 3


PROGRAMS = (("verify", "{url}"), ("report", "{dir}", "--metrics", "mlflow:digits", "-o", "{dir}/page.html"))
"""Commands whose errors come from a store, and from a tracker's own code."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, id=" ".join(one), marks=() if one in PROGRAMS else pytest.mark.thorough)
        for one in COMMANDS
    ],
)
def test_no_canary_is_printed_where_errors_come_from(
    mirror: WebServer, tmp_path: Path, files: Path, command: tuple[str, ...]
) -> None:
    """Whole programs: what prints a traceback takes the secrets out."""
    (tmp_path / "m.safetensors").write_bytes((files / "safetensors" / "dtypes.safetensors").read_bytes())
    arguments = [one.format(url=URLS["refused"], dir=tmp_path) for one in command]
    done = ckpttool(*arguments, env=environment_of("refused", mirror), cwd=tmp_path)
    assert_silent(done.stdout + done.stderr)


@pytest.mark.parametrize("case", URLS)
def test_no_canary_is_printed_of_any_server(mirror: WebServer, case: str) -> None:
    done = ckpttool("verify", URLS[case], env=environment_of(case, mirror))
    assert done.returncode == 2 or "Traceback" in done.stderr
    assert_silent(done.stdout + done.stderr)


def assert_silent(text: str) -> None:
    assert CANARY not in text
    assert BASIC not in text
    assert BASIC_OF_URL not in text
    assert SECRETS["AZURE_STORAGE_ACCOUNT_KEY"] not in text
    assert "X-Amz-Signature" not in text
    assert "internal error" not in text


def test_errors_of_the_library_show_none(mirror: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of("refused", mirror).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError) as caught:
        verify("s3://bucket/m.safetensors")
    assert_silent(f"{caught.value!r} {caught.value} {caught.value.reason}")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("at http://me:word@host/x", "at http://***@host/x"),
        ("at http://me@host/x, refused", "at http://***@host/x, refused"),
        ("GET https://host/x?X-Amz-Signature=1&y=2: no", "GET https://host/x?*** no"),
        ("mail a@b, see https://host/a@b", "mail a@b, see https://host/a@b"),
        ("s3://bucket/a?b", "s3://bucket/a?b"),
        ("runs/a?b=c", "runs/a?b=c"),
    ],
)
def test_what_is_shown_of_a_url(said: str, shown: str) -> None:
    assert without_signatures(said) == shown
    assert str(UsageError(said)) == shown
    assert CheckpointError("m", said).reason == shown
    assert str(CheckpointError("m", said)) == f"m: {shown}"


NAMED = "http://me:secret-word@host"
"""A URL of which only ``http://***@host`` is shown."""


def test_what_packages_warn_of_shows_none() -> None:
    said = io.StringIO()
    SafeStderr(said).write(f"UserWarning: {NAMED}/x?sig=1 is slow\n")
    assert said.getvalue() == "UserWarning: http://***@host/x?*** is slow\n"


def test_a_traceback_shows_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ValueError(NAMED)

    monkeypatch.setattr("ckpttool.cli.run", fail)
    monkeypatch.setattr(gc, "set_threshold", lambda *numbers: None)
    with pytest.raises(SystemExit):
        main()
    assert "ValueError: http://***@host\n" in capsys.readouterr().err


def test_an_answer_is_cut_once_it_has_none() -> None:
    """Of half a URL nobody knows what is a secret."""
    with pytest.raises(OSError, match=r"\.{280} http://\*\*\*@host"), as_os_errors("s3://bucket/m"):
        raise ValueError(f"{'.' * 280} {NAMED}")
    with (
        pytest.raises(Unsupported, match=r"\.{180} http://\*\*\*@host"),
        client_errors_as_unsupported("mlflow:digits"),
    ):
        raise ValueError(f"{'.' * 180} {NAMED}")


def test_a_server_of_mlflow_is_named_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is the path of errors, which JSON has as it is."""

    def fail(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(clients, "import_module", fail)
    assert ServerStore(NAMED).name == "http://***@host"
    with pytest.raises(MissingPackage) as caught:
        mlflow_client(NAMED)
    assert caught.value.path == "http://***@host"
    with pytest.raises(UsageError, match="credentials are not allowed here"):
        experiment_runs([], f"digits@{NAMED}")


def test_an_answer_is_changed_only_where_a_secret_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f"hf_{CANARY}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "short")
    text = "ssh://git@host/x?y=z short"
    assert without_secrets(text) == text
    assert without_secrets(f"{text} hf_{CANARY}") == f"{text} ***"
