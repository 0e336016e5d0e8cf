"""Prefill in the way of decode, or too slow itself: guide 6.4, 6.5, 7.2, 8.5. Pure."""

from __future__ import annotations

from kneewatch.diagnose.recommend.chunks import (
    budget_tokens,
    safe_budget,
    splits,
    step_numbers,
)
from kneewatch.diagnose.recommend.prediction import (
    After,
    changed_setup,
    predicted,
    present,
    resized_tokens,
)
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.recommend.scene import SETTLE_WORDS, Scene, advice
from kneewatch.diagnose.sizing.memory.vllm_defaults import LATEST, defaults

APART = "prefill and decode on separate servers"


def prefix_caching(scene: Scene) -> Recommendation | None:
    """Prefix caching on, where the page says it is off."""
    server = scene.server
    if server.prefix_caching is not False:
        return None
    # Where it is the default, the flag that switches it off is what goes; where that is not
    # given, vLLM itself has switched it off for this model.
    launch, off = server.stated.launch, "--no-enable-prefix-caching"
    absent = launch is not None and launch.absent(off)
    change = (
        (off, True, None)
        if server.caching_by_default and not absent
        else ("--enable-prefix-caching", False, True)
    )
    checks = ["that tenants may share cached prefixes (cache_salt separates those that may not)"]
    if absent and server.caching_by_default:
        checks.insert(0, "that vLLM supports it for this model: it is off without a flag saying so")
    prefill_s, step_s = scene.get("prefill_mean_s"), scene.get("itl_p50_s")
    return advice(
        scene,
        "prefix-caching",
        [change],
        "Prefix caching is switched off; with it, what prompts have in common is computed once. "
        "How much that is cannot be seen while it is off.",
        before={
            "prefix_saved_ratio": 0.0,
            "prefill_mean_s": prefill_s,
            "computed_prompt_tokens_per_s": scene.get("computed_prompt_tokens_per_s"),
        },
        checks=checks,
        risk="None for results; hashing costs less than a hundredth where nothing repeats.",
        verify=[
            f"prefix_hit_ratio rises above 0 {SETTLE_WORDS}; where it stays below 0.02, prompts "
            "share no prefix and nothing is lost",
            f"prefill_mean_s falls towards a step's time ({step_s:.2g} s) in proportion to the "
            "hits",
        ],
        guide=("7.2", "8.5"),
    )


def chunked_prefill(scene: Scene) -> Recommendation | None:
    """Chunked prefill on, where the launch switches it off, with a budget for its chunks."""
    server = scene.server
    off = server.chunked_prefill is False
    if not off and (server.chunked_prefill or server.caching_by_default):
        return None
    if server.stated.launch is None:
        return None
    budget = budget_tokens(scene)
    if budget is not None:
        budget = safe_budget(scene, budget)
        budget = budget if splits(scene, budget) else None
    switch = (
        ("--no-enable-chunked-prefill", True, None)
        if off and server.caching_by_default
        else ("--enable-chunked-prefill", False, True)
    )
    changes: list[tuple[str, float | bool | None, float | bool | None]] = [switch]
    now = server.max_num_batched_tokens
    if budget is not None and (now is None or budget < now):
        changes.append(("--max-num-batched-tokens", now, budget))
    return advice(
        scene,
        "chunked-prefill",
        changes,
        "Chunked prefill is off: a long prompt takes one long step, and every stream waits for it.",
        before=_stall_numbers(scene),
        predicted=step_numbers(scene, budget),
        checks=["TTFT of the longest prompts: in chunks they take a little longer"],
        risk="Long prompts get their first token somewhat later.",
        verify=[f"itl_stall_per_s and itl_stall_time_ratio go to 0 {SETTLE_WORDS}"],
        guide=("6.4", "8.5"),
    )


def smaller_budget(scene: Scene) -> Recommendation | None:
    """A smaller --max-num-batched-tokens: each step takes a shorter piece of a prompt."""
    server, budget = scene.server, budget_tokens(scene)
    now = server.max_num_batched_tokens
    if server.chunked_prefill is False or budget is None:
        return None
    budget = safe_budget(scene, budget)
    most = now or defaults(server.version or LATEST, server.stated.gpu).max_num_batched_tokens
    if budget >= most or not splits(scene, budget):
        return None
    checks = ["TTFT of the longest prompts: in smaller chunks they take longer"]
    if server.max_num_seqs is None:
        checks.insert(0, f"--max-num-seqs: vLLM does not start with more seats than {budget}")
    if not server.launch_known:
        checks.insert(
            0,
            "the command line: with --no-enable-chunked-prefill in it, drop that flag as well, "
            "for without chunks the budget must hold the longest prompt",
        )
    return advice(
        scene,
        "max-num-batched-tokens",
        [("--max-num-batched-tokens", now, budget)],
        f"At the prefill rate seen here a step of {budget:,} tokens takes about "
        f"{step_numbers(scene, budget)['longest_step_s']:.2f} s; the longest prefills take "
        f"{scene.get('prefill_p99_s'):.1f} s.",
        before=_stall_numbers(scene),
        predicted=step_numbers(scene, budget),
        checks=checks,
        risk="A budget too small leaves the GPU idle in prefill: TTFT and throughput suffer.",
        verify=[
            f"itl_stall_per_s and itl_stall_time_ratio go to 0 {SETTLE_WORDS}",
            "ttft_p99_s stays within its target",
        ],
        guide=("6.4", "8.5"),
    )


def long_prefill_threshold(scene: Scene) -> Recommendation | None:
    """--long-prefill-token-threshold: only long prompts are cut small, short ones are not."""
    server, budget = scene.server, budget_tokens(scene)
    if server.chunked_prefill is False or budget is None or not splits(scene, budget):
        return None
    launch = server.stated.launch
    now = None if launch is None else launch.count("--long-prefill-token-threshold")
    if now is not None and 0 < now <= budget:
        return None
    return advice(
        scene,
        "long-prefill-threshold",
        [("--long-prefill-token-threshold", now, budget)],
        f"Prompts longer than {budget:,} tokens are taken {budget:,} at a step, and the step's "
        "budget stays for the others.",
        before=_stall_numbers(scene),
        predicted=step_numbers(scene, budget),
        checks=["TTFT of the longest prompts"],
        risk="Long prompts get their first token later.",
        verify=[f"itl_stall_per_s goes to 0 {SETTLE_WORDS}; prefill_p99_s rises"],
        guide=("6.4",),
    )


def disaggregation(scene: Scene) -> Recommendation | None:
    """Prefill and decode apart: what remains where chunking cannot meet both targets."""
    return advice(
        scene,
        "pd-disaggregation",
        [("deployment", "together", APART)],
        "Prefill and decode on their own servers do not wait for each other; each is sized for "
        "its own target.",
        before=_stall_numbers(scene),
        cost_usd_per_hour=None,
        checks=[
            "the time of one KV transfer between the two on your network against the TTFT target",
            "the P:D ratio from prompt and output tokens a second (kneewatch size)",
        ],
        risk="Two kinds of servers to run, and a network that becomes part of TTFT.",
        verify=[
            "itl_p99_p50_ratio on the decode servers falls below 2, kv_transfer_mean_s stays a "
            f"small part of ttft_mean_s, {SETTLE_WORDS}"
        ],
        guide=("6.5", "8.5"),
    )


def fp8_weights(scene: Scene) -> Recommendation | None:
    """FP8 weights: half the bytes that each step reads."""
    setup, server = scene.server.setup, scene.server
    gpu = server.stated.gpu
    if gpu is not None and gpu.fp8_flop_per_s is None:
        return None
    launch = server.stated.launch
    given = None if launch is None else launch.text("--quantization")
    if given is not None or (setup is not None and setup.scheme.linear_bits < 16):
        return None
    then = changed_setup(scene, quantization="fp8")
    capacity = resized_tokens(scene, then)
    told = predicted(scene, After(setup=then, capacity_tokens=capacity)) if then else {}
    checks = ["answers on your own evaluation set; a calibrated FP8 checkpoint is better"]
    if setup is None:
        checks.insert(0, "that the checkpoint is in 16 bit now: nothing on the page says so")
    if gpu is None:
        checks.append("that the GPU computes FP8 (H100, L40S, MI300 and later)")
    return advice(
        scene,
        "fp8-weights",
        [("--quantization", None, "fp8")],
        "FP8 weights take half the memory and half the bandwidth of a step; what they free "
        "becomes KV cache.",
        before=present(scene),
        predicted=told,
        checks=checks,
        risk="A small loss of quality.",
        verify=[f"itl_p50_s falls and kv_capacity_tokens rises {SETTLE_WORDS}"],
        guide=("4.2", "8.5"),
    )


def _stall_numbers(scene: Scene) -> dict[str, float]:
    return {
        key: value
        for key in ("itl_stall_per_s", "itl_stall_time_ratio", "itl_p99_s", "prefill_p99_s")
        if (value := scene.facts.values.get(key)) is not None
    }
