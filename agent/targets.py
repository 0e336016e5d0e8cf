"""What is watched: a target with its name, address and effective settings. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kneewatch.agent.settings import Settings
from kneewatch.agent.source import capture_name
from kneewatch.collector.base import CollectError, SettingsError
from kneewatch.collector.http.address import METRICS_PATH, shown_url

LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """One target as configured. `name` is unique, and stands in URLs and in the store.

    `address` is a server's URL, or the path of a capture that is played as if it were live.
    `labels` are the user's (tier, pod, node, namespace ...), `settings` the effective ones with
    what is set for this target alone, `gpu_metrics` its DCGM exporter page where one is stated,
    `origin` where the target was configured.
    """

    name: str
    address: str
    labels: Mapping[str, str]
    settings: Settings
    gpu_metrics: str | None
    origin: str

    @property
    def played(self) -> bool:
        """Whether it is a capture."""
        return "://" not in self.address

    @property
    def shown_address(self) -> str:
        """The address without credentials."""
        return self.address if self.played else shown_url(self.address)

    @property
    def awaited(self) -> str:
        """What is waited for before its first scrape, in words."""
        if self.played:
            return f"the first page of {self.address} is waited for"
        most_s = self.settings["fetch.connect_timeout_s"] + self.settings["fetch.read_timeout_s"]
        return f"{self.shown_address} is waited for, up to {most_s:g} s"


def target_name(target: str) -> str:
    """A server's name in diagnoses: its URL without credentials and without the usual path.

    Raises:
        CollectError: the target cannot be an HTTP(S) URL.
    """
    return shown_url(target).removesuffix(METRICS_PATH)


def spec(
    address: str,
    settings: Settings,
    origin: str,
    *,
    played: bool = False,
    name: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> TargetSpec:
    """A target; without a name of its own it gets its address's. `played`: it is a capture.

    Raises:
        SettingsError: the address, the name or a label cannot be one; the message says where it
            was configured.
    """
    try:
        usual = capture_name(address) if played else target_name(address)
    except CollectError as error:
        raise SettingsError(f"{origin}: {error}; {error.hint}") from error
    made = name if name is not None else usual
    if not made.strip() or not made.isprintable() or len(made) > LONGEST_NAME:
        raise SettingsError(
            f"{origin}: {made!r} is no name: write 1 to {LONGEST_NAME} printable characters"
        )
    for label in labels or {}:
        if not LABEL.fullmatch(label):
            raise SettingsError(
                f"{origin}: {label!r} is no label name: letters, digits and _, no digit first"
            )
    if not played and "://" not in address:
        address = f"http://{address.strip()}"
    return TargetSpec(made, address, dict(labels or {}), settings, settings["gpu_metrics"], origin)


def check_unique(specs: Sequence[TargetSpec]) -> None:
    """That no two targets have the same name.

    Raises:
        SettingsError: two have; the message names both places.
    """
    first: dict[str, TargetSpec] = {}
    for one in specs:
        other = first.setdefault(one.name, one)
        if other is not one:
            raise SettingsError(
                f"two targets are called {one.name!r}: {other.origin} and {one.origin}; "
                "leave one out, or give it another name"
            )
