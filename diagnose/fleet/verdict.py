"""The verdict on a fleet at one moment. It is the JSON document kneewatch.fleet/1. Pure.

Times and numbers are rounded as in `kneewatch.diagnose.verdict`. A name that is unknown (tier,
role, node) is null.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from statistics import fmean, median, median_high
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.diagnose.cause import told
from kneewatch.diagnose.doc_links import cause_page
from kneewatch.diagnose.fleet.inventory import Peak, QueryLoad
from kneewatch.diagnose.fleet.tier import Engine, FleetCause, Tier, place
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.verdict import UNKNOWN_STAGE, Server, Verdict
from kneewatch.rules.cascade import Stage, staged
from kneewatch.rules.rule import OK, STATES, WARNING, Finding, Severity, State
from kneewatch.rules.wire import CauseId, Figure, Internal, UnixTime, rounded, written, written_as

SCHEMA: Literal["kneewatch.fleet/1"] = "kneewatch.fleet/1"
FLEET = "fleet"
IN_FLEET = f"{FLEET}/"
"""What the names of a fleet's pools and replicas as targets begin with."""


class FleetAdvice(Advice, frozen=True, kw_only=True):
    """A recommendation for a pool or tier.

    - `pool`: the pool that it is for.
    - `tier`: the tier of the pool; null if it is for the whole pool.
    """

    pool: str
    tier: str | None = None


class Spread(Struct, frozen=True):
    """A signal over the engines of a tier.

    - `count`: the number of engines with a value.
    - `unknown`: the number of engines without a value.
    - `least`, `median`, `mean`, `most`: the statistic over the engines, in the signal's unit.
      Percentiles are never averaged: their mean is null, and their median is one engine's value.
    - `worst`: the name of the engine with the greatest value, or with the least if less is worse.
    """

    count: int
    unknown: int
    least: Figure = field(name="min")
    median: Figure
    mean: Figure | None
    most: Figure = field(name="max")
    worst: str


POOL_SIGNALS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "kv_usage_ratio": max,
    "running": fsum,
    "waiting": fsum,
    "preemption_ratio_per_s": max,
    "ttft_p50_s": max,
    "ttft_p99_s": max,
    "itl_p50_s": max,
    "itl_p99_s": max,
}
"""A pool's signals: the sum over its engines, or the value of the worst engine."""

PERCENTILE = re.compile(r"_p\d+_")
LESS_IS_WORSE = frozenset({"prefix_hit_ratio", "generation_tokens_per_s"})


class TierSize(Struct, frozen=True, omit_defaults=True):
    """A tier's replicas and the number that its measured peak needs.

    - `present`: the replicas that there are.
    - `needed`: the replicas that the measured peak needs; null if unknown.
    - `why`: the reason for no change or no judgement; empty if a recommendation changes it.
    - `used_ratio`: the share of the tier's capacity (KV cache or sequences) that the peak used.
    - `gpus_each`: GPUs of one replica.
    - `usd_per_hour`: the cost of all replicas; null without a price.
    - `peak`: the measured peak; null if it was not measured.
    - `advice`: the recommended change; None if there is none.
    """

    present: int = field(name="replicas")
    needed: int | None = written_as("recommended", None)
    why: str = written("")
    used_ratio: Figure | None = written(None)
    gpus_each: Figure | None = written_as("gpus_per_replica", None)
    usd_per_hour: Figure | None = written(None)
    peak: Peak | None = written(None)
    advice: Internal[Advice | None] = None


class TierVerdict(Struct, frozen=True, kw_only=True):
    """The replicas of one pool on one GPU type.

    - `pool`: the pool's name.
    - `tier`: the tier's name; null if no label names it.
    - `role`: prefill or decode; null if the replicas do both.
    - `model`: the served model.
    - `size`: the number of replicas, and the number that the measured peak needs.
    - `replicas`: the number of replicas that serve.
    - `engines`: the number of their engines.
    - `signals`: each signal's distribution over the engines, by its key.
    - `server`: the facts about each server from its series and the settings.
    """

    pool: str
    tier: str | None = None
    role: str | None = None
    model: str = ""
    size: TierSize
    replicas: int
    engines: int
    signals: Mapping[str, Spread] = field(default_factory=dict[str, Spread])
    server: Server = field(default_factory=Server)

    @property
    def name(self) -> str:
        return place(self.pool, self.tier, self.role)


UNEVEN = 1.5
"""Another split is recommended from this ratio of both sides' used shares on."""

LEAST_BUSY = 0.2
"""The split is judged only if the fuller side uses at least this share of its capacity."""


class Split(Struct, frozen=True):
    """The prefill and decode replicas of a tier, and the ratio that the measured work needs.

    - `pool`: the pool's name.
    - `tier`: the tier's name; null if no label names it.
    - `prefill`, `decode`: the number of replicas with this role.
    - `needed`: the needed ratio of prefill to decode replicas, such as 1:2.3.
    - `prefill_used_ratio`: the mean share of time in which a prefill replica has a request.
    - `decode_used_ratio`: the mean share of its KV cache, or of its ITL target, that a decode
      replica's requests use.
    - `prefill_needed`: how many of the present replicas the ratio assigns to prefill.
    """

    pool: str
    tier: str | None
    prefill: int = field(name="prefill_replicas")
    decode: int = field(name="decode_replicas")
    needed: str
    prefill_used_ratio: Figure
    decode_used_ratio: Figure
    prefill_needed: int = field(name="prefill_replicas_needed", default=0)

    @property
    def uneven(self) -> bool:
        """Whether another split would clearly fit the work better."""
        least, most = sorted((self.prefill_used_ratio, self.decode_used_ratio))
        other = self.prefill_needed != self.prefill
        return other and most >= LEAST_BUSY and most >= UNEVEN * least


class EngineVerdict(Struct, frozen=True, kw_only=True):
    """One engine of a fleet.

    - `replica`: the replica's name.
    - `engine`: the engine core within the replica; null if it has only one.
    - `model`: the served model.
    - `pool`: the replica's pool.
    - `tier`: its tier; null if no label names it.
    - `role`: prefill or decode; null if it does both.
    - `node`: the node that it runs on; null if unknown.
    - `health`: the worst of causes, stage and findings.
    - `stage`: the stage of the KV memory-pressure cascade; null if unknown.
    - `findings`: the rules whose bounds are crossed.
    - `causes`: ids of the engine's causes.
    - `values`: the signals that have a value, by key.
    """

    replica: str
    engine: str | None = None
    model: str = ""
    pool: str = ""
    tier: str | None = None
    role: str | None = None
    node: str | None = None
    health: State
    stage: Stage | None = None
    findings: Sequence[Finding] = ()
    causes: Sequence[CauseId] = ()
    values: Mapping[str, Figure] = field(default_factory=dict[str, Figure], name="signals")

    @property
    def name(self) -> str:
        return f"{self.replica} engine {self.engine}" if self.engine else self.replica


class GoneReplica(Struct, frozen=True):
    """A replica that had series within the last hour and does not serve now.

    - `replica`: the replica's name.
    - `pool`: its pool.
    - `down`: whether its scrapes fail.
    """

    replica: str
    pool: str
    down: bool


class Watching(Struct, frozen=True):
    """The queries of a daemon that watches a fleet.

    - `interval_s`: seconds between cycles.
    - `seen_s`: when the newest answer came, by the daemon's clock.
    - `cycles`: cycles since the start.
    - `failures`: failed cycles since the start.
    - `failing`: failed cycles in a row.
    - `error`: why the newest cycle failed; empty if it did not.
    - `queries`: queries since the start.
    - `retried`: queries that were sent again since the start.
    - `queries_per_s`: the mean of the newest cycle.
    """

    interval_s: Figure
    seen_s: UnixTime = field(name="seen")
    cycles: int
    failures: int
    failing: int
    error: str
    queries: int
    retried: int
    queries_per_s: Figure


class FleetVerdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The verdict on a fleet at one moment: `kneewatch diagnose --prometheus URL --format json`.

    - `schema`: the name and version of this document.
    - `t_s`: when the fleet was judged, by the metrics system's clock.
    - `source`: the metrics system's address, without credentials.
    - `window_s`: the seconds that rates and percentiles are computed over.
    - `scrape_interval_s`: the longest time between scrapes of a pool; null if not measured.
    - `health`: the worst severity of causes and engines. It is unknown if a part of the fleet is
      not seen and nothing worse than info is known.
    - `partial`: whether some results are missing. A replica that is not seen is not healthy.
    - `lost`: since when there is no newer verdict, and why; null if this one is current.
    - `clock_skew_s`: seconds that the metrics system's clock is ahead of this machine's; null
      within the measuring error.
    - `replicas`: the number of replicas that serve.
    - `engine_count`: the number of their engines.
    - `tiers`: the tiers with their sizes and signals.
    - `causes`: the causes by rank.
    - `advice`: the recommended changes.
    - `splits`: the tiers whose replicas only prefill or only decode.
    - `engines`: the engines, worst first.
    - `gone`: replicas that had series within the last hour and do not serve now.
    - `recorded`: always empty.
    - `raw`: keys of the signals that any engine has.
    - `warnings`: warnings of the metrics system.
    - `notes`: what could not be judged, and why.
    - `load`: the load that the queries put on the metrics system.
    - `failed`: why queries have no answer, by the query's name.
    - `watch`: the daemon's queries; only from a daemon that watches the fleet.
    """

    schema: Literal["kneewatch.fleet/1"] = written(SCHEMA)
    t_s: UnixTime = field(name="t")
    source: str
    window_s: Figure
    scrape_interval_s: Figure | None = written(None)
    health: State
    partial: bool = written(default=False)
    lost: str | None = written(None)
    clock_skew_s: Figure | None = written(None)
    replicas: int = written(0)
    engine_count: int = written_as("engines", 0)
    tiers: Sequence[TierVerdict] = written(())
    causes: Sequence[FleetCause] = written(())
    advice: Sequence[FleetAdvice] = written_as("recommendations", ())
    splits: Sequence[Split] = written(())
    engines: Sequence[EngineVerdict] = written_as("targets", ())
    gone: Sequence[GoneReplica] = written(())
    recorded: Sequence[str] = written(())
    raw: Sequence[str] = written(())
    warnings: Sequence[str] = written(())
    notes: Sequence[str] = written_as("unknown", ())
    load: QueryLoad = written(QueryLoad())
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    watch: Watching | None = None

    @property
    def severity(self) -> Severity:
        severities = [cause.severity for cause in self.causes]
        return max([*severities, *(STATES[engine.health] for engine in self.engines)], default=OK)

    def linked(self, docs_url: str) -> FleetVerdict:
        """The verdict with the address of each cause's page below `docs_url`."""
        causes = [replace(cause, docs=cause_page(docs_url, cause.id)) for cause in self.causes]
        return replace(self, causes=causes)

    def by_place(self) -> dict[tuple[str, str | None], Verdict]:
        """The verdict on each pool and on each tier, as on a target: one cause for all of its
        replicas. A pool without a problem and one without replicas are included."""
        places: dict[tuple[str, str | None], None]
        places = dict.fromkeys((tier.pool, None) for tier in self.tiers)
        places |= dict.fromkeys([(tier.pool, tier.tier) for tier in self.tiers])
        places |= dict.fromkeys([(cause.pool, cause.tier) for cause in self.causes])
        places |= dict.fromkeys([(replica.pool, None) for replica in self.gone])
        return {where: self._of(*where) for where in places}

    def _of(self, pool: str, tier: str | None) -> Verdict:
        causes = [cause for cause in self.causes if (cause.pool, cause.tier) == (pool, tier)]
        stage = self._worst_stage(pool, tier, causes)
        return replace(
            self.as_target(target_of(place(pool, tier))),
            health="unknown" if self.partial else (stage.severity or OK).word,
            stage=stage,
            causes=[
                replace(cause, since_s=self.t_s) if cause.since_s is None else cause
                for cause in causes
            ],
            recommendations=[row for row in self.advice if (row.pool, row.tier) == (pool, tier)],
            values=_measured(
                [each for each in self.engines if each.pool == pool and tier in (None, each.tier)]
                if causes
                else ()
            ),
        )

    def by_pool(self) -> dict[str, Verdict]:
        """The verdict on each pool with the causes of all its tiers, by the pool's name. Signals
        are those of POOL_SIGNALS."""
        pools = [tier.pool for tier in self.tiers]
        pools += [cause.pool for cause in self.causes] + [replica.pool for replica in self.gone]
        return {pool: self._on_pool(pool) for pool in dict.fromkeys(pools)}

    def _on_pool(self, pool: str) -> Verdict:
        causes = [cause for cause in self.causes if cause.pool == pool]
        engines = [engine for engine in self.engines if engine.pool == pool]
        stages = [engine.stage for engine in engines if engine.stage is not None]
        stage = max(
            stages,
            key=lambda stage: (stage.severity or OK, stage.level),
            default=UNKNOWN_STAGE,
        )
        severity = max([stage.severity or OK, *(cause.severity for cause in causes)])
        unseen = self.partial or not engines or all(each.health == "unknown" for each in engines)
        return replace(
            self.as_target(target_of(pool)),
            model=engines[0].model if engines else "",
            health="unknown" if unseen and severity < WARNING else severity.word,
            stage=stage,
            causes=causes,
            recommendations=[row for row in self.advice if row.pool == pool],
            values=_measured(engines),
            unknown=self.warnings,
        )

    def as_target(self, name: str) -> Verdict:
        """A verdict without a problem on the target `name` of this fleet."""
        return Verdict(
            t_s=self.t_s,
            target=name,
            health="ok",
            stage=staged(0, self.t_s, OK, None, ()),
            window_s=self.window_s,
            judged_against="its peers",
        )

    def _worst_stage(self, pool: str, tier: str | None, causes: Sequence[FleetCause]) -> Stage:
        """The worst stage among the tier's engines, ignoring engines with a reported cause."""
        explained = {name for c in causes if c.severity >= WARNING for name in c.replicas}
        stages = [
            (engine.stage.severity or OK, engine.stage.level, engine.name, engine.stage.name)
            for engine in self.engines
            if engine.stage is not None
            and (engine.pool, engine.tier) == (pool, tier)
            and engine.name not in explained
        ]
        severity, number, name, words = max(
            stages, key=lambda row: row[:2], default=(OK, 0, "", "")
        )
        if not number:
            return staged(0, self.t_s, OK, None, ())
        # A snapshot has no history: the receiver's alert state keeps when a stage began.
        return staged(number, self.t_s, severity, None, (f"{name}: {words}",))


# --- From what the fleet is judged by -------------------------------------------------------------


def documented(cause: FleetCause) -> FleetCause:
    return replace(told(cause).rounded(), tier=cause.tier or None)


def tier_verdict(
    tier: Tier, size: TierSize, server: Server, spread_over: Iterable[str]
) -> TierVerdict:
    """A tier with the spreads of these signals over its engines."""
    peak = size.peak
    if peak is not None:
        figures = ("requests", "mean_requests", "seen_ratio")
        peak = replace(peak, **{name: rounded(getattr(peak, name)) for name in figures})
    return TierVerdict(
        pool=tier.pool,
        tier=tier.tier or None,
        role=tier.role or None,
        model=tier.engines[0].member.model,
        size=replace(
            size,
            peak=peak,
            advice=None,
            used_ratio=rounded(size.used_ratio),
            usd_per_hour=rounded(size.usd_per_hour),
        ),
        replicas=tier.replicas,
        engines=len(tier.engines),
        signals={
            signal: row
            for signal in spread_over
            if (row := spread(signal, tier.engines)) is not None
        },
        server=server,
    )


def target_of(pool: str, replica: str = "") -> str:
    """The name of a pool, or of one of its replicas, as a target."""
    return f"{IN_FLEET}{pool}/{replica}" if replica else f"{IN_FLEET}{pool}"


def _measured(engines: Sequence[EngineVerdict]) -> dict[str, float | None]:
    """The signals of POOL_SIGNALS over these engines; None for those that no engine has."""
    measured: dict[str, float | None] = {}
    for signal, fold in POOL_SIGNALS.items():
        values = [engine.values[signal] for engine in engines if signal in engine.values]
        measured[signal] = fold(values) if values else None
    return measured


def spread(signal: str, engines: Sequence[Engine]) -> Spread | None:
    """A signal's distribution over the engines; None if no engine has a value."""
    rows = [(e.values[signal], e.member.name) for e in engines if signal in e.values]
    if not rows:
        return None
    numbers = [value for value, _ in rows]
    _, worst = min(rows) if signal in LESS_IS_WORSE else max(rows)
    percentiles = PERCENTILE.search(signal)
    return Spread(
        len(rows),
        len(engines) - len(rows),
        min(numbers),
        median_high(numbers) if percentiles else median(numbers),
        None if percentiles else fmean(numbers),
        max(numbers),
        worst,
    )


def engine_verdict(engine: Engine) -> EngineVerdict:
    """An engine as documents contain it."""
    member, verdict = engine.member, engine.verdict
    return EngineVerdict(
        replica=member.replica,
        engine=member.engine or None,
        model=member.model,
        pool=member.pool,
        tier=member.tier or None,
        role=member.role or None,
        node=member.node or None,
        health=engine.health,
        stage=None if verdict is None or verdict.stage.number is None else verdict.stage,
        findings=engine.findings,
        causes=[cause.id for cause in engine.causes],
        values=engine.values,
    )
