"""Why a server did not start or died, as read from its log. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from kneewatch.collector.packaged import packaged_tables

Value = str | float | int | bool

KV_NONE, KV_SMALL, FREE_MEMORY = "no_kv_memory", "kv_below_one_request", "gpu_memory_in_use"
GPU_MEMORY, HOST_MEMORY, FEW_STATES = "gpu_out_of_memory", "host_out_of_memory", "too_few_states"
MODEL_LEN, FLAG, OTHER = "max_model_len_above_model", "invalid_argument", "error"


class Failure(Struct, frozen=True):
    """Why the server did not start or, if `served`, why it died.

    `line` is the proof; `details` has its numbers and words by name. `kind` is "error" for a line
    that no wording matches.
    """

    kind: str
    line: str
    served: bool
    details: Mapping[str, Value] = field(default_factory=dict[str, Value])


SIZE = r"\d[\d.]{0,12} (?:[GMK]iB|bytes)"
_GIB_EACH = {"GiB": 1.0, "MiB": 1 / 1024, "KiB": 1 / 1024**2, "bytes": 1 / 2**30}
_THIS_PROCESS = "this process has"
_TORCH_RATIO = 0.75
"""Least share of a process's GPU memory that PyTorch allocates.

The rest is CUDA's context, graphs and NCCL. So the process with a matching size wrote the log line.
"""
_LEAST_GIB = 1.0
"""A process without tensors, such as a monitor or a display, uses less GPU memory than this."""


def reasons() -> Mapping[str, Mapping[str, Any]]:
    """What happened and what to do, by the kind of failure."""
    return packaged_tables("collector.engines", "vllm/startup_failures.toml")


def phases() -> Mapping[str, Mapping[str, Any]]:
    """The phases of a start in which the GPU's memory can end, the most specific first."""
    of_memory: Mapping[str, Mapping[str, Any]] = reasons()[GPU_MEMORY]["phases"]
    return of_memory


def others_gpu_gib(failure: Failure) -> float | None:
    """GiB of GPU memory that other processes use, from PyTorch's out-of-memory line; 0 if it is
    little.

    None if the line does not say. In a container, PyTorch names its own process by the node's
    process id; the process is then found by its size.
    """
    rows = re.findall(rf"([^.]+ has )({SIZE}) memory in use\.", str(failure.details.get("holders")))
    others = [_gib(size) for who, size in rows if _THIS_PROCESS not in who]
    held_gib = sum(others)
    if len(others) == len(rows):
        own_gib = size_gib(failure, "torch")
        if not own_gib or not others:
            return None
        mine_gib = min(others, key=lambda size: abs(size - own_gib))
        if not _TORCH_RATIO * mine_gib <= own_gib <= mine_gib:
            return None
        held_gib -= mine_gib
    return held_gib if held_gib >= _LEAST_GIB else 0.0


def is_fragmented(failure: Failure) -> bool:
    """Whether PyTorch had reserved much memory in pieces, more than the allocation that failed."""
    asked_gib, cached_gib = size_gib(failure, "asked"), size_gib(failure, "cached")
    return asked_gib > 0 and cached_gib >= max(asked_gib, _LEAST_GIB)


def size_gib(failure: Failure, name: str) -> float:
    """A logged size in GiB; 0 if the line does not say."""
    return _gib(str(failure.details.get(name, "")))


def _gib(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * _GIB_EACH[unit] if re.fullmatch(r"\d+(\.\d+)?", number) else 0.0
