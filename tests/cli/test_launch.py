"""What a stack is started with: checks before the start and the services' command lines."""

import errno
import json
import os
import random
import socket
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import grpc
import pytest

from slipstream.cli import up
from slipstream.cli.app import app
from slipstream.cli.up import limit_flags, queue_options
from slipstream.errors import InvalidConfig, ModelNotUsable
from slipstream.rpc.grpc_options import SERVER_OPTIONS
from slipstream.stack import addresses
from slipstream.stack.addresses import gateway_address
from slipstream.stack.local import POCKET_DIR, POCKET_READER, StackOptions, check_options, service_argv
from slipstream.stack.process import RunFolder

ADDRESSES = {"target": "unix:/t", "draft": "unix:/d", "gateway": "127.0.0.1:5"}


def checkpoint(folder: Path, tokenizer: object = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=len(folder.name)))
    return folder


def flags(options: StackOptions, name: str) -> dict[str, str]:
    words = service_argv(options, name, ADDRESSES)[3:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_checkpoints_must_share_their_tokenizer(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", {"model": {"a": 0, "b": 1}, "padding": None})
    twin = checkpoint(tmp_path / "twin", {"padding": {"length": 8}, "model": {"b": 1, "a": 0}})
    other = checkpoint(tmp_path / "other", {"model": {"a": 1, "b": 0}})
    unknown = checkpoint(tmp_path / "unknown")
    for draft in (twin, unknown, None):
        check_options(StackOptions(target, draft))
    with pytest.raises(ModelNotUsable, match="different tokenizers"):
        check_options(StackOptions(target, other))


def test_a_target_by_itself_is_told_how_to_do_without_a_draft() -> None:
    with pytest.raises(ModelNotUsable, match="give --target and --draft"):
        check_options(StackOptions(POCKET_READER))
    check_options(StackOptions(POCKET_READER, None))


def test_one_form_of_merges_is_as_good_as_the_other(tmp_path: Path) -> None:
    pairs = {"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "ignore_merges": False}}
    strings = {"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}
    check_options(StackOptions(checkpoint(tmp_path / "target", pairs), checkpoint(tmp_path / "draft", strings)))


def test_models_on_the_hub_are_left_to_the_services(tmp_path: Path) -> None:
    options = StackOptions("owner/big", "owner/small")
    check_options(options)
    assert flags(options, "target")["--model"] == "owner/big"
    assert flags(options, "draft")["--model"] == "owner/small"
    assert StackOptions().start_limit_s < options.start_limit_s
    assert replace(options, start_timeout_s=7).start_limit_s == 7
    for given in ("nowhere", "a/b/c", "/nowhere/big", "./nowhere", "~/nowhere", Path("owner/big"), ""):
        with pytest.raises(ModelNotUsable, match="no checkpoint at"):
            check_options(StackOptions(given, None))
    for pair in (StackOptions("owner/big"), StackOptions(draft_model="owner/small")):
        with pytest.raises(ModelNotUsable, match="give --target and --draft"):
            check_options(pair)


def test_pocket_models_are_known(tmp_path: Path) -> None:
    assert StackOptions().is_pocket
    assert StackOptions(str(POCKET_DIR.parent / "pocket-qwen" / "target")).is_pocket
    assert StackOptions(POCKET_READER).is_pocket_reader and not StackOptions().is_pocket_reader
    assert not StackOptions(tmp_path).is_pocket and not StackOptions("owner/big").is_pocket


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target")
    (target / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotUsable, match="damaged"):
        check_options(StackOptions(target, None))


def test_bad_options_are_found_before_the_start(tmp_path: Path) -> None:
    good = StackOptions(checkpoint(tmp_path / "target"), None)
    with pytest.raises(InvalidConfig, match="video root"):
        check_options(replace(good, video_roots=(tmp_path / "none",)))
    with pytest.raises(InvalidConfig, match="--redis: no URL"):
        check_options(replace(good, redis="foo://x"))
    with pytest.raises(InvalidConfig, match="--threads 1"):
        check_options(replace(good, pin=True, threads=2))
    for tls in (
        {"extra_flags": {"gateway": ("--tls-cert", "c.pem")}},
        {"env": {"SLIPSTREAM_GATEWAY_TLS_CERT": "c.pem"}},
        {"env": {"SLIPSTREAM_FRONT_TLS_CERT": "c.pem"}, "http": 0},
    ):
        with pytest.raises(InvalidConfig, match="--tls-cert is not for a local stack"):
            check_options(replace(good, **tls))  # type: ignore[arg-type]
    check_options(replace(good, env={"SLIPSTREAM_FRONT_TLS_CERT": "c.pem"}))  # of a stack without a front


def test_flags_of_the_services(tmp_path: Path) -> None:
    options = StackOptions(Path("T"), Path("D"), device="cuda:0", draft_device="cuda:1", video_roots=(tmp_path,))
    assert flags(options, "target") == {
        "--listen": "unix:/t",
        "--model": "T",
        "--device": "cuda:0",
        "--dtype": "auto",
    }
    assert flags(options, "draft") == {
        "--listen": "unix:/d",
        "--model": "D",
        "--device": "cuda:1",
        "--dtype": "auto",
    }
    given = replace(options, formats="modern", extra_flags={"gateway": ["--max-frames", "9"]})
    assert flags(given, "gateway") == {
        "--listen": "127.0.0.1:5",
        "--target": "unix:/t",
        "--draft": "unix:/d",
        "--drain-s": "1.0",
        "--archive-drain-s": "1.0",
        "--video-roots": str(tmp_path),
        "--formats": "modern",
        "--max-frames": "9",
    }
    assert "--formats" not in flags(options, "gateway")


def test_results_leave_the_queue_of_a_local_stack(tmp_path: Path) -> None:
    queue = queue_options(results_to=f"file://{tmp_path}", queue_bytes=2_000_000, data=tmp_path)
    given = flags(StackOptions(**queue), "gateway")
    assert (given["--results-to"], given["--queue-bytes"]) == (f"file://{tmp_path}", "2000000")
    assert "--results-to" not in flags(StackOptions(**queue_options(data=tmp_path)), "gateway")


def test_limits_of_videos_are_the_gateways_unless_said() -> None:
    assert limit_flags({"max-video-bytes": None, "max-ranged-bytes": 6}) == ["--max-ranged-bytes", "6"]
    assert limit_flags({"max-video-bytes": None}) == []


def test_the_queues_address_is_on_no_command_line() -> None:
    options = StackOptions(archive=True, redis="redis://:secret@host", archive_slots=3)
    assert flags(options, "gateway")["--archive-slots"] == "3"
    assert not any("secret" in word for name in ADDRESSES for word in service_argv(options, name, ADDRESSES))


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 2, 9, 6})
    shared = flags(StackOptions(), "draft")
    assert (shared["--threads"], shared["--prefill-threads"]) == ("2", "4")
    assert "--prefill-threads" not in flags(StackOptions(threads=1), "target")
    pinned = StackOptions(pin=True)
    assert [flags(pinned, name)["--cpu"] for name in ("target", "draft")] == ["2", "4"]
    assert flags(pinned, "target")["--threads"] == "1"
    assert "--prefill-threads" not in flags(pinned, "target")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert "--cpu" not in flags(pinned, "target")


def test_gateway_addresses(tmp_path: Path) -> None:
    host, port = gateway_address(None).split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert gateway_address(f"unix:{tmp_path}/g.sock") == f"unix:{tmp_path}/g.sock"


def test_programs_that_start_from_the_same_seed_take_different_ports() -> None:
    """As forks do. What one has chosen the others do not know."""
    chosen = set()
    for _ in range(3):
        random.seed(0)
        chosen.add(gateway_address(None))
        os.close(addresses._held.pop())
    assert len(chosen) > 1


async def test_a_port_that_is_chosen_is_kept_for_who_is_to_listen_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks that start at the same time, each in its process, would be given the same port, and one end with an error
    or be served by the other's gateway."""
    address = gateway_address(None)
    port = int(address.rpartition(":")[2])
    monkeypatch.setattr(addresses, "UNASSIGNED_PORTS", [port])
    monkeypatch.setattr(addresses, "PORT_TRIES", 1)
    monkeypatch.setattr(addresses, "_held", deque())  # as another process
    with pytest.raises(InvalidConfig, match="the port is in use"):
        gateway_address(None)
    assert gateway_address(address) == address
    with socket.create_server(("127.0.0.1", port)):
        pass
    server = grpc.aio.server(options=SERVER_OPTIONS)
    assert server.add_insecure_port(address) == port
    await server.start()
    await server.stop(0)


def test_few_chosen_ports_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_held", held := deque[int]())
    monkeypatch.setattr(addresses, "MOST_HELD", 2)
    chosen = [int(gateway_address(None).rpartition(":")[2]) for _ in range(3)]
    assert len(held) == 2
    for descriptor, port in zip(held, chosen[1:], strict=True):
        with socket.socket(fileno=descriptor) as kept:
            assert kept.getsockname() == ("127.0.0.1", port)


@pytest.mark.parametrize("listen", ["5051", "localhost:", ":80", "127.0.0.1:99999", "unix:/nowhere/g.sock"])
def test_bad_addresses(listen: str) -> None:
    with pytest.raises(InvalidConfig, match="cannot listen at"):
        gateway_address(listen)


def test_addresses_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(InvalidConfig, match="the port is in use"):
        gateway_address(f"127.0.0.1:{server.getsockname()[1]}")
    path = str(tmp_path / "g.sock")
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(path)
        holder.listen()
        with pytest.raises(InvalidConfig, match="the socket is in use"):
            gateway_address(f"unix:{path}")
    assert gateway_address(f"unix:{path}") == f"unix:{path}"


@pytest.mark.parametrize("name", ["x" * 100, ","])
def test_a_temporary_folder_is_avoided_in_which_sockets_cannot_be_told(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given = tmp_path_factory.mktemp("t") / name
    given.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(given))
    folder = RunFolder()
    assert folder.path.parent == Path("/tmp")
    folder.close()
    assert not folder.path.exists()


def test_a_folder_is_not_taken_for_two(tmp_path: Path) -> None:
    """With a `:` at its end it was the one without, and that was served where it was there."""
    for name in ("films:", "films:2024"):
        (named := tmp_path / name).mkdir()
        (linked := tmp_path / f"to {len(name)}").symlink_to(named)
        for root in (named, linked):
            with pytest.raises(InvalidConfig, match="a ':' is between two roots"):
                flags(StackOptions(video_roots=(tmp_path, root)), "gateway")
    roots = (tmp_path, Path("/usr"))
    assert flags(StackOptions(video_roots=roots), "gateway")["--video-roots"] == f"{tmp_path}:/usr"


def test_without_a_folder_for_temporary_files_it_is_said_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose root is read-only."""

    def none_takes_files() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.tempdir", "/none")
    with pytest.raises(InvalidConfig, match="can be made: No such file or directory; set TMPDIR"):
        RunFolder()
    monkeypatch.setattr("tempfile.gettempdir", none_takes_files)
    with pytest.raises(InvalidConfig, match=r"No usable temporary directory found in .*; set TMPDIR"):
        RunFolder()


@pytest.mark.parametrize(("given", "told"), [((), []), (("700", "90"), ["700", "90"])])
def test_keys_and_values_of_each_model_may_be_bounded(
    given: tuple[str, ...], told: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By `slipstream up`, whose other flags for services stay."""
    served: list[StackOptions] = []

    async def serve(options: StackOptions) -> None:
        served.append(options)

    monkeypatch.setattr(up, "_serve", serve)
    words = [
        word for pair in zip(("--target-kv-budget-mb", "--draft-kv-budget-mb"), given, strict=False) for word in pair
    ]
    results = ("--results-to", f"file://{tmp_path}")
    app(["up", "--no-http", *results, *words], standalone_mode=False)
    (options,) = served
    found = [service_argv(options, name, ADDRESSES) for name in ("target", "draft")]
    assert [argv[argv.index("--kv-budget-mb") + 1] for argv in found if "--kv-budget-mb" in argv] == told
    assert "--results-to" in service_argv(options, "gateway", ADDRESSES)
