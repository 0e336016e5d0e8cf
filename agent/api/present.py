"""How things are now, in every form. What was rendered is kept until a cycle changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any

from kneewatch.agent.api.forms import JSON
from kneewatch.agent.api.problems import dumped
from kneewatch.agent.api.standings import late, shown, worst_first
from kneewatch.agent.api.telling import body
from kneewatch.agent.board import TargetState
from kneewatch.agent.targets import TargetSpec
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.reports.document import document

KEPT_MOST = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """Targets at a moment: what is asked about. `late` are those without a recent cycle."""

    states: tuple[TargetState, ...]
    late: frozenset[str]

    @classmethod
    def of(cls, states: Sequence[TargetState], now_s: float) -> Moment:
        """The targets as they are now."""
        return cls(tuple(states), frozenset(one.name for one in states if late(one, now_s)))

    def same(self, other: Moment) -> bool:
        """Whether nothing has changed."""
        return (
            len(self.states) == len(other.states)
            and self.late == other.late
            and all(mine is its for mine, its in zip(self.states, other.states, strict=True))
        )

    def diagnoses(self) -> list[Diagnosis]:
        """What is said of the engines, worst first."""
        return worst_first(
            chain.from_iterable(shown(one, is_late=one.name in self.late) for one in self.states)
        )


@dataclass(slots=True)
class Present:
    """Rendered answers by form and target; the empty target stands for all of them."""

    _kept: dict[tuple[str, str], tuple[Moment, bytes]] = field(
        default_factory=dict[tuple[str, str], tuple[Moment, bytes]]
    )
    _documents: dict[str, tuple[TargetState, bool, list[tuple[Diagnosis, bytes]]]] = field(
        default_factory=dict[str, tuple[TargetState, bool, list[tuple[Diagnosis, bytes]]]]
    )
    _lock: Lock = field(default_factory=Lock)
    _watched: Sequence[TargetSpec] = ()

    def only(self, specs: Sequence[TargetSpec]) -> None:
        """Forget what is kept of targets that are not among these; the same object as last time
        stands for the same targets."""
        if specs is self._watched:
            return
        with self._lock:
            self._watched = specs
            names = {"", *(spec.name for spec in specs)}
            self._kept = {key: told for key, told in self._kept.items() if key[1] in names}
            self._documents = {n: told for n, told in self._documents.items() if n in names}

    def kept(self, form: str, target: str, moment: Moment) -> bytes | None:
        """What was rendered of this moment, if it was."""
        held = self._kept.get((form, target))
        return held[1] if held is not None and held[0].same(moment) else None

    def render(self, form: str, target: str, moment: Moment) -> bytes:
        """What there is to say: for JSON, the members `targets` and `watching`."""
        with self._lock:
            found = self.kept(form, target, moment)
            if found is not None:
                return found
            if form == JSON:
                found = self._json(moment)
            else:
                found = body(form, moment.diagnoses(), alone=bool(target)).encode(
                    "utf-8", "replace"
                )
            if len(self._kept) > KEPT_MOST:
                # Targets come and go; what is still asked for is soon rendered again.
                self._kept.clear()
                self._documents.clear()
            self._kept[form, target] = moment, found
            return found

    def _json(self, moment: Moment) -> bytes:
        told: dict[int, bytes] = {}
        diagnoses: list[Diagnosis] = []
        for state in moment.states:
            for diagnosis, rendered in self._of(state, is_late=state.name in moment.late):
                told[id(diagnosis)] = rendered
                diagnoses.append(diagnosis)
        documents = b",".join(told[id(one)] for one in worst_first(diagnoses))
        watching = dumped([watched(one, is_late=one.name in moment.late) for one in moment.states])
        return b'"targets":[%s],"watching":%s' % (documents, watching)

    def _of(self, state: TargetState, *, is_late: bool) -> list[tuple[Diagnosis, bytes]]:
        held = self._documents.get(state.name)
        if held is None or held[0] is not state or held[1] != is_late:
            rows = [(one, dumped(document(one))) for one in shown(state, is_late=is_late)]
            held = self._documents[state.name] = (state, is_late, rows)
        return held[2]


def watched(state: TargetState, *, is_late: bool) -> Mapping[str, Any]:
    """How the watching of a target goes, for JSON."""
    return {
        "target": state.name,
        "url": state.url,
        "labels": dict(state.labels),
        "t": round(state.t_s, 3),
        "late": is_late,
        "interval_s": state.interval_s,
        "cycle_s": round(state.cycle_s, 6),
        "cycles": state.cycles,
        "failures": state.failures,
        "failing": state.failing,
        "sources": [
            {
                "name": source.name,
                "t": round(source.t_s, 3),
                "success": source.success,
                "duration_s": round(source.duration_s, 6),
                "error": source.error,
                "joined": source.joined,
            }
            for source in state.sources
        ],
    }
