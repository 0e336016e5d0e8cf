"""The sizing question from the flags and files of `size`. I/O edge: it reads files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kneewatch.agent.size.options import FLAGS
from kneewatch.agent.stated_deployment import named_gpu, named_model
from kneewatch.diagnose.catalogue.gpu_specs import GIB, gpus
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.sizing.configuration_search import Choices
from kneewatch.diagnose.sizing.memory.launch_setup import LATEST, Setup, parse_version
from kneewatch.diagnose.sizing.memory.weights import (
    DEFAULT_RANK,
    ONE_GPU,
    Adapters,
    Draft,
    Parallel,
)
from kneewatch.diagnose.sizing.replica_count import SAFETY_DEFAULT
from kneewatch.diagnose.sizing.requirements import Question

OWN_DRAFT = "mtp"


def asked(
    given: dict[str, Any],
    usable_requests_per_s: float | None,
    find: Callable[[str], Model] = named_model,
) -> Question:
    """The sizing question that the flags ask. `usable_requests_per_s` is that of a benchmark, None
    without one; `find` returns the model of a name.

    Raises:
        SizingError: a flag's value is invalid; the error has the flag's name.
    """
    parallel, replicas = _spread(given)
    if given["search"]:
        parallel, replicas = ONE_GPU, 1
    if given["search"] and given["tp"]:
        parallel = Parallel(tensor=given["tp"])
    return Question(
        setup=_setup(given, parallel, find),
        replicas=replicas,
        concurrency=given["concurrency"],
        input_tokens=given["input_tokens"],
        output_tokens=given["output_tokens"],
        peak_requests_per_s=given["peak_rps"],
        usable_requests_per_s=(
            usable_requests_per_s if given["usable_rps"] is None else given["usable_rps"]
        ),
        ttft_slo_s=given["ttft_slo"],
        itl_slo_s=given["itl_slo"],
        safety=SAFETY_DEFAULT if given["safety"] is None else given["safety"],
        usd_per_gpu_hour=given["usd_per_gpu_hour"],
        utilization_ratio=given["utilization"],
        mfu_ratio=given["mfu"],
        mbu_ratio=given["mbu"],
        acceptance_ratio=given["acceptance"],
    )


def _setup(given: dict[str, Any], parallel: Parallel, find: Callable[[str], Model]) -> Setup:
    version = given["vllm_version"]
    if given["model"] is None:
        raise SizingError("required: a catalogue id or the path of a config.json", name="model")
    model = find(given["model"])
    return Setup(
        model=model,
        gpu=named_gpu(given["gpu"]) if given["gpu"] else None,
        parallel=parallel,
        quantization=given["quantization"],
        kv_cache_dtype=given["kv_cache_dtype"],
        version=parse_version(version) if version else LATEST,
        gpu_memory_utilization=given["gpu_memory_utilization"],
        max_model_len=given["max_model_len"],
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        block_tokens=given["block_size"],
        decode_context_parallel=given["dcp"],
        enforce_eager=given["enforce_eager"],
        hybrid_pool=not given["disable_hybrid_kv_cache_manager"],
        prefix_caching=not given["no_enable_prefix_caching"],
        overhead=given["overhead"] or "fitted",
        weights_bytes=_gib("weights_gib", given["weights_gib"]),
        available_kv_bytes=_gib("available_kv_gib", given["available_kv_gib"]),
        context_tokens=given["context"],
        adapters=_adapters(given),
        draft=_draft(given, model, find),
    )


def _adapters(given: dict[str, Any]) -> Adapters | None:
    slots, rank = given["max_loras"], given["max_lora_rank"]
    if slots is None:
        if rank is not None:
            raise SizingError("set the number of adapters for --max-lora-rank", name="max_loras")
        return None
    return Adapters(slots, DEFAULT_RANK if rank is None else rank)


def _draft(given: dict[str, Any], target: Model, find: Callable[[str], Model]) -> Draft | None:
    name, tokens = given["draft_model"], given["num_speculative_tokens"]
    if name is None and tokens is None:
        return None
    if name is None:
        raise SizingError(
            "set the draft model; n-gram drafting takes no memory and needs no flag",
            name="draft_model",
        )
    if tokens is None:
        raise SizingError(
            "set how many tokens the draft model proposes", name="num_speculative_tokens"
        )
    if name == OWN_DRAFT:
        if target.own_draft is None:
            raise SizingError(f"{target.id} has no MTP layers in the catalogue", name="draft_model")
        return Draft(target.own_draft, tokens)
    try:
        return Draft(find(name), tokens)
    except SizingError as error:
        raise SizingError(str(error), name="draft_model", choices=error.choices) from error


def _gib(name: str, stated: float | None) -> float | None:
    if stated is None:
        return None
    if not 0 <= stated <= 1 << 20:  # a pebibyte, more than any GPU has
        raise SizingError(f"{stated:g} GiB is out of range", name=name)
    return stated * GIB


def _spread(given: dict[str, Any]) -> tuple[Parallel, int]:
    """One replica's parallel sizes, and how many replicas the GPUs allow."""
    for flag in ("tp", "pp", "dp", "dcp", "gpus"):
        value = given[flag]
        if value is not None and not 1 <= value <= 4096:
            raise SizingError(f"{value} is out of range: 1 to 4096 are allowed", name=flag)
    tp, pp, dp, gpus = given["tp"], given["pp"], given["dp"], given["gpus"]
    if tp is None:
        tp = 1 if gpus is None else max(gpus // (pp * dp), 1)
    per_replica = tp * pp * dp
    replicas = 1 if gpus is None else gpus // per_replica
    if gpus is not None and gpus != replicas * per_replica:
        raise SizingError(
            f"{gpus} GPUs are not a multiple of TP {tp} x PP {pp} x DP {dp}",
            name="gpus",
            choices=[str(per_replica * count) for count in (1, 2, 4)],
        )
    return Parallel(tensor=tp, pipeline=pp, data=dp, experts=given["expert_parallel"]), replicas


# Flags that override a profile, with the profile's table and key.
_PROFILE_KEYS = {
    "model": ("deployment", "model"),
    "tp": ("deployment", "tensor_parallel"),
    "quantization": ("deployment", "quantization"),
    "max_model_len": ("deployment", "max_model_len"),
    "usable_rps": ("deployment", "usable_requests_per_s"),
    "usd_per_gpu_hour": ("deployment", "usd_per_gpu_hour"),
    "peak_rps": ("traffic", "peak_requests_per_s"),
    "ttft_slo": ("slo", "ttft_p99_s"),
    "itl_slo": ("slo", "itl_p99_s"),
}


_WITH_A_PLAN = {*_PROFILE_KEYS, "gpu", "kv_cache_dtype", "plan"}


def refuse_ignored_by_plan(given: dict[str, Any]) -> None:
    """Refuse flags that a plan would ignore.

    Raises:
        SizingError: with the flag's name.
    """
    for flag in FLAGS:
        if flag.parameter not in _WITH_A_PLAN and given[flag.parameter] != flag.default:
            decided = "is decided by the plan" if flag.kind is bool else "is read from the profile"
            raise SizingError(
                f"not available with --plan: it {decided} (docs/how-to/plan.md)",
                name=flag.parameter,
            )


def over_profile(given: dict[str, Any]) -> dict[str, dict[str, object]]:
    """The values of flags that override a profile's, by the profile's table and key."""
    stated: dict[str, dict[str, object]] = {}
    for flag, (table, key) in _PROFILE_KEYS.items():
        if given[flag] is not None:
            stated.setdefault(table, {})[key] = given[flag]
    if given["gpu"] is not None:
        stated.setdefault("deployment", {})["gpus"] = [named_gpu(given["gpu"]).id]
    if given["kv_cache_dtype"] != "auto":
        stated.setdefault("deployment", {})["kv_cache_dtype"] = given["kv_cache_dtype"]
    return stated


def choices_of(given: dict[str, Any]) -> Choices:
    """What --search may vary: whatever no flag fixes, on data-centre GPUs."""
    sweeps = ("benchmark", "benchmark_by_tensor_parallel")
    for flag in ("dp", "dcp", "concurrency", "expert_parallel", *sweeps):
        if given[flag] not in (None, False, 1, ()):
            raise SizingError("not available with --search", name=flag)
    ids = None
    if given["gpu"] is None:
        ids = [key for key, card in gpus().items() if card.segment == "data-centre"]
    return Choices(
        gpu_ids=ids,
        tensor_parallels=None if given["tp"] is None else [given["tp"]],
        pipeline_parallels=None if given["pp"] == 1 else [given["pp"]],
        kv_cache_dtypes=None if given["kv_cache_dtype"] == "auto" else [given["kv_cache_dtype"]],
        most_gpus=given["gpus"],
    )
