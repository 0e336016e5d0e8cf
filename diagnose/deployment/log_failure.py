"""Why a server did not start or died, as read from its log. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct, field

Value = str | float | int | bool

KV_NONE, KV_SMALL, FREE_MEMORY, GPU_MEMORY, HOST_MEMORY = (
    "no_kv_memory", "kv_below_one_request", "gpu_memory_in_use", "gpu_out_of_memory",
    "host_out_of_memory",
)  # fmt: skip
MODEL_LEN, FLAG, QUANTIZATION, NCCL, PORT, HOST_MEMORY_IN_USE, MODEL_PATH, OTHER = (
    "max_model_len_above_model", "invalid_argument", "quantization_unsupported", "nccl_error",
    "port_in_use", "host_memory_in_use", "model_not_found", "error",
)  # fmt: skip


class Failure(Struct, frozen=True):
    """Why the server did not start or, if `served`, why it died.

    `line` is the proof; `details` has its numbers and words by name. `kind` is "error" for a line
    that no wording matches.
    """

    kind: str
    line: str
    served: bool
    details: Mapping[str, Value] = field(default_factory=dict[str, Value])


_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ([GMK])iB")
_GIB_EACH = {"G": 1.0, "M": 1 / 1024, "K": 1 / 1024**2}
_THIS_PROCESS = "this process has"
_TORCH_RATIO = 0.75
"""Least share of a process's GPU memory that PyTorch allocates.

The rest is CUDA's context, graphs and NCCL. So the process with a matching size wrote the log line.
"""


def others_gpu_gib(failure: Failure) -> float | None:
    """GiB of GPU memory that other processes use, from PyTorch's out-of-memory line.

    None if the line does not say. In a container, PyTorch names its own process by the node's
    process id; the process is then found by its size.
    """
    holders = str(failure.details.get("holders", ""))
    rows = re.findall(r"([^.]+ has )([\d.]+ [GMK]iB) memory in use\.", holders)
    others = [_gib(size) for who, size in rows if _THIS_PROCESS not in who]
    if len(others) < len(rows):
        return sum(others)
    allocated = failure.details.get("torch")
    own = _gib(str(allocated)) if allocated is not None else 0.0
    if not own or not others:
        return None
    mine = min(others, key=lambda size: abs(size - own))
    return sum(others) - mine if _TORCH_RATIO * mine <= own <= mine else None


def _gib(text: str) -> float:
    match = _SIZE.fullmatch(text)
    return 0.0 if match is None else float(match[1]) * _GIB_EACH[match[2]]
