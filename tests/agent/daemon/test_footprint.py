"""What the process takes of the machine."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, resource
from kneewatch.agent import cli
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, hard), hard))
from kneewatch.agent.daemon import supervisor
supervisor.tune_process()
supervisor.tune_process()
soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
print(soft == min(hard, supervisor.OPEN_FILES))
cli.cli = lambda *_, **__: print(gc.get_threshold()[0], gc.isenabled())
cli.main()
"""


def test_connections_and_garbage() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n20000 True\n"


HEAVY = "import sys, kneewatch.agent.daemon.command as _; print(*sys.modules, sep='\\n')"


def test_the_daemon_starts_without_what_only_pages_and_reports_need() -> None:
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "kneewatch.agent.daemon.cycle" in modules
    heavy = {"jinja2", "numpy", "prometheus_client", "requests", "kneewatch.reports.triage.page"}
    assert not modules & (heavy | {"kneewatch.reports.weekly.report"})
