"""The tables of a workload profile and their keys. Pure."""

from __future__ import annotations

from kneewatch.diagnose.sizing.fleet.cold_start import STORAGE_PATHS
from kneewatch.diagnose.sizing.fleet.workload import ARCHETYPES, TARGETS
from kneewatch.diagnose.sizing.memory.transfer import LINK_BYTES_PER_S
from kneewatch.diagnose.sizing.plan.profile_table import Key

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
