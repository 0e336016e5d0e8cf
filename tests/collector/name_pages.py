"""Pages to resolve names on: the recorded ones, and what deployments make of them."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from kneewatch.collector.exposition import parse
from kneewatch.collector.names.vllm_metrics import HistogramSlots
from kneewatch.collector.names.vllm_resolver import Binding, EngineBinding, ValueSlot, resolve
from kneewatch.collector.page import Page

FIXTURES = Path(__file__).parents[1] / "fixtures"
PAGES = FIXTURES / "pages"
CORE = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
}


def recorded(name: str) -> str:
    """The text of a recorded page."""
    return gzip.decompress((PAGES / f"vllm-{name}.txt.gz").read_bytes()).decode()


def resolved(body: str) -> tuple[Page, Binding]:
    """A page and what is on it."""
    page = parse(body)
    return page, resolve(page.layout)


def only_engine(binding: Binding) -> EngineBinding:
    """The engine of a page that has one."""
    (engine,) = binding.engines
    return engine


def kinds(engine: EngineBinding) -> dict[str, str]:
    """The kind of each metric that an engine has."""
    metrics_of_kind = {
        "gauge": engine.gauges,
        "counter": engine.counters,
        "histogram": engine.histograms,
        "info": engine.infos,
    }
    return {name: kind for kind, metrics in metrics_of_kind.items() for name in metrics}


def slots(engine: EngineBinding, name: str) -> tuple[ValueSlot | HistogramSlots, ...]:
    """Where a metric of any kind stands."""
    if name in engine.histograms:
        return engine.histograms[name]
    plain = {**engine.gauges, **engine.counters, **engine.infos}
    return plain.get(name, ())


def values(page: Page, engine: EngineBinding, name: str) -> dict[str, float]:
    """A metric's values by the values of its own labels; of a histogram its count."""
    values_by_name: dict[str, float] = {}
    for slot in slots(engine, name):
        position = slot.count if isinstance(slot, HistogramSlots) else slot.position
        own = ",".join(value for _, value in slot.labels)
        assert position is not None
        assert own not in values_by_name
        values_by_name[own] = page.values[position]
    return values_by_name


def prefixed(body: str, prefix: str) -> str:
    """The page with another prefix, in HELP and TYPE too; a dotted name needs quotes."""
    if "." not in prefix:
        return re.sub(r"(?m)^((?:# (?:HELP|TYPE) )?)vllm:", rf"\1{prefix}", body)
    body = re.sub(r"(?m)^# (?:HELP|TYPE) vllm:.*\n", "", body)
    return re.sub(r"(?m)^vllm:(\w+)\{", rf'{{"{prefix}\1",', body)


def labelled(body: str, **labels: str) -> str:
    """vLLM's series of the page with more labels, or with other values of those they have."""
    for label in labels:
        body = re.sub(rf'(?m)^(vllm:.*[{{,]){label}="[^"]*",?', r"\1", body)
    more = ",".join(f'{label}="{value}"' for label, value in labels.items())
    body = re.sub(r"(?m)^(vllm:\w+)\{", rf"\1{{{more},", body)
    return re.sub(r"(?m)^(vllm:\w+) ", rf"\1{{{more}}} ", body)


def unlabelled(body: str, label: str) -> str:
    """vLLM's series of the page without a label."""
    return re.sub(rf'(?m)^(vllm:.*[{{,]){label}="[^"]*",?', r"\1", body)
