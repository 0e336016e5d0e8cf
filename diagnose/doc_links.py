"""Addresses of the pages about causes and rules. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.diagnose.ranking import BY_ID
from kneewatch.diagnose.verdict import Verdict

OWN_DOCS = "/docs"
"""Where the daemon itself serves these pages; used for links if `docs_url` is not set."""

DEFAULT_DOCS = f"http://127.0.0.1:9877{OWN_DOCS}"
"""The address of these pages at the daemon's default address, for links of exported alerts."""


def cause_page(docs_url: str, cause_id: str) -> str:
    """The address of a cause's page below `docs_url`; empty if there is no base or no page."""
    # A diagnosis of another version may name causes that this one lacks.
    return f"{docs_url}/causes/{cause_id}" if docs_url and cause_id in BY_ID else ""


def linked(verdict: Verdict, docs_url: str) -> Verdict:
    """The verdict with the address of each cause's page below `docs_url`."""
    if not docs_url or not verdict.causes:
        return verdict
    causes = [replace(cause, docs=cause_page(docs_url, cause.id)) for cause in verdict.causes]
    return replace(verdict, causes=causes)


def rule_page(docs_url: str, rule_id: str) -> str:
    """The address of a rule's page below `docs_url`; empty if there is no base."""
    return f"{docs_url}/rules/{rule_id}" if docs_url else ""
