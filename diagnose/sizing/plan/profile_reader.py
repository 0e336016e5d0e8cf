"""A workload profile out of its TOML text, read strictly. Pure.

What the keys mean is in docs/plan.md and in the packaged example_profile.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from typing import Any, cast

from kneewatch.collector.base import SettingsError
from kneewatch.diagnose.sizing.plan.profile import (
    Deployment,
    Hosting,
    Lengths,
    Lora,
    Prefix,
    Routing,
    SessionShape,
    Slo,
    Speculation,
    TierProfile,
    Traffic,
    WorkloadProfile,
)
from kneewatch.diagnose.sizing.plan.profile_keys import DEPLOYMENT, LENGTHS, TABLES, TIER
from kneewatch.diagnose.sizing.plan.profile_table import known_keys, read_table

_NEEDED = ("lengths", "traffic", "deployment")
_SHARE_TOLERANCE = 1e-6


def example_profile() -> str:
    """The text of the packaged example."""
    folder = resources.files("kneewatch.diagnose.sizing.plan")
    return folder.joinpath("example_profile.toml").read_text("utf-8")


Stated = Mapping[str, Mapping[str, object]]
"""Values by table and key that win over a profile's own."""


def read_profile(
    text: str, *, origin: str = "profile", stated: Stated | None = None
) -> WorkloadProfile:
    """The profile that a TOML text holds, with what is stated beside it laid over it.

    Raises:
        SettingsError: it is no TOML, or a key or value cannot be; `origin` and the key are named.
    """
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise SettingsError(f"{origin}: {exc}") from exc
    except RecursionError as exc:
        raise SettingsError(f"{origin}: is nested too deeply") from exc
    for place, values in (stated or {}).items():
        own: object = document.get(place, {})
        if isinstance(own, dict):
            document[place] = {**cast("dict[str, object]", own), **values}
    known_keys(document, known=("name", *TABLES, "tiers"), place="", origin=origin)
    for place in _NEEDED:
        if place not in document:
            raise SettingsError(f"{origin}: the table [{place}] is missing")
    tables = {
        place: read_table(document[place], keys, place=place, origin=origin)
        for place, keys in TABLES.items()
        if place in document
    }
    lengths = _lengths(tables["lengths"], place="lengths", origin=origin)
    deployment = Deployment(**tables["deployment"])
    routing = Routing(**tables.get("routing", {}))
    profile = WorkloadProfile(
        name=_name(document, origin),
        lengths=lengths,
        traffic=Traffic(**tables["traffic"]),
        deployment=deployment,
        slo=Slo(**tables.get("slo", {})),
        hosting=Hosting(**tables.get("hosting", {})),
        routing=routing,
        prefix=Prefix(**tables["prefix"]) if "prefix" in tables else None,
        lora=Lora(**tables["lora"]) if "lora" in tables else None,
        speculation=Speculation(**tables["speculation"]) if "speculation" in tables else None,
        session=SessionShape(**tables["session"]) if "session" in tables else None,
    )
    tiers = _tiers(document.get("tiers", []), profile, origin)
    _check_shares(tiers, routing.method, origin)
    _check_traffic(profile.traffic, origin)
    _check_prefix(profile, origin)
    return replace(profile, tiers=tiers)


def _name(document: Mapping[str, object], origin: str) -> str:
    name = document.get("name", "workload")
    if not isinstance(name, str) or not name.strip():
        raise SettingsError(f"{origin}: name is {name!r}; it must be a text that is not empty")
    return name


def _lengths(values: Mapping[str, Any], *, place: str, origin: str) -> Lengths:
    lengths = Lengths(**values)
    for side in ("input", "output"):
        names = [f"{side}_{level}_tokens" for level in ("p50", "p95", "p99")]
        p50, p95, p99 = (cast("int", getattr(lengths, name)) for name in names)
        for name, low, high in ((names[1], p50, p95), (names[2], p95, p99)):
            if high < low:
                raise SettingsError(
                    f"{origin}: {place}.{name} is {high}, below the lower percentile's {low}"
                )
    return lengths


def _tiers(listed: object, profile: WorkloadProfile, origin: str) -> tuple[TierProfile, ...]:
    if not isinstance(listed, list):
        raise SettingsError(f"{origin}: tiers is {listed!r}; write each as a table [[tiers]]")
    tiers: list[TierProfile] = []
    for number, given in enumerate(cast("list[object]", listed), start=1):
        place = f"tiers[{number}]"
        if not isinstance(given, Mapping):
            raise SettingsError(f"{origin}: {place} is {given!r}; it must be a table")
        table = dict(cast("Mapping[str, object]", given))
        lengths = profile.lengths
        own = table.pop("lengths", None)
        if own is not None:
            inner = f"{place}.lengths"
            values = read_table(own, LENGTHS, place=inner, origin=origin)
            lengths = _lengths(values, place=inner, origin=origin)
        keys = (*TIER, *(replace(key, needed=False) for key in DEPLOYMENT))
        found = read_table(table, keys, place=place, origin=origin)
        tier = {key.name: found.pop(key.name) for key in TIER if key.name in found}
        found.setdefault("model", profile.deployment.model)
        found.setdefault("gpus", profile.deployment.gpus)
        tiers.append(TierProfile(**tier, deployment=Deployment(**found), lengths=lengths))
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{origin}: two tiers are called {name!r}")
    return tuple(tiers)


def _check_shares(tiers: tuple[TierProfile, ...], method: str, origin: str) -> None:
    if not tiers:
        return
    if len(tiers) == 1:
        raise SettingsError(f"{origin}: one tier is no tiers; state two or more, or [deployment]")
    wanted, other = "share_ratio", "escalation_ratio"
    if method == "cascade":
        wanted, other = other, wanted
    for number, tier in enumerate(tiers, start=1):
        place = f"{origin}: tiers[{number}]"
        if getattr(tier, other) is not None:
            raise SettingsError(f"{place}.{other} means nothing with routing.method {method!r}")
        last = method == "cascade" and number == len(tiers)
        if last and tier.escalation_ratio is not None:
            raise SettingsError(f"{place}.escalation_ratio: the last tier hands on to none")
        if not last and getattr(tier, wanted) is None:
            raise SettingsError(f"{place}.{wanted} is missing")
    if method != "cascade":
        total = sum(tier.share_ratio or 0.0 for tier in tiers)
        if abs(total - 1) > _SHARE_TOLERANCE:
            raise SettingsError(f"{origin}: tiers: share_ratio adds up to {total:g}, not 1")


def _check_traffic(traffic: Traffic, origin: str) -> None:
    stated = [traffic.batch_requests is not None, traffic.batch_window_s is not None]
    place = f"{origin}: traffic"
    if any(stated) and traffic.kind == "online":
        raise SettingsError(f"{place}.batch_requests and batch_window_s go with kind 'batch'")
    if any(stated) and not all(stated):
        missing = "batch_window_s" if stated[0] else "batch_requests"
        raise SettingsError(f"{place}.{missing} is missing: the two go together")
    if traffic.peak_requests_per_s is None and not all(stated):
        raise SettingsError(
            f"{place}.peak_requests_per_s is missing"
            + ("; or state batch_requests and batch_window_s" if traffic.kind == "batch" else "")
        )
    if traffic.peak_requests_per_s is not None and all(stated):
        raise SettingsError(
            f"{place}.peak_requests_per_s is stated beside batch_requests: which one counts?"
        )
    rates = (
        ("lowest_requests_per_s", traffic.lowest_requests_per_s),
        ("average_requests_per_s", traffic.average_requests_per_s),
        ("peak_requests_per_s", traffic.peak_requests_per_s),
    )
    known = [(name, value) for name, value in rates if value is not None]
    for (low_name, low), (high_name, high) in pairwise(known):
        if high < low:
            raise SettingsError(f"{place}.{high_name} is {high:g}, below {low_name} of {low:g}")


def _check_prefix(profile: WorkloadProfile, origin: str) -> None:
    prefix, lora = profile.prefix, profile.lora
    if prefix is not None and prefix.shared_tokens > profile.lengths.mean_input_tokens:
        raise SettingsError(
            f"{origin}: prefix.shared_tokens is {prefix.shared_tokens}, above the mean input of "
            f"{profile.lengths.mean_input_tokens:g} tokens"
        )
    if lora is not None and (lora.max_lora_rank is None) == (not lora.adapter_bytes):
        raise SettingsError(
            f"{origin}: lora: state max_lora_rank, or adapter_bytes of adapters that are known"
        )
    if lora is not None and lora.max_simultaneous_adapters > lora.adapters:
        raise SettingsError(
            f"{origin}: lora.max_simultaneous_adapters is {lora.max_simultaneous_adapters}, above "
            f"the {lora.adapters} adapters that there are"
        )
