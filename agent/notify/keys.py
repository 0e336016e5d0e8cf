"""The keys of a `[[notify]]` table, as data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kneewatch.agent.settings_table import Kind, Setting

SLACK, WEBHOOK, EMAIL = "slack", "webhook", "email"
KINDS = (SLACK, WEBHOOK, EMAIL)
WEB = (SLACK, WEBHOOK)
DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Key:
    """One key: what it holds, and the kinds of receiver that have it."""

    setting: Setting
    of: tuple[str, ...] = KINDS

    @property
    def name(self) -> str:
        """The key as it stands in the file."""
        return self.setting.key


def _key(
    name: str,
    kind: Kind,
    default: Any,  # noqa: ANN401 - a key has its own kind
    told: str,
    *of: str,
    most: float = float("inf"),
    secret: bool = False,
) -> Key:
    return Key(Setting(name, kind, default, told, most=most, secret=secret), of or KINDS)


KEYS: tuple[Key, ...] = (
    _key("kind", "text", None, "slack (and what takes its messages), webhook or email"),
    _key("name", "text", None, "what logs and metrics call it; unset: its kind and place"),
    _key("severity", "text", "critical", "what is told from: warning or critical"),
    _key("targets", "texts", None, "names of targets, with * and ?; unset: all"),
    _key("labels", "pairs", None, "labels that a target must have, values with * and ?"),
    _key("own", "flag", True, "tell what kneewatch itself finds"),
    _key("alerts", "flag", True, "pass on what Alertmanager posts, with the diagnosis"),
    _key("group_wait_s", "seconds", 10.0, "how long to gather what is alike", most=3600.0),
    _key(
        "hold_s",
        "seconds",
        None,
        "how long a trouble must stay gone before its end is told; unset: 2 windows",
        most=DAY_S,
    ),
    _key("repeat_s", "seconds", None, "tell what goes on again after so long; unset: once"),
    _key("give_up_s", "seconds", 3600.0, "how long a message is tried", most=DAY_S),
    _key("timeout_s", "seconds", 10.0, "for one try, all of it", most=300.0),
    _key("triage_url", "text", None, "where people reach kneewatch, for links to its page"),
    _key("url", "text", None, "where to post; better in a file", *WEB, secret=True),
    _key("url_file", "text", None, "file with it", *WEB),
    _key("url_env", "text", None, "environment variable with it", *WEB),
    _key("headers", "pairs", None, "extra request headers", *WEB, secret=True),
    _key("header_files", "pairs", None, "headers whose values are in files", *WEB),
    _key("header_envs", "pairs", None, "headers whose values are in the environment", *WEB),
    _key("bearer_token_file", "text", None, "file with a bearer token", *WEB),
    _key("bearer_token_env", "text", None, "environment variable with a bearer token", *WEB),
    _key("client_cert_file", "text", None, "client certificate", *WEB),
    _key("client_key_file", "text", None, "its key", *WEB),
    _key("host", "text", None, "the mail server", EMAIL),
    _key("port", "count", None, "unset: 587, 465 with tls, 25 with none", EMAIL, most=65_535),
    _key("security", "text", "starttls", "starttls, tls or none", EMAIL),
    _key("user", "text", None, "name to log in with", EMAIL),
    _key("password_file", "text", None, "file with its password", EMAIL),
    _key("password_env", "text", None, "environment variable with its password", EMAIL),
    _key("from", "text", None, "sender's address", EMAIL),
    _key("to", "texts", None, "recipients' addresses", EMAIL),
    _key("ca_file", "text", None, "certificate authorities to trust"),
    _key("insecure_skip_verify", "flag", False, "do not verify certificates"),
)
BY_NAME = {key.name: key for key in KEYS}
