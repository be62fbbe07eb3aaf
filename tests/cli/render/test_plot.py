"""Pictures: the same bytes each time, names as they are, and nothing that a browser would run."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from ckpttool import MissingPackage, UsageError
from ckpttool.core.plugins import install_command
from ckpttool.integrations.matplotlib import (
    KINDS,
    MARK,
    Bars,
    Drawing,
    HeatMap,
    Lines,
    check_can_draw,
    kind_of,
    picture,
)

NAN, INF = float("nan"), float("inf")
BARS = Bars("relative change", ["fc.weight", "fc.bias", "gone"], [0.25, 0.5, None])
HEAT = HeatMap("by step", ["fc.weight", "fc.bias"], ["2.pth", "3.pth"], [[0.1, 0.01], [None, 1.0]], True)
LINES = Lines("loss", ["1.pth", "2.pth", "3.pth"], {"train": [3.0, None, 1.0], "val": [3.5, 2.5, NAN]})
TABLE = [["tensor", "L2"], ["fc.weight", "0.25"]]
SVG = "{http://www.w3.org/2000/svg}"


def svg(*drawings: Drawing, title: str = "a title") -> ElementTree.Element:
    return ElementTree.fromstring(picture("svg", title, drawings))


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]


class _Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.attributes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th", "h1") and data.strip():
            self.cells.append(data)


@pytest.mark.parametrize("kind", KINDS)
def test_same_numbers_give_the_same_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = picture(kind, "a title", [BARS, HEAT, LINES], TABLE)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert picture(kind, "a title", [BARS, HEAT, LINES], TABLE) == first
    assert not re.search(rb"20\d\d-\d\d-\d\d", first)
    begin = {"svg": b"<?xml", "png": b"\x89PNG\r\n\x1a\n", "html": b"<!doctype html>"}
    assert first.startswith(begin[kind])
    assert MARK.encode() in first[:4096]  # who drew it


def test_bars_are_as_long_as_their_values() -> None:
    root = svg(BARS)
    assert {"fc.weight", "fc.bias", "gone", "relative change", "a title"} <= {*texts(root)}
    shapes = [one.get("d") or "" for one in root.iter(f"{SVG}path") if "#3465a4" in (one.get("style") or "")]
    lengths = [max(numbers) - min(numbers) for numbers in map(_abscissas, shapes)]
    assert lengths[0] * 2 == pytest.approx(lengths[1], rel=1e-6)
    assert lengths[2] == 0


def _abscissas(path: str) -> list[float]:
    return [float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)]


def test_endless_bars_are_told() -> None:
    assert "inf" in texts(svg(Bars("t", ["a", "b"], [INF, 1.0])))


def test_logarithms_of_nothing() -> None:
    drawings: list[Drawing] = []
    for values in ([0.0, 0.0], [None, None], [0.0, 1.0]):
        drawings.append(HeatMap("t", ["a", "b"], ["x"], [[one] for one in values], is_logarithmic=True))
    assert texts(svg(*drawings)).count("t") == 3


def test_heat_names_rows_and_columns() -> None:
    root = svg(HEAT)
    assert {"fc.weight", "fc.bias", "2.pth", "3.pth", "by step"} <= {*texts(root)}
    assert len([*root.iter(f"{SVG}image")]) == 2  # the fields, and the scale beside them


def test_scale_has_numbers_as_people_write_them() -> None:
    for values in ((0.1, 0.2), (0.1, 3.0), (1e-9, 1.0), (0.5, 0.5)):
        said = texts(svg(HeatMap("t", ["a"], ["x", "y"], [values], is_logarithmic=True)))
        assert not any("$" in text for text in said)
        assert any(re.fullmatch(r"[\d.]+(e-\d+)?", text) for text in said), values


def test_lines_name_points_and_series() -> None:
    assert {"1.pth", "2.pth", "3.pth", "train", "val", "loss"} <= {*texts(svg(LINES))}


def test_many_rows_stay_readable() -> None:
    names = [f"layer.{at}" for at in range(340)]
    heat = HeatMap("t", names, ["a", "b"], [[0.5, 1.0]] * 340)
    shown = [text for text in texts(svg(heat)) if text.startswith("layer.")]
    assert 100 < len(shown) <= 120


def test_page_holds_picture_and_table() -> None:
    page = picture("html", "a title", [BARS], TABLE).decode()
    found = _Page(page)
    assert found.tags.count("svg") == 1
    assert found.cells == ["a title", "tensor", "L2", "fc.weight", "0.25"]
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"|rdf:resource="[^"]*"', "", page)


HOSTILE = [
    "<script>alert(1)</script>",
    "]]><svg onload=alert(1)>",
    '"><img src=x onerror=alert(1)>',
    "$\\frac{1}{2}$",
    "$x",
    "\x1b[2J\x00\ud800\u202e",
    "漢字",
    "a & b",
    "-->",
    "x" * 10_000,
]


@pytest.mark.parametrize("kind", ["svg", "html"])
def test_names_are_names(kind: str) -> None:
    ones = [1.0] * len(HOSTILE)
    drawings: list[Drawing] = [
        Bars(HOSTILE[0], HOSTILE, ones),
        HeatMap(HOSTILE[1], HOSTILE, HOSTILE, [ones] * len(HOSTILE)),
        Lines(HOSTILE[2], HOSTILE, dict.fromkeys(HOSTILE, ones)),
    ]
    drawn = picture(kind, HOSTILE[3], drawings, [HOSTILE, HOSTILE]).decode()
    if kind == "svg":
        root = ElementTree.fromstring(drawn)
        tags = [one.tag.rpartition("}")[2] for one in root.iter()]
        attributes = [key for one in root.iter() for key in one.attrib]
        shown = [name for name in HOSTILE if len(name) < 60 and name.isprintable()]
        assert all(texts(root).count(name) >= 5 for name in shown)
    else:
        page = _Page(drawn)
        tags, attributes = page.tags, page.attributes
    assert not {"script", "img"} & {*tags}
    assert not any(key.startswith("on") for key in attributes)
    assert all(character.isprintable() or character == "\n" for character in drawn)


def test_settings_of_the_user_stay_and_have_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    before = picture("svg", "t", [BARS])
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert picture("svg", "t", [BARS]) == before
        assert matplotlib.rcParams["font.size"] == 30


def test_kind_is_told_by_the_name() -> None:
    assert [kind_of(path) for path in ("a.svg", "d.x/A.PNG", "a.b.html")] == ["svg", "png", "html"]
    for path in ("a", "a.pdf", "svg", ".svg", "a.pth"):
        with pytest.raises(UsageError, match=re.escape(f"--plot {path}: ")):
            kind_of(path)


def test_missing_package_names_the_line_that_installs_it(without_matplotlib: None) -> None:
    with pytest.raises(MissingPackage) as caught:
        check_can_draw("a.svg")
    assert str(caught.value) == f"a.svg: plots need matplotlib ({install_command('plot')})"
