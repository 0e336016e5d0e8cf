"""Print the requirements of an image: kneewatch's own without the report's, plus those of extras.

    python packaging/requirements.py [EXTRA,...]

`pip install kneewatch` always includes the libraries for reports, because pip cannot leave out
requirements. An image contains them only with the extra `report`.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: str) -> list[str]:
    """The requirements with these extras, such as [kubernetes,report].

    Raises:
        KeyError: an extra does not exist.
    """
    optional: dict[str, list[str]] = project["optional-dependencies"]
    wanted = [name for name in extras.strip("[]").replace(" ", "").split(",") if name]
    needed = set(project["dependencies"]) - set(optional["report"])
    return sorted(needed.union(*(optional[name] for name in wanted)))


if __name__ == "__main__":
    with Path("pyproject.toml").open("rb") as file:
        print(*requirements(tomllib.load(file)["project"], "".join(sys.argv[1:])), sep="\n")
