"""The peers that `make bench` and `make accuracy` measure beside kneewatch."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.pages_server import pages_server

ENVIRONMENT = Path(__file__).parent.parent / "build" / "peers"
DOCTOR = "vllm-doctor==0.6.0"
AICONFIGURATOR = "aiconfigurator==0.12.0"

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
    return _installed(DOCTOR)


def _installed(requirement: str) -> Path | None:
    """The program of a peer in the peers' environment; None where it cannot be had."""
    program = ENVIRONMENT / "bin" / requirement.split("==")[0]
    if program.exists():
        return program
    if not ENVIRONMENT.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    install = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", requirement]
    if subprocess.run(install, capture_output=True, check=False).returncode:
        return None
    return program


_ESTIMATE = """
import importlib.util, json, logging, pathlib, sys, tempfile
logging.disable(logging.CRITICAL)
from aiconfigurator.cli.api import cli_estimate
package = pathlib.Path(importlib.util.find_spec("aiconfigurator_core").origin).parent
for line in sys.stdin:
    arguments, figures = json.loads(line), None
    config = arguments.pop("config")
    name = arguments["model_path"].replace("/", "--") + "_config.json"
    folder = tempfile.mkdtemp()
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    own = (package / "model_configs" / name).exists()
    # It may refer to a configuration of its own that it downloads.
    for path in [arguments["model_path"], folder] if own else [folder]:
        try:
            estimate = cli_estimate(**{**arguments, "model_path": path}, backend_name="vllm")
            figures = [estimate.tokens_per_second, estimate.tpot / 1e3, estimate.ttft / 1e3]
            break
        except Exception:
            pass
    print(json.dumps(figures), flush=True)
"""


Estimate = tuple[float, float, float]


def aiconfigurator_estimates(
    arguments: Sequence[Mapping[str, object]],
) -> list[Estimate | None]:
    """AIConfigurator's output tokens/s, TPOT and TTFT in seconds for each set of arguments of its
    `cli_estimate`; None where it does not support a model or has no measured tables for it.

    `config` among them is read where it has no configuration of its own. Empty where it cannot be
    installed (0.9 GB). It takes seconds for each, so they are kept beside it.
    """
    if _installed(AICONFIGURATOR) is None:
        return []
    kept = ENVIRONMENT / "estimates.json"
    known: dict[str, Estimate | None] = json.loads(kept.read_text()) if kept.exists() else {}
    asked = [json.dumps(each, sort_keys=True) for each in arguments]
    new = [each for each in dict.fromkeys(asked) if each not in known]
    if new:
        known.update(zip(new, _estimated(new), strict=False))
        kept.write_text(json.dumps(known))
    return [known.get(each) for each in asked]


def _estimated(arguments: Sequence[str]) -> list[Estimate | None]:
    """Its answers to lines of arguments."""
    finished = subprocess.run(
        [str(ENVIRONMENT / "bin" / "python"), "-W", "ignore", "-c", _ESTIMATE],
        input="\n".join(arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    lines = finished.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith(("[", "null"))]


def doctor_checks(program: Path, capture: Path, page: int) -> list[str]:
    """Ids of the checks that it fires at warning or worse on one recorded page."""
    with pages_server(capture, page, page + 1) as url:
        argv = [str(program), "diagnose", url, "-o", "json"]
        finished = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    try:
        checks = json.loads(finished.stdout)["checks"]
    except (ValueError, KeyError):
        print(f"vllm-doctor: {finished.stderr.strip()[:200]}", file=sys.stderr)
        return []
    fired = [row for row in checks if row.get("finding")]
    return [r["id"] for r in fired if r["finding"]["severity"] in ("warning", "critical")]
