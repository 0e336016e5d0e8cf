"""A second batch of other kinds of load, written down after the first one was mended and before
kneewatch had seen their pages."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.rules.rule import Severity
from tests.incidents.held_out import BEGINS_S, CHAT, waits_for_the_prefill_side
from tests.incidents.incident import NOTHING, Incident
from tests.incidents.pages import STEP_S, Load
from tests.incidents.second_held_out import incident, milder, never, never_scaled_out
from tests.incidents.slow_decay import HOUR_S, drafts
from tests.incidents.slow_decay import STEP_S as SLOW_STEP_S
from tests.incidents.third_held_out import KV_OR_SEATS, from_the_first

HOURLY_OF_FOUR = (4.47, 4.34, 4.24, 4.10, 3.95, 3.91, 3.84, 3.77, 3.70, 3.63, 3.56, 3.49)
"""Tokens a step, by hour, of a server with four callers that runs EAGLE."""

HOURLY_OF_ONE = (4.49, 4.45, 4.47, 4.47, 4.43, 4.51, 4.47, 4.46, 4.48, 4.45, 4.49, 4.47)
"""The same with one caller."""


def accepted(hourly: tuple[float, ...], at_s: float) -> float:
    """Accepted draft tokens: a step generates one more."""
    hour = min(at_s / HOUR_S, len(hourly) - 1.0)
    before = min(int(hour), len(hourly) - 2)
    return hourly[before] + (hour - before) * (hourly[before + 1] - hourly[before]) - 1.0


def slow_for_a_quarter_of_an_hour(at_s: float) -> Load:
    """Eight callers have 350 tokens/s, 30 for 15 minutes, and then 300."""
    streams = replace(
        CHAT, running=8.0, kv_ratio=0.1, generated_per_s=350.0, itl_s=0.023, answer_tokens=400.0,
        first_tokens_per_s=0.9, finished_per_s=0.9, request_s=9.0, steps_per_s=44.0,
        step_tokens=8.0, prompt_per_s=180.0,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return streams
    if at_s < BEGINS_S + 900.0:
        return replace(
            streams, generated_per_s=30.0, itl_s=0.27, first_tokens_per_s=0.075,
            finished_per_s=0.075, request_s=107.0, steps_per_s=3.7, prompt_per_s=15.0,
        )  # fmt: skip
    return replace(
        streams, generated_per_s=300.0, itl_s=0.027, first_tokens_per_s=0.75, finished_per_s=0.75,
        request_s=10.7, steps_per_s=37.0, prompt_per_s=150.0,
    )  # fmt: skip


def slower_for_good(at_s: float) -> Load:
    """One caller with images has 50 tokens/s; three at once have 45; from then on one has 15."""
    alone = replace(
        CHAT, running=1.0, kv_ratio=0.02, generated_per_s=50.0, itl_s=0.02, answer_tokens=200.0,
        first_tokens_per_s=0.25, finished_per_s=0.25, request_s=4.0, steps_per_s=50.0,
        step_tokens=2.0, prompt_per_s=250.0, prompt_tokens=1000.0,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return alone
    if at_s < BEGINS_S + 120.0:
        return replace(
            alone, running=3.0, kv_ratio=0.06, generated_per_s=45.0, itl_s=0.066,
            first_tokens_per_s=0.22, finished_per_s=0.22, request_s=13.3, steps_per_s=15.0,
        )  # fmt: skip
    return replace(
        alone, generated_per_s=15.0, itl_s=0.066, first_tokens_per_s=0.075, finished_per_s=0.075,
        request_s=13.3, steps_per_s=15.0, prompt_per_s=75.0,
    )  # fmt: skip


THOUSAND_AT_ONCE = Load(
    running=260.0, waiting=475.0, kv_ratio=1.0, preempted_per_s=0.5, generated_per_s=7097.7,
    first_tokens_per_s=6.9, finished_per_s=6.9, prompt_per_s=0.0, prompt_tokens=1024.0,
    answer_tokens=1024.0, ttft_s=70.0, queued_s=69.0, prefill_s=0.5, itl_s=0.037, request_s=107.0,
    hit_ratio=0.002, blocks=24_000, steps_per_s=27.0, step_tokens=300.0,
)  # fmt: skip
"""A thousand requests of 1,024 and 1,024 tokens: 260 run in a full cache, 475 wait."""


def frozen_by_tokenizing(at_s: float) -> Load | None:
    """Each two minutes a body of 27 MB is tokenized for 29 s, in which no call is answered, and
    then refused."""
    since_s = at_s - BEGINS_S
    if since_s < 0:
        return replace(CHAT, accepted_per_s=2.0)
    if since_s % 120.0 < 29.0:
        return None
    refused = 0.2 if since_s % 120.0 < 29.0 + STEP_S else 0.0
    return replace(CHAT, accepted_per_s=2.0, refused_per_s=refused)


def small_behind_giants(at_s: float) -> Load:
    """Five small prompts a second behind prompts of 130,000 tokens that take 250 steps of 512."""
    chat = replace(
        CHAT, running=16.0, kv_ratio=0.05, generated_per_s=250.0, first_tokens_per_s=5.0,
        finished_per_s=5.0, prompt_per_s=1000.0, itl_s=0.03, steps_per_s=33.0, step_tokens=45.0,
        blocks=25_000,
    )  # fmt: skip
    since_s = at_s - BEGINS_S
    if since_s < 0:
        return chat
    behind = replace(
        chat, waiting=3.75 * since_s, running=2.0, kv_ratio=0.33, steps_per_s=16.0,
        step_tokens=512.0, itl_s=0.06, prefill_s=15.0, queued_s=0.75 * since_s,
        ttft_s=15.0 + 0.75 * since_s, request_s=18.0 + 0.75 * since_s,
    )  # fmt: skip
    if round(since_s / STEP_S) % 4 < 3:
        return replace(
            behind, generated_per_s=0.0, first_tokens_per_s=0.0, finished_per_s=0.0,
            prompt_per_s=0.0,
        )  # fmt: skip
    return replace(
        behind, running=20.0, generated_per_s=250.0, first_tokens_per_s=5.2, finished_per_s=5.0,
        prompt_per_s=27_000.0,
    )  # fmt: skip


def behind_a_long_read(at_s: float) -> Load:
    """A prompt of 240,000 tokens takes 256 s, and three short requests wait behind it."""
    if at_s < BEGINS_S:
        return replace(CHAT, blocks=25_000)
    since_s = at_s - BEGINS_S
    if since_s == 0.0:
        return replace(CHAT, running=1.0, kv_ratio=0.0, blocks=25_000)
    return replace(
        CHAT, running=1.0, waiting=min(3.0, 1.0 + since_s // 20.0), kv_ratio=0.0023 * since_s,
        generated_per_s=0.0, first_tokens_per_s=0.0, finished_per_s=0.0, prompt_per_s=0.0,
        steps_per_s=0.9, step_tokens=1024.0, blocks=25_000,
    )  # fmt: skip


def reads_among_chat(at_s: float) -> Load:
    """Each 40 s a prompt of 60,000 tokens takes 18 s in chunks of 4,096; short ones wait for it."""
    chat = replace(
        CHAT, running=6.0, kv_ratio=0.06, first_tokens_per_s=1.0, finished_per_s=1.0,
        generated_per_s=150.0, answer_tokens=150.0, steps_per_s=40.0, step_tokens=12.0,
        itl_s=0.025, blocks=25_000,
    )  # fmt: skip
    since_s = at_s - BEGINS_S
    if since_s < 0:
        return chat
    turn = round(since_s / STEP_S) % 8
    if turn < 4:
        return replace(
            chat, running=5.0, waiting=5.0 * turn, kv_ratio=0.06 + 0.04 * turn,
            generated_per_s=4.0, itl_s=1.2, steps_per_s=0.83, step_tokens=4096.0,
            first_tokens_per_s=0.0, finished_per_s=0.1, prompt_per_s=0.0,
        )  # fmt: skip
    if turn == 4:
        return replace(
            chat, running=22.0, kv_ratio=0.25, first_tokens_per_s=4.2, ttft_s=9.0, queued_s=9.0,
            prompt_per_s=12_800.0, generated_per_s=500.0,
        )  # fmt: skip
    if turn == 7:
        return replace(
            chat, finished_per_s=0.2, prefill_s=18.0, ttft_s=18.1, prompt_tokens=60_000.0
        )
    return replace(chat, running=12.0, finished_per_s=2.0, generated_per_s=300.0, queued_s=5.0)


VIDEOS = Load(
    running=1.0, kv_ratio=0.01, first_tokens_per_s=0.217, finished_per_s=0.217,
    generated_per_s=10.0, prompt_per_s=867.9, prompt_tokens=4000.0, answer_tokens=46.0,
    ttft_s=36.0, request_s=37.0, queued_s=0.02, prefill_s=0.8, outside_s=35.0, itl_s=0.02,
    steps_per_s=10.0, step_tokens=90.0, hit_ratio=0.0, blocks=13_000,
)  # fmt: skip
"""13 videos a minute of eight callers: one core prepares their frames."""


def one_long_prompt_at_a_time(at_s: float) -> Load:
    """One caller: a prompt of 175,000 tokens in 10 s, an answer of 24 tokens/s, and a pause."""
    turn = round(at_s / STEP_S) % 12
    busy = Load(
        running=1.0, kv_ratio=0.168, generated_per_s=24.0, itl_s=0.042, prompt_tokens=175_000.0,
        answer_tokens=700.0, ttft_s=10.0, queued_s=0.01, prefill_s=10.0, request_s=39.0,
        steps_per_s=24.0, step_tokens=1.0, hit_ratio=0.0, blocks=65_000,
    )  # fmt: skip
    if turn < 2:
        return replace(busy, generated_per_s=0.0, steps_per_s=2.0, step_tokens=8192.0,
                       kv_ratio=0.084 * (turn + 1))  # fmt: skip
    if turn == 2:
        return replace(busy, first_tokens_per_s=0.2, prompt_per_s=35_000.0)
    if turn == 8:
        return replace(busy, finished_per_s=0.2)
    if turn > 8:
        return replace(busy, running=0.0, kv_ratio=0.0, generated_per_s=0.0, steps_per_s=0.0)
    return busy


DOCUMENTS = Load(
    running=4.0, kv_ratio=0.12, first_tokens_per_s=0.545, finished_per_s=0.545,
    generated_per_s=54.5, prompt_per_s=5450.0, prompt_tokens=10_000.0, answer_tokens=100.0,
    ttft_s=2.822, queued_s=0.3, prefill_s=2.5, itl_s=0.045, request_s=7.3, hit_ratio=0.0,
    tier_lookups_per_s=5450.0, tier_hit_ratio=0.0, blocks=21_000, steps_per_s=14.0,
    step_tokens=400.0,
)  # fmt: skip
"""Documents of 10,000 tokens that neither the prefix cache nor LMCache has: TTFT 2.8 s."""


def queued_for_transfers(at_s: float) -> Load:
    """A decode server with vLLM 0.17: requests whose KV does not come pile up, and no page says
    why."""
    load = waits_for_the_prefill_side(at_s)
    return replace(load, waiting=load.deferred or 0.0, deferred=None)


def none_seen_to_leave(at_s: float) -> Load:
    """The same, while as many as ever run."""
    load = queued_for_transfers(at_s)
    return replace(load, running=20.0, generated_per_s=900.0)


def forty_seats_held(at_s: float) -> Load:
    """Forty requests run for ever without a token, beside three that get theirs."""
    chat = replace(CHAT, running=3.0, generated_per_s=140.0, answer_tokens=70.0)
    return chat if at_s < BEGINS_S else replace(chat, running=43.0, kv_ratio=0.6)


def held_for_their_grammar(at_s: float) -> Load:
    """More and more requests wait for their grammar, and none of them is served."""
    if at_s < BEGINS_S:
        return CHAT
    return replace(CHAT, deferred=0.55 * (at_s - BEGINS_S))


def drafts_cost_more(at_s: float) -> Load:
    """One stream has 342 tokens/s; with one draft token, of which 96.6% are accepted, 128."""
    plain = replace(
        CHAT, running=1.0, kv_ratio=0.002, generated_per_s=342.0, itl_s=1 / 342.0, hit_ratio=0.445,
        first_tokens_per_s=0.85, finished_per_s=0.85, answer_tokens=400.0, request_s=1.2,
        prompt_per_s=967.2, prompt_tokens=1130.0, prefill_s=0.03, steps_per_s=342.0,
        step_tokens=2.6, blocks=80_000, drafts_per_s=0.0, draft_tokens=1,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return plain
    return replace(
        plain, generated_per_s=128.3, itl_s=0.0153, steps_per_s=65.2, drafts_per_s=65.2,
        accepted_per_draft=0.966, first_tokens_per_s=0.33, finished_per_s=0.33, request_s=3.1,
        prompt_per_s=373.0, hit_ratio=0.22, step_tokens=6.4,
    )  # fmt: skip


def eighth_of_seven(at_s: float) -> Load:
    """Seven prompts of 32,000 tokens fit, at 114 ms a token; with an eighth, a token takes 440."""
    seven = Load(
        running=7.0, kv_ratio=0.924, blocks=2000, block_tokens=128, generated_per_s=52.0,
        itl_s=0.114, first_tokens_per_s=0.052, finished_per_s=0.052, prompt_per_s=1660.0,
        prompt_tokens=32_000.0, answer_tokens=1000.0, ttft_s=9.0, queued_s=0.01, prefill_s=9.0,
        request_s=123.0, steps_per_s=8.8, step_tokens=195.0, hit_ratio=0.0, deferred=None,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return seven
    return replace(
        seven, running=8.0, waiting=4.0, kv_ratio=0.987, preempted_per_s=0.05, itl_s=0.425,
        generated_per_s=17.0, first_tokens_per_s=0.017, finished_per_s=0.017, prompt_per_s=557.0,
        queued_s=160.0, ttft_s=170.0, request_s=600.0, steps_per_s=2.3, step_tokens=900.0,
    )  # fmt: skip


def thousand_for_32_seats(at_s: float) -> Load:
    """A thousand requests at once for 32 seats, in a KV cache that stays nearly empty."""
    few = Load(
        running=4.5, kv_ratio=0.02, blocks=5000, first_tokens_per_s=0.8, finished_per_s=0.8,
        generated_per_s=160.0, prompt_per_s=174.0, prompt_tokens=217.0, answer_tokens=200.0,
        ttft_s=0.055, queued_s=0.005, prefill_s=0.05, itl_s=0.028, request_s=5.7, hit_ratio=0.1,
        steps_per_s=36.0, step_tokens=9.0, deferred=None,
    )  # fmt: skip
    since_s = at_s - BEGINS_S
    if since_s < 0.0:
        return few
    waited_s = min(290.0, since_s)
    return replace(
        few, running=32.0, waiting=968.0 - 3.26 * since_s, kv_ratio=0.13, queued_s=waited_s,
        ttft_s=waited_s + 0.05, request_s=waited_s + 9.6, itl_s=0.0475, generated_per_s=652.0,
        first_tokens_per_s=3.26, finished_per_s=3.26, prompt_per_s=707.0, steps_per_s=21.0,
        step_tokens=60.0,
    )  # fmt: skip


def as_fast(_: float) -> Load:
    """One of two engines of a server."""
    return replace(CHAT, answer_tokens=100.0)


def three_times_as_slow(_: float) -> Load:
    """The other one, whose steps have always taken three times as long."""
    return replace(CHAT, running=12.0, itl_s=0.06, request_s=6.0, answer_tokens=100.0)


def of_hours(name: str, source: str, hourly: tuple[float, ...], first_cause: str) -> Incident:
    """A server that is scraped every two minutes for eleven hours, and judged for the last two."""
    return Incident(
        name=name, source=source, load_at=drafts(lambda at_s: accepted(hourly, at_s)),
        lasts_s=11 * HOUR_S, judged_from_s=9 * HOUR_S, first_cause=first_cause,
        least=Severity.INFO, step_s=SLOW_STEP_S,
    )  # fmt: skip


INCIDENTS = (
    # Expected at first after six hours: a trend takes seven.
    of_hours("EAGLE accepts 22% less after eleven hours", "vllm 41838", HOURLY_OF_FOUR,
             "spec_acceptance_drift"),
    never(of_hours("EAGLE with one caller stays as it is", "healthy; vllm 41838", HOURLY_OF_ONE,
                   NOTHING), "spec_acceptance_drift"),
    replace(
        incident("350 -> 30 tokens/s for a quarter of an hour", "vllm 4158",
                 slow_for_a_quarter_of_an_hour, "slow_steps"),
        lasts_s=BEGINS_S + 890.0,
    ),
    replace(
        never(incident("... and 300 again", "healthy; vllm 4158", slow_for_a_quarter_of_an_hour,
                       NOTHING), "slow_steps"),
        lasts_s=BEGINS_S + 1300.0, judged_from_s=BEGINS_S + 1080.0,
    ),
    replace(
        milder(incident("slower for good since three calls at once", "vllm 9283", slower_for_good,
                        "slow_steps")),
        judged_from_s=BEGINS_S + 240.0,
    ),
    from_the_first(never(incident("260 run in a full cache, 475 wait", "vllm 25787",
                                  lambda _: THOUSAND_AT_ONCE, "kv_pressure"), "admission_limit")),
    replace(
        never(incident("nobody is answered for 29 s", "vllm 24910", frozen_by_tokenizing,
                       "target_down"), "engine_stalled", "engine_restarted"),
        lasts_s=BEGINS_S + 25.0, judged_from_s=BEGINS_S + 15.0,
    ),
    replace(
        never(incident("... and again as before", "healthy; vllm 24910", frozen_by_tokenizing,
                       NOTHING), "engine_stalled", "engine_restarted", "target_down"),
        lasts_s=BEGINS_S + 115.0, judged_from_s=BEGINS_S + 60.0,
    ),
    never(incident("small prompts behind 130,000 tokens in 250 steps", "vllm 10235",
                   small_behind_giants, "queue_saturation"), *KV_OR_SEATS, "engine_stalled"),
    replace(
        never(milder(incident("three wait for a read of 240,000 tokens",
                              "glm53-flash-exl3-2x-dgx-spark 14", behind_a_long_read,
                              "queue_saturation")), "engine_stalled"),
        lasts_s=BEGINS_S + 255.0,
    ),
    never(incident("reads of 60,000 tokens among chat", "club-3090 712", reads_among_chat,
                   "prefill_interference"), "kv_pressure", "engine_stalled"),
    from_the_first(milder(incident("13 videos a minute, one core", "Qwen3-VL 1378",
                                   lambda _: VIDEOS, "host_contention"))),
    from_the_first(never(incident("prompts of 175,000 tokens, one at a time",
                                  "healthy; spark-vllm-docker 114", one_long_prompt_at_a_time,
                                  NOTHING), "engine_stalled", "kv_pressure")),
    never_scaled_out(incident("a transfer holds the queue, no reasons", "vllm 50719",
                              queued_for_transfers, "kv_transfer_slow")),
    never_scaled_out(incident("... while as many as ever run", "vllm 50719", none_seen_to_leave,
                              "kv_transfer_slow")),
    replace(never_scaled_out(milder(incident("40 of 43 running requests get no token", "vllm 38347",
                                             forty_seats_held, "kv_held"))),
            judged_from_s=BEGINS_S + 150.0),
    replace(never_scaled_out(incident("requests wait for their grammar for ever", "vllm 53130",
                                      held_for_their_grammar, "kv_held")),
            judged_from_s=BEGINS_S + 150.0),
    never(incident("drafts cost more than they give: 342 -> 128 tokens/s", "vllm 39680",
                   drafts_cost_more, "slow_steps"), "queue_saturation"),
    never(incident("an eighth long prompt: 114 -> 440 ms a token", "vllm-ascend 5859",
                   eighth_of_seven, "kv_pressure"), "admission_limit", "engine_stalled"),
    replace(never(incident("a thousand requests for 32 seats", "vllm 17788",
                           thousand_for_32_seats, "admission_limit"), "queue_saturation"),
            lasts_s=BEGINS_S + 270.0, no_change=frozenset({"replicas"})),
    replace(from_the_first(milder(incident("the slower of two engines of a server", "probe",
                                           three_times_as_slow, "bad_node"))),
            other_engines=(as_fast,)),
    from_the_first(never(incident("documents that no cache has", "healthy; LMCache 1741",
                                  lambda _: DOCUMENTS, NOTHING), "kv_transfer_slow")),
)  # fmt: skip
