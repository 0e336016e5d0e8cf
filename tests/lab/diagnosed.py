"""`kneewatch diagnose` as its users run it, a process of its own, and what it said. I/O edge."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

PROGRAM = Path(sys.executable).with_name("kneewatch")
INTERVAL_S, WATCH_S, WINDOW_S = 2, 20, 15
SAMPLED_S = WINDOW_S // INTERVAL_S * INTERVAL_S
"""From the first scrape in the window to the last: what its means are made of."""

ENDS_WITHIN_S = 40.0
KILLED = -9


class Said(Struct, frozen=True):
    """What one run said. `document` is empty when it was not one JSON document."""

    status: int
    stdout: str
    stderr: str
    document: dict[str, Any]

    @property
    def to_s(self) -> float:
        """When the last page was scraped, unix seconds; NaN when nothing was said."""
        return float(self.document.get("t", math.nan))

    @property
    def from_s(self) -> float:
        """When the first page in the window was scraped."""
        return self.to_s - SAMPLED_S

    @property
    def stage(self) -> int | None:
        """The stage's number."""
        number = self.document.get("stage", {}).get("number")
        return None if number is None else int(number)

    @property
    def causes(self) -> list[tuple[str, str]]:
        """Ids and severities of the causes, the first one first."""
        return [(cause["id"], cause["severity"]) for cause in self.document.get("causes", [])]

    @property
    def short(self) -> str:
        """Status, health, stage and first cause in a few words."""
        if not self.document:
            return f"exit {self.status}, no document"
        first = self.causes[0][0] if self.causes else "no cause"
        return f"exit {self.status}, {self.document['health']}, stage {self.stage}, {first}"

    @property
    def recommendations(self) -> list[dict[str, Any]]:
        """The recommendations, best first."""
        return list(self.document.get("recommendations", []))

    def signal(self, key: str) -> float | None:
        """A signal's value."""
        value = self.document.get("signals", {}).get(key)
        return None if value is None else float(value)


def say(url: str, *options: str, watched_s: float = WATCH_S) -> Said:
    """What `kneewatch diagnose` says of a server as JSON, with further options if any."""
    status, stdout, stderr = run(
        *("diagnose", url, "--format", "json", "--for", f"{watched_s:.0f}s"),
        *("--interval", f"{INTERVAL_S}s", "--window", f"{WINDOW_S}s"),
        *options,
        timeout_s=watched_s + ENDS_WITHIN_S,
    )
    document: dict[str, Any] = {}
    with suppress(json.JSONDecodeError):
        document = json.loads(stdout)
    return Said(status, stdout, stderr, document)


def run(*arguments: str, timeout_s: float = WATCH_S + ENDS_WITHIN_S) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of kneewatch, with none of the caller's settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KNEEWATCH_")}
    try:
        done = subprocess.run(
            [str(PROGRAM), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        return KILLED, "", f"no end after {timeout_s:.0f} s: {exc.stderr!r}"
    return done.returncode, done.stdout, done.stderr
