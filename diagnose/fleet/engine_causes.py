"""Causes of single engines, concluded in fleet mode by the same records as in the sidecar. Pure.

A moment's values replace the sidecar's window; how long a condition has held, baselines and
drifts come from the metrics system, where it can tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kneewatch.diagnose.causes.availability import STALLED_S, Stalled
from kneewatch.diagnose.causes.evidence import Cause, Facts
from kneewatch.diagnose.causes.gpu_faults import GPU_FAULT
from kneewatch.diagnose.causes.ranking import CAUSES, conclude, ranked
from kneewatch.diagnose.fleet.inventory import Labels
from kneewatch.diagnose.fleet.observed import HOUR_S, Values
from kneewatch.diagnose.gpu.health import GpuState
from kneewatch.rules.cascade import Stage
from kneewatch.rules.conditions import nodes
from kneewatch.rules.facts import Baselines, Spelling, Targets, duration
from kneewatch.rules.quantities import RECENT, BaselineValue, Held, signals_of
from kneewatch.rules.rule import Severity

_FORMS = tuple(
    form for record in CAUSES if not record.sidecar for form in record.forms if not form.sidecar
)

SIGNALS = signals_of(_FORMS)
"""Signals that the causes of an engine are concluded from."""

BASELINES = {node.key: node.name for node in nodes(_FORMS) if isinstance(node, BaselineValue)}
"""Signals that are compared with quiet times, and the keys of their recorded baselines."""

LEFT_OUT = {
    **{record.id: record.sidecar for record in CAUSES if record.sidecar and not record.fleet},
    GPU_FAULT.id: "of a GPU's faults only XIDs are read; exported alerts have the others",
}
"""Causes that fleet mode cannot conclude, and why."""

REMEMBERED = (*BASELINES.values(), *RECENT.values())
"""Keys that only recording rules provide."""

STALLED = "stalled"
_HELD = {(node.name, node.for_s.value): node for node in nodes(_FORMS) if isinstance(node, Held)}
"""Conditions that must hold for a while, by name and seconds."""


def held_queries(to: Spelling) -> dict[tuple[str, float], str]:
    """Queries that have a series for each engine where a condition has held, by its name and for
    how many seconds."""
    step = duration(to.scrape_s)
    queries: dict[tuple[str, float], str] = {}
    for held in _HELD.values():
        flag, span_s = held.flag(to), held.lasts_s(to)[1]
        if flag is not None:
            queries[held.name, span_s] = f"min_over_time(({flag})[{duration(span_s)}:{step}]) == 1"
    queries[STALLED, STALLED_S] = Stalled(whole=True).promql(to, side=True).vector
    return queries


@dataclass(frozen=True, slots=True)
class RecordedBaselines(Baselines):
    """Quiet baselines as the recording rules have them."""

    values: Values

    def get(self, key: str) -> float | None:
        """The baseline of a signal; None where the rules have none."""
        return self.values.get(BASELINES.get(key, f"{key}:baseline"))


def causes_of(
    values: Values,
    *,
    streaks_s: Mapping[str, float],
    stage: int | None,
    severity: Severity,
    config: Labels,
    targets: Targets,
    window_s: float,
    scale: float,
    faulty_gpus: Sequence[GpuState] = (),
    gpus_guessed: bool = False,
) -> list[Cause]:
    """The causes of one engine, ranked; those that others explain are folded into them."""
    age_s = values.get("age_s", HOUR_S if "running_hour_ago" in values else 0.0)
    current: Mapping[str, float | None] = values
    facts = Facts(
        current,
        targets,
        streaks_s,
        config,
        {key: values.get(name, values.get(key)) for key, name in RECENT.items()},
        RecordedBaselines(values),
        window_s,
        age_s,
        scale,
        stage=Stage(stage or 0, 0.0, severity, None, ()),
        gpus=faulty_gpus,
        gpus_guessed=gpus_guessed,
    )
    return ranked(conclude(facts))
