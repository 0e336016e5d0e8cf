"""The catalogue of GPUs: its figures, and the names that drivers give."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from kneewatch.diagnose.catalogue.gpu_specs import (
    GIB,
    Gpu,
    gpu,
    gpus,
    plain_name,
    recognise,
)
from kneewatch.diagnose.catalogue.inputs import SizingError

WANTED = (
    *("h100-sxm", "h100-pcie", "h100-nvl", "h200", "h20", "b200", "b300", "gb200", "gb300"),
    *("a100-80gb", "a100-40gb", "l40s", "l4", "a10g", "rtx-4090", "mi300x", "mi325x"),
)
PACKAGED = resources.files("kneewatch.diagnose.catalogue").joinpath("gpus.toml").read_text("utf-8")

every_gpu = pytest.mark.parametrize("card", gpus().values(), ids=lambda card: card.id)


# --- The packaged figures ---


def test_the_wanted_gpus_are_there() -> None:
    assert set(WANTED) <= gpus().keys()
    assert [card.id for card in gpus().values()] == list(gpus())


@every_gpu
def test_a_gpu_says_where_its_figures_are_from(card: Gpu) -> None:
    for source in (card.source, card.memory_source, card.price_source):
        assert len(source) > 8
    assert any(vague in card.price_source for vague in ("rounded", "estimate"))


@every_gpu
def test_a_gpu_is_plausible(card: Gpu) -> None:
    assert 0.9 < card.memory_bytes / card.memory_sold_bytes <= 1
    # The most is that of Jetson Thor: 947.
    assert 25 < card.bf16_flop_per_s / card.memory_bandwidth_bytes_per_s < 1000
    assert card.pcie_bytes_per_s in (16e9, 32e9, 64e9, 128e9)
    assert 50 < card.power_watts <= 1400
    assert 0.1 < card.usd_per_hour < 20
    assert (card.compute_capability is None) == (card.vendor == "amd")
    assert card.nvlink_gpus in ((1,) if card.nvlink_bytes_per_s is None else (2, 4, 8, 72))


@every_gpu
def test_half_the_bits_double_the_rate(card: Gpu) -> None:
    if card.fp8_flop_per_s is not None:
        assert card.fp8_flop_per_s / card.bf16_flop_per_s == pytest.approx(2, rel=0.02)
    if card.fp4_flop_per_s is not None:
        assert card.fp8_flop_per_s is not None
        assert 1.99 < card.fp4_flop_per_s / card.fp8_flop_per_s < 4.01


@pytest.mark.parametrize(
    ("architecture", "dtypes"),
    [
        pytest.param("ampere", {"int8"}, id="Ampere has no FP8"),
        pytest.param("ada", {"fp8", "int8"}, id="Ada has no FP4"),
        pytest.param("hopper", {"fp8", "int8"}, id="Hopper has no FP4"),
        pytest.param("cdna3", {"fp8", "int8"}, id="MI300 has no FP4"),
        pytest.param("cdna4", {"fp8", "fp4", "int8"}, id="MI355 has all"),
    ],
)
def test_an_architecture_computes_in(architecture: str, dtypes: set[str]) -> None:
    cards = [card for card in gpus().values() if card.architecture == architecture]
    assert cards
    for card in cards:
        rates = {
            "fp8": card.fp8_flop_per_s,
            "fp4": card.fp4_flop_per_s,
            "int8": card.int8_op_per_s,
        }
        assert {dtype for dtype, rate in rates.items() if rate is not None} == dtypes


def test_blackwell_computes_in_fp4() -> None:
    for card in gpus().values():
        if card.architecture == "blackwell":
            assert card.fp8_flop_per_s is not None
            # vLLM has no FP4 kernels for GB10.
            assert (card.fp4_flop_per_s is None) == (card.compute_capability == "12.1")


@pytest.mark.parametrize(
    ("gpu_id", "memory_gib"),
    [
        pytest.param("h100-sxm", 79.18, id="vllm 21348: 79.18"),
        pytest.param("h200", 139.80, id="Kimi-K2 recipe: 139.80"),
        pytest.param("b200", 178.36, id="vllm 21489: 178.36, neither 192 nor 180 GB"),
        pytest.param("gb200", 184.31, id="start-up log: 184.31"),
        pytest.param("gb300", 276.62, id="srt-slurm: 276.62"),
        pytest.param("b300", 267.69, id="out of memory: 267.69"),
        pytest.param("a100-80gb", 79.15, id="vllm 2031: 79.15"),
        pytest.param("a100-40gb", 39.49, id="start-up log: 39.49"),
        pytest.param("l40s", 44.39, id="vllm 17122: 44.39"),
        pytest.param("rtx-3090", 23.58, id="vllm 10517: 23.58"),
        pytest.param("mi300x", 191.98, id="out of memory: 191.98"),
    ],
)
def test_memory_is_what_logs_show(gpu_id: str, memory_gib: float) -> None:
    assert gpu(gpu_id).memory_bytes == round(memory_gib * 2**30)
    assert not gpu(gpu_id).memory_is_estimated


def test_gigabytes_on_the_box_are_binary() -> None:
    assert gpu("h100-sxm").memory_sold_bytes == 80 * GIB
    assert gpu("h100-sxm").memory_bytes > 80e9
    assert gpu("h20").memory_is_estimated


@pytest.mark.parametrize(
    ("gpu_id", "bytes_per_s", "bf16_flop_per_s", "fp8_flop_per_s", "nvlink", "nvlink_gpus"),
    [
        ("h100-sxm", 3.35e12, 989e12, 1979e12, 900e9, 8),
        ("h100-pcie", 2.0e12, 756e12, 1513e12, 600e9, 2),
        ("h200", 4.8e12, 989e12, 1979e12, 900e9, 8),
        ("h20", 4.0e12, 148e12, 296e12, 900e9, 8),
        ("b200", 8.0e12, 2250e12, 4500e12, 1800e9, 8),
        ("gb200", 8.0e12, 2500e12, 5000e12, 1800e9, 72),
        ("a100-80gb", 2.04e12, 312e12, None, 600e9, 8),
        ("l40s", 864e9, 362e12, 733e12, None, 1),
        ("l4", 300e9, 121e12, 242e12, None, 1),
        ("mi300x", 5.3e12, 1307e12, 2615e12, 896e9, 8),
        ("mi325x", 6.0e12, 1307e12, 2615e12, 896e9, 8),
    ],
)
def test_figures_of_the_data_sheets(
    gpu_id: str,
    bytes_per_s: float,
    bf16_flop_per_s: float,
    fp8_flop_per_s: float | None,
    nvlink: float | None,
    nvlink_gpus: int,
) -> None:
    card = gpu(gpu_id)
    assert card.memory_bandwidth_bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert card.bf16_flop_per_s == pytest.approx(bf16_flop_per_s, rel=0.01)
    assert card.fp8_flop_per_s == (fp8_flop_per_s and pytest.approx(fp8_flop_per_s, rel=0.01))
    assert (card.nvlink_bytes_per_s, card.nvlink_gpus) == (nvlink, nvlink_gpus)


def test_the_way_to_the_cpu_is_pcie_unless_the_cpu_is_on_the_module() -> None:
    assert gpu("h100-sxm").host_bytes_per_s == 64e9
    assert gpu("gh200").host_bytes_per_s == 450e9


# --- Ids ---


def test_ids_may_be_typed_in_capitals() -> None:
    assert gpu(" H100-SXM ") is gpus()["h100-sxm"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("h10-sxm", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
    ],
)
def test_an_unknown_id_says_what_may_have_been_meant(typed: str, meant: str) -> None:
    with pytest.raises(SizingError) as raised:
        gpu(typed)
    assert f"unknown GPU {typed!r}; did you mean {meant}" in str(raised.value)
    assert (raised.value.name, raised.value.choices) == ("gpu", ())


@pytest.mark.parametrize("typed", ["", "tpu-v5e"])
def test_an_id_like_no_other_says_how_to_list_them(typed: str) -> None:
    with pytest.raises(
        SizingError,
        match=r"unknown GPU .*; `kneewatch size --list-gpus` lists all; or set --gpu-memory-gib",
    ):
        gpu(typed)


# --- Product names ---

RECOGNISED = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 80GB HBM2e": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA H20": "h20",
    "NVIDIA H20-3e": "h20-3e",
    "NVIDIA H800": "h800",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB300": "gb300",
    "NVIDIA GB10": "gb10",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie",
    "NVIDIA L40S": "l40s",
    "NVIDIA L40": "l40",
    "NVIDIA L4": "l4",
    "NVIDIA A10G": "a10g",
    "NVIDIA A10": "a10",
    "NVIDIA A40": "a40",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI325X": "mi325x",
    " nvidia  h100 80gb hbm3 ": "h100-sxm",
}
NOT_WHOLE_OR_NOT_KNOWN = (
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA H100 80GB HBM3 MIG 7g.80gb",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    "NVIDIA H200 MIG 1g.18gb",
    "GRID A100D-20C",
    "NVIDIA A40-48Q",
    "NVIDIA L4-24C",
    "NVIDIA L40S-48Q",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA H100",
    "NVIDIA",
    "Tesla P4",
    "",
)


@pytest.mark.parametrize(("name", "gpu_id"), RECOGNISED.items())
def test_a_product_name_is_recognised(name: str, gpu_id: str) -> None:
    assert recognise(name) is gpus()[gpu_id]


@pytest.mark.parametrize("name", NOT_WHOLE_OR_NOT_KNOWN)
def test_what_is_not_a_whole_known_gpu_is_not_recognised(name: str) -> None:
    assert recognise(name) is None


@given(st.text())
def test_any_text_is_recognised_or_not(name: str) -> None:
    recognised = recognise(name)
    assert recognised is None or recognised.names


def test_all_names_are_recognised_and_none_with_a_slice() -> None:
    for card in gpus().values():
        for name in card.names:
            assert recognise(name) is card
            assert recognise(f"{name} MIG 1g.10gb") is None


# --- The packaged table ---


@every_gpu
def test_a_gpu_has_values_of_the_right_kind(card: Gpu) -> None:
    hints = get_type_hints(Gpu)
    for field in fields(card):
        value = getattr(card, field.name)
        if value is None:
            assert field.default is None, field.name
        elif hints[field.name] in (str, str | None):
            assert isinstance(value, str), field.name
            assert value.strip() or field.name in ("note", "given_name")
        elif hints[field.name] is bool:
            assert type(value) is bool
        elif field.name in ("names", "short_names"):
            assert all(isinstance(name, str) and plain_name(name) for name in value)
        else:
            whole = hints[field.name] is int
            assert type(value) in ((int,) if whole else (int, float)), field.name
            assert 0 < value < math.inf, field.name


@every_gpu
def test_a_gpu_is_consistent(card: Gpu) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", card.id)
    assert card.segment in ("data-centre", "workstation")
    assert (card.nvlink_gpus > 1) == (card.nvlink_bytes_per_s is not None)


def test_no_two_gpus_have_the_same_name() -> None:
    names = [(plain_name(name), card.id) for card in gpus().values() for name in card.names]
    assert len(dict(names)) == len(set(names))


def test_the_packaged_table_is_not_mutable() -> None:
    assert isinstance(gpus(), Mapping)
    assert not hasattr(gpus(), "__setitem__")
    assert gpus() is gpus()


def test_every_key_of_the_packaged_table_is_explained_in_it() -> None:
    head = PACKAGED.partition("\n# ---")[0]
    for row in tomllib.loads(PACKAGED)["gpus"].values():
        for key in row:
            assert key in head


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("h100", "h100-sxm"),
        ("A100", "a100-80gb"),
        ("H100 80GB", "h100-sxm"),
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("dgx-spark", "gb10"),
        ("rtx a6000", "a6000"),
    ],
)
def test_the_names_that_people_type_are_known(typed: str, expected: str) -> None:
    assert gpu(typed).id == expected


def test_a_short_name_belongs_to_one_gpu() -> None:
    ids = {spec_id.replace("-", "") for spec_id in gpus()}
    short = [name.replace("-", "") for spec in gpus().values() for name in spec.short_names]
    assert len(set(short)) == len(short)
    assert not ids & set(short) - {"rtxa6000"}
    with pytest.raises(SizingError, match="rtx-6000-ada"):
        gpu("rtx 6000")
