"""All real incidents: a table of `make accuracy`."""

from __future__ import annotations

from tests.incidents import (
    fifth_held_out,
    fourth_held_out,
    held_out,
    lost_memory,
    overload,
    prefix_cache,
    second_held_out,
    sixth_held_out,
    slow_decay,
    slow_server,
    third_held_out,
    without_progress,
)
from tests.incidents.incident import Incident, said, table

INCIDENTS: tuple[Incident, ...] = (
    *without_progress.INCIDENTS,
    *overload.INCIDENTS,
    *prefix_cache.INCIDENTS,
    *lost_memory.INCIDENTS,
    *slow_decay.INCIDENTS,
    *slow_server.INCIDENTS,
    *held_out.INCIDENTS,
    *second_held_out.INCIDENTS,
    *third_held_out.INCIDENTS,
    *fourth_held_out.INCIDENTS,
    *fifth_held_out.INCIDENTS,
    *sixth_held_out.INCIDENTS,
)


def report() -> str:
    """The table of all incidents."""
    return table([said(incident) for incident in INCIDENTS])


if __name__ == "__main__":
    print(report())
