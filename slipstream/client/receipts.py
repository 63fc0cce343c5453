"""Receipts that a caller writes, in the form of the archive's: as far as a gateway says what a caption was made by."""

import hashlib

from slipstream import __version__
from slipstream.archive.messages import ModelReceipt, OptionValues, Receipt
from slipstream.messages import Caption
from slipstream.service_info import GatewayInfo


def caller_receipt(
    caption: Caption, info: GatewayInfo, options: OptionValues, *, sha256: str, num_bytes: int
) -> Receipt:
    """Of a caption that was asked for interactively.

    Args:
        info: what the gateway said shortly before or after; its `version` is the release, or '' this one.
        options: all that are known.
        sha256, num_bytes: of the file; '' and 0 where the caller could not read it.
    """
    facts = caption.speculation
    return Receipt(
        slipstream_version=info.version or __version__,
        target=ModelReceipt(info.target_model, info.target_revision, info.target_dtype),
        draft=ModelReceipt(info.draft_model, info.draft_revision, info.draft_dtype) if caption.had_draft else None,
        options=options,
        video_sha256=sha256,
        video_bytes=num_bytes,
        text_sha256=hashlib.sha256(caption.text.encode()).hexdigest(),
        runs=1,
        accepted_prediction_tokens=facts.accepted_prediction_tokens,
        rejected_prediction_tokens=facts.rejected_prediction_tokens,
        shared=caption.shared,
        skipped=caption.skipped,
    )
