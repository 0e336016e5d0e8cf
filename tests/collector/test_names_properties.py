"""What holds for any page: positions, owners, order, and names that vLLM never had."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import parse
from kneewatch.collector.names.vllm_metrics import PREFIXES, HistogramSlots, Metric, metric_table
from kneewatch.collector.names.vllm_resolver import Binding, resolve
from kneewatch.collector.page import Layout, Page, Series
from tests.collector.name_pages import kinds, labelled, prefixed, recorded, resolved, slots, values
from tests.examples import examples

TABLE = metric_table()
LINES = [line for line in recorded("0.32.0-lora").splitlines() if line.startswith("vllm:")]
KEYS = st.tuples(
    st.sampled_from(["a", "b, c"]), st.sampled_from(["0", "1", "12"]), st.sampled_from(["p", "q"])
)


def table_metric(line: str) -> Metric:
    """The metric of a recorded line."""
    return TABLE.samples[line.partition("{")[0].removeprefix("vllm:")].metric


def check(page: Page, binding: Binding) -> None:
    """What must hold for every binding of a page."""
    layout, table = page.layout, TABLE.samples
    for engine in binding.engines:
        for metric in kinds(engine):
            for slot in slots(engine, metric):
                parts = (
                    [*slot.buckets, slot.sum, slot.count]
                    if isinstance(slot, HistogramSlots)
                    else [slot.position]
                )
                for at in parts:
                    if at is None:
                        continue
                    series = layout.series[at]
                    assert at not in layout.repeated
                    sample = table[series.name.removeprefix(binding.prefix)]
                    assert sample.metric.name == metric
                    assert series.label("model_name", engine.key.model) == engine.key.model
                    assert series.label("engine", engine.key.engine) == engine.key.engine
                if isinstance(slot, HistogramSlots):
                    assert list(slot.bounds) == sorted(set(slot.bounds))
                    assert slot.bounds[-1] == float("inf")
                    assert len(slot.bounds) == len(slot.buckets)
    assert len({engine.key for engine in binding.engines}) == len(binding.engines)


@examples(25)
@given(keys=st.sets(KEYS, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_engines_are_those_that_the_labels_name(keys: set[tuple[str, str, str]], seed: int) -> None:
    lines: list[str] = []
    for model, engine, pod in sorted(keys):
        body = labelled("\n".join(LINES), model_name=model, engine=engine, pod=pod)
        lines += body.splitlines()
    random.Random(seed).shuffle(lines)
    page, binding = resolved("\n".join(lines) + "\n")
    check(page, binding)
    pods_needed = len({(model, engine) for model, engine, _ in keys}) < len(keys)
    expected = {(m, e, p if pods_needed else "") for m, e, p in keys}
    assert {(e.key.model, e.key.engine, e.key.replica) for e in binding.engines} == expected


@examples(50)
@given(kept=st.sets(st.sampled_from(LINES)), prefix=st.sampled_from(PREFIXES))
def test_any_part_of_a_page_resolves_or_is_no_vllm(kept: set[str], prefix: str) -> None:
    page = parse(prefixed("\n".join(kept) + "\n", prefix))
    if not any(table_metric(line).core for line in kept):
        with pytest.raises(CollectError):
            resolve(page.layout)
        return
    binding = resolve(page.layout)
    assert binding.prefix == prefix
    check(page, binding)


@examples(50)
@given(
    series=st.lists(
        st.tuples(
            st.sampled_from(sorted(TABLE.samples)),
            st.dictionaries(
                st.sampled_from(["model_name", "engine", "le", "pod", "reason", "ReplicaId"]),
                st.sampled_from(["", "0", "1", "[1]", "+Inf", "0.5", "x, y"]),
            ),
        ),
        max_size=40,
    )
)
def test_series_put_together_at_random_never_break_it(
    series: list[tuple[str, dict[str, str]]],
) -> None:
    rows = [Series(f"vllm:{name}", tuple(sorted(labels.items()))) for name, labels in series]
    unique = list(dict.fromkeys([*rows, Series("vllm:num_requests_running")]))
    binding = resolve(Layout(tuple(unique), {}))
    assert binding.engines
    positions = [at for engine in binding.engines for at in engine.created]
    for engine in binding.engines:
        for metric in kinds(engine):
            for slot in slots(engine, metric):
                positions += slot.buckets if isinstance(slot, HistogramSlots) else (slot.position,)
    assert all(0 <= at < len(unique) for at in positions)


def test_the_order_of_lines_changes_nothing() -> None:
    lines = labelled("\n".join(LINES), engine="0").splitlines()
    lines += labelled("\n".join(lines), engine="1").splitlines()
    page, binding = resolved("\n".join(lines) + "\n")
    random.Random(7).shuffle(lines)
    other_page, other = resolved("\n".join(lines) + "\n")
    for engine, same in zip(binding.engines, other.engines, strict=True):
        assert (engine.key, kinds(engine)) == (same.key, kinds(same))
        for metric in kinds(engine):
            assert values(page, engine, metric) == values(other_page, same, metric)
