"""The most requests in flight that keep the targets on one replica. Pure.

Latencies grow with the requests in flight, so the highest concurrency is found by bracketing:
guide, operating point (C_max at the SLO), here on the predicted curve instead of a measured one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf, isfinite

from kneewatch.diagnose.sizing.speed.closed_loop import ClosedLoop, Latency, Load, closed_loop
from kneewatch.diagnose.sizing.speed.costs import Costs
from kneewatch.diagnose.sizing.speed.efficiency import DEFAULT, Efficiency
from kneewatch.diagnose.sizing.speed.roofline import Performance, performance_of

TTFT, ITL = "TTFT", "ITL"
TOKEN_BUDGET = "token budget"
RUNNING_LIMIT = "running limit"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest concurrency that keeps the targets, and the speed there.

    `concurrency` is 0 where one request alone misses a target; `performance` is then that
    request's. `binding` says what one request more would break: TTFT, ITL, the token budget (more
    in flight would only wait) or the running limit (KV cache or max_num_seqs).
    """

    concurrency: int
    performance: Performance
    binding: str


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds that must not be exceeded; None: no target."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def strain(self, speed: Latency | Performance) -> tuple[float, str]:
        """The worst ratio of a latency to its target, above 1 when it is missed, and which."""
        worst = (0.0, RUNNING_LIMIT)
        if self.ttft_s is not None:
            worst = max(worst, (speed.ttft_s / self.ttft_s, TTFT))
        if self.itl_s is not None:
            worst = max(worst, (speed.itl_s / self.itl_s, ITL))
        return worst


def capacity(
    costs: Costs, load: Load, targets: Targets, efficiency: Efficiency = DEFAULT
) -> Capacity:
    """The highest concurrency from 1 to `load.concurrency` that keeps the targets.

    Raises:
        SizingError: a load that cannot be, named.
    """
    loop = closed_loop(costs, load, efficiency)
    found = _highest(loop, int(load.concurrency), targets)
    return Capacity(found[0], performance_of(loop, found[1]), found[2])


def _highest(loop: ClosedLoop, high: int, targets: Targets) -> tuple[int, Latency, str]:
    """The highest concurrency, what it sees, and what one more would break."""
    best = loop.at(high)
    strain, binding = _strain(targets, best)
    if strain <= 1:
        return high, best, RUNNING_LIMIT
    low, missed = 0, best
    # Secants through the last two points, as latencies are nearly straight lines; the middle where
    # there is none, or where the bracket did not halve in two steps.
    before, last, widths = (0, 0.0), (high, strain), (inf, inf)
    while high - low > 1:
        middle = (low + high) // 2
        rise = (last[1] - before[1]) / (last[0] - before[0])
        if isfinite(rise) and rise > 0 and 2 * (high - low) <= widths[0]:
            middle = min(max(last[0] + floor((1 - last[1]) / rise), low + 1), high - 1)
        widths = widths[1], high - low
        found = loop.at(middle)
        strain, what = _strain(targets, found)
        before, last = last, (middle, strain)
        if strain <= 1:
            low, best = middle, found
        else:
            high, missed, binding = middle, found, what
    if low:
        return low, best, binding
    strain, alone = targets.strain(missed)
    # One request that waits for nobody else is no queue.
    return (0, missed, alone) if strain > 1 else (1, missed, binding)


def _strain(targets: Targets, speed: Latency) -> tuple[float, str]:
    # Requests that only wait for prompts to come in add no throughput.
    return (inf, TOKEN_BUDGET) if speed.queueing else targets.strain(speed)
