"""Causes that show only across replicas (diagnose/fleet judges them). Pure."""

from __future__ import annotations

from kneewatch.diagnose.causes.record import CauseRecord

OF_REPLICAS = "it is a comparison of replicas: `kneewatch diagnose --prometheus` has it"

CAUSES = (
    CauseRecord(
        id="routing_dilution",
        title="Routing ignored prefixes",
        means="Replicas' hit rates are low because routing ignores prefixes.",
        levers=("sticky_routing",),
        fleet=True,
        sidecar=OF_REPLICAS,
    ),
    CauseRecord(
        id="replica_imbalance",
        title="Replicas unevenly loaded",
        means="Replicas of one tier, or engines of one server, carry very different load.",
        fleet=True,
        sidecar=OF_REPLICAS,
    ),
    CauseRecord(
        id="mixed_tiers",
        title="Mixed hardware behind one balancer",
        means="A pool's hardware tiers differ, and the balancer treats them alike.",
        fleet=True,
        sidecar=OF_REPLICAS,
    ),
    CauseRecord(
        id="bad_node",
        title="A node slower than its peers",
        means="A replica is slower than its peers with the same work.",
        fleet=True,
    ),
    CauseRecord(
        id="cold_replica",
        title="A replica still warming up",
        means="A replica has started and its caches are cold.",
        fleet=True,
        sidecar=OF_REPLICAS,
    ),
)
