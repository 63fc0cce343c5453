"""What a caption's options ask of the two model services."""

from services.gateway.options import CaptionOptions
from slipstream.rpc import codec
from slipstream.video.decode import SampledVideo


def target_request(options: CaptionOptions, video: SampledVideo) -> codec.TargetRequest:
    """To the target."""
    return codec.TargetRequest(
        session_id=options.request_id,
        prompt=options.prompt,
        max_new_tokens=options.max_new_tokens,
        with_guidance=options.speculative,
        sampling=options.sampling,
        seconds_per_frame=_seconds_per_frame(video),
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
    )


def _seconds_per_frame(video: SampledVideo) -> float:
    """Frames are sampled evenly over the clip's duration."""
    return video.duration_s / len(video.frames)
