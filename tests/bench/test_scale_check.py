"""The part `manifests` of scale-check fails where something is missing or wrong, and says what."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import scale_check
from bench.scale_check import CUSTOM, passed, run_manifests

WANTED = {"kubectl", "kubernetes-validate", *CUSTOM}


def definition(name: str, properties: dict[str, Any]) -> str:
    """A `CustomResourceDefinition` of the kind, whose `spec` has these."""
    version, kind = name.split()
    group, _, number = version.partition("/")
    spec = {"type": "object", "properties": properties}
    fields = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": spec,
    }
    schema = {"openAPIV3Schema": {"type": "object", "properties": fields}}
    found = {"group": group, "names": {"kind": kind}, "versions": [{"name": number, "schema": schema}]}
    return yaml.safe_dump({"kind": "CustomResourceDefinition", "spec": found})


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    version, kind = name.split()
    return {"apiVersion": version, "kind": kind, "metadata": {"name": "it"}, "spec": spec}


@pytest.mark.parametrize(
    "there", [set(), WANTED - {"kubectl"}, WANTED - {"kubernetes-validate"}, *({*WANTED} - {name} for name in CUSTOM)]
)
async def test_what_is_missing_is_named_and_fails(
    there: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_check, "KUBECTL", "kubectl" if "kubectl" in there else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if "kubernetes-validate" in there else None)
    for number, name in enumerate(there & CUSTOM.keys()):
        (tmp_path / f"{number}.yaml").write_text(definition(name, {}))
    report = await run_manifests(argparse.Namespace(crds=str(tmp_path)))
    assert not passed("manifests", report)
    for name in WANTED:
        found = [line for line in report["missing"] if line.startswith(name)]
        assert len(found) == (name not in there), report
        if name in CUSTOM and found:
            assert CUSTOM[name].project in found[0] and CUSTOM[name].file in found[0] and str(tmp_path) in found[0]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [({"replicas": 2}, ""), ({"replicas": "two"}, "'two' is not of type 'integer'"), ({"replica": 2}, "'replica' was")],
)
def test_a_wrong_and_an_unknown_field_of_another_projects_kind_are_found(
    spec: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    pytest.importorskip("jsonschema", reason="it comes with kubernetes-validate")
    name = next(iter(CUSTOM))
    (tmp_path / "it.yaml").write_text(definition(name, {"replicas": {"type": "integer"}}))
    schemas = scale_check._definitions(tmp_path)
    found = scale_check._custom_complaints([manifest(name, **spec), manifest("v1 Service", other=1)], schemas)
    assert bool(found) == bool(complaint) and all(complaint in each for each in found)


def test_a_complaint_fails() -> None:
    assert passed("manifests", {"complaints": []}) and not passed("manifests", {"complaints": ["no such field"]})


def test_the_manifests_kinds_of_others_are_those_that_are_wanted() -> None:
    folder = scale_check.FOLDER
    found = [each for path in folder.rglob("*.yaml") for each in yaml.safe_load_all(path.read_text()) if each]
    names = {f"{each['apiVersion']} {each['kind']}" for each in found if "kind" in each}
    assert {name for name in names if name.split("/")[0] in ("keda.sh", "leaderworkerset.x-k8s.io")} == CUSTOM.keys()
