"""The faults of the closed loop: what the server is started with, the load, the cause. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from tests.lab.load import Shape
from tests.lab.server import SMALL_CACHE

NO_FP8: Mapping[str, str] = {"kv-fp8": "the CPU backend has no FP8 KV cache"}


class Fault(Struct, frozen=True):
    """A server with a fault. `loads` are requests and how many clients send them.

    `skipped` are recommendations (ids) that are not followed, and why. `from_start`: kneewatch
    watches while the clients start, so that it has seen smaller batches than the last. `earlier`
    are requests, clients and seconds before `loads`, watched too. `by_name_only`: another setting
    of a fault, left out where none is named.
    """

    name: str
    cause: str
    flags: tuple[str, ...]
    loads: tuple[tuple[Shape, int], ...]
    ramp_s: float
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    from_start: bool = False
    by_name_only: bool = False
    earlier: tuple[Shape, int, float] | None = None


NO_MEMORY: Mapping[str, str] = {
    **NO_FP8,
    "kv-blocks": "here no memory for more blocks is taken to be free",
}
ONE_MACHINE: Mapping[str, str] = {"replicas": "there is one machine"}
NO_QUEUE: Mapping[str, str] = {"max-num-seqs-down": "here nobody is to queue"}


def _small_cache(
    name: str,
    *,
    blocks: int,
    shape: Shape,
    clients: int,
    length: int = 2048,
    skipped: Mapping[str, str] = {**NO_MEMORY, **ONE_MACHINE},
    earlier: tuple[Shape, int, float] | None = None,
) -> Fault:
    """A cache that is too small, by default where fewer seats are the only cure."""
    return Fault(
        name,
        "kv_pressure",
        (
            *("--num-gpu-blocks-override", str(blocks), "--max-num-seqs", "128"),
            *("--max-model-len", str(length)),
        ),
        ((shape, clients),),
        ramp_s=90.0,
        skipped=skipped,
        from_start=True,
        by_name_only=name != "kv_pressure_no_memory",
        earlier=earlier,
    )


FAULTS = (
    Fault(
        "kv_pressure",
        "kv_pressure",
        SMALL_CACHE,
        ((Shape(), 30),),
        ramp_s=90.0,
        skipped=NO_FP8,
        from_start=True,
    ),
    Fault(
        "prefix_cache_off",
        "prefix_cache_off",
        ("--max-num-seqs", "32", "--max-model-len", "4096", "--no-enable-prefix-caching"),
        ((Shape(prompt_tokens=1050, output_tokens=30, shared_tokens=1000, pause_s=1.0), 4),),
        ramp_s=2.0,
    ),
    Fault(
        "prefill_interference",
        "prefill_interference",
        (
            *("--max-num-seqs", "32", "--max-model-len", "8192"),
            *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"),
        ),
        (
            (Shape(prompt_tokens=32, output_tokens=200), 6),
            (Shape(prompt_tokens=6000, output_tokens=4, pause_s=2.0), 1),
        ),
        ramp_s=3.0,
    ),
    Fault(
        "spec_decode_poor",
        "spec_decode_poor",
        (
            *("--max-num-seqs", "16", "--max-model-len", "4096", "--speculative-config"),
            '{"method": "ngram", "num_speculative_tokens": 4, '
            '"prompt_lookup_max": 3, "prompt_lookup_min": 1}',
        ),
        ((Shape(prompt_tokens=64, output_tokens=200, words=32), 3),),
        ramp_s=3.0,
    ),
    # 95 usable blocks: 18 requests of 100 + 100 tokens.
    _small_cache("kv_pressure_no_memory", blocks=96, shape=Shape(output_tokens=100), clients=30),
    _small_cache(
        "kv_pressure_11_seats",
        blocks=72,
        shape=Shape(prompt_tokens=60, output_tokens=140),
        clients=24,
        length=1024,
    ),
    _small_cache(
        "kv_pressure_20_seats",
        blocks=192,
        shape=Shape(prompt_tokens=200, output_tokens=100),
        clients=30,
    ),
    _small_cache(
        "kv_pressure_long_prompts",
        blocks=320,
        shape=Shape(prompt_tokens=500, output_tokens=80),
        clients=30,
    ),
    _small_cache(
        "kv_pressure_pauses",
        blocks=96,
        shape=Shape(output_tokens=100, pause_s=1.0),
        clients=40,
    ),
    _small_cache(
        "kv_pressure_replicas",
        blocks=96,
        shape=Shape(output_tokens=100),
        clients=30,
        skipped={**NO_MEMORY, **NO_QUEUE},
    ),
    _small_cache(
        "kv_pressure_replicas_long_prompts",
        blocks=192,
        shape=Shape(prompt_tokens=200, output_tokens=100),
        clients=30,
        skipped={**NO_MEMORY, **NO_QUEUE},
    ),
    # The larger batch was measured with shorter requests.
    _small_cache(
        "kv_pressure_blocks",
        blocks=160,
        shape=Shape(prompt_tokens=150, output_tokens=200),
        clients=24,
        skipped={**NO_FP8, **NO_QUEUE, **ONE_MACHINE},
        earlier=(Shape(prompt_tokens=50, output_tokens=60), 28, 60.0),
    ),
)
