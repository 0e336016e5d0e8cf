"""The highest concurrency within the latency targets, draft cost, and their arithmetic. Pure."""

from __future__ import annotations

from collections.abc import Callable
from math import floor, inf, isfinite
from typing import TypeVar

from msgspec import Struct

from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.sizing.arithmetic import Sheet
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.speed.performance import (
    KERNELS,
    ClosedLoop,
    Drafting,
    Performance,
    StepTime,
    step_model,
)
from kneewatch.diagnose.sizing.speed.roofline_inputs import SOURCE, Costs, Efficiency, costs
from kneewatch.rules.facts import Targets
from kneewatch.rules.formatting import figure


def drafting_of(question: Question, launch: Launch, target: Costs) -> Drafting | None:
    """Speculative decoding with the draft of `launch`: draft tokens, acceptance and relative cost.

    None if the draft, its acceptance ratio, the GPU or the request lengths are not given.
    """
    draft, accepted, gpu = launch.draft, question.acceptance_ratio, launch.gpu
    inputs, outputs = question.input_tokens, question.output_tokens
    if draft is None or accepted is None or gpu is None or inputs is None or outputs is None:
        return None
    split = Parallel(tensor=launch.parallel.tensor)
    own = costs(Launch(draft.model, gpu, split, kv_cache_dtype=launch.kv_cache_dtype))
    context = inputs + outputs / 2
    times = [
        step_model(
            each, question.efficiency, context_tokens=context, prompt_context_tokens=context
        ).parts(question.concurrency_per_engine)
        for each in (own, target)
    ]
    # The draft's step is taken without the host's part.
    ratio = (times[0].total_s - times[0].host_s) / times[1].total_s
    return Drafting(tokens=draft.tokens, acceptance_ratio=accepted, cost_ratio=ratio)


# --- The highest concurrency within the targets on one replica ------------------------------------
#
# Latencies grow with the requests in flight, so the highest concurrency is found by bracketing:
# guide, operating point (C_max at the SLO), here on the predicted curve instead of a measured
# one.


TOKEN_BUDGET = "token budget"
RUNNING_LIMIT = "running limit"


class Capacity(Struct, frozen=True):
    """The highest concurrency that meets the targets, and the speed at that concurrency.

    If a single request already misses a target, `concurrency` is 0 and `performance` is that
    request's. `binding` is what one more request would exceed: TTFT, ITL, the token budget (more
    requests would only wait) or the running limit (KV cache or max_num_seqs).
    """

    concurrency: int
    performance: Performance
    binding: str


def strain(
    targets: Targets, ttft_s: float, itl_s: float, latency_s: float | None = None
) -> tuple[float, str]:
    """The highest ratio of a latency to its target, and which latency it is. Above 1, it is
    missed."""
    ratios = [
        (measured_s / target_s, name)
        for name, measured_s, target_s in targets.beside(ttft_s, itl_s, latency_s)
    ]
    return max(ratios, default=(0.0, RUNNING_LIMIT))


def capacity(loop: ClosedLoop, targets: Targets, most: float) -> Capacity:
    """The highest concurrency from 1 to `most` that meets the targets."""

    def exceeds(seen: Performance) -> tuple[float, str]:
        # Requests that only wait for prompts to come in add no throughput.
        return (inf, TOKEN_BUDGET) if seen.queueing else strain(targets, seen.ttft_s, seen.itl_s)

    count, seen, binding = highest(loop.at, exceeds, max(floor(most), 1))
    if not count:
        over, alone = strain(targets, seen.ttft_s, seen.itl_s)
        # One request that waits for nobody else is no queue.
        count, binding = (0, alone) if over > 1 else (1, binding)
    return Capacity(count, seen, binding)


Seen = TypeVar("Seen")


def highest(
    at: Callable[[int], Seen], exceeds: Callable[[Seen], tuple[float, str]], high: int
) -> tuple[int, Seen, str]:
    """The highest concurrency up to `high` within the targets, with what `at` gives there and what
    one more request would exceed; 0 with what `at` gives for 1 if that exceeds one already.

    `exceeds` is the highest ratio to a target, and its name.
    """
    best = at(high)
    over, binding = exceeds(best)
    if over <= 1:
        return high, best, RUNNING_LIMIT
    low, missed = 0, best
    # Secants through the last two points, as latencies are nearly straight lines; the middle where
    # there is none, or where the bracket did not halve in two steps.
    before, last, widths = (0, 0.0), (high, over), (inf, inf)
    while high - low > 1:
        middle = (low + high) // 2
        rise = (last[1] - before[1]) / (last[0] - before[0])
        if isfinite(rise) and rise > 0 and 2 * (high - low) <= widths[0]:
            middle = min(max(last[0] + floor((1 - last[1]) / rise), low + 1), high - 1)
        widths = widths[1], high - low
        seen = at(middle)
        over, what = exceeds(seen)
        before, last = last, (middle, over)
        if over <= 1:
            low, best = middle, seen
        else:
            high, missed, binding = middle, seen, what
    return (low, best, binding) if low else (0, missed, binding)


# --- The roofline's prediction as arithmetic that can be checked by hand --------------------------


def performance_lines(sheet: Sheet, predicted: Performance) -> None:
    """Add the prediction: bytes read, a plain step, a step with a prompt, the results."""
    costs, load, efficiency = predicted.loop.costs, predicted.loop.load, predicted.loop.efficiency
    fixed = _cited(efficiency, "mfu_ratio", "mbu_ratio")
    places = min(load.concurrency, load.max_running)
    passes = max(load.output_tokens - 1, 0.0) / predicted.tokens_per_pass
    _reading(sheet, costs, efficiency)
    decode_s = step_line(
        sheet, "Decode step", predicted.decode_step, source=f"guide 3.3 and 3.4; {fixed}"
    )
    prompt_s = step_line(
        sheet,
        f"Step with {figure(round(predicted.chunk_tokens))} prompt tokens",
        predicted.prefill_step,
        source=f"guide 3.2 and 5.1; {fixed}",
    )
    _token(sheet, predicted, decode_s=decode_s, prompt_s=prompt_s)
    sheet.line(
        "Time to first token",
        "{requests in flight} / {requests/s} - {passes} x {time of a pass:s}",
        (
            load.concurrency,
            predicted.requests_per_s,
            passes,
            predicted.itl_s * predicted.tokens_per_pass,
        ),
        result="{:s}",
        source="Little's law",
    )
    sheet.line(
        "Output tokens per second",
        f"{{requests/s of {figure(places)} running:requests/s}} x {{output tokens}}",
        (predicted.requests_per_s, load.output_tokens),
        result=f"{{}} tokens/s, bound by {predicted.bound_by}",
        source="closed loop",
    )


def _token(sheet: Sheet, predicted: Performance, *, decode_s: float, prompt_s: float) -> None:
    drafting, share = predicted.loop.load.drafting, predicted.prefill_step_ratio
    formula = (
        "(1 - {share of steps with a prompt}) x {decode step:s} + "
        "{share of steps with a prompt} x {step with a prompt:s}"
    )
    taken = [share, decode_s, prompt_s]
    if drafting is not None and drafting.tokens:
        formula = (
            "({decode step:s} x (1 + {drafted} x {draft cost}) + {share of steps with a prompt} x "
            "({step with a prompt:s} - {decode step:s}) x (1 + {draft cost})) / {tokens per pass}"
        )
        taken = [decode_s, drafting.tokens, drafting.cost_ratio, share, prompt_s]
        taken.append(predicted.tokens_per_pass)
    source = "share = 1 - exp(-prompts per step); guide 6.6"
    sheet.line("Time per output token", formula, taken, result="{:s}", source=source)


def expert_exchange(
    sheet: Sheet, model: Model, costs: Costs, *, tokens: float, gpus: int, of: str
) -> float:
    """Seconds that these tokens' dispatch to experts on other GPUs and return take at full link
    bandwidth.

    A token's expert is on another GPU with probability 1 - 1/gpus. Source: guide 5.4.
    """
    experts = model.experts
    sent_bytes = sheet.line(
        f"Expert all-to-all {of}",
        "{MoE layers} x {tokens} x {experts per token} x {hidden} x 2 x 2 x (1 - 1 / {GPUs})",
        (experts.layers, tokens, experts.per_token, model.hidden_size, gpus),
        result="{:GB}, 2 B an element, there and back",
        source="guide 5.4",
    )
    return sheet.line(
        f"Time of the all-to-all {of}",
        f"{{sent:GB}} / {{GPUs}} / {{bandwidth of {costs.link}:GB/s}}",
        (sent_bytes, gpus, costs.link_bytes_per_s),
        result="{:s}" + ("" if costs.token_exchange_s else ", not in the prediction"),
        source="guide 5.4",
    )


def _reading(sheet: Sheet, costs: Costs, efficiency: Efficiency) -> None:
    experts = (costs.experts_bytes,) if costs.experts_bytes else ()
    read = "({weights:GB} + {experts:GB})" if experts else "{weights:GB}"
    sheet.line(
        "Weight reads per step",
        f"{read} / ({{bandwidth:TB/s}} x {{MBU}})",
        (costs.weights_bytes, *experts, costs.bandwidth_bytes_per_s, efficiency.mbu_ratio),
        result="{:s}" + (" if every expert is used" if experts else ""),
        source=f"guide 3.3; {_cited(efficiency, 'mbu_ratio')}",
    )


def _cited(efficiency: Efficiency, *names: str) -> str:
    """Where these shares come from: stated ones are the user's."""
    stated = [name for name in names if name in efficiency.stated]
    words = " and ".join(name.removesuffix("_ratio").upper() for name in stated)
    if len(stated) == len(names) == 1:
        return f"{words} as stated"
    return f"{words} as stated, the rest {SOURCE}" if stated else SOURCE


def step_line(sheet: Sheet, title: str, time: StepTime, *, source: str) -> float:
    """Adds the line of a step's time, experts only if the model has any; returns its seconds."""
    kinds = zip(KERNELS, time.reads_s, time.computes_s, strict=True)
    parts = [(name, times_s) for name, *times_s in kinds if any(times_s)]
    maxima = [f"max({{{name} read:s}}, {{{name} computed:s}})" for name, _ in parts]
    rest = ("{all-reduce:s}", "{kernel launches:s}", "{host:s}")
    return sheet.line(
        title,
        " + ".join([*maxima, *rest]),
        (
            *(time_s for _, times_s in parts for time_s in times_s),
            time.interconnect_s,
            time.launch_s,
            time.host_s,
        ),
        result="{:s}",
        source=source,
    )
