"""Prefill levers: chunked prefill, prefix caching, disaggregation, quantized weights. Pure."""

from __future__ import annotations

from math import ceil, exp, floor, log2

from kneewatch.collector.engines.engine_kind import (
    NO_PREFIX_CACHE,
    SEATS,
    STEP_TOKENS,
    WEIGHTS_FORMAT,
)
from kneewatch.diagnose.catalogue.gpu_specs import gpu
from kneewatch.diagnose.catalogue.quantization import FULL_BITS
from kneewatch.diagnose.causes.bottleneck import bound_of
from kneewatch.diagnose.causes.common_conditions import why_together
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.context import SETTLE_WORDS, LeverContext, advice
from kneewatch.diagnose.recommend.ledger import BUDGET_UP
from kneewatch.diagnose.recommend.prediction import (
    After,
    changed_launch,
    computed_costs,
    predicted,
    present,
    resized_tokens,
    tails_now,
)
from kneewatch.diagnose.recommend.queueing import RARE, at_most, banded
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.rules.formatting import duration

LONGEST_STEP_S = 0.2
"""Longest step if no ITL target is set; readers of a stream do not notice it."""

SHORTEST_S = 1e-3
"""Shorter prefill times, below 1 ms, are artefacts of histogram interpolation."""

STALL_BUCKET_S = 0.5
"""Gaps from this length on count as stalls in itl_stall_per_s; shorter steps cause none."""

OF_PREFILL_RATIO = 0.5
"""From this share of the longest prefills on, the last first tokens are theirs."""

FEWEST_BUDGET_TOKENS = 256
"""Smaller chunks leave the GPU underused."""

FILLED_STEP_RATIO, FILLED_PROMPT_RATIO, BUDGET_GROWTH = 0.9, 2.0, 4.0
"""Steps are full from this share of the budget on, and a prompt that is so many times longer than
the mean step fills it; the budget grows at most so much in one change."""

ANY_GPU = "h100-sxm"
"""Stands for any GPU. Only FLOP are read from its costs, and these depend on the model alone."""


def budget_tokens(context: LeverContext) -> int | None:
    """Prompt tokens per step that keep ITL within its target; a power of two.

    None if the prefill rate is unknown or the default budget is already smaller.
    """
    token_s = _token_s(context)
    if token_s is None:
        return None
    wanted_s = context.facts.targets.itl_p99_s or LONGEST_STEP_S
    fitting = (wanted_s - context.get("itl_p50_s")) / token_s
    if fitting < FEWEST_BUDGET_TOKENS:
        return FEWEST_BUDGET_TOKENS
    budget: int = 2 ** floor(log2(fitting))
    server = context.server
    most = server.launch.defaults.max_num_batched_tokens
    return budget if budget < most else None


def safe_budget(context: LeverContext, budget: int) -> int:
    """The budget, but at least max_num_seqs: vLLM refuses a smaller budget."""
    server = context.server
    seats = server.launch.max_num_seqs
    if seats is None:
        taken = server.launch.defaults.max_num_seqs
        seats = max(taken, floor(context.get("running_max")))
    return max(budget, seats)


def splits_prompts(context: LeverContext, budget: int) -> bool:
    """Whether this budget splits the longest prompts, so that steps become shorter than measured
    now."""
    numbers = step_numbers(context, budget)
    longest_s = context.get("prefill_p99_s") + context.get("itl_p50_s")
    return (
        budget < context.get("prompt_tokens_p99") and numbers.get("longest_step_s", 0.0) < longest_s
    )


def step_numbers(context: LeverContext, budget: int | None) -> dict[str, float]:
    """The longest step, the longest prefills and the stalls with this budget.

    A prompt in more steps waits for as many decodes more. {} if the prefill rate is unknown.
    """
    token_s, tokens = _token_s(context), context.get("prompt_tokens_p99")
    if budget is None or token_s is None:
        return {}
    # The same step also decodes a token for every running stream.
    decode_s = context.get("itl_p50_s")
    step_s = budget * token_s + decode_s
    mean_step_s = budget * token_s / end_ratio(context, _longest_tokens(context)) + decode_s
    numbers = {"longest_step_s": step_s}
    more_steps = ceil(tokens / budget) - _steps_now(context, tokens)
    if decode_s and more_steps > 0:
        numbers["prefill_p99_s"] = context.get("prefill_p99_s") + more_steps * decode_s
        numbers |= _tails(context, mean_step_s, step_s, more_steps * decode_s)
    if step_s < STALL_BUCKET_S:
        numbers |= {"itl_stall_per_s": 0.0, "itl_stall_time_ratio": 0.0}
    return numbers


def _tails(
    context: LeverContext, mean_step_s: float, longest_step_s: float, later_s: float
) -> dict[str, float]:
    """P99 of ITL and TTFT where prompts that fill steps end `later_s` later.

    A stream waits for full steps while a prompt is computed. If these are more than one of a
    hundred, the P99 is one of them, and among the longest, as prompts are computed to their end.
    """
    decode_s, busy = context.get("itl_p50_s"), 1 - exp(-context.get("prefill_busy_ratio"))
    numbers: dict[str, float] = {}
    full_steps, others = busy / longest_step_s, (1 - busy) / decode_s
    if full_steps > RARE * (full_steps + others):
        numbers |= banded("itl", longest_step_s, mean_step_s, longest_step_s)
    ttft_s = context.get("ttft_p99_s")
    if ttft_s >= OF_PREFILL_RATIO * context.get("prefill_p99_s"):
        numbers |= banded("ttft", ttft_s + later_s, ttft_s, ttft_s + later_s)
    return numbers


def _steps_now(context: LeverContext, tokens: float) -> int:
    """The steps of a prompt of so many tokens today; without chunks a step holds any prompt."""
    launch = context.server.launch
    if context.server.chunked_prefill is False:
        return 1
    return ceil(tokens / (launch.max_num_batched_tokens or launch.defaults.max_num_batched_tokens))


def _token_s(context: LeverContext) -> float | None:
    """Prefill seconds per token at the end of the longest prompts; None if unknown.

    The P99 of times and of lengths lie anywhere in their buckets, and the means include what a
    short prompt takes beside its tokens: the lower figure has the smaller error.
    """
    longest_s, longest_tokens = context.get("prefill_p99_s"), context.get("prompt_tokens_p99")
    if longest_s < SHORTEST_S or not longest_tokens:
        return None
    mean_s, computed_tokens = context.get("prefill_mean_s"), context.demand.computed_tokens
    rates = [longest_s / longest_tokens]
    rates += [mean_s / computed_tokens] if mean_s and computed_tokens else []
    return min(rates) * end_ratio(context, _longest_tokens(context))


def _longest_tokens(context: LeverContext) -> float:
    return max(context.get("prompt_tokens_p99"), context.demand.input_tokens or 0.0)


def end_ratio(context: LeverContext, tokens: float) -> float:
    """Cost of a prompt's last token divided by its mean token: the last one attends to all others.

    (body + n pair) / (body + n / 2 pair) in FLOP; 1 if the model is unknown.
    """
    model = context.server.stated.model
    if model is None:
        return 1.0
    read = computed_costs(Launch(model, context.server.stated.gpu or gpu(ANY_GPU)))
    if read is None:
        return 1.0
    last = mean = read.body_flop_per_token
    last += read.prefill_flop_per_pair * tokens
    mean += read.prefill_flop_per_pair * tokens / 2
    for window in read.windows:
        attended = min(tokens, window.tokens)
        last += window.flop_per_pair * attended
        mean += window.flop_per_pair * attended * (1 - attended / (2 * tokens))
    return last / mean


def tokens_are_late(context: LeverContext) -> bool:
    """Whether streams stall, or miss their target. Otherwise smaller steps only delay prompts."""
    target_s = context.facts.targets.itl_p99_s
    missed = target_s is not None and context.get("itl_p99_s") > target_s
    return missed or context.get("itl_stall_per_s") > 0.0


# --- The levers (guide 6.4, 6.5, 7.2, 8.5) --------------------------------------------------------


APART = "prefill and decode on separate servers"


def prefix_caching(context: LeverContext) -> Advice | None:
    """Turn prefix caching on, if cache_config_info shows that it is off."""
    server = context.server
    if server.launch.prefix_caching is not False:
        return None
    # Where caching is the default, remove the flag that disables it. If that flag is not given,
    # vLLM itself disabled caching for this model.
    launch, off = server.stated.command_line, NO_PREFIX_CACHE
    absent = launch is not None and launch.absent(off)
    change = (
        (off, True, None)
        if server.caching_by_default and not absent
        else ("--enable-prefix-caching", False, True)
    )
    checks = [
        "confirm that tenants may share cached prefixes (use cache_salt for those that may not)"
    ]
    if absent and server.caching_by_default:
        checks.insert(
            0,
            "confirm that vLLM supports it for this model: it is off although no flag disables it",
        )
    prefill_s, step_s = context.get("prefill_mean_s"), context.get("itl_p50_s")
    return advice(
        context,
        "prefix-caching",
        [change],
        "Prefix caching is off. When on, vLLM computes a prefix that prompts share only once. The "
        "gain cannot be measured while it is off.",
        before={
            "prefix_saved_ratio": 0.0,
            "prefill_mean_s": prefill_s,
            "computed_prompt_tokens_per_s": context.get("computed_prompt_tokens_per_s"),
            **tails_now(context),
        },
        predicted=at_most(tails_now(context)),
        checks=checks,
        verify=[
            f"prefix_hit_ratio rises above 0 {SETTLE_WORDS}; if it stays below 0.02, prompts share "
            "no prefix and nothing is lost",
            f"prefill_mean_s falls towards one step ({duration(step_s)}) in proportion to the hit "
            "ratio",
        ],
    )


def chunked_prefill(context: LeverContext) -> Advice | None:
    """Turn chunked prefill on, with a token budget, if the launch turned it off."""
    server = context.server
    off = server.chunked_prefill is False
    if not off and (server.chunked_prefill or server.caching_by_default):
        return None
    if server.stated.command_line is None:
        return None
    budget = budget_tokens(context)
    if budget is not None:
        budget = safe_budget(context, budget)
        budget = budget if splits_prompts(context, budget) else None
    switch = (
        ("--no-enable-chunked-prefill", True, None)
        if off and server.caching_by_default
        else ("--enable-chunked-prefill", False, True)
    )
    changes: list[tuple[str, float | bool | None, float | bool | None]] = [switch]
    now = server.launch.max_num_batched_tokens
    if budget is not None and (now is None or budget < now):
        changes.append((STEP_TOKENS, now, budget))
    return advice(
        context,
        "chunked-prefill",
        changes,
        "Chunked prefill is off: a long prompt runs as one long step and stalls every stream.",
        before=_stall_numbers(context),
        predicted=step_numbers(context, budget),
    )


def smaller_budget(context: LeverContext) -> Advice | None:
    """Fewer tokens of a step: each step prefills a smaller chunk of a prompt."""
    server, budget = context.server, budget_tokens(context)
    now = server.launch.max_num_batched_tokens
    if server.chunked_prefill is False or budget is None or not tokens_are_late(context):
        return None
    budget = context.steady("max-num-batched-tokens", safe_budget(context, budget), lowers=True)
    most = now or server.launch.defaults.max_num_batched_tokens
    if budget >= most or not splits_prompts(context, budget):
        return None
    checks = ["measure TTFT of the longest prompts: it rises with smaller chunks"]
    if server.launch.max_num_seqs is None:
        checks.insert(0, f"keep {SEATS} at or below {budget}: vLLM refuses to start otherwise")
    if not server.launch_known:
        checks.insert(
            0,
            "read the launch command: if it has --no-enable-chunked-prefill, remove that flag too, "
            "because without chunks the budget must hold the longest prompt",
        )
    return advice(
        context,
        "max-num-batched-tokens",
        [(STEP_TOKENS, now, budget)],
        f"The longest prefills take {duration(context.get('prefill_p99_s'))} (P99). At this rate a "
        f"step of {budget:,} tokens takes about "
        f"{duration(step_numbers(context, budget)['longest_step_s'])}.",
        before=_stall_numbers(context),
        predicted=step_numbers(context, budget),
        checks=checks,
    )


def larger_budget(context: LeverContext) -> Advice | None:
    """More tokens of a step, if steps are full of prompt tokens and still short.

    Without a stated budget, it is the mean step: prompts are longer and always under prefill.
    """
    server, mean_tokens = context.server, context.get("iteration_tokens_mean")
    stated, step_s = server.launch.max_num_batched_tokens, context.get("itl_mean_s")
    longest_s = context.facts.targets.itl_p99_s or LONGEST_STEP_S
    if stated is None and (
        context.get("prompt_tokens_p50") < FILLED_PROMPT_RATIO * mean_tokens
        or context.get("prefill_busy_ratio") < 1
    ):
        return None
    now = stated or 2 ** round(log2(max(1.0, mean_tokens)))
    most = server.launch.defaults.max_num_batched_tokens
    if not step_s or mean_tokens < FILLED_STEP_RATIO * now or now >= most:
        return None
    to = min(most, 2 ** floor(log2(now * min(BUDGET_GROWTH, longest_s / step_s))))
    if to <= now:
        return None
    before, then = {**present(context)}, {"longest_step_s": step_s * to / now}
    least_s = _least_step_s(context, step_s)
    words, ratio, costs = "", context.demand.load_ratio, computed_costs(server.sized_launch)
    if least_s and ratio is not None:
        # Of a step, what it takes without prompts is saved; its products take what the GPU's peak
        # allows at least.
        products_s = to * costs.body_flop_per_token / costs.flop_per_s if costs else 0.0
        longer_s = max(least_s + to / now * (step_s - least_s), products_s)
        gain = to / now * step_s / longer_s
        before.update(load_ratio=ratio, least_step_s=least_s)
        then.update(load_ratio=ratio / gain, prompts_served_ratio=gain)
        words = (
            f" That serves about {gain:.2f}x as many, because a step without prompts takes "
            f"{duration(least_s)}."
        )
    return advice(
        context,
        BUDGET_UP,
        [(STEP_TOKENS, now, to)],
        f"Steps are full: {mean_tokens:.0f} tokens on average, and a step takes only "
        f"{duration(step_s)}. With {to:,} tokens per step fewer steps read the weights for as many "
        f"prompts.{words}",
        before={"iteration_tokens_mean": mean_tokens, **before},
        predicted=then,
    )


def _least_step_s(context: LeverContext, step_s: float) -> float | None:
    """The shortest step of this server's windows; None without a shorter one than now."""
    seen = () if context.curve is None else context.curve.column("itl_s")
    return min((each for each in seen if 0 < each < step_s), default=None)


def long_prefill_threshold(context: LeverContext) -> Advice | None:
    """--long-prefill-token-threshold, which splits only long prompts into small chunks."""
    server, budget = context.server, budget_tokens(context)
    if server.chunked_prefill is False or budget is None or not splits_prompts(context, budget):
        return None
    budget = context.steady("long-prefill-threshold", budget, lowers=True)
    launch = server.stated.command_line
    now = None if launch is None else launch.count("--long-prefill-token-threshold")
    if now is not None and 0 < now <= budget:
        return None
    return advice(
        context,
        "long-prefill-threshold",
        [("--long-prefill-token-threshold", now, budget)],
        f"Prompts longer than {budget:,} tokens are prefilled {budget:,} tokens per step, leaving "
        "budget for other requests.",
        before=_stall_numbers(context),
        predicted=step_numbers(context, budget),
    )


def disaggregation(context: LeverContext) -> Advice | None:
    """Run prefill and decode on separate servers, if chunking cannot meet both targets.

    None if it would not help, or if the known replicas compute prompts for less than one server.
    """
    replicas, busy = context.server.stated.replicas, context.facts.values.get("prefill_busy_ratio")
    idle = replicas is not None and busy is not None and busy * replicas < 1
    if idle or why_together(context.facts):
        return None
    return advice(
        context,
        "pd-disaggregation",
        [("deployment", "together", APART)],
        "Run prefill and decode on separate servers: neither delays the other, and each is sized "
        "for its own target.",
        before=_stall_numbers(context),
        cost_usd_per_hour=None,
    )


CONFIRM_16_BIT = "confirm that the checkpoint is 16-bit now: vLLM's metrics do not show it"


def quantized_weights(context: LeverContext) -> Advice | None:
    """Weights with fewer bits, so that each step reads fewer bytes: FP8, or else INT8 or AWQ.

    None if the GPU is unknown: it may be a CPU, which supports none of these formats.
    """
    launch, server = context.server.sized_launch, context.server
    gpu = server.stated.gpu
    command_line = server.stated.command_line
    given = None if command_line is None else command_line.text(WEIGHTS_FORMAT)
    # vLLM refuses another format than that of a quantized checkpoint, also of experts alone.
    own = None if launch is None else launch.scheme
    is_quantized = own is not None and min(own.linear_bits, own.expert_bits) < FULL_BITS
    if gpu is None or given is not None or is_quantized:
        return None
    scheme = "fp8"
    change: tuple[str, str | None, str] = (WEIGHTS_FORMAT, None, scheme)
    summary = "Quantize the weights to FP8: half the memory of weights, half the bytes that a step "
    summary += "reads"
    if gpu.fp8_flop_per_s is None:
        # Tensor cores compute INT8 twice as fast. AWQ has 4-bit weights, the fewest bytes.
        bound = bound_of(context.facts)
        is_compute = bound is not None and bound.kind == "compute"
        scheme, words = ("int8", "INT8 (W8A8)") if is_compute else ("awq", "AWQ (4-bit)")
        change = ("checkpoint", "16-bit", words)
        summary = f"{gpu.name} has no FP8 arithmetic. Serve an {words} checkpoint of the model: "
        summary += "each step reads fewer weight bytes"
    quantized = changed_launch(context, quantization=scheme)
    numbers: dict[str, float] = {}
    if quantized is not None:
        capacity = resized_tokens(context, quantized)
        after = After(launch=quantized, capacity_tokens=capacity, other_steps=True)
        numbers = predicted(context, after)
    return advice(
        context,
        f"{scheme}-weights",
        [change],
        f"{summary}{_freed_words(context)}",
        before=present(context),
        predicted=numbers,
        checks=[] if launch else [CONFIRM_16_BIT],
    )


def _freed_words(context: LeverContext) -> str:
    """What the freed memory is used for, as the end of a sentence."""
    server = context.server
    fixed = "" if server.kv_memory_bytes is None else "--kv-cache-memory-bytes"
    if server.blocks_override is not None:  # it wins
        fixed = "--num-gpu-blocks-override"
    if fixed:
        return f". The freed memory stays unused until you raise or remove {fixed}."
    return "; vLLM uses the freed memory for the KV cache."


def _stall_numbers(context: LeverContext) -> dict[str, float]:
    stalls = {
        key: value
        for key in ("itl_stall_per_s", "itl_stall_time_ratio", "prefill_p99_s")
        if (value := context.facts.values.get(key)) is not None
    }
    return {**stalls, **tails_now(context)}
