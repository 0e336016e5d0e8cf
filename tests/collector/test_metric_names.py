"""The names that vLLM's sources declare are found by reading them."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

from tests.metric_names import Declared, of_wheel, unknown

SOURCE = """
class Logger:
    def __init__(self):
        self._gauge_cls(name="vllm:num_requests_running", documentation="x")
        Counter("vllm:num_apples", "x")
        log("vllm:not_a_metric")
"""


def test_declarations_are_found_and_unknown_ones_named(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/v1/metrics/loggers.py", SOURCE)
    file = "vllm/v1/metrics/loggers.py"
    apples = Declared("num_apples", "counter", file)
    running = Declared("num_requests_running", "gauge", file)
    assert of_wheel(wheel) == {"num_apples": apples, "num_requests_running": running}
    assert unknown(of_wheel(wheel)) == [apples]
