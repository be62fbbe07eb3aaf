"""``ckpttool verify`` with a configuration: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from ckpttool.core.report import error
from tests.support.predictions import answer_alike, stage


@pytest.fixture
def project(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory: a repository with an intact model and one that holds infinities."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / "models").mkdir()
    shutil.copy(files / "pytorch" / "guide.pth", tmp_path / "models" / "guide.pth")
    header = {"mask": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text + struct.pack("<2f", 0, float("-inf"))
    (tmp_path / "models" / "mask.safetensors").write_bytes(data)
    return tmp_path


MASK = '[[verify.rule]]\npath = "models/mask*"\nignore = [{code = "infinity", reason = "causal"}]\n'


def configure(project: Path, text: str) -> None:
    path = project / "ckpttool.toml"
    path.write_text(text, "utf-8")
    path.chmod(0o644)


def test_without_a_path_and_a_configuration_nothing_is_looked_at(run, project: Path) -> None:
    assert run("verify") == (
        2,
        "",
        "ckpttool: error: name a PATH, or write a ckpttool.toml that names some (see docs/config.md)\n",
    )


def test_what_is_ignored_fails_nothing_and_stays(run, project: Path) -> None:
    configure(project, '[verify]\npaths = ["models"]\nstrict = true\n' + MASK)
    status, out, err = run("verify")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "valid    models/guide.pth  pytorch zip, 4.0 kB: checksum 14 records, values 8 tensors",
        "valid    models/mask.safetensors  safetensors, 80 B: "
        "values 1 tensor, 1 ignored; not checked: checksum",
        "    warning infinity [mask]: 1 of 2 values are infinite (ignored: causal)",
        "2 checkpoints: 2 valid",
    ]
    status, out, err = run("verify", "--json")
    assert (status, err) == (0, "")
    assert [one["findings"] for one in json.loads(out)["checkpoints"]] == [
        [],
        [
            {
                "code": "infinity",
                "severity": "warning",
                "message": "1 of 2 values are infinite",
                "where": "mask",
                "ignored": "causal",
            }
        ],
    ]


def test_with_a_path_no_configuration_is_read(run, project: Path) -> None:
    configure(project, "this is no TOML")
    assert run("verify", "models/guide.pth").status == 0
    assert run("verify", "--strict", "-q", "models").status == 1


def test_a_named_one_applies_to_given_paths(run, project: Path) -> None:
    configure(project, '[verify]\npaths = ["nowhere"]\nstrict = true\n' + MASK)
    assert run("verify", "--config", "ckpttool.toml", "-q", "models") == (0, "", "")


def test_a_path_that_is_not_there_is_an_error(run, project: Path) -> None:
    configure(project, '[verify]\npaths = ["models", "nowhere"]\n')
    assert run("verify") == (2, "", "ckpttool: error: nowhere: no such file or directory\n")


def test_what_means_nothing_is_a_warning(run, project: Path) -> None:
    configure(project, MASK.replace("infinity", "nan") + '[[verify.rule]]\npath = "*.pt"\n')
    status, _, err = run("verify", "-q")
    assert status == 0
    assert err.splitlines() == [
        "ckpttool: warning: ckpttool.toml[verify.rule 1]: ignore 1: there is no finding nan",
        "ckpttool: warning: ckpttool.toml[verify.rule 2]: no checkpoint matches '*.pt'",
    ]
    assert run("verify", "-q", "--quick").err == ""


def test_dangerous_code_stays_unsafe(run, project: Path, files: Path) -> None:
    shutil.copy(files / "hostile" / "call_global.pth", project / "stranger.pth")
    (finding,) = json.loads(run("verify", "--json", "stranger.pth").out)["checkpoints"][0]["findings"]
    code = finding["code"]
    configure(
        project,
        f'[[verify.rule]]\npath = "stranger.pth"\nignore = [{{code = "{code}", reason = "ours"}}]\n',
    )
    status, out, err = run("verify")
    assert status == 1
    assert "UNSAFE   ./stranger.pth" in out
    assert "ignored" not in out
    assert err == (
        "ckpttool: error: ckpttool.toml[verify.rule 1]: ignore 1: "
        f"{code} in ./stranger.pth can't be ignored: "
        "loading the file would run code that is known to be dangerous\n"
    )


def test_what_is_ignored_keeps_nothing_from_being_run(
    run, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_alike(monkeypatch, stage("load", "Net, 1 key"), stage("predict", "output 1×2"))
    rule = MASK + 'predict = true\nmodel = "nets:Net"\n'
    configure(project, '[verify]\npaths = ["models/mask.safetensors"]\nstrict = true\n' + rule)
    status, out, err = run("verify")
    assert (status, err) == (0, "")
    assert "load       passed   Net, 1 key" in out
    assert "predict    passed   output 1×2" in out


def test_what_can_not_be_loaded_stays_invalid(run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = error("missing-key", "the model has it, the checkpoint doesn't", "fc.weight")
    failed = stage("load", "it has no fc.weight", finding)
    answer_alike(monkeypatch, failed, stage("predict", "it was not loaded", is_skipped=True))
    rule = MASK.replace("infinity", "missing-key") + 'predict = true\nmodel = "nets:Net"\n'
    configure(project, '[verify]\npaths = ["models/mask.safetensors"]\n' + rule)
    status, out, err = run("verify")
    assert (status, out.split()[0]) == (1, "INVALID")
    assert err == (
        "ckpttool: error: ckpttool.toml[verify.rule 1]: ignore 1: missing-key in models/mask.safetensors "
        "can't be ignored: the model could not be loaded, so it was not run\n"
    )


def test_wishes_for_a_prediction_that_nothing_asks_for_are_refused(run, project: Path) -> None:
    configure(project, MASK)
    assert run("verify", "--record", "golden.npz", "models/guide.pth", "--config", "ckpttool.toml") == (
        2,
        "",
        "ckpttool: error: --record: no rule asks for a prediction (--predict does)\n",
    )


def test_trust_stands_in_no_file(run, project: Path) -> None:
    configure(project, '[[verify.rule]]\npath = "*"\ntrust = true\n')
    assert run("verify") == (
        2,
        "",
        "ckpttool: error: ckpttool.toml[verify.rule 1]: "
        "code in a checkpoint is only trusted on the command line: --trust\n",
    )
