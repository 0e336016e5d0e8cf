"""KV that comes from elsewhere: slow paths, and pools that do not match. Guide 6.5, 7.7. Pure."""

from __future__ import annotations

from kneewatch.diagnose.case import Case, Cause, Facts
from kneewatch.diagnose.causes.memory import KV_BOUND_FROM
from kneewatch.rules.model import Severity

FETCHING_HELD_S = 10.0
TRANSFER_SHARE = 0.3
TRANSFER_DRIFT = 3.0

DECODES_FROM = 0.5
"""Of the prompt tokens that a server of the decode pool takes most were computed elsewhere."""

ONE_TOKEN = 1.5
"""A server of the prefill pool makes one token a request, and hands the request on."""

PATH = (
    "Look at the network, RDMA or PCIe path and the peer's log: it is the data path, not the GPU."
)
LMCACHE_PATH = (
    "Look at where LMCache keeps the KV (host memory, disk, a remote server), at the way there and "
    "at LMCache's log: it is the data path, not the GPU."
)
DECODE_POOL = (
    "More decode replicas, or prefill replicas turned into such (a lower P:D ratio): the path is "
    "not what they wait for."
)


def kv_transfer_slow(facts: Facts) -> Cause | None:
    """KV movement between nodes or tiers is the wait."""
    mean_s, ttft_s = facts.values.get("kv_transfer_mean_s"), facts.get("ttft_mean_s")
    quiet_s = facts.baseline.get("kv_transfer_mean_s")
    failed_per_s = facts.get("kv_transfer_failed_per_s")
    fetching = facts.held("fetching", FETCHING_HELD_S)
    share = mean_s / ttft_s if mean_s is not None and ttft_s > 0 else 0.0
    drift = mean_s / quiet_s if mean_s is not None and quiet_s else 0.0
    slow = share >= TRANSFER_SHARE or drift >= TRANSFER_DRIFT
    if not (slow or failed_per_s > 0 or fetching):
        return None
    case = Case(
        "kv_transfer_slow",
        "Requests wait for KV blocks to arrive from another node or tier.",
        PATH,
        ("6.5", "7.7"),
        Severity.WARNING,
        log_odds=-0.3,
    )
    # The signals of transfers know LMCache's as well: they are its where they say what it says.
    retrieved = mean_s is not None and facts.values.get("lmcache_retrieve_mean_s") == mean_s
    lost = failed_per_s > 0 and facts.get("lmcache_failed_per_s") == failed_per_s
    if share >= TRANSFER_SHARE:
        move = "a retrieve from LMCache" if retrieved else "a transfer"
        text = f"{move} takes {100 * share:.0f} % of TTFT"
        case.weigh("kv_transfer_mean_s", share, TRANSFER_SHARE, 1.2, text)
    if drift >= TRANSFER_DRIFT:
        moves = "retrieves from LMCache" if retrieved else "transfers"
        text = f"{moves} take {drift:.1f} times their quiet mean"
        case.weigh("kv_transfer_mean_s", drift, TRANSFER_DRIFT, 1.5, text)
    if failed_per_s > 0:
        text = "reads from LMCache's storage fail" if lost else "transfers fail and are repeated"
        case.weigh("kv_transfer_failed_per_s", failed_per_s, 0.0, 1.5, text)
    if fetching:
        _weigh_fetches(case, facts)
    if (slow and retrieved) or lost:
        _weigh_lmcache(case, facts)
    _weigh_pools(case, facts)
    return case.close()


def pool_of(facts: Facts) -> str:
    """`prefill` or `decode` where the server is one side of a disaggregated pair, else empty."""
    if facts.get("kv_external_share_ratio") >= DECODES_FROM:
        return "decode"
    hands_on = facts.values.get("kv_expired_per_s") is not None
    length = facts.values.get("output_tokens_mean")
    return "prefill" if hands_on and length is not None and length <= ONE_TOKEN else ""


def _weigh_fetches(case: Case, facts: Facts) -> None:
    """Requests that wait for KV, by how far it has come: only what is under way is slow."""
    waiting, arrived = facts.get("kv_fetch_waiting"), facts.get("kv_fetch_arrived")
    if waiting and arrived > waiting / 2:
        text = f"the KV of {arrived:.0f} of {waiting:.0f} waiting requests has arrived"
        case.weigh("kv_fetch_arrived", arrived, None, -0.8, text)
        case.lever = DECODE_POOL
        return
    case.weigh("kv_fetch_waiting", waiting, 1.0, 1.2, f"{waiting:.0f} requests wait for KV")
    queued, usage = facts.get("kv_fetch_queued"), facts.get("kv_usage_avg_ratio")
    if queued > waiting / 2 and usage >= KV_BOUND_FROM:
        text = f"{queued:.0f} have not begun, and the KV cache here is {100 * usage:.0f} % full"
        case.weigh("kv_fetch_queued", queued, None, -0.8, text)
        case.lever = DECODE_POOL


def _weigh_lmcache(case: Case, facts: Facts) -> None:
    """What LMCache says of itself while it is slow or loses KV."""
    if case.lever == PATH:
        case.lever = LMCACHE_PATH
    rate = facts.values.get("lmcache_retrieve_tokens_per_s")
    if rate is not None:
        text = f"while it moves, {rate:.0f} tokens a second do, on each GPU"
        case.weigh("lmcache_retrieve_tokens_per_s", rate, None, 0.0, text)
    if facts.get("lmcache_healthy", 1.0) < 1:
        text = "LMCache says that it is not healthy"
        case.weigh("lmcache_healthy", 0.0, None, 0.6, text)


def _weigh_pools(case: Case, facts: Facts) -> None:
    """On which side of a disaggregated pair this is, and which side binds."""
    expired_per_s, pool = facts.get("kv_expired_per_s"), pool_of(facts)
    rate = facts.values.get("kv_transfer_bytes_per_s")
    if rate is not None:
        case.weigh(
            "kv_transfer_bytes_per_s", rate, None, 0.0, f"while it moves, {rate / 1e9:.1f} GB/s do"
        )
    if pool == "decode":
        share = facts.get("kv_external_share_ratio")
        text = f"a decode pool: {100 * share:.0f} % of prompt tokens were computed elsewhere"
        case.weigh("kv_external_share_ratio", share, None, 0.0, text)
    if expired_per_s > 0:
        text = (
            f"KV of {60 * expired_per_s:.1f} requests a minute expired here before it was fetched"
        )
        case.weigh("kv_expired_per_s", expired_per_s, None, 0.6, text)
        case.lever = DECODE_POOL
