"""`kneewatch export`: files that promtool takes, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from kneewatch.agent.settings.table import OPTIONS
from kneewatch.dashboards.prometheus.rule_files import Flavor
from tests.agent.running import Main
from tests.programs import require


def test_rules_and_their_tests(main: Main, tmp_path: Path) -> None:
    ended = main("export", "prometheus-tests", str(tmp_path / "out"), "--slo-ttft", "2s")
    assert ended.status == 0
    rules, tests = (Path(line) for line in ended.out.splitlines())
    # What they expect is tried in tests/dashboards/test_rules.py.
    document = yaml.load(tests.read_text(), yaml.CSafeLoader)
    (test,) = document["tests"]
    tests.write_text(json.dumps({**document, "tests": [{**test, "promql_expr_test": []}]}))
    for command in (["check", "rules", str(rules)], ["test", "rules", str(tests)]):
        subprocess.run([require("promtool"), *command], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("flavor", "wanted", "absent"),
    [
        ("prometheus", "rate(vllm:", "increase_prometheus("),
        ("victoriametrics", "increase_prometheus(", "keep_firing_for"),
        ("without-keep-firing", "rate(vllm:", "keep_firing_for"),
        ("prometheus-operator", "kind: PrometheusRule", "increase_prometheus("),
    ],
)
def test_a_folder_holds_the_rules_once(
    flavor: str, wanted: str, absent: str, main: Main, tmp_path: Path
) -> None:
    exported = main("export", "prometheus-rules", str(tmp_path), "--flavor", flavor)
    (rules,) = (Path(line) for line in exported.out.splitlines())
    assert [*tmp_path.glob("*.yml"), *tmp_path.glob("*.yaml"), *tmp_path.glob("*.rules")] == [rules]
    assert wanted in rules.read_text()
    assert absent not in rules.read_text()
    assert exported.err == ""


def test_a_prometheus_loads_the_folder(main: Main, tmp_path: Path) -> None:
    main("export", "prometheus-tests", str(tmp_path / "rules"))
    config = tmp_path / "prometheus.yml"
    config.write_text("rule_files: [rules/*.yml]")
    check = [require("promtool"), "check", "config", str(config)]
    checked = subprocess.run(check, check=True, capture_output=True, text=True)
    assert "1 rule files found" in checked.stdout


def test_the_rules_of_another_export_are_named(main: Main, tmp_path: Path) -> None:
    main("export", "prometheus-rules", str(tmp_path), "--flavor", "prometheus-operator")
    (tmp_path / "mine.yml").write_text("groups: []")
    exported = main("export", "prometheus-rules", str(tmp_path))
    assert exported.status == 0
    (line,) = exported.err.splitlines()
    assert line.startswith(str(tmp_path / "kneewatch.prometheusrule.yml"))


def test_promtool_cannot_test_every_flavor(main: Main, tmp_path: Path) -> None:
    refused = main("export", "prometheus-tests", str(tmp_path), "--flavor", "victoriametrics")
    assert refused.status == 2
    assert "--flavor" in refused.err
    assert list(tmp_path.iterdir()) == []


def test_every_flavor_can_be_asked_for() -> None:
    assert OPTIONS["flavor"]["choices"] == list(Flavor)


def test_flags_reach_the_rules(main: Main, tmp_path: Path) -> None:
    main(
        "export", "prometheus-rules", str(tmp_path), "--prefix", "ray_vllm_", "--label", "team",
        "--window", "2m", "--selector", 'env="prod"', "--slo-itl", "50ms",
    )  # fmt: skip
    text = (tmp_path / "kneewatch.rules.yml").read_text()
    assert 'ray_vllm_num_requests_running{env="prod",model_name!=""}' in text
    assert "[120s]" in text
    assert "[4m]" in text
    assert "engine, team)" in text
    itl = 'ray_vllm_inter_token_latency_seconds_bucket{env="prod",kneewatch_goal!="throughput"}'
    assert f"{itl}[5m])) > 0.05" in text


def test_a_fleet_of_two_engines_has_a_group_for_each(main: Main, tmp_path: Path) -> None:
    engines = ("--engine", "sglang", "--engine", "vllm")
    main("export", "prometheus-rules", str(tmp_path / "both"), *engines)
    main("export", "prometheus-rules", str(tmp_path / "vllm"))
    both, alone = (
        yaml.load((tmp_path / name / "kneewatch.rules.yml").read_text(), yaml.CSafeLoader)
        for name in ("both", "vllm")
    )
    names = [group["name"] for group in both["groups"]]
    count = len(alone["groups"])
    assert both["groups"][:count] == alone["groups"]
    assert names[count:] == ["kneewatch-sglang", "kneewatch-signals-sglang"]
    main("export", "grafana", str(tmp_path / "boards"), *engines)
    main("export", "grafana", str(tmp_path / "sglang"), "--engine", "sglang")
    assert len([*(tmp_path / "boards").iterdir()]) > len([*(tmp_path / "sglang").iterdir()])


def test_a_prefix_of_another_engine_chooses_it(main: Main, tmp_path: Path) -> None:
    main("export", "prometheus-rules", str(tmp_path), "--prefix", "sglang_")
    text = (tmp_path / "kneewatch.rules.yml").read_text()
    assert "rate(sglang_num_retracted_requests_total[2m])" in text
    assert "vllm:" not in text
    ended = main(
        "export", "prometheus-rules", str(tmp_path / "x"),
        "--prefix", "sglang_", "--engine", "tensorrt-llm",
    )  # fmt: skip
    assert ended.status == 2
    assert "add --engine sglang" in ended.err


def test_rules_for_names_with_a_dot_are_rules_that_a_server_loads(
    main: Main, tmp_path: Path
) -> None:
    main("export", "prometheus-rules", str(tmp_path), "--prefix", "vllm.")
    rules = tmp_path / "kneewatch.rules.yml"
    assert '{__name__="vllm.num_requests_running",model_name!=""}' in rules.read_text()
    check = [require("promtool"), "check", "rules", str(rules)]
    subprocess.run(check, check=True, capture_output=True)


def test_gpus_are_selected_as_stated(main: Main, tmp_path: Path) -> None:
    main("export", "prometheus-rules", str(tmp_path), "--gpu-selector", 'cluster="a"')
    assert 'DCGM_FI_DEV_SM_CLOCK{cluster="a"}' in (tmp_path / "kneewatch.rules.yml").read_text()


def test_a_join_of_gpus_is_accepted_and_changes_nothing(main: Main, tmp_path: Path) -> None:
    main("export", "prometheus-rules", str(tmp_path / "joined"), "--gpu-join", "pod=exported_pod")
    main("export", "prometheus-rules", str(tmp_path / "plain"))
    joined, plain = (tmp_path / name / "kneewatch.rules.yml" for name in ("joined", "plain"))
    assert joined.read_text() == plain.read_text()


def test_a_window_of_too_few_evaluations_is_refused(main: Main, tmp_path: Path) -> None:
    ended = main("export", "prometheus-rules", str(tmp_path), "--evaluation-interval", "30s")
    assert ended.status == 2
    assert "--window" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_ranges_follow_the_scrape_interval(main: Main, tmp_path: Path) -> None:
    every_minute = ("--scrape-interval", "60s", "--evaluation-interval", "60s")
    ended = main("export", "prometheus-rules", str(tmp_path), *every_minute)
    assert ended.status == 0
    assert "ranges are 240 s" in ended.err
    text = (tmp_path / "kneewatch.rules.yml").read_text()
    assert "ranges are 240 s" in text
    assert "rate(vllm:generation_tokens_total[4m])" in text
    assert not re.search(r"vllm:\w+(\{[^}]*\})?\[(60s|1m|2m)\]", text)


def test_what_an_interval_cannot_serve_is_named(main: Main, tmp_path: Path) -> None:
    ended = main("export", "prometheus-rules", str(tmp_path), "--scrape-interval", "90s")
    assert "Left out, scraped every 90 s: group kneewatch-hourly" in ended.err
    assert "name: kneewatch-hourly" not in (tmp_path / "kneewatch.rules.yml").read_text()
    ended = main("export", "prometheus-rules", str(tmp_path / "none"), "--scrape-interval", "5m")
    assert ended.status == 2
    assert "--scrape-interval" in ended.err
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_is_named(main: Main, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = main("export", "prometheus-rules", str(tmp_path / "file" / "out"))
    assert ended.status == 2
    assert str(tmp_path / "file") in ended.err


def test_dashboards_and_what_dcgm_exporter_needs(main: Main, tmp_path: Path) -> None:
    boards = main("export", "grafana", str(tmp_path / "grafana")).out.splitlines()
    assert len(boards) >= 9
    assert all(Path(board).read_text().startswith("{") for board in boards)
    fields, scrape = main("export", "dcgm", str(tmp_path / "dcgm")).out.splitlines()
    assert "DCGM_FI_PROF_SM_ACTIVE, gauge" in Path(fields).read_text()
    config = ["check", "config", "--syntax-only", scrape]
    subprocess.run([require("promtool"), *config], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--label", "a b"),
        ("--label", ""),
        ("--label", "le"),
        ("--prefix", "a b"),
        ("--prefix", "acme."),
        ("--engine", "dynamo"),
        ("--selector", "namespace=chat"),
        ("--gpu-selector", "x}"),
    ],
)
def test_what_would_make_rules_that_no_server_loads_is_refused(
    main: Main, tmp_path: Path, flag: str, value: str
) -> None:
    ended = main("export", "prometheus-rules", str(tmp_path / "rules"), flag, value)
    assert ended.status == 2
    assert f"{flag}: " in ended.err
    assert not (tmp_path / "rules").exists()
