"""What `make check` can't hold: decisions go by codes and records, and no sentence of ours is read back.

Nor does what is no format's own code tell one format from another by its name.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ckpttool.containers.toml import parse_toml
from ckpttool.formats import formats
from tests.support import golden

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "ckpttool"
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


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Return all that each file of the package says."""
    gc.disable()  # nothing of it is garbage, and looking for it again and again takes longest
    try:
        return {path: [*ast.walk(ast.parse(path.read_text("utf-8")))] for path in PACKAGE.rglob("*.py")}
    finally:
        gc.enable()


def sentences_read(said: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the constants that look like sentences, where code takes a text apart by them."""
    for node in said:
        match node:
            case ast.Call(func=ast.Attribute(attr=method), args=[ast.Constant(value=str(text)), *_]):
                if method in READS and SENTENCE.search(text):
                    yield text


def test_the_search_sees_sentences() -> None:
    code = 'a.startswith("last ")\nb.partition(" in ")\nc.replace("goes with it", "")\nd.startswith("key.")\n'
    assert list(sentences_read(ast.walk(ast.parse(code)))) == ["last ", " in ", "goes with it"]


def imports_of_files() -> dict[str, set[str]]:
    """Return which files of the package each one imports, in functions, too, and for types alone."""
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        called: set[str] = set()
        for node in nodes()[path]:
            if isinstance(node, ast.ImportFrom) and node.module:
                called |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                called |= {alias.name for alias in node.names}
        imports[name] = called & modules.keys() - {name}
    return imports


def test_no_files_import_each_other_in_a_circle() -> None:
    imports = imports_of_files()
    while free := {name for name, called in imports.items() if not called & imports.keys()}:
        imports = {name: called for name, called in imports.items() if name not in free}
    importers = {called for calls in imports.values() for called in calls}
    assert sorted(imports.keys() & importers) == []


MODULE = re.compile(r"ckpttool((?:\.\w+)*)\.?", re.ASCII)


@cache
def layers() -> dict[str, int]:
    """Return the layer of each part of the package, by the contract in pyproject.toml; the top one is 0."""
    linter = parse_toml((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    (contract,) = (one for one in linter["contracts"] if one["name"] == "Layers point downwards")
    parts = ((part, number) for number, row in enumerate(contract["layers"]) for part in row.split(" | "))
    return {part.removeprefix("ckpttool."): number for part, number in parts}


def modules_above(part: str, said: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the texts that name a module of a layer above a part's, or begin such a name.

    Of a name that is put together, it counts how it begins: ``f"ckpttool.{part}"`` may be any module.
    """
    said = [*said]
    begun = {id(node.values[0]) for node in said if isinstance(node, ast.JoinedStr) and node.values}
    for node in said:
        match node:
            case ast.Constant(value=str(text)) if found := MODULE.fullmatch(text):
                first = found[1].split(".")[1] if found[1] else None
                is_open = first is None and text.endswith(".") and id(node) in begun
                if is_open or layers().get(first or "", layers()[part]) < layers()[part]:
                    yield text


def test_the_search_sees_modules_above() -> None:
    code = """
import_module("ckpttool.cli.render.json")
import_module(f"ckpttool.formats.{name}")
import_module(f"ckpttool.{name}")
A, B, C = "ckpttool.core.tensor", "ckpttool.list/1", "ckpttool.toml"
"""
    above = ["ckpttool.cli.render.json", "ckpttool.formats.", "ckpttool."]
    assert sorted(modules_above("storage", ast.walk(ast.parse(code)))) == sorted(above)
    assert sorted(modules_above("formats", ast.walk(ast.parse(code)))) == sorted([above[0], above[2]])


def test_no_import_runs_upwards_through_a_string() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), text)
        for path, said in nodes().items()
        if len(path.relative_to(PACKAGE).parts) > 1
        for text in modules_above(path.relative_to(PACKAGE).parts[0], said)
    }
    assert found == set()


def test_no_sentence_of_ours_is_read_back() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), sentence)
        for path, said in nodes().items()
        for sentence in sentences_read(said)
    }
    assert found == set(ALLOWED)


OF_FORMATS = ("formats", "predict", "testing")
"""Rooms that are about formats and frameworks one by one."""

NAMED_FORMATS = {
    ("weights/converting/framework_layout.py", "keras"): "the layout that it makes",
    ("weights/converting/framework_layout.py", "pytorch"): "the layout that it makes",
    ("ops/conversion.py", "keras"): "the layout",
    ("ops/manifest.py", "fluid"): "its serial directories",
    ("ops/merge.py", "safetensors"): "a variant of which one rank's file looks like the whole",
    ("ops/merge.py", "torch-dcp"): "the format with that variant",
    ("ops/metadata_diff.py", "paddle"): "the library that a safetensors file is for",
    ("ops/scan_findings.py", "pytorch"): "the one format that can be told to write no checksums",
    ("ops/scan_findings.py", "savedmodel"): "the one format that may hold a program and no tensors",
    ("cli/render/text_inspect.py", "fluid"): "the trainers that it alone has",
    ("cli/render/text_inspect.py", "paddle"): "the framework",
    ("cli/render/text_inspect.py", "pytorch"): "the framework",
    ("cli/render/text_inspect.py", "tensorflow"): "the framework",
    ("runs/pruning/protections.py", "fluid"): "its serial directories",
    ("runs/renaming/names.py", "paddle"): "two files of one name",
    ("runs/renaming/names.py", "tensorflow"): "what its manager writes over",
    ("runs/renaming/names.py", "fluid"): "its serial directories",
    ("runs/renaming/names.py", "savedmodel"): "what TensorFlow Serving looks for",
    ("core/state_dict.py", "numpy"): "the framework of a state dict",
    ("core/state_dict.py", "tensorflow"): "the framework of a state dict",
    ("containers/pickle/numpy_types.py", "numpy"): "the Python module",
    ("containers/pickle/pickle_nodes.py", "numpy"): "the Python module",
    ("containers/pickle/pickler.py", "numpy"): "the Python module",
    ("containers/pickle/constructors.py", "numpy"): "the Python module",
}
"""The names of formats elsewhere, by their files, and what they are there."""


def test_formats_are_told_apart_by_their_traits() -> None:
    names = {format.name for format in formats()} - {"pickle"}
    found = {
        (path.relative_to(PACKAGE).as_posix(), node.value)
        for path, said in nodes().items()
        if path.relative_to(PACKAGE).parts[0] not in OF_FORMATS
        for node in said
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert found == set(NAMED_FORMATS)


def test_each_golden_text_has_its_test() -> None:
    for path in golden.DIRECTORY.rglob("*.txt"):
        module = TESTS / path.relative_to(golden.DIRECTORY).with_name(f"test_{path.stem}.py")
        code = module.read_text("utf-8")
        names = {re.split(r"\[| #", name)[0] for name in golden.sections(path)}
        assert sorted(name for name in names if f"def {name}(" not in code) == [], path


def test_programs_of_the_tests_find_what_they_import() -> None:
    """No test imports those that a target of the Makefile runs."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in TESTS.rglob("*.py")}
    missing = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.")):
                continue
            module = TESTS.parent.joinpath(*str(node.module).split(".")).with_suffix(".py")
            if module.exists():
                text = module.read_text("utf-8")
                missing += [
                    f"{path.name}: {alias.name}"
                    for alias in node.names
                    if re.search(rf"\b{re.escape(alias.name)}\b", text) is None
                ]
    assert missing == []
