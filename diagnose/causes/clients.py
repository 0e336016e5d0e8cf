"""Causes from what becomes of requests: given up, failed, answered with next to nothing. Pure.

Every accepted request is finished, in flight or given up. vLLM does not count most of the given-up
ones, so they are computed from the other counts.
"""

from __future__ import annotations

from kneewatch.diagnose.account_signals import ANSWERS, DEMAND, PROMPTS
from kneewatch.diagnose.causes.bottleneck import ABORTED_SHARE, SPEED_IS_LOST
from kneewatch.diagnose.causes.common_conditions import (
    FAR,
    SERVED,
    SOME_GIVEN_UP,
    UNMOVED,
    WINDOW_S,
)
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import Form, cause, term
from kneewatch.rules.conditions import Check, Condition, FirstOf, Number, Quantity
from kneewatch.rules.quantities import BaselineValue, Live
from kneewatch.rules.rule import Severity

CALLS_MIN = 4.0
"""Least number of calls in the window for computing a share of them."""

READ_LOG = "Read vLLM's log for the error of these requests."


def _failing_lever(facts: Facts) -> str:
    """What to do about failing requests, by what else the page shows."""
    if facts.get("kv_transfer_failed_per_s") > 0 or facts.get("external_hit_ratio") > 0:
        return (
            f"{READ_LOG} Look at the KV connector and the tier behind it first. With "
            '`"kv_load_failure_policy": "recompute"` vLLM computes what cannot be loaded.'
        )
    return READ_LOG


def _given_up_lever(facts: Facts) -> str:
    """What to do about calls that clients give up, by whether requests wait in the engine."""
    if facts.get("waiting_avg") >= 1:
        return (
            "Serve what is accepted: size for the accepted rate, and refuse early (a queue limit) "
            "what cannot be served in time."
        )
    return (
        "No request waits: answers take longer than clients wait. Set the timeout of clients and "
        "gateway to the longest answer that you want, and max_tokens to what fits into it."
    )


ABORTED = Live("finished_abort_per_s")
FAILED, FAILED_SHARE = Live("finished_error_per_s"), Live("finished_error_ratio")
REFUSED = Live("server_error_per_s") - (
    Live("rejected_per_s").otherwise(0.0) + FAILED.otherwise(0.0)
)
LEFT = (ABORTED - REFUSED.otherwise(0.0).at_least(0.0)).otherwise(0.0)
"""Aborted requests whose calls did not end in HTTP 5xx: the server aborted the others."""

ACCEPTED, GIVEN_UP = Live("accepted_per_s"), Live("given_up_per_s").at_least(LEFT)
GIVEN_UP_SHARE = Live("given_up_ratio").otherwise(0.0).at_least((LEFT / SERVED).otherwise(0.0))
"""Of the calls, or of the requests: a call that its client leaves may be counted as neither."""

TAKEN = ACCEPTED.at_least(SERVED)
ANSWERED = SERVED - ABORTED.otherwise(0.0)
WRONG, WRONG_SHARE = Live("client_error_per_s"), Live("client_error_ratio")


GAVE_UP = "Clients give up {share:%} of the calls before they are answered"
RATES = "{accepted:calls/s} accepted, {answered:requests/s} answered"
MOST_GIVEN_UP = 0.5
MANY_GIVEN_UP = 0.25
"""Shares of accepted calls that are given up: for critical and for warning."""

WRONG_SHARE_FROM = 0.1


CLIENTS_GIVE_UP = cause(
    "clients_give_up",
    Form(
        gate=(GIVEN_UP_SHARE >= SOME_GIVEN_UP) & (GIVEN_UP * WINDOW_S >= CALLS_MIN),
        start=Number(-0.4),
        terms=(
            term(
                GIVEN_UP_SHARE,
                SOME_GIVEN_UP,
                2.0,
                "{value:%} of the accepted calls ended before their request finished",
            ),
            term(
                ANSWERED,
                None,
                0.4,
                "{accepted:calls/s} accepted, {value:requests/s} answered",
                when=ANSWERED < (1 - MANY_GIVEN_UP) * TAKEN,
            ),
        ),
        levels=(
            (Severity.CRITICAL, GIVEN_UP_SHARE >= MOST_GIVEN_UP),
            (Severity.WARNING, GIVEN_UP_SHARE >= MANY_GIVEN_UP),
        ),
        severity=Severity.INFO,
        instead=((ACCEPTED.known, f"{GAVE_UP}: {RATES}."),),
        say=f"{GAVE_UP}.",
        words=(("share", GIVEN_UP_SHARE), ("accepted", TAKEN), ("answered", ANSWERED)),
        lever=_given_up_lever,
    ),
)

CALLS = FirstOf((ACCEPTED, SERVED)) + WRONG.otherwise(0.0) + Live("server_error_per_s")
REFUSED_SHARE = REFUSED / CALLS
"""Share of the calls that fail with HTTP 5xx in the API server: neither counted as failed by the
engine, nor rejected because the queue is at its limit."""

TRANSFERS_FAIL = Live("kv_transfer_failed_per_s")
EXTERNAL = Live("external_hit_ratio")
FAILED_FROM, ABORTED_FROM = 0.02, 0.25
"""Shares of failed and of aborted requests from which the cause is concluded: some clients always
leave, and nearly no request fails."""

BESIDE = (
    term(
        TRANSFERS_FAIL,
        None,
        0.5,
        "KV transfers fail meanwhile ({value:failures/s})",
        when=TRANSFERS_FAIL > 0.0,
    ),
    term(
        EXTERNAL,
        None,
        0.0,
        "prompts are loaded from another cache tier (hit ratio there {value:%}): where a load "
        "fails, kv_load_failure_policy may fail the request",
        when=EXTERNAL > 0.0,
    ),
    term(
        Live("waiting_deferred_avg"),
        None,
        0.0,
        "{value:.1f} requests are held back for KV, an adapter or a grammar",
        when=Live("waiting_deferred_avg") > 0.0,
    ),
    term(
        Live("kv_usage_max_ratio"),
        None,
        0.0,
        "the KV cache was up to {value:%} full",
        when=Live("kv_usage_max_ratio") >= 0.95,
    ),
)
"""What the page shows beside the failed requests."""


def _failing(
    share: Quantity,
    per_s: Quantity,
    from_share: float,
    critical: float,
    words: tuple[str, str, str],
    *,
    when: Condition | None = None,
) -> Form:
    """A form of requests_failing. `words`: its summary, the evidence, the sentence."""
    of, text, sentence = words
    gate = (share >= from_share) & (per_s * WINDOW_S >= 3.0)
    return Form(
        gate=gate if when is None else gate & when,
        start=Number(0.3),
        terms=(term(share, from_share, 2.0, text), *BESIDE),
        levels=((Severity.CRITICAL, share >= critical),),
        say=sentence,
        words=(("share", share), ("per_s", per_s)),
        summary=of,
        lever=_failing_lever,
    )


NEXT_TO_NOTHING = 0.1
CUT = (
    (Live(ANSWERS) <= NEXT_TO_NOTHING)
    & (Live("output_tokens_p50") <= NEXT_TO_NOTHING * BaselineValue("output_tokens_p50"))
    & (Live(DEMAND) * FAR >= 1.0)
    & (Live(PROMPTS) <= UNMOVED)
    & (Live(PROMPTS) * UNMOVED >= 1.0)
    & (SERVED * WINDOW_S >= 20.0)
).assume(unknown=False)
CUT_SHORT = Check("cut_short", CUT, Number(60.0)) & CUT
"""For a minute answers have nearly no tokens, though prompts are as long as usual and requests
do not stay away. A closed loop then asks more often. The median tells it from long requests that no
longer come beside short ones: it was that of the short ones before."""

REQUESTS_FAILING = cause(
    "requests_failing",
    _failing(
        FAILED_SHARE,
        FAILED,
        FAILED_FROM,
        0.1,
        (
            "Requests end in an error",
            "{value:%} of the finished requests ended in an error ({per_s:requests/s})",
            "{share:%} of the finished requests ended in an error.",
        ),
    ),
    _failing(
        REFUSED_SHARE,
        REFUSED,
        FAILED_FROM,
        0.1,
        (
            "Calls fail with HTTP 5xx in the API server",
            "{value:%} of the calls failed with HTTP 5xx ({per_s:calls/s}), and the engine "
            "counts no error for them: they fail in the API server",
            "{share:%} of the calls fail with HTTP 5xx before the engine counts them.",
        ),
    ),
    _failing(
        ABORTED_SHARE,
        ABORTED,
        ABORTED_FROM,
        0.5,
        (
            "Many requests are aborted",
            "{value:%} of the finished requests were aborted ({per_s:requests/s}), and the "
            "page does not count calls: clients left, or the server aborted them",
            "{share:%} of the finished requests were aborted: by clients that leave, or by the "
            "server.",
        ),
        when=~ACCEPTED.known & ~SPEED_IS_LOST,
    ),
    Form(
        gate=CUT_SHORT,
        start=Number(0.3),
        terms=(
            term(
                Live(ANSWERS),
                NEXT_TO_NOTHING,
                2.0,
                "answers have x{value:.2f} of their usual length ({output_tokens_mean} tokens), "
                "with x{demand_moved_ratio:.1f} of the usual requests/s and prompts x"
                "{prompts_moved_ratio:.1f} as long",
                below=True,
            ),
            term(
                Live("finished_length_ratio"),
                None,
                0.0,
                "{value:%} of the answers end at their limit",
            ),
        ),
        say="Answers have {output_tokens_mean} tokens, x{answers_moved_ratio:.2f} of their usual "
        "length, while requests/s and prompts are as usual.",
        summary="Answers have a tenth of their usual length or less, requests and prompts as usual",
        lever="Read one answer and its finish_reason. `stop` at once: compare the chat template, "
        "the stop sequences and the model's end-of-sequence token with the last release; `length`: "
        "max_tokens of the client or the gateway. If short answers are wanted, accept them: "
        "kneewatch accept.",
    ),
)

CLIENT_ERRORS = cause(
    "client_errors",
    Form(
        gate=(WRONG_SHARE >= WRONG_SHARE_FROM) & (WRONG * WINDOW_S >= CALLS_MIN),
        terms=(
            term(
                WRONG_SHARE,
                WRONG_SHARE_FROM,
                2.0,
                "{value:%} of the calls are refused with HTTP 4xx",
            ),
        ),
        severity=Severity.INFO,
        say="{client_error_ratio:%} of the calls are refused as wrong (HTTP 4xx, "
        "{client_error_per_s:calls/s}): prompts that are too long, an unknown model or "
        "parameter, a missing key.",
        lever="Read the error bodies at the client or gateway: vLLM's log names each reason.",
    ),
)
