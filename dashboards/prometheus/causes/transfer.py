"""Causes that lie in moving KV blocks, as PromQL. Pure."""

from __future__ import annotations

from kneewatch.dashboards.prometheus.causes.model import CauseQuery
from kneewatch.dashboards.prometheus.model import Plan, number, recorded
from kneewatch.dashboards.prometheus.odds import Term
from kneewatch.diagnose.causes import (
    transfer,
)
from kneewatch.rules.model import Severity


def kv_transfer_slow(_plan: Plan) -> CauseQuery:
    """Transfers of KV blocks take long, longer than before, or fail."""
    mean = recorded("kv_transfer_mean_s")
    share = f"({mean} / ({recorded('ttft_mean_s')} > 0))"
    drift, failed = recorded("kv_transfer_drift_ratio"), recorded("kv_transfer_failed_per_s")
    slow_share = f"{share} >= {number(transfer.TRANSFER_SHARE)}"
    slow_drift = f"{drift} >= {number(transfer.TRANSFER_DRIFT)}"
    return CauseQuery(
        "kv_transfer_slow",
        f"({slow_share}) or ({slow_drift}) or ({failed} > 0)",
        (
            Term(share, number(transfer.TRANSFER_SHARE), 1.2, slow_share),
            Term(drift, number(transfer.TRANSFER_DRIFT), 1.5, slow_drift),
            Term(failed, None, 1.5, f"{failed} > 0"),
        ),
        -0.3,
        ((Severity.WARNING, ""),),
        "Requests wait for KV blocks from another node or tier",
        "Look at the network, RDMA or PCIe path and the peer's log: it is the data path.",
        ("6.5", "7.7"),
    )
