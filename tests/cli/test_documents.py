"""The keys of the documents that ``--json`` prints, with their types."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import Run
from tests.support.golden import Golden

TYPES = {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "null"}
OPEN = {"hyper_parameters", "metrics", "origin", "values", "rules", "layers", "policy", "facts"}
"""Keys of mappings whose keys are data."""


def keys_in(value: object, above: str = "", key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a document: the mapping, the name and the type; ``[]`` is any item of a list."""
    if isinstance(value, dict) and key not in OPEN:
        for name, inner in value.items():
            yield from keys_in(inner, f"{above}.{key}" if above else key, name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from keys_in(inner, above, f"{key}[]")
    else:
        yield above, key, TYPES.get(type(value), "{}" if isinstance(value, dict) else "[]")


def shape_of(text: str) -> str:
    """Return the keys of documents with their types, a line for each mapping."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for line in text.splitlines():
        for above, key, type_ in keys_in(json.loads(line)):
            found.setdefault(above, {}).setdefault(key, {})[type_] = None
    lines = []
    for above, keys in found.items():
        told = ", ".join(f"{key} {'|'.join(types)}" for key, types in keys.items())
        lines.append(f"{above}: {told}" if above else told)
    return "\n".join(lines)


COMMANDS = """
inspect --stats run/model_epoch_10.pth
verify run torn.safetensors
verify --write-manifest run/model_epoch_9.pth
verify --part 1/1 --sample 50% run
diff run/model_epoch_9.pth run/model_epoch_10.pth
diff run/model_epoch_8.pth run/model_epoch_9.pth run/model_epoch_10.pth
card --verify --note hello --set data=CIFAR-10 run/model_epoch_10.pth
inspect run/model_epoch_10.pth
pin run/model_epoch_9.pth --until 2999-01-01
pin --list run
list run --best loss --keep 3
list run --cadence --mtbf 7d --save-time 1min
list run --part 1/1
latest run --best loss
convert run/model_epoch_10.pth out.safetensors
average run/model_epoch_9.pth run/model_epoch_10.pth average.safetensors
salvage torn.safetensors saved.safetensors
copy run copy --keep 8
log copy --to tensorboard:log
watch copy --once
config
prune run --keep 3 --min-age 0 --max-total-size 1B --dry-run
prune run --keep 3 --min-age 0 --explain run/model_epoch_1.pth
prune run --keep 3 --min-age 0 --trash --yes
undo run
prune run --keep 3 --min-age 0 --trash --yes
prune run --empty-trash --yes
rename run -t e{epoch:03d} --yes
""".strip().splitlines()


@pytest.mark.usefixtures("home")
def test_keys(run: Run, files: Path, golden: Golden) -> None:
    shutil.copytree(files / "series", "run", ignore=shutil.ignore_patterns("*.json"))
    for epoch in range(1, 11):
        os.utime(f"run/model_epoch_{epoch}.pth", (0, 1_700_000_000 + 3600 * epoch))
    whole = (files / "safetensors" / "order.safetensors").read_bytes()
    Path("torn.safetensors").write_bytes(whole[:-4])
    golden({command: shape_of(run(*command.split(), "--json").out) for command in COMMANDS})
