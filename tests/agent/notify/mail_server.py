"""A mail server of a few commands, on 127.0.0.1, with real TLS."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import threading
from collections.abc import Mapping

from msgspec import Struct, field

from tests.waiting import PATIENCE_S


class Taken(Struct):
    """One mail, and how it came."""

    sender: str
    recipients: list[str]
    data: bytes
    is_encrypted: bool
    user: str | None


class Ways(Struct, frozen=True):
    """How the server behaves: `replies` stand in for the usual answer to a command."""

    starttls: ssl.SSLContext | None = None
    tls: ssl.SSLContext | None = None
    login: tuple[str, str] | None = None
    replies: Mapping[str, str] = field(default_factory=dict[str, str])
    drip: bool = False


class MailServer:
    """Listens until it is closed; one thread a session."""

    def __init__(self, ways: Ways) -> None:
        self.ways, self.mails = ways, list[Taken]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._closing = threading.Event()
        self.open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.open.append(sock)
            thread = threading.Thread(target=self._session, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _session(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            if self.ways.tls is not None:
                sock = self.ways.tls.wrap_socket(sock, server_side=True)
                self.open.append(sock)
            if self.ways.drip:
                while not self._closing.wait(0.05):
                    sock.sendall(b"2")
                return
            _Session(self, sock).run()

    def close(self) -> None:
        self._closing.set()
        for sock in [self._listener, *self.open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)


class _Session:
    def __init__(self, server: MailServer, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self._file = sock.makefile("rb")
        self._user: str | None = None
        self._mail = Taken("", [], b"", isinstance(sock, ssl.SSLSocket), None)

    def run(self) -> None:
        self._say(self._server.ways.replies.get("", "220 ready"))
        while line := self._file.readline():
            word = line.decode().split()[0].upper()
            usual = self._answer(word, line.decode().strip())
            self._say(self._server.ways.replies.get(word, usual))
            if word == "QUIT":
                return
            if word == "STARTTLS":
                assert self._server.ways.starttls is not None
                self._sock = self._server.ways.starttls.wrap_socket(self._sock, server_side=True)
                self._server.open.append(self._sock)
                self._file = self._sock.makefile("rb")

    def _say(self, text: str) -> None:
        self._sock.sendall(text.encode() + b"\r\n")

    def _answer(self, word: str, line: str) -> str:
        ways = self._server.ways
        encrypted = isinstance(self._sock, ssl.SSLSocket)
        if word == "EHLO":
            more = ["STARTTLS"] if ways.starttls and not encrypted else []
            more += ["AUTH PLAIN"] if ways.login and encrypted else []
            return "\r\n".join(f"250-{keyword}" for keyword in ["here", *more]) + "\r\n250 OK"
        if word == "STARTTLS":
            return "220 go on"
        if word == "AUTH":
            _, user, password = base64.b64decode(line.split()[2]).decode().split("\0")
            self._user = user
            return "235 welcome" if (user, password) == ways.login else "535 no"
        if word == "MAIL":
            self._mail = Taken(line, [], b"", encrypted, self._user)
        if word == "RCPT":
            if "nobody" in line:
                return "550 no such user"
            self._mail.recipients.append(line[len("RCPT TO:") :].strip("<>"))
        if word == "DATA" and "DATA" not in ways.replies:
            return self._take()
        return "221 bye" if word == "QUIT" else "250 OK"

    def _take(self) -> str:
        self._say("354 go on")
        data = b""
        while (line := self._file.readline()) not in (b".\r\n", b""):
            data += line.removeprefix(b".")
        self._mail.data = data
        self._server.mails.append(self._mail)
        return "250 taken"
