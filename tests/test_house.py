"""What `make check` can't hold: decisions go by codes and records, and no sentence of ours is read back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ckpttool"
READS = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "split",
    "replace",
}
SENTENCE = re.compile(r"[a-z]{2,} [a-z(]|[a-z]{2,}:? $|^ [a-z]{2,}")
"""Two words, or a word before or behind a space."""

ALLOWED = {
    ("predict/interface.py", "Arguments received"): "Keras's words",
}


def sentences_read(tree: ast.AST) -> Iterator[str]:
    """Yield the constants that look like sentences, where code takes a text apart by them."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=method), args=[ast.Constant(value=str(text)), *_]):
                if method in READS and SENTENCE.search(text):
                    yield text


def test_the_search_sees_sentences() -> None:
    code = 'a.startswith("last ")\nb.partition(" in ")\nc.replace("goes with it", "")\nd.startswith("key.")\n'
    assert list(sentences_read(ast.parse(code))) == ["last ", " in ", "goes with it"]


def test_no_sentence_of_ours_is_read_back() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), sentence)
        for path in PACKAGE.rglob("*.py")
        for sentence in sentences_read(ast.parse(path.read_text("utf-8")))
    }
    assert found == set(ALLOWED)
