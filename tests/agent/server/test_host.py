"""The host memory of a server's process: its control group, or the one above that binds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kneewatch.agent.server.process import HostReader, control_groups, host_memory

USED, LIMIT = "host_memory_used_bytes", "host_memory_limit_bytes"
POD, CONTAINER = "kubepods/pod1", "kubepods/pod1/vllm"


def node(root: Path, groups: dict[str, tuple[str, str]], path: str = f"/{CONTAINER}") -> None:
    """A node with control groups (limit and use by path), and process 7 in one of them."""
    (root / "proc/7").mkdir(parents=True)
    (root / "proc/7/cgroup").write_text(f"0::{path}\n")
    for group, (limit, used) in groups.items():
        folder = root / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 600\ninactive_file 100\n")


def groups_of_7(root: Path) -> list[Path]:
    """The control groups of process 7."""
    return control_groups(7, cgroups=root / "cgroup", proc=root / "proc")


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param(
            {CONTAINER: ("1000", "700")}, {USED: 600.0, LIMIT: 1000.0}, id="less dropped files"
        ),
        pytest.param(
            {CONTAINER: ("max", "700"), POD: ("2000", "1900")},
            {USED: 1800.0, LIMIT: 2000.0},
            id="the pod's limit binds",
        ),
        pytest.param(
            {CONTAINER: ("1000", "700"), POD: ("2000", "1900")},
            {USED: 1800.0, LIMIT: 2000.0},
            id="the pod has less left",
        ),
        pytest.param({CONTAINER: ("max", "700")}, {}, id="no limit"),
        pytest.param({}, {}, id="nothing can be read"),
    ],
)
def test_memory_is_that_of_the_group_with_the_least_left(
    groups: dict[str, tuple[str, str]], expected: dict[str, float], tmp_path: Path
) -> None:
    node(tmp_path, groups)
    assert host_memory(groups_of_7(tmp_path)) == expected


def test_a_group_outside_its_namespace_is_not_read(tmp_path: Path) -> None:
    node(tmp_path, {"": ("1000", "700")}, path="/../../vllm")
    assert host_memory(groups_of_7(tmp_path)) == {}


PRESSURE, STEAL = "host_cpu_pressure_ratio", "host_cpu_steal_ratio"
SOME = "some avg10=9.00 avg60={} avg300=1.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0 total=0\n"


def cpu_times(root: Path, *, idle: int, steal: int) -> None:
    """The node's CPU times."""
    (root / "proc/stat").write_text(f"cpu  100 0 50 {idle} 0 0 0 {steal} 20 0\ncpu0 1 1 1 1\n")


def test_pressure_is_the_groups_else_the_nodes_and_steal_is_of_the_last_read(
    tmp_path: Path,
) -> None:
    node(tmp_path, {CONTAINER: ("max", "700")})
    (tmp_path / "proc/pressure").mkdir()
    (tmp_path / "proc/pressure/cpu").write_text(SOME.format("12.50"))
    cpu_times(tmp_path, idle=1000, steal=100)
    reader = HostReader(7, cgroups=tmp_path / "cgroup", proc=tmp_path / "proc")
    assert reader.read() == {PRESSURE: 0.125}
    (tmp_path / "cgroup" / CONTAINER / "cpu.pressure").write_text(SOME.format("40.00"))
    cpu_times(tmp_path, idle=1090, steal=110)
    assert reader.read() == {PRESSURE: 0.4, STEAL: pytest.approx(0.1)}


def test_a_node_that_tells_nothing_has_no_signals(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu nonsense\n")
    reader = HostReader(7, cgroups=tmp_path / "cgroup", proc=tmp_path / "proc")
    assert (reader.read(), reader.read()) == ({}, {})
