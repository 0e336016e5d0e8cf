"""A fleet and its signals from Prometheus or what speaks its API. I/O edge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kneewatch.agent.fleet.config import fleet_config, source_settings
from kneewatch.agent.fleet.snapshot import observe
from kneewatch.agent.mcp.documents import HistoryRow
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.stated_deployment import stated
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.collector.signals.expr import Dialect
from kneewatch.collector.signals.vllm import VLLM_SIGNALS
from kneewatch.diagnose.fleet.diagnosis import diagnose
from kneewatch.reports.diagnosis_text import Style
from kneewatch.reports.fleet_json import document
from kneewatch.reports.fleet_text import text

SIGNALS = {signal.key: signal for signal in VLLM_SIGNALS}


@dataclass(frozen=True, slots=True)
class MetricsSystem:
    """Asks a metrics system; `selector` restricts all series."""

    url: str
    settings: Settings
    selector: str = ""

    def fleet(self, at_s: float | None) -> tuple[str, dict[str, object]]:
        """The fleet now or at a moment, as text and as `kneewatch.fleet/1`.

        Raises:
            CollectError: the metrics system does not answer, or has no series of vLLM.
        """
        profile = self.settings.profile(stated=stated(self.settings))
        config = fleet_config(self.settings, self.selector, at_s=at_s)
        with PrometheusSource(self.url, source_settings(self.settings)) as source:
            diagnosis = diagnose(observe(source, config), profile)
        docs_url = self.settings.docs_url
        return text(diagnosis, Style(docs_url=docs_url)), document(diagnosis, docs_url=docs_url)

    def history(
        self, target: str, signals: Sequence[str], times_s: Sequence[float]
    ) -> list[HistoryRow]:
        """Values of a target, which is a pod or an address, at evenly spaced times.

        Raises:
            CollectError: the metrics system does not answer.
        """
        quoted = target.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        with PrometheusSource(self.url, source_settings(self.settings)) as source:
            for label in ("pod", "instance"):
                selector = ",".join(part for part in (f'{label}="{quoted}"', self.selector) if part)
                dialect = Dialect(self.settings["window_s"], selector=selector)
                rows = [
                    row for signal in signals for row in _rows(source, signal, dialect, times_s)
                ]
                if rows:
                    return rows
        return []


def _rows(
    source: PrometheusSource, signal: str, dialect: Dialect, times_s: Sequence[float]
) -> Iterator[HistoryRow]:
    """Yields a row for each engine; none for a signal that PromQL cannot express."""
    query = SIGNALS[signal].expr.promql(dialect)
    if query is None:
        return
    first_s, step_s = times_s[0], times_s[1] - times_s[0]
    values: dict[tuple[str, str], list[float | None]] = {}
    for piece in source.range(query, from_s=first_s, to_s=times_s[-1], step_s=step_s):
        for track in piece.tracks:
            engine = track.labels.get("model_name", ""), track.labels.get("engine", "")
            row = values.setdefault(engine, [None] * len(times_s))
            for t_s, value in track.points:
                row[round((t_s - first_s) / step_s)] = value
    for (model, engine_name), row in values.items():
        yield model, engine_name, signal, row
