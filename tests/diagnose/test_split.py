"""A model split over too many GPUs, by the user's sweeps: one server, what to change, a fleet."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kneewatch.diagnose.catalogue.models import model
from kneewatch.diagnose.deployment.deployment import Stated, deployment
from kneewatch.diagnose.deployment.vllm_flags import parse_command
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import symptoms
from kneewatch.diagnose.fleet.verdict import FleetVerdict
from kneewatch.diagnose.ranking import ranked
from kneewatch.diagnose.recommend.context import LeverContext
from kneewatch.diagnose.recommend.demand import demand
from kneewatch.diagnose.recommend.levers_replicas import lower_tensor_parallel
from kneewatch.diagnose.sizing.benchmark.operating_point import Sweeps
from kneewatch.rules.facts import Targets
from kneewatch.rules.rule import Severity
from tests.diagnose.fleet.example_fleets import Row, causes, pod, verdict
from tests.diagnose.recommend.scenes import FULL, LLAMA, PAGE, advised, changes
from tests.diagnose.situations import CALM, CONCLUSIVE, QUEUED, Situation, split_of
from tests.diagnose.sweeps import sweep

SPLIT = CONCLUSIVE["tp_overhead"]
SWEEPS = {**sweep(1, 1000), **sweep(4, 500)}
BUSY = replace(QUEUED, split=SPLIT.split)
"""With a queue: what it gives is what it can."""


def test_the_sweeps_alone_are_a_note_and_symptom_s5() -> None:
    cause = SPLIT.causes()["tp_overhead"]
    assert cause.severity == Severity.INFO
    assert "loses 50%" in cause.summary
    assert "TTFT P99 1.2 s" in " ".join(evidence.text for evidence in cause.evidence)
    assert symptoms(SPLIT.facts(), ranked([cause])) == ["S5"]


@pytest.mark.parametrize(
    "per_gpu",
    [
        pytest.param({1: 1000.0, 4: 750.0}, id="what the guide expects of PCIe"),
        pytest.param({1: 1000.0, 4: 1000.0}, id="as much a GPU"),
        pytest.param({1: 1000.0}, id="no sweep of its own"),
        pytest.param({4: 500.0}, id="no sweep of a smaller one"),
    ],
)
def test_sweeps_that_prove_nothing_conclude_nothing(per_gpu: dict[int, float]) -> None:
    assert replace(CALM, split=split_of(per_gpu, tensor_parallel=4)).causes() == {}


def test_a_smaller_share_is_surer() -> None:
    shares = [
        replace(CALM, split=split_of({1: 1000.0, 4: tokens}, tensor_parallel=4))
        for tokens in (740.0, 600.0, 300.0)
    ]
    confidences = [situation.causes()["tp_overhead"].confidence for situation in shares]
    assert confidences == sorted(set(confidences))


@pytest.mark.parametrize(
    ("situation", "side"),
    [
        pytest.param(BUSY.but(generation_tokens_per_s=2000.0), "evidence", id="as the benchmark"),
        pytest.param(BUSY.but(generation_tokens_per_s=3800.0), "against", id="as TP 1"),
        pytest.param(BUSY.but(generation_tokens_per_s=100.0), "", id="far less: another fault"),
        pytest.param(
            BUSY.but(generation_tokens_per_s=3800.0, output_tokens_mean=900.0), "",
            id="longer answers than the benchmark's",
        ),
        pytest.param(
            replace(CALM, split=SPLIT.split).but(generation_tokens_per_s=2000.0), "",
            id="no queue: it gives what it is asked for",
        ),
    ],
)  # fmt: skip
def test_what_a_queued_server_gives_is_evidence(situation: Situation, side: str) -> None:
    cause = situation.causes()["tp_overhead"]
    sides = {
        name
        for name, seen in (("evidence", cause.evidence), ("against", cause.against))
        if any(evidence.signal == "generation_tokens_per_s" for evidence in seen)
    }
    assert sides == ({side} if side else set())


def test_a_server_that_gives_what_fewer_gpus_gave_is_doubted() -> None:
    sure, doubted = (
        BUSY.but(generation_tokens_per_s=tokens_per_s).causes()["tp_overhead"]
        for tokens_per_s in (2000.0, 3800.0)
    )
    assert doubted.confidence < SPLIT.causes()["tp_overhead"].confidence < sure.confidence


def test_a_profile_says_why_its_sweeps_say_nothing() -> None:
    reasons = Profile(stated=Stated(sweeps=SWEEPS)).unstated
    assert reasons["tp_overhead"] == "degree not stated (tensor_parallel)"
    unlike = {**sweep(1, 1000, tokens_per_request=50), **sweep(4, 500)}
    reasons = Profile(stated=Stated(sweeps=unlike, tensor_parallel=4)).unstated
    assert "different requests" in reasons["tp_overhead"]
    assert "tp_overhead" not in Profile().unstated
    for degree in (1, 4):
        stated = Stated(sweeps=SWEEPS, tensor_parallel=degree)
        assert "tp_overhead" not in Profile(stated=stated).unstated


def test_the_degree_may_be_the_launch_files() -> None:
    launch = parse_command("vllm serve m --tensor-parallel-size 4", origin="f")
    split = Profile(stated=Stated(sweeps=SWEEPS, command_line=launch)).split
    assert split is not None
    assert split.far_below


def test_targets_decide_what_counts() -> None:
    stated = Stated(sweeps=SWEEPS, tensor_parallel=4)
    strict = Profile(stated=stated, targets=Targets(itl_p99_s=0.0206)).split
    assert strict is not None
    assert strict.share_ratio == pytest.approx(0.5)
    assert strict.narrow is not None
    assert strict.narrow.point is not None
    assert strict.narrow.point.concurrency == 1, "the lightest load alone keeps 20.6 ms"


ON_FOUR = replace(LLAMA, tensor_parallel=4, sweeps=SWEEPS)
LIGHT = replace(SPLIT, targets=Targets(ttft_p99_s=2.0)).but(
    prompt_tokens_mean=600.0, output_tokens_mean=200.0, itl_mean_s=0.02, ttft_mean_s=0.1
)


def test_fewer_gpus_each_and_more_replicas() -> None:
    """Two replicas on four GPUs make eight on one; 2 x 2,000 / 1,000 = 4 would give as much."""
    advice = advised("tp_overhead", situation=LIGHT, stated=ON_FOUR)["tensor-parallel-down"]
    assert changes(advice) == {"--tensor-parallel-size": (4, 1), "replicas": (2, 8)}
    assert (advice.before["tokens_per_s_per_gpu"], advice.predicted["tokens_per_s_per_gpu"]) == (
        500,
        1000,
    )
    assert advice.cost_usd_per_hour == 0
    price = LLAMA.gpu.usd_per_hour if LLAMA.gpu else 0.0
    assert advice.predicted["usd_per_million_tokens_at_limit"] == pytest.approx(
        price / 3.6, rel=5e-4
    )
    assert "4 would match the present throughput" in advice.summary
    assert advice.predicted["kv_capacity_tokens"] < advice.before["kv_capacity_tokens"] / 4
    assert advice.predicted["kv_demand_ratio"] < 0.9


@pytest.mark.parametrize(
    ("situation", "stated"),
    [
        pytest.param(LIGHT, replace(ON_FOUR, model=None), id="nobody says what is served"),
        pytest.param(LIGHT, replace(ON_FOUR, gpu=None), id="nobody says on what"),
        pytest.param(
            LIGHT, replace(ON_FOUR, model=model("meta-llama/Llama-3.3-70B-Instruct")),
            id="the weights do not fit on one GPU",
        ),
        pytest.param(
            replace(FULL, split=SPLIT.split), ON_FOUR, id="the smaller caches are too small"
        ),
        pytest.param(replace(LIGHT, split=None), ON_FOUR, id="no sweeps"),
    ],
)  # fmt: skip
def test_no_smaller_degree_that_may_do_harm(situation: Situation, stated: Stated) -> None:
    assert advised("tp_overhead", situation=situation, stated=stated) == {}


def test_no_smaller_degree_beside_weights_that_leave_no_room_for_a_fixed_cache() -> None:
    """A cache of a size in bytes fits by its own account; the weights of 70B beside it do not."""
    page = {**PAGE, "kv_cache_memory_bytes": str(10 << 30)}
    levers = advised("tp_overhead", situation=LIGHT, stated=ON_FOUR, page=page)
    assert "tensor-parallel-down" in levers
    large = replace(ON_FOUR, model=model("meta-llama/Llama-3.3-70B-Instruct"))
    assert advised("tp_overhead", situation=LIGHT, stated=large, page=page) == {}


def test_no_smaller_degree_that_a_weeks_peak_would_fill() -> None:
    facts, server = LIGHT.facts(), deployment(PAGE, ON_FOUR)
    scene = LeverContext("tp_overhead", facts, server, demand(facts.values, server))
    assert lower_tensor_parallel(replace(scene, weekly_peak_requests=12.0)) is not None
    assert lower_tensor_parallel(replace(scene, weekly_peak_requests=21.0)) is None


def fleet_on(
    gpus: int, more: Mapping[str, float] | None = None, *, sweeps: Sweeps = SWEEPS
) -> FleetVerdict:
    """Two replicas on so many GPUs each and nothing beside them."""
    rows: list[Row] = [(pod(name, tier="H100"), more or {}) for name in ("a", "b")]
    profile = Profile(stated=Stated(sweeps=sweeps))
    counts = {name: {"gpus": float(gpus)} for name in ("a", "b")}
    return verdict(*rows, gpus=counts, profile=profile)


def test_a_fleet_without_smaller_degrees_is_held_against_the_sweeps() -> None:
    diagnosis = fleet_on(4)
    assert causes(diagnosis) == {"tp_overhead": ("a", "b")}
    (cause,) = diagnosis.causes
    assert cause.severity == Severity.INFO
    assert "In the benchmark" in cause.summary
    assert causes(fleet_on(4, sweeps={})) == {}


def test_a_fleet_that_gives_as_much_as_the_smaller_degree_is_doubted() -> None:
    queued = {"waiting": 6.0, "waiting_by_capacity": 6.0, "output_tokens_mean": 200.0}
    (sure,), (doubted,) = (
        fleet_on(4, {**queued, "generation_tokens_per_s": tokens_per_s}).causes
        for tokens_per_s in (2000.0, 3800.0)
    )
    assert doubted.confidence < sure.confidence
    assert doubted.against


@pytest.mark.parametrize(("gpus", "why"), [(1, None), (2, "no sweep of TP 2 is given")])
def test_other_degrees_of_a_fleet(gpus: int, why: str | None) -> None:
    diagnosis = fleet_on(gpus)
    assert causes(diagnosis) == {}
    assert [note for note in diagnosis.notes if note.startswith("tp_overhead")] == (
        [f"tp_overhead: {why}"] if why else []
    )


def test_live_servers_come_before_the_sweeps() -> None:
    """Side by side with a queue four GPUs give as much each as one, whatever the sweeps say."""
    queued = {"waiting_by_capacity": 6.0, "computed_prompt_tokens_per_s": 300.0}
    rows: list[Row] = [
        (pod("one", tier="H100"), {**queued, "generation_tokens_per_s": 400.0}),
        (
            pod("four", tier="H100"),
            {**queued, "generation_tokens_per_s": 1600.0, "computed_prompt_tokens_per_s": 1200.0},
        ),
    ]
    gpus = {"one": {"gpus": 1.0}, "four": {"gpus": 4.0}}
    profile = Profile(stated=Stated(sweeps=SWEEPS))
    assert "tp_overhead" not in causes(verdict(*rows, gpus=gpus, profile=profile))


def test_sweeps_are_of_one_model_on_one_kind_of_gpu() -> None:
    rows: list[Row] = [(pod("a", tier="H100"), {}), (pod("b", tier="L40S"), {})]
    gpus = {"a": {"gpus": 4.0}, "b": {"gpus": 4.0}}
    diagnosis = verdict(*rows, gpus=gpus, profile=Profile(stated=Stated(sweeps=SWEEPS)))
    assert "tp_overhead" not in causes(diagnosis)
    assert any("several models or GPU types" in note for note in diagnosis.notes)


def test_gpus_that_nobody_counts_are_asked_for() -> None:
    profile = Profile(stated=Stated(sweeps=SWEEPS))
    diagnosis = verdict((pod("a"), {}), profile=profile)
    assert any("--tensor-parallel" in note for note in diagnosis.notes)
