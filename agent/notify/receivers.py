"""Receivers: the keys of a `[[notify]]` table, their validation, and secrets. I/O edge."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from kneewatch.agent.settings.effective import HIDDEN, Settings, nearest, validated
from kneewatch.agent.settings.table import Kind, Setting
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.http.address import Address, parse_target
from kneewatch.collector.http.connection import FetchSettings
from kneewatch.rules.rule import WINDOW_S, Severity

SLACK, WEBHOOK, EMAIL, ALERTMANAGER = "slack", "webhook", "email", "alertmanager"
KINDS = (SLACK, WEBHOOK, EMAIL, ALERTMANAGER)
MESSAGES = (SLACK, WEBHOOK, EMAIL)
"""The kinds that get messages; Alertmanager gets alerts, and groups and repeats them itself."""

WEB = (SLACK, WEBHOOK, ALERTMANAGER)
ALERTS_PATH = "/api/v2/alerts"
DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a `[[notify]]` table, and the kinds of receiver that have it."""

    setting: Setting
    of: tuple[str, ...] = KINDS

    @property
    def name(self) -> str:
        """The key as written in the file."""
        return self.setting.key


def _key(
    name: str,
    kind: Kind,
    default: Any,  # noqa: ANN401 - a key has its own kind
    text: str,
    *of: str,
    most: float = float("inf"),
    secret: bool = False,
) -> Key:
    return Key(Setting(name, kind, default, text, most=most, secret=secret), of or KINDS)


KEYS: tuple[Key, ...] = (
    _key("kind", "text", None, "slack (or a compatible program), webhook, email or alertmanager"),
    _key("name", "text", None, "name in logs and metrics; unset: kind and position"),
    _key("severity", "text", "critical", "lowest severity to send: warning or critical"),
    _key("targets", "texts", None, "target names, with * and ?; unset: all"),
    _key("labels", "pairs", None, "labels a target must have, values with * and ?"),
    _key("own", "flag", True, "send kneewatch's own findings"),
    _key("alerts", "flag", True, "forward Alertmanager's alerts with a diagnosis", *MESSAGES),
    _key(
        "group_wait_s", "seconds", 10.0, "how long to group similar events", *MESSAGES, most=3600.0
    ),
    _key(
        "hold_s",
        "seconds",
        None,
        "how long a problem must stay absent to be resolved; unset: 2 windows",
        most=DAY_S,
    ),
    _key(
        "repeat_s", "seconds", None, "repeat an active problem this often; unset: never", *MESSAGES
    ),
    _key("give_up_s", "seconds", 3600.0, "how long a message is retried", *MESSAGES, most=DAY_S),
    _key("timeout_s", "seconds", 10.0, "time limit for one attempt", most=300.0),
    _key("triage_url", "text", None, "base URL of kneewatch for people, for links"),
    _key("url", "text", None, "webhook URL or Alertmanager's; a file is safer", *WEB, secret=True),
    _key("url_file", "text", None, "file with the URL", *WEB),
    _key("url_env", "text", None, "environment variable with the URL", *WEB),
    _key("headers", "pairs", None, "extra request headers", *WEB, secret=True),
    _key("header_files", "pairs", None, "headers whose values are in files", *WEB),
    _key("header_envs", "pairs", None, "headers whose values are in the environment", *WEB),
    _key("bearer_token_file", "text", None, "file with a bearer token", *WEB),
    _key("bearer_token_env", "text", None, "environment variable with a bearer token", *WEB),
    _key("client_cert_file", "text", None, "client certificate", *WEB),
    _key("client_key_file", "text", None, "key of the client certificate", *WEB),
    _key("host", "text", None, "mail server", EMAIL),
    _key("port", "count", None, "unset: 587; 465 with tls, 25 with none", EMAIL, most=65_535),
    _key("security", "text", "starttls", "starttls, tls or none", EMAIL),
    _key("user", "text", None, "login name", EMAIL),
    _key("password_file", "text", None, "file with the password", EMAIL),
    _key("password_env", "text", None, "environment variable with the password", EMAIL),
    _key("from", "text", None, "sender's address", EMAIL),
    _key("to", "texts", None, "recipients' addresses", EMAIL),
    _key("ca_file", "text", None, "certificate authorities to trust"),
    _key("insecure_skip_verify", "flag", False, "do not verify certificates"),
)
BY_NAME = {key.name: key for key in KEYS}


# --- Receivers and their secrets ------------------------------------------------------------------
#
# Webhook URLs, passwords and header values are secrets: no log, `repr` or response shows them. A
# secret in a file or in the environment is read again at each use.


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret, or the file or environment variable that holds it."""

    text: str | None = field(default=None, repr=False)
    file: str | None = None
    env: str | None = None

    def read(self) -> str:
        """The secret's current value.

        Raises:
            SettingsError: it is unreadable or empty; the message names the place.
        """
        if self.text is not None:
            place, value = "the setting", self.text
        elif self.file is not None:
            place, value = f"the file {self.file}", _contents(self.file)
        else:
            place = f"the environment variable {self.env}"
            value = os.environ.get(self.env or "", "")
        if not value.strip():
            raise SettingsError(f"{place} is empty or not set")
        return value.strip()


@dataclass(frozen=True, slots=True)
class Web:
    """A webhook. `access` holds headers, tokens, client certificate and trusted authorities;
    `path` is added to the URL's."""

    url: Secret
    access: FetchSettings
    path: str = ""

    def address(self) -> Address:
        """The current address; its path may be a secret.

        Raises:
            SettingsError: it is unreadable or no HTTP(S) URL; the message does not show the URL.
        """
        url = self.url.read()
        if "://" not in url:
            raise SettingsError("url must begin with https:// or http:// (value not shown)")
        try:
            address = parse_target(url)
        except CollectError:
            # The error and its chain contain the URL.
            raise SettingsError("url must be an HTTP(S) URL (value not shown)") from None
        parts = urlsplit(url)
        if parts.path in ("", "/"):  # parse_target would add /metrics
            address = replace(address, path="/" + (f"?{parts.query}" if parts.query else ""))
        if self.path:
            path, mark, query = address.path.partition("?")
            path = path.rstrip("/").removesuffix(self.path) + self.path
            address = replace(address, path=path + mark + query)
        return address


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """A mail server, the sender and the recipients. `security` is starttls, tls or none."""

    host: str
    port: int
    security: str
    user: str | None
    password: Secret | None
    sender: str
    recipients: tuple[str, ...]
    ca_file: str | None
    insecure_skip_verify: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """A receiver of notifications. `origin` is where it was configured.

    `own`: send kneewatch's own findings; `alerts`: forward Alertmanager's. `hold_s` is how long a
    problem must stay absent to be resolved; `repeat_s` None: never repeat.
    """

    name: str
    kind: str
    endpoint: Web | Mail
    severity: Severity
    targets: tuple[str, ...]
    labels: Mapping[str, str]
    own: bool
    alerts: bool
    group_wait_s: float
    hold_s: float
    repeat_s: float | None
    give_up_s: float
    timeout_s: float
    triage_url: str
    docs_url: str
    origin: str

    def matches(self, target: str, labels: Mapping[str, str]) -> bool:
        """Whether this receiver gets notifications about a target."""
        named = not self.targets or any(_fits(target, pattern) for pattern in self.targets)
        return named and all(
            _fits(labels.get(name, ""), pattern) for name, pattern in self.labels.items()
        )

    def check(self) -> None:
        """Read the secrets once, so that a wrong setting fails at the start.

        Raises:
            SettingsError: a secret cannot be used.
        """
        try:
            if isinstance(self.endpoint, Web):
                self.endpoint.address()
            elif self.endpoint.password is not None:
                self.endpoint.password.read()
        except SettingsError as exc:
            raise SettingsError(f"{self.origin}: {exc}") from exc


def _contents(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"the file {file}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError:
        # The error quotes what could not be decoded, a piece of the secret.
        raise SettingsError(f"the file {file} is not UTF-8 text") from None


def _fits(text: str, pattern: str) -> bool:
    # As a pattern, a name such as http://[::1]:8000 does not match itself.
    return text == pattern or fnmatchcase(text, pattern)


# --- Reading the settings -------------------------------------------------------------------------


HOLD_S = 120.0
"""How long a problem must stay absent at the default window; scales with the window."""

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
    """The receivers of the settings' `[[notify]]` tables. No secret is read.

    Raises:
        SettingsError: a key is unknown or missing, or a value is of the wrong kind; the message
            names the key and the table.
    """
    hold_s = HOLD_S * settings["window_s"] / WINDOW_S
    if settings.docs_url and not LINK.fullmatch(settings.docs_url):
        raise SettingsError(
            "docs_url must be an HTTP(S) URL without user, query or fragment, for [[notify]]"
        )
    result: list[Receiver] = []
    for place, keys in enumerate(settings.tables.get("notify", ()), 1):
        table = _Table(keys, f"{settings.thresholds_origin}: [[notify]] number {place}")
        result.append(_receiver(table, place=place, hold_s=hold_s, docs_url=settings.docs_url))
    names = [receiver.name for receiver in result]
    for receiver in result:
        if names.count(receiver.name) > 1:
            raise SettingsError(f"{receiver.origin}: two receivers have the name {receiver.name!r}")
    return tuple(result)


def as_toml(settings: Settings) -> list[str]:
    """The `[[notify]]` tables as lines of TOML, with secrets hidden."""
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
        inner = ", ".join(
            f"{json.dumps(part)} = {json.dumps(part_value)}" for part, part_value in pairs
        )
        return f"{{ {inner} }}"
    return json.dumps(value, ensure_ascii=False, default=str)


class _Table:
    """One `[[notify]]` table, validated key by key."""

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
            names = [other.name for other in KEYS if self.kind in other.of]
            nearest_name = nearest(name, names)
            raise SettingsError(
                f"{self.origin}: {self.kind} has no key {name!r}; the nearest is {nearest_name!r}"
            )
        return validated(key.setting, value, self.origin)

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

    def fitting(self, name: str, value: str, pattern: re.Pattern[str], description: str) -> str:
        if not pattern.fullmatch(value) or not value.isprintable():
            raise SettingsError(f"{self.origin}: {name} must be {description}, not {value!r}")
        return value

    def secret(self, name: str, *, needed: bool) -> Secret | None:
        """The secret `name`: in the table itself, in a file, or in the environment."""
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


def _receiver(table: _Table, *, place: int, hold_s: float, docs_url: str) -> Receiver:
    link = (table["triage_url"] or "").rstrip("/").removesuffix("/triage")
    if link:
        table.fitting("triage_url", link, LINK, "an HTTP(S) URL without user, query or fragment")
    name = table["name"] or f"{table.kind}-{place}"
    if not name.isprintable():
        raise SettingsError(f"{table.origin}: name must be printable, not {name!r}")
    return Receiver(
        name=name,
        kind=table.kind,
        endpoint=_mail(table) if table.kind == EMAIL else _web(table),
        severity=SEVERITIES[table.one_of("severity", table["severity"], tuple(SEVERITIES))],
        targets=tuple(table["targets"] or ()),
        labels=table["labels"] or {},
        own=table["own"],
        alerts=table["alerts"] and table.kind != ALERTMANAGER,
        group_wait_s=table["group_wait_s"],
        hold_s=table["hold_s"] or hold_s,
        repeat_s=table["repeat_s"],
        give_up_s=table["give_up_s"],
        timeout_s=table["timeout_s"],
        triage_url=link,
        docs_url=docs_url or (f"{link}/docs" if link else ""),
        origin=table.origin,
    )


def _web(table: _Table) -> Web:
    url = table.secret("url", needed=True) or Secret()
    given = {name: table[name] for name in ACCESS if table[name] is not None}
    if table["client_key_file"] and not table["client_cert_file"]:
        raise SettingsError(f"{table.origin}: client_key_file requires client_cert_file")
    path = ALERTS_PATH if table.kind == ALERTMANAGER else ""
    web = Web(url, FetchSettings(**given), path)
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
        raise SettingsError(f"{table.origin}: a password requires a user")
    if password is not None and security == "none" and host not in LOOPBACK:
        raise SettingsError(
            f"{table.origin}: security = 'none' would send the password unencrypted; "
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
            table.fitting("to", recipient, MAILBOX, "mail addresses: name@host")
            for recipient in table.need("to")
        ),
        ca_file=table["ca_file"],
        insecure_skip_verify=table["insecure_skip_verify"],
    )
