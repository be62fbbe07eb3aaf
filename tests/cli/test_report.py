"""``ckpttool report``: one page without a network, which a browser sorts and filters."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import Run
from tests.support.runs import FILES

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RULES = ("--keep", 2, "--keep-best", 1, "--best", "loss", "--mode", "min")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(FILES / "series", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_what_list_says(runs: Path, run: Run) -> None:
    assert run("report", "runs", *RULES).err == "wrote report.html: 10 checkpoints in 1 series\n"
    page = Path("report.html").read_text("utf-8")
    data = data_of(page)
    assert data.pop("problems") == []
    assert data == json.loads(run("list", "runs", *RULES, "--json").out)


def test_the_page_needs_no_network(runs: Path, run: Run) -> None:
    run("report", "runs")
    page = Path("report.html").read_text("utf-8")
    assert re.findall(r"https?://[^\"'\s]+", page) == ["http://www.w3.org/2000/svg"]
    assert "default-src 'none'" in page
    assert not re.search(r"@@[a-z]+@@", page)


def test_problems_stand_on_the_page_and_in_the_status(runs: Path, run: Run) -> None:
    path = next(runs.glob("*_5.pth"))
    path.write_bytes(path.read_bytes()[:1000])
    assert run("report", "runs", "-q").status == 1
    assert [one["path"] for one in data_of(Path("report.html").read_text("utf-8"))["problems"]] == [
        "runs/model_epoch_5.pth"
    ]


@pytest.mark.parametrize("name", ["<script>alert(1)<!--.pth", "a&b<img src=x onerror=1>.pth", "@@data@@.pth"])
def test_names_are_text(runs: Path, run: Run, name: str) -> None:
    next(runs.glob("*_3.pth")).rename(runs / name)
    assert run("report", "runs").status == 0
    page = Path("report.html").read_text("utf-8")
    assert f"runs/{name}" in [one["path"] for one in data_of(page)["checkpoints"]]
    assert name not in page or "<" not in name


def test_only_an_earlier_report_is_replaced(runs: Path, run: Run) -> None:
    assert run("report", "runs").status == run("report", "runs").status == 0
    Path("mine.html").write_text("<!doctype html><p>mine")
    done = run("report", "runs", "-o", "mine.html")
    assert (done.status, done.err) == (
        2,
        "ckpttool: error: --output mine.html: the existing file is not such a report and is not replaced\n",
    )
    assert Path("mine.html").read_text() == "<!doctype html><p>mine"


needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome on the PATH"
)


def in_browser(page: Path, script: str, width: int = 1280) -> dict:
    """Return what a script puts into ``seen`` after the page's own, which must report no error."""
    assert CHROMIUM is not None
    show = "document.body.replaceChildren(JSON.stringify(seen))"
    added = f"<script>const seen = {{}}\n{_QUERIES}{script}\n{show}</script></body>"
    changed = page.with_name("in-browser.html")
    changed.write_text(page.read_text("utf-8").replace("</body>", added), "utf-8")
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            f"--window-size={width},900",
            f"--user-data-dir={page.with_name('profile')}",
            "--enable-logging=stderr",
            "--dump-dom",
            changed.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    body = re.search(r"<body>(.*)</body>", done.stdout, re.DOTALL)
    assert body is not None
    return json.loads(html.unescape(body[1]))


_QUERIES = """
const all = query => [...document.querySelectorAll(query)]
const column = name => all("#checkpoints th").findIndex(cell => cell.textContent === name)
const cells = name => all("#checkpoints tbody tr").map(row => row.children[column(name)].textContent)
const click = name => all("#checkpoints th")[column(name)].firstChild.click()
"""
_CLICKS = """
click("loss"); seen.ascending = cells("epoch")
click("loss"); seen.descending = cells("epoch")
const field = document.getElementById("filter")
field.value = "epoch_1 keep"; field.dispatchEvent(new Event("input")); seen.filtered = cells("checkpoint")
seen.shown = document.getElementById("shown").textContent
seen.stars = all("#plot svg text").filter(one => one.firstChild.data === "★").length
seen.hollow = all('#plot circle[fill="var(--page)"]').length
seen.facts = all("#facts b").map(one => one.textContent)
"""


@needs_browser
def test_a_browser_sorts_filters_and_draws(runs: Path, run: Run) -> None:
    run("report", "runs", *RULES)
    seen = in_browser(Path("report.html").absolute(), _CLICKS)
    listed = json.loads(run("list", "runs", *RULES, "--json").out)["checkpoints"]
    by_loss = [f"{one['epoch']}" for one in sorted(listed, key=lambda one: one["loss"])]
    assert (seen["ascending"], seen["descending"]) == (by_loss, by_loss[::-1])
    kept = [one["path"] for one in listed if one["kept"]]
    assert sorted(seen["filtered"]) == sorted(path for path in kept if "epoch_1" in path)
    assert seen["shown"].startswith(f"{len(seen['filtered'])} of 10, ")
    assert (seen["stars"], seen["hollow"]) == (1, 10 - len(kept))
    assert seen["facts"][:2] == ["10", "1"]


@needs_browser
def test_a_browser_shows_the_curves_of_all_runs(runs: Path, run: Run) -> None:
    for name in map(str, range(6)):
        shutil.copytree(FILES / "series", runs / name)
    run("report", "runs")
    script = 'seen.names = all("#plot .name").map(one => one.firstChild.data)'
    seen = in_browser(Path("report.html").absolute(), f'{script}; seen.runs = all("#runs tbody tr").length')
    names = [*(f"runs/{name}/model_epoch_*.pth" for name in range(6)), "runs/model_epoch_*.pth"]
    assert sorted(seen["names"]) == [name if len(name) <= 26 else f"…{name[-25:]}" for name in names]
    assert seen["runs"] == 7


@needs_browser
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("<script>alert(1)<!--.pth", None),
        ("a&b<img src=x onerror=alert(1)>'\".pth", None),
        ("model\u202egnp.pth", "model\\u202egnp.pth"),
        ("two\nlines\u200b.pth", "two\\u000alines\\u200b.pth"),
    ],
)
def test_a_browser_shows_names_as_text(runs: Path, run: Run, name: str, shown: str | None) -> None:
    next(runs.glob("*_3.pth")).rename(runs / name)
    (runs / name).write_bytes((runs / name).read_bytes()[:1000])
    run("report", "runs")
    seen = in_browser(
        Path("report.html").absolute(),
        'seen.paths = cells("checkpoint"); seen.problems = all("#problems li").map(one => one.textContent)'
        '; seen.foreign = all("img, body b:not(#facts b)").length',
    )
    assert f"runs/{shown or name}" in seen["paths"]
    assert seen["problems"][0].startswith(f"runs/{shown or name}: ")
    assert seen["foreign"] == 0


@needs_browser
def test_the_page_fits_a_phone(runs: Path, run: Run) -> None:
    (runs / "model_epoch_3.pth").rename(runs / f"model_{'x' * 100}_epoch_3.pth")
    run("report", "runs", *RULES)
    script = "seen.widths = [document.documentElement.scrollWidth, innerWidth]"
    scrolled, visible = in_browser(Path("report.html").absolute(), script, width=390)["widths"]
    assert scrolled <= visible <= 500
