"""The HTML file: well formed, alone, the same every time; what came from elsewhere stays text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pytest
from html5lib import HTMLParser

from kneewatch.reports.weekly.page.html import render
from kneewatch.reports.weekly.report import WeeklyReport
from tests.reports.triage.html_tree import Node, read, tree
from tests.reports.weekly.page import examples
from tests.reports.weekly.page.hostile_report import MARKUP, hostile

MOST_BYTES = 1_500_000
ROOT = Path(__file__).parents[4]
REPORTS: dict[str, Callable[[], WeeklyReport]] = {
    "fleet": examples.fleet,
    "one target": examples.one,
    "empty week": examples.empty,
    "many tiers": lambda: examples.many(14, incidents=12),
    "hostile": lambda: hostile(examples.fleet()),
}
SECTIONS = ["verdict", "incidents", "tables", "slo", "knee", "workload", "size", "money",
            "track-record", "data-quality"]  # fmt: skip


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: report() for name, report in _rendered().items()}


def _rendered() -> dict[str, Callable[[], str]]:
    return {name: partial(_page, report) for name, report in REPORTS.items()}


def _page(report: Callable[[], WeeklyReport]) -> str:
    return render(report())


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_parses_as_html_is_defined(pages: dict[str, str], name: str) -> None:
    parser: Any = HTMLParser(namespaceHTMLElements=False)  # its types leave much unsaid
    document: Element = parser.parse(pages[name])
    assert parser.errors == [], "as browsers parse: (line and column, what, of what)"
    ids = [node.get("id") for node in document.iter() if node.get("id")]
    assert len(set(ids)) == len(ids)
    for node in document.iter():
        for named in (node.get("aria-labelledby") or "").split():
            assert named in ids
        where = node.get("href") or ""
        assert not where.startswith("#") or where[1:] in ids


@pytest.mark.parametrize("name", ["an id twice", "what is not closed"])
def test_what_is_no_html_is_found(pages: dict[str, str], name: str) -> None:
    page = pages["one target"]
    broken = {
        "an id twice": page.replace("<main", '<p id="slo">a</p><main', 1),
        "what is not closed": page.replace("</table>", "", 1),
    }
    with pytest.raises(AssertionError):
        test_every_report_parses_as_html_is_defined({"one": broken[name]}, "one")


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_is_well_formed(pages: dict[str, str], name: str) -> None:
    root, problems = read(pages[name])
    assert problems == []
    assert root.one("html").attributes["lang"] == "en"
    levels = [int(node.tag[1]) for node in root.every() if re.fullmatch("h[1-6]", node.tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    for before, after in pairwise(levels):
        assert after <= before + 1, "no level of headings is left out"


@pytest.mark.parametrize("name", REPORTS)
def test_the_ten_sections_are_there_in_reading_order(pages: dict[str, str], name: str) -> None:
    root = tree(pages[name])
    sections = [node.attributes["aria-labelledby"] for node in root.every("section")]
    assert sections == SECTIONS
    assert [len(list(root.every(tag))) for tag in ("header", "main", "nav", "footer")] == [1] * 4
    links = [node.attributes["href"] for node in root.one("nav").every("a")]
    assert links == [f"#{section}" for section in SECTIONS]


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_outside_of_the_file_is_referred_to(pages: dict[str, str], name: str) -> None:
    root = tree(pages[name])
    for node in root.every():
        assert node.tag not in ("script", "img", "iframe", "object", "embed", "form", "base")
        for key in ("src", "srcset", "action", "data", "poster", "xlink:href", "background"):
            assert key not in node.attributes, node.tag
        assert node.attributes.get("href", "#").startswith(("#", "data:,"))
    (css,) = [node.text for node in root.every("style")]
    assert "@import" not in css
    assert set(re.findall(r"url\((.)", css)) <= {"#"}
    assert not re.search(r"https?:", css)


def test_the_policy_allows_the_one_stylesheet_and_nothing_else() -> None:
    html = render(examples.empty())
    (css,) = re.findall(r"<style>(.*?)</style>", html, flags=re.DOTALL)
    digest = b64encode(sha256(css.encode()).digest()).decode()
    policy = tree(html).one("head").one("meta", css="").parent
    assert policy is not None
    (content,) = [
        node.attributes["content"]
        for node in policy.every("meta")
        if node.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert content.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_every_colour_has_a_plain_value_before_its_variable() -> None:
    (css,) = re.findall(r"<style>(.*?)</style>", render(examples.empty()), flags=re.DOTALL)
    used = re.findall(r"([\w-]+): ?([^;{}]*);\1: ?([^;{}]*var\([^;{}]*)", css)
    assert len(used) == css.count("var(")
    for _, plain, varying in used:
        before, after = re.sub(r"var\(.*?\)", "\0", varying).split("\0")
        assert plain.startswith(before)
        assert plain.endswith(after)
        assert plain != varying


def test_the_same_values_give_the_same_file(pages: dict[str, str]) -> None:
    script = (
        "from tests.reports.weekly.page import examples; from kneewatch.reports.weekly.page.html "
        "import render; import sys; sys.stdout.buffer.write(render(examples.fleet()).encode())"
    )
    # Another process, whose hashes and object addresses are others.
    process = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.decode() == pages["fleet"]


def test_what_came_from_elsewhere_stays_text(pages: dict[str, str]) -> None:
    html = pages["hostile"]
    clean = tree(pages["fleet"])
    root = tree(html)
    assert MARKUP in root.text
    assert not re.search("[\x00\x1b\u202e\ud800]", html)
    assert {node.tag for node in root.every()} <= {node.tag for node in clean.every()}
    assert html.count("</style>") == 1
    for node in root.every():
        for name, value in node.attributes.items():
            assert re.fullmatch(r"[\w:-]+", name), name
            assert "alert" not in value or name in ("data-label", "aria-label"), (name, value)
        for child in node.every("code"):
            assert "\n" not in child.text


def test_a_word_that_is_not_known_is_unknown_and_never_healthy(pages: dict[str, str]) -> None:
    root = tree(pages["hostile"])
    assert [node.text for node in root.one("main").every(css="headline")] == ["2 tiers: 2 unknown."]
    assert list(root.one("main").every(css="ink-ok")) == []


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(lambda: examples.many(50, incidents=60), id="a tier each"),
        pytest.param(lambda: examples.many(2, engines_each=25, incidents=60), id="two tiers"),
        pytest.param(
            lambda: examples.many(12, engines_each=4, incidents=60), id="as many as in full"
        ),
    ],
)
def test_fifty_targets_weigh_little_enough(report: Callable[[], WeeklyReport]) -> None:
    html = render(report())
    assert len(html.encode()) <= MOST_BYTES
    assert read(html)[1] == []


def charts(root: Node) -> list[Node]:
    """Every drawing that means something."""
    drawn = [node for node in root.every("svg") if node.attributes.get("aria-hidden") != "true"]
    return [node for node in drawn if node.parent is not None and node.parent.tag != "svg"]


@pytest.mark.parametrize("name", ["fleet", "many tiers"])
def test_every_chart_has_a_name_and_tells_what_it_shows(pages: dict[str, str], name: str) -> None:
    chart_nodes = charts(tree(pages[name]))
    assert len(chart_nodes) > 40
    for chart in chart_nodes:
        assert chart.attributes["role"] == "img"
        words = " ".join(node.text for node in chart.children if node.tag in ("title", "desc"))
        assert len(words) > 15, words
        assert words.endswith("."), words


def test_every_chart_has_a_table_behind_it(pages: dict[str, str]) -> None:
    root = tree(pages["fleet"])
    behind = [node.text for node in root.every("details", css="behind")]
    assert len(behind) == 2 + 2 * (2 + 1 + 1), "incidents; per tier two tables, SLO, knee"
    for details in root.every("details", css="behind"):
        assert all(len(list(table.every("tr"))) > 1 for table in details.every("table"))
        assert list(details.every("table"))
    for svg in root.every("svg", css="bar"):
        assert svg.parent is not None
        assert list(svg.parent.every("table", css="key"))


def test_no_figure_is_computed_in_a_template() -> None:
    folder = ROOT / "reports" / "weekly" / "page"
    for template in folder.glob("*.j2"):
        for inside in re.findall(r"\{\{(.*?)\}\}", template.read_text(), flags=re.DOTALL):
            filter_match = re.search(
                r"\| *(told|bare|percent|share|duration|span|number|spread)\b", inside
            )
            assert not (filter_match and re.search(r"[\w)] [-+*/] [\w(]", inside)), inside
