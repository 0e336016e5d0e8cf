"""The table of metrics agrees with what was read from vLLM, and with itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from kneewatch.collector.names.vllm_metrics import Metric, metric_table, table_from
from tests.collector.name_pages import CORE, FIXTURES

TABLE = metric_table()
METRICS = list(TABLE.metrics.values())
FILE = resources.files("kneewatch.collector.engines").joinpath("vllm/metrics.toml")
DOCUMENT: dict[str, Any] = tomllib.loads(FILE.read_text("utf-8"))
VERSIONS: list[str] = DOCUMENT["versions"]
ROWS: dict[str, dict[str, Any]] = DOCUMENT["metrics"]


class Spelling(Struct, frozen=True, dict=True):
    """A name of a metric, with the first and last version that used it."""

    name: str
    since: str | None = None
    until: str | None = None
    hidden: str | None = None
    engine: str = ""


def spellings_of(metric: Metric) -> list[Spelling]:
    """A metric's names, the newest first."""
    row = ROWS[metric.name]
    keys = ("since", "until", "hidden", "engine")
    newest = Spelling(metric.name, **{key: row[key] for key in keys if key in row})
    return [newest, *(Spelling(**former) for former in row.get("former", ()))]


# Built at run time before 0.32, so the sources of 0.30 do not hold them as they are.
BUILT = "hisparse_"


def read_lines() -> list[tuple[str, str, str, str, str]]:
    """Name, kind, engine, first and last version, as read from vLLM's sources."""
    rows: list[tuple[str, str, str, str, str]] = []
    for line in (FIXTURES / "vllm_metric_names.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, kind, engine, first, last = line.split()
            rows.append((name, kind, engine, first, last))
    return rows


def spelling_of(name: str) -> tuple[Metric, Spelling] | None:
    """The row of a name as vLLM declares it; a counter's may end with _total."""
    for metric in METRICS:
        for spelling in spellings_of(metric):
            total = f"{spelling.name}_total" if metric.kind == "counter" else spelling.name
            if name in (spelling.name, total):
                return metric, spelling
    return None


def test_every_name_read_from_vllm_is_in_the_table() -> None:
    order = VERSIONS.index
    for name, kind, engine, first, last in read_lines():
        table_entry = spelling_of(name)
        assert table_entry is not None, name
        metric, spelling = table_entry
        assert kind in ("-", "gauge" if metric.kind == "info" else metric.kind), name
        assert spelling.since is not None, name
        assert order(spelling.since) <= order(first), name
        assert spelling.until is None or order(last) <= order(spelling.until), name
        assert "-" in engine or spelling.engine in ("", engine), name


def test_the_table_says_no_more_than_was_read() -> None:
    order = VERSIONS.index
    read: dict[str, tuple[int, int]] = {}
    for name, _, _, first, last in read_lines():
        table_entry = spelling_of(name)
        assert table_entry is not None
        low, high = read.get(table_entry[1].name, (len(VERSIONS), -1))
        read[table_entry[1].name] = (min(low, order(first)), max(high, order(last)))
    for metric in METRICS:
        for spelling in spellings_of(metric):
            if spelling.since is None or spelling.name.startswith(BUILT):
                continue
            until = spelling.until or VERSIONS[-1]
            assert read[spelling.name] == (order(spelling.since), order(until)), spelling.name


def test_no_two_metrics_share_a_name_on_the_page() -> None:
    parts = {"histogram": 4, "counter": 3, "gauge": 1, "info": 1}
    assert len(TABLE.samples) == sum(parts[m.kind] * len(m.names) for m in METRICS)


def test_core_is_what_diagnosis_rests_on() -> None:
    assert {metric.name: metric.kind for metric in METRICS if metric.core} == CORE


def test_versions_ascend_and_rows_keep_to_them() -> None:
    numbers = [tuple(map(int, v.replace(".post", ".").split("."))) for v in VERSIONS]
    assert numbers == sorted(numbers)
    order = VERSIONS.index
    for metric in METRICS:
        newest, *former = spellings_of(metric)
        for spelling in spellings_of(metric):
            if spelling.since is None:
                assert metric.name.startswith(("lmcache_", "http_requests", "process_"))
                continue
            assert spelling.until is None or order(spelling.since) <= order(spelling.until)
            assert spelling.hidden is None or order(spelling.hidden) >= order(spelling.since)
        for old in former:
            assert old.until is not None
            assert newest.since is not None
            assert old.since is not None
            assert order(old.since) < order(newest.since)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_row_is_complete(metric: Metric) -> None:
    assert metric.kind in ("gauge", "counter", "histogram", "info")
    assert metric.unit
    row = ROWS[metric.name]
    assert row["help"].endswith(".")
    assert row["source"].endswith(".py")
    assert metric.scope in ("engine", "model", "page")
    assert not metric.name.endswith("_total") or metric.kind == "histogram"
    assert set(row.get("replaced_by", ())) <= TABLE.metrics.keys()
    assert not {"model_name", "engine", "le"} & set(metric.labels)
    assert all(spelling.engine in ("", "v0", "v1") for spelling in spellings_of(metric))
    assert not (metric.core and "needs" in row)


def test_the_packaged_file_has_no_key_that_is_not_read() -> None:
    assert DOCUMENT.keys() == {"versions", "metrics"}
    keys = {key for row in ROWS.values() for key in row}
    assert keys == {
        *("kind", "core", "unit", "help", "since", "until", "hidden", "engine", "former", "needs"),
        *("labels", "scope", "replaced_by", "sample", "source", "note"),
    }
    assert {key for row in ROWS.values() for old in row.get("former", ())
            for key in old} <= {"name", "since", "until", "hidden", "engine"}  # fmt: skip
    assert table_from(DOCUMENT) == metric_table()
    assert metric_table() is metric_table()


AT_ONCE = """
import sys, threading
sys.setswitchinterval(1e-6)
from kneewatch.collector.engines.engine_kind import engine_kinds
from kneewatch.collector.names.dcgm_fields import field_table
from kneewatch.collector.names.vllm_metrics import metric_table
together = threading.Barrier(8)
def read():
    together.wait()
    for table in (engine_kinds, metric_table, field_table):
        table.__wrapped__()
threads = [threading.Thread(target=read) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
"""Without a lock this ends one process in five by a segmentation fault."""


def test_many_threads_may_read_the_tables_at_once() -> None:
    command = [sys.executable, "-c", AT_ONCE]
    assert [subprocess.run(command, check=False).returncode for _ in range(4)] == [0] * 4


def test_types_are_learned_by_one_thread_at_a_time() -> None:
    root = Path(__file__).parents[2]
    direct = [
        str(path.relative_to(root))
        for room in ("agent", "collector", "dashboards", "diagnose", "reports", "rules")
        for path in (root / room).rglob("*.py")
        if re.search(r"msgspec\.convert\(|json\.Decoder\(", path.read_text("utf-8"))
    ]
    assert direct == ["collector/packaged.py"]
