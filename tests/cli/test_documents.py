"""What ``--json`` prints is as the published schema says, and the schema says no more than it has."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import ckpttool
from tests.documents import commands
from tests.support.commands import Run
from tests.support.runs import flip_value
from tests.support.schemas import PATH, documents_in, keyed, looser_than, published
from tests.support.thorough import spread

COMMANDS = """
inspect --stats run/model_epoch_10.pth
inspect FILES/ranks/verl-2/model_world_size_2_rank_1.pt
inspect FILES/savedmodel/module
inspect FILES/twins/twin.npz
verify run torn.safetensors void missing.pth bad.pth
verify --config ignored.toml
verify --write-manifest run/model_epoch_9.pth
verify --part 1/1 --sample 50% run torn.safetensors missing.pth
diff run/model_epoch_9.pth run/model_epoch_10.pth
diff FILES/pytorch/guide.pth FILES/pytorch/values.pth
diff --keep-going bad.pth FILES/pytorch/guide.pth
diff run/model_epoch_8.pth run/model_epoch_9.pth run/model_epoch_10.pth
card --verify --note hello --set data=CIFAR-10 run/model_epoch_10.pth
inspect run/model_epoch_10.pth
pin run/model_epoch_9.pth --until 2999-01-01
pin --list run
pin --list void
list run void --best loss --keep 3
list run --cadence --mtbf 7d --save-time 1min
list run --part 1/1
list FILES/deepspeed
latest run --best loss
latest cut
convert run/model_epoch_10.pth out.safetensors
convert FILES/pytorch/module.pth module.safetensors --dry-run
average run/model_epoch_9.pth run/model_epoch_10.pth average.safetensors
salvage torn.safetensors saved.safetensors
copy run copy --keep 8
log copy --to tensorboard:log
log FILES/metrics/trainer --to tensorboard:other
log cut saved.safetensors --to tensorboard:other
watch copy --once
config
prune run --keep 3 --min-age 0 --max-total-size 1B --dry-run
prune run --keep 4 --full 1 --min-age 0 --dry-run
prune run --keep 3 --min-age 0 --explain run/model_epoch_1.pth
prune run --keep 3 --min-age 0 --trash --yes
undo run
prune run --keep 3 --min-age 0 --trash --yes
prune run --empty-trash --yes
rename run -t e{epoch:03d} --yes
""".strip().splitlines()


IGNORED = """
[verify]
paths = ["nan.pth"]
[[verify.rule]]
path = "nan.pth"
ignore = [{code = "nan", reason = "a mask"}]
"""


@pytest.fixture
def documents(home: None, run: Run, files: Path) -> list[dict[str, Any]]:
    """Return documents of all commands."""
    shutil.copytree(files / "series", "run", ignore=shutil.ignore_patterns("*.json"))
    for epoch in range(1, 11):
        os.utime(f"run/model_epoch_{epoch}.pth", (0, 1_700_000_000 + 3600 * epoch))
    whole = (files / "safetensors" / "order.safetensors").read_bytes()
    Path("torn.safetensors").write_bytes(whole[:-4])
    shutil.copy(files / "pytorch" / "guide.pth", "bad.pth")
    flip_value(Path("bad.pth"))
    shutil.copy(files / "pytorch" / "nan.pth", "nan.pth")
    Path("void").mkdir()
    Path("void/.ckpttool-pins.toml").write_text('pinned = [""]\n')
    Path("void/a.skops").touch()
    Path("cut").mkdir()
    shutil.copy("run/model_epoch_1.pth", "cut")
    Path("cut/model_epoch_2.pth").touch()
    os.link("run/model_epoch_8.pth", "link.pth")
    Path("ignored.toml").write_text(IGNORED)
    found = []
    for command in COMMANDS:
        answer = run(*(part.replace("FILES", str(files)) for part in command.split()), "--json")
        own = [*documents_in(answer.out)]
        assert own, (command, answer)
        found += own
    return found


def test_the_schema_says_what_documents_have(documents: list[dict[str, Any]]) -> None:
    """Each key is in some document, and each that isn't required lacks in some."""
    waited = replace(ckpttool.latest("cut"), waited=2.5, waited_for=("cut/model_epoch_2.pth",))
    assert looser_than([*documents, waited.to_dict()]) == []


def test_the_schema_lists_all_keys() -> None:
    Draft202012Validator.check_schema(published())
    parts = [*keyed(published())]
    closed = ("additionalProperties", "unevaluatedProperties")
    others = [path for path, part in parts if not any(part.get(word) is False for word in closed)]
    assert (len(parts) > 50, others) == (True, ["", "/$defs/difference", "/$defs/conversion"])


def test_the_page_has_all_keys_of_the_schema() -> None:
    page = PATH.with_name("json.md").read_text("utf-8")
    names = {name for _, part in keyed(published()) for name in part["properties"]}
    assert [name for name in sorted(names) if not re.search(rf'[".`]{name}["`]', page)] == []


def test_documents_of_the_fixtures(run: Run, files: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The ``run`` fixture compares each document with the schema."""
    shutil.copytree(files, tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")
    printed = [run(*command).out for command in spread([*commands(Path())], 40)]
    assert sum(len([*documents_in(text)]) for text in printed) > 20
