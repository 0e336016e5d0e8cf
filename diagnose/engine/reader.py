"""Reads the pages of one engine: history, window, signals, one row of `Values` per scrape. Pure."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import inf

from kneewatch.collector.names.vllm_resolver import EngineBinding
from kneewatch.collector.page import Page
from kneewatch.collector.scrape_history import NO_COLUMNS, Column, History, Restart, Where
from kneewatch.collector.signals.signal import SignalSet, metrics_of
from kneewatch.collector.signals.table import (
    GENERATION_HANDLERS,
    HTTP,
    ITL,
    OUTPUT_LENGTH,
    PREFILL,
    PROMPT_LENGTH,
    TTFT,
    VLLM_SIGNALS,
)
from kneewatch.collector.window import Window
from kneewatch.diagnose.deployment.server_state import AdapterUse, CanaryState
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.learned.derived_signals import (
    ABORTED,
    BLANK,
    COMPUTED_AT_MOST,
    NEAR_BASELINE,
    TYPICAL,
    momentary,
)
from kneewatch.diagnose.learned.live_workload import FEW
from kneewatch.diagnose.lengths import ANSWERS, LENGTH_POINTS, METRICS
from kneewatch.diagnose.values import NO_GPUS, GpuReading, Histogram, RequestCounts, Values
from kneewatch.rules.facts import Moment
from kneewatch.rules.quantities import (
    OF_REQUESTS,
    RECENT,
    RECENT_REQUESTS_MIN,
    RECENT_SCRAPES,
    RECENT_SHARE,
)
from kneewatch.rules.rule import LONG_WINDOWS, SCRAPES_IN_WINDOW

LORA_INFO, RUNNING_ADAPTERS = "lora_requests_info", "running_lora_adapters"

COUNTED: tuple[tuple[tuple[str, Where, str], ...], ...] = (
    (("generation_tokens", (), ""),),
    ((ITL, (), "sum"),),
    ((ITL, (), "count"),),
    ((TTFT, (), "count"),),
    (("iteration_tokens_total", (), "count"),),
    (("prompt_tokens", (), ""),),
    (("prompt_tokens_by_source", (("source", "local_compute"),), ""),),
    (("prefix_cache_hits", (), ""), ("external_prefix_cache_hits", (), "")),
    ((PREFILL, (), "sum"),),
    ((PREFILL, (), "count"),),
    (("request_prefill_kv_computed_tokens", (), "sum"),),
    ((OUTPUT_LENGTH, (), "count"),),
    ((OUTPUT_LENGTH, (), "sum"),),
    (("num_preemptions", (), ""),),
    (("iteration_tokens_total", (), "sum"),),
    (("request_success", (), ""),),
    tuple(
        (HTTP, (("handler", handler), ("method", "POST"), ("status", "2xx")), "")
        for handler in GENERATION_HANDLERS
    ),
    ((PROMPT_LENGTH, (), "sum"),),
)
"""The counters of `Values.totals`, each a sum of some: metric, labels and part.

Those of `Work` (learned/work.py) in the order of its fields, then finished requests, accepted
calls and prompt tokens of finished requests.
"""

GENERATED, STARTED, UNUSED, PREFILLS, PREEMPTED = 0, 3, 4, 8, 13
"""Indices of `COUNTED`. The number of prefills follows their seconds. Those before UNUSED are 0
until the process has generated a token."""

METRICS_COUNTED = frozenset(metric for parts in COUNTED for metric, _, _ in parts)
"""The metrics that are counted."""

ENGINE_STEPS = "engine_steps"
"""The progress of an engine that counts tokens only when a request ends."""

METRICS_READ = metrics_of(VLLM_SIGNALS) | METRICS_COUNTED | {LORA_INFO, ENGINE_STEPS}
"""Metrics that signals are computed from; a quarter of a page's counters belong to other
metrics."""

BUCKETS_SHOWN = metrics_of(signal for signal in VLLM_SIGNALS if signal.shown)
"""Histograms whose buckets are only shown."""


def decides(metric: str, part: str) -> bool:
    """Whether a rule, cause or advice may depend on this part of a metric."""
    unread = part == "created" or (part == "bucket" and metric in BUCKETS_SHOWN)
    return metric in METRICS_READ and not unread


PREFILLS_IN_WINDOW = 3.0
"""The window is at least this many mean prefills long, so it contains a whole one and its end."""

RECENT_SIGNALS = tuple(
    signal for signal in VLLM_SIGNALS if signal.key in RECENT and signal.key not in OF_REQUESTS
)
RECENT_SIGNALS_OF_REQUESTS = tuple(signal for signal in VLLM_SIGNALS if signal.key in OF_REQUESTS)
UNKNOWN_RECENT: Mapping[str, float | None] = dict.fromkeys(RECENT)


ANSWERED = "request_success"
PREFIX_PARTS = (("prefix_cache_queries", ""), ("prefix_cache_hits", ""), (TTFT, "count"))
"""The counters of `Values.prefix_counts`."""

Parts = tuple[tuple[int, ...], ...]
"""The columns of sums of counters."""


class EngineReader:
    """The pages of one engine, oldest first, read as one row of values after each."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._longest_s = LONG_WINDOWS * profile.window_s
        self._compares_answers = bool(profile.stated.points.get(ANSWERS))
        self.history = History(keep_s=self._longest_s, metrics=METRICS_READ)
        self._signals = SignalSet(profile.signals, self.history)
        self._recent_signals = SignalSet(RECENT_SIGNALS, self.history)
        self._recent_of_requests = SignalSet(RECENT_SIGNALS_OF_REQUESTS, self.history)
        self._prefix_counts: deque[tuple[float, ...]] = deque()
        self._columns = self._prefix_columns = NO_COLUMNS
        self._counted, self._prefix_parts = Parts(), Parts()
        self._steps: tuple[int, ...] = ()
        self._prefill_s, self._prefilled = 0.0, (0.0, 0.0)
        self._unused_s = -inf
        self.restart: Restart | None = None
        """The restart that the newest page showed; None without one."""

    @property
    def last_s(self) -> float:
        """Time of the newest page that had this engine; -inf before the first."""
        return self.history.times[-1] if self.history.times else -inf

    @property
    def config(self) -> Mapping[str, str]:
        """The labels of cache_config_info on the newest page."""
        return self.history.info.get("cache_config_info", {})

    def counters(self) -> tuple[tuple[Column, ...], tuple[float, ...]]:
        """The counter columns, including histogram parts, and their values on the newest page.

        Shapes: both (counters,). Values that the page lacks are NaN. The tuple of columns is the
        same object until a column is added.
        """
        newest = self.history.frames[-1].counters if self.history.frames else ()
        return self.history.counters.names, tuple(newest)

    def read(
        self,
        t_s: float,
        page: Page,
        binding: EngineBinding,
        process_start: int | None,
        *,
        gpus: GpuReading = NO_GPUS,
        host: Mapping[str, float],
        canary: CanaryState | None,
    ) -> Values | None:
        """The values after one scrape; None if the scrape is not newer than the last one."""
        history = self.history
        steps, dropped = history.clock_steps, history.out_of_order
        restart = history.append(t_s, page, binding, process_start)
        if history.out_of_order != dropped:
            return None
        self.restart = restart
        if self._columns is not history.columns:
            self._bind()
        totals = self._totals()
        if not any(totals[:UNUSED]):
            self._unused_s = t_s
        self._note_prefills(totals)
        window = Window(history, now_s=t_s, range_s=self._range_s(t_s))
        values = self._signals.read(window)
        signals = {**values, **BLANK}
        signals |= momentary(Moment(values, self._profile.targets, window_s=window.range_s))
        signals["prefill_hit_share"], signals["prefill_miss_share"] = prefill_sides(signals, window)
        progress = self._counted[GENERATED] if binding.kind.live_tokens else self._steps
        generated = gained(history, progress)
        is_silent = generated == 0.0
        return Values(
            signals=signals,
            missing=self._signals.missing,
            impossible=history.impossible,
            recent=self._recent(window),
            window_s=window.range_s,
            scrapes=window.scrapes,
            kind=binding.kind,
            config=self.config,
            observed_s=t_s - history.first_s,
            served_s=t_s - max(self._unused_s, history.started_s or -inf),
            started_s=history.started_s,
            restarted=restart is not None,
            starts_over=restart is not None or history.clock_steps != steps,
            unused=not totals[GENERATED] and _is_unused(history),
            arrivals=gained(history, self._counted[STARTED]),
            generated=generated,
            answered=is_silent and _has_answered(history),
            longest_prefill_s=_longest_s(history, PREFILL) if is_silent else 0.0,
            prefill_s_per_token=_prefill_s_per_token(history) if is_silent else 0.0,
            preempted=gained(history, self._counted[PREEMPTED]),
            totals=totals,
            prefix_counts=self._prefixes(window, values.get("prefix_hit_ratio")),
            answers=self._answers(t_s, window, values),
            request_counts=self._request_counts(),
            adapters=adapters_seen(window) if signals.get("waiting_deferred") else (),
            gpus=gpus,
            host=host,
            canary=canary,
        )

    def _bind(self) -> None:
        """Find the counters in the history's columns."""
        self._columns = columns = self.history.columns
        self._counted = tuple(
            tuple(at for counter in sums for at in columns.counter_columns(*counter))
            for sums in COUNTED
        )
        self._steps = columns.counter_columns(ENGINE_STEPS)
        self._prefix_parts = tuple(
            columns.counter_columns(metric, (), part) for metric, part in PREFIX_PARTS
        )

    def _totals(self) -> tuple[float, ...]:
        value_at = self.history.frames[-1].counters.__getitem__
        totals = [sum(map(value_at, part)) for part in self._counted]
        return tuple([total if total == total else 0.0 for total in totals])

    def _note_prefills(self, totals: tuple[float, ...]) -> None:
        """Note the mean prefill of the newest finished requests."""
        seconds, count = totals[PREFILLS : PREFILLS + 2]
        more = count - self._prefilled[1]
        if more > 0 and seconds >= self._prefilled[0]:
            mean_s = (seconds - self._prefilled[0]) / more
            self._prefill_s += min(1.0, more / RECENT_REQUESTS_MIN) * (mean_s - self._prefill_s)
        self._prefilled = seconds, count

    def _range_s(self, t_s: float) -> float:
        """The window in seconds. It is shorter until a whole window was seen, and longer if scrapes
        are rare or prefills are long: vLLM counts a prompt's tokens at its admission, and its first
        token and its prefill much later."""
        times = self.history.times
        window_s = self._profile.window_s
        if len(times) < 2:
            return window_s
        rare_s = SCRAPES_IN_WINDOW * (times[-1] - times[-2])
        longer_s = min(max(rare_s, PREFILLS_IN_WINDOW * self._prefill_s), self._longest_s)
        return min(max(window_s, longer_s), t_s - times[0])

    def _prefixes(self, window: Window, hit_ratio: float | None) -> tuple[tuple[float, ...], ...]:
        """`Values.prefix_counts`. Only the newest scrape's are added to those of the last window;
        reading them all again would take ten times as long."""
        kept = self._prefix_counts
        if hit_ratio is None or not 0 < hit_ratio < NEAR_BASELINE:
            kept.clear()
            return ()
        is_new = self._columns is not self._prefix_columns or len(kept) < window.scrapes - 1
        if is_new:
            kept.clear()
            self._prefix_columns = self._columns
        parts = self._prefix_parts
        for frame in window.frames if is_new else window.frames[-1:]:
            row = frame.counters
            kept.append(tuple([sum([row[at] for at in part]) for part in parts]))
        while len(kept) > window.scrapes:
            kept.popleft()
        return tuple(kept)

    def _answers(
        self, t_s: float, window: Window, signals: Mapping[str, float | None]
    ) -> Histogram | None:
        """Answers by length, of the longest window if this one has few; None unless their lengths
        are stated and many ended at their limit."""
        is_long = (signals.get("finished_length_ratio") or 0.0) >= LENGTH_POINTS
        if not is_long or not self._compares_answers:
            return None
        answers = _answers(window)
        if answers is None or answers[inf] >= FEW:
            return answers
        return _answers(Window(self.history, now_s=t_s, range_s=self._longest_s, few=True))

    def _recent(self, window: Window) -> dict[str, float | None]:
        """The signals of RECENT over the newest quarter of the window.

        If the quarter has too few requests, signals of requests are computed over the newest half.
        If the half also has too few, they are None.
        """
        times, window_s = self.history.times, window.range_s
        interval_s = times[-1] - times[-2] if len(times) > 1 else window_s
        range_s = min(max(RECENT_SHARE * window_s, RECENT_SCRAPES * interval_s), window_s)
        newest = self._newest(window, range_s)
        values = {**UNKNOWN_RECENT, **self._recent_signals.read(newest)}
        if not self._has_enough_requests(newest):
            newest = self._newest(newest, max(range_s, 2 * RECENT_SHARE * window_s))
        if self._has_enough_requests(newest):
            values |= self._recent_of_requests.read(newest)
        return values

    def _newest(self, window: Window, range_s: float) -> Window:
        """The window over its newest seconds; the same one if it is not longer."""
        if range_s == window.range_s:
            return window
        return Window(self.history, now_s=window.now_s, range_s=range_s, few=True)

    def _has_enough_requests(self, window: Window) -> bool:
        started_per_s = window.total_rate(self._counted[STARTED]) or 0.0
        return started_per_s * window.range_s >= RECENT_REQUESTS_MIN

    def _request_counts(self) -> RequestCounts | None:
        if self._profile.stated.workload is None:
            return None
        columns, row = self.history.columns, self.history.frames[-1].counters

        def total(selected: Sequence[int]) -> float:
            return sum(value for at in selected if (value := row[at]) == value)

        buckets = {side: columns.buckets_of(metric) for side, metric in METRICS.items()}
        return RequestCounts(
            total(columns.counter_columns(TTFT, (), "count")),
            {side: histogram.bounds for side, histogram in buckets.items()},
            {
                side: array("d", map(total, histogram.columns))
                for side, histogram in buckets.items()
            },
        )


# --- Since the previous scrape, and since the process started -------------------------------------


def gained(history: History, columns: Sequence[int]) -> float | None:
    """The increase of counter columns between the last two scrapes; None if unknown."""
    if len(history.frames) < 2:
        return None
    before, now = history.frames[-2], history.frames[-1]
    total: float | None = None
    for at in columns:
        value, was = now.counters[at], before.counters[at]
        # A counter that went back was reset: what it shows is what it gained.
        step = value if value < was else value - was
        if step == step:
            total = step if total is None else total + step
    return total


def _has_answered(history: History) -> bool:
    """Whether a request ended between the last two scrapes without being aborted."""
    rows = history.counters.by_metric.get(ANSWERED, ())
    ended = gained(history, [at for column, at in rows if ABORTED not in column.labels])
    return (ended or 0.0) > 0


def _is_unused(history: History) -> bool:
    """Whether the process has had no tokens to work on since it started; false if unknown."""
    columns = [
        history.counters.by_metric.get(metric, ())
        for metric in ("generation_tokens", "prompt_tokens")
    ]
    newest = history.frames[-1].counters
    return all(columns) and not any(
        newest[at] for metric_columns in columns for _, at in metric_columns
    )


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


# --- Distributions --------------------------------------------------------------------------------


def _answers(window: Window) -> Histogram | None:
    """Number of the window's answers up to each bound (in tokens); None if unknown."""
    buckets = window.buckets(METRICS[ANSWERS])
    if buckets is None:
        return None
    counts = [rate * window.range_s for rate in buckets.lifted]
    return dict(zip(buckets.bounds, counts, strict=True))


def prefill_sides(
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
    hits = computed.share_at_most(COMPUTED_AT_MOST * prompt)
    return hits, min(1.0, (1 - at_most) / (1 - shorter))


def adapters_seen(window: Window) -> tuple[AdapterUse, ...]:
    """The LoRA adapters that ran in the window, most turns first.

    Each set of running adapters is a series of vLLM's info metric; its value is the time when the
    set last ran. So all sets that ran between two scrapes are visible. A set that ran twice in
    between is visible once, so turns are undercounted, never overcounted.

    Source: vllm/v1/metrics/loggers.py (0.32), lora_requests_info.
    """
    columns = {
        at: _names(dict(column.labels).get(RUNNING_ADAPTERS, ""))
        for column, at in window.history.gauges.by_metric.get(LORA_INFO, ())
    }
    since_s = window.now_s - window.range_s
    moments = sorted(
        {
            (t_s, at)
            for frame in window.frames
            for at, names in columns.items()
            if names and since_s <= (t_s := frame.gauges[at]) <= window.now_s
        }
    )
    turns, last_s = Counter[str](), dict[str, float]()
    before: frozenset[str] = frozenset()
    for t_s, at in moments:
        turns.update(columns[at] - before)
        last_s.update(dict.fromkeys(columns[at], t_s))
        before = columns[at]
    return tuple(
        AdapterUse(name, count, window.now_s - last_s[name])
        for name, count in sorted(turns.items(), key=lambda pair: (-pair[1], pair[0]))
    )


def _names(label: str) -> frozenset[str]:
    return frozenset(name.strip() for name in label.split(",") if name.strip())
