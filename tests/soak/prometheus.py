"""A real Prometheus that scrapes the same pages."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def prometheus(urls: Sequence[str], *, interval_s: float, port: int = 0) -> Generator[int | None]:
    """Its pid while it runs, on loopback; None where it is not installed."""
    if shutil.which("prometheus") is None:
        yield None
        return
    jobs = [
        {
            "job_name": "soak",
            "scrape_interval": f"{interval_s:.0f}s",
            "scrape_timeout": f"{interval_s:.0f}s",
            "static_configs": [{"targets": [url.removeprefix("http://") for url in urls]}],
        }
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(json.dumps({"scrape_configs": jobs}))  # JSON is YAML
        argv = [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]  # fmt: skip
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
            try:
                yield process.pid
            finally:
                process.kill()
