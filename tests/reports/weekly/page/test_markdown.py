"""The Markdown report: the same sections, tables that hold, hostile text that stays text."""

from __future__ import annotations

import re
from html import unescape
from itertools import pairwise

import pytest
from msgspec.structs import replace

from kneewatch.reports.diagnosis_text import escaped
from kneewatch.reports.weekly.page.html import SECTIONS, render, render_markdown
from tests.reports.weekly.page import examples
from tests.reports.weekly.page.hostile_report import hostile
from tests.reports.weekly.page.test_html import REPORTS

BAR = re.compile(r"(?<!\\)\|")


def tables(document: str) -> list[list[str]]:
    """The lines of each table."""
    table_lines: list[list[str]] = [[]]
    for line in document.splitlines():
        if line.startswith("|"):
            table_lines[-1].append(line)
        elif table_lines[-1]:
            table_lines.append([])
    return [table for table in table_lines if table]


@pytest.mark.parametrize("name", REPORTS)
def test_every_table_has_as_many_cells_in_each_line(name: str) -> None:
    document = render_markdown(REPORTS[name]())
    for table in tables(document):
        assert len({len(BAR.findall(line)) for line in table}) == 1, table
        assert set(table[1]) == {"|", "-", " "}


@pytest.mark.parametrize("name", REPORTS)
def test_the_ten_sections(name: str) -> None:
    lines = render_markdown(REPORTS[name]()).splitlines()
    assert [line for line in lines if line.startswith("## ")] == [
        f"## {place}. {title}" for place, (_, title) in enumerate(SECTIONS, 1)
    ]
    assert sum(line.startswith("# ") for line in lines) == 1
    for before, line in pairwise(lines):
        assert line or before, "no two empty lines"
        if line.startswith("|") and not before.startswith("|"):
            assert before == ""


def test_what_came_from_elsewhere_stays_text() -> None:
    document = render_markdown(hostile(examples.fleet()))
    assert not re.search("[\x00\x1b\u202e\ud800]", document)
    assert not re.search(r"(?<!\\)[<>\[\]]", document.replace("\n> ", "\n"))
    assert "\n# no heading" not in document
    for span in re.findall(r"(?<!\\)`([^`]*)`", document):
        assert re.fullmatch(r"[\w.:/+-]+", span), span


def test_the_same_figures_as_in_html() -> None:
    document = render_markdown(examples.fleet())
    for words in (
        "\n**2 tiers: 1 critical, 1 healthy.**\n",
        "TTFT P99 4.2 s, up from 1.3 s, worse",
        "| KV cache eviction rate | 1.3%/s; worst hour 24%/s | below 5% "
        "| **critical** | 0%/s ▲ up, worse; 0%/s ▲ up, worse |",
        "| I1 The KV cache was too small for the load |",
        "| 1,204 requests | at least 2,061,000 tokens | 3,110 requests | 420 requests |",
        "- **--kv-cache-dtype fp8 (now auto)**",
        "| mean KV usage | 100% | 74% | 71% |",
        "220% spent: exhausted",
        "- C_max of one engine: 41 (37 to 46) requests in flight",
        "29% short of the peak",
        "- GPUs: **8 GPUs present, 12 needed**",
        "To enable it: Start vLLM with --kv-cache-metrics",
        "TTFT P99, Before 31 s, Predicted 1.3 s, Measured 1.5 s, Off by +15% |",
    ):
        assert words in document, words


@pytest.mark.parametrize("name", [name for name in REPORTS if name != "hostile"])
def test_the_headings_captions_and_columns_of_html(name: str) -> None:
    report = REPORTS[name]()
    page = re.sub(r"<(details|figure|head)\b.*?</\1>", "", render(report), flags=re.DOTALL)
    words = {
        unescape(re.sub(r"<[^>]+>", "", inner)).strip()
        for tag in ("h3", "h4", "caption", 'th scope="col"')
        for inner in re.findall(rf"<{tag}[^>]*>(.*?)</{tag.split()[0]}>", page)
    }
    document = render_markdown(report)
    hidden = set(re.findall(r'<caption class="unseen">(.*?)<', page))
    missing = {word for word in words - hidden - {"Trend"} if escaped(word) not in document}
    assert not missing


def test_without_drawings_and_folded_parts() -> None:
    document = render_markdown(examples.fleet())
    for words in ("small chart", "Folded parts", "numbers behind", "Skip to", "| Trend |"):
        assert words not in document, words


def test_links_lead_to_the_cause_and_not_into_the_page() -> None:
    document = render_markdown(examples.fleet(), docs_url="https://docs")
    assert "[kv_pressure](https://docs/causes/kv_pressure" in document
    assert "](#" not in document


def test_the_worst_tier_stands_first() -> None:
    report = examples.fleet()
    document = render_markdown(
        replace(report, tiers=report.tiers[::-1], verdicts=report.verdicts[::-1])
    )
    assert document.index(f"| **{examples.CHAT}**") < document.index(f"| **{examples.CODE}**")
