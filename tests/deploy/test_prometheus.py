"""Alert rules and dashboard: every metric that they name is exported, every alert has its line in the runbook, and
promtool reads them (Debian's package prometheus; what needs it is skipped where it is missing)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvstore.daemon.metrics import METRICS

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "deploy/prometheus/alerts.yml"
UNIT: Final = ROOT / "deploy/prometheus/alerts_test.yml"
DASHBOARD: Final = ROOT / "deploy/grafana/kvstored.json"

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus"
)

SAMPLES: Final = {
    sample: metric
    for metric in METRICS
    for sample in {
        "histogram": [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")],
        "info": [f"{metric.name}_info"],
    }.get(metric.kind, [metric.name])
}
"""What Prometheus calls the samples, and the rows that they belong to."""


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Where an expression stands, and the expression."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for note in json.loads(DASHBOARD.read_text())["annotations"]["list"]:
        yield note["name"], note["expr"]


def wrong_names(expression: str) -> list[str]:
    """Samples that nothing exports, and labels that the metric has not."""
    wrong = []
    for name, matchers in re.findall(r"\b(kvstore_\w+)(?:\{([^}]*)\})?", expression):
        if name not in SAMPLES:
            wrong.append(name)
            continue
        known = {*SAMPLES[name].labels, "instance", "job", "le"}
        wrong += [f"{name}.{label}" for label in re.findall(r"(\w+)\s*(?:=|!)", matchers) if label not in known]
    return wrong


def test_every_metric_that_is_asked_for_is_exported():
    assert {where: wrong for where, expression in queries() if (wrong := wrong_names(expression))} == {}


def test_a_name_that_is_not_exported_is_found():
    assert wrong_names('rate(kvstore_nothing_total[5m]) + kvstore_call_seconds{x="1"}') == [
        "kvstore_nothing_total", "kvstore_call_seconds",
    ]  # fmt: skip
    assert wrong_names('kvstore_tier_up{tier="ssd", method="x"}') == ["kvstore_tier_up.method"]


def test_rates_are_of_counters_and_levels_are_not():
    kinds = {metric.name: metric.kind for metric in METRICS}
    for where, expression in queries():
        for name in re.findall(r"(?:rate|increase)\((kvstore_\w+)", expression):
            assert SAMPLES[name].kind in ("counter", "histogram"), (where, name)
    assert "gauge" in kinds.values()


def test_every_alert_has_its_line_in_the_runbook():
    document = (ROOT / "docs/operations.md").read_text()
    section = document.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE))
    alerts = [rule for rule in rules() if "alert" in rule]
    assert [*told] == [rule["alert"] for rule in alerts]
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["runbook"] == "docs/operations.md#alerts"


def test_the_dashboard_is_whole():
    board = json.loads(DASHBOARD.read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "instance"]


def run_promtool(*arguments: str) -> str:
    found = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@promtool
def test_promtool_reads_the_rules_and_their_tests_pass():
    assert f"{len(rules())} rules found" in run_promtool("check", "rules", str(RULES))
    assert "SUCCESS" in run_promtool("test", "rules", str(UNIT))


@promtool
def test_promtool_reads_the_queries_of_the_dashboard(tmp_path: Path):
    made = [
        {"record": f"q:{number}", "expr": expression.replace("$__rate_interval", "5m").replace("$instance", ".*")}
        for number, (_, expression) in enumerate(queries())
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": made}]}))
    run_promtool("check", "rules", str(file))
