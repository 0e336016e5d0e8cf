"""Causes of memory that is never released: KV blocks and host memory. Pure."""

from __future__ import annotations

from kneewatch.diagnose.account_signals import KV_UNACCOUNTED, PROMPTS
from kneewatch.diagnose.causes.common_conditions import (
    ARRIVALS,
    BATCH,
    DEFERRED_GROWS,
    EXPIRED_PER_MIN,
    FIRST_TOKENS_VERY_LATE,
    KV_EXPIRES,
    KV_USAGE,
    NOT_EVICTING,
    PREFILL_BUSY,
    RUNNING,
    STEPS_HAVE_ROOM,
    WAITING,
    at_hour,
    queued_for,
)
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import Form, cause, term
from kneewatch.diagnose.slow_quantities import (
    EQUAL_LOAD,
    HOST_MEMORY,
    KV_FLOOR,
    SAME_WORK,
    TREND_S,
    WORK_GROWTH,
    goes_on,
    straight,
)
from kneewatch.rules.conditions import Check, Number
from kneewatch.rules.formatting import about, percent
from kneewatch.rules.quantities import BaselineValue, Live, Minimum
from kneewatch.rules.rule import DAY_S, HOUR_S, Severity

GIB = 2**30

# --- KV blocks that are never given back ----------------------------------------------------------

LEAK_FROM, LEAK_MATTERS_FROM = 0.02, 0.1
LEAKED = Live("kv_usage_ratio") - RUNNING - WAITING
"""KV usage while no request runs or waits; negative if there is any request."""

CONNECTED = Live("kv_expired_per_s").known | Live("kv_transfer_mean_s").known
"""The server has a connector to other nodes.

The connector holds a finished prefill's blocks until another node has fetched them, or for 480 s
(NIXL's default).
"""


def _held_for(for_s: float) -> Check:
    return Check("kv_held", LEAKED >= LEAK_FROM, Number(for_s), stretch=False)


LEVER = (
    "Restart the server in a quiet hour, and report it to vLLM with the version and the KV "
    "connector. Aborted requests that wait for remote KV are the known case."
)

SAME_WORK_KNOWN = WORK_GROWTH <= EQUAL_LOAD
UNEXPLAINED_FROM = 0.05
FLOOR_LATE_FROM = 0.25
"""Like `LATE_FROM`, but lower, because no warm-up raises this value.

The lowest usage of half an hour varies with the load.
"""

UNEXPLAINED = Live(KV_FLOOR.growth) - Live(KV_FLOOR.before) * WORK_GROWTH.at_least(0.0)
"""Growth of the lowest KV usage, as a share of the cache, minus the growth that more work
explains."""

KV_FULL_IN_S = (1.0 - KV_USAGE) / Live(KV_FLOOR.growth) * TREND_S
_KV_FULL_IN_S = KV_FULL_IN_S.read()


def _climbs(facts: Facts) -> str:
    before, growth = facts.get(KV_FLOOR.before), facts.get(KV_FLOOR.growth)
    full_in_s = _KV_FULL_IN_S(facts)
    ends = "" if full_in_s is None else f"; full about {at_hour(facts.now_s + full_in_s)}"
    return (
        f"KV cache leaks: its lowest usage climbed from {percent(before)} to "
        f"{percent(before + growth)} in {TREND_S / HOUR_S:.0f} h at equal load{ends}."
    )


def _climbed(facts: Facts) -> str:
    return (
        f"lowest KV usage {percent(facts.get(KV_FLOOR.before))} at "
        f"{at_hour(facts.now_s - TREND_S)}, {percent(facts.get(KV_FLOOR.level))} in the last half "
        "hour"
    )


KV_LEAK = cause(
    "kv_leak",
    Form(
        gate=(~CONNECTED & _held_for(120.0)) | _held_for(600.0),
        start=Number(0.5),
        terms=(
            term(
                LEAKED, LEAK_FROM, 1.5, "KV usage stays at {value:%} while no request runs or waits"
            ),
        ),
        levels=((Severity.WARNING, LEAKED >= LEAK_MATTERS_FROM),),
        severity=Severity.INFO,
        say="KV cache leaks: {kv_usage_ratio:%} of its blocks stay in use while no "
        "request runs or waits.",
        summary="KV cache leaks: blocks stay in use while no request runs or waits",
        lever=LEVER,
    ),
    Form(
        gate=goes_on(KV_FLOOR, FLOOR_LATE_FROM)
        & SAME_WORK_KNOWN
        & (UNEXPLAINED >= UNEXPLAINED_FROM),
        terms=(
            term(UNEXPLAINED, UNEXPLAINED_FROM, 1.5, _climbed),
            straight(KV_FLOOR, "climb: no step, no swing"),
            term(
                WORK_GROWTH.at_least(0.0),
                EQUAL_LOAD,
                -0.8,
                "the load has grown by {value:%} meanwhile",
                when=WORK_GROWTH > 0.0,
            ),
        ),
        levels=((Severity.WARNING, UNEXPLAINED >= LEAK_MATTERS_FROM),),
        severity=Severity.INFO,
        say=_climbs,
        summary="KV cache leaks: its lowest usage climbs for hours at equal load",
        lever=LEVER,
    ),
)


# --- KV blocks held by what does not run ------------------------------------------------------

PROMPT_TOKENS, ANSWER_TOKENS = Live("prompt_tokens_mean"), Live("output_tokens_mean")
OWNED = (
    1.5 * Live("running_avg") * (PROMPT_TOKENS + ANSWER_TOKENS) + Live("prompt_tokens_p99")
) / Live("kv_capacity_tokens")
"""Most of the KV cache that the running requests need: whole requests, half as long again as the
finished ones, and a long prompt that no gauge shows yet."""

HELD_FROM = 0.15
KV_HELD_SHARE = Minimum(KV_USAGE - OWNED, Live(KV_UNACCOUNTED))
"""Share of the KV cache that requests in flight do not account for, neither by their number nor by
the balance of tokens."""

USUAL_USAGE = (
    Live("running_avg") * BaselineValue("kv_usage_avg_ratio") / BaselineValue("running_avg")
)
"""KV usage that as many running requests have in quiet times."""

GREW = (
    (Live("kv_usage_avg_ratio") >= 2.0 * USUAL_USAGE * Live(PROMPTS).at_least(1.0))
    & (Live("itl_mean_drift_ratio") <= 1.25).assume(unknown=True)
).assume(unknown=False)
"""The same requests have far more of the cache, and steps do not read it: longer contexts would
slow them."""

FETCHES = (
    CONNECTED | (Live("external_hit_ratio") > 0.0) | (Live("kv_external_share_ratio") > 0.0)
).assume(unknown=False)
DEFERRED = Live("waiting_deferred_avg")
DEFERRED_SHARE = Minimum(
    DEFERRED * PROMPT_TOKENS / Live("kv_capacity_tokens"), Live("kv_usage_avg_ratio")
)
"""Most of the KV cache that deferred requests hold: each has the blocks of its prompt."""

DEFERRED_HOLD = (DEFERRED_SHARE >= 0.2) & (DEFERRED >= 0.25 * Live("running_avg"))

DECODING = Live("generation_tokens_per_s") * Live("itl_mean_s")
IDLE_SEATS = BATCH - DECODING - PREFILL_BUSY.otherwise(0.0)
"""Running requests that get no token, by Little's law: tokens/s times the time between two tokens
is the number of streams (more with speculation)."""

SEATS_HELD = Check(
    "seats_held",
    (IDLE_SEATS >= (0.5 * BATCH).at_least(4.0)) & (DECODING > 0.0) & STEPS_HAVE_ROOM & NOT_EVICTING,
    Number(120.0),
    stretch=False,
)
"""Most running requests get no token for two minutes, while steps have room for them."""

STARTED = ARRIVALS.otherwise(0.0)
NEVER_SERVED = Check(
    "never_served",
    (Live("waiting_deferred") >= (0.5 * BATCH).at_least(4.0))
    & (DEFERRED >= 10.0 * STARTED)
    & (0.2 * DEFERRED >= STARTED * Live("ttft_mean_s").otherwise(0.0))
    & ~(FETCHES | Live("lora_max").known),
    Number(60.0),
    stretch=False,
)
"""By Little's law deferred requests wait far longer than those took that got a first token: these
passed them. Neither a connector nor adapters hold them back."""

KV_HELD = cause(
    "kv_held",
    Form(
        summary="KV blocks are held by transfers, by deferred requests, or are not given back",
        gate=(FETCHES | GREW)
        & Check("kv_unaccounted", (KV_HELD_SHARE >= HELD_FROM) | DEFERRED_HOLD, Number(30.0)),
        start=Number(0.3),
        terms=(
            term(
                KV_HELD_SHARE,
                HELD_FROM,
                1.5,
                "{held:%} of the KV cache is in use beyond what requests in flight account "
                "for, of {kv_usage_avg_ratio:%} in use",
                when=KV_HELD_SHARE >= HELD_FROM,
            ),
            term(
                DEFERRED_SHARE,
                0.2,
                1.0,
                "the prompts of deferred requests fill {value:%} of the KV cache",
                when=DEFERRED_HOLD,
                signal="waiting_deferred",
            ),
            term(
                DEFERRED,
                1.0,
                0.6,
                "{value:.1f} requests are deferred: they hold blocks and do not run",
                when=DEFERRED >= 1.0,
                signal="waiting_deferred",
            ),
            KV_EXPIRES,
        ),
        levels=(
            (
                Severity.CRITICAL,
                ((KV_USAGE >= 0.95) & queued_for(60.0)) | FIRST_TOKENS_VERY_LATE | DEFERRED_GROWS,
            ),
        ),
        instead=(
            (
                ~FETCHES & (KV_HELD_SHARE >= HELD_FROM).assume(unknown=False),
                "{held:%} of the KV cache is in use beyond what the requests in flight hold: "
                "blocks are not given back.",
            ),
            (
                (KV_HELD_SHARE >= HELD_FROM).assume(unknown=False),
                "{held:%} of the KV cache is held by what does not run: transfers that nobody "
                "ends, or deferred requests.",
            ),
            (
                DEFERRED_HOLD,
                "Deferred requests hold {deferred:%} of the KV cache: transfers that do not end.",
            ),
        ),
        say="KV blocks are held by what does not run: transfers that do not end.",
        words=(("held", KV_HELD_SHARE), ("deferred", DEFERRED_SHARE), EXPIRED_PER_MIN),
        root=True,
        lever="With a KV connector, look for aborted or failed KV transfers in both sides' "
        "logs; let the connector give up before clients and routers do (time-outs). Restart "
        "the engine when the cache is nearly full; without a connector, report it to vLLM.",
    ),
    Form(
        gate=SEATS_HELD | NEVER_SERVED,
        start=Number(0.3),
        terms=(
            term(
                IDLE_SEATS,
                4.0,
                1.5,
                "{running_avg} requests run, and the tokens of {decoding:.1f} come: "
                "{generation_tokens_per_s:tokens/s}, one each {itl_mean_s:s}",
                when=SEATS_HELD,
            ),
            term(
                DEFERRED,
                4.0,
                1.5,
                "{value:.0f} requests are deferred, with no KV connector or adapter to wait for; "
                "{arrival_per_s:requests/s} get a first token",
                when=NEVER_SERVED,
                signal="waiting_deferred",
            ),
        ),
        levels=((Severity.CRITICAL, queued_for(60.0) | FIRST_TOKENS_VERY_LATE | DEFERRED_GROWS),),
        instead=(
            (
                SEATS_HELD,
                "{idle:.0f} of {running_avg:.0f} running requests get no token: they hold seats "
                "and KV blocks.",
            ),
        ),
        say="{deferred_requests:.0f} requests are held back, not for want of capacity, and are "
        "hardly ever served.",
        words=(
            ("decoding", DECODING),
            ("idle", IDLE_SEATS.otherwise(0.0)),
            ("deferred_requests", DEFERRED),
        ),
        root=True,
        summary="Requests that are in the engine get no tokens",
        lever="Look in vLLM's log for these requests: a grammar that does not compile, a "
        "connector, an encoder, a client that stopped reading. Let callers and the router time "
        "out. Restart the engine where that does not end them.",
    ),
)

# --- Host memory that is never given back ---------------------------------------------------------

USED_BYTES, GROWTH_BYTES = Live(HOST_MEMORY.signal), Live(HOST_MEMORY.growth)
GROWTH_SHARE = GROWTH_BYTES / Live(HOST_MEMORY.before)
FULL_IN_S = (Live("host_memory_limit_bytes") - USED_BYTES) / GROWTH_BYTES * TREND_S
_FULL_IN_S = FULL_IN_S.read()

GROWS = (GROWTH_SHARE >= 0.05) | (
    ((FULL_IN_S <= DAY_S) & (GROWTH_SHARE >= 0.01)).assume(unknown=False)
)


def _grows(facts: Facts) -> str:
    growth, used = facts.get(HOST_MEMORY.growth), facts.get(HOST_MEMORY.signal)
    per_h = growth / TREND_S * HOUR_S
    grows = f"grows by {about(per_h / GIB)} GiB/h at equal load"
    limit = facts.values.get("host_memory_limit_bytes")
    if limit is None:
        return f"Host memory {grows}: {used / GIB:.1f} GiB in use, limit unknown."
    return f"Host memory {grows}: {used / GIB:.1f} of {limit / GIB:.1f} GiB in use, {_full(facts)}."


def _full(facts: Facts) -> str:
    return f"full about {at_hour(facts.now_s + max(0.0, _FULL_IN_S(facts) or 0.0))}"


def _grew(facts: Facts) -> str:
    before_bytes, level_bytes = (
        facts.get(key) / GIB for key in (HOST_MEMORY.before, HOST_MEMORY.level)
    )
    return (
        f"{before_bytes:.1f} GiB at {at_hour(facts.now_s - TREND_S)}, {level_bytes:.1f} GiB in the "
        "last half hour"
    )


HOST_MEMORY_LEAK = cause(
    "host_memory_leak",
    Form(
        gate=goes_on(HOST_MEMORY) & GROWS & SAME_WORK,
        start=Number(0.3),
        terms=(
            term(GROWTH_SHARE, 0.05, 1.2, _grew),
            straight(HOST_MEMORY, "growth: no step, no warm-up that settles"),
            term(FULL_IN_S, DAY_S, 1.0, _full, when=FULL_IN_S <= DAY_S, below=True),
        ),
        levels=((Severity.CRITICAL, FULL_IN_S <= HOUR_S), (Severity.WARNING, FULL_IN_S <= DAY_S)),
        severity=Severity.INFO,
        say=_grows,
        lever="Restart the server in a quiet hour before host memory runs out. Report it to "
        "vLLM with the version, the features in use (multimodal input, KV connector, "
        "structured output) and the growth per hour.",
    ),
)
