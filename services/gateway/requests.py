"""What a caption's options ask of the two model services."""

from dataclasses import replace

from services.gateway.options import CaptionOptions
from slipstream.rpc import codec
from slipstream.rpc.options import REPLAY_MARK
from slipstream.speculation.methods import Shape
from slipstream.video.decode import SampledVideo


def target_request(options: CaptionOptions, video: SampledVideo, tokens_per_frame: int) -> codec.TargetRequest:
    """To the target. The share `alpha` of the video is also what a target that drafts for itself leaves out."""
    num_kept = max(round((1 - options.alpha) * len(video.frames) * tokens_per_frame), 1)
    return codec.TargetRequest(
        session_id=options.request_id,
        prompt=options.prompt,
        max_new_tokens=options.max_new_tokens,
        with_guidance=options.speculative,
        sampling=options.sampling,
        seconds_per_frame=_seconds_per_frame(video),
        with_attention=options.with_attention,
        lossy=options.lossy,
        self_draft_kept=num_kept if options.drafts_itself else 0,
    )


def draft_request(options: CaptionOptions, video: SampledVideo, guidance_address: str) -> codec.DraftRequest:
    """To the draft, which pulls guidance at that address."""
    return codec.DraftRequest(
        session_id=options.request_id,
        prompt=options.prompt,
        pruner=options.pruner,
        alpha=options.alpha,
        positions=options.positions,
        guidance=options.guidance,
        guidance_address=guidance_address,
        seed=options.seed,
        sampling=options.sampling,
        seconds_per_frame=_seconds_per_frame(video),
        tree=options.shape is Shape.TREE,
    )


def _seconds_per_frame(video: SampledVideo) -> float:
    """Frames are sampled evenly over the clip's duration."""
    return video.duration_s / len(video.frames)


def told_of_replay(video: SampledVideo, target_device: str) -> SampledVideo:
    """The video with a warning for the summary where the target's times are not its own."""
    if not target_device.startswith(REPLAY_MARK):
        return video
    warning = f"REPLAY: times are those of {target_device.removeprefix(REPLAY_MARK)}, from a table"
    return replace(video, warnings=(*video.warnings, warning))
