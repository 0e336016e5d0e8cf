"""GPU memory beside weights and KV cache: activations, the encoder's profile, CUDA graphs, and what
the process holds outside PyTorch. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.collector.packaged import packaged_tables
from kneewatch.diagnose.catalogue.families import Tower
from kneewatch.diagnose.catalogue.gpu_specs import GIB, Gpu
from kneewatch.diagnose.catalogue.layers import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    Recurrent,
    SlidingAttention,
    SlidingStates,
)
from kneewatch.diagnose.catalogue.models import Model
from kneewatch.diagnose.catalogue.quantization import scheme
from kneewatch.diagnose.deployment.vllm_flags import Version
from kneewatch.diagnose.sizing.memory.kv_formats import kv_format
from kneewatch.diagnose.sizing.memory.launch import GRAPHS_TAKEN, V1, Launch
from kneewatch.diagnose.sizing.memory.weights import weights_per_gpu

_AMPERE, _HOPPER, _BLACKWELL = 8, 9, 10
# FlashInfer's decode steps with drafted tokens are captured whole on Hopper and capability 12: not
# yet with 0.20 to 0.22 (three logged estimates) and a build of July 2026, with 0.26.1 they are.
_XQA_DRAFTS: Version = (0, 26, 0)
_LOGIT_BYTES = 4
_ELEMENT_BYTES = 2
_MIB = 2**20
# From 0.18 a kernel replaces the sampler's sort; logged residuals of H100 and H200 halve.
_KERNEL_SAMPLER: Version = (0, 18, 0)
# The second model runner's profile leaves out the rejection sampler (`_dummy_sampler_run` of
# vllm/v1/worker/gpu_model_runner.py and vllm/v1/worker/gpu/model_runner.py, 0.32).
_SECOND_RUNNER: Version = (0, 30, 0)
# Gemma 4's frames one by one before, in batches from here on.
_BATCHED_FRAMES: Version = (0, 22, 0)
# Experts no longer compute a step in chunks, and both their buffers are as wide as the hidden state
# (pull request 34086): Qwen3-235B on four H100 with 8,192 to 65,536 tokens a step.
_WHOLE_EXPERTS: Version = (0, 18, 0)
# FlashInfer's experts with GELU; read in 0.27, not in 0.22.
_FLASHINFER_GELU: Version = (0, 27, 0)
# V0 up to 0.7 charged every communicator to the first rank.
_V0_CHARGED: Version = (0, 8, 0)
_V0_WHOLE_PROMPT_TOKENS = 32_768
# A sparse-attention indexer keeps a workspace of five contexts of 16-bit latent rows
# (vllm/v1/attention/backends/mla/indexer.py and flashmla_sparse.py, 0.32).
_INDEX_WORKSPACE_BYTES_PER_TOKEN = 5 * 576 * 2
# All-reduce workspaces were logged with 0.18 to 0.20. Without them are GLM-5.2 on four GB200
# (0.21), DeepSeek V4 on two H200 (0.23) and three models on eight H100 (0.31): 0.5 to 3 GiB less.
_WITHOUT_WORKSPACES: Version = (0, 21, 0)
# DeepSeek V4's four residual streams in float32, in copies: 3 GiB for 4,096 tokens and 8 GiB for
# 16,384 on the two logged start-ups.
_STREAM_COPIES = 4 * 6.5
# Steps up to which start-ups on Windows are like those on Linux.
_WINDOWS_TOKENS = 2048

ACTIVATION_RATIO = 0.20
"""Activations divided by weight bytes, with FlashAttention (guide 2.3)."""
FRAMEWORK_LOW_RATIO, FRAMEWORK_HIGH_RATIO = 0.05, 0.10
"""Share of a GPU's memory that the serving framework uses (guide 2.4)."""


_TABLES: Final = packaged_tables("diagnose.sizing.memory", "overhead.toml")
_FIGURES: Mapping[str, float] = _TABLES["figures"]


class Overhead(Struct, frozen=True):
    """Overhead in bytes on one GPU: the expected parts, and lower and upper bounds of their sum."""

    activation_bytes: float
    framework_bytes: float
    graphs_bytes: float
    low_bytes: float
    high_bytes: float

    @property
    def expected_bytes(self) -> float:
        """The sum of the parts."""
        return self.activation_bytes + self.framework_bytes + self.graphs_bytes


def overhead_of(launch: Launch, weights_bytes: float, gpu: Gpu) -> Overhead:
    """GPU memory used beside weights and KV cache, by the launch's overhead model.

    If it was measured on the running server, the measured value, which is then also both bounds.
    """
    guide = launch.overhead == "guide"
    if launch.slack is not None:
        # Activations and graphs take the slack. What the process takes before it loads its weights
        # is taken from the share too.
        low, expected, high = (launch.utilization * GIB * each for each in launch.slack.process_gib)
        return Overhead(0.0, expected, 0.0, low, high)
    predicted = (
        guide_overhead(launch, weights_bytes, gpu) if guide else _fitted_overhead(launch, gpu)
    )
    excess_bytes = launch.overhead_excess_bytes
    if excess_bytes is None:
        return predicted
    shown_bytes = predicted.expected_bytes + excess_bytes
    return replace(
        predicted,
        framework_bytes=predicted.framework_bytes + excess_bytes,
        low_bytes=shown_bytes,
        high_bytes=shown_bytes,
    )


def guide_overhead(launch: Launch, weights_bytes: float, gpu: Gpu) -> Overhead:
    """Overhead to plan with: 20% of the weights as published, and 5 to 10% of the memory.

    Activations keep the checkpoint's own precision whatever the weights are quantized to.

    Source: guide 2.3, 2.4 and figure 2.1.
    """
    own = scheme(launch.model.quantization)
    own = own.in_float32 if launch.computed_dtype == "float32" else own
    published_ratio = 1.0
    if own.id != launch.scheme.id:
        published, taken = (
            sum(weights_per_gpu(launch.model, each, launch.parallel).values())
            for each in (own, launch.scheme)
        )
        published_ratio = published / taken
    activation = ACTIVATION_RATIO * weights_bytes * published_ratio
    high = activation + FRAMEWORK_HIGH_RATIO * gpu.memory_bytes
    return Overhead(
        activation_bytes=activation,
        framework_bytes=high - activation,
        graphs_bytes=0.0,
        low_bytes=activation + FRAMEWORK_LOW_RATIO * gpu.memory_bytes,
        high_bytes=high,
    )


def _fitted_overhead(launch: Launch, gpu: Gpu) -> Overhead:
    """The overhead, by vLLM's own terms and the figures of logged start-ups.

    The lower bound is at least half of the expected value. The upper bound includes the largest
    size that CUDA graphs may have.
    """
    figures = _FIGURES
    activation = _activation_bytes(launch, gpu)
    framework = _framework_bytes(gpu, launch.parallel.tensor, launch.version)
    graphs, graphs_high = _graphs_bytes(launch, gpu)
    if gpu.shares_host_memory:
        images_gib = figures["shared_host_images_gib"] if _encoder_bytes(launch, gpu)[0] else 0.0
        framework += (figures["shared_host_gib"] + images_gib) * GIB
    if gpu.shows_whole_memory and launch.batched_tokens > _WINDOWS_TOKENS:
        framework += figures["windows_gib"] * GIB
    if launch.decode_context_parallel > 1:
        framework += figures["context_parallel_gib"] * GIB
    expected = activation + framework + graphs
    band = _band(launch, gpu)
    return Overhead(
        activation_bytes=activation,
        framework_bytes=framework,
        graphs_bytes=graphs,
        low_bytes=expected - min(band["below_gib"] * GIB, expected / 2),
        high_bytes=activation + framework + graphs_high + band["above_gib"] * GIB,
    )


def _band(launch: Launch, gpu: Gpu) -> Mapping[str, float]:
    """The row of the GPU's class in the table of bands."""
    bands, name = _TABLES["bands"], gpu.architecture
    if gpu.shares_host_memory:
        name = "unified" if launch.parallel.gpus == 1 else "unified_nodes"
    elif name == "blackwell" and gpu.segment != "data-centre":
        name = "workstation_blackwell"
    row: Mapping[str, float] = bands.get(name, bands["unmeasured"])
    return row


def start_ups(launch: Launch, gpu: Gpu) -> tuple[int, int]:
    """How many recorded start-ups the band stands on: on GPUs of this class, and of such models."""
    families: Mapping[str, int] = _TABLES["family_start_ups"]
    return int(_band(launch, gpu)["start_ups"]), families[kind_of(launch.model)]


def kind_of(model: Model) -> str:
    """The kind of its layers that memory and speed depend on most."""
    kinds = [part.kind for part in model.layers]
    latent = [kind for kind in kinds if isinstance(kind, LatentAttention)]
    if any(isinstance(kind, SlidingStates) for kind in kinds):
        return "compressed"
    if any(isinstance(kind, Recurrent) for kind in kinds):
        return "recurrent"
    if latent:
        return "sparse_latent" if any(kind.index_dim for kind in latent) else "latent"
    return "mixture" if model.experts.count else "dense"


def _activation_bytes(launch: Launch, gpu: Gpu) -> float:
    """The peak of the profiling run: of the encoder, or of the decoder beside the encoder's output.

    Source: `profile_run` of vllm/v1/worker/gpu_model_runner.py (0.32).
    """
    model = launch.model
    encoder, kept = _encoder_bytes(launch, gpu)
    peak = max(encoder, kept + _decoder_bytes(launch, gpu))
    latent = [part.kind for part in model.layers if isinstance(part.kind, LatentAttention)]
    if latent and latent[0].index_dim:
        peak += _INDEX_WORKSPACE_BYTES_PER_TOKEN * launch.longest_tokens
    return peak


def _decoder_bytes(launch: Launch, gpu: Gpu) -> float:
    """The sampler's peak or the widest layer's activations, whichever is larger."""
    model, tokens, figures = launch.model, launch.batched_tokens, _FIGURES
    copies = figures["sampler_copies"]
    if launch.version >= _KERNEL_SAMPLER:
        copies = figures["kernel_sampler_copies"]
    elif launch.version >= V1 and gpu.architecture == "ampere":
        copies = figures["ampere_copies"]
    if launch.draft is not None and V1 <= launch.version < _SECOND_RUNNER:
        copies += figures["rejection_copies"]
    sampler = copies * launch.seqs * model.vocab_size * _LOGIT_BYTES
    latent = any(isinstance(part.kind, LatentAttention) for part in model.layers)
    # V0 profiled whole prompts at once, and chunked only contexts beyond 32,768 tokens; latent
    # attention could not be chunked at first.
    chunked = launch.longest_tokens > _V0_WHOLE_PROMPT_TOKENS
    if launch.version < V1 and (not chunked or (launch.version < _V0_CHARGED and latent)):
        tokens = max(tokens, launch.longest_tokens)
    # Gate, up and their product, and three rows of the hidden state, in 16 bit.
    inner_elements = 3 * model.intermediate_size / launch.parallel.tensor
    if launch.version >= V1:
        inner_elements = max(inner_elements, _expert_elements(launch, gpu))
    row_bytes = (inner_elements + 3 * model.hidden_size) * _ELEMENT_BYTES
    if any(isinstance(part.kind, SlidingStates) for part in model.layers):
        row_bytes += _STREAM_COPIES * _LOGIT_BYTES * model.hidden_size
    return max(sampler, tokens * row_bytes)


def _expert_elements(launch: Launch, gpu: Gpu) -> float:
    """Elements per token of the buffers between the two matrices of a layer's routed experts.

    CUTLASS kernels of NVFP4, which experts with GELU had before FlashInfer's, copy the rows in
    front of the first matrix, behind the second, and times the routing weights.

    Source: `workspace_shapes` and `run_cutlass_moe_fp4` of vllm/model_executor/layers/fused_moe
    (0.32).
    """
    model, parallel = launch.model, launch.parallel
    width = model.expert_width / (1 if parallel.experts else parallel.tensor)
    row_elements = max(2 * width, model.hidden_size)
    native = launch.scheme.compute == "fp4" and gpu.fp4_flop_per_s is not None
    if native and model.experts.gelu and launch.version < _FLASHINFER_GELU:
        row_elements += width + 3 * model.hidden_size
    elif launch.version < _WHOLE_EXPERTS:
        row_elements += width
    else:
        row_elements += max(width, model.hidden_size)
    return model.experts.per_token * row_elements


def _encoder_bytes(launch: Launch, gpu: Gpu) -> tuple[float, float]:
    """Peak bytes of encoding the largest items that fit into a step, and those of their output.

    vLLM encodes as many items of the modality with the most tokens as the encoder's budget holds,
    at least one, and keeps the output while it profiles the decoder.

    Source: vllm/multimodal/encoder_budget.py (0.32).
    """
    model, tower = launch.model, launch.model.tower
    if not model.multimodal or launch.version < V1:
        return 0.0, 0.0
    if tower is None:
        unknown = _FIGURES["unknown_tower_gib"] * GIB
        return 0.0, unknown
    limits = dict(launch.limit_mm_per_prompt)
    items = [
        (tokens, patches, limits.get(modality))
        for modality, patches, tokens in tower.modalities
        if limits.get(modality) != 0
    ]
    if not items:
        return 0.0, 0.0
    tokens, patches, limit = max(items)
    count = max(launch.batched_tokens // tokens, 1)
    if limit is not None:
        count = min(count, launch.seqs * limit)
    output = count * tokens * model.hidden_size * tower.levels * _ELEMENT_BYTES
    return _tower_bytes(tower, count * patches, launch, gpu) + output, output


def _tower_bytes(tower: Tower, patches: int, launch: Launch, gpu: Gpu) -> float:
    """Peak bytes of a vision tower that encodes these patches: of its attention or its MLP."""
    if tower.frame_patches:
        # Batches of frames whose estimate is within a tenth of the memory (`_encoder_chunk` of
        # vllm/model_executor/models/gemma4_mm.py, 0.32). It is for one-hot positions, which no
        # logged start-up has taken: E2B with 8 seats leaves all but 0.46 GiB beside its weights.
        frame_bytes = tower.frame_patches * tower.positions * 32
        frames = 1
        if launch.version >= _BATCHED_FRAMES:
            frames = int(gpu.memory_bytes / 10 / frame_bytes)
        patches = min(patches, max(frames, 1) * tower.frame_patches)
    inner = max(8 * tower.width, (3 if tower.gated else 2) * tower.inner)
    ranks = 1 if tower.whole else launch.parallel.tensor
    row_elements = 2 * tower.width + inner / ranks + tower.patch_elements
    return patches * row_elements * _ELEMENT_BYTES


def _framework_bytes(gpu: Gpu, tensor_parallel: int, version: Version) -> float:
    """Contexts, kernels and communicators: what vLLM logs as "non-torch"."""
    figures = _FIGURES
    large = gpu.nvlink_bytes_per_s is not None and gpu.architecture != "ampere"
    workstation = gpu.architecture == "blackwell" and gpu.segment != "data-centre"
    name = "large" if large else "workstation_blackwell" if workstation else "small"
    listed: Mapping[str, float] = _TABLES["non_torch_gib"][name]
    table = {int(size): gib for size, gib in listed.items()}
    taken = table[max(size for size in table if size <= tensor_parallel)]
    if version < _V0_CHARGED and tensor_parallel > 1:
        taken = figures["v0_gib_per_rank"] * tensor_parallel
    if gpu.vendor == "amd":
        taken = max(taken, figures["rocm_gib_per_rank"] * tensor_parallel)
    if _KERNEL_SAMPLER <= version < _WITHOUT_WORKSPACES and tensor_parallel > 1 and large:
        # No log shows more than eight ranks: a node's workspaces are its own.
        ranks = min(tensor_parallel, 8)
        taken = max(taken, table[1] + figures["workspace_gib_per_rank"] * ranks)
    return taken * GIB


def _graphs_bytes(launch: Launch, gpu: Gpu) -> tuple[float, float]:
    """Bytes that CUDA graphs take from the KV budget: expected, and at most."""
    if launch.version < GRAPHS_TAKEN or launch.enforce_eager:
        return 0.0, 0.0
    model, parallel, figures = launch.model, launch.parallel, _FIGURES
    mixture = bool(model.experts.count)
    # Models with sparse attention are captured kernel by kernel, whatever else vLLM compiles
    # (DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES of vllm/config/vllm.py, 0.32).
    sparse = any(isinstance(part.kind, CompressedAttention) for part in model.layers)
    compiled = not sparse and kind_of(model) != "sparse_latent"
    wide = mixture and compiled and parallel.experts and parallel.data > 1
    if wide and gpu.architecture == "blackwell":
        return figures["wide_graphs_gib"] * GIB, figures["most_wide_graphs_gib"] * GIB
    each = figures["graph_mib_per_layer"]
    each += figures["graph_mib_per_layer_experts"] * mixture
    # Over NVLink vLLM's own all-reduce is a kernel like others; NCCL's takes more.
    if parallel.tensor > gpu.nvlink_gpus or not compiled:
        each += figures["graph_mib_per_layer_nccl"]
    layers = model.depth / parallel.pipeline
    family = int(float(gpu.compute_capability or 0))
    flashinfer = _flashinfer(launch, family)
    # Source: `get_cudagraph_support` of vllm/v1/attention/backends/flashinfer.py (0.32).
    whole_drafts = family > _AMPERE and launch.version >= _XQA_DRAFTS
    whole_steps = not flashinfer or launch.draft is None or family == _BLACKWELL or whole_drafts
    graphs = _graphs(launch, whole_steps=whole_steps)
    expected = figures["first_graph_gib"] * GIB + graphs * layers * each * _MIB
    if flashinfer and whole_steps:
        expected += figures["flashinfer_workspace_mib"] * _MIB
    above_gib, ranks = figures["graphs_above_gib"], launch.decode_context_parallel
    if ranks > 1:
        above_gib += figures["context_parallel_graphs_gib_per_rank"] * ranks
    return expected, expected + above_gib * GIB


def _flashinfer(launch: Launch, family: int) -> bool:
    """Whether vLLM's attention kernels are FlashInfer's: for heads of one size, on data-centre
    Blackwell or with a KV cache that FlashAttention does not read.

    Source: `_get_backend_priorities` of vllm/platforms/cuda.py (0.32).
    """
    kept = launch.kv_cache_dtype
    unread = family != _HOPPER or kept == "fp8_e5m2"
    if family != _BLACKWELL and not (unread and kv_format(kept).is_quantized):
        return False
    heads = {
        (part.kind.key_dim, part.kind.value_dim)
        for part in launch.model.layers
        if isinstance(part.kind, FullAttention | SlidingAttention)
    }
    return len(heads) == 1


def _graphs(launch: Launch, *, whole_steps: bool) -> int:
    """How many CUDA graphs vLLM captures: of mixed steps in pieces, and of whole decode steps.

    Mixed steps up to twice the tokens of a decode step with all seats taken, of 1, 2, 4, every 8 to
    256 and every 16 to 512 tokens. Whole decode steps up to that many tokens.

    Source: vllm/config/vllm.py, `_set_cudagraph_sizes` (0.32).
    """
    drafted = 0 if launch.draft is None else launch.draft.tokens
    seated = launch.seqs * (1 + drafted)
    stated, most = launch.cudagraph_capture_sizes, launch.max_cudagraph_capture_size
    most = min(most or min(2 * seated, 512), launch.batched_tokens)
    every = (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16))
    mixed = stated or [size for size in every if size <= most]
    whole = [size for size in mixed if size <= seated] if whole_steps else []
    return len(mixed) + len(whole)
