"""A fleet in a real Prometheus, observed and diagnosed."""

from __future__ import annotations

from kneewatch.agent.fleet.snapshot import FleetConfig, observe
from kneewatch.collector.prometheus.client import PrometheusSource, SourceSettings
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.diagnosis import FleetDiagnosis, diagnose
from kneewatch.diagnose.fleet.inventory import label_map
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
        profile = Profile(window_s=window_s)
        wanted = FleetConfig(selector, label_map({}, "default"), window_s, at_s, profile=profile)
        return diagnose(observe(source, wanted), profile)


def told(fleet_diagnosis: FleetDiagnosis) -> dict[str, tuple[str, ...]]:
    """The replicas of each cause."""
    return {cause.cause.id: cause.replicas for cause in fleet_diagnosis.causes}
