"""Code that a configuration names is run only if nobody else could have written it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckpttool.cli import config as config_module
from ckpttool.cli.config import read_document
from ckpttool.cli.verify_config import read_config, settings_for
from tests.support.configs import trusted_config, write

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no such owners"),
    pytest.mark.usefixtures("home"),
]

CODE = """
    from pathlib import Path
    Path("ran").mkdir()
    def Net():
        raise SystemExit
"""


def project(files: Path, reference: str = "code/nets.py:Net", key: str = "model") -> None:
    """Make a project whose configuration runs a model, and a model that says that it ran."""
    shutil.copy(files / "pytorch" / "guide.pth", "m.pth")
    more = 'model = "json:loads"\n' if key == "optimizer" else ""
    trusted_config(f'[[verify.rule]]\npath = "m.pth"\npredict = true\n{key} = "{reference}"\n{more}')
    write(Path("code/nets.py"), CODE)
    Path("code").chmod(0o755)


def refused(place: str, why: str, key: str = "model") -> tuple[int, str, str]:
    hint = "--config ckpttool.toml runs it anyway"
    told = f"ckpttool.toml[verify.rule 1]: {key}: {place}: {why}, so it is not run ({hint})"
    return 2, "", f"ckpttool: error: {told}\n"


@pytest.mark.parametrize("key", ["model", "optimizer"])
def test_a_file_that_others_may_write(run, files: Path, tmp_path: Path, key: str) -> None:
    project(files, key=key)
    Path("code/nets.py").chmod(0o666)
    assert run("verify") == refused(f"{tmp_path}/code/nets.py", "every user can write to it", key)
    assert not Path("ran").exists()


def test_a_directory_in_which_others_may_put_a_neighbour(run, files: Path, tmp_path: Path) -> None:
    project(files)
    Path("code").chmod(0o777)
    assert run("verify") == refused(f"{tmp_path}/code", "every user can write to it")
    Path("code").chmod(0o1777)
    assert run("verify") == refused(f"{tmp_path}/code", "every user can write to it")
    assert not Path("ran").exists()


def test_what_a_link_leads_to(run, files: Path, tmp_path: Path) -> None:
    project(files, "link.py:Net")
    Path("link.py").symlink_to("code/nets.py")
    Path("code/nets.py").chmod(0o646)
    assert run("verify") == refused(f"{tmp_path}/link.py", "every user can write to it")
    Path("code/nets.py").chmod(0o644)
    Path("code").chmod(0o757)
    assert run("verify") == refused(f"{tmp_path}/code", "every user can write to it")


def test_anothers_file(run, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(files)
    real = os.lstat
    fields = list(real("code/nets.py"))
    fields[4] = os.geteuid() + 4321
    theirs = os.stat_result(fields)
    monkeypatch.setattr(
        config_module.os,
        "lstat",
        lambda path, **more: theirs if str(path).endswith("nets.py") else real(path, **more),
    )
    assert run("verify") == refused(f"{tmp_path}/code/nets.py", "it belongs to another user")


@pytest.mark.parametrize("reference", ["code.nets:Net", "nets:Net"])
def test_modules_in_the_current_directory(run, files: Path, reference: str) -> None:
    project(files, reference)
    write(Path("nets.py"), CODE)
    file = "code/nets.py" if reference.startswith("code") else "nets.py"
    Path(file).chmod(0o666)
    assert run("verify") == refused(file, "every user can write to it")
    Path(file).chmod(0o644)
    assert config_module.code_ownership_doubt(reference) is None
    Path.cwd().chmod(0o777)
    assert config_module.code_ownership_doubt(reference) == ".: every user can write to it"
    told = f"not protected: {Path.cwd()}: every user can write to it (--config ckpttool.toml uses"
    assert f"predict runs code, and the file is {told}" in run("verify").err
    Path.cwd().chmod(0o700)
    assert not Path("ran").exists()


def test_what_is_installed_and_what_is_ones_own_is_not_doubted(files: Path) -> None:
    project(files)
    assert config_module.code_ownership_doubt("torch.nn:Linear") is None
    assert config_module.code_ownership_doubt("code.nets:Net") is None
    assert config_module.code_ownership_doubt(f"{Path.cwd()}/code/nets.py:Net") is None
    assert config_module.code_ownership_doubt(f"{Path.cwd()}/nowhere.py:Net") is None


def test_what_is_not_run_is_not_refused(run, files: Path) -> None:
    project(files)
    Path("code/nets.py").chmod(0o666)
    assert run("verify", "m.pth").status == 0  # no configuration is read
    settings = settings_for(
        read_config(read_document("ckpttool.toml")), "m.pth", given={"model": "json:loads"}
    )
    assert settings.request is not None
    assert settings.request.model == "json:loads"


@pytest.mark.framework
def test_it_runs_where_the_user_says_so(run, files: Path) -> None:
    project(files)
    Path("code/nets.py").chmod(0o666)
    run("verify", "--config", "ckpttool.toml")
    assert Path("ran").is_dir()
