"""What vLLM's own cache code makes of censuses of layers, recorded for the tests.

Run once for each vLLM whose layout is to be held, with the lab's interpreter (`make lab` installs
it), from the repository's root; no weights and no GPU are needed:

    LAB/venv/bin/python -m tests.lab.kv_layout tests/fixtures/kvlayout/vllm-0.32.0.json

Every case of `tests/lab/kv_censuses.py` becomes the specifications that vLLM's layers would
register, goes through its block size alignment, grouping and capacity, and leaves one line of
figures. `tests/diagnose/sizing/test_kv_layout_oracle.py` holds kneewatch to them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import lcm, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.lab.kv_censuses import CASES, CENSUSES, DEFAULTS, GIB, LayerFacts, settings_of
from tests.lab.kv_specs import Foreign, backend, layer_specs, packing, state_of


def record() -> dict[str, Any]:
    """The version of the vLLM that ran, the censuses and the figures of every case."""
    return {
        "vllm": import_module("vllm").__version__,
        "defaults": DEFAULTS,
        "censuses": {name: [_facts(layer) for layer in census] for name, census in CENSUSES},
        "cases": [_outcome(dict(CENSUSES)[name], name, case) for name, case in CASES],
    }


def _facts(layer: LayerFacts) -> LayerFacts:
    """The layer, a recurrent one with the sizes that vLLM works out for it on one GPU."""
    if layer["kind"] != "recurrent":
        return layer
    shapes, dtypes = state_of(layer, 1)
    sizes = [prod(shape) for shape in shapes]
    return {
        "kind": "recurrent",
        "count": layer["count"],
        "conv_elements": sizes[0],
        "state_elements": sizes[1],
        "state_bytes_per_element": dtypes[1].itemsize,
    }


def _outcome(census: Sequence[LayerFacts], name: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    case = settings_of(stated)
    utils = import_module("vllm.v1.core.kv_cache_utils")
    config = _config(case)
    _align(config, census, case)
    _spare_ends(config, census, case)
    stages = _stages(layer_specs(config, census, case), case["pipeline_parallel"])
    free_bytes = int(case["available_gib"] * GIB)
    try:
        cache_configs = utils.get_kv_cache_configs(config, stages, [free_bytes] * len(stages))
    except (NotImplementedError, ValueError) as refused:
        return {"census": name, "settings": stated, "refused": type(refused).__name__}
    groups = cache_configs[0].kv_cache_groups
    layout = config.cache_config.get_resolved_kv_cache_layout()
    tokens, requests = utils.get_kv_cache_capacity(config, cache_configs[0])
    return {
        "census": name,
        "settings": stated,
        "blocks": cache_configs[0].num_blocks,
        "block_bytes": max(
            utils._get_kv_cache_bytes_per_block(stage.kv_cache_groups, layout)
            for stage in cache_configs
        ),
        "block_tokens": sorted(_tokens(group) for group in groups if _tokens(group)),
        "groups": len(groups),
        "request_blocks": sum(_held(group, config) for group in groups),
        "tokens": tokens,
        "concurrency": requests,
        **_served(config, cache_configs[0], case),
    }


# Of the lengths of a case's requests: a window's start in its block differs from one to the next.
_SPREAD_TOKENS = 64


def _served(config: Foreign, cache: Foreign, case: Mapping[str, Any]) -> dict[str, int]:
    """How many requests vLLM's cache manager admits, each in decode when the next is admitted.

    Of the cases with a small cache, whose layers have windows and no recurrent states.
    """
    utils = import_module("vllm.v1.core.kv_cache_utils")
    cache = utils.generate_scheduler_kv_cache_config([cache])
    names = {type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups}
    windowed = any(name.startswith("SlidingWindow") for name in names)
    if not windowed or "MambaSpec" in names or case["available_gib"] == DEFAULTS["available_gib"]:
        return {}
    blocks = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
    manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager(
        cache,
        max_model_len=case["max_model_len"],
        max_in_flight_tokens=config.max_in_flight_tokens,
        enable_caching=False,
        scheduler_block_size=lcm(*blocks),
        hash_block_size=min(blocks),
    )
    admitted = 0
    while _decodes(manager, case, admitted):
        admitted += 1
    return {"served": admitted}


def _decodes(manager: Foreign, case: Mapping[str, Any], number: int) -> bool:
    """Whether the request is admitted; it is then prefilled in whole steps and starts to decode."""
    batches = case["batches_in_flight"]
    length = case["max_model_len"] - batches - number % _SPREAD_TOKENS
    params = import_module("vllm.sampling_params").SamplingParams()
    request = import_module("vllm.v1.request").Request(str(number), [0] * length, params, None)
    while request.num_computed_tokens < length:
        step = min(case["max_num_batched_tokens"], length - request.num_computed_tokens)
        first = request.num_computed_tokens == 0
        if manager.allocate_slots(request, step, full_sequence_must_fit=first) is None:
            return False
        request.num_computed_tokens += step
    for _ in range(batches):
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        request.num_in_flight_tokens = min(request.num_in_flight_tokens + 1, batches - 1)
    return True


def _tokens(group: Foreign) -> int:
    """Tokens of a group's block; 0 for a state, whose block size means something else."""
    spec = group.kv_cache_spec
    return 0 if type(spec).__name__ == "MambaSpec" else int(spec.block_size)


def _held(group: Foreign, config: Foreign) -> int:
    spec = group.kv_cache_spec
    return -int(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)


def _config(case: Mapping[str, Any]) -> Foreign:
    """As much of a vLLM configuration as its cache code reads."""
    layouts = import_module("vllm.v1.kv_cache_layout").KVCacheLayout
    torch = import_module("torch")
    length = case["max_model_len"]
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=length,
            original_max_model_len=length,
            architecture="",
            dtype=torch.bfloat16,
            hf_config=SimpleNamespace(model_type=""),
        ),
        cache_config=SimpleNamespace(
            block_size=case["block_tokens"],
            cache_dtype=case["kv_cache_dtype"],
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            mamba_cache_mode=case["mamba_cache_mode"],
            mamba_block_size=length,
            mamba_page_size_padded=None,
            kv_cache_dtype_skip_layers=[],
            get_resolved_kv_cache_layout=lambda: layouts[case["layout"]],
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=not case["hybrid_pool"],
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=case["tensor_parallel"],
            decode_context_parallel_size=case["decode_context_parallel"],
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        max_in_flight_tokens=case["max_num_batched_tokens"] * case["batches_in_flight"],
        num_prefill_lookahead_tokens=0,
    )


def _align(config: Foreign, census: Sequence[LayerFacts], case: Mapping[str, Any]) -> None:
    """Let vLLM choose the block size of a model with recurrent layers."""
    recurrent = [layer for layer in census if layer["kind"] == "recurrent"]
    attention = [layer for layer in census if layer["kind"] in ("full", "latent")]
    if not recurrent or not attention:
        return
    shapes, dtypes = state_of(recurrent[0], case["tensor_parallel"])
    first, kernels = attention[0], backend(case)
    latent = first["kind"] == "latent"
    width = first["latent_dim"] + first["rope_dim"] if latent else first["key_dim"]
    config.model_config.use_mla = latent
    heads = 1 if latent else max(1, first["kv_heads"] // case["tensor_parallel"])
    config.model_config.get_head_size = mock.Mock(return_value=width)
    config.model_config.get_num_kv_heads = mock.Mock(return_value=heads)
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=mock.Mock(return_value=shapes),
        get_mamba_state_dtype_from_config=mock.Mock(return_value=dtypes),
    )
    platform = import_module("vllm.platforms.interface").Platform
    registry = import_module("vllm.model_executor.models").ModelRegistry
    current = import_module("vllm.config.vllm")
    with (
        mock.patch.object(type(registry), "resolve_model_cls", return_value=(model, "")),
        mock.patch.object(platform, "_find_non_ssm_backends", return_value=[kernels]),
        mock.patch.object(current, "set_current_vllm_config", mock.MagicMock()),
    ):
        platform._align_hybrid_block_size(config, kernels)


def _spare_ends(config: Foreign, census: Sequence[LayerFacts], case: Mapping[str, Any]) -> None:
    """Let vLLM choose the layers that stay in 16 bit, and the block size beside them."""
    if not case["kv_cache_dtype"].startswith("turboquant"):
        return
    turbo = import_module("vllm.model_executor.layers.quantization.turboquant.config")
    model, first = config.model_config, census[0]
    model.is_hybrid = False
    model.hf_text_config = SimpleNamespace(num_hidden_layers=first["count"])
    model.get_head_size = mock.Mock(return_value=first["key_dim"])
    heads = max(1, first["kv_heads"] // case["tensor_parallel"])
    model.get_num_kv_heads = mock.Mock(return_value=heads)
    config.cache_config.kv_cache_dtype_skip_layers = (
        turbo.TurboQuantConfig.get_boundary_skip_layers(model)
    )
    platform = import_module("vllm.platforms.interface").Platform
    current = import_module("vllm.config.vllm")
    with mock.patch.object(current, "set_current_vllm_config", mock.MagicMock()):
        platform._align_heterogeneous_kv_block_size(config, packing(case))


def _stages(specs: Mapping[str, Any], stages: int) -> list[dict[str, Any]]:
    """The layers of each pipeline stage, split as vLLM splits them."""
    pp_indices = import_module("vllm.distributed.utils").get_pp_indices
    layers = list(dict.fromkeys(name.rsplit(".", 1)[0] for name in specs))
    stage_specs: list[dict[str, Any]] = []
    for rank in range(stages):
        first, last = pp_indices(len(layers), rank, stages)
        mine = set(layers[first:last])
        stage_specs.append({n: spec for n, spec in specs.items() if n.rsplit(".", 1)[0] in mine})
    return stage_specs


def _lines(document: Mapping[str, Any]) -> str:
    """The record as JSON, a census or a case a line, so that a change can be read."""
    parts = [
        f'"vllm": {json.dumps(document["vllm"])}',
        f'"defaults": {json.dumps(document["defaults"])}',
    ]
    census = [
        f"{json.dumps(name)}: {json.dumps(facts)}" for name, facts in document["censuses"].items()
    ]
    parts.append('"censuses": {\n' + ",\n".join(census) + "\n}")
    cases = [json.dumps(case) for case in document["cases"]]
    parts.append('"cases": [\n' + ",\n".join(cases) + "\n]")
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(_lines(record()))
