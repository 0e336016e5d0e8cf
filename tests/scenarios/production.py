"""A fourth set of threads, of servers in production, and loads that only look alarming. What must
be said of each was written down before any was judged."""

from __future__ import annotations

from kneewatch.rules.rule import Severity
from tests.scenarios.engine import Knobs
from tests.scenarios.field_reports import HELD, HOST, QUEUE
from tests.scenarios.load import Scenario
from tests.scenarios.operations import PREFIX, RESTART
from tests.scenarios.threads import LONG, SLOW, B, E

LIMITS = ("kv_pressure", "kv_exhaustion_ahead", "queue_saturation", "past_knee")
RELEASED_S = 300.0

REPORTS = (
    # Eight prompts of 32,000 tokens fill the cache: TPOT 114 -> 440 ms, and four more wait.
    Scenario(
        name="vllm-ascend 5859: eight fill the cache",
        knobs=Knobs(
            callers=6,
            prompt=32_000,
            spread=0.05,
            hit=0.0,
            answer=1000,
            base_s=0.1,
            prompt_s=5e-5,
            blocks=16_600,
        ),
        turns={B: {"callers": 12}},
        want=LIMITS,
        seen_s=150.0,
        until_s=900.0,
        lasts_s=900.0,
    ),
    # 256 callers for 77,000 tokens of KV: 72 run, 184 wait, first tokens after a minute.
    Scenario(
        name="tandemn 11: 256 callers, 77,000 tokens",
        knobs=Knobs(callers=20, prompt=800, answer=500, seats=256, blocks=4818, base_s=0.02),
        turns={B: {"callers": 256}},
        want=LIMITS,
        lasts_s=E,
        least=Severity.CRITICAL,
    ),
    # Sustained chats, then no token for any request; the API server takes more.
    Scenario(
        name="vllm 42897: stuck in the driver",
        knobs=Knobs(rate=0.4, prompt=1500, answer=400, base_s=0.012),
        turns={B: {"hang": 1}},
        want=("engine_stalled",),
        lasts_s=E,
        least=Severity.CRITICAL,
    ),
    # 22 callers, of which 2 run with a cache at 99%, until no token comes.
    Scenario(
        name="vllm 1492: 2 run, 20 wait, nothing comes",
        knobs=Knobs(callers=22, prompt=3000, spread=0.2, answer=500, hit=0.0, blocks=480),
        turns={300.0: {"hang": 1}},
        want=("engine_stalled",),
        maybe=(*LIMITS, *LONG, "prefill_bound", "admission_limit", *SLOW),
        from_s=300.0,
        lasts_s=560.0,
        least=Severity.CRITICAL,
    ),
    # One image after the other: 5 -> 60 s each within 20 minutes.
    Scenario(
        name="vllm 13886: 5 -> 60 s each",
        knobs=Knobs(callers=1, think_s=1.0, prompt=1200, answer=100, base_s=0.045),
        turns={B: {"slow": (1.0, 12.0, 1200.0)}},
        want=SLOW,
        seen_s=300.0,
        until_s=1500.0,
        lasts_s=1500.0,
    ),
    # A KV pool beside the prefix cache: first tokens of 128,000 tokens 50% later.
    Scenario(
        name="vllm-ascend 15222: a pool costs 3 s",
        knobs=Knobs(rate=0.08, prompt=128_000, spread=0.05, hit=0.9, prompt_s=4e-4, blocks=60_000),
        turns={B: {"process": 1, "down": 1}, RELEASED_S: {"down": 0, "fetch_s": 3.0}},
        want=("kv_transfer_slow", *SLOW, "prefill_bound"),
        maybe=RESTART,
        from_s=RELEASED_S,
        seen_s=200.0,
        until_s=900.0,
        lasts_s=900.0,
        least=Severity.INFO,
        enough=0.5,
    ),
    # Prompts of 6,000 tokens, answers of two: the queue grows, 20 run, the cache is at 32%.
    Scenario(
        name="llm-d-autoscaling 662: 8/s of 6,000",
        knobs=Knobs(
            rate=4.0,
            prompt=6000,
            hit=0.0,
            answer=2,
            prompt_s=2.4e-5,
            budget=65_536.0,
            blocks=24_000,
            seats=256,
        ),
        turns={B: {"rate": 8.0}},
        want=("queue_saturation", "past_knee", "prefill_bound"),
        seen_s=150.0,
        until_s=900.0,
        lasts_s=900.0,
    ),
    # Another engine version: 2,200 -> 1,100 tokens/s for the same batch.
    Scenario(
        name="vllm 21029: 2,200 -> 1,100 tokens/s",
        knobs=Knobs(callers=64, think_s=0.5, prompt=300, answer=300, base_s=0.021, seats=128),
        turns={B: {"process": 1, "down": 1}, RELEASED_S: {"down": 0, "slow": 2.0}},
        want=SLOW,
        maybe=RESTART,
        from_s=RELEASED_S,
        seen_s=120.0,
        until_s=800.0,
    ),
    # Drafts are accepted less and less, until a restart.
    Scenario(
        name="vllm 11188: acceptance decays",
        knobs=Knobs(callers=6, answer=300, base_s=0.025, drafts=5, accepted=3.6),
        turns={B: {"accepted": (3.6, 1.5, 900.0)}},
        want=("spec_decode_poor", *SLOW),
        seen_s=900.0,
        until_s=1500.0,
        lasts_s=1500.0,
        least=Severity.INFO,
    ),
    # Restarted with another limit: 30 -> 17 tokens/s for one stream.
    Scenario(
        name="cognithor 322: 30 -> 17 tokens/s",
        knobs=Knobs(callers=1, think_s=2.0, prompt=2000, answer=400, base_s=0.033),
        turns={B: {"process": 1, "down": 1}, RELEASED_S: {"down": 0, "slow": 1.77}},
        want=SLOW,
        maybe=RESTART,
        from_s=RELEASED_S,
        seen_s=150.0,
        until_s=800.0,
    ),
    # Intents of 600 tokens in, 7 out: 1.6 requests/s and no more, with 20 callers.
    Scenario(
        name="vllm 9722: 1.6 requests/s",
        knobs=Knobs(callers=1, prompt=600, hit=0.0, answer=7, base_s=0.02, prompt_s=1e-3),
        turns={B: {"callers": 20}, E: {"callers": 1}},
        want=("prefill_bound", *LONG, *QUEUE),
    ),
    # 40 voices in real time: of the same load most are late some hours later.
    Scenario(
        name="vllm 32320: 40 voices, most late",
        knobs=Knobs(callers=40, think_s=0.3, prompt=200, answer=600, base_s=0.008, seats=50),
        turns={B: {"slow": 1.7}, E: {"slow": 1.0}},
        want=SLOW,
    ),
    # Half of the throughput while an adapter is used.
    Scenario(
        name="vllm 10062: an adapter, half the tokens",
        knobs=Knobs(rate=4.0, prompt=250, answer=220, base_s=0.018),
        turns={B: {"decode_slow": 1.9, "prefill_slow": 1.5}, E: {"decode_slow": 1.0}},
        want=SLOW,
        lasts_s=E,
    ),
    # One thread reads the text of prompts: 0.25 s each, at 4.5/s.
    Scenario(
        name="vllm 25301: one thread for prompts",
        knobs=Knobs(rate=3.0, prompt=30_000, hit=0.9, prompt_s=2e-5, request_s=0.25, blocks=60_000),
        turns={B: {"rate": 4.5}},
        want=HOST,
        seen_s=120.0,
        lasts_s=E,
    ),
    # Texts are embedded: a core is at its limit, the GPU is not.
    Scenario(
        name="vllm 11320: embeddings, one core",
        knobs=Knobs(
            rate=50.0, prompt=250, hit=0.0, answer=1, answer_most=1, prompt_s=1e-5, request_s=0.01
        ),
        turns={B: {"rate": 115.0}},
        want=(*HOST, "queue_saturation"),
        seen_s=120.0,
        lasts_s=E,
    ),
    # Prompts of 16,000 tokens at 7,900 tokens/s: nine run, more wait.
    Scenario(
        name="vllm 14333: 16,000 tokens, 16 seats",
        knobs=Knobs(
            rate=0.25, prompt=16_000, hit=0.0, answer=256, prompt_s=1.25e-4, base_s=0.03, seats=16
        ),
        turns={B: {"rate": 0.7}},
        want=(*QUEUE, *LONG, "prefill_bound"),
        seen_s=150.0,
        until_s=800.0,
    ),
    # Two prompts of 14,000 tokens fill the cache; there are 20 seats.
    Scenario(
        name="vllm 14412: two fill the cache",
        knobs=Knobs(
            callers=2, prompt=14_000, spread=0.1, hit=0.0, answer=600, base_s=0.03, blocks=2000
        ),
        turns={B: {"callers": 6}},
        want=LIMITS,
        seen_s=120.0,
        lasts_s=E,
    ),
    # A client cuts after 20 s what takes 30 s.
    Scenario(
        name="vllm 2484: half is cut",
        knobs=Knobs(callers=20, answer=600, base_s=0.045),
        turns={B: {"timeout_s": 20.0}, E: {"timeout_s": 1e9}},
        want=("clients_give_up",),
        seen_s=120.0,
    ),
    # A tenth of 18 requests a minute ends with 500.
    Scenario(
        name="vllm 40856: some images fail",
        knobs=Knobs(rate=0.3, prompt=1500),
        turns={B: {"fail_share": 0.15}},
        want=("requests_failing",),
        seen_s=240.0,
        until_s=1000.0,
        lasts_s=1000.0,
        enough=0.7,
    ),
    # Some answers run to the cap of 16,384 tokens and keep the four seats.
    Scenario(
        name="vllm 32262: old requests keep the seats",
        knobs=Knobs(rate=0.3, answer=300, base_s=0.012, seats=4, answer_most=16_384),
        turns={B: {"ramble_share": 0.25}},
        want=("runaway_generation", "workload_drift", *QUEUE),
        seen_s=200.0,
        until_s=900.0,
        lasts_s=900.0,
    ),
    # Six callers; the thread that takes requests is stuck, and the page looks idle.
    Scenario(
        name="vllm 47958: none reaches the engine",
        knobs=Knobs(callers=6, prompt=3000, answer=150, base_s=0.015),
        turns={B: {"request_s": 1e6}},
        want=("engine_stalled", *HOST),
        lasts_s=E,
    ),
    # Short requests behind prompts of 30,000 tokens: first tokens 0.04 -> 11 s.
    Scenario(
        name="vllm 37308: 11 s on a healthy server",
        knobs=Knobs(rate=2.0, prompt=200, answer=60, base_s=0.006, prompt_s=3.5e-4),
        turns={B: {"giant_every_s": 25.0, "giant": 30_000}, E: {"giant_every_s": 0.0}},
        want=(*LONG, "prefill_bound"),
        seen_s=120.0,
    ),
    # Of three tenants one puts the time into its prompts' head.
    Scenario(
        name="nexus: a third of the prefixes is lost",
        knobs=Knobs(rate=6.0, prompt=4000, spread=0.1, hit=0.94, answer=100),
        turns={B: {"hit_share": 0.67}, E: {"hit_share": 1.0}},
        want=PREFIX,
        seen_s=120.0,
        least=Severity.INFO,
    ),
    # Aborted loads leave blocks behind.
    Scenario(
        name="vllm 44100: aborted loads keep blocks",
        knobs=Knobs(rate=0.5),
        turns={B: {"held": (0.0, 17_000.0, 1500.0)}},
        want=(*HELD, "kv_exhaustion_ahead"),
        seen_s=700.0,
        until_s=1700.0,
        lasts_s=1700.0,
        least=Severity.INFO,
    ),
    # A new version turns tokens to text at 0.7 ms each, for 32 streams.
    Scenario(
        name="vllm 5206: upgrade, slow text",
        knobs=Knobs(callers=32, think_s=0.5, answer=400, token_s=1e-5),
        turns={B: {"process": 1, "down": 1}, RELEASED_S: {"down": 0, "token_s": 9e-4}},
        want=(*HOST, "slow_steps"),
        maybe=RESTART,
        from_s=RELEASED_S,
        seen_s=150.0,
        until_s=800.0,
    ),
    # 20 prompts of 24,000 tokens within 5 s, every two minutes: 22 s for a short one.
    Scenario(
        name="sglang 22831: bursts of 24,000 tokens",
        knobs=Knobs(rate=1.0, prompt=2000, answer=60, prompt_s=5e-5, blocks=60_000),
        turns={
            from_s: turn
            for at_s in (240.0, 360.0, 480.0, 600.0)
            for from_s, turn in (
                (at_s, {"giant_every_s": 0.01, "giant": 24_000}),
                (at_s + 5.0, {"giant_every_s": 0.0}),
            )
        },
        want=(*LONG, "prefill_bound", "queue_saturation"),
        seen_s=30.0,
        until_s=660.0,
        lasts_s=660.0,
        enough=0.3,
    ),
    # Restarted with drafts: 2.5 of five are accepted, and a step takes six times as long.
    Scenario(
        name="sglang 4759: drafts, 68 wait",
        knobs=Knobs(callers=100, prompt=130, answer=250, seats=128, base_s=0.02),
        turns={
            B: {"process": 1, "down": 1, "drafts": 4, "accepted": 2.5, "seats": 32},
            RELEASED_S: {"down": 0, "base_s": 0.14},
        },
        want=("spec_decode_poor", *SLOW, *QUEUE),
        maybe=RESTART,
        from_s=RELEASED_S,
        seen_s=120.0,
        until_s=800.0,
    ),
    # The decode servers are full: the prefill server keeps its blocks, and first tokens wait.
    Scenario(
        name="sglang 8816: decode full, prefill waits",
        knobs=Knobs(rate=10.0, prompt=1000, spread=0.1, hit=0.0, answer=1, answer_most=1),
        turns={B: {"held": (0.0, 19_900.0, 60.0)}, E: {"held": 0.0}},
        want=HELD,
    ),
    # 330 callers: first tokens 2 -> 47 s when only 110 run.
    Scenario(
        name="sglang 8285: 330 callers, 110 run",
        knobs=Knobs(
            callers=330,
            think_s=0.1,
            prompt=1024,
            answer=1024,
            spread=0.1,
            base_s=0.012,
            sequence_s=3e-5,
            prompt_s=2e-5,
            seats=512,
            blocks=60_000,
        ),
        turns={B: {"seats": 110.0}},
        want=QUEUE,
        lasts_s=E,
    ),
    # Healthy, and looks alarming: twelve voices instead of one, 5.8 -> 17.2 s each.
    Scenario(
        name="ok: orpheus 5: 1 to 12 voices",
        knobs=Knobs(callers=1, prompt=100, answer=700, base_s=0.007, sequence_s=1.4e-3),
        turns={B: {"callers": 12}, E: {"callers": 1}},
    ),
    # An autoscaler adds replicas and takes them away.
    Scenario(
        name="ok: replicas come and go",
        knobs=Knobs(rate=3.0),
        turns={B: {"rate": 6.0}, 340.0: {"rate": 3.0}, 480.0: {"rate": 1.5}, 620.0: {"rate": 5.0}},
    ),
    # A night without a request, and the morning at once.
    Scenario(
        name="ok: five silent minutes, then 4/s",
        knobs=Knobs(rate=2.0),
        turns={B: {"rate": 0.0}, 540.0: {"rate": 4.0}},
        lasts_s=900.0,
    ),
    # A new prompt template: three times as long, mostly shared; shorter answers.
    Scenario(
        name="ok: a new template",
        knobs=Knobs(rate=3.0),
        turns={B: {"prompt": 2400, "hit": 0.75, "answer": 120}},
    ),
    # A release: the first minute is slow, the prefix cache is cold, the load is as before.
    Scenario(
        name="ok: warm after a release",
        knobs=Knobs(rate=1.0, prompt=3000, hit=0.8),
        turns={
            B: {"process": 1, "down": 1},
            RELEASED_S: {"down": 0, "slow": 1.8, "hit": (0.0, 0.8, 120.0)},
            350.0: {"slow": 1.0},
        },
        maybe=(*RESTART, *PREFIX),
    ),
    # A canary: 5%, 25%, then all of the traffic.
    Scenario(
        name="ok: a canary takes over",
        knobs=Knobs(rate=0.2),
        turns={B: {"rate": 1.0}, 400.0: {"rate": 4.0}},
    ),
    # Documents are classified at night.
    Scenario(
        name="ok: a batch of 30 texts/s",
        knobs=Knobs(rate=2.0, prompt=300, hit=0.0, answer=4),
        turns={B: {"rate": 30.0}, E: {"rate": 2.0}},
    ),
    # Agents' contexts grow to 60,000 tokens, nearly all of them cached.
    Scenario(
        name="ok: contexts of 4,000 to 60,000",
        knobs=Knobs(callers=8, prompt=4000, spread=0.2, hit=0.95, answer=250, blocks=60_000),
        turns={B: {"prompt": (4000.0, 60_000.0, 400.0)}},
    ),
    # Other texts: 2.6 -> 2.2 tokens a step.
    Scenario(
        name="ok: drafts of other texts",
        knobs=Knobs(rate=2.0, drafts=3, accepted=2.6, base_s=0.012),
        turns={B: {"accepted": 2.2}},
    ),
)
