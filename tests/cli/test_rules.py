"""The rules of a configuration: what they may say, and what they ask of a checkpoint."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from ckpttool import Finding, Safety, Severity, UsageError, Verification
from ckpttool.cli.config import WrongValue, find_config, parse_bytes, read_document
from ckpttool.cli.verify_config import KEYS, matches, read_config, settings_for, unused_rules
from ckpttool.ops.ignored_findings import Ignore
from tests.support.configs import verify_config_of
from tests.support.predictions import request

pytestmark = pytest.mark.usefixtures("home")


def rule(lines: str) -> str:
    return '[[verify.rule]]\npath = "*.pth"\n' + textwrap.dedent(lines)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("trust = true", "code in a checkpoint is only trusted on the command line: --trust"),
        ("record = 'x.npz'", "recordings are only made on the command line: --record FILE"),
        ("model_args = {}", f"unknown key model_args (there are path, predict, ignore, {', '.join(KEYS)})"),
        ("predict = 'yes'", "predict is 'yes' (true or false)"),
        ("model = 'models.py'", "model is 'models.py' (package.module:Name or file.py:Name)"),
        ("model-args = [1]", "model-args is [1] (a table of texts, numbers, truth values, lists and tables)"),
        ("model-args = {day = 2026-01-02}", "model-args is {'day': datetime.date(2026, 1, 2)} (a table of"),
        ("input = ''", "input is '' (a text)"),
        ('input = "a\\u0000b"', "input is 'a\\x00b' (a text)"),
        ("input-shape = '1,10'", "input-shape is '1,10' (a list of at least one text)"),
        ("input-shape = ['1,x']", "no input shape: '1,x' (like 1,3,224,224"),
        ("input = 'x.npz'\ninput-shape = ['1']", "input and input-shape contradict each other"),
        ("batch-size = 0", "batch-size is 0 (a whole number of 1 or more)"),
        ("batch-size = true", "batch-size is true (a whole number of 1 or more)"),
        ("seed = 1.5", "seed is 1.5 (a whole number of 0 or more)"),
        ("rtol = -1", "rtol is -1 (a number of 0 or more)"),
        ("atol = nan", "atol is nan (a number of 0 or more)"),
        ("min-accuracy = 95", "min-accuracy is 95 (a number from 0 to 1)"),
        ("timeout = 0", "timeout is 0 (a number of seconds above 0)"),
        ("memory = '8'", "memory is '8' (a size like 512MB, 8GB or 8GiB)"),
        ("ignore = ['infinity']", "ignore is ['infinity'] (a list like [{code"),
        ("ignore = [{code = 'infinity'}]", "ignore.reason is missing (why it is of no matter)"),
        ("ignore = [{code = 'infinity', reason = ' '}]", "ignore.reason is ' ' (why it is of no matter)"),
        ("ignore = [{reason = 'x'}]", "ignore.code is missing (a finding's code, as findings"),
        ("ignore = [{code = 'a', reason = 'x', glob = 'x'}]", "unknown key ignore.glob (there are code"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_one_clear_error(lines: str, error: str) -> None:
    with pytest.raises(UsageError) as failure:
        verify_config_of(rule("seed = 1") + "\n" + rule(lines))
    assert str(failure.value).startswith(f"ckpttool.toml[verify.rule 2]: {error}")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("glob", "allowed"),
    [
        ("/m.pth", "a glob below the directory of this file"),
        ("../m.pth", "a glob below the directory of this file"),
        ("a//m.pth", "a glob like models/*.pth"),
        ("**.pth", "a glob like models/*.pth"),
        ("[ab.pth", "each [ needs its ]"),
        ("", "a text"),
    ],
)
def test_a_wrong_glob_is_told(glob: str, allowed: str) -> None:
    with pytest.raises(UsageError) as failure:
        verify_config_of(f"[[verify.rule]]\npath = '{glob}'\n")
    assert str(failure.value).startswith(f"ckpttool.toml[verify.rule 1]: path is {glob!r} ({allowed}")


def test_a_rule_needs_a_path() -> None:
    with pytest.raises(UsageError, match=r"^ckpttool.toml\[verify.rule 1\]: path is missing"):
        verify_config_of("[[verify.rule]]\npredict = true\n")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(5, 5), ("10B", 10), ("1.5 kB", 1500), ("8GB", 8 * 10**9), ("2GiB", 2**31), ("1MiB", 2**20)],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_bytes(text, "memory") == nbytes


@pytest.mark.parametrize("text", ["", "GB", "0GB", "-1GB", "8gb", "8 Gb", True, 0, 1.5, None])
def test_wrong_sizes(text: object) -> None:
    with pytest.raises(WrongValue):
        parse_bytes(text, "memory")


# What is asked --------------------------------------------------------------------------------------


def test_a_rule_becomes_a_request(tmp_path: Path) -> None:
    config = verify_config_of(
        """
        [[verify.rule]]
        path = "models/resnet*.pth"
        predict = true
        model = "models.py:SimpleModel"
        model-args = {depth = 18, sizes = [1, 2]}
        optimizer = "torch.optim:Adam"
        optimizer-args = {lr = 0.1}
        state-key = "model"
        input-shape = ["1,10", "ids=1,16:int64:0..100"]
        signature = "score"
        batch-size = 2
        seed = 3
        expect = "golden/x.npz"
        rtol = 1e-3
        atol = 0
        resume-step = true
        timeout = 60
        memory = "8GB"
        """
    )
    assert settings_for(config, "models/resnet18.pth").request == request(
        model=f"{tmp_path}{os.sep}models.py:SimpleModel",
        model_args={"depth": 18, "sizes": [1, 2]},
        optimizer="torch.optim:Adam",
        optimizer_args={"lr": 0.1},
        state_key="model",
        shapes="1,10 ids=1,16:int64:0..100",
        signature="score",
        batch_size=2,
        seed=3,
        expect=str(tmp_path / "golden" / "x.npz"),
        rtol=0.001,
        atol=0.0,
        resume_step=True,
        timeout=60.0,
        memory=8_000_000_000,
    )


def test_a_labelled_batch(tmp_path: Path) -> None:
    lines = 'predict = true\ninput = "x.npz"\nlabels = "y.npy"\nmin-accuracy = 1\nmax-error = 0.5\n'
    assert settings_for(verify_config_of(rule(lines)), "m.pth").request == request(
        input=str(tmp_path / "x.npz"), labels=str(tmp_path / "y.npy"), min_accuracy=1.0, max_error=0.5
    )


def test_every_key_is_an_attribute_of_a_request() -> None:
    attributes = {"input-shape": "input_shapes"}
    names = {attributes.get(key, key.replace("-", "_")) for key in KEYS}
    assert names == set(type(request()).__dataclass_fields__) - {"trust", "record"}


@pytest.mark.parametrize(
    ("glob", "path", "does_match"),
    [
        ("*.pth", "m.pth", True),
        ("*.pth", "a/m.pth", False),
        ("./*.pth", "m.pth", True),
        ("a/*.pth", "a/m.pth", True),
        ("a/*", "a/b/c", False),
        ("**", "a/b/c", True),
        ("**/*.pth", "m.pth", True),
        ("**/*.pth", "a/b/m.pth", True),
        ("a/**/m.pth", "a/m.pth", True),
        ("a/**/m.pth", "a/b/c/m.pth", True),
        ("a/**/m.pth", "b/a/m.pth", False),
        ("a/**", "a", True),
        ("**/a/**/b", "x/a/y/a/z/b", True),
        ("runs/ckpt-[0-9]/", "runs/ckpt-5", True),
        ("M.pth", "m.pth", False),
        ("**", "../m.pth", False),
        ("/".join(["**"] * 40) + "/x", "/".join("a" * 200), False),
    ],
)
def test_globs(glob: str, path: str, does_match: bool) -> None:
    glob = verify_config_of(f"[[verify.rule]]\npath = '{glob}'\n").rules[0].glob
    assert matches(glob, path) is does_match


def test_later_rules_override_key_by_key() -> None:
    config = verify_config_of(
        """
        [[verify.rule]]
        path = "**"
        predict = true
        seed = 1
        timeout = 60
        ignore = [{code = "infinity", reason = "masks"}]
        [[verify.rule]]
        path = "a/*"
        seed = 2
        ignore = [{code = "nan", reason = "padding", where = "*.pad"}]
        [[verify.rule]]
        path = "a/raw.pth"
        predict = false
        ignore = []
        """
    )
    first, second, third = (settings_for(config, path) for path in ("m.pth", "a/m.pth", "./a/raw.pth"))
    assert first.request == request(seed=1, timeout=60)
    assert first.ignores == (Ignore("infinity", "masks", None, "ckpttool.toml[verify.rule 1]: ignore 1"),)
    assert second.request == request(seed=2, timeout=60)
    assert second.ignores == (Ignore("nan", "padding", "*.pad", "ckpttool.toml[verify.rule 2]: ignore 1"),)
    assert (third.request, third.ignores, third.rules) == (None, (), config.rules)


def test_what_replaces_each_other_does_not_contradict(tmp_path: Path) -> None:
    config = verify_config_of(rule('predict = true\ninput = "x.npz"') + "\n" + rule('input-shape = ["1,10"]'))
    assert settings_for(config, "m.pth").request == request(shapes="1,10")
    assert settings_for(config, "m.pth", given={"input": "y.npz"}).request == request(input="y.npz")


def test_the_command_line_comes_last() -> None:
    config = verify_config_of(rule("predict = false\nseed = 1\nrtol = 0.5"))
    assert settings_for(config, "m.pth").request is None
    assert settings_for(config, "m.pth", predict=True, given={"seed": 9}).request == request(seed=9, rtol=0.5)
    assert settings_for(config, "other.pt", predict=True).request == request()


def test_rules_that_contradict_each_other_are_told() -> None:
    config = verify_config_of(rule('predict = true\nlabels = "y.npy"') + "\n" + rule("min-accuracy = 0.9"))
    with pytest.raises(UsageError) as failure:
        settings_for(config, "m.pth")
    assert str(failure.value) == (
        "ckpttool.toml[verify.rule 1], ckpttool.toml[verify.rule 2]: for m.pth: "
        "--labels needs the --input that it labels"
    )


def test_how_without_whether_is_told() -> None:
    config = verify_config_of(rule('model = "models.py:SimpleModel"'))
    with pytest.raises(UsageError) as failure:
        settings_for(config, "m.pth")
    assert str(failure.value) == (
        "ckpttool.toml[verify.rule 1]: it says how to predict, and not whether (predict = true or false)"
    )
    assert settings_for(config, "other.pt").request is None


def test_rules_hold_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_config_of("[[verify.rule]]\npath = 'models/*.pth'\npredict = true\n")
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    config = read_config(read_document(find_config() or ""))
    assert settings_for(config, "../models/m.pth").request == request()
    assert settings_for(config, str(tmp_path / "models" / "m.pth")).request == request()
    assert settings_for(config, "models/m.pth").request is None


def test_links_keep_the_names_that_people_see(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "models").symlink_to("disk")
    config = verify_config_of("[[verify.rule]]\npath = 'models/*.pth'\npredict = true\n")
    assert settings_for(config, "models/m.pth").request == request()


INF = Finding("infinity", Severity.WARNING, "2 infinities", "layer.mask", check="values")


def verified(path: str, *findings: Finding) -> Verification:
    return Verification(path, "pytorch", "zip", Safety.SAFE, (), findings)


def test_what_means_nothing_is_told() -> None:
    ignored = 'ignore = [{code = "infinity", reason = "x"}, {code = "nan", reason = "x", where = "*.pad"}]'
    config = verify_config_of(
        rule(ignored) + "\n[[verify.rule]]\npath = '*.pt'\nignore = [{code = 'x', reason = 'x'}]\n"
    )
    judged = [
        (settings_for(config, "a.pth"), verified("a.pth")),
        (settings_for(config, "b.pth"), verified("b.pth", INF)),
    ]
    assert unused_rules(config, judged) == [
        "ckpttool.toml[verify.rule 1]: ignore 2: there is no finding nan at '*.pad'",
        "ckpttool.toml[verify.rule 2]: no checkpoint matches '*.pt'",
    ]
