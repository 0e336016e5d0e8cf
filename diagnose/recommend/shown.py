"""Whether a page shows that a recommended change was made. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.diagnose.recommend.flags import FLAGS
from kneewatch.diagnose.recommend.recommendation import Value


def shown(flag: str, wanted: Value, config: Mapping[str, str]) -> bool | None:
    """Whether cache_config_info says that a flag is as wanted (None: left out); None where it
    cannot say: no label, or no flag of vLLM."""
    known = FLAGS.get(flag)
    if known is None or not known.label or known.label not in config:
        return None
    told = config[known.label]
    if flag == "--no-enable-prefix-caching":
        return told == "True"
    if wanted is None:
        return told in ("None", "")
    return told == str(wanted) or _same_number(told, wanted)


def _same_number(told: str, wanted: str | float) -> bool:
    try:
        return abs(float(told) - float(wanted)) <= 1e-6 * abs(float(wanted))
    except ValueError:
        return False
