"""The arithmetic of what is loaded beside a model: LoRA adapters and a draft. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kneewatch.diagnose.catalogue.gpus import GIB
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.memory.budget import Memory
from kneewatch.diagnose.sizing.memory.kv_pages import token_bytes
from kneewatch.diagnose.sizing.steps import Step, figure

_MEBI = 1 << 20


def gib(amount_bytes: float) -> str:
    """Bytes as GiB with two digits."""
    return f"{amount_bytes / GIB:,.2f} GiB"


def beside_steps(answer: Memory) -> Iterator[Step]:
    """The buffers of the adapters, the draft's weights, and all that is loaded together."""
    setup = answer.setup
    if setup.adapters is not None:
        slots, rank = setup.adapters.slots, setup.adapters.rank
        each = answer.adapter_bytes / slots
        yield Step(
            "LoRA adapters on each GPU",
            "slots x bytes of the matrices that may be adapted, at the largest rank",
            f"{slots} x {figure(each / _MEBI)} MiB of rank {rank} in 16 bit",
            gib(answer.adapter_bytes),
            "guide 2.5; vllm/lora/layers (0.32)",
        )
    if setup.draft is not None:
        draft = setup.draft.model
        parameters = draft.parameters.total if draft.parameters is not None else 0.0
        yield Step(
            f"Draft on each GPU ({scheme(draft.quantization).id})",
            f"{draft.id}, split over the ranks like its target",
            f"{figure(parameters / 1e9)} billion parameters / {setup.parallel.tensor}",
            gib(answer.draft_bytes),
            "guide 6.6; vllm/config/speculative.py (0.32)",
        )
    if setup.adapters is not None or setup.draft is not None:
        own = (answer.weights_bytes or 0.0) - answer.adapter_bytes - answer.draft_bytes
        parts = [own]
        parts += [answer.adapter_bytes] if setup.adapters is not None else []
        parts += [answer.draft_bytes] if setup.draft is not None else []
        yield Step(
            "Loaded on each GPU",
            "weights + adapters + draft",
            " + ".join(gib(part) for part in parts),
            gib(answer.weights_bytes or 0.0),
            'vLLM\'s line "Model loading took"',
        )


def draft_token_steps(answer: Memory) -> Iterator[Step]:
    """What a token takes in the draft's layers, which share the target's blocks."""
    draft, settings = answer.setup.draft, answer.layout.settings
    for part in draft.model.layers if draft is not None else ():
        each = token_bytes(part.kind, settings)
        yield Step(
            "KV of a token in the draft",
            "layers x bytes of a layer",
            f"{part.count} x {figure(each)}",
            f"{figure(part.count * each)} B on each GPU",
            "guide 6.6; vllm/v1/core/kv_cache_utils.py",
        )


def draft_token_bytes(answer: Memory) -> float:
    """Bytes that one more token takes in the draft's layers, on one GPU; 0 without a draft."""
    draft, settings = answer.setup.draft, answer.layout.settings
    if draft is None:
        return 0.0
    return sum(part.count * token_bytes(part.kind, settings) for part in draft.model.layers)
