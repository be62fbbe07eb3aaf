"""The configuration: where it is found, when it is believed, and what it may say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ckpttool import CheckpointError, NotFound, UsageError
from ckpttool.cli import config as reading
from ckpttool.cli.config import find_config, read_document
from ckpttool.cli.config_keys import keys
from ckpttool.cli.verify_config import VerifyConfig, VerifyRule, read_config
from tests.support.configs import verify_config_of, write
from tests.support.golden import Golden, refusal

pytestmark = pytest.mark.usefixtures("home")


# Finding --------------------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is() -> None:
    assert find_config() is None


def test_the_nearest_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "ckpttool.toml", "")
    write(tmp_path / "a" / "ckpttool.toml", "")
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    assert find_config(str(tmp_path / "a" / "b" / "c")) == str(tmp_path / "a" / "ckpttool.toml")
    for directory, found in {
        ".": "ckpttool.toml",
        "a": "ckpttool.toml",
        "a/b/c": "../../ckpttool.toml",
    }.items():
        monkeypatch.chdir(tmp_path / directory)
        assert find_config() == found.replace("/", os.sep)


def test_a_project_counts_only_with_our_table(tmp_path: Path) -> None:
    write(tmp_path / "ckpttool.toml", "")
    project = write(tmp_path / "a" / "pyproject.toml", "[tool.other]\n")
    assert find_config(str(tmp_path / "a")) == str(tmp_path / "ckpttool.toml")
    write(project, "[tool.ckpttool.verify]\nstrict = true\n")
    assert find_config(str(tmp_path / "a")) == str(project)
    write(tmp_path / "a" / "ckpttool.toml", "")
    assert find_config(str(tmp_path / "a")) == str(tmp_path / "a" / "ckpttool.toml")


@pytest.mark.parametrize("is_file", [False, True], ids=["clone", "worktree"])
def test_the_search_ends_with_the_repository(tmp_path: Path, is_file: bool) -> None:
    write(tmp_path / "ckpttool.toml", "")
    inner = tmp_path / "repository" / "models"
    inner.mkdir(parents=True)
    mark = inner.parent / ".git"
    mark.write_text("gitdir: elsewhere") if is_file else mark.mkdir()
    assert find_config(str(inner)) is None
    own = write(inner.parent / "ckpttool.toml", "")
    assert find_config(str(inner)) == str(own)


def test_the_search_ends_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "ckpttool.toml", "")
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    assert find_config(str(home / "work")) is None


def test_the_search_ends_with_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "ckpttool.toml", "")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    monkeypatch.setattr(reading, "_device", lambda directory: int(Path(directory) == mounted))
    assert find_config(str(mounted)) is None


def test_a_broken_project_on_the_way_is_told(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "[tool")
    with pytest.raises(UsageError, match=r"^pyproject.toml is not valid TOML: "):
        find_config()


# Believing ------------------------------------------------------------------------------------------

_POSIX = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no such owners")


@_POSIX
def test_what_others_may_write_is_not_believed_unless_named(golden: Golden) -> None:
    path = write(Path("ckpttool.toml"), "[verify]\nstrict = true\n")
    for mode in (0o602, 0o666):
        path.chmod(mode)
        said = refusal(lambda: read_config(read_document("ckpttool.toml")))
        assert read_config(read_document("ckpttool.toml", is_named=True)).strict
    golden(said)


@_POSIX
def test_a_pipe_is_no_configuration_and_makes_nobody_wait() -> None:
    os.mkfifo("ckpttool.toml")
    with pytest.raises(CheckpointError, match=r"^ckpttool.toml: not a regular file"):
        read_config(read_document("ckpttool.toml", is_named=True))


def test_a_huge_file_is_no_configuration() -> None:
    Path("c.toml").write_bytes(b"#" * (reading.MAX_BYTES + 1))
    with pytest.raises(
        UsageError, match=r"^c.toml: too large for a configuration \(limit: 1,048,576 bytes\)"
    ):
        read_config(read_document("c.toml", is_named=True))


def test_a_missing_file_is_told() -> None:
    with pytest.raises(NotFound, match=r"^c.toml: no such file or directory"):
        read_config(read_document("c.toml", is_named=True))
    Path("ckpttool.toml").symlink_to("nowhere")
    assert find_config() == "ckpttool.toml"
    with pytest.raises(CheckpointError, match=r"a link to nowhere, which does not exist"):
        read_config(read_document("ckpttool.toml"))


# Reading --------------------------------------------------------------------------------------------


def test_an_empty_one_asks_for_the_directory_it_lies_in() -> None:
    assert verify_config_of("") == VerifyConfig("ckpttool.toml", (".",))


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[verify]\npaths = ["models/", "../other"]\nexclude = ["*.tmp"]\nstrict = true\n'
    config = verify_config_of(text)
    assert config == VerifyConfig("ckpttool.toml", ("models", os.path.join("..", "other")), ("*.tmp",), True)
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    found = find_config()
    assert found is not None
    assert read_config(read_document(found)).paths == (
        os.path.join("..", "models"),
        os.path.join("..", "..", "other"),
    )
    assert read_config(read_document(found)).directory == str(tmp_path)


def test_a_project_has_the_same_tables(tmp_path: Path) -> None:
    write(
        Path("pyproject.toml"),
        '[tool.ckpttool.verify]\nstrict = true\n[[tool.ckpttool.verify.rule]]\npath = "a"\n',
    )
    config = read_config(read_document("pyproject.toml"))
    assert config.strict
    assert [one.origin for one in config.rules] == ["pyproject.toml[tool.ckpttool.verify.rule 1]"]


def test_room_is_left_for_other_commands() -> None:
    write(Path("ckpttool.toml"), "[retention]\nkeep-last = 3\n")
    assert read_config(read_document("ckpttool.toml")).rules == ()
    assert read_document("ckpttool.toml").tables["retention"] == {"keep-last": 3}


NO_TOML = [
    ("[verify", "ckpttool.toml is not valid TOML: Expected"),
    ("a = " + "[" * 5000, "ckpttool.toml is not valid TOML: "),
    ("[verify]\nstrict = 0x" + "f" * 5000, "ckpttool.toml is not valid TOML: Exceeds the limit"),
]
WRONG = [
    *(
        "[prune]",
        "[[rule]]",
        "[verify]\nfast = 1",
        "verify = 1",
        "[verify]\npath = 1",
    ),
    *(
        "[verify]\npaths = 'a'",
        "[verify]\npaths = []",
        "[verify]\nstrict = 1",
    ),
    *("[verify.rule]\npath = 'a'",),
]


def test_a_wrong_table_is_one_clear_error(golden: Golden) -> None:
    for text, error in NO_TOML:
        assert refusal(verify_config_of, text).startswith(error)
    said = {repr(text): refusal(verify_config_of, text) for text in WRONG}
    golden(said | {"many dots": refusal(verify_config_of, "verify" + ".a" * 100_000 + " = 1")})


def test_a_wrong_project_is_one_clear_error() -> None:
    write(Path("pyproject.toml"), "[tool]\nckpttool = 3\n")
    with pytest.raises(UsageError, match=r"^pyproject.toml\[tool.ckpttool\]: expected a table, not 3$"):
        read_config(read_document("pyproject.toml"))
    write(Path("pyproject.toml"), "[project]\n")
    with pytest.raises(UsageError, match=r"^pyproject.toml: no table \[tool.ckpttool\]$"):
        read_config(read_document("pyproject.toml", is_named=True))


# The page -------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "config.md").read_text("utf-8")


def test_the_example_on_the_page_is_read() -> None:
    example, *_ = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    config = verify_config_of(example)
    assert (config.paths, config.exclude, config.strict) == (("models",), ("*.tmp",), True)
    assert [rule.glob for rule in config.rules] == ["models/resnet*.pth", "models/**/encoder*"]


def test_every_key_stands_on_the_page() -> None:
    known = {*keys(VerifyConfig), *keys(VerifyRule), "trust"} - {"rule"}
    assert [key for key in known if f"{key}`" not in PAGE] == []
