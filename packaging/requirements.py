"""Print the requirements of an image: kneewatch's own without the report's, plus those of extras.

    python packaging/requirements.py [EXTRA,...]

`pip install kneewatch` always includes the libraries for reports, because pip cannot leave out
requirements. An image contains them only with the extra `report`. All come with the versions and
hashes of requirements.lock, also those that these need in turn. `make lock` writes that file.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

NEEDED_BY = re.compile(r"(?m)^    #(?: via|  ) +(\S+)")


def requirements(project: dict[str, Any], extras: str) -> list[str]:
    """The requirements with these extras, such as [kubernetes,report].

    Raises:
        KeyError: an extra does not exist.
    """
    optional: dict[str, list[str]] = project["optional-dependencies"]
    wanted = [name for name in extras.strip("[]").replace(" ", "").split(",") if name]
    needed = set(project["dependencies"]) - set(optional["report"])
    return sorted(needed.union(*(optional[name] for name in wanted)))


def locked(needed: list[str], lock: str) -> list[str]:
    """The entries of a lock for these requirements, and for what they need in turn.

    Raises:
        KeyError: the lock lacks a requirement.
    """
    entries = {name_of(entry): entry for entry in re.split(r"(?m)^(?=[a-z])", lock) if entry}
    included = {name_of(line) for line in needed}
    if missing := included - entries.keys():
        raise KeyError(f"not in requirements.lock, run make lock: {', '.join(sorted(missing))}")
    before = 0
    while before != len(included):
        before = len(included)
        included |= {
            name for name, entry in entries.items() if included & set(NEEDED_BY.findall(entry))
        }
    return [entry.rstrip() for name, entry in entries.items() if name in included]


def name_of(requirement: str) -> str:
    """The name of a requirement as it is in a lock."""
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


if __name__ == "__main__":
    with Path("pyproject.toml").open("rb") as file:
        direct = requirements(tomllib.load(file)["project"], "".join(sys.argv[1:]))
    print(*locked(direct, Path("packaging/requirements.lock").read_text()), sep="\n")
