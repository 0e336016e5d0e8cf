"""A fleet in a real Prometheus, observed and diagnosed."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kneewatch.agent.fleet.snapshot import FleetConfig, observe
from kneewatch.agent.fleet.watch import FleetMoment, FleetWatch
from kneewatch.collector.prometheus.client import PrometheusSource, SourceSettings
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.diagnosis import diagnose
from kneewatch.diagnose.fleet.inventory import Observed, label_map
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from tests.collector.oracle import LOOPBACK, Prometheus

QUICK = SourceSettings(pause_s=0.01, per_s=1000.0)


def observed(
    server: Prometheus | str,
    *,
    at_s: float | None = None,
    window_s: float = 60.0,
    selector: str = "",
) -> Observed:
    """What a server has."""
    url = server if isinstance(server, str) else f"http://{LOOPBACK}:{server.port}"
    profile = Profile(window_s=window_s)
    wanted = FleetConfig(selector, label_map({}, "default"), at_s, profile=profile)
    with PrometheusSource(url, QUICK) as source:
        return observe(source, wanted)


def watched(
    server: Prometheus | str,
    *,
    at_s: float | None = None,
    window_s: float = 60.0,
    selector: str = "",
) -> FleetVerdict:
    """The verdict on what a server has."""
    now = observed(server, at_s=at_s, window_s=window_s, selector=selector)
    return diagnose(now, Profile(window_s=window_s))


def told(fleet_diagnosis: FleetVerdict) -> dict[str, tuple[str, ...]]:
    """The replicas of each cause."""
    return {cause.id: cause.replicas for cause in fleet_diagnosis.causes}


def saw(watch: FleetWatch, moment: FleetMoment | None = None, **queries: Any) -> None:  # noqa: ANN401
    """Let a watch have seen a moment, or keep the one it has, with these figures of its queries."""
    state = watch.state
    watching = replace(state.watching, **queries)
    watch.state = replace(state, moment=moment or state.moment, watching=watching)
