"""Pages rebuilt from answers: those of answers like the one before, read as a whole, are those of
answers that are read series by series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from kneewatch.collector.page import Page, Series
from kneewatch.collector.prometheus import scraped_pages
from kneewatch.collector.prometheus.responses import RawSeries
from kneewatch.collector.prometheus.scraped_pages import ScrapedPages, Target, target_of

STEP_S = 15.0
NAMES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "process_open_fds")
TARGETS = ("a:8000", "b:8000")
Scrapes = dict[Target, list[tuple[float, dict[Series, float] | None]]]


def row(name: str, instance: str, samples: Sequence[tuple[float, str]]) -> RawSeries:
    labels = {"__name__": name, "instance": instance, "job": "vllm"}
    if name.startswith("vllm:"):
        labels["model_name"] = "m"
    return RawSeries(Raw(msgspec.json.encode(labels)), Raw(msgspec.json.encode(samples)))


def target(instance: str) -> Target:
    return target_of({"job": "vllm", "instance": instance})


def scrape(instance: str, t_s: float, value: float, **changes: str | None) -> list[RawSeries]:
    """A target's series at a time. Changes are texts of other values; None leaves a series out."""
    texts: Mapping[str, str | None] = {"up": "1", **dict.fromkeys(NAMES, f"{value:g}"), **changes}
    return [row(name, instance, [(t_s, text)]) for name, text in texts.items() if text is not None]


def read(pages: ScrapedPages, instance: str) -> list[tuple[float, dict[Series, float] | None]]:
    def samples(page: Page) -> dict[Series, float]:
        return dict(page.samples())

    return [
        (t_s, None if page is None else samples(page))
        for t_s, page in pages.pages(target(instance))
    ]


def by_series_only(_answer: Sequence[RawSeries]) -> None:
    """Every answer is read by series."""


def played(answers: Sequence[list[RawSeries]], *, whole: bool) -> tuple[Scrapes, int]:
    """All pages, and how many answers were read as a whole."""
    pages, scrapes, wholes = ScrapedPages(), Scrapes(), 0
    single = scraped_pages.single_samples if whole else by_series_only
    with (
        patch.object(scraped_pages, "single_samples", single),
        patch.object(scraped_pages, "values_of", wraps=scraped_pages.values_of) as by_series,
    ):
        for answer in answers:
            by_series.reset_mock()
            pages.keep([target(instance) for instance in TARGETS])
            pages.add(answer)
            wholes += not by_series.called
            for instance in TARGETS:
                scrapes.setdefault(target(instance), []).extend(read(pages, instance))
    return scrapes, wholes


def test_answers_with_the_same_series_are_read_as_a_whole() -> None:
    answers = [
        [each for name in TARGETS for each in scrape(name, at * STEP_S, float(at))]
        for at in range(6)
    ]
    scrapes, wholes = played(answers, whole=True)
    assert wholes == 5
    assert scrapes == played(answers, whole=False)[0]
    assert [t_s for t_s, _ in scrapes[target("a:8000")]] == [at * STEP_S for at in range(6)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"up": "0"}, id="the scrape failed"),
        pytest.param({NAMES[0]: None}, id="a series left"),
        pytest.param({"vllm:kv_cache_usage_perc": "0.5"}, id="a series came"),
        pytest.param({NAMES[1]: "+Inf"}, id="infinite"),
        pytest.param({NAMES[1]: "NaN"}, id="not a number"),
    ],
)
def test_an_answer_that_differs_is_read_by_series(changes: dict[str, str | None]) -> None:
    answers = [
        scrape("a:8000", at * STEP_S, 1.0, **(changes if at == 3 else {})) for at in range(7)
    ]
    scrapes, wholes = played(answers, whole=True)
    assert repr(scrapes) == repr(played(answers, whole=False)[0])
    assert 2 <= wholes <= 6


def test_a_target_that_came_back_is_read_again() -> None:
    pages = ScrapedPages()
    for at in range(4):
        pages.keep([target(name) for name in TARGETS])
        pages.add([each for name in TARGETS for each in scrape(name, at * STEP_S, float(at))])
        for name in TARGETS:
            assert [t_s for t_s, _ in read(pages, name)] == [at * STEP_S], "read once"
    pages.keep([target("a:8000")])
    pages.keep([target(name) for name in TARGETS])
    pages.add([each for name in TARGETS for each in scrape(name, 9 * STEP_S, 9.0)])
    for name in TARGETS:
        ((_, page),) = read(pages, name)
        assert page is not None
        assert set(page.values()) == {9.0}


steps = st.lists(
    st.tuples(
        st.sampled_from(("both", "a", "b", "reversed", "again", "two times", "late")),
        st.sampled_from((*NAMES, "")),
        st.sampled_from(("1", "0")),
    ),
    max_size=12,
)


@given(steps)
def test_any_answers_give_the_same_pages(choices: Sequence[tuple[str, str, str]]) -> None:
    answers, t_s = list[list[RawSeries]](), 0.0
    for how, without, up in choices:
        t_s += 0.0 if how == "again" else STEP_S
        names = TARGETS if len(how) > 1 else (f"{how}:8000",)
        answer = [
            each
            for name in names
            for each in scrape(name, t_s, t_s, up=up, **({without: None} if without else {}))
        ]
        if how == "reversed":
            answer.reverse()
        if how == "two times":
            answer[-1] = row(NAMES[2], names[-1], [(t_s - 1, "3"), (t_s, "4")])
        if how == "late":
            answer[-1] = row(NAMES[2], names[-1], [(t_s - 1, "3")])
        answers.append(answer)
    assert played(answers, whole=True)[0] == played(answers, whole=False)[0]
