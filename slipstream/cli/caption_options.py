"""What to ask of a video, as command-line options that `caption` and `archive submit` share."""

from typing import Annotated

import typer

from slipstream.rpc.v1.gateway_pb2 import CaptionOptions

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1


def caption_options(
    prompt: Annotated[str | None, typer.Option(help="What to ask of the video.")] = None,
    method: Annotated[str | None, typer.Option(help="slipstream, autoregressive (plain), parallelvlm...")] = None,
    frames: Annotated[int | None, typer.Option(min=1, max=UINT32_MAX, help="Frames to sample.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, max=UINT32_MAX, help="Most tokens.")] = None,
    pruner: Annotated[str | None, typer.Option(help="Chooses the draft's video tokens: uv, random, uniform...")] = None,
    alpha: Annotated[float | None, typer.Option(min=0, max=1, help="Share of them that the draft drops.")] = None,
    policy: Annotated[str | None, typer.Option(help="When the target starts a pass: self_clocked, fixed...")] = None,
    max_window: Annotated[int | None, typer.Option(min=1, max=UINT32_MAX, help="Most draft tokens a pass.")] = None,
    guidance: Annotated[str | None, typer.Option(help="What the draft prunes by: hidden_states or scores.")] = None,
    positions: Annotated[str | None, typer.Option(help="Of the kept video tokens: original or compact.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: the likeliest token; above: sample.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, max=UINT32_MAX, help="Sample from the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest that have this probability.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeat less.")] = None,
    sampling_rule: Annotated[str | None, typer.Option(help="Judges draft tokens: coupled or rejection.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=UINT64_MAX, help="Of sampling and random pruners.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    gamma: Annotated[int | None, typer.Option(min=1, max=UINT32_MAX, help="Window of fixed pacing.")] = None,
    shape: Annotated[str | None, typer.Option(help="Of a window: chain or tree.")] = None,
    lossy: Annotated[str | None, typer.Option(help="Prunes the target too, which changes the text: fastv...")] = None,
    lossy_keep: Annotated[float | None, typer.Option(min=0, max=1, help="Share of the tokens that it keeps.")] = None,
    gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="Decode plainly while that is faster.", show_default=True)
    ] = True,
) -> CaptionOptions:
    """The options that were given; the gateway's defaults stand for the others."""
    return CaptionOptions(
        prompt=prompt,
        method=method,
        num_frames=frames,
        max_new_tokens=max_new_tokens,
        pruner=pruner,
        alpha=alpha,
        policy=policy,
        max_window=max_window,
        guidance=guidance,
        positions=positions,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        sampling_rule=sampling_rule,
        seed=seed,
        stop=stop,
        gamma=gamma,
        shape=shape,
        lossy=lossy,
        lossy_keep=lossy_keep,
        gate=None if gate else False,
    )
