"""Facts around each cause: the least that concludes it, and each edge and unknown of its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.ranking import BY_ID
from kneewatch.rules.conditions import Check, Compare, Quantity, nodes
from kneewatch.rules.facts import Targets
from kneewatch.rules.quantities import BaselineValue, Configured, Live, Recent, Target, Watched
from tests.contract.situations import SITUATIONS
from tests.diagnose.situations import WINDOW_S, Situation

TARGETS = Targets(ttft_p99_s=1.0, itl_p99_s=0.1)
NEAR = 1e-3
"""How far beside an edge a value lies, as a share of it."""

STEPS = 40
FACTORS = (0.0, 0.5, 0.9, 1.4, 2.0)
HELD_S = 5.0
"""A streak that is shorter than any that a record asks for."""


class Variation(Struct, frozen=True):
    """What is different from the situation that concludes the cause; None makes it unknown."""

    values: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    recent: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    quiet: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    streaks_s: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    config: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    observed_s: float | None = None
    targets: bool | None = None

    @property
    def label(self) -> str:
        """What it changes, in words."""
        parts = [
            f"{name}.{key}={_shown(value)}"
            for name in ("values", "recent", "quiet", "streaks_s", "config")
            for key, value in getattr(self, name).items()
        ]
        parts += [] if self.observed_s is None else [f"observed_s={self.observed_s:g}"]
        parts += [] if self.targets is None else [f"targets={self.targets}"]
        return " ".join(parts) or "base"

    def on(self, base: Situation) -> Situation:
        """The situation with the change."""
        targets = base.targets if self.targets is None else TARGETS if self.targets else Targets()
        return replace(
            base,
            values={**base.values, **self.values},
            recent={**base.recent, **self.recent},
            quiet=_without_unknown({**base.quiet, **self.quiet}),
            streaks_s=_without_unknown({**base.streaks_s, **self.streaks_s}),
            config={k: v for k, v in {**base.config, **self.config}.items() if v is not None},
            observed_s=base.observed_s if self.observed_s is None else self.observed_s,
            targets=targets,
        )


def _shown(value: float | str | None) -> str:
    return "unknown" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def _without_unknown(values: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in values.items() if value is not None}


def bases() -> Iterator[tuple[str, CauseRecord, Situation]]:
    """Each cause that has forms, with the situations that conclude it."""
    for name, situation in SITUATIONS.items():
        record = BY_ID[name.partition(":")[0]]
        if record.forms:
            yield name, record, situation


def changes(record: CauseRecord, base: Situation) -> Iterator[Variation]:
    """The base, every leaf unknown, every leaf at several sizes, and both sides of every edge."""
    yield Variation()
    facts = base.facts()
    for leaf in dict.fromkeys(_leaves(record)):
        if isinstance(leaf, Target):
            yield Variation(targets=not bool(base.targets.ttft_p99_s))
            continue
        now = leaf.read()(facts)
        yield _with(leaf, None)
        sizes = [] if now is None else [factor * now for factor in FACTORS]
        for value in dict.fromkeys((*sizes, *_edges(record, base, leaf))):
            yield _with(leaf, value)
    for held in dict.fromkeys(node for node in nodes(record.forms) if isinstance(node, Check)):
        for seconds in (None, HELD_S, held.for_s.value * (1 - NEAR), held.for_s.value):
            yield Variation(streaks_s={held.name: seconds})
    parts = list(nodes(record.forms))
    for configured in dict.fromkeys(part for part in parts if isinstance(part, Configured)):
        for text in (None, "True", "False"):
            yield Variation(config={configured.label: text})
    for watched in dict.fromkeys(part for part in parts if isinstance(part, Watched)):
        for share in (1 - NEAR, 1.0):
            yield Variation(observed_s=share * watched.windows.value * WINDOW_S)


def _leaves(root: object) -> Iterator[Live | Recent | BaselineValue | Target]:
    for node in nodes(root):
        if isinstance(node, Live | Recent | BaselineValue | Target):
            yield node


def _with(leaf: Live | Recent | BaselineValue, value: float | None) -> Variation:
    match leaf:
        case Live():
            return Variation(values={leaf.key: value})
        case Recent():
            return Variation(recent={leaf.key: value})
        case BaselineValue():
            return Variation(quiet={leaf.key: value})


def _edges(
    record: CauseRecord, base: Situation, leaf: Live | Recent | BaselineValue
) -> Iterator[float]:
    """Values of a leaf on both sides of where a comparison of the record turns."""
    for node in nodes(record.forms):
        if not isinstance(node, Compare) or leaf not in set(_leaves(node)):
            continue
        edge = _turning(node.left, node.right, base, leaf)
        if edge is not None:
            yield from (edge * (1 - NEAR), edge, edge * (1 + NEAR))


def _turning(
    left: Quantity, right: Quantity, base: Situation, leaf: Live | Recent | BaselineValue
) -> float | None:
    """The value of a leaf at which two quantities are equal, found by halving; None without."""
    left_of, right_of = left.read(), right.read()

    def over(value: float) -> bool | None:
        facts = _with(leaf, value).on(base).facts()
        this, bound = left_of(facts), right_of(facts)
        return None if this is None or bound is None else this >= bound

    unit = leaf.key.rpartition("_")[2]
    most = {"ratio": 8.0, "bytes": 1e12}.get(unit, 1e6)
    low, high = 1e-9, most
    first, last = over(low), over(high)
    if first is None or last is None or first == last:
        return None
    for _ in range(STEPS + 20):
        middle = (low + high) / 2 if high < 1 or low > 1e-3 else (low * high) ** 0.5
        if over(middle) == first:
            low = middle
        else:
            high = middle
    edge = float(f"{high:.9g}")
    return float(f"{high:.3g}") if abs(edge - float(f"{high:.3g}")) < 1e-6 * edge else edge
