"""Receivers: the keys of a `[[notify]]` table, their validation, and reading of secrets. I/O
edge."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.settings.effective import (
    HIDDEN,
    Settings,
    gathered,
    reported_together,
    validated,
)
from kneewatch.agent.settings.table import Setting, settings_of
from kneewatch.collector.errors import CollectError, SettingsError
from kneewatch.collector.files import SECRET_MAX_BYTES, read_text
from kneewatch.collector.http.address import Address, FetchSettings, parse_target
from kneewatch.collector.spelling import did_you_mean
from kneewatch.rules.rule import BY_WORD, CRITICAL, WARNING, WINDOW_S, Severity

EMAIL, ALERTMANAGER = "email", "alertmanager"
POSTED = ("slack", "teams", "webhook")
"""Kinds of receivers that get messages by HTTP, in the formats of `FORMATS` of message.py."""

PAGERS = {
    "pagerduty": ("https://events.pagerduty.com", ""),
    "opsgenie": ("https://api.opsgenie.com", "GenieKey "),
}
"""Kinds of receivers that get an incident for each problem: the address where the settings have
none, and what precedes the key in the Authorization header; "" if the key is in the body."""

TEXTS = (*POSTED, EMAIL)
"""Kinds of receivers that get messages for people to read, reports and forwarded alerts too."""

MESSAGES = (*TEXTS, *PAGERS)
"""Kinds of receivers with keys about messages. Alertmanager groups and repeats alerts itself."""

WEB = (*POSTED, *PAGERS, ALERTMANAGER)
KINDS = (*MESSAGES, ALERTMANAGER)


KEYS_BY_KINDS: Mapping[tuple[str, ...], Sequence[Setting]] = {
    KINDS: settings_of("notify"),
    TEXTS: settings_of("notify_texts"),
    MESSAGES: settings_of("notify_messages"),
    WEB: settings_of("notify_web"),
    tuple(PAGERS): settings_of("notify_pager"),
    (EMAIL,): settings_of("notify_email"),
}
"""The keys of a `[[notify]]` table, by the kinds of receivers that can have them."""

KEYS = {key.key: (key, kinds) for kinds, keys in KEYS_BY_KINDS.items() for key in keys}


# --- Receivers and their secrets ------------------------------------------------------------------
#
# Webhook URLs, passwords and header values are secrets: no log, `repr` or response shows them. A
# secret in a file or in the environment is read again at each use.


class Secret(Struct, frozen=True):
    """A secret, or the name of the file or environment variable that contains it. Its repr does not
    show the text."""

    text: str | None = None
    file: str | None = None
    env: str | None = None

    def __repr__(self) -> str:
        return f"Secret(file={self.file!r}, env={self.env!r})"

    def read(self) -> str:
        """Read the current value of the secret.

        Raises:
            SettingsError: it is unreadable or empty; the message names its file or variable.
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


class Web(Struct, frozen=True):
    """A webhook. `access` holds headers, tokens, client certificate and trusted authorities. `path`
    is appended to the path of the URL. `key` is the key of a pager. `any_answer`: a success status
    is enough, whatever the response contains."""

    url: Secret
    access: FetchSettings
    path: str = ""
    key: Secret | None = None
    any_answer: bool = False

    def address(self) -> Address:
        """The current address. Its path may be a secret.

        Raises:
            SettingsError: the URL is unreadable or no HTTP(S) URL; the message does not show it.
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


class Mail(Struct, frozen=True, kw_only=True):
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


class Receiver(Struct, frozen=True, kw_only=True):
    """A receiver of notifications. `origin` is the place of its configuration.

    `own`: it gets kneewatch's own findings. `alerts`: it gets forwarded alerts of Alertmanager.
    `hold_s` is how many seconds a problem must stay absent to be resolved. `repeat_s` is the repeat
    interval in seconds; None means never.
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
        """Whether the receiver gets notifications about a target."""
        named = not self.targets or any(_fits(target, pattern) for pattern in self.targets)
        return named and all(
            _fits(labels.get(name, ""), pattern) for name, pattern in self.labels.items()
        )

    def check(self) -> None:
        """Read all secrets once, so that a wrong setting fails at the start.

        Raises:
            SettingsError: a secret cannot be used.
        """
        try:
            if isinstance(self.endpoint, Web):
                self.endpoint.address()
            secret = self.endpoint.key if isinstance(self.endpoint, Web) else self.endpoint.password
            if secret is not None:
                secret.read()
        except SettingsError as exc:
            raise SettingsError(f"{self.origin}: {exc}") from exc


def _contents(file: str) -> str:
    try:
        return read_text(file, SECRET_MAX_BYTES)
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
"""Seconds that a problem must stay absent to be resolved, at the default window. It scales with the
window."""

SEVERITIES = (WARNING.word, CRITICAL.word)
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
    """The receivers in the settings' `[[notify]]` tables. No secret is read.

    Raises:
        SettingsError: keys are unknown or missing, values are invalid, or two receivers have the
            same name; a message for each mistake names the table and the key.
    """
    hold_s = HOLD_S * settings["window_s"] / WINDOW_S
    with reported_together() as mistakes:
        if settings.docs_url and not LINK.fullmatch(settings.docs_url):
            mistakes.append(
                f"{settings.origin('docs_url')}: docs_url must be an HTTP(S) URL without user, "
                "query or fragment, for [[notify]]"
            )
        result: list[Receiver] = []
        for place, keys in enumerate(settings.tables.get("notify", ()), 1):
            table = _Table(keys, f"{settings.thresholds_origin}: [[notify]] number {place}")
            receiver = _receiver(table, place=place, hold_s=hold_s, docs_url=settings.docs_url)
            mistakes += table.mistakes
            if receiver.name in [other.name for other in result]:
                mistakes.append(
                    f"{receiver.origin}: name = {receiver.name!r}: another receiver has this name"
                )
            result.append(receiver)
    return tuple(result)


def check_secrets(settings: Settings) -> None:
    """Check that the secrets of all receivers in the settings can be read.

    Raises:
        SettingsError: a secret cannot be used, or as in `receivers`.
    """
    with reported_together() as mistakes:
        for receiver in receivers(settings):
            with gathered(mistakes):
                receiver.check()


def as_toml(settings: Settings) -> list[str]:
    """The `[[notify]]` tables as lines of TOML. Secrets are hidden."""
    lines: list[str] = []
    for given in settings.tables.get("notify", ()):
        lines += ["", "[[notify]]"]
        lines += [f"{json.dumps(name)} = {_toml(name, value)}" for name, value in given.items()]
    return lines


def _toml(name: str, value: object) -> str:
    if name not in KEYS or KEYS[name][0].secret:
        return json.dumps(HIDDEN)
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        inner = ", ".join(
            f"{json.dumps(part)} = {json.dumps(part_value)}" for part, part_value in pairs
        )
        return f"{{ {inner} }}"
    return json.dumps(value, ensure_ascii=False, default=str)


class _Table:
    """One `[[notify]]` table, validated key by key.

    `mistakes` are messages about wrong values. A wrong value is replaced by a default, so that all
    mistakes are found.
    """

    def __init__(self, given: Mapping[str, Any], origin: str) -> None:
        self.origin, self._given = origin, given
        self.mistakes: list[str] = []
        self._values: dict[str, Any] = {}
        kind = given.get("kind")
        if kind is None:
            self.wrong(f"kind is missing: one of {', '.join(KINDS)}")
        else:
            self.one_of("kind", kind, KINDS)
        # Without a valid kind, the keys of all kinds are accepted.
        self.kind: str = kind if kind in KINDS else ""
        keys = {key: row for key, (row, kinds) in KEYS.items() if not self.kind or kind in kinds}
        for name, value in given.items():
            if name not in keys:
                self.wrong(f"unknown key {name!r}{self._way_out(name, keys)}")
            elif name != "kind":
                with gathered(self.mistakes):
                    self._values[name] = validated(keys[name], value, origin)

    def _way_out(self, name: str, keys: Mapping[str, Setting]) -> str:
        if name in KEYS:
            return f" for {self.kind}: it is a key of {', '.join(KEYS[name][1])}"
        for_kind = f" for {self.kind}" if self.kind else ""
        return f"{for_kind}; {did_you_mean(name, keys)}"

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - a key has its own kind
        return self._values.get(name, KEYS[name][0].default)

    def wrong(self, message: str) -> None:
        self.mistakes.append(f"{self.origin}: {message}")

    def need(self, name: str) -> Any:  # noqa: ANN401
        # A value of the wrong kind has its own message.
        if not self[name] and (name in self._values or name not in self._given):
            self.wrong(f"{name} is missing: {KEYS[name][0].help}")
        return self[name]

    def one_of(self, name: str, value: object, choices: Sequence[str]) -> None:
        if value not in choices:
            self.wrong(f"{name} must be one of {', '.join(choices)}, not {value!r}")

    def fitting(self, name: str, value: str, pattern: re.Pattern[str], description: str) -> str:
        if not pattern.fullmatch(value) or not value.isprintable():
            self.wrong(f"{name} must be {description}, not {value!r}")
        return value

    def secret(self, name: str, *, needed: bool) -> Secret | None:
        """The secret `name`. It is in the table itself, in a file, or in an environment
        variable."""
        names = [other for other in (name, f"{name}_file", f"{name}_env") if other in KEYS]
        stated = [other for other in names if other in self._given]
        if len(stated) > 1:
            self.wrong(f"set only one of {', '.join(stated)}")
        elif not stated and needed:
            self.wrong(f"set one of {', '.join(names)}")
        if not any(self[other] is not None for other in stated):
            return None
        return Secret(
            self[name] if name in KEYS else None, self[f"{name}_file"], self[f"{name}_env"]
        )


def _receiver(table: _Table, *, place: int, hold_s: float, docs_url: str) -> Receiver:
    link = (table["triage_url"] or "").rstrip("/").removesuffix("/triage")
    if link:
        table.fitting("triage_url", link, LINK, "an HTTP(S) URL without user, query or fragment")
    name = table["name"] or f"{table.kind}-{place}"
    if not name.isprintable():
        table.wrong(f"name must be printable, not {name!r}")
    table.one_of("severity", table["severity"], SEVERITIES)
    return Receiver(
        name=name,
        kind=table.kind,
        endpoint=_mail(table) if table.kind == EMAIL else _web(table),
        severity=BY_WORD.get(table["severity"], CRITICAL),
        targets=tuple(table["targets"] or ()),
        labels=table["labels"] or {},
        own=table["own"],
        alerts=table["alerts"] and table.kind in TEXTS,
        group_wait_s=table["group_wait_s"] if table.kind != ALERTMANAGER else 0.0,
        hold_s=table["hold_s"] or hold_s,
        repeat_s=table["repeat_s"],
        give_up_s=table["give_up_s"],
        timeout_s=table["timeout_s"],
        triage_url=link,
        docs_url=docs_url or (f"{link}/docs" if link else ""),
        origin=table.origin,
    )


def _web(table: _Table) -> Web:
    pager = PAGERS.get(table.kind)
    needed = bool(table.kind) and pager is None
    url = table.secret("url", needed=needed) or Secret(pager[0] if pager else None)
    given = {name: table[name] for name in ACCESS if table[name] is not None}
    if table["client_key_file"] and not table["client_cert_file"]:
        table.wrong("client_key_file requires client_cert_file")
    key = table.secret("key", needed=True) if pager else None
    web = Web(url, FetchSettings(**given), "", key, table["any_answer"])
    if url.text is not None:
        try:
            web.address()
        except SettingsError as exc:
            table.wrong(str(exc))
    return web


def _mail(table: _Table) -> Mail:
    security, user = table["security"], table["user"]
    table.one_of("security", security, tuple(PORTS))
    host, sender = table.need("host") or "", table.need("from") or ""
    password = table.secret("password", needed=user is not None)
    if password is not None and user is None:
        table.wrong("a password requires user, the login name")
    if password is not None and security == "none" and host not in LOOPBACK:
        table.wrong("security = 'none' would send the password unencrypted; use starttls or tls")
    return Mail(
        host=host and table.fitting("host", host, HOST, "a host name or IP address"),
        port=table["port"] or PORTS.get(security, 0),
        security=security,
        user=user,
        password=password,
        sender=sender and table.fitting("from", sender, MAILBOX, "a mail address: name@host"),
        recipients=tuple(
            table.fitting("to", recipient, MAILBOX, "mail addresses: name@host")
            for recipient in table.need("to") or ()
        ),
        ca_file=table["ca_file"],
        insecure_skip_verify=table["insecure_skip_verify"],
    )
