"""What a report is made of, from a metrics system as the settings describe it. I/O edge."""

from __future__ import annotations

from kneewatch.agent.deployment import stated
from kneewatch.agent.fleet.queries import checked_selector
from kneewatch.agent.fleet.wanted import source_settings
from kneewatch.agent.report.members import Wanted
from kneewatch.agent.report.prometheus.gather import Asked, Tell, gather
from kneewatch.agent.settings import Settings
from kneewatch.collector.prometheus.source import PrometheusSource
from kneewatch.diagnose.fleet.shape import label_map
from kneewatch.reports.weekly.observed import Observed


def made_of(url: str, settings: Settings, selector: str, wanted: Wanted, tell: Tell) -> Observed:
    """What a metrics system knows.

    Raises:
        CollectError: it does not answer, or knew no vLLM server in that time.
        SettingsError: the selector or a label's meaning cannot be.
    """
    asked = Asked(
        checked_selector(selector, "--selector"),
        label_map(settings["fleet.labels"] or {}, settings.origin("fleet.labels")),
        settings.profile(stated=stated(settings)),
        settings["fleet.queries_at_once"],
    )
    with PrometheusSource(url, source_settings(settings)) as source:
        return gather(source, wanted, asked, tell)
