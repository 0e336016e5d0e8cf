"""Fewer replicas, only ever for a week's peak: guide 2.6, 8.3, 9.2. Pure."""

from __future__ import annotations

from math import ceil

from kneewatch.diagnose.recommend.demand import KV_TARGET_RATIO
from kneewatch.diagnose.recommend.prediction import After, predicted, present
from kneewatch.diagnose.recommend.recommendation import REPLICAS, Recommendation
from kneewatch.diagnose.recommend.scene import Scene, advice
from kneewatch.diagnose.sizing.memory.guide import HEADROOM_HIGH_RATIO, HEADROOM_LOW_RATIO

MOST_ITL_GROWTH = 2.0
"""Without a target ITL at the peak may become this many times what it is there now."""

LEAST_REPLICAS = 2
"""One replica alone has none to take over."""

RISK = "A fleet cut to a quiet week preempts at the next peak."
VERIFY = ("kv_usage_max_ratio below 0.9 and no preemption through the next weekly peak",)


def fewer_replicas(scene: Scene) -> Recommendation | None:
    """Fewer replicas where a week's peak is known and leaves room; else why none are advised.

    Sized for the peak's requests, by KV cache and seats, with the guide's 50 % on top; ITL at the
    peak must keep its target, or hardly grow where there is none.
    """
    now, peak = scene.server.stated.replicas, scene.weekly_peak_requests
    if now is None or now < 2:
        return None
    if peak is None:
        return _kept(
            scene,
            f"{now} replicas look too many for the load seen here, but capacity is for the weekly "
            "peak: a window or a day says nothing about that.",
        )
    used, present_requests = used_ratio(scene, peak), scene.demand.requests
    if used is None or present_requests <= 0:
        return _kept(scene, "What a replica can hold is not known, so neither is how many do.")
    least, total = (
        max(ceil(round(now * used * (1 + headroom), 6)), LEAST_REPLICAS)
        for headroom in (HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO)
    )
    share = peak / present_requests
    told = predicted(scene, After(share_ratio=share * now / total, replicas=total))
    at_peak_s = predicted(scene, After(share_ratio=share)).get("itl_s")
    why = _why_not(scene, now, total, then_s=told.get("itl_s"), at_peak_s=at_peak_s)
    if why:
        return _kept(scene, f"At the weekly peak of {peak:.0f} requests a replica {why}.")
    hourly = scene.server.usd_per_hour
    with_less = f"; with {HEADROOM_LOW_RATIO:.0%} it would be {least}" if least < total else ""
    return advice(
        scene,
        "fewer-replicas",
        [(REPLICAS, now, total)],
        f"At the weekly peak of {peak:.0f} requests a replica {used:.0%} of it is used; {total} "
        f"replicas carry that peak with {HEADROOM_HIGH_RATIO:.0%} headroom{with_less}.",
        before={**present(scene), "requests_at_weekly_peak": peak},
        predicted=told,
        cost_usd_per_hour=None if hourly is None else hourly * (total - now),
        checks=[
            "that the week was a usual one: no holiday, no launch ahead",
            f"that ITL of {1000 * told['itl_s']:.0f} ms at the peak suits the users",
            "one replica at a time, and that a lost one is still carried",
        ],
        risk=RISK,
        verify=VERIFY,
        guide=("2.6", "8.3", "9.2"),
    )


def used_ratio(scene: Scene, peak: float) -> float | None:
    """The part of a replica that a peak of so many requests takes: KV cache or seats, whichever is
    more; None where what it can hold is not known."""
    server, demand = scene.server, scene.demand
    if demand.held_tokens is None or not server.capacity_tokens:
        return None
    kv = max(demand.peak_tokens(peak), peak * demand.held_tokens / KV_TARGET_RATIO)
    seats = peak / server.max_num_seqs if server.max_num_seqs else 0.0
    return max(kv / server.capacity_tokens, seats)


def _why_not(
    scene: Scene, now: int, total: int, *, then_s: float | None, at_peak_s: float | None
) -> str:
    """Why fewer replicas are not advised, as the end of a sentence; "" where they are.

    `then_s` is ITL at the peak with `total` of them, `at_peak_s` with those there are.
    """
    if total >= now:
        return f"{now} replicas are no more than it needs with the guide's headroom"
    now_s = scene.get("itl_mean_s")
    if then_s is None or at_peak_s is None or not now_s:
        return "the KV cache has room, but what ITL would be is not known"
    target_s, tail_s = scene.facts.targets.itl_p99_s, scene.get("itl_p99_s")
    if target_s is None and then_s > MOST_ITL_GROWTH * at_peak_s:
        return (
            f"{total} replicas would let ITL grow from {1000 * at_peak_s:.0f} to "
            f"{1000 * then_s:.0f} ms; state a target (--slo-itl)"
        )
    if target_s is not None and max(tail_s, now_s) * then_s / now_s > target_s:
        return f"{total} replicas would miss the ITL target of {1000 * target_s:g} ms"
    return ""


def _kept(scene: Scene, why: str) -> Recommendation:
    """What is told in place of a change."""
    checks = ["kv_usage_max_ratio, running_max and waiting over a whole week"]
    return advice(
        scene,
        "fewer-replicas",
        [],
        why,
        before={
            "kv_usage_max_ratio": scene.get("kv_usage_max_ratio"),
            "replicas": scene.server.replicas,
        },
        cost_usd_per_hour=None,
        checks=checks,
        risk=RISK,
        verify=VERIFY,
        guide=("8.3", "9.2"),
    )
