"""The GPUs that a server's process uses, through a driver that is made here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
from msgspec import Struct

from kneewatch.agent.server.watch import NODE_PIDS, OTHER_PIDS, PARTS, ServerWatch, read_gpus
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.exposition import Limits
from kneewatch.collector.http.address import FetchSettings
from kneewatch.diagnose.deployment.deployment import NOTHING, Stated
from kneewatch.diagnose.deployment.server_facts import SourceReading, merge
from kneewatch.diagnose.deployment.vllm_flags import parse_command
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.values import GpuReading
from kneewatch.diagnose.verdict import Server
from tests.agent.server.test_facts_in_use import PAGES, TYPE
from tests.collector.fake_nvml import DRIVER_NOT_LOADED, FakeDriver, FakeGpu, driver_module
from tests.collector.nvml_nodes import A100

SERVER = os.getpid()
WHOLE = -1


def read(*gpus: FakeGpu, pids: str = NODE_PIDS, error: int = 0) -> SourceReading:
    driver = FakeDriver(*gpus)
    driver.error = error
    module = driver_module(driver)
    reading = read_gpus(SERVER, 5.0, load=lambda: module, pids=pids)
    assert driver.running == 0, "NVML is shut down again"
    return reading


@pytest.fixture
def worker() -> Iterator[int]:
    """A process that the server started."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child.pid
        child.communicate()


def test_the_gpus_of_the_server_and_of_what_it_started(worker: int) -> None:
    reading = read(
        FakeGpu("GPU-a", processes={SERVER: WHOLE}),
        FakeGpu("GPU-b", processes={worker: WHOLE, 7: WHOLE}),
        FakeGpu("GPU-c", name=A100, processes={7: WHOLE}),
    )
    assert dict(reading.values) == {
        "gpu": "h100-sxm",
        "gpu_name": "NVIDIA H100 80GB HBM3",
        "gpu_memory_gib": 80.0,
        "server_gpus": 2,
        "gpu_uuids": "GPU-a GPU-b",
    }
    assert (reading.source, reading.notes) == ("gpus", ())


def test_a_server_that_uses_no_gpu_has_none() -> None:
    assert dict(read(FakeGpu("GPU-a", processes={7: WHOLE})).values) == {}


def test_process_ids_of_a_container_are_never_compared() -> None:
    alike = read(FakeGpu("GPU-a", processes={SERVER: WHOLE}), FakeGpu("GPU-b"), pids="pid:[4026]")
    assert alike.values["gpu"] == "h100-sxm", "all are of that model"
    assert "server_gpus" not in alike.values
    assert alike.notes == (OTHER_PIDS,)
    mixed = read(FakeGpu("GPU-a", processes={SERVER: WHOLE}), FakeGpu("GPU-b", name=A100), pids="x")
    assert (dict(mixed.values), mixed.notes) == ({}, (OTHER_PIDS,))


def test_a_mig_instance_is_no_gpu_of_the_catalogue() -> None:
    reading = read(FakeGpu("GPU-a", processes={SERVER: 3}))
    assert (dict(reading.values), reading.notes) == ({}, (PARTS,))


def test_a_gpu_that_the_catalogue_lacks_has_its_name() -> None:
    values = read(FakeGpu("GPU-a", name="NVIDIA X900", processes={SERVER: WHOLE})).values
    assert (values["gpu_name"], "gpu" in values) == ("NVIDIA X900", False)


def test_a_driver_that_fails_is_a_note() -> None:
    reading = read(error=DRIVER_NOT_LOADED)
    assert dict(reading.values) == {}
    assert "driver is not loaded" in reading.notes[0]


def merged(stated: Stated, *readings: SourceReading) -> tuple[Server, Stated]:
    return merge(stated, readings, config={}, model_names=(), settings_s=1.0, page_s=9.0)


def test_the_gpu_completes_what_is_not_set() -> None:
    reading = read(FakeGpu("GPU-a", processes={SERVER: WHOLE}))
    facts, completed = merged(NOTHING, reading)
    assert completed.gpu is not None
    assert (completed.gpu.id, completed.degree) == ("h100-sxm", 1)
    assert facts.value("tensor_parallel") == 1
    assert {row.name for row in facts.unknown}.isdisjoint({"gpu", "tensor_parallel"})


@pytest.mark.parametrize(("flags", "notes"), [("-tp 2", 0), ("-tp 4", 1), ("-dp 2", 0)])
def test_a_command_line_for_another_number_of_gpus_is_a_note(flags: str, notes: int) -> None:
    reading = read(*[FakeGpu(name, processes={SERVER: WHOLE}) for name in ("GPU-a", "GPU-b")])
    launch = parse_command(f"vllm serve org/model {flags}", origin="test")
    facts, _ = merged(NOTHING, SourceReading("process", 5.0, command_line=launch), reading)
    assert sum("the server uses 2 GPUs" in note for note in facts.notes) == notes


# --- By the exporter's page -----------------------------------------------------------------------


class Exporter(Struct, dict=True):
    """The GPUs of a target by a page."""

    models: tuple[str, ...]

    def reading(self, now_s: float) -> GpuReading:
        del now_s
        return GpuReading(models=self.models)


H100 = "NVIDIA H100 80GB HBM3"


def server_facts(*readings: SourceReading, models: tuple[str, ...]) -> dict[str, object]:
    stream = TargetStream("t", Profile(), Limits())
    stream.gpus = Exporter(models).reading

    def read_all(_address: str, _fetch: FetchSettings, _now_s: float) -> Sequence[SourceReading]:
        return readings

    stream.server = ServerWatch("http://127.0.0.1:1", FetchSettings(), read=read_all)
    stream.take(1000.0, PAGES[0], TYPE)
    assert stream.monitor.server is not None
    return {fact.name: (fact.value, fact.source) for fact in stream.monitor.server.at(1000.0).facts}


def test_the_gpus_of_the_exporters_page_are_facts() -> None:
    facts = server_facts(models=(H100, H100))
    assert facts["gpu"] == ("h100-sxm", "gpus")
    assert facts["server_gpus"] == (2, "gpus")
    assert "tensor_parallel" not in facts, "two GPUs may be two stages or two engines"
    assert server_facts(models=(H100,))["tensor_parallel"] == (1, "gpus")


def test_what_the_driver_says_of_the_process_comes_first() -> None:
    driver = SourceReading("gpus", 5.0, {"server_gpus": 1, "gpu": "h200"})
    facts = server_facts(driver, models=(H100, H100))
    assert (facts["server_gpus"], facts["gpu"]) == ((1, "gpus"), ("h200", "gpus"))


def test_gpus_that_differ_have_no_model_and_a_guess_says_nothing() -> None:
    mixed = server_facts(models=(H100, "NVIDIA L4"))
    assert "gpu" not in mixed
    assert mixed["server_gpus"] == (2, "gpus")
    assert "server_gpus" not in server_facts(models=())
