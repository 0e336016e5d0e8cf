"""Slow KV transfers between nodes or cache tiers, and unbalanced P/D pools. Guide 6.5, 7.7.
Pure."""

from __future__ import annotations

from kneewatch.diagnose.causes.common_conditions import (
    ARRIVALS,
    BATCH,
    DECODES_FROM,
    DEFERRED_AVG,
    DEFERRED_GROWS,
    DEFERRED_HELD,
    EXPIRED_PER_MIN,
    FIRST_TOKENS_VERY_LATE,
    GROWING,
    KV_EXPIRES,
    KV_USAGE,
    QUEUED,
    SERVED,
    TTFT_DRIFT,
    TTFT_IS_MISSED,
    USUAL_TTFT_MEAN_S,
    WAIT_S,
)
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import Form, cause, term
from kneewatch.rules.conditions import Check, FirstOf, Number
from kneewatch.rules.formatting import percent
from kneewatch.rules.quantities import Live
from kneewatch.rules.rule import Severity

PATH = (
    "Check the network, RDMA or PCIe path and the peer's log: the data path is slow, not the GPU."
)
LMCACHE_PATH = (
    "Check LMCache's storage (host memory, disk, remote server), the path to it and LMCache's log: "
    "the data path is slow, not the GPU."
)
DECODE_SERVERS = (
    "Look at the decode servers, which take no more requests: add decode replicas where their KV "
    "caches are full, otherwise check their logs."
)
DECODE_POOL = (
    "Add decode replicas, or turn prefill replicas into decode replicas (lower the P:D ratio): the "
    "transfer path is not the limit."
)

MEAN_S, DRIFT = Live("kv_transfer_mean_s"), Live("kv_transfer_drift_ratio")
SHARE = MEAN_S / Live("ttft_mean_s")
FAILED = Live("kv_transfer_failed_per_s")
FAIL = FAILED > 0.0
DEFERRED_NOW = Live("waiting_deferred")
WAITING, ARRIVED = Live("kv_fetch_waiting"), Live("kv_fetch_arrived").otherwise(0.0)
NOT_BEGUN = Live("kv_fetch_queued").otherwise(0.0)
FETCH_S = WAITING / SERVED  # a request's mean wait for its KV, by Little's law
FETCHING = Check("fetching", WAITING >= 1.0, Number(10.0)) & (
    (FETCH_S >= (1.5 * FirstOf((USUAL_TTFT_MEAN_S, Live("ttft_mean_s")))).at_least(0.25))
    | (~USUAL_TTFT_MEAN_S.known & (FETCH_S >= 3.0))
    | TTFT_IS_MISSED.assume(unknown=False)
).assume(unknown=True)
"""Requests wait for their KV for longer than first tokens usually take, which include that wait. On
a busy server some requests wait at any time. Unknown while no request ends."""

FETCHES_UNTOLD = (Live("external_hit_ratio") > 0.0) & ~WAITING.known & ~Live("lora_max").known
"""The server finds prompts in another cache tier, and does not say how many requests wait for them:
only vLLM before 0.32 gives no reason. Without such hits a connector holds no request back, and
requests wait for something else, such as a grammar."""

HELD_BACK = DEFERRED_HELD & (DEFERRED_AVG >= (0.5 * BATCH).at_least(2.0)) & FETCHES_UNTOLD
"""Requests are held back at least half as long as others are served."""

PASSED_OVER = (
    Check(
        "passed_over",
        ~DEFERRED_AVG.known
        & QUEUED
        & ((Live("ttft_mean_s") <= 0.2 * WAIT_S) | (BATCH < 0.5).assume(unknown=False)),
        Number(30.0),
        stretch=False,
    )
    & FETCHES_UNTOLD
)
"""Requests wait far longer than those took that got their first token, or while hardly one runs.

A queue for capacity is served in order, so these would have waited as long, and it keeps the engine
busy. Needed only where the page does not tell a queue for capacity from requests that are held back
(before vLLM 0.20).
"""

SERVED_WAIT = ARRIVALS * Live("queue_mean_s")
STRANDED = (
    Check(
        "stranded",
        (DEFERRED_NOW >= 1.0) & (DEFERRED_AVG >= (2.0 * SERVED_WAIT).at_least(SERVED_WAIT + 1.0)),
        Number(180.0),
        stretch=False,
    )
    & FETCHES_UNTOLD
)
"""Some requests are held back for ever. By Little's law those that are served account for as many
as arrive in the time that they queued; more are held back at each moment of three minutes."""

FAR_LONGER = (DRIFT >= 1.5) | (~DRIFT.known & (MEAN_S >= 0.25))
"""A transfer takes longer than usual. If its usual time is unknown, it takes longer than a user
notices."""

LATE = TTFT_IS_MISSED.assume(unknown=False) | (TTFT_DRIFT >= 1.3).assume(unknown=True)
LONG = (SHARE >= 0.3) & (FAR_LONGER | TTFT_IS_MISSED).assume(unknown=False) & LATE
"""Transfers are a large part of a late TTFT. The share alone proves nothing: on a decode server
that is fed by prefill servers, most of TTFT may be the transfer."""

SLOWER = (DRIFT >= 3.0) & (SHARE >= 0.05).assume(unknown=True)
"""Transfers take far longer than usual and are not negligible."""

HANDING_OVER = FETCHING & (Live("kv_handover_waiting") > 0.5 * WAITING)
HERE = FETCHING & (ARRIVED > 0.5 * WAITING)
UNDER_WAY = FETCHING & ~HERE.assume(unknown=False)
KV_BINDS = UNDER_WAY & (NOT_BEGUN > 0.5 * WAITING) & (KV_USAGE >= 0.95)
ELSEWHERE = Live("kv_external_share_ratio")

RETRIEVED = MEAN_S <= Live("lmcache_retrieve_mean_s")
LOST = FAIL & (FAILED <= Live("lmcache_failed_per_s"))
BY_LMCACHE = ((LONG | SLOWER) & RETRIEVED) | LOST
"""The transfers and the failures are LMCache's: the longest mean, and the sum, equal its own."""

_RETRIEVED, _LOST, _BY_LMCACHE = (condition.python() for condition in (RETRIEVED, LOST, BY_LMCACHE))
_HANDING_OVER, _HERE, _KV_BINDS = HANDING_OVER.python(), HERE.python(), KV_BINDS.python()


def _long(facts: Facts) -> str:
    move = "a retrieve from LMCache" if _RETRIEVED(facts) else "a KV transfer"
    share = facts.get("kv_transfer_mean_s") / facts.get("ttft_mean_s", 1.0)
    return f"{move} takes {percent(share)} of TTFT"


def _slower(facts: Facts) -> str:
    moves = "retrieves from LMCache" if _RETRIEVED(facts) else "KV transfers"
    return f"{moves} take {facts.get('kv_transfer_drift_ratio'):.1f}x their quiet mean"


def _failing(facts: Facts) -> str:
    return "reads from LMCache's storage fail" if _LOST(facts) else "KV transfers fail"


def _lever(facts: Facts) -> str:
    if _HERE(facts) or _KV_BINDS(facts) or facts.get("kv_expired_per_s") > 0:
        return DECODE_POOL
    if _HANDING_OVER(facts):
        return DECODE_SERVERS
    return LMCACHE_PATH if _BY_LMCACHE(facts) else PATH


KV_TRANSFER_SLOW = cause(
    "kv_transfer_slow",
    Form(
        gate=LONG | SLOWER | FAIL | FETCHING | HELD_BACK | PASSED_OVER | STRANDED,
        start=Number(-0.3),
        terms=(
            term(SHARE, 0.3, 1.2, _long, when=LONG),
            term(DRIFT, 3.0, 1.5, _slower, when=SLOWER, signal="kv_transfer_mean_s"),
            term(FAILED, None, 1.5, _failing, when=FAIL),
            term(
                ARRIVED,
                None,
                -0.8,
                "the KV of {value} of {kv_fetch_waiting} waiting requests has arrived",
                when=HERE,
            ),
            term(WAITING, 1.0, 1.2, "{value} requests wait for their KV to move", when=UNDER_WAY),
            term(
                DEFERRED_AVG,
                2.0,
                1.2,
                "{value} requests are held back on average beside {running_avg} running ones, "
                "on a server that fetches KV",
                when=HELD_BACK,
                signal="waiting_deferred",
            ),
            term(
                WAIT_S,
                None,
                1.2,
                "{waiting_avg} requests wait, about {value:s} each, beside {running_avg} running "
                "ones; first tokens come after {ttft_mean_s:s}, on a server that fetches KV",
                when=PASSED_OVER,
                signal="waiting",
            ),
            term(
                DEFERRED_AVG,
                None,
                1.2,
                "{value:.1f} requests are held back at any time, while those that are served wait "
                "{queue_mean_s:s}: some are never served, on a server that fetches KV",
                when=STRANDED & ~HELD_BACK,
                signal="waiting_deferred",
            ),
            term(
                NOT_BEGUN,
                None,
                -0.8,
                "{value} fetches have not begun, and the KV cache here is "
                "{kv_usage_avg_ratio:%} full",
                when=KV_BINDS,
            ),
            term(
                Live("lmcache_retrieve_tokens_per_s"),
                None,
                0.0,
                "a retrieve moves {value} tokens/s on each GPU",
                when=BY_LMCACHE,
            ),
            term(
                Live("lmcache_healthy"),
                None,
                0.6,
                "LMCache reports itself unhealthy",
                when=BY_LMCACHE & (Live("lmcache_healthy") < 1.0),
            ),
            term(
                Live("kv_transfer_bytes_per_s"),
                None,
                0.0,
                "a KV transfer moves {gb_per_s:.1f} GB/s",
            ),
            term(
                ELSEWHERE,
                None,
                0.0,
                "a decode pool: {value:%} of prompt tokens were computed elsewhere",
                when=ELSEWHERE >= DECODES_FROM,
            ),
            KV_EXPIRES,
        ),
        levels=(
            (Severity.CRITICAL, FIRST_TOKENS_VERY_LATE | DEFERRED_GROWS | (PASSED_OVER & GROWING)),
        ),
        instead=(
            (FAIL, "KV transfers from another node or cache tier fail."),
            (LONG | SLOWER, "KV transfers from another node or cache tier are slow."),
            (HANDING_OVER, "Requests wait until a decode server takes their KV."),
        ),
        say="Requests wait for KV blocks from another node or cache tier.",
        words=(EXPIRED_PER_MIN, ("gb_per_s", Live("kv_transfer_bytes_per_s") * 1e-9)),
        lever=_lever,
    ),
)
