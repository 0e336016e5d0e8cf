"""Faults beside a load that changes, short and partial faults, and loads that only look like
faults. What must be said of each was written down before any was judged."""

from __future__ import annotations

from tests.scenarios.engine import Knobs
from tests.scenarios.load import Scenario, Turns
from tests.scenarios.threads import SLOW, B, E

CROWDED = ("queue_saturation", "admission_limit", "past_knee", "kv_pressure")
HOST = ("host_contention", "unexplained_latency")


def _during(then: dict[str, float], after: dict[str, float]) -> Turns:
    return {B: then, E: after}


COMBINED = (
    Scenario(
        name="x1.8 while the load doubles",
        knobs=Knobs(rate=2.0),
        turns=_during({"slow": 1.8, "rate": 4.0}, {"slow": 1.0, "rate": 2.0}),
        want=SLOW,
    ),
    Scenario(
        name="creeps to x3 over 20 minutes",
        knobs=Knobs(rate=2.5),
        turns={B: {"slow": (1.0, 3.0, 1200.0)}, 1600.0: {"slow": 1.0}},
        want=SLOW,
        seen_s=700.0,
        until_s=1600.0,
        lasts_s=1900.0,
    ),
    Scenario(
        name="decode x3 while prompts double",
        knobs=Knobs(rate=1.5, prompt=1500),
        turns=_during({"decode_slow": 3.0, "prompt": 3000}, {"decode_slow": 1.0, "prompt": 1500}),
        want=SLOW,
    ),
    Scenario(
        name="closed loop of 24, x2",
        knobs=Knobs(callers=24, answer=300),
        turns=_during({"slow": 2.0}, {"slow": 1.0}),
        want=SLOW,
    ),
    Scenario(
        name="pauses of 6 s every 30 s",
        knobs=Knobs(rate=2.0),
        turns=_during(
            {"pause_every_s": 30.0, "pause_s": 6.0}, {"pause_every_s": 0.0, "pause_s": 0.0}
        ),
        want=SLOW,
    ),
    Scenario(
        name="8% errors",
        knobs=Knobs(rate=4.0),
        turns=_during({"fail_share": 0.08}, {"fail_share": 0.0}),
        want=("requests_failing", "client_errors"),
    ),
    Scenario(name="ok: the load falls to a tenth", knobs=Knobs(rate=5.0), turns={B: {"rate": 0.5}}),
    Scenario(
        name="ok: x4 within five minutes",
        knobs=Knobs(rate=1.0, blocks=60_000),
        turns={B: {"rate": (1.0, 4.0, 300.0)}},
    ),
    Scenario(
        name="drafts 2.5 -> 1.2",
        knobs=Knobs(rate=2.0, accepted=2.5, drafts=3),
        turns=_during({"accepted": 1.2}, {"accepted": 2.5}),
        want=("spec_decode_poor", "spec_acceptance_drift", "unexplained_latency"),
    ),
    Scenario(
        name="hits 0.8 -> 0.2, prompts of 6,000",
        knobs=Knobs(rate=2.0, prompt=6000, hit=0.8, blocks=60_000),
        turns=_during({"hit": 0.2}, {"hit": 0.8}),
        want=("prefix_reuse_lost", "prefix_churn", "queue_saturation"),
    ),
    Scenario(
        name="detokenizer slow for ever",
        knobs=Knobs(rate=3.0),
        turns={B: {"token_s": 0.006}},
        want=HOST,
        lasts_s=E,
    ),
    Scenario(
        name="x1.3 of what 12 seats serve",
        knobs=Knobs(rate=2.0, seats=12, base_s=0.02),
        turns={B: {"rate": 4.6}},
        want=CROWDED,
        lasts_s=E,
    ),
    Scenario(
        name="ok: one prompt of 150,000",
        knobs=Knobs(rate=2.0, blocks=60_000),
        turns={B: {"giant_every_s": 400.0, "giant": 150_000}, 300.0: {"giant_every_s": 0.0}},
    ),
    Scenario(
        name="hang of 80 s",
        knobs=Knobs(rate=2.0),
        turns={B: {"hang": 1}, B + 80.0: {"hang": 0}},
        want=("engine_stalled",),
        seen_s=40.0,
        until_s=B + 80.0,
    ),
    Scenario(
        name="x5, and clients give up after 10 s",
        knobs=Knobs(rate=2.0, seats=16, base_s=0.02, timeout_s=10.0),
        turns=_during({"rate": 10.0}, {"rate": 1.5}),
        want=(*CROWDED, "clients_give_up"),
    ),
    Scenario(
        name="connector 0.03 -> 1 s",
        knobs=Knobs(rate=2.0, hit=0.8, prompt=3000, fetch_s=0.03),
        turns=_during({"fetch_s": 1.0}, {"fetch_s": 0.03}),
        want=("kv_transfer_slow", "unexplained_latency"),
    ),
    Scenario(
        name="ok: five times as many, a fifth as long",
        knobs=Knobs(rate=1.0, prompt=4000, answer=400),
        turns=_during(
            {"rate": 5.0, "prompt": 800, "answer": 80}, {"rate": 1.0, "prompt": 4000, "answer": 400}
        ),
    ),
    Scenario(
        name="one caller, x2.5",
        knobs=Knobs(callers=1, answer=300),
        turns=_during({"slow": 2.5}, {"slow": 1.0}),
        want=SLOW,
    ),
    Scenario(
        name="prefill x4, prompts of 3,000",
        knobs=Knobs(rate=1.0, prompt=3000, hit=0.0),
        turns=_during({"prefill_slow": 4.0}, {"prefill_slow": 1.0}),
        want=SLOW,
    ),
    Scenario(
        name="more than the captured batch",
        knobs=Knobs(rate=2.5, captured=24, uncaptured_s=0.03, answer=400),
        turns=_during({"rate": 6.0}, {"rate": 2.5}),
        want=(*SLOW, *CROWDED),
    ),
    Scenario(
        name="API server 0.4 s a request",
        knobs=Knobs(rate=2.0),
        turns=_during({"request_s": 0.4}, {"request_s": 0.0}),
        want=HOST,
    ),
    Scenario(
        name="blocks held, few free",
        knobs=Knobs(rate=3.0, blocks=3000),
        turns={B: {"held": (0.0, 2600.0, 120.0)}, E: {"held": 0.0}},
        want=("kv_held", "kv_leak", "kv_pressure"),
        seen_s=180.0,
    ),
    Scenario(
        name="ok: a template makes answers x5",
        knobs=Knobs(rate=2.0, answer=150),
        turns=_during({"answer": 750}, {"answer": 150}),
    ),
    Scenario(
        name="restarted, x1.9",
        knobs=Knobs(rate=2.0, answer=300),
        turns={B: {"process": 1, "down": 1}, 290.0: {"down": 0, "slow": 1.9}},
        want=SLOW,
        maybe=("target_down", "engine_restarted"),
        from_s=290.0,
        seen_s=120.0,
        until_s=800.0,
    ),
)
