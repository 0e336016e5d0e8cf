"""Random workload profiles, and every other split and precision that the plan could have chosen.

The plan's choice may not cost more than an alternative that the same predictions call feasible, and
a requirement that it does not meet has to be in its first line. Pools for prefill and decode have
to save more than the predictions' error.

Usage: python -m tests.plan_choices [PROFILES [FIRST [TRIED]]], with TRIED drawn alternatives each
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from functools import partial

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.plan.plan_result import Plan, plan_lines
from kneewatch.diagnose.sizing.plan.split_choice import SAVING_RATIO
from kneewatch.diagnose.sizing.plan.thirteen_steps import plan
from kneewatch.diagnose.sizing.plan.workload_profile import Stated, read_profile
from tests.diagnose.workloads import lengths_table

MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "openai/gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3",
    "Qwen/Qwen3-30B-A3B",
)
GPUS = ("h100-sxm", "h200", "a100-80gb", "l40s", "b200")


def profile_text(seed: int) -> str:
    """A profile whose lengths, rates, targets and hardware follow from the seed."""
    chance = random.Random(seed)
    spread = partial(chance.uniform, 1.2, 3.0)
    inputs, outputs = int(2 ** chance.uniform(6, 14)), int(2 ** chance.uniform(4, 10))
    tails = [int(inputs * spread()), int(outputs * spread())]
    ends = [int(tails[0] * spread()), int(tails[1] * spread())]
    gpus = chance.sample(GPUS, chance.choice((1, 1, 2)))
    targets = [f"ttft_p99_s = {2 ** chance.uniform(-2, 4):.3f}"] * (chance.random() < 0.8)
    if chance.random() < 0.6 or not targets:
        targets.append(f"itl_p99_s = {2 ** chance.uniform(-6, -2):.4f}")
    lines = [
        lengths_table((inputs, tails[0], ends[0]), (outputs, tails[1], ends[1])),
        f'[traffic]\nkind = "online"\narchetype = "{chance.choice(("chat", "rag", "code"))}"',
        f"peak_requests_per_s = {2 ** chance.uniform(-2, 9):.2f}",
        "[slo]",
        *targets,
        f'[deployment]\nmodel = "{chance.choice(MODELS)}"\ngpus = {gpus!r}',
    ]
    if chance.random() < 0.3:
        lines.append(f"concurrency = {int(2 ** chance.uniform(1, 8))}")
    if chance.random() < 0.3:
        lines.append(f"[prefix]\nshared_tokens = {inputs // 2}\nhit_ratio = 0.7")
    if chance.random() < 0.5:
        lines.append('[hosting]\nnetwork = "infiniband-ndr"')
    return "\n".join(lines)


def planned(text: str, stated: Stated | None = None) -> Plan | None:
    """The plan; None if nothing fits."""
    try:
        return plan(read_profile(text, stated=stated))
    except SizingError:
        return None


def alternatives(model_id: str) -> Iterator[Stated]:
    """Every split and precision that could be stated instead; weights published in a format of
    their own are not converted to INT8."""
    served = model(model_id)
    plain = served.quantization == "bf16"
    whole = ("", "bf16", "int8", "w8a8") if plain else ("", "bf16")
    more: list[dict[str, object]] = [{"pipeline_parallel": stages} for stages in (1, 2, 3, 4)]
    if served.experts.count:
        more.append({"expert_parallel": True})
        for count in (2, 4, 8):
            more.append({"data_parallel": count})
    for tensor, split, quantization, kv in itertools.product(
        (1, 2, 4, 8), more, whole, ("", "auto")
    ):
        if tensor * int(str(split.get("data_parallel", 1))) > 8:
            continue
        stated = {"tensor_parallel": tensor} | split
        stated |= {"quantization": quantization} if quantization else {}
        yield {"deployment": stated | ({"kv_cache_dtype": kv} if kv else {})}


def usd_per_year(found: Plan) -> float:
    """The plan's cost a year; infinite where it does not meet its requirements."""
    cost = found.step(12).output.get("usd_per_year")
    return float(cost) if found.fits and isinstance(cost, float | int) else float("inf")


def contradictions(seed: int, tried: int | None = None) -> list[str]:
    """Alternatives that are cheaper than the plan, and requirements that its first line leaves out.

    `tried` alternatives are drawn by chance; all of them if None.
    """
    text = profile_text(seed)
    chosen = planned(text)
    every = list(alternatives(read_profile(text).deployment.model))
    if tried is not None:
        every = random.Random(seed).sample(every, tried)
    least = float("inf") if chosen is None else usd_per_year(chosen)
    found: list[str] = []
    for stated in every:
        other = planned(text, stated)
        if other is None:
            continue
        parted = len(other.tiers) > (0 if chosen is None else len(chosen.tiers))
        if usd_per_year(other) < least * (1 - (SAVING_RATIO if parted else 1e-9)):
            found.append(f"seed {seed}: {stated} costs {usd_per_year(other):.0f}, not {least:.0f}")
    if chosen is not None:
        first = plan_lines(chosen)[0]
        found += [f"seed {seed}: not in {first!r}: {u}" for u in chosen.unmet if u not in first]
        if chosen.gpus is None and not chosen.unmet:
            found.append(f"seed {seed}: no fleet and no reason")
    return found


def main(count: str = "200", first: str = "0", tried: str = "") -> int:
    """Print every contradiction. Returns the number of profiles that have one."""
    wrong = 0
    for seed in range(int(first), int(first) + int(count)):
        lines = contradictions(seed, int(tried) if tried else None)
        wrong += bool(lines)
        for line in lines[:3]:
            print(line, flush=True)
    print(f"{wrong} profiles with contradictions")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
