"""Every number of the errata's third column, recomputed."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import ceil
from pathlib import Path
from statistics import NormalDist, median

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.gpu_specs import GIB, LINK_BYTES_PER_S, gpu
from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.sizing.arithmetic import Sheet
from kneewatch.diagnose.sizing.memory.budget import Memory, fewest_gpus, memory
from kneewatch.diagnose.sizing.memory.kv_cache import KvSettings, kv_layout
from kneewatch.diagnose.sizing.memory.kv_formats import kv_format
from kneewatch.diagnose.sizing.memory.launch import Launch
from kneewatch.diagnose.sizing.memory.memory_arithmetic import planned_memory
from kneewatch.diagnose.sizing.memory.weights import (
    Adapters,
    Parallel,
    adapter_bytes,
    parameters_of,
)
from kneewatch.diagnose.sizing.plan.split_choice import (
    break_even_acceptance_ratio,
    speculative_speedup,
)
from kneewatch.diagnose.sizing.replica_count import START_HIGH_S, STORAGE_PATHS, size_fleet
from kneewatch.diagnose.sizing.serving_cost import usd_per_million_tokens
from kneewatch.diagnose.sizing.speed.performance import Load, Performance, performance
from kneewatch.diagnose.sizing.speed.roofline_inputs import DEFAULT, costs
from kneewatch.diagnose.speculation import tokens_per_pass
from kneewatch.rules.library import RULES_BY_ID
from kneewatch.rules.rule import Severity
from tests.diagnose.sizing.guide_formulas import lora_adapter_bytes
from tests.kvtruth import weights_misses

MB, GB, MIB = 1e6, 1e9, 2.0**20
LLAMA = model("meta-llama/Llama-3.3-70B-Instruct")
LLAMA_405B = model("meta-llama/Llama-3.1-405B-Instruct")
KV = kv_layout(LLAMA.layers, KvSettings()).token_bytes
R1 = model("deepseek-ai/DeepSeek-R1")
R1_KV = kv_layout(R1.layers, KvSettings(kv_format=kv_format("fp8"))).token_bytes
NDR = LINK_BYTES_PER_S["infiniband-ndr"]
RIDGE = gpu("h100-sxm").bf16_flop_per_s / gpu("h100-sxm").memory_bandwidth_bytes_per_s
KIMI = Launch(
    model=model("moonshotai/Kimi-K2.6"),
    gpu=gpu("b200"),
    parallel=Parallel(tensor=8),
    kv_cache_dtype="fp8",
)
ATTENTION = [(8192, 8192), (8192, 1024), (8192, 1024), (8192, 8192)]
MLP = [(8192, 28672), (8192, 28672), (28672, 8192)]


def kimi(quantization: str | None = None, *, tokens: int = 80_000) -> Memory:
    """Kimi K2.6 on a node of B200, for requests of so many tokens."""
    return memory(replace(KIMI, quantization=quantization, context_tokens=tokens))


def prefill_of_kimi() -> Performance:
    """One prompt of 80,000 tokens alone."""
    load = Load(input_tokens=80_000, output_tokens=1, concurrency=1, max_num_batched_tokens=16_384)
    return performance(costs(KIMI), load)


def kimi_prefill_flop() -> float:
    """FLOP of a prompt of 80,000 tokens over all GPUs."""
    read = costs(KIMI)
    pairs = 80_000**2 / 2
    return 8 * (80_000 * read.body_flop_per_token + pairs * read.prefill_flop_per_pair)


def guide_gpus(quantization: str, kv_cache_dtype: str) -> float:
    """H100s for 50 requests of 8,000 tokens by the guide's allowances, as `size` finds them."""
    launch = Launch(
        model=LLAMA,
        gpu=gpu("h100-sxm"),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        overhead="guide",
        max_model_len=8192,
        context_tokens=8000,
    )
    return fewest_gpus(launch, concurrency=50).expected or 0


def load_errors() -> list[float]:
    """Logged weights over computed ones: the median in percent, loads within 3% and all loads."""
    errors = [1 / (1 + miss.error_ratio) - 1 for miss in weights_misses() if miss.doubt is None]
    within = sum(abs(error) <= 0.03 for error in errors)
    return [median(errors) * 100, within, 3, len(errors)]


def nvfp4_bytes() -> float:
    return kv_layout(LLAMA.layers, KvSettings(kv_format=kv_format("nvfp4"))).token_bytes


def lora_bytes(rank: int, matrices: list[tuple[int, int]]) -> float:
    return lora_adapter_bytes(rank=rank, matrices=matrices, layers=80)


def buffers(name: str, tensor: int) -> float:
    return adapter_bytes(model(name), Adapters(1, 16), Parallel(tensor=tensor))


def parameters_70b() -> float:
    assert LLAMA.parameters is not None
    return LLAMA.parameters.total


def accepted_share(billions: float) -> float:
    cost = billions / 70
    chance = break_even_acceptance_ratio(draft_tokens=5, draft_cost_ratio=cost)
    assert chance is not None
    return (tokens_per_pass(acceptance_ratio=chance, draft_tokens=5) - 1) / 5


def poisson_quantile(mean: float, quantile: float) -> float:
    return ceil(NormalDist(mean, mean**0.5).inv_cdf(quantile))


def speedup(quantization: str) -> float:
    """FLOP/s of an H100 with these weights over those with 16-bit weights."""
    flops = (
        costs(Launch(LLAMA, gpu("h100-sxm"), Parallel(tensor=4), quantization=each)).flop_per_s
        for each in (quantization, "bf16")
    )
    return next(flops) / next(flops)


def bandwidth_per_usd(card: str) -> float:
    """TB/s for a USD per hour."""
    return gpu(card).memory_bandwidth_bytes_per_s / 1e12 / gpu(card).usd_per_hour


RECOMPUTED: dict[str, Callable[[], list[float]]] = {
    "guide 2.2, 2.6, 7.5: Llama-3 70B holds 0.26 MB of KV cache per token in ": lambda: [
        KV,
        KV / MB,
        KV / MIB,
    ],
    "text 000, KV cache: 327,680 bytes are 0.31 MB": lambda: [KV / MIB, KV / MB],
    "text 003, KV cache memory: the same model holds 2,621,440 bytes, 2.5 MB": lambda: [KV],
    "text 003, KV cache memory: 32 requests of 2,048 tokens: 163,840 MB, 160 ": lambda: [
        32 * 2048 * KV / GB,
        32 * 2048 * KV / GIB,
    ],
    "text 003, KV cache memory: 140 + 160 GB, so 4 GPUs of 80 GB": lambda: [
        140 + 32 * 2048 * KV / GB,
        ceil((140 + 32 * 2048 * KV / GB) / 80),
    ],
    "text 004, KV cache: 2 x 80 x 8 x 128 x 4096 x 64 = 27,487,051,776 bytes,": lambda: [
        64 * 2 * 80 * 8 * 128 * 4096,
        64 * 2 * 80 * 8 * 128 * 4096 / GB,
        64 * 2 * 80 * 8 * 128 * 4096 / GIB,
    ],
    "text 004, KV cache: weights and KV at batch 32 need 165+ GB": lambda: [
        140 + 64 * 2 * 80 * 8 * 128 * 4096 / GB
    ],
    "text 004, KV cache: INT4 weights leave room for that KV cache on one A10": lambda: [
        35,
        64 * 2 * 80 * 8 * 128 * 4096 / GB,
        35 + 64 * 2 * 80 * 8 * 128 * 4096 / GB,
        80,
    ],
    "text 004, KV cache: a 128K request holds 51.5 GB": lambda: [131_072 * KV / GB],
    "guide 9.4: a 128K request holds 10 GB at FP16": lambda: [131_072 * KV / GB],
    "guide 7.6: a 100K context holds 8 GB, 4 GB in FP8": lambda: [
        100_000 * KV / GB,
        50_000 * KV / GB,
    ],
    "guide 7.6, 8.5: reload takes 125 ms from DRAM, 1.1 s from NVMe": lambda: [
        100_000 * KV / LINK_BYTES_PER_S["pcie5"],
        100_000 * KV / LINK_BYTES_PER_S["nvme"],
    ],
    "guide 6.5: 4K tokens in FP8 are 320 MB, 200 tokens 16 MB": lambda: [
        4096 * KV / 2 / MB,
        200 * KV / 2 / MB,
    ],
    "guide 6.5: 320 MB take 0.8 ms over InfiniBand NDR, 16 MB 0.04 ms": lambda: [
        320 * MB / NDR * 1000,
        16 * MB / NDR * 1000 + 0.01,
        4096 * KV / 2 / NDR * 1000,
        200 * KV / 2 / NDR * 1000,
    ],
    "guide 2.2 and 2.6: 50 x 8K is 106 GB, and 104 GB": lambda: [
        50 * 8000 * KV / GB,
        8000,
        50 * 8192 * KV / GB,
        8192,
    ],
    "guide 2.2: KV at 50 x 8K is over 70% of the weights": lambda: [
        50 * 8000 * KV / 140 / GB * 100,
        50 * 8192 * KV / 140 / GB * 100,
    ],
    "guide 2.2: 50 x 32K is 416 GB, three times the weights": lambda: [
        50 * 32_768 * KV / GB,
        32_768,
        50 * 32_768 * KV / 140 / GB,
    ],
    "guide 2.2, figure 2.2: KV exceeds the weights at 16 requests of 32K": lambda: [
        ceil(140 * GB / (32_768 * KV))
    ],
    "guide 2.6, figure 2.1: Llama-3 70B, FP16, 50 x 8K: 287 GB": lambda: [
        140 + 50 * 8000 * KV / GB + 28 + 15,
        guide_gpus("bf16", "auto"),
    ],
    "guide 2.6, figure 2.1: in FP8: 165 GB, 2-3 GPUs": lambda: [
        70 + 50 * 8000 * KV / 2 / GB + 28 + 15,
        ceil(178.5 / 80),
        guide_gpus("fp8", "fp8"),
    ],
    "guide 2.6: headroom makes 4 GPUs into 6": lambda: [
        ceil(287 * 1.3 / 80),
        ceil(287 * 1.5 / 80),
        guide_gpus("bf16", "auto"),
    ],
    "guide 2, figure 2.1 against 9.1: activations stay 28 GB in FP8; are 20% ": lambda: [
        planned_memory(
            Launch(LLAMA, gpu("h100-sxm"), quantization="fp8", max_model_len=8192),
            gpu("h100-sxm"),
            concurrency=50,
        ).activation_bytes
        / GB,
    ],
    "guide 2 against 2.4: framework takes 10-20 GB per deployment whatever th": lambda: [
        5,
        10,
        0.05 * 80 * 4,
        0.1 * 80 * 4,
    ],
    "guide 2.1 against 2.5: a LoRA adapter is 1-5% of the base (1.4-7 GB); 50": lambda: [
        lora_bytes(16, ATTENTION) / MB,
        16,
        lora_bytes(16, ATTENTION) / (140 * GB) * 100,
    ],
    "guide 2.5: 50-200 MB holds for all matrices at rank 16": lambda: [
        lora_bytes(16, ATTENTION + MLP) / MB
    ],
    "guide 2.5: 8 simultaneous adapters of rank 16 add roughly 0.8 GB to a 70": lambda: [
        8 * buffers("meta-llama/Llama-3.3-70B-Instruct", 1) / GB,
        8 * buffers("meta-llama/Llama-3.3-70B-Instruct", 4) / GB,
        4,
    ],
    "guide 2.5: adapters are small beside the model": lambda: [
        buffers("Qwen/Qwen3-30B-A3B", 1) / GB,
        16,
        buffers("deepseek-ai/DeepSeek-R1", 8) / GB,
        8,
    ],
    "guide 2.1, 4, 4.1: 70B in FP16 needs a full DGX node; is a multi-node se": lambda: [
        ceil(140 / 80),
        80,
        guide_gpus("bf16", "auto"),
        50,
    ],
    "guide 5: 405B in FP8 needs well over 200 GB": lambda: [parameters_of(LLAMA_405B).total / GB],
    "guide 2.1: Resident weights are 3-8% above what the formula predicts": lambda: [
        *load_errors(),
    ],
    "guide 5.1, figure 5.1: TP 4 holds 17.5 GB per GPU of 70B FP16": lambda: [140 / 4],
    "guide 2.3, figure 2.3: the 32K attention matrix has about 4 billion entr": lambda: [
        32_768**2 / 1e9
    ],
    "guide 4.3, 7.5: NVFP4 KV doubles FP8 and quadruples FP16; 50 x 4K in 13 ": lambda: [
        163_840 / nvfp4_bytes(),
        KV / nvfp4_bytes(),
        50 * 4096 * nvfp4_bytes() / GB,
    ],
    "guide 7.5: 50 x 4K is 52 GB, 26 GB in FP8": lambda: [
        50 * 4096 * KV / GB,
        50 * 4096 * KV / 2 / GB,
    ],
    "guide 8.5 against 7.1: PagedAttention ends a waste of 20-38%": lambda: [100 - 38, 100 - 20],
    "text 000, KV cache: a 128K request takes over half an H200": lambda: [
        131_072 * KV / (141 * GB) * 100,
        131_072 * KV / GB,
        141,
    ],
    "text 001, 4: a B200 has 192 GB (sold elsewhere as 180)": lambda: [
        gpu("b200").memory_bytes / GIB,
        gpu("b200").memory_bytes / GB,
    ],
    "text 001, 4: weights of 1T parameters in FP4 are 500 GB": lambda: [
        8 * (kimi().weights_bytes or 0) / GB,
        8 * (kimi("nvfp4").weights_bytes or 0) / GB,
        16,
    ],
    "text 001, 4: activations of a 500 GB model take about 80 GB, nothing els": lambda: [
        0.2 * 500,
        0.05 * 1536,
        0.1 * 1536,
    ],
    "text 001, 4.10.2: 35 KB a token; 341 users at 80K, 853 at 32K": lambda: [
        R1_KV,
        956 * GB / (80_000 * R1_KV),
        956 * GB / (32_000 * R1_KV),
    ],
    "text 001, 4.10.2: 956 GB of the node hold that many": lambda: [
        956 / 8 * GB // (80_000 * R1_KV),
        80,
        956 / 8 * GB // (32_000 * R1_KV),
        32,
        8,
        *(kimi(tokens=tokens).concurrency.expected // 1 for tokens in (80_000, 32_000)),
    ],
    "text 001, 4.9: 80,000 tokens/s of prefill: 1 s for an 80K prompt": lambda: [
        prefill_of_kimi().ttft_s,
        16,
        kimi_prefill_flop() / 8 / gpu("b200").bf16_flop_per_s,
        80,
    ],
    "text 001, 4.2: 10-12% MBU is 312-375 tokens/s": lambda: [
        0.10 * 64e12 / 16e9,
        0.12 * 64e12 / 16e9,
    ],
    "text 001, 4.5: FP4 decode does about 2 FLOP per byte, 600 times below th": lambda: [
        4,
        10e15 / 8e12 / 4,
    ],
    "text 001, 4.5, 4.8: a B200 does 10 PFLOPS dense in FP4": lambda: [
        (gpu("b200").fp4_flop_per_s or 0.0) / 1e15
    ],
    "text 001, 4.8: 78,000 tokens/s is 6.4% MFU": lambda: [78_000 / 1.25e6 * 100],
    "text 003 against guide 3.3: batch 1 does 1 FLOP per byte; about 2": lambda: [
        2 / 2,
        16,
        2 / 1,
        8,
        2 / 0.5,
        4,
    ],
    "guide 3.1 to 3.4: 295 FLOP per byte for FP8 decode": lambda: [
        1979e12 / gpu("h100-sxm").memory_bandwidth_bytes_per_s
    ],
    "guide 3.5 against 4.2: FP8 does not raise the FLOP/s of prefill; FP8 Ten": lambda: [
        speedup("fp8"),
        speedup("int8"),
        8,
    ],
    "guide 3.3, figure 3.3.2: decode at batch 1 leaves 98% idle": lambda: [(1 - 2 / RIDGE) * 100],
    "guide 6.6 against 3.3: compute utilization of plain decode is 20-30%": lambda: [
        100 / RIDGE,
        1,
        60,
        90,
        20,
        30,
    ],
    "guide 6.6: verifying five tokens is compute-bound": lambda: [5 * 2, RIDGE, 2 * RIDGE],
    "guide 3.3, figure 3.3.2 against text 003: batching never brings decode p": lambda: [
        RIDGE,
        2 * 70e9 / (KV * RIDGE),
    ],
    "guide 3.3: the H100 has more raw compute than the MI300X": lambda: [
        gpu("h100-sxm").bf16_flop_per_s / 1e12,
        gpu("mi300x").bf16_flop_per_s / 1e12,
    ],
    "guide 3.4: Llama-3 70B FP8 on an H100 decodes 80 tokens/s at batch 1": lambda: [
        3.35e12 / 70e9
    ],
    "guide 3.4, figure 3.4: 4,700 tokens/s at batch 128; 4,510": lambda: [128 * 3.35e12 / 70e9],
    "guide 6.4: a 16K prompt takes 300-500 ms on an H100, 70B": lambda: [
        2 * 70e9 * 16_384 / 1979e12,
        2 * 70e9 * 16_384 / 989e12,
    ],
    "text 003, matrix multiply: for many rows the output dominates, intensity": lambda: [
        4096 * 11_008 / (4096 + 11_008),
        4096,
        11_008,
    ],
    "text 003, matrix multiply, Q2: batch 295 reaches the ridge": lambda: [
        1 / (1 / RIDGE - 1 / 4096 - 1 / 11_008),
        4096,
        11_008,
    ],
    "text 003, decode phase: memory-bound up to batch 100-200": lambda: [RIDGE],
    "text 003, script: Llama-3 70B has 60.1 billion parameters": lambda: [parameters_70b() / 1e9],
    "text 003, common mistakes: below batch 10 an H100 equals an A100": lambda: [3.35 / 2.0],
    "text 003, table: an A10G does 125 TFLOPS at 150 W": lambda: [
        gpu("a10g").bf16_flop_per_s / 1e12,
        300,
    ],
    "text 003, table: The A100 has the most bandwidth per dollar of data cent": lambda: [
        bandwidth_per_usd(card) for card in ("a100-80gb", "h100-sxm", "b200", "mi300x")
    ],
    "text 003, introduction: An L40S beats the H100 on cost per token": lambda: [
        usd_per_million_tokens(gpus * usd, 32 / (140 / gpus / (0.7 * 1000 * terabytes_per_s)))
        for gpus, usd, terabytes_per_s in ((4, 2.2, 0.864), (2, 8.0, 3.35))
    ],
    "text 003, Q4: an all-reduce transfers 2BD bytes": lambda: [2 * (8 - 1) / 8, 8],
    "guide 5, 5.6: TP 4 on PCIe can be slower than TP 2 on NVLink; 38% negate": lambda: [
        4 * (1 - 0.25),
        2 * (1 - 0.02),
        8 * (1 - 0.38),
        8,
    ],
    "guide 5.6, 7.4, 7.6; text 003: PCIe Gen5 is 128 GB/s; 64; Gen4 is 64": lambda: [
        LINK_BYTES_PER_S["pcie5"] / GB,
        5,
        LINK_BYTES_PER_S["pcie4"] / GB,
    ],
    "guide 5.2: Bubbles take (PP - 1) / (m + PP - 1) of the time with m micro": lambda: [
        100 * (stages - 1) / (DEFAULT.microbatches_per_stage * stages + stages - 1)
        for stages in (2, 4)
    ],
    "guide 5.4, figure 5.4: DeepSeek-V3 activates 2 of 256 experts, 254 idle": lambda: [
        R1.experts.per_token,
        1,
        R1.experts.count - R1.experts.per_token,
    ],
    "guide 5.4, figure 5.4: most expert GPUs are idle at any moment": lambda: [
        (1 - (1 - 8 / 256) ** 64) * 100,
        64,
    ],
    "guide 6.5: RAG runs P:D 1:3 to 1:4, code 1:6": lambda: [
        4000 / 52_300 / (200 / 22_300),
        1,
        4000,
        200,
        3000 / 22_300 / (100 / 52_300),
        100,
        3000,
    ],
    "guide 6.6, step 3: speculation is never worse than plain decode": lambda: [
        speculative_speedup(acceptance_ratio=0, draft_tokens=5, draft_cost_ratio=3 / 70),
        3,
    ],
    "guide 6.6, figure 6.6: three accepted tokens are 3 tokens from one pass": lambda: [
        tokens_per_pass(acceptance_ratio=1, draft_tokens=3)
    ],
    "text 004, speculative decoding: K tokens per pass at best": lambda: [
        tokens_per_pass(acceptance_ratio=1, draft_tokens=5) - 5
    ],
    "guide 6.6: 70-90% acceptance gives 2-4 times; 8B drafts for 70B": lambda: [
        speculative_speedup(acceptance_ratio=0.7, draft_tokens=5, draft_cost_ratio=3 / 70),
        speculative_speedup(acceptance_ratio=0.9, draft_tokens=5, draft_cost_ratio=3 / 70),
        3,
        speculative_speedup(acceptance_ratio=0.7, draft_tokens=5, draft_cost_ratio=8 / 70),
        speculative_speedup(acceptance_ratio=0.9, draft_tokens=5, draft_cost_ratio=8 / 70),
        8,
    ],
    "guide 6.6: three or four tokens lift 20-30% to 60-80%": lambda: [3 * 20, 4 * 30],
    "guide 9.3: below 50% acceptance speculation only costs": lambda: [
        accepted_share(3) * 100,
        3,
        accepted_share(8) * 100,
        8,
    ],
    "guide 7.3: round-robin makes the hit ratio 1/N": lambda: [1, (1 - 4 / 100) * 100, 100, 4],
    "guide 7.3, figure 7.3: two of three requests miss, about 25%": lambda: [100 / 3],
    "guide 7.3: 80% shared prompts put 80% on one replica": lambda: [(0.8 + 0.2 / 4) * 100],
    "guide 2.1, 5.6, 7.6, 9.2: NVMe gives 12.5 GB/s; 7; 70 GB take 30-60 s (1": lambda: [
        70 * GB / STORAGE_PATHS["local-nvme"]["high_bytes_per_s"],
        70 * GB / STORAGE_PATHS["nvme-drive"]["high_bytes_per_s"],
        70 * GB / STORAGE_PATHS["nvme-loader"]["high_bytes_per_s"],
        70 * GB / STORAGE_PATHS["nvme-loader"]["low_bytes_per_s"],
    ],
    "guide 2.1 against 9.2: A cold start takes 2-10 minutes; 2-5 minutes": lambda: [
        START_HIGH_S / 60
    ],
    "guide 2.1, table: Object storage moves 0.5-1.0 GB/s and loads 70 GB in 2": lambda: [
        70 / 1.0,
        70 / 0.5,
        140 / 1.0,
        140 / 0.5,
    ],
    "guide 4.5, table: INT8 weights by AWQ": lambda: [4],
    "guide 9.5: FP8 on an A100 runs at INT8 speed without INT8's memory": lambda: [16, 8],
    "guide 9.5: tiers at 85 and 55% blend to 70%": lambda: [(7 * 85 + 55) / 8],
    "guide, introduction: inference is 15-23 times GPT-4's training": lambda: [
        2300 / 100,
        2300 / 78,
    ],
    "guide, introduction and First Principles: 40% utilization costs 2.5 time": lambda: [70 / 40],
    "guide 1: see 1.4 for the peak": lambda: [1.3],
    "guide 1.3: A P95 of 160 and P99 of 180 requests/s at 65 on average, intr": lambda: [
        poisson_quantile(65, 0.95),
        poisson_quantile(65, 0.99),
    ],
    "guide 8.3, figure 8.2: Little's ceiling is 48 / 2 s = 24 requests/s; the": lambda: [
        48,
        4,
        48 / 4,
    ],
    "guide 8.3: A gap under 2 is good, over 2 bad; the example has exactly 2 ": lambda: [2],
    "guide 8.3 against 9.1 step 11: GPUs = instances x TP x safety; or ceil(p": lambda: [
        7 * 4 * 1.3,
        size_fleet(
            Sheet(), peak_requests_per_s=78, usable_requests_per_s=12, gpus_each=4, safety=1.3
        ).gpus,
    ],
    "guide 9.2: A 30% shorter prompt is 30% more throughput": lambda: [0, (1 / 0.7 - 1) * 100],
    "guide 9.2: From 40 to 70% utilization cuts cost per token nearly in half": lambda: [
        (1 - 40 / 70) * 100
    ],
    "guide 9.3: GPU memory is 80-90% used": lambda: [
        100 * (RULES_BY_ID["GPU-MEMORY-HIGH"].threshold(Severity.INFO) or 0)
    ],
    "guide 9.4: Maximum safe queue depth = wait x arrival rate; 2 s x 50/s = ": lambda: [
        40 * 2,
        40,
    ],
    "guide 9.4: 100K tokens hold a decode slot for minutes": lambda: [
        100_000 * 0.015 / 60,
        100_000 * 0.025 / 60,
    ],
    "text 003, cost: Eight H100 nodes cost 180,000 USD a month; its script ha": lambda: [
        64 * 8 * 730
    ],
}
"""By the beginning of a row: its numbers, those given by the text among them."""

_TABLE = Path(__file__).parents[1] / "docs/explanation/errata.md"
# Names of things, and what is quoted from a command line.
_NAMES = re.compile(
    r"`[^`]*`|[HLAB]\d+[A-Z]*|MI300X|[WV]\d+A?\d*|[BT]?FP?\d+|INT\d+|BF16|R1|Qwen3-30B-A3B|x4|1/N"
    r"|(?<![\w.])\d+B\b|TP \d+|text \d+|rank \d+"
)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def rows() -> list[list[str]]:
    lines = [line for line in _TABLE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def numbers(cell: str) -> list[str]:
    return [text.replace(",", "") for text in _NUMBER.findall(_NAMES.sub(" ", cell))]


def shows(text: str, value: float) -> bool:
    """Whether a value is shown as that text, rounded to its last digit or to 1%."""
    digits = len(text.partition(".")[2])
    return abs(float(text) - value) <= max(0.51 * 10.0**-digits, 0.01 * abs(value))


ROWS = {f"{section}: {text}"[:72]: cell for section, text, cell, _ in rows()}
NUMBERED = {key: cell for key, cell in ROWS.items() if numbers(cell)}


def test_every_row_with_a_number_is_recomputed_and_no_row_stands_twice() -> None:
    assert NUMBERED.keys() == RECOMPUTED.keys()
    assert len(ROWS) == len(rows())


@pytest.mark.parametrize("row", NUMBERED)
def test_a_rows_numbers(row: str) -> None:
    recomputed = RECOMPUTED[row]()
    for shown in numbers(NUMBERED[row]):
        assert any(shows(shown, value) for value in recomputed), shown
