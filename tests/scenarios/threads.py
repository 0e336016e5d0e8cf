"""Threads of users whose servers were slow or hung, as loads. What must be said of each was written
down from the thread's numbers before any was judged."""

from __future__ import annotations

from kneewatch.rules.rule import Severity
from tests.scenarios.engine import Knobs
from tests.scenarios.load import Scenario

SLOW = ("slow_steps", "host_contention", "gpu_throttled", "unexplained_latency")
LONG = ("prefill_interference",)
B, E = 240.0, 560.0
H200 = {
    "base_s": 0.0155,
    "sequence_s": 2e-4,
    "prompt_s": 3e-5,
    "budget": 8192.0,
    "blocks": 60_000.0,
}
GB10 = {
    "base_s": 0.033,
    "sequence_s": 1e-3,
    "prompt_s": 4.3e-4,
    "budget": 8192.0,
    "blocks": 40_000.0,
}
THREADS = (
    # 31030: 60 -> 28 tokens/s per stream after an upgrade, 4 users
    Scenario(
        name="vllm 31030: upgrade, 60 -> 28 tokens/s",
        knobs=Knobs(rate=0.4, prompt=2000, answer=400, hit=0.5, **H200),
        turns={B: {"process": 1, "down": 1}, 300.0: {"down": 0, "decode_slow": 2.14}},
        want=SLOW,
        maybe=("target_down", "engine_restarted"),
        from_s=320.0,
        seen_s=120.0,
        until_s=800.0,
    ),
    # 51663: 40 callers, 1k prompts, 5,000 -> under 1,000 tokens/s
    Scenario(
        name="vllm 51663: upgrade, 5,000 -> 1,000 tokens/s",
        knobs=Knobs(
            callers=40,
            think_s=0.2,
            prompt=1000,
            answer=400,
            hit=0.0,
            base_s=0.005,
            sequence_s=6e-5,
            prompt_s=2e-5,
            budget=8192.0,
            blocks=60000.0,
        ),
        turns={B: {"process": 1, "down": 1}, 300.0: {"down": 0, "slow": 5.5}},
        want=SLOW,
        maybe=("target_down", "engine_restarted"),
        from_s=320.0,
        seen_s=120.0,
        until_s=800.0,
    ),
    # one client decodes, others send cold prompts: one token per 3.5 s for 110 s
    Scenario(
        name="qwen3.8-Flash-DGX 9: cold 72k prompts",
        knobs=Knobs(callers=1, think_s=2.0, prompt=800, answer=600, **GB10),
        turns={B: {"giant_every_s": 70.0, "giant": 72_000}, E: {"giant_every_s": 0.0}},
        want=LONG,
    ),
    # local-inference-lab 541: 65k prompt, 270 -> 6.6 tokens/s for 16.5 s, each minute
    Scenario(
        name="local-inference-lab 541: 65k prompts",
        knobs=Knobs(
            callers=2,
            think_s=1.0,
            prompt=4000,
            hit=0.9,
            answer=3000,
            base_s=0.0037,
            sequence_s=1e-4,
            prompt_s=1.43e-4 * 1.7,
            budget=1024.0 * 8,
            blocks=86_000.0,
        ),
        turns={B: {"giant_every_s": 50.0, "giant": 65_535}, E: {"giant_every_s": 0.0}},
        want=LONG,
    ),
    # GLM-5.3-Flash 6: 100k cold prefill in chunks of 1,024 of 1.5 s: 55 -> 5 tokens/s
    Scenario(
        name="GLM-5.3-Flash 6: cold 100k prompts",
        knobs=Knobs(
            callers=2,
            think_s=2.0,
            prompt=1500,
            hit=0.8,
            answer=1500,
            base_s=0.018,
            sequence_s=5e-4,
            prompt_s=1.45e-3,
            budget=1024.0,
            blocks=40_000.0,
        ),
        turns={B: {"giant_every_s": 160.0, "giant": 100_000}, E: {"giant_every_s": 0.0}},
        want=(*LONG, "queue_saturation"),
        lasts_s=E,
    ),
    # 4699: logprobs of the whole vocabulary: 37.8 -> 9.6 tokens/s, single caller
    Scenario(
        name="vllm 4699: all logprobs, one caller",
        knobs=Knobs(
            callers=1, think_s=1.0, prompt=300, answer=300, hit=0.0, base_s=0.0262, sequence_s=1e-4
        ),
        turns={B: {"slow": 3.9}, E: {"slow": 1.0}},
        want=SLOW,
    ),
    # 37343: n=8 with logprobs: every fifth second a 2 s pause of all
    Scenario(
        name="vllm 37594: stalls by logprobs and n=8",
        knobs=Knobs(rate=4.0, prompt=512, answer=64, hit=0.1, base_s=0.006),
        turns={B: {"pause_every_s": 20.0, "pause_s": 9.0}, E: {"pause_every_s": 0.0}},
        want=(*SLOW, "clients_give_up"),
    ),
    # 12122: grammars are compiled for 3.4 s: TTFT P50 0.6 -> 4 s
    Scenario(
        name="vllm 12122: grammars are compiled",
        knobs=Knobs(
            rate=1.0,
            prompt=3000,
            answer=300,
            hit=0.0,
            base_s=0.02,
            prompt_s=1e-4,
            fetch_s=0.01,
            budget=2048.0,
        ),
        turns={B: {"fetch_s": 3.4}, E: {"fetch_s": 0.01}},
        want=(*SLOW, "kv_transfer_slow"),
    ),
    # 2485: all-reduce suddenly slow: GPU 70% -> 20% busy
    Scenario(
        name="vllm 2485: all-reduce slows down",
        knobs=Knobs(rate=2.0, prompt=600, answer=200, base_s=0.018, sequence_s=2e-4, prompt_s=1e-4),
        turns={B: {"slow": 4.0}, 400.0: {"slow": 1.0}},
        want=SLOW,
        until_s=400.0,
        seen_s=60.0,
    ),
    # 46097: deadlock of a collective with hundreds waiting
    Scenario(
        name="vllm 46097: deadlock, all queue",
        knobs=Knobs(
            rate=2.0,
            prompt=1500,
            answer=500,
            seats=64.0,
            base_s=0.02,
            sequence_s=2e-4,
            blocks=30_000.0,
        ),
        turns={B: {"hang": 1}, E: {"process": 1, "hang": 0}},
        want=("engine_stalled",),
        lasts_s=E,
    ),
    # minefield 89: deadlock with one request in flight, KV under 1%
    Scenario(
        name="minefield 89: deadlock of one request",
        knobs=Knobs(
            callers=1, think_s=5.0, prompt=3000, hit=0.9, answer=500, blocks=100_000.0, base_s=0.03
        ),
        turns={B: {"hang": 1}, E: {"process": 1, "hang": 0}},
        want=("engine_stalled",),
        lasts_s=E,
    ),
    # 24728: videos instead of images: the host decodes frames; 132 -> 10 tokens/s
    Scenario(
        name="vllm 24728: videos",
        knobs=Knobs(
            callers=8, think_s=0.5, prompt=1500, answer=150, hit=0.0, request_s=0.05, base_s=0.0075
        ),
        turns={B: {"request_s": 1.9, "prompt": 4500}, E: {"request_s": 0.05, "prompt": 1500}},
        want=("host_contention", "unexplained_latency"),
    ),
    # 18115: 8 requests of long answers fill the cache by 0.4% each 10 s until it is full
    Scenario(
        name="vllm 18115: KV cache creeps full",
        knobs=Knobs(
            rate=0.25,
            prompt=1000,
            answer=900,
            answer_most=60000,
            spread=0.2,
            blocks=6_000.0,
            base_s=0.032,
            sequence_s=1e-4,
            seats=64,
        ),
        turns={B: {"ramble_share": 1.0}},
        want=("kv_pressure", "kv_exhaustion_ahead", "runaway_generation"),
        seen_s=260.0,
        until_s=900.0,
        lasts_s=900.0,
    ),
    # ten draft tokens of which few are accepted: 14 -> 4.5 tokens/s, from the start on
    Scenario(
        name="vllm 21278: ten draft tokens",
        knobs=Knobs(
            callers=2, prompt=600, answer=300, hit=0.0, base_s=0.22, drafts=10, accepted=1.1
        ),
        turns={},
        want=("spec_decode_poor",),
        maybe=("spec_decode_poor",),
        from_s=120.0,
        until_s=560.0,
        lasts_s=560.0,
    ),
    # 50425: aborted transfers hold blocks on the prefill side
    Scenario(
        name="vllm 50425: transfers hold blocks",
        knobs=Knobs(
            rate=1.0, prompt=8000, answer=2, hit=0.0, budget=2048.0, prompt_s=8e-5, blocks=20_000.0
        ),
        turns={B: {"held": (0.0, 19_000.0, 240.0)}, E: {"held": 0.0}},
        want=("kv_held", "kv_leak", "kv_transfer_slow"),
        seen_s=200.0,
    ),
    # LMCache 3688: each abort kills the engine: down 60 s, then 60 s of service
    Scenario(
        name="LMCache 3688: each abort is a crash",
        knobs=Knobs(rate=1.0),
        turns={
            B: {"down": 1, "process": 1},
            300.0: {"down": 0},
            360.0: {"down": 1, "process": 2},
            420.0: {"down": 0},
            480.0: {"down": 1, "process": 3},
            540.0: {"down": 0},
        },
        want=("target_down", "engine_restarted"),
        seen_s=30.0,
        until_s=560.0,
        lasts_s=560.0,
        least=Severity.INFO,
    ),
    # rtx3090 52: identical prefixes never hit: TTFT 90 s
    Scenario(
        name="qwen38-27b-rtx3090 52: no prefix hits",
        knobs=Knobs(
            callers=1,
            think_s=5.0,
            prompt=60_000,
            spread=0.1,
            hit=0.98,
            answer=300,
            base_s=0.025,
            prompt_s=1.5e-3,
            budget=2048.0,
            blocks=12_000.0,
        ),
        turns={300.0: {"hit": 0.0}, 1500.0: {"hit": 0.98}},
        want=("prefix_reuse_lost", "prefix_churn"),
        from_s=300.0,
        seen_s=240.0,
        until_s=1500.0,
        lasts_s=1500.0,
    ),
    # 54677: thinking is on by default after the upgrade: answers x6
    Scenario(
        name="vllm 54677: thinks by default",
        knobs=Knobs(rate=1.0, prompt=400, answer=120),
        turns={B: {"process": 1, "down": 1}, 300.0: {"down": 0, "answer": 1500}},
        want=("runaway_generation", "workload_drift", "usual_changed"),
        maybe=("target_down", "engine_restarted"),
        from_s=320.0,
        seen_s=180.0,
        until_s=800.0,
        least=Severity.INFO,
    ),
    # war room: a new model revision: TTFT 2 -> 14 s at a stable volume
    Scenario(
        name="k8sllm war room: TTFT 2 -> 14 s",
        knobs=Knobs(
            rate=0.25,
            prompt=12_000,
            answer=200,
            hit=0.0,
            base_s=0.02,
            prompt_s=1.5e-4,
            blocks=40_000,
        ),
        turns={
            B: {"process": 1, "down": 1},
            300.0: {"down": 0, "prefill_slow": 2.0, "decode_slow": 1.3},
        },
        want=(*SLOW, "queue_saturation"),
        maybe=("target_down", "engine_restarted"),
        from_s=320.0,
        seen_s=150.0,
        until_s=800.0,
    ),
    # 23444: the KV cache fills, waiting jumps, throughput falls
    Scenario(
        name="vllm 23444: KV cache near 100%",
        knobs=Knobs(
            callers=40, think_s=1.0, prompt=2500, answer=600, hit=0.2, blocks=16_000, seats=256
        ),
        turns={B: {"callers": 150}, E: {"callers": 40}},
        want=("kv_pressure",),
        lasts_s=E,
    ),
    # 26166: a token each 10 s since the start
    Scenario(
        name="vllm 26166: 0.1 tokens/s",
        knobs=Knobs(callers=2, prompt=300, answer=40, hit=0.0, base_s=10.0),
        turns={},
        want=(*SLOW, "decode_bound"),
        maybe=("unexplained_latency",),
        from_s=120.0,
        until_s=560.0,
        lasts_s=560.0,
    ),
    # sglang-like 16050: throughput decays by half each minute for 4 minutes
    Scenario(
        name="vllm 16050: throughput decays",
        knobs=Knobs(callers=16, prompt=2400, answer=60, hit=0.0),
        turns={B: {"slow": (1.0, 20.0, 240.0)}, E: {"slow": 1.0}},
        want=(*SLOW, "clients_give_up"),
        seen_s=120.0,
    ),
    # GLM 166, a false alarm: 4 seats on the client's side
    Scenario(
        name="ok: GLM-5.3-Flash 166: gate of the client",
        knobs=Knobs(
            callers=4,
            think_s=0.05,
            prompt=2000,
            answer=256,
            hit=0.0,
            base_s=0.1,
            prompt_s=5e-4,
            budget=1024.0,
        ),
        turns={B: {}},
    ),
    # qwen flash-next 9: 16 callers, hits 66%
    Scenario(
        name="ok: qwen38-flash-next 9: hits 66%",
        knobs=Knobs(
            callers=16,
            think_s=0.2,
            prompt=6000,
            answer=250,
            hit=0.66,
            base_s=0.15,
            prompt_s=1e-4,
            blocks=40_000,
        ),
        turns={B: {}},
    ),
    # 19254: a burst of a thousand, drained in a minute
    Scenario(
        name="ok: vllm 19254: a burst of 600",
        knobs=Knobs(
            rate=2.0,
            prompt=500,
            answer=120,
            seats=1024,
            blocks=120_000,
            prompt_s=4e-5,
            base_s=0.01,
            sequence_s=4e-5,
            budget=8192.0,
        ),
        turns={B: {"rate": 60.0}, B + 10: {"rate": 2.0}},
        maybe=("queue_saturation", "past_knee", "prefill_interference"),
    ),
)
