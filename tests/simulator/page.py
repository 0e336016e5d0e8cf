"""An engine's /metrics page, exactly as a vLLM of some version writes it.

The recorded page of that version is the form: its lines, names, labels and buckets stay, the
values are the engine's. What a version calls otherwise is looked up under its old name.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path

from tests.simulator.counters import OF_LENGTH, Counters
from tests.simulator.scheduler import Launch
from tests.simulator.shown import Shown

PAGES = Path(__file__).parents[1] / "fixtures" / "pages"
SAMPLE = re.compile(r"(vllm:)?(\w+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
OLD_NAMES = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries_total": "prefix_cache_queries_total",
    "gpu_prefix_cache_hits_total": "prefix_cache_hits_total",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}
START_S = 1_800_000_000.0
"""Unix time at which simulated time is 0."""

BORN_BEFORE_S = 40.0
"""The process is that much older than its engine: weights are loaded in between."""

NEWEST = "0.32.0-loaded"
WITH_SPECULATION = "0.32.0-spec"


class PageWriter:
    """Writes the pages of one engine."""

    def __init__(
        self, engine: Shown, *, model: str, form: str = NEWEST, started_s: float = START_S
    ) -> None:
        self._engine = engine
        self._lines = tuple(_lines(_form(form), engine, model, started_s))
        self._samples = tuple(
            line[1] if isinstance(line, tuple) else float(line.rsplit(" ", 1)[1])
            for line in self._lines
            if not isinstance(line, str) or not line.startswith("#")
        )

    def samples(self) -> list[float]:
        """The values of the page's samples, in its order; adapters are left out."""
        values = _values(self._engine)
        return [
            values.get(sample, 0.0) if isinstance(sample, str) else sample
            for sample in self._samples
        ]

    def page(self) -> str:
        """The page now."""
        values = _values(self._engine)
        engine = self._engine
        lines = [
            line if isinstance(line, str) else line[0] + _number(values.get(line[1], 0.0)) + "\n"
            for line in self._lines
        ]
        if engine.launch.max_loras:
            lines.extend(_adapter_lines(engine))
        return "".join(lines)


Line = str | tuple[str, str]
"""A line as it is, or what stands before a value and the value's key."""


@cache
def _form(name: str) -> tuple[str, ...]:
    text = gzip.decompress((PAGES / f"vllm-{name}.txt.gz").read_bytes()).decode()
    return tuple(line for line in text.splitlines() if not line.startswith("# vLLM"))


def _lines(form: tuple[str, ...], engine: Shown, model: str, started_s: float) -> Iterator[Line]:
    widened, config_seen = set[str](), False
    for text in form:
        match = None if text.startswith("#") else SAMPLE.match(text)
        if match is None:
            if "lora_requests_info" not in text:
                yield text + "\n"
            continue
        prefix, name, labels, value = match[1] or "", match[2], match[3] or "", match[4]
        if name == "lora_requests_info":
            continue
        if name == "cache_config_info":
            yield _config(labels, engine.launch)
            config_seen = True
            continue
        if name == "process_start_time_seconds":
            yield f"{name} {started_s - BORN_BEFORE_S}\n"
            continue
        labels = labels.replace('model_name="tiny"', f'model_name="{model}"')
        if name.endswith("_created") and prefix:
            yield f"{prefix}{name}{{{labels}}} {started_s}\n"
        elif not prefix:
            yield f"{name}{{{labels}}} {value}\n" if labels else f"{name} {value}\n"
        elif name.endswith("_bucket") and name.removesuffix("_bucket") in OF_LENGTH:
            if name not in widened:
                widened.add(name)
                yield from _widened(name, labels, engine.counters)
        else:
            yield f"{prefix}{name}{{{labels}}} ", _value(name, labels)
    if not config_seen:
        # The renderings without traffic lack what a server adds when its engine is up.
        labels = 'block_size="",cache_dtype="auto",enable_prefix_caching="",engine="0",'
        labels += 'gpu_memory_utilization="0.9",num_gpu_blocks=""'
        yield "# TYPE vllm:cache_config_info gauge\n"
        yield _config(labels, engine.launch)


def _widened(name: str, labels: str, counters: Counters) -> Iterator[Line]:
    family = name.removesuffix("_bucket")
    rest = ",".join(f'{k}="{v}"' for k, v in LABEL.findall(labels) if k != "le")
    edges = [*map(float, counters.histograms[family].edges), float("inf")]
    for place, edge in enumerate(edges):
        le = "+Inf" if edge == float("inf") else repr(edge)
        yield f'vllm:{name}{{{rest},le="{le}"}} ', f"{family}|{place}"


def _value(name: str, labels: str) -> str:
    """The key of a sample's value."""
    own = {k: v for k, v in LABEL.findall(labels) if k not in ("engine", "model_name")}
    if name.endswith("_bucket"):
        family = name.removesuffix("_bucket")
        edge = float(own["le"].replace("+Inf", "inf"))
        # A bucket by its edge: versions differ in the edges that they have.
        return f"{OLD_NAMES.get(family, family)}|le={edge}"
    for ending in ("_sum", "_count"):
        if name.endswith(ending):
            family = name.removesuffix(ending)
            return OLD_NAMES.get(family, family) + ending
    key = OLD_NAMES.get(name, name)
    return key + "".join(f"|{k}={v}" for k, v in own.items())


def _values(engine: Shown) -> dict[str, float]:
    scheduler, counters = engine.scheduler, engine.counters
    waiting, deferred = len(scheduler.waiting), scheduler.deferred
    values: dict[str, float] = {name: int(count) for name, count in counters.counts.items()}
    values |= {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": waiting,
        "num_requests_waiting_by_reason|reason=capacity": max(0, waiting - deferred),
        "num_requests_waiting_by_reason|reason=deferred": deferred,
        "engine_sleep_state|sleep_state=awake": not engine.asleep,
        "engine_sleep_state|sleep_state=weights_offloaded": engine.asleep,
        "kv_cache_usage_perc": scheduler.blocks.usage_ratio,
        "prefix_cache_queries_total": int(scheduler.queried_tokens),
        "prefix_cache_hits_total": int(scheduler.hit_tokens),
    }
    for name, histogram in counters.histograms.items():
        at_most = list(accumulate(histogram.own))
        values[f"{name}_sum"], values[f"{name}_count"] = histogram.sum, at_most[-1]
        places, edges = _keys(name, histogram.edges)
        if name in OF_LENGTH:
            values.update(zip(places, at_most, strict=True))
        values.update(zip(edges, at_most, strict=True))
    return values


@cache
def _keys(name: str, edges: tuple[float, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A histogram's buckets by place and by edge."""
    bounds = (*edges, float("inf"))
    by_place = tuple(f"{name}|{place}" for place in range(len(bounds)))
    return by_place, tuple(f"{name}|le={float(edge)}" for edge in bounds)


def _number(value: float) -> str:
    return repr(float(value))


def _config(labels: str, launch: Launch) -> str:
    tokens = (launch.num_gpu_blocks - 1) * launch.block_size
    own = {
        "block_size": str(launch.block_size),
        "effective_attention_block_size": str(launch.block_size),
        "num_gpu_blocks": str(launch.num_gpu_blocks),
        "num_gpu_blocks_override": str(launch.num_gpu_blocks) if launch.is_overridden else "None",
        "enable_prefix_caching": str(launch.enable_prefix_caching),
        "kv_cache_size_tokens": str(tokens),
        "kv_cache_max_concurrency": str(round(tokens / launch.max_model_len, 2)),
        "user_specified_block_size": "False",
    }
    pairs = [(k, own.get(k, v)) for k, v in LABEL.findall(labels) if k != "kv_cache_memory_bytes"]
    inside = ",".join(f'{k}="{v}"' for k, v in pairs)
    return f"vllm:cache_config_info{{{inside}}} 1.0\n"


def _adapter_lines(engine: Shown) -> Iterator[str]:
    yield "# HELP vllm:lora_requests_info Running stats on lora requests.\n"
    yield "# TYPE vllm:lora_requests_info gauge\n"
    for names, seen_s in engine.adapters_seen.items():
        labels = f'max_lora="{engine.launch.max_loras}",running_lora_adapters="{names}",'
        labels += f'waiting_lora_adapters="{names}"'
        yield f"vllm:lora_requests_info{{{labels}}} {START_S + seen_s}\n"
