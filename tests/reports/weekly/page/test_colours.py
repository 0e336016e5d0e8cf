"""Colours of the report: enough contrast in both schemes, computed as WCAG 2.2 does."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from kneewatch.reports.triage.page import asset
from tests.reports.triage.test_colours import SHAPE, TEXT, contrast, scheme

CSS = (files("kneewatch.reports.weekly.page") / "report.css").read_text()
HEALTH = ("ok", "info", "warning", "critical", "unknown")
GROUNDS = ("paper", "sheet", *(f"{health}-tint" for health in HEALTH))
PAIRS = [
    *((colour, ground, TEXT) for colour in ("ink", "link") for ground in GROUNDS),
    *(("quiet", ground, TEXT) for ground in ("paper", "sheet")),
    *((health, ground, TEXT) for health in HEALTH for ground in ("paper", "sheet")),
    *((health, f"{health}-tint", TEXT) for health in HEALTH),
    *((colour, "paper", TEXT) for colour in ("bound", "knee")),
    *(("sign", health, TEXT) for health in HEALTH if health != "unknown"),
    *((colour, ground, SHAPE) for colour in ("line", "thin") for ground in ("paper", "sheet")),
    ("line", "area", SHAPE),
    ("line", "band", SHAPE),
    ("line", "knee-tint", SHAPE),
    *((f"part-{letter}", "on-dark", TEXT) for letter in "ab"),
    ("part-e", "on-dark", SHAPE),
    *((f"part-{letter}", "on-light", TEXT) for letter in "cd"),
]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast(dark: bool) -> None:
    colours = scheme(dark=dark)
    low = {
        (colour, other): round(contrast(colours[colour], colours[other]), 2)
        for colour, other, least in PAIRS
        if contrast(colours[colour], colours[other]) < least
    }
    assert low == {}


def test_every_colour_is_a_role() -> None:
    rules = re.sub(r"--[\w-]+: #[0-9a-f]{6};", "", CSS)
    rules = rules.replace("url(#hatch)", "").replace("#incidents", "")
    # On paper there are no roles: the margin's own colour, and white.
    assert set(re.findall(r"#[0-9a-fA-F]{3,8}\b", rules)) == {"#575b63", "#ffffff"}


def test_every_role_is_used() -> None:
    both = CSS + asset("triage.css").decode()  # which begins with the palette
    roles = set(re.findall(r"--([\w-]+):", both))
    assert roles == set(re.findall(r"var\(--([\w-]+)\)", both))
