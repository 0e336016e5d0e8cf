"""Makes, checks and ranks one engine's recommendations over time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import floor, inf

from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import (
    ADAPTER_SLOTS,
    LONGEST_TOKENS,
    SEATS,
    STEP_TOKENS,
    TENSOR_SPLIT,
)
from kneewatch.diagnose.capacity import StatedServer
from kneewatch.diagnose.causes.availability import STALL_NOTED_S
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.deployment.deployment import NOTHING, Deployment, deployment, stated_of
from kneewatch.diagnose.deployment.vllm_flags import LARGEST
from kneewatch.diagnose.learned.knee import CurveLearner
from kneewatch.diagnose.ranking import BY_ID
from kneewatch.diagnose.recommend import (
    levers_kv_cache,
    levers_limits,
    levers_prefill,
    levers_replicas,
    levers_speculation,
)
from kneewatch.diagnose.recommend.advice import REPLICAS, Advice, FlagChange
from kneewatch.diagnose.recommend.context import KV_AHEAD, MOVED, Lever, LeverContext, shown
from kneewatch.diagnose.recommend.demand import (
    KV_TARGET_RATIO,
    QueueHistory,
    QueueTrend,
    ahead,
    demand,
)
from kneewatch.diagnose.recommend.ledger import (
    BACKLOG,
    BUDGET,
    BUDGET_UP,
    QUEUE_LIMIT,
    SEATS_UP,
    is_free,
    order,
    subject,
)
from kneewatch.diagnose.recommend.past_advice import AdviceTracker, HeldAdvice
from kneewatch.diagnose.recommend.prediction import After, predicted
from kneewatch.diagnose.recommend.serve_command import with_command
from kneewatch.diagnose.recommend.step_times import StepTimes
from kneewatch.diagnose.sizing.replica_count import SAFETY_DEFAULT
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.formatting import duration, figure, percent, stated_duration


def checked_recommendation(recommendation: Advice, context: LeverContext) -> Advice | None:
    """The recommendation, with a note if it is not sufficient; None if it must not be given.

    It is not given if the running version lacks a flag, if the value is already in force, or if the
    prediction misses a target that is met now.
    """
    server = context.server
    for change in recommendation.changes:
        same = change.before == change.after and change.after is not None
        too_large = isinstance(change.after, int | float) and abs(change.after) > LARGEST
        if same or too_large or not server.supports(change.flag):
            return None
        now = server.in_force(change.flag)
        if change.after is not None and now is not None and now == change.after:
            return None
    if _misses_target(recommendation, context) or not _starts(recommendation, server):
        return None
    return with_residual(recommendation, context)


def _starts(recommendation: Advice, server: Deployment) -> bool:
    """Whether vLLM would start with the changes, as far as the flags are known.

    What contradicts without them is known wrongly: the server runs.

    Source: vllm/config/scheduler.py and vllm/config/lora.py of 0.32.
    """
    to = {change.flag: change.after for change in recommendation.changes}

    def value_after(flag: str) -> float | None:
        value = to[flag] if flag in to else server.in_force(flag)
        return float(value) if isinstance(value, int | float) else None

    chunks = server.chunks
    if "--no-enable-chunked-prefill" in to or "--enable-chunked-prefill" in to:
        chunks = True
    rules = [
        (STEP_TOKENS, SEATS),
        (LONGEST_TOKENS, "--long-prefill-token-threshold"),
        ("--max-cpu-loras", ADAPTER_SLOTS),
    ]
    if chunks is False:
        rules.append((STEP_TOKENS, LONGEST_TOKENS))
    ends = [tuple(map(value_after, rule)) for rule in rules if not to.keys().isdisjoint(rule)]
    return all(most is None or least is None or most >= least for most, least in ends)


WORSE_RATIO = 1.25
"""A latency that grows by this ratio is named as a risk."""


def _misses_target(recommendation: Advice, context: LeverContext) -> bool:
    """Whether the change misses a target that is met now."""
    now_s = {
        "ITL": context.facts.values.get("itl_p99_s"),
        "TTFT": context.facts.values.get("ttft_p99_s"),
    }
    return any(
        (now := now_s[name]) is not None and now <= target_s < then_s
        for name, target_s, then_s in _tails(recommendation, context)
    )


def with_residual(recommendation: Advice, context: LeverContext) -> Advice:
    """Adds what the change does not mend: a load that exceeds the KV cache, and the backlog."""
    numbers = recommendation.predicted
    demand, waiting = numbers.get("kv_demand_ratio"), context.demand.waiting
    if demand is not None and demand > 1:
        need = figure(round(demand, 1 if demand >= 1.1 else 3))
        left = (
            f"Not enough alone: the load would still need {need}x the KV cache, and vLLM would "
            "still preempt requests."
        )
    elif demand is not None and demand > KV_TARGET_RATIO:
        left = (
            f"Barely enough: the load would use {percent(demand)} of the KV cache, and vLLM may "
            "still preempt some requests."
        )
    elif (
        numbers.get("preemption_per_s") == 0
        and numbers.get("kv_capacity_ratio", 1.0) > 1
        and context.demand.callers is None
        and waiting >= 1
        and context.demand.running < (context.seats or inf)
    ):
        left = BACKLOG
        recommendation = replace(recommendation, predicted={**numbers, "backlog_requests": waiting})
    else:
        left = ""
    unmet = tuple(
        f"{name} P99 target of {stated_duration(target_s)}"
        for name, target_s, then_s in _tails(recommendation, context)
        if then_s > target_s
    )
    missed = f"It does not mend the {' and the '.join(unmet)}: still missed." if unmet else ""
    worsens = tuple(_worse(recommendation))
    return replace(
        recommendation,
        summary=" ".join(filter(None, (recommendation.summary, left, missed))),
        risk=" ".join(filter(None, (recommendation.risk, _worse_words(worsens)))),
        suffices=suffices(recommendation, context),
        unmet=unmet,
        worsens=worsens,
    )


def _tails(recommendation: Advice, context: LeverContext) -> Iterator[tuple[str, float, float]]:
    """The name, the target and the predicted P99 in seconds of each latency with a target.

    Without a predicted P99, assume that it moves in proportion to the mean; it is not below it.
    """
    targets, values = context.facts.targets, context.facts.values
    for name, key, target_s, signal in (
        ("ITL", "itl_s", targets.itl_p99_s, "itl_p99_s"),
        ("TTFT", "ttft_s", targets.ttft_p99_s, "ttft_p99_s"),
    ):
        then_s, now_s = recommendation.predicted.get(key), recommendation.before.get(key)
        tail_s = values.get(signal) or 0.0
        if target_s is not None and then_s is not None and now_s:
            moved_s = recommendation.predicted.get(signal, tail_s * then_s / now_s)
            yield name, target_s, max(then_s, moved_s)


def _worse(recommendation: Advice) -> Iterator[str]:
    """The latencies that the change makes clearly worse."""
    before, then = recommendation.before, recommendation.predicted
    for name, key in (
        ("Mean ITL", "itl_s"),
        ("Mean TTFT", "ttft_s"),
        ("P99 of prefill", "prefill_p99_s"),
    ):
        if before.get(key) and then.get(key, 0.0) >= WORSE_RATIO * before[key]:
            yield f"{name} rises from {duration(before[key])} to {duration(then[key])}"


def _worse_words(worsens: tuple[str, ...]) -> str:
    return " ".join(f"{each}." for each in worsens)


def _own_risk(recommendation: Advice) -> str:
    """The risk without the latencies that the change alone makes worse."""
    return recommendation.risk.removesuffix(_worse_words(recommendation.worsens)).strip()


# --- Ranking: what suffices -----------------------------------------------------------------------


FEWER_SEATS = "max-num-seqs-down"

BUDGET_ERROR, BUDGET_GAIN = 1.1, 1.2
"""Up to this load, a larger token budget with this gain may suffice: larger chunks save more than
is predicted, except where compute takes nearly the whole step."""


def suffices(recommendation: Advice, context: LeverContext) -> bool | None:
    """Whether the change alone removes its cause at the present load; None if unknown."""
    key, predicted_numbers = BY_ID[recommendation.cause].enough, recommendation.predicted
    is_unknown = recommendation.id == BUDGET and not context.server.launch_known
    if not key or is_unknown or not (recommendation.changes or predicted_numbers):
        return None
    if recommendation.id in (REPLICAS, SEATS_UP) and context.demand.repeats:
        return None
    if key == "waiting" and "load_ratio" in predicted_numbers:
        load = predicted_numbers["load_ratio"]
        if recommendation.id != BUDGET_UP:
            return load <= 1
        # A new replica comes with room for a peak, a larger budget does not.
        if load * SAFETY_DEFAULT <= 1:
            return True
        gain = predicted_numbers["prompts_served_ratio"]
        return None if load <= BUDGET_ERROR and gain >= BUDGET_GAIN else False
    if recommendation.id == FEWER_SEATS:
        # It moves the shortage into the queue: enough only where the wait stays within the target.
        target_s = context.facts.targets.ttft_p99_s
        return target_s is not None and predicted_numbers.get("queue_wait_s", target_s) < target_s
    return predicted_numbers.get(key) == 0


def ranked_recommendations(
    recommendations: Sequence[Advice], context: LeverContext
) -> list[Advice]:
    """One cause's recommendations in the ledger's order, of each subject the first.

    If no single change is sufficient, a sufficient pair comes first. The sort is stable.
    """
    ranked = list(recommendations)
    if context.for_kv and not any(each.suffices for each in ranked):
        ranked[:0] = _sufficient_pair(ranked, context)
    by_subject: dict[frozenset[str], Advice] = {}
    for each in sorted(ranked, key=order):
        by_subject.setdefault(subject(each), each)
    ranked = list(by_subject.values())
    return [] if ranked and ranked[0].id == QUEUE_LIMIT else ranked


def _sufficient_pair(recommendations: Sequence[Advice], context: LeverContext) -> list[Advice]:
    """The first pair of changes that is sufficient together, free pairs first; [] if there is
    none."""
    grow = [first for first in recommendations if first.id == REPLICAS or _growth(first) > 1]
    capacity = context.server.capacity_tokens
    if capacity is None:
        return []
    for first, second in sorted(
        combinations(grow, 2), key=lambda pair: not all(map(is_free, pair))
    ):
        changes = (*first.changes, *second.changes)
        by_flag = {change.flag: change for change in changes}
        if len(by_flag) < len(changes) or TENSOR_SPLIT in by_flag:
            continue
        added = by_flag.get(REPLICAS, FlagChange(REPLICAS, 1, 1))
        now, total = float(added.before or 1), float(added.after or 1)
        after = After(
            capacity_tokens=capacity * _growth(first) * _growth(second),
            share_ratio=now / total,
            replicas=round(total) if total > now else None,
        )
        numbers = predicted(context, after)
        steps = levers_kv_cache.kv_verify_steps(context, numbers)
        joined = replace(_joined(first, second, numbers), verify=tuple(steps))
        both = checked_recommendation(joined, context)
        if both is not None and both.suffices:
            return [both]
    return []


def _growth(recommendation: Advice) -> float:
    return recommendation.predicted.get("kv_capacity_ratio", 1.0)


def _joined(first: Advice, second: Advice, numbers: dict[str, float]) -> Advice:
    costs = (first.cost_usd_per_hour, second.cost_usd_per_hour)
    known_costs = [cost for cost in costs if cost is not None]
    left = numbers.get("kv_demand_ratio", KV_TARGET_RATIO)
    return replace(
        first,
        id=f"{first.id}+{second.id}",
        changes=(*first.changes, *second.changes),
        summary=f"Neither change is enough alone; with both the load uses {percent(left)} of the "
        "KV cache.",
        predicted=shown(numbers),
        cost_usd_per_hour=sum(known_costs) if len(known_costs) == len(costs) else None,
        checks=(*first.checks, *second.checks),
        risk=" ".join(filter(None, map(_own_risk, (first, second)))),
        unknown=tuple(dict.fromkeys((*first.unknown, *second.unknown))),
        guide=tuple(dict.fromkeys((*first.guide, *second.guide))),
    )


# --- Recommendations of one engine ----------------------------------------------------------------


MOST = 5
"""Most recommendations given for one cause."""

LARGEST_VALUE = 1e18
"""A signal value above this is an error of the metrics page."""

LEVERS: Mapping[str, Lever] = {
    lever.__name__: lever
    for lever in (
        levers_kv_cache.kv_blocks,
        levers_kv_cache.kv_memory_bytes,
        levers_kv_cache.kv_fp8,
        levers_kv_cache.gpu_memory_utilization,
        levers_kv_cache.host_cache,
        levers_limits.more_seqs,
        levers_limits.fewer_seqs,
        levers_limits.queue_limit,
        levers_limits.max_model_len,
        levers_replicas.more_replicas,
        levers_replicas.tensor_parallel,
        levers_prefill.prefix_caching,
        levers_prefill.chunked_prefill,
        levers_prefill.smaller_budget,
        levers_prefill.larger_budget,
        levers_prefill.long_prefill_threshold,
        levers_prefill.disaggregation,
        levers_prefill.quantized_weights,
        levers_kv_cache.prompt_order,
        levers_kv_cache.sticky_routing,
        levers_kv_cache.transfer_path,
        levers_speculation.shorter_draft,
        levers_speculation.no_speculation,
        levers_speculation.speculation,
        levers_limits.more_adapter_slots,
        levers_limits.adapter_routing,
        levers_limits.output_cap,
        levers_replicas.fewer_replicas,
        levers_replicas.lower_tensor_parallel,
    )
}
"""Every lever by its name; causes list these names under `levers`."""


def recommend(
    facts: Facts,
    causes: Sequence[str],
    server: Deployment,
    incidents: dict[str, HeldAdvice] | None = None,
    *,
    trend: QueueTrend | None = None,
    anew: bool = False,
    weekly_peak_requests: float | None = None,
    curve: CurveLearner | None = None,
) -> list[Advice]:
    """Recommendations against these causes (ids), in the order of the causes, best first.

    A lever that helps against two causes is listed under the first. `incidents` has what is held
    against each cause, and is brought up to date; `anew`: sizes are not held to it. Fewer replicas
    are recommended only if `weekly_peak_requests` is known.
    """
    incidents = {} if incidents is None else incidents
    if not sum(map(abs, filter(None, facts.values.values()))) < LARGEST_VALUE:
        # A page can contain +Inf or absurd values: do not compute with them.
        plain = {
            key: value if value is not None and abs(value) < LARGEST_VALUE else None
            for key, value in facts.values.items()
        }
        facts = replace(facts, values=plain)
    demand_now = demand(facts.values, server, trend)
    pinned = floor(facts.get("running_max")) if "admission_limit" in causes else None
    own_steps = None if curve is None else StepTimes.of(curve, facts.now_s)
    chosen: dict[frozenset[str], Advice] = {}
    for cause in causes:
        incident = incidents.setdefault(cause, HeldAdvice(whole_s=facts.now_s + facts.window_s))
        asked = ahead(demand_now, facts.values) if cause == KV_AHEAD else demand_now
        held, sized = {} if anew else incident.values, asked
        if incident.misjudges(asked):
            # The first size for the arrivals is held, also where their rate was measured too low.
            held, sized = {}, replace(asked, requests=asked.requests * MOVED)
        context = LeverContext(
            cause,
            facts,
            server,
            sized,
            weekly_peak_requests=weekly_peak_requests,
            curve=curve,
            own_steps=own_steps,
            held=held,
            pinned=pinned,
        )
        offered = (LEVERS[name](context) for name in BY_ID[cause].levers)
        checked = (checked_recommendation(each, context) for each in offered if each is not None)
        incident.take([each for each in checked if each is not None], asked, facts.now_s)
        others = [each for each in incident.recommendations if subject(each) not in chosen]
        ranked = ranked_recommendations(others, context)[:MOST]
        chosen.update({subject(each): each for each in ranked})
    return [with_command(each, server.stated, facts.values) for each in chosen.values()]


APART_WINDOWS = 5.0
"""A cause that is back within so many windows is of the same incident: load comes in waves."""


class Adviser:
    """The recommendations of one engine: made once per incident, and then held.

    They change, and say why, when a cause is added, or when the load asks for clearly more.

    After a week of history, the caller sets `weekly_peak_requests`: the most requests that ran or
    waited on this engine at once. Without it, fewer replicas are never recommended.
    """

    def __init__(self, stated: StatedServer = NOTHING) -> None:
        self.weekly_peak_requests: float | None = None
        self._stated = stated_of(stated)
        self._tracker = AdviceTracker()
        self._config: Mapping[str, str] | None = None
        self._server = Deployment(stated=self._stated)
        self._causes: tuple[str, ...] = ()
        self._computed_s = self._window_s = self._advised_s = float("-inf")
        self._recommendations: tuple[Advice, ...] = ()
        self._incidents: dict[str, HeldAdvice] = {}
        self._queue, self._learned = QueueHistory(), frozenset[str]()
        self._restarted = False

    def set_stated(self, stated: StatedServer) -> None:
        """From the next scrape on, make recommendations for this deployment."""
        if stated != self._stated:
            self._stated = stated_of(stated)
            self._server = deployment(self._config or {}, self._stated)
            self._forget()

    def restarted(self) -> None:
        """Note that the process restarted, so the next page shows its new flags."""
        self._restarted = True
        self._forget()

    def _forget(self) -> None:
        self._end_incidents()
        self._queue.forget()

    def _end_incidents(self) -> None:
        self._causes, self._recommendations = (), ()
        self._learned = frozenset[str]()
        self._incidents.clear()

    def advise(
        self, facts: Facts, causes: Sequence[Cause], curve: CurveLearner | None = None
    ) -> tuple[Advice, ...]:
        """The recommendations for these causes now. `curve` has the windows that this engine was
        measured in."""
        if self._restarted and facts.config:
            self._tracker.restarted(facts.now_s, facts.config, before=self._config)
            self._restarted = False
        # No token comes out: more replicas or seats would be for a load that is not served.
        stalled = facts.streaks_s.get("stalled", 0.0) >= STALL_NOTED_S
        cause_ids = tuple(
            [
                cause.id
                for cause in causes
                if _has_advice(cause, causes, facts) and not (stalled and BY_ID[cause.id].capacity)
            ]
        )
        self._queue.add(facts.now_s, facts.values, facts.window_s, is_incident=bool(cause_ids))
        # Until a whole window was watched, each scrape tells clearly more.
        grows = facts.window_s > self._window_s and facts.observed_s <= facts.window_s
        self._window_s = facts.window_s
        if not cause_ids:
            if self._causes and facts.now_s - self._advised_s > APART_WINDOWS * facts.window_s:
                self._end_incidents()
            return ()
        self._advised_s = facts.now_s
        # Each is news once in an incident, though it may hold only now and then.
        trend = self._queue.trend(facts.values, facts.window_s)
        loop = "closed" if trend.is_closed else "open" if trend.callers is None else "unknown"
        learned = self._learned.union({loop}, {"measured"} if trend.is_measured else ())
        knows_more, self._learned = learned != self._learned, learned
        incidents = [self._incidents[each] for each in cause_ids if each in self._incidents]
        knows_more |= any(each.is_whole_first(facts.now_s) for each in incidents)
        if facts.config != self._config:
            self._config = dict(facts.config)
            self._server = deployment(facts.config, self._stated)
            self._incidents.clear()
        elif (
            cause_ids == self._causes
            and facts.now_s - self._computed_s < facts.window_s
            and not (knows_more or grows)
        ):
            return self._recommendations
        self._causes, self._computed_s = cause_ids, facts.now_s
        recommendations = recommend(
            facts,
            cause_ids,
            self._server,
            self._incidents,
            trend=trend,
            anew=grows,
            weekly_peak_requests=self.weekly_peak_requests,
            curve=curve,
        )
        requests = facts.get("running_avg") + facts.get("waiting_avg")
        allowed = self._tracker.allowed(
            facts.now_s, recommendations, requests=requests, running=facts.get("running_max")
        )
        # A queue limit alone would only turn users away.
        others = {each.cause for each in allowed if each.id != QUEUE_LIMIT}
        given = tuple([each for each in allowed if each.cause in others])
        self._tracker.advised(facts.now_s, given, requests=requests)
        self._recommendations = given
        return given


def _has_advice(cause: Cause, causes: Sequence[Cause], facts: Facts) -> bool:
    """Whether the levers of a cause help: not while its form is a root that they do not reach."""
    if cause.root or not BY_ID[cause.id].levers:
        return False
    return cause.id != "prefix_churn" or _churn_holds(cause, causes, facts)


def _churn_holds(churn: Cause, causes: Sequence[Cause], facts: Facts) -> bool:
    """Whether more KV cache would help against prefix churn.

    It would not if prompts share no prefix now, or if the churn is only a brief dip.
    """
    if any(cause.id == "prefix_reuse_lost" for cause in causes):
        return False
    return churn.since_s is None or facts.now_s - churn.since_s >= facts.window_s
