"""What the process that makes a scheduled report is told: settings and places, as JSON. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from kneewatch.agent.settings import Effective, Settings

FleetAsked = tuple[str, str]
"""A metrics system's URL, and matchers of the series to look at."""


def order(
    settings: Settings, *, store: Path, folder: Path, due_s: float, fleet: FleetAsked | None = None
) -> bytes:
    """What the process is to do, as it reads it."""
    values = {setting.key: [one.value, one.origin] for setting, one in settings.rows()}
    return orjson.dumps(
        {
            "settings": values,
            "thresholds": settings.thresholds,
            "thresholds_origin": settings.thresholds_origin,
            "tables": settings.tables,
            "store": str(store),
            "folder": str(folder),
            "due_s": due_s,
            "fleet": fleet,
        }
    )


def settings_of(given: dict[str, Any]) -> Settings:
    """The settings of an order."""
    values = {key: Effective(value, origin) for key, (value, origin) in given["settings"].items()}
    return Settings(values, given["thresholds"], given["thresholds_origin"], given["tables"])
