"""Settings: every one from every source, in the order of precedence, with its origin."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import trustme

from kneewatch.agent.cli import cli
from kneewatch.agent.notify import receivers
from kneewatch.agent.settings.effective import HIDDEN, load
from kneewatch.agent.settings.table import BY_KEY, RUN_DEFAULTS, SETTINGS, HeadedOption, Setting
from kneewatch.agent.targets import table_specs
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.rules.rule import Severity
from tests.agent.running import Main
from tests.agent.test_benchmarks import ONE

COMMANDS = {
    "diagnose": ("window_s", "interval_s", "watch_s", "gpus", "slo.ttft_p99_s", "fetch.headers"),
    "replay": ("window_s", "gpus", "slo.itl_p99_s"),
    "record": ("interval_s", "fetch.ca_file", "fetch.header_envs"),
    "demo": ("window_s",),
    "run": (
        "interval_s",
        "window_s",
        "listen",
        "store.file",
        "gpu_metrics",
        "file_sd",
        "log.level",
    ),
}
TYPED: dict[str, tuple[list[str], list[object]]] = {
    "seconds": (["7.5", "8.5", "9.5"], [7.5, 8.5, 9.5]),
    "count": (["7", "8", "9"], [7, 8, 9]),
    "number": (["0.25", "0.5", "0.75"], [0.25, 0.5, 0.75]),
    "text": (["/a b", "/c", "/d"], ["/a b", "/c", "/d"]),
    "texts": (["a", "b", "c"], [["a"], ["b"], ["c"]]),
    "url": (
        ["http://a:1/m", "http://b/m", "https://c/m"],
        ["http://a:1/m", "http://b/m", "https://c/m"],
    ),
    "flag": (["true", "false", "true"], [True, False, True]),
    "pairs": (["X-A=1", "X-B=2", "X-C=3"], [{"X-A": "1"}, {"X-B": "2"}, {"X-C": "3"}]),
}
"""By kind: what is written in a file, in the environment and as a flag, and what each means."""


PEMS = ["a.pem", "b.pem", "c.pem"]
CHECKED = {
    "report.cron": ["0 6 * * mon", "30 7 * * *", "0 0 1 * *"],
    "listen": ["127.0.0.1:1", "localhost:2", "[::1]:3"],
    "model": ["01-ai/Yi-6B", "01-ai/Yi-34B", "01-ai/Yi-6B"],
    "gpu": ["b200", "b300", "h200"],
    "vllm_version": ["0.10.0", "0.11.0", "0.12.0"],
    "launch_file": ["a.sh", "b.sh", "c.sh"],
    "workload_profile": ["a.toml", "b.toml", "c.toml"],
    **dict.fromkeys(
        (key for key in BY_KEY if key.startswith("http.") and key.endswith("_file")),
        PEMS,
    ),
}
"""What is written for settings that `config` looks at more closely."""

SWEEPS = ["1=a.csv", "2=b.csv", "4=c.csv"], [{"1": "a.csv"}, {"2": "b.csv"}, {"4": "c.csv"}]
"""What is written for benchmark sweeps, and what it means."""

PROFILE = files("kneewatch.diagnose.sizing.plan").joinpath("example_profile.toml").read_text()
NAMED_FILES = {
    f"{name}.{ending}": text
    for name in "abc"
    for ending, text in (("sh", "vllm serve 01-ai/Yi-6B\n"), ("toml", PROFILE), ("csv", ONE))
}
"""The files that these settings name."""


def typed(setting: Setting) -> tuple[list[str], list[object]]:
    """What is written for a setting, and what it means; one that is chosen, from its choices."""
    if setting.key in CHECKED:
        return CHECKED[setting.key], list[object](CHECKED[setting.key])
    if setting.key == "benchmark.by_tensor_parallel":
        return SWEEPS[0], list[object](SWEEPS[1])
    if setting.key == "launch_flags":
        values = ["max-num-seqs=7", "port=8", "block-size=16"]
        return values, [dict([value.split("=")]) for value in values]
    if setting.least:
        counts = [int(setting.least) + more for more in (7, 8, 9)]
        return [str(count) for count in counts], list[object](counts)
    if setting.kind != "text" or not setting.choices:
        return TYPED[setting.kind]
    texts = [setting.choices[0], setting.choices[-1], setting.choices[0]]
    return texts, list[object](texts)


def in_toml(kind: str, text: str) -> str:
    """A value as TOML writes it."""
    if kind == "pairs":
        name, _, value = text.partition("=")
        return f'{{ "{name}" = "{value}" }}'
    if kind == "texts":
        return f'["{text}"]'
    return f'"{text}"' if kind in ("text", "url") else text


def as_flag(setting: Setting, text: str) -> list[str]:
    """A value as the command line writes it."""
    if setting.kind != "flag":
        return [setting.option, text]
    return [setting.option if text == "true" else setting.option.replace("--", "--no-")]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_file_environment_and_flag(
    main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: Setting
) -> None:
    monkeypatch.delenv(setting.env, raising=False)
    texts, values = typed(setting)
    if texts is PEMS:
        # A certificate with its key serves as any of them.
        own = trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.bytes()
        for name in PEMS:
            (tmp_path / name).write_bytes(own)
        if setting.key != "http.tls_cert_file":
            monkeypatch.setenv("KNEEWATCH_HTTP_TLS_CERT_FILE", "a.pem")
    for name, text in NAMED_FILES.items():
        (tmp_path / name).write_text(text)
    file = tmp_path / "k.toml"
    file.write_text(f"{setting.key} = {in_toml(setting.kind, texts[0])}\n")
    config, flag = ["config", "--config", str(file)], as_flag(setting, texts[2])
    default = RUN_DEFAULTS.get(setting.key, setting.default)
    assert shown(main("config").out, setting) == (default, "default")
    assert shown(main(*config).out, setting) == (values[0], f"file {file}")
    monkeypatch.setenv(setting.env, texts[1])
    assert shown(main(*config).out, setting) == (values[1], f"environment {setting.env}")
    ended = main(*config, *flag)
    assert shown(ended.out, setting) == (values[2], f"flag {setting.option}")
    assert (ended.status, ended.err) == (0, "")


def shown(out: str, setting: Setting) -> tuple[object, str]:
    """A setting's value and origin as `config` prints them; a secret's value by its default."""
    (line,) = [
        line for line in out.splitlines() if line.removeprefix("# ").startswith(f"{setting.key} ")
    ]
    if line.startswith("#"):
        assert f"{setting.key} is not set; {setting.help}" in line
        return None, "default"
    origin = line.rpartition("  # ")[2].removesuffix(f"; {setting.help}")
    value: Any = tomllib.loads(line)
    for part in setting.key.split("."):
        value = value[part]
    if setting.secret:
        assert set(value.values()) == {HIDDEN}
        value = {name: str(" ABC".index(name[-1])) for name in value}
    return value, origin


def test_a_file_named_by_the_environment(
    main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "[slo]\r\n# as an editor on Windows writes it\r\nttft_p99_s = 2\r\n"
    (tmp_path / "k.toml").write_text(text, encoding="utf-8-sig", newline="")
    monkeypatch.setenv("KNEEWATCH_CONFIG", "k.toml")
    assert "slo.ttft_p99_s = 2.0  # file k.toml; " in main("config").out


def test_what_config_prints_is_a_settings_file(main: Main, tmp_path: Path) -> None:
    file = tmp_path / "first.toml"
    file.write_text(
        'window_s = 30\n[fetch]\nheader_files = { "X-Key" = "/run/k" }\nca_file = "a \\"b\\".pem"\n'
        "[rules.KV-EVICT]\nwarning = 0.1\ncritical = 3e-1\n"
    )
    first = main("config", "--config", file).out
    again = tmp_path / "again.toml"
    again.write_text(first)
    second = main("config", "--config", again).out
    assert tomllib.loads(first) == tomllib.loads(second)
    assert tomllib.loads(first)["rules"] == {"KV-EVICT": {"warning": 0.1, "critical": 0.3}}


WRONG = {
    "windows_s = 3": "file k.toml: unknown setting 'windows_s'; did you mean window_s?",
    "bananas = 3": "unknown setting 'bananas'; `kneewatch config` prints all settings",
    "[slo]\nttft_s = 3": "unknown setting 'slo.ttft_s'; did you mean slo.ttft_p99_s?",
    "window_s = '3x'": "file k.toml: window_s: '3x' is not a duration; write 30s, 5m or 2h",
    "window_s = 0": "file k.toml: window_s = 0 is out of range: it must be more than 0",
    "window_s = nan": "file k.toml: window_s = nan is out of range",
    "window_s = inf": "file k.toml: window_s = inf is out of range",
    "window_s = true": "file k.toml: window_s must be a number of seconds, not True",
    "interval_s = 1e300": "interval_s = 1e+300 is out of range: it must be more than 0 and at most "
    "86400",
    "store.max_bytes = 10": "store.max_bytes = 10 is out of range: it must be 1,048,576 or more",
    "gpus = 1.5": "file k.toml: gpus must be a whole number, not 1.5",
    "peak.flop_per_s = 0": "peak.flop_per_s = 0 is out of range",
    "benchmark.gpu_ratio = 70": "benchmark.gpu_ratio = 70 is out of range: it must be more than 0 "
    "and at most 1",
    "fetch.gzip = 1": "file k.toml: fetch.gzip must be true or false, not 1",
    "fetch.ca_file = 1": "file k.toml: fetch.ca_file must be text, not 1",
    "fetch.headers = 'secret'": "file k.toml: fetch.headers must be a table with text values\n",
    "fetch.header_files = {a = 1}": "header_files must be a table with text values, not {'a': 1}",
    "window_s = ": "settings file k.toml: Invalid value",
    "rules.KV-EVICT = 1": "file k.toml: rules.KV-EVICT must be rules.<ID>.<severity> = number",
    "rules.KV-EVICT.warning = 'x'": "must be rules.<ID>.<severity> = number",
    "rules.KV-EVICT.warning = nan": "must be rules.<ID>.<severity> = number",
    "rules.KV-EVICTS.warning = 1": "file k.toml: no rule 'KV-EVICTS'; did you mean KV-EVICT?",
    "log.level = 'loud'": "file k.toml: log.level must be one of debug, info, warning, error, not "
    "'loud'",
    "gpu_metrics = 'ftp://host'": "file k.toml: gpu_metrics: not a target: 'ftp://host': the",
    "gpu_metrics = 1": "file k.toml: gpu_metrics must be a URL, not 1",
    "rules.KV-EVICT.fatal = 1": "file k.toml: rule KV-EVICT has no severity 'fatal'",
}


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("command", ["config", "demo"])
def test_a_wrong_file(main: Main, tmp_path: Path, text: str, command: str) -> None:
    (tmp_path / "k.toml").write_text(text)
    ended = main(command, "--config", "k.toml")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("kneewatch: ")
    assert WRONG[text] in ended.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "report.cron = 'nonsense'",
            "file k.toml: report.cron = 'nonsense' is not a cron expression",
        ),
        (
            "report = {cron = '0 6 * * mon', timezone = 'Mars/Olympus'}",
            "file k.toml: report.timezone = 'Mars/Olympus' is not a time zone",
        ),
        (
            "report = {cron = '0 6 * * mon', send = ['ops']}",
            "file k.toml: report.send: no receiver is named 'ops'",
        ),
    ],
)
def test_config_refuses_what_run_would(main: Main, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "k.toml").write_text(text)
    ended = main("config", "--config", "k.toml")
    assert (ended.status, ended.out) == (2, "")
    assert says in ended.err


def test_a_file_that_is_no_text(main: Main, tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_bytes(b"\xff\xfe")
    assert "settings file k.toml: 'utf-8' codec" in main("config", "--config", "k.toml").err
    assert main("config", "--config", ".").err == "kneewatch: settings file .: not a regular file\n"


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("WINDOW_S", "soon", "'soon' is not a duration; write 30s, 5m or 2h"),
        ("WINDOW_S", "", "'' is not a duration; write 30s, 5m or 2h"),
        ("SLO_TTFT", "2", "no such setting; did you mean KNEEWATCH_SLO_TTFT_P99_S?"),
        ("WINDOW_S", "-1", "window_s = -1.0 is out of range"),
        ("GPUS", "1.5", "'1.5' is not a whole number"),
        ("FETCH_GZIP", "maybe", "'maybe' is neither true nor false"),
        ("FETCH_HEADERS", "secret", "write NAME=VALUE, separated by commas"),
    ],
)
def test_a_wrong_environment(
    main: Main, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, says: str
) -> None:
    monkeypatch.setenv(f"KNEEWATCH_{variable}", text)
    ended = main("config")
    assert (ended.status, ended.out) == (2, "")
    assert (
        ended.err == f"kneewatch: environment KNEEWATCH_{variable}: {says}\n" or says in ended.err
    )
    assert "secret" not in ended.err


def test_several_pairs(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNEEWATCH_FETCH_HEADER_ENVS", "X-A=AA, X-B=BB,")
    assert 'fetch.header_envs = { "X-A" = "AA", "X-B" = "BB" }' in main("config").out
    ended = main("config", "--header-env", "X-C=CC", "--header-env", "X-D=D=D")
    assert 'fetch.header_envs = { "X-C" = "CC", "X-D" = "D=D" }' in ended.out
    assert "write NAME=VALUE" in main("config", "--header", "secret").err


def test_secrets_are_not_printed(main: Main, tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text('fetch.headers = { "X-Api-Key" = "sesame" }\n')
    out = main("config", "--config", "k.toml").out
    assert f'fetch.headers = {{ "X-Api-Key" = "{HIDDEN}" }}' in out
    assert "sesame" not in out


TARGETS = """\
window_s = 30
[[targets]]
url = "http://me:sesame@host:8000/metrics"
labels = { tier = "chat", pod = "a b" }
slo.ttft_p99_s = 2
fetch.headers = { "X-Api-Key" = "sesame" }
gpu_metrics = "http://me:sesame@host:9400"
[[targets]]
url = "host:8001"
name = "second"
[targets.labels]
tier = "batch"
[targets.fetch]
read_timeout_s = 4
[targets.rules.KV-FULL]
info = 0.8
"""


def test_a_target_has_thresholds_of_its_own(tmp_path: Path) -> None:
    """Tiers that differ by hardware or traffic have different bounds."""
    (tmp_path / "k.toml").write_text("rules.KV-FULL.info = 0.9\n" + TARGETS)
    chat, batch = table_specs(load(file=tmp_path / "k.toml", environ={}, flags={}))
    bounds = [
        {bound.severity: bound.threshold for bound in rule.bounds}[Severity.INFO]
        for target in (chat, batch)
        for rule in target.settings.profile().rules
        if rule.id == "KV-FULL"
    ]
    assert bounds == [0.9, 0.8]


def test_targets_are_printed_without_their_secrets(main: Main, tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text(TARGETS)
    ended = main("config", "--config", "k.toml")
    assert ended.status == 0
    assert "sesame" not in ended.out
    assert "[[targets]]  # file k.toml: [[targets]] number 2" in ended.out
    hidden = {"X-Api-Key": HIDDEN}
    first, second = tomllib.loads(ended.out)["targets"]
    assert first == {
        "url": "http://host:8000/metrics",
        "name": "http://host:8000",
        "labels": {"tier": "chat", "pod": "a b"},
        "slo": {"ttft_p99_s": 2.0},
        "fetch": {"headers": hidden},
        "gpu_metrics": "http://host:9400/metrics",
    }
    assert second == {
        "url": "http://host:8001/metrics",
        "name": "second",
        "labels": {"tier": "batch"},
        "fetch": {"read_timeout_s": 4.0},
        "rules": {"KV-FULL": {"info": 0.8}},
    }
    (tmp_path / "again.toml").write_text(ended.out)
    again = tomllib.loads(main("config", "--config", "again.toml").out)
    assert again == tomllib.loads(ended.out)


WRONG_TARGETS = {
    "name = 'a'": "number 1: url is missing",
    "url = 8000": "number 1: url must be text",
    "url = 'ftp://a'": "number 1: url: not a target: 'ftp://a': the scheme must be http or https",
    "url = 'a'\nname = ''": "number 1: name = '': write 1 to 200 printable characters",
    "url = 'a'\nname = \"a\\u001b\"": "number 1: name = 'a\\x1b': write 1 to 200",
    "url = 'a'\nname = 3": "number 1: name must be text, not 3",
    "url = 'a'\nrules.KV-FULL = 3": "number 1: rules.KV-FULL must be rules.<ID>.<severity> = num",
    "url = 'a'\nrules.KV-FUL.info = 3": "number 1: no rule 'KV-FUL'; did you mean KV-FULL?",
    "url = 'a'\nlabels = 3": "number 1: labels must be a table with text values, not ",
    "url = 'a'\nlabels.a = 3": "number 1: labels must be a table with text values, not ",
    "url = 'a'\nlabels.'a-b' = ''": "number 1: labels: 'a-b' is not a label name",
    "url = 'a'\nurls = 'a'": "number 1: unknown key 'urls'; did you mean url?",
    "url = 'a'\nslo.ttft_s = 1": "unknown key 'slo.ttft_s'; did you mean slo.ttft_p99_s?",
    "url = 'a'\nbananas = 1": "unknown key 'bananas'; valid: url, name, labels, and the "
    "settings of one target",
    "url = 'a'\nlisten = 'a'": "number 1: listen applies to all targets",
    "url = 'a'\nwindow_s = 'soon'": "number 1: window_s: 'soon' is not a duration",
}


@pytest.mark.parametrize("text", WRONG_TARGETS)
def test_a_wrong_target(main: Main, tmp_path: Path, text: str) -> None:
    (tmp_path / "k.toml").write_text(f"[[targets]]\n{text}\n")
    ended = main("config", "--config", "k.toml")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("kneewatch: file k.toml: [[targets]] ")
    assert WRONG_TARGETS[text] in ended.err


@pytest.mark.parametrize("text", ["targets = 3", "[targets]\nurl = 'http://a:8000'"])
def test_tables_are_lists_of_tables(main: Main, tmp_path: Path, text: str) -> None:
    (tmp_path / "k.toml").write_text(text)
    assert (
        "write targets as [[targets]], one table per entry"
        in main("config", "--config", "k.toml").err
    )


def test_all_mistakes_are_named_at_once(main: Main, tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text("window = 3\ninterval_s = 'soon'\n[rules]\nERRORS = 1\n")
    ended = main(
        "config", "--config", "k.toml", "--slo-ttft", "2000", "--gpus", "two", "--for", "1x"
    )
    assert [line.split(": ", 2)[2] for line in ended.err.splitlines()] == [
        "unknown setting 'window'; did you mean window_s?",
        "interval_s: 'soon' is not a duration; write 30s, 5m or 2h",
        "rules.ERRORS must be rules.<ID>.<severity> = number",
        "'1x' is not a duration; write 30s, 5m or 2h",
        "slo.ttft_p99_s = 2000.0 is out of range: it must be more than 0 and at most 600, in "
        "seconds",
        "'two' is not a whole number",
    ]


def test_wrong_targets_are_named_with_all_other_mistakes(main: Main) -> None:
    ended = main("run", "ftp://a", "http://b:8000/v1", "--interval", "soon")
    assert [line.split(": ", 2)[1] for line in ended.err.splitlines()] == [
        "flag --interval",
        "argument 1",
        "argument 2",
    ]


MISTAKES_OF_RUN = """\
window = 3
interval_s = 0.01
[report]
cron = "0 6 * *"
timezone = "Mars/Olympus"
send = ["ops", "chat"]
[[targets]]
url = "http://a:8000"
interval_s = 0.02
"""
RUN_MESSAGES = [
    "unknown setting 'window'",
    "interval_s = 0.01 is too short: it must be 0.1 or more",
    "[[targets]] number 1: interval_s = 0.02 is too short: it must be 0.1 or more",
    "report.timezone = 'Mars/Olympus' is not a time zone",
    "report.cron = '0 6 * *' is not a cron expression (4 fields instead of 5)",
    "report.send: no receiver is named 'ops'",
    "report.send: no receiver is named 'chat'",
]

MISTAKES_OF_FILES = """\
model = "nope/none"
launch_file = "no.sh"
[[targets]]
url = "http://127.0.0.1:1"
gpu = "h999"
[[notify]]
kind = "slack"
url_file = "no-url"
[[notify]]
kind = "webhook"
name = "b"
url_env = "NO_SUCH_VARIABLE"
"""
FILE_MESSAGES = [
    "launch_file no.sh does not exist",
    "model 'nope/none' is not in the catalogue",
    "[[targets]] number 1: unknown GPU 'h999'",
    "[[notify]] number 1: the file no-url: No such file or directory",
    "[[notify]] number 2: the environment variable NO_SUCH_VARIABLE is empty or not set",
]


@pytest.mark.parametrize("command", ["config", "run"])
@pytest.mark.parametrize(
    ("mistakes", "messages"),
    [(MISTAKES_OF_RUN, RUN_MESSAGES), (MISTAKES_OF_FILES, FILE_MESSAGES)],
    ids=["values", "what they name"],
)
def test_mistakes_of_settings_that_only_run_reads_come_with_all_others(
    main: Main, tmp_path: Path, command: str, mistakes: str, messages: list[str]
) -> None:
    (tmp_path / "k.toml").write_text(mistakes)
    ended = main(command, "--config", "k.toml")
    assert ended.status == 2
    said = [line.split(": ", 2)[2].split(";")[0] for line in ended.err.splitlines()]
    assert said == messages


MISTAKES_OF_HTTP = """\
window = 3
listen = "0.0.0.0:9877"
[http]
body_bytes = 0
admin_token_file = "empty"
tls_cert_file = "cert.pem"
tls_key_file = "no.key"
client_ca_file = "no-ca.pem"
"""
HTTP_MESSAGES = [
    "unknown setting 'window'; did you mean window_s?",
    "http.body_bytes = 0 is out of range: it must be more than 0",
    "http.tls_key_file = no.key: No such file or directory",
    "http.client_ca_file = no-ca.pem: No such file or directory",
    "http.admin_token_file = empty contains no token; write one per line",
]


@pytest.mark.parametrize("command", ["config", "run"])
def test_mistakes_of_the_http_endpoint_come_with_all_others(
    main: Main, tmp_path: Path, command: str
) -> None:
    for name in ("empty", "cert.pem"):
        (tmp_path / name).touch()
    (tmp_path / "k.toml").write_text(MISTAKES_OF_HTTP)
    ended = main(command, "--config", "k.toml")
    assert (ended.status, ended.out) == (2, "")
    assert [line.split(": ", 2)[2] for line in ended.err.splitlines()] == HTTP_MESSAGES


MANY_MISTAKES = """\
window = 3
rules.KV-EVICTS.warning = 1
rules.KV-EVICT.fatal = 1
[[targets]]
slo.ttft_s = 1
window_s = "soon"
name = 3
[[targets]]
url = "ftp://a"
name = ""
labels.a-b = ""
[[targets]]
url = "http://a"
name = "twice"
[[targets]]
url = "http://b"
name = "twice"
[[notify]]
kind = "slak"
severity = "info"
bananas = 1
[[notify]]
kind = "email"
port = "25"
urls = "x"
password_env = "P"
"""

MANY_MESSAGES = [
    "unknown setting 'window'; did you mean window_s?",
    "[[targets]] number 1: name must be text, not 3",
    "[[targets]] number 1: unknown key 'slo.ttft_s'; did you mean slo.ttft_p99_s?",
    "[[targets]] number 1: window_s: 'soon' is not a duration",
    '[[targets]] number 1: url is missing: write url = "http://HOST:PORT"',
    "[[targets]] number 2: url: not a target: 'ftp://a': the scheme must be http or https",
    "[[targets]] number 2: name = '': write 1 to 200 printable characters",
    "[[targets]] number 2: labels: 'a-b' is not a label name",
    "two targets are called 'twice': file k.toml: [[targets]] number 3 and file k.toml: "
    "[[targets]] number 4; remove one or rename it",
    "[[notify]] number 1: kind must be one of slack, teams, webhook, email, pagerduty",
    "[[notify]] number 1: unknown key 'bananas'; valid: kind, name",
    "[[notify]] number 1: severity must be one of warning, critical, not 'info'",
    "[[notify]] number 2: port must be a whole number, not '25'",
    "[[notify]] number 2: unknown key 'urls' for email; valid: kind, name",
    "[[notify]] number 2: host is missing: mail server",
    "[[notify]] number 2: from is missing: sender's address",
    "[[notify]] number 2: a password requires user, the login name",
    "[[notify]] number 2: to is missing: recipients' addresses",
    "no rule 'KV-EVICTS'; did you mean KV-EVICT?",
    "rule KV-EVICT has no severity 'fatal'; use info, warning, critical",
]


def test_all_mistakes_in_tables_and_thresholds_are_named_at_once(
    main: Main, tmp_path: Path
) -> None:
    (tmp_path / "k.toml").write_text(MANY_MISTAKES)
    ended = main("config", "--config", "k.toml")
    mistakes = [
        line.removeprefix("kneewatch: ").removeprefix("file k.toml: ")
        for line in ended.err.splitlines()
    ]
    assert ended.status == 2
    assert len(mistakes) == len(MANY_MESSAGES)
    for message, beginning in zip(mistakes, MANY_MESSAGES, strict=True):
        assert message.startswith(beginning)


def test_every_duration_has_a_limit() -> None:
    # A window of 1e300 s silences every rule, and no socket takes such a timeout.
    notify = [key for key, _ in receivers.KEYS.values()]
    seconds = [each for each in (*SETTINGS, *notify) if each.kind == "seconds"]
    assert [each.key for each in seconds if each.most > 400 * 366 * 86400.0] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_are_documented(main: Main, command: str) -> None:
    short = " ".join(main(command, "--help").out.split())
    whole = " ".join(main(command, "--help-all").out.split()) if "--help-all" in short else short
    for setting in (BY_KEY[key] for key in COMMANDS[command]):
        line = f"{setting.option} ", f"{setting.help} [{setting.env}]"
        assert all(part in whole for part in line) is (setting.shown != "never")
        assert (f"{setting.option} " in short) is (setting.shown == "first")


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_the_help_of_every_command_is_one_screen(main: Main, command: str) -> None:
    assert len(main(command, "--help").out.splitlines()) <= 40


def test_flags_are_unique() -> None:
    options = [setting.option for setting in SETTINGS]
    assert len(set(options)) == len(options)


def test_durations_take_weeks_as_http_requests_do(main: Main) -> None:
    assert "window_s = 604800.0  # flag --window; " in main("config", "--window", "1w").out


@pytest.mark.parametrize("text", ["30", "30s", "0.5m", "30000ms", " 30 s "])
def test_durations(main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    assert "window_s = 30.0  # flag --window; " in main("config", "--window", text).out
    (tmp_path / "k.toml").write_text(f'window_s = "{text}"')
    assert "window_s = 30.0  # file " in main("config", "--config", "k.toml").out
    monkeypatch.setenv("KNEEWATCH_WINDOW_S", text)
    assert "window_s = 30.0  # environment " in main("config").out


def test_variables_that_are_not_meant_as_settings(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that Kubernetes sets for a service called kneewatch, and one that a setting names."""
    monkeypatch.setenv("KNEEWATCH_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KNEEWATCH_PORT", "tcp://10.0.0.1:9877")
    monkeypatch.setenv("KNEEWATCH_FLEET_PORT_9877_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("KNEEWATCH_TOKEN", "sesame")
    assert main("config", "--bearer-token-env", "KNEEWATCH_TOKEN").status == 0
    assert "environment KNEEWATCH_TOKEN: no such setting" in main("config").err


def test_thresholds_reach_the_rules(main: Main, tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("[rules.KV-EVICT]\nwarning = 0.11\n")
    settings = load(file=file, environ={}, flags={})
    (rule,) = [rule for rule in settings.profile().rules if rule.id == "KV-EVICT"]
    assert [bound.threshold for bound in rule.bounds if bound.source == f"file {file}"] == [0.11]


def test_what_is_not_set_is_not_passed_on() -> None:
    settings = load(file=None, environ={}, flags={"window_s": None})
    assert settings.fetch().bearer_token_file is None
    assert settings.fetch().headers == {}
    assert settings.profile().targets.ttft_p99_s is None


def test_commands_share_the_option_of_a_setting() -> None:
    for setting in SETTINGS:
        named = [
            option
            for command in cli.commands.values()
            for option in command.params
            if isinstance(option, HeadedOption) and option.variable == setting.env
        ]
        assert len({id(option) for option in named}) == 1, setting.key


@pytest.mark.parametrize("key", ["window_s", "kv_horizon_s", "usual_after_s"])
def test_a_setting_and_the_diagnosis_have_the_same_default(key: str) -> None:
    assert BY_KEY[key].default == getattr(Profile(), key)
