"""Starts that cannot work: exit status 2, and one clear line of JSON that names what is wrong."""

import socket
from pathlib import Path

import pytest

from slipstream.stack.addresses import gateway_address
from slipstream.stack.local import Stack
from tests.support.processes import failed_start, running
from tests.support.tiny_qwen3_5 import write_tiny_qwen3_5
from tests.support.world import World

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def check(name: str, folder: Path, complaint: str, *flags: str, **env: str) -> None:
    status, told = await failed_start(name, folder, *flags, **env)
    log = [entry for entry in told if entry["level"] != "warning"]  # as upstream's of packages that are not there
    assert [(entry["event"], entry["level"], entry["service"]) for entry in log] == [("service.failed", "error", name)]
    assert complaint in log[0]["error"]
    assert status == 2


@pytest.mark.parametrize(
    ("flags", "env", "complaint"),
    [
        ((), {}, "--target (or SLIPSTREAM_GATEWAY_TARGET) is needed"),
        (("--targets", "x"), {}, "unrecognized arguments: --targets x; see --help"),
        (("--target", "x", "--max-frames", "many"), {}, "--max-frames: 'many' is no int"),
        (("--target", "x", "--max-frames", "0"), {}, "--max-frames: '0' must be between 1 and 4096"),
        (("--target", "x", "--default-alpha", "nan"), {}, "--default-alpha: 'nan' is no float"),
        (("--target", "x", "--log-level", "loud"), {}, "--log-level: 'loud' must be one of debug, info"),
        (("--target", "x", "--video-roots", "/nowhere"), {}, "--video-roots: '/nowhere' is no directory"),
        (("--target", "x", "--video-roots", "/nowhere/{owner}"), {}, "--video-roots: '/nowhere' is no directory"),
        (("--target", "x", "--video-roots", "/" + "x" * 256), {}, "xxx' is no directory"),
        (("--target", "x", "--metrics", "a..b:9"), {}, "--metrics: cannot listen on a..b:9: "),
        (("--target", "x", "--video-roots", "/tmp/of-{owner}"), {}, "{owner} must be the whole name of a folder"),
        (("--target", "x"), {"SLIPSTREAM_GATEWAY_MAX_FRAME": "3"}, "SLIPSTREAM_GATEWAY_MAX_FRAME is no option"),
        (("--target", "x"), {"SLIPSTREAM_GATEWAY_MAX_FRAMES": "x"}, "--max-frames: 'x' is no int"),
        (("--target", "x"), {"SLIPSTREAM_PARENT_PID": "x"}, "SLIPSTREAM_PARENT_PID: 'x' is no process id"),
        (("--target", "x", "--redis", "foo://user:secret@x"), {}, "--redis: no URL of a Redis server"),
        (
            ("--target", "x", "--redis", "redis://x?ssl_cert_reqs=none"),
            {},
            "unexpected keyword argument 'ssl_cert_reqs'",
        ),
        (("--target", "x", "--redis", "rediss://x?ssl_cert_reqs=no"), {}, "--redis: no URL of a Redis server: Invalid"),
        (("--target", "x", "--listen", "nonsense"), {}, "cannot listen on nonsense"),
        (("--target", "x", "--listen", "127.0.0.1:99999"), {}, "cannot listen on 127.0.0.1:99999"),
        (("--target", "x", "--listen", "unix:/nowhere/g.sock"), {}, "cannot listen on unix:/nowhere/g.sock"),
        (("--target", "unix:/nowhere/t", "--start-timeout-s", "0.1"), {}, "no answer of the target at unix:/nowhere/t"),
    ],
)
async def test_the_gateway(tmp_path: Path, flags: tuple[str, ...], env: dict[str, str], complaint: str) -> None:
    if complaint.startswith("no answer"):
        status, log = await failed_start("gateway", tmp_path, *flags, **env)
        assert status == 4 and complaint in log[-1]["error"]
        return
    await check("gateway", tmp_path, complaint, *flags, **env)


async def test_the_model_services(tmp_path: Path, world: World) -> None:
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "gpt2"}')
    (broken / "model.safetensors").write_bytes(b"")
    model, recurs = str(world.pair.draft), str(write_tiny_qwen3_5(tmp_path / "recurs", seed=1))
    cases: list[tuple[str, str, tuple[str, ...], dict[str, str]]] = [
        ("target", "/nowhere/at/all", ("--model", "/nowhere/at/all"), {}),
        ("target", "has no config.json", ("--model", str(empty)), {}),
        ("target", "unknown architecture 'gpt2'; known: glm46v, glm4v, glm4v_moe", ("--model", str(broken)), {}),
        ("target", "the model has 2 layers", ("--model", model, "--guidance-layer", "9"), {}),
        ("target", "works with one process", ("--model", model, "--ranks", "2", "--prefill-threads", "2"), {}),
        ("target", "SLIPSTREAM_TARGET_SPEED is no option", ("--model", model), {"SLIPSTREAM_TARGET_SPEED": "9"}),
        ("target", "start it without --static-steps on", ("--model", recurs, "--static-steps", "on"), {}),
        ("target", "start it without --ride-along", ("--model", recurs, "--ride-along", "0.1"), {}),
        ("draft", "device 'abacus' is not usable", ("--model", model, "--device", "abacus"), {}),
    ]
    for number, (name, complaint, flags, env) in enumerate(cases):
        await check(name, tmp_path / str(number), complaint, *flags, **env)


async def test_an_address_in_use(tmp_path: Path, stack: Stack) -> None:
    target = ("--target", stack.processes["target"].address)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        await check("gateway", tmp_path / "1", f"cannot listen on {address}: the address is in use", *target,
                    "--listen", address)  # fmt: skip
    async with running("gateway", tmp_path, *target) as first:
        await check("gateway", tmp_path / "2", "is in use by another service", *target, "--listen", first.address)
        async with running("gateway", tmp_path / "2", *target, listen=gateway_address(None)) as second:
            assert second.exit_status is None
