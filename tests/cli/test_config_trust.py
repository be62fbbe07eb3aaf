"""What a configuration may do that was merely found: a download may bring one along."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpttool import UsageError
from ckpttool.cli import config as config_module
from ckpttool.cli.config import ownership_doubt, read_document
from ckpttool.cli.config_keys import keys as keys_of
from ckpttool.cli.config_keys import read
from ckpttool.cli.retention_config import read_retention
from ckpttool.cli.verify_config import read_config
from ckpttool.cli.watch import watch_settings
from ckpttool.core.options import Reach, option
from tests.cli.test_watch import Watched
from tests.support.commands import Answer, Run, refusals, transcript
from tests.support.configs import all_keys, trusted_config, write
from tests.support.golden import Golden

_POSIX = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no such owners")

HINT = "read it, and run ckpttool config --trust ckpttool.toml, or use --config ckpttool.toml"


@pytest.fixture(autouse=True)
def download(home: None, tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, which came from elsewhere, beside one that is precious."""
    for place in ("download/m", "precious"):
        (tmp_path / place).mkdir(parents=True)
        for epoch in (1, 2, 3):
            shutil.copy(files / "series" / f"model_epoch_{epoch}.pth", tmp_path / place)
    monkeypatch.chdir(tmp_path / "download")
    monkeypatch.delenv("XDG_STATE_HOME")
    return tmp_path / "download"


@pytest.fixture(autouse=True)
def precious(download: Path) -> Iterator[Path]:
    """Whatever a test tries, what lies beside the download stays as it is."""
    place = download.parent / "precious"
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    yield place
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert {path.name for path in download.parent.iterdir()} <= {"download", "precious", ".local"}


def configure(text: str, name: str = "ckpttool.toml") -> Path:
    return write(Path(name), text)


# Each key -------------------------------------------------------------------------------------------


PREDICT = '[[verify.rule]]\npath = "m/*"\n'
ATTACKS = {
    "verify.paths": ('[verify]\npaths = ["../precious"]', "verify"),
    "verify.rule.predict": (f"{PREDICT}predict = true", "verify"),
    "verify.rule.model": (f'{PREDICT}model = "a.py:B"', "verify"),
    "verify.rule.model-args": (f"{PREDICT}model-args = {{a = 1}}", "verify"),
    "verify.rule.optimizer": (f'{PREDICT}optimizer = "os:system"', "verify"),
    "verify.rule.optimizer-args": (f"{PREDICT}optimizer-args = {{}}", "verify"),
    "verify.rule.resume-step": (f"{PREDICT}resume-step = true", "verify"),
    "verify.rule.input": (f'{PREDICT}input = "../precious"', "verify"),
    "verify.rule.expect": (f'{PREDICT}expect = "../precious"', "verify"),
    "verify.rule.labels": (f'{PREDICT}labels = "../precious"', "verify"),
    "retention.paths": ('[retention]\nkeep-last = 1\npaths = ["m", "../precious"]', "prune"),
    "retention.metrics": ('[retention]\nkeep-last = 1\nmetrics = ["../precious"]', "prune"),
    "retention.yes": ("[retention]\nkeep-last = 1\nyes = true", "prune"),
    "watch.paths": ('[watch]\npaths = ["../precious"]', "watch --once"),
    "watch.copy-to": ('[watch]\ncopy-to = "out"', "watch --once"),
    "watch.log-to": ('[watch]\nlog-to = "mlflow:a@http://h"', "watch --once"),
}
"""What a stranger writes, and the command that runs on it."""
HARMLESS = {
    "verify": "exclude strict",
    "verify.rule": """path state-key input-shape signature batch-size seed rtol atol min-accuracy
        max-error timeout memory ignore""",
    "retention": """keep-last keep-best keep-best-runs metric mode keep-every-steps keep-every-epochs
        keep-hourly keep-daily keep-weekly keep-monthly keep-yearly keep-within
        keep-name older-than max-size max-total-size full dtype incomplete failed
        recursive exclude max-depth series group-by min-age max-delete verify trash
        jobs""",
    "retention.rule": """path keep-last keep-best keep-best-runs metric mode keep-every-steps
        keep-every-epochs keep-hourly keep-daily keep-weekly keep-monthly
        keep-yearly keep-within keep-name older-than max-size full dtype incomplete""",
    "naming": "template",
    "watch": "steps interval",
}


def keys() -> dict[str, Reach | None]:
    """Return what each key of the code's own tables says of itself, by its whole name."""
    return {
        f"{name}.{key}": row.reach
        for name, known in all_keys().items()
        for key, row in known.items()
        if key != "rule"
    }


def test_each_key_says_what_it_may_do() -> None:
    harmless = {f"{table}.{key}" for table, names in HARMLESS.items() for key in names.split()}
    assert {key for key, reach in keys().items() if reach is Reach.HARMLESS} == harmless
    assert {key for key, reach in keys().items() if reach is not Reach.HARMLESS} == ATTACKS.keys()
    assert None not in keys().values()


def test_a_key_that_reaches_further_is_refused_until_the_file_is_trusted(run: Run, golden: Golden) -> None:
    said = {}
    for key, (text, command) in ATTACKS.items():
        configure(text)
        said[key] = refusals(run, command) + transcript(run, (0, "config --trust"))
        document = read_document("ckpttool.toml")
        assert document.trust_doubt() is None
        assert document._replace(path="m/ckpttool.toml").trust_doubt() is not None
        run("config", "--untrust")
    golden(said)
    assert len(list(Path("m").iterdir())) == 3


def test_the_page_lists_each_key_that_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "config.md").read_text("utf-8")
    section = page.split("\n## Trust\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert listed == {key.rpartition(".")[2] for key in ATTACKS}


@dataclass
class New:
    """A table whose key says nothing of what it may do."""

    new: bool = option("new", help="Do something.", default=False)


def test_a_key_that_says_nothing_is_refused() -> None:
    assert keys_of(New)["new"].reach is None
    configure("[verify]\nnew = true\n")
    document = read_document("ckpttool.toml")
    with pytest.raises(
        UsageError, match="new affects more than the files below this one, and the file is not trusted"
    ):
        read(New, document, "verify")


# Paths ----------------------------------------------------------------------------------------------


def test_what_lies_below_may_be_named(run: Run, download: Path) -> None:
    Path("inner").symlink_to("m")
    for path in (".", "m", "m/", "./m/../m", "m/../m/./", "inner", "nowhere/yet", "../download/m"):
        configure(f'[retention]\nkeep-last = 1\npaths = ["{path}"]\n')
        assert read_retention(read_document("ckpttool.toml")) is not None, path
    configure(f'[verify]\npaths = ["{download}/m"]\n')
    assert run("verify").status == 0


OUTSIDE = (
    *("..", "../precious", "m/../../precious", "/", "outer", "outer/..", "m/outer", "s3://bucket/runs"),
    *("mlflow:digits@http://localhost:1", "wandb:../precious", "wandb:m", "log.csv:epoch+1"),
    *("S3://bucket/runs", "../download-2"),
)


def test_what_does_not_may_not(precious: Path) -> None:
    Path("outer").symlink_to("../precious")
    Path("m/outer").symlink_to(precious)
    Path("log.csv").symlink_to("../precious/log.csv")
    for path in OUTSIDE:
        for key in ("paths", "metrics"):
            configure(f'[retention]\nkeep-last = 1\n{key} = ["{path}"]\n')
            why = rf"^ckpttool.toml\[retention\]: {key} points outside the directory"
            with pytest.raises(UsageError, match=why):
                read_retention(read_document("ckpttool.toml"))


def test_a_directory_may_have_a_colon_in_its_name(run: Run, download: Path) -> None:
    place = download / "run:1"
    shutil.copytree("m", place / "m")
    write(place / "ckpttool.toml", f'[verify]\npaths = ["{place}/m"]\n')
    os.chdir(place)
    assert run("verify").status == 0


def test_a_text_of_paths_holds_no_null_byte(run: Run) -> None:
    configure('[verify]\npaths = ["m\\u0000"]\n')
    assert run("verify").err.endswith("(a non-empty list of strings)\n")


def test_what_lies_below_is_pruned_as_before(run: Run) -> None:
    configure("[retention]\nkeep-last = 1\nyes = false\n")
    assert run("prune").status == 0
    assert [path.name for path in Path("m").iterdir()] == ["model_epoch_3.pth"]


def test_a_template_is_for_what_lies_below(run: Run) -> None:
    configure('[naming]\ntemplate = "x-{epoch}"\n')
    said = "../precious is outside the directory of this file, and the file is not trusted"
    assert run("rename", "../precious").err == f"ckpttool: error: ckpttool.toml[naming]: {said} ({HINT})\n"
    assert run("rename", "m").status == 0
    assert run("rename", "../precious", "--dry-run", "--config", "ckpttool.toml").status == 0
    run("config", "--trust")
    assert run("rename", "../precious", "--dry-run").status == 0


def test_a_template_is_no_path_even_if_the_file_is_trusted(run: Run) -> None:
    for template in ("../../precious/{epoch}", "/tmp/{epoch}"):
        trusted_config(f"[naming]\ntemplate = '{template}'\n")
        assert "rename can't move checkpoints to another directory" in run("rename", "m").err
        assert run("watch", "--once").status != 0
    assert len(list(Path("m").glob("model_epoch_*.pth"))) == 3


# Which commands -------------------------------------------------------------------------------------


def test_a_key_that_a_command_does_not_use_is_in_nobodys_way(run: Run) -> None:
    configure('[retention]\nkeep-last = 1\nyes = true\n[watch]\ncopy-to = "../precious"\n')
    commands = ("list", "report -o m/r.html -q", "prune -n", "prune --check")
    for command in (*commands, "prune --explain m/model_epoch_1.pth", "prune -y"):
        assert run(*command.split()).status in (0, 1), command


def test_the_command_line_replaces_what_is_refused(run: Run) -> None:
    configure('[retention]\nkeep-last = 1\nmetrics = ["../precious"]\n')
    Path("log.csv").write_text("step,loss\n1,1\n")
    assert run("prune", "-n").status == 2
    assert run("prune", "-n", "--metrics", "log.csv").status == 0


def test_the_command_line_replaces_code() -> None:
    configure(f'{PREDICT}predict = true\nmodel = "a.py:B"\n')
    document = read_document("ckpttool.toml")
    with pytest.raises(UsageError, match="predict runs code"):
        read_config(document, given={"model"})
    with pytest.raises(UsageError, match="model runs code"):
        read_config(document, given={"predict"})
    assert read_config(document, given={"model", "predict"}).rules


def test_verify_reads_harmless_keys(run: Run) -> None:
    configure('[verify]\nexclude = ["*_1.pth"]\n[watch]\nlog-to = "mlflow:x"\n[retention]\nyes = true\n')
    status, out, err = run("verify")
    assert (status, err, out.splitlines()[-1]) == (0, "", "2 checkpoints: 2 valid")


def test_one_that_is_named_is_the_users_own_word(run: Run) -> None:
    configure("[retention]\nkeep-last = 1\nyes = true\n")
    assert run("prune", "--config", "ckpttool.toml").status == 0
    assert [path.name for path in Path("m").iterdir()] == ["model_epoch_3.pth"]


def test_the_nearest_to_a_path_is_not_named(run: Run) -> None:
    configure(ATTACKS["verify.rule.model"][0])
    Path(".git").mkdir()
    assert "model runs code, and the file is not trusted" in run("verify", "--config", "auto", "m").err


def test_watch_does_not_read_it_again() -> None:
    """What is written into it while somebody watches was confirmed by nobody."""
    configure("[retention]\nkeep-last = 9\n")
    settings = watch_settings((), None, (), None)
    configure("[retention]\nkeep-last = 1\n")
    with Watched(Path("m"), **settings.steps) as watched:
        assert [one for one in watched.look(2) if "removed" in one] == []
    settings = watch_settings((), None, (), None)
    with Watched(Path("m"), **settings.steps) as watched:
        assert len([one for one in watched.look(2) if "removed" in one]) == 2


# Confirming -----------------------------------------------------------------------------------------

COPY = '[watch]\npaths = ["m"]\ncopy-to = "out"\n'


def watch_error(run: Run) -> str:
    answer: Answer = run("watch", "--once", "--interval", "1s")
    return answer.err if answer.status == 2 else ""


def test_it_is_asked_again_once_it_says_something_else(run: Run) -> None:
    configure(COPY)
    assert watch_error(run)
    assert run("config", "--trust").status == 0
    assert watch_error(run) == ""
    assert len(list(Path("out").iterdir())) == 3
    configure(f"# a comment\n{COPY}\n")
    assert watch_error(run) == ""
    configure(COPY.replace("out", "m/out"))
    assert (
        "copy-to names a place to write to, and the file is no longer trusted, since it changed"
        in watch_error(run)
    )
    configure(COPY)
    assert watch_error(run) == ""
    assert run("config", "--untrust") == (0, "ckpttool.toml is no longer trusted\n", "")
    assert "the file is not trusted" in watch_error(run)
    assert run("config", "--untrust") == (0, "ckpttool.toml was not trusted\n", "")


def test_a_copy_elsewhere_is_another_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(COPY)
    run("config", "--trust")
    shutil.copy("ckpttool.toml", "m")
    monkeypatch.chdir("m")
    assert "the file is not trusted" in watch_error(run)


def test_a_project_is_trusted_for_its_own_table(run: Run) -> None:
    text = "[tool.ckpttool.watch]\npaths = ['m']\ncopy-to = 'out'\n"
    configure(text, "pyproject.toml")
    assert run("config", "--trust").out == "trusted pyproject.toml, with watch.copy-to\n"
    configure(f"[project]\nname = 'x'\n{text}", "pyproject.toml")
    assert watch_error(run) == ""
    configure(text.replace("out", "m/out"), "pyproject.toml")
    assert watch_error(run).startswith("ckpttool: error: pyproject.toml[tool.ckpttool.watch]: copy-to names")


def test_what_init_writes_is_trusted(run: Run) -> None:
    assert run("init").status == 0
    assert run("config").out.splitlines()[0] == "ckpttool.toml (trusted)"


def test_a_file_may_be_named_from_elsewhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(COPY)
    monkeypatch.chdir("..")
    assert run("config", "download/ckpttool.toml").out.startswith("download/ckpttool.toml (not trusted)\n")
    answer = run("config", "--trust", "download/ckpttool.toml")
    assert answer.out == "trusted download/ckpttool.toml, with watch.copy-to\n"
    assert run("config", "download").out.startswith("download/ckpttool.toml (trusted)\n")
    Path("download/ckpttool.toml").unlink()
    assert run("config", "--untrust", "download/ckpttool.toml").out.endswith("is no longer trusted\n")


def test_what_is_shown_and_what_can_not_be_trusted(run: Run) -> None:
    nothing = "ckpttool: error: no configuration (`ckpttool init` writes one)\n"
    assert run("config", "--trust") == run("config", "--untrust") == (2, "", nothing)
    assert run("config", "--trust", "nowhere.toml").status == 2
    configure(COPY)
    assert re.search(r'^watch\.copy-to +"out" +file, refused$', run("config").out, re.MULTILINE)
    for options in (["--trust", "--json"], ["--trust", "--untrust"], ["--trust", "--schema"]):
        assert run("config", *options).status == 2
    assert run("config").out.startswith("ckpttool.toml (not trusted)\n")
    configure("[watch]\ncopy = 1\n")
    assert "unknown key copy" in run("config", "--trust").err


# Whose it is ----------------------------------------------------------------------------------------


def record() -> Path:
    (only,) = Path(os.environ["HOME"], ".local", "state", "ckpttool", "trusted").iterdir()
    return only


@_POSIX
def test_the_record_is_the_users_own(run: Run) -> None:
    configure(COPY)
    run("config", "--trust")
    assert (record().stat().st_mode & 0o777, record().parent.stat().st_mode & 0o777) == (0o600, 0o700)
    record().chmod(0o666)
    assert "the file is not trusted" in watch_error(run)
    record().chmod(0o600)
    record().write_text("")
    assert "the file is no longer trusted, since it changed" in watch_error(run)
    record().unlink()
    os.mkfifo(config_module._record_path("ckpttool.toml"))
    assert "the file is not trusted" in watch_error(run)


def test_the_state_directory(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(COPY)
    monkeypatch.setenv("XDG_STATE_HOME", "m")  # a download could hold one
    run("config", "--trust")
    assert record().is_file() and not Path("m/ckpttool").exists()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".local" / "elsewhere"))
    assert watch_error(run)
    run("config", "--trust")
    assert (tmp_path / ".local" / "elsewhere" / "ckpttool" / "trusted" / record().name).is_file()


@_POSIX
def test_a_directory_that_others_can_write_to(run: Run, download: Path) -> None:
    inner = download / "m" / "inner"
    inner.mkdir()
    configure(COPY.replace('"m"', '"."'), "m/inner/ckpttool.toml")
    os.chdir(inner)
    run("config", "--trust")
    for place, mode, is_safe in (
        (inner, 0o755, True),
        (inner, 0o777, False),
        (inner, 0o1777, False),
        (download / "m", 0o777, False),
        (download / "m", 0o1777, True),  # as /tmp: nobody can rename what is another's
    ):
        place.chmod(mode)
        doubt = read_document("ckpttool.toml").trust_doubt()
        place.chmod(0o755)
        assert (doubt is None) == is_safe, (place, mode)
        assert doubt is None or doubt.text == f"not protected: {place}: every user can write to it"
    inner.chmod(0o777)
    run("config", "--untrust")
    said = f"the file is not protected: {inner}: every user can write to it, so it can't be trusted"
    hint = "--config ckpttool.toml uses it anyway"
    assert run("config", "--trust") == (2, "", f"ckpttool: error: ckpttool.toml: {said} ({hint})\n")


@_POSIX
def test_a_link_counts_with_its_own_directory_and_its_targets(run: Run, download: Path) -> None:
    write(Path("shared/c.toml"), COPY)
    Path("ckpttool.toml").symlink_to("shared/c.toml")
    run("config", "--trust")
    assert run("config").out.startswith("ckpttool.toml (trusted)\n")
    Path("shared").chmod(0o777)
    assert run("config").out.startswith(f"ckpttool.toml (not protected: {download}/shared: every user")
    Path("shared").chmod(0o755)
    download.chmod(0o777)
    assert run("config").out.startswith(f"ckpttool.toml (not protected: {download}: every user")
    download.chmod(0o755)
    Path("m/ckpttool.toml").symlink_to("../shared/c.toml")  # the same file, as seen from another place
    assert run("config", "m").out.startswith("m/ckpttool.toml (not trusted)\n")


def status(*, mode: int = 0o100644, user: int | None = None, group: int = 0) -> os.stat_result:
    owner = os.geteuid() if user is None else user
    return os.stat_result((mode, 0, 0, 1, owner, group, 0, 0, 0, 0))


@_POSIX
def test_only_this_user_and_root_are_believed() -> None:
    assert ownership_doubt(status()) is None
    assert ownership_doubt(status(user=0)) is None
    assert ownership_doubt(status(user=os.geteuid() + 4321)) == "it belongs to another user"
    assert ownership_doubt(status(mode=0o120777)) is None  # a link
    assert ownership_doubt(status(mode=0o120777, user=4321)) == "it belongs to another user"
    nobodys = 987_654
    assert ownership_doubt(status(mode=0o100664, group=nobodys)) == "other users of its group can write to it"


@_POSIX
def test_a_group_of_ones_own_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    name = pwd.getpwuid(os.geteuid()).pw_name
    members: list[str] = []
    monkeypatch.setattr(grp, "getgrgid", lambda number: grp.struct_group((name, "x", number, members)))
    assert ownership_doubt(status(mode=0o100664, group=1234)) is None
    members.append("somebody")
    assert ownership_doubt(status(mode=0o100664, group=1234)) == "other users of its group can write to it"
