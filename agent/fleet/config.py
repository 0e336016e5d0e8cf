"""A fleet's diagnosis by the settings. I/O edge."""

from __future__ import annotations

from kneewatch.agent.fleet.queries import checked_selector
from kneewatch.agent.fleet.snapshot import FleetConfig, observe
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.collector.prometheus.client import PrometheusSource, SourceSettings
from kneewatch.diagnose.fleet.diagnosis import FleetDiagnosis, diagnose
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


def diagnose_fleet(
    url: str, settings: Settings, selector: str, *, at_s: float | None
) -> FleetDiagnosis:
    """The diagnosis of the fleet that the metrics system at `url` scrapes, now or at a moment.

    Raises:
        CollectError: the metrics system does not answer, or has no series of vLLM.
    """
    profile = settings.profile(stated=stated(settings))
    config = fleet_config(settings, selector, at_s=at_s)
    with PrometheusSource(url, source_settings(settings)) as source:
        return diagnose(observe(source, config), profile)
