"""The commands replay and demo: diagnose recordings scrape by scrape. I/O edge."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from struct import pack
from traceback import format_exc
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import click

from kneewatch.agent.console import NO_DATA, OK, say
from kneewatch.agent.printing import print_timeline, style
from kneewatch.agent.settings.effective import Settings
from kneewatch.agent.settings.table import timestamp
from kneewatch.agent.stated_deployment import stated
from kneewatch.agent.stream import Captures, PageReader, TargetStream, capture_names
from kneewatch.collector.errors import CaptureError, CollectError, SettingsError
from kneewatch.collector.exposition import Limits
from kneewatch.collector.samples import Layout, Page
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.engine.diagnosis import Diagnosis
from kneewatch.diagnose.engine.engine_monitor import Catalogue
from kneewatch.rules.formatting import wrapped

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


PageRead: TypeAlias = tuple[int, float, Page | CollectError]
"""A capture's index, the time of the scrape in unix seconds, and the page or the error."""


class _Packed(NamedTuple):
    """A page, packed to be sent to another process. `at` is the index of its capture. `layout` is
    None if it equals the layout of the capture's previous page."""

    at: int
    t_s: float
    layout: Layout | None
    values: bytes
    timestamps_s: Mapping[int, float]
    host: Mapping[str, float]


class _Failed(NamedTuple):
    """A failed scrape, packed to be sent to another process. `at` is the index of its capture."""

    at: int
    t_s: float
    message: str
    kind: str
    hint: str


class PrefetchedPages:
    """The pages of captures in order of time, in batches. A second process reads them ahead.

    On a machine with a single core, this process reads them instead. Messages and errors of
    `Captures` appear in this process. `unusable` is the number of captures without a readable
    entry.
    """

    def __init__(self, captures: Captures, limits: Limits) -> None:
        self._captures, self._limits = captures, limits
        self.unusable = 0

    def __iter__(self) -> Iterator[list[PageRead]]:
        return self._in_process() if os.cpu_count() == 1 else self._in_subprocess()

    def _in_process(self) -> Iterator[list[PageRead]]:
        yield from read_batches(self._captures, self._limits)
        self.unusable = self._captures.unusable

    def _in_subprocess(self) -> Iterator[list[PageRead]]:
        # Lazy: slow to import.
        from multiprocessing import get_context

        context = get_context("fork")
        source, sink = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve, args=(source, sink, self._captures, self._limits), daemon=True
        )
        process.start()
        sink.close()
        try:
            yield from self._received(source)
        except EOFError:
            process.join()
            message = f"the process that reads the captures exited ({process.exitcode})"
            raise CaptureError(message) from None
        finally:
            source.close()
            process.terminate()
            process.join()

    def _received(self, source: Connection) -> Iterator[list[PageRead]]:
        """Yields the batches that the reading process sends.

        Raises:
            EOFError: the reading process exited unexpectedly.
        """
        layouts: dict[int, Layout] = {}
        while True:
            message: tuple[str, Any] = source.recv()
            kind, payload = message
            if kind == "pages":
                yield [_unpacked(packed, layouts) for packed in payload]
            elif kind == "say":
                say(payload)
            elif kind == "refused":
                raise CaptureError(payload)
            elif kind == "broken":
                raise RuntimeError(payload)
            else:
                self.unusable = payload
                return


def read_batches(captures: Captures, limits: Limits) -> Iterator[list[PageRead]]:
    """Yields all pages in batches, read in this process."""
    readers = [PageReader(limits) for _ in range(len(captures))]
    for batch in captures.batches():
        yield [(at, entry.t_s, readers[at].read(entry)) for at, entry in batch]


def _serve(source: Connection, sink: Connection, captures: Captures, limits: Limits) -> None:
    """Send all pages. Runs in the reading process; stops when the receiver closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    source.close()
    captures.on_message = lambda message: sink.send(("say", message))
    last: dict[int, Layout] = {}
    try:
        for batch in read_batches(captures, limits):
            sink.send(("pages", [_packed(read, last) for read in batch]))
        sink.send(("end", captures.unusable))
    except BrokenPipeError:
        return
    except CaptureError as error:
        sink.send(("refused", str(error)))
    except Exception:  # noqa: BLE001 - the parent process prints the traceback
        sink.send(("broken", format_exc()))


def _packed(read: PageRead, last: dict[int, Layout]) -> _Packed | _Failed:
    """A page or error, packed to be sent. `last` holds the previous layout of each capture and is
    updated."""
    at, t_s, page = read
    if isinstance(page, CollectError):
        return _Failed(at, t_s, str(page), page.kind, page.hint)
    layout = page.layout if last.get(at) is not page.layout else None
    last[at] = page.layout
    values = pack(f"{len(page.values)}d", *page.values)
    return _Packed(at, t_s, layout, values, page.timestamps_s, page.host)


def _unpacked(packed: _Packed | _Failed, layouts: dict[int, Layout]) -> PageRead:
    at, t_s = packed.at, packed.t_s
    if isinstance(packed, _Failed):
        return at, t_s, CollectError(packed.message, kind=packed.kind, hint=packed.hint)
    if packed.layout is not None:
        layouts[at] = packed.layout
    values = array("d", packed.values).tolist()
    return at, t_s, Page(layouts[at], values, packed.timestamps_s, host=packed.host)


# --- The commands ---------------------------------------------------------------------------------


DEMO = "demo.jsonl.gz"
DEMO_WINDOW_S = 15.0
"""Length of the demo's window in seconds. The phases of the shipped recording last 30 s each, so a
window of 60 s would mix them."""

DEMO_CRITICAL_AFTER_S = 80.0
"""Seconds from the start of the shipped recording until it turns critical."""


def replay(
    captures: Sequence[str],
    settings: Settings,
    *,
    form: str,
    from_time: str | None,
    to_time: str | None,
) -> int:
    """Print the diagnosis of every recorded scrape. Returns the exit status."""
    from_s, to_s = timestamp(from_time), timestamp(to_time)
    if from_s is not None and to_s is not None and from_s > to_s:
        raise SettingsError(f"--from {from_time} is later than --to {to_time}")
    pages = PrefetchedPages(Captures(captures, from_s=from_s, to_s=to_s), settings.limits())
    profile = settings.profile(stated=stated(settings))
    diagnoses = _replayed(pages, captures, profile, settings)
    status = print_timeline(diagnoses, form, settings.docs_url, named=len(captures) > 1)
    return NO_DATA if status == OK and pages.unusable else status


def _replayed(
    pages: PrefetchedPages, paths: Sequence[str], profile: Profile, settings: Settings
) -> Iterator[list[Diagnosis]]:
    """Yields the diagnoses of each scrape. Raises SettingsError for a wrong threshold before the
    first scrape."""
    catalogue, limits = Catalogue.of(profile), settings.limits()
    streams = [TargetStream(name, profile, limits, catalogue) for name in capture_names(paths)]
    return (streams[at].judge(t_s, page) for batch in pages for at, t_s, page in batch)


def demo(settings: Settings, *, form: str) -> int:
    """Replay the shipped recording. Returns the exit status."""
    recording = str(files("kneewatch.agent") / DEMO)
    window_s = settings["window_s"]
    if settings.origin("window_s") == "default":
        window_s = DEMO_WINDOW_S
    pages = PrefetchedPages(Captures([recording]), settings.limits())
    diagnoses = _replayed(pages, [recording], settings.profile(window_s=window_s), settings)
    if form == "text":
        introduction = (
            "Recording of a real vLLM 0.32.0 server on CPU with 160 KV cache blocks: healthy, "
            "nearly full, preempting, queueing, drained. Scraped every 2 s, window "
            f"{window_s:g} s."
        )
        click.echo("\n".join(wrapped(introduction, width=style().width, more=0)) + "\n")
    return print_timeline(diagnoses, form, settings.docs_url, named=False)
