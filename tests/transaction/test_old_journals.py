"""What ckpttool 0.1.0 left when it was killed, and its trash: today's commands settle it and take it back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import Run
from tests.support.old_transactions import cases, tree, unpack
from tests.support.thorough import sampled

pytestmark = pytest.mark.skipif("sys.platform == 'win32'", reason="needs a POSIX system")


def played(request: pytest.FixtureRequest) -> set[str]:
    """Return the names of the cases that tests of this module play with a fixture."""
    items = (item for item in request.session.items if item.getparent(pytest.Module) is request.node)
    return {item.callspec.params["name"] for item in items if request.fixturename in item.fixturenames}


@pytest.fixture(scope="module")
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the cases, where each journal names the files that lie there."""
    place = tmp_path_factory.mktemp("unpacked")
    unpack(place, played(request))
    return place


@pytest.fixture(scope="module")
def copied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the cases as a copy of the disk, where no file is the one that was noted."""
    place = tmp_path_factory.mktemp("copied")
    unpack(place, played(request), is_copy=True)
    return place


@pytest.mark.parametrize("name", sampled(cases(), 33))
def test_it_is_settled_and_taken_back(
    name: str, unpacked: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, place = cases()[name], unpacked / name
    monkeypatch.chdir(place)
    assert tree(place) == case["known"][case["trees"][0]]
    for step in case["then"]:
        answer = run(*step["command"])
        assert (answer.status, tree(place)) == (step["status"], case["known"][step["tree"]]), answer
    ours = (path.relative_to(place) for path in place.rglob(".ckpttool-*"))
    assert not [path for path in ours if "-trash" not in str(path)]


@pytest.mark.parametrize("name", sampled(cases(), 22))
def test_in_a_copy_it_is_settled_or_told(
    name: str, copied: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, place = cases()[name], copied / name
    monkeypatch.chdir(place)
    answer = run(*case["then"][0]["command"])
    status, known = case["copy"]["status"], case["known"][case["copy"]["tree"]]
    assert (answer.status, tree(place)) == (status, known), answer
