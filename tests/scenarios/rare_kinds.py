"""A fifth set of threads, of kinds that are few in the others: trouble at the door, adapters that
load slowly, a single caller, pauses that come back, errors at a low rate, long prompts as the usual
load, and faults within the first minutes. What must be said of each was written down before any was
judged."""

from __future__ import annotations

from kneewatch.rules.rule import Severity
from tests.scenarios.engine import Knobs
from tests.scenarios.field_reports import HOST, QUEUE
from tests.scenarios.load import Scenario
from tests.scenarios.operations import PREFIX, RESTART
from tests.scenarios.production import RELEASED_S
from tests.scenarios.threads import LONG, SLOW, B, E

ADAPTERS = ("adapter_thrash", *SLOW)
EARLY_S = 130.0
LONG_PROMPTS = {
    "prompt": 24_000.0,
    "spread": 0.5,
    "hit": 0.0,
    "prompt_s": 1e-4,
    "budget": 8192.0,
    "blocks": 80_000.0,
}
"""Each step of a prompt takes 0.8 s, and pauses all streams so long. With 20,000 blocks, as first
written down, the cache overflows by itself."""

RARE_KINDS = (
    # Images are decoded on the event loop: 0.22 s each, at four a second.
    Scenario(
        name="vllm 34789: images on the event loop",
        knobs=Knobs(rate=4.0, prompt=1200, answer=120, request_s=0.01),
        turns={B: {"request_s": 0.24}, E: {"request_s": 0.01}},
        want=HOST,
        seen_s=120.0,
    ),
    # Prompts of 256,000 characters hold the event loop for seconds, three times a minute.
    Scenario(
        name="vllm 10635: the loop is blocked in turns",
        knobs=Knobs(rate=3.0, prompt=2000, hit=0.8, request_s=0.005),
        turns={
            at_s: turn
            for from_s in range(240, 560, 20)
            for at_s, turn in (
                (float(from_s), {"request_s": 1.5}),
                (from_s + 4.0, {"request_s": 0.005}),
            )
        },
        want=HOST,
        seen_s=120.0,
        cleared_s=200.0,  # what was left at the door is served until then
    ),
    # One caller, prompts of 90,000 tokens: minutes pass before the engine has the request.
    Scenario(
        name="vLLM-5090 8: minutes before the engine",
        knobs=Knobs(callers=1, think_s=5.0, prompt=90_000, hit=0.97, answer=300, blocks=60_000),
        turns={B: {"request_s": 150.0}},
        want=("engine_stalled", *HOST),
        seen_s=240.0,
        until_s=1200.0,
        lasts_s=1200.0,
        enough=0.5,
    ),
    # Each second of 12 calls a minute ends with 500.
    Scenario(
        name="MiniCPM 38: half of 12 a minute fail",
        knobs=Knobs(rate=0.2, prompt=540, answer=14, hit=0.04),
        turns={B: {"fail_share": 0.5}, E: {"fail_share": 0.0}},
        want=("requests_failing",),
        least=Severity.CRITICAL,
        seen_s=120.0,
    ),
    # Streams end without a reason: one of 25, at 1.5/s.
    Scenario(
        name="vllm 52852: a stream in 25 breaks off",
        knobs=Knobs(rate=1.5, prompt=4000, hit=0.8, answer=300, base_s=0.02),
        turns={B: {"fail_share": 0.04}},
        want=("requests_failing",),
        seen_s=180.0,
        until_s=1000.0,
        lasts_s=1000.0,
        enough=0.7,
    ),
    # Every request loads an adapter for 43 s, and then answers in half a second.
    Scenario(
        name="vllm 5564: 43 s for an adapter",
        knobs=Knobs(callers=1, think_s=10.0, prompt=30, answer=16, base_s=0.03, load_s=43.0),
        turns={B: {"load_share": 1.0}},
        want=("engine_stalled", *ADAPTERS),
        seen_s=180.0,
        until_s=1000.0,
        lasts_s=1000.0,
    ),
    # 1 s without an adapter, 3 s with one.
    Scenario(
        name="vllm 11092: 1 -> 3 s by an adapter",
        knobs=Knobs(callers=2, think_s=2.0, prompt=1200, answer=60, base_s=0.015, load_s=2.0),
        turns={B: {"load_share": 1.0}, E: {"load_share": 0.0}},
        want=ADAPTERS,
        seen_s=120.0,
    ),
    # The first request of an adapter takes 20 s; there are many adapters.
    Scenario(
        name="vllm 8559: first use takes 20 s",
        knobs=Knobs(rate=1.0, prompt=400, answer=150, load_s=20.0),
        turns={B: {"load_share": 0.012}},
        want=("engine_stalled", *ADAPTERS),
        seen_s=200.0,
        until_s=1000.0,
        lasts_s=1000.0,
        enough=0.7,
    ),
    # Batches of ten and more are slow in a new version: three callers, then ten.
    Scenario(
        name="vllm 9113: slow from a batch of ten",
        knobs=Knobs(callers=3, think_s=0.5, prompt=500, answer=250, captured=8, uncaptured_s=0.045),
        turns={B: {"callers": 12}, E: {"callers": 3}},
        want=SLOW,
    ),
    # One coder: after an upgrade first tokens of 20,000-token prompts come three times as late.
    Scenario(
        name="vllm 32494: upgrade, one coder, TTFT x3",
        knobs=Knobs(
            callers=1, think_s=4.0, prompt=20_000, hit=0.6, answer=250, base_s=0.018, prompt_s=2e-4
        ),
        turns={B: {"process": 1, "down": 1}, RELEASED_S: {"down": 0, "prefill_slow": 3.0}},
        want=(*SLOW, "prefill_bound"),
        maybe=RESTART,
        from_s=RELEASED_S,
        seen_s=150.0,
        until_s=900.0,
        lasts_s=900.0,
    ),
    # 16 seats, /health is 200, no token any more: two minutes after the agent was started.
    Scenario(
        name="vllm 52319: silent two minutes after",
        knobs=Knobs(rate=1.0, prompt=3000, answer=300, seats=16, base_s=0.02),
        turns={EARLY_S: {"hang": 1.0}},
        want=("engine_stalled",),
        from_s=EARLY_S,
        seen_s=60.0,
        until_s=500.0,
        lasts_s=500.0,
        least=Severity.CRITICAL,
    ),
    # Prompts of 30,000 tokens beside four streams: they stop for 7 s.
    Scenario(
        name="vllm 7537: streams stop for 7 s",
        knobs=Knobs(callers=4, prompt=1000, answer=500, base_s=0.02, prompt_s=2.5e-4),
        turns={B: {"giant_every_s": 30.0, "giant": 30_000}, E: {"giant_every_s": 0.0}},
        want=LONG,
        seen_s=120.0,
    ),
    # Two long contexts at once: 22 -> 2 tokens/s each.
    Scenario(
        name="DGX-Spark 14: two at once, 22 -> 2/s",
        knobs=Knobs(
            callers=1,
            think_s=3.0,
            prompt=60_000,
            spread=0.2,
            hit=0.95,
            answer=300,
            base_s=0.04,
            captured=1,
            uncaptured_s=0.45,
            blocks=30_000,
        ),
        turns={B: {"callers": 2}},
        want=(*SLOW, "decode_bound"),
        seen_s=120.0,
        until_s=800.0,
    ),
    # Kernels are compiled while 48 requests run: 2 s each 20 s.
    Scenario(
        name="vllm-ascend 14324: 2 s each 20 s",
        knobs=Knobs(callers=48, prompt=600, answer=300, base_s=0.02, drafts=1, accepted=1.7),
        turns={B: {"pause_every_s": 20.0, "pause_s": 2.0}, E: {"pause_every_s": 0.0}},
        want=SLOW,
        seen_s=120.0,
    ),
    # A step is frozen for 1.2 s, once for each of many short batches.
    Scenario(
        name="vllm 48229: 1.2 s each 12 s",
        knobs=Knobs(rate=2.0, prompt=500, answer=100, base_s=0.01),
        turns={B: {"pause_every_s": 12.0, "pause_s": 1.2}, E: {"pause_every_s": 0.0}},
        want=SLOW,
        seen_s=120.0,
    ),
    # Garbage is collected each minute, for 5 s and then for 30 s.
    Scenario(
        name="sglang 28067: 5 s, then 30 s each minute",
        knobs=Knobs(rate=1.5, prompt=1500, answer=250, base_s=0.015),
        turns={B: {"pause_every_s": 60.0, "pause_s": (5.0, 30.0, 700.0)}},
        want=("engine_stalled", *SLOW),
        seen_s=240.0,
        until_s=1000.0,
        lasts_s=1000.0,
        enough=0.7,
    ),
    # Videos are read in one thread, 2.2 s each: 15 a minute, then 36.
    Scenario(
        name="vllm 44404: videos wait at the door",
        knobs=Knobs(rate=0.25, prompt=18_000, hit=0.0, answer=110, prompt_s=3e-5, request_s=2.2),
        turns={B: {"rate": 0.6}},
        want=(*HOST, "queue_saturation"),
        seen_s=180.0,
        until_s=700.0,
        lasts_s=700.0,
    ),
    # A reranker of a new version takes three times as long for each document.
    Scenario(
        name="vllm 43444: reranker, upgrade, x3",
        knobs=Knobs(rate=30.0, prompt=400, hit=0.0, answer=1, answer_most=1, prompt_s=1.5e-5),
        turns={
            B: {"process": 1, "down": 1},
            RELEASED_S: {"down": 0, "prefill_slow": 4.0, "decode_slow": 4.0},
        },
        want=(*SLOW, "prefill_bound", *QUEUE),
        maybe=RESTART,
        from_s=RELEASED_S,
        seen_s=150.0,
        until_s=800.0,
    ),
    # One session grows to 12,000 tokens, and nothing of it is cached: 4 -> 36 s.
    Scenario(
        name="club-3090 102: 36 s to the first token",
        knobs=Knobs(callers=1, think_s=5.0, prompt=1200, spread=0.1, hit=0.0, prompt_s=3e-3),
        turns={B: {"prompt": (1200.0, 12_000.0, 300.0)}},
        want=("workload_drift", "prefill_bound", *LONG, *PREFIX),
        seen_s=240.0,
        until_s=900.0,
        lasts_s=900.0,
    ),
    # Long prompts are usual here; then each step takes twice as long.
    Scenario(
        name="long prompts as ever, then x2.5",
        knobs=Knobs(rate=0.15, answer=300, base_s=0.02, **LONG_PROMPTS),
        turns={B: {"slow": 2.5}, E: {"slow": 1.0}},
        want=(*SLOW, "prefill_bound"),
        seen_s=150.0,
        lasts_s=E,
    ),
    # Healthy, and looks alarming: documents of 24,000 tokens, from the first day on.
    Scenario(
        name="ok: documents of 24,000 tokens as ever",
        knobs=Knobs(rate=0.15, answer=300, base_s=0.02, **LONG_PROMPTS),
        turns={},
        lasts_s=900.0,
    ),
    # A document of 40,000 tokens each half minute beside chats, from the first day on. That they
    # pause the chats may be said: so it is of the books of the hard cases.
    Scenario(
        name="ok: a giant each half minute as ever",
        knobs=Knobs(rate=2.0, budget=16_384, blocks=40_000, giant_every_s=30.0, giant=40_000),
        turns={},
        maybe=LONG,
        lasts_s=900.0,
    ),
    # The only caller is away for some minutes.
    Scenario(
        name="ok: one caller, at lunch",
        knobs=Knobs(callers=1, think_s=2.0, prompt=4000, hit=0.8, answer=300, base_s=0.02),
        turns={B: {"think_s": 150.0}, E: {"think_s": 2.0}},
        lasts_s=1000.0,
    ),
    # Answers of one token, and each minute ten seconds with six times as many.
    Scenario(
        name="ok: bursts of classifications",
        knobs=Knobs(rate=5.0, prompt=300, hit=0.5, answer=1, answer_most=1),
        turns={
            at_s: turn
            for from_s in range(60, 780, 60)
            for at_s, turn in ((float(from_s), {"rate": 30.0}), (from_s + 10.0, {"rate": 5.0}))
        },
    ),
    # One agent whose context grows to 50,000 tokens, nearly all of it cached.
    Scenario(
        name="ok: one agent, 5,000 to 50,000 tokens",
        knobs=Knobs(
            callers=1, think_s=2.0, prompt=5000, spread=0.1, hit=0.97, answer=200, base_s=0.02
        ),
        turns={B: {"prompt": (5000.0, 50_000.0, 500.0)}},
    ),
    # Prompts six times as long, at half the rate.
    Scenario(
        name="ok: prompts x6 at half the rate",
        knobs=Knobs(rate=1.0, prompt=700, hit=0.3, answer=200),
        turns={B: {"prompt": 4200, "rate": 0.5}},
    ),
)
