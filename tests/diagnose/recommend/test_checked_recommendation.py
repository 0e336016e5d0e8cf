"""Do no harm, whatever the server and the load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.deployment.deployment import Stated, deployment
from kneewatch.diagnose.deployment.vllm_flags import CommandLine, supports_flag
from kneewatch.diagnose.recommend.adviser import MOST, checked_recommendation
from kneewatch.diagnose.recommend.context import LeverContext, advice
from kneewatch.diagnose.recommend.demand import demand
from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.scenes import ADVISED, FULL, LLAMA, PAGE, advised
from tests.diagnose.situations import Situation
from tests.examples import examples

COUNTS = st.one_of(st.floats(0, 5000), st.just(float("inf")))
RATIOS = st.floats(0, 1)
VALUES = st.fixed_dictionaries(
    {
        "running": COUNTS,
        "running_avg": COUNTS,
        "running_max": COUNTS,
        "waiting_by_capacity": COUNTS,
        "waiting_avg": COUNTS,
        "kv_usage_avg_ratio": RATIOS,
        "completed_per_s": st.floats(0, 100),
        "waiting_slope_per_s": st.floats(-10, 10),
        "prompt_tokens_mean": st.one_of(st.none(), st.floats(1, 50_000)),
        "output_tokens_mean": st.one_of(st.none(), st.floats(1, 5000)),
        "prefill_p99_s": st.floats(0, 30),
        "prompt_tokens_p99": st.floats(0, 100_000),
        "itl_mean_s": st.floats(0, 1),
        "itl_p99_s": st.floats(0, 2),
        "ttft_mean_s": st.floats(0, 60),
        "ttft_p99_s": st.floats(0, 60),
        "spec_acceptance_ratio": st.one_of(st.none(), RATIOS),
        "spec_accepted_per_draft_tokens": st.one_of(st.none(), st.floats(0, 8)),
        "lora_max": st.one_of(st.none(), st.floats(1, 64)),
        "waiting_deferred_avg": COUNTS,
    }
)
PAGES = st.fixed_dictionaries(
    {},
    optional={
        "block_size": st.sampled_from(["16", "32", "None"]),
        "num_gpu_blocks": st.sampled_from(["1", "160", "10001", "None"]),
        "cache_dtype": st.sampled_from(["auto", "fp8", "bfloat16"]),
        "gpu_memory_utilization": st.sampled_from(["0.5", "0.9", "0.95", "0.99", "x"]),
        "num_gpu_blocks_override": st.sampled_from(["160", "None"]),
        "kv_cache_memory_bytes": st.sampled_from([str(2**30), "None"]),
        "enable_prefix_caching": st.sampled_from(["True", "False"]),
        "kv_cache_size_tokens": st.sampled_from(["5120", "160016", "None"]),
        "kv_cache_max_concurrency": st.sampled_from(["0.5", "2.5", "None"]),
    },
)
STATED = st.sampled_from(
    [Stated(), LLAMA, Stated(gpu=LLAMA.gpu), Stated(version=(0, 6, 0)), replace(LLAMA, replicas=7)]
)
TARGETS = st.sampled_from([Targets(), Targets(1.0, 0.05)])


@examples(200)
@given(
    cause_id=st.sampled_from(ADVISED),
    values=VALUES,
    page=PAGES,
    stated=STATED,
    targets=TARGETS,
)
def test_what_always_holds(
    cause_id: str,
    values: dict[str, float | None],
    page: dict[str, str],
    stated: Stated,
    targets: Targets,
) -> None:
    situation = Situation(values={**FULL.values, **values}, targets=targets)
    levers = advised(cause_id, situation=situation, page=page, stated=stated)
    server = deployment(page, stated)
    assert len(levers) <= MOST
    for recommendation in levers.values():
        assert recommendation.cause == cause_id
        assert recommendation.summary
        assert recommendation.checks
        assert recommendation.verify
        for change in recommendation.changes:
            assert change.before != change.after or change.after is None
            assert supports_flag(change.flag, version=server.version, config=page)
            now = server.in_force(change.flag)
            assert now is None or change.after != now
        ratio = recommendation.predicted.get("kv_demand_ratio", 0.0)
        if ratio > 1:
            assert "Not enough alone" in recommendation.summary
            assert recommendation.predicted.get("preemption_per_s") is None
        assert recommendation.predicted.get("kv_usage_ratio", 0.0) <= 1
        if "gpu-memory-utilization" in levers:
            ((change),) = levers["gpu-memory-utilization"].changes
            assert isinstance(change.after, float)
            assert isinstance(change.before, float)
            assert change.before < change.after <= 0.95


def lever_context(situation: Situation = FULL, stated: Stated = LLAMA) -> LeverContext:
    server = deployment(PAGE, stated)
    return LeverContext("kv_pressure", situation.facts(), server, demand(situation.values, server))


def test_a_target_that_is_met_is_not_given_up() -> None:
    meets = replace(FULL.but(itl_p99_s=0.04), targets=Targets(itl_p99_s=0.05))
    recommendation = advice(
        lever_context(meets), "x", [("--max-num-seqs", 8, 16)], "s",
        before={"itl_s": 0.02}, predicted={"itl_s": 0.03},
    )  # fmt: skip
    assert checked_recommendation(recommendation, lever_context(meets)) is None  # 0.04 x 1.5 = 0.06
    assert checked_recommendation(recommendation, lever_context()) is not None  # no target


def test_a_value_in_force_is_not_recommended() -> None:
    stated = replace(LLAMA, replicas=4)
    for before, after in ((3, 4), (4, 4)):
        recommendation = advice(
            lever_context(stated=stated), "x", [("replicas", before, after)], "s"
        )
        assert checked_recommendation(recommendation, lever_context(stated=stated)) is None
    recommendation = advice(lever_context(stated=stated), "x", [("replicas", 4, 5)], "s")
    given = checked_recommendation(recommendation, lever_context(stated=stated))
    assert given == replace(recommendation, suffices=False)


@pytest.mark.parametrize(
    ("flag", "version", "supported"),
    [
        ("--max-num-queued-reqs", (0, 28, 0), False),
        ("--max-num-queued-reqs", (0, 29, 0), True),
        ("--speculative-config.num_speculative_tokens", (0, 9, 0), True),
        ("--speculative-config", (0, 7, 0), False),
        ("--max-num-seqs", None, True),
        ("--long-prefill-token-threshold", None, False),
        ("--swap-space-of-mine", (0, 32, 0), False),
        ("replicas", None, True),
    ],
)
def test_flags_by_version(
    flag: str, version: tuple[int, int, int] | None, *, supported: bool
) -> None:
    assert supports_flag(flag, version=version, config={}) is supported


def test_a_label_on_the_page_vouches_for_its_flag() -> None:
    config = {"kv_offloading_size": "None"}
    assert supports_flag("--kv-offloading-size", version=None, config=config)
    assert not supports_flag("--kv-offloading-size", version=None, config={})


def test_flags_that_contradict_already_hold_up_no_other_change() -> None:
    """The server runs, so what is known of its flags is wrong; the change must still start."""
    line = CommandLine("m", {"--max-num-batched-tokens": "512", "--max-num-seqs": "1024"})
    context = lever_context(stated=replace(LLAMA, command_line=line))
    off = ("--no-enable-prefix-caching", True, None)
    caching, more = (
        advice(context, "x", [change], "s") for change in (off, ("--max-num-seqs", 1024, 2048))
    )
    assert checked_recommendation(caching, context) is not None
    assert checked_recommendation(more, context) is None
