"""The peers that `make bench` and `make accuracy` measure beside kneewatch."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

from tests.pages_server import pages_server

ENVIRONMENT = Path(__file__).parent.parent / "build" / "peers"
DOCTOR = "vllm-doctor==0.6.0"

DOCTOR_CHECKS: dict[str, frozenset[str]] = {
    "kv_pressure": frozenset({"kv_cache_pressure", "preemption_pressure"}),
    "queue_saturation": frozenset({"queue_pressure", "queue_latency"}),
    "prefix_cache_off": frozenset({"prefix_cache_efficiency"}),
    "prefix_reuse_lost": frozenset({"prefix_cache_efficiency"}),
    "prefix_churn": frozenset({"prefix_cache_efficiency"}),
    "prefill_interference": frozenset({"tpot_bottleneck"}),
}
"""Which of its checks mean our cause; it has none for speculation, adapters, or a target down."""


def vllm_doctor() -> Path | None:
    """The peer's program, installed in an environment of its own; None where it cannot be had."""
    program = ENVIRONMENT / "bin" / "vllm-doctor"
    if not program.exists():
        venv.create(ENVIRONMENT, with_pip=True)
        install = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", DOCTOR]
        if subprocess.run(install, capture_output=True, check=False).returncode:
            return None
    return program


def doctor_checks(program: Path, capture: Path, page: int) -> list[str]:
    """Ids of the checks that it fires at warning or worse on one recorded page."""
    with pages_server(capture, page, page + 1) as url:
        argv = [str(program), "diagnose", url, "-o", "json"]
        said = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    try:
        checks = json.loads(said.stdout)["checks"]
    except (ValueError, KeyError):
        print(f"vllm-doctor: {said.stderr.strip()[:200]}", file=sys.stderr)
        return []
    fired = [row for row in checks if row.get("finding")]
    return [r["id"] for r in fired if r["finding"]["severity"] in ("warning", "critical")]
