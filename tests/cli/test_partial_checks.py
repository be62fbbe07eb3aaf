"""A check that covers only a part is ``partial``: in the text, in JSON, in JUnit's XML."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file

from tests.support.commands import Run

FILES = Path(__file__).parents[2] / "fixtures" / "files"


def listed_in_part(folder: Path) -> tuple[str, str, str]:
    """Write two shards, and a manifest that lists one of them."""
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, shard in enumerate(shards):
        save_file({f"w{number}": torch.ones(3) * 2**number}, folder / shard)
    weight_map = {f"w{number}": shard for number, shard in enumerate(shards)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    digest = hashlib.sha256((folder / shards[0]).read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  {shards[0]}\n")
    return "manifest", "partial manifest", "1 file"


def summed_in_part(folder: Path) -> tuple[str, str, str]:
    """Write a SavedModel, whose variables have checksums and whose other files don't."""
    shutil.copytree(FILES / "savedmodel" / "module", folder, dirs_exist_ok=True)
    return "checksum", "partial checksums", "have none"


@pytest.mark.parametrize("make", [listed_in_part, summed_in_part])
def test_a_partial_check(make: Callable[[Path], tuple[str, str, str]], tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    name, brief, detail = make(folder)
    answer = run("verify", folder, "--junit", tmp_path / "junit.xml", "-v")
    assert answer.status == 0
    head, *lines = answer.out.splitlines()
    assert brief in head
    (line,) = (one for one in lines if one.split()[0] == name)
    assert line.split()[1] == "partial" and detail in line
    (checkpoint,) = json.loads(run("verify", folder, "--json").out)["checkpoints"]
    assert {one["name"]: one["status"] for one in checkpoint["checks"]}[name] == "partial"
    case = ElementTree.parse(tmp_path / "junit.xml").find(f".//testcase[@name='{name}']")
    assert case is not None and case.find("skipped") is None
    assert (case.findtext("system-out") or "").startswith("partial: ")
