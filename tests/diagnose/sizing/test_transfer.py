"""Transfers of the guide's worked examples: P/D, offload, swap and cold start."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.catalogue.inputs import SizingError
from kneewatch.diagnose.sizing.memory.kv_reuse import (
    LINK_BYTES_PER_S,
    contexts_held,
    disaggregation_gain_s,
    link_bytes_per_s,
    transfer_s,
)

GB = 1e9
LLAMA_70B_KV_BYTES = 327_680
LLAMA_70B_FP8_KV_BYTES = 163_840
SWAP_S_PER_TOKEN = LLAMA_70B_KV_BYTES / LINK_BYTES_PER_S["pcie5"]
PREFILL_S_PER_TOKEN = 2 * 70e9 / 989e12  # one H100 in BF16, at its peak


def moved_s(*, moved_bytes: float, link: str) -> float:
    return transfer_s(moved_bytes=moved_bytes, bandwidth_bytes_per_s=link_bytes_per_s(link))


@pytest.mark.parametrize(
    ("says_s", "moved_bytes", "link"),
    [
        pytest.param(0.015, 1 * GB, "pcie5", id="guide 7.4: 1 GB over PCIe Gen5, 15.6 ms"),
        pytest.param(0.125, 8 * GB, "pcie5", id="guide 7.6: 8 GB from DRAM"),
        pytest.param(1.1, 8 * GB, "nvme", id="guide 7.6: 8 GB from NVMe, 1.14 s"),
    ],
)
def test_transfers_that_the_guide_gets_right(says_s: float, moved_bytes: float, link: str) -> None:
    assert moved_s(moved_bytes=moved_bytes, link=link) == pytest.approx(says_s, rel=0.05)


@pytest.mark.parametrize(
    ("says_s", "tokens", "per_token_bytes", "link", "expected_s"),
    [
        pytest.param(
            0.8e-3, 4096, 163_840, "infiniband-ndr", 13.4e-3, id="guide 6.5: 4K over NDR in 0.8 ms"
        ),
        pytest.param(
            0.04e-3, 200, 163_840, "infiniband-ndr", 0.655e-3, id="guide 6.5: 200 in 0.04 ms"
        ),
        pytest.param(0.125, 100_000, 327_680, "pcie5", 0.512, id="guide 7.6: 100K from DRAM"),
        pytest.param(1.1, 100_000, 327_680, "nvme", 4.68, id="guide 7.6: 100K from NVMe"),
    ],
)
def test_transfers_that_rest_on_a_wrong_kv_size_or_bandwidth(
    says_s: float, tokens: int, per_token_bytes: float, link: str, expected_s: float
) -> None:
    seconds = moved_s(moved_bytes=tokens * per_token_bytes, link=link)
    assert seconds == pytest.approx(expected_s, rel=2e-3)
    assert seconds > 4 * says_s


def test_the_guides_0_8_ms_takes_gigabits_for_gigabytes() -> None:
    assert transfer_s(moved_bytes=320e6, bandwidth_bytes_per_s=400 * GB) == pytest.approx(0.8e-3)
    ndr_bits_per_s = 8 * LINK_BYTES_PER_S["infiniband-ndr"]
    assert ndr_bits_per_s == 400e9  # guide 5.6: 50 GB/s per link


def test_tensor_parallel_ranks_move_their_shares_side_by_side() -> None:
    one_s, four_s = (
        transfer_s(moved_bytes=GB, bandwidth_bytes_per_s=50 * GB, links=links) for links in (1, 4)
    )
    assert one_s == 4 * four_s


def test_a_latency_is_paid_once() -> None:
    seconds = transfer_s(moved_bytes=GB, bandwidth_bytes_per_s=GB, links=2, latency_s=1e-3)
    assert seconds == pytest.approx(0.501)


def test_disaggregation_of_the_guides_example() -> None:
    says = disaggregation_gain_s(stall_s=0.400, transfer_s=0.8e-3)
    computed = disaggregation_gain_s(
        stall_s=0.400,
        transfer_s=moved_s(moved_bytes=4096 * LLAMA_70B_FP8_KV_BYTES, link="infiniband-ndr"),
    )
    assert says == pytest.approx(0.399, abs=1e-3)
    assert computed == pytest.approx(0.387, abs=1e-3)  # the conclusion stands
    assert disaggregation_gain_s(stall_s=0.001, transfer_s=0.002) < 0


@pytest.mark.parametrize(
    ("context_gb", "expected"),
    [
        pytest.param(8, (1, 17), id="guide 7.6: one of its 8 GB contexts in 10 GB"),
        pytest.param(32.768, (0, 0), id="guide 7.6: none of the real ones"),
        pytest.param(16.384, (0, 0), id="guide 7.6: nor in FP8"),
    ],
)
def test_contexts_in_the_10_gb_left_on_an_h100(
    context_gb: float, expected: tuple[int, int]
) -> None:
    held = contexts_held(
        hbm_free_bytes=10 * GB, tier_free_bytes=128 * GB, context_bytes=context_gb * GB
    )
    assert held == expected


def test_an_unknown_link_lists_the_choices() -> None:
    with pytest.raises(SizingError, match="link is 'token-ring'; choose one of nvlink4, pcie5"):
        link_bytes_per_s("token-ring")
