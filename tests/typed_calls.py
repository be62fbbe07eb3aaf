"""Calls of the library for ``mypy --strict``: a wrong one has the code of its error behind it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import ckpttool
from ckpttool import DiffOptions, Finding, Policy, PruneRequest, RenameRequest


def options_as_keywords(a: Path, b: str) -> None:
    ckpttool.diff(a, b, rtol=1, only="weights", ignore=("optimizer.*",), jobs=None)
    ckpttool.diff(a, b, DiffOptions(rtol=1e-3), atol=0.5)
    ckpttool.diff(a, b, rtoll=1)  # error: call-arg
    ckpttool.diff(a, b, rtol="x")  # error: arg-type
    ckpttool.diff(a, b, only="optimizer")  # error: arg-type
    ckpttool.convert(a, b, to="safetensors", dtype="bfloat16", shard_size=200)
    ckpttool.convert(a, b, frobnicate=1)  # error: call-arg
    ckpttool.convert(a, b, dtype="int8")  # error: arg-type
    ckpttool.merge([a, b], "whole.safetensors", layout="torch", force=True)
    ckpttool.merge([a, b], "whole.safetensors", layout="jax")  # error: arg-type
    ckpttool.average([a, b], "average.pth", weights=[1, 3], dry_run=True)
    ckpttool.average([a, b], "average.pth", ema=0.99, decay=0.99)  # error: call-arg
    ckpttool.salvage(a, b, jobs=4, to="pytorch")
    ckpttool.salvage(a, b, jobs="4")  # error: arg-type
    ckpttool.rename(a, "{run}-e{epoch:04d}", exclude=["*.tmp"], max_depth=2)
    ckpttool.rename(RenameRequest(directory=b, template="{epoch}"), dry_run=True)
    ckpttool.rename(a, "{epoch}", excude=())  # error: call-arg
    ckpttool.rename(a, "{epoch}", group_by="series")  # error: arg-type
    ckpttool.prune(a, keep_last=3, depth="quick", exclude=["*.tmp"], trash=True, dry_run=True)
    ckpttool.prune(PruneRequest(directory=b, policy=Policy(keep_last=3)), keep_best=2, metric="loss")
    ckpttool.prune(a, keep_lst=1)  # error: call-arg
    ckpttool.prune(a, keep_last="3")  # error: arg-type
    ckpttool.prune(a, keep_last=3, depth="whole")  # error: arg-type
    ckpttool.copy(a, "s3://bucket/runs", keep_last=5, force=True, max_depth=2)
    ckpttool.copy([a, b], "backup", keep_last=5.5)  # error: arg-type
    ckpttool.copy(a, "backup", require_copy="s3://bucket")  # error: call-arg
    ckpttool.copy(a, "backup", full=2)  # error: call-arg


def results(a: Path, b: str) -> tuple[object, ...]:
    verdict: ckpttool.Verification = ckpttool.verify(a, only=("structure",), strict=True)
    verdicts: ckpttool.Verifications = ckpttool.verify_all([a, b], max_depth=1)
    difference: ckpttool.Difference = ckpttool.diff(a, b)
    converted: ckpttool.Converted = ckpttool.convert(a, b)
    salvaged: ckpttool.Salvaged = ckpttool.salvage(a, b)
    card: ckpttool.Card = ckpttool.card(a, verify=True)
    logged: ckpttool.Logged = ckpttool.log([a], "tensorboard:tb")
    with ckpttool.open_checkpoint(a) as checkpoint:
        shape: tuple[int, ...] = checkpoint["fc.weight"].shape
    found: list[str] = ckpttool.inspect(a).tensors  # error: assignment
    newest: str = ckpttool.latest(b).path  # error: assignment
    restored: int = ckpttool.undo(a).restored  # error: assignment
    rows: str = ckpttool.list_checkpoints(a, sort="epoch").checkpoints  # error: assignment
    paths: list[str] = [one.entry.path for one in ckpttool.list_checkpoints(a)[1:]]
    row: str = ckpttool.list_checkpoints(a)[0]  # error: assignment
    oks: list[bool] = [one.ok for one in ckpttool.verify_all(a)]
    names: list[int] = ckpttool.rename(a, "{epoch}").renames  # error: assignment
    pinned: date = ckpttool.pin([a], until=date(2027, 1, 1)).changed  # error: assignment
    return (
        *(verdict, verdicts, difference, converted, salvaged, card, logged, shape),
        *(found, newest, restored, rows, names, pinned, paths, row, oks),
    )


def explicit_keywords(a: Path, b: str) -> None:
    ckpttool.verify(a, strct=True)  # error: call-arg
    ckpttool.verify_all(a, jobs="2")  # error: arg-type
    ckpttool.list_checkpoints(b, mode="lowest")  # error: arg-type
    ckpttool.latest(b, tag="best")  # error: call-arg
    ckpttool.card(a, verify="yes")  # error: arg-type
    ckpttool.log("runs", ["tensorboard:tb"])  # error: arg-type
    ckpttool.undo(b, dry=True)  # error: call-arg
    ckpttool.inspect(a, stats=1.5)  # error: arg-type
    ckpttool.dif(a, b)  # error: attr-defined


def messages_are_text_to_show(finding: Finding) -> str:
    if finding.message == "truncated":  # error: comparison-overlap
        return str(finding.message)
    print("truncated" in finding.message)  # error: operator
    print(finding.message.split())  # error: attr-defined
    return f"{finding.code}: {finding.message}"
