"""Derived signals (counts, drifts, estimates), and how long conditions have held. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import sub
from weakref import WeakKeyDictionary

from msgspec import Struct

from kneewatch.collector.scrape_history import Columns, History
from kneewatch.collector.signals.signal import BoundSignals
from kneewatch.collector.signals.vllm import PREFILL, PROMPT_LENGTH, TTFT, VLLM_SIGNALS
from kneewatch.collector.window import Window
from kneewatch.diagnose.learned import slow_trends
from kneewatch.rules.baseline import Baseline
from kneewatch.rules.conditions import Quantity, each_value, nodes
from kneewatch.rules.facts import Moment, Targets
from kneewatch.rules.quantities import (
    RECENT,
    BaselineValue,
    Signal,
    Target,
    UsualValue,
    WindowSeconds,
)

NO_BASELINE = "no baseline from quiet times yet"
NO_TARGET = "no TTFT target (slo.ttft_p99_s)"
GENERATED, ANSWERED = "generation_tokens", "request_success"
ABORTED = ("finished_reason", "abort")
"""Aborted requests are no progress: a stalled engine still counts requests that clients give up."""

CALLS_MIN = 4.0
"""Least number of calls in the window for computing a share of them."""

FILLED_MIN = 0.005
"""A prefill is progress if it raises KV usage above its maximum by this share of the cache."""

RECENT_REQUESTS_MIN = 4.0
RECENT_SHARE = 0.25
RECENT_SCRAPES = 2.2

STALL, PREFILL_SILENCE = "stalled_s", "prefill_silence_s"
HIT_SPREAD = "prefix_hit_spread_sigmas"
NEAR_BASELINE = 0.9
"""A hit ratio of at least this share of its baseline has not fallen."""

TYPICAL = 3.0
"""If the mean prompt exceeds this many medians, most requests are short and a few are long.

The share of requests that hit then says nothing about the share of tokens that hit.
"""

SPREAD_STEPS_MIN = 4
"""Fewest scrapes with requests for computing a spread."""

LONGEST_PREFILL_S = 120.0
"""A prefill explains no longer silence than this, unless it keeps filling the KV cache."""

PAUSE_MARGIN, SPEED_MARGIN = 1.5, 2.0
"""Margins for the next prompt: it may be longer than earlier ones, and long prompts prefill
slower."""


class DerivedSignal(Struct, frozen=True):
    """A quantity computed from signals. Its key ends with the unit; plain counts have none.

    `of` is its expression. At each scrape `derive` evaluates it. In a fleet it is evaluated on the
    values of one moment. It is also compiled to a recording rule. `of` is None if a module follows
    the quantity from scrape to scrape, or reads it elsewhere than on vLLM's page.
    """

    key: str
    help: str
    of: Quantity | None = None

    @property
    def momentary(self) -> bool:
        """Whether signals of one moment suffice to compute it, without a baseline or earlier
        scrapes."""
        return self.of is not None and not self._reads(BaselineValue, UsualValue)

    @property
    def gap(self) -> str:
        """Why the derived signal may be None although its signals have values; empty if it
        cannot."""
        if self._reads(BaselineValue):
            return NO_BASELINE
        return NO_TARGET if self._reads(Target) else ""

    def _reads(self, *kinds: type[Quantity]) -> bool:
        return any(isinstance(node, kinds) for node in nodes(self.of))


def _in_window(key: str, per_s: str) -> DerivedSignal:
    """A derived signal: the number of events in the window, computed from their rate.

    Used to ignore shares that rest on too few events.
    """
    return DerivedSignal(key, f"{per_s} times the window", WindowSeconds() * Signal(per_s))


def _drift(key: str, of: str) -> DerivedSignal:
    """A derived signal: a signal divided by its baseline."""
    return DerivedSignal(key, f"{of} over its quiet baseline", Signal(of) / BaselineValue(of))


FOLLOWED: Mapping[str, str] = {
    STALL: "seconds for which requests have been in flight, or calls ended, without progress: no "
    "token, no finished request, no prefill that fills more of the KV cache than those before it",
    PREFILL_SILENCE: "seconds for which one prefill may keep the engine from any token, at most "
    f"{LONGEST_PREFILL_S:g}: by the pauses before first tokens so far, by the longest prefill that "
    "the page has counted, and by the blocks taken since the last token at the engine's prefill "
    "speed; 0 while nothing runs",
    "prompt_tokens_shift_ratio": "share of an hour's prompts beyond a percentile of "
    "workload_profile, less the share that the profile allows",
    "output_tokens_shift_ratio": "the same for answers",
    "arrival_peak_ratio": "an hour's arrivals over this engine's share of workload_profile's peak",
    "cascade_stage": "stage of the KV memory-pressure cascade, 0 to 4",
    "cascade_severity": "severity of that stage: 0 ok, 1 info, 2 warning, 3 critical",
    "kv_demand_ratio": "KV tokens needed by requests in flight over the KV cache's capacity",
    "kv_peak_demand_ratio": "kv_demand_ratio at the window's highest KV usage; while a climb is "
    "forecast, at the likely peaks of the next minutes",
    "kv_demand_ahead_ratio": "kv_peak_demand_ratio at its trend, kv_horizon_s from now; without a "
    "trend kv_demand_ratio",
    "kv_exhausted_in_s": "seconds until kv_peak_demand_ratio reaches 1 at its trend; no value "
    "without a trend, or in a burst that does not fill the cache",
    "kv_exhausted_soonest_s": "the same at the steepest likely trend",
    "kv_exhausted_latest_s": "the same at the flattest likely trend; no value beyond half an hour",
    "slo_breaks_in_s": "seconds until TTFT exceeds its target at the present trend; no value "
    "without a trend or a target",
    "slo_breaks_soonest_s": "the same at the steepest likely trend",
    "slo_breaks_latest_s": "the same at the flattest likely trend; no value beyond half an hour",
    "prefill_hit_share": "share of requests that computed at most a quarter of a median prompt; no "
    f"value where the mean prompt is over {TYPICAL:g} medians long",
    "prefill_miss_share": "share of requests that computed their prompt whole: those that computed "
    "more than the bucket bound below the median prompt, over prompts above that bound; no value "
    "where the mean prompt is that long",
    HIT_SPREAD: "how much more the prefix cache's hits vary from scrape to scrape than if each "
    "request hit whole or not at all, in standard deviations: far below 0 where all requests hit "
    "the same share; no value while the hit ratio is near its baseline",
    "host_cpu_pressure_ratio": "share of the last minute in which a task of the server's control "
    "group on this node waited for a CPU; of the node where the group's is not readable",
    "host_cpu_steal_ratio": "share of the node's CPU time that its hypervisor withheld since the "
    "last scrape",
    **slow_trends.HELP,
}
"""Help texts of derived signals without an expression.

A module follows them from scrape to scrape, or reads them elsewhere than on vLLM's page.
"""

DERIVED: tuple[DerivedSignal, ...] = (
    _in_window("preempted_in_window", "preemption_per_s"),
    _in_window("errors_in_window", "finished_error_per_s"),
    _in_window("accepted_in_window", "accepted_per_s"),
    _drift("ttft_p99_drift_ratio", "ttft_p99_s"),
    _drift("ttft_p50_drift_ratio", "ttft_p50_s"),
    _drift("itl_p99_drift_ratio", "itl_p99_s"),
    _drift("itl_p50_drift_ratio", "itl_p50_s"),
    _drift("itl_mean_drift_ratio", "itl_mean_s"),
    _drift("ttft_p99_p50_drift_ratio", "ttft_p99_p50_ratio"),
    _drift("kv_transfer_drift_ratio", "kv_transfer_mean_s"),
    DerivedSignal(
        "finished_length_drift_points",
        "finished_length_ratio less its quiet baseline",
        Signal("finished_length_ratio") - BaselineValue("finished_length_ratio"),
    ),
    DerivedSignal(
        "prefix_hit_quiet_ratio",
        "prefix_hit_ratio's quiet baseline, at least expect.prefix_hit_ratio",
        BaselineValue("prefix_hit_ratio"),
    ),
    DerivedSignal(
        "prefill_busy_ratio",
        "mean number of prompts under prefill: arrival_per_s x prefill_mean_s",
        Signal("arrival_per_s") * Signal("prefill_mean_s"),
    ),
    DerivedSignal(
        "prompt_tail_ratio",
        "prompt length P99 over P95",
        Signal("prompt_tokens_p99") / Signal("prompt_tokens_p95"),
    ),
    DerivedSignal(
        "prompt_p99_kv_share_ratio",
        "P99 prompt length over the KV cache's capacity",
        Signal("prompt_tokens_p99") / Signal("kv_capacity_tokens"),
    ),
    DerivedSignal(
        "queue_wait_estimate_ratio",
        "expected_wait_s over the TTFT target",
        Signal("expected_wait_s") / Target("ttft_p99_s"),
    ),
    DerivedSignal(
        "spec_accepted_usual_tokens",
        "spec_accepted_per_draft_tokens at this hour in earlier weeks",
        UsualValue(slow_trends.SPEC_ACCEPTED.signal),
    ),
    *(DerivedSignal(key, text) for key, text in FOLLOWED.items()),
)
"""Every derived signal. Rules, causes, recording rules, the fleet and the reference use this
list."""

MOMENTARY: Mapping[str, Quantity] = {
    signal.key: signal.of for signal in DERIVED if signal.of is not None and signal.momentary
}
"""Expressions of the derived signals that can be computed from one moment, by key."""

evaluated = each_value({signal.key: signal.of for signal in DERIVED if signal.of is not None})
"""Values of the derived signals that have an expression, by key."""

_GAPS = {signal.key: signal.gap for signal in DERIVED if signal.gap}


def derive(
    values: Mapping[str, float | None], window: Window, baseline: Baseline, targets: Targets
) -> tuple[dict[str, float | None], dict[str, str]]:
    """The derived signals of one window, from its signals and the baseline.

    Also returns the reasons for missing values, where known.
    """
    derived = evaluated(Moment(values, targets, baseline=baseline, window_s=window.range_s))
    notes = {
        key: gap
        for key, gap in _GAPS.items()
        if derived[key] is None and (gap is NO_BASELINE or targets.ttft_p99_s is None)
    }
    derived["prefill_hit_share"], derived["prefill_miss_share"] = _prefill_sides(values, window)
    hit_ratio, quiet = values.get("prefix_hit_ratio"), baseline.get("prefix_hit_ratio")
    if hit_ratio is not None and quiet is not None and hit_ratio < NEAR_BASELINE * quiet:
        derived[HIT_SPREAD] = _hit_spread(window)
    return derived, notes


RECENT_SIGNALS = tuple(signal for signal in VLLM_SIGNALS if signal.key in RECENT)
OF_REQUESTS = frozenset({"prefix_hit_ratio", "prefix_hit_tokens_mean"})
"""Signals of RECENT that are meaningless while few requests arrive."""


_bound: WeakKeyDictionary[Columns, BoundSignals] = WeakKeyDictionary()
"""RECENT_SIGNALS bound to columns in use; nothing else keeps them from scrape to scrape."""


def recent(history: History, now_s: float, window_s: float) -> dict[str, float | None]:
    """The signals of RECENT over the newest quarter of the window.

    If the quarter has too few requests, signals of requests are computed over the newest half. If
    the half also has too few, they are None.
    """
    frames = history.times
    interval_s = frames[-1] - frames[-2] if len(frames) > 1 else window_s
    range_s = min(max(RECENT_SHARE * window_s, RECENT_SCRAPES * interval_s), window_s)
    bound = _bound.get(history.columns)
    if bound is None:
        bound = _bound[history.columns] = BoundSignals.of(RECENT_SIGNALS, history.columns)
    quarter = Window(history, now_s=now_s, range_s=range_s, few=True)
    values = dict.fromkeys(RECENT) | {key: value(quarter) for key, value in bound.valued}
    if not _enough_requests(quarter):
        half_s = max(range_s, 2 * RECENT_SHARE * window_s)
        half = Window(history, now_s=now_s, range_s=half_s, few=True)
        enough = _enough_requests(half)
        of_half = {key: value(half) for key, value in bound.valued} if enough else {}
        values |= {key: of_half.get(key) for key in OF_REQUESTS}
    return values


def _enough_requests(window: Window) -> bool:
    started_per_s = window.part_rate(TTFT, "count") or 0.0
    return started_per_s * window.range_s >= RECENT_REQUESTS_MIN


UNFORGIVING = frozenset({"stalled"})
"""Conditions that a single scrape to the contrary ends: one generated token is progress."""


class Streaks:
    """How long conditions have held. A single scrape to the contrary does not end a streak.

    `conditions` are the conditions that causes use. Whether the engine is stalled is computed from
    the history instead.
    """

    def __init__(self, conditions: Callable[[Moment], dict[str, bool]], targets: Targets) -> None:
        self._conditions, self._targets = conditions, targets
        self._progress = Progress()
        self._since_s: dict[str, float] = {}
        self._doubted: set[str] = set()

    def forget(self) -> None:
        """Drop all streaks, because the process was replaced."""
        self._progress = Progress()
        self._since_s.clear()
        self._doubted.clear()

    def update(
        self, now_s: float, history: History, values: Mapping[str, float | None]
    ) -> dict[str, float]:
        """Seconds for which each condition has held; conditions that do not hold are left out."""
        moment = Moment(values, self._targets)
        holds = self._conditions(moment)
        holds["stalled"] = not self._progress.update(history, values)
        for name, holding in holds.items():
            if holding:
                self._since_s.setdefault(name, now_s)
                self._doubted.discard(name)
            elif name in self._doubted or name in UNFORGIVING:
                self._since_s.pop(name, None)
            else:
                self._doubted.add(name)
        return {name: now_s - since_s for name, since_s in self._since_s.items()}

    def prefill_silence_s(self, history: History, values: Mapping[str, float | None]) -> float:
        """Seconds for which one prefill may delay the next token; 0 after a token."""
        return self._progress.prefill_silence_s(history, values)


class Progress:
    """Whether an engine makes progress, checked at each scrape.

    Generated tokens and finished requests are progress. Prompt tokens and changes of KV usage are
    not: vLLM may prefill a prompt that does not fit again and again.

    vLLM counts the tokens of a prefill only at its end. So a long prefill is also progress while it
    fills more of the KV cache than was filled at any time since the last token. Without chunked
    prefill it is a single step, in which no gauge moves; `prefill_silence_s` is how long that may
    take.
    """

    def __init__(self) -> None:
        self._filled = self._held = 0.0
        self._token_s = self._silent_s = self._longest_pause_s = 0.0

    def update(self, history: History, values: Mapping[str, float | None]) -> bool:
        """Whether there was progress since the previous scrape.

        True without requests, and if the page has no token counters.
        """
        running, usage = values.get("running") or 0.0, values.get("kv_usage_ratio") or 0.0
        generated = _step(history, GENERATED)
        in_flight = running + (values.get("waiting") or 0.0) >= 1
        has_requests = in_flight or _unanswered(values)
        if not has_requests or generated is None or generated > 0 or _has_answered(history):
            if self._silent_s and _gained(
                history, history.columns.counter_columns(TTFT, part="count")
            ):
                self._longest_pause_s = max(self._longest_pause_s, self._silent_s)
            self._filled = self._held = usage
            self._token_s, self._silent_s = history.times[-1], 0.0
            return True
        self._silent_s = history.times[-1] - self._token_s
        if running and usage >= self._filled + FILLED_MIN:
            self._filled = usage
            return True
        return False

    def prefill_silence_s(self, history: History, values: Mapping[str, float | None]) -> float:
        """Seconds for which one prefill may delay the next token; 0 after a token or while nothing
        runs."""
        if not self._silent_s or not values.get("running"):
            return 0.0
        taken_tokens = (self._filled - self._held) * (values.get("kv_capacity_tokens") or 0.0)
        explained_s = max(
            PAUSE_MARGIN * self._longest_pause_s,
            _longest_s(history, PREFILL),
            SPEED_MARGIN * taken_tokens * _prefill_s_per_token(history),
        )
        return min(explained_s, LONGEST_PREFILL_S)


def _longest_s(history: History, metric: str) -> float:
    """Upper bound of a histogram's highest bucket with an observation since the process started.

    0 if there is no observation.
    """
    newest, buckets = history.frames[-1].counters, history.columns.buckets_of(metric)
    counts = [sum(newest[at] for at in columns) for columns in buckets.columns]
    bounds = [le for le, count in zip(buckets.bounds, counts, strict=True) if count < counts[-1]]
    return buckets.bounds[len(bounds)] if counts and counts[-1] > 0 else 0.0


def _prefill_s_per_token(history: History) -> float:
    """Mean seconds of prefill per prompt token since the process started; 0 if unknown."""
    newest = history.frames[-1].counters
    tokens = sum(newest[at] for at in history.columns.counter_columns(PROMPT_LENGTH, part="sum"))
    prefill_s = sum(newest[at] for at in history.columns.counter_columns(PREFILL, part="sum"))
    return prefill_s / tokens if tokens > 0 else 0.0


def _unanswered(values: Mapping[str, float | None]) -> bool:
    """Whether HTTP calls ended in the window, but no request finished and no token was generated.

    A stalled engine may show no request at all.
    """
    out = (values.get("completed_per_s") or 0.0) + (values.get("generation_tokens_per_s") or 0.0)
    return (values.get("accepted_in_window") or 0.0) >= CALLS_MIN and not out


def unused(history: History) -> bool:
    """Whether the process has had no tokens to work on since it started; false if unknown."""
    columns = [
        history.counters.by_metric.get(metric, ()) for metric in (GENERATED, "prompt_tokens")
    ]
    newest = history.frames[-1].counters
    return all(columns) and not any(
        newest[at] for metric_columns in columns for _, at in metric_columns
    )


def increase_since_last(history: History, metric: str) -> float:
    """The increase of a counter between the last two scrapes; 0 if unknown."""
    return _step(history, metric) or 0.0


def arrivals_since_last(history: History) -> float | None:
    """Requests that got their first token between the last two scrapes; None if unknown."""
    return _gained(history, history.columns.counter_columns(TTFT, part="count"))


def _step(history: History, metric: str) -> float | None:
    """The increase of a counter between the last two scrapes; None if unknown."""
    return _gained(history, history.columns.counter_columns(metric))


def _has_answered(history: History) -> bool:
    """Whether a request ended between the last two scrapes without being aborted."""
    rows = history.counters.by_metric.get(ANSWERED, ())
    ended = _gained(history, [at for column, at in rows if ABORTED not in column.labels])
    return (ended or 0.0) > 0


def _gained(history: History, columns: Sequence[int]) -> float | None:
    """The increase of counter columns between the last two scrapes; None if unknown."""
    if len(history.frames) < 2:
        return None
    before, now = history.frames[-2], history.frames[-1]
    gained: float | None = None
    for at in columns:
        value, was = now.counters[at], before.counters[at]
        # A counter that went back was reset: what it shows is what it gained.
        step = value if value < was else value - was
        if step == step:
            gained = step if gained is None else gained + step
    return gained


def _prefill_sides(
    values: Mapping[str, float | None], window: Window
) -> tuple[float | None, float | None]:
    """Shares of requests that hit almost fully and that miss fully; None if unknown.

    A request that misses computes its whole prompt. So it computes more tokens than a bound exactly
    if its prompt is longer than the bound.
    """
    prompt, mean = values.get("prompt_tokens_p50"), values.get("prompt_tokens_mean")
    computed = window.buckets("request_prefill_kv_computed_tokens")
    prompts = window.buckets("request_prompt_tokens")
    if prompt is None or mean is None or mean > TYPICAL * prompt:
        return None, None
    if computed is None or prompts is None:
        return None, None
    at_most, shorter = computed.share_at_most(prompt), prompts.share_at_most(prompt)
    if at_most is None or shorter is None or shorter >= 1:
        return None, None  # at 1, the buckets contradict each other
    return computed.share_at_most(0.25 * prompt), min(1.0, (1 - at_most) / (1 - shorter))


def _hit_spread(window: Window) -> float | None:
    """The spread of hits in standard deviations; see `spread_sigmas`.

    It is the lower of the whole window's and its newest half's spread: the newest half shows a fall
    first.
    """
    columns = window.history.columns
    selected = [
        columns.counter_columns("prefix_cache_queries"),
        columns.counter_columns("prefix_cache_hits"),
        columns.counter_columns(TTFT, (), "count"),
    ]
    counts = [
        tuple(sum(frame.counters[at] for at in part) for part in selected)
        for frame in window.frames
    ]
    half = counts[min(len(counts) // 2, len(counts) - SPREAD_STEPS_MIN - 1) :]
    spreads = [spread_sigmas(part) for part in (counts, half)]
    return min((spread for spread in spreads if spread is not None), default=None)


def spread_sigmas(counts: Sequence[tuple[float, ...]]) -> float | None:
    """How much hits vary between scrapes, compared with requests that hit fully or miss fully.

    The result is the distance from the variance of such requests, in standard deviations. `counts`
    has, per scrape, the counters of tokens looked up, tokens that hit, and requests.

    The hits of n such requests have a binomial variance. So the sum of squares divided by it has a
    chi-square distribution (normal approximation by Wilson and Hilferty).
    """
    steps = [tuple(map(sub, after, before)) for before, after in pairwise(counts)]
    if any(value < 0 for step in steps for value in step):
        return None  # the counters were reset
    steps = [step for step in steps if step[0] > 0]
    looked_up, hits, requests = (sum(step[at] for step in steps) for at in range(3))
    if len(steps) < SPREAD_STEPS_MIN or requests < 1 or not 0 < hits < looked_up:
        return None
    ratio, prompt_tokens = hits / looked_up, looked_up / requests
    squares = sum((hit - ratio * tokens) ** 2 / tokens for tokens, hit, _ in steps)
    freedom = len(steps) - 1
    spread = squares / (prompt_tokens * ratio * (1 - ratio) * freedom)
    variance = 2 / (9 * freedom)
    return (math.cbrt(spread) - (1 - variance)) / math.sqrt(variance)
