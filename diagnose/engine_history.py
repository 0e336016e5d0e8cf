"""What the history keeps of an engine beside its verdicts: recommendations with their outcomes, and
configurations. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kneewatch.diagnose.recommend.advice import Advice


class PastAdvice(Struct, frozen=True, kw_only=True):
    """A recommendation for an engine, and its outcome.

    `outcome` is one of:
        "open": active, and apparently not applied
        "applied": the engine runs with it, but it is not measured yet
        "kept", "missed", "worsened": measured, compared with the prediction
        "lapsed": never applied, and no longer active
        "unknown": a metrics system does not record it

    `measured` are signals by key after the change. `engine_id` is the engine's number in the store;
    a report adds its tier, target and engine.
    """

    recommendation: Advice
    first_s: float
    last_s: float
    outcome: str
    applied_s: float | None
    measured: Mapping[str, float]
    engine_id: int = 0
    tier: str = ""
    target: str = ""
    engine: str = ""


class ConfigChange(Struct, frozen=True):
    """A start of an engine, or a change of its configuration.

    `before` is empty for the first known configuration. `restart` is the way in which a restart was
    detected. A report adds the target and the engine.
    """

    t_s: float
    before: Mapping[str, str]
    after: Mapping[str, str]
    restart: str
    target: str = ""
    engine: str = ""
