"""The command line on recordings: exit status, streams, formats, flags."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kneewatch.agent.diagnose_command import DEMO_CRITICAL_AFTER_S
from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.captures.format import Entry
from tests.agent.running import ARGV, Document, Ended, Main, capture, environment, run
from tests.reports.schema import problems
from tests.simulator.sglang_cases import recorded as sglang_pages
from tests.simulator.sglang_cases import restored

HEALTHY, CASCADE = capture("healthy_light"), capture("kv_pressure_cascade")
REPLICAS = [capture(f"round_robin_two_replicas.r{number}") for number in (0, 1)]
WINDOW = ("--window", "15s")
JSON = (*WINDOW, "--format", "json")
STEADY_T = 1795219600.0
"""A moment at which healthy_light is under way."""

KEYS = [
    "schema",
    "t",
    "target",
    "engine",
    "model",
    "tier",
    "health",
    "stage",
    "causes",
    "symptoms",
    "findings",
    "recommendations",
    "signals",
    "unknown",
]
STAGE_KEYS = ["number", "name", "since", "forecast_s"]
CAUSE_KEYS = ["id", "confidence", "severity", "since", "summary", "evidence", "against", "guide"]


@pytest.mark.parametrize(
    "captures",
    [
        [CASCADE],
        [capture("restart_mid_run")],
        [capture("lora_thrash")],
        REPLICAS,
    ],
    ids=lambda paths: "+".join(path.name.split(".", 1)[0] for path in paths),
)
def test_every_line_of_a_replay(main: Main, captures: list[Path]) -> None:
    documents = main("replay", *captures, *JSON).documents
    assert [problem for document in documents for problem in problems(document)] == []
    assert all(set(KEYS) <= document.keys() for document in documents)
    assert all(set(STAGE_KEYS) <= document["stage"].keys() for document in documents)
    causes = [cause for document in documents for cause in document["causes"]]
    assert causes
    assert all(set(CAUSE_KEYS) <= cause.keys() for cause in causes)
    times = [document["t"] for document in documents]
    assert times == sorted(times)
    said = [(d["t"], d["target"], d["engine"]) for d in documents]
    scraped = [
        (round(entry.t_s, 3), path.name.removesuffix(".jsonl.gz"), "0")
        for path in captures
        for entry in CaptureReader(path)
    ]
    assert sorted(said) == sorted(scraped)


def test_a_capture_of_sglang_is_replayed(main: Main, tmp_path: Path) -> None:
    path = tmp_path / "sglang.jsonl.gz"
    own = next(each for each in sglang_pages() if each.name == "SGLang: KV too small for the peak")
    with CaptureWriter(path) as out:
        for t_s, page in restored(own.pages):
            out.write(Entry(t_s, page, error="" if page else "gone"))
    documents = main("replay", path, "--format", "json").documents
    assert [problem for document in documents for problem in problems(document)] == []
    assert "kv_pressure" in {d["causes"][0]["id"] for d in documents if d["causes"]}


def test_a_cascade_is_told(main: Main) -> None:
    ended = main("replay", CASCADE, *JSON)
    assert (ended.status, ended.err) == (1, "")
    worst = max(ended.documents, key=lambda document: document["stage"]["number"] or 0)
    assert worst["stage"]["number"] >= 3
    assert worst["causes"][0]["id"] == "kv_pressure"
    assert ended.documents[-1]["causes"] == []


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_a_recording_that_ends_well_begins_with_its_worst_state(main: Main, form: str) -> None:
    ended = main("diagnose", CASCADE, *WINDOW, "--format", form)
    first = " ".join(ended.out.partition("\n\n")[0].split())
    assert (ended.status, ended.err) == (0, "")
    assert re.match(
        r"Worst state: CRITICAL kv_pressure, .*, at [0-9-]+ [0-9:]+ UTC; ended after [0-9:]+ UTC\. "
        r"Below is the last state, at [0-9:]+ UTC\. All states: kneewatch replay \S+$",
        first,
    )


def test_the_worst_state_of_a_recording_is_no_part_of_its_json(main: Main) -> None:
    ended = main("diagnose", CASCADE, *JSON)
    assert [document["health"] for document in ended.documents] == ["ok"]
    assert "Worst state: CRITICAL kv_pressure" in ended.err


def test_a_recording_that_ends_at_its_worst_needs_no_introduction(main: Main) -> None:
    ended = main("diagnose", capture("prefix_off"), *WINDOW)
    assert ended.out.startswith("WARNING")


EXITS: tuple[tuple[tuple[object, ...], int, str], ...] = (
    (("replay", HEALTHY, *WINDOW), 0, ""),
    (("replay", CASCADE, *WINDOW), 1, ""),
    (("diagnose", CASCADE, *WINDOW), 0, ""),
    (("diagnose", capture("prefix_off"), *WINDOW), 1, ""),
    (("replay", "no-such.jsonl.gz"), 2, "no-such.jsonl.gz: no such file"),
    (("diagnose", "no-such.jsonl.gz"), 2, "no-such.jsonl.gz: no such file"),
    (("replay", "empty.jsonl.gz"), 2, "it is empty"),
    (("replay", "other.txt"), 2, "nothing in it can be used"),
    (("replay", "."), 2, "is a directory"),
    (("diagnose", "./"), 2, "is a directory"),
    (("replay", HEALTHY, "--from", "yesterday"), 2, "'yesterday' is neither unix seconds"),
    (("replay", HEALTHY, "--to", "nan"), 2, "'nan' is not a time"),
    (("replay", HEALTHY, "--from", "9", "--to", "5"), 2, "--from 9 is later than --to 5"),
    (("replay", HEALTHY, "--to", "5"), 2, "no entry in the time asked for"),
    (("replay", HEALTHY, "--window", "soon"), 2, "'soon' is not a duration"),
    (("replay", HEALTHY, "--window", "-3s"), 2, "window_s = -3.0 is out of range"),
    (("replay", HEALTHY, "--window", "inf"), 2, "window_s = inf is out of range"),
    (("replay", HEALTHY, "--windows", "15s"), 2, "No such option '--windows'"),
    (("replay",), 2, "Missing argument 'CAPTURES...'"),
    (("replay", HEALTHY, "--format", "xml"), 2, "'xml' is not one of"),
    (("replay", HEALTHY, "--config", "no.toml"), 2, "settings file no.toml: No such file"),
    (("diagnose", HEALTHY, "--gpu-metrics", "host:9400"), 2, "--gpu-metrics needs a server"),
    (("diagnose", HEALTHY, "--gpus", "0"), 2, "flag --gpus: gpus = 0 is out of range"),
    (("unheard-of",), 2, "No such command 'unheard-of'"),
    ((), 2, "Commands:"),
    (("--help",), 0, ""),
    (("--version",), 0, ""),
)


@pytest.mark.parametrize(
    ("args", "status", "says"), EXITS, ids=[" ".join(map(str, row[0]))[-60:] for row in EXITS]
)
def test_exit_status(
    main: Main, tmp_path: Path, args: tuple[object, ...], status: int, says: str
) -> None:
    (tmp_path / "empty.jsonl.gz").touch()
    (tmp_path / "other.txt").write_text("this is\nno capture\n")
    ended = main(*args)
    assert ended.status == status
    assert says in ended.err
    assert bool(ended.err) == bool(says)
    assert bool(ended.out) == (status < 2), "results go to stdout, messages do not"


def test_the_installed_script(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("kneewatch")
    done = subprocess.run(
        [script, "replay", HEALTHY, *WINDOW],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "OK" in done.stdout


def test_results_and_messages_do_not_mix(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(CASCADE.read_bytes()[:-500])
    ended = run("replay", damaged, *JSON, cwd=tmp_path)
    assert ended.status == 1
    assert len(ended.documents) == 96
    (message,) = ended.err.splitlines()
    assert message.startswith(f"kneewatch: {damaged}: 1 damaged entries skipped; the first: ")


def test_damage_in_the_middle_is_told_and_passed_over(main: Main, tmp_path: Path) -> None:
    lines = [
        b'{"t": %d, "status": 200, "body": "%s"}' % (at, b"vllm:num_requests_running 1\\n")
        for at in range(10)
    ]
    lines[3], lines[7] = b'{"t": 3, "bo', b"\x00\xff garbage"
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"\n".join(lines))
    ended = main("replay", path, *JSON)
    assert [document["t"] for document in ended.documents] == [0, 1, 2, 4, 5, 6, 8, 9]
    assert "2 damaged entries skipped; the first: line 4: " in ended.err


def test_a_part_of_a_recording(main: Main) -> None:
    until = STEADY_T + 20
    ended = main("replay", HEALTHY, *JSON, "--from", STEADY_T, "--to", until).documents
    assert len(ended) == 10
    assert all(STEADY_T <= document["t"] <= until for document in ended)


def test_a_time_without_a_zone_is_utc_as_all_that_is_printed(tmp_path: Path) -> None:
    ended = run(
        *("replay", HEALTHY, *JSON, "--from", "2026-11-21T00:06:40"),
        cwd=tmp_path,
        TZ="America/New_York",
    )
    assert ended.documents[0]["t"] == pytest.approx(STEADY_T, abs=2)


@pytest.mark.parametrize("text", ["2026-11-21T00:06:40Z", "2026-11-21 01:06:40+01:00"])
def test_times_with_a_zone(main: Main, text: str) -> None:
    documents = main("replay", HEALTHY, *JSON, "--from", text).documents
    assert documents[0]["t"] == pytest.approx(STEADY_T, abs=2)


def test_captures_of_the_same_name_are_told_apart(main: Main, tmp_path: Path) -> None:
    paths = [tmp_path / folder / "pod.jsonl.gz" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(HEALTHY.read_bytes())
    documents = main("replay", *paths, *JSON).documents
    assert {d["target"] for d in documents} == {str(path.with_name("pod")) for path in paths}
    assert len(documents) == 88


def test_one_capture_that_cannot_be_used_does_not_hide_the_others(
    main: Main, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    ended = main("replay", HEALTHY, empty, *JSON)
    assert ended.status == 2, "a target without data is not healthy"
    assert len(ended.documents) == 44
    assert f"{empty}: nothing in it can be used (it is empty)" in ended.err
    assert main("replay", CASCADE, empty, *JSON).status == 1


def test_a_target_that_ends_unreadable_is_not_healthy(main: Main, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    with path.open("w") as file:
        file.write('{"t": 1, "body": "vllm:num_requests_running 1\\n"}\n{"t": 2, "error": "x"}\n')
    ended = main("diagnose", path, "--format", "json")
    assert ended.documents[0]["health"] == "unknown"
    assert ended.status == 2


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*ARGV, "replay", str(CASCADE), *JSON],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"schema":"kneewatch.diagnosis/1"')
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is Linux's /dev/full")
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_disk_is_no_finding(tmp_path: Path, form: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*ARGV, "replay", str(HEALTHY), *WINDOW, "--format", form],
            cwd=tmp_path,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "kneewatch: cannot write the results: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is Linux's /dev/full")
@pytest.mark.parametrize("arguments", [["replay", "nosuch.jsonl"], ["replay", "--nosuch"]])
def test_a_full_disk_for_messages_is_no_finding(tmp_path: Path, arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*ARGV, *arguments], cwd=tmp_path, env=environment(), stderr=full, check=False
        )
    assert done.returncode == 2


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_closed_stdout_changes_no_status(tmp_path: Path, form: str) -> None:
    argv = [*ARGV, "replay", str(HEALTHY), *WINDOW, "--format", form]
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *argv],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "kneewatch.agent.cli":
            os.kill(os.getpid(), signal.SIGINT)
from kneewatch.agent import main
sys.meta_path.insert(0, Interrupts())
main()
"""


def test_ctrl_c_during_the_first_imports_prints_no_traceback(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", INTERRUPTED_IMPORT]
    done = subprocess.run(argv, cwd=tmp_path, env=environment(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def last(ended: Ended) -> Document:
    """The last document."""
    return ended.documents[-1]


HEAVY = (
    *("apscheduler", "fastapi", "uvicorn", "textual", "pynvml", "sqlite3", "yaml", "jinja2"),
    "kneewatch.diagnose.fleet",
)


def test_no_other_command_pays_for_the_daemon() -> None:
    code = (
        "import sys, kneewatch.agent.cli\n"
        "from kneewatch.agent import diagnose_command\n"
        f"print([module for module in {HEAVY} if module in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


OF_A_DIAGNOSIS = (
    "kneewatch.agent.printing",
    "kneewatch.agent.settings.effective",
    "kneewatch.collector.http",
    "kneewatch.collector.signals",
    "kneewatch.diagnose.causes",
    "kneewatch.rules.library",
)


@pytest.mark.parametrize(
    "args", [["--version"], ["--help"], ["diagnose", "--help"], ["completion", "bash"]]
)
def test_version_and_help_do_not_import_the_diagnosis(args: list[str]) -> None:
    code = (
        "import atexit, sys, kneewatch.agent.cli as cli\n"
        f"imported = lambda: [module for module in {OF_A_DIAGNOSIS} if module in sys.modules]\n"
        "atexit.register(lambda: print(imported(), file=sys.stderr))\n"
        f"cli.main({args!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_no_garbage_is_searched_for_at_exit() -> None:
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > len(gc.get_objects())))\n"
        "from kneewatch.agent.cli import main\n"
        "main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def test_the_first_page_is_scraped_before_the_diagnosis_is_imported() -> None:
    slow = ("kneewatch.agent.printing", "kneewatch.diagnose.causes", "kneewatch.rules.library")
    code = (
        "import sys, kneewatch.agent.cli as cli\n"
        "def on_event(event, _arguments):\n"
        "    if event == 'socket.connect':\n"
        f"        print([name for name in {slow} if name in sys.modules], file=sys.stderr)\n"
        "sys.addaudithook(on_event)\n"
        "cli.main(['diagnose', 'http://127.0.0.1:1'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("[]\n"), done.stderr


def test_a_healthy_server_is_diagnosed_without_levers() -> None:
    unused = {"kneewatch.diagnose.recommend.adviser"}
    code = (
        "import atexit, sys, kneewatch.agent.cli as cli\n"
        f"atexit.register(lambda: print(any(map(sys.modules.get, {unused})), file=sys.stderr))\n"
        f"cli.main({['diagnose', str(HEALTHY), *WINDOW]!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "False\n")


def test_the_demo_turns_critical_when_its_note_says(main: Main) -> None:
    documents = main("demo", "--format", "json").documents
    critical_s = next(document["t"] for document in documents if document["health"] == "critical")
    assert critical_s - documents[0]["t"] == pytest.approx(DEMO_CRITICAL_AFTER_S, abs=5.0)


def test_a_demo(main: Main) -> None:
    ended = main("demo")
    assert (ended.status, ended.err) == (1, "")
    assert "Recording of a real vLLM 0.32.0 server" in ended.out
    assert "kv_pressure" in ended.out
    _, _, end = ended.out.partition("--- at the end")
    assert "\nOK  " in end
    assert last(main("demo", "--format", "json"))["health"] == "ok"


def test_a_demo_takes_a_window(main: Main) -> None:
    windows = [last(main("demo", "--format", "json", *args))["window_s"] for args in ((), WINDOW)]
    assert windows == [15, 15]
    assert last(main("demo", "--format", "json", "--window", "40s"))["window_s"] == 40


def test_markdown(main: Main) -> None:
    ended = main("replay", CASCADE, *WINDOW, "--format", "markdown")
    assert ended.out.startswith("```\n")
    assert ended.out.count("```") == 2
    assert "\n# at its worst, 2026-11-21 " in ended.out
    assert "kv\\_" not in ended.out
    assert "\n### 1. kv_pressure (critical, confidence 0." in ended.out


def test_a_target_of_a_capture_is_judged_against_what_is_promised(main: Main) -> None:
    ended = main("diagnose", CASCADE, *JSON, "--slo-ttft", "500ms", "--slo-itl", "10s")
    (document,) = ended.documents
    assert document["judged_against"] == "targets: TTFT P99 500 ms, ITL P99 10 s"
    assert "TTFT-P99" in {finding["rule"] for finding in document["findings"]}
