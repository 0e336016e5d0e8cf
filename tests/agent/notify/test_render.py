"""Messages as they are sent: what they say, and that hostile text stays text."""

from __future__ import annotations

import re
from collections.abc import Callable
from email import message_from_bytes, policy
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kneewatch.agent.notify import events
from kneewatch.agent.notify import message as formats
from kneewatch.agent.notify.alert_state import AlertState
from kneewatch.agent.notify.events import Event
from kneewatch.agent.notify.message import Line, Message, Part
from kneewatch.diagnose.fleet.verdict import FLEET
from kneewatch.diagnose.recommend.advice import FlagChange
from kneewatch.diagnose.recommend.ledger import BACKLOG
from kneewatch.reports.lines import cut_after_sentence
from tests.agent.notify.factories import FP8, receiver, sick, state
from tests.reports.diagnoses import NOW_S, PRESSURE

BASE = "https://ops.example"
HOSTILE = (
    "<!here> <!channel> @channel <@U123> <https://evil.example|triage> [triage](https://evil.example)"
    " <script>alert(1)</script> www.evil.example `*~ \x1b[31m \r\nBcc: x@evil.example \u202e \0"
)


def began(folder: Path, **more: object) -> list[Event]:
    text = f'kind = "slack"\nurl = "https://h.example/x"\ntriage_url = "{BASE}"'
    diagnosis = sick(**more)  # type: ignore[arg-type]
    return AlertState(receiver(folder, text)).update(state(diagnosis, name="gpu-7"))


def hostile() -> Message:
    line = Line("evidence", HOSTILE, HOSTILE)
    part = Part(HOSTILE, (line, line), f"{BASE}/triage?target=x")
    return Message(
        id="0", status="firing", severity="critical", t_s=0.0, headline=HOSTILE, parts=(part,)
    )


def test_one_line_evidence_lever_and_link(tmp_path: Path) -> None:
    message = events.message(began(tmp_path), receiver="slack-1", base=BASE)
    assert formats.text(message).splitlines() == [
        "CRITICAL: kv_pressure on gpu-7 (model llama, engine 0), stage 3 (queueing), for 40 s",
        "",
        "gpu-7 (model llama, engine 0)",
        "  The KV cache is too small for this load.",
        "  do first: Send less traffic to this replica, or shed load at the gateway (HTTP 429). "
        "Add a replica if one starts in minutes. Stop batch jobs and very long prompts first.",
        "  then fix it: --kv-cache-dtype fp8. Instead of --kv-cache-dtype auto. Needs a restart, "
        "which empties the caches. Half the bytes a token: the cache holds twice as many. Quality.",
        "  expected: KV tokens 5,088 -> 10,176",
        "  KV cache: stage 3 of 4, queueing for 40 s, since 00:06:00 UTC",
        "  now: KV 100%, 12 running, 9 waiting",
        "  last 60 s: 24% of running requests preempted every second, TTFT P99 123 ms, "
        "ITL P99 21 ms",
        "  https://ops.example/triage?target=gpu-7&at=2026-11-21T00:06:40Z",
    ]


def test_the_code_is_what_is_pasted_and_the_rest_is_whole_sentences(tmp_path: Path) -> None:
    derived = "The cache holds twice as many. " + "Speed predicted from a long derivation. " * 9
    change = FlagChange("--num-gpu-blocks-override", 160, 288)
    sized = replace(FP8, changes=(change,), summary=derived + BACKLOG, risk="Blocks may not fit.")
    backlog = replace(sized, predicted={**sized.predicted, "backlog_requests": 8.0})
    message = events.message(began(tmp_path, recommendations=(backlog,)), receiver="x", base=BASE)
    (fix,) = [row for row in formats.slack(message)["text"].splitlines() if "then fix it" in row]
    code, words = re.findall(r"`(.*?)`\. (.*)", fix)[0]
    assert code == "--num-gpu-blocks-override 288"
    assert words == (
        "Instead of --num-gpu-blocks-override 160. Needs a restart, which empties the caches. "
        f"The cache holds twice as many. {BACKLOG} Blocks may not fit."
    )
    assert cut_after_sentence(words, 140).endswith("The cache holds twice as many. …")


def test_no_effect_at_the_load_of_another_moment(tmp_path: Path) -> None:
    earlier = replace(FP8, as_of_s=NOW_S - 14)
    message = events.message(began(tmp_path, recommendations=(earlier,)), receiver="x", base=BASE)
    assert "expected" not in formats.text(message)


def test_a_cause_that_only_lingers_says_of_when_its_numbers_are(tmp_path: Path) -> None:
    lingering = replace(PRESSURE, seen_s=NOW_S - 8)
    message = events.message(began(tmp_path, causes=[lingering]), receiver="x", base="")
    text = formats.text(message)
    assert f"Ending: last detected 8 s ago. It was: {PRESSURE.summary}" in text
    assert "  if it returns, do first: " in text


def test_a_moment_is_rounded_up_to_the_second_that_has_its_scrape() -> None:
    assert formats.link(BASE, "r0", NOW_S + 0.3) == (
        f"{BASE}/triage?target=r0&at=2026-11-21T00:06:41Z"
    )
    assert formats.link(BASE, FLEET, NOW_S) == f"{BASE}/triage?at=2026-11-21T00:06:40Z"
    assert formats.link(BASE, FLEET) == f"{BASE}/triage"


def test_without_a_recommendation_the_lever_is_told(tmp_path: Path) -> None:
    message = events.message(began(tmp_path, recommendations=()), receiver="x", base="")
    assert "then fix it: Give the KV cache more room" in formats.text(message)
    assert "http" not in formats.text(message)


def test_slack_finds_no_markup_but_ours() -> None:
    body = formats.slack(hostile())
    for text in (body["text"], *(block["text"]["text"] for block in body["blocks"])):
        assert re.findall(r"<[^>]*>", text) in ([], [f"<{BASE}/triage?target=x|triage>"])
        assert not re.search(r"@\w|://evil|www\.|\]\(|[\x00-\x09\x0b-\x1f\u202e]", text)
    assert all(block["text"]["verbatim"] for block in body["blocks"])
    assert len(body["blocks"]) == 2


def test_slack_sections_stay_within_its_limits(tmp_path: Path) -> None:
    (event,) = began(tmp_path)
    many = [
        replace(event, key=event.key._replace(target=f"{'&' * 300}{number}", model="<" * 300))
        for number in range(200)
    ]
    body = formats.slack(events.message(many, receiver="x", base=BASE))
    assert len(body["blocks"]) <= 50
    assert all(len(block["text"]["text"]) <= 3000 for block in body["blocks"])
    assert len(body["text"]) <= 40_000
    assert (
        len(msgspec.json.encode(formats.webhook(events.message(many, receiver="x", base=""))))
        < 1_000_000
    )


def test_markdown_and_plain_text_find_no_link_either() -> None:
    body = formats.webhook(hostile())
    for text in (body["title"], body["text"], body["markdown"]):
        match = re.findall(r"\S*://\S*|www\.\S*|@\w+|\]\([^)]*\)", text.replace(BASE, ""))
        assert match in ([], ["](/triage?target=x)"]), text
        assert "\r" not in text
        assert "\x1b" not in text


class Tags(HTMLParser):
    """The tags and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]


def test_mail_has_two_forms_and_no_header_of_others() -> None:
    mail = formats.email(hostile(), sender="kw@example.org", recipients=("a@x.org", "b@x.org"))
    again = message_from_bytes(bytes(mail), policy=policy.default)
    assert again["Bcc"] is None
    assert again["To"] == "a@x.org, b@x.org"
    assert again["Subject"].startswith("[kneewatch] <!here>")
    plain, rich = again.get_body(("plain",)), again.get_body(("html",))
    assert plain is not None
    assert rich is not None
    tags = Tags(rich.get_content())
    assert tags.tags == {"html", "body", "p", "b", "a", "ul", "li", "code"}
    assert tags.links == [f"{BASE}/triage?target=x"]
    assert "https://evil" not in plain.get_content()


@pytest.mark.parametrize(
    "escape", [formats.escape_slack, formats.escape_plain, formats.escape_mail]
)
def test_addresses_can_be_copied(escape: Callable[[str, int], str]) -> None:
    assert escape("KV cache full on http://10.0.0.1:8000", 99) == "KV cache full on 10.0.0.1:8000"


@given(st.text() | st.from_regex(r"[<>@&:/\[\]()*`~w.!|\x00-\x1f]{0,40}"), st.integers(1, 80))
def test_hostile_text_stays_text(text: str, most: int) -> None:
    slack = formats.escape_slack(text, most)
    assert not re.search(r"[<>*`~\x00-\x1f]|@[^\u200b]|&(?!amp;|lt;|gt;)|://|\]\(", slack)
    plain = formats.escape_plain(text, most)
    assert plain.replace(formats.BREAK, "").isprintable() or not plain
    assert len(plain.replace(formats.BREAK, "")) <= most
    assert "\n" not in formats.escape_markdown(text, most)
    assert not re.search(
        r"(?<!\\)[\[\]<>`*|]", formats.escape_markdown(text, most).replace("\\\\", "")
    )
    assert not re.search(r"[<>\"']", formats.escape_html(text, most))
