"""Prefill levers: chunked prefill, prefix caching, disaggregation, FP8 weights. Pure."""

from __future__ import annotations

from functools import lru_cache
from math import floor, log2

from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.recommend.context import SETTLE_WORDS, Scene, advice
from kneewatch.diagnose.recommend.prediction import (
    After,
    changed_setup,
    predicted,
    present,
    resized_tokens,
)
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.sizing.memory.launch_setup import LATEST, defaults
from kneewatch.diagnose.sizing.speed.roofline_inputs import costs

LONGEST_STEP_S = 0.2
"""A step that a reader of a stream does not notice, where no ITL target is set."""

SHORTEST_S = 1e-3
"""A prefill shorter than a millisecond is a histogram's interpolation."""

STALL_BUCKET_S = 0.5
"""What counts as a pause in itl_stall_per_s: steps that are shorter end them."""

FEWEST_BUDGET_TOKENS = 256
"""Below it chunks are too small for the GPU to be busy with."""

ANY_GPU = "h100-sxm"
"""For FLOP alone, which are the model's."""


_costs_of = lru_cache(maxsize=64)(costs)


def budget_tokens(scene: Scene) -> int | None:
    """Prompt tokens that one step takes within the ITL that is wanted; a power of two."""
    token_s = _token_s(scene)
    if token_s is None:
        return None
    wanted_s = scene.facts.targets.itl_p99_s or LONGEST_STEP_S
    fitting = (wanted_s - scene.get("itl_p50_s")) / token_s
    if fitting < FEWEST_BUDGET_TOKENS:
        return FEWEST_BUDGET_TOKENS
    budget: int = 2 ** floor(log2(fitting))
    server = scene.server
    most = defaults(server.version or LATEST, server.stated.gpu).max_num_batched_tokens
    return budget if budget < most else None


def safe_budget(scene: Scene, budget: int) -> int:
    """The budget, or the smallest above it that vLLM surely starts with: its seats must fit."""
    server = scene.server
    seats = server.max_num_seqs
    if seats is None:
        taken = defaults(server.version or LATEST, server.stated.gpu).max_num_seqs
        seats = max(taken, floor(scene.get("running_max")))
    return max(budget, seats)


def splits(scene: Scene, budget: int) -> bool:
    """Whether steps of so many tokens are shorter than what is seen: else nothing is split."""
    told = step_numbers(scene, budget)
    longest_s = scene.get("prefill_p99_s") + scene.get("itl_p50_s")
    return budget < scene.get("prompt_tokens_p99") and told.get("longest_step_s", 0.0) < longest_s


def step_numbers(scene: Scene, budget: int | None) -> dict[str, float]:
    """What a budget does to the longest step; nothing where the prefill rate is not known."""
    token_s = _token_s(scene)
    if budget is None or token_s is None:
        return {}
    # The streams that decode beside the chunk take their own time in the same step.
    step_s = budget * token_s + scene.get("itl_p50_s")
    if step_s >= STALL_BUCKET_S:
        return {"longest_step_s": step_s}
    return {"longest_step_s": step_s, "itl_stall_per_s": 0.0, "itl_stall_time_ratio": 0.0}


def _token_s(scene: Scene) -> float | None:
    """Seconds for each token at the end of the longest prompts; None: not known."""
    longest_s, tokens = scene.get("prefill_p99_s"), scene.get("prompt_tokens_p99")
    if longest_s < SHORTEST_S or not tokens:
        return None
    return longest_s / tokens * end_ratio(scene, tokens)


def end_ratio(scene: Scene, tokens: float) -> float:
    """What a prompt's last tokens cost over its mean token: they attend to all before them.

    (body + n pair) / (body + n / 2 pair) in FLOP; 1 where the model is not known.
    """
    model = scene.server.stated.model
    if model is None:
        return 1.0
    try:
        read = _costs_of(model, scene.server.stated.gpu or gpu(ANY_GPU))
    except SizingError:
        return 1.0
    last = mean = read.body_flop_per_token
    last += read.prefill_flop_per_pair * tokens
    mean += read.prefill_flop_per_pair * tokens / 2
    for window in read.windows:
        attended = min(tokens, window.tokens)
        last += window.flop_per_pair * attended
        mean += window.flop_per_pair * attended * (1 - attended / (2 * tokens))
    return last / mean


# --- Prefill in the way of decode, or too slow itself: guide 6.4, 6.5, 7.2, 8.5 -------------------


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
