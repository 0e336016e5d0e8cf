"""A whole page: its format, its end, and what a parser keeps from the last one."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from kneewatch.collector.errors import ExpositionError
from kneewatch.collector.exposition import PageParser, parse
from kneewatch.collector.page import Page, Series
from tests.effort import calls

PAGES = Path(__file__).parents[1] / "fixtures" / "pages"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


def recorded(name: str) -> str:
    return gzip.decompress((PAGES / f"{name}.txt.gz").read_bytes()).decode()


def refused(body: str | bytes, *, content_type: str = "") -> ExpositionError:
    with pytest.raises(ExpositionError) as caught:
        parse(body, content_type=content_type)
    return caught.value


# Lines that are not samples


def test_comments_and_blank_lines_are_skipped_and_line_ends_may_be_crlf() -> None:
    body = "\r\n# a comment\r\n#\r\n  \t\r\n#TYPE a nonsense\r\n  # TYPE a gauge \r\na 1\r\n\r\n"
    page = parse(body)
    assert page.layout.series == (Series("a"),)
    assert page.layout.types == {"a": "gauge"}
    assert page.values == [1.0]


def test_types_are_those_stated_and_the_first_counts() -> None:
    body = '# HELP a Any text: {}, \\n "quoted, and # more\n# TYPE a counter\n# TYPE b.c gauge\n'
    assert refused(body).line == 3
    body = (
        '# HELP a Any {text}, \\n "\n# HELP b\n# TYPE a counter\n# TYPE a gauge\n'
        '# TYPE "b.c" histogram\n#\tTYPE\td\tuntyped\t\n# UNIT a seconds\n# UNIT\na 1\n'
    )
    assert parse(body).layout.types == {"a": "counter", "b.c": "histogram", "d": "untyped"}


def test_a_page_may_be_empty() -> None:
    page = parse(b"")
    assert (page.layout.series, page.values) == ((), [])


def test_repeated_series_are_kept_and_marked() -> None:
    page = parse('a{b="1",c="2"} 1\nd 2\na{c="2",b="1"} 3\na{b="1"} 4\na{b="1",c="2",} 5\n')
    assert page.values == [1, 2, 3, 4, 5]
    assert page.layout.repeated == {2, 4}
    assert [value for _, value in page.samples()] == [1, 2, 4]


# Which format


@pytest.mark.parametrize(
    ("content_type", "end", "timestamp_s"),
    [
        pytest.param("", "", 1.5, id="no type, no EOF: text"),
        pytest.param("", "# EOF\n", 1500.0, id="no type, EOF: OpenMetrics"),
        pytest.param("", "# EOF", 1500.0, id="no type, EOF without its line feed"),
        pytest.param("", "# EOF\r\n\r\n", 1500.0, id="no type, EOF and a blank line"),
        pytest.param("", "# EOF\n# more\n", 1.5, id="no type, EOF is not last"),
        pytest.param("", "# EOF.\n", 1.5, id="no type, not quite EOF"),
        pytest.param(TEXT, "# EOF\n", 1.5, id="text: EOF is a comment"),
        pytest.param(OPENMETRICS.upper(), "# EOF\n", 1500.0, id="OpenMetrics"),
    ],
)
def test_the_format_follows_the_content_type_or_the_end(
    content_type: str, end: str, timestamp_s: float
) -> None:
    assert parse(f"a 1 1500\n{end}", content_type=content_type).timestamps_s == {0: timestamp_s}


def test_the_same_parser_reads_the_same_lines_by_the_format_of_each_page() -> None:
    parser = PageParser()
    body = "a 1 1500\n# EOF\n"
    assert parser.parse(body, content_type=TEXT).timestamps_s == {0: 1.5}
    assert parser.parse(body, content_type=OPENMETRICS).timestamps_s == {0: 1500.0}


@pytest.mark.parametrize(
    ("body", "line"),
    [("a 1\n# EOF\nb 1\n# EOF\n", 3), ("# EOF\n# HELP a b\n", 2), ("# EOF\n# EOF\n", 2)],
)
def test_nothing_may_follow_the_end_of_openmetrics(body: str, line: int) -> None:
    error = refused(body, content_type=OPENMETRICS)
    assert (error.line, error.kind) == (line, "exposition")


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        pytest.param("a 1\n", OPENMETRICS, id="no EOF"),
        pytest.param("", OPENMETRICS, id="nothing"),
        pytest.param("a 1\n# EO", OPENMETRICS, id="within EOF"),
        pytest.param('a 1\na{b="', OPENMETRICS, id="within OpenMetrics labels"),
        pytest.param('a 1\na{b="', "", id="within labels"),
        pytest.param("a 1\nvllm:num_req", "", id="within a name"),
        pytest.param("a 1\nb 1e", "", id="within a value"),
        pytest.param("# HELP b\n# TYPE b coun", "", id="within a type"),
        pytest.param("a 1\nb 1\r", "", id="within a line end"),
    ],
)
def test_a_page_that_stops_short_is_truncated(body: str, content_type: str) -> None:
    assert refused(body, content_type=content_type).kind == "truncated"


def test_a_last_line_that_can_be_read_needs_no_line_feed() -> None:
    assert parse("a 1\nb 2").values == [1, 2]


@pytest.mark.parametrize(
    "body", ["a 1\nb 1e\n", "b 1e\na 1", '{"detail":"Not Found"}', "<html>\n</html>"]
)
def test_a_malformed_page_is_not_called_truncated(body: str) -> None:
    assert refused(body).kind == "exposition"


# What a parser keeps between pages


FIRST = '# HELP a Text.\n# TYPE a gauge\na{b="1"} 1\na{b="2"} 2\nc 3\n'


def second_page(second: str) -> tuple[Page, Page]:
    parser = PageParser()
    return parser.parse(FIRST), parser.parse(second)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(FIRST, id="nothing"),
        pytest.param(FIRST.replace("} 2", "} 22.5").replace("c 3", "c NaN"), id="values"),
        pytest.param(FIRST.replace("c 3", "c 3 1500"), id="a timestamp"),
        pytest.param(FIRST.replace("Text", "Other text"), id="help"),
        pytest.param(FIRST.replace('{b="1"}', '{ b="1", }'), id="spelling"),
        pytest.param(FIRST + "\n# comment\n", id="lines without a meaning"),
        pytest.param(FIRST.replace("\n", "\r\n"), id="line ends"),
    ],
)
def test_the_layout_stays_the_same_object_while_it_is_the_same(second: str) -> None:
    first, other = second_page(second)
    assert other.layout is first.layout


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(FIRST.replace("c 3", "d 3"), id="name"),
        pytest.param(FIRST.replace('b="2"', 'b="3"'), id="label value"),
        pytest.param(FIRST.replace('b="2"', 'd="2"'), id="label name"),
        pytest.param(FIRST.replace("gauge", "counter"), id="type"),
        pytest.param(FIRST + "d 4\n", id="series more"),
        pytest.param(FIRST.replace("c 3\n", ""), id="series less"),
        pytest.param(FIRST.replace("c 3\n", "\n"), id="series blanked"),
        pytest.param("c 3\n" + FIRST.replace("c 3\n", ""), id="order"),
        pytest.param(FIRST.replace('b="2"', 'b="1"'), id="repeated"),
    ],
)
def test_a_new_layout_is_a_new_object(second: str) -> None:
    first, other = second_page(second)
    fresh = parse(second)
    assert other.layout is not first.layout
    assert other.layout.series == fresh.layout.series
    assert other.layout.types == fresh.layout.types
    assert other.layout.repeated == fresh.layout.repeated
    assert other.values == fresh.values


def test_a_page_keeps_its_values_when_the_next_is_read() -> None:
    parser = PageParser()
    first = parser.parse("a 1 1000\nb 2\n")
    other = parser.parse("a 3\nb 4 2000\n")
    assert (first.values, first.timestamps_s) == ([1, 2], {0: 1.0})
    assert (other.values, other.timestamps_s) == ([3, 4], {1: 2.0})


def test_what_is_done_to_a_page_does_not_reach_the_next() -> None:
    parser = PageParser()
    parser.parse("a 1\nb 2\n").values[:] = [7, 7]
    parser.parse("a 1\nb 3\n").values[:] = [7, 7]
    assert parser.parse("a 1\nb 3\n").values == [1, 3]


def test_a_page_in_error_does_not_disturb_what_is_kept() -> None:
    parser = PageParser()
    layout = parser.parse(FIRST).layout
    changed = FIRST.replace("} 1", "} 9")
    for damaged in (changed.replace("c 3", "c x"), changed[:-2], changed + "\x00\n"):
        with pytest.raises(ExpositionError):
            parser.parse(damaged)
    page = parser.parse(FIRST.replace("} 2", "} 5"))
    assert page.layout is layout
    assert page.values == [1, 5, 3]


TAILS = [
    *("5", " 5", "5 ", "\t5", "+Inf", "infinity", "NaN", "1e5", "-0", ".5", "5."),
    *("1_0", "0x10", "\u0661", "5\r", "\x0b5", "5\x85", "1,2", "1,", ",", "", " ", "e", "nan nan"),
    *("5 1500", "5\t-1500 ", "5 1.5", "5 6 7", "5 # {} 1", '5 1 # {b="c"} 1 2', "5 # {} x", "5#"),
    *("5.0", "5.0\r\r", "[5.0]", "5.0,6.0", "1.5e999", "0.1", "1e-400"),
    *('{b="1"} 5', "{} 5", "a 5", "# 5", '"} 5'),
]


@pytest.mark.parametrize("before", ["3", "3 1000", '3 # {b="d"} 1'])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("head", ["c ", 'c{b="1"} ', 'c{b="1"}', "c\t", '{"c"} '])
def test_a_known_page_is_read_as_a_new_one(before: str, tail: str, head: str) -> None:
    first = f"# TYPE c gauge\na 1\n{head}{before}\nd 4\n# EOF\n"
    second = f"# TYPE c gauge\na 1.0\n{head}{tail}\nd 4.0\n# EOF\n"
    parser = PageParser()
    parser.parse(first)
    assert outcome(parser.parse, second) == outcome(parse, second)


@pytest.mark.parametrize(
    "line", ["5", "nan", "inf", "", "#", "# TYPE c gauge", "b 5", "c5", "cc 5"]
)
def test_a_line_that_is_another_is_read_as_on_a_new_page(line: str) -> None:
    parser = PageParser()
    parser.parse("a 1\nc 3\n# comment\n")
    for second in (f"a 1\n{line}\n# comment\n", f"a 1\nc 3\n{line}\n"):
        assert outcome(parser.parse, second) == outcome(parse, second)


def outcome(read: Callable[[str], Page], body: str) -> object:
    """All that can be told from a page or from its error."""
    try:
        page = read(body)
    except ExpositionError as exc:
        return str(exc), exc.line, exc.kind
    layout = page.layout
    parts = (layout.series, dict(layout.types), layout.repeated, page.timestamps_s)
    return [repr(value) for value in page.values], *parts


def test_consecutive_recorded_pages_share_their_layout() -> None:
    first, second = recorded("vllm-0.32.0-loaded"), recorded("vllm-0.32.0-loaded-next")
    parser = PageParser()
    layout = parser.parse(first).layout
    page = parser.parse(second)
    assert page.layout is layout
    assert page.values == parse(second).values
    assert page.values != parse(first).values


def test_targets_with_the_same_series_share_a_layout_and_no_values() -> None:
    first, second = recorded("vllm-0.32.0-loaded"), recorded("vllm-0.32.0-loaded-next")
    parser, other = PageParser(), PageParser()
    pages = [parser.parse(first), other.parse(second), parser.parse(second), other.parse(first)]
    assert len({page.layout for page in pages}) == 1
    assert [page.values for page in pages[:2]] == [page.values for page in (pages[3], pages[2])]
    described = other.parse(first.replace("# HELP vllm:num_requests_running ", "# HELP a "))
    assert described.layout is pages[0].layout
    unlike = other.parse(first.replace('engine="0"', 'engine="1"'))
    assert unlike.layout is not pages[0].layout


def test_a_known_layout_is_read_with_a_fraction_of_the_work() -> None:
    first, second = recorded("vllm-0.32.0-loaded"), recorded("vllm-0.32.0-loaded-next")
    parser = PageParser()
    parser.parse(first)
    assert calls(lambda: parser.parse(second)) < calls(lambda: parse(second)) / 10
