"""A third set of threads, of kinds that the other sets lack, and loads that only look alarming.
What must be said of each was written down before any was judged."""

from __future__ import annotations

from kneewatch.rules.rule import Severity
from tests.scenarios.engine import Knobs
from tests.scenarios.load import Scenario
from tests.scenarios.operations import PREFIX, RESTART
from tests.scenarios.threads import LONG, SLOW, B, E

QUEUE = ("queue_saturation", "admission_limit", "past_knee")
HOST = ("host_contention", "unexplained_latency")
HELD = ("kv_held", "kv_leak", "kv_transfer_slow")
FIELD_REPORTS = (
    # 4 requests freeze for 81 s, with normal steps before and after; it comes back each 320 s,
    # and is over when it does not.
    Scenario(
        name="vllm 57429: freezes of 81 s",
        knobs=Knobs(callers=4, think_s=0.2, prompt=1024, hit=0.0, answer=240, base_s=0.029),
        turns={
            B: {"hang": 1},
            321.0: {"hang": 0},
            560.0: {"hang": 1},
            641.0: {"hang": 0},
            880.0: {"hang": 1},
            961.0: {"hang": 0},
        },
        want=("engine_stalled", *SLOW),
        seen_s=30.0,
        until_s=961.0,
        cleared_s=300.0,
        lasts_s=1400.0,
        enough=0.2,
    ),
    # 35 run, 115 wait, the cache is at 99%; then no token comes out.
    Scenario(
        name="vllm 2731: stuck with a full cache",
        knobs=Knobs(callers=150, prompt=2500, answer=600, hit=0.2, blocks=8000, seats=256),
        turns={400.0: {"hang": 1}},
        want=("engine_stalled",),
        maybe=("kv_pressure", *QUEUE, *LONG, "prefill_bound", "decode_bound"),
        from_s=400.0,
        until_s=700.0,
        lasts_s=700.0,
        least=Severity.CRITICAL,
    ),
    # 0.2 -> 10 s a request, after tens of thousands of them.
    Scenario(
        name="sglang 5784: 0.2 -> 10 s",
        knobs=Knobs(callers=8, think_s=0.5, prompt=200, answer=30, hit=0.0, base_s=0.006),
        turns={B: {"slow": 50.0}, E: {"slow": 1.0}},
        want=SLOW,
        least=Severity.CRITICAL,
    ),
    # The cache was full for two minutes; afterwards decoding is 14 times as slow.
    Scenario(
        name="sglang 26248: x14 after retractions",
        knobs=Knobs(callers=40, prompt=2500, answer=600, hit=0.2, blocks=16_000, seats=256),
        turns={
            B: {"callers": 120},
            360.0: {"callers": 40, "decode_slow": 14.0},
            900.0: {"decode_slow": 1.0},
        },
        want=SLOW,
        maybe=("kv_pressure", "kv_exhaustion_ahead", *QUEUE),
        from_s=360.0,
        seen_s=150.0,
        until_s=900.0,
        lasts_s=1200.0,
    ),
    # Short requests wait until a prompt of 128,000 tokens is read, for 26 s.
    Scenario(
        name="sglang 8211: behind 128,000 tokens",
        knobs=Knobs(rate=1.0, prompt=500, prompt_s=2e-4, budget=8192.0, blocks=40_000),
        turns={B: {"giant_every_s": 90.0, "giant": 128_000}, E: {"giant_every_s": 0.0}},
        want=(*LONG, "prefill_bound"),
        seen_s=120.0,
        enough=0.5,
    ),
    # One request decodes, and no prefill begins while others queue.
    Scenario(
        name="sglang 14400: one runs, others wait",
        knobs=Knobs(rate=1.0, answer=300, base_s=0.012),
        turns={B: {"seats": 1.0}, E: {"seats": 64.0}},
        want=(*QUEUE, *SLOW),
        lasts_s=E,
    ),
    # 16 adapters for 8 slots: first tokens 40 ms -> 6 s.
    Scenario(
        name="sglang 13349: 16 adapters, 8 slots",
        knobs=Knobs(rate=2.0, prompt=1000),
        turns={B: {"load_share": 0.5, "load_s": 0.85}, E: {"load_share": 0.0}},
        want=(*SLOW, "adapter_thrash", "queue_saturation"),
    ),
    # 10 callers whose answers follow a schema: 20 -> 160 ms a token.
    Scenario(
        name="vllm 3567: JSON for 10 callers",
        knobs=Knobs(callers=10, prompt=512, answer=150, base_s=0.019),
        turns={B: {"decode_slow": 8.0}, E: {"decode_slow": 1.0}},
        want=SLOW,
    ),
    # 72 callers with four page images each: few run, none wait, first tokens after 30 s.
    Scenario(
        name="vllm 44688: images of 72 callers",
        knobs=Knobs(callers=72, think_s=8.0, prompt=1500, seats=256, request_s=0.01),
        turns={B: {"request_s": 0.5, "prompt": 6000}, E: {"request_s": 0.01, "prompt": 1500}},
        want=HOST,
    ),
    # Drafts on a slow link: 93% accepted, and 61 -> 44 tokens/s.
    Scenario(
        name="vllm 44697: drafts cost 25 ms",
        knobs=Knobs(callers=1, prompt=500, answer=300, base_s=0.0163),
        turns={
            B: {"process": 1, "down": 1, "drafts": 2, "accepted": 1.8, "base_s": 0.0412},
            300.0: {"down": 0},
        },
        want=("spec_decode_poor", *SLOW),
        maybe=RESTART,
        from_s=320.0,
        seen_s=150.0,
        until_s=800.0,
        least=Severity.INFO,
    ),
    # Prompts of 64,000 tokens: after some rounds no draft is accepted.
    Scenario(
        name="vllm-ascend 10495: acceptance 0",
        knobs=Knobs(
            callers=2,
            prompt=64_000,
            spread=0.05,
            hit=0.98,
            answer=300,
            base_s=0.025,
            drafts=3,
            accepted=2.8,
            blocks=40_000,
        ),
        turns={B: {"accepted": 1.0}, E: {"accepted": 2.8}},
        want=("spec_decode_poor",),
    ),
    # Requests that are too long leave blocks behind, until a restart.
    Scenario(
        name="vllm 27073: blocks held in steps",
        knobs=Knobs(rate=1.0),
        turns={
            B: {"held": 4000.0},
            400.0: {"held": 8000.0},
            560.0: {"held": 12_000.0},
            720.0: {"held": 16_000.0},
            880.0: {"held": 19_000.0},
        },
        want=(*HELD, "kv_exhaustion_ahead"),
        seen_s=480.0,
        until_s=1100.0,
        lasts_s=1100.0,
        least=Severity.INFO,
    ),
    # One caller's answers run to the cap of 32,768 tokens, for three minutes each.
    Scenario(
        name="vllm 30599: thinks to the cap",
        knobs=Knobs(
            callers=1, think_s=5.0, prompt=800, answer=500, answer_most=32_768, base_s=0.0055
        ),
        turns={B: {"ramble_share": 1.0}},
        want=("runaway_generation", "workload_drift", "usual_changed"),
        seen_s=300.0,
        until_s=1200.0,
        lasts_s=1200.0,
        least=Severity.INFO,
    ),
    # Translations of 60 tokens; 3 of 100 never end, and fill three quarters of the cache.
    Scenario(
        name="Qwen3 513: some translations never end",
        knobs=Knobs(rate=8.0, prompt=200, answer=60, hit=0.2, answer_most=8192),
        turns={B: {"ramble_share": 0.03}, 700.0: {"ramble_share": 0.0}},
        want=("runaway_generation", "workload_drift", "kv_exhaustion_ahead"),
        seen_s=180.0,
        until_s=700.0,
        lasts_s=700.0,
        least=Severity.INFO,
    ),
    # A new version reads large prompts slower: 2 -> 3.2 s each, at a request per 5 s.
    Scenario(
        name="vllm 35048: upgrade, prefill x1.6",
        knobs=Knobs(rate=0.2, prompt=20_000, hit=0.0, prompt_s=1e-4, base_s=0.015, blocks=40_000),
        turns={B: {"process": 1, "down": 1}, 300.0: {"down": 0, "prefill_slow": 1.6}},
        want=(*SLOW, "prefill_bound", "queue_saturation"),
        maybe=RESTART,
        from_s=320.0,
        seen_s=150.0,
        until_s=800.0,
        least=Severity.INFO,
    ),
    # A prompt of 12,000 tokens in one step stops all streams for 9 s.
    Scenario(
        name="vllm 1026: 9 s for a prompt",
        knobs=Knobs(
            callers=3, prompt=400, answer=300, base_s=0.03, prompt_s=7.5e-4, budget=16_384.0
        ),
        turns={B: {"giant_every_s": 60.0, "giant": 12_000}, E: {"giant_every_s": 0.0}},
        want=(*LONG, "prefill_bound"),
        seen_s=120.0,
        enough=0.5,
    ),
    # A proxy cuts answers after a minute, and the client asks again.
    Scenario(
        name="vllm 20520: cut and asked again",
        knobs=Knobs(
            callers=24, think_s=0.5, answer=300, base_s=0.03, sequence_s=5e-4, timeout_s=60.0
        ),
        turns={B: {"answer": 1500}, E: {"answer": 300}},
        want=("clients_give_up", "runaway_generation", "workload_drift"),
        seen_s=120.0,
    ),
    # 400 callers for 64 seats: 336 wait for 70 s.
    Scenario(
        name="vllm 16391: many pending",
        knobs=Knobs(callers=20, prompt=500, answer=300, base_s=0.02, sequence_s=4e-4),
        turns={B: {"callers": 400}, E: {"callers": 20}},
        want=QUEUE,
        lasts_s=E,
        least=Severity.CRITICAL,
    ),
    # None runs, six wait, the cache is empty, for nine minutes.
    Scenario(
        name="vllm 45414: none runs, six wait",
        knobs=Knobs(callers=6, think_s=2.0, answer=300, base_s=0.02),
        turns={B: {"seats": 0.0}, 780.0: {"seats": 64.0}},
        want=("engine_stalled",),
        until_s=780.0,
        lasts_s=1000.0,
        least=Severity.CRITICAL,
    ),
    # Fetching from Redis takes longer than to compute: first tokens 8 -> 20 s.
    Scenario(
        name="LMCache 914: 12 s from Redis",
        knobs=Knobs(rate=0.3, prompt=12_000, hit=0.9, base_s=0.02, fetch_s=0.3),
        turns={B: {"fetch_s": 12.5}, E: {"fetch_s": 0.3}},
        want=("kv_transfer_slow", *SLOW),
    ),
    # A decode server died: the prefill side keeps its blocks for 480 s. Nobody waits yet: a note.
    Scenario(
        name="llm-d 1138: blocks held for 480 s",
        knobs=Knobs(rate=1.5, prompt=3000, answer=2, hit=0.0),
        turns={B: {"held": (0.0, 19_650.0, 100.0)}, 820.0: {"held": 0.0}},
        want=HELD,
        seen_s=150.0,
        until_s=820.0,
        lasts_s=1050.0,
        least=Severity.INFO,
    ),
    # 32 evaluations get 73 tokens/s together and are cut after 200 s, from the start on: all at the
    # same moment, so that a window of 60 s sees it for half of the time.
    Scenario(
        name="tt-inference-server 350: cut at 200 s",
        knobs=Knobs(callers=32, prompt=300, answer=500, base_s=0.4, timeout_s=200.0),
        turns={},
        want=("clients_give_up",),
        maybe=("clients_give_up", "decode_bound", *SLOW),
        from_s=320.0,
        until_s=800.0,
        lasts_s=800.0,
        enough=0.5,
    ),
    # The API server takes requests and none reaches the engine.
    Scenario(
        name="sglang 33858: lost before the engine",
        knobs=Knobs(rate=2.0),
        turns={B: {"request_s": 1e6}},
        want=("engine_stalled", *HOST),
        lasts_s=E,
        least=Severity.CRITICAL,
    ),
    # Texts are embedded, until a full batch locks the scheduler.
    Scenario(
        name="sglang 22518: embeddings, deadlock",
        knobs=Knobs(rate=20.0, prompt=250, hit=0.0, answer=1, answer_most=1),
        turns={B: {"hang": 1}, E: {"hang": 0, "process": 1}},
        want=("engine_stalled",),
        lasts_s=E,
        least=Severity.CRITICAL,
    ),
    # Three of four seats are used: the fourth caller waits for the end of an answer.
    Scenario(
        name="sglang 35537: the fourth waits",
        knobs=Knobs(callers=4, think_s=0.2, prompt=2000, answer=300, base_s=0.03),
        turns={B: {"seats": 3.0}, E: {"seats": 64.0}},
        want=(*QUEUE, *SLOW),
        seen_s=120.0,
        least=Severity.INFO,
    ),
    # Prompts of 4,000 tokens, answers of one: 40 ms -> 1 s after an upgrade with data parallelism.
    Scenario(
        name="sglang 5962: upgrade, 40 ms -> 1 s",
        knobs=Knobs(
            rate=4.0, prompt=4000, hit=0.0, answer=1, answer_most=1, prompt_s=7e-6, budget=65_536.0
        ),
        turns={B: {"process": 1, "down": 1}, 300.0: {"down": 0, "base_s": 1.0}},
        want=(*SLOW, "prefill_bound", "queue_saturation"),
        maybe=RESTART,
        from_s=320.0,
        seen_s=120.0,
        until_s=800.0,
    ),
    # 20 streams are turned to text in one thread, 1.2 ms a token: 2,000 -> 830 tokens/s.
    Scenario(
        name="vllm 57350: text of 20 streams",
        knobs=Knobs(callers=20, answer=800, token_s=1e-5),
        turns={B: {"token_s": 1.2e-3}, E: {"token_s": 1e-5}},
        want=(*HOST, "slow_steps"),
    ),
    # Half of the requests come from a client with a new head: 600 -> 3,300 computed tokens.
    Scenario(
        name="half of the prefixes lost",
        knobs=Knobs(rate=1.5, prompt=6000, hit=0.9),
        turns={B: {"hit_share": 0.5}, E: {"hit_share": 1.0}},
        want=PREFIX,
        seen_s=120.0,
    ),
    # Graphs are captured again and again: 1.5 s in each 7 s.
    Scenario(
        name="pauses of 1.5 s every 5 s",
        knobs=Knobs(rate=2.0),
        turns={B: {"pause_every_s": 5.0, "pause_s": 1.5}, E: {"pause_every_s": 0.0}},
        want=SLOW,
    ),
    # A collective waits 0.6 s in each 3.6 s: streams stutter.
    Scenario(
        name="waits of 0.6 s every 3 s",
        knobs=Knobs(rate=2.0, base_s=0.02),
        turns={B: {"pause_every_s": 3.0, "pause_s": 0.6}, E: {"pause_every_s": 0.0}},
        want=SLOW,
        least=Severity.INFO,
    ),
    # Heat: x1.8 within ten minutes, then it stays.
    Scenario(
        name="heat: x1.8 within ten minutes",
        knobs=Knobs(callers=12, think_s=0.5, base_s=0.02),
        turns={B: {"slow": (1.0, 1.8, 600.0)}, 1500.0: {"slow": 1.0}},
        want=SLOW,
        seen_s=600.0,
        until_s=1500.0,
        lasts_s=1800.0,
    ),
    # Healthy, and looks alarming: TPOT 15 -> 81 ms with 64 times the callers.
    Scenario(
        name="ok: vllm-ascend 13045: 1 to 64 callers",
        knobs=Knobs(callers=1, think_s=0.5, answer=150, base_s=0.014, sequence_s=1.05e-3),
        turns={B: {"callers": (1.0, 64.0, 400.0)}},
    ),
    # 13 videos a minute, each 1.5 s in the API server, since the start.
    Scenario(
        name="ok: vllm 21873: 13 videos a minute",
        knobs=Knobs(rate=0.22, prompt=4000, hit=0.0, answer=40, request_s=1.5),
        turns={B: {}},
    ),
    # One caller's answers of 20,000 tokens, since the start.
    Scenario(
        name="ok: vllm 31353: answers of 20,000",
        knobs=Knobs(callers=1, think_s=3.0, answer=20_000, answer_most=60_000, spread=0.2),
        turns={B: {}},
    ),
    # A day of documents: prompts x30, most of them cached.
    Scenario(
        name="ok: prompts of 60,000 for a while",
        knobs=Knobs(rate=0.3, prompt=2000, hit=0.5, blocks=60_000),
        turns={B: {"prompt": 60_000, "hit": 0.9}, E: {"prompt": 2000, "hit": 0.5}},
    ),
    # A cron job: 40 requests within 2 s, each three minutes.
    Scenario(
        name="ok: 40 requests every 3 minutes",
        knobs=Knobs(rate=1.0),
        turns={
            60.0: {"rate": 20.0},
            62.0: {"rate": 1.0},
            240.0: {"rate": 20.0},
            242.0: {"rate": 1.0},
            420.0: {"rate": 20.0},
            422.0: {"rate": 1.0},
            600.0: {"rate": 20.0},
            602.0: {"rate": 1.0},
        },
    ),
    # What waited during an outage comes within the first minute of the process.
    Scenario(
        name="ok: a backlog at the start",
        knobs=Knobs(rate=8.0),
        turns={60.0: {"rate": 1.0}},
    ),
    # Tool calls: short turns on long contexts, twice as many.
    Scenario(
        name="ok: tool calls double",
        knobs=Knobs(rate=4.0, prompt=30_000, spread=0.2, hit=0.98, answer=40, blocks=60_000),
        turns={B: {"rate": 8.0}, E: {"rate": 4.0}},
    ),
    # A canary takes all but 1% away, and gives it back.
    Scenario(
        name="ok: 1% of the traffic for a while",
        knobs=Knobs(rate=4.0),
        turns={B: {"rate": 0.04}, E: {"rate": 4.0}},
    ),
    # The first request after a restart tunes kernels for 31 s.
    Scenario(
        name="ok: vllm 39822: tuned for 31 s",
        knobs=Knobs(rate=1.0),
        turns={
            B: {"process": 1, "down": 1},
            280.0: {"down": 0, "hang": 1},
            311.0: {"hang": 0},
        },
        maybe=(*RESTART, "engine_stalled", "queue_saturation"),
    ),
    # All callers go to lunch.
    Scenario(
        name="ok: 30 callers, 2, and 30 again",
        knobs=Knobs(callers=30, think_s=10.0),
        turns={B: {"callers": 2}, E: {"callers": 30}},
    ),
)
