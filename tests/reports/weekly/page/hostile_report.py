"""A report in which everything that a page, a label or a setting could have said is hostile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import asdict, replace

from kneewatch.reports.weekly.report import WeeklyReport

MARKUP = "<script>alert(1)</script>\"'`|&amp;<img src=x onerror=alert(2)>[a](javascript:b)"
HOSTILE = f"{MARKUP}\n# no heading\x00\x1b[2J\u202etxt.exe\ud800 </style>$x^2$"


def hostile(report: WeeklyReport) -> WeeklyReport:
    """The report with HOSTILE at the end of every text but the time zone's name."""
    tainted = cast("WeeklyReport", _tainted(report))
    return replace(tainted, timezone=report.timezone)


def _tainted(value: Any) -> Any:  # noqa: ANN401 - whatever a report holds
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {_tainted(key): item for key, item in items}
    if isinstance(value, tuple):
        items_of = cast("tuple[object, ...]", value)
        return tuple(_tainted(item) for item in items_of)
    if isinstance(value, Struct):
        return replace(value, **{name: _tainted(part) for name, part in asdict(value).items()})
    return value
