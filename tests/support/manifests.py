"""The Kubernetes manifests as `kubectl kustomize` makes them, and what they say, without a cluster."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
COMPONENT = "app.kubernetes.io/component"
KUBECTL = shutil.which("kubectl")


@dataclass(frozen=True)
class Pod:
    """One template of pods. `kind` and `name`: of what makes them."""

    kind: str
    name: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def component(self) -> str:
        return self.labels[COMPONENT]

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        """All of them, those that start first ahead."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """By name."""
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", [])}


@cache
def rendered(folder: Path) -> str:
    """What `kubectl apply -k` would send."""
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(overlay: str) -> list[dict[str, Any]]:
    """The objects of an overlay."""
    return [document for document in yaml.safe_load_all(rendered(FOLDER / "overlays" / overlay)) if document]


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [document for document in objects if document["kind"] in kinds]


def pods(objects: list[dict[str, Any]]) -> list[Pod]:
    return [pod for document in objects for pod in _pods_of(document)]


def _pods_of(document: Mapping[str, Any]) -> Iterator[Pod]:
    kind, name = document["kind"], document["metadata"]["name"]
    if kind in ("Deployment", "StatefulSet"):
        template = document["spec"]["template"]
        yield Pod(kind, name, template["metadata"]["labels"], template["spec"])
    elif kind == "LeaderWorkerSet":
        for which in ("leaderTemplate", "workerTemplate"):
            template = document["spec"]["leaderWorkerTemplate"][which]
            yield Pod(kind, name, template["metadata"]["labels"], template["spec"])


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes what has these labels."""
    if any(labels.get(name) != value for name, value in selector.get("matchLabels", {}).items()):
        return False
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


def may_call(policies: list[dict[str, Any]], caller: Pod, called: Pod, port: int) -> bool:
    """Whether the network policies let a connection begin: both ends must. Only what is said of pods counts."""
    return _passes(policies, "egress", "to", caller, called, port) and _passes(
        policies, "ingress", "from", called, caller, port
    )


def _passes(policies: list[dict[str, Any]], way: str, end: str, here: Pod, there: Pod, port: int) -> bool:
    mine = [
        policy["spec"]
        for policy in policies
        if selects(policy["spec"]["podSelector"], here.labels) and way.capitalize() in policy["spec"]["policyTypes"]
    ]
    rules = [rule for spec in mine for rule in spec.get(way, [])]
    return not mine or any(_lets(rule, end, there, port) for rule in rules)


def _lets(rule: Mapping[str, Any], end: str, there: Pod, port: int) -> bool:
    is_port = "ports" not in rule or port in [entry["port"] for entry in rule["ports"]]
    peers = [peer["podSelector"] for peer in rule.get(end, []) if "podSelector" in peer]
    return is_port and any(selects(peer, there.labels) for peer in peers)
