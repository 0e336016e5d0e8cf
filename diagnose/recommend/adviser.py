"""One engine's recommendations over time: made for its causes, checked, ranked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from kneewatch.diagnose.causes.evidence import Cause, Facts
from kneewatch.diagnose.causes.ranking import BY_ID
from kneewatch.diagnose.deployment.deployment import NOTHING, Deployment, Stated, deployment
from kneewatch.diagnose.deployment.vllm_flags import LARGEST
from kneewatch.diagnose.recommend import levers_kv_cache as budget
from kneewatch.diagnose.recommend import levers_kv_cache as kv
from kneewatch.diagnose.recommend import levers_kv_cache as reuse
from kneewatch.diagnose.recommend import levers_limits as features
from kneewatch.diagnose.recommend import levers_limits as load
from kneewatch.diagnose.recommend import levers_prefill as prefill
from kneewatch.diagnose.recommend import levers_replicas as fleet
from kneewatch.diagnose.recommend import levers_replicas as scale_down
from kneewatch.diagnose.recommend import levers_replicas as split
from kneewatch.diagnose.recommend import levers_speculation as spec
from kneewatch.diagnose.recommend.context import Lever, Scene
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO, demand
from kneewatch.diagnose.recommend.history import Incidents, RecommendationTracker
from kneewatch.diagnose.recommend.prediction import After, predicted
from kneewatch.diagnose.recommend.recommendation import REPLICAS, Recommendation, Value

WEAK_RATIO = 1.005
"""More KV cache than that is worth a restart; less is noise."""


def harmless(made: Recommendation, scene: Scene) -> Recommendation | None:
    """The recommendation with what it leaves undone said; None where it must not be made.

    It is not made where the running version does not know a flag, a value is in force already, or
    the same math says that a target which is met now would be missed.
    """
    server = scene.server
    for change in made.changes:
        same = change.before == change.after and change.after is not None
        if same or not server.knows(change.flag) or not _representable(change.after):
            return None
        now = server.in_force(change.flag)
        if change.after is not None and now is not None and now == change.after:
            return None
    if _misses_target(made, scene) or not _starts(made, server):
        return None
    return _with_residual(made)


def _representable(value: Value) -> bool:
    return not isinstance(value, int | float) or abs(value) <= LARGEST


def _starts(made: Recommendation, server: Deployment) -> bool:
    """Whether vLLM would start with the changes, as far as its other flags are known.

    Source: vllm/config/scheduler.py and vllm/config/lora.py of 0.32.
    """
    to = {change.flag: change.after for change in made.changes}

    def then(flag: str) -> float | None:
        value = to[flag] if flag in to else server.in_force(flag)
        return float(value) if isinstance(value, int | float) else None

    chunks = server.chunks
    if "--no-enable-chunked-prefill" in to or "--enable-chunked-prefill" in to:
        chunks = True
    budget, longest = then("--max-num-batched-tokens"), then("--max-model-len")
    rules = [
        (budget, then("--max-num-seqs")),
        (longest, then("--long-prefill-token-threshold")),
        (then("--max-cpu-loras"), then("--max-loras")),
    ]
    if chunks is False:
        rules.append((budget, longest))
    return all(most is None or least is None or most >= least for most, least in rules)


def _misses_target(made: Recommendation, scene: Scene) -> bool:
    targets = scene.facts.targets
    for key, target_s, tail in (
        ("itl_s", targets.itl_p99_s, "itl_p99_s"),
        ("ttft_s", targets.ttft_p99_s, "ttft_p99_s"),
    ):
        then_s, now_s = made.predicted.get(key), made.before.get(key)
        tail_s = scene.facts.values.get(tail)
        if target_s is None or then_s is None or not now_s or tail_s is None:
            continue
        # The tail is taken to move with the mean.
        if tail_s <= target_s < max(then_s, tail_s * then_s / now_s):
            return True
    return False


def _with_residual(made: Recommendation) -> Recommendation:
    """Says where the load still needs more KV cache than there would be."""
    demand = made.predicted.get("kv_demand_ratio")
    if demand is None or demand <= KV_TARGET_RATIO:
        return made
    left = (
        f"Not enough alone: the load would still take {demand:.1f} times the KV cache, and "
        "requests would still be preempted."
        if demand > 1
        else f"Barely enough: the load would take {100 * demand:.0f} % of the KV cache, and "
        "some requests may still be preempted."
    )
    return replace(made, summary=f"{made.summary} {left}")


# --- Which recommendation comes first: what suffices, and of that what is free --------------------


QUEUE_LIMIT = "queue-limit"
"""It refuses users: last, and never alone."""

BUDGET = "max-num-batched-tokens"
FEWER_SEATS = "max-num-seqs-down"


def suffices(made: Recommendation, scene: Scene) -> bool | None:
    """Whether the change alone ends its cause at the present load; None: nothing tells."""
    key, told = BY_ID[made.cause].enough, made.predicted
    if not key:
        return None
    if key == "waiting" and "load_ratio" in told:
        return told["load_ratio"] <= 1
    if made.id == FEWER_SEATS:
        # It moves the shortage into the queue: enough only where that wait is promised to nobody.
        target_s = scene.facts.targets.ttft_p99_s
        return target_s is not None and told.get("queue_wait_s", target_s) < target_s
    return told.get(key) == 0


def is_free(made: Recommendation) -> bool:
    """Whether it needs no more GPUs; what has no known price does."""
    return made.cost_usd_per_hour is not None and made.cost_usd_per_hour <= 0


def ordered(found: Sequence[Recommendation], scene: Scene) -> list[Recommendation]:
    """One cause's recommendations: those that suffice and are free, that suffice, then the rest.

    Where none suffices, two that do together come first. Within a rank the order stays.
    """
    made = list(found)
    known = made and made[0].cause == "kv_pressure"
    if known and not any(suffices(one, scene) for one in made):
        made[:0] = _together(made, scene)
    made.sort(key=lambda one: _rank(one, scene))
    return [] if made and made[0].id == QUEUE_LIMIT else made


def _rank(made: Recommendation, scene: Scene) -> int:
    if made.id == QUEUE_LIMIT:
        return 5
    if made.id == BUDGET and not scene.server.launch_known:
        # It may be refused at start by flags that are not known.
        return 4
    if suffices(made, scene):
        return 0 if is_free(made) else 1
    return 3


def _together(made: Sequence[Recommendation], scene: Scene) -> list[Recommendation]:
    """The first two changes that suffice together, free ones first; none where none do."""
    grow = [one for one in made if one.id == REPLICAS or _growth(one) > 1]
    capacity = scene.server.capacity_tokens
    if capacity is None:
        return []
    for one, two in sorted(combinations(grow, 2), key=lambda pair: not all(map(is_free, pair))):
        flags = [change.flag for change in (*one.changes, *two.changes)]
        if len(set(flags)) < len(flags) or "--tensor-parallel-size" in flags:
            continue
        now, total = _replicas(two if two.id == REPLICAS else one)
        after = After(
            capacity_tokens=capacity * _growth(one) * _growth(two),
            share_ratio=now / total,
            replicas=round(total) if total > now else None,
        )
        both = _joined(one, two, predicted(scene, after))
        if suffices(both, scene):
            return [both]
    return []


def _growth(made: Recommendation) -> float:
    return 1.0 if made.id == REPLICAS else made.predicted.get("kv_capacity_ratio", 1.0)


def _replicas(made: Recommendation) -> tuple[float, float]:
    if made.id != REPLICAS:
        return 1.0, 1.0
    (change,) = made.changes
    return float(change.before or 1), float(change.after or 1)


def _joined(one: Recommendation, two: Recommendation, told: dict[str, float]) -> Recommendation:
    costs = (one.cost_usd_per_hour, two.cost_usd_per_hour)
    known = [cost for cost in costs if cost is not None]
    left = told.get("kv_demand_ratio", KV_TARGET_RATIO)
    return replace(
        one,
        id=f"{one.id}+{two.id}",
        changes=(*one.changes, *two.changes),
        summary=f"Neither is enough alone; together the load takes {100 * left:.0f} % of the KV "
        "cache.",
        predicted={key: float(f"{value:.6g}") for key, value in told.items()},
        cost_usd_per_hour=sum(known) if len(known) == len(costs) else None,
        checks=(*one.checks, *two.checks),
        risk=f"{one.risk} {two.risk}".strip(),
        unknown=tuple(dict.fromkeys((*one.unknown, *two.unknown))),
        guide=tuple(dict.fromkeys((*one.guide, *two.guide))),
    )


# --- The recommendations of one engine over time: made for its causes, held while they hold -------


MOST = 5
"""Levers told for one cause."""

LARGEST_VALUE = 1e18
"""More of anything is a mistake of the page."""

MOVED = 1.25
"""A load that has moved by this much is computed anew; less would only make numbers flicker."""

SLACK = (2.0, 0.5)
"""Requests, and requests a second, that are no movement however small the load is."""

LEVERS: Mapping[str, Lever] = {
    lever.__name__: lever
    for lever in (
        budget.kv_blocks,
        budget.kv_memory_bytes,
        kv.kv_fp8,
        kv.gpu_memory_utilization,
        load.more_seqs,
        load.fewer_seqs,
        load.queue_limit,
        load.max_model_len,
        fleet.more_replicas,
        fleet.tensor_parallel,
        prefill.prefix_caching,
        prefill.chunked_prefill,
        prefill.smaller_budget,
        prefill.long_prefill_threshold,
        prefill.disaggregation,
        prefill.fp8_weights,
        reuse.prompt_order,
        reuse.sticky_routing,
        reuse.transfer_path,
        spec.shorter_draft,
        spec.no_speculation,
        features.more_adapter_slots,
        features.adapter_routing,
        features.output_cap,
        scale_down.fewer_replicas,
        split.lower_tensor_parallel,
    )
}
"""Every change that can be recommended, by the name that causes list it under (`levers`)."""


def recommend(
    facts: Facts,
    causes: Sequence[str],
    server: Deployment,
    incidents: Incidents | None = None,
    *,
    weekly_peak_requests: float | None = None,
) -> list[Recommendation]:
    """Every lever against these causes (ids) that does no harm, by cause and then best first.

    A lever that answers two causes is told for the first of them. Sizes are for the peak of each
    cause in `incidents`; fewer replicas are for `weekly_peak_requests`, and none without it.
    """
    seen = Incidents() if incidents is None else incidents
    if not sum(map(abs, filter(None, facts.values.values()))) < LARGEST_VALUE:
        # A page may say +Inf or nonsense: no number to compute with.
        plain = {
            key: value if value is not None and abs(value) < LARGEST_VALUE else None
            for key, value in facts.values.items()
        }
        facts = replace(facts, values=plain)
    wanted = demand(facts.values, server)
    told: dict[str, Recommendation] = {}
    for cause in causes:
        scene = Scene(
            cause,
            facts,
            server,
            seen.peak(cause, wanted),
            weekly_peak_requests=weekly_peak_requests,
        )
        found: list[Recommendation] = []
        for name in BY_ID[cause].levers:
            made = LEVERS[name](scene)
            made = None if made is None else harmless(made, scene)
            if made is not None and made.id not in told:
                found.append(seen.grown(made))
        told.update({made.id: made for made in ordered(found, scene)[:MOST]})
    return list(told.values())


class Adviser:
    """One engine's recommendations. What is told stays while causes and load are the same.

    `weekly_peak_requests` is for whoever has watched a week to fill in: the most requests that ran
    or waited on this engine at once. Without it no replica is advised away.
    """

    def __init__(self, stated: Stated = NOTHING) -> None:
        self.weekly_peak_requests: float | None = None
        self._stated = stated
        self._tracker = RecommendationTracker()
        self._config: Mapping[str, str] | None = None
        self._server = Deployment(stated=stated)
        self._causes: tuple[str, ...] = ()
        self._load, self._made_s = (0.0, 0.0), float("-inf")
        self._told: tuple[Recommendation, ...] = ()
        self._incidents = Incidents()
        self._restarted = False

    def restarted(self) -> None:
        """The process was replaced: the next page shows what it was started with."""
        self._restarted = True
        self._forget()

    def _forget(self) -> None:
        self._causes, self._told = (), ()
        self._incidents.keep(())

    def advise(self, facts: Facts, causes: Sequence[Cause]) -> tuple[Recommendation, ...]:
        """The recommendations for these causes at this moment."""
        if self._restarted and facts.config:
            self._tracker.restarted(facts.now_s, facts.config, before=self._config)
            self._restarted = False
        named = tuple([cause.id for cause in causes if BY_ID[cause.id].levers])
        if "prefix_churn" in named and not _churn_holds(facts, causes):
            named = tuple([cause for cause in named if cause != "prefix_churn"])
        if not named:
            if self._causes:
                self._forget()
            return ()
        load_now = _load_of(facts)
        fresh = facts.now_s - self._made_s < facts.window_s
        same = named == self._causes and facts.config == self._config
        if same and fresh and not _moved(self._load, load_now):
            return self._told
        if facts.config != self._config:
            self._config = dict(facts.config)
            self._server = deployment(facts.config, self._stated)
        self._causes, self._load, self._made_s = named, load_now, facts.now_s
        self._incidents.keep(named)
        made = recommend(
            facts,
            named,
            self._server,
            self._incidents,
            weekly_peak_requests=self.weekly_peak_requests,
        )
        running = facts.values.get("running_max") or 0.0
        allowed = self._tracker.allowed(facts.now_s, made, requests=load_now[0], running=running)
        told = tuple(_with_others(allowed))
        self._tracker.advised(facts.now_s, told, requests=load_now[0])
        self._told = told
        return told


def _with_others(made: Sequence[Recommendation]) -> list[Recommendation]:
    """Without a queue limit that is all that is told against its cause."""
    others = {one.cause for one in made if one.id != QUEUE_LIMIT}
    return [one for one in made if one.id != QUEUE_LIMIT or one.cause in others]


def _churn_holds(facts: Facts, causes: Sequence[Cause]) -> bool:
    """Whether more KV would help: not where prompts no longer share prefixes, nor at a dip."""
    if any(cause.id == "prefix_reuse_lost" for cause in causes):
        return False
    churn = next(cause for cause in causes if cause.id == "prefix_churn")
    return not facts.now_s - churn.since_s < facts.window_s


def _load_of(facts: Facts) -> tuple[float, float]:
    """What decides whether the numbers are computed anew: requests wanted, requests served."""
    values = facts.values
    wanted = (values.get("running_avg") or 0.0) + (values.get("waiting_avg") or 0.0)
    return wanted, values.get("completed_per_s") or 0.0


def _moved(was: tuple[float, float], now: tuple[float, float]) -> bool:
    return any(
        abs(after - before) > slack and not before / MOVED <= after <= before * MOVED
        for before, after, slack in zip(was, now, SLACK, strict=True)
    )
