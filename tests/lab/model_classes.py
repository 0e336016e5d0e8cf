"""Parameters and KV caches of vLLM's own model classes, recorded for the tests.

Run once for each vLLM whose classes are to be held, with the lab's interpreter (`make lab` installs
it), from the repository's root; no weights and no GPU are needed:

    LAB/venv/bin/python -m tests.lab.model_classes tests/fixtures/models/vllm-0.32.0.json

Each configuration of the file is built on torch's meta device, and its `parameters` and `caches`
are rewritten: elements of the language model, and layers by what their cache keeps.
Configurations that say "small" are made up, with fields of the family; the others are of published
models.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
# vLLM is not installed where the types are checked.
Foreign = Any
# Only their names are needed to import the classes.
_ABSENT = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
_TOWERS = ("vision_tower", "visual", "vision_model", "audio", "multi_modal_projector")


def built(document: Mapping[str, Any]) -> tuple[Foreign, Foreign]:
    """vLLM's configuration of a model and its class without weights, on one GPU in 16 bit."""
    config = import_module("vllm.config")
    torch = import_module("torch")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(document), encoding="utf-8")
        described = config.ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
        )
    launch = config.VllmConfig(
        model_config=described,
        cache_config=config.CacheConfig(enable_prefix_caching=False),
        device_config=config.DeviceConfig(device="cpu"),
        load_config=config.LoadConfig(load_format="dummy"),
    )
    loader = import_module("vllm.model_executor.model_loader.utils")
    with config.set_current_vllm_config(launch):
        _start(torch)
        # LongCat's tables of n-grams are refused where Triton is absent; none of it runs here.
        newer = mock.patch.object(type(launch), "use_v2_model_runner", True)
        with torch.device("meta"), newer:
            return launch, loader.initialize_model(launch)


def _start(torch: Foreign) -> None:
    """The process group of one rank that vLLM's layers ask for."""
    if torch.distributed.is_initialized():
        return
    distributed = import_module("vllm.distributed")
    store = Path(tempfile.mkdtemp(), "ranks")
    distributed.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    distributed.initialize_model_parallel(1, 1)


def caches(launch: Foreign) -> list[dict[str, Any]]:
    """What the layers keep, alike ones together: bytes of a token, or elements and bytes of each
    part of a state."""
    kept: Counter[str] = Counter()
    for layer in launch.compilation_config.static_forward_context.values():
        spec = layer.get_kv_cache_spec(launch) if hasattr(layer, "get_kv_cache_spec") else None
        if spec is not None:
            kept[json.dumps(_facts(spec))] += 1
    return [{"layers": layers, **json.loads(facts)} for facts, layers in sorted(kept.items())]


def _facts(spec: Foreign) -> dict[str, Any]:
    kind = type(spec).__name__.removesuffix("Spec")
    if kind == "Mamba":
        parts = zip(spec.shapes, spec.dtypes, strict=True)
        return {"kind": kind, "states": [[prod(shape), dtype.itemsize] for shape, dtype in parts]}
    token_bytes = spec.page_size_bytes * spec.tokens_per_state // spec.block_size
    window = getattr(spec, "sliding_window", None)
    return {"kind": kind, "token_bytes": token_bytes, **({"window": window} if window else {})}


def _register(family: str) -> None:
    """Let transformers read a family that it does not have, as a plain configuration."""
    auto = import_module("transformers.models.auto.configuration_auto")
    own = import_module("vllm.transformers_utils.config")
    if family in own._CONFIG_REGISTRY or family in auto.CONFIG_MAPPING:
        return
    transformers = import_module("transformers")
    if family in own_text_parts():
        transformers.AutoConfig.register(family, own_text_parts()[family])
        return
    like = transformers.LongcatFlashConfig if "longcat" in family else transformers.PretrainedConfig
    plain = {"model_type": family, "hidden_act": "silu"}
    transformers.AutoConfig.register(family, type(f"{family}_config", (like,), plain))


def own_text_parts() -> Mapping[str, type]:
    """Configuration classes of vLLM that are read as part of a larger file only."""
    minimax = import_module("vllm.transformers_utils.configs.minimax_m3")
    return {"minimax_m3_text": minimax.MiniMaxM3TextConfig}


def _run_here(inspection: Callable[[], Foreign]) -> Foreign:
    return inspection()


def record(path: Path) -> None:
    """Rewrite the file's figures."""
    import_module("transformers")
    for absent in _ABSENT:
        sys.modules.setdefault(absent, mock.MagicMock(__spec__=None))
    triton: Foreign = import_module("vllm.triton_utils").triton
    triton.set_allocator = mock.Mock()
    registry: Foreign = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = _run_here
    # A CPU with bf16 instructions keeps recurrent states in float32; a GPU keeps the model's type.
    import_module("torch").cpu._is_avx512_bf16_supported = mock.Mock(return_value=False)
    # Which kernels would run does not matter where none does.
    kernels: Foreign = import_module("vllm.model_executor.layers.fused_moe.oracle.unquantized")
    for kernel in kernels.backend_to_kernel_cls(kernels.UnquantizedMoeBackend.CPU):
        kernel.is_supported_config = mock.Mock(return_value=(True, None))
    recorded = json.loads(path.read_text("utf-8"))
    recorded["vllm"] = import_module("vllm").__version__
    for name, entry in recorded["models"].items():
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        _register(entry["config"]["model_type"])
        launch, network = built(entry["config"])
        entry["parameters"] = sum(
            parameter.numel()
            for key, parameter in network.named_parameters()
            if not key.startswith(_TOWERS)
        )
        entry["caches"] = caches(launch)
        print(name, entry["parameters"], entry["caches"], flush=True)
    models = recorded["models"].items()
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in models]
    path.write_text(
        f'{{"vllm": {json.dumps(recorded["vllm"])},\n"models": {{\n' + ",\n".join(lines) + "\n}}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    record(Path(sys.argv[1]))
