"""The dashboard and the alert rules name only metrics and labels that the services have; the page lists all metrics."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from slipstream.budget import Admission
from slipstream.metrics import REGISTRY, GatewayMetrics, ModelMetrics

ROOT = Path(__file__).resolve().parents[1]
OF_PROMETHEUS = {"up": {"job", "instance"}}
EVERYWHERE = {"job", "instance", "le", "version"}
"""Labels of the scrape, of every histogram, and of the build."""
NAME = re.compile(r"\b((?:slipstream|process|python)_\w+|up)\b(?:\{([^}]*)\})?")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}


def exported() -> dict[str, set[str]]:
    """The labels of every series that a service may show, by its name."""
    registries = CollectorRegistry(), CollectorRegistry(), REGISTRY
    GatewayMetrics(registries[0])
    admission = Admission(budget_bytes=1, max_sessions=1, max_queued=1, queue_timeout_s=1, what="target")
    ModelMetrics(registries[1]).watch(admission)
    found = dict(OF_PROMETHEUS)
    for registry in registries:
        for collector in registry._collector_to_names:
            labels = set(getattr(collector, "_labelnames", ()))
            families: list[Metric] = list(collector.collect())
            for family in families:
                found |= {family.name + suffix: labels | EVERYWHERE for suffix in SUFFIXES[family.type]}
    return found


def expressions() -> list[tuple[str, str]]:
    rules = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((ROOT / "deploy/grafana.json").read_text())["panels"]
    shown = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]
    return [(rule["alert"], rule["expr"]) for rule in rules] + shown


EXPORTED = exported()


@pytest.mark.parametrize(("what", "expression"), expressions())
def test_only_what_is_exported_is_named(what: str, expression: str) -> None:
    used = NAME.findall(expression)
    assert used, what
    grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(",")}
    for name, selector in used:
        assert name in EXPORTED, name
        selected = set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\"", selector))
        assert selected | grouped <= EXPORTED[name] | EVERYWHERE, expression
    assert expression.count("(") == expression.count(")")


def test_every_rule_says_what_to_do() -> None:
    rules: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    assert all(":" in rule["annotations"]["summary"] for rule in rules)


@dataclass(frozen=True)
class Case:
    """What a rule tells of: series of one value a minute, and the minute at which it does. In the first it does not."""

    alert: str
    minute: int
    series: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the alert."""


CASES = (
    Case(
        "SlipstreamStoreTakesNoWrites",
        11,
        {'slipstream_queue_writable{instance="g1",store="redis"}': "1x9 0x5"},
        {"instance": "g1", "store": "redis"},
    ),
    Case(
        "SlipstreamNoWorker",
        11,
        {'slipstream_queue_jobs{state="queued"}': "3x20", 'slipstream_queue_jobs{state="running"}': "1x4 0x20"},
    ),
    Case(
        "SlipstreamArchiveStands",
        61,
        {'slipstream_queue_jobs{state="queued"}': "3x70", 'slipstream_jobs_total{outcome="retried"}': "0+1x70"},
    ),
    Case("SlipstreamOldJob", 12, {"slipstream_queue_oldest_job_age_seconds": "21600+60x20"}),
    Case("SlipstreamJobsDead", 12, {'slipstream_queue_jobs{state="dead"}': "0x9 2x9"}, {"state": "dead"}),
    Case(
        "SlipstreamAcceptanceCollapsed",
        170,
        {"slipstream_tau_sum": "0+1.8x60 108+0.2x120", "slipstream_tau_count": "0+2x180"},
    ),
)


def rule_test(case: Case) -> dict[str, Any]:
    """As promtool reads it."""
    rules = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"][0]["rules"]
    (summary,) = (rule["annotations"]["summary"] for rule in rules if rule["alert"] == case.alert)
    said = {"summary": summary.replace("{{ $labels.instance }}", case.labels.get("instance", ""))}
    told = {"exp_labels": dict(case.labels), "exp_annotations": said}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": "1m", "alertname": case.alert, "exp_alerts": []},
            {"eval_time": f"{case.minute}m", "alertname": case.alert, "exp_alerts": [told]},
        ],
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_rules_tell_of_what_they_are_for(tmp_path: Path) -> None:
    path = tmp_path / "tests.yaml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(ROOT / "deploy/alerts.yaml")], "tests": [rule_test(case) for case in CASES]})
    )
    for words in (["check", "rules", str(ROOT / "deploy/alerts.yaml")], ["test", "rules", str(path)]):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_lists_every_metric() -> None:
    page = (ROOT / "docs/operating.md").read_text()
    ours = {re.sub("_(bucket|sum|count)$", "", name) for name in EXPORTED if name.startswith("slipstream_")}
    assert [name for name in sorted(ours) if f"`{name}`" not in page] == []
