"""The metrics that a vLLM wheel declares, and what a release renamed: `make metric-names`.

    python -m tests.metric_names NEW.whl [OLD.whl]

Prints the names that `collector/names` lacks, and with an old wheel the names that came and went.
Names that vLLM builds at run time are not seen.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from kneewatch.collector.names.vllm_metrics import metric_table

PREFIX = "vllm:"
KINDS = ("counter", "gauge", "histogram")


class Declared(NamedTuple):
    """A metric as a source file declares it; `kind` is "-" where the call does not tell it."""

    name: str
    kind: str
    file: str


def of_wheel(path: Path) -> dict[str, Declared]:
    """The metrics that a wheel's sources declare, by name without prefix."""
    by_name: dict[str, Declared] = {}
    with ZipFile(path) as wheel:
        for file in wheel.namelist():
            if file.startswith("vllm/") and file.endswith(".py"):
                source = wheel.read(file).decode("utf-8", "replace")
                if PREFIX in source:
                    by_name |= {metric.name: metric for metric in of_source(source, file)}
    return by_name


def of_source(source: str, file: str) -> Iterator[Declared]:
    """The metrics that a source file declares: calls whose first argument or `name` is one."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        names = [word.value for word in node.keywords if word.arg == "name"] + node.args[:1]
        called = ast.unparse(node.func).rpartition(".")[2].lower()
        kind = next((kind for kind in KINDS if kind in called), "-")
        for name in names:
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and kind != "-":
                plain = name.value.removeprefix(PREFIX)
                if plain != name.value and plain:
                    yield Declared(plain, kind, file)


def unknown(declared: dict[str, Declared]) -> list[Declared]:
    """Those that collector/names does not know under any name."""
    table = metric_table()
    names = {name for metric in table.metrics.values() for name in metric.names}
    names |= table.samples.keys() | {name.removesuffix("_total") for name in table.samples}
    return [metric for name, metric in sorted(declared.items()) if name not in names]


def main(paths: list[str]) -> None:
    """Print what is new to the table, and what changed since the old wheel."""
    new = of_wheel(Path(paths[0]))
    print(f"{len(new)} metrics declared")
    rows = [("not in collector/names", unknown(new))]
    if len(paths) > 1:
        old = of_wheel(Path(paths[1]))
        rows.append(("new in this release", [new[name] for name in sorted(new.keys() - old)]))
        rows.append(("gone in this release", [old[name] for name in sorted(old.keys() - new)]))
    for title, metrics in rows:
        print(f"\n{title}: {len(metrics)}")
        for metric in metrics:
            print(f"  {metric.name} {metric.kind} {metric.file}")


if __name__ == "__main__":
    main(sys.argv[1:])
