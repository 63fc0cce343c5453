"""`gpu-tp`: a model of full size over several GPUs, with random weights that every rank makes for itself; then one of
its ranks is killed.

The ranks are processes of this module, started as `torchrun` would start them; rank 0 serves with the engine's own
mirrored runner, the others follow it. Only the loading is another one: nobody has a checkpoint, or room for it.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.common import ROOT, at_least, peak_bytes, say
from bench.gpu.checks import Report, make_gpu_parser, parse_device
from bench.gpu.measure import POOL_ROOM, Clock, judge, write_ahead
from bench.gpu.random_model import GEOMETRIES, Geometry, RandomModel, chain, make_upstream, plan_of, tiny
from slipstream.engine.forward import DecodeState
from slipstream.engine.kernels import get_kernel
from slipstream.engine.loading import open_device
from slipstream.engine.parallel.follower import Follower
from slipstream.engine.parallel.member import join
from slipstream.engine.parallel.mirror import Director, MirroredRunner
from slipstream.engine.parallel.ranks import Group, RankOrder, lead, rank_here
from slipstream.engine.parallel.shards import KEYS_AND_VALUES, GatheredLinear, SummedLinear, check_split
from slipstream.engine.parallel.steps import MirroredSteps
from slipstream.engine.startup import MAX_DIFFERENCE
from slipstream.engine.static.step import MAX_AHEAD
from slipstream.engine.video_lm import VideoLM
from slipstream.errors import DeviceLost, SlipstreamError
from slipstream.stack.addresses import gateway_address

SUMMED = ("o_proj", "down_proj")
ROWS = (1, 8)
GONE_S = {"cuda": 35.0, "cpu": 5.0}
"""Within which rank 0 has to end that has lost another rank, by where the ranks compute."""
MOST_BESIDE = 3e9
PATIENCE_S = 500.0

# -- one rank ---------------------------------------------------------------------------------------------------------


def make_share(geometry: Geometry, group: Group, device: torch.device, dtype: torch.dtype) -> Any:
    """Upstream's model, of whose text model every layer is this rank's share on `device`; the vision tower has no
    memory. Linear layers are cut as `shards.localise` leaves them."""
    upstream: Any = make_upstream(geometry, torch.device("meta"), dtype)
    text = upstream.config.get_text_config()
    check_split(geometry.name, text, group.size)
    generator = torch.Generator(device).manual_seed(group.rank)
    decoder = upstream.model.language_model
    for layer in decoder.layers:
        for parent in list(layer.modules()):
            for name, part in list(parent.named_children()):
                if isinstance(part, nn.Linear):
                    shares = min(group.size, text.num_key_value_heads) if name in KEYS_AND_VALUES else group.size
                    setattr(parent, name, _cut(part, name in SUMMED, shares, generator))
        _make_norms(layer, device)
    _make_norms(decoder.norm, device)
    config = decoder.config
    table = torch.Generator(device).manual_seed(0)  # alike on all ranks
    decoder.embed_tokens.weight = _random((config.vocab_size, config.hidden_size), dtype, table)
    with device:
        decoder.rotary_emb = type(decoder.rotary_emb)(config=config)
    share = config.vocab_size // group.size
    upstream.lm_head = GatheredLinear(_random((share, config.hidden_size), dtype, generator), group.size)
    return upstream


def _cut(part: nn.Linear, is_summed: bool, size: int, generator: torch.Generator) -> nn.Module:
    outputs, inputs = part.weight.shape
    shape = (outputs, inputs // size) if is_summed else (outputs // size, inputs)
    part.weight = _random(shape, part.weight.dtype, generator)
    if part.bias is not None:
        part.bias = nn.Parameter(torch.zeros(shape[0], dtype=part.weight.dtype, device=generator.device), False)
    return SummedLinear(part) if is_summed else part


def _random(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> nn.Parameter:
    weight: Tensor = torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)
    return nn.Parameter(weight.mul_(shape[1] ** -0.5), requires_grad=False)


def _make_norms(part: nn.Module, device: torch.device) -> None:
    for module in part.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.is_meta:
                setattr(module, name, nn.Parameter(torch.ones(weight.shape, dtype=weight.dtype, device=device), False))


class ReportingFollower(Follower):
    """One that also tells its peak."""

    def _peak(self, record: Mapping[str, Any]) -> None:
        share_peaks(self._device)


def share_peaks(device: torch.device) -> list[int]:
    """The most memory that each rank has taken: tensors on a GPU, all of a process on a CPU. All ranks call it."""
    peaks = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    own = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_bytes(os.getpid())
    peaks[dist.get_rank()] = own
    dist.all_reduce(peaks)
    return [int(peak) for peak in peaks.tolist()]


def run_follower(order: RankOrder, geometry: Geometry) -> NoReturn:
    member = join(order)
    dtype = getattr(torch, order.dtype)
    with member.checked():
        device = open_device(order.devices[member.rank])
        kernel = get_kernel(order.attention, device, dtype)
    member.connect(device)
    model = RandomModel(geometry, make_share(geometry, member, device, dtype), device, dtype)
    follower = ReportingFollower(model.runner(kernel), device, member)
    member.ready(device)
    while True:
        follower.do(member.records.get())


def run_leader(order: RankOrder, geometry: Geometry, given: Namespace) -> None:
    """Measures, tells the figures in a file, and goes on with passes until a rank is lost."""
    leader = lead(order, _end)
    dtype = getattr(torch, order.dtype)
    with leader.checked():
        device = open_device(order.devices[0])
        kernel = get_kernel(order.attention, device, dtype)
    leader.connect(device)
    share = make_share(geometry, leader, device, dtype)
    gc.collect()
    leader.ready()
    director = Director(leader, device)
    model = RandomModel(geometry, share, device, dtype, partial(MirroredRunner, director=director))
    engine, plan = model.engine(kernel), plan_of(given.video_tokens)
    embeddings = model.video_embeddings(given.video_tokens)
    clock = Clock(device, given.repeats)

    def prefill() -> None:
        engine.start_prefill(plan, embeddings).finish()[0].close()

    found: dict[str, Any] = {"prefill": clock.time(prefill, repeats=2)}
    state, _ = engine.start_prefill(plan, embeddings).finish()
    found["T_p"] = {str(rows): clock.time(partial(judge, engine, state, rows)) for rows in ROWS}
    leader.publish("peak")
    found["peak_bytes"] = share_peaks(device)
    found["weight_bytes"] = sum(weight.nbytes for weight in share.parameters() if not weight.is_meta)
    found["kv_bytes"] = state.kv_bytes
    (eager,) = engine.step([(state, chain(ROWS[-1]))])
    state.close()

    engine.make_static_steps = partial(MirroredSteps, director=director)
    engine.open_static_steps((given.video_tokens + POOL_ROOM) * engine.runner.kv_bytes_per_token)
    state, _ = engine.start_prefill(plan, embeddings).finish()
    found["static"] = measure_static(engine, state, eager, clock)
    _tell(given.figures, found)
    while True:
        judge(engine, state, 1)


def measure_static(engine: VideoLM, state: DecodeState, eager: Tensor, clock: Clock) -> dict[str, Any]:
    """Seconds of static steps over a prompt, and of a token written ahead; whether all of them were, and how far their
    logits are from those of ordinary passes, beside the largest."""
    steps = engine.static
    assert steps is not None, "they have just been opened"
    taken = []
    for rows in ROWS:
        taken.append(steps.run([(state, chain(rows))]))
        state.rollback(state.num_prompt_tokens)
    (logits,) = engine.step([(state, chain(ROWS[-1]))])
    state.rollback(state.num_prompt_tokens)
    found = {str(rows): clock.time(partial(judge, engine, state, rows)) for rows in ROWS}
    return {
        "T_p": found,
        "ahead_s": clock.time(partial(write_ahead, engine, state))["s"] / MAX_AHEAD,
        "attention": steps.attention,
        "layers": steps.layers,
        "taken": None not in taken,
        "difference": float((logits - eager).abs().max() / eager.abs().max()),
    }


def _end(error: SlipstreamError) -> None:
    """As a service ends: the other thread may wait for ever in a recorded step, which no timeout of NCCL watches."""
    say(f"rank 0: {error}")
    os._exit(error.exit_code)


def _tell(path: Path, found: Mapping[str, Any]) -> None:
    whole = path.with_suffix(".unfinished")
    whole.write_text(json.dumps(found))
    whole.replace(path)


def run_rank(given: Namespace) -> NoReturn:
    """A rank's process, from its start to its end; a loss ends it as it ends a service."""
    order = RankOrder(**json.loads(given.order) | {"devices": tuple(json.loads(given.order)["devices"])})
    torch.set_num_threads(order.threads)
    geometry = _geometry(given, order.size)
    status = 1
    try:
        if rank_here():
            run_follower(order, geometry)
        run_leader(order, geometry, given)
    except DeviceLost as error:
        status = error.exit_code
        say(f"rank {rank_here()}: {error}")
    except Exception:
        traceback.print_exc()
    os._exit(status)  # also where another thread waits for a rank that is gone


# -- all of them ------------------------------------------------------------------------------------------------------


def _geometry(given: Namespace, size: int) -> Geometry:
    geometry = GEOMETRIES[given.model]
    if not given.tiny:
        return geometry
    small = tiny(geometry)
    heads = {"num_attention_heads": 4, "num_key_value_heads": max(size, 2)}
    return replace(small, text={**small.text, **heads})


def start_ranks(given: Namespace, folder: Path) -> list[subprocess.Popen[bytes]]:
    """As `torchrun` does."""
    devices = [f"cuda:{rank}" if given.device.type == "cuda" else "cpu" for rank in range(given.tp)]
    order = RankOrder(given.model, tuple(devices), "float32" if given.tiny else "bfloat16", "auto", 0, 1)
    words = ["--model", given.model, "--order", json.dumps(asdict(order)), "--figures", str(folder / "figures.json")]
    words += ["--video-tokens", str(given.video_tokens), "--repeats", str(given.repeats)]
    words += ["--tiny"] if given.tiny else []
    host, _, port = gateway_address(None).rpartition(":")  # which no connection is given before rank 0 listens there
    shared = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(given.tp)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(given.tp)}
    argv = [sys.executable, "-m", "bench", "gpu-tp", *words]
    return [
        subprocess.Popen(
            [*argv, "--device", device],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, device in enumerate(devices)
    ]


def measure(given: Namespace, report: Report) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="slipstream-tp-") as folder:
        ranks = start_ranks(given, Path(folder))
        try:
            found = _await_figures(ranks, Path(folder) / "figures.json")
            say(f"gpu-tp: {found}")
            struck_at = time.monotonic()
            ranks[-1].send_signal(signal.SIGKILL)
            try:
                status = ranks[0].wait(PATIENCE_S / 4)
            except subprocess.TimeoutExpired:
                status = None
            gone_s = time.monotonic() - struck_at
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    report.equals("ranks told their peak bytes", sum(peak > 0 for peak in found["peak_bytes"]), given.tp)
    beside = max(found["peak_bytes"]) - found["weight_bytes"] - found["kv_bytes"]
    report.equals("static steps were taken", found["static"]["taken"], True)
    report.at_most("static logits beside ordinary ones", found["static"]["difference"], MAX_DIFFERENCE)
    report.at_most("bytes of a rank beside its weights, keys and values", beside, MOST_BESIDE)
    report.equals("rank 0 ended with an error after kill -9 of the last", status not in (None, 0), True)
    report.at_most("from kill -9 to its end, s", None if status is None else gone_s, GONE_S[given.device.type])
    return {"ranks": given.tp, "video_tokens": given.video_tokens, **found, "exit_status": status, "gone_s": gone_s}


def _await_figures(ranks: Sequence[subprocess.Popen[bytes]], path: Path) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        ended = [number for number, rank in enumerate(ranks) if rank.poll() is not None]
        if ended or time.monotonic() > deadline:
            sys.exit(f"gpu-tp: {f'rank {ended[0]} has ended' if ended else 'no figures came'}; see above")
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _ranks(words: str) -> int:
    if not words.isdecimal() or int(words) < 2:
        raise ArgumentTypeError("2 ranks or more")
    return int(words)


def main(argv: Sequence[str]) -> None:
    parser = make_gpu_parser("gpu-tp", "A model over several GPUs.", repeats=10)
    parser.add_argument("--model", default="Qwen2.5-VL-72B", choices=list(GEOMETRIES), metavar="NAME")
    parser.add_argument("--tp", type=_ranks, default=4, help="ranks, of which each has a GPU")
    parser.add_argument("--video-tokens", type=at_least(1), default=None, help="25,000")
    parser.add_argument("--order", default="", help="of a rank that this program started")
    parser.add_argument("--figures", type=Path, help="where rank 0 writes what it has measured")
    given = parse_device(parser, argv)
    given.video_tokens = given.video_tokens or (96 if given.tiny else 25_000)
    if given.order:
        run_rank(given)
    if given.device.type == "cuda" and torch.cuda.device_count() < given.tp:
        parser.error(f"--tp {given.tp}: there are {torch.cuda.device_count()} GPUs here")
    report = Report(given)
    report.finish(**measure(given, report))
