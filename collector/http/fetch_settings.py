"""Settings for reading pages: timeouts, limits, credentials, TLS. Pure, and without heavy
imports."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import asdict, replace

MIB = 1024 * 1024


class FetchSettings(Struct, frozen=True):
    """How to read a page. Its repr hides the headers' values.

    `read_timeout_s` is for the whole response. `body_limit_bytes` applies both before and after
    decompression. A header's value is literal text, or the name of a file or environment variable
    that contains the value.
    """

    connect_timeout_s: float = 3.0
    read_timeout_s: float = 10.0
    body_limit_bytes: int = 64 * MIB
    gzip: bool = False
    """Request gzip. Off by default: decompressing 50 kB costs 0.1 ms, compressing costs the server
    1-2 ms."""
    bearer_token_file: str | None = None
    bearer_token_env: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    header_files: Mapping[str, str] = field(default_factory=dict[str, str])
    header_envs: Mapping[str, str] = field(default_factory=dict[str, str])
    ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None
    insecure_skip_verify: bool = False

    def __repr__(self) -> str:
        shown = asdict(self) | {"headers": list(self.headers)}
        return f"FetchSettings({shown})"

    def without_secrets(self) -> FetchSettings:
        """These settings without tokens and headers, for another server."""
        return replace(
            self,
            bearer_token_file=None,
            bearer_token_env=None,
            headers={},
            header_files={},
            header_envs={},
        )
