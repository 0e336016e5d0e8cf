"""Derived signals (counts, drifts, estimates), and how long conditions have held. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import inf
from operator import sub

from kneewatch.diagnose.account_signals import (
    ALL_CANCELLED,
    AT_THE_DOOR,
    CANCELLED,
    HIT_SPREAD,
    OPEN_CALLS_SIGNALS,
    PILED,
    SILENT,
    STOP_DUE,
    STOPPED,
    STOPS_EVERY,
    UNADMITTED,
)
from kneewatch.diagnose.causes.clients import CALLS_MIN
from kneewatch.diagnose.learned.work import (
    ACCEPTED,
    FINISHED,
    SPEED_MARGIN,
    decoding,
    prefill_explains,
)
from kneewatch.diagnose.slow_quantities import SPEC_ACCEPTED
from kneewatch.diagnose.values import Signals, Values
from kneewatch.rules.baseline import Baseline
from kneewatch.rules.conditions import Number, Quantity, each_value, nodes
from kneewatch.rules.facts import Moment, Targets
from kneewatch.rules.quantities import (
    BaselineValue,
    Live,
    Minimum,
    Target,
    UsualValue,
    WindowSeconds,
)

# --- Calls in flight at the API server, an account beside the engine's gauges ---------------------
#
# The gauges are those of the engine's last step. If the engine hangs between two steps, they show
# that nothing runs; if all clients leave at once, that everything still runs, until the next step.
# The API server shows both: it holds a connection open for each call, and counts calls as they end.


LEVEL_S = 600.0
"""The level of open connections is the highest of this time."""

OPEN_MIN, LAG_S = 4.0, 30.0
"""Fewest connections beyond the level that are calls. The level is that of so long ago."""

IDLE_S, KEPT_S, GROWTH_MIN = 10.0, 120.0, 2
"""Connections that grow in so many scrapes are calls if they stay for 10 s without a token, others
after two minutes: the API server closes an idle connection after 5 s, or later if it is told so."""

PILED_MIN, PILED_S = 16.0, 180.0
"""So many more connections than at any time that long ago, and than all requests that were in
flight at once since, are calls that the engine never gets. Clients keep no more of them open."""

SOON_S = 20.0
"""Calls that end within so many seconds of the last token were cancelled, not timed out."""

MORE = 1.1
"""If more calls end than requests were in flight, by this ratio, new calls fail too: a stall."""


SILENT_FROM_S, SILENT_TO_S = 20.0, 1800.0
LONGER = 3.0
"""An end of traffic is unusual if it lasts so many times longer than any pause before it."""

BUSY_S, RECENT_S = 600.0, 1800.0
"""A server is judged after ten minutes of traffic, by the pauses of half an hour to an hour."""

FULL_RATE = 0.5
"""Traffic that falls below this share of its mean before it ends drains, and is not cut off."""


class Silence:
    """How long a server has been idle after its traffic ended from one scrape to the next.

    The router or the network may have cut it off, or the engine hangs and its gauges read 0.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._busy_s = self._rate = self._mean_rate = 0.0
        self._longest, self._longest_before, self._since_s = 0.0, 0.0, 0.0

    def update(self, t_s: float, values: Values, in_flight: float) -> float | None:
        """The seconds; None if the server is not idle, or if that is not unusual."""
        work = (values.generated or 0.0) + (values.arrivals or 0.0)
        if self._first_s is None:
            self._first_s = self._busy_s = self._since_s = t_s
        if work or in_flight or values.answered:
            self._note_pause(t_s)
            self._rate = work / max(1.0, t_s - self._busy_s)
            self._mean_rate += 0.05 * (self._rate - self._mean_rate)
            self._busy_s = t_s
            return None
        silent_s = t_s - self._busy_s
        least_s = max(SILENT_FROM_S, LONGER * max(self._longest, self._longest_before))
        is_busy_server = self._busy_s - self._first_s >= BUSY_S and self._mean_rate > 0
        cut_off = self._rate >= FULL_RATE * self._mean_rate
        is_due = least_s <= silent_s <= SILENT_TO_S
        return silent_s if is_busy_server and cut_off and is_due else None

    def _note_pause(self, t_s: float) -> None:
        if t_s - self._since_s >= RECENT_S:
            self._longest_before, self._longest, self._since_s = self._longest, 0.0, t_s
        self._longest = max(self._longest, t_s - self._busy_s)


class OpenCalls:
    """The calls in flight at one engine's API server."""

    def __init__(self) -> None:
        self.begun: tuple[float, tuple[float, ...]] | None = None
        """Time and totals of the scrape before the last one with a token."""
        self._before: tuple[float, tuple[float, ...]] | None = None
        self._left_soon, self._grown, self._most = 0.0, 0, 0.0
        self._levels: deque[tuple[float, float, float]] = deque()
        """Connections beside the requests in flight, and those, by time, while tokens came."""
        self._silence = Silence()
        self.values: dict[str, float | None] = dict.fromkeys(OPEN_CALLS_SIGNALS)
        """The signals, as of the newest scrape."""

    def update(self, t_s: float, values: Values, signals: Signals, *, token: bool) -> None:
        """Take a scrape into account; `token`: tokens were generated since the one before."""
        running, files = signals.get("running"), signals.get("open_files")
        in_flight = (running or 0.0) + (signals.get("waiting") or 0.0)
        if values.totals is None:
            return
        now = (t_s, values.totals)
        if token:
            # Calls may have ended since the scrape before, after the last token.
            self.begun = self._before or now
            self._left_soon, self._grown, self._most = 0.0, 0, 0.0
            if files is not None:
                self._levels.append((t_s, files - in_flight, in_flight))
                while len(self._levels) > 1 and self._levels[1][0] < t_s - LEVEL_S:
                    self._levels.popleft()
        self._before = now
        self.values = dict.fromkeys(OPEN_CALLS_SIGNALS)
        self.values[SILENT] = self._silence.update(t_s, values, in_flight)
        if self.begun is None or running is None:
            return
        if token:  # the levels of ten minutes matter only once tokens stop
            self.values[CANCELLED] = 0.0
            if files is not None:
                self.values[AT_THE_DOOR], self.values[PILED] = 0.0, self._piled(t_s)
            return
        # Calls that do not reach the engine pile up while it still serves those before them.
        settled_s = self._levels[-1][0] - LAG_S if self._levels else 0.0
        levels = [level for at_s, level, _ in self._levels if at_s <= settled_s]
        is_open = None
        if files is not None:
            door = self._at_the_door(files - in_flight, levels, t_s - self.begun[0])
            self.values[AT_THE_DOOR], self.values[PILED] = door, 0.0
            is_open = files - min(levels) if levels else None
        self.values[CANCELLED] = self._cancelled(now, in_flight, is_open)

    def _piled(self, t_s: float) -> float:
        """Connections beyond any earlier level, while the engine serves others; 0 if few."""
        (_, first, _), (_, last, in_flight) = self._levels[0], self._levels[-1]
        if last - first - in_flight < PILED_MIN:  # it cannot be more than this
            return 0.0
        newest = [level for at_s, level, _ in self._levels if at_s >= t_s - LAG_S]
        earlier = [level for at_s, level, _ in self._levels if at_s <= t_s - PILED_S]
        kept = max(running for *_, running in self._levels)
        piled = min(newest) - max(earlier, default=inf) - kept
        return piled if piled >= PILED_MIN else 0.0

    def _at_the_door(self, beside: float, levels: Sequence[float], idle_s: float) -> float:
        """Connections beyond their level; 0 unless they are many, and grow or stay. They may have
        grown at the scrape with the last token already."""
        if not levels:
            return 0.0
        level = max(levels)
        self._note(self._levels[-1][1] - level)
        beyond = beside - level
        self._note(beyond)
        stay_s = IDLE_S if self._grown >= GROWTH_MIN else KEPT_S
        return beyond if beyond >= OPEN_MIN and idle_s >= stay_s else 0.0

    def _note(self, beyond: float) -> None:
        if beyond > self._most:
            self._most, self._grown = beyond, self._grown + 1

    def _cancelled(
        self, now: tuple[float, tuple[float, ...]], in_flight: float, is_open: float | None
    ) -> float | None:
        """1 if the calls of (nearly) all requests in flight were cancelled, else 0; None if
        unknown. `is_open`: the most calls that may be open, by the connections."""
        (t_s, totals), (begun_s, before) = now, self.begun or now
        if not totals[ACCEPTED] and is_open is None:
            return None
        if in_flight < 1:
            return 0.0
        ended = totals[ACCEPTED] - before[ACCEPTED] - (totals[FINISHED] - before[FINISHED])
        left = max(ended, 0.0 if is_open is None else in_flight - is_open)
        if t_s - begun_s <= SOON_S:
            self._left_soon = left
        share = min(left, self._left_soon) / in_flight
        return 1.0 if share >= ALL_CANCELLED and ended <= MORE * in_flight else 0.0


# --- Derived signals, and streaks -----------------------------------------------------------------


NO_BASELINE = "no baseline from quiet times yet"
NO_TARGET = "no TTFT target (slo.ttft_p99_s)"
ABORTED = ("finished_reason", "abort")
"""Aborted requests are no progress: a stalled engine still counts requests that clients give up."""

FILLED_MIN = 0.005
"""A prefill is progress if it raises KV usage above its maximum by this share of the cache."""

NEAR_BASELINE = 0.9
"""A hit ratio of at least this share of its baseline has not fallen."""

TYPICAL = 3.0
"""If the mean prompt exceeds this many medians, most requests are short and a few are long.

The share of requests that hit then says nothing about the share of tokens that hit.
"""

COMPUTED_AT_MOST = 0.25
"""A request that computes at most this share of a median prompt has hit almost fully."""

SPREAD_STEPS_MIN = 4
"""Fewest scrapes with requests for computing a spread."""

LONGEST_PREFILL_S = 120.0
"""A prefill explains no longer silence than this, unless it keeps filling the KV cache."""

OUTPUT_MULTIPLE, QUEUE_OF_LIMIT = 3.0, 0.85
"""The output limit over the baseline mean: few legitimate outputs are longer. The share of the TTFT
target that the queue may use: the guide says 80 to 90% (9.4)."""

PAUSE_MARGIN = 1.5
"""Margin for the next prompt: it may be longer than earlier ones."""


LONGEST = Minimum(Live("output_tokens_p99"), Number(4096.0))
"""Tokens of the longest answer that admission expects: SGLang expects at most 4,096."""


DERIVED: Mapping[str, Quantity] = {
    "preempted_in_window": WindowSeconds() * Live("preemption_per_s"),
    "errors_in_window": WindowSeconds() * Live("finished_error_per_s"),
    "accepted_in_window": WindowSeconds() * Live("accepted_per_s"),
    **{
        f"{name}_drift_ratio": Live(of) / BaselineValue(of)
        for name, of in (
            ("ttft_p99", "ttft_p99_s"),
            ("ttft_p50", "ttft_p50_s"),
            ("itl_p99", "itl_p99_s"),
            ("itl_p50", "itl_p50_s"),
            ("itl_mean", "itl_mean_s"),
            ("ttft_p99_p50", "ttft_p99_p50_ratio"),
            ("kv_transfer", "kv_transfer_mean_s"),
        )
    },
    "finished_length_drift_points": Live("finished_length_ratio")
    - BaselineValue("finished_length_ratio"),
    "prefix_hit_quiet_ratio": BaselineValue("prefix_hit_ratio"),
    "prefill_busy_ratio": Live("arrival_per_s") * Live("prefill_mean_s"),
    "prompt_tail_ratio": Live("prompt_tokens_p99") / Live("prompt_tokens_p95"),
    "prompt_p99_kv_share_ratio": Live("prompt_tokens_p99") / Live("kv_capacity_tokens"),
    "kv_claimed_ratio": Live("kv_usage_avg_ratio")
    + (
        Live("prompt_tokens_mean")
        + LONGEST
        + Live("kv_reserve_share_ratio")
        * Live("running_avg")
        * (LONGEST - 0.5 * Live("output_tokens_mean"))
    )
    / Live("kv_capacity_tokens"),
    "queue_wait_estimate_ratio": Live("expected_wait_s") / Target("ttft_p99_s"),
    "input_limit_tokens": (2.0 * Live("prompt_tokens_p95")).at_least(Live("prompt_tokens_p99")),
    "output_limit_tokens": OUTPUT_MULTIPLE * BaselineValue("output_tokens_mean"),
    "queue_limit": (QUEUE_OF_LIMIT * Target("ttft_p99_s") - Live("prefill_mean_s").otherwise(0.0))
    * (Live("waiting_avg") / Live("expected_wait_s")),
    "spec_accepted_usual_tokens": UsualValue(SPEC_ACCEPTED.signal),
}
"""The derived signals with an expression, evaluated at each scrape; `derived_signals.toml` has the
help texts. The unit ends the key; plain counts have none."""


def _reads(of: Quantity, *kinds: type[Quantity]) -> bool:
    return any(isinstance(node, kinds) for node in nodes(of))


_OF_BASELINE = {key for key, of in DERIVED.items() if _reads(of, BaselineValue, UsualValue)}

BLANK: Mapping[str, float | None] = dict.fromkeys(DERIVED)
"""The derived signals with an expression, in order, without values."""

momentary = each_value({key: of for key, of in DERIVED.items() if key not in _OF_BASELINE})
"""Values of the derived signals that one moment suffices for, by key."""

against_baseline = each_value({key: of for key, of in DERIVED.items() if key in _OF_BASELINE})
"""Values of the derived signals that compare a signal with its baseline, by key."""

_GAPS = {
    key: NO_BASELINE if _reads(of, BaselineValue) else NO_TARGET
    for key, of in DERIVED.items()
    if _reads(of, BaselineValue, Target)
}
"""Why a derived signal may be unknown although its signals have values."""


def derive(
    values: Values, baseline: Baseline, targets: Targets
) -> tuple[dict[str, float | None], dict[str, str]]:
    """The signals, with those added that compare a signal with its baseline.

    Also returns the reasons for missing values, where known.
    """
    signals = dict(values.signals)
    signals |= against_baseline(
        Moment(values.signals, targets, baseline=baseline, window_s=values.window_s)
    )
    notes = {
        key: gap
        for key, gap in _GAPS.items()
        if signals[key] is None and (gap is NO_BASELINE or targets.ttft_p99_s is None)
    }
    hit_ratio, quiet = signals.get("prefix_hit_ratio"), baseline.get("prefix_hit_ratio")
    if hit_ratio is not None and quiet is not None and hit_ratio < NEAR_BASELINE * quiet:
        signals[HIT_SPREAD] = hit_spread(values.prefix_counts)
    return signals, notes


UNFORGIVING = frozenset({"stalled"})
"""Conditions that a single scrape to the contrary ends: one generated token is progress."""

FORGIVEN_WINDOWS = {"far_off": 0.25, "pauses": 0.25}
"""Conditions that end only once they have not held for such a part of the window: what pauses
streams leaves the window before it comes back."""


class Streaks:
    """How long conditions have held. A single scrape to the contrary does not end a streak, nor do
    those of `FORGIVEN_WINDOWS`.

    `conditions` are the conditions that causes use. Whether the engine is stalled is computed from
    scrape to scrape instead.
    """

    def __init__(self, conditions: Callable[[Moment], tuple[str, ...]]) -> None:
        self._conditions = conditions
        self.progress = Progress()
        self._since_s: dict[str, float] = {}
        self._doubted: dict[str, float] = {}

    def forget(self) -> None:
        """Drop all streaks, because the process was replaced."""
        self.progress = Progress()
        self._since_s.clear()
        self._doubted.clear()

    def update(self, now_s: float, values: Values, moment: Moment) -> dict[str, float]:
        """Seconds for which each condition has held; conditions that do not hold are left out.

        `moment` has all but the streaks.
        """
        holds = self._conditions(moment)
        if not self.progress.update(now_s, values, moment.values):
            holds = (*holds, "stalled")
        since_s, doubted = self._since_s, self._doubted
        for name in since_s.keys() - holds:
            doubted_s = doubted.setdefault(name, now_s)
            is_first = doubted_s == now_s and name not in UNFORGIVING
            if (
                not is_first
                and now_s - doubted_s >= FORGIVEN_WINDOWS.get(name, 0.0) * values.window_s
            ):
                del since_s[name], doubted[name]
        for name in holds:
            doubted.pop(name, None)
            since_s.setdefault(name, now_s)
        return {name: now_s - since_s for name, since_s in self._since_s.items()}


STOP_MIN_S = 10.0
"""Shorter stops are pauses of streams."""

OVERDUE, APART_MAX_S = 1.3, 600.0
"""Stops recur until the next one is overdue by this ratio; stops that are further apart do not."""


class Progress:
    """Whether an engine makes progress, checked at each scrape, and its last two stops: requests
    ran, no token came, and no prefill explained it.

    Generated tokens and finished requests are progress. Prompt tokens and changes of KV usage are
    not: vLLM may prefill a prompt that does not fit again and again.

    vLLM counts the tokens of a prefill only at its end. So a long prefill is also progress while it
    fills more of the KV cache than was filled at any time since the last token. Without chunked
    prefill it is a single step, in which no gauge moves; `prefill_silence_s` is how long that may
    take.
    """

    def __init__(self) -> None:
        self.open_calls = OpenCalls()
        self._stopped_s, self._apart_s, self._stop_lasts_s = -math.inf, math.inf, 0.0
        self._filled = self._held = 0.0
        self._token_s = self._silent_s = self._longest_pause_s = 0.0
        self._prefill_s_per_token = self._longest_prefill_s = 0.0
        self._counted_max_s = math.inf
        self._runs = True
        self._admitted_s, self._most = math.inf, 0.0

    def update(self, now_s: float, values: Values, signals: Signals) -> bool:
        """Whether there was progress since the previous scrape.

        True without requests, and if the page has no token counters.
        """
        running, usage = signals.get("running") or 0.0, signals.get("kv_usage_ratio") or 0.0
        generated = values.generated
        token = generated is None or generated > 0
        begun = self.open_calls.begun
        self.open_calls.update(now_s, values, signals, token=token)
        self.open_calls.values |= self._stops(now_s) | self._unadmitted(now_s, values, signals)
        has_requests = self._has_requests(signals)
        if not has_requests or generated is None or generated > 0 or values.answered:
            if self._silent_s and has_requests:
                self._went_on(values, None if begun is None else begun[1])
            self._filled = self._held = usage
            self._token_s, self._silent_s, self._runs = now_s, 0.0, True
            return True
        self._silent_s = now_s - self._token_s
        self._runs = self._runs and min(running, decoding(values.totals)) >= 1
        self._prefill_s_per_token = values.prefill_s_per_token
        self._longest_prefill_s = values.longest_prefill_s
        if running and usage >= self._filled + FILLED_MIN:
            self._filled = usage
            return True
        return False

    def _went_on(self, values: Values, before: tuple[float, ...] | None) -> None:
        """The engine goes on after a silence: note whether a prefill explains that, or whatever
        else comes before a first token. If not, it stopped, and so did what was under prefill: its
        time says nothing of prefills."""
        totals, silent_s = values.totals, self._silent_s
        if (
            totals is None
            or before is None
            or self._filled > self._held
            or not self._runs
            or prefill_explains(silent_s, before, totals, self._prefill_s_per_token)
        ):
            if values.arrivals:
                self._longest_pause_s = max(self._longest_pause_s, silent_s)
        elif silent_s >= STOP_MIN_S:
            self._apart_s, self._stopped_s = self._token_s - self._stopped_s, self._token_s
            self._stop_lasts_s = silent_s
            self._counted_max_s = min(self._counted_max_s, self._longest_prefill_s)

    def _stops(self, now_s: float) -> dict[str, float]:
        """Seconds between the last two stops, the share of time that they take, and seconds until
        the next one is due; empty where they do not recur."""
        due_s, apart_s = self._stopped_s + self._apart_s - now_s, self._apart_s
        if apart_s > APART_MAX_S or -due_s > (OVERDUE - 1.0) * apart_s:
            return {}
        return {STOPS_EVERY: apart_s, STOPPED: self._stop_lasts_s / apart_s, STOP_DUE: due_s}

    def _unadmitted(self, now_s: float, values: Values, signals: Signals) -> dict[str, float]:
        """Seconds for which requests have queued and none had a first token, while at most half as
        many ran as this process has run at once; empty otherwise."""
        running, queued = signals.get("running") or 0.0, signals.get("waiting_by_capacity") or 0.0
        self._most = max(self._most, running)
        if values.arrivals != 0.0 or queued < 1 or not 1 <= running <= self._most / 2:
            self._admitted_s = now_s
        return {UNADMITTED: now_s - self._admitted_s} if now_s > self._admitted_s else {}

    def _has_requests(self, signals: Signals) -> bool:
        """Whether requests are in flight, by the gauges or at the API server's door."""
        of_calls = self.open_calls.values
        if (of_calls[CANCELLED] or 0.0) >= ALL_CANCELLED:
            return False
        in_flight = (signals.get("running") or 0.0) + (signals.get("waiting") or 0.0) >= 1
        return in_flight or bool(of_calls[AT_THE_DOOR]) or _unanswered(signals)

    def prefill_silence_s(self, values: Values, signals: Signals) -> float:
        """Seconds for which one prefill may delay the next token; 0 after a token or while nothing
        runs."""
        if not self._silent_s or not signals.get("running"):
            return 0.0
        taken_tokens = (self._filled - self._held) * (signals.get("kv_capacity_tokens") or 0.0)
        explained_s = max(
            PAUSE_MARGIN * self._longest_pause_s,
            min(values.longest_prefill_s, self._counted_max_s),
            SPEED_MARGIN * taken_tokens * values.prefill_s_per_token,
        )
        return min(explained_s, LONGEST_PREFILL_S)


def _unanswered(signals: Signals) -> bool:
    """Whether HTTP calls ended in the window, but no request finished and no token was generated.

    A stalled engine may show no request at all.
    """
    out = (signals.get("completed_per_s") or 0.0) + (signals.get("generation_tokens_per_s") or 0.0)
    return (signals.get("accepted_in_window") or 0.0) >= CALLS_MIN and not out


def hit_spread(counts: Sequence[tuple[float, ...]]) -> float | None:
    """The spread of hits in standard deviations; see `spread_sigmas`.

    It is the lower of the whole window's and its newest half's spread: the newest half shows a fall
    first.
    """
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
