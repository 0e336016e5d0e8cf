"""The rates of the present load, and how much KV cache and batch it needs. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from math import exp, floor, inf, pi, sqrt
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.account_signals import ANSWERS, COMPUTED, DEMAND, SPEED
from kneewatch.diagnose.causes.kv_and_queue import GROWS_FROM_PER_S
from kneewatch.diagnose.deployment.deployment import Deployment

KV_TARGET_RATIO = 0.9
"""Highest KV usage that does not lead to preemptions: the guide's band ends at 90% (9.3)."""

KV_AIM_RATIO = 0.8
"""KV usage that recommended sizes aim at, within the guide's 75 to 90%."""

SPREADS = 3.0
"""Standard deviations above the mean; the sum of all requests exceeds this 0.1% of the time."""

Z_95 = 1.645
"""Standard deviations from the mean to the 95th percentile of a normal distribution."""

SHARED_FROM = 0.1
"""From this share of cached prompt tokens on, prompts count as sharing prefixes."""

LEAST_PER_S = 1e-3
"""About one request in 15 minutes; lower rates count as 0."""

GIVEN_UP_FROM = 1.1
"""From this ratio of accepted to served requests on, clients leave the queue unserved."""

MOST_ABORTED = 0.5
"""From this share of aborted requests on, clients give up; fewer may be meant."""

TREND_WINDOWS, TREND_S = 4.0, 120.0
"""The growth of the queue is that of so many windows, at least of so many seconds."""

PARTS = 4
WINDOW_SEEN = 0.99

GROWTH_DEVIATIONS, GROWTH_SERVED = 2.0, 25.0
"""Requests arrive on their own where those in flight grow by so many standard deviations of the
requests served, of at least so many served: clients of a loop are on their way now and then. That
they become fewer shows nothing: clients may leave."""

RISEN_RATIO = 1.25
"""More requests than the mean of the window by this ratio are no noise."""

CHANCE = 0.01
"""Independent arrivals keep as few more or fewer in flight at most so often: below, the loop is
closed."""

BETWEEN_SCRAPES = 1.165
"""Standard deviations from scrape to scrape by which a random walk is wider than its scrapes show:
twice 0.5826, the known correction of a boundary that is looked at from time to time."""


class QueueTrend(Struct, frozen=True):
    """How the requests in flight change.

    `growth_per_s` is arrivals minus completions. `callers`: the clients that each send the next
    request once the last one is answered (a closed loop), `is_closed`, or may do so; None if
    requests arrive on their own. `is_measured`: rates of a window are those of the queue.
    """

    growth_per_s: float
    callers: float | None = None
    is_closed: bool = False
    is_measured: bool = True


class QueueHistory:
    """Requests in flight on one engine since an incident began, or since requests wait.

    A queue that returns within a window is the same queue.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, bool]] = deque()
        self._last_s = -inf
        self._is_open = False

    def spans(self, window_s: float) -> bool:
        """Whether it has about a window: scrapes are not exactly at its ends."""
        seen = self._seen
        return bool(seen) and seen[-1][0] - seen[0][0] >= WINDOW_SEEN * window_s

    def measures(self, window_s: float) -> bool:
        """Whether the rates of a window are the queue's: those of a scrape are of the time since
        the one before. `diagnose` watches for a window."""
        seen = self._seen
        if len(seen) < 2:
            return False
        return 2 * seen[-1][0] - seen[-2][0] - seen[0][0] >= WINDOW_SEEN * window_s

    def forget(self) -> None:
        """Start anew with the next incident or queue."""
        self._seen.clear()
        self._is_open = False

    def add(
        self,
        now_s: float,
        values: Mapping[str, float | None],
        window_s: float,
        *,
        is_incident: bool,
    ) -> None:
        """Add the requests in flight of a scrape, and drop those that a trend leaves out."""
        waiting, seen = values.get("waiting") or 0.0, self._seen
        if waiting >= 1 or is_incident:
            self._last_s = now_s
        elif now_s - self._last_s > window_s:
            self.forget()
            return
        seen.append((now_s, (values.get("running") or 0.0) + waiting, waiting >= 1))
        while now_s - seen[0][0] > max(TREND_WINDOWS * window_s, TREND_S):
            seen.popleft()

    def trend(self, values: Mapping[str, float | None], window_s: float) -> QueueTrend:
        """The trend up to the scrape that was added last, whose values these are.

        Until the queue was seen for a window, growth is the slope of that window. It then counts as
        no more than the served rate, because a burst looks the same, nor as more than the queue
        itself has grown.
        """
        served_per_s = _served_per_s(values)
        growth_per_s, is_measured = self._growth_per_s(), True
        grows = self._grows(growth_per_s, served_per_s)
        if not self.spans(window_s):
            is_measured = self.measures(window_s)
            most_per_s = growth_per_s if is_measured else inf
            slope_per_s = values.get("waiting_slope_per_s") or 0.0
            growth_per_s = min(slope_per_s, served_per_s, most_per_s)
        callers = self._callers(served_per_s, window_s)
        is_closed = callers is not None
        self._is_open = not is_closed and (self._is_open or grows)
        if not is_closed and not self._is_open:
            since_s = self._seen[-1][0] - window_s
            callers = max(requests for t_s, requests, _ in self._seen if t_s >= since_s)
        return QueueTrend(growth_per_s, callers, is_closed, is_measured)

    def _grows(self, growth_per_s: float, served_per_s: float) -> bool:
        """Whether more requests arrive than are served, beyond doubt."""
        seen_s = self._seen[-1][0] - self._seen[0][0]
        served = max(GROWTH_SERVED, served_per_s * seen_s)
        return growth_per_s * seen_s > GROWTH_DEVIATIONS * sqrt(served)

    def _growth_per_s(self) -> float:
        """The median growth of equal parts: a burst shows in one of them only; 0 at one scrape."""
        first_s, last_s = self._seen[0][0], self._seen[-1][0]
        ends = [self._seen[0]]
        for part in range(1, PARTS + 1):
            until_s = first_s + part * (last_s - first_s) / PARTS
            end = next(each for each in self._seen if each[0] >= until_s - 1e-6)
            if end[0] > ends[-1][0]:
                ends.append(end)
        parts = [(then[1] - before[1]) / (then[0] - before[0]) for before, then in pairwise(ends)]
        return median(parts or [0.0])

    def _callers(self, served_per_s: float, window_s: float) -> float | None:
        now_s, requests, _ = self._seen[-1]
        low = high = requests
        callers = None
        for scrapes, (t_s, in_flight, waits) in enumerate(reversed(self._seen)):
            low, high = min(low, in_flight), max(high, in_flight)
            if not waits:
                break
            seen_s = now_s - t_s
            if seen_s >= window_s and _chance(high - low, served_per_s * seen_s, scrapes) < CHANCE:
                callers = high
        return callers


def _chance(span: float, served: float, steps: int) -> float:
    """How often independent arrivals keep the requests in flight within a span at each of so many
    scrapes while so many are served: a random walk between two walls."""
    wide = span + 1 + BETWEEN_SCRAPES * sqrt(served / steps)
    return exp(-served * (pi / wide) ** 2 / 2)


class Demand(Struct, frozen=True, kw_only=True):
    """What the load needs, whether it is served or not.

    - `requests`: the most requests that run at once when nobody waits; sizes are for these. Those
      of a closed loop are its callers. The backlog of other loads is not among them, because it has
      to be served only once.
    - `mean_requests`: their mean over the window; mean latencies are for these.
    - `in_flight`: the mean number of requests that run or wait for capacity.
    - `deferred`: the mean number of requests that wait for something else, such as an adapter.
    - `callers`: the clients of a closed loop (`is_closed`), or of what may be one; None where
      requests arrive on their own.
    - `held_tokens`: mean KV cache of a running request in tokens; None if unknown.
    - `spread_tokens`: its standard deviation: requests grow while they run, and lengths differ.
    - `prompts_vary`, `outputs_vary`: the squared coefficient of variation of their lengths.
    - `served_per_s`, `arrival_per_s`: requests/s.
    - `proven_per_s`: requests/s that it can serve as far as is known: more than now where it
      computes preempted requests again.
    - `repeats`: arrivals are calls, of which clients give up many and may send them again.
    - `is_measured`: `arrival_per_s` is of a whole window of the queue.
    """

    requests: float
    mean_requests: float
    running: float
    waiting: float
    held_tokens: float | None
    served_per_s: float
    arrival_per_s: float
    input_tokens: float | None
    output_tokens: float | None
    saved_ratio: float
    spread_tokens: float = 0.0
    prompts_vary: float = 0.0
    outputs_vary: float = 0.0
    in_flight: float = 0.0
    deferred: float = 0.0
    callers: float | None = None
    is_closed: bool = False
    repeats: bool = False
    proven_per_s: float = 0.0
    is_measured: bool = True

    @property
    def may_be_callers(self) -> bool:
        """Whether a closed loop can be told neither from a backlog nor from requests on their
        own."""
        return self.callers is not None and not self.is_closed

    @property
    def computed_tokens(self) -> float:
        """Mean tokens of a prompt that no cache saves; 0 if lengths are unknown."""
        return (self.input_tokens or 0.0) * (1 - self.saved_ratio)

    @property
    def tokens(self) -> float | None:
        """KV tokens of all requests together; None if unknown."""
        return None if self.held_tokens is None else self.requests * self.held_tokens

    @property
    def load_ratio(self) -> float | None:
        """Arrivals over served requests; below 1 while a backlog drains, None if none is served."""
        return self.arrival_per_s / self.served_per_s if self.served_per_s > 0 else None

    @property
    def asked_ratio(self) -> float | None:
        """Arrivals over what can be served; None if that is unknown."""
        return self.arrival_per_s / self.proven_per_s if self.proven_per_s > 0 else None

    def peak_tokens(self, requests: float) -> float:
        """KV tokens that this many independent requests rarely exceed."""
        return requests * (self.held_tokens or 0.0) + SPREADS * self.spread_tokens * sqrt(requests)

    def most_requests(self, capacity_tokens: float, *, usage_ratio: float) -> int:
        """The most requests whose mean stays within `usage_ratio` and whose peak fits.

        The condition for the peak, h n + k s sqrt(n) <= c, is a quadratic in sqrt(n).
        """
        held = self.held_tokens or 1.0
        margin = SPREADS * self.spread_tokens
        root = (sqrt(margin**2 + 4 * held * capacity_tokens) - margin) / (2 * held)
        return floor(min(usage_ratio * capacity_tokens / held, root**2))


def demand(
    values: Mapping[str, float | None], server: Deployment, trend: QueueTrend | None = None
) -> Demand:
    """The present demand, from the signals of one engine.

    vLLM counts a request only at its first token, so the arrival rate is the served rate plus the
    growth of the queue: by `trend`, or without one by the window's slope. If the HTTP server
    accepts clearly more requests, that rate is used, because clients that give up leave the queue.
    While the running requests are unknown, so are the tokens of all.
    """

    def get(key: str) -> float:
        return values.get(key) or 0.0

    running = max(get("running_avg"), get("running"))
    by_capacity = get("waiting_by_capacity")
    deferred = get("waiting_deferred_avg")
    waiting = max(by_capacity, get("waiting_avg") - deferred)
    now = get("running") + by_capacity
    mean = get("running_avg") + max(0.0, get("waiting_avg") - deferred)
    # Requests between the client and the engine are in none of the engine's gauges. With
    # preemption many requests end, and so arrive, at once. So estimate them by Little's law from
    # the tokens/s, which are even.
    length_tokens = get("output_tokens_mean") or inf
    by_little = get("generation_tokens_per_s") / length_tokens * get("e2e_mean_s")
    finished = _served_per_s(values)
    # Where most clients leave, their requests are calls, which they may send again.
    aborted = get("finished_abort_per_s")
    served = max(0.0, finished - aborted) if aborted >= MOST_ABORTED * finished else finished
    in_flight = max(now, mean, get("running_max"))
    in_flight_mean = min(in_flight, max(mean, by_little) or now)
    growth_per_s = get("waiting_slope_per_s") if trend is None else trend.growth_per_s
    grows = growth_per_s if abs(growth_per_s) > GROWS_FROM_PER_S else 0.0
    callers = None
    if waiting >= 1:
        # One window alone may be that of a closed loop, unless the queue grows or shrinks.
        at_most = (None if grows else in_flight) if trend is None else trend.callers
        callers = at_most and max(at_most, in_flight)
    arrival = max(0.0, served + grows)
    proven = max(served, _before_preemption_per_s(values, arrival))
    if repeats := (calls := max(get("accepted_per_s"), finished)) > GIVEN_UP_FROM * served:
        arrival = max(arrival, calls)
    # Without them, nobody knows how many requests of which length share the cache.
    is_shown = values.get("running") is not None or values.get("running_avg") is not None
    requests, requests_mean = callers or in_flight, in_flight_mean
    if callers is not None:
        # While callers become more, the window's mean lies behind.
        requests_mean = now if now > RISEN_RATIO * in_flight_mean else in_flight_mean
    elif waiting >= 1:
        # They run for as long as those that are served now, or were before preemption. Where none
        # is served, that is unknown, and the backlog is no measure of it.
        times = max(1.0, arrival / proven) if proven else 1.0
        requests = min(in_flight, running * times)
        requests_mean = min(in_flight_mean, requests)
    return Demand(
        requests=requests,
        mean_requests=requests_mean,
        running=running,
        waiting=waiting,
        held_tokens=_held_tokens(values, server) if is_shown else None,
        served_per_s=served,
        arrival_per_s=arrival,
        input_tokens=(values.get("prompt_tokens_mean") or values.get("prompt_tokens_p50"))
        if is_shown
        else None,
        output_tokens=values.get("output_tokens_mean") or values.get("output_tokens_p50"),
        saved_ratio=min(1.0, max(0.0, get("prefix_saved_ratio"))),
        spread_tokens=_spread_tokens(values),
        prompts_vary=_varies(values, "prompt_tokens"),
        outputs_vary=_varies(values, "output_tokens"),
        in_flight=in_flight_mean,
        deferred=deferred,
        callers=callers,
        is_closed=callers is not None and trend is not None and trend.is_closed,
        repeats=repeats,
        proven_per_s=proven,
        is_measured=trend is None or trend.is_measured,
    )


def _before_preemption_per_s(values: Mapping[str, float | None], arrival_per_s: float) -> float:
    """Requests/s that the engine served in quiet times, at its present work and speed; 0 unless it
    preempts now."""
    moved = values.get(DEMAND)
    if not moved or not values.get("preemption_per_s"):
        return 0.0
    work = max(1.0, values.get(COMPUTED) or 1.0, values.get(ANSWERS) or 1.0)
    return arrival_per_s / moved * min(1.0, values.get(SPEED) or 1.0) / work


def _served_per_s(values: Mapping[str, float | None]) -> float:
    """Requests/s; 0 if there is about none.

    A burst of long answers, or clients that hang up: requests begin, and few of them finish.
    """
    served = max(values.get("completed_per_s") or 0.0, values.get("arrival_per_s") or 0.0)
    return served if served >= LEAST_PER_S else 0.0


def ahead(now: Demand, values: Mapping[str, float | None]) -> Demand:
    """The demand that the KV forecast expects within minutes: the present load, grown along its
    trend."""
    peak, expected = values.get("kv_peak_demand_ratio"), values.get("kv_demand_ahead_ratio")
    if not peak or expected is None or expected <= peak:
        return now
    times = expected / peak
    return replace(
        now,
        requests=times * now.requests,
        mean_requests=times * now.mean_requests,
        in_flight=times * now.in_flight,
        running=times * now.running,
        served_per_s=times * now.served_per_s,
        arrival_per_s=times * now.arrival_per_s,
    )


def _spread_tokens(values: Mapping[str, float | None]) -> float:
    """Standard deviation of the KV tokens of a running request; 0 if lengths are unknown.

    At a random moment, a request holds between its prompt and its prompt plus output. The spread of
    lengths is computed from their P95.
    """
    output = values.get("output_tokens_mean") or 0.0
    variance = output**2 / 12
    for mean, tail in (
        (values.get("prompt_tokens_mean"), values.get("prompt_tokens_p95")),
        (output / 2, (values.get("output_tokens_p95") or 0.0) / 2),
    ):
        variance += _deviation_tokens(mean or 0.0, tail) ** 2
    return sqrt(variance)


def _varies(values: Mapping[str, float | None], lengths: str) -> float:
    mean = values.get(f"{lengths}_mean") or 0.0
    return (_deviation_tokens(mean, values.get(f"{lengths}_p95")) / mean) ** 2 if mean else 0.0


def _deviation_tokens(mean: float, p95: float | None) -> float:
    return max(0.0, (p95 or 0.0) - mean) / Z_95 if mean else 0.0


def _held_tokens(values: Mapping[str, float | None], server: Deployment) -> float | None:
    """Mean KV tokens of a running request, measured or computed from lengths; None if unknown.

    By its lengths, a request holds its prompt, half of its output and half of a block on average.
    Only this figure includes tokens that preemption has freed. Only the measured figure includes
    the savings of shared prefixes. The larger one is used, unless prefixes are shared.
    """
    measured, by_length = None, None
    usage, running = values.get("kv_usage_avg_ratio"), values.get("running_avg")
    if usage and running and running >= 1 and server.capacity_tokens:
        measured = usage * server.capacity_tokens / running
    prompt, output = values.get("prompt_tokens_mean"), values.get("output_tokens_mean")
    if prompt is not None and output is not None:
        by_length = prompt + output / 2 + (server.launch.block_tokens or 16) / 2
        layout, blocks = server.layout, server.blocks
        if layout is not None and layout.has_windows and blocks and server.capacity_tokens:
            # The capacity counts requests in prefill, which hold more than their window.
            share_ratio = layout.decode_blocks(int(by_length)) / blocks
            by_length = share_ratio * server.capacity_tokens
    if measured is None and by_length is None:
        return None
    shared = measured is not None and (values.get("prefix_saved_ratio") or 0.0) > SHARED_FROM
    held = measured if shared else max(measured or 0.0, by_length or 0.0)
    return max(1.0, held or 0.0)
