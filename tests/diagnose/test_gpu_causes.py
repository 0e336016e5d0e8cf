"""Faulty and throttled GPUs against what only looks like them: from pages, and cause by cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace

from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.exposition import PageParser
from kneewatch.collector.gpu.page import GpuNote
from kneewatch.collector.names.dcgm_fields import Gpus
from kneewatch.diagnose.causes.gpu_faults import ACTIONS, RECOVERY, XIDS
from kneewatch.diagnose.deployment.deployment import Stated
from kneewatch.diagnose.deployment.server_state import XidSeen
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.target_monitor import TargetMonitor
from kneewatch.diagnose.gpu import GpuChoice, GpuMonitor, whole_page
from kneewatch.diagnose.ranking import ranked
from kneewatch.diagnose.values import GpuReading
from kneewatch.diagnose.verdict import Cause
from kneewatch.rules.rule import Severity
from tests.collector.dcgm_pages import Pages, body, labels
from tests.collector.name_pages import recorded
from tests.diagnose.situations import CALM, CONCLUSIVE, HOT, NOW_S, QUEUED, Situation, on_gpu
from tests.recordings import CAPTURES

BLANK = 9223372036854775794
BLANK_32 = 2147483632
B200 = (
    'gpu="0",UUID="GPU-0",device="nvidia0",modelName="NVIDIA B200",Hostname="node-a",'
    'pod="cuda-workload",namespace="dcgm-exporter",container="cuda-workload"'
)
H100 = labels(0, pod="vllm-agg-0", namespace="dynamo-workload")
SLICE = labels(0, mig=2, pod="vllm-mig-0")
LABEL_SETS = pytest.mark.parametrize(
    "who", [pytest.param(who, id=name) for name, who in
            (("H100", H100), ("B200", B200), ("MIG", SLICE))]
)  # fmt: skip
At = Mapping[str, float]


def read(*pages: Mapping[str, At], choose: Callable[[Gpus], GpuChoice] = whole_page) -> (
    GpuReading
):  # fmt: skip
    """What is read of pages 15 s apart, the energy counted on."""
    monitor, page_maker = GpuMonitor(window_s=60, choose=choose), Pages()
    start_s = NOW_S - 15 * (len(pages) - 1)
    for at, page in enumerate(pages):
        fed = {who: {"DEV_TOTAL_ENERGY_CONSUMPTION": at, **own} for who, own in page.items()}
        monitor.take(start_s + 15 * at, page_maker(body(fed)))
    return monitor.reading(NOW_S)


AS_EVER = CALM.but(engine_speed_ratio=1.0)


def causes_of(reading: GpuReading, situation: Situation = AS_EVER) -> dict[str, Cause]:
    """What is concluded of an engine with these GPUs."""
    gpus, lost = tuple(reading.states), tuple(reading.lost)
    beside = replace(situation, gpus=gpus, gpus_guessed=reading.guess, gpus_lost=lost)
    return replace(beside, values={**situation.values, **reading.values}).causes()


@LABEL_SETS
def test_a_healthy_busy_gpu_is_no_cause(who: str) -> None:
    page: Mapping[str, At] = {who: {}}
    assert causes_of(read(*[page] * 6)) == {}


@LABEL_SETS
def test_blank_fields_are_unknown_and_no_cause(who: str) -> None:
    blank: dict[str, float] = dict.fromkeys(
        (
            *("DEV_XID_ERRORS", "DEV_ECC_DBE_VOL_TOTAL", "DEV_ROW_REMAP_FAILURE"),
            *("DEV_ROW_REMAP_PENDING", "DEV_PCIE_REPLAY_COUNTER", "DEV_GPU_RECOVERY_ACTION"),
            *("DEV_CLOCKS_EVENT_REASONS", "DEV_SM_CLOCK", "DEV_MAX_SM_CLOCK"),
            *("DEV_NVLINK_ERROR_DL_CRC", "DEV_THERMAL_VIOLATION", "DEV_RETIRED_PENDING"),
        ),
        float(BLANK),
    )
    reading = read(*[{who: blank}] * 4)
    assert causes_of(reading) == {}
    assert reading.values["gpu_xid_last"] is None
    assert causes_of(read(*[{who: {**blank, "DEV_ROW_REMAP_FAILURE": BLANK_32}}] * 4)) == {}


@LABEL_SETS
def test_an_xid_that_comes_is_a_fault_with_its_meaning_and_its_node(who: str) -> None:
    cause = causes_of(read({who: {}}, {who: {}}, {who: {"DEV_XID_ERRORS": 79}}))["gpu_fault"]
    assert cause.severity == Severity.CRITICAL
    assert "fallen off the bus (XID 79)" in cause.summary
    assert "hardware fault" in cause.summary
    node = "node-a" if who is B200 else "gpu-node-1"
    assert cause.summary.startswith(f"GPU 0 of {node}: ")
    assert cause.lever == f"Drain {node}: reboot the node."


def test_an_xid_that_stood_before_the_watch_is_no_page_for_tonight() -> None:
    cause = causes_of(read(*[{H100: {"DEV_XID_ERRORS": 95}}] * 4))["gpu_fault"]
    assert (cause.severity, cause.apart) == (Severity.WARNING, True)
    assert "since before this watch" in cause.summary


OFF_THE_BUS: At = {"DEV_XID_ERRORS": 79, "DEV_SM_CLOCK": 0, "DEV_POWER_USAGE": 0,
                   "PROF_GR_ENGINE_ACTIVE": 0}  # fmt: skip
EIGHT: Mapping[str, At] = {labels(index): {} for index in range(8)}


def test_a_gpu_that_works_after_an_xid_that_halts_it_has_an_old_mark() -> None:
    sticky = causes_of(read(*[{H100: {"DEV_XID_ERRORS": 79}}] * 4))["gpu_fault"]
    assert (sticky.severity, sticky.apart) == (Severity.INFO, True)
    assert "it works again" in sticky.summary
    assert "reboot" not in sticky.lever
    came: list[Mapping[str, At]] = [{H100: {}}, {H100: {"DEV_XID_ERRORS": 79}}]
    assert causes_of(read(*came))["gpu_fault"].severity == Severity.CRITICAL
    assert causes_of(read(*came, came[-1]))["gpu_fault"].severity == Severity.INFO


@pytest.mark.parametrize("before", [0, 3])
def test_a_gpu_that_is_off_the_bus_is_dead_though_the_code_is_older_than_the_watch(
    before: int,
) -> None:
    pages: list[Mapping[str, At]] = [{H100: {"DEV_XID_ERRORS": 79}}] * before
    pages += [{H100: OFF_THE_BUS}] * 3
    cause = causes_of(read(*pages))["gpu_fault"]
    assert (cause.severity, cause.apart) == (Severity.CRITICAL, False)
    assert "reboot" in cause.lever


def test_a_dead_gpu_of_eight_that_may_be_the_servers_is_a_warning() -> None:
    page = {**EIGHT, labels(3): OFF_THE_BUS}
    cause = causes_of(read(EIGHT, EIGHT, page, page))["gpu_fault"]
    assert (cause.severity, cause.apart) == (Severity.WARNING, True)
    assert cause.summary.startswith("GPU 3 of gpu-node-1")


def test_a_dead_gpu_of_a_page_that_one_pod_has_is_critical() -> None:
    pod: dict[str, At] = {labels(index, pod="vllm-0"): {} for index in range(8)}
    page = {**pod, labels(3, pod="vllm-0"): OFF_THE_BUS}
    assert causes_of(read(pod, pod, page, page))["gpu_fault"].severity == Severity.CRITICAL
    assert read({**EIGHT, labels(0, pod="vllm-0"): {}}).guess


def test_a_gpu_that_leaves_the_page_is_lost() -> None:
    seven = {who: own for who, own in EIGHT.items() if who != labels(3)}
    assert causes_of(read(EIGHT, EIGHT, seven)) == {}, "one reading may lack it"
    cause = causes_of(read(EIGHT, EIGHT, seven, seven))["gpu_fault"]
    assert cause.summary.startswith("GPU 3 of gpu-node-1 is missing from the GPU page")
    assert causes_of(read(EIGHT, seven, seven, EIGHT)) == {}


@pytest.mark.parametrize(("tensor_parallel", "guessed"), [(8, False), (4, True), (None, True)])
def test_gpus_are_no_guess_where_the_server_has_as_many(
    tensor_parallel: int | None, guessed: bool
) -> None:
    stated = Stated(tensor_parallel=tensor_parallel)
    monitor = TargetMonitor("tiny", Profile(stated=stated))
    page = {**EIGHT, labels(3): OFF_THE_BUS}
    body_text = recorded("0.32.0-loaded")
    reading = read(EIGHT, page, page)
    for at_s in (NOW_S, NOW_S + 15):
        (told_now,) = monitor.page(at_s, PageParser().parse(body_text), reading)
    faults = [cause.severity for cause in told_now.causes if cause.id == "gpu_fault"]
    assert told_now.severity == (Severity.WARNING if guessed else Severity.CRITICAL), faults


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 69, 999])
def test_what_a_program_did_to_itself_is_no_fault_of_the_gpu(code: int) -> None:
    assert causes_of(read({H100: {}}, {H100: {"DEV_XID_ERRORS": code}})) == {}


def test_an_xid_hidden_by_the_next_one_is_remembered_for_ten_minutes() -> None:
    def pages(after: int) -> list[Mapping[str, At]]:
        later = [{H100: {"DEV_XID_ERRORS": 45.0}}] * after
        return [{H100: {}}, {H100: {"DEV_XID_ERRORS": 48.0}}, *later]

    assert "XID 48" in causes_of(read(*pages(39)))["gpu_fault"].summary
    assert causes_of(read(*pages(41))) == {}


def test_an_exporter_that_began_anew_ends_the_fault() -> None:
    pages = [{H100: {"DEV_XID_ERRORS": code}} for code in (0.0, 48.0, 0.0)]
    assert causes_of(read(*pages)) == {}


@pytest.mark.parametrize("name", ["EXP_XID_ERRORS_COUNT", "EXP_XID_ERRORS_TOTAL"])
def test_xids_counted_by_number_are_seen_though_the_gauge_shows_another(name: str) -> None:
    monitor, page_maker = GpuMonitor(window_s=60), Pages()
    for at in range(4):
        text = body({H100: {"DEV_XID_ERRORS": 43, "DEV_TOTAL_ENERGY_CONSUMPTION": at}})
        count = at if name.endswith("TOTAL") else int(at == 3)
        lines = "".join(f'DCGM_{name}{{{H100},xid="{xid}"}} {count}\n' for xid in (43, 119))
        monitor.take(NOW_S - 45 + 15 * at, page_maker(text + lines))
    cause = causes_of(monitor.reading(NOW_S))["gpu_fault"]
    assert "XID 119" in cause.summary
    assert len(cause.evidence) == 1


def rising(field: str, per_page: float) -> list[Mapping[str, At]]:
    return [{H100: {field: 50 + per_page * at}} for at in range(5)]


@pytest.mark.parametrize(
    ("pages", "severity", "apart"),
    [
        pytest.param(rising("DEV_ECC_DBE_VOL_TOTAL", 1), Severity.CRITICAL, False, id="ECC rises"),
        pytest.param(rising("DEV_ECC_DBE_VOL_TOTAL", 0), Severity.WARNING, True, id="ECC stands"),
        pytest.param(rising("DEV_NVLINK_ERROR_DL_CRC", 3000), Severity.WARNING, False,
                     id="200 NVLink errors a second, Hopper"),
        pytest.param(rising("DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 3000), Severity.WARNING,
                     False, id="200 NVLink errors a second, Ampere"),
        pytest.param(rising("DEV_NVLINK_RECOVERY_FAILED_TOTAL", 1), Severity.CRITICAL, False,
                     id="NVLink lost, Blackwell"),
        pytest.param(rising("DEV_NVLINK_ERROR_DL_RECOVERY", 1), Severity.WARNING, False,
                     id="NVLink recovered"),
        pytest.param(rising("DEV_PCIE_REPLAY_COUNTER", 3), Severity.WARNING, False,
                     id="12 PCIe replays a minute"),
        pytest.param([{H100: {"DEV_ROW_REMAP_FAILURE": 1.0}}], Severity.WARNING, True,
                     id="remapping failed"),
        pytest.param([{H100: {"DEV_ROW_REMAP_PENDING": 1.0}}], Severity.INFO, True,
                     id="remapping waits for a reset"),
        pytest.param([{H100: {"DEV_GPU_RECOVERY_ACTION": 2.0}}], Severity.CRITICAL, False,
                     id="the driver asks for a reboot"),
    ],
)  # fmt: skip
def test_faults_by_counters_and_flags(
    pages: list[Mapping[str, At]], severity: Severity, *, apart: bool
) -> None:
    cause = causes_of(read(*pages))["gpu_fault"]
    assert (cause.severity, cause.apart) == (severity, apart)


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(rising("DEV_NVLINK_ERROR_DL_CRC", 1200), id="80 NVLink errors a second"),
        pytest.param(rising("DEV_PCIE_REPLAY_COUNTER", 1), id="4 PCIe replays a minute"),
        pytest.param(rising("DEV_ECC_SBE_VOL_TOTAL", 5), id="corrected errors"),
        pytest.param(rising("DEV_CORRECTABLE_REMAPPED_ROWS", 0), id="rows remapped long ago"),
        pytest.param([{H100: {"DEV_FB_USED": 79_900, "DEV_FB_FREE": 100}}], id="memory taken"),
    ],
)
def test_what_every_gpu_does_is_no_fault(pages: list[Mapping[str, At]]) -> None:
    assert causes_of(read(*pages)) == {}


SLOW_PAGE: At = {"DEV_SM_CLOCK": 990, "DEV_MAX_SM_CLOCK": 1980, "DEV_GPU_TEMP": 88}
HEAT, CAP, BRAKE, SETTING, IDLE = 0x20, 0x4, 0x80, 0x2, 0x1


@LABEL_SETS
@pytest.mark.parametrize(
    ("bits", "said", "severity"),
    [
        (HEAT, "by heat", Severity.WARNING),
        (BRAKE, "its power supply", Severity.WARNING),
        (CAP, "its power limit", Severity.INFO),
        (SETTING, "setting", Severity.INFO),
    ],
)
def test_clocks_held_down_are_told_with_the_reason(
    who: str, bits: int, said: str, severity: Severity
) -> None:
    page = {who: {**SLOW_PAGE, "DEV_CLOCKS_EVENT_REASONS": bits}}
    reading = read(*[page] * 5)
    cause = causes_of(reading)["gpu_throttled"]
    assert said in cause.summary
    assert "50% of its clock" in cause.summary
    assert cause.severity == severity, "what somebody may have set is a note"
    slower = causes_of(reading, CALM.but(engine_speed_ratio=0.65))["gpu_throttled"]
    assert slower.severity == Severity.WARNING
    assert slower.lever.startswith("On" if severity == Severity.INFO else "Drain")
    hidden = causes_of(reading, AS_EVER.but(itl_mean_drift_ratio=7.0))["gpu_throttled"]
    assert (hidden.severity, hidden.apart) == (Severity.WARNING, False), "a batch 7x as large"


@pytest.mark.parametrize(
    ("clocks", "speed", "told"),
    [((2400, 700), 0.5, True), ((2400, 700), 1.0, False), ((2400, 2300), 0.5, False)],
)
def test_a_board_outside_the_table_is_compared_with_its_own_clock_while_it_is_slow(
    clocks: tuple[int, int], speed: float, told: bool
) -> None:
    gb10 = labels(0).replace("NVIDIA H100 80GB HBM3", "NVIDIA GB10")
    page: At = {"DEV_MAX_SM_CLOCK": BLANK, "DEV_POWER_USAGE": 40}
    before, now = ({gb10: {**page, "DEV_SM_CLOCK": clock}} for clock in clocks)
    pages = *[before] * 5, *[now] * 14
    causes = causes_of(read(*pages), CALM.but(engine_speed_ratio=speed))
    assert ("gpu_throttled" in causes) == told
    if told:
        assert "29% of its clock" in causes["gpu_throttled"].summary


L4 = labels(0).replace("NVIDIA H100 80GB HBM3", "NVIDIA L4")


@pytest.mark.parametrize(
    ("who", "own", "throttled"),
    [
        pytest.param(L4, {"DEV_SM_CLOCK": 990, "DEV_POWER_USAGE": 71}, False, id="L4 at its 72 W"),
        pytest.param(L4, {"DEV_SM_CLOCK": 990, "DEV_POWER_USAGE": 40}, True, id="L4 at 40 W"),
        pytest.param(
            H100,
            {"DEV_SM_CLOCK": 1200, "DEV_POWER_USAGE": 698, "DEV_ENFORCED_POWER_LIMIT": 700},
            False,
            id="H100 at its 700 W",
        ),
        pytest.param(
            H100,
            {"DEV_SM_CLOCK": 1200, "DEV_POWER_USAGE": 399, "DEV_ENFORCED_POWER_LIMIT": 400},
            True,
            id="H100 with its limit lowered",
        ),
        pytest.param(
            H100,
            {"DEV_SM_CLOCK": 1200, "DEV_POWER_USAGE": 500, "DEV_POWER_MGMT_LIMIT_DEF": 500,
             "DEV_CLOCKS_EVENT_REASONS": CAP},
            False,
            id="a board delivered with less",
        ),
    ],
)  # fmt: skip
def test_the_power_limit_that_a_board_came_with_is_no_fault(
    who: str, own: At, *, throttled: bool
) -> None:
    assert ("gpu_throttled" in causes_of(read(*[{who: own}] * 5))) == throttled


def test_counted_seconds_serve_where_there_are_no_bits() -> None:
    pages = [{H100: {**SLOW_PAGE, "DEV_THERMAL_VIOLATION": 9e9 * at}} for at in range(5)]
    cause = causes_of(read(*pages))["gpu_throttled"]
    assert "by heat" in cause.summary
    assert next(e.value for e in cause.evidence if "thermal" in e.signal) == pytest.approx(0.6)


def test_the_names_of_newer_exporters_say_the_same() -> None:
    page = {
        B200: {
            "DEV_SM_CLOCK_HERTZ": 982.5e6,
            "DEV_SM_MAX_CLOCK_HERTZ": 1965e6,
            "DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL": 0.0,
            "DEV_XID_ERROR": 0.0,
        }
    }
    pages = [
        {
            B200: {
                **page[B200],
                "DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL": 7.5 * at,
                "DEV_XID_ERROR": 149.0 if at == 4 else 0.0,
            }
        }
        for at in range(5)
    ]
    causes = causes_of(read(*pages))
    assert "throttled to 50% of its clock by heat" in causes["gpu_throttled"].summary
    assert "NVLink error (NETIR) (XID 149)" in causes["gpu_fault"].summary


def test_the_default_fields_alone_show_low_clocks() -> None:
    cause = causes_of(read(*[{H100: {"DEV_SM_CLOCK": 1005}}] * 5))["gpu_throttled"]
    assert "51% of its clock for an unknown reason" in cause.summary
    unknown = H100.replace("NVIDIA H100 80GB HBM3", "NVIDIA X1")
    assert causes_of(read(*[{unknown: {"DEV_SM_CLOCK": 1005}}] * 5)) == {}, (
        "nothing says what is full"
    )


@pytest.mark.parametrize(
    ("clock", "throttled"),
    [(900.0, True), (1400.0, True), (1600.0, False)],
    ids=["half", "four fifths", "nine tenths"],
)
def test_one_of_eight_is_found_by_its_peers(clock: float, *, throttled: bool) -> None:
    whose = [labels(at).replace("H100 80GB HBM3", "X1") for at in range(8)]
    page = {who: {"DEV_SM_CLOCK": clock if at == 5 else 1755.0} for at, who in enumerate(whose)}

    def mine(gpus: Gpus) -> GpuChoice:
        return GpuChoice(gpus, "by index")

    causes = causes_of(read(*[page] * 5, choose=mine))
    assert ("gpu_throttled" in causes) == throttled
    share = f"throttled to {100 * clock / 1755:.0f}%"
    said = [cause.summary for cause in causes.values()]
    assert all(summary.startswith(f"GPU 5 of gpu-node-1 is {share}") for summary in said)


@pytest.mark.parametrize(
    "own",
    [
        pytest.param({"DEV_SM_CLOCK": 345, "PROF_GR_ENGINE_ACTIVE": 0.02}, id="idle, by its use"),
        pytest.param(
            {"DEV_SM_CLOCK": 345, "DEV_CLOCKS_EVENT_REASONS": IDLE}, id="idle, by its bit"
        ),
        pytest.param(
            {"DEV_SM_CLOCK": 1530, "DEV_CLOCKS_EVENT_REASONS": CAP, "DEV_POWER_USAGE": 699},
            id="at the power limit under full load",
        ),
        pytest.param({"DEV_SM_CLOCK": 1980, "DEV_POWER_VIOLATION": 7}, id="full speed"),
    ],
)
def test_what_a_healthy_gpu_does_is_no_throttling(own: At) -> None:
    page = {H100: {"DEV_MAX_SM_CLOCK": 1980, **own}}
    assert causes_of(read(*[page] * 5)) == {}


def test_a_moment_of_low_clocks_is_no_throttling() -> None:
    pages = [{H100: {"DEV_SM_CLOCK": clock}} for clock in (1755, 900, 900, 1755, 900)]
    assert causes_of(read(*pages)) == {}


def test_heat_without_loss_is_a_note() -> None:
    page = {H100: {**SLOW_PAGE, "DEV_SM_CLOCK": 1900, "DEV_CLOCKS_EVENT_REASONS": HEAT}}
    slower = CALM.but(engine_speed_ratio=0.8)
    note = causes_of(read(*[page] * 5), slower)["gpu_throttled"]
    assert (note.severity, note.apart) == (Severity.INFO, True), "it explains no queue"


def test_of_gpus_that_may_be_anothers_nothing_pages() -> None:
    page: dict[str, At] = {
        labels(0): {},
        labels(1): {**SLOW_PAGE, "DEV_CLOCKS_EVENT_REASONS": HEAT},
    }
    later = {**page, labels(0): {"DEV_XID_ERRORS": 79}}
    causes = causes_of(read(page, page, page, later))
    assert {cause.severity for cause in causes.values()} == {Severity.INFO}
    assert set(causes) == {"gpu_fault", "gpu_throttled"}
    assert any("guess" in against.text for against in causes["gpu_fault"].against)


def test_of_gpus_that_may_be_anothers_nothing_follows() -> None:
    dead = replace(on_gpu(HOT, XidSeen(79, NOW_S - 5)), is_awake=True)
    causes = replace(QUEUED, gpus=(dead,), gpus_guessed=True).causes()
    assert (causes["gpu_fault"].apart, causes["gpu_throttled"].apart) == (True, True)
    ranked_causes = ranked(list(causes.values()))
    assert [(c.id, c.severity) for c in ranked_causes[:1]] == [
        ("queue_saturation", Severity.WARNING)
    ]
    assert {c.severity for c in ranked_causes[1:]} == {Severity.INFO}


@pytest.mark.parametrize(
    ("stalled_s", "ago_s", "is_ours"),
    [
        pytest.param(90.0, 75.0, True, id="an engine that stopped with the XID"),
        pytest.param(90.0, 400.0, False, id="an engine that went on for minutes after it"),
        pytest.param(15.0, 15.0, False, id="an engine that may only compute a long prompt"),
        pytest.param(0.0, 75.0, False, id="an engine that goes on"),
    ],
)
def test_a_gpu_whose_fault_stopped_the_engine_is_no_guess(
    stalled_s: float, ago_s: float, *, is_ours: bool
) -> None:
    stopped = replace(
        QUEUED, gpus=(on_gpu({}, XidSeen(48, NOW_S - ago_s)),), gpus_guessed=True,
        streaks_s={**QUEUED.streaks_s, "stalled": stalled_s},
    )  # fmt: skip
    first = ranked(list(stopped.causes().values()))[0]
    assert (first.id == "gpu_fault" and first.severity is Severity.CRITICAL) is is_ours


def test_a_gpu_that_no_longer_answers_is_a_fault() -> None:
    monitor, page_maker = GpuMonitor(window_s=60), Pages()
    note = GpuNote("GPU 1 (GPU-b) has fallen off the bus (XID 79 in the kernel log)", "GPU-b", "1",
                   lost=True)  # fmt: skip
    monitor.take(NOW_S, page_maker(body({H100: {}}), note))
    cause = causes_of(monitor.reading(NOW_S))["gpu_fault"]
    assert cause.severity == Severity.CRITICAL
    assert "GPU 1 (GPU-b) has fallen off the bus" in cause.summary


PRESSED = replace(CONCLUSIVE["kv_pressure"], worst=Severity.CRITICAL).but(
    engine_speed_ratio=0.4, waiting_by_capacity=20.0
)


def first(situation: Situation) -> Cause:
    return ranked(list(situation.causes().values()))[0]


def test_a_slow_gpu_stands_for_what_it_makes() -> None:
    assert (first(PRESSED).id, first(PRESSED).explains) == ("slow_steps", ("kv_pressure",))
    hot = first(replace(PRESSED, gpus=(on_gpu(HOT),)))
    assert (hot.id, hot.severity) == ("gpu_throttled", Severity.CRITICAL)
    assert hot.explains == ("kv_pressure", "slow_steps")
    dead = replace(PRESSED, gpus=(on_gpu({}, XidSeen(79, NOW_S - 5)),))
    assert (first(dead).id, first(dead).explains) == ("gpu_fault", ("kv_pressure", "slow_steps"))


def test_a_gpu_that_slows_nothing_explains_nothing() -> None:
    as_ever = replace(PRESSED.but(engine_speed_ratio=1.0), gpus=(on_gpu(HOT),))
    assert first(as_ever).id == "kv_pressure"
    standing = replace(QUEUED, gpus=(on_gpu({"gpu_row_remap_failures": 1.0}),))
    assert {cause.id for cause in ranked(list(standing.causes().values()))} == {
        *("gpu_fault", "queue_saturation")
    }


def test_no_gpu_source_is_no_verdict() -> None:
    assert replace(CALM, gpus=(on_gpu(dict.fromkeys(HOT)),)).causes() == {}


def test_the_table_of_xids_is_whole() -> None:
    assert all(xid.meaning and xid.action in ACTIONS for xid in XIDS.values())
    for action in (*ACTIONS.values(), *RECOVERY.values()):
        assert not action.endswith(".")
        assert not action[0].isupper()


def replayed(*, gpu: At | None) -> set[str]:
    """The first causes at warning or worse over the recorded cascade, its GPU as told from when
    the first request is preempted; as healthy before."""
    monitor = TargetMonitor("tiny", Profile(window_s=20.0))
    gpus, parser, page_maker = GpuMonitor(window_s=20.0), PageParser(), Pages()
    first_ids: set[str] = set()
    hot = False
    for at, entry in enumerate(CaptureReader(CAPTURES / "kv_pressure_cascade.jsonl.gz")):
        if entry.body is None:
            continue
        own: At = gpu if hot and gpu else {}
        energy = {"DEV_TOTAL_ENERGY_CONSUMPTION": at, "DEV_FB_USED": 79_000, "DEV_FB_FREE": 500}
        gpus.take(entry.t_s, page_maker(body({H100: {**energy, **own}})))
        diagnoses = monitor.page(entry.t_s, parser.parse(entry.body), gpus.reading(entry.t_s))
        for diagnosis in diagnoses:
            hot = hot or bool(diagnosis.values.get("preemption_per_s"))
            if diagnosis.causes and diagnosis.causes[0].severity >= Severity.WARNING:
                first_ids.add(diagnosis.causes[0].id)
    return first_ids


def test_on_a_recorded_cascade_a_hot_gpu_is_told_and_a_full_one_is_not() -> None:
    assert replayed(gpu=None) == {"kv_pressure"}
    assert replayed(gpu={**SLOW_PAGE, "DEV_CLOCKS_EVENT_REASONS": HEAT}) == {"gpu_throttled"}
    assert replayed(gpu={"DEV_XID_ERRORS": 95}) == {"gpu_fault"}


def test_gpus_that_are_all_gone_are_a_fault_until_one_answers_again() -> None:
    monitor, page_maker = GpuMonitor(window_s=60), Pages()
    monitor.take(NOW_S - 60, page_maker(body({H100: {}})))
    monitor.failed("GPU 0 has fallen off the bus", lost=True)
    assert causes_of(monitor.reading(NOW_S))["gpu_fault"].severity == Severity.CRITICAL
    monitor.failed("http://node:9400/metrics: connection refused")
    assert causes_of(monitor.reading(NOW_S)) == {}, "a source that is down says nothing of a GPU"
    monitor.take(NOW_S, page_maker(body({H100: {}})))
    assert causes_of(monitor.reading(NOW_S)) == {}
