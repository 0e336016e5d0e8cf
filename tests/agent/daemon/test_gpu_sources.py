"""The daemon's GPU sources: sharing, failures, faults of GPUs, reloads."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from types import ModuleType

import pytest

from kneewatch.agent.daemon.gpu_sources import GpuSources
from kneewatch.agent.daemon.node_gpus import GpuClaim
from kneewatch.agent.targets import TargetSpec
from tests.agent.daemon.gpu_factories import (
    T_S,
    Clock,
    Exporter,
    Make,
    active,
    errors,
    said,
    target,
    wait,
)
from tests.collector.dcgm_pages import body, labels, node
from tests.collector.fake_nvml import LOST, MISMATCH, FakeDriver, driver_module
from tests.collector.nvml_nodes import hopper
from tests.collector.servers import Serve, Start, always, answer
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes sources, and closes them."""
    with closing(Make()) as maker:
        yield maker


# One exporter, many targets


def test_targets_share_an_exporter_and_each_reads_its_own_gpus(serving: Start, make: Make) -> None:
    exporter = Exporter(
        serving,
        body(
            {
                labels(at, pod=f"vllm-{at // 2}"): {"PROF_GR_ENGINE_ACTIVE": 0.1 * (at + 1)}
                for at in range(4)
            }
        ),
    )
    specs = [
        target("pod", page=exporter.url, pod="vllm-1", namespace="llm"),
        target("uuid", page=exporter.url, gpu_uuids="GPU-gpu-node-1-0"),
        target("index", page=exporter.url, gpu_indexes="1,2"),
        target("unstated", page=exporter.url, tensor_parallel=4),
    ]
    sources = make(*specs)
    assert [said(sources, spec) for spec in specs] == [["gpu_*: GPUs not read yet"]] * 4
    assert [sources.states(spec) for spec in specs] == [[]] * 4
    for cycle in range(3):
        sources.collect(T_S + 15 * cycle)
    assert exporter.asked == 3, "one GET an interval, however many targets"
    t_s = T_S + 30
    assert [active(sources, spec, t_s) for spec in specs] == pytest.approx([0.35, 0.1, 0.25, 0.25])
    assert [sources.reading(spec, t_s).guess for spec in specs] == [False, False, False, True]
    joined = [sources.states(spec)[0].joined for spec in specs]
    assert joined[:3] == ["by pod: GPU 2, 3", "by UUID: GPU 0", "by index: GPU 1, 2"]
    assert joined[3] == "all 4 GPUs on the page: a guess", "others use them too"
    (state,) = sources.states(specs[0])
    assert (state.name, state.t_s, state.success, state.error) == ("dcgm", t_s, True, "")
    assert 0 < state.duration_s < PATIENCE_S


def test_targets_with_the_same_gpus_share_what_is_computed_from_a_page(
    serving: Start, make: Make
) -> None:
    exporter = Exporter(serving, node(4))
    same = [target(name, page=exporter.url, gpu_indexes="0,1") for name in ("a", "b")]
    other = target("c", page=exporter.url, gpu_indexes="2")
    sources = make(*same, other)
    sources.collect(T_S)
    sources.update([*same, other, late := target("d", page=exporter.url, gpu_indexes="0,1")])
    readings = [sources.reading(spec, T_S) for spec in (*same, late)]
    assert active(sources, late) is not None
    assert readings[0] is readings[1] is readings[2]
    assert sources.reading(other, T_S).joined == "by index: GPU 2"


def test_a_target_alone_with_as_many_gpus_as_it_has(serving: Start, make: Make) -> None:
    exporter = Exporter(serving, node(4))
    spec = target(page=exporter.url, tensor_parallel=4)
    sources = make(spec)
    sources.collect(T_S)
    assert not sources.reading(spec, T_S).guess
    assert "likely all 4" in sources.reading(spec, T_S).joined


def test_a_guess_is_told_with_the_way_out(serving: Start, make: Make) -> None:
    spec = target(page=Exporter(serving, node(4)).url)
    sources = make(spec)
    sources.collect(T_S)
    (line,) = said(sources, spec)
    assert "a guess: set the target's labels gpu_uuids, gpu_indexes" in line
    assert active(sources, spec) == pytest.approx(0.25), "and they are shown"


def test_the_gpus_that_a_server_uses_are_its_own_unless_labels_say_others(
    serving: Start, make: Make
) -> None:
    url = Exporter(serving, node(4)).url
    unlabelled, labelled = target("a", page=url), target("b", page=url, gpu_indexes="3")
    sources = make(unlabelled, labelled)
    for spec in (unlabelled, labelled):
        sources.set_used(spec.name, GpuClaim(("GPU-gpu-node-1-1", "GPU-gpu-node-1-2")))
    sources.collect(T_S)
    reading = sources.reading(unlabelled, T_S)
    assert (reading.joined, reading.guess) == ("by UUID: GPU 1, 2", False)
    assert sources.reading(labelled, T_S).joined == "by index: GPU 3"
    sources.set_used("a", GpuClaim())
    sources.collect(T_S)
    assert sources.reading(unlabelled, T_S).guess


def test_a_server_has_the_gpus_that_the_exporter_assigns_to_its_pod(
    serving: Start, make: Make
) -> None:
    page = body(
        {
            labels(0, pod="vllm-0"): {},
            labels(1, pod="vllm-0"): {},
            labels(2, pod="vllm-0", namespace="dev"): {},
            labels(3, pod="other"): {},
        }
    )
    unlabelled = target("a", page=Exporter(serving, page).url)
    sources = make(unlabelled)
    sources.collect(T_S)
    assert sources.reading(unlabelled, T_S).models == (), "whose they are is a guess"
    sources.set_used("a", GpuClaim(pod="vllm-0", namespace="llm"))
    sources.collect(T_S)
    reading = sources.reading(unlabelled, T_S)
    assert (reading.joined, reading.guess) == ("by pod: GPU 0, 1", False)
    assert reading.models == ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3")


def test_a_stated_page_is_not_shown_the_targets_token(serving: Start, make: Make) -> None:
    exporter = Exporter(serving, node(1))
    secret = {"X-Key": "sesame"}
    own = target("own", at=exporter.url, page=exporter.url, fetch__headers=secret)
    other = target("other", page=exporter.url, fetch__headers=secret)
    sources = make(own, other)
    sources.collect(T_S)
    asked = sorted(b"sesame" in request for request in exporter.server.requests)
    assert asked == [False, True], "the same page with other access is another source"


# Failures


def test_an_exporter_that_fails_is_left_alone_for_longer_and_recovers(
    serving: Start, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    exporter, clock = Exporter(serving, node(1)), Clock()
    spec = target(page=exporter.url)
    sources = make(spec, monotonic=clock)
    sources.collect(T_S)
    exporter.status = "503 Service Unavailable"
    asked: list[int] = []
    for cycle in range(1, 17):
        clock.now_s += 15
        before = exporter.asked
        sources.collect(T_S + 15 * cycle)
        asked.append(exporter.asked - before)
    assert asked == [1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    (state,) = sources.states(spec)
    assert not state.success
    assert "503" in state.error
    (line,) = said(sources, spec)
    assert "503" in line
    assert sources.reading(spec, T_S).values == {}
    assert [record.message for record in caplog.records if "failed" in record.message] == [
        f"GPU source failed source=dcgm error={state.error}"
    ], "said once"
    exporter.text, exporter.status = node(1, DEV_TOTAL_ENERGY_CONSUMPTION=9e9), "200 OK"
    clock.now_s += 300
    sources.collect(T_S + 600)
    assert active(sources, spec, T_S + 600) == pytest.approx(0.1)
    assert sources.states(spec)[0].success
    assert "GPU source up again source=dcgm failures=5" in caplog.messages


def test_a_page_that_is_not_an_exporters(serving: Start, make: Make) -> None:
    exporter = Exporter(serving, "vllm:num_requests_running 1\n")
    spec = target(page=exporter.url)
    sources = make(spec)
    sources.collect(T_S)
    (line,) = said(sources, spec)
    assert exporter.url in line
    assert "no DCGM_FI_ series" in line
    assert "dcgm-exporter" in errors(sources, spec)[0], "the hint is with the source"


def test_a_reading_that_is_no_longer_taken_goes_stale(serving: Start, make: Make) -> None:
    spec = target(page=Exporter(serving, node(1)).url)
    sources = make(spec)
    sources.collect(T_S)
    assert active(sources, spec, T_S + 60) is not None
    assert active(sources, spec, T_S + 100) is None
    assert said(sources, spec, T_S + 100) == ["gpu_*: the newest GPU page is 100 s old"]


def test_a_source_that_hangs_delays_no_other_and_is_not_started_again(
    serving: Start, make: Make
) -> None:
    held = threading.Event()
    driver = FakeDriver(hopper())
    module = driver_module(driver)
    exporter = Exporter(serving, node(1))
    stuck = target("stuck", page="nvml", gpu_interval_s=0.5)
    well = target("well", page=exporter.url)
    sources = make(stuck, well, load=lambda: module, hang_s=4.0)
    sources.collect(T_S)
    driver.hook = partial(wait, held)
    sources.collect(T_S + 15)
    sources.collect(T_S + 30)
    assert exporter.asked == 3
    assert active(sources, well, T_S + 30) is not None
    assert said(sources, stuck, T_S + 30)[0].startswith("gpu_*: nvml is hanging: no answer for ")
    (state,) = sources.states(stuck)
    assert not state.success
    assert "is hanging" in state.error
    calls = len(driver.calls)
    sources.collect(T_S + 45)
    assert len(driver.calls) == calls, "one reading at a time"
    driver.hook = lambda: None
    held.set()
    time.sleep(0.3)
    assert not sources.reading(stuck, T_S + 45).values, "what comes so late is not taken"

    def goes_on() -> bool:
        sources.collect(T_S + 60)
        return bool(sources.reading(stuck, T_S + 60).values)

    until(goes_on)


def test_closing_does_not_wait_for_what_hangs(make: Make) -> None:
    held = threading.Event()
    driver = FakeDriver(hopper())
    driver.hook = partial(wait, held)
    module = driver_module(driver)
    sources = make(target(page="nvml"), load=lambda: module, hang_s=3600)
    collecting = threading.Thread(target=sources.collect, args=(T_S,))
    collecting.start()
    until(lambda: driver.calls)
    sources.close(1.0)
    collecting.join(PATIENCE_S)
    assert not collecting.is_alive()
    held.set()


# Faults of GPUs and drivers


def test_a_lost_gpu_is_told_to_its_target_and_once_to_the_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver(hopper("GPU-a"), hopper("GPU-b"))
    module = driver_module(driver)
    first = target("first", page="nvml", gpu_uuids="GPU-a")
    second = target("second", page="nvml", gpu_uuids="GPU-b")
    sources = make(first, second, load=lambda: module)
    sources.collect(T_S)
    driver.gpus[1].error = LOST
    for cycle in (1, 2, 3):
        sources.collect(T_S + 15 * cycle)
    assert said(sources, second)[0] == (
        "gpu_*: GPU 1 (GPU-b) has fallen off the bus (XID 79 in the kernel log): drain the node"
    )
    assert sources.reading(second, T_S + 45).values == {}
    assert said(sources, first) == []
    assert sources.reading(first, T_S + 45).values["gpu_temperature_c"] == 58
    (state,) = sources.states(second)
    assert (state.success, "fallen off the bus" in state.error) == (False, True)
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_a_driver_that_was_updated_says_so_and_comes_back(make: Make) -> None:
    driver, clock = FakeDriver(hopper()), Clock()
    module = driver_module(driver)
    spec = target(page="nvml")
    sources = make(spec, load=lambda: module, monotonic=clock)
    sources.collect(T_S)
    driver.error = MISMATCH
    clock.now_s += 15
    sources.collect(T_S + 15)
    assert "different versions" in said(sources, spec)[0]
    assert "reboot the node" in errors(sources, spec)[0]
    driver.error = 0
    clock.now_s += 15
    sources.collect(T_S + 30)
    assert sources.reading(spec, T_S + 30).values["gpu_temperature_c"] == 58


def test_a_bug_in_reading_is_a_failure_of_that_source_alone(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> ModuleType:
        raise ZeroDivisionError("a bug of the test's")

    spec = target(page="nvml")
    sources = make(spec, load=broken)
    sources.collect(T_S)
    assert "a bug of the test's" in errors(sources, spec)[0]
    assert "Traceback" in caplog.text


# Reload


def throttled(sources: GpuSources, spec: TargetSpec) -> float | None:
    return sources.reading(spec, T_S + 15).values.get("gpu_power_throttle_ratio")


def test_a_reload_keeps_the_windows_of_what_did_not_change(serving: Start, make: Make) -> None:
    exporter = Exporter(serving, node(2, DEV_POWER_VIOLATION=1e9))
    sources = make(target("kept", page=exporter.url, gpu_indexes="0"), target("other"))
    sources.collect(T_S)
    exporter.text = node(2, DEV_POWER_VIOLATION=4e9)
    sources.collect(T_S + 15)
    again = target("kept", page=exporter.url, gpu_indexes="0")
    new = target("new", page=exporter.url, gpu_indexes="1")
    sources.update([again, new])
    assert throttled(sources, again) == pytest.approx(0.2)
    assert active(sources, new, T_S + 15) == pytest.approx(0.2), "the newest page serves at once"
    assert throttled(sources, new) is None
    changed = target("kept", page=exporter.url, gpu_indexes="1")
    sources.update([changed])
    assert active(sources, changed, T_S + 15) == pytest.approx(0.2)
    assert throttled(sources, changed) is None, "another GPU has another window"
    assert sources.reading(new, T_S).unknown == ("gpu_*: no GPU source",)


def test_a_source_that_hangs_when_it_is_dropped_is_closed_once_it_answers(make: Make) -> None:
    held, driver = threading.Event(), FakeDriver(hopper())
    module = driver_module(driver)
    sources = make(target(page="nvml"), load=lambda: module, hang_s=2.0)
    sources.collect(T_S)
    driver.hook = partial(wait, held)
    sources.collect(T_S + 15)
    sources.update([])
    assert driver.running == 1
    driver.hook = lambda: None
    held.set()
    until(lambda: driver.running == 0)


def test_a_source_that_nobody_uses_any_more_is_closed(serving: Start, make: Make) -> None:
    driver = FakeDriver(hopper())
    module = driver_module(driver)
    exporter = Exporter(serving, node(1))
    sources = make(target(page="nvml"), load=lambda: module)
    sources.collect(T_S)
    assert driver.running == 1
    spec = target(page=exporter.url)
    sources.update([spec])
    sources.collect(T_S + 15)
    assert active(sources, spec, T_S + 15) == pytest.approx(0.1)
    until(lambda: driver.running == 0)


def test_a_slow_exporter_is_given_up_before_it_counts_as_hanging(
    serving: Start, make: Make
) -> None:
    def drip(sock: socket.socket, _request: bytes, _number: int) -> bool:
        for _ in range(100):
            sock.sendall(b"H")
            time.sleep(0.05)
        return False

    slow: Serve = drip
    spec = target(page=serving(slow).url, fetch__read_timeout_s=0.3)
    fine = target("fine", page=serving(always(answer(node(1).encode()))).url)
    sources = make(spec, fine)
    sources.collect(T_S)
    assert "0.3" in errors(sources, spec)[0]
    assert active(sources, fine) == pytest.approx(0.1)
