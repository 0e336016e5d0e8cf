"""The scenarios. What must be said of each was written down before any was judged."""

from __future__ import annotations

from tests.scenarios.combined import COMBINED
from tests.scenarios.engine import Knobs
from tests.scenarios.field_reports import FIELD_REPORTS
from tests.scenarios.load import Scenario
from tests.scenarios.operations import OPERATIONS
from tests.scenarios.production import REPORTS
from tests.scenarios.rare_kinds import RARE_KINDS
from tests.scenarios.threads import SLOW, THREADS

LONG = ("prefill_interference", "prefill_bound", "workload_drift")
PREFIX = ("prefix_reuse_lost", "prefix_churn")
LARGE = {
    "base_s": 0.025,
    "sequence_s": 2e-4,
    "prompt_s": 1.2e-4,
    "budget": 2048.0,
    "blocks": 30_000.0,
}
SMALL = {"base_s": 0.06, "sequence_s": 2e-3, "prompt_s": 1e-3, "seats": 16.0, "blocks": 6_000.0}

BEGIN, END = 240.0, 560.0

FAULTS = (
    Scenario(
        name="API server at its limit",
        knobs=Knobs(rate=6.0, request_s=0.02, prompt=600),
        turns={BEGIN: {"request_s": 0.163}, END: {"request_s": 0.02}},
        want=("host_contention", "unexplained_latency"),
    ),
    Scenario(
        name="tokenizer slow, callers wait",
        knobs=Knobs(callers=8, prompt=3000, request_s=0.005),
        turns={BEGIN: {"request_s": 0.8}, END: {"request_s": 0.005}},
        want=("host_contention", "unexplained_latency"),
    ),
    Scenario(
        name="detokenizer behind",
        knobs=Knobs(callers=32, prompt=500, token_s=5e-5),
        turns={BEGIN: {"token_s": 8e-4}, END: {"token_s": 5e-5}},
        want=("host_contention", "unexplained_latency"),
    ),
    Scenario(
        name="GPU clock at half",
        knobs=Knobs(rate=1.0, prompt=2000, answer=150, hit=0.0, **LARGE),
        turns={
            BEGIN: {"decode_slow": 1.3, "prefill_slow": 2.0},
            END: {"decode_slow": 1.0, "prefill_slow": 1.0},
        },
        want=SLOW,
    ),
    Scenario(
        name="NCCL stalls",
        knobs=Knobs(callers=24, **LARGE),
        turns={BEGIN: {"pause_every_s": 8.0, "pause_s": 1.5}, END: {"pause_every_s": 0.0}},
        want=SLOW,
    ),
    Scenario(
        name="no CUDA graph above 32",
        knobs=Knobs(callers=20, captured=32, uncaptured_s=0.03),
        turns={BEGIN: {"callers": 48}, END: {"callers": 20}},
        want=SLOW,
    ),
    Scenario(
        name="speculation collapses",
        knobs=Knobs(callers=12, base_s=0.02, drafts=3, accepted=3.0),
        turns={BEGIN: {"accepted": 1.1}, END: {"accepted": 3.0}},
        want=("spec_decode_poor", "unexplained_latency"),
    ),
    Scenario(
        name="adapters load in steps",
        knobs=Knobs(rate=2.0, load_share=0.02, load_s=0.5),
        turns={BEGIN: {"load_share": 0.4}, END: {"load_share": 0.02}},
        want=(*SLOW, "adapter_thrash"),
    ),
    Scenario(
        name="connector slow",
        knobs=Knobs(callers=12, hit=0.8, prompt=2000, fetch_s=0.03),
        turns={BEGIN: {"fetch_s": 2.5}, END: {"fetch_s": 0.03}},
        want=("kv_transfer_slow", "unexplained_latency"),
    ),
    Scenario(
        name="router sends giants",
        knobs=Knobs(rate=2.0, blocks=40_000),
        turns={BEGIN: {"giant_every_s": 8.0, "giant": 45_000}, END: {"giant_every_s": 0.0}},
        want=LONG,
    ),
    Scenario(
        name="release: slow prefill",
        knobs=Knobs(rate=1.0, prompt=4000, hit=0.0, answer=120),
        turns={BEGIN: {"process": 1, "down": 1, "prefill_slow": 2.5}, 270.0: {"down": 0}},
        want=SLOW,
        maybe=("target_down",),
        from_s=270.0,
        until_s=800.0,
    ),
    Scenario(
        name="small server, one caller, x1.6",
        knobs=Knobs(callers=1, answer=120, prompt=300, **SMALL),
        turns={BEGIN: {"slow": 1.6}, END: {"slow": 1.0}},
        want=SLOW,
    ),
    Scenario(
        name="creeps to x2.2",
        knobs=Knobs(callers=30, **LARGE),
        turns={BEGIN: {"slow": (1.0, 2.2, 300.0)}, 800.0: {"slow": 1.0}},
        want=SLOW,
        seen_s=210.0,
        until_s=800.0,
        lasts_s=1100.0,
    ),
    Scenario(
        name="slow prefill fills the cache",
        knobs=Knobs(rate=1.2, prompt=5000, answer=150, hit=0.0, blocks=5_000),
        turns={BEGIN: {"prefill_slow": 3.0}, END: {"prefill_slow": 1.0}},
        want=(*SLOW, "prefill_bound"),
        lasts_s=END,
    ),
    Scenario(
        name="release: 6 seats",
        knobs=Knobs(callers=20, seats=48),
        turns={BEGIN: {"process": 1, "seats": 6}},
        want=("admission_limit",),
        until_s=800.0,
    ),
    Scenario(
        name="release: small KV cache",
        knobs=Knobs(callers=24, prompt=1500, answer=300),
        turns={BEGIN: {"process": 1, "blocks": 1_500}},
        want=("kv_pressure",),
        until_s=800.0,
    ),
    Scenario(
        name="ten times the load",
        knobs=Knobs(rate=3.0, **{**LARGE, "seats": 256.0}),
        turns={BEGIN: {"rate": 30.0}, 420.0: {"rate": 3.0}},
        want=("queue_saturation", "admission_limit", "past_knee", "kv_pressure"),
        until_s=420.0,
        lasts_s=420.0,
    ),
    Scenario(
        name="hang with few callers",
        knobs=Knobs(rate=0.4, answer=300),
        turns={BEGIN: {"hang": 1}, END: {"process": 1, "hang": 0}},
        want=("engine_stalled",),
    ),
    Scenario(
        name="slow, and all give up",
        knobs=Knobs(rate=3.0, timeout_s=15.0),
        turns={BEGIN: {"slow": 7.0}, END: {"slow": 1.0}},
        want=(*SLOW, "clients_give_up"),
    ),
    Scenario(
        name="15% errors",
        knobs=Knobs(rate=3.0),
        turns={BEGIN: {"fail_share": 0.15}, END: {"fail_share": 0.0}},
        want=("requests_failing",),
    ),
    Scenario(
        name="answers ramble",
        knobs=Knobs(rate=1.5, answer_most=2048),
        turns={BEGIN: {"ramble_share": 0.35}, END: {"ramble_share": 0.0}},
        want=("runaway_generation", "workload_drift"),
    ),
    Scenario(
        name="blocks held",
        knobs=Knobs(callers=16, blocks=12_000),
        turns={BEGIN: {"held": 8_000}, END: {"held": 0}},
        want=("kv_held", "kv_leak"),
    ),
    Scenario(
        name="template breaks the prefix",
        knobs=Knobs(callers=10, prompt=6000, hit=0.9),
        turns={BEGIN: {"hit": 0.05}, END: {"hit": 0.9}},
        want=PREFIX,
    ),
)

HEALTHY = (
    Scenario(
        name="ok: prefix cache reset",
        knobs=Knobs(rate=2.0, prompt=3000, hit=0.9),
        turns={BEGIN: {"hit": (0.0, 0.9, 90.0)}},
        maybe=PREFIX,
    ),
    Scenario(
        name="ok: batch job",
        knobs=Knobs(rate=1.0, **LARGE),
        turns={BEGIN: {"callers": 24}, END: {"callers": 0}},
    ),
    Scenario(
        name="ok: ramp of a day",
        knobs=Knobs(rate=0.5),
        turns={BEGIN: {"rate": (0.5, 8.0, 500.0)}},
    ),
    Scenario(
        name="ok: restart",
        knobs=Knobs(rate=2.0),
        turns={BEGIN: {"process": 1, "down": 1}, 300.0: {"down": 0}},
        maybe=("target_down", "engine_restarted"),
    ),
    Scenario(
        name="ok: small server, 1 to 3 callers",
        knobs=Knobs(callers=1, answer=120, prompt=300, **SMALL),
        turns={BEGIN: {"callers": 3}, END: {"callers": 1}},
    ),
    Scenario(
        name="ok: longer prompts, fewer hits",
        knobs=Knobs(rate=2.0, hit=0.6, prompt=1500),
        turns={BEGIN: {"prompt": 3000, "hit": 0.45}},
    ),
    Scenario(
        name="ok: contexts of agents grow",
        knobs=Knobs(callers=6, hit=0.9, prompt=2000, answer=300, blocks=30_000),
        turns={BEGIN: {"prompt": (2000.0, 20_000.0, 400.0)}},
    ),
)
SCENARIOS = (
    *FAULTS,
    *HEALTHY,
    *THREADS,
    *COMBINED,
    *OPERATIONS,
    *FIELD_REPORTS,
    *REPORTS,
    *RARE_KINDS,
)
