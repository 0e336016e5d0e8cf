"""Prefixes found again, and KV that comes from elsewhere: guide 6.5, 7.2, 7.3, 7.7. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kneewatch.diagnose.catalogue.gpus import GIB
from kneewatch.diagnose.causes.prefix import WAS_SHARED_FROM
from kneewatch.diagnose.recommend.prediction import After, latencies
from kneewatch.diagnose.recommend.recommendation import Recommendation
from kneewatch.diagnose.recommend.roofline import costs_of
from kneewatch.diagnose.recommend.scene import SETTLE_WORDS, Scene, advice
from kneewatch.diagnose.sizing.inputs import SizingError
from kneewatch.diagnose.sizing.memory.transfer import LINK_BYTES_PER_S, transfer_s
from kneewatch.diagnose.sizing.speed.efficiency import DEFAULT

FABRIC = "infiniband-ndr"
"""What a transfer between nodes is held against: 400 Gbit/s for each GPU (guide 5.6)."""


def prompt_order(scene: Scene) -> Recommendation | None:
    """The shared part of prompts in front again, where prompts did share one."""
    quiet, hits = scene.facts.baseline.get("prefix_hit_ratio"), scene.get("prefix_hit_ratio")
    if quiet is None or quiet < WAS_SHARED_FROM or hits >= quiet:
        return None
    left = (1 - quiet) / (1 - hits)
    return advice(
        scene,
        "prompt-order",
        [("prompt", None, "the shared part first")],
        f"{quiet:.0%} of prompt tokens hit in quiet times, fewer do now. A token that differs "
        "ends the match: what changes (a date, an id, a name) belongs behind what is shared."
        + _money_words(scene, left),
        before=_prefill_numbers(scene, hits),
        predicted=_prefill_numbers(scene, quiet, left=left),
        checks=["what was deployed when it began: a template, a gateway, a tokenizer"],
        risk="None for the server; the model sees its prompt in another order.",
        verify=[
            f"prefix_hit_ratio returns to about {quiet:.2f} and computed_prompt_tokens_per_s falls "
            f"to {left:.0%} of what it is {SETTLE_WORDS}"
        ],
        guide=("7.2", "7.3"),
    )


def sticky_routing(scene: Scene) -> Recommendation | None:
    """Requests of one prefix to one replica, where there are several."""
    if not scene.server.stated.replicas or scene.server.replicas < 2:
        return None
    hits, quiet = scene.get("prefix_hit_ratio"), scene.facts.baseline.get("prefix_hit_ratio")
    better = quiet is not None and hits < quiet < 1
    left = (1 - quiet) / (1 - hits) if quiet is not None and better else 1.0
    return advice(
        scene,
        "prefix-routing",
        [("router", "any replica", "by prefix")],
        f"Spread over {scene.server.replicas} replicas, each prefix is computed and kept on all of "
        "them; routed by prefix (or by session) it is found again, and takes room once."
        + (f" With the {quiet:.0%} of quiet times:{_money_words(scene, left)}" if better else ""),
        before=_prefill_numbers(scene, hits),
        predicted=_prefill_numbers(scene, quiet, left=left) if better else {},
        checks=["that the router falls back on load where one prefix is most of the traffic"],
        risk="A popular prefix makes its replica hot.",
        verify=[f"prefix_hit_ratio rises on every replica {SETTLE_WORDS}, running stays alike"],
        guide=("7.3", "9.3"),
    )


def _prefill_numbers(scene: Scene, hits: float | None, *, left: float = 1.0) -> dict[str, float]:
    """Hits, prefill work and first tokens, now or where `left` of that work remains.

    TTFT is the roofline's where model and GPU are stated, else what is measured less the prefill
    that is no longer done: both leave a queue that would shrink as it is.
    """
    numbers: dict[str, float] = {} if hits is None else {"prefix_hit_ratio": hits}
    values = scene.facts.values
    for key in ("computed_prompt_tokens_per_s", "prefill_mean_s"):
        value = values.get(key)
        if value is not None:
            numbers[key] = value * left
    ttft_s, prefill_s = values.get("ttft_mean_s"), values.get("prefill_mean_s")
    if ttft_s is None or prefill_s is None:
        return numbers
    numbers["ttft_s"] = max(ttft_s - prefill_s * (1 - left), 0.0)
    yielded = None
    if left < 1:
        saved = 1 - (1 - scene.demand.saved_ratio) * left
        yielded = latencies(scene, After(saved_ratio=saved))
    if yielded is not None:
        made, scale = yielded
        numbers["ttft_s"] = min(made.ttft_s * scale, ttft_s)
    return numbers


def _money_words(scene: Scene, left: float) -> str:
    """The GPU time that prompts computed once too often take, and its price where it is known.

    FLOP of the tokens over the reached share of the peak (guide 3.2, 8.4).
    """
    setup, hourly = scene.server.setup, scene.server.usd_per_hour
    again_per_s = scene.get("computed_prompt_tokens_per_s") * (1 - left)
    if setup is None or setup.gpu is None or again_per_s <= 0:
        return ""
    try:
        known = costs_of(setup)
    except SizingError:
        return ""
    reached_per_s = known.flop_per_s * DEFAULT.mfu_ratio
    share = again_per_s * known.body_flop_per_token / reached_per_s
    if not 0 < share <= 1:
        return ""
    dollars = "" if hourly is None else f", {hourly * share:.2f} USD an hour a replica"
    return f" It would free {100 * share:.0f} % of the GPUs' time{dollars}."


def transfer_path(scene: Scene) -> Recommendation | None:
    """Where to look when KV comes too slowly, with what the fabric should take."""
    mean_s = scene.facts.values.get("kv_transfer_mean_s")
    if mean_s is None:
        return None
    quiet_s, numbers = (
        scene.facts.baseline.get("kv_transfer_mean_s"),
        {"kv_transfer_mean_s": mean_s},
    )
    wanted_s, told = _fabric_s(scene), ""
    if wanted_s is not None:
        told = (
            f" A prompt's KV of {_moved_bytes(scene) / GIB:.2f} GiB a GPU takes "
            f"{1000 * wanted_s:.1f} ms at {LINK_BYTES_PER_S[FABRIC] * 8 / 1e9:.0f} Gbit/s a GPU."
        )
    aim_s = max((value for value in (quiet_s, wanted_s) if value), default=None)
    verify = f"kv_transfer_mean_s falls {SETTLE_WORDS}"
    if aim_s is not None and aim_s < mean_s:
        verify = f"kv_transfer_mean_s falls towards {aim_s:.2g} s {SETTLE_WORDS}"
    checks: Sequence[str] = (
        "that transfers go over RDMA and not TCP: the connector's start-up log says which",
        "errors, pause frames and the rate of the NICs and of PCIe on both sides",
        "that GPU and NIC sit on the same PCIe switch",
    )
    return advice(
        scene,
        "kv-transfer-path",
        [],
        f"KV transfers are slow: it is the data path, not the GPU.{told}",
        before=numbers,
        checks=checks,
        risk="Where the path cannot be mended, prefill and decode together are faster.",
        verify=[verify],
        guide=("6.5", "7.7"),
    )


def _moved_bytes(scene: Scene) -> float:
    """KV bytes of a mean prompt on one GPU; 0 where model or lengths are not known."""
    layout, tokens = scene.server.layout, scene.get("prompt_tokens_mean")
    return 0.0 if layout is None else tokens * layout.token_bytes


def _fabric_s(scene: Scene) -> float | None:
    moved_bytes = _moved_bytes(scene)
    if not moved_bytes:
        return None
    return transfer_s(moved_bytes=moved_bytes, bandwidth_bytes_per_s=LINK_BYTES_PER_S[FABRIC])
