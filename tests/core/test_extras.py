"""The command that installs an extra works wherever ckpttool came from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.plugins import install_command

METADATA = """\
Metadata-Version: 2.1
Name: ckpttool
Version: 1.0
Requires-Dist: numpy>=1.24
Requires-Dist: torch>=2.1; extra == "torch"
Requires-Dist: safetensors>=0.4; extra == 'torch'
Requires-Dist: torch>=2.1; extra == 'all'
Requires-Dist: tomli; python_version < '3.11'
"""
REPOSITORY = "https://example.org/ckpttool.git"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let ckpttool be installed as a directory says that an installer left."""

    def make(**origin: Any) -> None:
        directory = tmp_path / "ckpttool-1.0.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text(METADATA)
        if origin:
            (directory / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.setattr("importlib.metadata.distribution", lambda name: Distribution.at(directory))

    return make


def test_from_an_index_it_is_the_packages(install) -> None:
    install()
    assert install_command("torch") == "pip install torch safetensors"


@pytest.mark.parametrize("name", ["clone", "my clone", "ü", "it's"])
def test_from_a_directory(install, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir()
    install(url=path.as_uri(), dir_info={})
    assert shlex.split(install_command("torch")) == ["pip", "install", f"{path}[torch]"]


def test_from_a_directory_in_which_it_is_edited(install, tmp_path: Path) -> None:
    install(url=tmp_path.as_uri(), dir_info={"editable": True})
    assert shlex.split(install_command("plot")) == ["pip", "install", "-e", f"{tmp_path}[plot]"]


def test_from_a_directory_that_has_gone_it_is_the_packages(install, tmp_path: Path) -> None:
    install(url=(tmp_path / "gone").as_uri(), dir_info={})
    assert install_command("torch") == "pip install torch safetensors"


def test_from_a_repository(install) -> None:
    install(url=REPOSITORY, vcs_info={"vcs": "git", "requested_revision": "v1", "commit_id": "abc"})
    assert install_command("torch") == f"pip install 'ckpttool[torch] @ git+{REPOSITORY}@v1'"


def test_from_a_directory_of_a_repository(install) -> None:
    install(url=REPOSITORY, vcs_info={"vcs": "git", "commit_id": "abc"}, subdirectory="tools")
    assert (
        install_command("torch") == f"pip install 'ckpttool[torch] @ git+{REPOSITORY}@abc#subdirectory=tools'"
    )


def test_from_an_archive_on_the_web(install) -> None:
    install(url="https://example.org/ckpttool-1.0.tar.gz", archive_info={})
    assert (
        install_command("torch") == "pip install 'ckpttool[torch] @ https://example.org/ckpttool-1.0.tar.gz'"
    )
