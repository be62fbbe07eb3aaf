"""Templates: parsed without a crash, rendered without a silent 0, and read back as what was written."""

from __future__ import annotations

import string
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import UsageError
from ckpttool.core.naming import parse_name
from ckpttool.runs.renaming.template import (
    FIELDS,
    FieldError,
    Template,
    Value,
    parse_template,
    render,
    run_of,
    stem_of,
    utc_time,
)

WHEN = datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc)
VALUES: dict[str, Value] = {
    "run": "resnet18",
    "name": "resnet18_epoch_3",
    "format": "pytorch",
    "epoch": 3,
    "step": 1200,
    "date": WHEN,
    "time": WHEN,
    "val_loss": 0.31415926,
    "val/acc": 0.5,
}


def rendered(text: str, **values: Value) -> str:
    return render(parse_template(text), {**VALUES, **values})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{run}-e{epoch:04d}", "resnet18-e0003"),
        ("{run}-{date:%Y%m%d}-{time:%H%M%S}-e{epoch:04d}-s{step:08d}-{val_loss:.4f}",
         "resnet18-20260304-050607-e0003-s00001200-0.3142"),
        ("{run}-{date}-{time}", "resnet18-20260304-050607"),
        ("{date:%G-W%V}_{epoch}", "2026-W10_3"),
        ("{{{run}}}", "{resnet18}"),
        ("{format}:{epoch:>3}", "pytorch:  3"),
        ("{val/acc:.0%}{epoch}", "50%3"),
        ("{step:_}", "1_200"),
        ("{run:.6}{epoch}", "resnet3"),
        ("ü{epoch}", "ü3"),
    ],
)  # fmt: skip
def test_what_is_written(text: str, name: str) -> None:
    assert rendered(text) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{run}-e{epoch}-{f1?:.2f}", "resnet18-e3"),
        ("{run}-{f1?:.2f}-e{epoch}", "resnet18-e3"),
        ("{run}-f1={f1?:.2f}-e{epoch}", "resnet18-e3"),
        ("{run}-f1_{f1?}-e{epoch}", "resnet18-e3"),
        ("{run}_val_f1={val_f1?}_e{epoch}", "resnet18_e3"),
        ("{run}-vf{val_f1?}-e{epoch}", "resnet18-e3"),
        ("best-{run}-n{number?}", "best-resnet18"),
        ("best-model-{number?}-{run}", "best-model-resnet18"),
        ("{f1?}-{number?}-{run}", "resnet18"),
        ("{f1?}_{run}.{number?}", "resnet18"),
        ("{run}{number?}", "resnet18"),
        ("{run}-{number?}.final", "resnet18.final"),
        ("{run}-e{epoch?}", "resnet18-e3"),
    ],
)
def test_what_is_missing_goes_with_its_separator(text: str, name: str) -> None:
    assert rendered(text) == name


def test_what_is_missing_is_an_error_that_names_it() -> None:
    with pytest.raises(FieldError, match=r"^no number \(\{number\?\} omits it\)$"):
        rendered("{run}-{number}")
    with pytest.raises(FieldError, match=r"^\{epoch:04d\}: its format doesn't fit 2\.5; write \{epoch\}"):
        rendered("{run}-{epoch:04d}", epoch=2.5)
    assert rendered("{epoch:.1f}", epoch=2.5) == "2.5"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model", "no field"),
        ("", "no field"),
        ("{epoch", "never closed"),
        ("{run}-epoch}", "unmatched brace"),
        ("{}", "invalid field at character 1"),
        ("x{?}", "invalid field at character 2"),
        ("{ epoch}", "invalid field"),
        ("{epoch:zz}", "'zz'"),
        ("{epoch:99999d}", "'99999d'"),
        ("{epoch:.4f.2}", "invalid format"),
        ("{val_loss:04d}", "doesn't fit"),
        ("{run:d}", "doesn't fit"),
        ("{date:04d}", "invalid time format"),
        ("{date:%D}", "invalid time format"),
        ("{time:%H/%M}", "invalid time format"),
        ("{date:2026}", "invalid time format"),
        ("runs/{epoch}", "another directory"),
        ("{epoch}\n", "non-printable"),
        ("{epoch!r}", "no field|r"),
        ("{e{p}och}", "invalid field"),
        ("{epoch}" + "x" * 5000, "at most 4,096"),
    ],
)
def test_what_is_no_template(text: str, told: str) -> None:
    if text == "{epoch!r}":  # a metric by that name, which nothing has
        with pytest.raises(FieldError, match=r"no epoch!r"):
            rendered(text)
        return
    with pytest.raises(UsageError, match=told):
        parse_template(text)


def test_nothing_in_a_template_is_run() -> None:
    for text in ("{run.__class__}", "{run[0]}", "{0}", "{epoch:{step}}"):
        try:
            template = parse_template(text)
        except UsageError:
            continue
        with pytest.raises(FieldError, match="no "):
            render(template, VALUES)


@given(st.text(alphabet=string.printable + "{}{}{}?:%ü\x00", max_size=60))
def test_parsing_never_crashes(text: str) -> None:
    try:
        template = parse_template(text)
    except UsageError:
        return
    assert isinstance(template, Template) and template.fields
    try:
        name = render(template, VALUES)
    except FieldError:
        return
    assert "/" not in name and "\0" not in name


@given(st.text(alphabet="dfegx%_,.+-#0123456789<>=^ z", max_size=8), st.sampled_from(FIELDS))
def test_formats_never_crash(spec: str, field: str) -> None:
    try:
        template = parse_template(f"{{{field}:{spec}}}")
    except UsageError:
        return
    assert len(render(template, {**VALUES, "number": 7})) < 2000


STEPS = st.integers(0, 10**9).filter(lambda step: not 19_000_000 <= step < 22_000_000)  # a date
RUNS = st.from_regex(r"[a-z]{3,8}[0-9]{0,2}", fullmatch=True).filter(lambda run: parse_name(run).blank == run)


@given(
    run=RUNS,
    epoch=st.integers(0, 10**6),
    step=STEPS,
    loss=st.integers(0, 10**6).map(lambda value: value / 10_000),
    when=st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1)),
)
def test_what_is_written_can_be_read(run: str, epoch: int, step: int, loss: float, when: datetime) -> None:
    values: dict[str, Value] = {"run": run, "epoch": epoch, "step": step, "val_loss": loss}
    values |= {"date": when, "time": when}
    name = render(
        parse_template("{run}-{date}-{time}-e{epoch:04d}-s{step:08d}-val_loss={val_loss:.4f}"), values
    )
    fields = parse_name(name + ".pth")
    assert (fields.epoch, fields.step, fields.metrics) == (epoch, step, {"val_loss": loss})
    assert fields.saved_at == when.replace(microsecond=0).isoformat()
    assert run_of(name, "directory") == run


@given(run=RUNS, epoch=st.integers(0, 10**6), step=STEPS)
def test_usual_templates_come_back(run: str, epoch: int, step: int) -> None:
    values: dict[str, Value] = {"run": run, "epoch": epoch, "step": step}
    for text in (
        "{run}-e{epoch:04d}-s{step:08d}",
        "{run}_epoch_{epoch}_step_{step}",
        "{run}-epoch={epoch}-step={step}",
    ):
        fields = parse_name(render(parse_template(text), values))
        assert (fields.epoch, fields.step) == (epoch, step)


@pytest.mark.parametrize(
    ("stem", "run"),
    [
        ("model_epoch_3", "model"),
        ("resnet18_epoch_9", "resnet18"),
        ("epoch=3-step=100", "exp1"),
        ("checkpoint-500", "checkpoint"),
        ("ckpt-5", "ckpt"),
        ("model.ckpt-1000", "model.ckpt"),
        ("model-val_loss=0.25-epoch=3", "model"),
        ("resnet18-20260304-050607-e0003", "resnet18"),
        ("20260304_e0003", "exp1"),
        ("model", "model"),
        ("model_global_step_10", "model"),
        ("10_epochs", "exp1"),
    ],
)
def test_the_run_is_what_stands_before_the_fields(stem: str, run: str) -> None:
    assert run_of(stem, "runs/exp1") == run


@pytest.mark.parametrize(
    ("name", "is_directory", "stem"),
    [
        ("a.pth", False, "a"),
        ("a.pth.tar", False, "a"),
        ("a.weights.h5", False, "a"),
        ("model.v1.5", False, "model.v1.5"),
        ("e3.ckpt", True, "e3"),
        ("run.old", True, "run.old"),
        (".pth", False, ".pth"),
        ("a-1.0.safetensors", False, "a-1.0"),
    ],
)
def test_suffixes(name: str, is_directory: bool, stem: str) -> None:
    assert stem_of(name, is_directory=is_directory) == stem


def test_times_are_in_utc_and_bounded() -> None:
    assert utc_time(0.0) == datetime(1970, 1, 1, tzinfo=timezone.utc)
    assert utc_time(-86_400.0) == datetime(1969, 12, 31, tzinfo=timezone.utc)
    assert utc_time(float("nan")) is utc_time(1e30) is utc_time(float("inf")) is None
