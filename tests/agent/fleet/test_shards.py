"""Two daemons share a fleet: each pool is judged by one of them."""

from __future__ import annotations

import time
from typing import cast
from unittest.mock import Mock

import pytest

from kneewatch.agent.fleet.snapshot import FleetConfig, Shard, observe, shard_of
from kneewatch.agent.fleet.watch import SYSTEM_DOWN, FleetWatch
from kneewatch.agent.notify.notifier import Notifier
from kneewatch.agent.target_state import TargetState
from kneewatch.collector.errors import SettingsError
from kneewatch.collector.prometheus.client import PrometheusSource
from kneewatch.diagnose.fleet.inventory import label_map
from tests import fleets
from tests.agent.api.serving import settings_of
from tests.agent.fleet.prometheus_fleet import QUICK
from tests.collector.oracle import LOOPBACK, running
from tests.programs import require


def test_each_pool_is_judged_by_one_of_two(tmp_path_factory: pytest.TempPathFactory) -> None:
    end_s = int(time.time()) // 15 * 15
    blocks = tmp_path_factory.mktemp("fleet") / "blocks"
    fleets.write_blocks(blocks, fleets.fleet(24), end_s=end_s)
    pools: list[set[str]] = []
    gone: list[set[str]] = []
    with (
        running(require("prometheus"), blocks=blocks) as server,
        PrometheusSource(f"http://{LOOPBACK}:{server.port}", QUICK) as source,
    ):
        for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
            wanted = FleetConfig("", label_map({}, "default"), end_s, shard=shard)
            observed = observe(source, wanted)
            pools.append({member.pool for member in observed.shape.members})
            gone.append({replica.replica for replica in observed.gone})
            assert set(observed.verdicts) == {member.key for member in observed.shape.members}
    whole, first, second = pools
    assert first
    assert second
    assert not first & second
    assert first | second == whole
    assert gone[1] | gone[2] == gone[0] != set()


@pytest.mark.parametrize(
    ("shard", "silent_s", "told"), [("1/2", 0.0, True), ("2/2", 0.0, False), ("2/2", 1000.0, True)]
)
def test_a_lost_metrics_system_is_reported_by_the_first_and_after_a_while_by_all(
    monkeypatch: pytest.MonkeyPatch, *, shard: str, silent_s: float, told: bool
) -> None:
    watch = FleetWatch("http://127.0.0.1:1", settings_of(fleet__shard=shard), "")
    offered: list[TargetState] = []
    notifier = cast("Notifier", Mock(offer=offered.append, active_targets=lambda: ()))
    watch.notify_through(notifier, lambda: None)
    now_s = time.time() + silent_s
    monkeypatch.setattr("kneewatch.agent.fleet.watch.OWN_CLOCK", lambda: now_s)
    watch.cycle()
    assert [state.diagnoses[0].causes[0].id for state in offered] == [SYSTEM_DOWN] * told


@pytest.mark.parametrize("text", ["2", "0/2", "3/2", "1/0", "a/b", "1/2/3", ""])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="use 1/2 and 2/2"):
        shard_of(text, "--fleet-shard")


def test_a_part_counts_from_one() -> None:
    assert shard_of("2/2", "file") == Shard(1, 2)
    assert shard_of(None, "default") == Shard()
