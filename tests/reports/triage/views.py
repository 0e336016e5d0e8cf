"""Views of real recordings, as the endpoint would gather them from board and store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from msgspec.structs import replace

from kneewatch.diagnose.change import Interval
from kneewatch.diagnose.verdict import Verdict
from kneewatch.reports.health import SourceState
from kneewatch.reports.triage.view_model import (
    EngineView,
    TargetView,
    TriageView,
    cited,
)
from kneewatch.rules.rule import STATES, Severity
from tests.recordings import CAPTURES, diagnoses

INTERVAL_S = 2.0


@cache
def recorded(name: str) -> tuple[Verdict, ...]:
    """Every diagnosis of a recording, oldest first."""
    return tuple(diagnoses(CAPTURES / f"{name}.jsonl.gz"))


def until(name: str, seconds: float) -> list[Verdict]:
    """The diagnoses of a recording's first seconds."""
    recording = recorded(name)
    return [diagnosis for diagnosis in recording if diagnosis.t_s <= recording[0].t_s + seconds]


def intervals(recording: Sequence[Verdict]) -> list[Interval]:
    """The stages, causes and healths of diagnoses as stretches of time."""
    done: list[Interval] = []
    open_: dict[tuple[str, str], Interval] = {}
    for diagnosis in recording:
        now: dict[tuple[str, str], Severity] = {
            ("health", diagnosis.health): STATES[diagnosis.health]
        }
        if diagnosis.stage.severity is not None:
            now["stage", str(diagnosis.stage.number)] = diagnosis.stage.severity
        now |= {("cause", cause.id): cause.severity for cause in diagnosis.causes}
        for key in [key for key in open_ if key not in now]:
            done.append(replace(open_.pop(key), end_s=diagnosis.t_s))
        for (kind, what), severity in now.items():
            open_interval = open_.get((kind, what))
            if open_interval is None:
                open_[kind, what] = interval(kind, what, severity, diagnosis.t_s)
            elif severity > open_interval.severity:
                open_[kind, what] = replace(open_interval, severity=severity)
    return [*done, *open_.values()]


def interval(
    kind: str, what: str, severity: Severity, start_s: float, end_s: float | None = None
) -> Interval:
    """An interval that ended when it was last seen, or that goes on."""
    ended = "" if end_s is None else "ended"
    return Interval(kind, what, severity, start_s, start_s, end_s, ended)


def times(recording: Sequence[Verdict]) -> list[float]:
    """When diagnoses were made."""
    return [diagnosis.t_s for diagnosis in recording]


def series(recording: Sequence[Verdict], keys: Iterable[str]) -> dict[str, list[float]]:
    """Signals of diagnoses over time."""
    values = {key: [diagnosis.values.get(key) for diagnosis in recording] for key in keys}
    return {
        key: [math.nan if value is None else value for value in row]
        for key, row in values.items()
        if any(value is not None for value in row)
    }


def engine(recording: Sequence[Verdict]) -> EngineView:
    """An engine as of its last diagnosis."""
    return engine_view(recording[-1], recording)


def engine_view(shown: Verdict, recording: Sequence[Verdict]) -> EngineView:
    """An engine with this diagnosis, and its history."""
    return EngineView(
        shown, intervals(recording), times(recording), series(recording, cited(shown))
    )


def target(name: str, *engines: EngineView, **fields: object) -> TargetView:
    """A target with these engines."""
    last_s = engines[0].diagnosis.t_s if engines else None
    target_view = TargetView(
        name=name,
        url=f"http://{name}:8000/metrics",
        labels={"tier": "h100", "zone": "b"},
        engines=engines,
        interval_s=INTERVAL_S,
        last_s=last_s,
        sources=(SourceState("vllm", last_s or 0.0, success=True, duration_s=0.1),),
    )
    return replace(target_view, **fields)


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
    recording = recorded("kv_pressure_cascade")
    worst = max(
        range(len(recording)), key=lambda n: (recording[n].severity, recording[n].values["waiting"])
    )
    return view(target("kv_pressure_cascade", engine(recording[: worst + 1])))


def healthy() -> TriageView:
    """A real server without trouble."""
    return view(target("healthy_light", engine(recorded("healthy_light"))))


def unreadable() -> TriageView:
    """A real server that has just died."""
    recording = recorded("restart_mid_run")
    down = max(n for n, diagnosis in enumerate(recording) if not diagnosis.was_read)
    return view(target("restart_mid_run", engine(recording[: down + 1])))


def late() -> TriageView:
    """A healthy server of which nothing was heard for two minutes."""
    healthy_view = healthy()
    return replace(healthy_view, now_s=healthy_view.now_s + 120, until_s=healthy_view.until_s + 120)


def past() -> TriageView:
    """The cascade, seen an hour later, with what came after it."""
    recording = recorded("kv_pressure_cascade")
    shown = cascade().targets[0].engines[0]
    at_s = shown.diagnosis.t_s + 0.5
    later = engine_view(shown.diagnosis, recording)
    return replace(
        view(target("kv_pressure_cascade", later)),
        now_s=at_s + 3600,
        at_s=at_s,
        since_s=at_s - 120,
        until_s=at_s + 120,
    )


def shifted(shown: EngineView, by_s: float, **fields: Any) -> EngineView:  # noqa: ANN401
    """The same engine at another time, under another name."""
    diagnosis = shown.diagnosis
    stage, began_s = diagnosis.stage, diagnosis.stage.since_s
    stage = stage if began_s is None else replace(stage, since_s=began_s + by_s)
    causes = [replace(cause, since_s=(cause.since_s or 0.0) + by_s) for cause in diagnosis.causes]
    moved = [
        replace(i, start_s=i.start_s + by_s, end_s=None if i.end_s is None else i.end_s + by_s)
        for i in shown.intervals
    ]
    return EngineView(
        replace(diagnosis, t_s=diagnosis.t_s + by_s, stage=stage, causes=causes, **fields),
        moved,
        [t_s + by_s for t_s in shown.times],
        shown.series,
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
        target(
            f"vllm-{place}",
            shifted(shown, now_s - shown.diagnosis.t_s, target=f"vllm-{place}"),
        )
        for place, shown in enumerate(engines)
    ]
    unseen = TargetView("vllm-new", "http://vllm-new:8000/metrics", {}, (), 5.0, None)
    return view(*targets, unseen, single=False)


def many_engines() -> TriageView:
    """A target with data parallelism: one engine in trouble, three fine."""
    sick, calm = cascade().targets[0].engines[0], healthy().targets[0].engines[0]
    by_s = sick.diagnosis.t_s - calm.diagnosis.t_s
    fine = [shifted(calm, by_s, engine=str(number)) for number in (1, 2, 3)]
    return view(target("dp4", *fine[:1], sick, *fine[1:]))
