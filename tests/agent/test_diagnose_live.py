"""`diagnose` against real servers on 127.0.0.1 that serve recorded pages in turn."""

from __future__ import annotations

import os
import re
import signal
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from tests.agent.running import Document, Ended, Main, bodies, ended, in_turn, start, wait_for
from tests.clock import Clock
from tests.collector.oracle import LOOPBACK, free_port
from tests.collector.servers import Start, always, answer, chunked

WATCH = ("--for", "4s", "--interval", "0.5s")
SHORT = ("--for", "0.6s", "--interval", "0.15s", "--format", "json")
PAGES = bodies("healthy_light", 10, 30)

pytestmark = pytest.mark.usefixtures("clock")
H100 = (
    'gpu="0",UUID="GPU-c4529c8d-69c4-b61d-e0bc-7b2460096005",pci_bus_id="00000000:53:00.0",'
    'device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="gpu-node-1",'
    'DCGM_FI_DRIVER_VERSION="580.105.08",container="main",namespace="dynamo-workload",'
    'pod="vllm-agg-0-vllmdecodeworker-s65j5",pod_uid=""'
)
GPU_FIELDS = {
    "DEV_SM_CLOCK": 1980,
    "DEV_GPU_TEMP": 61,
    "DEV_POWER_USAGE": 412.5,
    "DEV_FB_USED": 70_000,
    "DEV_FB_FREE": 10_000,
    "DEV_XID_ERRORS": 0,
    "PROF_GR_ENGINE_ACTIVE": 0.87,
    "PROF_DRAM_ACTIVE": 0.42,
}
GPU_PAGE = "".join(
    f"# TYPE DCGM_FI_{name} gauge\nDCGM_FI_{name}{{{H100}}} {value}\n"
    for name, value in GPU_FIELDS.items()
).encode()


def unused_url() -> str:
    """A URL where nothing listens."""
    return f"http://{LOOPBACK}:{free_port()}/metrics"


def only(watch: Ended) -> Document:
    """The one document on stdout."""
    (document,) = watch.documents
    return document


def test_a_healthy_server(serving: Start, main: Main) -> None:
    watch = main("diagnose", serving(in_turn(PAGES)).url, *WATCH)
    assert (watch.status, watch.err) == (0, "")
    assert re.match(r"OK  http://127\.0\.0\.1:\d+ \(model tiny, engine 0\)\n", watch.out)


def test_a_cascade(serving: Start, main: Main) -> None:
    server = serving(in_turn(bodies("kv_pressure_cascade", 40)))
    watch = main("diagnose", server.url, *WATCH)
    assert (watch.status, watch.err) == (1, "")
    lines = watch.out.splitlines()
    assert re.match(r"(WARNING|CRITICAL)  kv_pressure  http://127", lines[0])
    assert lines[1] == "what changed since quiet times is unknown"
    assert re.match(r"KV cache: stage [234] of 4, \w+ for \d s, since [\d:]+ UTC", lines[2])
    cause = next(at for at, line in enumerate(lines) if line.startswith("1. kv_pressure"))
    assert len([line for line in lines[cause:] if line.startswith("   + ")]) in (2, 3)
    assert "   do first: " in watch.out


def test_a_server_that_dies_midway(serving: Start, main: Main, clock: Clock) -> None:
    server = serving(in_turn(PAGES))
    clock.after(1.0, server.close)
    watch = main("diagnose", server.url, "--for", "3s", "--interval", "0.25s", "--format", "json")
    document = only(watch)
    assert watch.status == 1
    assert [cause["id"] for cause in document["causes"]] == ["target_down"]
    assert document["causes"][0]["severity"] == "critical"
    assert "connection refused" in document["causes"][0]["summary"]
    assert document["model"] == "tiny", "what was learnt before is kept"


def test_gpu_signals_and_a_token_that_goes_to_the_target_alone(
    serving: Start, main: Main, tmp_path: Path
) -> None:
    target, gpus = serving(in_turn(PAGES)), serving(always(answer(GPU_PAGE)))
    token = tmp_path / "token"
    token.write_text("secret-of-the-target\n")
    flags = ("--gpu-metrics", gpus.url, "--bearer-token-file", str(token))
    document = only(main("diagnose", target.url, *SHORT, *flags))
    wanted = {
        "gpu_engine_active_ratio": 0.87,
        "gpu_dram_active_ratio": 0.42,
        "gpu_temperature_c": 61,
        "gpu_power_watts": 412.5,
        "gpu_sm_clock_hz": 1.98e9,
        "gpu_memory_used_ratio": 0.875,
        "gpu_xid_last": 0,
    }
    assert {key: document["signals"][key] for key in wanted} == wanted
    assert not [line for line in document["unknown"] if line.startswith("gpu_*")]
    finding = next(f for f in document["findings"] if f["rule"] == "GPU-MEMORY-HIGH")
    assert (finding["state"], finding["value"]) == ("ok", 0.875)
    assert b"Authorization: Bearer secret-of-the-target" in target.requests[0]
    assert b"GET /metrics" in gpus.requests[0]
    assert b"Authorization" not in b"".join(gpus.requests)


def test_a_dead_gpu_source_is_said_and_stops_nothing(serving: Start, main: Main) -> None:
    url = serving(in_turn(PAGES)).url
    watch = main("diagnose", url, *SHORT, "--gpu-metrics", unused_url())
    document = only(watch)
    assert (watch.status, document["health"]) == (0, "ok")
    (line,) = [line for line in document["unknown"] if line.startswith("gpu_")]
    assert re.fullmatch(r"gpu_\*: http://127.0.0.1:\d+/metrics: connection refused", line)


def test_a_password_is_not_shown(serving: Start, main: Main) -> None:
    url = serving(in_turn(PAGES)).url.replace("//", "//me:sesame@")
    watch = main("diagnose", url, *SHORT)
    assert watch.status == 0
    assert "sesame" not in watch.out + watch.err
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", only(watch)["target"])


def test_markdown(serving: Start, main: Main) -> None:
    watch = main("diagnose", serving(in_turn(PAGES)).url, *SHORT[:4], "--format", "markdown")
    assert watch.status == 0
    assert watch.out.startswith("## OK http://127.0.0.1:")


HTML = answer(b"<!doctype html><title>login</title>", "Content-Type: text/html")
OTHER_PAGE = answer(b"# TYPE up gauge\nup 1\n" * 30)
FAILURES = {
    "401": (answer(b"", status="401 Unauthorized"), "answered 401", "token"),
    "403": (answer(b"", status="403 Forbidden"), "answered 403", "token"),
    "404": (answer(b"", status="404 Not Found"), "answered 404", "path"),
    "500": (answer(b"", status="500 Oops"), "answered 500", "log"),
    "HTML": (HTML, "a web page, not metrics", "port"),
    "empty": (answer(b""), "the page is empty", "port"),
    "no vLLM": (OTHER_PAGE, "no vLLM metrics on this page", ""),
    "kneewatch itself": (
        answer(b"kneewatch_stage 0\n"),
        "kneewatch itself",
        "curl http://127.0.0.1:",
    ),
    "no exposition": (answer(b"hello there, world\n"), "line 1", "metrics page"),
    "stops": (answer(b"x" * 500)[:-100], "stops midway", "restart"),
    "chunk stops": (chunked(b"# TYPE a gauge\n", end=False), "stops midway", "restart"),
}


def assert_told(done: Ended, url: str, says: str, hint: str) -> None:
    """The failure is told once, with the address and what to try; nothing is on stdout."""
    assert (done.status, done.out) == (2, "")
    message, tries = done.err.splitlines()
    assert message.startswith("kneewatch: ")
    assert url in message
    assert says in message
    assert tries.startswith("  try: ")
    assert hint in tries


@pytest.mark.parametrize("kind", FAILURES)
def test_a_server_without_a_page(serving: Start, main: Main, clock: Clock, kind: str) -> None:
    data, says, hint = FAILURES[kind]
    server = serving(always(data, keep=False))
    since_s = clock.now_s
    done = main("diagnose", server.url, "--for", "20s")
    assert clock.now_s == since_s, "it waits for no second scrape"
    assert_told(done, server.url, says, hint)


def test_a_server_that_refuses(main: Main) -> None:
    url = unused_url()
    assert_told(main("diagnose", url), url, "connection refused", "check that vLLM runs")


def test_a_name_that_cannot_be_resolved(main: Main) -> None:
    done = main("diagnose", "no..such.host:8000")
    assert_told(done, "http://no..such.host:8000/metrics", "cannot be resolved", "spelling")


def test_tls_where_none_is_spoken(main: Main) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        url = f"https://127.0.0.1:{server.server_address[1]}/metrics"
        done = main("diagnose", url)
        server.shutdown()
        thread.join()
    assert_told(done, url, "does not speak TLS", "http://")


class Quiet(BaseHTTPRequestHandler):
    """What comes as TLS is no HTTP, and is answered so."""

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def test_tls_with_an_unknown_authority(serving: Start, main: Main, tmp_path: Path) -> None:
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.tempfile() as pem:
        tls.load_cert_chain(pem)
    url = serving(in_turn(PAGES), tls).url
    assert_told(main("diagnose", url), url, "unknown CA", "ca_file")
    trusted = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(trusted))
    brief = ("--for", "0.2s", "--interval", "0.2s")
    assert main("diagnose", url, *brief, "--ca-file", trusted).status == 0
    assert main("diagnose", url, *brief, "--insecure").status == 0


@pytest.mark.parametrize("target", ["", "ftp://host/metrics", "host:99999", "a b"])
def test_what_is_no_target(main: Main, target: str) -> None:
    done = main("diagnose", target)
    assert (done.status, done.out) == (2, "")
    assert "not a target" in done.err
    assert "  try: " in done.err


def test_one_get_a_scrape(serving: Start, main: Main) -> None:
    server = serving(in_turn(PAGES))
    main("diagnose", f"127.0.0.1:{server.port}", "--for", "0.5s", "--interval", "0.1s")
    assert len(server.requests) == 6
    assert server.connections == 1


def test_a_first_page_that_comes_only_after_failures_is_not_waited_for(
    serving: Start, main: Main
) -> None:
    server = serving(always(answer(b"", status="503 Service Unavailable")))
    done = main("diagnose", server.url, "--for", "20s")
    assert_told(done, server.url, "answered 503", "try again later")
    assert len(server.requests) == 1


def test_a_watch_of_two_scrapes(serving: Start, main: Main) -> None:
    server = serving(in_turn(PAGES))
    done = main("diagnose", server.url, "--for", "0.5s", "--interval", "1m", "--format", "json")
    assert (done.status, len(server.requests)) == (0, 2)
    assert done.documents[0]["signals"]["generation_tokens_per_s"] > 0


def test_engines_of_one_server_have_a_document_each(serving: Start, main: Main) -> None:
    server = serving(in_turn([two_engines(page) for page in PAGES]))
    done = main("diagnose", server.url, *SHORT)
    assert [document["engine"] for document in done.documents] == ["0", "1"]


def two_engines(page: bytes) -> bytes:
    """The page with every series of engine 0 for an engine 1 as well."""
    return re.sub(
        rb'(?m)^(vllm:.*)engine="0"(.*)$', rb'\1engine="0"\2' + b"\n" + rb'\1engine="1"\2', page
    )


def test_a_page_steers_no_terminal(serving: Start, main: Main) -> None:
    evil = [page.replace(b'"tiny"', b'"ti\x1b[2Jny"') for page in PAGES]
    done = main("diagnose", serving(in_turn(evil)).url, *SHORT[:4])
    assert done.status == 0
    assert "model ti?[2Jny" in done.out
    assert "\x1b" not in done.out + done.err
    assert os.linesep in done.out


def test_ctrl_c_tells_what_was_seen_until_then(serving: Start, tmp_path: Path) -> None:
    server = serving(in_turn(PAGES))
    process = start("diagnose", server.url, "--interval", "0.1s", cwd=tmp_path)
    wait_for(server, 3)
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.status == 0
    assert done.out.startswith("OK")
    assert "interrupted: diagnosis of the scrapes so far" in done.err


def test_a_watch_that_is_too_short_to_tell_a_hang_ends_in_time_and_is_unknown(
    serving: Start, main: Main
) -> None:
    hangs = serving(in_turn(bodies("kv_pressure_cascade", 20, 21)))
    ended = main("diagnose", hangs.url, "--for", "6s", "--interval", "1s")
    assert len(hangs.requests) == 7
    assert ended.status == 2
    assert ended.out.startswith("Unknown: no token for 5 s while requests are in flight.")
    assert "--for 32s decides" in ended.out
    assert "UNKNOWN" in ended.out
    (document,) = main(
        "diagnose", hangs.url, "--for", "6s", "--interval", "1s", "--format", "json"
    ).documents
    assert document["health"] == "unknown"
    assert "engine_stalled: no token for 5 s; --for 32s decides" in document["unknown"]


def test_a_watch_that_is_long_enough_tells_a_hang(serving: Start, main: Main) -> None:
    hangs = serving(in_turn(bodies("kv_pressure_cascade", 20, 21)))
    ended = main("diagnose", hangs.url, "--for", "32s", "--interval", "1s", "--format", "json")
    (document,) = ended.documents
    assert (document["health"], document["causes"][0]["id"]) == ("critical", "engine_stalled")


def test_an_engine_that_stops_midway_is_unknown_too(serving: Start, main: Main) -> None:
    stops = serving(in_turn(bodies("kv_pressure_cascade", 17, 21)))
    ended = main("diagnose", stops.url, "--for", "20s", "--interval", "1s", "--format", "json")
    assert ended.status == 2
    assert ended.documents[0]["health"] == "unknown"


def test_an_engine_that_works_slowly_is_not_unknown(serving: Start, main: Main) -> None:
    serves = serving(in_turn(bodies("healthy_light", 10, 60)))
    ended = main("diagnose", serves.url, "--for", "4s", "--interval", "0.5s", "--format", "json")
    assert ended.status == 0
    assert ended.documents[0]["health"] == "ok"
