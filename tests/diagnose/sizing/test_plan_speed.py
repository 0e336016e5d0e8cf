"""The plan's predictions: P99s from the roofline's means, C_max, token budgets, splits."""

from __future__ import annotations

import pytest

from kneewatch.diagnose.sizing.benchmark.operating_point import missed_targets
from kneewatch.diagnose.sizing.memory.weights import Parallel
from kneewatch.diagnose.sizing.plan.replica_curve import (
    Serving,
    at,
    best_point,
    point,
    predicted_misses,
    replica_launch,
    serving,
    sweep,
    tuned,
)
from kneewatch.diagnose.sizing.plan.thirteen_steps import plan
from kneewatch.diagnose.sizing.plan.workload_profile import read_profile
from kneewatch.diagnose.sizing.plan.workload_steps import pool_of
from kneewatch.diagnose.sizing.speed.roofline_inputs import measured_ratios
from tests.diagnose.sizing.test_plan import profile_text

TIGHT = "ttft_p99_s = 2.0\nitl_p99_s = 0.08"


def instance(*, slo: str = "ttft_p99_s = 2.0", tensor: int = 4, **options: str) -> Serving:
    profile = read_profile(profile_text(slo=slo, **options))
    pool = pool_of(
        profile,
        profile.deployment,
        profile.lengths,
        name="",
        share_ratio=1.0,
        models={},
    )
    return serving(pool, replica_launch(pool, Parallel(tensor=tensor), quantization="fp8"))


def test_the_ttft_of_a_p99_prompt_adds_its_longer_prefill() -> None:
    served = instance()
    speed = at(served, 16)
    # P99 input 2,000 tokens, mean 1,000.
    longer_s = (2000 - 1000) / speed.prefill_tokens_per_s
    assert point(served, 16).ttft_p99_s == pytest.approx(speed.ttft_s + longer_s)


def test_the_itl_p99_is_a_plain_step_until_chunks_are_common() -> None:
    served = instance()
    alone, busy = at(served, 1), at(served, 16)
    assert alone.prefill_step_ratio < 0.01 < busy.prefill_step_ratio
    assert point(served, 1).itl_p99_s == pytest.approx(max(alone.decode_step.total_s, alone.itl_s))
    assert point(served, 16).itl_p99_s == pytest.approx(busy.prefill_step.total_s)


def test_c_max_is_the_last_concurrency_that_keeps_the_targets() -> None:
    served = tuned(instance(slo=TIGHT))[0]
    best = best_point(served)
    assert best is not None
    assert 1 < best.concurrency < served.limit
    assert not predicted_misses(served, best)
    assert predicted_misses(served, point(served, best.concurrency + 1))


@pytest.mark.parametrize("slo", ["ttft_p99_s = 2.0", TIGHT, "itl_p99_s = 0.03"])
def test_a_plan_leaves_the_margin_of_a_search(slo: str) -> None:
    served = tuned(instance(slo=slo))[0]
    best, targets = best_point(served), served.pool.profile.slo
    assert best is not None
    assert not missed_targets(best, targets)
    # Were every step as slow as in the worst of 20 benchmarks, the means would keep the targets.
    mean, ratios = at(served, best.concurrency), measured_ratios(served.launch)
    slowest = mean.ttft_s * ratios["TTFT"][1], mean.itl_s * ratios["ITL"][1]
    assert all(slowest_s <= target_s for _, slowest_s, target_s in targets.beside(*slowest))


def test_a_smaller_chunk_carries_more_at_an_itl_target() -> None:
    best, tried = tuned(instance(slo=TIGHT))
    carried = dict(tried)
    assert best.launch.batched_tokens < 8192
    assert carried[best.launch.batched_tokens] > 2 * carried[8192]
    assert tuned(instance())[1] == []


def test_memory_bounds_concurrency() -> None:
    served = instance()
    held = served.memory.concurrency.expected
    assert served.limit == int(held)
    assert at(served, served.limit * 4).queueing


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        pytest.param(1, (1,), id="one"),
        pytest.param(8, (1, 2, 4, 8), id="a power of two"),
        pytest.param(49, (1, 2, 4, 8, 16, 32, 49), id="the limit last"),
    ],
)
def test_the_sweep_ends_at_the_limit(limit: int, expected: tuple[int, ...]) -> None:
    assert sweep(limit) == expected


def test_a_stated_concurrency_has_to_keep_the_targets() -> None:
    text = profile_text(slo="itl_p99_s = 0.06", deployment="concurrency = 48")
    step = plan(read_profile(text)).step(6)
    assert step.output["tensor_parallel"] == 4
    assert any("TP 2 rejected: " in note and "48 are needed" in note for note in step.notes)


def test_more_hits_carry_more() -> None:
    carried: list[float] = []
    for hits in ("0.1", "0.5", "0.9"):
        more = f"[prefix]\nshared_tokens = 800\nhit_ratio = {hits}\n"
        usable = (
            plan(read_profile(profile_text(more=more))).step(10).output["usable_requests_per_s"]
        )
        assert isinstance(usable, float)
        carried.append(usable)
    assert carried == sorted(carried)
    assert carried[0] < carried[-1]


def test_each_tier_is_kept_warm_for_its_own_share() -> None:
    """60 requests/s at night, half of them: max(ceil(30 x 2 / 12), ceil(30 / 12) + 1) = 5."""
    tiers = '[routing]\nmethod = "hardware"\n' + "".join(
        f'[[tiers]]\nname = "{name}"\nshare_ratio = 0.5\nusable_requests_per_s = 12\n'
        for name in ("a", "b")
    )
    fleet_plan = plan(read_profile(profile_text(traffic="lowest_requests_per_s = 60", more=tiers)))
    assert fleet_plan.step(11).output["a.warm_instances"] == 5


def test_the_curve_says_what_stops_it() -> None:
    notes = plan(read_profile(profile_text(slo=TIGHT))).step(7).notes
    assert any(note.startswith("with one more request in flight: ITL P99") for note in notes)
    assert any("contain a prefill chunk" in note for note in notes)
