"""``ckpttool convert`` on real files: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.support.commands import Run, refusals
from tests.support.conversions import spoil_target
from tests.support.golden import Golden

OK, DIFFERS, FAILED = 0, 1, 2


class Own:
    """A class that no target can hold."""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory with one checkpoint."""
    monkeypatch.chdir(tmp_path)
    torch.save({"epoch": 3, "model": {"fc.weight": torch.ones(20, 10)}}, "in.pth")


def size_of(path: str) -> str:
    nbytes = os.path.getsize(path)
    return f"{nbytes / 1000:.1f} kB"


def test_a_line_says_what_stands_there(run: Run) -> None:
    answer = run("convert", "in.pth", "out.safetensors")
    size = size_of("out.safetensors")
    assert answer == (OK, f"in.pth → out.safetensors: 1 tensor, {size}, verified\n", "")
    assert load_file("out.safetensors")["model.fc.weight"].sum() == 200


def test_the_format_is_said_where_the_name_does_not(run: Run) -> None:
    status, out, err = run("convert", "in.pth", "out", "--to", "numpy")
    assert (status, err) == (OK, "")
    assert out.endswith(" as numpy, verified\n")
    assert np.load("out")["model.fc.weight"].sum() == 200


def test_json(run: Run, golden: Golden) -> None:
    status, out, err = run("convert", "--json", "in.pth", "out.npz", "--dtype", "float16")
    assert (status, err) == (OK, "")
    document = json.loads(out)
    assert document.pop("bytes") == os.path.getsize("out.npz")
    golden(json.dumps(document, indent=1))
    assert np.load("out.npz")["model.fc.weight"].dtype == np.float16


def test_quiet_says_nothing_of_what_is_as_asked_for(run: Run) -> None:
    assert run("convert", "-q", "in.pth", "out.safetensors") == (OK, "", "")


def test_what_is_not_carried_is_listed(run: Run) -> None:
    torch.save({"w": torch.ones(2), "own": Own()}, "own.pth")
    status, out, err = run("convert", "own.pth", "out.safetensors")
    assert (status, err) == (OK, "")
    head, *rest = out.splitlines()
    assert head.endswith("verified")
    assert rest[0] == "  not preserved: 1 item"
    assert rest[1].startswith("    own: ")
    status, out, err = run("convert", "-q", "own.pth", "quiet.safetensors")
    assert (status, out) == (OK, "")
    assert err.startswith("ckpttool: warning: own is not preserved: ")


def test_strict_refuses_what_is_not_carried(run: Run) -> None:
    torch.save({"w": torch.ones(2), "own": Own()}, "own.pth")
    status, out, err = run("convert", "--strict", "own.pth", "out.safetensors")
    assert (status, out) == (FAILED, "")
    assert err.startswith("ckpttool: error: own can't be preserved: ")
    assert err.endswith(" (--strict)\n")
    assert run("convert", "--strict", "-q", "in.pth", "out.safetensors") == (OK, "", "")


def test_strict_refuses_an_entry_that_is_not_used(run: Run) -> None:
    save_file({"w": np.ones(2, np.float32)}, "in.safetensors", metadata={"ckpttool.content": "{}"})
    status, out, err = run("convert", "in.safetensors", "out.npz", "--strict")
    assert (status, out) == (FAILED, "")
    assert err.startswith("ckpttool: error: ckpttool.content can't be preserved: ")
    status, out, _ = run("convert", "in.safetensors", "out.npz")
    assert status == OK
    assert "    ckpttool.content: " in out


@pytest.mark.parametrize("way", [(), ("--quiet",), ("--json",)])
def test_what_loading_the_target_could_run_is_always_said(
    run: Run, files: Path, way: tuple[str, ...]
) -> None:
    status, out, err = run("convert", files / "keras-unsafe" / "lambda.keras", "out.keras", *way)
    assert status == OK
    assert err.startswith("ckpttool: warning: out.keras[")
    assert "Lambda" in err
    if "--json" in way:
        assert {one["code"] for one in json.loads(out)["safety"]} == {"keras-lambda"}


def test_strict_refuses_what_could_run(run: Run, files: Path) -> None:
    status, out, err = run("convert", files / "keras-unsafe" / "lambda.keras", "out.keras", "--strict")
    assert (status, out) == (FAILED, "")
    assert err.endswith("(--strict)\n")
    assert sorted(os.listdir()) == ["in.pth"]


def test_what_differs_is_removed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def rotten(written: Path) -> None:
        data = bytearray(written.read_bytes())
        data[-5] ^= 0x40
        written.write_bytes(data)

    spoil_target(monkeypatch, rotten)
    status, out, err = run("convert", "in.pth", "out.safetensors")
    assert (status, out) == (DIFFERS, "")
    assert err == (
        "ckpttool: error: out.safetensors: model.fc.weight: its values differ (nothing was written)\n"
    )
    status, out, _ = run("convert", "--json", "in.pth", "out.safetensors")
    assert status == DIFFERS
    told = json.loads(out)
    assert (told["verified"], told["mismatches"]) == (False, ["model.fc.weight: its values differ"])
    assert sorted(os.listdir()) == ["in.pth"]


def test_a_target_that_is_there(run: Run) -> None:
    Path("out.safetensors").write_bytes(b"mine")
    status, out, err = run("convert", "in.pth", "out.safetensors")
    assert (status, out) == (FAILED, "")
    assert err == "ckpttool: error: out.safetensors already exists (--force replaces it)\n"
    Path("out.safetensors.sha256").write_text("of mine")
    status, out, err = run("convert", "in.pth", "out.safetensors", "--force")
    assert (status, err) == (OK, "")
    assert out.endswith(
        "\n  out.safetensors.sha256 describes the replaced checkpoint, and is removed with it\n"
    )
    assert sorted(os.listdir()) == ["in.pth", "out.safetensors"]


def test_a_dry_run(run: Run) -> None:
    answer = run("convert", "-n", "in.pth", "out.safetensors")
    assert answer == (OK, "in.pth → out.safetensors: would write 1 tensor, 800 B as safetensors\n", "")
    assert sorted(os.listdir()) == ["in.pth"]


WRONG = """
in.pth
in.pth out.npz --only biases
in.pth out
in.pth out --to onnx
in.pth . --to numpy
in.pth / --to numpy --force
in.pth in.pth --force
gone.pth out.npz
in.pth out.npz --shard-size 1kB
in.pth out --to safetensors --shard-size big
in.pth out --to safetensors --shard-size 0
in.pth out --to safetensors --shard-size ٣GB
-n in.pth in.pth
"""


def test_usage(run: Run, golden: Golden) -> None:
    lines = WRONG.split("\n")[1:-1]
    huge = f"in.pth out --to safetensors --shard-size {'9' * 400}"
    golden(refusals(run, *(f"convert {line}" for line in (*lines, huge))))
    assert sorted(os.listdir()) == ["in.pth"]


def test_sizes(run: Run) -> None:
    for number, size in enumerate(("1kB", "1 KiB", "1000", "0.001MB", "999999999999999999TB")):
        out = f"out-{number}"
        status, _, err = run("convert", "-q", "in.pth", out, "--to", "safetensors", "--shard-size", size)
        assert (status, err) == (OK, "")
        assert any(name.endswith(".safetensors") for name in os.listdir(out))


def test_names_are_escaped(run: Run) -> None:
    torch.save({"w\x1b[31m": torch.ones(2), "own\x1b[31m": Own()}, "esc.pth")
    status, out, err = run("convert", "esc.pth", "out.safetensors")
    assert status == OK
    assert "\x1b" not in out + err
