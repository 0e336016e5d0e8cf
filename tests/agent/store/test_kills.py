"""kill -9 under load costs at most the cycle under way. `python -m tests.agent.store.kills 200`
kills more often."""

from __future__ import annotations

from pathlib import Path

from tests.agent.store.kills import kill_often

KILLS = 20


def test_a_kill_costs_at_most_the_cycle_under_way(tmp_path: Path) -> None:
    left = kill_often(tmp_path / "store.db", KILLS)
    assert len(left) == KILLS
    for kill in left:
        assert kill.lost == 0
        assert 0 <= kill.put - kill.found <= 1
    assert left[-1].found > 100, "they wrote before they were killed"
