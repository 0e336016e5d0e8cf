"""Start-ups of 2026 held against the sizing: what each launch's flags give, and what vLLM logged.

Usage: python -m tests.kvtruth_2026
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpu
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.memory.budget import memory
from kneewatch.diagnose.sizing.memory.launch import Launch, launch_of, parse_version
from kneewatch.diagnose.sizing.memory.weights import Draft, Parallel
from tests.kvtruth import Case, cases

RECORDED = ("cases_2026.jsonl", "cases_2026_public.jsonl", "cases_2026_unseen.jsonl")
THIRD, FOURTH = "cases_2026_third.jsonl", "cases_2026_fourth.jsonl"
"""Start-ups of later in 2026, as the unseen ones written down before anything of them was computed,
and in no fit."""


@cache
def recorded(*names: str) -> tuple[Case, ...]:
    """Every start-up of these files, or of all, that states what it depends on."""
    return tuple(
        case for name in names or RECORDED for case in cases(name) if not case.get("doubt")
    )


def launch_of_case(case: Case) -> Launch:
    """The launch that the case describes, nothing of its outcome.

    Raises:
        SizingError: the sizing does not accept the launch.
    """
    card = gpu(case["gpu"])
    if case.get("gpu_mem_gib"):
        card = replace(card, memory_bytes=int(case["gpu_mem_gib"] * GIB))
    named = model(case["model"])
    draft = None
    if case.get("spec") == "mtp":
        if named.own_draft is None:
            raise SizingError(f"{named.id} has no MTP layers", name="draft_model")
        draft = Draft(named.own_draft, case["spec_tokens"])
    fields = {
        "parallel": Parallel(
            tensor=case["tp"], pipeline=case["pp"], data=case["dp"], experts=case["ep"]
        ),
        "quantization": case["weights_quant"],
        "kv_cache_dtype": case["kv_dtype"],
        "version": parse_version(case["vllm_version"]),
        "gpu_memory_utilization": case["gpu_memory_utilization"],
        "max_model_len": case["max_model_len"],
        "max_num_seqs": case.get("max_num_seqs"),
        "max_num_batched_tokens": case.get("max_num_batched_tokens"),
        "block_tokens": case.get("block_size"),
        "decode_context_parallel": case["dcp"],
        "enforce_eager": case["enforce_eager"],
        "cudagraph_capture_sizes": tuple(case.get("cudagraph_capture_sizes", ())),
        "prefix_caching": case["prefix_caching"],
        "limit_mm_per_prompt": tuple(case.get("limit_mm_per_prompt", {}).items()),
        "language_model_only": case.get("language_model_only", False),
        "draft": draft,
    }
    return launch_of(named, card, fields)


class Row(Struct, frozen=True):
    """One start-up: predicted over logged, minus 1; None where nothing was logged or stated.

    `refused`: why the sizing did not accept the launch. `in_band`: whether the logged KV memory, or
    without it the logged concurrency or the blocks of a refused start, is inside the stated band.
    """

    case: Case
    refused: str = ""
    concurrency: float | None = None
    kv: float | None = None
    weights: float | None = None
    in_band: bool | None = None


def row_of(case: Case) -> Row:
    """The start-up, judged."""
    try:
        launch = launch_of_case(case)
        answer = memory(launch)
    except SizingError as error:
        return Row(case, refused=str(error))
    logged_gib, logged_requests = case["available_kv_gib"], case["max_concurrency"]
    logged_blocks = case.get("state_blocks")
    requests = kv = weights = in_band = None
    if logged_gib:
        layout = memory(replace(launch, available_kv_bytes=logged_gib * GIB))
        if logged_requests:
            requests = layout.concurrency.expected / logged_requests - 1
        elif case.get("estimated_max_len"):
            requests = layout.longest_that_fits / case["estimated_max_len"] - 1
    free = answer.available_bytes
    # A launch without its utilization says nothing about the memory beside the weights.
    if case["util_known"]:
        if logged_gib:
            kv = free.expected / GIB / logged_gib - 1
            in_band = free.low <= logged_gib * GIB <= free.high
        elif logged_requests:
            held = answer.concurrency
            kv = held.expected / logged_requests - 1
            in_band = held.low <= logged_requests <= held.high
        elif logged_blocks:
            blocks = free.map(answer.layout.blocks)
            kv = blocks.expected / logged_blocks - 1
            in_band = blocks.low <= logged_blocks <= blocks.high
    if case.get("weights_gib") and answer.weights_bytes:
        includes = case.get("weights_include_draft") or not launch.draft
        drafted = 0 if includes else answer.draft_bytes
        weights = (answer.weights_bytes - drafted) / GIB / case["weights_gib"] - 1
    return Row(case, "", requests, kv, weights, in_band)


@cache
def rows(*names: str) -> tuple[Row, ...]:
    """Every start-up of these files, or of all, judged."""
    return tuple(map(row_of, recorded(*names)))


def within(values: Sequence[float | None], bound_ratio: float) -> tuple[int, int]:
    """How many of the values are within the bound, and how many there are."""
    measured = [value for value in values if value is not None]
    return sum(abs(value) <= bound_ratio for value in measured), len(measured)


_COLUMNS: Mapping[str, tuple[Callable[[Row], float | None], float]] = {
    "concurrency from the logged KV": (lambda row: row.concurrency, 0.01),
    "KV from flags": (lambda row: row.kv, 0.10),
    "weights": (lambda row: row.weights, 0.03),
}


def report() -> Iterator[str]:
    """The tables of all files as lines."""
    for name in (*RECORDED, THIRD, FOURTH):
        yield from _table(name)


def _table(name: str) -> Iterator[str]:
    judged = rows(name)
    yield f"Sizing against start-ups of 2026 ({name})"
    refused = sum(bool(row.refused) for row in judged)
    yield f"  refused although they ran: {refused} of {len(judged)}"
    for title, (value, bound_ratio) in _COLUMNS.items():
        values = [value(row) for row in judged]
        hits, count = within(values, bound_ratio)
        measured = [each for each in values if each is not None]
        middle = f", median {statistics.median(measured):+.1%}" if measured else ""
        yield f"  {title:<34}{hits:>3} of {count} within {bound_ratio:.0%}{middle}"
    banded = [row.in_band for row in judged if row.in_band is not None]
    yield f"  {'inside the stated band':<34}{sum(banded):>3} of {len(banded)}"
    yield f"    {'case':<46}{'requests':>9}{'KV':>8}{'weights':>9}  band"
    for row in judged:
        shown = "".join(
            f"{'-' if value is None else f'{value:+.1%}':>{width}}"
            for value, width in ((row.concurrency, 9), (row.kv, 8), (row.weights, 9))
        )
        band = {None: "-", True: "in", False: "out"}[row.in_band]
        told = f"  refused: {row.refused[:90]}" if row.refused else f"{shown}  {band}"
        yield f"    {row.case['case_id']:<46}{told}"
    for case in (case for case in cases(name) if case.get("doubt")):
        yield f"    {case['case_id']:<46}  not counted: {case['doubt']}"


if __name__ == "__main__":
    print("\n".join(report()))
