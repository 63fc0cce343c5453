"""What a caption was made of and by, and the name of all that its text depends on. Knows no queue."""

import hashlib

from services.gateway.options import CaptionOptions
from slipstream import __version__
from slipstream.rpc.v1 import archive_pb2, common_pb2, gateway_pb2
from slipstream.video.decode import SampledVideo

REJECTION = "rejection"
"""The one sampling rule with which the text depends on the draft."""


def content_key(
    video_sha256: str, options: CaptionOptions, target: common_pb2.ModelInfo, draft: common_pb2.ModelInfo | None
) -> str:
    """Equal keys: the same was asked of the same file, models and release, so the text can be taken over.

    All options count, also those that change the speed only: a result tells how it was made.
    """
    parts = [__version__, video_sha256, target.revision, target.dtype]
    if options.speculative and options.sampling.rule == REJECTION:
        parts += [draft.revision, draft.dtype] if draft else ["", ""]
    asked = options_message(options).SerializeToString(deterministic=True)
    return hashlib.sha256("\0".join(parts).encode() + b"\0" + asked).hexdigest()


def make_receipt(
    options: CaptionOptions,
    video: SampledVideo,
    summary: gateway_pb2.Summary,
    target: common_pb2.ModelInfo,
    draft: common_pb2.ModelInfo | None,
) -> archive_pb2.Receipt:
    """Of a caption that has just been made; who runs the job fills in `runs`."""
    took_part = draft is not None and bool(summary.speculation.kept_digest or summary.timings.draft_ready_s)
    return archive_pb2.Receipt(
        slipstream_version=__version__,
        target=_model_receipt(target),
        draft=_model_receipt(draft) if draft is not None and took_part else None,
        options=options_message(options),
        video_sha256=video.sha256,
        video_bytes=video.num_bytes,
        text_sha256=hashlib.sha256(summary.text.encode()).hexdigest(),
    )


def options_message(options: CaptionOptions) -> gateway_pb2.CaptionOptions:
    """All options after defaults, but for the path and the request's name."""
    sampling, lossy = options.sampling, options.lossy
    return gateway_pb2.CaptionOptions(
        prompt=options.prompt,
        method=options.method,
        num_frames=options.num_frames,
        max_new_tokens=options.max_new_tokens,
        pruner=options.pruner,
        alpha=options.alpha,
        policy=options.policy,
        max_window=options.max_window,
        guidance=options.guidance,
        positions=options.positions,
        seed=options.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        sampling_rule=sampling.rule,
        stop=sampling.stop,
        gate=options.gate,
        gamma=options.gamma,
        shape=options.shape.value,
        lossy=lossy.method if lossy else None,
        lossy_keep=lossy.keep if lossy else None,
    )


def tallies(summary: gateway_pb2.Summary) -> dict[str, float]:
    """What a caption adds to its batch's totals; the names are fields of `BatchTotals`."""
    timings, speculation = summary.timings, summary.speculation
    return {
        "tokens": summary.num_tokens,
        "video_s": summary.video.duration_s,
        "decode_s": timings.decode_s,
        "first_token_s": timings.first_token_s,
        "generate_s": timings.generate_s,
        "plain_generate_s": max(summary.num_tokens - 1, 0) * _plain_round_s(speculation),
        "judged": speculation.judged,
        "accepted": speculation.accepted,
    }


def _plain_round_s(speculation: gateway_pb2.Speculation) -> float:
    """Seconds of a plain pass as this caption measured it, or else as earlier ones did."""
    plain = next((cost.round_s for cost in speculation.pass_costs if cost.window == 0), 0.0)
    return plain or speculation.plain_pass_s or speculation.speed_ratio * speculation.draft_pass_s


def _model_receipt(model: common_pb2.ModelInfo) -> archive_pb2.ModelReceipt:
    return archive_pb2.ModelReceipt(model_id=model.model_id, revision=model.revision, dtype=model.dtype)
