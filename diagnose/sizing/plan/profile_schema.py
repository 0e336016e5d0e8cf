"""The tables and keys of a workload profile, and a strict reader of TOML tables. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from kneewatch.collector.errors import SettingsError
from kneewatch.diagnose.sizing.memory.kv_reuse import LINK_BYTES_PER_S
from kneewatch.diagnose.sizing.replicas.archetypes import ARCHETYPES, TARGETS
from kneewatch.diagnose.sizing.replicas.cold_start import STORAGE_PATHS

_LARGEST = 1e15


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a table: its kind, and what a value must be.

    `kind` is number, count, ratio, flag, text or texts. A number is above 0, or 0 too with
    `zero`; a ratio is from 0 to `most`.
    """

    name: str
    kind: str
    needed: bool = False
    zero: bool = False
    most: float = _LARGEST
    choices: tuple[str, ...] = ()


def known_keys(
    table: Mapping[str, object], *, known: Sequence[str], place: str, origin: str
) -> None:
    """Refuse keys that mean nothing there.

    Raises:
        SettingsError: naming the key, the nearest known one and all that there are.
    """
    for name in table:
        if name in known:
            continue
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise SettingsError(f"{origin}: unknown key {_path(place, name)}; {hint}")


def read_table(table: object, keys: Sequence[Key], *, place: str, origin: str) -> dict[str, Any]:
    """The values of a table by key, those left out left out.

    Raises:
        SettingsError: an unknown or missing key, or a value that cannot be; it is named.
    """
    if not isinstance(table, Mapping):
        raise SettingsError(f"{origin}: {place} is {table!r}; it must be a table")
    values = cast("Mapping[str, object]", table)
    known_keys(values, known=[key.name for key in keys], place=place, origin=origin)
    checked: dict[str, Any] = {}
    for key in keys:
        path = _path(place, key.name)
        if key.name in values:
            checked[key.name] = _checked(key, values[key.name], path, origin)
        elif key.needed:
            raise SettingsError(f"{origin}: {path} is missing")
    return checked


def _path(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _checked(key: Key, value: object, path: str, origin: str) -> object:
    trouble = _trouble(key, value)
    if trouble:
        raise SettingsError(f"{origin}: {path} is {_shown(value)}; it must be {trouble}")
    if key.kind == "texts":
        return tuple(cast("list[str]", value))
    if key.kind == "count":
        return int(cast("float", value))
    return value


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _trouble(key: Key, value: object) -> str:
    """What the value must be instead; empty where it will do."""
    if key.kind == "flag":
        return "" if isinstance(value, bool) else "true or false"
    if key.kind == "text":
        return _text_trouble(key, value)
    if key.kind == "texts":
        items = cast("list[object]", value) if isinstance(value, list) else []
        listed = bool(items) and all(isinstance(item, str) and item.strip() for item in items)
        return "" if listed else "a non-empty list of strings"
    return _number_trouble(key, value)


def _text_trouble(key: Key, value: object) -> str:
    if key.choices:
        return "" if value in key.choices else f"one of {', '.join(key.choices)}"
    return "" if isinstance(value, str) and value.strip() else "a non-empty string"


def _number_trouble(key: Key, value: object) -> str:
    floor = "0 or more" if key.zero else "above 0"
    expected = f"a number {floor}"
    if key.kind == "ratio":
        expected = f"a ratio from 0 to {key.most:g}"
    elif key.kind == "count":
        expected = f"a whole number {floor}"
    elif key.most < _LARGEST:
        expected = f"{expected} and at most {key.most:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return expected
    if key.kind == "count" and value != int(value):
        return expected
    low_enough = value <= key.most
    high_enough = value >= 0 if key.zero or key.kind == "ratio" else value > 0
    return "" if low_enough and high_enough else expected


# --- The tables of a workload profile and their keys ----------------------------------------------


SAFETY_BY_PREDICTABILITY = {"predictable": 1.2, "typical": 1.3, "uncertain": 1.5}
"""Guide 8.3: 20 % for known patterns, 50 % for new deployments; its example takes 30 %."""

METHODS = ("route", "cascade", "hardware")

LENGTHS = (
    Key("input_p50_tokens", "count", needed=True),
    Key("input_p95_tokens", "count", needed=True),
    Key("input_p99_tokens", "count", needed=True),
    Key("output_p50_tokens", "count", needed=True),
    Key("output_p95_tokens", "count", needed=True),
    Key("output_p99_tokens", "count", needed=True),
    Key("input_mean_tokens", "number"),
    Key("output_mean_tokens", "number"),
)
TRAFFIC = (
    Key("kind", "text", needed=True, choices=tuple(TARGETS)),
    Key("archetype", "text", needed=True, choices=tuple(a.id for a in ARCHETYPES)),
    Key("average_requests_per_s", "number"),
    Key("peak_requests_per_s", "number"),
    Key("lowest_requests_per_s", "number", zero=True),
    Key("rise_per_s_per_s", "number", zero=True),
    Key("growth_ratio", "ratio", most=100.0),
    Key("predictability", "text", choices=tuple(SAFETY_BY_PREDICTABILITY)),
    Key("utilization_ratio", "ratio", most=1.0),
    Key("batch_requests", "number"),
    Key("batch_window_s", "number"),
)
SLO = (Key("ttft_p99_s", "number", most=3600.0), Key("itl_p99_s", "number", most=60.0))
DEPLOYMENT = (
    Key("model", "text", needed=True),
    Key("gpus", "texts", needed=True),
    Key("quantization", "text"),
    Key("kv_cache_dtype", "text"),
    Key("tensor_parallel", "count", most=64),
    Key("pipeline_parallel", "count", most=64),
    Key("max_model_len", "count"),
    Key("concurrency", "count", most=100_000),
    Key("usable_requests_per_s", "number"),
    Key("usd_per_gpu_hour", "number", zero=True),
    Key("baseline_benchmark", "text"),
    Key("final_benchmark", "text"),
    Key("benchmark_gpu_ratio", "ratio", most=1.0),
)
PREFIX = (
    Key("shared_tokens", "count", needed=True),
    Key("distinct", "count"),
    Key("hit_ratio", "ratio", most=1.0),
)
LORA = (
    Key("adapters", "count", needed=True),
    Key("max_simultaneous_adapters", "count", needed=True),
    Key("adapter_bytes", "number"),
    Key("max_lora_rank", "count"),
)
SPECULATION = (
    Key("draft_tokens", "count", needed=True, most=64),
    Key("acceptance_ratio", "ratio", needed=True, most=1.0),
    Key("draft_cost_ratio", "ratio", most=10.0),
    Key("draft_weights_bytes", "number", zero=True),
)
SESSION = (
    Key("calls", "count", needed=True, most=10_000),
    Key("added_tokens", "count", needed=True, zero=True),
)
HOSTING = (
    Key("node_gpus", "count", most=128),
    Key("network", "text", choices=tuple(LINK_BYTES_PER_S)),
    Key("storage_path", "text", choices=tuple(path.name for path in STORAGE_PATHS)),
    Key("provision_s", "number", zero=True),
    Key("initialise_s", "number", zero=True),
    Key("host_memory_bytes", "number"),
)
ROUTING = (
    Key("method", "text", choices=METHODS),
    Key("simple_ratio", "ratio", most=1.0),
    Key("small_model_acceptable", "flag"),
    Key("router_s", "number", zero=True),
)
TIER = (
    Key("name", "text", needed=True),
    Key("share_ratio", "ratio", most=1.0),
    Key("escalation_ratio", "ratio", most=1.0),
)
TABLES = {
    "lengths": LENGTHS,
    "traffic": TRAFFIC,
    "slo": SLO,
    "deployment": DEPLOYMENT,
    "hosting": HOSTING,
    "prefix": PREFIX,
    "lora": LORA,
    "speculation": SPECULATION,
    "session": SESSION,
    "routing": ROUTING,
}
"""The tables by name; beside them stand `name` and the list of tables `tiers`, whose tables have
the keys of `TIER` and of `DEPLOYMENT`, and `lengths` of their own."""
