"""``[retention]`` and its rules: what they may say, and when ``prune`` reads them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Policy, UsageError
from ckpttool.cli.config import ConfigDocument, read_document
from ckpttool.cli.config_keys import keys, read, read_value
from ckpttool.cli.retention_config import Retention, read_retention
from ckpttool.runs.retention.request import PathRule
from tests.support.commands import Run
from tests.support.configs import trusted_config, write
from tests.support.golden import Golden, refusal
from tests.support.retention import policies

pytestmark = pytest.mark.usefixtures("home")


KEYS = keys(Retention)


def retention_from(text: str) -> Retention:
    found = read_retention(trusted_config(text))
    assert found is not None
    return found


# What it may say ------------------------------------------------------------------------------------


def test_every_key() -> None:
    found = retention_from(
        """\
        [retention]
        paths = ["runs/", "../other"]
        keep-last = 3
        keep-best = 2
        metric = "val_loss"
        mode = "min"
        keep-every-steps = 1000
        keep-every-epochs = 10
        keep-hourly = 24
        keep-daily = 7
        keep-weekly = 4
        keep-monthly = 12
        keep-yearly = 5
        keep-within = "7d12h"
        keep-name = ["final*"]
        max-size = "200GB"
        max-total-size = "1.5TiB"
        incomplete = "remove"
        failed = "list"
        recursive = true
        exclude = ["*.tmp"]
        max-depth = 3
        series = ["digit_*.pt"]
        group-by = "parent"
        metrics = ["logs/metrics.csv"]
        min-age = "2h"
        max-delete = "20%"
        verify = "quick"
        trash = true
        yes = true
        jobs = 2
        """
    )
    assert found.request_values == {
        "failed": "list",
        "recursive": True,
        "exclude": ("*.tmp",),
        "max_depth": 3,
        "series": ("digit_*.pt",),
        "group_by": "parent",
        "metrics": ("logs/metrics.csv",),
        "min_age": 7200,
        "max_delete": "20%",
        "depth": "quick",
        "jobs": 2,
    }
    assert (found.paths, found.trash, found.yes) == (("runs", os.path.join("..", "other")), True, True)
    policy = Policy(
        keep_last=3,
        keep_best=2,
        metric="val_loss",
        mode="min",
        keep_every_steps=1000,
        keep_every_epochs=10,
        keep_hourly=24,
        keep_daily=7,
        keep_weekly=4,
        keep_monthly=12,
        keep_yearly=5,
        keep_within=(7 * 24 + 12) * 3600,
        keep_names=("final*",),
        max_size=200 * 10**9,
        max_total_size=3 * 2**39,
        incomplete="remove",
    )
    assert found.policies == policies(policy)


def test_rules_of_series() -> None:
    found = retention_from(
        """\
        [retention]
        keep-last = 3

        [[retention.rule]]
        path = "./runs/final/**"
        keep-every-epochs = 5

        [[retention.rule]]
        path = "**/fold_*/*"
        keep-best = 1
        metric = "acc"
        mode = "max"
        """
    )
    place = "ckpttool.toml[retention.rule {}]".format
    rules = (
        ("runs/final/**", Policy(keep_every_epochs=5), place(1)),
        ("**/fold_*/*", Policy(keep_best=1, metric="acc", mode="max"), place(2)),
    )
    assert found.policies == policies(Policy(keep_last=3), *rules)


def test_a_number_is_a_count_and_nothing_else() -> None:
    found = retention_from("[retention]\nkeep-last = 1\nmin-age = 0\nmax-delete = 10\n")
    assert (found.request_values["min_age"], found.request_values["max_delete"]) == (0, "10")
    for key in ("keep-within", "max-size", "min-age"):
        with pytest.raises(UsageError, match=rf"^ckpttool.toml\[retention\]: {key}: 60"):
            retention_from(f"[retention]\n{key} = 60\n")


def test_a_project_has_the_same_table() -> None:
    write(Path("a/pyproject.toml"), "[tool.ckpttool.retention]\nkeep-last = 2\npaths = ['runs']\n")
    found = read_retention(read_document("a/pyproject.toml"))
    assert found is not None
    assert found.policies == policies(Policy(keep_last=2), directory="a")
    assert found == Retention(
        config="a/pyproject.toml", policies=found.policies, paths=("a/runs",), rules={"keep_last": 2}
    )


def test_without_paths_the_directory_of_the_file_is_meant() -> None:
    write(Path("a/ckpttool.toml"), "[retention]\nkeep-last = 2\n")
    found = read_retention(read_document("a/ckpttool.toml"))
    assert found is not None
    assert (found.paths, found.request_values) == (("a",), {})


def test_logs_are_relative_to_the_file_or_to_each_run() -> None:
    write(Path("a/logs/all.csv"), "epoch,loss\n1,2\n")
    logs = ["logs/all.csv", "logs/all.csv:epoch+1", "metrics.csv", "metrics.csv:step"]
    write(Path("a/ckpttool.toml"), f"[retention]\nkeep-last = 2\nmetrics = {logs}\n")
    found = read_retention(read_document("a/ckpttool.toml"))
    assert found is not None
    there = os.path.join("a", "logs", "all.csv")
    assert found.request_values["metrics"] == (there, f"{there}:epoch+1", "metrics.csv", "metrics.csv:step")


def test_a_file_may_say_nothing_of_it() -> None:
    write(Path("ckpttool.toml"), "[verify]\nstrict = true\n")
    assert read_retention(read_document("ckpttool.toml")) is None


WRONG = [
    *(
        "retention = 3",
        "[retention]\nkeep = 3",
        "[retention]\nkeep_daily = 3",
    ),
    *(
        "[[retention.rules]]",
        "[retention]\nkeep-last = 0",
        "[retention]\nkeep-last = true",
    ),
    *(
        "[retention]\nmode = 'most'",
        "[retention]\ngroup-by = 'day'",
    ),
    *(
        "[retention]\nkeep-name = 'a*'",
        "[retention]\nverify = 'all'",
        "[retention]\nyes = 1",
    ),
    *(
        "[retention]\nkeep-within = 'soon'",
        "[retention]\nkeep-within = 1.5",
    ),
    *(
        "[retention]\nmin-age = -1",
        "[retention]\nmax-size = 'huge'",
    ),
    *(
        "[retention]\nmax-delete = '101%'",
        "[retention]\nkeep-best = 1",
    ),
    *(
        "[retention.rule]\npath = 'a'",
        "[[retention.rule]]\nkeep-last = 1",
    ),
    *(
        "[[retention.rule]]\npath = 'a'",
        "[[retention.rule]]\npath = '/a'\nkeep-last = 1",
    ),
    *("[[retention.rule]]\npath = 'a'\nmax-total-size = '1GB'",),
    *("[[retention.rule]]\npath = 'a'\nkeep-last = 1\n[[retention.rule]]\npath = 'b'\nyes = true",),
]


def test_what_is_wrong_is_one_line_with_its_place(golden: Golden) -> None:
    golden({repr(text): refusal(retention_from, text) for text in WRONG})


def test_others_may_not_write_it() -> None:
    path = write(Path("ckpttool.toml"), "[retention]\nkeep-last = 1\n")
    path.chmod(0o666)
    with pytest.raises(UsageError, match=r"^ckpttool.toml: every user can write to it, so it is not trusted"):
        read_retention(read_document("ckpttool.toml"))
    assert read_retention(read_document("ckpttool.toml", is_named=True)) is not None


def test_the_command_line_and_the_file_know_the_same_words(run: Run) -> None:
    shown = run("prune", "--help").out
    for key in ("incomplete", "failed", "group-by"):
        (words,) = re.findall(rf"^  --{key} (\S+)", shown, re.MULTILINE)
        for word in words.split("|"):
            assert read_value(KEYS[key], word) == word


_PLAIN = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["1d", "2GB", "5%", "min"]),
)
_VALUES = st.one_of(
    _PLAIN, st.lists(_PLAIN, max_size=3), st.dictionaries(st.text(max_size=3), _PLAIN, max_size=2)
)


@given(st.sampled_from(sorted(KEYS.keys() - {"rule"})), _VALUES)
def test_any_value_is_read_or_refused_in_one_line(key: str, value: object) -> None:
    try:
        values = read(Retention, ConfigDocument("c.toml", "", {"retention": {key: value}}), "retention")
    except UsageError as failure:
        assert str(failure).startswith(f"c.toml[retention]: {key}")
        assert "\n" not in str(failure)
    else:
        row = KEYS[key]
        found = (values if row.group is None else values[row.group])[row.name]
        assert found is not None
        assert not isinstance(found, list | dict | float)


# The pages ------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs" / "reference"


def test_every_key_stands_on_the_page() -> None:
    page = (DOCS / "config.md").read_text("utf-8")
    assert [key for key in (*KEYS, *keys(PathRule)) if f"`{key}`" not in page and key != "rule"] == []


def test_the_examples_on_the_pages_are_read() -> None:
    for name in ("config", "policies"):
        page = (DOCS / f"{name}.md").read_text("utf-8")
        examples = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        found = [one for one in examples if "[retention]" in one or "[[retention" in one]
        assert found
        for example in found:
            read = retention_from(example).policies
            assert read is not None
            assert read.default is not None
