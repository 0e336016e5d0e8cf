"""The dashboards against Grafana's own types: `python -m tests.dashboards.grafana_types 11.0.0`.

Each argument is a version of the package @grafana/schema, which Grafana releases with its own
versions. Needs npm and a registry of packages; TypeScript's compiler is the judge. Prints what it
finds, and ends with 1 for that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BOARDS = Path(__file__).parents[2] / "dashboards" / "generated" / "grafana"
PLUGINS = {
    "timeseries": "TimeSeries",
    "stat": "Stat",
    "table": "Table",
    "state-timeline": "StateTimeline",
}
"""Panels by type, with the name of their file of types."""

# A JSON text is no member of an enum to TypeScript, but it is of the enum's values.
VALUES = """
type Values<T> = T extends string ? `${T}` : T extends number ? number
  : T extends (infer U)[] ? Values<U>[] : T extends object ? {[K in keyof T]: Values<T[K]>} : T;
"""


def source(types: str) -> str:
    """A program that is right if every dashboard, and every panel's options, fit the types."""
    lines = [VALUES, f"import type {{ Dashboard }} from '{types}/veneer/dashboard.types';"]
    for kind, name in PLUGINS.items():
        at = f"{types}/raw/composable/{name.lower()}/panelcfg/x/{name}PanelCfg_types.gen"
        lines.append(f"import type * as {module(kind)} from '{at}';")
    for number, path in enumerate(sorted(BOARDS.glob("*.json"))):
        board: dict[str, Any] = json.loads(path.read_text())
        lines.append(f"const b{number}: Values<Dashboard> = {json.dumps(board)};")
        for place, panel in enumerate(board["panels"]):
            if panel["type"] == "row":
                continue
            # Partial: Grafana fills in the defaults of what is not saved.
            parts = [("Options", panel["options"])]
            if custom := panel["fieldConfig"]["defaults"].get("custom"):
                parts.append(("FieldConfig", custom))
            for part, value in parts:
                constant = (
                    f"b{number}_{place}_{part}: Values<Partial<{module(panel['type'])}.{part}>>"
                )
                lines.append(f"const {constant} = {json.dumps(value)};")
    return "\n".join(lines) + "\n"


def module(kind: str) -> str:
    """The name under which a panel's types are imported."""
    return kind.replace("-", "")


def check(version: str, folder: Path) -> str:
    """What TypeScript's compiler reports; empty if nothing."""
    npm = ["npm", "install", "--silent", "--no-save", "--prefix", str(folder)]
    subprocess.run([*npm, f"@grafana/schema@{version}", "typescript@5"], check=True)
    package = folder / "node_modules" / "@grafana" / "schema" / "dist"
    types = package / "types" if (package / "types").is_dir() else package / "esm"
    program = folder / "dashboards.ts"
    program.write_text(source(str(types)))
    tsc = [str(folder / "node_modules" / ".bin" / "tsc"), "--noEmit", "--strict", "--skipLibCheck"]
    options = ["--target", "es2020", "--module", "esnext", "--moduleResolution", "node"]
    ran = subprocess.run(
        [*tsc, *options, str(program)], capture_output=True, text=True, check=False
    )
    return ran.stdout + ran.stderr


def main(versions: list[str]) -> int:
    """Check against each version; 1 if one does not fit."""
    failed = 0
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            mistakes = check(version, Path(folder))
        failed |= bool(mistakes)
        print(f"@grafana/schema {version}: {mistakes or 'every dashboard fits'}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
