"""The screen: what its keys do, at any size, whatever the engines are called."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot

from kneewatch.agent.watch.command import View
from kneewatch.agent.watch.feeds import Playback
from kneewatch.agent.watch.rendering import ASCII
from kneewatch.agent.watch.state import Kind, ScreenState
from tests.agent.watch.screens import (
    Clock,
    driven,
    line_with,
    lines_of,
    played,
    pressed,
    settled,
    three,
    told,
    view_of,
)
from tests.reports.diagnoses import HEALTHY, NOW_S, SICK, changed


def selected(lines: list[str]) -> str:
    """The name of the engine that is marked in the list."""
    return line_with(lines, "▶").split()[1]


def test_what_is_seen_at_first() -> None:
    async def look(pilot: Pilot[None]) -> None:
        lines = lines_of(pilot)
        assert lines[0].startswith("kneewatch  1 critical 2 ok")
        assert selected(lines) == "b-sick"
        assert "b-sick (model llama, engine 0)" in lines[5]
        assert "more below" in lines[5]
        assert lines[6].startswith("CRITICAL  kv_pressure")
        assert lines[-1].startswith("q quit")
        assert len(lines) == 24

    driven(view_of(three()), look)


def test_choosing() -> None:
    async def choose(pilot: Pilot[None]) -> None:
        assert selected(await pressed(pilot, "down")) == "a-well"
        assert line_with(lines_of(pilot), "OK")
        assert selected(await pressed(pilot, "j")) == "c-well"
        assert selected(await pressed(pilot, "down")) == "c-well"
        assert selected(await pressed(pilot, "k", "up")) == "b-sick"
        assert selected(await pressed(pilot, "end")) == "c-well"
        assert selected(await pressed(pilot, "home")) == "b-sick"

    driven(view_of(three()), choose)


def test_the_worst_is_followed_until_one_is_chosen() -> None:
    wall = three()

    async def follow(pilot: Pilot[None]) -> None:
        worse = changed(SICK, stage=replace(SICK.stage, number=4, name="collapsing"))
        told(wall, worse, source="c-well")
        await settled(pilot)
        assert selected(lines_of(pilot)) == "c-well"
        await pressed(pilot, "down")
        assert selected(lines_of(pilot)) == "b-sick"
        told(wall, HEALTHY, source="b-sick")
        await settled(pilot)
        assert selected(lines_of(pilot)) == "b-sick", "what was chosen stays, wherever it moves"
        assert selected(await pressed(pilot, "g")) == "c-well"

    driven(view_of(wall), follow)


def test_an_engine_that_goes_away_while_it_is_chosen() -> None:
    wall = three()

    async def lose(pilot: Pilot[None]) -> None:
        await pressed(pilot, "end")
        wall.put("c-well", [replace(HEALTHY, target="other")], now_s=NOW_S)
        await settled(pilot)
        assert selected(lines_of(pilot)) == "b-sick"

    driven(view_of(wall), lose)


def test_the_details_scroll() -> None:
    async def scroll(pilot: Pilot[None]) -> None:
        assert not any("could not be judged" in line for line in lines_of(pilot))
        assert line_with(await pressed(pilot, "space", "space"), "explains: queue_saturation")
        assert line_with(await pressed(pilot, "pageup", "pageup"), "do first: ")
        lines = await pressed(pilot, "tab", "down", "j", "j")
        assert selected(lines) == "b-sick"
        assert "TTFT P99 " not in lines[7]
        lines = await pressed(pilot, "G")
        assert "more below" not in lines[5]
        assert "TTFT P99 " in (await pressed(pilot, "g"))[7]
        assert selected(await pressed(pilot, "tab", "down")) == "a-well"

    driven(view_of(three()), scroll)


def test_another_engine_s_details_begin_at_their_top() -> None:
    wall = three()
    told(wall, SICK, source="c-well")

    async def scroll(pilot: Pilot[None]) -> None:
        await pressed(pilot, "space")
        assert "CRITICAL  kv_pressure" in (await pressed(pilot, "down"))[6]

    driven(view_of(wall), scroll)


def test_zoom() -> None:
    async def zoom(pilot: Pilot[None]) -> None:
        lines = await pressed(pilot, "enter")
        assert not any("a-well" in line for line in lines)
        assert "b-sick" in lines[1]
        assert line_with(await pressed(pilot, "G"), "latency judged against")
        assert selected(await pressed(pilot, "escape")) == "b-sick"
        await pressed(pilot, "enter")
        assert selected(await pressed(pilot, "enter")) == "b-sick"

    driven(view_of(three()), zoom)


def test_pause_holds_the_screen_and_plays_on_after() -> None:
    wall, pace = three(), Playback()

    async def pause(pilot: Pilot[None]) -> None:
        assert " PAUSED " in (await pressed(pilot, "p"))[0]
        told(wall, SICK, source="a-well")
        await settled(pilot)
        assert lines_of(pilot)[0].startswith("kneewatch  1 critical 2 ok")
        assert selected(await pressed(pilot, "down")) == "a-well"
        assert line_with(lines_of(pilot), "OK")
        lines = await pressed(pilot, "p")
        assert lines[0].startswith("kneewatch  2 critical 1 ok")
        assert "PAUSED" not in lines[0]

    driven(view_of(wall, pace), pause)


def test_speed() -> None:
    wall, pace = ScreenState(clock=Clock()), Playback()
    played(wall, "kv_pressure_cascade", 70)

    async def faster(pilot: Pilot[None]) -> None:
        assert "playing x1 " in lines_of(pilot)[0]
        assert "playing x4" in (await pressed(pilot, "plus", "equals_sign"))[0]
        assert "playing x0.5" in (await pressed(pilot, "minus", "minus", "minus"))[0]

    driven(view_of(wall, pace), faster)
    assert pace.speed == 0.5


def test_help() -> None:
    async def ask(pilot: Pilot[None]) -> None:
        lines = await pressed(pilot, "question_mark")
        assert line_with(lines, "follow")
        assert line_with(lines, "Exit status by the last state: 0 ok")
        lines = await pressed(pilot, "q")
        assert selected(lines) == "b-sick"
        assert line_with(await pressed(pilot, "h"), "Exit status")
        assert selected(await pressed(pilot, "escape")) == "b-sick"

    driven(view_of(three()), ask)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_quit(key: str) -> None:
    view = view_of(three())

    async def leave(pilot: Pilot[None]) -> None:
        await pilot.press(key)
        await pilot.pause()

    driven(view, leave)
    assert not view.is_running


def test_a_single_engine_has_the_whole_screen() -> None:
    wall = ScreenState(clock=Clock())
    played(wall, "kv_pressure_cascade", 75)

    async def look(pilot: Pilot[None]) -> None:
        lines = lines_of(pilot)
        assert "kv_pressure_cascade (model tiny, engine 0)" in lines[1]
        assert lines[2].startswith("CRITICAL  kv_pressure")
        assert "(now 160)" in line_with(lines, "then fix it: --num-gpu-blocks-override ")
        assert line_with(await pressed(pilot, "j", "j"), "KV ")
        assert not lines_of(pilot)[2].startswith("CRITICAL")

    driven(view_of(wall), look)


def test_wide_screens_have_the_list_on_the_left() -> None:
    async def look(pilot: Pilot[None]) -> None:
        lines = lines_of(pilot)
        assert "── b-sick (model llama, engine 0)" in lines[1]
        assert "▶CRITICAL b-sick" in lines[2]
        assert "CRITICAL  kv_pressure" in lines[2]
        assert "a-well" in lines[3]

    driven(view_of(three()), look, (160, 45))


def test_more_engines_than_lines() -> None:
    wall = ScreenState(clock=Clock())
    for number in range(300):
        told(wall, HEALTHY, source=f"r{number:03}")

    async def walk(pilot: Pilot[None]) -> None:
        assert "1-7 of 300" in lines_of(pilot)[1]
        assert selected(await pressed(pilot, *["down"] * 9)) == "r009"
        assert "4-10 of 300" in lines_of(pilot)[1]
        assert selected(await pressed(pilot, "end")) == "r299"
        assert "294-300 of 300" in lines_of(pilot)[1]
        assert "294-300 of 300" in (await pressed(pilot, "up"))[1]
        assert "1-7 of 300" in (await pressed(pilot, "home"))[1]

    driven(view_of(wall), walk)


def test_silence_changes_the_screen() -> None:
    clock = Clock()
    wall = three(clock)

    async def wait(pilot: Pilot[None]) -> None:
        clock.now_s += 60
        await settled(pilot)
        lines = lines_of(pilot)
        assert lines[0].startswith("kneewatch  1 critical 2 unknown")
        assert line_with(lines, "no data for 60 s: this state is out of date")
        assert line_with(lines, "no data for 60 s")

    driven(view_of(wall), wait)


def test_a_daemon_s_trouble_stands_on_top() -> None:
    wall = three()
    wall.expect("http://d:9877/api/v1/triage", Kind.DAEMON, patience_s=10.0)
    wall.set_note("http://d:9877/api/v1/triage", "connection refused [bold]x[/] \x1b[2J")

    async def look(pilot: Pilot[None]) -> None:
        assert lines_of(pilot)[1] == "connection refused [bold]x[/] ?[2J"

    driven(view_of(wall, where="daemon http://d:9877/api/v1/triage"), look)


def test_nothing_to_show_yet() -> None:
    wall = ScreenState(clock=Clock())
    wall.expect("http://a:1", Kind.SERVER, patience_s=10.0)

    async def look(pilot: Pilot[None]) -> None:
        lines = lines_of(pilot)
        assert lines[0].startswith("kneewatch  1 unknown")
        assert line_with(lines, "waiting for the first scrape")

    driven(view_of(wall), look)

    async def press_all(pilot: Pilot[None]) -> None:
        await pressed(pilot, "down", "up", "enter", "escape", "p", "p", "space", "home", "end")
        assert "no data yet" in "".join(lines_of(pilot))

    driven(view_of(ScreenState(clock=Clock())), press_all)


@cache
def busy() -> ScreenState:
    """A wall with a cascade on it, which takes a while to play."""
    wall = three()
    played(wall, "kv_pressure_cascade", 70)
    return wall


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (20, 5), (10, 3), (1, 1), (300, 90)], ids=str)
def test_any_size(size: tuple[int, int]) -> None:
    async def press_all(pilot: Pilot[None]) -> None:
        for key in (
            "down",
            "enter",
            "space",
            "enter",
            "question_mark",
            "escape",
            "p",
            "tab",
            "end",
        ):
            await pilot.press(key)
        await settled(pilot)

    driven(view_of(busy()), press_all, size)


def test_hostile_names() -> None:
    name = "[red]x[/red]\x1b[2J\x9b1m\u202e"
    wall = ScreenState(clock=Clock())
    told(wall, replace(SICK, model=name), source=name)
    told(wall, HEALTHY, source="[/]" * 30)

    async def look(pilot: Pilot[None]) -> None:
        shown = "\n".join(lines_of(pilot))
        assert "[red]x[/red]?[2J" in shown
        assert "\x1b" not in shown
        assert "\u202e" not in shown

    driven(view_of(wall), look, (160, 40))


def test_ascii_only() -> None:
    wall = three()
    played(wall, "kv_pressure_cascade", 75)
    told(wall, replace(SICK, model="模型"), source="sérvér")

    async def look(pilot: Pilot[None]) -> None:
        for keys in ((), ("question_mark",), ("escape",), ("tab",), ("enter",)):
            lines = await pressed(pilot, *keys)
            assert "\n".join(lines).isascii(), lines

    driven(view_of(wall, glyphs=ASCII), look)


def styles_of(view: View) -> list[Any]:
    """The style of every drawn piece."""
    compositor = view.screen._compositor  # pyright: ignore[reportPrivateUsage]
    strips = compositor.render_strips()
    return [segment.style for strip in strips for segment in strip if segment.style]


@pytest.mark.parametrize("colour", [True, False])
def test_colours_are_the_terminal_s_own(colour: bool) -> None:
    wall = three()
    played(wall, "kv_pressure_cascade", 75)
    view = view_of(wall, colour=colour)

    async def look(pilot: Pilot[None]) -> None:
        del pilot
        numbers = {
            c.number
            for style in styles_of(view)
            for c in (style.color, style.bgcolor)
            if c is not None and not c.is_default
        }
        assert None not in numbers, "a colour of 16 million"
        assert bool(numbers) is colour
        assert all(number < 16 for number in numbers)

    driven(view, look)
