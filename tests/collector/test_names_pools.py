"""One engine's own KV blocks on a page of several: vLLM shows the sum on the row of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest

from kneewatch.collector.names.vllm_resolver import own_blocks
from tests.collector.name_pages import labelled, recorded, resolved

BUSY = "0.32.0-loaded"
"""4,096 blocks of 32 tokens: 131,072."""


BARE: list[Mapping[str, str]] = [{}, {}]


def rows(*blocks: str, **more: str) -> list[Mapping[str, str]]:
    return [{"num_gpu_blocks": each, "block_size": "16", **more} for each in blocks]


@pytest.mark.parametrize(
    ("shown", "each"),
    [
        pytest.param(rows("2000", "2000"), "1000", id="two engines' sum"),
        pytest.param(rows("2001", "2001"), "1000", id="unequal pools: their mean"),
        pytest.param(
            rows("2000", "2000", kv_cache_size_tokens="16000"), "1000", id="a size says so"
        ),
        pytest.param(
            rows("2000", "2000", num_gpu_blocks_override="1000"), "1000", id="an override says so"
        ),
        pytest.param(rows("2000"), None, id="one engine"),
        pytest.param(rows("1000", "900"), None, id="each engine's own"),
        pytest.param(
            rows("1000", "1000", kv_cache_size_tokens="16000"), None,
            id="each one's own, as its size says",
        ),
        pytest.param(
            rows("1000", "1000", num_gpu_blocks_override="1000"), None,
            id="each one's own, as its override says",
        ),
        pytest.param(rows("None", "None"), None, id="no number"),
        pytest.param(rows("0", "0"), None, id="no block"),
        pytest.param(BARE, None, id="no label"),
    ],
)  # fmt: skip
def test_the_blocks_of_each_engine(shown: Sequence[Mapping[str, str]], each: str | None) -> None:
    assert own_blocks(shown) == each


def of_engines(body: str) -> dict[tuple[str, str], str]:
    page, binding = resolved(body)
    return {
        (e.key.model, e.key.engine): e.info("cache_config_info", page.values)["num_gpu_blocks"]
        for e in binding.engines
    }


def dp_page(*blocks: int) -> str:
    """A recorded page for so many engines, each row with its number of blocks; no size is shown,
    as before 0.27."""
    plain = re.sub(r'kv_cache_(size_tokens|max_concurrency)="[^"]*",', "", recorded(BUSY))
    return "".join(
        re.sub(
            r'num_gpu_blocks="\d+"', f'num_gpu_blocks="{count}"', labelled(plain, engine=str(at))
        )
        for at, count in enumerate(blocks)
    )


def test_engines_of_one_server_share_the_sum_that_it_shows() -> None:
    assert of_engines(dp_page(8192, 8192)) == {("tiny", "0"): "4096", ("tiny", "1"): "4096"}


def test_engines_that_show_their_own_keep_it() -> None:
    """Unequal pools: the smallest binds its own engine, not the others."""
    assert of_engines(dp_page(4096, 512)) == {("tiny", "0"): "4096", ("tiny", "1"): "512"}


def test_two_models_on_a_page_add_up_nothing() -> None:
    body = "".join(labelled(recorded(BUSY), model_name=model) for model in ("a", "b"))
    assert set(of_engines(body).values()) == {"4096"}
