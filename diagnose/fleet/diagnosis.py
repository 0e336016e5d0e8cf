"""Judges a fleet: causes, tier sizes and recommendations. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from msgspec.structs import asdict, replace

from kneewatch.diagnose.capacity import ALIKE, FAR_BELOW
from kneewatch.diagnose.causes.evidence import Case
from kneewatch.diagnose.causes.tensor_parallel import split_case, weigh_live
from kneewatch.diagnose.deployment.deployment import stated_of
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import CauseTracker
from kneewatch.diagnose.fleet.absence import (
    OF_A_POOL,
    absence_causes,
    absence_notes,
)
from kneewatch.diagnose.fleet.inventory import Group, Observed, Past
from kneewatch.diagnose.fleet.outliers import bad_nodes, cold_replicas, replica_imbalance, underused
from kneewatch.diagnose.fleet.replica_count import (
    average_engine,
    server_of,
    sizes_of,
    splits_of,
    tier_facts,
)
from kneewatch.diagnose.fleet.routers import router_faults
from kneewatch.diagnose.fleet.routing import mixed_tiers, reuse_possible, routing_dilution
from kneewatch.diagnose.fleet.tier import (
    Engine,
    FleetCause,
    Tier,
    closed,
    engine_causes,
    engines_of,
    middle,
)
from kneewatch.diagnose.fleet.verdict import (
    FleetAdvice,
    FleetVerdict,
    GoneReplica,
    Split,
    TierSize,
    documented,
    engine_verdict,
    tier_verdict,
)
from kneewatch.diagnose.fleet.workload_drift import unprofiled, workload_drift
from kneewatch.diagnose.ranking import (
    BY_ID,
    CAUSES,
    ENGINE_RESTARTED,
    WAITS_FOR,
    explained_by,
    is_under,
    with_explained,
)
from kneewatch.diagnose.recommend.advice import Advice, FlagChange, in_document
from kneewatch.diagnose.recommend.context import SETTLE_WORDS
from kneewatch.diagnose.recommend.ledger import order, subject
from kneewatch.diagnose.recommend.levers_kv_cache import sticky_routing
from kneewatch.diagnose.recommend.past_advice import HeldAdvice
from kneewatch.rules.formatting import percent, plural, span
from kneewatch.rules.rule import DAY_S, OK, WARNING, Severity, is_queued
from kneewatch.rules.wire import rounded, to_ms

# --- What tensor parallelism costs: guide 5.1, 8.2 ------------------------------------------------
#
# Tokens/s per GPU are compared with servers of the same model on fewer GPUs, or with the user's
# benchmark sweeps.

Kind: TypeAlias = tuple[str, str, str]


def tp_overhead(tiers: Sequence[Tier], profile: Profile) -> list[FleetCause]:
    """A cause for each group of servers that have far less throughput per GPU than a smaller split.

    The group is compared with servers of the same model on fewer GPUs. If there are none, it is
    compared with the stated sweeps for fewer GPUs.
    """
    causes: list[FleetCause] = []
    groups = [group for tier in tiers for group in _saturated_by_gpus(tier)]
    compared = set[tuple[Kind, int]]()
    for gpus, wide in groups:
        narrow = [
            (fewer, group)
            for fewer, group in groups
            if fewer < gpus and _kind(group) == _kind(wide) and _are_alike(group, wide)
        ]
        best = max(narrow, key=lambda group: _tokens_per_gpu(*group), default=None)
        if best is None:
            continue
        compared.add((_kind(wide), gpus))
        if (cause := _by_peers(gpus, wide, *best)) is not None:
            causes.append(cause)
    stated = stated_of(profile.stated)
    if stated.sweeps and not several_kinds(tiers):
        causes += [
            cause
            for tier in tiers
            for degree, engines in degrees_of(tier, stated.degree).items()
            if (_kind(tier), degree) not in compared
            and (cause := _by_sweeps(tier, degree, engines, profile)) is not None
        ]
    return causes


def split_notes(tiers: Sequence[Tier], profile: Profile) -> list[str]:
    """A line for each server to which the stated sweeps cannot be applied, with the reason."""
    stated = stated_of(profile.stated)
    if not stated.sweeps:
        return []
    if several_kinds(tiers):
        return [
            "benchmark.by_tensor_parallel: several models or GPU types are served; select one "
            "(--selector)"
        ]
    degrees = {d for tier in tiers for d in degrees_of(tier, stated.degree)}
    if not degrees:
        return ["benchmark.by_tensor_parallel: number of GPUs unknown (set --tensor-parallel)"]
    whys = [stated.split_at(degree, profile.targets).why for degree in sorted(degrees)]
    return [f"tp_overhead: {why}" for why in whys if why]


def several_kinds(tiers: Sequence[Tier]) -> bool:
    """Whether the fleet serves several models or GPU types. Benchmark sweeps then apply to no
    tier."""
    return len({_kind(tier)[:2] for tier in tiers}) > 1


def degrees_of(tier: Tier, stated: int | None) -> dict[int, list[Engine]]:
    """The engines of a decoding tier by tensor-parallel degree.

    The degree is the stated one, otherwise the engine's number of GPUs.
    """
    by_degree: dict[int, list[Engine]] = {}
    engines_each = tier.engines_each
    for engine in tier.engines if tier.role != "prefill" else ():
        gpus = (engine.gpus.get("gpus") or 0.0) / engines_each if engines_each else 0.0
        degree = stated or (int(gpus) if gpus == int(gpus) else 0)
        if degree:
            by_degree.setdefault(degree, []).append(engine)
    return by_degree


def _by_sweeps(
    tier: Tier, degree: int, engines: Sequence[Engine], profile: Profile
) -> FleetCause | None:
    split = stated_of(profile.stated).split_at(degree, profile.targets)
    case = split_case(split)
    if case is None:
        return None
    queued = [engine for engine in engines if _saturated(engine)]
    weigh_live(
        case,
        split,
        tokens_per_s=middle(engine.get("generation_tokens_per_s") for engine in queued),
        tokens_per_request=middle(engine.get("output_tokens_mean") for engine in queued),
        queued=bool(queued),
    )
    return closed(case, tier.pool, tier.tier, engines)


def _saturated_by_gpus(tier: Tier) -> Iterator[tuple[int, Tier]]:
    """Yields the tier's saturated servers with so many GPUs each.

    Data-parallel engines are left out, because the number of GPUs of each is unknown.
    """
    by_gpus: dict[int, list[Engine]] = {}
    for engine in tier.engines:
        gpus = engine.gpus.get("gpus")
        if gpus and gpus == int(gpus) and not engine.member.engine and _saturated(engine):
            by_gpus.setdefault(int(gpus), []).append(engine)
    for gpus, engines in sorted(by_gpus.items()):
        group = replace(tier, engines=tuple(engines), medians={})
        if group.median("generation_tokens_per_s") and group.median(COMPUTED):
            yield gpus, group


COMPUTED = "computed_prompt_tokens_per_s"


def _tokens_per_gpu(gpus: int, tier: Tier) -> float:
    """Tokens/s per GPU of the median server, which has so many GPUs."""
    return (tier.median("generation_tokens_per_s") or 0.0) / gpus


def _are_alike(tier: Tier, other: Tier) -> bool:
    """Whether the median servers compute about as many prompt tokens per generated token."""
    least, most = sorted(
        (each.median(COMPUTED) or 0.0) / _tokens_per_gpu(1, each) for each in (tier, other)
    )
    return most <= ALIKE * least


def _saturated(engine: Engine) -> bool:
    return is_queued(engine.get("waiting_by_capacity"), engine.get("running") or 0.0)


def _kind(tier: Tier) -> Kind:
    """Model, GPU type and role. Only tiers for which all three are equal are compared."""
    return tier.engines[0].member.model, tier.tier, tier.role


def _by_peers(gpus: int, tier: Tier, fewer: int, others: Tier) -> FleetCause | None:
    """The cause of servers that get far fewer tokens/s per GPU than others on fewer GPUs."""
    own_per_s, others_per_s = _tokens_per_gpu(gpus, tier), _tokens_per_gpu(fewer, others)
    share, split = own_per_s / others_per_s, plural(fewer, "GPU")
    if share >= FAR_BELOW:
        return None
    case = Case(
        "tp_overhead",
        f"Replicas on {gpus} GPUs generate {own_per_s:.0f} tokens/s per GPU, replicas on {split} "
        f"{others_per_s:.0f}: {gpus} GPUs lose {percent(1 - share)}.",
        f"Serve from more replicas on {split} if their TTFT meets its target.",
        Severity.INFO,
        log_odds=-0.2,
        guide=("5.1", "8.2"),
    )
    case.weigh(
        "generation_tokens_per_s",
        share,
        FAR_BELOW,
        1.5,
        f"{percent(share)} of the tokens/s per GPU of replicas on {split}",
        below=True,
    )
    case.weigh(
        "waiting_by_capacity",
        float(len(tier.engines) + len(others.engines)),
        None,
        0.5,
        f"{len(tier.engines)} and {len(others.engines)} of them have queues: they run at capacity",
    )
    return closed(case, tier.pool, tier.tier, tier.engines)


# --- Recommendations ------------------------------------------------------------------------------


def advice_of(
    tiers: Sequence[Tier],
    sizes: Sequence[TierSize],
    causes: Sequence[FleetCause],
    splits: Sequence[Split],
    profile: Profile,
    past: Past,
    t_s: float,
) -> list[FleetAdvice]:
    """All recommended changes at `t_s` in the ledger's order: free ones first, fewer replicas last.

    Of changes that exclude each other in one tier, as replicas with different causes need them, the
    first.
    """
    launches = [advice for tier in tiers for advice in _launches(tier, causes)]
    resizes = [
        _advice(size.advice, tier.pool, tier.tier, t_s)
        for tier, size in zip(tiers, sizes, strict=True)
        if size.advice is not None
    ]
    diluted = {(cause.id, cause.pool, cause.tier) for cause in causes}
    routing = [
        advice
        for tier in tiers
        if ("routing_dilution", tier.pool, tier.tier) in diluted
        and (advice := _routing(tier, profile, past)) is not None
    ]
    splitting = [advice for split in splits if (advice := _resplit(split)) is not None]
    chosen: dict[tuple[object, ...], FleetAdvice] = {}
    for each in sorted([*launches, *resizes, *routing, *splitting], key=order):
        chosen.setdefault((each.pool, each.tier, subject(each)), each)
    return list(chosen.values())


OF_A_CAUSE = 2
"""Most changes of the launch given for one cause of a tier."""


def _launches(tier: Tier, causes: Sequence[FleetCause]) -> Iterator[FleetAdvice]:
    """Changes of the launch that a tier's replicas need by their own causes.

    Each is that of the replica that has had the cause for longest, so that it stays the same. How
    many replicas are needed, and where requests go, no replica knows.
    """
    for cause in causes:
        had = [
            (own.since_s or 0.0, engine.member.name, engine.verdict)
            for engine in tier.engines
            if (cause.pool, cause.tier) == (tier.pool, tier.tier) and engine.verdict is not None
            for own in engine.causes
            if own.id == cause.id
        ]
        if not had:
            continue
        _, _, verdict = min(had)
        own = [
            each
            for each in verdict.recommendations
            if each.cause in (cause.id, *cause.explains)
            and each.changes
            and all(change.flag.startswith("--") for change in each.changes)
        ]
        for each in own[:OF_A_CAUSE]:
            yield _advice(each, tier.pool, tier.tier, verdict.t_s)


def _advice(
    recommendation: Advice, pool: str, tier: str | None, now_s: float | None = None
) -> FleetAdvice:
    """A recommendation for a pool. If it was made at `now_s`, its figures are those of now."""
    document = in_document(recommendation)
    if document.as_of_s == now_s:
        document = replace(document, as_of_s=None)
    return FleetAdvice(**asdict(document), pool=pool, tier=tier or None)


def _routing(tier: Tier, profile: Profile, past: Past) -> FleetAdvice | None:
    """Prefix-aware routing, with the hit ratio that it would reach; None if it would not help."""
    server = server_of(tier, stated_of(profile.stated))
    context = average_engine(tier, server, profile.targets, "routing_dilution", peak=None)
    sticky = sticky_routing(context)
    usual = past.reuse_of(tier.group, profile.expected_prefix_hit_ratio)
    possible = middle(reuse_possible(engine, usual) for engine in tier.engines)
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
    return _advice(advice, tier.pool, tier.tier)


def _resplit(split: Split) -> FleetAdvice | None:
    """How to split the same replicas into prefill and decode, to fit the measured work.

    None if the present split fits. Guide 6.5.
    """
    if not split.uneven:
        return None
    now, to, total = split.prefill, split.prefill_needed, split.prefill + split.decode
    used = split.prefill_used_ratio, split.decode_used_ratio
    after = used[0] * now / to, used[1] * split.decode / (total - to)
    recommendation = Advice(
        id="pd-ratio",
        cause="",
        changes=(
            FlagChange("prefill replicas", now, to),
            FlagChange("decode replicas", split.decode, total - to),
        ),
        summary=f"Prefill replicas are {percent(used[0])} used, decode replicas "
        f"{percent(used[1])}: the load needs {split.needed}, the "
        f"replicas are {now}:{split.decode}.",
        before={"prefill_used_ratio": used[0], "decode_used_ratio": used[1]},
        predicted={"prefill_used_ratio": after[0], "decode_used_ratio": after[1]},
        cost_usd_per_hour=0.0,
        checks=("confirm that this hour's mix of prompts and answers is typical",),
        risk="A replica that changes its role starts with an empty cache.",
        verify=(f"queue_mean_s falls on the fuller side {SETTLE_WORDS}, and ITL meets its target",),
        guide=("6.5",),
    )
    return _advice(recommendation, split.pool, split.tier)


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


# --- The causes that comparing replicas concludes, over time ------------------------------------

Place = tuple[str, str, str]
"""Pool and tier of a cause, and its replica if each replica has a cause of its own."""

OF_ONE_REPLICA = frozenset({"bad_node"})

SHOWN_BY_REPLICAS = frozenset({"bad_node", "routing_dilution"})
"""Causes that replicas report in part by themselves, as slow steps or lost hits: such a cause
begins without an onset time where they do, and stays as long as they do."""

EFFECTS_S = 180.0
"""Longest time for which such a cause stays after it was last concluded."""


class Comparisons:
    """Applies the onset and clear times of causes to those that compare replicas.

    `scale` is the short window divided by its default; the times are multiplied by it. `incidents`
    has what is recommended for each tier with a problem.
    """

    def __init__(self, *, scale: float) -> None:
        self._scale = scale
        self._trackers: dict[Place, CauseTracker[FleetCause]] = {}
        self._concluded_s: dict[tuple[Place, str], float] = {}
        self._is_first = True
        self.incidents: dict[Group, HeldAdvice] = {}

    def update(
        self,
        t_s: float,
        concluded: Sequence[FleetCause],
        engines: Sequence[Engine] = (),
    ) -> list[FleetCause]:
        """The causes to report at `t_s`, each with its start time.

        A cause that made engines queue lasts while their queue shrinks. A cause that an engine's
        own cause explains comes and goes with it. Requests that pile up on a bad node are no
        imbalance. One fault so keeps one name.
        """
        shrinking = {
            engine.member.name: engine
            for engine in engines
            if engine.get("waiting") and (engine.get("waiting_slope_per_s") or 0.0) < 0
        }
        own: dict[tuple[str, str], set[str]] = {}
        explained = set[tuple[str, str]]()
        for engine in engines:
            here = own.setdefault((engine.member.pool, engine.member.tier), set())
            here.update(cause.id for cause in engine.causes)
            explained |= {
                (engine.member.name, other)
                for cause in engine.causes
                for other in explained_by(cause)
            }
        under = [
            cause
            for cause in concluded
            if explained.issuperset((name, cause.id) for name in cause.replicas)
        ]
        reported = [cause for each in self._trackers.values() for cause in each.causes]
        bad = {name for each in reported if each.id == "bad_node" for name in each.replicas}
        concluded = [
            cause
            for cause in concluded
            if cause.id != "replica_imbalance" or not bad.issuperset(cause.replicas)
        ]
        shown = {(e.member.name, cause.id) for e in engines for cause in e.causes}
        # Queues have many causes; those that are older than the first comparison have this one.
        is_first, self._is_first = self._is_first, False
        with_effects = {
            (_place(cause), cause.id)
            for cause in (*concluded, *reported)
            if (cause.id in SHOWN_BY_REPLICAS or is_first)
            and any(
                (name, effect) in shown
                for effect in set(explained_by(cause)) - (set() if is_first else WAITS_FOR)
                for name in cause.replicas
            )
        }
        self._concluded_s |= {(_place(cause), cause.id): t_s for cause in concluded}
        lasting = list[FleetCause]()
        drained: dict[tuple[Place, str], FleetCause] = {}
        for place, tracker in self._trackers.items():
            for cause in tracker.causes:
                key = place, cause.id
                since_s = self._concluded_s[key]
                queued = [shrinking[name] for name in cause.replicas if name in shrinking]
                if since_s < t_s and key in with_effects and t_s - since_s <= EFFECTS_S:
                    lasting.append(cause)
                elif since_s < t_s and queued and cause.id in WAITS_FOR:
                    lasting.append(cause)
                    drained[key] = _drained(cause, queued, since_s)
        by_place: dict[Place, list[FleetCause]] = {}
        for cause in (*concluded, *lasting):
            if cause not in under:
                by_place.setdefault(_place(cause), []).append(cause)
        over = {(_place(cause), cause.id) for cause in under}
        reported = list(under)
        for place in {**self._trackers, **by_place}:
            tracker = self._trackers.setdefault(place, CauseTracker(scale=self._scale))
            reported += tracker.update(
                t_s,
                by_place.get(place, ()),
                [cause_id for where, cause_id in over if where == place],
                beside=own.get(place[:2], ()),
                developed=[cause_id for where, cause_id in with_effects if where == place],
            )
            if not tracker:
                del self._trackers[place]
        kept = {key: at_s for key, at_s in self._concluded_s.items() if key[0] in self._trackers}
        self._concluded_s = kept
        return [drained.get((_place(cause), cause.id), cause) for cause in reported]


def _drained(cause: FleetCause, queued: Sequence[Engine], concluded_s: float) -> FleetCause:
    """A cause of which only the queues of these engines are left, with the time to serve them."""
    waiting = sum(engine.get("waiting") or 0.0 for engine in queued)
    served_per_s = -sum(engine.get("waiting_slope_per_s") or 0.0 for engine in queued)
    left = (
        f"{plural(round(waiting), 'request')} left, served in about {span(waiting / served_per_s)}"
    )
    summary = f"{cause.summary} Its queue drains: {left}."
    return replace(cause, summary=summary, seen_s=concluded_s)


def _place(cause: FleetCause) -> Place:
    own = cause.replicas[0] if cause.id in OF_ONE_REPLICA else ""
    return cause.pool, cause.tier or "", own


FLEET_CAUSES = tuple(record.id for record in CAUSES if record.fleet)
"""Ids of all causes that compare replicas or are about a whole fleet."""


def diagnose(
    observed: Observed, profile: Profile, comparisons: Comparisons | None = None
) -> FleetVerdict:
    """The verdict on a fleet.

    `comparisons` are the causes of earlier verdicts on it; without them, what is concluded now is
    reported at once.
    """
    engines = engines_of(observed)
    tiers = tiers_of(engines)
    compared = [cause for tier in tiers for cause in _compared(tier, tiers, observed, profile)]
    compared += tp_overhead(tiers, profile)
    for pool, role in sorted({(tier.pool, tier.role) for tier in tiers}):
        mixed = mixed_tiers([tier for tier in tiers if (tier.pool, tier.role) == (pool, role)])
        compared += [mixed] if mixed else []
    if comparisons is not None:
        compared = comparisons.update(observed.t_s, compared, engines)
    # What replicas show together says more than what each says for itself.
    together = {(cause.id, cause.pool, cause.tier) for cause in compared}
    causes = [
        *absence_causes(observed),
        *router_faults(observed.routers, engines),
        *compared,
        *(
            cause
            for tier in tiers
            for cause in engine_causes(tier, observed.t_s)
            if (cause.id, cause.pool, cause.tier) not in together
            and cause.id != ENGINE_RESTARTED  # judged for the pool, with those that are down
        ),
    ]
    causes = [_or_by_design(cause, observed.t_s) for cause in causes]
    ranked = sorted(folded(causes), key=lambda c: (-c.severity, -c.confidence, c.id))
    worst = sorted(engines, key=lambda e: (-e.severity, -(e.stage or 0), e.member.name))
    notes = _notes(observed, engines)
    notes += split_notes(tiers, profile)
    stated, targets = stated_of(profile.stated), profile.targets
    notes += unprofiled(tiers, stated)
    servers = [tier_facts(tier, stated, t_s=observed.t_s)[0] for tier in tiers]
    notes += [
        f"{tier.name}: {note}"
        for tier, server in zip(tiers, servers, strict=True)
        for note in server.notes
    ]
    blind = bool(observed.warnings or observed.failed)
    severity = max([c.severity for c in ranked] + [e.severity for e in worst[:1]], default=OK)
    unseen = blind or not engines or any(engine.health == "unknown" for engine in engines)
    incidents = {} if comparisons is None else comparisons.incidents
    sizes = sizes_of(tiers, observed, ranked, stated, targets, incidents, blind=blind)
    splits = splits_of(tiers, stated, targets)
    advice = (
        ()
        if blind
        else advice_of(tiers, sizes, ranked, splits, profile, observed.past, observed.t_s)
    )
    return FleetVerdict(
        t_s=to_ms(observed.t_s),
        source=observed.source,
        window_s=observed.window_s,
        scrape_interval_s=rounded(observed.scrape_interval_s),
        health="unknown" if unseen and severity < WARNING else severity.word,
        partial=blind,
        clock_skew_s=observed.skew_s,
        replicas=len({engine.member.replica for engine in engines}),
        engine_count=len(engines),
        tiers=[
            tier_verdict(tier, size, server.at(observed.t_s), SPREAD_OVER)
            for tier, size, server in zip(tiers, sizes, servers, strict=True)
        ],
        causes=[documented(cause) for cause in ranked],
        advice=advice,
        splits=splits,
        engines=[engine_verdict(engine) for engine in worst],
        gone=[GoneReplica(row.replica, row.pool, row.down) for row in observed.gone],
        raw=sorted(set[str]().union(*[engine.values for engine in engines])),
        warnings=observed.warnings,
        notes=notes,
        load=replace(observed.load, seconds=round(observed.load.seconds, 3)),
        failed=observed.failed,
    )


def _or_by_design(cause: FleetCause, t_s: float) -> FleetCause:
    """The cause; if it is a queue that has lasted for a day, with the setting for queues that are
    intended."""
    if not BY_ID[cause.id].queues or t_s - (cause.since_s or t_s) < DAY_S:
        return cause
    hint = "If this queue is intended (batch work), name the pool in fleet.throughput_pools."
    return replace(cause, lever=f"{cause.lever} {hint}")


def _compared(
    tier: Tier, tiers: Sequence[Tier], observed: Observed, profile: Profile
) -> list[FleetCause]:
    """The causes that comparing the replicas of a tier, or its requests with the past,
    concludes."""
    causes = [
        routing_dilution(
            tier,
            observed.past,
            profile.targets,
            expected=profile.expected_prefix_hit_ratio,
        ),
        *(examine(tier) for examine in (replica_imbalance, cold_replicas, underused)),
        *bad_nodes(tier),
        workload_drift(tier, observed.past, stated_of(profile.stated), tiers),
    ]
    return [cause for cause in causes if cause is not None]


def folded(causes: Sequence[FleetCause]) -> list[FleetCause]:
    """The causes, without those that another cause explains.

    The explaining cause must cover all replicas of the explained one, in the same tier, together
    with those of its id (each slow engine has its own), or have taken replicas from the pool before
    the explained one began. It takes the worst severity of the
    causes that it explains.
    """
    under = {id(cause): _under(cause, causes) for cause in causes}
    explained = {id(other) for others in under.values() for other in others}
    return [with_explained(head, under[id(head)]) for head in causes if id(head) not in explained]


def _under(head: FleetCause, causes: Sequence[FleetCause]) -> list[FleetCause]:
    place = head.id, head.pool, head.tier
    alike = (each for each in causes if (each.id, each.pool, each.tier) == place)
    replicas = set(head.replicas).union(*(each.replicas for each in alike))
    return [
        other
        for other in causes
        if (
            is_under(other, head)
            and (other.pool, other.tier) == (head.pool, head.tier)
            and replicas.issuperset(other.replicas)
            and not set(head.replicas).isdisjoint(other.replicas)
        )
        or _is_of_loss(other, head)
    ]


def _is_of_loss(queue: FleetCause, loss: FleetCause) -> bool:
    """Whether requests queue since a pool lost replicas."""
    return (
        loss.id in (OF_A_POOL, ENGINE_RESTARTED)
        and loss.severity is Severity.CRITICAL
        and BY_ID[queue.id].queues
        and queue.pool == loss.pool
        and loss.since_s is not None
        and (queue.since_s or 0.0) >= loss.since_s
    )


def tiers_of(engines: Sequence[Engine]) -> list[Tier]:
    """The tiers of each pool. Engines of different tiers are never compared or averaged."""
    groups: dict[Group, list[Engine]] = {}
    for engine in engines:
        groups.setdefault(engine.member.group, []).append(engine)
    return [
        Tier(pool, name, role, tuple(members))
        for (pool, name, role), members in sorted(groups.items())
    ]


def _notes(observed: Observed, engines: Sequence[Engine]) -> list[str]:
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
    return notes
