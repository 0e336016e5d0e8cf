"""Formats numbers, durations and times for users. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

MINUTES_FROM_S = 120.0
"""Times below this are shown in seconds."""


def number(value: float | None) -> str:
    """A number with three significant digits; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def figure(value: float) -> str:
    """A number as people write it: whole numbers in full, others with four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def about(value: float) -> str:
    """A number with two significant digits, written out: 0.82, 1.2, 120."""
    return figure(float(f"{value:.2g}"))


def failed_in_a_row(scrapes: int) -> str:
    """That scrapes failed: "1 scrape failed", "3 scrapes in a row failed"."""
    return f"{plural(scrapes, 'scrape')} {'failed' if scrapes == 1 else 'in a row failed'}"


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """A count with its noun: 1 replica, 2 replicas; `plural_noun` for irregular ones."""
    return f"{count:,} {noun if count == 1 else plural_noun or noun + 's'}"


PLURAL_AFTER_ONE = re.compile(
    r"(?<![\d.,:/x-])1 ((?:[a-z]+ )?)(request|replica|engine|target|adapter|slot|block|call|client|"
    r"GPU|step|prompt|token)s\b(?: (are|were|have|queue|wait|run)\b)?"
)
VERBS = {"are": "is", "were": "was", "have": "has"}


def singular(sentence: str) -> str:
    """The sentence with the noun and verb after a count of 1 in the singular: 1 requests wait
    becomes 1 request waits."""

    def after_one(match: re.Match[str]) -> str:
        verb = match[3] and f" {VERBS.get(match[3], match[3] + 's')}"
        return f"1 {match[1]}{match[2]}{verb or ''}"

    return PLURAL_AFTER_ONE.sub(after_one, sentence)


def percent(ratio: float) -> str:
    """A ratio in percent: 0.2%, 4.6%, 98%."""
    scaled = 100 * ratio
    whole = abs(scaled) >= 9.95 or abs(scaled) < 0.05
    return f"{scaled:.0f}%" if whole else f"{round(scaled, 1):g}%"


def stated_duration(seconds: float) -> str:
    """A duration that a user may have set, as text. With at most three significant digits it is not
    rounded, so that a target is shown as it was set: 35.5 ms, 1.25 s, 12.5 s."""
    rounded = duration(seconds)
    if seconds >= MINUTES_FROM_S:
        return rounded
    value, unit = _in_unit(seconds)
    stated = f"{value:.3g} {unit}"
    exact = float(f"{seconds:.3g}") == seconds and len(stated) > len(rounded)
    return stated if exact else rounded


def duration(seconds: float) -> str:
    """A measured or predicted duration as text: 36 ms, 2.5 s, 40 s, 12 min."""
    if seconds >= MINUTES_FROM_S:
        return span(seconds)
    value, unit = _in_unit(seconds)
    if unit == "ms":
        return f"{value:.0f} ms" if abs(value) >= 9.95 else f"{value:.2g} ms"
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def _in_unit(seconds: float) -> tuple[float, str]:
    return (1000 * seconds, "ms") if abs(seconds) < 0.9995 else (seconds, "s")


def rate(per_s: float, noun: str = "") -> str:
    """A rate in the shortest unit in which it does not round to 0.0: 4.6 requests/s, 1.2
    requests/min, 3.0 requests/h; without a noun 4.6/s."""
    noun = f" {noun}" if noun else ""
    if not per_s:
        return f"0{noun}/s"
    for unit, seconds in (("s", 1.0), ("min", 60.0)):
        if per_s * seconds >= 0.1:
            return f"{per_s * seconds:.1f}{noun}/{unit}"
    return f"{per_s * 3600:.1f}{noun}/h"


LOAD_RATIOS = ("load_ratio", "demand_ratio", "capacity_ratio")
"""Suffixes of ratio signals that can exceed 100%, such as 173%."""


def quantity(key: str, value: float | None, *, stated: bool = False) -> str:
    """A signal's value with its unit, which is the end of its key. `stated`: it is a bound that a
    user may have set, so it is not rounded."""
    if value is None:
        return "-"
    if key.endswith("_ratio_per_s"):
        return f"{percent(value)}/s"
    if key.endswith(LOAD_RATIOS) or (key.endswith(("_ratio", "_share")) and 0 <= value <= 1):
        return percent(value)
    if key.endswith("_bytes_per_s"):
        return f"{number(value / 1e9)} GB/s"
    if key.endswith("_bytes"):
        return f"{number(value / 2**30)} GiB"
    if key.endswith("_per_s"):
        # Less than one in ten days is the rest of a difference of floats.
        return f"{number(value if abs(value) >= 1e-6 else 0.0)}/s"
    if not key.endswith("_s"):
        return number(value)
    return stated_duration(value) if stated else duration(value)


def alike(key: str, *values: float) -> list[str]:
    """Values of one signal, all as `quantity` writes them; if only some are percentages, all as
    numbers."""
    shown = [quantity(key, value) for value in values]
    mixed = len({text.endswith("%") for text in shown}) > 1
    return list(map(number, values)) if mixed else shown


def span(seconds: float) -> str:
    """How long something has lasted: 45 s, 12 min, 3.2 h, 4.5 days."""
    if seconds < MINUTES_FROM_S:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def clock(t_s: float) -> str:
    """A UTC time of day: 03:07:12."""
    return datetime.fromtimestamp(t_s, tz=UTC).strftime("%H:%M:%S")


def date(t_s: float) -> str:
    """A UTC date: 2026-11-21."""
    return datetime.fromtimestamp(t_s, tz=UTC).strftime("%Y-%m-%d")


def stamp(t_s: float) -> str:
    """A UTC time as programs write it: 2026-11-21T03:07:12Z."""
    return f"{date(t_s)}T{clock(t_s)}Z"


def as_sentence(text: str) -> str:
    """The text as a sentence. Its first letter becomes a capital, unless the first word is a flag
    or a name such as vLLM (it contains a sign or a capital). An empty text stays empty."""
    text = text.strip()
    first = text.split(" ", 1)[0].rstrip(",:?!.")
    begun = text[:1].upper() + text[1:] if first.isalpha() and first.islower() else text
    return begun if not begun or begun.endswith((".", "!", "?")) else f"{begun}."


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and the number of further ones."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left:,} more" if left > 0 else "")
