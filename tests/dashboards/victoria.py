"""A real VictoriaMetrics that scrapes recordings as if live, with vmalert and the exported rules,
against the sidecar.

    python -m tests.dashboards.victoria [SPEED [NAME...]]

prints, for each recording, at how many evaluations the two disagree by more than `STEPS`, or
`CAUSE_STEPS` where it is about a cause.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.request import urlopen

from msgspec.structs import replace

from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits, PageParser
from kneewatch.dashboards.prometheus.rule_files import RULES_FILE, Flavor, groups, rule_files
from kneewatch.dashboards.prometheus.rule_group import Alert, Group, Plan, Record
from kneewatch.diagnose.causes.ranking import BY_ID
from tests.collector.oracle import LOOPBACK, free_port
from tests.dashboards.parity import Difference
from tests.dashboards.playing import Play, compared, play_of, process, staged, summary_lines
from tests.programs import require
from tests.recordings import phases

EVALUATION_S = 1.0
STEPS = 4
"""vmalert evaluates a rule before what the rules before it recorded can be read: a stage or finding
comes up to four evaluations after what it rests on."""

CAUSE_STEPS = 10
"""A cause rests on more records: the stage's evidence, the stage, the gate, the confidence, the
severity, whether it is met, since when, whether it is held, the cause. The last evaluation is for
the write."""

LABEL_OF = {"kneewatch:cause": "cause", "kneewatch:finding": "rule"}
"""The label that tells the series of these records apart, by the start of their names."""


def played(play: Play, folder: Path) -> dict[str, list[Difference]]:
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
            stage.wait(after_s=CAUSE_STEPS * EVALUATION_S)
            soon, late = (
                compared(url, play, stage, plan, steps=steps) for steps in (STEPS, CAUSE_STEPS)
            )
            return {
                name: [
                    *(difference for difference in soon[name] if difference.key not in BY_ID),
                    *(difference for difference in late[name] if difference.key in BY_ID),
                ]
                for name in soon
            }


def introduce(url: str, play: Play, plan: Plan) -> None:
    """Show it every series that rules may record, two hours ago.

    VictoriaMetrics looks for series that it has never seen every 10 s: each rule would wait for
    the one before it, once, and nothing else of a recording of two minutes would be judged.
    """
    before_ms = round(1000 * (time.time() - 2 * 3600))
    exported = groups(replace(plan, ordered=False))
    ids = {
        label: {
            rule.labels[label] for group in exported for rule in group.rules if label in rule.labels
        }
        for label in LABEL_OF.values()
    }
    lines = [
        f"{name}{{{','.join(f'{k}={json.dumps(v)}' for k, v in sorted(labels.items()))}}}"
        f" 0 {before_ms}"
        for name, pages in play.pages.items()
        for engine in _engines(name, pages)
        for group in exported
        for rule in group.rules
        for name, labels in _series(group, rule, engine, ids)
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
    group: Group,
    rule: Record | Alert,
    engine: Mapping[str, str],
    ids: Mapping[str, Collection[str]],
) -> Iterator[tuple[str, dict[str, str]]]:
    """What evaluating a rule writes for an engine. `ids` are the causes and rules by their label:
    some rules are of all at once, and take the label from what they read."""
    own = {**engine, **rule.labels}
    if isinstance(rule, Alert):
        alert = own | {"alertname": rule.name, "alertgroup": group.name}
        for state in ("pending", "firing"):
            yield "ALERTS", alert | {"alertstate": state}
        return
    label = next((each for start, each in LABEL_OF.items() if rule.name.startswith(start)), None)
    if label is None or label in own:
        yield rule.name, own
    else:
        yield from ((rule.name, {**own, label: one_id}) for one_id in ids[label])


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
