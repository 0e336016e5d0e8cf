"""GPU fields on pages of the DCGM exporter, in the shapes that it and Prometheus give them."""

from __future__ import annotations

import pytest

from kneewatch.collector.errors import CollectError
from kneewatch.collector.exposition import parse
from kneewatch.collector.names.dcgm_fields import (
    GpuFields,
    GpuKey,
    Gpus,
    Workload,
    field_table,
    resolve_gpus,
)
from kneewatch.collector.page import Page
from tests.effort import calls

TABLE = field_table()
DEFAULT = [field.name for field in TABLE.fields.values() if field.csv == "default"]
BLANK = "9223372036854775794"
# As published for an H100 with driver 580 (all series of the page carry these labels).
H100 = (
    'gpu="0",UUID="GPU-c4529c8d-69c4-b61d-e0bc-7b2460096005",pci_bus_id="00000000:53:00.0",'
    'device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="gpu-node-1",'
    'DCGM_FI_DRIVER_VERSION="580.105.08",container="main",namespace="dynamo-workload",'
    'pod="vllm-agg-0-vllmdecodeworker-s65j5",pod_uid=""'
)


def gpu(index: int, *, host: str = 'Hostname="node-a"', more: str = "") -> str:
    """The labels of one of several GPUs."""
    return (
        f'gpu="{index}",UUID="GPU-{index:04}",device="nvidia{index}",modelName="NVIDIA B200",'
        f"{host}{',' if more else ''}{more}"
    )


def page_of(*rows: tuple[str, str, object]) -> str:
    return "".join(f"{name}{{{labels}}} {value}\n" for name, labels, value in rows)


def resolved(body: str) -> tuple[Page, Gpus]:
    page = parse(body)
    return page, resolve_gpus(page.layout)


def value(page: Page, board: GpuFields, field: str) -> float | None:
    (slot,) = board.fields[field]
    return slot.value(page.values)


def test_the_published_h100_page() -> None:
    body = page_of(
        ("DCGM_FI_DEV_GPU_TEMP", H100, 30),
        ("DCGM_FI_DEV_POWER_USAGE", H100, 113.611),
        ("DCGM_FI_DEV_SM_CLOCK", H100, 1980),
        ("DCGM_FI_DEV_FB_USED", H100, 73000),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", H100, 2147483640),
        ("DCGM_FI_DEV_GPU_UTIL", H100, 87),
        ("DCGM_FI_PROF_DRAM_ACTIVE", H100, 0.691),
        ("DCGM_FI_DEV_POWER_VIOLATION", H100, 2_500_000_000),
        ("DCGM_FI_DEV_MEMORY_TEMP", H100, BLANK),
    )
    page, gpus = resolved(body)
    (board,) = gpus
    uuid = "GPU-c4529c8d-69c4-b61d-e0bc-7b2460096005"
    assert board.key == GpuKey(uuid, "0", "NVIDIA H100 80GB HBM3", "gpu-node-1")
    assert board.workloads == (
        Workload("dynamo-workload", "vllm-agg-0-vllmdecodeworker-s65j5", "main"),
    )
    assert {field: value(page, board, field) for field in board.fields} == {
        "DCGM_FI_DEV_GPU_TEMP": 30,
        "DCGM_FI_DEV_POWER_USAGE": 113.611,
        "DCGM_FI_DEV_SM_CLOCK": 1.98e9,
        "DCGM_FI_DEV_FB_USED": 73000 * 2**20,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": pytest.approx(2147483.64),
        "DCGM_FI_DEV_GPU_UTIL": pytest.approx(0.87),
        "DCGM_FI_PROF_DRAM_ACTIVE": 0.691,
        "DCGM_FI_DEV_POWER_VIOLATION": pytest.approx(2.5),
        "DCGM_FI_DEV_MEMORY_TEMP": None,
    }


# Names and units of exporter 4.9


@pytest.mark.parametrize(
    ("old", "old_value", "new", "new_value"),
    [
        ("DCGM_FI_DEV_SM_CLOCK", 1980, "DCGM_FI_DEV_SM_CLOCK_HERTZ", 1.98e9),
        ("DCGM_FI_DEV_MEM_CLOCK", 2619, "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", 2.619e9),
        ("DCGM_FI_DEV_GPU_UTIL", 50, "DCGM_FI_DEV_GPU_UTIL_RATIO", 0.5),
        ("DCGM_FI_DEV_FB_FREE", 2, "DCGM_FI_DEV_FB_FREE_BYTES", 2097152),
        (
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
            5000,
            "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL",
            5,
        ),
        ("DCGM_FI_DEV_POWER_USAGE", 700, "DCGM_FI_DEV_BOARD_POWER_WATTS", 700),
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0.9, "DCGM_FI_PROF_TENSOR_UTIL_RATIO", 0.9),
        ("DCGM_FI_DEV_XID_ERRORS", 79, "DCGM_FI_DEV_XID_ERROR", 79),
    ],
)
def test_both_names_of_a_field_give_one_value_in_one_unit(
    old: str, old_value: float, new: str, new_value: float
) -> None:
    for name, shown in ((old, old_value), (new, new_value)):
        page, gpus = resolved(page_of((name, gpu(0), shown)))
        assert value(page, gpus[0], old) == pytest.approx(new_value)
    page, gpus = resolved(page_of((old, gpu(0), old_value), (new, gpu(0), 2 * new_value)))
    assert value(page, gpus[0], old) == pytest.approx(2 * new_value)


def test_a_whole_page_of_newer_names_lacks_nothing() -> None:
    newest = {name.field.name: spelling for spelling, name in TABLE.names.items() if name.rank == 0}
    labels = 'gpu="0",uuid="GPU-0",modelName="NVIDIA B200",hostname="a"'
    _, gpus = resolved(page_of(*((newest[name], labels, 1) for name in DEFAULT)))
    (board,) = gpus
    assert board.fields.keys() == set(DEFAULT)
    assert (board.key.uuid, board.key.hostname) == ("GPU-0", "a")


# Labels


def test_gpus_are_sorted_by_host_and_number() -> None:
    rows = [("DCGM_FI_DEV_GPU_TEMP", gpu(index), index) for index in (10, 2, 0)]
    rows.append(("DCGM_FI_DEV_GPU_TEMP", gpu(1, host='hostname="node-0"'), 1))
    page, gpus = resolved(page_of(*rows))
    places = [(board.key.hostname, board.key.index) for board in gpus]
    assert places == [("node-0", "1"), ("node-a", "0"), ("node-a", "2"), ("node-a", "10")]
    assert [value(page, board, "DCGM_FI_DEV_GPU_TEMP") for board in gpus] == [1, 0, 2, 10]


def test_nvlink_series_join_their_gpu_under_other_label_names() -> None:
    name = "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"
    by_uuid = 'nvlink="{}",gpu_uuid="GPU-0000",model_name="NVIDIA B200",hostname="node-a"'
    rows = [
        ("DCGM_FI_DEV_GPU_TEMP", gpu(0), 50),
        (name, by_uuid.format(0), 3),
        (name, by_uuid.format(1), 4),
        (name, 'nvlink="2",gpu="0",hostname="node-a"', 5),
        ("DCGM_FI_DEV_NVSWITCH_LINK_STATUS", 'nvlink="0",nvswitch="1",hostname="node-a"', 1),
        (name, 'nvlink="9",nvswitch="1",hostname="node-a"', 6),
    ]
    page, gpus = resolved(page_of(*rows))
    (board,) = gpus
    assert board.key == GpuKey("GPU-0000", "0", "NVIDIA B200", "node-a")
    value_of_link = {
        dict(slot.labels)["nvlink"]: slot.value(page.values) for slot in board.fields[name]
    }
    assert value_of_link == {"0": 3, "1": 4, "2": 5}


def test_mig_instances_are_kept_apart_from_each_other_and_the_gpu() -> None:
    mig = 'GPU_I_PROFILE="2g.20gb",GPU_I_ID="{}"'
    rows = [("DCGM_FI_DEV_FB_USED", gpu(0, more=mig.format(i)), i) for i in (13, 3, 5)]
    page, gpus = resolved(page_of(*rows, ("DCGM_FI_DEV_GPU_TEMP", gpu(0), 60)))
    assert [board.key.mig for board in gpus] == ["", "3", "5", "13"]
    assert value(page, gpus[1], "DCGM_FI_DEV_FB_USED") == 3 * 2**20
    assert "DCGM_FI_DEV_FB_USED" not in gpus[0].fields


def test_labels_that_prometheus_moved_are_the_workload() -> None:
    own = 'namespace="gpu-operator",pod="nvidia-dcgm-exporter-x",container="exporter"'
    theirs = 'exported_namespace="llm",exported_pod="vllm-0",exported_container="main"'
    rows = [
        ("DCGM_FI_DEV_GPU_TEMP", gpu(0, more=f"{own},{theirs}"), 1),
        ("DCGM_FI_DEV_GPU_TEMP", gpu(1, more=own), 2),
    ]
    _, gpus = resolved(page_of(*rows))
    busy, idle = gpus
    assert busy.workloads == (Workload("llm", "vllm-0", "main"),)
    assert idle.workloads == ()


def test_a_gpu_that_pods_share_has_one_value_and_all_pods() -> None:
    pods = ['namespace="llm",container="main",pod="b"', 'namespace="llm",container="main",pod="a"']
    page, gpus = resolved(
        page_of(*(("DCGM_FI_DEV_GPU_UTIL", gpu(0, more=pod), 40) for pod in pods))
    )
    (board,) = gpus
    assert value(page, board, "DCGM_FI_DEV_GPU_UTIL") == pytest.approx(0.4)
    assert [workload.pod for workload in board.workloads] == ["a", "b"]


def test_own_labels_of_a_field_are_kept() -> None:
    xid = 'err_code="79",err_msg="GPU has fallen off the bus, and more"'
    rows = [
        ("DCGM_FI_DEV_XID_ERRORS", gpu(0, more=xid), 79),
        ("DCGM_EXP_CLOCK_EVENTS_COUNT", gpu(0, more='clock_event="sw_thermal"'), 2),
        ("DCGM_EXP_CLOCK_EVENTS_COUNT", gpu(0, more='clock_event="power_cap"'), 3),
    ]
    page, gpus = resolved(page_of(*rows))
    (board,) = gpus
    assert dict(board.fields["DCGM_FI_DEV_XID_ERRORS"][0].labels)["err_code"] == "79"
    events = {
        dict(slot.labels)["clock_event"]: slot.value(page.values)
        for slot in board.fields["DCGM_EXP_CLOCK_EVENTS_COUNT"]
    }
    assert events == {"sw_thermal": 2, "power_cap": 3}


def test_gpus_without_uuid_are_known_by_host_and_number() -> None:
    rows = [("DCGM_FI_DEV_GPU_TEMP", f'gpu="0",Hostname="{host}"', 1) for host in "ab"]
    _, gpus = resolved(page_of(*rows))
    assert [board.key.hostname for board in gpus] == ["a", "b"]


def test_repeated_lines_count_once() -> None:
    page, gpus = resolved(2 * page_of(("DCGM_FI_DEV_GPU_TEMP", gpu(0), 30)))
    assert page.layout.repeated == {1}
    (slot,) = gpus[0].fields["DCGM_FI_DEV_GPU_TEMP"]
    assert slot.position == 0


@pytest.mark.parametrize(
    "body", ["", "vllm:num_requests_running 1\n", 'dcgm_sm_clock{gpu="0"} 1\n']
)
def test_a_page_without_dcgm_fields_is_an_error(body: str) -> None:
    with pytest.raises(CollectError) as caught:
        resolve_gpus(parse(body).layout)
    assert caught.value.kind == "not_metrics"
    assert "dcgm-exporter" in caught.value.hint


def test_the_work_grows_with_the_number_of_gpus_alone() -> None:
    def work(gpus: int) -> int:
        body = page_of(*((name, gpu(index), 1) for name in TABLE.fields for index in range(gpus)))
        resolved_page, layout = parse(body).layout, parse(body).layout
        assert len(resolve_gpus(resolved_page)) == gpus
        return calls(lambda: resolve_gpus(layout))

    assert work(8) < 10 * work(1)


def test_gpus_without_end_are_refused_at_once() -> None:
    body = "".join(f'DCGM_FI_DEV_GPU_UTIL{{gpu="{n}",UUID="GPU-{n}"}} 1\n' for n in range(5_000))
    with pytest.raises(CollectError, match="more than 512 GPUs") as caught:
        resolve_gpus(parse(body).layout)
    assert caught.value.kind == "too_large"
