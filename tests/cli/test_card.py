"""Cards: what they say, that nothing in a name becomes markup, and that their snippets load checkpoints."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import ckpttool
from ckpttool.runs.card import escaped
from tests.support.commands import Run
from tests.support.frameworks import python_with_frameworks

FILES = Path(__file__).parents[2] / "fixtures" / "files"


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    return Path(shutil.copy(FILES / "pytorch" / "guide.pth", tmp_path / "model.pth"))


def front_matter(text: str) -> dict[str, object]:
    head = text.split("---\n")[1]
    return dict(yaml.safe_load(head))


def cells(text: str) -> dict[str, str]:
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", text, re.MULTILINE)
    return dict(rows)


def test_markdown(guide: Path, run: Run) -> None:
    answer = run("card", guide, "--set", "license=mit", "--set", "data=CIFAR-10", "--note", "figure 2")
    assert (answer.status, answer.err) == (0, "")
    assert front_matter(answer.out) == {
        "library_name": "pytorch",
        "license": "mit",
        "datasets": ["CIFAR-10"],
        "tags": ["pytorch"],
    }
    facts = cells(answer.out)
    assert (facts["format"], facts["epoch"], facts["loss"]) == ("pytorch (zip)", "10", "0.02")
    assert facts["verified"] == "no: only its structure was read"
    assert facts["data"] == "CIFAR-10"
    assert "> figure 2" in answer.out
    assert hashlib.sha256(guide.read_bytes()).hexdigest() in answer.out
    assert f"{guide.stat().st_size:,}" in answer.out


def test_what_is_not_known_does_not_appear(guide: Path, run: Run) -> None:
    out = run("card", guide).out
    assert front_matter(out) == {"library_name": "pytorch", "tags": ["pytorch"]}
    assert not any(word in out for word in ("seed", "Metrics", "Hyper-parameters", "> "))


def test_json_is_the_library_s(guide: Path, run: Run, tmp_path: Path) -> None:
    document = json.loads(run("card", guide, "--json", "--verify").out)
    assert document == ckpttool.card(guide, verify=True).to_dict()
    assert document["verified"]["valid"] and document["verified"]["checks"]["checksum"] == "passed"
    content = guide.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    assert document["files"] == [{"path": guide.name, "bytes": len(content), "sha256": digest}]
    assert run("card", guide, "-o", tmp_path / "card.json") == (0, "", "")
    assert json.loads((tmp_path / "card.json").read_text()) == {**document, "verified": None}


def test_a_damaged_one_is_called_so(guide: Path, run: Run) -> None:
    data = bytearray(guide.read_bytes())
    data[data.index(b"data/0") + 128] ^= 0x10
    guide.write_bytes(data)
    assert cells(run("card", guide, "--verify").out)["verified"] == "damaged or incomplete"


def test_a_file_is_replaced_only_if_that_is_said(guide: Path, run: Run, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("mine")
    answer = run("card", guide, "-o", card, "--note", "x")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == f"ckpttool: error: {card} already exists (--force replaces it)\n"
    assert card.read_text() == "mine"
    assert not (tmp_path / ".ckpttool-pins.toml").exists()
    assert run("card", guide, "-o", card, "--force").status == 0
    assert card.read_text() == ckpttool.card(guide).to_markdown()
    assert run("card", guide, "-o", tmp_path / "card.txt").status == 2


@pytest.mark.parametrize("fact", ["data", "=x", "two words=x", "note=x", "until=x", "a.b=x", "é=x"])
def test_what_is_no_fact(fact: str, guide: Path, run: Run, tmp_path: Path) -> None:
    assert run("card", guide, "--set", fact).status == 2
    assert not (tmp_path / ".ckpttool-pins.toml").exists()


def test_notes_are_shown_and_removed(guide: Path, run: Run) -> None:
    run("card", guide, "--note", "final", "--set", "seed=7", "--set", "data=a|b")
    shown = [line.split(maxsplit=1) for line in run("inspect", guide).out.splitlines()]
    assert ["note", "final"] in shown and ["seed", "7"] in shown
    assert json.loads(run("inspect", "--json", guide).out)["checkpoints"][0]["about"] == {
        "note": "final",
        "until": None,
        "facts": {"seed": "7", "data": "a|b"},
    }
    assert "note: final" in run("list", "--grouped", guide.parent).out
    (row,) = json.loads(run("list", "--json", guide.parent).out)["checkpoints"]
    assert row["about"]["note"] == "final" and row["protected"] == []  # a note doesn't pin
    run("card", guide, "--note", "", "--set", "seed=", "--set", "data=")
    assert not (guide.parent / ".ckpttool-pins.toml").exists()
    assert "about" not in json.loads(run("inspect", "--json", guide).out)["checkpoints"][0]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_no_text_becomes_markup(text: str) -> None:
    tokens = (
        MarkdownIt("commonmark").enable("table").parse(f"| a | b |\n| --- | --- |\n| {escaped(text)} | x |\n")
    )
    row = [token for token in tokens if token.type == "td_open"]
    inline = [child.type for token in tokens for child in token.children or ()]
    assert len(row) == 2
    assert set(inline) <= {"text"}


def test_names_of_others_are_escaped(tmp_path: Path, run: Run) -> None:
    name = "<img src=x>`|*[a](b)\n.pth"
    path = Path(shutil.copy(FILES / "pytorch" / "guide.pth", tmp_path / name))
    out = run("card", path, "--note", "<script>\n# not a heading").out
    html = MarkdownIt("commonmark").enable("table").render(out.split("## Load")[0])
    assert not re.search(r"<(img|script|h1>not|a )", html)
    assert "&lt;img src=x&gt;" in html and "# not a heading" in html


def snippet_of(path: Path) -> str:
    return re.findall(r"```python\n(.*?)\n```", ckpttool.card(path).to_markdown(), re.DOTALL)[0]


_LOADS = {
    "pytorch/guide.pth": "assert checkpoint['epoch'] == 10",
    "pytorch/module.pth": "assert weights",  # a whole module: its own loader would run code
    "safetensors/trainer/checkpoint-4": "assert type(model).__name__ == 'GPT2LMHeadModel'",
    "runs/lightning/search/version_0/checkpoints/last.ckpt": "assert checkpoint['state_dict']",
    "twins/twin.safetensors": "assert weights",
    "numpy/every_type.npz": "assert arrays.files",
    "keras/adam.keras": "assert model.layers",
    "tensorflow/keras3": "assert reader.get_variable_to_shape_map()",
}


_EACH = """
import json, sys
for name, code in json.load(sys.stdin).items():
    print(name, file=sys.stderr)
    exec(code, {})
"""


@pytest.mark.framework
def test_the_snippets_load_the_checkpoints() -> None:
    """All in one process, since what takes long is to import the frameworks."""
    snippets = {}
    for name, check in _LOADS.items():
        path = FILES / name
        code = snippet_of(path).replace(json.dumps(path.name), json.dumps(str(path)))
        snippets[name] = f"{code}\n{check}"
    python_with_frameworks("-c", _EACH, stdin=json.dumps(snippets))


def test_what_it_was_made_from(run: Run, guide: Path, tmp_path: Path) -> None:
    shards = shutil.copytree(FILES / "safetensors" / "sharded", tmp_path / "sharded")
    made = tmp_path / "made.safetensors"
    assert run("convert", guide, made, "--only", "weights").status == 0
    assert run("card", made, "--from", guide, "--from", shards, "--json").status == 0
    one = hashlib.sha256(guide.read_bytes()).hexdigest()
    names = sorted(path.name for path in shards.iterdir() if path.name != "config.json")
    lines = "".join(f"{hashlib.sha256((shards / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    several = hashlib.sha256(lines.encode()).hexdigest()
    told = run("inspect", "--field", "about.facts.source", made).out.strip()
    assert told == f"{guide} (sha256:{one}); {shards} (sha256:{several})"
    assert one in run("card", made).out
    assert run("card", made, "--from", tmp_path / "gone.pth").status == 2
