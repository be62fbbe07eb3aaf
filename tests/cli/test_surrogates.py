"""Names that are no UTF-8, and texts in files that no encoding holds: every answer is UTF-8."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HALF = "\ud800"
RUNS, NAME = os.fsdecode(b"r\xffns"), os.fsdecode(b"m\xfe_epoch_%d.pkl")

pytestmark = pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="file names are text there")


def global_named(module: str, name: str) -> bytes:
    """Return a pickle that calls what has these names."""
    texts = [text.encode("utf-8", "surrogatepass") for text in (module, name)]
    return b"\x80\x04" + b"".join(b"\x8c%c%b" % (len(text), text) for text in texts) + b"\x93)R."


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory in which half characters stand wherever a text may."""
    monkeypatch.chdir(tmp_path)
    place = Path(RUNS)
    place.mkdir()
    for epoch in (1, 2, 3):
        content = {
            "epoch": epoch,
            f"w{HALF}": [1.0, epoch],
            "b\udcff": HALF,
            HALF: {f"k{HALF}": epoch},
            "metrics": {f"m{HALF}": 1.0 / epoch},
            "best_model_path": f"a{HALF}",
        }
        (place / (NAME % epoch)).write_bytes(pickle.dumps(content))
    (place / "evil.pkl").write_bytes(global_named("os", f"system{HALF}"))
    (place / "unknown.pkl").write_bytes(global_named(f"x{HALF}", f"y{HALF}"))
    (place / os.fsdecode(b"cut\xfd.pth")).write_bytes(b"PK\x03\x04")
    header = json.dumps({f"w{HALF}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (place / "half.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    lines = [json.dumps({"epoch": epoch, f"val{HALF}": epoch / 10}) for epoch in (1, 2, 3)]
    (place / "log.jsonl").write_text("\n".join(lines), "utf-8")
    (place / "best.json").write_text(json.dumps({"best": HALF}), "utf-8")
    return place


COMMANDS = [
    ("inspect",),
    ("inspect", "-v"),
    ("inspect", "--stats"),
    ("verify",),
    ("verify", "-v"),
    ("verify", "--github"),
    ("list",),
    ("list", "-v", "--grouped"),
    ("list", "--metrics", f"{RUNS}/log.jsonl"),
    ("list", "--keep", "1"),
    ("prune", "--keep", "1", "-n"),
    ("prune", "--keep", "1", "-n", "-v"),
    ("rename", "{stem}-{epoch}", "-n"),
    ("pin", "--list"),
    ("undo", "-n"),
]


def check(answer: tuple[int, str, str], *, is_json: bool) -> None:
    """Require that an answer is text that UTF-8 holds, and no internal error."""
    status, out, err = answer
    assert status in (0, 1, 2)
    assert "internal error" not in err
    assert "codec" not in out + err
    (out + err).encode()  # raises where half a character is left
    if is_json and out:
        assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize("json_", [(), ("--json",)], ids=["text", "json"])
def test_directories(run, runs: Path, json_: tuple[str, ...]) -> None:
    for command in COMMANDS:
        check(run(command[0], runs, *command[1:], *json_), is_json=bool(json_))


@pytest.mark.parametrize("json_", [(), ("--json",)], ids=["text", "json"])
def test_files(run, runs: Path, json_: tuple[str, ...]) -> None:
    one, other, third = (runs / (NAME % epoch) for epoch in (1, 2, 3))
    for path in (*runs.iterdir(), runs / os.fsdecode(b"nowhere\xff")):
        check(run("inspect", path, *json_), is_json=bool(json_))
        check(run("verify", path, *json_), is_json=bool(json_))
    for command in (
        ("diff", one, other),
        ("diff", one, other, third),
        ("diff", one, runs / "evil.pkl"),
        ("convert", one, "made.safetensors"),
        ("convert", one, "made.npz"),
        ("convert", one, "made.h5"),
        ("prune", runs, "--keep", 1, "--explain", one),
        ("pin", one),
        ("unpin", one),
    ):
        check(run(*command, *json_), is_json=bool(json_))


def test_the_document_of_latest(run, runs: Path) -> None:
    answer = run("latest", runs, "--json")
    check(answer, is_json=True)
    assert os.fsencode(json.loads(answer.out)["path"]) == b"r\xffns/m\xfe_epoch_3.pkl"
    assert r"m\udcfe_epoch_3.pkl" in answer.out


def test_reports(run, runs: Path) -> None:
    check(run("verify", runs, "--junit", "j", "--sarif", "s", "--summary", "m", "--github"), is_json=False)
    suites = ElementTree.fromstring(Path("j").read_text("utf-8"))
    names = {suite.get("name") for suite in suites.iter("testsuite")}
    assert r"r\udcffns/m\udcfe_epoch_1.pkl" in names
    locations = {
        one["location"]["uri"] for one in json.loads(Path("s").read_text("utf-8"))["runs"][0]["artifacts"]
    }
    assert any(uri.endswith("/m%FE_epoch_1.pkl") or "m%FE_epoch_1.pkl" in uri for uri in locations)
    assert "udcfe" in Path("m").read_text("utf-8")


def test_pictures(run, runs: Path) -> None:
    check(run("list", runs, "--plot", "p.svg"), is_json=False)
    check(run("report", runs, "-o", "p.html"), is_json=False)
    assert all(Path(file).read_text("utf-8") for file in ("p.svg", "p.html"))


def test_a_manifest_of_such_a_name_is_read_again(run, files: Path, runs: Path) -> None:
    path = runs / os.fsdecode(b"guide\xff.pth")
    path.write_bytes((files / "pytorch" / "guide.pth").read_bytes())
    assert run("verify", path, "--write-manifest").status == 0
    status, out, _ = run("verify", path)
    assert status == 0
    assert "manifest ok" in out


def test_an_index_and_a_state_that_python_wrote(run, files: Path, tmp_path: Path) -> None:
    shard = os.fsdecode(b"s\xff.safetensors")
    (tmp_path / shard).write_bytes((files / "safetensors" / "dtypes.safetensors").read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"fc.weight": shard, "fc.bias": f"{HALF}.safetensors"}}), "utf-8"
    )
    status, out, err = run("verify", index)
    check((status, out, err), is_json=False)
    assert "a name that is not valid text; not opened" in out
    (tmp_path / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "/r\udcff/x"}), "utf-8")
    assert "no JSON" not in "".join(run("verify", tmp_path)[1:])
