"""The diagnosis of a fleet: causes, sizes and recommendations. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kneewatch.diagnose.causes.ranking import CAUSES, explained_by, with_explained
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.server_facts import ServerFacts
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.fleet.absence import absence_causes, absence_notes
from kneewatch.diagnose.fleet.engine_state import LEFT_OUT, Engine, coverage, engines_of
from kneewatch.diagnose.fleet.inventory import Group, Observed
from kneewatch.diagnose.fleet.outliers import bad_nodes, cold_replicas, replica_imbalance, underused
from kneewatch.diagnose.fleet.replica_count import (
    Split,
    TierSize,
    average_engine,
    server_of,
    sizes_of,
    splits_of,
    tier_facts,
)
from kneewatch.diagnose.fleet.routers import router_faults
from kneewatch.diagnose.fleet.routing import mixed_tiers, reuse_possible, routing_dilution
from kneewatch.diagnose.fleet.tensor_parallel import split_notes, tp_overhead
from kneewatch.diagnose.fleet.tier import FleetCause, Tier, engine_causes, middle, spread
from kneewatch.diagnose.fleet.workload_drift import unprofiled, workload_drift
from kneewatch.diagnose.recommend.context import SETTLE_WORDS
from kneewatch.diagnose.recommend.levers_kv_cache import sticky_routing
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity


@dataclass(frozen=True, slots=True)
class FleetAdvice:
    """A recommendation, and the pool and tier that it is for."""

    made: Recommendation
    pool: str
    tier: str


def advice_of(
    tiers: Sequence[Tier],
    sizes: Sequence[TierSize],
    causes: Sequence[FleetCause],
    splits: Sequence[Split],
    stated: Stated,
    targets: Targets,
) -> list[FleetAdvice]:
    """All recommended changes: the most urgent first, those that save money last."""
    resizes = [
        FleetAdvice(size.advice, size.tier.pool, size.tier.tier)
        for size in sizes
        if size.advice is not None
    ]
    more = [advice for advice in resizes if advice.made.id != "fewer-replicas"]
    routing = [
        advice
        for tier in tiers
        if any(_dilutes(cause, tier) for cause in causes)
        and (advice := _routing(tier, stated, targets)) is not None
    ]
    splitting = [advice for split in splits if (advice := _resplit(split)) is not None]
    return [*more, *routing, *splitting, *(advice for advice in resizes if advice not in more)]


def _dilutes(cause: FleetCause, tier: Tier) -> bool:
    return (cause.cause.id, cause.pool, cause.tier) == ("routing_dilution", tier.pool, tier.tier)


def _routing(tier: Tier, stated: Stated, targets: Targets) -> FleetAdvice | None:
    """Prefix-aware routing, with the hit ratio that it would reach; None where it would not
    help."""
    context = average_engine(tier, server_of(tier, stated), targets, "routing_dilution", peak=None)
    sticky, possible = sticky_routing(context), middle(map(reuse_possible, tier.engines))
    hits = context.facts.values.get("prefix_hit_ratio")
    if sticky is None or possible is None or hits is None or not hits < possible:
        return None
    computed = context.get("computed_prompt_tokens_per_s")
    still_computed = (1 - possible) / (1 - hits)
    advice = replace(
        sticky,
        before={**sticky.before, "computed_prompt_tokens_per_s": computed},
        predicted={
            "prefix_hit_ratio": possible,
            "computed_prompt_tokens_per_s": computed * still_computed,
        },
        verify=(
            f"prefix_hit_ratio rises from {hits:.2f} towards {possible:.2f} on every replica "
            f"{SETTLE_WORDS}, and running stays even across replicas",
        ),
    )
    return FleetAdvice(advice, tier.pool, tier.tier)


def _resplit(split: Split) -> FleetAdvice | None:
    """The split of the same replicas into prefill and decode that fits the measured work: guide
    6.5."""
    if not split.uneven:
        return None
    now, to, total = split.prefill, split.prefill_needed, split.prefill + split.decode
    used, after = split.used, (split.prefill_work / to, split.decode_work / (total - to))
    recommendation = Recommendation(
        id="pd-ratio",
        cause="",
        changes=(
            Change("prefill replicas", now, to),
            Change("decode replicas", split.decode, total - to),
        ),
        summary=f"Prefill replicas are {used[0]:.0%} used, decode replicas {used[1]:.0%}: the "
        f"load needs {split.needed}, the replicas are {now}:{split.decode}.",
        before={"prefill_used_ratio": used[0], "decode_used_ratio": used[1]},
        predicted={"prefill_used_ratio": after[0], "decode_used_ratio": after[1]},
        cost_usd_per_hour=0.0,
        checks=("confirm that this hour's mix of prompts and answers is typical",),
        risk="A replica that changes its role starts with an empty cache.",
        verify=(f"queue_mean_s falls on the fuller side {SETTLE_WORDS}, and ITL meets its target",),
        guide=("6.5",),
    )
    return FleetAdvice(recommendation, split.pool, split.tier)


# --- Diagnosis ------------------------------------------------------------------------------------

SPREAD_OVER = (
    "running",
    "waiting",
    "kv_usage_ratio",
    "preemption_ratio_per_s",
    "arrival_per_s",
    "generation_tokens_per_s",
    "prefix_hit_ratio",
    "ttft_p99_s",
    "itl_p99_s",
)


FLEET_CAUSES = tuple(record.id for record in CAUSES if record.fleet)
"""Ids of all causes that compare replicas or concern a fleet."""


@dataclass(frozen=True, slots=True)
class FleetDiagnosis:
    """The verdict on a fleet: causes by rank, engines worst first.

    `lost` says since when and why there is no newer answer, empty if this one is current. `notes`
    list what could not be judged and why. `sizes` and `servers` (what
    is known about each tier's servers) are in the order of `tiers`; `splits` are of
    tiers with separate prefill and decode replicas.
    """

    observed: Observed
    tiers: tuple[Tier, ...]
    engines: tuple[Engine, ...]
    causes: tuple[FleetCause, ...]
    notes: tuple[str, ...]
    sizes: tuple[TierSize, ...]
    servers: tuple[ServerFacts, ...]
    advice: tuple[FleetAdvice, ...]
    splits: tuple[Split, ...] = ()
    lost: str = ""

    @property
    def severity(self) -> Severity:
        """The worst of causes and engines."""
        severities = [
            *(cause.cause.severity for cause in self.causes),
            *(engine.severity for engine in self.engines),
        ]
        return max(severities, default=Severity.OK)

    @property
    def partial(self) -> bool:
        """Whether some of the answer is missing, so that the fleet cannot be called ok."""
        return bool(self.observed.warnings or self.observed.failed)

    @property
    def health(self) -> str:
        """ok, info, warning, critical or unknown. Unknown where an engine cannot be read, the
        answer is partial or outdated."""
        if self.lost:
            return "unknown"
        blind = self.partial or any(engine.health == "unknown" for engine in self.engines)
        if (blind or not self.engines) and self.severity < Severity.WARNING:
            return "unknown"
        return self.severity.word


def diagnose(observed: Observed, profile: Profile) -> FleetDiagnosis:
    """The verdict on a fleet."""
    covered = coverage(profile, observed.recorded)
    engines = engines_of(observed, profile, covered)
    tiers = tiers_of(engines)
    causes = absence_causes(observed)
    causes += router_faults(observed.routers, engines)
    for tier in tiers:
        diluted = routing_dilution(tier, observed.past, profile.targets)
        causes += [diluted] if diluted else []
        per_tier = (replica_imbalance, cold_replicas, underused)
        causes += [cause for examine in per_tier if (cause := examine(tier)) is not None]
        causes += bad_nodes(tier)
        causes += engine_causes(tier)
        drifted = workload_drift(tier, observed.past, profile.stated, tiers)
        causes += [drifted] if drifted else []
    causes += tp_overhead(tiers, profile)
    for pool, role in sorted({(tier.pool, tier.role) for tier in tiers}):
        mixed = mixed_tiers([tier for tier in tiers if (tier.pool, tier.role) == (pool, role)])
        causes += [mixed] if mixed else []
    ranked = sorted(
        folded(causes), key=lambda c: (-c.cause.severity, -c.cause.confidence, c.cause.id)
    )
    worst = sorted(engines, key=lambda e: (-e.severity, -(e.stage or 0), e.member.name))
    notes = _notes(observed, engines, covered.left_out)
    notes += split_notes(tiers, profile)
    notes += unprofiled(tiers, profile.stated)
    stated, targets = profile.stated, profile.targets
    servers = [tier_facts(tier, stated, t_s=observed.t_s)[0] for tier in tiers]
    notes += [
        f"{tier.name}: {note}"
        for tier, server in zip(tiers, servers, strict=True)
        for note in server.notes
    ]
    blind = bool(observed.warnings or observed.failed)
    sizes = sizes_of(tiers, observed, ranked, stated, targets, blind=blind)
    splits = splits_of(tiers, stated, targets)
    advice = () if blind else advice_of(tiers, sizes, ranked, splits, stated, targets)
    return FleetDiagnosis(
        observed,
        tuple(tiers),
        tuple(worst),
        tuple(ranked),
        tuple(notes),
        tuple(sizes),
        tuple(servers),
        tuple(advice),
        tuple(splits),
    )


def folded(causes: Sequence[FleetCause]) -> list[FleetCause]:
    """The causes without those that another one of the same tier explains on all of their replicas;
    that one is as severe as the worst that it explains."""
    under = {id(cause): _under(cause, causes) for cause in causes}
    explained = {id(other) for others in under.values() for other in others}
    return [
        replace(head, cause=with_explained(head.cause, [c.cause for c in under[id(head)]]))
        for head in causes
        if id(head) not in explained
    ]


def _under(head: FleetCause, causes: Sequence[FleetCause]) -> list[FleetCause]:
    follows, replicas = explained_by(head.cause), set(head.replicas)
    return [
        other
        for other in causes
        if other.cause.id in follows
        and (other.pool, other.tier) == (head.pool, head.tier)
        and replicas.issuperset(other.replicas)
    ]


def tiers_of(engines: Sequence[Engine]) -> list[Tier]:
    """The tiers of each pool; engines of different tiers are never compared or averaged."""
    groups: dict[Group, list[Engine]] = {}
    for engine in engines:
        groups.setdefault(engine.member.group, []).append(engine)
    return [
        Tier(
            pool,
            name,
            role,
            tuple(members),
            tuple(row for key in SPREAD_OVER if (row := spread(key, members)) is not None),
        )
        for (pool, name, role), members in sorted(groups.items())
    ]


def _notes(observed: Observed, engines: Sequence[Engine], unjudged: Mapping[str, str]) -> list[str]:
    notes = [f"{key}: {why}" for key, why in sorted(observed.failed.items())]
    if observed.past.missing:
        notes.append(f"past load and lengths (for sizes and drift): {observed.past.missing}")
    blind = [engine.member.name for engine in engines if engine.stage is None]
    if blind:
        notes.append(
            f"{len(blind)} engine{'s have' if len(blind) > 1 else ' has'} no KV usage or no rate "
            f"in the window (new, stale, or scraped too rarely): {', '.join(blind[:3])}"
        )
    notes += absence_notes(observed)
    if not any(engine.member.tier for engine in engines):
        notes.append("tier: unknown, no label and no DCGM series names the replicas' GPUs")
    if not observed.gpus:
        notes.append("gpu_*: no DCGM series match the replicas")
    if not observed.recorded:
        notes.append(
            "stage 4 needs history: load the recording rules (kneewatch export prometheus-rules)"
        )
    by_reason: dict[str, list[str]] = {}
    for name, reason in (*unjudged.items(), *LEFT_OUT.items()):
        by_reason.setdefault(reason, []).append(name)
    notes += [f"not judged ({reason}): {', '.join(names)}" for reason, names in by_reason.items()]
    return notes
