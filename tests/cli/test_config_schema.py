"""The JSON schema of ``ckpttool.toml``: what the tool takes it takes, and what is wrong is wrong in both."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from ckpttool import UsageError
from ckpttool.cli.config import ConfigDocument, read_document
from ckpttool.cli.config_commands import config_entries, config_schema, config_template
from ckpttool.cli.config_keys import read_value, schema_of
from ckpttool.cli.verify_config import read_config
from ckpttool.containers.toml import parse_toml
from ckpttool.core.options import Option
from tests.support.commands import Run, refusals
from tests.support.configs import all_keys, write
from tests.support.golden import Golden

pytestmark = pytest.mark.usefixtures("home")

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = Draft7Validator(config_schema())


def is_valid(document: dict[str, Any]) -> bool:
    return bool(SCHEMA.is_valid(document))


def tool_takes(text: str) -> bool:
    write(Path("ckpttool.toml"), text)
    try:
        config_entries(read_document("ckpttool.toml"))
    except UsageError:
        return False
    return True


def test_it_is_a_schema_and_the_command_prints_it(run: Run) -> None:
    status, out, err = run("config", "--schema")
    assert (status, err) == (0, "")
    assert json.loads(out) == config_schema()
    Draft7Validator.check_schema(json.loads(out))


def test_the_copy_in_the_docs_is_current(run: Run) -> None:
    copy = (DOCS / "reference" / "ckpttool.schema.json").read_text("utf-8")
    assert run("config", "--schema").out == copy, "make docs writes it anew"


def test_it_is_printed_alone(run: Run, golden: Golden) -> None:
    golden(refusals(run, "config --schema --json", "config --schema ."))


def examples() -> list[str]:
    """Return the configurations on all pages."""
    pages = "\n".join(page.read_text("utf-8") for page in sorted(DOCS.rglob("*.md")))
    blocks = re.findall(r"^```toml\n(.*?)^```", pages, re.DOTALL | re.MULTILINE)
    return [one for one in blocks if re.search(r"^\[\[?(verify|retention|naming)\b", one, re.MULTILINE)]


def test_the_examples_of_the_docs_are_valid() -> None:
    assert len(examples()) >= 4
    for example in examples():
        assert is_valid(parse_toml(example)), example
        assert tool_takes(example), example


def test_what_init_writes_is_valid() -> None:
    assert is_valid(parse_toml(config_template()))
    everything = re.sub(r"^#(?=[a-z\[])", "", config_template(), flags=re.MULTILINE)
    assert parse_toml(everything)["retention"]["rule"]
    assert is_valid(parse_toml(everything))


WRONG = [
    *(
        "[verfy]\n",
        "verify = 1\n",
        "[verify]\nstrikt = true\n",
        "[verify]\nstrict = 1\n",
    ),
    *(
        "[verify]\npaths = 'models'\n",
        "[verify]\npaths = []\n",
        "[verify.rule]\npath = 'a'\n",
    ),
    *(
        "[[verify.rule]]\npredict = true\n",
        "[[verify.rule]]\npath = 'a'\npredikt = true\n",
    ),
    *("[[verify.rule]]\npath = 'a'\nbatch-size = 0\n",),
    *("[[verify.rule]]\npath = 'a'\nmin-accuracy = 2\n",),
    *(
        "[[verify.rule]]\npath = 'a'\ntimeout = 0\n",
        "[[verify.rule]]\npath = 'a'\nmodel = 'Net'\n",
    ),
    *("[[verify.rule]]\npath = 'a'\nmodel-args = 'depth'\n",),
    *("[[verify.rule]]\npath = 'a'\nmemory = '8'\n",),
    *("[[verify.rule]]\npath = 'a'\nignore = [{code = 'nan'}]\n",),
    *("[[verify.rule]]\npath = 'a'\nignore = [{code = 'nan', reason = 'x', place = 'y'}]\n",),
    *(
        "[[verify.rule]]\npath = 'a'\ntrust = true\n",
        "[retention]\nkeep-lats = 3\n",
    ),
    *(
        "[retention]\nkeep-last = '3'\n",
        "[retention]\nkeep-last = 0\n",
    ),
    *(
        "[retention]\nkeep-within = 1.5\n",
        "[retention]\nmax-size = true\n",
    ),
    *(
        "[retention]\ngroup-by = 'day'\n",
        "[retention]\nverify = 'all'\n",
        "[retention]\nyes = 1\n",
    ),
    *("[[retention.rule]]\nkeep-last = 1\n",),
    *("[[retention.rule]]\npath = 'a'\nkeep-last = 1\nyes = true\n",),
    *(
        "[[retention.rule]]\npath = 'a'\nmax-total-size = '1GB'\n",
        "[naming]\ntemplates = 'a'\n",
    ),
    *("[naming]\ntemplate = 1\n",),
]


def test_what_is_wrong_fails_in_both() -> None:
    for text in WRONG:
        assert not is_valid(parse_toml(text)), text
        assert not tool_takes(text), text


_PLAIN = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["1d", "2GB", "5%", "min", "a:b", "1,2", "full", 0, 1, 0.5]),
)
_VALUES = st.one_of(
    _PLAIN, st.lists(_PLAIN, max_size=2), st.dictionaries(st.text(max_size=2), _PLAIN, max_size=2)
)
_KEYS = [row for known in all_keys().values() for row in known.values() if row.item is None]


@given(st.sampled_from(_KEYS), _VALUES)
def test_the_schema_takes_what_the_tool_takes(row: Option, value: object) -> None:
    try:
        read_value(row, value)
    except UsageError:
        return
    Draft7Validator(schema_of(row)).validate(value)


@given(st.lists(st.dictionaries(st.sampled_from(["code", "reason", "where"]), _PLAIN), max_size=2))
def test_the_schema_takes_what_is_ignored(ignores: list[dict[str, object]]) -> None:
    tables = {"verify": {"rule": [{"path": "a", "ignore": ignores}]}}
    try:
        read_config(ConfigDocument("c.toml", "", tables))
    except UsageError:
        return
    assert is_valid(tables)
