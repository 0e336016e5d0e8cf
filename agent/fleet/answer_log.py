"""The warnings and errors of a diagnosis's queries. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kneewatch.collector.errors import CollectError
from kneewatch.collector.prometheus.responses import Answer, Sample


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
