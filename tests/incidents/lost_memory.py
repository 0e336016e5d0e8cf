"""KV blocks that are lost or cannot be used again."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.rules.rule import Severity
from tests.incidents.incident import NOTHING, Incident
from tests.incidents.pages import SERVING, Load, Phases, then

ENDS_S, LASTS_S = 120.0, 480.0
NIGHT = Load()
"""No request."""


def now_and_then(at_s: float) -> Load:
    """A request of 20 s once a minute, and an empty cache between them."""
    return replace(SERVING, running=1, kv_ratio=0.05) if at_s % 60 < 20 else NIGHT


def quiet_with(kv_ratio: float) -> Phases:
    """A load that ends with so much of the cache still in use."""
    return lambda at_s: SERVING if at_s < ENDS_S else replace(NIGHT, kv_ratio=kv_ratio)


INCIDENTS = (
    Incident(
        name="blocks of aborted requests are never freed",
        source="vllm 46283, 36958",
        load_at=quiet_with(0.14),
        lasts_s=LASTS_S,
        judged_from_s=ENDS_S + 135,
        first_cause="kv_leak",
        least=Severity.WARNING,
    ),
    Incident(
        name="the load ends and the cache is empty",
        source="healthy",
        load_at=then(SERVING, ENDS_S, **dict.fromkeys((
            "running", "kv_ratio", "first_tokens_per_s", "finished_per_s", "generated_per_s",
            "prompt_per_s"), 0.0)),
        lasts_s=LASTS_S,
        judged_from_s=ENDS_S,
        first_cause=NOTHING,
    ),
    Incident(
        name="a short request each minute",
        source="healthy",
        load_at=now_and_then,
        lasts_s=LASTS_S,
        judged_from_s=ENDS_S,
        first_cause=NOTHING,
    ),
)  # fmt: skip
