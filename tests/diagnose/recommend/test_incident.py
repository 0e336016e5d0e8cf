"""Sizes are for the peak of a cause, while it lasts; hostile pages break nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.diagnose.deployment.deployment import Stated, deployment
from kneewatch.diagnose.deployment.vllm_flags import parse_command
from kneewatch.diagnose.recommend.advice import Advice
from kneewatch.diagnose.recommend.adviser import Adviser
from kneewatch.diagnose.recommend.context import LeverContext
from kneewatch.diagnose.recommend.demand import demand
from kneewatch.diagnose.recommend.levers_kv_cache import kv_blocks
from kneewatch.diagnose.recommend.past_advice import HeldAdvice
from kneewatch.rules.facts import Targets
from tests.diagnose.recommend.scenes import ADVISED, FULL, LLAMA, PAGE, advised, cause, changes
from tests.diagnose.situations import CALM, NOW_S
from tests.examples import examples
from tests.reports.diagnoses import SICK
from tests.reports.documents import document
from tests.reports.schema import problems

OVERRIDE = {**PAGE, "num_gpu_blocks_override": "10001"}
PEAK = FULL.but(waiting=360.0, waiting_avg=360.0, waiting_by_capacity=360.0)
"""A minute after FULL, 300 more wait: 9 requests/s arrive, and 4 are served."""


def sizes(recommendations: tuple[Advice, ...]) -> dict[str, Any]:
    return {advice.id: advice.changes[0].after for advice in recommendations if advice.changes}


def test_sizes_do_not_follow_the_drain_down() -> None:
    adviser, pressure = Adviser(), [cause("kv_pressure")]
    facts = [replace(situation, config=OVERRIDE).facts() for situation in (FULL, PEAK, FULL)]
    first, peak, drained = (
        sizes(adviser.advise(replace(snapshot, now_s=NOW_S + at), pressure))
        for at, snapshot in zip((0.0, 60.0, 120.0), facts, strict=True)
    )
    assert first["kv-blocks"] < peak["kv-blocks"]
    assert first["replicas"] < peak["replicas"]
    assert drained == peak
    # The cause ends, and the queue: the next one is sized for its own load.
    calm = FULL.but(waiting=0.0, waiting_avg=0.0, waiting_by_capacity=0.0).facts()
    for at_s in (122, 482):
        assert adviser.advise(replace(calm, now_s=NOW_S + at_s), []) == ()
    assert sizes(adviser.advise(replace(facts[0], now_s=NOW_S + 484), pressure)) == first


def test_a_change_of_the_advice_says_why() -> None:
    adviser, pressure = Adviser(), [cause("kv_pressure")]
    for at_s, situation in ((0.0, FULL), (60.0, PEAK), (120.0, PEAK)):
        facts = replace(replace(situation, config=OVERRIDE).facts(), now_s=NOW_S + at_s)
        levers = {advice.id: advice for advice in adviser.advise(facts, pressure)}
    why = "The first advice was 2; it is 3 now: arrivals/s rose from 4.0 to 9.0."
    assert why in levers["replicas"].summary


def test_a_cache_for_giant_prompts_ends_their_share() -> None:
    """They take half of it each, and the cause lasts while they take a fifth."""
    giants = CALM.but(running=4.0, running_avg=4.0, running_max=4.0, waiting=9.0, waiting_avg=9.0,
                      waiting_by_capacity=9.0, kv_usage_avg_ratio=0.4, preemption_per_s=0.0,
                      prompt_p99_kv_share_ratio=0.5, prompt_tokens_mean=800.0)  # fmt: skip
    page = {**PAGE, "num_gpu_blocks_override": "10001"}
    blocks = advised("kv_pressure", situation=giants, page=page)["kv-blocks"]
    assert 0.5 / blocks.predicted["kv_capacity_ratio"] < 0.2


def test_more_that_wait_for_an_adapter_are_more_load() -> None:
    """At first one request waits for the only slot, later five."""
    adviser, thrash = Adviser(), [cause("adapter_thrash")]
    for at_s, running, deferred in ((0.0, 4.0, 0.8), (60.0, 1.0, 5.1)):
        situation = CALM.but(running=running, running_avg=running, running_max=running, waiting=0.0,
                             waiting_avg=deferred, waiting_deferred_avg=deferred, lora_max=1.0,
                             lora_running=1.0, lora_waiting=4.0)  # fmt: skip
        facts = replace(replace(situation, config=PAGE).facts(), now_s=NOW_S + at_s)
        (slots,) = [a for a in adviser.advise(facts, thrash) if a.id == "max-loras"]
    assert slots.before["waiting_deferred"] == 5.1


def test_replicas_that_were_added_do_not_hide_a_load_that_still_grows() -> None:
    """Each of two replicas has fewer requests than the single one had, and two are too few."""
    incident, asked = HeldAdvice(), demand(FULL.facts().values, deployment(PAGE, Stated()))
    more = advised("kv_pressure")["replicas"]
    for before, after, share in ((1, 2, 1.0), (2, 3, 0.6)):
        change = replace(more.changes[0], before=before, after=after)
        each = replace(asked, requests=share * asked.requests)
        incident.take([replace(more, changes=(change,))], each, NOW_S)
    assert incident.values["replicas"] == 3


def test_a_restart_forgets_the_peak() -> None:
    adviser, pressure = Adviser(), [cause("kv_pressure")]
    full, peak = (replace(situation, config=OVERRIDE).facts() for situation in (FULL, PEAK))
    adviser.advise(peak, pressure)
    adviser.restarted()
    again = sizes(adviser.advise(replace(full, now_s=NOW_S + 60), pressure))
    assert again == sizes(Adviser().advise(full, pressure))


def test_a_budget_does_not_swing_back() -> None:
    adviser = Adviser(
        Stated(command_line=parse_command("vllm serve m --max-num-seqs 64", origin="f"))
    )
    slow = CALM.but(prefill_p99_s=4.0, prompt_tokens_p99=6000.0, itl_stall_per_s=1.0)
    quick = CALM.but(prefill_p99_s=2.0, prompt_tokens_p99=6000.0, itl_stall_per_s=1.0)
    advised_sizes = [
        sizes(
            adviser.advise(
                replace(situation.facts(), now_s=NOW_S + at), [cause("prefill_interference")]
            )
        )
        for at, situation in ((0, quick), (100, slow), (200, quick))
    ]
    assert [by_lever["max-num-batched-tokens"] for by_lever in advised_sizes] == [512, 256, 256]


@pytest.mark.parametrize(("held", "advised_blocks"), [(18_000, 18_000), (17_000, 20_480)])
def test_a_size_that_is_no_longer_enough_is_not_held(held: int, advised_blocks: int) -> None:
    """256,000 tokens need 17,778 blocks at 90%; 20,480 aim at 80%."""
    page = {**PAGE, "num_gpu_blocks_override": "10001"}
    facts = replace(FULL, config=page).facts()
    server = deployment(page)
    context = LeverContext(
        "kv_pressure", facts, server, demand(facts.values, server), held={"kv-blocks": held}
    )
    advice = kv_blocks(context)
    assert advice is not None
    assert [change.after for change in advice.changes] == [advised_blocks]


HOSTILE = st.sampled_from(
    ["1e308", "9" * 21, "1e300", "1e-300", "5e-324", "0", "-1", "nan", "inf", "None", "16", "160"]
)
LABELS = (
    "block_size", "num_gpu_blocks", "num_gpu_blocks_override", "kv_cache_size_tokens",
    "kv_cache_max_concurrency", "kv_cache_memory_bytes", "gpu_memory_utilization",
)  # fmt: skip
NUMBERED = ("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "-tp", "-dp",
            "--max-cpu-loras", "--long-prefill-token-threshold", "--max-loras",
            "--max-lora-rank")  # fmt: skip
AMOUNTS = st.sampled_from(
    ["9" * 26, "9" * 400, "0", "1", "8", "512", "8192", "4k", "${N:-64}", "x"]
)


@examples(300)
@given(
    page=st.dictionaries(st.sampled_from(LABELS), HOSTILE),
    flags=st.dictionaries(st.sampled_from(NUMBERED), AMOUNTS),
    more=st.text(alphabet="ab $'\"\\\n;#-=<{}", max_size=30),
    cause_id=st.sampled_from(ADVISED),
    running=st.sampled_from([0.0, 8.0, 1e17, 1e308]),
    adapters=st.sampled_from([2.0, 1e6, 1e17]),
    is_stated=st.booleans(),
)
def test_hostile_pages_and_launches(
    page: dict[str, str], flags: dict[str, str], more: str, cause_id: str, running: float, *,
    adapters: float, is_stated: bool,
) -> None:  # fmt: skip
    line = "vllm serve m --enable-lora " + " ".join(
        f"{flag} {value}" for flag, value in flags.items()
    )
    launch = parse_command(f"{line} {more}", origin="f")
    stated = replace(LLAMA if is_stated else Stated(version=(0, 32, 0)), command_line=launch)
    situation = FULL.but(
        running=running, running_max=running, lora_max=adapters, waiting_deferred_avg=3.0,
        spec_acceptance_ratio=0.1, spec_accepted_per_draft_tokens=0.4, prefill_p99_s=2.0,
    )  # fmt: skip
    situation = replace(situation, targets=Targets(2.0, 0.1))
    levers = advised(cause_id, situation=situation, page=page, stated=stated)
    diagnosis_document = document(replace(SICK, recommendations=tuple(levers.values())))
    assert orjson.dumps(diagnosis_document)
    server = deployment(page, stated)
    for advice in levers.values():
        assert starts({c.flag: c.after for c in advice.changes}, server.in_force)
    if levers:
        assert next(iter(levers)) != "queue-limit"


def starts(to: dict[str, Any], in_force: Callable[[str], object]) -> bool:
    """vLLM's own rules at start, over what would be in force."""

    def then(flag: str) -> object:
        return to[flag] if flag in to else in_force(flag)

    for most, least in (
        ("--max-num-batched-tokens", "--max-num-seqs"),
        ("--max-model-len", "--long-prefill-token-threshold"),
        ("--max-cpu-loras", "--max-loras"),
    ):
        high, low = then(most), then(least)
        touched = most in to or least in to
        if touched and isinstance(high, int) and isinstance(low, int) and high < low:
            return False
    return True


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("num_gpu_blocks", "1e308"),
        ("block_size", "9" * 21),
        ("num_gpu_blocks_override", "1e308"),
        ("kv_cache_size_tokens", "1e300"),
    ],
)
def test_numbers_that_are_none(label: str, value: str) -> None:
    assert advised("kv_pressure", page={**PAGE, label: value}) is not None


def test_seats_stay_within_the_budget() -> None:
    pinned = CALM.but(
        running=8.0, running_avg=8.0, running_max=8.0, waiting=60.0, waiting_avg=60.0,
        waiting_by_capacity=60.0, kv_usage_avg_ratio=0.05, completed_per_s=8.0,
        prompt_tokens_mean=800.0, output_tokens_mean=384.0,
    )  # fmt: skip
    line = "vllm serve m --max-num-seqs 8 --max-num-batched-tokens 16"
    stated = Stated(command_line=parse_command(line, origin="f"))
    advice = advised("admission_limit", situation=pinned, stated=stated)["max-num-seqs-up"]
    assert changes(advice) == {"--max-num-seqs": (8, 16)}


def test_an_unknown_launch_gets_no_small_budget() -> None:
    long = CALM.but(prefill_p99_s=20.0, prompt_tokens_p99=6000.0, itl_stall_per_s=1.0)
    levers = advised("prefill_interference", situation=long, stated=Stated(version=(0, 32, 0)))
    assert next(iter(levers)) != "max-num-batched-tokens"
    budget = levers["max-num-batched-tokens"].changes[0].after
    assert isinstance(budget, int)
    assert budget >= 1024  # the default seats
    assert "launch command" in levers["max-num-batched-tokens"].checks[0]


def test_nothing_to_split_no_budget() -> None:
    short = CALM.but(prefill_p99_s=0.3, prompt_tokens_p99=200.0, itl_stall_per_s=1.0)
    levers = advised("prefill_interference", situation=short, stated=Stated(version=(0, 32, 0)))
    assert not {"max-num-batched-tokens", "long-prefill-threshold"} & levers.keys()


def test_speculation_that_pays_is_kept() -> None:
    pays = CALM.but(spec_acceptance_ratio=0.44, spec_accepted_per_draft_tokens=2.2)
    launch = """vllm serve m -sc '{"method": "ngram", "num_speculative_tokens": 5}'"""
    stated = Stated(command_line=parse_command(launch, origin="f"))
    assert "spec-off" not in advised("spec_decode_poor", situation=pays, stated=stated)


def test_documents_of_all_causes_keep_the_schema() -> None:
    for cause_id in ADVISED:
        levers = advised(cause_id, situation=FULL, stated=LLAMA)
        diagnosis_document = document(replace(SICK, recommendations=tuple(levers.values())))
        assert problems(diagnosis_document) == []


def test_what_comes_first_suffices() -> None:
    many = FULL.but(waiting=160.0, waiting_avg=160.0, waiting_by_capacity=160.0)
    stated = replace(LLAMA, replicas=None)
    levers = advised("kv_pressure", situation=many, stated=stated, gpu_memory_utilization="0.9")
    enough = [advice for advice in levers.values() if advice.predicted.get("preemption_per_s") == 0]
    assert next(iter(levers.values())) in enough
    free = [
        advice for advice in enough if advice.cost_usd_per_hour == 0 and "down" not in advice.id
    ]
    assert not free or next(iter(levers.values())) in free


def test_replicas_follow_the_rates_while_a_backlog_drains() -> None:
    """600 wait and fewer arrive than are served: nothing has to be bought for them."""
    adviser, overload = Adviser(Stated(replicas=1)), [cause("queue_saturation")]
    advised_now: tuple[Advice, ...] = ()
    replicas: list[object] = []
    for at_s in range(0, 900, 15):
        waiting = 2.7 * at_s if at_s < 450 else 1200.0 - 4 / 3 * (at_s - 450)
        busy = FULL.but(waiting=waiting, waiting_avg=waiting, waiting_by_capacity=waiting,
                        completed_per_s=4.0)  # fmt: skip
        advised_now = adviser.advise(replace(busy.facts(), now_s=NOW_S + at_s), overload)
        replicas.append(sizes(advised_now).get("replicas"))
    assert set(replicas[10:30]) == {3}
    assert set(replicas[45:]) == {None}
    wait = next(iter(advised_now))
    assert wait.id == "backlog-drains"
    assert "requests wait: drained in about" in wait.summary


def test_a_thousand_requests_at_once_are_no_rate_of_arrivals() -> None:
    """The window still holds the jump of the queue, which only drains since: no replica is
    missing, and no rate is named of requests that do not come."""
    adviser, pinned = Adviser(Stated(replicas=1)), [cause("admission_limit")]
    for at_s in (0, 15, 30, 45, 60):
        waiting = 960.0 - 4.0 * at_s
        busy = FULL.but(
            waiting=waiting, waiting_avg=waiting, waiting_by_capacity=waiting,
            completed_per_s=4.0, arrival_per_s=4.0, waiting_slope_per_s=16.0,
        )  # fmt: skip
        advised_now = adviser.advise(replace(busy.facts(), now_s=NOW_S + at_s), pinned)
        if at_s >= 45:
            assert "replicas" not in sizes(advised_now)
            wait = next(each for each in advised_now if each.id == "backlog-drains")
            assert wait.summary.startswith("Hardly any request arrives. ")


def test_a_queue_before_the_cause_shows_who_waits_for_answers() -> None:
    """As many are in flight at each scrape, so each sends its next request after an answer. The
    advice counts all of them from the first scrape on, and says as long as that is not measured."""
    facts = replace(FULL, config=OVERRIDE).facts()
    pressure, seen_s = [cause("kv_pressure")], facts.window_s

    def first_blocks(adviser: Adviser, at_s: float) -> tuple[int, bool]:
        advised = adviser.advise(replace(facts, now_s=NOW_S + at_s), pressure)
        (blocks,) = [each for each in advised if each.id == "kv-blocks"]
        return int(sizes(advised)["kv-blocks"]), "is not measured" in blocks.summary

    fresh, watched = Adviser(), Adviser()
    blocks, is_open_question = first_blocks(fresh, 0.0)
    assert is_open_question
    for step in range(11):
        watched.advise(replace(facts, now_s=NOW_S + step / 10 * seen_s), [])
    assert first_blocks(watched, 1.1 * seen_s) == (blocks, False)
    for step in range(1, 10):
        assert first_blocks(fresh, step / 10 * seen_s) == (blocks, True)
    assert first_blocks(fresh, seen_s) == (blocks, False)
