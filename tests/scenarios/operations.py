"""What operators of LLM servers see: faults that creep, come and go, or begin at a bad moment, and
changes that they make themselves. What must be said of each was written down before any was
judged."""

from __future__ import annotations

from kneewatch.rules.rule import Severity
from tests.scenarios.engine import Knobs
from tests.scenarios.load import Scenario, Turns
from tests.scenarios.threads import SLOW, B, E

RESTART = ("target_down", "engine_restarted")
PREFIX = ("prefix_reuse_lost", "prefix_churn")


def _spells(slow: float, lasts_s: float, every_s: float, count: int) -> Turns:
    """The engine is `slow` for `lasts_s` out of `every_s` seconds."""
    begins = [B + every_s * spell for spell in range(count)]
    return {
        **{at_s: {"slow": slow} for at_s in begins},
        **{at_s + lasts_s: {"slow": 1.0} for at_s in begins},
    }


OPERATIONS = (
    # sglang 3909: throughput falls steadily. Told at x1.6, long before it is x2.
    Scenario(
        name="sglang 3909: x2 within an hour",
        knobs=Knobs(rate=1.5, base_s=0.025),
        turns={B: {"slow": (1.0, 2.0, 3600.0)}, 3900.0: {"slow": 1.0}},
        want=SLOW,
        seen_s=2100.0,
        until_s=3900.0,
        lasts_s=4200.0,
    ),
    # A fault that comes and goes. While the engine is well, nothing need be said: half is enough.
    Scenario(
        name="60 s at x4, 60 s well",
        knobs=Knobs(rate=1.5),
        turns=_spells(4.0, 60.0, 120.0, 5),
        want=SLOW,
        seen_s=60.0,
        until_s=780.0,
        lasts_s=1100.0,
        enough=0.5,
    ),
    # qwen38-27b-rtx3090 155: kernels are compiled while the first requests wait. It ends by
    # itself, so a note is enough, but the minutes after a restart are not silent.
    Scenario(
        name="qwen38-27b-rtx3090 155: JIT at start",
        knobs=Knobs(rate=1.0),
        turns={
            B: {"process": 1, "down": 1},
            280.0: {"down": 0, "pause_every_s": 8.0, "pause_s": 6.0},
            430.0: {"pause_every_s": 0.0},
        },
        want=(*SLOW, "engine_restarted"),
        maybe=RESTART,
        from_s=280.0,
        seen_s=60.0,
        until_s=430.0,
        lasts_s=700.0,
        least=Severity.INFO,
    ),
    # kneewatch was started two minutes before.
    Scenario(
        name="x3, watched for two minutes",
        knobs=Knobs(rate=2.0),
        turns={120.0: {"slow": 3.0}, 440.0: {"slow": 1.0}},
        want=SLOW,
        from_s=120.0,
        until_s=440.0,
        lasts_s=700.0,
    ),
    # The peak is served well. Then the load is as before, and the engine is not.
    Scenario(
        name="x2.5 right after a peak",
        knobs=Knobs(rate=2.0),
        turns={B: {"rate": 6.0}, 360.0: {"rate": 2.0, "slow": 2.5}, 680.0: {"slow": 1.0}},
        want=SLOW,
        from_s=360.0,
        until_s=680.0,
        lasts_s=940.0,
    ),
    # A balancer that counts open calls takes work away from the slow replica.
    Scenario(
        name="x2 and half the callers",
        knobs=Knobs(callers=24),
        turns={B: {"slow": 2.0, "callers": 12}, E: {"slow": 1.0, "callers": 24}},
        want=SLOW,
    ),
    # The job is no fault; what begins beside it is.
    Scenario(
        name="x2.2 beside a batch job",
        knobs=Knobs(rate=1.0),
        turns={
            B: {"callers": 16},
            400.0: {"slow": 2.2},
            700.0: {"slow": 1.0},
            900.0: {"callers": 0},
        },
        want=SLOW,
        from_s=400.0,
        until_s=700.0,
        lasts_s=1050.0,
    ),
    # At night: 0.05 requests/s, of 6 s each, then of 24 s. Ten requests take 200 s, to tell the
    # fault and to tell its end.
    Scenario(
        name="x4 at a request per 20 s",
        knobs=Knobs(rate=0.05, answer=300, base_s=0.02),
        turns={600.0: {"slow": 4.0}, 1200.0: {"slow": 1.0}},
        want=SLOW,
        from_s=600.0,
        seen_s=200.0,
        until_s=1200.0,
        cleared_s=200.0,
        lasts_s=1500.0,
    ),
    # Four agents with 200,000 of 262,144 tokens, 98% of them from the prefix cache.
    Scenario(
        name="decode x2.5, contexts of 200,000",
        knobs=Knobs(callers=4, prompt=200_000, spread=0.05, hit=0.98, answer=400, blocks=80_000),
        turns={B: {"decode_slow": 2.5}, E: {"decode_slow": 1.0}},
        want=SLOW,
    ),
    # cluster 4879: a transcoder on the same node. Each spell is short: a note during some is
    # enough.
    Scenario(
        name="cluster 4879: 30 s at x6, 120 s well",
        knobs=Knobs(rate=1.0),
        turns=_spells(6.0, 30.0, 150.0, 5),
        want=SLOW,
        until_s=870.0,
        lasts_s=1150.0,
        least=Severity.INFO,
        enough=0.1,
    ),
    # vllm 44175: answers of a token have no time between tokens; all end with "length"
    Scenario(
        name="vllm 44175: classification, x2.5",
        knobs=Knobs(rate=20.0, prompt=400, hit=0.5, answer=1, answer_most=1),
        turns={B: {"slow": 2.5}, E: {"slow": 1.0}},
        want=SLOW,
    ),
    # --max-num-batched-tokens 256: a prompt takes 16 steps instead of one, and prefills fill 75%
    # of the engine's time: TTFT 0.3 -> 2 s.
    Scenario(
        name="restarted with a budget of 256",
        knobs=Knobs(rate=1.0, prompt=4000, hit=0.0, answer=150, base_s=0.03),
        turns={B: {"process": 1, "down": 1, "budget": 256.0}, 280.0: {"down": 0}},
        want=(*SLOW, "prefill_bound", "queue_saturation"),
        maybe=RESTART,
        from_s=280.0,
        seen_s=120.0,
        until_s=800.0,
    ),
    # 5 of 240 requests a minute: 20 times what a target of 99.9% allows.
    Scenario(
        name="2% errors",
        knobs=Knobs(rate=4.0),
        turns={B: {"fail_share": 0.02}, E: {"fail_share": 0.0}},
        want=("requests_failing",),
        seen_s=120.0,
    ),
    Scenario(
        name="30% errors, closed loop",
        knobs=Knobs(callers=16),
        turns={B: {"fail_share": 0.3}, E: {"fail_share": 0.0}},
        want=("requests_failing",),
        least=Severity.CRITICAL,
    ),
    # vllm 42362: each call ends with 500, and the page goes on.
    Scenario(
        name="vllm 42362: all answers are errors",
        knobs=Knobs(rate=2.0),
        turns={B: {"fail_share": 1.0}, E: {"fail_share": 0.0}},
        want=("requests_failing", "engine_died"),
        seen_s=60.0,
        least=Severity.CRITICAL,
    ),
    # The first fault ends when the second begins, which must not be put down to the first.
    Scenario(
        name="prefix lost, then decode x3",
        knobs=Knobs(rate=1.5, prompt=4000, hit=0.9),
        turns={
            B: {"hit": 0.1},
            420.0: {"hit": 0.9, "decode_slow": 3.0},
            740.0: {"decode_slow": 1.0},
        },
        want=SLOW,
        maybe=PREFIX,
        from_s=420.0,
        until_s=740.0,
        lasts_s=1000.0,
    ),
    # vllm 4158: 8 callers, 350 -> 30 tokens/s for 15 minutes, which must not become the usual
    Scenario(
        name="vllm 4158: 350 -> 30 tokens/s, 15 min",
        knobs=Knobs(callers=8, think_s=0.1, prompt=500, answer=300, base_s=0.022),
        turns={B: {"slow": 11.0}, 1140.0: {"slow": 1.0}},
        want=SLOW,
        seen_s=120.0,
        until_s=1140.0,
        lasts_s=1500.0,
    ),
    # legacy-rocm-build 6347: 33 -> 26 tokens/s until a restart. It wakes nobody: a note.
    Scenario(
        name="rocm 6347: 33 -> 26 tokens/s",
        knobs=Knobs(callers=1, prompt=500, answer=300, base_s=0.0302),
        turns={B: {"slow": 1.27}},
        want=SLOW,
        seen_s=180.0,
        until_s=900.0,
        lasts_s=900.0,
        least=Severity.INFO,
    ),
    # 50 requests pile up in each. A window of 60 s sees it in 85 of 145 s.
    Scenario(
        name="hangs of 25 s every 2 minutes",
        knobs=Knobs(rate=2.0),
        turns={B: {"pause_every_s": 120.0, "pause_s": 25.0}, 830.0: {"pause_every_s": 0.0}},
        want=(*SLOW, "engine_stalled"),
        seen_s=30.0,
        until_s=840.0,
        lasts_s=1100.0,
        enough=0.5,
    ),
    # llm-scaler 391: 1 running, 14 waiting, KV cache at 76%, 5.4 tokens/s: a second prompt of
    # 40,000 tokens has no room
    Scenario(
        name="llm-scaler 391: one prompt fits",
        knobs=Knobs(
            callers=6,
            prompt=4000,
            spread=0.1,
            hit=0.5,
            answer=300,
            base_s=0.18,
            prompt_s=1e-4,
            blocks=3400,
        ),
        turns={B: {"callers": 15, "prompt": 40_000, "hit": 0.92}},
        want=("kv_pressure", "queue_saturation"),
        lasts_s=E,
    ),
    # A stream gets 2.6 tokens per step of 11 ms instead of one per 8 ms.
    Scenario(
        name="ok: speculation switched on",
        knobs=Knobs(rate=2.0),
        turns={
            B: {"process": 1, "down": 1, "drafts": 3, "accepted": 2.6, "base_s": 0.011},
            280.0: {"down": 0},
        },
        maybe=RESTART,
    ),
    # 90 -> 62 tokens/s, as was meant: that it changed may be said, that something is broken not.
    Scenario(
        name="ok: speculation switched off",
        knobs=Knobs(rate=2.0, drafts=2, accepted=1.8, base_s=0.02),
        turns={
            B: {"process": 1, "down": 1, "drafts": 0, "accepted": 1.0, "base_s": 0.016},
            280.0: {"down": 0},
        },
        maybe=(*RESTART, "usual_changed"),
    ),
    Scenario(
        name="ok: connector 0.4 -> 0.05 s",
        knobs=Knobs(rate=2.0, hit=0.8, prompt=3000, fetch_s=0.4),
        turns={B: {"fetch_s": 0.05}},
    ),
    # Of two replicas the other restarts first, then this one.
    Scenario(
        name="ok: rolling restart",
        knobs=Knobs(rate=3.0),
        turns={
            B: {"rate": 6.0},
            340.0: {"down": 1, "process": 1},
            400.0: {"down": 0},
            420.0: {"rate": 3.0},
        },
        maybe=RESTART,
    ),
    # 20 prompts of 2,000 tokens and their answers fill 2,650 of 3,000 blocks: nobody waits.
    Scenario(
        name="ok: KV cache at 88%",
        knobs=Knobs(callers=20, think_s=0.1, prompt=2000, spread=0.15, hit=0.0, blocks=3000),
        turns={B: {}},
    ),
    Scenario(
        name="ok: callers double",
        knobs=Knobs(callers=12),
        turns={B: {"callers": 24}, E: {"callers": 12}},
    ),
    # Answers of a token, all of which end with "length".
    Scenario(
        name="ok: classification, 10 -> 25/s",
        knobs=Knobs(rate=10.0, prompt=400, hit=0.5, answer=1, answer_most=1),
        turns={B: {"rate": 25.0}, E: {"rate": 10.0}},
    ),
    # 60% busy with prefills, before and after.
    Scenario(
        name="ok: texts to embed become longer",
        knobs=Knobs(rate=40.0, prompt=250, hit=0.0, answer=1, answer_most=1),
        turns={B: {"rate": 20.0, "prompt": 500}},
    ),
    # 0.05 requests/s, none for four minutes, then the morning.
    Scenario(
        name="ok: a night with few requests",
        knobs=Knobs(rate=0.05),
        turns={400.0: {"rate": 0.0}, 640.0: {"rate": 1.0}},
        lasts_s=900.0,
        until_s=900.0,
    ),
    # Prompts end in one step instead of eight; streams wait for it, 0.25 s at most.
    Scenario(
        name="ok: budget 512 -> 8192 at a restart",
        knobs=Knobs(rate=0.8, prompt=4000, hit=0.0, budget=512.0),
        turns={B: {"process": 1, "down": 1, "budget": 8192.0}, 280.0: {"down": 0}},
        maybe=RESTART,
    ),
)
