"""What a SavedModel computes, with models that TensorFlow and Keras save here and now."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from ckpttool import open_checkpoint
from tests.support.commands import python
from tests.support.frameworks import python_with_frameworks
from tests.support.limits import lower_limits

WRITE = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, tensorflow as tf
os.chdir(sys.argv[1])

class Module(tf.Module):
    def __init__(self, factor=2.0, vocabulary=None):
        self.first = tf.Variable(tf.ones((4, 4)), name="first")
        self.other = tf.Variable(tf.ones((4, 4)), name="other")
        self.factor = factor
        if vocabulary:
            read = tf.lookup.TextFileInitializer(vocabulary, tf.string, 0, tf.int64, 1, delimiter="\\t")
            self.table = tf.lookup.StaticHashTable(read, -1)

    @tf.function(input_signature=[tf.TensorSpec((None, 4), name="x")])
    def f(self, x):
        return self.factor * tf.nn.relu(x @ self.first)

    @tf.function(input_signature=[tf.TensorSpec((None, 4), name="x")])
    def g(self, x):
        return self.f(x) @ self.other

    @tf.function(input_signature=[tf.TensorSpec((None, 4), name="x"), tf.TensorSpec((None, 4), name="y")])
    def h(self, x, y):
        return tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s @ self.other - y), (0, x))[1]

def save(module, name, *functions):
    tf.saved_model.save(module, name, signatures=dict(zip("abc", functions)))

module = Module()
for name in ("one", "again"):
    save(module, name, module.f, module.g, module.h)
save(module, "exchanged", module.g, module.f, module.h)
other = Module(3.0)
save(other, "factor", other.f, other.g, other.h)
other.first, other.other = other.other, other.first
other = Module()
other.first, other.other = other.other, other.first
save(other, "wired", other.f, other.g, other.h)
for name, text in (("words", "a\\t1\\n"), ("others", "a\\t2\\n")):
    with open("vocabulary.txt", "w") as stream:
        stream.write(text)
    listed = Module(vocabulary="vocabulary.txt")
    listed.look = tf.function(listed.table.lookup, input_signature=[tf.TensorSpec(None, tf.string)])
    save(listed, name, listed.f)

layers = keras.layers
model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dropout(0.5), layers.Dense(2)])
for name in ("exported", "exported_again"):
    model.export(name, verbose=False)
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    x = tf.compat.v1.placeholder(tf.float32, (None, 4))
    y = tf.nn.relu(x @ tf.compat.v1.get_variable("w", (4, 4)))
    session.run(tf.compat.v1.global_variables_initializer())
    for name in ("v1", "v1_again"):
        tf.compat.v1.saved_model.simple_save(session, name, {"x": x}, {"y": y})
"""

pytestmark = [
    pytest.mark.framework,
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of models that two processes wrote, the second one's in ``second``."""
    directory = tmp_path_factory.mktemp("models")
    (directory / "second").mkdir()
    python_with_frameworks("-c", WRITE, directory)
    python("-c", WRITE, directory / "second", check=True)
    return directory


def metadata_of(path: Path, key: str = "graph") -> Any:
    with open_checkpoint(path) as checkpoint:
        found = checkpoint.metadata[key]
        assert isinstance(found, dict)
        return found.get("serve", found)


def changed(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return the names of what differs, those of signatures among them."""
    both = [{**found, **found["signatures"], "signatures": None} for found in (one, other)]
    return {name for name in both[0] | both[1] if both[0].get(name) != both[1].get(name)}


@pytest.mark.parametrize("name", ["one", "exported", "v1", "words"])
def test_two_processes_say_the_same(models: Path, name: str) -> None:
    assert metadata_of(models / name) == metadata_of(models / "second" / name)


@pytest.mark.parametrize(
    ("name", "again"), [("one", "again"), ("exported", "exported_again"), ("v1", "v1_again")]
)
def test_two_saves_say_the_same(models: Path, name: str, again: str) -> None:
    assert metadata_of(models / name) == metadata_of(models / again)


@pytest.mark.parametrize(
    ("name", "differing"),
    [
        ("exchanged", {"a", "b"}),
        ("factor", {"a", "b", "functions", "nodes"}),
        ("wired", {"a", "b", "c", "nodes"}),
    ],
)
def test_another_graph_says_what_differs(models: Path, name: str, differing: set[str]) -> None:
    assert changed(metadata_of(models / "one"), metadata_of(models / name)) == differing


def test_assets_are_told_with_their_checksums(models: Path) -> None:
    assert metadata_of(models / "words") == metadata_of(models / "others")
    for name, text in (("words", b"a\t1\n"), ("others", b"a\t2\n")):
        expected = f"<4 bytes, CRC-32 {crc32(text):08x}>"
        assert metadata_of(models / name, "files") == {"assets/vocabulary.txt": expected}


def test_constants_that_were_not_read_are_told(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, constants=0, short_constant=64)
    assert metadata_of(models / "one")["constants"].endswith(" bytes of constants that were not read>")
