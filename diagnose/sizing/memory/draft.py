"""A draft for speculative decoding on the GPUs of its target: weights and KV cache. Pure.

vLLM splits the draft over the same tensor-parallel ranks, keeps all of it on the last pipeline
stage, and puts its layers into the target's KV pool.
Source: vllm/config/speculative.py, vllm/v1/worker/gpu_model_runner.py (0.32); guide 6.6.
"""

from __future__ import annotations

from dataclasses import dataclass

from kneewatch.diagnose.catalogue.layers import Layers
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.sizing.inputs import SizingError, positive, within
from kneewatch.diagnose.sizing.memory.weights import Parallel, weights_per_gpu

MOST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model, or a target's own prediction layers, and how many tokens it drafts."""

    model: Model
    tokens: int


def check_draft(draft: Draft, target: Model, parallel: Parallel) -> None:
    """Refuse what vLLM would refuse.

    Raises:
        SizingError: with the input's name.
    """
    positive("num_speculative_tokens", draft.tokens)
    within("num_speculative_tokens", draft.tokens, low=1, high=MOST_TOKENS)
    model = draft.model
    if model.parameters is None:
        raise SizingError(f"{model.id}: its parameters cannot be counted", name="draft_model")
    wanted = model.target_hidden_size
    if wanted and wanted != target.hidden_size:
        raise SizingError(
            f"{model.id} drafts for models of hidden size {wanted:,}, {target.id} has "
            f"{target.hidden_size:,}",
            name="draft_model",
        )
    if model.attention_heads and model.attention_heads % parallel.tensor:
        raise SizingError(
            f"tensor parallel {parallel.tensor} does not divide the {model.attention_heads} "
            f"attention heads of the draft {model.id}, which vLLM splits like its target",
            name="draft_model",
        )


def draft_bytes(draft: Draft, parallel: Parallel) -> float:
    """Bytes of the draft's weights on the fullest GPU, in the form of its checkpoint."""
    spread = Parallel(parallel.tensor, 1, parallel.data, parallel.experts)
    return weights_per_gpu(draft.model, scheme(draft.model.quantization), spread).total_bytes


def draft_layers(draft: Draft, parallel: Parallel) -> tuple[Layers, ...]:
    """What its layers keep, counted so that the last of the stages has all of them."""
    stages = parallel.pipeline
    return tuple(Layers(part.kind, part.count * stages) for part in draft.model.layers)
