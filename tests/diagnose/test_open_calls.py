"""Open connections of an idle engine: calls that wait, or connections that clients keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kneewatch.diagnose.account_signals import AT_THE_DOOR, CANCELLED, PILED
from kneewatch.diagnose.learned.derived_signals import IDLE_S, KEPT_S, OpenCalls
from kneewatch.diagnose.values import Values

ENDS_S, EVERY_S, FILES, POOL = 600.0, 5.0, 40.0, 20.0


def waiting(open_files: Callable[[float], float]) -> Iterator[tuple[float, float]]:
    """Yields the seconds since the last token, and the calls at the door. Before, 5 to 15 of the 20
    connections of a pool have a request in flight; `open_files` says what is open afterwards."""
    calls = OpenCalls()
    for scrape in range(int((ENDS_S + 300.0) / EVERY_S)):
        t_s = scrape * EVERY_S
        serves = t_s < ENDS_S
        running = 5.0 + scrape % 11 if serves else 0.0
        files = FILES + POOL if serves else open_files(t_s - ENDS_S)
        values = Values({}, totals=(0.0,) * 18, generated=10.0 * serves)
        signals = {"running": running, "waiting": 0.0, "open_files": files}
        calls.update(t_s, values, signals, token=serves)
        if not serves:
            yield t_s - ENDS_S, calls.values[AT_THE_DOOR] or 0.0


def test_connections_that_clients_keep_are_no_calls() -> None:
    kept = waiting(lambda ago_s: FILES + POOL if ago_s < 75.0 else FILES)
    assert not any(calls for _, calls in kept)


def test_calls_that_pile_up_or_stay_wait_at_the_door() -> None:
    piling = dict(waiting(lambda ago_s: FILES + POOL + ago_s))
    assert piling[2 * IDLE_S] > 0
    staying = dict(waiting(lambda _: FILES + POOL))
    assert not staying[KEPT_S / 2]
    assert staying[KEPT_S + EVERY_S] > 0


def piled(more_files: Callable[[float], float]) -> list[float]:
    """The calls that the engine does not get, by scrapes since the tenth minute of a server that
    serves throughout."""
    calls, told = OpenCalls(), list[float]()
    for scrape in range(200):
        ago_s, running = EVERY_S * scrape - ENDS_S, 5.0 + scrape % 11
        files = FILES + running + 5.0 * (scrape % 2) + (more_files(ago_s) if ago_s > 0 else 0.0)
        signals = {"running": running, "waiting": 0.0, "open_files": files}
        values = Values({}, totals=(0.0,) * 18, generated=10.0)
        calls.update(EVERY_S * scrape, values, signals, token=True)
        told += [calls.values[PILED] or 0.0] * (ago_s >= 0)
    return told


def test_calls_that_the_engine_never_gets_are_told_while_it_serves_others() -> None:
    stuck = piled(lambda ago_s: 0.8 * ago_s)
    assert not any(stuck[:4])
    assert all(stuck[20:])
    assert not any(piled(lambda ago_s: min(30.0, ago_s))), "clients keep those of a burst"


def cancelled(open_files: Callable[[float], float]) -> Iterator[float]:
    """Yields whether the calls of 30 requests count as cancelled, at each scrape after the last
    token of a server that counts no calls. Their gauges stay; 5 connections are idle while it
    serves."""
    calls = OpenCalls()
    for scrape in range(80):
        t_s = scrape * EVERY_S
        serves = t_s < 300.0
        running = 20.0 + scrape % 11 if serves else 30.0
        files = FILES + running + 5.0 * (scrape % 2) if serves else open_files(t_s - 300.0)
        values = Values({}, totals=(0.0,) * 18, generated=10.0 * serves)
        signals = {"running": running, "waiting": 0.0, "open_files": files}
        calls.update(t_s, values, signals, token=serves)
        if not serves:
            yield calls.values[CANCELLED] or 0.0


def test_connections_that_close_at_once_tell_cancelled_calls() -> None:
    assert all(cancelled(lambda _: FILES))


def test_idle_connections_that_close_cancel_nothing() -> None:
    assert not any(cancelled(lambda _: FILES + 30.0))


def test_calls_that_come_after_those_that_were_cancelled_hang() -> None:
    assert list(cancelled(lambda ago_s: FILES + ago_s / 5.0))[-1] == 0.0
