"""Colours: enough contrast in both schemes, computed as WCAG 2.2 does."""

from __future__ import annotations

import re

import pytest

from kneewatch.reports.health import RANKS
from kneewatch.reports.templates import palette
from kneewatch.reports.triage.page import asset

CSS = asset("triage.css").decode()
TEXT, SHAPE = 4.5, 3.0
"""Levels AA for text and for shapes that mean something."""

BACKGROUNDS = ("paper", "sheet", *(f"{health}-tint" for health in RANKS))
PAIRS = [
    *((colour, ground, TEXT) for colour in ("ink", "quiet", "link") for ground in BACKGROUNDS),
    *(
        (health, ground, TEXT)
        for health in RANKS
        for ground in ("paper", "sheet", f"{health}-tint")
    ),
    # The tally of all targets stands on the worst one's tint.
    *((health, f"{worst}-tint", TEXT) for health in RANKS for worst in RANKS),
    *(("bound", ground, TEXT) for ground in ("paper", "sheet")),
    *(("sign", health, SHAPE) for health in RANKS if health != "unknown"),
    *(("line", ground, SHAPE) for ground in BACKGROUNDS),
    *(("focus", ground, SHAPE) for ground in BACKGROUNDS),
]


def scheme(*, dark: bool) -> dict[str, str]:
    """The colours by role; the dark scheme overrides the light one."""
    light, _, rest = palette().partition("@media screen and (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    if dark:
        inside = rest[: rest.index("\n}\n")]
        overridden = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", inside))
        assert set(overridden) == set(colours), "every colour has its dark counterpart"
        colours |= overridden
    return colours


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb. Source: WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21."""
    low, high = sorted((luminance(colour), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(over: str, under: str, share: float) -> str:
    """A colour laid over another, so opaque."""
    pairs = ((int(over[at : at + 2], 16), int(under[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def test_the_arithmetic() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert mixed("#000000", "#ffffff", 0.5) == "#808080"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast(dark: bool) -> None:
    colours = scheme(dark=dark)
    low = {
        (colour, other): round(contrast(colours[colour], colours[other]), 2)
        for colour, other, least in PAIRS
        if contrast(colours[colour], colours[other]) < least
    }
    assert low == {}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_steady_bars_are_calm_and_can_be_seen(dark: bool) -> None:
    (opacity,) = re.findall(r"\.bar\.ok \{ fill-opacity: ([\d.]+);", CSS)
    colours = scheme(dark=dark)
    bar = mixed(colours["ok"], colours["sheet"], float(opacity))
    assert contrast(bar, colours["sheet"]) >= SHAPE


def test_every_colour_is_a_role() -> None:
    rules = re.sub(r"--[\w-]+: #[0-9a-f]{6};", "", CSS)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b", re.sub(r"url\(#\w+\)|#at", "", rules))
