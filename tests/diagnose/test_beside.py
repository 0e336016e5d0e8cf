"""Data-parallel engines of one page: who carries more than its share, whose KV pool is whose."""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence

import pytest

from kneewatch.diagnose.deployment.deployment import deployment
from kneewatch.diagnose.verdict import Verdict
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.collector.name_pages import PAGES, labelled
from tests.diagnose.streams import Target, bodies, cause_ids
from tests.pages import engine_only, with_values
from tests.recordings import NO_TARGETS

BUSY, CALM = bodies("queue_overload")[8:30], bodies("healthy_light")[8:30]
"""Eight run and dozens wait; a few run."""

FEW = CALM[:3]


def told_of(
    *engines: Sequence[str],
    models: Sequence[str] = ("tiny", "tiny"),
    targets: Targets = NO_TARGETS,
) -> list[Verdict]:
    """What is said of engines that share the pages of one server, by their number."""
    target = Target(window_s=15.0, targets=targets)
    diagnoses: list[Verdict] = []
    for pages in zip(*engines, strict=True):
        body = "".join(
            engine_only(labelled(page, engine=str(at), model_name=model))
            for at, (page, model) in enumerate(zip(pages, models, strict=True))
        )
        diagnoses = target.take(body)
    return sorted(diagnoses, key=lambda diagnosis: diagnosis.engine)


def test_an_engine_that_carries_far_more_than_the_other_is_told() -> None:
    hot, cool = told_of(BUSY, CALM)
    cause = hot.causes[0]
    assert cause.id == "replica_imbalance"
    assert "1 of 2 data-parallel engines of one replica carries far more" in cause.summary
    assert "tiny engine 0 has" in cause.summary
    assert set(cause.explains) & {"queue_saturation", "admission_limit"}
    assert cause.severity >= Severity.WARNING
    assert "replica_imbalance" not in cause_ids(cool)


def test_an_engine_whose_first_tokens_are_late_is_as_critical_as_its_verdict() -> None:
    hot, _ = told_of(BUSY, CALM, targets=Targets(ttft_p99_s=0.5))
    first = hot.causes[0]
    assert first.id == "replica_imbalance"
    assert first.severity.word == hot.health == "critical"


def test_load_that_piles_up_on_two_ranks_of_eight_asks_for_no_replicas() -> None:
    full = bodies("kv_pressure_cascade")[44:66]
    quiet = bodies("healthy_light")[8:30]
    diagnoses = told_of(full, full, *[quiet] * 6, models=("tiny",) * 8)
    for diagnosis in diagnoses[:2]:
        assert diagnosis.causes[0].id == "replica_imbalance", cause_ids(diagnosis)
        assert "kv_pressure" in diagnosis.causes[0].explains
        assert diagnosis.causes[0].severity == Severity.CRITICAL
        changed = {change.flag for each in diagnosis.recommendations for change in each.changes}
        assert "replicas" not in changed
    assert all("replica_imbalance" not in cause_ids(diagnosis) for diagnosis in diagnoses[2:])


def test_the_order_of_the_engines_changes_nothing() -> None:
    cool, hot = told_of(CALM, BUSY)
    assert "replica_imbalance" in cause_ids(hot)
    assert "replica_imbalance" not in cause_ids(cool)


@pytest.mark.parametrize(
    ("engines", "models"),
    [
        pytest.param((BUSY, BUSY), ("tiny", "tiny"), id="both are as busy"),
        pytest.param((CALM, CALM), ("tiny", "tiny"), id="both are calm"),
        pytest.param((BUSY, CALM), ("tiny", "other"), id="two models have loads of their own"),
    ],
)
def test_alike_and_unlike_engines_are_not_told(
    engines: Sequence[Sequence[str]], models: Sequence[str]
) -> None:
    for diagnosis in told_of(*engines, models=models):
        assert "replica_imbalance" not in cause_ids(diagnosis)


def with_blocks(pages: Sequence[str], blocks: int) -> list[str]:
    """The pages with so many KV blocks of 32 tokens, as vLLM showed them before 0.27."""
    plain = re.compile(r'kv_cache_(?:size_tokens|max_concurrency)="[^"]*",|_override="\d+"')
    return [
        re.sub(r'num_gpu_blocks="\d+"', f'num_gpu_blocks="{blocks}"', plain.sub("", page))
        for page in pages
    ]


def test_engines_whose_pools_are_summed_have_their_share() -> None:
    """512 blocks on the row of each of two engines are 256 of 32 tokens for one."""
    for diagnosis in told_of(with_blocks(FEW, 512), with_blocks(FEW, 512)):
        assert diagnosis.values["kv_capacity_tokens"] == 256 * 32


def test_a_real_page_of_two_engines_shows_the_pool_of_each() -> None:
    """160 blocks were asked for; each row says 320, and a size of 5,120 tokens."""
    body = gzip.decompress((PAGES / "two-engines-vllm-0.32.0.txt.gz").read_bytes()).decode()
    assert body.count('num_gpu_blocks="320"') == 2
    target = Target(window_s=15.0)
    diagnoses = target.take(body, body)
    sizes = [(diagnosis.engine, diagnosis.values["kv_capacity_tokens"]) for diagnosis in diagnoses]
    assert sizes == [("0", 5120.0), ("1", 5120.0)]
    for engine in target.stream.monitor.engines:
        server = deployment(engine.reader.config)
        assert (server.blocks, server.blocks_override, server.capacity_tokens) == (160, 160, 5088)


def test_the_smaller_of_two_pools_binds_its_own_engine() -> None:
    """With as many requests in each, the engine with fewer blocks is the one that is full."""
    small = [with_values(page, {"kv_cache_usage_perc": 0.97}) for page in with_blocks(FEW, 100)]
    full, roomy = told_of(small, with_blocks(FEW, 400))
    assert full.values["kv_capacity_tokens"] == 100 * 32
    assert roomy.values["kv_capacity_tokens"] == 400 * 32
    assert full.values["kv_usage_ratio"] == 0.97
    assert roomy.values["kv_usage_ratio"] != 0.97
