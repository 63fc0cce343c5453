"""The Kubernetes manifests, held to the services' own parsers and to each other; no cluster has run them."""

import math
import re
from typing import Any

import pytest
import yaml

from slipstream.archive.service import HEALTH_NAME
from slipstream.captioning.config import GatewayConfig
from slipstream.config import parse_config
from slipstream.services.draft.__main__ import DraftConfig
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.app import browsers_of
from slipstream.services.front.config import FrontConfig
from slipstream.services.gateway.scaler import SHARE_KEY, _share
from slipstream.services.target.__main__ import TargetConfig
from tests.support.manifests import (
    COMPONENT,
    FOLDER,
    KUBECTL,
    OVERLAYS,
    ROOT,
    Pod,
    documents,
    may_call,
    of_kind,
    pods,
    selects,
)

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
CONFIGS: dict[str, type] = {
    "target": TargetConfig,
    "draft": DraftConfig,
    "gateway": GatewayConfig,
    "front": FrontConfig,
}
GIVEN = {"secret": {"slipstream-redis"}, "claim": {"slipstream-videos", "slipstream-models"}}
"""What the operator makes; docs/scaling.md says how."""
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "leader", "POD_IP": "10.0.0.1"}
"""What the cluster puts into containers."""
SETTLE_S = 5.0
"""Beyond what is configured, for a process to end."""


def expanded(text: str) -> str:
    """With `$(NAME)` of the cluster's filled in; any other is an error."""
    return re.sub(r"\$\((\w+)\)", lambda found: LWS[found[1]], text)


def config_of(container: dict[str, Any]) -> Any:
    """As the service reads its flags and its environment."""
    command = [expanded(word) for word in container["command"]]
    module = command.index("-m") + 1
    service = command[module].rpartition(".")[2]
    assert command[module] == f"slipstream.services.{service}"
    environ = {entry["name"]: expanded(entry["value"]) for entry in container.get("env", []) if "value" in entry}
    return parse_config(CONFIGS[service], service, command[module + 1 :], environ)


def services_in(pod: Pod) -> list[tuple[dict[str, Any], Any]]:
    """Containers that run a service of ours, with its configuration."""
    ours = [dict(container) for container in pod.containers if container["image"] == "slipstream"]
    return [(container, config_of(container)) for container in ours]


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return documents(request.param)


def test_there_are_as_many_as_the_page_says() -> None:
    assert OVERLAYS == ["cpu", "gpu", "gpu-archive", "multi-gpu"]
    page = (ROOT / "docs/scaling.md").read_text()
    assert all(f"`{name}`" in page for name in OVERLAYS)
    assert all(f"`{name}`" in page for names in GIVEN.values() for name in names)


def test_the_services_take_what_they_are_given(objects: list[dict[str, Any]]) -> None:
    configs = [config for pod in pods(objects) for _, config in services_in(pod)]
    assert {type(config) for config in configs} == set(CONFIGS.values())


def test_a_word_that_is_no_option_is_found(objects: list[dict[str, Any]]) -> None:
    container, _ = services_in(pods(objects)[0])[0]
    with pytest.raises(Exception, match="no option of"):
        config_of(container | {"env": [{"name": f"{container['env'][-1]['name']}X", "value": "1"}]})


def test_ports_are_those_that_services_listen_on(objects: list[dict[str, Any]]) -> None:
    for pod in pods(objects):
        for container, config in services_in(pod):
            told = (config.listen, getattr(config, "scaler_listen", ""), getattr(config, "metrics", ""))
            listens = {int(address.rpartition(":")[2]) for address in told if address}
            ports = {port["containerPort"] for port in container.get("ports", [])}
            assert ports <= listens and (not ports or int(config.listen.rpartition(":")[2]) in ports)
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(name, {})
                assert not probe.keys() & {"grpc"} or probe["grpc"]["port"] in ports
                assert not probe.keys() & {"httpGet"} or probe["httpGet"]["port"] in pod.ports


def test_every_service_leads_to_pods_that_have_its_ports(objects: list[dict[str, Any]]) -> None:
    for service in of_kind(objects, "Service"):
        chosen = [pod for pod in pods(objects) if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        assert len(chosen) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert chosen[0].ports[port["targetPort"]] == port["port"]


def addresses(config: Any) -> list[str]:
    """HOST:PORT of others that a service is told to call."""
    if isinstance(config, GatewayConfig):
        return [config.target, config.draft, config.redis.removeprefix("redis://").removesuffix("/0")]
    if isinstance(config, DraftConfig):
        return [config.guidance_targets]
    return [config.gateway] if isinstance(config, FrontConfig) else []


def test_who_is_called_is_there_and_the_networks_let_it_through(objects: list[dict[str, Any]]) -> None:
    policies, all_pods = of_kind(objects, "NetworkPolicy"), pods(objects)
    named = {service["metadata"]["name"]: service["spec"] for service in of_kind(objects, "Service")}
    wanted = set()
    for pod in all_pods:
        for _, config in services_in(pod):
            for host, _, port in (address.rpartition(":") for address in addresses(config)):
                if host == "127.0.0.1":
                    assert int(port) in pod.ports.values()
                    continue
                (called,) = (
                    other for other in all_pods if selects({"matchLabels": named[host]["selector"]}, other.labels)
                )
                assert int(port) in [entry["port"] for entry in named[host]["ports"]]
                wanted.add((pod.component, called.component, int(port)))
    possible = {
        (caller.component, called.component, port)
        for caller in all_pods
        for called in all_pods
        for port in called.ports.values()
        if caller is not called and may_call(policies, caller, called, port)
    }
    between_ranks = {pair for pair in possible if {*pair[:2]} == {"target", "target-rank"}}
    assert wanted == possible - between_ranks


def test_by_default_nobody_reaches_anybody(objects: list[dict[str, Any]]) -> None:
    (nothing,) = (policy for policy in of_kind(objects, "NetworkPolicy") if policy["metadata"]["name"] == "nothing")
    assert nothing["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_beyond_pods_only_names_are_asked_for(objects: list[dict[str, Any]]) -> None:
    """Of the cluster's own pods and of a cache on the node; by every pod, and by TCP where UDP is too short."""
    specs = [policy["spec"] for policy in of_kind(objects, "NetworkPolicy")]
    beyond = [
        (spec["podSelector"], rule)
        for spec in specs
        for rule in spec.get("egress", [])
        if any("podSelector" not in peer for peer in rule.get("to", [{}]))
    ]
    cluster = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    on_the_node = {"ipBlock": {"cidr": "169.254.20.10/32"}}
    ports = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    assert beyond == [({}, {"to": [cluster, on_the_node], "ports": ports})]


def test_every_container_is_hardened(objects: list[dict[str, Any]]) -> None:
    for pod in pods(objects):
        user = pod.spec["securityContext"]
        assert user["runAsNonRoot"] is True and user["runAsUser"] > 0
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
        # Variables such as SLIPSTREAM_GATEWAY_PORT would else be made for a service of that name, and end the start.
        assert pod.spec["enableServiceLinks"] is False
        for container in pod.containers:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True and context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]} and "privileged" not in context
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] or (
                pod.component == "redis"
            )
            writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
            assert set(writable) <= {"/tmp", "/data", "/dev/shm"}


def test_volumes_secrets_and_claims_are_there_or_asked_of_the_operator(objects: list[dict[str, Any]]) -> None:
    claims = {claim["metadata"]["name"] for claim in of_kind(objects, "PersistentVolumeClaim")}
    for pod in pods(objects):
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        own = {"data"} if pod.kind == "StatefulSet" else set()
        mounted = {mount["name"] for container in pod.containers for mount in container["volumeMounts"]}
        assert mounted == {*volumes, *own}
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] in GIVEN["secret"]
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims | GIVEN["claim"]
        for _, config in services_in(pod):
            if isinstance(config, GatewayConfig):
                assert config.redis_password_file == "/run/secrets/redis/password"
    assert not of_kind(objects, "Secret"), "secrets are named, and never in the manifests"


def test_there_is_time_to_end_well(objects: list[dict[str, Any]]) -> None:
    """--drain-s, --archive-drain-s and 5 s more, of one container after the other: models end behind their gateway."""
    for pod in pods(objects):
        needed = 0.0
        for container, config in services_in(pod):
            stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
            needed += float(stop[1]) + config.drain_s + getattr(config, "archive_drain_s", 0.0) + SETTLE_S
        assert needed <= pod.spec["terminationGracePeriodSeconds"] <= max(60, 2 * needed), pod.component


def test_a_worker_that_is_told_to_end_has_time_for_the_longest_job() -> None:
    """Decoded ahead, it waits for a place as long as a caption may take, and then takes as long itself."""
    for overlay in ("cpu", "gpu-archive"):
        (worker,) = (pod for pod in pods(documents(overlay)) if pod.component == "worker")
        (config,) = (config for _, config in services_in(worker) if isinstance(config, GatewayConfig))
        rounds = math.ceil((config.archive_slots + config.archive_ahead) / config.archive_slots)
        assert config.archive_drain_s >= rounds * config.request_timeout_s + config.decode_timeout_s


def test_jobs_run_at_workers_where_there_are_any(objects: list[dict[str, Any]]) -> None:
    has_workers = any(pod.component == "worker" for pod in pods(objects))
    (door,) = (pod for pod in pods(objects) if pod.component == "gateway")
    ((_, config),) = services_in(door)
    assert (config.archive_slots == 0) == has_workers


def test_models_of_a_worker_start_before_its_gateway_and_end_after_it() -> None:
    (worker,) = (pod for pod in pods(documents("cpu")) if pod.component == "worker")
    assert [(each["name"], each["restartPolicy"]) for each in worker.spec["initContainers"]] == [
        ("target", "Always"),
        ("draft", "Always"),
    ]
    assert all("startupProbe" in each for each in worker.spec["initContainers"])
    assert [container["name"] for container in worker.spec["containers"]] == ["gateway"]


def test_a_gateway_that_waits_for_its_target_is_alive_and_not_ready(objects: list[dict[str, Any]]) -> None:
    """A worker is ready for jobs, so it is asked for the archive's health; a door captions without the store, too."""
    found = {}
    for pod in pods(objects):
        for container, config in services_in(pod):
            if isinstance(config, GatewayConfig):
                assert container["livenessProbe"]["grpc"] == {"port": port_of(config.scaler_listen)}
                assert container["readinessProbe"]["grpc"]["port"] == port_of(config.listen)
                assert "startupProbe" not in container
                found[pod.component] = container["readinessProbe"]["grpc"].get("service", "")
    assert found.items() <= {"gateway": "", "worker": HEALTH_NAME}.items() and "gateway" in found


def test_a_gateway_waits_longer_than_any_target_may_take_to_start(objects: list[dict[str, Any]]) -> None:
    """One that gave up would be started again and again, ever later, and nobody would answer KEDA meanwhile."""
    probes = [container.get("startupProbe", {}) for pod in pods(objects) for container, _ in services_in(pod)]
    longest_s = max(probe.get("failureThreshold", 0) * probe.get("periodSeconds", 0) for probe in probes)
    for pod in pods(objects):
        for _, config in services_in(pod):
            assert not isinstance(config, GatewayConfig) or config.start_timeout_s > 2 * longest_s


def test_the_front_is_known_by_every_name_that_its_service_has(objects: list[dict[str, Any]]) -> None:
    (config,) = (config for pod in pods(objects) for _, config in services_in(pod) if isinstance(config, FrontConfig))
    (service,) = (each for each in of_kind(objects, "Service") if each["metadata"]["name"] == "front")
    host, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    browsers = browsers_of(config, has_tokens=False)
    for name in (host, f"{host}.{namespace}", f"{host}.{namespace}.svc", f"{host}.{namespace}.svc.cluster.local"):
        headers = {"host": f"{name}:8000"}
        browsers.check("POST", lambda wanted, headers=headers: headers.get(wanted, ""))
    with pytest.raises(ApiError):
        browsers.check("GET", lambda wanted: {"host": "elsewhere.example"}.get(wanted, ""))


def test_every_service_is_found_dead_and_where_it_counts_unready(objects: list[dict[str, Any]]) -> None:
    for pod in pods(objects):
        if pod.component == "target-rank":
            continue  # it serves nothing, and goes with rank 0
        for container, _ in services_in(pod):
            assert "livenessProbe" in container, (pod.component, container["name"])
            is_optional = (pod.component, container["name"]) == ("worker", "draft")  # without one it is slower
            assert ("readinessProbe" in container) != is_optional


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_budgets_are_of_pods_that_there_are(objects: list[dict[str, Any]]) -> None:
    components = {pod.component for pod in pods(objects)}
    budgets = of_kind(objects, "PodDisruptionBudget")
    chosen = {budget["spec"]["selector"]["matchLabels"][COMPONENT] for budget in budgets}
    assert {"gateway", "target", "draft"} <= chosen <= components


def test_what_scales_is_there_and_the_scaler_takes_what_it_is_told() -> None:
    for overlay in ("cpu", "gpu-archive"):
        objects = documents(overlay)
        (scaled,) = of_kind(objects, "ScaledObject")
        (workload,) = (
            each
            for each in of_kind(objects, "Deployment")
            if each["metadata"]["name"] == scaled["spec"]["scaleTargetRef"]["name"]
        )
        assert "replicas" not in workload["spec"], "an apply would set back what KEDA has scaled"
        (trigger,) = scaled["spec"]["triggers"]
        host, _, port = trigger["metadata"]["scalerAddress"].rpartition(":")
        name, namespace, *rest = host.split(".")
        (service,) = (each for each in of_kind(objects, "Service") if each["metadata"]["name"] == name)
        assert (namespace, rest) == (service["metadata"]["namespace"], ["svc", "cluster", "local"])
        assert {"name": "scaler", "port": int(port), "targetPort": "scaler"} in service["spec"]["ports"]
        assert service["spec"]["publishNotReadyAddresses"], "workers are started while no gateway has a target"
        (worker,) = (pod for pod in pods(objects) if pod.component == "worker")
        (slots,) = (config.archive_slots for _, config in services_in(worker) if isinstance(config, GatewayConfig))
        assert _share(trigger["metadata"][SHARE_KEY], 1) == slots


def test_gpus_are_asked_for_where_models_use_them(objects: list[dict[str, Any]]) -> None:
    for pod in pods(objects):
        for container, config in services_in(pod):
            gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
            device = getattr(config, "device", "cpu")
            per_node = [word for word in container["command"] if word.startswith("--nproc-per-node=")]
            wanted = int(per_node[0].partition("=")[2]) if per_node else int(device.startswith("cuda"))
            assert gpus == wanted


def test_redis_is_as_durable_as_compose_has_it(objects: list[dict[str, Any]]) -> None:
    (redis,) = (pod for pod in pods(objects) if pod.component == "redis")
    words = redis.containers[0]["command"][4:]
    settings = dict(zip(words[::2], words[1::2], strict=True))
    stack = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["redis"]["command"][4:]
    durable = dict(zip(stack[::2], stack[1::2], strict=True))
    for name in ("--appendonly", "--appendfsync", "--save", "--maxmemory-policy"):
        assert settings[name] == durable[name]
    assert int(settings["--maxmemory"].removesuffix("gb")) < int(
        redis.containers[0]["resources"]["limits"]["memory"].removesuffix("Gi")
    )


def test_ranks_of_a_target_are_one_unit() -> None:
    (group,) = of_kind(documents("multi-gpu"), "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart" and template["size"] == 2
    leader, rank = (template[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert leader["command"] == rank["command"] and leader["env"] == rank["env"]
    assert leader["command"][0] == "torchrun"
    # Else no rank finds the leader: our Service of that name leads to those that are ready, which they are together.
    assert group["spec"]["networkConfig"] == {"subdomainPolicy": "UniquePerReplica"}
    assert not of_kind([each for each in documents("multi-gpu") if each["metadata"]["name"] == "target"], "Deployment")


def test_no_file_is_left_out() -> None:
    """Of a folder with a kustomization every file is in it."""
    for path in FOLDER.rglob("kustomization.yaml"):
        said = path.read_text()
        others = {other.name for other in path.parent.glob("*.yaml")} - {path.name}
        assert all(name in said for name in others), path
