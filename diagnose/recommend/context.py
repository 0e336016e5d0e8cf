"""What a lever looks at: a cause, the facts, the server, the load. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, isfinite

from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.deployment.deployment import Deployment
from kneewatch.diagnose.deployment.vllm_flags import LARGEST, NUMBERS
from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO, Demand
from kneewatch.diagnose.recommend.recommendation import Change, Recommendation, Value

VERIFY_S = 300.0
"""Within which a change must show at an unchanged load: the guide's second window."""

MEASURED = "measured"
"""Where `memo` has the shares of the GPU's peaks that were measured: by their names, or none."""

SETTLE_WORDS = f"within {VERIFY_S / 60:.0f} minutes at the same load"


@dataclass(frozen=True, slots=True)
class Scene:
    """A cause in its surroundings. `cause` is its id; `memo` keeps what several levers ask for.

    `weekly_peak_requests` are the most that ran or waited on this engine within the last week,
    None where nobody watched for so long.
    """

    cause: str
    facts: Facts
    server: Deployment
    demand: Demand
    memo: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    weekly_peak_requests: float | None = None

    def get(self, signal: str) -> float:
        """A signal's value, 0 where it has none."""
        return self.facts.values.get(signal) or 0.0


Lever = Callable[[Scene], Recommendation | None]


def seats_held(scene: Scene, *, usage_ratio: float = KV_TARGET_RATIO) -> int | None:
    """Requests of the present size that the KV cache holds up to a usage in the mean, with room
    for their spread; None: not known."""
    capacity, held = scene.server.capacity_tokens, scene.demand.held_tokens
    if capacity is None or not held:
        return None
    return scene.demand.most_requests(capacity, usage_ratio=usage_ratio)


def rounded_down(count: float) -> int:
    """A count that a person would choose, not above: whole up to 16, then in eighths of powers."""
    return _rounded(count, floor)


def rounded_up(count: float) -> int:
    """A count that a person would choose, not below."""
    return _rounded(count, ceil)


def _rounded(count: float, to_whole: Callable[[float], int]) -> int:
    whole = to_whole(count)
    if whole <= 16:
        return whole
    step = max(1, 2 ** (whole.bit_length() - 4))
    return int(to_whole(count / step) * step)


def advice(
    scene: Scene,
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
    guide: Sequence[str] = (),
) -> Recommendation:
    """A recommendation for the scene's cause; free unless a cost is given."""
    then = predicted or {}
    summary = f"{summary}{_measured_words(scene, then)}"
    return Recommendation(
        id=lever_id,
        cause=scene.cause,
        changes=tuple(Change(flag, now, then) for flag, now, then in changes),
        summary=summary,
        before=_shown(before or {}),
        predicted=_shown(then),
        cost_usd_per_hour=cost_usd_per_hour,
        checks=tuple(checks),
        risk=risk,
        verify=tuple(verify),
        guide=tuple(guide),
        unknown=tuple(_unknown(scene, then, cost_usd_per_hour)),
    )


def _measured_words(scene: Scene, predicted: Mapping[str, float]) -> str:
    """Says which share of a peak was measured, where speeds are predicted with it."""
    found = scene.memo.get(MEASURED, {}) if "itl_s" in predicted else {}
    words = {"mfu_ratio": "MFU", "mbu_ratio": "MBU"}
    told = [f"{words[name]} of {100 * share:.0f} %" for name, share in found.items()]
    return f" Speeds are with the measured {' and '.join(told)}." if told else ""


def _shown(numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers with six significant digits; what is no number is left out."""
    return {
        key: value if isinstance(value, int) else float(f"{value:.6g}")
        for key, value in numbers.items()
        if isfinite(value) and abs(value) <= LARGEST
    }


def _unknown(
    scene: Scene, predicted: Mapping[str, float], cost_usd_per_hour: float | None
) -> Iterator[str]:
    """What cannot be computed, and for want of what, in words."""
    server = scene.server
    if "max_concurrency" in predicted and "itl_s" not in predicted:
        yield f"TTFT and ITL after it ({_why_no_latency(scene)})"
    if "itl_s" in predicted and not scene.memo.get(MEASURED):
        yield f"MFU and MBU here: {_why_no_share(scene)}; defaults of published points stand in"
    if cost_usd_per_hour is None:
        lacks = [
            *([] if server.usd_per_gpu_hour is not None else ["--gpu or --usd-per-gpu-hour"]),
            *([] if server.gpus is not None else ["--tensor-parallel"]),
        ]
        if lacks:
            yield f"what it costs (state {', and '.join(lacks)})"
    if server.misfit:
        yield f"the stated set-up cannot run: {server.misfit}"
    launch = server.stated.launch
    for flag in NUMBERS if launch is not None else ():
        if launch is not None and launch.unreadable(flag):
            yield f"{flag}: the launch file says {launch.flags[flag][:40]!r}, which is no number"


def _why_no_share(scene: Scene) -> str:
    # A server without the flag has the counters too, at 0.
    if not scene.get("flop_per_s") and not scene.get("memory_bytes_per_s"):
        return "vLLM does not report them without --enable-mfu-metrics"
    return "this load does not show them"


def _why_no_latency(scene: Scene) -> str:
    stated, server = scene.server.stated, scene.server
    missing = [
        *([] if stated.model else ["--model"]),
        *([] if stated.gpu else ["--gpu"]),
        *([] if server.tensor_parallel else ["--tensor-parallel"]),
    ]
    if missing:
        return f"state {' and '.join((', '.join(missing[:-1]), missing[-1])).removeprefix(' and ')}"
    if not scene.get("itl_mean_s"):
        return "the page shows no ITL yet"
    if not scene.demand.input_tokens or not scene.demand.output_tokens:
        return "the page shows no lengths of requests yet"
    return "measured ITL is far from what the roofline gives for the stated model and GPU"
