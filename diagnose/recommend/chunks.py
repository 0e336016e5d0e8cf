"""Prompts taken in pieces: how long a step with one takes. Guide 6.4. Pure."""

from __future__ import annotations

from functools import lru_cache
from math import floor, log2

from kneewatch.diagnose.catalogue.gpus import gpu
from kneewatch.diagnose.recommend.scene import Scene
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.vllm_defaults import LATEST, defaults
from kneewatch.diagnose.sizing.speed.costs import costs

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
