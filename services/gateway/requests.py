"""What a caption's options ask of the two model services."""

from services.gateway.options import CaptionOptions
from slipstream.rpc import codec


def target_request(options: CaptionOptions) -> codec.TargetRequest:
    """To the target."""
    return codec.TargetRequest(
        session_id=options.request_id,
        prompt=options.prompt,
        max_new_tokens=options.max_new_tokens,
        with_guidance=options.speculative,
        sampling=options.sampling,
    )


def draft_request(options: CaptionOptions, guidance_address: str) -> codec.DraftRequest:
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
    )
