"""Real start-ups of vLLM held against the sizing: what it predicts, and what was logged.

The cases were published by vLLM's users and are copied with their source. `doubt` says why a row
contradicts itself or does not state what it depends on; such rows are printed, not counted.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.memory.budget import memory
from kneewatch.diagnose.sizing.memory.launch import LATEST, Launch, parse_version
from kneewatch.diagnose.sizing.memory.weights import Parallel, weights_per_gpu

_FOLDER = Path(__file__).parent / "fixtures" / "kvtruth"
Case = Mapping[str, Any]


@cache
def cases(name: str = "cases.jsonl") -> tuple[Case, ...]:
    """Every start-up that a file recorded."""
    return tuple(json.loads(line) for line in (_FOLDER / name).read_text().splitlines())


def launch_of(case: Case) -> Launch:
    """The launch that the case describes, nothing of its outcome."""
    card = gpu(case["gpu_id"]) if case["gpu_id"] else None
    if card is not None and case["gpu_mem_gib"]:
        card = replace(card, memory_bytes=int(case["gpu_mem_gib"] * GIB))
    named_model = model(case["model"])
    hybrid = len(named_model.layers) > 1
    return Launch(
        model=named_model,
        gpu=card,
        parallel=Parallel(
            tensor=case["tp"] or 1,
            pipeline=case["pp"] or 1,
            data=case["dp"] or 1,
            experts=bool(case["ep"]),
        ),
        quantization=case["weights_quant"],
        kv_cache_dtype="fp8" if case["kv_dtype"] == "fp8" else "auto",
        version=parse_version(case["version"]) if case["version"] else LATEST,
        gpu_memory_utilization=case["gpu_memory_utilization"],
        max_model_len=case["max_model_len"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        block_tokens=None if hybrid else case["block_size"],
        decode_context_parallel=8 if "dcp8" in case["case_id"] else 1,
        enforce_eager=bool(case["enforce_eager"]),
        # LMCache switched the shared pool off.
        hybrid_pool="mi325x" not in case["case_id"],
    )


class Miss(Struct, frozen=True):
    """One quantity of one case: predicted over logged, minus 1."""

    case_id: str
    quantity: str
    predicted: float
    logged: float
    doubt: str | None

    @property
    def error_ratio(self) -> float:
        """How far the prediction is off, signed."""
        return self.predicted / self.logged - 1


def weights_misses() -> Iterator[Miss]:
    """Weights on one GPU, in GiB."""
    for case in cases():
        launch = launch_of(case)
        if case["weights_gib"] is None or launch.model.parameters is None:
            continue
        weights = weights_per_gpu(launch.model, launch.scheme, launch.parallel)
        predicted_gib = sum(weights.values()) / GIB
        yield Miss(
            case["case_id"], "weights_gib", predicted_gib, case["weights_gib"], case["doubt"]
        )


def _started(case: Case) -> bool:
    """True where vLLM came up and logged both weights and KV: a share of nothing says nothing."""
    is_logged = case["weights_gib"] is not None and case["available_kv_gib"] is not None
    return is_logged and case["status"] == "ok"


def is_told(case: Case) -> bool:
    """Whether the row says what beside weights and KV cache took memory, and does not contradict
    itself."""
    return _started(case) and case["doubt"] is None


def available_misses(overhead: str = "fitted") -> Iterator[Miss]:
    """Available KV in GiB, the weights as logged."""
    for case in cases():
        if not _started(case):
            continue
        launch = launch_of(case)
        if launch.gpu is None:
            continue
        budget = memory(replace(launch, weights_bytes=case["weights_gib"] * GIB, overhead=overhead))
        yield Miss(
            case["case_id"],
            "available_kv_gib",
            budget.available_bytes.expected / GIB,
            case["available_kv_gib"],
            case["doubt"],
        )


def capacity_misses() -> Iterator[Miss]:
    """Tokens and concurrency as logged, the available bytes as logged."""
    for case in cases():
        if case["available_kv_gib"] is None:
            continue
        launch = replace(launch_of(case), available_kv_bytes=case["available_kv_gib"] * GIB)
        budget = memory(launch)
        for quantity, predicted in (
            ("kv_tokens", budget.logged_tokens.expected),
            ("max_concurrency", budget.concurrency.expected),
        ):
            if case[quantity]:
                yield Miss(case["case_id"], quantity, predicted, case[quantity], case["doubt"])


# How far simple rules get: available KV in GiB from utilization x memory and the weights.
SIMPLE_RULES: Mapping[str, Callable[[float, float, float], float]] = {
    "guide, 5 % of VRAM": lambda room, memory, weights: room - 0.20 * weights - 0.05 * memory,
    "guide, 10 % of VRAM": lambda room, memory, weights: room - 0.20 * weights - 0.10 * memory,
    "flat 5 GiB": lambda room, _memory, _weights: room - 5,
    "3 % of VRAM + 1 GiB": lambda room, memory, _weights: room - 0.03 * memory - 1,
}


def rule_misses(rule: Callable[[float, float, float], float]) -> Iterator[Miss]:
    """Available KV in GiB by a simple rule, the weights as logged."""
    for case in cases():
        if not _started(case):
            continue
        launch = launch_of(case)
        if launch.gpu is None:
            continue
        memory_gib = launch.gpu.memory_bytes / GIB
        room_gib = launch.utilization * memory_gib - case["weights_gib"]
        predicted_gib = rule(room_gib, memory_gib, case["weights_gib"])
        yield Miss(case["case_id"], "", predicted_gib, case["available_kv_gib"], case["doubt"])


def summary(title: str, misses: Sequence[Miss], *, bound_ratio: float) -> str:
    """One line: how many are within the bound, the median and the worst."""
    counted = [miss for miss in misses if miss.doubt is None]
    errors = [miss.error_ratio for miss in counted]
    within = sum(abs(error) <= bound_ratio for error in errors)
    return (
        f"  {title:<34}{within:>3} of {len(errors)} within {bound_ratio:.0%}, "
        f"median {statistics.median(errors):+.1%}, worst {max(errors, key=abs):+.1%}"
    )


def report() -> str:
    """The distributions, and every row that is off."""
    weights, available = list(weights_misses()), list(available_misses())
    capacity = list(capacity_misses())
    lines = [
        "Sizing against logged start-ups (rows that contradict themselves are not counted)",
        summary("weights", weights, bound_ratio=0.03),
        summary("available KV, fitted", available, bound_ratio=0.05),
        *(
            summary(f"available KV, {title}", list(rule_misses(rule)), bound_ratio=0.05)
            for title, rule in SIMPLE_RULES.items()
        ),
        summary("tokens and concurrency", capacity, bound_ratio=0.01),
        "  off, or not counted:",
    ]
    for misses, bound_ratio in ((weights, 0.03), (available, 0.05), (capacity, 0.01)):
        lines += [_off(miss) for miss in misses if abs(miss.error_ratio) > bound_ratio]
    return "\n".join(lines)


def _off(miss: Miss) -> str:
    why = f"  ({miss.doubt})" if miss.doubt else ""
    return (
        f"    {miss.case_id:<46}{miss.quantity:<18}{miss.predicted:>12.4g} against "
        f"{miss.logged:.4g}: {miss.error_ratio:+.1%}{why}"
    )


if __name__ == "__main__":
    print(report())
