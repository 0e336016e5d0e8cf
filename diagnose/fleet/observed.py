"""What a metrics system said of a fleet at one moment. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kneewatch.diagnose.fleet.history import Past
from kneewatch.diagnose.fleet.shape import Key, Labels, Shape
from kneewatch.rules.model import Severity

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Gone:
    """A replica that was there within the hour and is not now. `down`: its scrape fails, else it is
    no target any more."""

    replica: str
    pool: str
    down: bool


@dataclass(frozen=True, slots=True)
class Load:
    """What the metrics system was asked, and how it took it."""

    queries: int = 0
    retried: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Observed:
    """A fleet at one moment, by engine key.

    `values` are signals, `gpus` the figures of the GPUs that an engine's replica has. `recorded`
    are signals that recording rules gave, `raw` those computed from raw series, `failed` those
    that could not be asked, with the reason. `skew_s` is how far the server's clock is ahead,
    None where that is within what measuring it can tell. `configs` are the labels of
    cache_config_info, `alerts` the severities of rules whose recorded alerts fire, by rule id.
    """

    t_s: float
    source: str
    window_s: float
    shape: Shape
    values: Mapping[Key, Values]
    gpus: Mapping[Key, Values] = field(default_factory=dict[Key, Values])
    configs: Mapping[Key, Labels] = field(default_factory=dict[Key, Labels])
    alerts: Mapping[Key, Mapping[str, Severity]] = field(
        default_factory=dict[Key, Mapping[str, Severity]]
    )
    past: Past = field(default_factory=Past)
    gone: Sequence[Gone] = ()
    recorded: Sequence[str] = ()
    raw: Sequence[str] = ()
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    warnings: Sequence[str] = ()
    skew_s: float | None = None
    load: Load = field(default_factory=Load)
