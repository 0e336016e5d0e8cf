"""A sizing answer as the JSON document kneewatch.size/1. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import floor
from typing import Any

from kneewatch.diagnose.sizing.memory.budget import Range
from kneewatch.diagnose.sizing.memory.memory_arithmetic import draft_token_bytes, memory_steps
from kneewatch.diagnose.sizing.replica_count import FleetSize
from kneewatch.diagnose.sizing.requirements import Question
from kneewatch.diagnose.sizing.size import Size, steps

SCHEMA = "kneewatch.size/1"


def size_document(answer: Size) -> dict[str, Any]:
    """The JSON document of one answer; unknown values are null, and `notes` say why."""
    fewest = answer.fewest
    return {
        "schema": SCHEMA,
        "fits": answer.fits,
        "inputs": _inputs(answer.question, answer),
        "memory": _memory(answer),
        "min_gpus": fewest.expected if fewest else None,
        "min_gpus_range": {
            "low": fewest.low if fewest else None,
            "expected": fewest.expected if fewest else None,
            "high": fewest.high if fewest else None,
        },
        "performance": _performance(answer),
        "fleet": _fleet(answer),
        "cost": _cost(answer),
        "steps": [asdict(step) for step in (*memory_steps(answer.memory), *steps(answer))],
        "notes": [*answer.notes, *answer.missed],
    }


def nothing_document(extra: Mapping[str, Any], *, fits: bool = False) -> dict[str, Any]:
    """The document of a plan, or of a search without a result: no single launch is the answer."""
    empty: dict[str, Any] = {
        "schema": SCHEMA,
        "fits": fits,
        **dict.fromkeys(("inputs", "memory", "min_gpus", "min_gpus_range")),
        **dict.fromkeys(("performance", "fleet", "cost")),
        "steps": [],
        "notes": [],
    }
    return empty | dict(extra)


def _inputs(question: Question, answer: Size) -> dict[str, Any]:
    setup = question.setup
    return {
        "model": setup.model.id,
        "model_source": setup.model.source,
        "gpu": setup.gpu.id if setup.gpu else None,
        "gpu_source": setup.gpu.source if setup.gpu else None,
        "replicas": question.replicas,
        "tensor_parallel": setup.parallel.tensor,
        "pipeline_parallel": setup.parallel.pipeline,
        "decode_context_parallel": setup.decode_context_parallel,
        "data_parallel": setup.parallel.data,
        "expert_parallel": setup.parallel.experts,
        "quantization": setup.scheme.id,
        "kv_cache_dtype": setup.kv_cache_dtype,
        "gpu_memory_utilization": setup.utilization,
        "max_model_len": setup.longest_tokens,
        "max_num_seqs": setup.seqs,
        "max_num_batched_tokens": setup.batched_tokens,
        "vllm_version": ".".join(str(part) for part in setup.version),
        "overhead": setup.overhead,
        "context_tokens": setup.context,
        "concurrency": question.concurrency_per_engine * question.engines,
        "input_tokens": question.input_tokens,
        "output_tokens": question.output_tokens,
        "peak_requests_per_s": question.peak_requests_per_s,
        "usable_requests_per_s": answer.usable_requests_per_s,
        "usable_requests_source": answer.usable_source,
        "ttft_slo_s": question.ttft_slo_s,
        "itl_slo_s": question.itl_slo_s,
        "safety": question.safety,
        "usd_per_gpu_hour": price_of(question),
        "utilization_ratio": question.full_load_ratio,
        "max_loras": setup.adapters.slots if setup.adapters else None,
        "max_lora_rank": setup.adapters.rank if setup.adapters else None,
        "draft_model": setup.draft.model.id if setup.draft else None,
        "num_speculative_tokens": setup.draft.tokens if setup.draft else None,
        "acceptance_ratio": question.acceptance_ratio,
        "mfu_ratio": question.efficiency.mfu_ratio,
        "mbu_ratio": question.efficiency.mbu_ratio,
    }


def price_of(question: Question) -> float | None:
    """Dollars per GPU-hour: as stated, else the catalogue's; None where neither is known."""
    if question.usd_per_gpu_hour is not None:
        return question.usd_per_gpu_hour
    gpu = question.setup.gpu
    return gpu.usd_per_hour if gpu else None


def _memory(answer: Size) -> dict[str, Any]:
    memory = answer.memory
    weights, overhead = memory.weights_bytes, memory.overhead
    return {
        "weights_bytes_per_gpu": None if weights is None else round(weights),
        "kv_bytes_per_token_per_gpu": _number(memory.layout.token_bytes),
        "kv_bytes_per_request_per_gpu": round(memory.layout.request_bytes(memory.setup.context)),
        "overhead_bytes_per_gpu": None if overhead is None else round(overhead.expected_bytes),
        "kv_available_bytes_per_gpu": _whole(memory.available_bytes),
        "kv_blocks": _whole(memory.available_bytes.map(memory.layout.blocks)),
        "kv_capacity_tokens": _whole(memory.logged_tokens),
        "kv_tokens_at_context": _whole(memory.held_tokens),
        "max_concurrency": asdict(memory.concurrency.map(lambda requests: round(requests, 3))),
        "fits": answer.fits,
        "adapter_bytes_per_gpu": round(memory.adapter_bytes),
        "draft_bytes_per_gpu": round(memory.draft_bytes),
        "draft_kv_bytes_per_token_per_gpu": _number(draft_token_bytes(memory)),
    }


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _whole(amount: Range) -> dict[str, int]:
    return asdict(amount.map(floor))


def _performance(answer: Size) -> dict[str, Any]:
    """Performance of one replica: all its data-parallel engines together."""
    performance, engines = answer.performance, answer.question.setup.parallel.data
    if performance is None:
        return dict.fromkeys(
            ("prefill_tokens_per_s", "decode_tokens_per_s", "requests_per_s", "ttft_s", "itl_s",
             "running", "binding", "ridge_flop_per_byte", "decode_flop_per_byte",
             "batch_at_ridge")
        )  # fmt: skip
    bound = answer.intensity
    return {
        "prefill_tokens_per_s": round(performance.prefill_tokens_per_s * engines, 1),
        "decode_tokens_per_s": round(performance.decode_tokens_per_s * engines, 1),
        "requests_per_s": round(performance.requests_per_s * engines, 4),
        "ttft_s": round(performance.ttft_s, 5),
        "itl_s": round(performance.itl_s, 6),
        "running": round(performance.running * engines, 2),
        "binding": performance.binding,
        "ridge_flop_per_byte": None if bound is None else round(bound.ridge_flop_per_byte, 2),
        "decode_flop_per_byte": None if bound is None else round(bound.decode_flop_per_byte, 3),
        "batch_at_ridge": (
            None
            if bound is None or bound.batch_at_ridge is None
            else round(bound.batch_at_ridge, 1)
        ),
    }


def _fleet(answer: Size) -> dict[str, Any]:
    fleet: FleetSize | None = answer.fleet
    if fleet is None:
        return dict.fromkeys(("instances", "deployed_instances", "gpus", "headroom_ratio"))
    return {
        "instances": fleet.instances,
        "deployed_instances": fleet.deployed_instances,
        "gpus": fleet.gpus,
        "headroom_ratio": round(fleet.headroom_ratio, 4),
    }


def _cost(answer: Size) -> dict[str, Any]:
    per_token, per_year = answer.token_cost, answer.yearly_cost
    return {
        "gpus": answer.gpus,
        "usd_per_million_output_tokens": (
            None if per_token is None else round(per_token.usd_per_million_tokens, 4)
        ),
        "usd_per_year": None if per_year is None else round(per_year.usd_per_year, 2),
        "utilization_ratio": round(answer.utilization.ratio, 4),
        "utilization_source": answer.utilization.source,
    }
