"""The `vllm serve` command of a sized launch. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from kneewatch.collector.engines.engine_kind import EngineKind
from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.catalogue.quantization import FULL_BITS, scheme
from kneewatch.diagnose.deployment.vllm_flags import printed_words
from kneewatch.diagnose.sizing.memory.launch_setup import Setup

# No method of 0.32 (vllm/model_executor/layers/quantization/__init__.py).
_BITSANDBYTES_UNTIL = (0, 32, 0)


def sized_command(setup: Setup) -> str:
    """The command of a sized launch; a shell comment says where it needs another checkpoint."""
    others = dict(setup.other_flags)
    values = {
        flag: value
        for flag, value in flag_values(setup).items()
        if value is not None and flag not in others
    }
    if setup.slack is None:
        flags = [_words(flag, value) for flag, value in values.items()]
        command = " ".join(["vllm serve", shlex.quote(setup.model.id), *flags])
    else:
        command = _own_command(setup.kind, setup.model.id, values)
    command = " ".join([command, *(printed_words(*other) for other in others.items())])
    own = scheme(setup.model.quantization)
    other = setup.scheme.id != own.id and _quantized_at_load(setup) is None
    return f"{command}  # needs a checkpoint in {setup.scheme.id}" if other else command


def _own_command(kind: EngineKind, model: str, values: Mapping[str, str | float | bool]) -> str:
    """The command of an engine that is not vLLM, in its flags."""
    flags: list[str] = []
    for flag, value in values.items():
        if value is False:
            spelled, value = kind.flags.get(f"--no-{flag[2:]}", ""), True
        else:
            spelled = kind.flags.get(flag, "")
        value = kind.values.get(f"{value}", value) if isinstance(value, str) else value
        flags += [_words(spelled, value)] if spelled else []
    return " ".join([f"python -m {kind.launchers[0]} --model-path", shlex.quote(model), *flags])


def _quantized_at_load(setup: Setup) -> str | None:
    """The method with which vLLM quantizes the model while it loads it.

    None for quantized checkpoints, which state theirs, and for schemes that need one.
    """
    chosen, is_full = setup.scheme.id, scheme(setup.model.quantization).expert_bits == FULL_BITS
    loads = chosen == "fp8" or (chosen == "bitsandbytes" and setup.version < _BITSANDBYTES_UNTIL)
    return chosen if is_full and loads else None


def flag_values(setup: Setup) -> Mapping[str, str | float | bool | None]:
    """The value of each flag; None for what is not set."""
    parallel, adapters, draft = setup.parallel, setup.adapters, setup.draft
    sizes, limits = setup.cudagraph_capture_sizes, setup.limit_mm_per_prompt
    ranks = setup.decode_context_parallel
    drafted = None
    if draft is not None:
        own = draft.model == setup.model.own_draft
        drafted = json.dumps(
            ({"method": "mtp"} if own else {"model": draft.model.id})
            | {"num_speculative_tokens": draft.tokens}
        )
    return {
        "--tensor-parallel-size": parallel.tensor if parallel.tensor > 1 else None,
        "--pipeline-parallel-size": parallel.pipeline if parallel.pipeline > 1 else None,
        "--data-parallel-size": parallel.data if parallel.data > 1 else None,
        "--decode-context-parallel-size": ranks if ranks > 1 else None,
        "--enable-expert-parallel": parallel.experts or None,
        "--quantization": _quantized_at_load(setup),
        "--kv-cache-dtype": None if setup.kv_cache_dtype == "auto" else setup.kv_cache_dtype,
        "--gpu-memory-utilization": setup.gpu_memory_utilization,
        "--kv-cache-memory-bytes": setup.kv_cache_memory_bytes and int(setup.kv_cache_memory_bytes),
        "--max-model-len": setup.max_model_len,
        "--max-num-seqs": setup.max_num_seqs,
        "--max-num-batched-tokens": setup.max_num_batched_tokens,
        "--block-size": setup.block_tokens,
        "--enable-prefix-caching": setup.prefix_caching,
        "--disable-hybrid-kv-cache-manager": not setup.hybrid_pool or None,
        "--enforce-eager": setup.enforce_eager or None,
        "--compilation-config": json.dumps({"cudagraph_capture_sizes": sizes}) if sizes else None,
        "--speculative-config": drafted,
        "--language-model-only": setup.language_model_only or None,
        "--limit-mm-per-prompt": json.dumps(dict(limits)) if limits else None,
        "--cpu-offload-gb": setup.cpu_offload_bytes / GIB or None,
        "--kv-offloading-size": setup.kv_offloading_bytes / GIB or None,
        "--enable-lora": None if adapters is None else True,
        "--max-loras": None if adapters is None else adapters.slots,
        "--max-lora-rank": None if adapters is None else adapters.rank,
    }


def _words(flag: str, value: str | float | bool) -> str:
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    return f"{flag} {shlex.quote(f'{value:g}' if isinstance(value, float) else str(value))}"
