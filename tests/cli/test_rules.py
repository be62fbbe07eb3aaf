"""The rules of a configuration: what they may say, and what they ask of a checkpoint."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from ckpttool import Finding, Safety, Severity, UsageError, Verification
from ckpttool.cli.config import find_config, read_document
from ckpttool.cli.config_keys import keys
from ckpttool.cli.verify_config import VerifyRule, matches, read_config, settings_for, unused_rules
from ckpttool.containers.toml import as_toml
from ckpttool.ops.ignored_findings import Ignore
from tests.support.configs import verify_config_of
from tests.support.golden import Golden, refusal
from tests.support.predictions import request

pytestmark = pytest.mark.usefixtures("home")


def rule(lines: str) -> str:
    return '[[verify.rule]]\npath = "*.pth"\n' + textwrap.dedent(lines)


WRONG = [
    *(
        "trust = true",
        "record = 'x.npz'",
        "model_args = {}",
        "predict = 'yes'",
    ),
    *(
        "model = 'models.py'",
        "model-args = [1]",
        "model-args = {day = 2026-01-02}",
        "input = ''",
    ),
    *(
        'input = "a\\u0000b"',
        "input-shape = '1,10'",
        "input-shape = ['1,x']",
    ),
    *(
        "input = 'x.npz'\ninput-shape = ['1']",
        "batch-size = 0",
        "batch-size = true",
        "seed = 1.5",
    ),
    *(
        "rtol = -1",
        "atol = nan",
        "min-accuracy = 95",
        "min-accuracy = -1",
        "timeout = 0",
        "timeout = '60s'",
        "memory = '8'",
    ),
    *(
        "model = 1",
        "state-key = false",
        "input-shapes = ['1']",
        "ignore = [{code = 'a', reason = 'x'}, {code = 'b', reason = 1}]",
    ),
    *(
        "ignore = ['infinity']",
        "ignore = [{code = 'infinity'}]",
    ),
    *(
        "ignore = [{code = 'infinity', reason = ' '}]",
        "ignore = [{reason = 'x'}]",
    ),
    *("ignore = [{code = 'a', reason = 'x', glob = 'x'}]",),
]


def test_what_is_wrong(golden: Golden) -> None:
    said = {lines: refusal(verify_config_of, rule("seed = 1") + "\n" + rule(lines)) for lines in WRONG}
    for glob in ("/m.pth", "../m.pth", "a//m.pth", "**.pth", "[ab.pth", ""):
        said[f"path = {glob!r}"] = refusal(verify_config_of, f"[[verify.rule]]\npath = '{glob}'\n")
    said["no path"] = refusal(verify_config_of, "[[verify.rule]]\npredict = true\n")
    golden({name.replace("\n", "; "): text for name, text in said.items()})


def test_sizes() -> None:
    sizes = {5: 5, "10B": 10, "1.5 kB": 1500, "8GB": 8 * 10**9, "2GiB": 2**31, "1MiB": 2**20}
    for text, size in sizes.items():
        config = verify_config_of(rule(f"memory = {as_toml(text)}"))
        assert config.rules[0].prediction_options == {"memory": size}
    for wrong in ("", "GB", "0GB", "-1GB", "8gb", "8 Gb", True, 0, -1, 1.5):
        shown = str(wrong).lower() if wrong is True else repr(wrong)
        assert refusal(verify_config_of, rule(f"memory = {as_toml(wrong)}")) == (
            f"ckpttool.toml[verify.rule 1]: memory is {shown} (a size like 512MB, 8GB or 8GiB)"
        )


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
    names = {row.name for row in keys(VerifyRule).values()}
    own = {"glob", "predict", "ignores"}
    assert names - own == set(type(request()).__dataclass_fields__) - {"trust", "record"}


GLOBS = [
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
]


def test_globs() -> None:
    for glob, path, does_match in GLOBS:
        read = verify_config_of(f"[[verify.rule]]\npath = '{glob}'\n").rules[0].glob
        assert matches(read, path) is does_match, (glob, path)


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
        "ckpttool.toml[verify.rule 1], ckpttool.toml[verify.rule 2]: for m.pth: --labels requires --input"
    )


def test_how_without_whether_is_told() -> None:
    config = verify_config_of(rule('model = "models.py:SimpleModel"'))
    with pytest.raises(UsageError) as failure:
        settings_for(config, "m.pth")
    assert str(failure.value) == (
        "ckpttool.toml[verify.rule 1]: it has prediction keys, but no predict (set predict = true or false)"
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
        "ckpttool.toml[verify.rule 1]: ignore 2: no finding nan at '*.pad'",
        "ckpttool.toml[verify.rule 2]: no checkpoint matches '*.pt'",
    ]
