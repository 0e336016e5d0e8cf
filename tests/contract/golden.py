"""What each cause concludes on stored facts: the expected side of the contract.

`python -m tests.contract.golden` rewrites tests/contract/causes.json after a deliberate change of a
record; read the diff, each line of it is a verdict that became another.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import CauseRecord
from kneewatch.diagnose.engine.diagnosis import CauseTracker
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.conditions import Check, nodes
from tests.contract.situations import SITUATIONS
from tests.contract.variants import Variation, bases, changes

STORE = Path(__file__).with_name("causes.json")
TRACKED_S = 7_500
"""How long a cause is followed to see when it is reported and when it ends."""

Verdict = tuple[float | None, str | None, str]
"""Confidence and severity (None and None where nothing is concluded), and the names of those
conditions that hold now and must hold for a while; `apart` where the cause explains nothing, `over`
where it would end at once."""


class Stored(Struct, frozen=True):
    """What is expected around one situation: when its cause is reported and gone, and each change
    with its facts and the verdict."""

    tracked: list[int | None] | None
    rows: list[tuple[Variation, Facts, Verdict]]


class Judge:
    """A record, ready to judge facts."""

    def __init__(self, record: CauseRecord) -> None:
        self.record = record
        held = (node for node in nodes(record.forms) if isinstance(node, Check))
        self._over = None if record.over is None else record.over.python()
        self._held = {(node.name, node.for_s.value): node.of.python() for node in held}

    def verdict(self, facts: Facts) -> Verdict:
        """What the record concludes of facts."""
        cause = self.record.examine(facts)
        names = [name for (name, _), holds in self._held.items() if holds(facts)]
        names += ["over"] if self._over is not None and self._over(facts) else []
        if cause is None:
            return None, None, " ".join(names)
        names += ["apart"] * cause.apart + ["root"] * cause.root
        return cause.confidence, cause.severity.word, " ".join(names)


def tracked(record: CauseRecord, cause: Cause) -> list[int | None]:
    """Seconds after which a cause is reported while it is concluded, and gone once it is not."""
    tracker = CauseTracker[Cause](scale=1.0, records={record.id: record})
    shown_s = next((t for t in range(TRACKED_S) if tracker.update(t, [cause])), None)
    if shown_s is None:
        return [None, None]
    gone = next((t for t in range(TRACKED_S) if not tracker.update(shown_s + t, [])), None)
    return [shown_s, gone]


def computed() -> dict[str, dict[str, Any]]:
    """All rows, by the name of the situation that concludes the cause."""
    rows: dict[str, dict[str, Any]] = {}
    for name, record, base in bases():
        judge, cause = Judge(record), record.examine(base.facts())
        assert (cause is None) == (": not" in name), name
        rows[name] = {
            "tracked": None if cause is None else tracked(record, cause),
            "rows": [
                [stored(change), *judge.verdict(change.on(base).facts())]
                for change in {change.label: change for change in changes(record, base)}.values()
            ],
        }
    return rows


def stored(change: Variation) -> dict[str, Any]:
    """A change as JSON; what it leaves alone is left out."""
    fields = ("values", "recent", "quiet", "streaks_s", "config", "observed_s", "targets")
    return {name: value for name in fields if (value := getattr(change, name)) not in (None, {})}


@cache
def read() -> dict[str, Stored]:
    """The stored rows, by situation."""
    store: dict[str, Stored] = {}
    for name, entry in json.loads(STORE.read_text()).items():
        rows = [(Variation(**change), tuple(verdict)) for change, *verdict in entry["rows"]]
        store[name] = Stored(entry["tracked"], [(change, facts, verdict) for change, verdict in rows
                             for facts in [change.on(SITUATIONS[name]).facts()]])  # fmt: skip
    return store


def differs(record: CauseRecord, name: str, store: Stored) -> str:
    """The first stored verdict that a record does not give, in words; empty where there is none."""
    judge = Judge(record)
    for change, facts, verdict in store.rows:
        if (now := judge.verdict(facts)) != verdict:
            return f"{name}, {change.label}: stored {verdict}, now {now}"
    cause = record.examine(store.rows[0][1])
    moments = None if cause is None else tracked(record, cause)
    return "" if moments == store.tracked else f"{name}: reported and gone after {moments} s"


def main() -> None:
    """Rewrite the store."""
    lines = [
        f'  {json.dumps(name)}: {{"tracked": {json.dumps(entry["tracked"])}, "rows": [\n    '
        + ",\n    ".join(json.dumps(row) for row in entry["rows"])
        + "\n  ]}"
        for name, entry in computed().items()
    ]
    STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
