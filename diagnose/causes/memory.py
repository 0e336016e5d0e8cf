"""Causes around the KV cache's size and the queue: guide 7.4, 8.1, 9.3. Pure."""

from __future__ import annotations

from kneewatch.diagnose.case import Case, Cause, Facts
from kneewatch.rules.cascade import EVICT_WARNING_PER_S
from kneewatch.rules.model import Severity

KV_ROOM_BELOW = 0.8
KV_BOUND_FROM = 0.95
QUEUE_HELD_S = 10.0
QUEUE_WAIT_MIN_S = 1.0
QUEUE_SHARE_OF_REQUEST = 0.2
CRITICAL_WAIT_S = 60.0
GPU_ROOM_DRIFT = 1.6
"""ITL below this many times its quiet mean: the GPU is not what keeps requests out of the batch."""
PINNED_RATIO = 0.9


def kv_pressure(facts: Facts) -> Cause | None:
    """Running requests are preempted, or requests wait for KV blocks that running ones hold."""
    usage, waiting = facts.values.get("kv_usage_avg_ratio"), facts.get("waiting_by_capacity")
    evicting = facts.stage.number >= 2
    kv_bound = (usage or 0.0) >= KV_BOUND_FROM and facts.held("queued", QUEUE_HELD_S)
    if not evicting and not kv_bound:
        return None
    ratio = facts.get("preemption_ratio_per_s")
    case = Case(
        "kv_pressure",
        f"The KV cache is too small for this load: {_evicting(facts)}."
        if evicting
        else "Requests wait for KV blocks: the cache is full, nothing is evicted yet.",
        "Give the KV cache more room: fp8 KV cache, higher --gpu-memory-utilization; or "
        "admit less: "
        "lower --max-num-seqs; or add replicas.",
        ("7.4", "9.3"),
        facts.stage.severity if evicting else Severity.WARNING,
        log_odds=0.0 if evicting else -0.5,
    )
    if evicting:
        case.weigh(
            "preemption_ratio_per_s",
            ratio,
            EVICT_WARNING_PER_S,
            2.0,
            f"{100 * ratio:.1f} % of running requests are preempted a second",
        )
    if usage is not None:
        case.weigh(
            "kv_usage_avg_ratio",
            usage,
            0.9,
            2.0 if usage >= 0.85 else -1.5,
            f"the KV cache is {100 * usage:.0f} % full (mean of the window)",
            below=usage < 0.85,
        )
    if waiting >= 1:
        case.weigh(
            "waiting_by_capacity", waiting, 1.0, 1.0, f"{waiting:.0f} requests wait for room"
        )
    stalled = facts.get("itl_stall_time_ratio")
    if evicting and stalled > 0.02:
        case.weigh(
            "itl_stall_time_ratio",
            stalled,
            0.02,
            0.5,
            f"{100 * stalled:.0f} % of decode time is pauses of half a second and more",
        )
    return case.close()


def _evicting(facts: Facts) -> str:
    per_s = facts.get("preemption_per_s")
    words = {2: "requests are evicted", 3: "evicted requests queue", 4: "useful work collapses"}
    return f"{words[facts.stage.number]} ({per_s:.1f} preemptions a second)"


def queue_saturation(facts: Facts) -> Cause | None:
    """Arrivals exceed the service rate and KV is not the limit."""
    return _queue(facts, pinned=False)


def admission_limit(facts: Facts) -> Cause | None:
    """The batch is pinned at max_num_seqs while KV and GPU have room."""
    return _queue(facts, pinned=True)


def _queue(facts: Facts, *, pinned: bool) -> Cause | None:
    wait_s = queue_wait_s(facts)
    if wait_s is None or facts.stage.number >= 2:
        return None
    usage = facts.values.get("kv_usage_avg_ratio")
    if (usage or 0.0) >= KV_BOUND_FROM or pinned != seats_bind(facts):
        return None
    waiting = facts.get("waiting_by_capacity")
    running = facts.get("running_max")
    case = Case(
        "admission_limit" if pinned else "queue_saturation",
        f"The batch is pinned at {running:.0f} requests while KV and GPU have room; "
        f"{waiting:.0f} wait."
        if pinned
        else f"More requests arrive than are served: {waiting:.0f} wait, about {wait_s:.1f} s "
        "each.",
        "Raise --max-num-seqs; check ITL as the batch grows."
        if pinned
        else "Add replicas; the KV cache is not what limits this one.",
        ("9.3", "8.1"),
        Severity.CRITICAL if wait_s >= CRITICAL_WAIT_S else Severity.WARNING,
        log_odds=0.3,
    )
    case.weigh(
        "waiting_by_capacity",
        waiting,
        2.0,
        1.2,
        f"{waiting:.0f} requests wait, about {wait_s:.1f} s at the present service rate",
    )
    if usage is not None and usage < KV_ROOM_BELOW:
        case.weigh(
            "kv_usage_avg_ratio",
            usage,
            KV_ROOM_BELOW,
            1.0,
            f"KV cache {100 * usage:.0f} % full",
            below=True,
        )
    slope = facts.get("waiting_slope_per_s")
    if slope > 0.1:
        case.weigh(
            "waiting_slope_per_s", slope, 0.1, 0.6, f"the queue grows by {slope:.1f} a second"
        )
    drift = facts.values.get("itl_mean_drift_ratio")
    if drift is not None:
        case.weigh(
            "itl_mean_drift_ratio",
            drift,
            GPU_ROOM_DRIFT,
            0.6,
            f"ITL is {drift:.1f} times its quiet mean: "
            + ("the GPU has room" if drift < GPU_ROOM_DRIFT else "the GPU is busy"),
            below=pinned,
        )
    return case.close()


def queue_wait_s(facts: Facts) -> float | None:
    """Seconds a newcomer waits, by Little's law, where a queue has held and hurts; else None."""
    if not facts.held("queued", QUEUE_HELD_S):
        return None
    waiting, served_per_s = facts.get("waiting_by_capacity"), facts.get("completed_per_s")
    wait_s = waiting / served_per_s if served_per_s > 0 else facts.streaks_s["queued"]
    target_s = facts.targets.ttft_p99_s
    if target_s is not None:
        return wait_s if wait_s >= 0.5 * target_s else None
    request_s = facts.get("e2e_mean_s")
    hurts = wait_s >= max(QUEUE_WAIT_MIN_S, QUEUE_SHARE_OF_REQUEST * request_s)
    return wait_s if hurts else None


def seats_bind(facts: Facts) -> bool:
    """Whether the batch sits at a ceiling of its own, with room in KV and on the GPU."""
    running_max = facts.get("running_max")
    if running_max < 1 or facts.get("running_avg") < PINNED_RATIO * running_max:
        return False
    drift = facts.values.get("itl_mean_drift_ratio")
    gpu_has_room = drift is None or drift < GPU_ROOM_DRIFT
    return facts.get("kv_usage_avg_ratio", 1.0) < KV_ROOM_BELOW and gpu_has_room
