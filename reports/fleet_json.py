"""A fleet's diagnosis as JSON: schema kneewatch.fleet/1 (docs/how-to/fleet.md). Pure."""

from __future__ import annotations

import math
from typing import Any

from kneewatch.diagnose.fleet.diagnosis import FleetDiagnosis
from kneewatch.diagnose.fleet.engine_state import Engine
from kneewatch.diagnose.fleet.replica_count import TierSize
from kneewatch.diagnose.fleet.tier import FleetCause, Spread, Tier
from kneewatch.reports.diagnosis_json import recommendation_document, rounded

SCHEMA = "kneewatch.fleet/1"


def document(found: FleetDiagnosis) -> dict[str, Any]:
    """The document. Keys are only ever added."""
    observed = found.observed
    return {
        "schema": SCHEMA,
        "t": observed.t_s,
        "source": observed.source,
        "window_s": observed.window_s,
        "health": found.health,
        "partial": found.partial,
        "lost": found.lost or None,
        "clock_skew_s": observed.skew_s,
        "replicas": len({engine.member.replica for engine in found.engines}),
        "engines": len(found.engines),
        "tiers": [_tier(*one) for one in zip(found.tiers, found.sizes, strict=True)],
        "causes": [_cause(one) for one in found.causes],
        "recommendations": [
            {**recommendation_document(one.made), "pool": one.pool, "tier": one.tier or None}
            for one in found.advice
        ],
        "splits": [
            {
                "pool": one.pool,
                "tier": one.tier or None,
                "prefill_replicas": one.prefill,
                "decode_replicas": one.decode,
                "needed": one.needed,
                "prefill_used_ratio": rounded(one.used[0]),
                "decode_used_ratio": rounded(one.used[1]),
            }
            for one in found.splits
        ],
        "targets": [_engine(engine) for engine in found.engines],
        "gone": [
            {"replica": one.replica, "pool": one.pool, "down": one.down} for one in observed.gone
        ],
        "recorded": list(observed.recorded),
        "raw": list(observed.raw),
        "warnings": list(observed.warnings),
        "unknown": list(found.notes),
        "load": {
            "queries": observed.load.queries,
            "retried": observed.load.retried,
            "seconds": round(observed.load.seconds, 3),
        },
    }


def _tier(tier: Tier, size: TierSize) -> dict[str, Any]:
    return {
        "pool": tier.pool,
        "tier": tier.tier or None,
        "role": tier.role or None,
        "size": _size(size),
        "replicas": tier.replicas,
        "engines": len(tier.engines),
        "signals": {one.signal: _spread(one) for one in tier.spreads},
    }


def _size(size: TierSize) -> dict[str, Any]:
    peak = size.peak
    return {
        "replicas": size.present,
        "recommended": size.needed,
        "why": size.why,
        "used_ratio": rounded(size.used_ratio),
        "gpus_per_replica": size.gpus_each,
        "usd_per_hour": rounded(size.usd_per_hour),
        "peak": None
        if peak is None
        else {
            "requests": rounded(peak.requests),
            "t": peak.t_s,
            "mean_requests": rounded(peak.mean_requests),
            "span_s": peak.span_s,
            "seen_ratio": rounded(peak.seen_ratio),
        },
    }


def _spread(one: Spread) -> dict[str, Any]:
    return {
        "count": one.count,
        "unknown": one.unknown,
        "min": one.least,
        "median": one.median,
        "mean": one.mean,
        "max": one.most,
        "worst": one.worst,
    }


def _cause(one: FleetCause) -> dict[str, Any]:
    cause = one.cause
    return {
        "id": cause.id,
        "confidence": cause.confidence,
        "severity": cause.severity.word,
        "pool": one.pool,
        "tier": one.tier or None,
        "replicas": list(one.replicas),
        "summary": cause.summary,
        "lever": cause.lever,
        "evidence": [
            {"signal": e.signal, "value": e.value, "threshold": e.threshold, "text": e.text}
            for e in cause.evidence
        ],
        "against": [
            {"signal": e.signal, "value": e.value, "threshold": e.threshold, "text": e.text}
            for e in cause.against
        ],
        "guide": list(cause.guide),
    }


def _engine(engine: Engine) -> dict[str, Any]:
    member = engine.member
    return {
        "replica": member.replica,
        "engine": member.engine or None,
        "model": member.model,
        "pool": member.pool,
        "tier": member.tier or None,
        "role": member.role or None,
        "node": member.node or None,
        "health": engine.health,
        "stage": None
        if engine.stage is None
        else {"number": engine.stage, "name": engine.stage_name},
        "findings": [
            {
                "rule": one.rule.id,
                "state": one.severity.word,
                "signal": one.rule.signal,
                "value": one.value,
            }
            for one in engine.findings
        ],
        "signals": {k: v for k, v in sorted(engine.values.items()) if math.isfinite(v)},
    }
