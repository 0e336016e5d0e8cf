"""Transfers of the guide's worked examples: P/D, offload, swap and cold start."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.catalogue.gpu_specs import LINK_BYTES_PER_S

GB = 1e9
LLAMA_70B_KV_BYTES = 327_680
LLAMA_70B_FP8_KV_BYTES = 163_840
SWAP_S_PER_TOKEN = LLAMA_70B_KV_BYTES / LINK_BYTES_PER_S["pcie5"]
PREFILL_S_PER_TOKEN = 2 * 70e9 / 989e12  # one H100 in BF16, at its peak


def moved_s(*, moved_bytes: float, link: str) -> float:
    return moved_bytes / LINK_BYTES_PER_S[link]


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
    assert 320e6 / (400 * GB) == pytest.approx(0.8e-3)
    ndr_bits_per_s = 8 * LINK_BYTES_PER_S["infiniband-ndr"]
    assert ndr_bits_per_s == 400e9  # guide 5.6: 50 GB/s per link
