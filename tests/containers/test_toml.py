"""Lists of texts in TOML: what is changed, and that nothing else is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers.toml import change_strings, parse_toml, quote

TEXT = 't = """\npinned = ["a"]"""\n'
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@pytest.mark.parametrize(
    ("text", "renamed", "added", "expected"),
    [
        ("", {}, ["a"], 'pinned = [\n  "a",\n]\n'),
        ("# mine", {}, ["a"], '# mine\npinned = [\n  "a",\n]\n'),
        ("[table]\nx = 1\n", {}, ["a"], 'pinned = [\n  "a",\n]\n\n[table]\nx = 1\n'),
        (
            "y = 2 # two\n\n# of the table\n[table]\n",
            {},
            ["a"],
            'y = 2 # two\npinned = [\n  "a",\n]\n\n# of the table\n[table]\n',
        ),
        ("y = 2\r\n", {}, ["a"], 'y = 2\r\npinned = [\r\n  "a",\r\n]\r\n'),
        ("pinned=[]", {}, ["a", "b"], 'pinned=["a", "b"]'),
        ("pinned=[ # none\n]", {}, ["a"], 'pinned=["a", # none\n]'),
        ('pinned = ["a", "b"]  # both\n', {}, ["c"], 'pinned = ["a", "b", "c"]  # both\n'),
        ('pinned = [\n    "a"  # first\n]\n', {}, ["b"], 'pinned = [\n    "a",  # first\n    "b",\n]\n'),
        ('pinned = ["a", "b", "c"]', {"b": None}, [], 'pinned = ["a", "c"]'),
        ('pinned = ["a", "b", "c"]', {"c": None}, [], 'pinned = ["a", "b"]'),
        ('pinned = ["a", "b"]', {"a": None, "b": None}, [], "pinned = []"),
        ('pinned = [\n  "a",\n  "b",\n]\n', {"a": None}, [], 'pinned = [\n  "b",\n]\n'),
        ('pinned = [\n  "a",  # why\n  "b",\n]\n', {"a": None}, [], 'pinned = [\n    # why\n  "b",\n]\n'),
        ('pinned = ["a", "b"]', {"a": "b", "b": "a"}, [], 'pinned = ["b", "a"]'),
        ("pinned = ['a', \"\"\"b\"\"\"]", {"a": "ä"}, [], 'pinned = ["ä", """b"""]'),
        (f"{TEXT}'pinned' = ['a']", {"a": "b"}, [], f"{TEXT}'pinned' = [\"b\"]"),
        ('pinned = ["a]", "#b"]  # ["a]"]\n', {"a]": None}, [], 'pinned = ["#b"]  # ["a]"]\n'),
    ],
)  # fmt: skip
def test_a_change_in_its_place(
    text: str, renamed: dict[str, str | None], added: list[str], expected: str
) -> None:
    assert change_strings(text, "pinned", renamed=renamed, added=added) == expected


def test_nothing_to_do_changes_nothing() -> None:
    text = 'pinned = [ "a" ,\n ]\n'
    assert change_strings(text, "pinned", renamed={"b": "c"}) is text


@pytest.mark.parametrize(
    "text", ["pinned = 3\n", 'pinned = "a"\n', "pinned = [1]\n", "[pinned]\n", "pinned = ["]
)
def test_what_is_no_list_of_texts_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        change_strings(text, "pinned", added=["a"])


def test_a_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(ValueError):
        quote("\udcff")


@given(NAMES)
def test_any_text_is_read_back(name: str) -> None:
    assert parse_toml(f"x = {quote(name)}")["x"] == name


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Return a document with a list in it, in one of many spellings, and the list."""
    names = draw(st.lists(NAMES, unique=True, max_size=5))
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    gap = st.sampled_from(["", " ", f' # a ] comment, "of" \'it{newline}', newline, f"{newline}  "])
    parts = []
    for name in names:
        plain = all(character.isalnum() for character in name)
        token = draw(st.sampled_from([quote(name), *([f"'{name}'", f'"""{name}"""'] if plain else [])]))
        parts.append(draw(gap) + token + draw(gap))
    comma = "," if names and draw(st.booleans()) else ""
    head = draw(
        st.sampled_from(
            ["", "# head\n", "a = [[1], {b = ']'}] # c\n", 't = """\npinned = [1]"""\n', "a.pinned = 1\n"]
        )
    )
    tail = draw(st.sampled_from(["", "z = '''[x]'''\n", "[table]\npinned = 1\n", "# end"]))
    return (
        f"{head}pinned = [{','.join(parts)}{comma}{draw(gap)}]{draw(st.sampled_from(['', ' # c']))}\n{tail}",
        names,
    )


@given(documents(), st.data())
def test_the_list_is_changed_and_nothing_else_is(
    document: tuple[str, list[str]], data: st.DataObject
) -> None:
    text, names = document
    before = parse_toml(text)
    new = st.one_of(st.none(), NAMES)
    renamed = {name: data.draw(new) for name in names if data.draw(st.booleans())}
    added = data.draw(st.lists(NAMES, max_size=3))
    result = change_strings(text, "pinned", renamed=renamed, added=added)
    expected = [kept for name in names if (kept := renamed.get(name, name)) is not None] + added
    assert parse_toml(result) == before | {"pinned": expected}
    for comment in ("# head", "# a ] comment", "# end", "# c"):
        assert result.count(comment) == text.count(comment)
    assert json.dumps(change_strings(result, "pinned")) == json.dumps(result)


KEY = "a" + ".a" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        f"{KEY} = 1",
        f"[{KEY}]",
        f"[[{KEY}]]",
        f"b = {{{KEY} = 1}}",
        'b = {\'=\' = 1, "x\\"" = "\'", ' + KEY + " = 1}",
        "a" + " . '='" * 100_000 + " = 1",
        "a" + '."a.=,"' * 100_000 + " = 1",
        'b = {c = """\n""", ' + KEY + " = 1}",
        "b = {c = '''\n''', " + KEY + " = 1}",
    ],
    ids=range(9),
)
def test_a_key_of_many_parts_takes_no_memory(text: str) -> None:
    with pytest.raises(ValueError, match="a key has more than 128 dots"):
        parse_toml(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[" + ", ".join(["'layers.0.mlp.w'"] * 100) + "]", ["layers.0.mlp.w"] * 100),
        ("[" + ", ".join(["1.5"] * 200) + "]", [1.5] * 200),
        (f'"{"." * 200}"', "." * 200),
        (f"1 # {'.a' * 200}", 1),
        (
            "{" + ", ".join(f"k{n}.a = 0.5" for n in range(200)) + "}",
            {f"k{n}": {"a": 0.5} for n in range(200)},
        ),
    ],
    ids=range(5),
)
def test_dots_outside_of_a_key_may_be_many(text: str, value: object) -> None:
    assert parse_toml(f"v = {text}") == {"v": value}


def test_an_integer_that_cannot_be_shown() -> None:
    with pytest.raises(ValueError, match="4300 digits"):
        parse_toml(f"a = 0x{'f' * 100_000}")
