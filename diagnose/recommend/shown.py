"""Whether a page shows that a recommended change was made. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.diagnose.recommend.flags import FLAGS
from kneewatch.diagnose.recommend.recommendation import Change, Value


def shown(change: Change, config: Mapping[str, str]) -> bool | None:
    """Whether cache_config_info says so; None where it cannot: no label, or no flag of vLLM."""
    known = FLAGS.get(change.flag)
    if known is None or not known.label or known.label not in config:
        return None
    told = config[known.label]
    if change.flag == "--no-enable-prefix-caching":
        return told == "True"
    if change.after is None:
        return told in ("None", "")
    return told == str(change.after) or _same_number(told, change.after)


def _same_number(told: str, wanted: Value) -> bool:
    try:
        return abs(float(told) - float(wanted or 0)) <= 1e-6 * abs(float(wanted or 0))
    except ValueError:
        return False
