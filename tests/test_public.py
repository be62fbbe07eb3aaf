"""The public surface: what is exported, that it is described, and that docstrings draw it as it is."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from pathlib import Path
from types import ModuleType

import pytest

import ckpttool
from ckpttool import CheckpointError, UsageError
from ckpttool.core import errors
from ckpttool.ops.conversion import ConvertKeywords
from ckpttool.ops.difference import DiffKeywords
from ckpttool.runs.copying import CopyKeywords, CopyRequest
from ckpttool.runs.retention.request import PruneKeywords
from ckpttool.runs.scope import Scope, ScopeKeywords

PACKAGE = Path(ckpttool.__file__).parent
PUBLIC = [getattr(ckpttool, name) for name in ckpttool.__all__]


def subclasses(root: type) -> list[type]:
    return [root, *(found for child in root.__subclasses__() for found in subclasses(child))]


ERRORS = [found for found in subclasses(CheckpointError) if found.__module__ == errors.__name__]


def test_all_is_sorted_and_has_no_doubles() -> None:
    assert list(ckpttool.__all__) == sorted(set(ckpttool.__all__))


def test_all_is_complete() -> None:
    """All that type checkers are told of is exported, and nothing else is public."""
    tree = ast.parse(Path(ckpttool.__file__).read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    told = {
        alias.asname or alias.name
        for node in imports
        if node.module and node.module.startswith("ckpttool")
        for alias in node.names
    }
    assert told == set(ckpttool.__all__) == set(dir(ckpttool))
    public = {
        name
        for name, value in vars(ckpttool).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - {"annotations", "TYPE_CHECKING"} <= set(ckpttool.__all__)


def test_other_names_are_not_there() -> None:
    assert not hasattr(ckpttool, "no_such_name")
    assert not hasattr(ckpttool, "import_module")


def test_star_import_gives_all() -> None:
    namespace: dict[str, object] = {}
    exec("from ckpttool import *", namespace)
    assert set(ckpttool.__all__) <= set(namespace)


def test_public_names_are_described() -> None:
    for name in ckpttool.__all__:
        described = getattr(ckpttool, name).__doc__
        assert described and described.strip(), name
        first = described.strip().splitlines()[0]
        assert first[0].isupper() and first.endswith(".") and len(first) <= 110, name


def members(thing: object) -> list[tuple[str, object]]:
    if not inspect.isclass(thing):
        return []
    return [
        (name, value)
        for name, value in vars(thing).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property | staticmethod | classmethod))
    ]


def test_public_methods_are_described() -> None:
    every = [(thing, name, member) for thing in PUBLIC for name, member in members(thing)]
    assert len(every) > 20
    assert [f"{thing}.{name}" for thing, name, member in every if not inspect.getdoc(member)] == []


def test_every_error_is_exported() -> None:
    assert {found.__name__ for found in [*ERRORS, UsageError]} <= set(ckpttool.__all__)


def test_tree_of_errors_is_drawn_as_it_is() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│ ]*(?:[├└]── )?)([A-Z][A-Za-z]+)(?: {2,}|$)", line)
        if match:
            depth = len(match[1]) // 4
            del above[depth:]
            drawn[match[2]] = above[-1] if above else ""
            above.append(match[2])
    real = {found.__name__: found.__bases__[0].__name__ for found in ERRORS}
    real["CheckpointError"] = drawn["UsageError"] = ""
    assert drawn == real | {"UsageError": ""}


def test_codes_of_errors_tell_them_apart() -> None:
    codes = [found.code for found in ERRORS]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in codes)


def test_error_says_where_what_and_what_was_expected() -> None:
    assert len(ERRORS) > 5
    for kind in ERRORS:
        check_error(kind)


def check_error(kind: type[CheckpointError]) -> None:
    error = kind("m.safetensors", "bytes 96..160", expected="128 bytes", where="fc.weight", code="my-code")
    assert str(error) == "m.safetensors[fc.weight]: bytes 96..160 (128 bytes)"
    assert error.reason == "bytes 96..160 (128 bytes)"
    assert (error.path, error.where, error.code) == ("m.safetensors", "fc.weight", "my-code")
    assert str(kind(Path("m.pth"), "odd")) == "m.pth: odd"


def test_errors_survive_a_process_boundary() -> None:
    import pickle

    error = errors.Truncated("m.pth", "short", expected="long", where="data/0")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


TYPED_CALLS = Path(__file__).parent / "typed_calls.py"
USER = """
[mypy]
strict = True
python_version = 3.10
cache_dir = /dev/null
mypy_path = {root}
[mypy-ckpttool.*]
ignore_errors = True
"""
"""How a user checks a program; ``ckpttool`` is looked at as an installed package is."""


def test_type_checkers_know_keywords_and_results(tmp_path: Path) -> None:
    from mypy import api

    (tmp_path / "mypy.ini").write_text(USER.format(root=PACKAGE.parent))
    out, err, _ = api.run(["--config-file", str(tmp_path / "mypy.ini"), str(TYPED_CALLS)])
    found = re.findall(r"typed_calls\.py:(\d+): error: .*\[([a-z-]+)\]$", out, re.MULTILINE)
    lines = enumerate(TYPED_CALLS.read_text("utf-8").splitlines(), 1)
    expected = [
        (str(number), line.split("  # error: ")[1]) for number, line in lines if "  # error: " in line
    ]
    assert (found, err, len(expected) > 20) == (expected, "", True), out


@pytest.mark.parametrize(
    ("keywords", "records", "given"),
    [
        (DiffKeywords, [ckpttool.DiffOptions], set()),
        (ConvertKeywords, [ckpttool.ConvertOptions], set()),
        (ScopeKeywords, [Scope], set()),
        (PruneKeywords, [ckpttool.PruneRequest, ckpttool.Policy], {"directory"}),
        (CopyKeywords, [CopyRequest, ckpttool.Policy], {"sources", "destination", "full", "dtype"}),
    ],
)
def test_keywords_for_type_checkers_are_the_attributes(
    keywords: type, records: list[type], given: set[str]
) -> None:
    types = {name: type_ for one in records for name, type_ in typing.get_type_hints(one).items()}
    own = {name: type_ for name, type_ in types.items() if name not in given}
    assert typing.get_type_hints(keywords) == own


@pytest.mark.parametrize(
    "name", ["diff", "convert", "merge", "average", "salvage", "rename", "prune", "copy"]
)
def test_types_of_options_are_known_at_run_time(name: str) -> None:
    function = getattr(ckpttool, name)
    result = typing.get_type_hints(function)["return"]
    assert str(inspect.signature(function)).endswith(f" -> '{result.__name__}'")


def test_results_are_frozen(files: Path) -> None:
    verification = ckpttool.verify(files / "pytorch" / "guide.pth")
    inspection = ckpttool.inspect(files / "pytorch" / "guide.pth")
    difference = ckpttool.diff(*[files / "pytorch" / "guide.pth"] * 2)
    for result in (
        verification,
        inspection,
        difference,
        difference.a,
        verification.checks[0],
        inspection.tensors[0],
    ):
        with pytest.raises((AttributeError, TypeError)):
            result.path = "other"  # type: ignore[misc]


def test_library_answers_what_the_command_shows(run, files: Path) -> None:
    import json

    path = files / "pytorch" / "guide.pth"
    (told,) = json.loads(run("verify", "--json", path).out)["checkpoints"]
    verification = ckpttool.verify(path)
    assert told["safety"] == verification.safety.value
    assert [check["status"] for check in told["checks"]] == [c.status.value for c in verification.checks]


def test_library_compares_as_the_command_does(run, files: Path) -> None:
    import json

    paths = [files / "series" / f"model_epoch_{epoch}.pth" for epoch in (9, 10)]
    told = json.loads(run("diff", "--json", "--rtol", "0.1", *paths).out)
    difference = ckpttool.diff(*paths, ckpttool.DiffOptions(rtol=0.1))
    assert isinstance(difference, ckpttool.Difference)
    assert [one["name"] for one in told["changed"]] == [one.name for one in difference.changed]
    assert told["equal"] is difference.equal is False
    assert [one["path"] for one in told["values"]] == [one.path for one in difference.values]


def compare_with_itself(path: str) -> object:
    return ckpttool.diff(path, path)


def test_path_to_nothing_is_an_error_of_ours() -> None:
    for function in (ckpttool.open_checkpoint, ckpttool.inspect, ckpttool.verify, compare_with_itself):
        for path in ("no/such/file.pth", "a\0b.pth", ""):
            with pytest.raises(CheckpointError):
                function(path)
