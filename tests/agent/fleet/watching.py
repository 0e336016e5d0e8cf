"""A fleet in a real Prometheus, observed and diagnosed."""

from __future__ import annotations

from kneewatch.agent.fleet.gather import Wanted, observe
from kneewatch.collector.prometheus.source import PrometheusSource, SourceSettings
from kneewatch.diagnose.fleet.diagnosing import FleetDiagnosis, diagnose
from kneewatch.diagnose.fleet.shape import label_map
from kneewatch.diagnose.profile import Profile
from tests.collector.oracle import LOOPBACK, Prometheus

QUICK = SourceSettings(pause_s=0.01, per_s=1000.0)


def watched(
    server: Prometheus | str,
    *,
    at_s: float | None = None,
    window_s: float = 60.0,
    selector: str = "",
) -> FleetDiagnosis:
    """The diagnosis of what a server has."""
    url = server if isinstance(server, str) else f"http://{LOOPBACK}:{server.port}"
    with PrometheusSource(url, QUICK) as source:
        wanted = Wanted(selector, label_map({}, "default"), window_s, at_s)
        return diagnose(observe(source, wanted), Profile(window_s=window_s))


def told(found: FleetDiagnosis) -> dict[str, tuple[str, ...]]:
    """The replicas of each cause."""
    return {one.cause.id: one.replicas for one in found.causes}
