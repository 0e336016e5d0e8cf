"""What vLLM's log says about the server, as one source among others. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.diagnose.deployment.server_facts import (
    AVAILABLE_KV_GIB,
    KV_BLOCKS,
    KV_TOKENS,
    LOG,
    MAX_MODEL_LEN,
    VERSION,
    WEIGHTS_GIB,
    SourceReading,
    Value,
)
from kneewatch.diagnose.deployment.startup_log import StartupLog

NAMES: Mapping[str, str] = {
    "version": VERSION,
    "max_model_len": MAX_MODEL_LEN,
    "weights_gib": WEIGHTS_GIB,
    "load_s": "load_s",
    "available_kv_gib": AVAILABLE_KV_GIB,
    "kv_cache_tokens": KV_TOKENS,
    "gpu_blocks": KV_BLOCKS,
    "max_concurrency": "max_concurrency",
    "graph_s": "graph_s",
    "graph_gib": "graph_gib",
    "attention_backend": "attention_backend",
}
"""Logged facts and their names among those of all sources. Logged arguments are in `launch`."""


def log_reading(log: StartupLog, read_s: float) -> SourceReading:
    """The facts of the newest start in the log, as it was read at `read_s`."""
    values: dict[str, Value] = {
        name: log.facts[logged].value for logged, name in NAMES.items() if logged in log.facts
    }
    return SourceReading(LOG, read_s, values, launch=log.launch)
