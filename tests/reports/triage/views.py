"""Views of real recordings, as the endpoint would gather them from board and store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.reports.triage.view_model import (
    EngineView,
    IntervalView,
    SeriesView,
    SourceView,
    TargetView,
    TriageView,
    cited,
)
from kneewatch.rules.rule import WORDS, Severity
from tests.recordings import CAPTURES, diagnoses

WORST = {word: severity for severity, word in WORDS.items()}
INTERVAL_S = 2.0


@cache
def recorded(name: str) -> tuple[Diagnosis, ...]:
    """Every diagnosis of a recording, oldest first."""
    return tuple(diagnoses(CAPTURES / f"{name}.jsonl.gz"))


def until(name: str, seconds: float) -> list[Diagnosis]:
    """The diagnoses of a recording's first seconds."""
    found = recorded(name)
    return [one for one in found if one.t_s <= found[0].t_s + seconds]


def intervals(found: Sequence[Diagnosis]) -> list[IntervalView]:
    """The stages, causes and healths of diagnoses as stretches of time."""
    done: list[IntervalView] = []
    open_: dict[tuple[str, str], IntervalView] = {}
    for one in found:
        now = {("health", one.health): one.health}
        if one.stage is not None:
            now["stage", str(one.stage.number)] = one.stage.severity.word
        now |= {("cause", cause.id): cause.severity.word for cause in one.causes}
        for key in [key for key in open_ if key not in now]:
            done.append(replace(open_.pop(key), end_s=one.t_s))
        for (kind, what), word in now.items():
            known = open_.get((kind, what))
            if known is None:
                open_[kind, what] = IntervalView(kind, what, word, one.t_s, None)
            elif WORST.get(word, Severity.OK) > WORST.get(known.severity, Severity.OK):
                open_[kind, what] = replace(known, severity=word)
    return [*done, *open_.values()]


def series(found: Sequence[Diagnosis], keys: Iterable[str]) -> dict[str, SeriesView]:
    """Signals of diagnoses over time."""
    times = [one.t_s for one in found]
    values = {key: [one.values.get(key) for one in found] for key in keys}
    return {
        key: SeriesView(times, [math.nan if value is None else value for value in row])
        for key, row in values.items()
        if any(value is not None for value in row)
    }


def engine(found: Sequence[Diagnosis]) -> EngineView:
    """An engine as of its last diagnosis."""
    return EngineView(found[-1], intervals(found), series(found, cited(found[-1])))


def target(name: str, *engines: EngineView, **fields: object) -> TargetView:
    """A target with these engines."""
    last_s = engines[0].diagnosis.t_s if engines else None
    made = TargetView(
        name=name,
        url=f"http://{name}:8000/metrics",
        labels={"tier": "h100", "zone": "b"},
        engines=engines,
        interval_s=INTERVAL_S,
        last_s=last_s,
        sources=(SourceView("vllm", last_s or 0.0, success=True),),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def view(*targets: TargetView, single: bool | None = None, back_s: float = 240.0) -> TriageView:
    """A page of targets just after their newest scrape."""
    now_s = 1.4 + max((t.last_s or 0.0 for t in targets), default=0.0)
    return TriageView(
        now_s=now_s,
        at_s=None,
        since_s=now_s - back_s,
        until_s=now_s,
        refresh_s=2.0,
        version="0.1.0",
        targets=targets,
        single=len(targets) == 1 if single is None else single,
    )


def cascade() -> TriageView:
    """A real server in stage 3."""
    found = recorded("kv_pressure_cascade")
    worst = max(range(len(found)), key=lambda n: (found[n].severity, found[n].values["waiting"]))
    return view(target("kv_pressure_cascade", engine(found[: worst + 1])))


def healthy() -> TriageView:
    """A real server without trouble."""
    return view(target("healthy_light", engine(recorded("healthy_light"))))


def unreadable() -> TriageView:
    """A real server that has just died."""
    found = recorded("restart_mid_run")
    down = max(n for n, one in enumerate(found) if not one.was_read)
    return view(target("restart_mid_run", engine(found[: down + 1])))


def late() -> TriageView:
    """A healthy server of which nothing was heard for two minutes."""
    made = healthy()
    return replace(made, now_s=made.now_s + 120, until_s=made.until_s + 120)


def past() -> TriageView:
    """The cascade, seen an hour later, with what came after it."""
    found = recorded("kv_pressure_cascade")
    shown = cascade().targets[0].engines[0]
    at_s = shown.diagnosis.t_s + 0.5
    later = EngineView(shown.diagnosis, intervals(found), series(found, cited(shown.diagnosis)))
    return replace(
        view(target("kv_pressure_cascade", later)),
        now_s=at_s + 3600,
        at_s=at_s,
        since_s=at_s - 120,
        until_s=at_s + 120,
    )


def shifted(one: EngineView, by_s: float, **fields: Any) -> EngineView:  # noqa: ANN401
    """The same engine at another time, under another name."""
    found = one.diagnosis
    stage = found.stage and replace(found.stage, since_s=found.stage.since_s + by_s)
    causes = [replace(cause, since_s=cause.since_s + by_s) for cause in found.causes]
    moved = [
        replace(i, start_s=i.start_s + by_s, end_s=None if i.end_s is None else i.end_s + by_s)
        for i in one.intervals
    ]
    return EngineView(
        replace(found, t_s=found.t_s + by_s, stage=stage, causes=causes, **fields),
        moved,
        {
            key: SeriesView([t + by_s for t in drawn.times], drawn.values)
            for key, drawn in one.series.items()
        },
    )


def fleet(count: int = 8) -> TriageView:
    """Many targets at one time: a cascade, a dead one, notes, one never seen, healthy ones."""
    names = ("kv_pressure_cascade", "lora_thrash", "itl_spikes_no_chunked", "prefix_lost")
    engines = [cascade().targets[0].engines[0], unreadable().targets[0].engines[0]]
    engines += [engine(recorded(name)[:40]) for name in names[1:]]
    calm = healthy().targets[0].engines[0]
    engines += [calm] * (count - len(engines) - 1)
    now_s = calm.diagnosis.t_s
    targets = [
        target(f"vllm-{place}", shifted(one, now_s - one.diagnosis.t_s, target=f"vllm-{place}"))
        for place, one in enumerate(engines)
    ]
    unseen = TargetView("vllm-new", "http://vllm-new:8000/metrics", {}, (), 5.0, None)
    return view(*targets, unseen, single=False)


def many_engines() -> TriageView:
    """A target with data parallelism: one engine in trouble, three fine."""
    sick, calm = cascade().targets[0].engines[0], healthy().targets[0].engines[0]
    by_s = sick.diagnosis.t_s - calm.diagnosis.t_s
    fine = [shifted(calm, by_s, engine=str(number)) for number in (1, 2, 3)]
    return view(target("dp4", *fine[:1], sick, *fine[1:]))
