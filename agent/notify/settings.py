"""The `[[notify]]` tables of the settings as receivers. Pure: no secret is read here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kneewatch.agent.notify.keys import BY_NAME, EMAIL, KEYS, KINDS
from kneewatch.agent.notify.receiver import Mail, Receiver, Secret, Web
from kneewatch.agent.settings import HIDDEN, Settings
from kneewatch.agent.settings_sources import checked, nearest
from kneewatch.collector.base import SettingsError
from kneewatch.collector.http.access import FetchSettings
from kneewatch.rules.model import WINDOW_S, Severity

HOLD_S = 120.0
"""How long a trouble must stay gone, at the default window; stretched with it, as durations are."""

SEVERITIES = {"warning": Severity.WARNING, "critical": Severity.CRITICAL}
PORTS = {"starttls": 587, "tls": 465, "none": 25}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAILBOX = re.compile(r"[^\s<>@,;:\"()\\]+@[^\s<>@,;:\"()\\]+")
HOST = re.compile(r"[\w.:-]+")
LINK = re.compile(r"https?://[^\s<>|\"'?#@\\]+")
ACCESS = (
    "headers",
    "header_files",
    "header_envs",
    "bearer_token_file",
    "bearer_token_env",
    "ca_file",
    "client_cert_file",
    "client_key_file",
    "insecure_skip_verify",
)


def receivers(settings: Settings) -> tuple[Receiver, ...]:
    """Who is told, as the settings' `[[notify]]` tables say.

    Raises:
        SettingsError: an unknown key, a value of the wrong kind, something missing; the message
            names the key and the table.
    """
    hold_s = HOLD_S * settings["window_s"] / WINDOW_S
    made: list[Receiver] = []
    for place, given in enumerate(settings.tables.get("notify", ()), 1):
        table = _Table(given, f"{settings.thresholds_origin}: [[notify]] number {place}")
        made.append(_receiver(table, place=place, hold_s=hold_s))
    names = [one.name for one in made]
    for one in made:
        if names.count(one.name) > 1:
            raise SettingsError(f"{one.origin}: two receivers have the name {one.name!r}")
    return tuple(made)


def as_toml(settings: Settings) -> list[str]:
    """Lines of a TOML file with the same tables; what is or may be a secret is hidden."""
    lines: list[str] = []
    for given in settings.tables.get("notify", ()):
        lines += ["", "[[notify]]"]
        lines += [f"{json.dumps(name)} = {_toml(name, value)}" for name, value in given.items()]
    return lines


def _toml(name: str, value: object) -> str:
    key = BY_NAME.get(name)
    if key is None or key.setting.secret:
        return json.dumps(HIDDEN)
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        inner = ", ".join(f"{json.dumps(part)} = {json.dumps(told)}" for part, told in pairs)
        return f"{{ {inner} }}"
    return json.dumps(value, ensure_ascii=False, default=str)


class _Table:
    """One `[[notify]]` table, checked key by key."""

    def __init__(self, given: Mapping[str, Any], origin: str) -> None:
        self.origin = origin
        self.kind = self._kind(given)
        self._given: dict[str, Any] = {}
        for name, value in given.items():
            self._given[name] = self._value(name, value)

    def _kind(self, given: Mapping[str, Any]) -> str:
        kind = given.get("kind")
        if kind is None:
            raise SettingsError(f"{self.origin}: kind is missing: {', '.join(KINDS)}")
        return self.one_of("kind", kind, KINDS)

    def _value(self, name: str, value: object) -> object:
        key = BY_NAME.get(name)
        if key is None or self.kind not in key.of:
            known = [other.name for other in KEYS if self.kind in other.of]
            near = nearest(name, known)
            raise SettingsError(
                f"{self.origin}: {self.kind} has no key {name!r}; the nearest is {near!r}"
            )
        return checked(key.setting, value, self.origin)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - a key has its own kind
        return self._given.get(name, BY_NAME[name].setting.default)

    def need(self, name: str) -> Any:  # noqa: ANN401
        if not self[name]:
            raise SettingsError(f"{self.origin}: {name} is missing: {BY_NAME[name].setting.help}")
        return self[name]

    def one_of(self, name: str, value: object, choices: Sequence[str]) -> str:
        if value not in choices:
            raise SettingsError(
                f"{self.origin}: {name} must be one of {', '.join(choices)}, not {value!r}"
            )
        return cast("str", value)

    def fitting(self, name: str, value: str, pattern: re.Pattern[str], wanted: str) -> str:
        if not pattern.fullmatch(value) or not value.isprintable():
            raise SettingsError(f"{self.origin}: {name} must be {wanted}, not {value!r}")
        return value

    def secret(self, name: str, *, needed: bool) -> Secret | None:
        """Where a secret is: as text (where there is such a key), in a file, or in the
        environment."""
        names = [other for other in (name, f"{name}_file", f"{name}_env") if other in BY_NAME]
        stated = [other for other in names if self[other] is not None]
        if len(stated) > 1:
            raise SettingsError(f"{self.origin}: only one of {', '.join(stated)}")
        if not stated and needed:
            raise SettingsError(f"{self.origin}: one of {', '.join(names)} is missing")
        if not stated:
            return None
        text = self[name] if name in BY_NAME else None
        return Secret(text, self[f"{name}_file"], self[f"{name}_env"])


def _receiver(table: _Table, *, place: int, hold_s: float) -> Receiver:
    link = (table["triage_url"] or "").rstrip("/").removesuffix("/triage")
    if link:
        table.fitting("triage_url", link, LINK, "an HTTP(S) URL without user, query or fragment")
    name = table["name"] or f"{table.kind}-{place}"
    if not name.isprintable():
        raise SettingsError(f"{table.origin}: name must be printable, not {name!r}")
    return Receiver(
        name=name,
        kind=table.kind,
        way=_mail(table) if table.kind == EMAIL else _web(table),
        severity=SEVERITIES[table.one_of("severity", table["severity"], tuple(SEVERITIES))],
        targets=tuple(table["targets"] or ()),
        labels=table["labels"] or {},
        own=table["own"],
        alerts=table["alerts"],
        group_wait_s=table["group_wait_s"],
        hold_s=table["hold_s"] or hold_s,
        repeat_s=table["repeat_s"],
        give_up_s=table["give_up_s"],
        timeout_s=table["timeout_s"],
        triage_url=link,
        origin=table.origin,
    )


def _web(table: _Table) -> Web:
    url = table.secret("url", needed=True) or Secret()
    given = {name: table[name] for name in ACCESS if table[name] is not None}
    if table["client_key_file"] and not table["client_cert_file"]:
        raise SettingsError(f"{table.origin}: client_key_file needs client_cert_file beside it")
    web = Web(url, FetchSettings(**given))
    if url.text is not None:
        try:
            web.address()
        except SettingsError as exc:
            raise SettingsError(f"{table.origin}: {exc}") from exc
    return web


def _mail(table: _Table) -> Mail:
    security = table.one_of("security", table["security"], tuple(PORTS))
    host, user = table.need("host"), table["user"]
    password = table.secret("password", needed=user is not None)
    if password is not None and user is None:
        raise SettingsError(f"{table.origin}: a password needs a user beside it")
    if password is not None and security == "none" and host not in LOOPBACK:
        raise SettingsError(
            f"{table.origin}: security = 'none' would show the password to the network; "
            "use starttls or tls"
        )
    return Mail(
        host=table.fitting("host", host, HOST, "a host name or IP address"),
        port=table["port"] or PORTS[security],
        security=security,
        user=user,
        password=password,
        sender=table.fitting("from", table.need("from"), MAILBOX, "a mail address: name@host"),
        recipients=tuple(
            table.fitting("to", one, MAILBOX, "mail addresses: name@host")
            for one in table.need("to")
        ),
        ca_file=table["ca_file"],
        insecure_skip_verify=table["insecure_skip_verify"],
    )
