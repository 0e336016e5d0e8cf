"""Chats whose prompts hit their common head alone: what follows it is evicted, or differs."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.rules.rule import Severity
from tests.incidents.incident import Incident
from tests.incidents.pages import Load

CHANGES_S, SURE_S, LASTS_S = 300.0, 60.0, 480.0

CHATS = Load(
    running=6.0, kv_ratio=0.1, blocks=20_000, first_tokens_per_s=1.0, finished_per_s=1.0,
    generated_per_s=300.0, prompt_per_s=8000.0, prompt_tokens=8000.0, answer_tokens=300.0,
    hit_ratio=0.92, queued_s=0.01, prefill_s=0.1, request_s=6.0, steps_per_s=50.0,
    step_tokens=20.0,
)  # fmt: skip
"""Turns of long conversations behind a system prompt of 2,000 tokens: a block lasts 300 s."""

HEADS_ALONE = replace(CHATS, hit_ratio=0.25, prefill_s=0.8, ttft_s=0.8, request_s=7.0, kv_ratio=0.2)
"""The system prompt hits and nothing behind it."""

MORE_CHATS = replace(
    HEADS_ALONE, running=20.0, kv_ratio=0.35, first_tokens_per_s=3.0, finished_per_s=3.0,
    generated_per_s=900.0, prompt_per_s=24_000.0,
)  # fmt: skip

INCIDENTS = (
    Incident(
        name="three times the chats: their tails are evicted",
        source="chats behind a system prompt",
        load_at=lambda at_s: MORE_CHATS if at_s >= CHANGES_S else CHATS,
        lasts_s=LASTS_S,
        judged_from_s=CHANGES_S + SURE_S,
        first_cause="prefix_churn",
        least=Severity.WARNING,
        never=frozenset({"prefix_reuse_lost"}),
    ),
    Incident(
        name="a date behind the system prompt, equal load",
        source="chats behind a system prompt",
        load_at=lambda at_s: HEADS_ALONE if at_s >= CHANGES_S else CHATS,
        lasts_s=LASTS_S,
        judged_from_s=CHANGES_S + SURE_S,
        first_cause="prefix_reuse_lost",
        least=Severity.WARNING,
        never=frozenset({"prefix_churn"}),
    ),
)
