"""The queries of one diagnosis: several in one request, with their errors. I/O edge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kneewatch.collector.errors import CollectError
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.collector.prometheus.responses import Answer, Sample, Track

KEY = "kneewatch_query"
"""The label that distinguishes the samples of several queries in one request."""

QUERIES_MAX, REQUEST_CHARACTERS_MAX = 6, 8000
"""Most queries and characters in one request: servers limit its time and its length
(VictoriaMetrics: 16 KiB)."""

OF_THE_QUERY = frozenset({"query", "timeout", "too_large"})
"""Errors of a request that may be caused by one of its queries: each is then sent separately."""


@dataclass(slots=True)
class AnswerLog:
    """Collects the warnings and errors of answers."""

    warnings: dict[str, None] = field(default_factory=dict[str, None])
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def samples(self, key: str, answer: Answer | CollectError) -> Sequence[Sample]:
        """An answer's samples; empty for an error."""
        if isinstance(answer, CollectError):
            self.failed[key] = str(answer)
            return ()
        self.warnings.update(dict.fromkeys(answer.warnings))
        return answer.samples


@dataclass(frozen=True, slots=True)
class QueryMoment:
    """Sends queries for one moment, and logs their errors and warnings."""

    source: PrometheusSource
    log: AnswerLog
    at_s: float

    def instants(self, queries: Mapping[str, str]) -> dict[str, Sequence[Sample]]:
        """The samples of each query; empty for an error."""
        parts = {" ".join(part): part for part in _parts(queries)}
        requests = {name: _joined(part) for name, part in parts.items()}
        alone: dict[str, str] = {}
        by_key: dict[str, Sequence[Sample]] = {}
        for name, answer in self.source.instants(requests, self.at_s).items():
            part = parts[name]
            if isinstance(answer, CollectError) and answer.kind in OF_THE_QUERY and len(part) > 1:
                alone |= part
                continue
            for key in part:
                by_key[key] = _samples_of(key, self.log.samples(key, answer), len(part))
        again = self.source.instants(alone, self.at_s)
        by_key |= {key: self.log.samples(key, answer) for key, answer in again.items()}
        return {key: by_key[key] for key in queries}

    def tracks(self, key: str, selector: str) -> Sequence[Track]:
        """The samples of a range selector, as they were scraped; empty for an error."""
        try:
            piece = self.source.samples(selector, self.at_s)
        except CollectError as exc:
            self.log.failed[key] = str(exc)
            return ()
        self.log.warnings.update(dict.fromkeys(piece.warnings))
        return piece.tracks


def _parts(queries: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields the queries of each request."""
    part: dict[str, str] = {}
    for key, query in queries.items():
        length = sum(map(len, part.values())) + len(query)
        if part and (len(part) == QUERIES_MAX or length > REQUEST_CHARACTERS_MAX):
            yield part
            part = {}
        part[key] = query
    if part:
        yield part


def _joined(part: Mapping[str, str]) -> str:
    """One query that combines several, each with its key as a label."""
    if len(part) == 1:
        return next(iter(part.values()))
    return " or ".join(
        f'label_replace({query}, "{KEY}", "{key}", "", "")' for key, query in part.items()
    )


def _samples_of(key: str, samples: Sequence[Sample], queries: int) -> Sequence[Sample]:
    """The samples of one of several combined queries, without the label KEY."""
    if queries == 1:
        return samples
    return [
        replace(sample, labels={name: v for name, v in sample.labels.items() if name != KEY})
        for sample in samples
        if sample.labels.get(KEY) == key
    ]
