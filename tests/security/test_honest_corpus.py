"""Honest files are called safe, each of them: a false alarm teaches people not to look."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.security.honest import write
from tests.security.test_hostile_corpus import command, lines


@pytest.mark.framework
def test_no_honest_file_raises_an_alarm(tmp_path: Path) -> None:
    wrong = []
    for path in write(tmp_path / "honest"):
        _, out, err = command("verify", "--json", path)
        found = json.loads(out)["checkpoints"] if out else [err]
        if [one["safety"] for one in found if isinstance(one, dict)] != ["safe"]:
            wrong.append(f"{path.name}: {found}"[:300])
    assert not wrong, lines(wrong)


UNSAFE_FIXTURES = {"hostile", "hdf5-hostile", "keras-unsafe"}


def test_no_fixture_of_a_framework_raises_an_alarm(files: Path) -> None:
    wrong = []
    for directory in sorted(files.iterdir()):
        if directory.name in UNSAFE_FIXTURES or not directory.is_dir():
            continue
        _, out, err = command("verify", "--quick", "--json", directory)
        for one in json.loads(out)["checkpoints"] if out else []:
            if one["safety"] == "unsafe" and "unsafe" not in one["path"]:
                wrong.append(f"{one['path']}: {one['findings']}"[:300])
        assert "internal error" not in err
    assert not wrong, lines(wrong)
