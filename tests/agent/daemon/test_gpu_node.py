"""The GPUs of this node: what is found by looking, and whether a target is here at all."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kneewatch.agent.daemon.node_gpus import on_this_node
from tests.agent.daemon.gpu_factories import HERE, T_S, Clock, Exporter, Make, active, said, target
from tests.collector.dcgm_pages import node
from tests.collector.fake_nvml import FakeDriver, driver_module
from tests.collector.nvml_nodes import ampere, hopper
from tests.collector.servers import Start
from tests.waiting import PATIENCE_S


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes sources, and closes them."""
    for name in ("PROBE_CONNECT_S", "PROBE_READ_S"):
        monkeypatch.setattr(f"kneewatch.agent.daemon.node_gpus.{name}", PATIENCE_S)
    with closing(Make()) as maker:
        yield maker


def test_an_exporter_on_this_node_is_found_and_kept(serving: Start, make: Make) -> None:
    exporter = Exporter(serving, node(1))
    here, there = target("here", at=HERE), target("there")
    sources = make(here, there, usual_url=exporter.url)
    for cycle in range(3):
        sources.collect(T_S + 15 * cycle)
    assert exporter.asked == 3, "looking is the first reading"
    assert active(sources, here, T_S + 30) == pytest.approx(0.1)
    assert [state.name for state in sources.states(here)] == ["dcgm"]
    assert said(sources, there) == [
        "gpu_*: no GPU source (the target is not on this node; gpu_metrics names its page)"
    ]
    assert sources.states(there) == []


def test_without_an_exporter_nvml_is_asked(make: Make) -> None:
    module = driver_module(FakeDriver(hopper("GPU-a"), ampere("GPU-b")))
    spec = target(at=HERE, gpu_indexes="0")
    sources = make(spec, load=lambda: module)
    sources.collect(T_S)
    time.sleep(0.15)
    sources.collect(T_S + 15)
    reading = sources.reading(spec, T_S + 15)
    assert reading.values["gpu_dram_active_ratio"] == pytest.approx(0.65)
    assert reading.values["gpu_temperature_c"] == 58
    assert reading.joined == "by index: GPU 0"
    assert said(sources, spec) == [], "what the other GPU lacks does not concern the target"
    assert [state.name for state in sources.states(spec)] == ["nvml"]


def test_no_gpu_is_normal_and_said_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    specs = [target(name, at=HERE) for name in "abc"]
    sources = make(*specs, monotonic=clock)
    for cycle in range(100):
        sources.collect(T_S + 15 * cycle)
        clock.now_s += 15
    for spec in specs:
        (line,) = said(sources, spec)
        assert line.startswith("gpu_*: no GPU source: http://127.0.0.1:9/metrics: connection")
        assert "libnvidia-ml.so.1" in line
        assert sources.states(spec) == []
    (message,) = caplog.messages
    assert "no GPU source" in message
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_an_exporter_that_starts_later_is_found(serving: Start, make: Make) -> None:
    exporter, clock = Exporter(serving, ""), Clock()
    spec = target(at=HERE)
    sources = make(spec, usual_url=exporter.url, monotonic=clock)
    sources.collect(T_S)
    exporter.text = node(1)
    clock.now_s += 15
    sources.collect(T_S + 15)
    assert active(sources, spec, T_S + 15) is None, "not looked for at each reading"
    clock.now_s += 600
    sources.collect(T_S + 615)
    assert active(sources, spec, T_S + 615) == pytest.approx(0.1)


def test_what_was_found_and_is_gone_for_long_is_looked_for_anew(serving: Start, make: Make) -> None:
    exporter, clock = Exporter(serving, node(1)), Clock()
    module = driver_module(FakeDriver(hopper()))
    spec = target(at=HERE)
    sources = make(spec, usual_url=exporter.url, load=lambda: module, monotonic=clock)
    sources.collect(T_S)
    exporter.status = "404 Not Found"
    for _ in range(6):
        clock.now_s += 301
        sources.collect(T_S)
    assert [state.name for state in sources.states(spec)] == ["nvml"]


def test_nvml_that_is_stated_and_absent_is_a_failure(make: Make) -> None:
    spec = target(page="nvml")
    sources = make(spec)
    sources.collect(T_S)
    (state,) = sources.states(spec)
    assert (state.name, state.success) == ("nvml", False)
    assert "NVIDIA runtime" in state.error


def test_none_is_none(make: Make) -> None:
    spec = target(at=HERE, page="none")
    sources = make(spec)
    sources.collect(T_S)
    assert said(sources, spec) == ["gpu_*: no GPU source"]


@pytest.mark.parametrize(
    ("at", "stated", "expected"),
    [
        ("http://127.0.0.1:8000", "", True),
        ("http://127.8.8.8:8000", "", True),
        ("http://[::1]:8000", "", True),
        ("http://localhost:8000", "", True),
        ("http://LOCALHOST:8000", "", True),
        (f"http://{socket.gethostname()}:8000", "", True),
        ("http://10.255.0.1:8000", "", False),
        ("http://vllm.example:8000", "", False),
        ("http://10.255.0.1:8000", socket.gethostname(), True),
        ("http://10.255.0.1:8000", "another", False),
    ],
)
def test_whether_a_target_is_on_this_node(at: str, stated: str, expected: bool) -> None:
    assert on_this_node(target(at=at, node=stated)) is expected
