"""Signals bound to a history's columns: what appears, vanishes and comes back is taken up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import gt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import PageParser
from kneewatch.collector.names.vllm_resolver import resolve
from kneewatch.collector.scrape_history import History
from kneewatch.collector.signals.expr import (
    AboveRate,
    Expr,
    FirstValue,
    Gauge,
    OverTime,
    Quantile,
    Rate,
    ShareAtMost,
    Slope,
    complement,
    difference,
    kept_if,
    product,
    ratio,
    scaled,
    total,
)
from kneewatch.collector.signals.signal import Signal, SignalSet, metrics_of
from kneewatch.collector.signals.table import (
    VLLM_SIGNALS,
    configured,
    expression,
    expressions,
    signals,
)
from kneewatch.collector.window import Window
from kneewatch.diagnose.engine.reader import METRICS_READ
from tests.collector.histories import Handmade, Scraped
from tests.collector.name_pages import only_engine
from tests.examples import examples
from tests.recordings import CAPTURES

RECORDING = CAPTURES / "kv_pressure_cascade.jsonl.gz"
BOUNDS = (0.5, 1.0, math.inf)
SECOND_CHOICE = FirstValue((Rate("late"), Rate("early")))
KINDS: dict[str, Expr] = {
    "gauge": Gauge("level"),
    **{fold: OverTime("level", fold) for fold in ("avg", "min", "max")},
    "slope": Slope("level"),
    "rate": Rate("early"),
    "ratio": scaled(ratio(Rate("late"), Rate("early")), 2.0),
    "first": SECOND_CHOICE,
    "median": Quantile("histogram", 0.5),
    "share": ShareAtMost("histogram", 0.5),
    "above": AboveRate("histogram", 0.5),
    "complement": complement(Gauge("level")),
    "difference": difference(Rate("early"), Rate("late")),
    "product": product(Rate("early"), Gauge("level")),
    "sum": total(Rate("early"), scaled(Gauge("level"), 3.0)),
    "positive": kept_if(Rate("late"), ">", gt, 0),
}
SIGNALS = tuple(Signal(key, expr, "", "") for key, expr in KINDS.items())


class Watched:
    """A made-up history and signals that were bound when it began."""

    def __init__(self, signals: Sequence[Signal] = SIGNALS) -> None:
        self.handmade = Handmade(bounds=BOUNDS)
        self.history = self.handmade.history
        self.signals = SignalSet(signals, self.history)

    def read(self) -> dict[str, float | None]:
        """The signals at the newest scrape, over a minute."""
        return self.signals.read(Window(self.history, now_s=self.history.times[-1], range_s=60.0))


def test_an_option_that_appears_takes_over() -> None:
    watched = Watched([Signal("first", SECOND_CHOICE, "", "")])
    for t_s in range(0, 70, 10):
        watched.handmade.take(t_s, {"early": 1.0 * t_s})
    assert watched.read()["first"] == 60 / 60
    for t_s in range(70, 140, 10):
        watched.handmade.take(t_s, {"early": 1.0 * t_s, "late": 2.0 * t_s})
    assert watched.read()["first"] == 120 / 60


def test_a_metric_that_never_was_is_missing_and_without_value() -> None:
    watched = Watched()
    watched.handmade.take(0.0, {"early": 1.0})
    values = watched.read()
    assert set(values) == set(KINDS)
    assert values["gauge"] is None
    assert watched.signals.missing["gauge"] == ("level",)
    assert "first" not in watched.signals.missing


Shown = tuple[float | None, float | None, float | None, int | None]


@st.composite
def pages(draw: st.DrawFn) -> list[Shown]:
    """Two counters, a gauge and a histogram's step: they grow, fall, say NaN or are gone."""
    value = st.one_of(st.none(), st.just(math.nan), st.sampled_from((0.0, 0.0, 1.0, 250.0, 1e9)))
    steps = st.one_of(st.none(), st.integers(0, 5))
    return draw(st.lists(st.tuples(value, value, value, steps), min_size=1, max_size=12))


@examples(200)
@given(shown=pages())
def test_what_was_bound_early_equals_what_is_bound_anew(shown: list[Shown]) -> None:
    watched = Watched()
    buckets = [0.0] * len(BOUNDS)
    for number, (early, late, level, step) in enumerate(shown):
        counters = {"early": early, "late": late}
        buckets = [count + at * (step or 0) for at, count in enumerate(buckets, 1)]
        watched.handmade.take(
            5.0 * number,
            {name: value for name, value in counters.items() if value is not None},
            {} if level is None else {"level": level},
            None if step is None else buckets,
        )
        values = watched.read()
        window = Window(watched.history, now_s=5.0 * number, range_s=60.0)
        for key, expr in KINDS.items():
            anew = expr.bind(watched.history.columns)(window)
            assert values[key] == anew or math.isnan(values[key] or 0.0), key


def test_a_queue_moves_by_first_tokens_while_few_requests_finish() -> None:
    page = (
        'vllm:num_requests_waiting{{model_name="m"}} 30\n'
        'vllm:time_to_first_token_seconds_count{{model_name="m"}} {begun}\n'
        'vllm:request_success_total{{finished_reason="stop",model_name="m"}} {ended}\n'
    )

    def expected_wait_s(begun: int, ended: int) -> float | None:
        scraped = Scraped()
        scraped.take(0.0, page.format(begun=0, ended=0))
        scraped.take(60.0, page.format(begun=begun, ended=ended))
        window = Window(scraped.history, now_s=60.0, range_s=60.0)
        return SignalSet(VLLM_SIGNALS, scraped.history).read(window).get("expected_wait_s")

    assert expected_wait_s(begun=60, ended=6) == pytest.approx(30.0)
    assert expected_wait_s(begun=6, ended=60) == pytest.approx(30.0)
    assert expected_wait_s(begun=0, ended=0) is None


def test_goodput_takes_off_the_share_of_late_gaps() -> None:
    page = (
        'vllm:time_to_first_token_seconds_bucket{{le="1.0",model_name="m"}} {early}\n'
        'vllm:time_to_first_token_seconds_bucket{{le="+Inf",model_name="m"}} {requests}\n'
        'vllm:time_to_first_token_seconds_count{{model_name="m"}} {requests}\n'
        'vllm:inter_token_latency_seconds_bucket{{le="0.05",model_name="m"}} {smooth}\n'
        'vllm:inter_token_latency_seconds_bucket{{le="+Inf",model_name="m"}} {gaps}\n'
        'vllm:inter_token_latency_seconds_count{{model_name="m"}} {gaps}\n'
    )
    scraped = Scraped()
    scraped.take(0.0, page.format(early=0, requests=0, smooth=0, gaps=0))
    scraped.take(60.0, page.format(early=540, requests=600, smooth=3000, gaps=4000))

    def goodput_per_s(ttft_slo_s: float, itl_slo_s: float | None) -> float | None:
        signals = configured(ttft_slo_s=ttft_slo_s, itl_slo_s=itl_slo_s)
        window = Window(scraped.history, now_s=60.0, range_s=60.0)
        return SignalSet(signals, scraped.history).read(window).get("goodput_per_s")

    # 10 requests/s, nine tenths with the first token in time; a quarter of the gaps is late.
    assert goodput_per_s(1.0, None) == pytest.approx(9.0)
    assert goodput_per_s(1.0, 0.06) == pytest.approx(6.5)
    assert goodput_per_s(1.0, 0.005) is None


def test_every_option_of_an_expression_is_a_metric_of_its_signal() -> None:
    assert metrics_of(SIGNALS) == {"level", "early", "late", "histogram"}
    stated = configured(
        ttft_slo_s=1.0, itl_slo_s=0.1, gpus=8, peak_flop_per_s=1.0, peak_bytes_per_s=1.0
    )
    assert metrics_of(stated) <= METRICS_READ


def test_without_the_series_that_nothing_reads_every_signal_is_the_same() -> None:
    parser = PageParser()
    histories = History(keep_s=60.0), History(keep_s=60.0, metrics=METRICS_READ)
    sets = [SignalSet(VLLM_SIGNALS, history) for history in histories]
    for entry in list(CaptureReader(RECORDING))[:30]:
        page = parser.parse(entry.body or "")
        binding = resolve(page.layout)
        for history in histories:
            history.append(entry.t_s, page, only_engine(binding), binding.process_start)
        every, few = (
            signals.read(Window(history, now_s=entry.t_s, range_s=15.0))
            for signals, history in zip(sets, histories, strict=True)
        )
        assert every == few
        assert sets[0].missing == sets[1].missing
    unread = {column.metric for column in histories[0].counters.names} - METRICS_READ
    assert "request_params_n" in unread
    assert {column.metric for column in histories[1].counters.names}.isdisjoint(unread)


def test_a_table_of_text_is_a_signal() -> None:
    named = expressions({"done": "rate(finished) or count_rate(took)"})
    tables = {
        "group": {
            "needs": "a flag",
            "optional": True,
            "failed_{each}_ratio": {
                "each": [1, 2],
                "expr": 'rate(finished, code="{each}") / done',
                "help": "Share {each}.",
            },
            "waiting": {"expr": "gauge(waiting) > 0", "help": "Queue.", "needs": "nothing"},
        }
    }
    first, second, waiting = signals(tables, named)
    assert (first.key, second.key, second.help) == ("failed_1_ratio", "failed_2_ratio", "Share 2.")
    assert second.expr == ratio(
        Rate("finished", (("code", "2"),)),
        FirstValue((Rate("finished"), Rate("took", suffix="_count"))),
    )
    assert (first.needs, first.optional, waiting.needs) == ("a flag", True, "nothing")


@pytest.mark.parametrize("text", ["rate(a) ** 2", "unknown(a)", "a", "rate(a) < 0", "2 - rate(a)"])
def test_text_that_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        expression(text, {})
