"""The diagnosis of a fleet from what a metrics system said of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kneewatch.diagnose.case import Cause, Evidence
from kneewatch.diagnose.causes import CAUSES
from kneewatch.diagnose.causes.observer import TARGET_DOWN
from kneewatch.diagnose.fleet.advice import FleetAdvice, advice_of
from kneewatch.diagnose.fleet.balance import cold_replicas, replica_imbalance, underused
from kneewatch.diagnose.fleet.judging import Engine, coverage, engines_of
from kneewatch.diagnose.fleet.nodes import bad_nodes
from kneewatch.diagnose.fleet.observed import Gone, Observed
from kneewatch.diagnose.fleet.parallelism import split_notes, tp_overhead
from kneewatch.diagnose.fleet.routing import mixed_tiers, routing_dilution
from kneewatch.diagnose.fleet.shape import Group
from kneewatch.diagnose.fleet.sizing import TierSize, sizes_of
from kneewatch.diagnose.fleet.split import Split, splits_of
from kneewatch.diagnose.fleet.spread import spread
from kneewatch.diagnose.fleet.verdict import FleetCause, Tier
from kneewatch.diagnose.fleet.workload import unprofiled, workload_drift
from kneewatch.diagnose.profile import Profile
from kneewatch.rules.model import Severity

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


OF_A_POOL = TARGET_DOWN.id
"""The cause that is told of a pool: what does not answer does not say its tier."""

FLEET_CAUSES = tuple(record.id for record in CAUSES if record.fleet)
"""Every cause across replicas."""


@dataclass(frozen=True, slots=True)
class FleetDiagnosis:
    """The verdict on a fleet: causes best first, engines worst first.

    `lost` says since when and why there is no newer answer, empty where there is none to miss.
    `notes` say what could not be judged, and what else a reader must know. `sizes` are in the order
    of `tiers`; `splits` are of those that prefill and decode apart.
    """

    observed: Observed
    tiers: tuple[Tier, ...]
    engines: tuple[Engine, ...]
    causes: tuple[FleetCause, ...]
    notes: tuple[str, ...]
    sizes: tuple[TierSize, ...]
    advice: tuple[FleetAdvice, ...]
    splits: tuple[Split, ...] = ()
    lost: str = ""

    @property
    def severity(self) -> Severity:
        """The worst of causes and engines."""
        found = [*(one.cause.severity for one in self.causes), *(e.severity for e in self.engines)]
        return max(found, default=Severity.OK)

    @property
    def partial(self) -> bool:
        """Whether some of the answer is missing: nothing that is not seen is healthy."""
        return bool(self.observed.warnings or self.observed.failed)

    @property
    def health(self) -> str:
        """One word; an engine that cannot be read and an answer that is partial are not ok. Of what
        was seen before and no more nothing is said."""
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
    causes = [*_gone(observed.gone)]
    for tier in tiers:
        alone = (routing_dilution, replica_imbalance, cold_replicas, underused)
        causes += [one for judge in alone if (one := judge(tier)) is not None]
        causes += bad_nodes(tier)
        drifted = workload_drift(tier, observed.past, profile.stated, tiers)
        causes += [drifted] if drifted else []
    causes += tp_overhead(tiers, profile)
    for pool, role in sorted({(tier.pool, tier.role) for tier in tiers}):
        mixed = mixed_tiers([tier for tier in tiers if (tier.pool, tier.role) == (pool, role)])
        causes += [mixed] if mixed else []
    ranked = sorted(causes, key=lambda c: (-c.cause.severity, -c.cause.confidence, c.cause.id))
    worst = sorted(engines, key=lambda e: (-e.severity, -(e.stage or 0), e.member.name))
    notes = _notes(observed, engines, covered.left_out)
    notes += split_notes(tiers, profile)
    notes += unprofiled(tiers, profile.stated)
    stated, targets = profile.stated, profile.targets
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
        tuple(advice),
        tuple(splits),
    )


def tiers_of(engines: Sequence[Engine]) -> list[Tier]:
    """The tiers of each pool; nothing is ever compared or averaged across them."""
    groups: dict[Group, list[Engine]] = {}
    for engine in engines:
        groups.setdefault(engine.member.group, []).append(engine)
    return [
        Tier(
            pool,
            name,
            role,
            tuple(members),
            tuple(one for key in SPREAD_OVER if (one := spread(key, members)) is not None),
        )
        for (pool, name, role), members in sorted(groups.items())
    ]


def _gone(gone: Sequence[Gone]) -> list[FleetCause]:
    """Replicas whose scrapes fail, a cause for each pool."""
    found: list[FleetCause] = []
    for pool in sorted({one.pool for one in gone if one.down}):
        down = sorted(one.replica for one in gone if one.down and one.pool == pool)
        what = "replica does not answer its" if len(down) == 1 else "replicas do not answer their"
        text = f"{len(down)} {what} scrapes: {', '.join(down[:3])}"
        cause = Cause(
            OF_A_POOL,
            0.95,
            Severity.CRITICAL,
            text + (" and others." if len(down) > 3 else "."),
            (Evidence("up", 0.0, 1.0, "Prometheus says that the scrape fails (up is 0)"),),
            (),
            (),
            "See whether the server runs and listens.",
        )
        found.append(FleetCause(cause, pool, "", tuple(down)))
    return found


def _notes(observed: Observed, engines: Sequence[Engine], unjudged: Mapping[str, str]) -> list[str]:
    notes = [f"{key}: {why}" for key, why in sorted(observed.failed.items())]
    if observed.past.missing:
        notes.append(f"the past, so replicas and drifts: {observed.past.missing}")
    blind = [engine.member.name for engine in engines if engine.stage is None]
    if blind:
        notes.append(
            f"{len(blind)} engines tell no KV usage or no rate in the window (new, stale, or "
            f"scraped too rarely for it): {', '.join(blind[:3])}"
        )
    left_out = [one.replica for one in observed.gone if not one.down]
    if left_out:
        notes.append(
            f"{len(left_out)} replicas of the last hour are no targets any more (scaled down, or "
            f"renamed): {', '.join(sorted(left_out)[:3])}"
        )
    if not any(engine.member.tier for engine in engines):
        notes.append("tier: no label and no DCGM series says what GPUs the replicas have")
    if not observed.gpus:
        notes.append("gpu_*: no DCGM series can be joined to the replicas")
    if not observed.recorded:
        notes.append(
            "stage 4 needs a past: load the recording rules (kneewatch export prometheus-rules)"
        )
    by_reason: dict[str, list[str]] = {}
    for rule, reason in unjudged.items():
        by_reason.setdefault(reason, []).append(rule)
    notes += [f"not judged ({reason}): {', '.join(rules)}" for reason, rules in by_reason.items()]
    return notes
