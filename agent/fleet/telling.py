"""A fleet's verdict as states of targets, so that receivers are told of it like of any other. Pure.

`fleet` is the metrics system itself, `fleet/TIER` what lies across a tier's replicas, and
`fleet/POOL/REPLICA` the KV cascade of a replica's engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kneewatch.agent.board import TargetState
from kneewatch.agent.notify.message import FLEET
from kneewatch.diagnose.case import Cause, Evidence
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.fleet.diagnosing import FleetDiagnosis
from kneewatch.diagnose.fleet.judging import Engine, stage_severity
from kneewatch.rules.cascade import NAMES, Stage
from kneewatch.rules.model import Severity

SYSTEM_DOWN = "metrics_system_down"


def states_of(found: FleetDiagnosis, *, interval_s: float) -> list[TargetState]:
    """What is told of an answer. Of what an answer that is partial lacks nothing is over."""
    made = [_state(FLEET, {}, found, [_judged(found, FLEET)], interval_s)]
    groups = dict.fromkeys([(tier.pool, tier.tier) for tier in found.tiers])
    groups |= dict.fromkeys([(cause.pool, cause.tier) for cause in found.causes])
    for pool, tier in groups:
        name = f"{FLEET}/{pool or '?'}" + (f" on {tier}" if tier else "")
        causes = [_dated(c.cause, found) for c in found.causes if (c.pool, c.tier) == (pool, tier)]
        diagnosis = _judged(found, name, causes=causes, blind=found.partial)
        made.append(_state(name, {"pool": pool, "tier": tier}, found, [diagnosis], interval_s))
    by_replica: dict[tuple[str, str], list[Engine]] = {}
    for engine in found.engines:
        by_replica.setdefault((engine.member.pool, engine.member.replica), []).append(engine)
    for (pool, replica), engines in by_replica.items():
        name, member = "/".join(part for part in (FLEET, pool, replica) if part), engines[0].member
        labels = {**member.labels, "pool": pool, "tier": member.tier, "role": member.role}
        diagnoses = [_of_engine(found, name, engine) for engine in engines]
        made.append(_state(name, labels, found, diagnoses, interval_s))
    return made


def lost_state(url: str, why: str, *, t_s: float, interval_s: float) -> TargetState:
    """What is told while the metrics system does not answer: no more than that."""
    cause = Cause(
        SYSTEM_DOWN,
        1.0,
        Severity.CRITICAL,
        f"The metrics system does not answer, so nothing is known of the fleet: {why}",
        (Evidence("fleet_up", 0.0, None, why),),
        (),
        (),
        "Look at the metrics system and at the way to it.",
        since_s=t_s,
    )
    unread = Diagnosis(
        t_s, FLEET, "", "", None, "unknown", None, (cause,), (), (), {}, (why,), 0.0,
        f"nothing: {why}",
    )  # fmt: skip
    return TargetState(FLEET, url, {}, t_s, (unread,), 0.0, interval_s, 0, 0, 1)


def _dated(cause: Cause, found: FleetDiagnosis) -> Cause:
    """A cause of this moment: what is told of it is dated by the receiver's ledger."""
    return replace(cause, since_s=found.observed.t_s)


def _of_engine(found: FleetDiagnosis, name: str, engine: Engine) -> Diagnosis:
    member = engine.member
    return _judged(
        found,
        name,
        model=member.model,
        engine=member.engine,
        stage=engine.stage,
        severity=stage_severity(engine.values),
        values=engine.values,
        blind=engine.health == "unknown" or found.partial,
    )


def _judged(
    found: FleetDiagnosis,
    name: str,
    *,
    causes: Sequence[Cause] = (),
    model: str = "",
    engine: str = "",
    stage: int | None = 0,
    severity: Severity = Severity.OK,
    values: Mapping[str, float] | None = None,
    blind: bool = False,
) -> Diagnosis:
    observed = found.observed
    shown = None
    if stage is not None:
        reasons = (f"the metrics system says {NAMES[stage]}",)
        # One moment has no past: a receiver's ledger knows since when it is told.
        shown = Stage(stage, observed.t_s, severity, None, reasons)
    return Diagnosis(
        observed.t_s, name, engine, model, None, "unknown" if blind else severity.word, shown,
        causes, (), (), dict(values or {}), (), observed.window_s, "its peers",
    )  # fmt: skip


def _state(
    name: str,
    labels: Mapping[str, str],
    found: FleetDiagnosis,
    diagnoses: Sequence[Diagnosis],
    interval_s: float,
) -> TargetState:
    observed = found.observed
    return TargetState(
        name, observed.source, labels, observed.t_s, tuple(diagnoses), observed.load.seconds,
        interval_s, 0, 0, 0,
    )  # fmt: skip
