"""Print the requirements of an image: those of kneewatch without the report's, and those of extras.

    python packaging/requirements.py [EXTRA,...]

pip cannot install a distribution without some of its requirements. `pip install kneewatch` has
the report's; an image has them with the extra `report` only.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: str) -> list[str]:
    """The requirements for a list of extras such as [kubernetes,report].

    Raises:
        KeyError: there is no such extra.
    """
    optional: dict[str, list[str]] = project["optional-dependencies"]
    wanted = [name for name in extras.strip("[]").replace(" ", "").split(",") if name]
    needed = set(project["dependencies"]) - set(optional["report"])
    return sorted(needed.union(*(optional[name] for name in wanted)))


if __name__ == "__main__":
    with Path("pyproject.toml").open("rb") as file:
        print(*requirements(tomllib.load(file)["project"], "".join(sys.argv[1:])), sep="\n")
