"""What has changed with a target since its last cycle, said in the log once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kneewatch.collector.base import CollectError
from kneewatch.diagnose.diagnosis import Diagnosis
from kneewatch.diagnose.room import ENGINES_MAX

log = logging.getLogger(__name__)

LONGER = 1.3
"""By so much a wait has grown and not only varied."""

LINES_MAX, LINES_S = 100, 600.0
"""So many lines about a target's engines are written within so long: labels that change with every
scrape must not fill a disk with them. What is left out is counted."""

Key = tuple[str, str]


class Lines:
    """What the log takes of one target's engines."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since_s = 0.0
        self._written = self._left_out = 0

    def begin(self, t_s: float) -> None:
        """A cycle begins at `t_s`; a while that is over ends with the number of lines left out."""
        if 0 <= t_s - self._since_s < LINES_S:
            return
        if self._left_out:
            log.warning(
                "changes were left out of the log target=%s lines=%s", self._name, self._left_out
            )
        self._since_s, self._written, self._left_out = t_s, 0, 0

    def say(self, message: str, *args: object) -> None:
        """Write a line, or count it."""
        if self._written < LINES_MAX:
            self._written += 1
            log.info(message, *args)
            return
        if not self._left_out:
            log.warning(
                "too many changes for the log, more are only counted target=%s most=%s in_s=%.0f",
                self._name,
                LINES_MAX,
                LINES_S,
            )
        self._left_out += 1


class Changes:
    """What was last told of one target: up or down, stage and causes of each engine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._answers: bool | None = None
        self._interval_s = 0.0
        self._failed = 0
        self._told: dict[Key, tuple[int | None, frozenset[str]]] = {}
        self._lines = Lines(name)

    def scraped(self, error: CollectError | None, interval_s: float) -> None:
        """A scrape gave a page (`error` is None) or none; the next one follows in `interval_s`."""
        if error is None:
            if self._answers is False:
                log.info("target answers again target=%s failed=%s", self._name, self._failed)
            elif self._answers is None:
                log.info("target answers target=%s", self._name)
            self._answers, self._failed, self._interval_s = True, 0, interval_s
            return
        self._failed += 1
        if self._answers is not False:
            log.warning(
                "target does not answer target=%s error=%s try=%s", self._name, error, error.hint
            )
            self._interval_s = interval_s
        elif interval_s > LONGER * self._interval_s:
            log.info(
                "target is left alone for longer target=%s interval_s=%.1f failed=%s",
                self._name,
                interval_s,
                self._failed,
            )
            self._interval_s = interval_s
        self._answers = False

    def judged(self, diagnoses: Sequence[Diagnosis]) -> None:
        """What is said of each engine now."""
        if diagnoses:
            self._lines.begin(diagnoses[0].t_s)
        self._forget(diagnoses)
        for diagnosis in diagnoses:
            if not diagnosis.was_read:
                continue  # that it cannot be read was said already
            key = diagnosis.model, diagnosis.engine
            causes = frozenset(cause.id for cause in diagnosis.causes)
            was_stage, was_causes = self._told.get(key, (0, frozenset[str]()))
            number = was_stage if diagnosis.stage is None else diagnosis.stage.number
            self._told[key] = number, causes
            if number != was_stage:
                self._stage(diagnosis, was_stage)
            for cause in diagnosis.causes:
                if cause.id not in was_causes:
                    self._lines.say(
                        "cause begins target=%s model=%s engine=%s cause=%s severity=%s "
                        "confidence=%s summary=%s",
                        self._name,
                        *key,
                        cause.id,
                        cause.severity.word,
                        cause.confidence,
                        cause.summary,
                    )
            for gone in sorted(was_causes - causes):
                self._lines.say(
                    "cause ends target=%s model=%s engine=%s cause=%s", self._name, *key, gone
                )

    def _forget(self, diagnoses: Sequence[Diagnosis]) -> None:
        """Keep no more engines than a target may have: first those that nothing is said of."""
        if len(self._told) > ENGINES_MAX:
            now = {(one.model, one.engine) for one in diagnoses}
            self._told = {key: told for key, told in self._told.items() if key in now}

    def _stage(self, diagnosis: Diagnosis, before: int | None) -> None:
        stage = diagnosis.stage
        if stage is not None:
            self._lines.say(
                "stage changes target=%s model=%s engine=%s before=%s now=%s name=%s severity=%s",
                self._name,
                diagnosis.model,
                diagnosis.engine,
                before,
                stage.number,
                stage.name,
                stage.severity.word,
            )
