"""The input of levers (cause, signals, server, load), and how they make a recommendation. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, floor, inf, isfinite

from msgspec import Struct, field

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.deployment.deployment import Deployment
from kneewatch.diagnose.deployment.vllm_flags import COUNTS, LARGEST
from kneewatch.diagnose.learned.knee import CurveLearner
from kneewatch.diagnose.recommend.advice import Advice, FlagChange, Value
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO, Demand
from kneewatch.diagnose.recommend.step_times import StepTimes, reaches
from kneewatch.rules.formatting import about, percent, plural, singular, span

VERIFY_S = 300.0
"""Seconds within which a change must show its effect at an unchanged load."""

MOVED = 1.25
"""A recommended size changes if the new one goes further by at least this ratio; less is noise."""

MORE_CACHE_FROM = 1.05
"""From this ratio on, a larger KV cache is worth a restart."""

KV_AHEAD = "kv_exhaustion_ahead"
"""For this cause, sizes are for the expected load instead of the present load."""

STEP_TIMES = "step_times"
"""Key of `memo` for decode_factor and prefill_factor: measured over predicted step times.

They come from the present window only, which starts again after a restart.
"""

OWN_STEPS = "own_steps"
"""Key of `memo` for the step times that the server measured itself.

The entry has the number, batches and age of the windows used, and the ratio of the present step
time to the measured one.
"""

PACE_CHANGED_RATIO = 1.25
"""From this ratio of the present step time to the measured one on, the machine's speed has
changed."""

SETTLE_WORDS = f"within {VERIFY_S / 60:.0f} minutes at the same load"


class LeverContext(Struct, frozen=True):
    """One cause on one engine: the cause's id, the signals, the server and the load.

    `curve` has the windows that this engine was measured in; None for an engine without history.
    `own_steps` are the step times in them; None if they are too few.
    `memo` caches values that several levers need. `weekly_peak_requests` is the most requests that
    ran or waited on this engine at once within the last week; None without a week of history.
    `held` has the values by lever that were recommended before in this incident. `pinned` is the
    batch that the engine does not exceed though requests wait; None where no such limit is seen.
    """

    cause: str
    facts: Facts
    server: Deployment
    demand: Demand
    memo: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    weekly_peak_requests: float | None = None
    curve: CurveLearner | None = None
    own_steps: StepTimes | None = None
    held: Mapping[str, Value] = field(default_factory=dict[str, Value])
    pinned: int | None = None

    @property
    def seats(self) -> int | None:
        """The most requests that run at once whatever the KV cache holds: stated, or observed."""
        return self.server.launch.max_num_seqs or self.pinned

    @property
    def for_kv(self) -> bool:
        """Whether the cause is a KV cache that is too small for the load; KV tokens then decide
        sizes."""
        return self.cause in ("kv_pressure", KV_AHEAD)

    def steady(
        self,
        lever: str,
        value: int,
        *,
        lowers: bool = False,
        least: float = -inf,
        most: float = inf,
    ) -> int:
        """The value, or the one recommended before, unless the new one goes clearly further or
        the old one is not within `least` and `most`."""
        held = self.held.get(lever)
        if not isinstance(held, int) or not least <= held <= most:
            return value
        further = value * MOVED <= held if lowers else value >= MOVED * held
        return value if further else held

    def get(self, signal: str) -> float:
        """The value of a signal; 0 if unknown."""
        return self.facts.values.get(signal) or 0.0


Lever = Callable[[LeverContext], Advice | None]


def seats_held(context: LeverContext, *, usage_ratio: float = KV_TARGET_RATIO) -> int | None:
    """Requests of the present size that the KV cache holds at this mean usage; None if unknown.

    Includes a margin for the spread of their lengths.
    """
    capacity, held = context.server.capacity_tokens, context.demand.held_tokens
    if capacity is None or not held:
        return None
    return context.demand.most_requests(capacity, usage_ratio=usage_ratio)


def in_flight(demand: Demand) -> dict[str, float]:
    """The number in `maybe_closed_words`."""
    return {"in_flight": demand.callers} if demand.callers and demand.may_be_callers else {}


def maybe_closed_words(demand: Demand, *, holds: float = inf) -> str:
    """A sentence about a size that serves both a closed loop and other loads, as far as it holds
    the requests in flight; empty if it is known which of them it is."""
    if demand.callers is None or not demand.may_be_callers:
        return ""
    requests = plural(round(demand.callers), "request")
    part = "all" if holds >= demand.callers else f"{holds:.0f} of"
    return f" Sized for {part} {requests} in flight: whether clients wait for them is not measured."


def rounded_down(count: float) -> int:
    """The next round number at or below: whole numbers up to 16, then eighths of powers of two."""
    return _rounded(count, floor)


def rounded_up(count: float) -> int:
    """The next round number at or above."""
    return _rounded(count, ceil)


def _rounded(count: float, to_whole: Callable[[float], int]) -> int:
    whole = to_whole(count)
    if whole <= 16:
        return whole
    step = max(1, 2 ** (whole.bit_length() - 4))
    return int(to_whole(count / step) * step)


def advice(
    context: LeverContext,
    lever_id: str,
    changes: Sequence[tuple[str, Value, Value]],
    summary: str,
    *,
    before: Mapping[str, float] | None = None,
    predicted: Mapping[str, float] | None = None,
    cost_usd_per_hour: float | None = 0.0,
    checks: Sequence[str] = (),
    risk: str = "",
    verify: Sequence[str] = (),
) -> Advice:
    """A recommendation against the context's cause, with what levers.toml has of the lever; free
    unless a cost is given."""
    predicted_numbers = predicted or {}
    lever = packaged_tables("diagnose.recommend", "levers.toml").get(lever_id, {})
    usual = [text.format(settled=SETTLE_WORDS) for text in lever.get("verify", ())]
    summary = singular(f"{summary}{_measured_words(context, predicted_numbers)}")
    return Advice(
        id=lever_id,
        cause=context.cause,
        changes=tuple(
            FlagChange(flag, now, predicted_numbers) for flag, now, predicted_numbers in changes
        ),
        summary=summary,
        before=shown(before or {}),
        predicted=shown(predicted_numbers),
        basis=shown(_basis(context)) if "itl_s" in predicted_numbers else {},
        cost_usd_per_hour=cost_usd_per_hour,
        checks=(*checks, *lever.get("checks", ())),
        risk=risk or lever.get("risk", ""),
        verify=tuple(verify or usual),
        guide=tuple(lever.get("guide", ())),
        unknown=tuple(_unknown(context, predicted_numbers, cost_usd_per_hour)),
    )


def _basis(context: LeverContext) -> Mapping[str, float]:
    factors = {**context.memo.get(STEP_TIMES, {}), "window_s": context.facts.window_s}
    return context.memo.get(OWN_STEPS) or factors


def _measured_words(context: LeverContext, predicted: Mapping[str, float]) -> str:
    """A sentence about the measurements that a predicted speed rests on; empty without a
    prediction."""
    factors, own_steps = context.memo.get(STEP_TIMES), context.memo.get(OWN_STEPS)
    if "itl_s" not in predicted:
        return ""
    if own_steps is not None:
        pace = own_steps["pace_ratio"]
        changed = (
            f" Steps of the same batch now take {about(pace)}x the time that they took in those "
            "windows, and the prediction assumes that they keep this pace."
            if max(pace, 1 / pace) >= PACE_CHANGED_RATIO
            else ""
        )
        if own_steps["running"] > own_steps["most_running"]:
            changed += (
                f" A batch of {own_steps['running']:.0f} was not measured: its step time is "
                "extrapolated from the largest batches."
            )
        return (
            " Speed predicted from this server's own step times: "
            f"{own_steps['windows']:.0f} windows with {own_steps['least_running']:.0f} to "
            f"{own_steps['most_running']:.0f} running requests, median error "
            f"{percent(own_steps['error_ratio'])}.{changed}"
        )
    if factors is None:
        return ""
    window_s = context.facts.window_s
    # A fleet's figures are of one query, whose window the engines' facts do not have.
    times = f"the step times of the last {span(window_s)}" if window_s else "measured step times"
    return (
        f" Speed predicted from {times}: decode takes {factors['decode_factor']:.2f}x "
        f"the roofline's time, prefill {factors['prefill_factor']:.2f}x."
    )


def shown(numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers rounded to four significant digits; infinite and absurdly large numbers are left
    out."""
    return {
        key: value if isinstance(value, int) else float(f"{value:.4g}")
        for key, value in numbers.items()
        if isfinite(value) and abs(value) <= LARGEST
    }


def _unknown(
    context: LeverContext, predicted: Mapping[str, float], cost_usd_per_hour: float | None
) -> Iterator[str]:
    """What cannot be computed, and which input is missing for it."""
    server = context.server
    if "max_concurrency" in predicted and "itl_s" not in predicted:
        yield f"TTFT and ITL after the change ({_why_no_latency(context, predicted)})"
    if cost_usd_per_hour is None:
        needed = {
            "gpu or usd_per_gpu_hour": server.stated.price_usd_per_gpu_hour,
            "tensor_parallel": server.stated.engine_gpus,
        }
        lacks = [name for name, value in needed.items() if value is None]
        if lacks:
            yield f"the cost of the change (set kneewatch's {', and '.join(lacks)})"
    if server.misfit:
        yield f"sizes: the stated model and GPU cannot run as stated ({server.misfit})"
    launch = server.stated.command_line
    for flag in COUNTS if launch is not None else ():
        if launch is not None and launch.unreadable(flag):
            yield f"{flag}: {launch.flags[flag][:40]!r} in the launch file is not a number"


def _why_no_latency(context: LeverContext, predicted: Mapping[str, float]) -> str:
    own_steps = context.memo.get(OWN_STEPS)
    if own_steps is not None:
        running = min(context.demand.requests, predicted["max_concurrency"])
        least, most = own_steps["least_running"], own_steps["most_running"]
        if not reaches(running, least, most):
            side, edge = ("beyond", most) if running > most else ("below", least)
            return f"not measured {side} {plural(round(edge), 'request')} at once"
    if missing := context.server.stated.lacking:
        keys = " and ".join(", ".join(part) for part in (missing[:-1], missing[-1:]) if part)
        return f"set kneewatch's {keys}"
    if not context.get("itl_mean_s"):
        return "vLLM reports no ITL yet"
    if not context.demand.input_tokens or not context.demand.output_tokens:
        return "vLLM reports no running requests, or no request lengths yet"
    return "the measured ITL is far from the prediction for the stated model and GPU"
