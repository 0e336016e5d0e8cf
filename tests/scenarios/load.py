"""A scenario: an engine whose knobs are turned at given times, and the pages that it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.stream import TargetStream
from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.rule import Severity
from tests.incidents.rebuilt import RIGHT_FROM, worded
from tests.scenarios.engine import Engine, Knobs
from tests.simulator.page import NEWEST, START_S, WITH_SPECULATION, PageWriter

EVERY_S = 5.0
CALM_S, BEGINS_S, SEEN_S, CLEARED_S = 60.0, 240.0, 90.0, 150.0
"""A process settles; the usual time at which a fault begins; the usual time after which it must be
told, and after its end be over."""

HTTP = re.compile(r'^http_requests_total\{(.*)status="2xx"\} .*$', re.MULTILINE)
FILES = re.compile(r"^process_open_fds .*$", re.MULTILINE)

Turns = Mapping[float, Mapping[str, float | tuple[float, float, float]]]
"""New values of knobs, by time. A triple: from a value to another within so many seconds."""


class Scenario(Struct, frozen=True, kw_only=True):
    """A load. `want`: causes of which one must come first; empty: nothing at warning or worse.

    `from_s`, `until_s`: the time of the fault, which must be told after `seen_s`. `maybe`: what may
    be said at other times, too. `enough`: the share of scrapes in which it must be told. After
    `cleared_s` from its end it must be over.
    """

    name: str
    knobs: Knobs
    turns: Turns
    want: tuple[str, ...] = ()
    maybe: tuple[str, ...] = ()
    from_s: float = BEGINS_S
    seen_s: float = SEEN_S
    until_s: float = 560.0
    cleared_s: float = CLEARED_S
    lasts_s: float = 800.0
    least: Severity = Severity.WARNING
    enough: float = RIGHT_FROM

    def pages(self, seed: int = 1) -> Iterator[tuple[float, str | None]]:
        """The page of each scrape, by time since the start; None while nothing answers."""
        knobs, rng = replace(self.knobs), Random(seed)
        engine = writer = None
        process, at_s, begun_s = knobs.process, 0.0, -86_400.0
        while at_s < self.lasts_s:
            self._turn(knobs, at_s)
            if knobs.process != process or knobs.down:
                engine, process, begun_s = None, knobs.process, at_s
            at_s += EVERY_S
            if knobs.down:
                yield at_s, None
                continue
            if engine is None or writer is None:
                engine = Engine(knobs, rng, at_s - EVERY_S)
                form = WITH_SPECULATION if knobs.drafts else NEWEST
                writer = PageWriter(engine, model="m", form=form, started_s=START_S + begun_s)
            engine.run(at_s)
            yield at_s, _with_calls(writer.page(), engine)

    def _turn(self, knobs: Knobs, at_s: float) -> None:
        for from_s, turns in sorted(self.turns.items()):
            if at_s < from_s:
                break
            for name, value in turns.items():
                if isinstance(value, tuple):
                    begin, end, over_s = value
                    value = begin + (end - begin) * min(1.0, (at_s - from_s) / over_s)
                setattr(knobs, name, value)

    def verdicts(
        self, seed: int = 1, profile: Profile | None = None
    ) -> Iterator[tuple[float, Verdict]]:
        """The diagnosis after each scrape."""
        stream = TargetStream("m@r0", profile or Profile(), Limits())
        for at_s, body in self.pages(seed):
            t_s = START_S + at_s
            if body is None:
                yield at_s, stream.judge(t_s, CollectError("refused", kind="refused"))[0]
            else:
                yield at_s, stream.take(t_s, body, "text/plain", 200)[0]


def _with_calls(page: str, engine: Engine) -> str:
    """The page with the API server's calls and open connections."""
    lines = [f'http_requests_total{{\\1status="2xx"}} {float(engine.answered)}']
    if engine.failed:
        lines.append(f'http_requests_total{{\\1status="5xx"}} {float(engine.failed)}')
    return FILES.sub(
        f"process_open_fds {40.0 + engine.in_flight}", HTTP.sub("\n".join(lines), page)
    )


class Said(Struct, frozen=True):
    """What was said: before the fault, while it must be told, and after it is over."""

    scenario: Scenario
    before: Sequence[Verdict]
    judged: Sequence[Verdict]
    after: Sequence[Verdict]

    @property
    def share(self) -> float:
        """Share of the judged scrapes that are right."""
        return sum(map(self._is_right, self.judged)) / len(self.judged)

    def _is_right(self, verdict: Verdict) -> bool:
        scenario, first = self.scenario, verdict.causes[0] if verdict.causes else None
        if not scenario.want:
            return self._is_calm(verdict)
        return first is not None and first.id in scenario.want and first.severity >= scenario.least

    def _is_calm(self, verdict: Verdict) -> bool:
        loud = [cause.id for cause in verdict.causes if cause.severity >= Severity.WARNING]
        return (verdict.severity < Severity.WARNING or bool(loud)) and all(
            cause in self.scenario.maybe for cause in loud
        )

    @property
    def needless(self) -> str:
        """The first warning before the fault or after it; empty if there is none."""
        loud = [each for each in (*self.before, *self.after) if not self._is_calm(each)]
        return worded(loud[0]) if loud else ""

    @property
    def right(self) -> bool:
        """Whether it was told right, and nothing else was said at warning or worse."""
        return (
            self.share >= (self.scenario.enough if self.scenario.want else 1.0)
            and not self.needless
        )


def said(scenario: Scenario, seed: int = 1) -> Said:
    """What was said of a scenario."""
    told = list(scenario.verdicts(seed))
    from_s, until_s = scenario.from_s, scenario.until_s

    def between(first_s: float, last_s: float) -> list[Verdict]:
        return [verdict for at_s, verdict in told if first_s <= at_s <= last_s]

    seen_s = scenario.seen_s if scenario.want else 0.0
    return Said(
        scenario,
        between(CALM_S, from_s - EVERY_S),
        between(from_s + seen_s, until_s),
        between(until_s + scenario.cleared_s, scenario.lasts_s),
    )
