"""More incidents of issue threads, written down before kneewatch had seen their pages."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.rules.rule import Severity
from tests.incidents.held_out import BEGINS_S, CHAT, LASTS_S, SURE_S
from tests.incidents.incident import NOTHING, Incident
from tests.incidents.pages import SERVING, Load, Phases


def never_admitted(at_s: float) -> Load:
    """Six requests wait for capacity over an hour while the cache is empty and nothing runs."""
    if at_s < BEGINS_S:
        return CHAT
    waiting = min(6.0, 1.0 + (at_s - BEGINS_S) / 60.0)
    return Load(waiting=waiting, blocks=118, block_tokens=768, finished_per_s=0.0)


def collective_hangs(at_s: float) -> Load:
    """A collective operation of one tensor-parallel rank never ends: one request, no token."""
    if at_s < BEGINS_S:
        return CHAT
    return replace(
        CHAT, running=1.0, kv_ratio=0.002, generated_per_s=0.0, first_tokens_per_s=0.0,
        finished_per_s=0.0, prompt_per_s=0.0,
    )  # fmt: skip


def too_many_callers(at_s: float) -> Load:
    """256 callers; 72 requests fit into 4,818 blocks, 184 wait, TTFT is 60 s."""
    if at_s < BEGINS_S:
        return replace(CHAT, blocks=4818, running=20.0, kv_ratio=0.27)
    return replace(
        CHAT, running=72.0, waiting=184.0, kv_ratio=0.995, blocks=4818, preempted_per_s=1.5,
        generated_per_s=1400.0, first_tokens_per_s=3.0, finished_per_s=3.0, prompt_per_s=3000.0,
        prompt_tokens=1000.0, answer_tokens=460.0, ttft_s=60.0, queued_s=59.0, request_s=85.0,
        itl_s=0.05,
    )  # fmt: skip


def reasoning_storm(at_s: float) -> Load:
    """Answers may be as long as the context: each running request is preempted twice a minute."""
    if at_s < BEGINS_S:
        return replace(CHAT, running=30.0, kv_ratio=0.5, generated_per_s=1500.0)
    return replace(
        CHAT, running=30.0, waiting=25.0, kv_ratio=0.99, preempted_per_s=1.0,
        generated_per_s=700.0, first_tokens_per_s=0.5, finished_per_s=0.2, answer_tokens=5000.0,
        ttft_s=20.0, queued_s=15.0, request_s=160.0, itl_s=0.04,
    )  # fmt: skip


def nearly_full(at_s: float) -> Load:
    """Eight requests fill the cache to 96% at a steady 240 tokens/s; nobody waits."""
    return Load(
        running=8.0, kv_ratio=min(0.96, 0.912 + 0.00005 * at_s), generated_per_s=240.0,
        itl_s=0.033, first_tokens_per_s=0.1, finished_per_s=0.1, request_s=80.0,
    )  # fmt: skip


def images_prepared_slowly(at_s: float) -> Load:
    """20 requests/s with images: their preparation blocks the API server for 2.4 s each."""
    if at_s < BEGINS_S:
        return CHAT
    return replace(
        CHAT, ttft_s=2.5, request_s=4.4, outside_s=2.4, first_tokens_per_s=6.0,
        finished_per_s=6.0, generated_per_s=300.0,
    )  # fmt: skip


def drafts_rejected(at_s: float) -> Load:
    """The traffic changes and 0.6 of four draft tokens are accepted, 2.4 before."""
    accepted = 0.6 if at_s >= BEGINS_S else 2.4
    return replace(CHAT, drafts_per_s=60.0, accepted_per_draft=accepted, running=24.0)


def one_seat(at_s: float) -> Load:
    """--max-num-seqs 1: a request holds 45% of the cache, and nine wait for the seat."""
    del at_s
    return replace(
        SERVING, running=1.0, waiting=9.0, kv_ratio=0.45, generated_per_s=50.0, itl_s=0.02,
        first_tokens_per_s=0.3, finished_per_s=0.3, request_s=3.3, ttft_s=30.0, queued_s=30.0,
        prefill_s=0.1,
    )  # fmt: skip


def grammars_compile(at_s: float) -> Load:
    """Requests are deferred while their grammars compile; a connector exists and is never hit."""
    healthy = replace(
        CHAT, running=20.0, generated_per_s=900.0, tier_lookups_per_s=400.0, tier_hit_ratio=0.0
    )
    if at_s < BEGINS_S:
        return healthy
    return replace(healthy, deferred=15.0, running=10.0, generated_per_s=450.0)


def thinks_between_turns(at_s: float) -> Load:
    """An agent that calls tools for 40 s between turns of 5 s."""
    busy = at_s % 45.0 < 5.0
    if busy:
        return CHAT
    return replace(
        CHAT, running=0.0, kv_ratio=0.0, first_tokens_per_s=0.0, finished_per_s=0.0,
        generated_per_s=0.0, prompt_per_s=0.0,
    )  # fmt: skip


def prompts_refused(at_s: float) -> Load:
    """Half of the calls are answered 400: the prompt is longer than the context."""
    refused = 1.0 if at_s >= BEGINS_S else 0.0
    return replace(CHAT, accepted_per_s=1.0, refused_per_s=refused)


def incident(name: str, source: str, load_at: Phases, first_cause: str) -> Incident:
    """An incident that is judged from two minutes after its beginning on."""
    return Incident(
        name=name, source=source, load_at=load_at, lasts_s=LASTS_S,
        judged_from_s=BEGINS_S + SURE_S, first_cause=first_cause,
    )  # fmt: skip


def milder(incident: Incident, least: Severity = Severity.WARNING) -> Incident:
    """The incident with a cause that need not be critical."""
    return replace(incident, least=least)


def never(incident: Incident, *cause_ids: str) -> Incident:
    """The incident with causes that must not be said."""
    return replace(incident, never=frozenset(cause_ids))


def never_scaled_out(incident: Incident) -> Incident:
    """The incident in which neither replicas nor seats help."""
    return replace(incident, no_change=frozenset({"replicas", "--max-num-seqs"}))


INCIDENTS = (
    never_scaled_out(incident("waiting for capacity, the cache is empty",
                              "vllm-metal 479, vllm 45414", never_admitted, "engine_stalled")),
    never_scaled_out(incident("a collective operation hangs", "vllm 2734, 9839",
                              collective_hangs, "engine_stalled")),
    incident("256 callers, 72 fit", "Tandemn 11", too_many_callers, "kv_pressure"),
    milder(incident("a preemption storm of long reasoning", "verl 5504, vllm 25538",
                    reasoning_storm, "kv_pressure")),
    incident("the cache is 96% full, nobody waits", "healthy; vllm 18115", nearly_full, NOTHING),
    milder(incident("images block the API server", "vllm 34789", images_prepared_slowly,
                    "host_contention")),
    milder(incident("drafts are rejected since a change of traffic", "vllm 9565",
                    drafts_rejected, "spec_decode_poor")),
    never(milder(incident("one seat, one more request fits", "--max-num-seqs 1", one_seat,
                          "admission_limit")), "kv_pressure"),
    never(incident("deferred for grammars beside an idle connector", "vllm 10081",
                   grammars_compile, NOTHING), "kv_transfer_slow"),
    never(incident("an agent thinks between its turns", "healthy", thinks_between_turns, NOTHING),
          "host_contention"),
    milder(incident("half of the calls are refused", "vllm 0.32 on CPU", prompts_refused,
                    "client_errors"), Severity.INFO),
)  # fmt: skip
