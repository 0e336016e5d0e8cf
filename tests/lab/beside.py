"""Whether kneewatch, installed beside vLLM, changes a version there: `python -m tests.lab.beside`.

Asks pip's resolver in the lab's environment (tests/lab/install.sh), which stays as it is. Ends with
1 and the distributions that would change.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAB = Path(os.environ.get("VLLM_LAB_DIR", Path.home() / ".cache" / "kneewatch-lab"))


def by_name(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Versions by distribution, but for kneewatch's own."""
    versions = {re.sub(r"[-_.]+", "-", row["name"]).lower(): row["version"] for row in rows}
    return {name: version for name, version in versions.items() if name != "kneewatch"}


def main() -> int:
    """Print how many distributions would be new, and which would change."""
    pip = [str(LAB / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    listed = subprocess.run([*pip, "list", "--format=json"], capture_output=True, check=True)
    wanted = [f"{ROOT}[kubernetes,mcp]", "--dry-run", "--quiet", "--report", "-"]
    planned = subprocess.run([*pip, "install", *wanted], capture_output=True, check=True)
    there = by_name(json.loads(listed.stdout))
    install = by_name([entry["metadata"] for entry in json.loads(planned.stdout)["install"]])
    changed = [f"{name} {there[name]} -> {install[name]}" for name in install if name in there]
    print(
        f"{len(there)} distributions beside vLLM, {len(install)} new, changed: {changed or 'none'}"
    )
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
