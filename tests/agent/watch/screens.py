"""Walls filled from recordings or by hand, and the screen over them without a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace
from textual.pilot import Pilot

from kneewatch.agent.captures import capture_names
from kneewatch.agent.settings.effective import Settings, load
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.stream import TargetStream
from kneewatch.agent.watch.command import View
from kneewatch.agent.watch.feeds import Playback
from kneewatch.agent.watch.rendering import UNICODE, Glyphs
from kneewatch.agent.watch.state import Kind, ScreenState
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.diagnose.verdict import Verdict
from tests.agent.running import capture
from tests.recordings import WINDOW_S
from tests.reports.diagnoses import HEALTHY, SICK

SERVER = "http://10.0.0.7:8000"
SMALL = (80, 24)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def settings_of(**flags: Any) -> Settings:  # noqa: ANN401 - a setting has its own kind
    """Settings with a recording's window; dots of keys are written as two underscores."""
    stated = {name.replace("__", "."): value for name, value in flags.items()}
    return load(file=None, environ={}, flags={"window_s": WINDOW_S, **stated})


def played(wall: ScreenState, name: str, scrapes: int | None = None) -> None:
    """Put a recording on a wall, up to a scrape."""
    settings, (source,) = settings_of(), capture_names([str(capture(name))])
    stream = TargetStream(source, settings.profile(stated=stated(settings)), settings.limits())
    wall.expect(source, Kind.RECORDING, patience_s=0.0)
    for entry in islice(CaptureReader(str(capture(name))), scrapes):
        wall.put(source, stream.replay(entry), now_s=entry.t_s)


def told(wall: ScreenState, *diagnoses: Verdict, source: str = SERVER, **more: Any) -> None:  # noqa: ANN401
    """Put diagnoses of a server on a wall; they get its name."""
    wall.expect(source, Kind.SERVER, patience_s=10.0)
    named = [replace(diagnosis, target=source) for diagnosis in diagnoses]
    wall.put(source, named, now_s=named[0].t_s, **more)


def three(clock: Clock | None = None) -> ScreenState:
    """A sick server between two healthy ones, at a time that only `clock` moves."""
    wall = ScreenState(clock=clock or Clock())
    for name, diagnosis in (("a-well", HEALTHY), ("b-sick", SICK), ("c-well", HEALTHY)):
        told(wall, diagnosis, source=name)
    return wall


def view_of(wall: ScreenState, pace: Playback | None = None, **more: Any) -> View:  # noqa: ANN401
    """The screen over a wall."""
    glyphs: Glyphs = more.pop("glyphs", UNICODE)
    given: dict[str, Any] = {"where": "", "colour": True, **more}
    return View(wall, pace or Playback(), glyphs=glyphs, **given)


def driven(
    view: View, drive: Callable[[Pilot[None]], Awaitable[None]], size: tuple[int, int] = SMALL
) -> None:
    """Run the screen without a terminal while `drive` presses its keys."""

    async def run() -> None:
        async with view.run_test(size=size) as pilot:
            await settled(pilot)
            await drive(pilot)

    asyncio.run(run())


async def settled(pilot: Pilot[None]) -> None:
    """Once everything is drawn."""
    await pilot.pause()
    view = pilot.app
    assert isinstance(view, View)
    view.draw()
    await pilot.pause()
    await pilot.pause()


def lines_of(pilot: Pilot[Any]) -> list[str]:
    """What the screen shows, line by line."""
    compositor = pilot.app.screen._compositor  # pyright: ignore[reportPrivateUsage]
    return [strip.text.rstrip() for strip in compositor.render_strips()]


async def pressed(pilot: Pilot[None], *keys: str) -> list[str]:
    """What the screen shows after keys."""
    await pilot.press(*keys)
    await settled(pilot)
    return lines_of(pilot)


def line_with(lines: Sequence[str], word: str) -> str:
    """The first line that holds a word."""
    return next(line for line in lines if word in line)
