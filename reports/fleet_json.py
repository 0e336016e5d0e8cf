"""A fleet's diagnosis as JSON: schema kneewatch.fleet/1 (docs/how-to/fleet.md). Pure."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.fleet.diagnosis import FleetDiagnosis
from kneewatch.diagnose.fleet.engine_state import Engine
from kneewatch.diagnose.fleet.replica_count import TierSize
from kneewatch.diagnose.fleet.tier import FleetCause, Spread, Tier
from kneewatch.reports.diagnosis_json import recommendation_document, rounded, server_document

SCHEMA = "kneewatch.fleet/1"


def document(diagnosis: FleetDiagnosis, *, docs_url: str = "") -> dict[str, Any]:
    """The document. Keys are only ever added.

    With `docs_url` each cause has the address of its page.
    """
    observed = diagnosis.observed
    return {
        "schema": SCHEMA,
        "t": observed.t_s,
        "source": observed.source,
        "window_s": observed.window_s,
        "scrape_interval_s": rounded(observed.scrape_interval_s),
        "health": diagnosis.health,
        "partial": diagnosis.partial,
        "lost": diagnosis.lost or None,
        "clock_skew_s": observed.skew_s,
        "replicas": len({engine.member.replica for engine in diagnosis.engines}),
        "engines": len(diagnosis.engines),
        "tiers": [
            {**_tier(tier, size), "server": server_document(server, observed.t_s)}
            for tier, size, server in zip(
                diagnosis.tiers, diagnosis.sizes, diagnosis.servers, strict=True
            )
        ],
        "causes": [_cause(cause, docs_url) for cause in diagnosis.causes],
        "recommendations": [
            {
                **recommendation_document(advice.made),
                "pool": advice.pool,
                "tier": advice.tier or None,
            }
            for advice in diagnosis.advice
        ],
        "splits": [
            {
                "pool": split.pool,
                "tier": split.tier or None,
                "prefill_replicas": split.prefill,
                "decode_replicas": split.decode,
                "needed": split.needed,
                "prefill_used_ratio": rounded(split.used[0]),
                "decode_used_ratio": rounded(split.used[1]),
            }
            for split in diagnosis.splits
        ],
        "targets": [_engine(engine) for engine in diagnosis.engines],
        "gone": [
            {"replica": replica.replica, "pool": replica.pool, "down": replica.down}
            for replica in observed.gone
        ],
        "recorded": list(observed.recorded),
        "raw": list(observed.raw),
        "warnings": list(observed.warnings),
        "unknown": list(diagnosis.notes),
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
        "signals": {spread.signal: _spread(spread) for spread in tier.spreads},
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


def _spread(spread: Spread) -> dict[str, Any]:
    return {
        "count": spread.count,
        "unknown": spread.unknown,
        "min": spread.least,
        "median": spread.median,
        "mean": spread.mean,
        "max": spread.most,
        "worst": spread.worst,
    }


def _cause(fleet_cause: FleetCause, docs_url: str) -> dict[str, Any]:
    cause = fleet_cause.cause
    docs = cause_page(docs_url, cause.id)
    return {
        "id": cause.id,
        "confidence": cause.confidence,
        "severity": cause.severity.word,
        "pool": fleet_cause.pool,
        "tier": fleet_cause.tier or None,
        "replicas": list(fleet_cause.replicas),
        "summary": cause.summary,
        "explains": list(cause.explains),
        "lever": cause.lever,
        "evidence": [asdict(item) for item in cause.evidence],
        "against": [asdict(item) for item in cause.against],
        "guide": list(cause.guide),
        **({"docs": docs} if docs else {}),
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
                "rule": finding.rule.id,
                "state": finding.severity.word,
                "signal": finding.rule.signal,
                "value": finding.value,
            }
            for finding in engine.findings
        ],
        "causes": [cause.id for cause in engine.causes],
        "signals": {k: v for k, v in sorted(engine.values.items()) if math.isfinite(v)},
    }
