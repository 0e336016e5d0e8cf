"""The Markdown report: the same sections, tables that hold, hostile text that stays text."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from kneewatch.reports.weekly.page.markdown import render_markdown
from kneewatch.reports.weekly.page.markdown_tiers import code, rows, sections, text
from kneewatch.reports.weekly.page.parts import SECTIONS
from tests.reports.weekly.page import made
from tests.reports.weekly.page.made_hostile import HOSTILE, hostile
from tests.reports.weekly.page.test_html import REPORTS

BAR = re.compile(r"(?<!\\)\|")


def tables(document: str) -> list[list[str]]:
    """The lines of each table."""
    found: list[list[str]] = [[]]
    for line in document.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


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
    document = render_markdown(hostile(made.fleet()))
    assert not re.search("[\x00\x1b\u202e\ud800]", document)
    assert not re.search(r"(?<!\\)[<>\[\]]", document.replace("\n> ", "\n"))
    assert "\n# no heading" not in document
    for span in re.findall(r"(?<!\\)`([^`]*)`", document):
        assert re.fullmatch(r"[\w.:/+-]+", span), span


def test_the_same_figures_as_in_html() -> None:
    document = render_markdown(made.fleet())
    for words in (
        "**2 tiers: 1 critical, 1 ok.**",
        "TTFT P99 4.2 s, up from 1.3 s, worse",
        "| KV cache eviction rate | 1.3%/s; worst hour 24%/s | below 5% "
        "| **critical** | 0%/s (▲ up, worse); 0%/s (▲ up, worse) |",
        "- error budget: 220% spent; 99% of 812,345 requests must be in time, 17,872 requests",
        "C_max of one engine: 41 (37 to 46) in flight",
        "29% short of the peak",
        "recomputed at least 2,061,000 tokens",
        "To enable it: Start vLLM with --kv-cache-metrics",
    ):
        assert words in document, words


def test_the_worst_tier_stands_first() -> None:
    report = made.fleet()
    document = render_markdown(replace(report, tiers=report.tiers[::-1]))
    assert document.index(f"| **{made.CHAT}**") < document.index(f"| **{made.CODE}**")


def test_lines() -> None:
    assert text("a|b\n# c `d`") == r"a\|b # c \`d\`"
    assert code("kv_usage_ratio") == "`kv_usage_ratio`"
    assert "`" not in re.sub(r"\\`", "", code(f"a`b{HOSTILE}"))
    assert rows(("a", "b"), []) == []
    assert rows(("a", "b"), [("1", "")]) == ["| a | b |", "| --- | --- |", "| 1 | - |"]
    assert sections(["a"], [], ["b", "c"]) == ["a", "", "b", "c"]
