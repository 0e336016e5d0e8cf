"""What vLLM's own LoRA code reserves for adapters, recorded for the tests.

Run once for each vLLM whose buffers are to be held, with the lab's interpreter (`make lab` installs
it), from the repository's root; no weights and no GPU are needed:

    LAB/venv/bin/python -m tests.lab.adapter_buffers tests/fixtures/adapters/vllm-0.32.0.json

Every model is built on torch's meta device, with as many tensor-parallel ranks as a case says, and
wrapped by vLLM's LoRA manager; what is added up are the tensors that it makes.
`tests/diagnose/sizing/test_adapters.py` holds kneewatch to the sums.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

SLOTS, RANK = 3, 16
MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.3-70B-Instruct",
    "meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1", "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "google/gemma-2-9b-it", "microsoft/Phi-3-mini-4k-instruct", "openai/gpt-oss-20b",
    "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-R1", "zai-org/GLM-4.5-Air",
    "zai-org/GLM-4-9B-0414", "ibm-granite/granite-3.1-8b-instruct",
    "ibm-granite/granite-4.0-h-tiny", "CohereForAI/c4ai-command-r-v01",
    "nvidia/Nemotron-Mini-4B-Instruct", "Qwen/Qwen1.5-MoE-A2.7B",
    "allenai/OLMoE-1B-7B-0924-Instruct", "zai-org/GLM-4.7-Flash",
)  # fmt: skip
TENSOR_PARALLELS = (1, 2, 4, 8)
CATALOGUE = Path("diagnose/catalogue/models.json")
CLASSES = {
    "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}  # fmt: skip
STACKS = ("lora_a_stacked", "lora_b_stacked")
EXPERT_STACKS = tuple(f"{part}_{stack}" for part in ("w13", "w2") for stack in STACKS)

Foreign = Any


def record() -> dict[str, Any]:
    """The version of the vLLM that ran, and the bytes of every model and case."""
    _simplify_experts()
    entries = json.loads(CATALOGUE.read_text())
    cases = [_case(entries, name, tensor) for name in MODELS for tensor in TENSOR_PARALLELS]
    return {
        "vllm": import_module("vllm").__version__,
        "max_loras": SLOTS,
        "max_lora_rank": RANK,
        "cases": [case for case in cases if case],
    }


def _simplify_experts() -> None:
    """Experts' wrappers without the kernels, which there are none of without a GPU."""
    torch = import_module("torch")
    module = import_module("vllm.lora.layers.fused_moe")

    def wrap(self: Foreign, base: Foreign, *, slices: int | None = None) -> None:
        torch.nn.Module.__init__(self)
        self.base_layer, self.moe_config = base, base.moe_config
        self._shared_experts = base._shared_experts
        self.tp_size, self.tp_rank = base.moe_config.moe_parallel_config.tp_size, 0
        self.device, self.enable_moe_shared_loras = torch.device("meta"), False
        self._w13_slices = slices or (2 if base.moe_config.is_act_and_mul else 1)
        self.n_slices = self.local_num_experts * (self._w13_slices + 1)

    def wrap_fused(self: Foreign, base: Foreign) -> None:
        wrap(self, base, slices=1)

    module.FusedMoEWithLoRA.__init__ = wrap
    module.FusedMoE3DWithLoRA.__init__ = wrap_fused
    module.FusedMoEWithLoRA.set_mapping = mock.Mock()


def _case(entries: Any, name: str, tensor: int) -> dict[str, Any]:  # noqa: ANN401
    """One line of figures; empty where vLLM does not split the model so."""
    described = entries[name]
    if "base" in described:
        described = {**entries[described["base"]], **described}
    config = {k: v for k, v in described["config"].items() if k != "layer_types_count"}
    if "kv_lora_rank" in config:
        # Left out it would be the default of another model.
        config.setdefault("q_lora_rank", None)
    listed = described.get("architecture") or CLASSES[config["model_type"]]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**config, "architectures": [listed]}))
        try:
            buffers = _built(folder, tensor)
        except (ArithmeticError, AssertionError, ValueError) as refused:
            print(name, tensor, type(refused).__name__, str(refused)[:80], file=sys.stderr)
            return {}
    return {"model": name, "tensor_parallel": tensor, **buffers}


def _built(folder: str, tensor: int) -> dict[str, int]:
    torch, config = import_module("torch"), import_module("vllm.config")
    arguments = import_module("vllm.engine.arg_utils").EngineArgs(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, load_format="dummy",
        dtype="bfloat16", max_model_len=1024, enable_lora=True, max_loras=SLOTS, max_lora_rank=RANK,
    )  # fmt: skip
    engine_config = arguments.create_engine_config()
    engine_config.parallel_config.tensor_parallel_size = tensor
    _pretend_ranks(tensor)
    with config.set_current_vllm_config(engine_config), torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        loader = import_module("vllm.model_executor.model_loader.utils")
        model = loader.initialize_model(vllm_config=engine_config)
        weights = sum(each.numel() * each.element_size() for each in model.parameters())
        manager = import_module("vllm.lora.model_manager").LoRAModelManager(
            model,
            8,
            1024,
            model.config.vocab_size,
            engine_config.lora_config,
            torch.device("meta"),
            engine_config,
        )
    taken = sum(
        each.numel() * each.element_size()
        for module in manager.modules.values()
        for each in _tensors(module, torch.Tensor)
    )
    return {"weights_bytes": weights, "adapter_bytes": taken}


def _tensors(module: Foreign, kind: type) -> Iterator[Foreign]:
    for stack in EXPERT_STACKS if hasattr(module, EXPERT_STACKS[0]) else STACKS:
        held = getattr(module, stack)
        yield from (held,) if isinstance(held, kind) else held


def _pretend_ranks(tensor: int) -> None:
    """Rank 0 of so many, without a process of any other."""
    state = import_module("vllm.distributed.parallel_state")
    for name, size in (
        ("_TP", tensor), ("_EP", tensor), ("_WORLD", tensor), ("_PP", 1), ("_DP", 1), ("_DCP", 1),
        ("_PCP", 1),
    ):  # fmt: skip
        ranks = SimpleNamespace(size=lambda size=size: size, rank=lambda: 0)
        setattr(
            state,
            name,
            SimpleNamespace(
                world_size=size, rank_in_group=0, rank=0, local_rank=0, ranks=list(range(size)),
                is_first_rank=True, is_last_rank=True, first_rank=0, last_rank=size - 1,
                device_group=ranks, cpu_group=ranks, device_communicator=None, unique_name=name,
            ),
        )  # fmt: skip


def _lines(document: dict[str, Any]) -> str:
    """The record as JSON, a case a line, so that a change can be read."""
    head = {key: value for key, value in document.items() if key != "cases"}
    cases = ",\n".join(json.dumps(case) for case in document["cases"])
    return f'{json.dumps(head)[:-1]}, "cases": [\n{cases}\n]}}\n'


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    Path(sys.argv[1]).write_text(_lines(record()))
