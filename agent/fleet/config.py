"""The configuration of a fleet diagnosis, from the settings."""

from __future__ import annotations

from kneewatch.agent.fleet.queries import checked_selector
from kneewatch.agent.fleet.snapshot import FleetConfig
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.prometheus.client import SourceSettings
from kneewatch.diagnose.fleet.inventory import label_map


def source_settings(settings: Settings) -> SourceSettings:
    """The settings for queries to a metrics system."""
    return SourceSettings(
        fetch=settings.fetch(),
        query_timeout_s=settings["fleet.query_timeout_s"],
        at_once=settings["fleet.queries_at_once"],
        per_s=settings["fleet.queries_per_s"],
    )


def fleet_config(settings: Settings, selector: str, *, at_s: float | None = None) -> FleetConfig:
    """The fleet to diagnose.

    Raises:
        SettingsError: the selector is no list of matchers, or fleet.labels has an unknown role.
    """
    return FleetConfig(
        checked_selector(selector, "--selector"),
        label_map(settings["fleet.labels"] or {}, settings.origin("fleet.labels")),
        settings["window_s"],
        at_s,
        settings["fleet.lookback_s"],
        profile=settings.profile(),
    )
