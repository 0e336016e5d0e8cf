"""How many replicas a tier needs, by the peak that was measured: guide 2.6, 8.3, 9.1 step 11. Pure.

The arithmetic and the guards are the sidecar's (diagnose/recommend), for the tier's average engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from kneewatch.diagnose.case import Targets
from kneewatch.diagnose.fleet.history import Peak
from kneewatch.diagnose.fleet.observed import Observed
from kneewatch.diagnose.fleet.scene import at_load, scene_of, server_of
from kneewatch.diagnose.fleet.verdict import FleetCause, Tier
from kneewatch.diagnose.recommend.deployment import Deployment, Stated
from kneewatch.diagnose.recommend.levers_fleet import more_replicas
from kneewatch.diagnose.recommend.levers_scale_down import fewer_replicas, used_ratio
from kneewatch.diagnose.recommend.recommendation import REPLICAS, Recommendation
from kneewatch.diagnose.recommend.scene import Scene
from kneewatch.diagnose.sizing.memory.guide import HEADROOM_HIGH_RATIO, HEADROOM_LOW_RATIO
from kneewatch.rules.model import Severity

MOST_OF = 0.5
"""A tier is short of replicas where half of its engines are; what fewer show is their own."""

NO_PEAK = (
    "no load of the past can be told: no series, or none whose labels say the tier "
    "(--fleet-label tier=LABEL)"
)
DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier's replicas: those there are, those that its measured peak needs (None: unknown).

    `used_ratio` is the part of the tier that the peak took; `advice` the change, None where it
    keeps its size; `why` says why it does, or cannot be judged.
    """

    tier: Tier
    present: int
    needed: int | None
    peak: Peak | None
    used_ratio: float | None
    gpus_each: int | None
    usd_per_hour: float | None
    advice: Recommendation | None = None
    why: str = ""


def _size(
    tier: Tier,
    peak: Peak | None,
    stated: Stated,
    targets: Targets,
    *,
    trouble: str,
    down: int,
    blind: bool,
) -> TierSize:
    """The size of a tier. `trouble` says what ails it, empty for nothing: then it gets no less.

    No number is told at all where some of the answer is missing (`blind`), or where replicas of
    the pool are `down`: those that answer are not all there are, and nobody is to scale to them.
    """
    server, now, engines = server_of(tier, stated), tier.replicas, tier.engines_each
    hourly, gpus = server.usd_per_hour, server.gpus
    plain = TierSize(
        tier,
        now,
        None,
        peak,
        None,
        None if gpus is None or engines is None else gpus * engines,
        None if hourly is None else hourly * len(tier.engines),
    )
    if blind or any(engine.stage is None for engine in tier.engines):
        return replace(plain, why="not all of it can be seen")
    if down:
        answers = "does" if down == 1 else "do"
        return replace(plain, why=f"{down} more of its pool {answers} not answer")
    if engines is None:
        return replace(plain, why="its replicas have unlike numbers of data-parallel engines")
    if tier.role == "prefill":
        # Its cache is a passage: what it carries is compute, which the P:D ratio weighs.
        return replace(plain, needed=now, why="prefill replicas are sized by the P:D ratio")
    if peak is None:
        return replace(plain, why=NO_PEAK)
    return _sized(plain, server, targets, peak, trouble)


def _sized(
    plain: TierSize, server: Deployment, targets: Targets, peak: Peak, trouble: str
) -> TierSize:
    tier, now = plain.tier, plain.present
    each = peak.requests / len(tier.engines)
    scene = scene_of(tier, server, targets, "underused", peak=each if peak.weekly else None)
    used = used_ratio(scene, each)
    if used is None:
        return replace(plain, why="what a replica can hold is not known")
    sized = replace(plain, used_ratio=used)
    if (more := _more(scene, tier, each)) is not None:
        told = f"{_peak_words(peak, used)}. {more.summary}"
        return replace(sized, needed=_count(more), advice=_whole(replace(more, summary=told), tier))
    if ceil(round(now * used * (1 + HEADROOM_LOW_RATIO), 6)) >= now:
        return replace(sized, needed=now, why=f"{_peak_words(peak, used)}: the size is right")
    if trouble:
        return replace(sized, needed=now, why=f"no fewer while something is wrong: {trouble}")
    if not peak.weekly:
        seen = f"{peak.seen_ratio * peak.span_s / DAY_S:.1f} days of load"
        return replace(sized, needed=now, why=f"no fewer by {seen}: a week's peak is wanted")
    if scene.demand.requests <= 0:
        return replace(sized, needed=now, why="nothing runs at this moment that ITL could tell of")
    fewer = fewer_replicas(scene)
    if fewer is None or not fewer.changes:
        of_each = " Of each engine:" if tier.engines_each != 1 else ""
        said = f".{of_each} {fewer.summary}" if fewer else ""
        why = f"{_peak_words(peak, used)}{said}"
        return replace(sized, needed=now, why=why)
    total = _count(fewer)
    told = f"{_peak_words(peak, used)}: {total} carry it with {HEADROOM_HIGH_RATIO:.0%} on top."
    return replace(sized, needed=total, advice=_whole(replace(fewer, summary=told), tier))


def _whole(made: Recommendation, tier: Tier) -> Recommendation:
    """What is said of one engine's server, in the dollars of replicas that have several."""
    engines = tier.engines_each or 1

    def dollars(told: Mapping[str, float]) -> dict[str, float]:
        times = {"usd_per_hour": engines}
        return {key: value * times.get(key, 1) for key, value in told.items()}

    cost = made.cost_usd_per_hour
    return replace(
        made,
        before=dollars(made.before),
        predicted=dollars(made.predicted),
        cost_usd_per_hour=None if cost is None else cost * engines,
    )


def _more(scene: Scene, tier: Tier, each: float) -> Recommendation | None:
    """More replicas: for the peak with the guide's headroom, for what presses now, or none."""
    found: list[Recommendation] = []
    requests = max(each, scene.demand.requests)
    capacity = scene.server.capacity_tokens
    wanted = at_load(replace(scene, cause="kv_pressure"), requests)
    if wanted.demand.tokens is not None and capacity:
        ratio = wanted.demand.tokens / capacity * (1 + HEADROOM_LOW_RATIO)
        now = tier.replicas
        if ceil(round(now * ratio, 6)) > now or _share(tier, pressed=True) >= MOST_OF:
            found += [made for made in [more_replicas(wanted)] if made is not None]
    if _share(tier, pressed=False) >= MOST_OF:
        queue = replace(scene, cause="queue_saturation")
        found += [made for made in [more_replicas(queue)] if made is not None]
    return max(found, key=_count, default=None)


def _share(tier: Tier, *, pressed: bool) -> float:
    """The share of engines that evict, else of those that only queue."""
    if pressed:
        shown = [engine for engine in tier.engines if (engine.stage or 0) >= 2]
    else:
        shown = [
            engine
            for engine in tier.engines
            if (engine.get("waiting_min") or 0.0) >= 1 and not (engine.stage or 0) >= 2
        ]
    return len(shown) / len(tier.engines)


def _count(made: Recommendation) -> int:
    return next(int(c.after or 0) for c in made.changes if c.flag == REPLICAS)


def _peak_words(peak: Peak, used: float) -> str:
    days = peak.span_s / DAY_S
    whole = "" if peak.seen_ratio >= 1 else f" ({peak.seen_ratio:.0%} of them seen)"
    return (
        f"The most in flight in {days:.3g} days{whole} was {peak.requests:.0f} requests, "
        f"{used:.0%} of what the tier holds"
    )


def _trouble(tier: Tier, causes: Iterable[FleetCause]) -> str:
    """What is wrong with a tier at warning or worse; empty where nothing is."""
    found = [
        one.cause.id
        for one in causes
        if one.cause.severity >= Severity.WARNING
        and one.pool == tier.pool
        and one.tier in ("", tier.tier)
    ]
    ill = [e.member.name for e in tier.engines if e.severity >= Severity.WARNING]
    more = f" and {len(ill) - 1} more" if len(ill) > 1 else ""
    return ", ".join([*found, *([f"{ill[0]}{more}"] if ill else [])])


def sizes_of(
    tiers: Sequence[Tier],
    observed: Observed,
    causes: Sequence[FleetCause],
    stated: Stated,
    targets: Targets,
    *,
    blind: bool,
) -> list[TierSize]:
    """The size of every tier."""
    down = Counter(one.pool for one in observed.gone if one.down)
    return [
        _size(
            tier,
            observed.past.peaks.get((tier.pool, tier.tier, tier.role)),
            stated,
            targets,
            trouble=_trouble(tier, causes),
            down=down[tier.pool],
            blind=blind,
        )
        for tier in tiers
    ]
