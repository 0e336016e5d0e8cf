"""What gets worse over hours at equal load, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, sin

from msgspec.structs import replace

from kneewatch.rules.rule import Severity
from tests.incidents.incident import NOTHING, Incident
from tests.incidents.pages import SERVING, Load, Phases

GIB, HOUR_S = 2**30, 3600.0
STEP_S = 120.0
DAYTIME = replace(SERVING, kv_ratio=0.6, answer_tokens=200.0, resident_bytes=2.0 * GIB)


def swings(at_s: float) -> float:
    """Noise from -1 to 1 that is the same in every run."""
    return (int(at_s / STEP_S) * 7919 % 101) / 50 - 1


def memory(grown_gib: Callable[[float], float]) -> Phases:
    """A load whose process holds 2 GiB, some noise, and what it grew by."""
    return lambda at_s: replace(
        DAYTIME, resident_bytes=(2.0 + 0.02 * swings(at_s) + grown_gib(at_s)) * GIB
    )


def leaks_blocks(at_s: float) -> Load:
    """2% of the cache an hour is never given back, below a load that swings."""
    return replace(DAYTIME, kv_ratio=0.3 + 0.01 * swings(at_s) + 0.04 * at_s / HOUR_S)


def fills_with_load(at_s: float) -> Load:
    """The cache as it fills through a morning whose load grows by half."""
    load = 1 + 0.5 * min(1.0, at_s / (6 * HOUR_S))
    return replace(
        DAYTIME, running=4 * load, kv_ratio=0.3 * load, finished_per_s=2 * load,
        first_tokens_per_s=2 * load,
    )  # fmt: skip


def drafts(accepted_at: Callable[[float], float]) -> Phases:
    """A load with speculation of four tokens, of which some are accepted."""
    return lambda at_s: replace(
        DAYTIME,
        drafts_per_s=25.0,
        accepted_per_draft=accepted_at(at_s) + 0.05 * swings(at_s),
        generated_per_s=100.0,
    )


def busier(at_s: float) -> Load:
    """Three times the requests after six hours, and the memory of their connections."""
    load = 1 + 2 * min(1.0, at_s / (6 * HOUR_S))
    return replace(DAYTIME, running=4 * load, finished_per_s=2 * load, resident_bytes=load * GIB)


INCIDENTS = (
    Incident(
        name="host memory grows by 300 MiB/h",
        source="vllm 44175, 50150, 52089",
        load_at=memory(lambda at_s: 0.3 * at_s / HOUR_S),
        lasts_s=4 * HOUR_S,
        judged_from_s=3.6 * HOUR_S,
        first_cause="host_memory_leak",
        least=Severity.INFO,
        says="GiB/h at equal load",
        step_s=STEP_S,
    ),
    Incident(
        name="blocks leak under load, 4% of the cache an hour",
        source="vllm 46283, 36958",
        load_at=leaks_blocks,
        lasts_s=4 * HOUR_S,
        judged_from_s=3.6 * HOUR_S,
        first_cause="kv_leak",
        least=Severity.WARNING,
        says="lowest usage climbed from",
        step_s=STEP_S,
    ),
    Incident(
        name="draft acceptance decays, 3.07 to 2.8 tokens",
        source="vLLM with EAGLE, hours",
        load_at=drafts(lambda t: 3.07 - 0.27 * min(1.0, t / (7.5 * HOUR_S))),
        lasts_s=7.4 * HOUR_S,
        judged_from_s=7.1 * HOUR_S,
        first_cause="spec_acceptance_drift",
        least=Severity.INFO,
        says="3.0",
        step_s=STEP_S,
    ),
    *(
        Incident(
            name=name,
            source="healthy",
            load_at=load_at,
            lasts_s=8 * HOUR_S,
            judged_from_s=0.0,
            first_cause=NOTHING,
            never=frozenset({"host_memory_leak", "kv_leak", "spec_acceptance_drift"}),
            step_s=STEP_S,
        )
        for name, load_at in (
            ("host memory grows as caches warm up", memory(lambda t: 1.5 * (1 - exp(-t / HOUR_S)))),
            ("host memory grows to a plateau", memory(lambda t: min(0.8, 0.3 * t / HOUR_S))),
            ("host memory steps up once", memory(lambda t: 0.5 if t > 2 * HOUR_S else 0.0)),
            ("host memory grows with the load", busier),
            ("KV usage climbs with the load", fills_with_load),
            ("draft acceptance swings", drafts(lambda t: 3.0 + 0.1 * sin(t / HOUR_S))),
            ("draft acceptance falls once", drafts(lambda t: 2.7 if t > 3 * HOUR_S else 3.0)),
        )
    ),
)
