"""The log: one line a message whatever is in it, values apart from phrases, no secrets."""

from __future__ import annotations

import json
import logging
import os
import select
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kneewatch.agent import logs

HOSTILE = 'a"b\\c\nlevel=error msg="all is well"\r\x1b[2J\x9b1m\u202e\u2028\ud800 x=y'

LOGFMT, JSON = logs.LineFormatter("logfmt"), logs.LineFormatter("json")


def record(message: str, *args: object, **more: Any) -> logging.LogRecord:  # noqa: ANN401
    return logging.LogRecord("kneewatch.test", logging.WARNING, "f", 1, message, args, None, **more)


def logfmt(message: str, *args: object) -> str:
    return LOGFMT.format(record(message, *args))


def as_json(message: str, *args: object) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(JSON.format(record(message, *args)))
    return parsed


def test_values_are_fields() -> None:
    line = logfmt("target answers again target=%s failed=%s after_s=%.1f", "http://a:1", 3, 2.25)
    time, rest = line.split(" ", 1)
    assert time.startswith("time=20")
    assert time.endswith("Z")
    assert rest == (
        'level=warning msg="target answers again" target=http://a:1 failed=3 after_s=2.2 '
        "logger=kneewatch.test"
    )
    fields = as_json("target answers again target=%s failed=%s after_s=%.1f", "http://a:1", 3, 2.25)
    assert fields["msg"] == "target answers again"
    assert (fields["target"], fields["failed"], fields["after_s"]) == ("http://a:1", 3, "2.2")


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (("",), 'value=""'),
        ((None,), "value=None"),
        ((True,), "value=True"),
        ((float("nan"),), "value=nan"),
        ((0.1 + 0.2,), "value=0.3"),
        (("a=b",), 'value="a=b"'),
        (("ü",), "value=ü"),
        (("x" * 5000,), "value=" + "x" * 1999 + "…"),
        ((ValueError("a b"),), 'value="a b"'),
    ],
)
def test_how_values_are_written(args: tuple[object, ...], shown: str) -> None:
    assert f" {shown} " in logfmt("it is value=%s", *args)


def test_hostile_text_is_one_field_of_one_line() -> None:
    line = logfmt("page says text=%s", HOSTILE)
    assert line.isprintable()
    assert "level=warning" in shlex.split(line)
    assert "level=error" not in shlex.split(line)
    raw = JSON.format(record("page says text=%s", HOSTILE))
    assert raw.isprintable()
    assert raw.isascii()
    assert json.loads(raw)["text"] == HOSTILE


@given(st.text(), st.text())
def test_any_text_is_one_field_of_one_line(phrase: str, value: str) -> None:
    line = logfmt("it says a=%s b=%s", phrase, value)
    assert line.isprintable()
    assert [word.split("=")[0] for word in shlex.split(line)] == [
        "time", "level", "msg", "a", "b", "logger",
    ]  # fmt: skip
    fields = as_json("it says a=%s b=%s", phrase, value)
    assert (fields["a"], fields["b"]) == tuple(map(logs.without_secrets, (phrase, value)))


@given(st.text(), st.lists(st.one_of(st.text(), st.integers(), st.floats(), st.none())))
def test_any_template_is_a_line(template: str, args: list[object]) -> None:
    line = LOGFMT.format(record(template, *args))
    assert line.isprintable()
    assert json.loads(JSON.format(record(template, *args)))["level"] == "warning"


def test_a_message_of_another_make_is_a_phrase() -> None:
    assert ' msg="50% of a b" ' in logfmt("50%% of %s b", "a")
    assert " msg=100% " in logfmt("100%")
    assert ' msg="a %d' in logfmt("a %d", "b")
    assert ' msg="{} a=1" ' in logfmt("%s a=%s", {}, 1)


def test_a_field_takes_no_other_ones_place() -> None:
    fields = as_json("it is level=%s time=%s", "fine", "noon")
    assert (fields["level"], fields["level_"], fields["time_"]) == ("warning", "fine", "noon")


def test_credentials_are_left_out() -> None:
    line = logfmt("cannot reach url=%s error=%s", "http://me:sesame@a:1/m", "//u:sesame@b: no")
    assert "sesame" not in line
    assert "url=http://a:1/m" in line
    try:
        raise ValueError("at http://me:sesame@a:1")  # noqa: TRY301
    except ValueError as error:
        logged = record("it crashed")
        logged.exc_info = (type(error), error, error.__traceback__)
    for form in (LOGFMT, JSON):
        line = form.format(logged)
        assert "ValueError: at http://a:1" in line
        assert "sesame" not in line
        assert line.isprintable()


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_levels_and_descriptor(root: logging.Logger, tmp_path: Path) -> None:
    del root
    with (tmp_path / "log").open("wb") as file:
        logs.configure(form="json", level="warning", fd=file.fileno())
        log = logging.getLogger("kneewatch.x")
        log.info("not this")
        log.warning("this")
        logging.getLogger("uvicorn.error").info("nor this")
        logs.configure(form="logfmt", level="debug", fd=file.fileno())
        log.debug("and this")
    first, second = (tmp_path / "log").read_text().splitlines()
    assert json.loads(first)["msg"] == "this"
    assert ' level=debug msg="and this" ' in second


def test_a_reader_that_is_gone_stops_nothing(root: logging.Logger) -> None:
    del root
    reading, writing = os.pipe()
    os.close(reading)
    logs.configure(form="logfmt", level="info", fd=writing)
    logging.getLogger("kneewatch.x").warning("said to nobody")
    os.close(writing)


def test_a_reader_that_stops_reading_stops_nothing(root: logging.Logger) -> None:
    del root
    reading, writing = os.pipe()
    logs.configure(form="logfmt", level="info", fd=writing)
    log = logging.getLogger("kneewatch.x")
    for number in range(5_000):  # a pipe holds 64 kB
        log.info("said number=%s", number)
    told = b""
    while select.select([reading], [], [], 0)[0]:
        told += os.read(reading, 65_536)
    log.info("heard again")
    told += os.read(reading, 65_536)
    os.close(reading)
    os.close(writing)
    *lines, lost, last = told.decode().splitlines()
    assert [f"number={number} " in line for number, line in enumerate(lines)] == [True] * len(lines)
    assert f'msg="log lines lost" lines={5_000 - len(lines)} ' in lost
    assert 'msg="heard again"' in last


def test_the_traceback_of_an_error_that_comes_back_is_logged_once_in_a_while() -> None:
    formatter = logs.LineFormatter("json")

    def crash(value: int, *, after_s: float = 0.0) -> str:
        crashed = record("job crashed name=%s", "a")
        crashed.created += after_s
        try:
            int(f"x{value}")
        except ValueError as error:
            crashed.exc_info = (type(error), error, error.__traceback__)
        line: dict[str, str] = json.loads(formatter.format(crashed))
        return line["traceback"]

    assert crash(1).startswith("Traceback")
    assert crash(2) == "ValueError: invalid literal for int() with base 10: 'x2'"
    assert crash(3, after_s=logs.TRACEBACK_S + 60).startswith("Traceback")
