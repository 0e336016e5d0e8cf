"""A server that does the same work more slowly, for a reason that its page does not show."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.rules.rule import Severity
from tests.incidents.incident import NOTHING, Incident
from tests.incidents.pages import SERVING, Load

QUIET_S, LASTS_S = 240.0, 480.0
CHAT = replace(
    SERVING,
    running=40.0,
    generated_per_s=2000.0,
    first_tokens_per_s=8.0,
    finished_per_s=8.0,
    prompt_per_s=4000.0,
    request_s=5.0,
    answer_tokens=250.0,
)


def slower_by(factor: float) -> Load:
    """As many requests in flight, each of whose tokens takes `factor` times as long."""
    return replace(
        CHAT,
        generated_per_s=CHAT.generated_per_s / factor,
        first_tokens_per_s=CHAT.first_tokens_per_s / factor,
        finished_per_s=8.0 / factor,
        prompt_per_s=CHAT.prompt_per_s / factor,
        itl_s=CHAT.itl_s * factor,
        request_s=CHAT.request_s * factor,
    )


def longer_contexts(at_s: float) -> Load:
    """Documents instead of chat: the same batch holds three times the blocks."""
    return replace(slower_by(2.0), kv_ratio=0.9) if at_s >= QUIET_S else CHAT


INCIDENTS = (
    Incident(
        name="structured outputs: 2,000 -> 200 tokens/s",
        source="vllm 10081",
        load_at=lambda at_s: slower_by(10.0) if at_s >= QUIET_S else CHAT,
        lasts_s=LASTS_S,
        judged_from_s=QUIET_S + 120.0,
        first_cause="slow_steps",
    ),
    Incident(
        name="every token takes 1.8 times as long",
        source="a driver's new version",
        load_at=lambda at_s: slower_by(1.8) if at_s >= QUIET_S else CHAT,
        lasts_s=LASTS_S,
        judged_from_s=QUIET_S + 120.0,
        first_cause="slow_steps",
        least=Severity.WARNING,
    ),
    Incident(
        name="contexts three times as long",
        source="healthy",
        load_at=longer_contexts,
        lasts_s=LASTS_S,
        judged_from_s=0.0,
        first_cause=NOTHING,
    ),
)
