"""A concluded cause and its evidence, as verdicts contain them. Pure."""

from __future__ import annotations

from typing import Self, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.rules.rule import Severity
from kneewatch.rules.wire import (
    CauseId,
    Figure,
    Internal,
    UnixTime,
    rounded,
    to_ms,
    written,
    written_as,
)


class Evidence(Struct, frozen=True):
    """A measured value for or against a cause.

    - `signal`: the signal's key, or another name if the value is not a signal, such as
      scrape_failures.
    - `value`: the value, in the unit that ends the signal's key or that `text` names.
    - `threshold`: what the value is compared with, in the same unit; null if there is nothing.
    - `text`: the value and the threshold in words.
    """

    signal: str
    value: Figure | None = None
    threshold: Figure | None = None
    text: str = ""

    def rounded(self) -> Evidence:
        """The evidence with numbers as in documents."""
        return Evidence(self.signal, rounded(self.value), rounded(self.threshold), self.text)


class Counterfactual(Struct, frozen=True):
    """A value at which a cause would no longer be concluded.

    - `signal`: the signal's key.
    - `now`: its current value.
    - `at`: the value at which the cause would not be concluded.
    - `above`: true if the cause would not be concluded from there upwards, false if downwards.
    """

    signal: str
    now: Figure
    at: Figure
    above: bool


class Cause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A concluded cause with its evidence.

    - `id`: the cause's id.
    - `confidence`: 0 to 1, how certain the evidence makes the cause.
    - `severity`: info, warning or critical.
    - `since_s`: when the cause was first concluded; null if unknown, such as from a log without a
      year and time zone.
    - `seen_s`: the time that all numbers belong to. It is the verdict's time; during the clear
      time, the last time at which the cause was concluded. Null if unknown.
    - `summary`: what is wrong, in a sentence.
    - `evidence`: evidence for the cause, the most important first.
    - `against`: evidence against the cause.
    - `guide`: sections of the sizing guide.
    - `lever`: the first thing to do.
    - `explains`: ids of causes that follow from this one and are not listed beside it.
    - `unless`: values at which the cause would not have been concluded; only for a verdict's first
      cause.
    - `docs`: the address of the cause's page, a URL or a path on the server that answered.
    - `apart`: the cause explains no other cause now.
    - `root`: the cause now explains those in its record's `heads`; otherwise they explain it.
    """

    id: CauseId
    confidence: Figure = written(0.0)
    severity: Severity
    since_s: UnixTime | None = written_as("since", None)
    seen_s: UnixTime | None = written_as("seen", None)
    summary: str = written("")
    evidence: tuple[Evidence, ...] = written(())
    against: tuple[Evidence, ...] = written(())
    guide: tuple[str, ...] = written(())
    lever: str = written("")
    explains: tuple[CauseId, ...] = written(())
    unless: tuple[Counterfactual, ...] = written(())
    docs: str = ""
    apart: Internal[bool] = False
    root: Internal[bool] = False

    @property
    def badness(self) -> tuple[Severity, float]:
        """A sort key: severity, confidence."""
        return self.severity, self.confidence

    def rounded(self) -> Self:
        """The cause with times and numbers as in documents."""
        return replace(
            self,
            since_s=None if self.since_s is None else to_ms(self.since_s),
            seen_s=None if self.seen_s is None else to_ms(self.seen_s),
            evidence=tuple([item.rounded() for item in self.evidence]),
            against=tuple([item.rounded() for item in self.against]),
            unless=tuple(
                [
                    Counterfactual(point.signal, now, at, point.above)
                    for point in self.unless
                    if (now := rounded(point.now)) is not None
                    and (at := rounded(point.at)) is not None
                ]
            ),
        )


AnyCause = TypeVar("AnyCause", bound=Cause)


def told(cause: AnyCause) -> AnyCause:
    """A cause as documents contain it."""
    return replace(cause, apart=False, root=False)
