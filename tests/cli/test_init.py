"""``ckpttool init`` and ``ckpttool config``: a configuration to start from, and what is in force."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool import UsageError
from ckpttool.cli.config import read_document
from ckpttool.cli.config_commands import config_entries, config_template
from ckpttool.containers.toml import parse_toml
from tests.support.commands import Run, refusals, transcript
from tests.support.configs import all_keys, write
from tests.support.golden import Golden

pytestmark = pytest.mark.usefixtures("home")

_COMMENTED = re.compile(r"^#(?=[a-z\[])", re.MULTILINE)
"""A line that sets something; prose has a space behind its #."""

# init -----------------------------------------------------------------------------------------------


def test_it_writes_a_file_that_changes_nothing(run: Run) -> None:
    assert run("init").status == 0
    assert parse_toml(Path("ckpttool.toml").read_text("utf-8")) == {
        "verify": {},
        "retention": {},
        "watch": {},
    }
    assert not [one for one in config_entries(read_document("ckpttool.toml")) if one.is_from_file]
    assert config_entries(read_document("ckpttool.toml")) == config_entries(None)


def test_prune_and_list_do_what_they_did_without_it(run: Run, files: Path) -> None:
    Path("runs").mkdir()
    for epoch in (1, 2):
        write(Path(f"runs/m_epoch_{epoch}.pth"), "").write_bytes(
            (files / "pytorch" / "minimal.pth").read_bytes()
        )
    commands = (("list",), ("prune", "-n"), ("prune", "runs", "--keep", 1, "-n"), ("rename", "-n"))
    before = [run(*command) for command in commands]
    run("init")
    for command, answer in zip(commands, before, strict=True):
        expected = answer.err.replace(
            "-e{epoch:04d}')", "-e{epoch:04d}'; ckpttool.toml has no template in [naming])"
        )
        assert run(*command) == (answer.status, answer.out, expected), command


def test_every_key_is_in_it(run: Run) -> None:
    run("init", "-q")
    text = Path("ckpttool.toml").read_text("utf-8")
    assert parse_toml(_COMMENTED.sub("", text))["verify"]["rule"][0]["predict"] is True
    for name, known in all_keys().items():
        for key in () if name == "naming" else known:
            assert f"\n#{key} = " in text or f"\n#[[{name}.{key}]]" in text, key


def single_keys() -> Iterator[tuple[str, str]]:
    """Yield each line of the template that sets a key, below its heading."""
    heading = ""
    for line in config_template().splitlines():
        if line.lstrip("#").startswith("["):
            heading = line.lstrip("#")
        elif _COMMENTED.match(line):
            yield heading, line[1:]


NEED = {
    "keep-best": "metric = 'loss'",
    "keep-best-runs": "metric = 'loss'",
    "metric": "keep-best = 1",
    "mode": "keep-best = 1\nmetric = 'loss'",
    "dtype": "full = 1",
    "incomplete": "keep-last = 1",
    "path": "keep-last = 1",
}
"""What some rules of a policy can't be without."""


def test_each_line_is_right_once_it_is_uncommented() -> None:
    every = [*single_keys()]
    assert len(every) > 50
    for heading, line in every:
        key = line.partition(" = ")[0]
        lines = [heading, line]
        if heading.startswith("[[") and key != "path":
            lines.append("path = 'runs'")
        if "retention" in heading:
            lines.append(NEED.get(key, ""))
        write(Path("ckpttool.toml"), "\n".join(lines))
        entries = {one.key: one for one in config_entries(read_document("ckpttool.toml")) if one.is_from_file}
        assert entries[key].value == parse_toml(line)[key], (heading, line)


def test_what_it_says(run: Run, golden: Golden) -> None:
    """A configuration that is there is kept, and so is a link to nowhere; one above is told."""
    Path("sub").mkdir()
    golden(transcript(run, (0, "init"), (2, "init"), (0, "init sub"), (2, "init nowhere")))
    write(Path("ckpttool.toml"), "[verify]\n")
    assert run("init").status == 2
    assert Path("ckpttool.toml").read_text("utf-8") == "[verify]\n"
    Path("ckpttool.toml").unlink()
    Path("ckpttool.toml").symlink_to("elsewhere.toml")
    assert run("init").status == 2
    assert not Path("elsewhere.toml").exists()
    Path("ckpttool.toml").unlink()
    write(Path("pyproject.toml"), "[tool.ckpttool.verify]\nstrict = true\n")
    golden(transcript(run, (2, "init")))
    write(Path("pyproject.toml"), "[project]\n")
    assert run("init").status == 0


@pytest.mark.skipif(not hasattr(os, "umask"), reason="there are no modes")
def test_it_is_trusted_whatever_the_umask(run: Run) -> None:
    before = os.umask(0)
    try:
        assert run("init").status == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path("ckpttool.toml").stat().st_mode) == 0o644


# config ---------------------------------------------------------------------------------------------


def test_what_is_in_force_and_where_it_comes_from(run: Run) -> None:
    write(
        Path("ckpttool.toml"),
        """\
        [verify]
        strict = true
        [[verify.rule]]
        path = "a/*.pth"
        model-args = {depth = 18, "two words" = [1.5, false]}
        [retention]
        keep-last = 3
        """,
    )
    Path("a").mkdir()
    status, out, err = run("config", "a")
    assert (status, err) == (0, "")
    head, *lines = out.splitlines()
    assert head == "ckpttool.toml (not trusted)"
    rows = {name: [value, source] for name, value, source in (re.split(r"  +", line) for line in lines)}
    assert len(rows) == len(lines) == len(config_entries(None)) + 2
    assert rows["verify.paths"] == ['["."]', "default"]
    assert rows["verify.exclude"] == ["-", "default"]
    assert rows["verify.strict"] == ["true", "file"]
    assert rows["verify.rule.1.path"] == ['"a/*.pth"', "file"]
    assert rows["verify.rule.1.model-args"] == [
        '{depth = 18, "two words" = [1.5, false]}',
        "file, refused",
    ]
    assert rows["retention.keep-last"] == ["3", "file"]
    assert rows["retention.verify"] == ['"full"', "default"]
    assert rows["naming.template"] == ["-", "default"]


def test_the_document(run: Run) -> None:
    write(Path("ckpttool.toml"), "[[verify.rule]]\npath = 'a'\npredict = true\n")
    status, out, err = run("config", "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert (document["schema"], document["path"]) == ("ckpttool.config/1", "ckpttool.toml")
    values = document["values"]
    predict = {"table": "verify", "rule": 1, "key": "predict", "value": True, "source": "file"}
    assert {**predict, "refused": True} in values
    strict = {"table": "verify", "rule": None, "key": "strict", "value": False, "source": "default"}
    assert {**strict, "refused": False} in values
    assert document["trusted"] is False
    run("config", "--trust")
    trusted = json.loads(run("config", "--json").out)
    assert (trusted["trusted"], {**predict, "refused": False} in trusted["values"]) == (True, True)


def test_without_a_file_it_says_so(run: Run, golden: Golden) -> None:
    golden(transcript(run, (0, "config")))
    assert " file\n" not in run("config").out
    assert json.loads(run("config", "--json").out)["path"] is None


def test_a_wrong_one_is_an_error(run: Run, golden: Golden) -> None:
    said = {}
    for text in (
        "[verify]\nstrict = 1\n",
        "[retention]\nkeep-lats = 1\n",
        "[naming]\ntemplate = 1\n",
        "naming = 1\n",
    ):
        write(Path("ckpttool.toml"), text)
        said[repr(text)] = refusals(run, "config").splitlines()[1]
    golden(said | {"a directory that is not there": refusals(run, "config sub").splitlines()[1]})


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no such owners")
def test_one_that_is_not_trusted_is_not_in_force(run: Run, golden: Golden) -> None:
    write(Path("ckpttool.toml"), "[verify]\n").chmod(0o666)
    golden(refusals(run, "config"))
    with pytest.raises(UsageError):
        config_entries(read_document("ckpttool.toml"))
