"""The KV cache's layout against what vLLM's own code made of the same layers and launches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kneewatch.diagnose.catalogue.gpu_specs import GIB
from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.catalogue.layers import (
    CompressedAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    Layers,
    Recurrent,
    SlidingAttention,
    SlidingStates,
)
from kneewatch.diagnose.sizing.memory.kv_cache import (
    KvLayout,
    KvSettings,
    kv_layout,
)
from kneewatch.diagnose.sizing.memory.kv_formats import kv_format
from kneewatch.diagnose.sizing.memory.launch import defaults, parse_version

Facts = Mapping[str, Any]
RECORDED: Facts = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "kvlayout" / "vllm-0.32.0.json").read_text()
)
KINDS: Mapping[str, type[LayerKind]] = {
    "full": FullAttention,
    "sliding": SlidingAttention,
    "latent": LatentAttention,
    "recurrent": Recurrent,
    "compressed": CompressedAttention,
    "states": SlidingStates,
}
VERSION = defaults(parse_version(RECORDED["vllm"]), None)
# Which of the two shapes a stage has more of depends on the order of the layers, which a census
# does not have: one layer of the larger shape too many.
_ORDER_MATTERS = {("latent and sliding, no divisor", 4)}


def title(case: Facts) -> str:
    stated = ", ".join(f"{name} {value}" for name, value in case["settings"].items())
    return f"{case['census']}: {stated or 'plain'}"


def settings_of(case: Facts) -> dict[str, Any]:
    return {**RECORDED["defaults"], **case["settings"]}


def layers(census: str) -> list[Layers]:
    return [
        Layers(
            KINDS[facts["kind"]](
                **{name: value for name, value in facts.items() if name not in ("kind", "count")}
            ),
            facts["count"],
        )
        for facts in RECORDED["censuses"][census]
    ]


def layout_of(case: Facts) -> KvLayout:
    stated = settings_of(case)
    # A launch of 0.32 caches prefixes, in mode "align", unless it is told not to.
    aligned = stated["mamba_cache_mode"] == "align"
    return kv_layout(
        layers(case["census"]),
        KvSettings(
            tensor_parallel=stated["tensor_parallel"],
            pipeline_parallel=stated["pipeline_parallel"],
            decode_context_parallel=stated["decode_context_parallel"],
            kv_format=kv_format(stated["kv_cache_dtype"]),
            block_tokens=stated["block_tokens"],
            in_flight_tokens=stated["max_num_batched_tokens"] * stated["batches_in_flight"],
            decode_tokens=stated["batches_in_flight"],
            hybrid_pool=stated["hybrid_pool"],
            state_blocks=VERSION.state_blocks if aligned else 1,
            latent_hybrid_tokens=VERSION.latent_hybrid_tokens,
        ),
    )


def figures(case: Facts) -> dict[str, Any]:
    layout, stated = layout_of(case), settings_of(case)
    free_bytes, context = int(stated["available_gib"] * GIB), stated["max_model_len"]
    return {
        "blocks": layout.blocks(free_bytes),
        "block_bytes": layout.block_bytes,
        "block_tokens": sorted(
            group.block_tokens
            for group in layout.groups
            for _ in range(group.groups)
            if not isinstance(group.kind, Recurrent)
        ),
        "groups": sum(group.groups for group in layout.groups),
        "request_blocks": layout.request_blocks(context),
        "tokens": int(layout.concurrency(free_bytes, context) * context),
    }


def exact(case: Facts) -> bool:
    return (case["census"], settings_of(case)["pipeline_parallel"]) not in _ORDER_MATTERS


STARTED = [case for case in RECORDED["cases"] if "refused" not in case]
REFUSED = [case for case in RECORDED["cases"] if "refused" in case]


@pytest.mark.parametrize("case", [case for case in STARTED if exact(case)], ids=title)
def test_blocks_groups_and_capacity_are_those_of_vllm(case: Facts) -> None:
    computed = figures(case)
    assert computed == {name: case[name] for name in computed}
    stated = settings_of(case)
    free_bytes = int(stated["available_gib"] * GIB)
    requests = layout_of(case).concurrency(free_bytes, stated["max_model_len"])
    assert requests == pytest.approx(case["concurrency"], rel=1e-9)


@pytest.mark.parametrize("case", [case for case in STARTED if "served" in case], ids=title)
def test_requests_that_run_at_once_are_those_that_vllms_manager_admits(case: Facts) -> None:
    stated = settings_of(case)
    free_bytes, longest = int(stated["available_gib"] * GIB), stated["max_model_len"]
    # The recorded requests are 2 to 65 tokens shorter.
    held = layout_of(case).held(free_bytes, longest - 34)
    assert case["served"] <= held < 1.01 * case["served"] + 1


@pytest.mark.parametrize("case", [case for case in STARTED if not exact(case)], ids=title)
def test_a_stage_of_unknown_order_is_not_taken_for_smaller(case: Facts) -> None:
    computed = figures(case)
    assert computed["request_blocks"] == case["request_blocks"]
    assert case["block_bytes"] <= computed["block_bytes"] <= case["block_bytes"] * 1.03


@pytest.mark.parametrize("case", REFUSED, ids=title)
def test_what_vllm_refuses_is_refused(case: Facts) -> None:
    with pytest.raises(SizingError) as caught:
        layout_of(case)
    assert caught.value.name == "hybrid_pool"


def test_every_kind_and_every_refusal_is_recorded() -> None:
    kinds = {facts["kind"] for census in RECORDED["censuses"].values() for facts in census}
    assert kinds == set(KINDS)
    assert len(STARTED) > 650
    assert len(REFUSED) > 10
