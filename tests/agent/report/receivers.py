"""A receiver of reports, as settings state it."""

from __future__ import annotations

from tests.agent.notify.mail_server import MailServer


def team(mail: MailServer) -> str:
    """The receiver `team`: an owner's mailbox."""
    return f"""
        [[notify]]
        kind = "email"
        name = "team"
        host = "127.0.0.1"
        port = {mail.port}
        security = "none"
        from = "kneewatch@example.org"
        to = ["owner@example.org"]
    """
