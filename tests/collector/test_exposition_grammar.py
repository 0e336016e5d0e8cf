"""One line of exposition text: what it means, and what is refused."""

from __future__ import annotations

import math
import time

import pytest

from kneewatch.collector.errors import ExpositionError
from kneewatch.collector.exposition import parse
from kneewatch.collector.page import Series

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


def only_series(body: str) -> Series:
    (series,) = parse(body).layout.series
    return series


def only_value(text: str) -> float:
    (value,) = parse(f"a {text}\n").values
    return value


def refused(body: str | bytes, *, content_type: str = "") -> ExpositionError:
    with pytest.raises(ExpositionError) as caught:
        parse(body, content_type=content_type)
    return caught.value


# Names and labels


@pytest.mark.parametrize(
    ("line", "name", "labels"),
    [
        pytest.param("a 1", "a", {}, id="no labels"),
        pytest.param("a{} 1", "a", {}, id="empty braces"),
        pytest.param("a{ } 1", "a", {}, id="blank braces"),
        pytest.param("vllm:x_total 1", "vllm:x_total", {}, id="colon in a name"),
        pytest.param("_:9 1", "_:9", {}, id="odd but classic name"),
        pytest.param('a{b="1",c="2"} 1', "a", {"b": "1", "c": "2"}, id="two labels"),
        pytest.param('a{c="2",b="1"} 1', "a", {"b": "1", "c": "2"}, id="sorted by name"),
        pytest.param('a{b="1",} 1', "a", {"b": "1"}, id="comma after the last"),
        pytest.param('a{b="1", } 1', "a", {"b": "1"}, id="comma and blank after the last"),
        pytest.param('a{b=""} 1', "a", {"b": ""}, id="empty value"),
        pytest.param('a{b="1"}1', "a", {"b": "1"}, id="no blank after the braces"),
        pytest.param('\t a\t{ b = "1" , c\t="2" }\t1 ', "a", {"b": "1", "c": "2"}, id="blanks"),
        pytest.param('a{b="x,y}z{=# "} 1', "a", {"b": "x,y}z{=# "}, id="punctuation in a value"),
        pytest.param('a{b="# {c=1} 2 3"} 1', "a", {"b": "# {c=1} 2 3"}, id="no exemplar"),
        pytest.param(r'a{b="\\"} 1', "a", {"b": "\\"}, id="escaped backslash ends a value"),
        pytest.param(r'a{b="\"}",c="2"} 1', "a", {"b": '"}', "c": "2"}, id="escaped quote"),
        pytest.param(r'a{b="1\n2"} 1', "a", {"b": "1\n2"}, id="escaped line feed"),
        pytest.param(r'a{b="\\n"} 1', "a", {"b": r"\n"}, id="escaped backslash, then n"),
        pytest.param(r'a{b="\\\n\\\""} 1', "a", {"b": '\\\n\\"'}, id="several escapes"),
        pytest.param(r'a{b="C:\temp"} 1', "a", {"b": r"C:\temp"}, id="unknown escape stays"),
        pytest.param('a{b="é\u2028\x00\x85"} 1', "a", {"b": "é\u2028\x00\x85"}, id="any character"),
        pytest.param('a{b="1\r2"} 1', "a", {"b": "1\r2"}, id="carriage return within a line"),
        # prometheus_client refuses these names; the formats only reserve them.
        pytest.param('a{__b="1"} 1', "a", {"__b": "1"}, id="two underscores"),
        pytest.param('{"a.b"} 1', "a.b", {}, id="quoted name"),
        pytest.param('{"a b", "c.d"="1"} 1', "a b", {"c.d": "1"}, id="quoted name and label"),
        pytest.param('a{"b"="1"} 1', "a", {"b": "1"}, id="quoted classic label"),
        pytest.param(r'{"a\"b"} 1', 'a"b', {}, id="escape in a quoted name"),
    ],
)
def test_a_sample_line_names_its_series(line: str, name: str, labels: dict[str, str]) -> None:
    page = parse(f"{line}\n")
    assert page.layout.series == (Series(name, tuple(sorted(labels.items()))),)
    assert page.values == [1.0]
    assert page.timestamps_s == {}


def test_two_spellings_of_a_series_are_equal() -> None:
    series = only_series('a{b="\\\\",c="2"} 1\n')
    other = only_series('{ c="2" , "a" , b="\\\\", } 1\n')
    assert series == other


# Values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0.0),
        ("-0.0", -0.0),
        ("15752.0", 15752.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("+1.5e+09", 1.5e9),
        ("1E-3", 0.001),
        ("1.7952216786764884e+09", 1795221678.6764884),
        ("007", 7.0),
        ("18446744073709551616", 2.0**64),
        ("5e-324", 5e-324),
        ("1e400", math.inf),
        ("+Inf", math.inf),
        ("Inf", math.inf),
        ("-Inf", -math.inf),
        ("inf", math.inf),
        ("infinity", math.inf),
        ("-INFINITY", -math.inf),
    ],
)
def test_values_are_read_exactly(text: str, value: float) -> None:
    assert repr(only_value(text)) == repr(value)


@pytest.mark.parametrize("text", ["NaN", "nan", "-nan", "+NaN"])
def test_nan_is_a_value(text: str) -> None:
    assert math.isnan(only_value(text))


@pytest.mark.parametrize(
    "text",
    [
        *("1_0", "0x10", "0x1p4", "1e", "1,5", "--1", "1-", "abc", "NaN1", "1#"),
        # prometheus_client takes these: its numbers and its blanks are Python's.
        *("\u0661", "1\u00a0", "\x0b1", "1\x1c", "1\r\r"),
    ],
)
def test_what_is_not_a_number_is_refused(text: str) -> None:
    assert refused(f"a {text}\nb 1\n").line == 1


# Timestamps and exemplars


def test_timestamps_are_milliseconds_in_the_text_format() -> None:
    page = parse('a 1 1395066363000\nb 2\nc{d="1"}\t3\t-1500 \n', content_type=TEXT)
    assert page.values == [1, 2, 3]
    assert page.timestamps_s == {0: 1395066363.0, 2: -1.5}


@pytest.mark.parametrize(
    "line",
    [
        # prometheus_client takes all but the last two: the format says an int64.
        pytest.param("a 1 1.5", id="fraction"),
        pytest.param("a 1 1e3", id="exponent"),
        pytest.param("a 1 NaN", id="NaN"),
        pytest.param("a 1 12345678901234567890", id="more than an int64"),
        pytest.param("a 1 2 3", id="third number"),
        pytest.param('a 1 # {b="1"} 2', id="exemplar, as in OpenMetrics"),
        pytest.param("a 1 1_0", id="underscore"),
        pytest.param("a 1 x", id="word"),
    ],
)
def test_what_is_no_timestamp_in_the_text_format_is_refused(line: str) -> None:
    assert refused(f"b 1\n{line}\nc 1\n").line == 2


def test_timestamps_are_seconds_in_openmetrics() -> None:
    page = parse("a 1 1395066363.25\nb 2 1e3\nc 3 -1.5\n# EOF\n", content_type=OPENMETRICS)
    assert page.timestamps_s == {0: 1395066363.25, 1: 1000.0, 2: -1.5}


def test_openmetrics_samples_can_have_exemplars() -> None:
    body = (
        'a_bucket{le="1"} 5 # {trace="x,} # y",b="\\""} 0.5 1.25\n'
        "a_bucket 6 7.5 # {} +Inf\n"
        f'a_bucket{{le="2"}} 8 # {{trace="{"x" * 200}"}} 1\n'  # over the 128 that a writer may use
        "a_count 9\n# EOF\n"
    )
    page = parse(body, content_type=OPENMETRICS)
    assert page.values == [5, 6, 8, 9]
    assert page.timestamps_s == {1: 7.5}


@pytest.mark.parametrize(
    "line",
    [
        "a 1 NaN",
        "a 1 inf",
        "a 1 # {} 1 NaN",
        "a 1 # {}",
        "a 1 # {b} 1",
        'a 1 # {"b"} 1',
        'a 1 # {b="1" 1',
        "a 1 #{} 1",
        "a 1# {} 1",
        "a 1 # {} 1 2 3",
        "a 1 # comment",
        # prometheus_client drops the character after the braces, whatever it is.
        "a{}x1",
    ],
)
def test_malformed_openmetrics_samples_are_refused(line: str) -> None:
    error = refused(f"{line}\n# EOF\n", content_type=OPENMETRICS)
    assert (error.line, error.kind) == (1, "exposition")


# What is malformed


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a ",
        "1 1",
        "a-b 1",
        "é 1",
        "a b",
        "a 1 2 3",
        "{} 1",
        '{b="1"} 1',
        'a{"c"} 1',
        '{"a","c"} 1',
        '{""} 1',
        "a{b} 1",
        "a{b=1} 1",
        "a{b='1'} 1",
        'a{b="1"c="2"} 1',
        'a{b="1",,c="2"} 1',
        'a{,b="1"} 1',  # prometheus_client takes it; the format has no comma before the first
        "a{,} 1",
        'a{:b="1"} 1',
        'a{b:c="1"} 1',  # prometheus_client takes it; a colon is for metric names
        'a{b="1",b="1"} 1',
        'a{""="1"} 1',
        'a{__name__="b"} 1',
        '{__name__="b"} 1',  # prometheus_client takes it; neither format has it
        'a{b="1" 1',
        'a{b="1} 1',
        r'a{b="\"} 1',
        'a b="1"} 1',
        "a{b}{c} 1",
        "\x0ba 1",
        "\ufeffa 1",
        "# HELP",
        "# HELP ",
        "# HELP 9 text",
        "# TYPE a",
        "# TYPE a bogus",
        "# TYPE a Counter",
        "# TYPE a counter more",
        "# TYPE 'a' counter",
    ],
)
def test_a_malformed_line_is_refused_with_its_number(line: str) -> None:
    error = refused(f"ok 1\n\n{line}\nok 2\n")
    assert (error.line, error.kind) == (3, "exposition")
    assert str(error).startswith("line 3: ")


def test_an_error_shows_a_short_and_harmless_excerpt() -> None:
    error = refused("\x1b[31m\u202e\x00" + "x" * 100_000 + "\n")
    assert "\\x1b[31m\\u202e\\x00xxx" in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("a{" + 'b="",' * 500_000, id="open braces"),
        pytest.param("a{" + '"' * 1_000_001 + "} 1", id="quotes"),
        pytest.param('a{b="' + "\\" * 1_000_001 + '"} 1', id="backslashes"),
        pytest.param("a" + " " * 1_000_000 + "b", id="blanks"),
        pytest.param("a 1" + " 1" * 500_000, id="numbers"),
        pytest.param("a 1 # {" * 200_000 + "\n# EOF", id="exemplars"),
        pytest.param("# TYPE " + "a" * 1_000_000 + " b", id="family"),
        pytest.param("a" * 1_000_000, id="name"),
        pytest.param("a{}" * 300_000, id="braces"),
    ],
)
def test_hostile_lines_cost_no_more_than_their_length(body: str) -> None:
    started_s = time.process_time()
    refused(body)
    # A megabyte takes some 10 ms of CPU; what grows with the square of it would take minutes.
    assert time.process_time() - started_s < 20.0
