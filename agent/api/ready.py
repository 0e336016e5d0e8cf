"""Whether the daemon is of use yet: every target has had a cycle, and the history can be written.
Pure but for the service it asks."""

from __future__ import annotations

from kneewatch.agent.api.service import Service
from kneewatch.agent.api.standings import late

SHOWN = 20


def reasons(service: Service) -> list[str]:
    """Why it is not ready, a line each; none when it is."""
    now_s, found = service.clock(), list[str]()
    for spec in service.targets():
        state = service.board.get(spec.name)
        if state is None:
            found.append(f"{spec.name}: not scraped yet")
        elif late(state, now_s):
            found.append(f"{spec.name}: no cycle for {now_s - state.t_s:.0f} s")
    if service.fleet is not None:
        told = service.fleet.state.told(now_s)
        if told is None:
            found.append(f"fleet: {service.fleet.state.error or 'not asked yet'}")
        elif told.lost:
            found.append(f"fleet: {told.lost}")
    more = len(found) - SHOWN
    if more > 0:
        found[SHOWN:] = [f"and {more} more targets"]
    if service.store is not None and service.store.stats().last_error:
        found.append("the history cannot be written; the log of kneewatch says why")
    return found
