"""Which pool binds where KV moves between them, and who takes turns in adapter slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kneewatch.collector.signals.table import VLLM_SIGNALS
from kneewatch.diagnose.causes.common_conditions import pool_of
from kneewatch.diagnose.causes.kv_transfer import (
    DECODE_POOL,
    DECODE_SERVERS,
    LMCACHE_PATH,
    PATH,
)
from kneewatch.diagnose.verdict import Cause, Verdict
from kneewatch.rules.rule import Severity
from tests.diagnose.situations import CALM, Situation
from tests.diagnose.streams import INTERVAL_S, Target, bodies
from tests.recordings import CAPTURES, diagnoses

FETCHING = CALM.but(kv_fetch_waiting=8.0).lasting(fetching=30.0)


def slow(situation: Situation) -> Cause | None:
    return situation.causes().get("kv_transfer_slow")


@pytest.mark.parametrize(
    ("values", "pool"),
    [
        pytest.param({"kv_external_share_ratio": 0.97}, "decode", id="prompts come computed"),
        pytest.param(
            {"kv_expired_per_s": 0.0, "output_tokens_mean": 1.0}, "prefill", id="one token each"
        ),
        pytest.param({"output_tokens_mean": 1.0}, "", id="a classifier: no connector"),
        pytest.param({"kv_external_share_ratio": 0.2, "kv_expired_per_s": 0.0}, "", id="a cache"),
        pytest.param({}, "", id="one server for both"),
    ],
)
def test_pools_are_recognised(values: dict[str, float], pool: str) -> None:
    assert pool_of(CALM.but(**values).facts()) == pool


def test_kv_under_way_is_the_path() -> None:
    cause = slow(FETCHING.but(kv_fetch_moving=7.0, kv_fetch_arrived=1.0))
    assert cause is not None
    assert (cause.lever, cause.severity) == (PATH, Severity.WARNING)


def test_prompts_that_no_decode_server_takes_lead_to_the_decode_servers() -> None:
    cause = slow(FETCHING.but(kv_handover_waiting=7.0))
    assert cause is not None
    assert cause.lever == DECODE_SERVERS
    assert "a decode server takes their KV" in cause.summary


def test_a_busy_pool_in_which_some_requests_always_wait_for_kv_is_quiet() -> None:
    usual = {**FETCHING.quiet, "ttft_mean_s": 3.0}
    assert slow(replace(FETCHING, quiet=usual)) is None
    assert slow(replace(FETCHING.but(kv_fetch_waiting=12.0), quiet=usual)) is not None
    assert slow(replace(FETCHING.but(completed_per_s=0.0), quiet=usual)) is not None


def test_kv_that_has_arrived_does_not_wait_for_the_path() -> None:
    assert slow(FETCHING.but(kv_fetch_arrived=7.0)) is None
    late = slow(FETCHING.but(kv_fetch_arrived=7.0, kv_transfer_mean_s=0.1))
    assert late is not None
    assert late.lever == DECODE_POOL
    assert [evidence.signal for evidence in late.against] == ["kv_fetch_arrived"]


def test_a_full_decode_pool_is_told_from_a_slow_path() -> None:
    full = {"kv_fetch_queued": 8.0, "kv_usage_avg_ratio": 0.98, "kv_transfer_mean_s": 0.1}
    cause = slow(FETCHING.but(**full))
    assert cause is not None
    assert cause.lever == DECODE_POOL
    roomy = slow(FETCHING.but(**{**full, "kv_usage_avg_ratio": 0.4}))
    assert roomy is not None
    assert roomy.lever == PATH
    assert roomy.confidence > cause.confidence


def test_kv_that_expires_on_the_prefill_side_blames_the_decode_pool() -> None:
    cause = slow(CALM.but(kv_transfer_mean_s=0.07, kv_expired_per_s=0.1))
    assert cause is not None
    assert cause.lever == DECODE_POOL
    assert any("KV of 6.0 requests/min expired" in evidence.text for evidence in cause.evidence)


CONNECTED = """\
# TYPE vllm:{name}_xfer_time_seconds histogram
vllm:{name}_xfer_time_seconds_bucket{{engine="0",model_name="tiny",le="0.1"}} {count}
vllm:{name}_xfer_time_seconds_bucket{{engine="0",model_name="tiny",le="+Inf"}} {count}
vllm:{name}_xfer_time_seconds_sum{{engine="0",model_name="tiny"}} {seconds}
vllm:{name}_xfer_time_seconds_count{{engine="0",model_name="tiny"}} {count}
# TYPE vllm:{name}_bytes_transferred histogram
vllm:{name}_bytes_transferred_bucket{{engine="0",model_name="tiny",le="+Inf"}} {count}
vllm:{name}_bytes_transferred_sum{{engine="0",model_name="tiny"}} {moved}
vllm:{name}_bytes_transferred_count{{engine="0",model_name="tiny"}} {count}
# TYPE vllm:{name}_num_failed_transfers_total counter
vllm:{name}_num_failed_transfers_total{{engine="0",model_name="tiny"}} {failed}
# TYPE vllm:{name}_num_kv_expired_reqs_total counter
vllm:{name}_num_kv_expired_reqs_total{{engine="0",model_name="tiny"}} 0
"""


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_both_connectors_give_the_same_signals(name: str) -> None:
    target, pages = Target(window_s=20.0), bodies("healthy_light")[:12]
    diagnosis = target.one(
        *(
            page
            + CONNECTED.format(
                name=name, count=10 * at, seconds=0.4 * at, moved=8e8 * at, failed=at // 6
            )
            for at, page in enumerate(pages)
        )
    )
    assert diagnosis.values["kv_transfer_mean_s"] == pytest.approx(0.04)
    assert diagnosis.values["kv_transfer_bytes_per_s"] == pytest.approx(2e9)
    assert diagnosis.values["kv_expired_per_s"] == 0
    assert "XFER-FAIL" in {f.rule for f in diagnosis.findings if f.severity}


OFFLOADED = """# TYPE vllm:kv_offload_load_bytes_total counter
vllm:kv_offload_load_bytes_total{{engine="0",model_name="tiny"}} {moved}
# TYPE vllm:kv_offload_load_time_total counter
vllm:kv_offload_load_time_total{{engine="0",model_name="tiny"}} {seconds}
# TYPE vllm:kv_offload_load_size histogram
vllm:kv_offload_load_size_bucket{{engine="0",model_name="tiny",le="+Inf"}} {count}
vllm:kv_offload_load_size_sum{{engine="0",model_name="tiny"}} {moved}
vllm:kv_offload_load_size_count{{engine="0",model_name="tiny"}} {count}
"""


def test_loads_from_an_offload_tier_are_transfers_too() -> None:
    target, pages = Target(window_s=20.0), bodies("healthy_light")[:12]
    diagnosis = target.one(
        *(
            page + OFFLOADED.format(count=10 * at, seconds=0.4 * at, moved=8e8 * at)
            for at, page in enumerate(pages)
        )
    )
    assert diagnosis.values["kv_transfer_mean_s"] == pytest.approx(0.04)
    assert diagnosis.values["kv_transfer_bytes_per_s"] == pytest.approx(2e9)
    assert diagnosis.values["kv_transfer_busy_ratio"] == pytest.approx(0.4 / INTERVAL_S)
    assert diagnosis.values["kv_transfer_p95_s"] is None, "no histogram tells of single loads"


PREFIXES = ("kv_transfer", "lmcache_")
LMCACHE_LABELS = 'model_name="/models/tiny",role="worker",served_model_name="tiny",worker_id="{}"'
LMCACHE_BOUNDS = ("0.01", "0.1", "0.25", "0.5", "1.0", "+Inf")
LMCACHE_COUNTERS = ("num_requested_tokens", "num_hit_tokens", "num_stored_tokens")


def lmcache(
    *, retrieves: int, retrieve_s: float, failed: int = 0, missed: int = 0, healthy: int = 1
) -> str:
    """LMCache's part of a page of two GPUs, as it shows it: a part of the metrics' names, with the
    labels of LMCacheConnector's workers, which name no engine."""
    lines: list[str] = []
    tokens = 256 * retrieves
    values = {"num_requested_tokens": tokens, "num_hit_tokens": tokens - missed}
    for worker in range(2):
        labels = LMCACHE_LABELS.format(worker)
        for name in LMCACHE_COUNTERS:
            lines.append(f"lmcache:{name}_total{{{labels}}} {values.get(name, tokens)}")
        for name, seconds in (("time_to_retrieve", retrieve_s), ("time_to_store", 0.002)):
            for le in LMCACHE_BOUNDS:
                count = retrieves if float(le) >= seconds else 0
                lines.append(f'lmcache:{name}_bucket{{{labels},le="{le}"}} {count}')
            lines.append(f"lmcache:{name}_sum{{{labels}}} {retrieves * seconds}")
            lines.append(f"lmcache:{name}_count{{{labels}}} {retrieves}")
        lines.append(f'lmcache:retrieve_speed_bucket{{{labels},le="+Inf"}} {retrieves}')
        lines.append(f"lmcache:retrieve_speed_sum{{{labels}}} {tokens / retrieve_s}")
        lines.append(f"lmcache:retrieve_speed_count{{{labels}}} {retrieves}")
        lines.append(f"lmcache:get_blocking_failed_count{{{labels}}} {failed if worker else 0}")
        lines.append(f"lmcache:lmcache_is_healthy{{{labels}}} {healthy if worker else 1}")
    return "\n".join(lines) + "\n"


def retrieving(target: Target, **slow: float) -> Verdict:
    """What is said after some pages of a calm server whose LMCache retrieves ten times a page."""
    pages = bodies("healthy_light")[:12]
    per_page = {"retrieve_s": 0.01, **slow}
    return target.one(
        *(
            page
            + lmcache(
                retrieves=10 * at,
                retrieve_s=per_page["retrieve_s"],
                failed=int(per_page.get("failed", 0)) * at,
                missed=int(per_page.get("missed", 0)) * at,
                healthy=int(per_page.get("healthy", 1)),
            )
            for at, page in enumerate(pages)
        )
    )


def test_retrieves_from_lmcache_are_transfers_of_the_only_engine() -> None:
    diagnosis = retrieving(Target(window_s=20.0), retrieve_s=0.4, missed=640)
    wanted = {
        "kv_transfer_mean_s": 0.4,
        "kv_transfer_busy_ratio": 2 * 10 * 0.4 / INTERVAL_S,
        "lmcache_retrieve_mean_s": 0.4,
        "lmcache_retrieve_tokens_per_s": 256 / 0.4,
        "lmcache_retrieved_ratio": 0.75,
        "lmcache_store_mean_s": 0.002,
        "kv_transfer_failed_per_s": 0.0,
        "lmcache_failed_per_s": 0.0,
        "lmcache_healthy": 1.0,
    }
    assert {key: diagnosis.values[key] for key in wanted} == pytest.approx(wanted)
    assert 0.25 < (diagnosis.values["kv_transfer_p95_s"] or 0.0) <= 0.5


def told_slow(diagnosis: Verdict) -> Cause | None:
    return next((cause for cause in diagnosis.causes if cause.id == "kv_transfer_slow"), None)


def test_slow_retrieves_are_laid_to_lmcache_and_fast_ones_to_nobody() -> None:
    cause = told_slow(retrieving(Target(window_s=20.0), retrieve_s=0.4, healthy=0))
    assert cause is not None
    texts = [evidence.text for evidence in cause.evidence]
    assert any(text.startswith("a retrieve from LMCache takes") for text in texts)
    assert "a retrieve moves 640 tokens/s on each GPU" in texts
    assert "LMCache reports itself unhealthy" in texts
    assert cause.lever == LMCACHE_PATH
    assert told_slow(retrieving(Target(window_s=20.0), retrieve_s=0.001, healthy=0)) is None


def test_reads_that_fail_are_laid_to_lmcache() -> None:
    diagnosis = retrieving(Target(window_s=20.0), retrieve_s=0.001, failed=1)
    assert diagnosis.values["kv_transfer_failed_per_s"] == pytest.approx(1 / INTERVAL_S)
    assert "XFER-FAIL" in {f.rule for f in diagnosis.findings if f.severity}
    cause = told_slow(diagnosis)
    assert cause is not None
    assert "reads from LMCache's storage fail" in [evidence.text for evidence in cause.evidence]
    assert cause.lever == LMCACHE_PATH


def test_of_nixl_and_lmcache_the_slower_one_is_told() -> None:
    pages, nixl = bodies("healthy_light")[:12], {"name": "nixl", "moved": 0, "failed": 0}
    cases = ((10, 10, 0.4, 0.4), (10, 10, 0.01, 0.04), (0, 10, 0.4, 0.4), (10, 0, 0.4, 0.04))
    for transfers, retrieves, retrieve_s, told_s in cases:
        diagnosis = Target(window_s=20.0).one(
            *(
                page
                + CONNECTED.format(count=transfers * at, seconds=0.04 * transfers * at, **nixl)
                + lmcache(retrieves=retrieves * at, retrieve_s=retrieve_s)
                for at, page in enumerate(pages)
            )
        )
        assert diagnosis.values["kv_transfer_mean_s"] == pytest.approx(told_s)


def test_of_several_engines_lmcache_is_nobodys_and_that_is_said() -> None:
    pages = [page + page.replace('engine="0"', 'engine="1"') for page in bodies("healthy_light")]
    engines = Target(window_s=20.0).take(
        *(page + lmcache(retrieves=10 * at, retrieve_s=0.4) for at, page in enumerate(pages[:8]))
    )
    assert len(engines) == 2
    for diagnosis in engines:
        assert diagnosis.values["lmcache_retrieve_mean_s"] is None
        assert diagnosis.values["kv_transfer_mean_s"] is None
        (line,) = (line for line in diagnosis.unknown if line.startswith("lmcache_retrieve_mean_s"))
        assert "LMCache (single-engine endpoints only)" in line
        assert told_slow(diagnosis) is None


@pytest.mark.parametrize("capture", ["prefix_churn", "restart_mid_run"])
def test_lmcache_beside_vllm_changes_no_other_signal(capture: str) -> None:
    """Even where LMCache's own counters are reset, as its API can."""
    alone, beside = Target(), Target()
    for at, page in enumerate(bodies(capture)[:80:2]):
        more = lmcache(retrieves=10 * (at % 20), retrieve_s=0.4, failed=at % 20)
        bare, other = alone.take(page), beside.take(page + more)
        assert len(bare) == len(other)
        for diagnosis, with_more in zip(bare, other, strict=True):
            rest = {
                key: value
                for key, value in with_more.values.items()
                if not key.startswith(("lmcache_", "kv_transfer_"))
            }
            assert rest == {key: diagnosis.values[key] for key in rest}


def test_no_connector_makes_no_signal() -> None:
    keys = {signal.key for signal in VLLM_SIGNALS if signal.key.startswith(PREFIXES)}
    diagnosis = Target().one(*bodies("healthy_light")[:5])
    assert keys
    assert [key for key in keys if diagnosis.values[key] is not None] == []


def test_adapters_that_take_turns_are_named() -> None:
    texts = [
        evidence.text
        for diagnosis in diagnoses(CAPTURES / "lora_thrash.jsonl.gz")
        for cause in diagnosis.causes
        if cause.id == "adapter_thrash"
        for evidence in cause.evidence
        if evidence.signal == "lora_turns"
    ]
    assert texts
    last = texts[-1]
    assert "least number of turns in a slot: a" in last
    assert "last ran" in last
    assert not any("3 more" in text for text in texts), "there are six adapters, four are named"


def turns_told(times: int, ran: Callable[[float], dict[str, float]]) -> str:
    """The words about turns after so many pages two seconds apart, with the sets that ran at the
    seconds since the first of them."""
    target, seen = Target(window_s=30.0), dict[str, float]()
    pages = [
        page.replace('reason="deferred"} 0.0', 'reason="deferred"} 3.0')
        for page in bodies("healthy_light")[30 : 30 + times]
    ]
    start_s, diagnosis = target.now_s, None
    for at, page in enumerate(pages):
        seen |= {names: start_s + since_s for names, since_s in ran(2.0 * at).items()}
        lines = "".join(
            f'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="{names}",'
            f'waiting_lora_adapters=""}} {t_s}\n'
            for names, t_s in seen.items()
        )
        diagnosis = target.one(f"{page}# TYPE vllm:lora_requests_info gauge\n{lines}")
    assert diagnosis is not None
    (cause,) = (candidate for candidate in diagnosis.causes if candidate.id == "adapter_thrash")
    return next(evidence.text for evidence in cause.evidence if evidence.signal == "lora_turns")


def test_turns_between_two_scrapes_are_counted() -> None:
    text = turns_told(12, lambda now_s: {"sql": now_s + 0.5, "chat": now_s + 1.5})
    assert text.endswith("turns in a slot: chat 11, sql 11; sql last ran 2 s ago")


def test_an_adapter_that_keeps_its_slot_has_one_turn() -> None:
    text = turns_told(12, lambda now_s: {"fr,sql": now_s + 0.5, "chat,sql": now_s + 1.5})
    assert text.endswith("turns in a slot: chat 11, fr 11, sql 1; fr last ran 2 s ago")
