"""Dockerfile and compose files, as far as they can be judged without a daemon; `make compose-check` runs them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.captioning.config import GatewayConfig
from slipstream.config import parse_config
from slipstream.services.draft.__main__ import DraftConfig
from slipstream.services.target.__main__ import TargetConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIGS: dict[str, type] = {"target": TargetConfig, "draft": DraftConfig, "gateway": GatewayConfig}
OVERRIDES = sorted(path.name for path in ROOT.glob("compose.*.yaml"))
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^${}]*)|:\+(?:[^${}]|\$\{\w+\})*)?\}")


def services(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return document["services"]


STACK = services("compose.yaml")


def with_defaults(text: str) -> str:
    """What compose makes of it in an empty environment."""
    return VARIABLE.sub(lambda found: found[2] or "", text)


def config_of(service: str, environment: Mapping[str, str]) -> Any:
    module, *flags = STACK[service]["command"][2:]
    assert module == f"slipstream.services.{service}"
    environ = {name: with_defaults(str(value)) for name, value in environment.items()}
    return parse_config(CONFIGS[service], service, [with_defaults(flag) for flag in flags], environ)


def test_defaults_are_filled_in() -> None:
    assert with_defaults("127.0.0.1:${PORT:-50050}:1") == "127.0.0.1:50050:1"
    assert with_defaults("redis://${PASSWORD:+:${PASSWORD}@}redis:6379") == "redis://redis:6379"


def test_the_stack_is_whole() -> None:
    assert set(STACK) == {"redis", *CONFIGS}


@pytest.mark.parametrize("service", STACK)
def test_every_container_is_hardened(service: str) -> None:
    settings = STACK[service]
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"] and "cap_add" not in settings
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert not settings.get("privileged") and "network_mode" not in settings
    assert settings["init"] is True and settings["restart"] == "unless-stopped"
    assert settings["pids_limit"] and settings["mem_limit"] and settings["healthcheck"]["test"]
    user = with_defaults(settings["user"])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), user
    assert all(mount.endswith(":ro") for mount in settings["volumes"] if "/" in mount.partition(":")[0])


def test_only_the_gateway_is_published_and_on_loopback() -> None:
    published = {name: settings["ports"] for name, settings in STACK.items() if "ports" in settings}
    assert list(published) == ["gateway"]
    assert all(with_defaults(port).startswith("127.0.0.1:") for port in published["gateway"])


def test_only_the_gateway_is_on_a_network_that_leads_outside() -> None:
    networks = yaml.safe_load((ROOT / "compose.yaml").read_text())["networks"]
    assert networks["back"]["internal"] is True
    assert {name for name, settings in STACK.items() if settings["networks"] != ["back"]} == {"gateway"}


def test_one_service_builds_the_image_for_all() -> None:
    assert [name for name, settings in STACK.items() if "build" in settings] == ["target"]
    assert len({STACK[service]["image"] for service in CONFIGS}) == 1


@pytest.mark.parametrize("service", CONFIGS)
def test_the_services_take_what_compose_gives_them(service: str) -> None:
    config = config_of(service, STACK[service]["environment"])
    port = config.listen.rpartition(":")[2]
    assert STACK[service]["healthcheck"]["test"][-1] == f"127.0.0.1:{port}"
    if service == "gateway":
        assert config.video_roots == "/videos"
        assert config.target == "target:" + config_of("target", STACK["target"]["environment"]).listen.split(":")[1]
        assert config.draft == "draft:" + config_of("draft", STACK["draft"]["environment"]).listen.split(":")[1]


@pytest.mark.parametrize("name", OVERRIDES)
def test_the_services_take_what_overrides_give_them(name: str) -> None:
    for service, settings in services(name).items():
        config_of(service, STACK[service]["environment"] | settings.get("environment", {}))
        assert not {"privileged", "cap_add", "network_mode", "ports"} & set(settings)


def test_redis_is_durable_and_never_evicts() -> None:
    words = STACK["redis"]["command"]
    settings = dict(zip(words[1::2], words[2::2], strict=True))
    assert settings["--appendonly"] == "yes" and settings["--appendfsync"] == "always"
    assert settings["--maxmemory-policy"] == "noeviction"
    assert "redis:/data" in STACK["redis"]["volumes"]


def test_the_dockerfile_asks_no_registry_for_more_than_its_base() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "syntax=" not in text and "@sha256" not in text
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert set(bases) == {"${BASE}"}
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE) == ["10001:10001"]


def test_the_build_context_has_what_the_dockerfile_copies() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            source = source.removesuffix("*").removesuffix("/")
            assert source in sent or source.partition("/")[0] in sent, source


@pytest.mark.parametrize("name", ["", *OVERRIDES])
def test_compose_reads_the_files(name: str) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, timeout=30).returncode:
        pytest.skip("no docker compose here")
    files = ["compose.yaml", *filter(None, [name])]
    words = [docker, "compose", *(word for file in files for word in ("-f", file)), "config", "--quiet"]
    reading = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, complaint = reading.communicate(timeout=60)
    except subprocess.TimeoutExpired:  # docker 26's client and its plugin have been seen to spin for ever
        pytest.skip("docker compose hangs here")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(reading.pid, signal.SIGKILL)
    assert reading.returncode == 0, complaint
