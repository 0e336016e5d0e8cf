"""GPU memory beside weights and KV cache: activations, contexts, graphs. Pure.

There are two models. `guide` is for planning (guide chapters 2, 4 and 7: 20% of the weights and 5
to 10% of the memory). `fitted` is for prediction; its constants are fitted to some sixty logged
start-ups of vLLM 0.6 to 0.31 (tests/fixtures/kvtruth), and its band is their scatter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, Gpu
from kneewatch.diagnose.catalogue.layers import LatentAttention
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.sizing.memory.launch_setup import GRAPHS_TAKEN, V1, Version
from kneewatch.diagnose.sizing.memory.weights import Parallel

_LOGIT_BYTES = 4
# The sampler's peak, in copies of the logits of a full batch in float32: sort, softmax, masks.
_SAMPLER_COPIES = 9.75
# From 0.18 a kernel replaces the sort; logged residuals of H100 and H200 halve.
_KERNEL_SAMPLER: Version = (0, 18, 0)
_KERNEL_SAMPLER_COPIES = 4.3
# A100 with 0.9 to 0.17 and 2,048 batched tokens: 0.5 to 0.8 GiB in all on the logged rows.
_AMPERE_COPIES = 2.6
# Contexts and communicators by tensor-parallel size, as logged ("non-torch").
_NON_TORCH_GIB = {1: 0.13, 2: 0.55, 4: 0.65, 8: 1.0}
# The same on A100 and on cards without NVLink.
_SMALL_NON_TORCH_GIB = {1: 0.13, 2: 0.27, 4: 0.28, 8: 0.5}
# From 0.18, all-reduce workspaces on NVLink: Llama-70B TP4 4.2 GiB, R1 TP8 6 GiB in all.
_WORKSPACE_GIB_PER_RANK = 0.5
# ROCm logs 8 to 11 GiB at TP8.
_ROCM_GIB_PER_RANK = 0.6
# Encoder profiling of vision models: 0.1 to 0.9 GiB in V1.
_ENCODER_GIB = 0.3
# CUDA graphs, estimated and taken from the KV budget since 0.20: dense 0.3 to 1.5 GiB logged, a
# mixture over expert-parallel ranks 5, over data-parallel ones too 33 (GB300) and some 60 (B200).
# None of the logs with more than 2 GiB is from before Blackwell.
_GRAPHS_GIB = (1.0, 2.0)
_EXPERT_GRAPHS_GIB = (5.0, 33.0)
_DATA_EXPERT_GRAPHS_GIB = (33.0, 60.0)
_BAND_GIB = 1.5
# A sparse-attention indexer keeps a workspace of five contexts of 16-bit latent rows
# (vllm/v1/attention/backends/mla/indexer.py and flashmla_sparse.py, 0.32).
_INDEX_WORKSPACE_BYTES_PER_TOKEN = 5 * 576 * 2
# V0 up to 0.7 charged every communicator to the first rank: 3.6 GiB at TP 2, 7.2 at TP 8.
_V0_CHARGED: Version = (0, 8, 0)
_V0_GIB_PER_RANK = 0.9
_V0_WHOLE_PROMPT_TOKENS = 32_768


ACTIVATION_RATIO = 0.20
"""Activations over weight bytes, with FlashAttention (guide 2.3)."""
FRAMEWORK_LOW_RATIO, FRAMEWORK_HIGH_RATIO = 0.05, 0.10
"""Share of a GPU's memory that the serving framework takes (guide 2.4)."""
HEADROOM_LOW_RATIO, HEADROOM_HIGH_RATIO = 0.30, 0.50
"""Share to add to the calculated need before deploying (guide 2.6)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The settings of a launch that decide the overhead."""

    version: Version
    max_num_seqs: int
    max_num_batched_tokens: int
    max_context_tokens: int
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes on one GPU: the expected parts, and a lower and upper bound of their sum."""

    activation_bytes: float
    framework_bytes: float
    graphs_bytes: float
    low_bytes: float
    high_bytes: float

    @property
    def expected_bytes(self) -> float:
        """The sum of the parts."""
        return self.activation_bytes + self.framework_bytes + self.graphs_bytes


def guide_overhead(*, weights_bytes: float, memory_bytes: float) -> Overhead:
    """The guide's planning figures: 20% of the weights, and 5 to 10% of the memory.

    Source: guide 2.3 and 2.4.
    """
    activation = ACTIVATION_RATIO * weights_bytes
    return Overhead(
        activation_bytes=activation,
        framework_bytes=0.075 * memory_bytes,
        graphs_bytes=0.0,
        low_bytes=activation + FRAMEWORK_LOW_RATIO * memory_bytes,
        high_bytes=activation + FRAMEWORK_HIGH_RATIO * memory_bytes,
    )


def corrected_overhead(predicted: Overhead, excess_bytes: float) -> Overhead:
    """The overhead that a running server showed: `excess_bytes` more than predicted, without a
    band."""
    expected_bytes = predicted.expected_bytes + excess_bytes
    return replace(
        predicted,
        framework_bytes=predicted.framework_bytes + excess_bytes,
        low_bytes=expected_bytes,
        high_bytes=expected_bytes,
    )


def fitted_overhead(
    *, model: Model, gpu: Gpu | None, parallel: Parallel, launch: Launch
) -> Overhead:
    """The overhead by logged start-ups of that version on such a GPU; without a GPU, an H100.

    The lower bound is 1.5 GiB below the expected value, but at least half of it. The upper bound is
    1.5 GiB above it, with the most that CUDA graphs may take.
    """
    activation = _activation_bytes(model, gpu, parallel, launch)
    framework = _framework_bytes(gpu, parallel.tensor, launch.version)
    if model.multimodal and launch.version >= V1:
        activation += _ENCODER_GIB * GIB
    graphs, graphs_high = _graphs_bytes(model, gpu, parallel, launch)
    expected = activation + framework + graphs
    return Overhead(
        activation_bytes=activation,
        framework_bytes=framework,
        graphs_bytes=graphs,
        low_bytes=expected - min(_BAND_GIB * GIB, expected / 2),
        high_bytes=activation + framework + graphs_high + _BAND_GIB * GIB,
    )


def _ampere(gpu: Gpu | None) -> bool:
    return gpu is not None and gpu.architecture == "ampere"


def _activation_bytes(model: Model, gpu: Gpu | None, parallel: Parallel, launch: Launch) -> float:
    """The larger of the sampler's peak and the widest layer's activations."""
    copies = _SAMPLER_COPIES
    if launch.version >= _KERNEL_SAMPLER:
        copies = _KERNEL_SAMPLER_COPIES
    elif launch.version >= V1 and _ampere(gpu):
        copies = _AMPERE_COPIES
    sampler = copies * launch.max_num_seqs * model.vocab_size * _LOGIT_BYTES
    tokens = launch.max_num_batched_tokens
    if launch.version < V1:
        tokens = max(tokens, _whole_prompt_tokens(model, launch))
    # Gate, up and their product, and three rows of the hidden state, in 16 bit.
    row_elements = 3 * model.intermediate_size / parallel.tensor + 3 * model.hidden_size
    latent = _latent(model)
    workspace = 0
    if latent is not None and latent.index_dim:
        workspace = _INDEX_WORKSPACE_BYTES_PER_TOKEN * launch.max_context_tokens
    return max(sampler, tokens * row_elements * 2) + workspace


def _whole_prompt_tokens(model: Model, launch: Launch) -> int:
    # V0 profiled whole prompts at once, and chunked only contexts beyond 32,768 tokens; latent
    # attention could not be chunked at first.
    chunked = launch.max_context_tokens > _V0_WHOLE_PROMPT_TOKENS
    if chunked and not (launch.version < _V0_CHARGED and _latent(model)):
        return 0
    return launch.max_context_tokens


def _latent(model: Model) -> LatentAttention | None:
    kinds = [part.kind for part in model.layers if isinstance(part.kind, LatentAttention)]
    return kinds[0] if kinds else None


def _framework_bytes(gpu: Gpu | None, tensor_parallel: int, version: Version) -> float:
    large = gpu is None or (gpu.nvlink_bytes_per_s is not None and not _ampere(gpu))
    table = _NON_TORCH_GIB if large else _SMALL_NON_TORCH_GIB
    taken = table[max(size for size in table if size <= tensor_parallel)]
    if version < _V0_CHARGED and tensor_parallel > 1:
        taken = _V0_GIB_PER_RANK * tensor_parallel
    if gpu is not None and gpu.vendor == "amd":
        taken = max(taken, _ROCM_GIB_PER_RANK * tensor_parallel)
    if version >= _KERNEL_SAMPLER and tensor_parallel > 1 and large:
        # No log shows more than eight ranks: a node's workspaces are its own.
        ranks = min(tensor_parallel, 8)
        taken = max(taken, _NON_TORCH_GIB[1] + _WORKSPACE_GIB_PER_RANK * ranks)
    return taken * GIB


def _graphs_bytes(
    model: Model, gpu: Gpu | None, parallel: Parallel, launch: Launch
) -> tuple[float, float]:
    """Bytes of CUDA graphs taken from the KV budget: expected, and at most."""
    if launch.version < GRAPHS_TAKEN or launch.enforce_eager:
        return 0.0, 0.0
    expected, most = _GRAPHS_GIB
    blackwell = gpu is not None and gpu.architecture == "blackwell"
    if model.experts.count and parallel.experts and blackwell:
        expected, most = _DATA_EXPERT_GRAPHS_GIB if parallel.data > 1 else _EXPERT_GRAPHS_GIB
    return expected * GIB, most * GIB
