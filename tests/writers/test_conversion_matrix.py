"""Every format that is read, in every format that is written: its framework loads it, and it is equal."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from ckpttool import ConvertOptions, UsageError, convert, diff
from ckpttool.testing import expected_digests, read_truth
from tests.conftest import FIXTURES
from tests.support.commands import python
from tests.support.frameworks import python_with_frameworks
from tests.support.thorough import sampled
from tests.support.twins import FIXTURES as TWIN_FILES
from tests.support.twins import unpacked

LOADER = Path(__file__).with_name("matrix_load.py")
SOURCES = {
    "pytorch": "pytorch/guide.pth",
    "pytorch, legacy": "pytorch-legacy/guide_legacy.pth",
    "pytorch, sharded": "pytorch/pytorch-sharded",
    "pytorch, DeepSpeed": "deepspeed/zero-2/global_step2",
    "pytorch, ranks": "ranks/old-fsdp-4",
    "pickle": "pickle/protocol4.pkl",
    "torchscript": "torchscript/scripted.pt",
    "torch-export": "torch-export/program.pt2",
    "torch-dcp": "torch-dcp/two-ranks",
    "safetensors": "safetensors/metadata.safetensors",
    "safetensors, sharded": "safetensors/sharded",
    "tensorflow": "tensorflow/keras3/ckpt-1",
    "tensorflow, v1": "tensorflow/v1-sharded",
    "savedmodel": "savedmodel/module",
    "keras": "keras/adam.keras",
    "keras-h5, weights": "keras/adam.weights.h5",
    "keras-h5, model": "keras/adam.h5",
    "hdf5": "hdf5/mixed.h5",
    "fluid": "fluid/guide/checkpoint_0",
    "paddle": "paddle/protocol4.pdparams",
    "numpy": "numpy/packed.npz",
}
TARGETS = {
    "pytorch": "out.pth",
    "safetensors": "out.safetensors",
    "tensorflow": "ckpt-1.index",
    "savedmodel": "saved",
    "keras": "out.keras",
    "keras-h5": "out.weights.h5",
    "hdf5": "out.hdf5",
    "numpy": "out.npz",
    "fluid": "root",
    "torch-dcp": "dcp",
}
FRAMEWORKS = {
    "torch": ("pytorch", "safetensors", "torch-dcp", "numpy", "hdf5"),
    "tensorflow": ("tensorflow", "savedmodel", "keras-h5"),
    "paddle": ("fluid",),
}
"""Which framework's process loads which format."""


TWINS = [
    *("twin{}.pth", "twin{}.safetensors", "twin{}.npz", "twin-keras{}.npz", "twin{}-dcp", "twin{}.keras"),
    *("twin{}.h5", "twin{}.weights.h5", "twin{}-keras2.h5", "twin{}-subclassed.weights.h5", "twin{}-tf"),
    *("twin{}-functional-tf", "twin{}-savedmodel", "twin{}-keras2-savedmodel"),
    *("twin{}-fluid", "twin{}-static.pdmodel", "twin{}.pdparams"),
]
"""One network in every framework, as it is and with one changed element."""
LEAST = 7
"""In how many formats each of them can be written, at least."""


PARTS = 3
"""``make test`` converts every third source."""


class Made(NamedTuple):
    """What a conversion came to: where it stands, or why it is refused."""

    path: str
    refused: str | None = None
    dropped: tuple[str, ...] = ()


Matrix = dict[tuple[str, str], Made]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twins")
    for path in TWIN_FILES.glob("twin*"):
        shutil.copy(path, folder)
    return unpacked("others", folder)


def converted(sources: list[str], folder: Path) -> Matrix:
    """Convert sources to all formats."""
    made = {}
    for source in sources:
        for target, name in TARGETS.items():
            path = folder / source.replace(" ", "") / target / name
            path.parent.mkdir(parents=True)
            try:
                done = convert(FIXTURES / SOURCES[source], path, ConvertOptions(to=target))
            except UsageError as refusal:
                made[source, target] = Made(str(path), str(refusal))
            else:
                assert done.verified, (source, target, done.mismatches)
                made[source, target] = Made(done.target, dropped=tuple(one.path for one in done.dropped))
    return made


def loaded(matrix: Matrix) -> dict[str, dict[str, str]]:
    """Return the digests that the frameworks find, by path."""
    wanted: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for (source, target), made in matrix.items():
        for framework, formats in FRAMEWORKS.items():
            if target in formats and made.refused is None:
                kind = "pickle" if (source, target) == ("pickle", "pytorch") else target
                wanted[framework].append((kind, made.path))
    found: dict[str, dict[str, str]] = {}
    for framework, paths in wanted.items():
        asked = json.dumps(paths)
        if framework == "paddle":  # it crashes beside PyTorch
            told = python(LOADER, input=asked, env={"GLOG_minloglevel": "3"}, check=True).stdout
        else:
            told = python_with_frameworks(LOADER, stdin=asked)
        found |= json.loads(told.splitlines()[-1])
    return found


@pytest.mark.framework
@pytest.mark.parametrize("part", sampled(range(PARTS), 1))
def test_what_was_converted_is_equal_to_its_source_and_loads(part: int, tmp_path: Path) -> None:
    matrix = converted([*SOURCES][part::PARTS], tmp_path)
    found, documents = loaded(matrix), documented()
    for (source, target), made in matrix.items():
        assert documents[source][target] == ("–" if made.refused else "yes"), (source, target, made)
        if made.refused is None:
            require_equal(source, target, made)
            if target != "keras":
                require_loaded(source, target, found[made.path])


def require_equal(source: str, target: str, made: Made) -> None:
    """Require that ckpttool sees no difference, whichever side comes first."""
    where = source, target
    for found in (diff(FIXTURES / SOURCES[source], made.path), diff(made.path, FIXTURES / SOURCES[source])):
        assert (found.changed, found.added, found.removed, found.renamed) == ((), (), (), ()), (
            source,
            target,
        )
        assert found.compared == found.unchanged > 0, where
        # Only what a conversion told that it would drop is another: a graph, and what is computed by it.
        is_known = found.values and made.dropped == ("saved_model.pb",)
        assert found.equal or is_known, where


def require_loaded(source: str, target: str, found: dict[str, str]) -> None:
    """Require that a framework loaded the source's values under the source's names."""
    expected = digests_of(FIXTURES / SOURCES[source])
    names = {plain(name): digest for name, digest in found.items()}
    assert set(expected.values()) <= set(names.values()), (source, target)
    if target != "keras-h5":  # Keras counts layers by their classes there, whatever they are called
        # Where a format has no ties, a tied tensor is stored once.
        once = {name: digest for name, digest in expected.items() if plain(name) in names}
        assert {name: names[plain(name)] for name in once} == once, (source, target)


@pytest.mark.parametrize("source", sampled(TWINS, 5))
def test_one_changed_element_is_told_of_what_was_converted(twins: Path, tmp_path: Path, source: str) -> None:
    """The frameworks wrote both networks; in the second, one element is another."""
    wanted = json.loads((TWIN_FILES / "twins.expected.json").read_text())["changed"]
    one, other = (twins / source.format(which) for which in ("", "-changed"))
    count = 0
    for target, name in TARGETS.items():
        (tmp_path / target).mkdir()
        try:
            done = convert(other, tmp_path / target / name, ConvertOptions(to=target))
        except UsageError:
            continue
        found = diff(one, done.target)
        (change,) = found.changed
        assert (found.added, found.removed, found.renamed, found.undecided) == ((), (), (), ())
        assert found.unchanged == found.compared - 1 and found.not_compared == found.broken == ()
        assert change.kind == "values" and change.statistics is not None
        assert change.statistics.count == 1 and sorted(change.statistics.where) == [7, 20]
        assert change.statistics.max_abs == abs(wanted["after"] - wanted["before"])
        count += 1
    assert count >= LEAST


def digests_of(path: Path) -> dict[str, str]:
    """Return what the framework that wrote a fixture says of its tensors, by name."""
    told = path if path.with_name(f"{path.name}.expected.json").exists() else path.parent
    return {".".join(map(str, path)): digest for path, digest in expected_digests(read_truth(told)).items()}


def plain(name: str) -> str:
    """Return a name without what tells apart what lies in each other, and what has a dot or slash in it."""
    return re.sub(r"\.S|\.+|/", "", name)


def documented() -> dict[str, dict[str, str]]:
    """Return the table of docs/reference/formats.md."""
    page = (LOADER.parents[2] / "docs" / "reference" / "formats.md").read_text("utf-8")
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in page.partition("<!-- conversions -->")[2].partition("<!-- end -->")[0].splitlines()
        if line.startswith("|")
    ]
    heading = rows[0][1:]
    return {row[0].replace("`", ""): dict(zip(heading, row[1:], strict=True)) for row in rows[2:]}


def test_the_table_in_the_docs_is_of_this_matrix() -> None:
    """What stands in its cells is compared with the conversions."""
    assert {source: list(row) for source, row in documented().items()} == {key: [*TARGETS] for key in SOURCES}


def test_every_writer_is_in_the_matrix(tmp_path: Path) -> None:
    known = re.escape(f"unknown format (choose from {', '.join(TARGETS)})")
    with pytest.raises(UsageError, match=known):
        convert(FIXTURES / SOURCES["pytorch"], tmp_path / "out", ConvertOptions(to="none"))
