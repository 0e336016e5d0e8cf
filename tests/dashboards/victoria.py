"""A real VictoriaMetrics that scrapes recordings as if live, with vmalert and the exported rules,
against the sidecar.

    python -m tests.dashboards.victoria [SPEED [NAME...]]

prints, for each recording, at how many evaluations the two disagree by more than `LATE_S`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.request import urlopen

from msgspec.structs import replace

from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, Flavor, groups, rule_files
from kneewatch.dashboards.prometheus.rule_group import Alert, Group, Plan, Record
from tests.collector.oracle import LOOPBACK, free_port
from tests.dashboards.parity import Difference
from tests.dashboards.playing import Play, compared, play_of, process, staged, summary_lines
from tests.programs import require
from tests.recordings import phases

EVALUATION_S = 1.0
LATE_S = 4.0
"""vmalert evaluates a rule before what the rules before it recorded can be read: a verdict comes up
to four evaluations after what it rests on."""


def played(play: Play, folder: Path, *, late_s: float = LATE_S) -> dict[str, list[Difference]]:
    """Where VictoriaMetrics with vmalert and the sidecar disagree, by recording."""
    plan = play.plan(EVALUATION_S)
    with staged(play) as stage:
        (folder / "rules.yml").write_text(rule_files(plan, Flavor.VICTORIA)[RULES_FILE])
        (folder / "scrapes.yml").write_text(json.dumps({"scrape_configs": stage.scrapes()}))
        url, alerting = (f"http://{LOOPBACK}:{free_port()}" for _ in range(2))
        store = [
            require("victoria-metrics"),
            f"-storageDataPath={folder}/data",
            f"-httpListenAddr={url.removeprefix('http://')}",
            f"-promscrape.config={folder}/scrapes.yml",
            "-search.latencyOffset=0s",
        ]
        ruler = [
            require("vmalert"),
            f"-rule={folder}/rules.yml",
            f"-datasource.url={url}",
            f"-remoteWrite.url={url}",
            f"-remoteRead.url={url}",
            f"-notifier.url=http://{stage.address}",
            f"-httpListenAddr={alerting.removeprefix('http://')}",
            "-remoteWrite.flushInterval=100ms",
        ]
        with (
            process(store, ready=f"{url}/health", log=folder / "store.log"),
            process(ruler, ready=f"{alerting}/health", log=folder / "ruler.log"),
        ):
            introduce(url, play, plan)
            stage.wait(after_s=late_s)
            return compared(url, play, stage, plan, steps=round(late_s / EVALUATION_S))


def introduce(url: str, play: Play, plan: Plan) -> None:
    """Show it every series that rules may record, two hours ago.

    VictoriaMetrics looks for series that it has never seen every 10 s: each rule would wait for
    the one before it, once, and nothing else of a recording of two minutes would be judged.
    """
    before_ms = round(1000 * (time.time() - 2 * 3600))
    lines = [
        f"{name}{{{','.join(f'{k}={json.dumps(v)}' for k, v in sorted(labels.items()))}}}"
        f" 0 {before_ms}"
        for name, pages in play.pages.items()
        for engine in _engines(name, pages)
        for group in groups(replace(plan, ordered=False))
        for rule in group.rules
        for name, labels in _series(group, rule, engine)
    ]
    with urlopen(
        f"{url}/api/v1/import/prometheus", "\n".join(lines).encode(), timeout=30
    ) as response:
        response.read()


def _engines(name: str, pages: Sequence[Entry]) -> Iterator[dict[str, str]]:
    """The labels that an instance's engines have in Prometheus."""
    body = next(entry.body for entry in pages if entry.body is not None)
    page = PageParser(Limits()).parse(body, content_type="")
    for series, _ in page.samples():
        if series.name == "vllm:num_requests_running":
            yield dict(series.labels) | {"job": "vllm", "instance": name}


def _series(
    group: Group, rule: Record | Alert, engine: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """What evaluating a rule writes for an engine."""
    own = {**engine, **rule.labels}
    if isinstance(rule, Record):
        yield rule.name, own
    else:
        alert = own | {"alertname": rule.name, "alertgroup": group.name}
        for state in ("pending", "firing"):
            yield "ALERTS", alert | {"alertstate": state}


def main() -> None:
    """Play what the command line names; all recordings at once, unless told."""
    speed, *names = sys.argv[1:] or ["1"]
    every = sorted({phase.capture.name.removesuffix(".jsonl.gz") for phase in phases()})
    with tempfile.TemporaryDirectory(prefix="kneewatch-victoria-") as folder:
        by_recording = played(play_of(names or every, speed=float(speed)), Path(folder))
    print("\n".join(summary_lines(by_recording)))
    sys.exit(any(by_recording.values()))


if __name__ == "__main__":
    main()
