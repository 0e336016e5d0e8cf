"""The list of engines and the lines around it."""

from __future__ import annotations

import pytest

from kneewatch.agent.watch import rendering as listing
from kneewatch.agent.watch.rendering import ASCII, UNICODE, Line, cells
from kneewatch.agent.watch.state import ScreenState
from tests.agent.watch.screens import Clock, three, told
from tests.reports.diagnoses import HEALTHY, SICK, UNREADABLE, changed


def text_of(line: Line) -> str:
    return "".join(text for text, _ in line)


def test_a_line_at_80_columns() -> None:
    row = three().rows()[0]
    line = text_of(listing.line_of(row, width=80, selected=True, glyphs=UNICODE))
    assert line == (
        "▶CRITICAL b-sick             3 queueing   kv_pressure         100%     9  123 ms"
    )
    heads = text_of(listing.heads(80, first=1, last=3, count=3))
    assert heads == (
        " state    engine             stage        first cause           KV  wait  TTFT99"
    )


def test_a_healthy_line_and_an_unread_one() -> None:
    wall = three()
    told(wall, UNREADABLE, source="http://10.0.0.9:8000")
    rows = {row.name: row for row in wall.rows()}
    well = text_of(listing.line_of(rows["a-well"], width=80, selected=False, glyphs=UNICODE))
    assert well.split() == ["ok", "a-well", "0", "steady", "-", "46%", "0", "123", "ms"]
    down = rows["http://10.0.0.9:8000"]
    line = text_of(listing.line_of(down, width=80, selected=False, glyphs=UNICODE))
    assert line.split() == ["CRITICAL", "10.0.0.9:8000", "?", "target_down", "-", "-", "-"]


def test_silence_is_said_in_the_list() -> None:
    clock = Clock()
    wall = three(clock)
    clock.now_s += 75
    row = next(row for row in wall.rows() if row.name == "a-well")
    assert "no data for 75 s" in text_of(
        listing.line_of(row, width=80, selected=False, glyphs=UNICODE)
    )


@pytest.mark.parametrize("width", [40, 51, 52, 62, 75, 76, 80, 132, 200])
@pytest.mark.parametrize("name", ["x", "http://" + "y" * 150, "模型" * 40, "[red]\x1b[2J"])
def test_columns_stay_in_line(width: int, name: str) -> None:
    wall = ScreenState(clock=Clock())
    told(wall, SICK, source=name)
    told(wall, changed(HEALTHY, values={}), source="other")
    lines = [
        text_of(listing.line_of(row, width=width, selected=False, glyphs=ASCII))
        for row in wall.rows()
    ]
    heads = text_of(listing.heads(width, first=1, last=2, count=2))
    assert {cells(line) for line in (heads, *lines)} == {width}
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_heads_say_which_part_is_seen() -> None:
    assert "4-9 of 20" in text_of(listing.heads(80, first=4, last=9, count=20))


def header(wall: ScreenState, *, paused: bool = False, where: str = "", width: int = 80) -> str:
    return text_of(
        listing.header(
            wall.rows(), where=where, clock="08:17:44 UTC", paused=paused, width=width,
            glyphs=UNICODE,
        )
    )  # fmt: skip


def test_the_header_counts() -> None:
    assert header(three()).split("  ")[:2] == ["kneewatch", "1 critical 2 ok"]
    assert header(three()).endswith("  08:17:44 UTC")
    assert " PAUSED   08:17:44 UTC" in header(three(), paused=True)
    assert "daemon http://x?[2J" in header(three(), where="daemon http://x\x1b[2J")
    assert len(header(three())) == 80


@pytest.mark.parametrize("width", [20, 60, 80, 160])
def test_the_rule(width: int) -> None:
    line = listing.rule("a" * 300, below=7, focused=True, width=width, glyphs=UNICODE)
    assert "7 more below" in text_of(line)
    assert width < 60 or cells(text_of(line)) == width
    line = listing.rule("short", below=0, focused=False, width=width, glyphs=ASCII)
    assert "more" not in text_of(line)


def test_keys_and_help_fit_a_small_screen() -> None:
    for line in (listing.keys(plays=True), listing.keys(plays=False)):
        assert len(text_of(line)) <= 80
    rows = listing.HELP.splitlines()
    assert max(map(len, rows)) <= 80
    assert len(rows) <= 24
    assert listing.HELP.isascii()
