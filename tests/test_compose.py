"""Dockerfile and compose files, as far as they can be judged without a daemon; `make compose-check` runs them."""

import contextlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.captioning.config import GatewayConfig
from slipstream.config import parse_config
from slipstream.documents.messages import DocumentLimits
from slipstream.engine.startup import MPS_FOLDER, MPS_VARIABLE
from slipstream.errors import InvalidConfig
from slipstream.services.draft.__main__ import DraftConfig
from slipstream.services.front.config import FrontConfig
from slipstream.services.reader.__main__ import ReaderConfig
from slipstream.services.target.__main__ import TargetConfig

ROOT = Path(__file__).resolve().parents[1]
CONFIGS: dict[str, type] = {
    "target": TargetConfig,
    "draft": DraftConfig,
    "reader": ReaderConfig,
    "gateway": GatewayConfig,
    "front": FrontConfig,
}
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
    assert all(mount.endswith(":ro") for mount in settings.get("volumes", []) if "/" in mount.partition(":")[0])


def test_only_the_doors_are_published_and_on_loopback() -> None:
    published = {name: settings["ports"] for name, settings in STACK.items() if "ports" in settings}
    assert list(published) == ["gateway", "front"]
    assert all(with_defaults(port).startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_networks_are_apart_and_none_leads_outside() -> None:
    networks = yaml.safe_load((ROOT / "compose.yaml").read_text())["networks"]
    assert {name: settings["networks"] for name, settings in STACK.items()} == {
        "redis": ["queue"],
        "target": ["models"],
        "draft": ["models"],
        "reader": ["reader"],
        "gateway": ["front", "models", "queue", "reader"],
        "front": ["front"],
    }
    assert networks["models"] == networks["queue"] == networks["reader"] == {"internal": True}
    assert networks["front"]["driver_opts"] == {"com.docker.network.bridge.enable_ip_masquerade": "false"}


def test_only_who_fetches_videos_gets_a_network_that_leads_outside() -> None:
    for name in OVERRIDES:
        document = yaml.safe_load((ROOT / name).read_text())
        outside = {service for service, settings in document["services"].items() if "networks" in settings}
        assert (document.get("networks"), outside) == (
            ({"egress": None}, {"gateway"}) if "egress" in name else (None, set())
        )


def test_mps_is_the_same_for_both_models() -> None:
    target, draft = (services("compose.mps.yaml")[name] for name in ("target", "draft"))
    assert target == draft and target["ipc"] == "host"
    assert target["volumes"] == ["${SLIPSTREAM_MPS:-/tmp/nvidia-mps}:/tmp/nvidia-mps"]
    assert target["environment"] == {MPS_VARIABLE: MPS_FOLDER}


def test_secrets_are_files() -> None:
    document = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert set(document["secrets"]) == {"redis_password"} and "file" in document["secrets"]["redis_password"]
    assert {name for name, settings in STACK.items() if "secrets" in settings} == {"redis", "gateway"}
    config = config_of("gateway", STACK["gateway"]["environment"])
    assert config.redis == "redis://redis:6379/0" and config.redis_password_file == "/run/secrets/redis_password"
    said = [*STACK["redis"]["command"], *map(str, STACK["redis"].get("environment", {}).values())]
    assert not any("PASSWORD" in word or "--requirepass" in word for word in said)
    default = with_defaults(document["secrets"]["redis_password"]["file"]).removeprefix("./")
    assert f"\n{default}:\n" in (ROOT / "Makefile").read_text()
    assert "secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_redis_reads_its_password_from_the_file(tmp_path: Path) -> None:
    """The line of shell as it stands, with other folders and with a printer in place of the server."""
    shell, flags, script, name, *options = STACK["redis"]["command"]
    (tmp_path / "redis_password").write_text("abc123\n")
    script = script.replace("/run/secrets", str(tmp_path)).replace("/tmp/password", f"{tmp_path}/password")
    script = script.replace("exec redis-server", "printf '%s\\n'").replace("$$", "$")
    shown = subprocess.run(
        [shell, flags, script, name, *options], capture_output=True, text=True, check=True, timeout=30
    )
    assert shown.stdout.splitlines() == [f"{tmp_path}/password.conf", *options]
    assert (tmp_path / "password.conf").read_text().splitlines() == ["requirepass abc123"]
    assert (tmp_path / "password.conf").stat().st_mode & 0o777 == 0o600


def test_a_password_file_completes_the_url(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("a/b@c\n")
    base = GatewayConfig(listen="127.0.0.1:0", target="t:1", redis_password_file=str(file))
    urls = ("redis://redis:6379/0", "rediss://me@redis/0", "unix:///run/a@b.sock", "sentinel://one:1,two:2/queue")
    assert [replace(base, redis=url).redis_url for url in urls] == [
        "redis://:a%2Fb%40c@redis:6379/0",
        "rediss://me:a%2Fb%40c@redis/0",
        "unix://:a%2Fb%40c@/run/a@b.sock",
        "sentinel://:a%2Fb%40c@one:1,two:2/queue",
    ]
    for wrong in ("redis://:other@redis", "redis"):
        with pytest.raises(InvalidConfig, match="--redis-password-file"):
            assert replace(base, redis=wrong).redis_url
    file.unlink()
    with pytest.raises(InvalidConfig, match="--redis-password-file: cannot read"):
        assert replace(base, redis=urls[0]).redis_url


MIB = 1024**2
PICTURE_BYTES = 3 * DocumentLimits.max_page_pixels
FRAME_BYTES = 448 * 448 * 3
GATEWAY_MIB, MODEL_MIB = 256, 1024
"""A service at rest: the gateway with two decoders; a pocket model with torch, and room for its passes."""
READER_MIB, READING_MIB = 128, 768
"""The reader's service at rest, and one process with a document's page; one more waits ready."""
FRONT_REQUEST_MIB = 1
"""A request at the front: its JSON is some kilobytes, and its media beyond 256 KiB are on the disk."""
UNITS = {"m": MIB, "g": 1024 * MIB}


def num_bytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(?:m|g)b?", text), text.rstrip("b")[-1]
    assert number is not None
    return int(number[1]) * UNITS[unit]


def test_limits_of_memory_follow_from_the_settings() -> None:
    """docs/operating.md has the same sums in words."""
    gateway = config_of("gateway", STACK["gateway"]["environment"])
    frames = gateway.max_frames * FRAME_BYTES
    captions = gateway.max_captions + gateway.archive_slots
    (tmpfs,) = (re.search(r"size=([^,]+)", with_defaults(mount)) for mount in STACK["gateway"]["tmpfs"])
    assert tmpfs is not None
    uploads, decoders = num_bytes(tmpfs[1]), gateway.decode_workers * gateway.decode_memory_mb * MIB
    needed = {"gateway": GATEWAY_MIB * MIB + uploads + decoders + (captions + gateway.archive_ahead) * frames}
    pictures = (gateway.pages_at_once + 1) * PICTURE_BYTES
    needed["gateway"] += gateway.documents_at_once * (gateway.max_document_bytes + pictures)
    for name in ("target", "draft"):
        budget_mib = config_of(name, STACK[name]["environment"]).kv_budget_mb
        assert budget_mib, "half of what is available is not what is left beside frames"
        needed[name] = (MODEL_MIB + budget_mib) * MIB + captions * frames
    reader = config_of("reader", STACK["reader"]["environment"])
    needed["reader"] = (READER_MIB + (reader.max_documents + 1) * READING_MIB) * MIB
    needed["reader"] += (reader.max_documents + reader.max_queued) * reader.max_document_mb * MIB
    for name, least in needed.items():
        assert least <= num_bytes(with_defaults(STACK[name]["mem_limit"])) <= 1.3 * least, (name, least / MIB)
    front = config_of("front", STACK["front"]["environment"])
    assert front.max_requests * FRONT_REQUEST_MIB <= num_bytes(with_defaults(STACK["front"]["mem_limit"])) / MIB
    words = STACK["redis"]["command"][4:]
    kept = dict(zip(words[::2], words[1::2], strict=True))["--maxmemory"]
    assert num_bytes(with_defaults(kept)) < num_bytes(with_defaults(STACK["redis"]["mem_limit"]))


def test_every_container_has_a_limit_of_cores_to_set() -> None:
    limits = {name: float(with_defaults(str(settings["cpus"]))) for name, settings in STACK.items()}
    assert limits == {"redis": 1, "target": 0, "draft": 0, "reader": 2, "gateway": 2, "front": 1}


def test_images_from_elsewhere_can_be_pinned_and_no_registry_is_named() -> None:
    assert STACK["target"]["build"]["args"] == {"BASE": "${SLIPSTREAM_BASE:-python:3.11-slim}"}
    assert STACK["redis"]["image"] == "${SLIPSTREAM_REDIS_IMAGE:-redis:7-bookworm}"
    assert "ARG BASE=python:3.11-slim\n" in (ROOT / "Dockerfile").read_text()


def test_one_service_builds_the_image_for_all_but_the_reader() -> None:
    assert [name for name, settings in STACK.items() if "build" in settings] == ["target", "reader"]
    assert len({STACK[service]["image"] for service in CONFIGS if service != "reader"}) == 1
    assert STACK["reader"]["build"] == STACK["target"]["build"] | {"target": "reader"}
    assert STACK["reader"]["image"] != STACK["target"]["image"]


def test_the_readers_image_has_what_it_imports_and_no_torch() -> None:
    """As far as this environment tells: the service's imports, and what reading documents needs."""
    installed = set(re.findall(r"[\w-]+", " ".join(re.findall(r"^ {8}([a-z].*?) \\$", reader_stage(), re.MULTILINE))))
    listing = "import sys, slipstream.services.reader.__main__, slipstream.rpc.probe; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True, timeout=60)
    owners = importlib.metadata.packages_distributions()
    needed = {
        owner.lower().replace("_", "-")
        for module in loaded.stdout.split()
        if "." not in module
        for owner in owners.get(module, [])
    }
    only_here = {"slipstream", "setuptools", "typing-extensions", "rich", "pygments"}
    # shares `google` with protobuf; structlog and rich look for the others
    only_here |= {"googleapis-common-protos", "greenlet", "attrs"}
    assert needed - only_here <= installed
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["documents"]
    assert {name.partition(">")[0] for name in extra} <= installed
    assert not {"torch", "transformers"} & (installed | needed)


def reader_stage() -> str:
    return (ROOT / "Dockerfile").read_text().partition("AS reader-builder")[2].partition("AS reader\n")[0]


@pytest.mark.parametrize("service", CONFIGS)
def test_the_services_take_what_compose_gives_them(service: str) -> None:
    config = config_of(service, STACK[service]["environment"])
    port = config.listen.rpartition(":")[2]
    assert f"127.0.0.1:{port}" in STACK[service]["healthcheck"]["test"][-1]
    if service == "front":
        gateway = config_of("gateway", STACK["gateway"]["environment"])
        assert config.gateway == "gateway:" + gateway.listen.rpartition(":")[2]
        assert f"{config.data}/media" in gateway.video_roots.split(":") and config.shared_media
        assert STACK["front"]["volumes"] == ["front:/data"] and "front:/data:ro" in STACK["gateway"]["volumes"]
    if service == "draft":
        assert config.guidance_targets == STACK["gateway"]["environment"]["SLIPSTREAM_GATEWAY_TARGET"]
    if service == "reader":
        assert config.max_documents == config_of("gateway", STACK["gateway"]["environment"]).documents_at_once
        assert config.owner_share == 1
    if service == "gateway":
        assert config.reader == ""
        told = (
            f"COMPOSE_PROFILES=documents, SLIPSTREAM_READER=reader:{STACK['reader']['healthcheck']['test'][-1][-5:]} "
        )
        assert told in (ROOT / "compose.yaml").read_text()
        assert config.video_roots == "/videos:/data/media"
        assert config.target == "target:" + config_of("target", STACK["target"]["environment"]).listen.split(":")[1]
        assert config.draft == "draft:" + config_of("draft", STACK["draft"]["environment"]).listen.split(":")[1]


@pytest.mark.parametrize("name", OVERRIDES)
def test_the_services_take_what_overrides_give_them(name: str) -> None:
    for service, settings in services(name).items():
        config_of(service, STACK[service]["environment"] | settings.get("environment", {}))
        assert not {"privileged", "cap_add", "network_mode", "ports", "secrets"} & set(settings)


def test_redis_is_durable_and_never_evicts() -> None:
    front = config_of("front", STACK["front"]["environment"])
    assert front.max_requests * FRONT_REQUEST_MIB <= num_bytes(with_defaults(STACK["front"]["mem_limit"])) / MIB
    words = STACK["redis"]["command"][4:]
    settings = dict(zip(words[::2], words[1::2], strict=True))
    assert settings["--appendonly"] == "yes" and settings["--appendfsync"] == "always"
    assert settings["--maxmemory-policy"] == "noeviction"
    assert "redis:/data" in STACK["redis"]["volumes"]


def test_the_dockerfile_asks_no_registry_for_more_than_its_base() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "syntax=" not in text and "@sha256" not in text
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert set(bases) == {"${BASE}"}
    assert set(re.findall(r"^USER (\S+)", text, re.MULTILINE)) == {"10001:10001"}
    assert text.rpartition("\nFROM ")[2].startswith("${BASE}\n"), "what is built without a name is the image for all"


def test_the_build_context_has_what_the_dockerfile_copies() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            source = source.removesuffix("*").removesuffix("/")
            assert source in sent or source.partition("/")[0] in sent, source


def test_what_the_image_is_made_of_is_readable_for_its_user_whatever_the_builders_umask() -> None:
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")[1:]
    copying = [stage for stage in stages if re.search("^COPY (?!--from)", stage, re.MULTILINE)]
    assert len(copying) == 2 and not any("\nUSER " in stage for stage in copying)
    for stage in copying:
        _, _, behind_sources = stage.rpartition("\nCOPY ")
        assert "WORKDIR /app\n" in stage and behind_sources.rstrip().endswith(" && chmod -R a+rX ."), stage


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
