"""Incidents of issue threads with other kinds of load, written down before kneewatch had seen their
pages."""

from __future__ import annotations

from msgspec.structs import replace

from tests.incidents.held_out import BEGINS_S, CHAT, SURE_S
from tests.incidents.incident import NOTHING, Incident
from tests.incidents.pages import STEP_S, Load
from tests.incidents.second_held_out import incident, milder, never, never_scaled_out


def all_at_once(at_s: float) -> Load:
    """1,280 requests come at once; prefills of 27,409 tokens/s go first, and decoding has 4.9
    tokens/s."""
    since_s = at_s - BEGINS_S
    if since_s < 0:
        return CHAT
    prefilled = 49.0 + 4.3 * since_s
    return replace(
        CHAT, running=prefilled, waiting=1000.0 - prefilled, kv_ratio=0.168 / 49.0 * prefilled,
        prompt_per_s=27_408.8, prompt_tokens=6400.0, first_tokens_per_s=4.3, finished_per_s=0.0,
        generated_per_s=4.9, hit_ratio=0.1255, ttft_s=10.0 + since_s, itl_s=10.0, steps_per_s=3.3,
        step_tokens=8192.0, blocks=120_000,
    )  # fmt: skip


def prompts_alone(at_s: float) -> Load:
    """Prompts of 6,000 tokens and two tokens of answer: 8 requests/s come, 7 are served."""
    half = Load(
        running=3.0, kv_ratio=0.05, first_tokens_per_s=4.0, finished_per_s=4.0,
        generated_per_s=8.0, prompt_per_s=24_000.0, prompt_tokens=6000.0, answer_tokens=2.0,
        ttft_s=0.6, queued_s=0.01, prefill_s=0.55, itl_s=0.15, request_s=0.75, steps_per_s=3.0,
        step_tokens=8000.0, hit_ratio=0.0, blocks=23_400,
    )  # fmt: skip
    since_s = at_s - BEGINS_S
    if since_s < 0:
        return half
    return replace(
        half, running=20.0, waiting=since_s, kv_ratio=0.32, first_tokens_per_s=7.0,
        finished_per_s=7.0, generated_per_s=14.0, prompt_per_s=42_000.0, queued_s=since_s / 7.0,
        prefill_s=1.5, ttft_s=1.5 + since_s / 7.0, itl_s=1.5, request_s=3.0 + since_s / 7.0,
        steps_per_s=0.65, step_tokens=65_000.0,
    )  # fmt: skip


RANK = Load(
    running=34.0, kv_ratio=0.75, generated_per_s=950.0, first_tokens_per_s=0.8, finished_per_s=0.8,
    prompt_per_s=400.0, prompt_tokens=500.0, answer_tokens=1200.0, itl_s=0.035, request_s=42.0,
    queued_s=0.01, prefill_s=0.1, hit_ratio=0.7, blocks=12_000,
)  # fmt: skip
"""One of eight data-parallel engines with its share of 512 callers."""


def crowded_rank(at_s: float) -> Load:
    """The first engine: 51 requests run, 117 wait."""
    if at_s < BEGINS_S:
        return RANK
    return replace(
        RANK, running=51.0, waiting=117.0, kv_ratio=1.0, generated_per_s=1157.2,
        prompt_per_s=16.5, ttft_s=60.0, queued_s=60.0, itl_s=0.044, request_s=110.0,
    )  # fmt: skip


def second_rank(at_s: float) -> Load:
    """The second engine: 31 run, 108 wait."""
    if at_s < BEGINS_S:
        return RANK
    return replace(
        RANK, running=31.0, waiting=108.0, kv_ratio=0.986, generated_per_s=809.3,
        prompt_per_s=0.0, ttft_s=60.0, queued_s=60.0, itl_s=0.038, request_s=110.0, hit_ratio=0.66,
    )  # fmt: skip


def fair_rank(at_s: float) -> Load:
    """Another engine."""
    del at_s
    return RANK


def thinks_to_the_cap(at_s: float) -> Load:
    """One stream of 180 tokens/s at a time; each answer goes on to its cap of 8,192 tokens."""
    before = replace(
        CHAT, running=1.0, kv_ratio=0.003, generated_per_s=180.0, itl_s=0.0055,
        first_tokens_per_s=0.2, finished_per_s=0.2, answer_tokens=900.0, request_s=5.0,
        prompt_per_s=40.0, hit_ratio=0.682,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return before
    return replace(
        before, kv_ratio=0.003 + 0.00025 * ((at_s - BEGINS_S) % 45.0), first_tokens_per_s=0.022,
        finished_per_s=0.022, answer_tokens=8192.0, cut_share=1.0, request_s=45.5,
        prompt_per_s=4.4,
    )  # fmt: skip


def one_long_answer(at_s: float) -> Load:
    """One answer of ten minutes: 120.1 tokens/s at its beginning, a tenth less each 10 s."""
    return Load(
        running=1.0, kv_ratio=0.06 + 0.0001 * at_s / 10.0, generated_per_s=120.1 - 0.1 * at_s,
        itl_s=1.0 / (120.1 - 0.1 * at_s), hit_ratio=0.188,
    )  # fmt: skip


def full_then_silent(at_s: float) -> Load:
    """35 requests run, 115 wait, the cache is 99% full; then no token comes any more."""
    busy = replace(
        CHAT, running=35.0, waiting=115.0, kv_ratio=0.99, generated_per_s=118.5,
        prompt_per_s=382.6, first_tokens_per_s=0.5, finished_per_s=0.5, itl_s=0.149,
        ttft_s=120.0, queued_s=118.0, request_s=150.0, steps_per_s=3.0,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return busy
    return replace(
        busy, generated_per_s=0.0, prompt_per_s=0.0, first_tokens_per_s=0.0, finished_per_s=0.0,
        steps_per_s=0.0,
    )  # fmt: skip


def one_fetched_for_ever(at_s: float) -> Load:
    """A decode server whose every prompt is fetched: none runs, one waits and one is deferred."""
    healthy = replace(CHAT, running=12.0, generated_per_s=500.0, tier_lookups_per_s=400.0)
    if at_s < BEGINS_S:
        return healthy
    return replace(
        healthy, running=0.0, waiting=1.0, deferred=1.0, kv_ratio=0.003, generated_per_s=0.0,
        prompt_per_s=0.0, first_tokens_per_s=0.0, finished_per_s=0.0, tier_lookups_per_s=0.0,
        steps_per_s=0.0,
    )  # fmt: skip


def two_crawl(at_s: float) -> Load:
    """One request has 30 tokens/s; two together have 0.4."""
    alone = replace(
        CHAT, running=1.0, kv_ratio=0.003, generated_per_s=30.0, itl_s=0.033,
        first_tokens_per_s=0.1, finished_per_s=0.1, answer_tokens=300.0, request_s=10.0,
        prompt_per_s=20.0, steps_per_s=30.0, step_tokens=1.0,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return alone
    return replace(
        alone, running=2.0, kv_ratio=0.006, generated_per_s=0.4, itl_s=5.0, first_tokens_per_s=0.0,
        finished_per_s=0.0, prompt_per_s=0.0, steps_per_s=0.2, step_tokens=2.0,
    )  # fmt: skip


def guided_with_a_full_cache(at_s: float) -> Load:
    """100 requests run in a full cache: 800 tokens/s, with guided JSON 70."""
    free = replace(
        CHAT, running=100.0, kv_ratio=0.97, generated_per_s=800.0, itl_s=0.075, blocks=6000,
        prompt_tokens=512.0, prompt_per_s=2048.0, first_tokens_per_s=4.0, finished_per_s=4.0,
        answer_tokens=200.0, request_s=20.0, steps_per_s=10.0, step_tokens=100.0, hit_ratio=0.0,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return free
    return replace(
        free, generated_per_s=70.0, itl_s=1.7, first_tokens_per_s=0.35, finished_per_s=0.35,
        prompt_per_s=180.0, request_s=240.0, steps_per_s=0.6,
    )  # fmt: skip


def never_hits_since_an_upgrade(at_s: float) -> Load:
    """Prompts of 64,000 tokens that hit 90%, TTFT 6.8 s; then none hits, and TTFT is 15 s."""
    hitting = Load(
        running=4.0, kv_ratio=0.25, blocks=8000, block_tokens=128, generated_per_s=145.0,
        first_tokens_per_s=0.15, finished_per_s=0.15, prompt_per_s=9600.0, prompt_tokens=64_000.0,
        answer_tokens=1000.0, ttft_s=6.8, queued_s=0.1, prefill_s=6.7, itl_s=0.02, request_s=27.0,
        hit_ratio=0.9, steps_per_s=45.0, step_tokens=200.0,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return hitting
    return replace(
        hitting, hit_ratio=0.0, ttft_s=14.955, prefill_s=14.8, request_s=35.0,
        first_tokens_per_s=0.114, finished_per_s=0.114, prompt_per_s=7300.0, generated_per_s=114.0,
    )  # fmt: skip


def first_request_compiles(at_s: float) -> Load:
    """The first request after a start compiles kernels: 8.6, 17.0 and then 80 tokens/s."""
    tokens_per_s = 8.6 if at_s <= 10.0 else 17.0 if at_s <= 20.0 else 85.5 if at_s <= 30.0 else 76.5
    ended_per_s = 0.0 if at_s <= 25.0 else 0.09
    return Load(
        running=1.0, kv_ratio=0.02, generated_per_s=tokens_per_s, itl_s=1.0 / tokens_per_s,
        first_tokens_per_s=0.2 if at_s == STEP_S else ended_per_s, finished_per_s=ended_per_s,
        prompt_per_s=111.4 if at_s == STEP_S else 557.0 * ended_per_s, prompt_tokens=557.0,
        answer_tokens=850.0, ttft_s=0.6, request_s=25.0 if at_s <= 30.0 else 11.0, queued_s=0.01,
        prefill_s=0.5, hit_ratio=0.0,
    )  # fmt: skip


def climbs_to_the_end(at_s: float) -> Load:
    """16 answers go on at one token/s each, and the cache fills by 0.12% a second."""
    return Load(
        running=16.0, kv_ratio=min(1.0, 0.6 + 0.0012 * at_s), generated_per_s=16.7, itl_s=0.96,
        steps_per_s=1.04, step_tokens=16.0,
    )  # fmt: skip


PREEMPTED = Load(
    running=105.0, waiting=16.0, kv_ratio=0.985, preempted_per_s=5.46, generated_per_s=11_582.0,
    first_tokens_per_s=2.306, finished_per_s=2.306, prompt_per_s=2306.0, prompt_tokens=1000.0,
    answer_tokens=5000.0, ttft_s=6.56, queued_s=6.0, prefill_s=0.5, itl_s=0.009, request_s=51.6,
    blocks=18_724, steps_per_s=105.0, step_tokens=130.0,
)  # fmt: skip
"""128 callers of 5,000 tokens each into a cache of 299,584: 1,065 preemptions in 195 s."""


def filled_by_giants(at_s: float) -> Load:
    """Some giant prompts fill the cache: 34 run at 750 tokens/s, and 18, 40, 47 wait."""
    since_s = at_s - BEGINS_S
    before = replace(
        CHAT, running=20.0, kv_ratio=0.5, generated_per_s=700.0, hit_ratio=0.432, blocks=20_000
    )
    if since_s < 0:
        return before
    return replace(
        before, running=33.0, waiting=18.0 + 0.7 * since_s, kv_ratio=0.985, generated_per_s=736.0,
        prompt_per_s=100.0, first_tokens_per_s=0.3, finished_per_s=0.3, queued_s=30.0, ttft_s=30.0,
        request_s=90.0, itl_s=0.045,
    )  # fmt: skip


def one_seat_of_four(at_s: float) -> Load:
    """One seat: the second of two requests gets its first token when the first one ends."""
    return Load(
        running=1.0, waiting=1.0 + round(at_s / STEP_S) % 2, kv_ratio=0.1, generated_per_s=9.0,
        itl_s=0.11, first_tokens_per_s=0.02, finished_per_s=0.02, prompt_per_s=20.0,
        prompt_tokens=1000.0, answer_tokens=450.0, ttft_s=50.46, queued_s=49.0, prefill_s=1.0,
        request_s=100.0, hit_ratio=0.3, steps_per_s=9.0, step_tokens=1.0,
    )  # fmt: skip


def prefilled_whole_among_streams(at_s: float) -> Load:
    """Each 40 s a prompt of 12,000 tokens is prefilled whole, and eight streams stop for 10 s."""
    streams = replace(
        CHAT, running=8.0, kv_ratio=0.2, generated_per_s=300.0, itl_s=0.025, steps_per_s=40.0,
        step_tokens=8.0,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return streams
    turn = round((at_s - BEGINS_S) / STEP_S) % 8
    if turn < 2:
        return replace(
            streams, running=9.0, generated_per_s=0.0, first_tokens_per_s=0.0, finished_per_s=0.0,
            prompt_per_s=0.0, steps_per_s=0.0,
        )  # fmt: skip
    if turn == 2:
        return replace(
            streams, running=9.0, generated_per_s=1.8, itl_s=10.0, first_tokens_per_s=0.2,
            finished_per_s=0.0, ttft_s=10.0, prompt_per_s=2400.0, steps_per_s=0.2,
            step_tokens=12_000.0,
        )  # fmt: skip
    if turn == 7:
        return replace(streams, finished_per_s=0.2, prefill_s=10.0, prompt_tokens=12_000.0)
    return streams


def loads_an_adapter_each_time(at_s: float) -> Load:
    """Each request brings an adapter that is loaded in 43 s, and has 16 tokens."""
    if at_s < BEGINS_S:
        return replace(CHAT, adapters=("", ""))
    turn, step = divmod(round((at_s - BEGINS_S) / STEP_S), 9)
    loading = replace(
        CHAT, running=1.0, kv_ratio=0.01, generated_per_s=0.0, first_tokens_per_s=0.0,
        finished_per_s=0.0, prompt_per_s=0.0, steps_per_s=0.0, adapters=(f"lora{turn % 7}", ""),
        ttft_s=43.0, prefill_s=42.7, request_s=43.6, answer_tokens=16.0,
    )  # fmt: skip
    if step < 8:
        return loading
    return replace(
        loading, generated_per_s=3.2, first_tokens_per_s=0.2, finished_per_s=0.2, prompt_per_s=2.4,
        prompt_tokens=12.0, steps_per_s=3.2,
    )  # fmt: skip


def calls_the_adapter(at_s: float) -> Load:
    """A stream has 17.6 tokens/s of the model alone, and 6.5 of its adapter."""
    model = replace(
        CHAT, running=1.0, kv_ratio=0.02, generated_per_s=17.6, itl_s=1 / 17.6,
        first_tokens_per_s=0.06, finished_per_s=0.06, answer_tokens=300.0, request_s=17.0,
        steps_per_s=17.6, step_tokens=1.0, prompt_per_s=12.0, adapters=("", ""),
    )  # fmt: skip
    if at_s < BEGINS_S:
        return model
    return replace(
        model, generated_per_s=6.5, itl_s=1 / 6.5, first_tokens_per_s=0.022, finished_per_s=0.022,
        request_s=46.0, steps_per_s=6.5, prompt_per_s=4.4, adapters=("lora1", ""),
    )  # fmt: skip


DRAFTS_OF_THREE = replace(
    CHAT, running=1.0, kv_ratio=0.275, generated_per_s=54.0, itl_s=0.018, prompt_per_s=236.8,
    prompt_tokens=5000.0, first_tokens_per_s=0.05, finished_per_s=0.05, answer_tokens=1000.0,
    request_s=19.0, hit_ratio=0.911, tier_lookups_per_s=21.0, tier_hit_ratio=0.012,
    drafts_per_s=20.6, accepted_per_draft=1.49, draft_tokens=3, steps_per_s=20.6, step_tokens=4.0,
)  # fmt: skip
"""49.7% of the drafts' three tokens are accepted: 2.49 tokens a step."""


def one_among_thirty(at_s: float) -> Load:
    """A request takes 8 s alone, and 16 s beside a batch job of 30."""
    alone = replace(
        CHAT, running=1.0, kv_ratio=0.01, generated_per_s=50.0, itl_s=0.02,
        first_tokens_per_s=0.125, finished_per_s=0.125, answer_tokens=400.0, request_s=8.0,
        prompt_per_s=25.0, steps_per_s=50.0, step_tokens=1.0,
    )  # fmt: skip
    if at_s < BEGINS_S:
        return alone
    return replace(
        alone, running=31.0, kv_ratio=0.3, generated_per_s=775.0, itl_s=0.04,
        first_tokens_per_s=1.9, finished_per_s=1.9, request_s=16.0, prompt_per_s=380.0,
        steps_per_s=25.0, step_tokens=31.0,
    )  # fmt: skip


def from_the_first(incident: Incident) -> Incident:
    """The incident with a load that is the same from the first page on."""
    return replace(incident, judged_from_s=SURE_S)


KV_OR_SEATS = ("kv_pressure", "admission_limit")

INCIDENTS = (
    replace(
        never_scaled_out(never(milder(incident(
            "1,280 requests at once, prefills first", "ray 54070", all_at_once,
            "queue_saturation")), *KV_OR_SEATS, "engine_stalled")),
        lasts_s=BEGINS_S + 50.0, judged_from_s=BEGINS_S + 20.0,
        no_change=frozenset({"--max-num-seqs"}),
    ),
    replace(
        never(incident("prompts alone: 8/s come, 7/s are served", "llm-d-autoscaling 662",
                       prompts_alone, "queue_saturation"), *KV_OR_SEATS),
        judged_from_s=BEGINS_S + 180.0, no_change=frozenset({"--max-num-seqs"}),
    ),
    replace(
        milder(incident("two of eight engines have the queue", "vllm 36748", crowded_rank,
                        "replica_imbalance")),
        other_engines=(second_rank, *[fair_rank] * 6),
    ),
    # Expected at first: runaway_generation. Eight answers, maybe of one prompt, are too few for it.
    never(incident("each answer thinks on to its cap", "vllm 30599", thinks_to_the_cap, NOTHING),
          "engine_stalled", "slow_steps"),
    from_the_first(never(incident(
        "one answer of ten minutes", "healthy; vllm 31353", one_long_answer, NOTHING),
        "engine_stalled", "slow_steps", "kv_leak", "kv_exhaustion_ahead")),
    never_scaled_out(incident("full, a queue, then no token", "vllm 2731", full_then_silent,
                              "engine_stalled")),
    never_scaled_out(incident("one request is fetched for ever", "vllm-ascend 11696",
                              one_fetched_for_ever, "engine_stalled")),
    never(incident("two requests at 0.4 tokens/s", "vllm 15018", two_crawl, "slow_steps"),
          "engine_stalled"),
    never(incident("guided JSON in a full cache: 800 -> 70 tokens/s", "vllm 3567",
                   guided_with_a_full_cache, "slow_steps"), "kv_pressure"),
    never(milder(incident("nothing hits since an upgrade", "vllm-ascend 12041",
                          never_hits_since_an_upgrade, "prefix_reuse_lost")), "prefix_churn"),
    replace(
        never(incident("the first request compiles kernels", "healthy; qwen38-27b-rtx3090 155",
                       first_request_compiles, NOTHING), "engine_stalled"),
        judged_from_s=0.0,
    ),
    replace(
        milder(incident("16 slow answers fill the cache", "tenstorrent/vllm 55",
                        climbs_to_the_end, "kv_exhaustion_ahead")),
        lasts_s=320.0, judged_from_s=200.0,
    ),
    from_the_first(milder(incident("1,065 preemptions in 195 s", "vllm 44594",
                                   lambda _: PREEMPTED, "kv_pressure"))),
    never(incident("giant prompts fill the cache, a queue grows", "vllm 27073", filled_by_giants,
                   "kv_pressure"), "engine_stalled"),
    from_the_first(milder(incident("one seat, TTFT is another's answer",
                                   "DeepSeek-v4-Flash-One-DGX-Spark 7", one_seat_of_four,
                                   "admission_limit"))),
    never(milder(incident("prompts prefilled whole stop eight streams", "vllm 1026",
                          prefilled_whole_among_streams, "prefill_interference")),
          "engine_stalled"),
    # Expected at first: adapter_thrash. No request waits for a slot, and none is said to hang.
    never(incident("each request loads an adapter in 43 s", "vllm 5564",
                   loads_an_adapter_each_time, NOTHING), "slow_steps", "prefill_interference"),
    never(milder(incident("an adapter's tokens take 2.7 times as long", "vllm 13204",
                          calls_the_adapter, "slow_steps")), "adapter_thrash"),
    from_the_first(never(incident("49.7% of three drafts are accepted", "healthy; LMCache 3655",
                                  lambda _: DRAFTS_OF_THREE, NOTHING),
                         "spec_decode_poor", "kv_transfer_slow")),
    never(incident("one request among a batch of thirty", "healthy; vllm 24365", one_among_thirty,
                   NOTHING), "slow_steps"),
)  # fmt: skip
