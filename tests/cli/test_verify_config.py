"""``ckpttool verify`` with a configuration: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from ckpttool.core.report import error
from tests.support.commands import Run, refusals, transcript
from tests.support.golden import Golden
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


def test_without_a_path_and_a_configuration_nothing_is_looked_at(
    run: Run, project: Path, golden: Golden
) -> None:
    golden(refusals(run, "verify"))


def test_what_is_ignored_fails_nothing_and_stays(run: Run, project: Path, golden: Golden) -> None:
    configure(project, '[verify]\npaths = ["models"]\nstrict = true\n' + MASK)
    golden(transcript(run, (0, "verify")))
    status, out, err = run("verify", "--json")
    assert (status, err) == (0, "")
    golden(json.dumps([one["findings"] for one in json.loads(out)["checkpoints"]], indent=1))


def test_with_a_path_no_configuration_is_read(run, project: Path) -> None:
    configure(project, "this is no TOML")
    assert run("verify", "models/guide.pth").status == 0
    assert run("verify", "--strict", "-q", "models").status == 1


def test_a_named_one_applies_to_given_paths(run, project: Path) -> None:
    configure(project, '[verify]\npaths = ["nowhere"]\nstrict = true\n' + MASK)
    assert run("verify", "--config", "ckpttool.toml", "-q", "models") == (0, "", "")


def test_a_path_that_is_not_there_is_an_error(run: Run, project: Path, golden: Golden) -> None:
    configure(project, '[verify]\npaths = ["models", "nowhere"]\n')
    golden(transcript(run, (2, "verify")))


def test_what_means_nothing_is_a_warning(run: Run, project: Path, golden: Golden) -> None:
    configure(project, MASK.replace("infinity", "nan") + '[[verify.rule]]\npath = "*.pt"\n')
    golden(transcript(run, (0, "verify -q"), (0, "verify -q --quick")))


def test_dangerous_code_stays_unsafe(run: Run, project: Path, files: Path, golden: Golden) -> None:
    shutil.copy(files / "hostile" / "call_global.pth", project / "stranger.pth")
    (finding,) = json.loads(run("verify", "--json", "stranger.pth").out)["checkpoints"][0]["findings"]
    ignore = f'ignore = [{{code = "{finding["code"]}", reason = "ours"}}]'
    configure(project, f'[[verify.rule]]\npath = "stranger.pth"\n{ignore}\n')
    told = transcript(run, (1, "verify"))
    assert "UNSAFE   stranger.pth" in told and "ignored" not in told.replace("can't be ignored", "")
    golden(told)


def test_predictions(run: Run, project: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is ignored keeps nothing from being run, and what can't be loaded stays invalid."""
    predict = 'predict = true\nmodel = "nets:Net"\n'
    head = '[verify]\npaths = ["models/mask.safetensors"]\nstrict = true\n'
    with monkeypatch.context() as patch:
        answer_alike(patch, stage("load", "Net, 1 key"), stage("predict", "output 1×2"))
        configure(project, head + MASK + predict)
        golden(transcript(run, (0, "verify --config ckpttool.toml")))
    finding = error("missing-key", "in the model, but not in the checkpoint", "fc.weight")
    failed = stage("load", "it has no fc.weight", finding)
    answer_alike(monkeypatch, failed, stage("predict", "it was not loaded", is_skipped=True))
    configure(
        project, head.replace("strict = true\n", "") + MASK.replace("infinity", "missing-key") + predict
    )
    golden(transcript(run, (1, "verify --config ckpttool.toml")))


def test_what_is_refused(run: Run, project: Path, golden: Golden) -> None:
    """Options of a prediction that nothing asks for, and trust in a file."""
    configure(project, MASK)
    golden(refusals(run, "verify --record golden.npz models/guide.pth --config ckpttool.toml"))
    configure(project, '[[verify.rule]]\npath = "*"\ntrust = true\n')
    golden(refusals(run, "verify"))


# Paths and --config auto ----------------------------------------------------------------------------

STRICT = "[verify]\nstrict = true\n"
UNREAD = "ckpttool: {} is not read when paths are named (--config auto reads it)\n"


def test_a_configuration_that_is_not_read_is_named(run: Run, project: Path) -> None:
    configure(project, STRICT)
    for path in ("models", "models/guide.pth", "./models/", "models/../models/guide.pth"):
        status, _, err = run("verify", path)
        assert (status, err) == (0, UNREAD.format("ckpttool.toml"))
        assert run("verify", "-q", path).err == ""


def test_the_nearest_is_named_once(run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(project, STRICT)
    configure(project / "models", STRICT)
    nearest = os.path.join("models", "ckpttool.toml")
    assert run("verify", "models/guide.pth", "models/mask.safetensors").err == UNREAD.format(nearest)
    monkeypatch.chdir(project / "models")
    assert run("verify", "guide.pth").err == UNREAD.format("ckpttool.toml")
    (project / "models" / "ckpttool.toml").unlink()
    assert run("verify", "guide.pth").err == UNREAD.format(os.path.join("..", "ckpttool.toml"))


def test_outside_of_a_repository_only_the_directory_counts(run, project: Path) -> None:
    (project / ".git").rmdir()
    configure(project, STRICT)
    assert run("verify", "models/guide.pth").err == ""
    configure(project / "models", STRICT)
    nearest = os.path.join("models", "ckpttool.toml")
    assert run("verify", "models/guide.pth").err == UNREAD.format(nearest)
    told = "ckpttool: error: --config auto: no configuration for away (omit --config)\n"
    (project / "away").mkdir()
    assert run("verify", "--config", "auto", "away") == (2, "", told)


def test_one_is_named_if_it_says_something_of_it(run: Run, project: Path) -> None:
    silent = (
        "",
        "[verify]\n",
        "[verify]\n# strict = true\n\n[retention]\nkeep-last = 1\n",
        "[retention]\nkeep-last = 1\n",
        "#[verify]\n#strict = true\n",
    )
    named = (
        "[verify] # all\r\n\r\n # more\r\n paths = ['a']\r\n",
        "[[verify.rule]]\npath='a'",
        "verify.strict=true",
    )
    for text in (*silent, *named):
        configure(project, text)
        said = UNREAD.format("ckpttool.toml") if text in named else ""
        assert run("verify", "models/guide.pth").err == said, text


def test_what_init_writes_is_not_named(run, project: Path) -> None:
    assert run("init").status == 0
    assert run("verify", "models").err == ""


def test_a_configuration_that_is_not_read_is_not_parsed(
    run, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser of TOML can be made to take all memory by few bytes."""
    configure(project, STRICT)

    def parse(text: str) -> dict[str, object]:
        raise AssertionError("it was parsed")

    monkeypatch.setattr("ckpttool.containers.toml.parse_toml", parse)
    (project / "models" / "pyproject.toml").write_text("[tool.ckpttool.verify]\nstrict = true\n")
    status, out, err = run("verify", "models")
    assert (status, err) == (0, UNREAD.format("ckpttool.toml"))
    assert "✓ valid    models/guide.pth" in out


def test_through_a_link_the_real_directory_counts(run, project: Path, tmp_path_factory) -> None:
    configure(project, STRICT)
    away = tmp_path_factory.mktemp("away")
    shutil.copytree(project / "models", away / "models")
    configure(away, STRICT)
    (project / "linked").symlink_to(away / "models")
    assert run("verify", "linked").err == ""
    assert run("verify", "--config", "auto", "linked").status == 2
    (away / ".git").mkdir()
    assert run("verify", "linked").err == UNREAD.format(away / "ckpttool.toml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_of_its_name_makes_nobody_wait(run, project: Path) -> None:
    os.mkfifo(project / "ckpttool.toml")
    assert run("verify", "models/guide.pth")[::2] == (0, "")


def test_auto_reads_the_nearest(run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(project, '[verify]\npaths = ["nowhere"]\nstrict = true\n')
    assert run("verify", "--config", "auto", "-q", "models").status == 1
    configure(project, STRICT + MASK)
    assert run("verify", "--config", "auto", "-q", "models") == (0, "", "")
    monkeypatch.chdir(project / "models")
    assert run("verify", "--config", "auto", "-q", "mask.safetensors") == (0, "", "")
    assert run("verify", "--strict", "-q", "mask.safetensors").status == 1


def test_auto_without_a_path_is_the_default(run, project: Path) -> None:
    configure(project, '[verify]\npaths = ["models"]\n')
    assert run("verify", "--config", "auto") == run("verify")
    (project / "ckpttool.toml").unlink()
    assert run("verify", "--config", "auto") == run("verify")
    assert run("verify").status == 2


def test_auto_needs_one_for_all_paths(run, project: Path) -> None:
    configure(project / "models", STRICT)
    (project / "other").mkdir()
    told = "ckpttool: error: --config auto: {} (verify them separately, or name one)\n".format
    config = os.path.join("models", "ckpttool.toml")
    wrong = told(f"{config} applies to models, but not to other")
    assert run("verify", "--config", "auto", "models", "other") == (2, "", wrong)
    configure(project / "other", STRICT)
    assert run("verify", "--config", "auto", "models", "other") == (2, "", wrong)


def test_auto_is_not_a_word_of_trust(run, project: Path) -> None:
    configure(project, STRICT)
    (project / "ckpttool.toml").chmod(0o666)
    err = run("verify", "--config", "auto", "models").err
    assert err.startswith("ckpttool: error: ckpttool.toml: every user can write to it, so it is not trusted")
