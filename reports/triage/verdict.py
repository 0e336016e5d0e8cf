"""How an engine stands on the page: its verdict, unless its numbers are too old to trust. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.reports.coverage import gaps
from kneewatch.reports.diagnosis_text import VERDICTS, clearing_words, notable, summary_words
from kneewatch.reports.formatting import span
from kneewatch.reports.triage.view_model import EngineView, IntervalView, TargetView, TriageView
from kneewatch.rules.rule_state import Finding

LATE_INTERVALS = 3.0
LATE_S = 15.0
"""Numbers older than three intervals, and than this, say nothing of now."""

RANKS: Mapping[str, int] = {"ok": 0, "info": 1, "unknown": 2, "warning": 3, "critical": 4}
"""Unknown is worse than a note: somebody must look."""

TALLY = {
    "critical": "critical",
    "warning": "warning",
    "unknown": "unknown",
    "info": "healthy, with a note",
    "ok": "healthy",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """One engine of a target, or a target without any (`engine` is None).

    `health` is the verdict's word; `late` says that the newest numbers are too old to call the
    engine healthy.
    """

    target: TargetView
    engine: EngineView | None
    health: str
    late: bool
    age_s: float | None

    @property
    def rank(self) -> int:
        """How bad, the worst highest."""
        return RANKS[self.health]

    @property
    def verdict(self) -> str:
        """The verdict's word as all output has it."""
        return VERDICTS[self.health]

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What is said of the engine."""
        return None if self.engine is None else self.engine.diagnosis

    @property
    def intervals(self) -> Sequence[IntervalView]:
        """The engine's intervals. Of late numbers none goes on: what held then may not hold now."""
        if self.engine is None:
            return ()
        if not self.late:
            return self.engine.intervals
        seen = [one for one in self.engine.intervals if one.start_s <= (self.target.last_s or 0.0)]
        return [
            replace(one, end_s=self.target.last_s) if one.end_s is None else one for one in seen
        ]

    @property
    def told_s(self) -> float:
        """The moment that durations are counted to: what goes on goes on at the page's, also of a
        target that fails and is asked ever more rarely; what is late is as it was."""
        if self.late or self.age_s is None or self.target.last_s is None:
            return 0.0 if self.engine is None else self.engine.diagnosis.t_s
        return self.target.last_s + self.age_s

    @property
    def who(self) -> str:
        """Which engine of the target; empty where none is known."""
        found = self.diagnosis
        if found is None or not (found.model or found.engine):
            return ""
        return f"model {found.model or '?'}, engine {found.engine or '?'}"

    @property
    def headline(self) -> str:
        """What is the matter, in a sentence."""
        found = self.diagnosis
        if found is None:
            return sentence(self.target.error) or "This target has not been scraped yet."
        if self.late and self.health == "unknown":
            return (
                f"No news for {span(self.age_s or 0.0)}: what was {VERDICTS[found.health]} then "
                "need not be so now."
            )
        if found.causes:
            return summary_words(found.causes[0], found.t_s)
        return _without_cause(found)


def sentence(words: str) -> str:
    """Words as a sentence: a capital in front, a full stop behind; nothing stays nothing."""
    words = words.strip()
    end = "" if not words or words.endswith((".", "!", "?")) else "."
    return words[:1].upper() + words[1:] + end


def _without_cause(found: Diagnosis) -> str:
    if not found.was_read:
        return sentence(found.stage_unknown)
    if found.health == "unknown":
        left = (gaps(found) or ["wait for the next scrapes"])[0]
        return f"Not enough was seen to judge. {sentence(left)}"
    over = list[Finding]()
    for state in ("critical", "warning", "info"):
        for finding in notable(found, state):
            if finding.clearing is None:
                return f"{finding.rule.summary}."
            over.append(finding)
    if found.stage is None:
        return f"The KV cascade's stage is unknown: {sentence(found.stage_unknown)}"
    if found.stage.severity:
        return f"The KV cascade is at stage {found.stage.number} ({found.stage.name})."
    if over:
        worst = max(over, key=lambda finding: finding.held)
        return f"Nothing is wrong now: {clearing_words(worst, found.t_s)}."
    return "Nothing wrong was found."


def standings(target: TargetView, view: TriageView) -> list[Standing]:
    """The engines of a target, worst first; never none."""
    age_s = None if target.last_s is None else max(0.0, view.moment_s - target.last_s)
    late = age_s is not None and age_s > max(LATE_S, LATE_INTERVALS * target.interval_s)
    if not target.engines:
        return [Standing(target, None, "unknown", late, age_s)]
    found = [
        Standing(target, engine, _health(engine.diagnosis.health, late=late), late, age_s)
        for engine in target.engines
    ]
    return sorted(found, key=lambda standing: -standing.rank)


def _health(word: str, *, late: bool) -> str:
    """The health word; what was fine a while ago is not known to be, and a strange word is not."""
    word = word if word in RANKS else "unknown"
    return "unknown" if late and RANKS[word] < RANKS["unknown"] else word


def tally(found: Iterable[Standing]) -> list[tuple[str, int, str]]:
    """How many stand how, worst first: health word, count, words."""
    counts = Counter(standing.health for standing in found)
    return [(word, counts[word], words) for word, words in TALLY.items() if counts[word]]
