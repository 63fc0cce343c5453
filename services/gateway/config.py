"""What a gateway can be told at start."""

from dataclasses import dataclass

from services.gateway.archive.options import ArchiveOptions
from services.gateway.media_options import MediaOptions
from slipstream.config import between, one_of, option
from slipstream.logs import LEVELS
from slipstream.rpc.security import WireOptions
from slipstream.rpc.tokens import TokenOptions


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(MediaOptions, ArchiveOptions, WireOptions, TokenOptions):
    """Options of the gateway service."""

    listen: str = option("address to serve on: HOST:PORT, port 0 for any, or unix:/path")
    target: str = option("address of the target service")
    draft: str = option("address of the draft service; empty for plain decoding only", default="")
    max_captions: int = option("captions in work at once; more are refused", default=16, check=between(1, 4096))
    max_frames: int = option("most frames of a request", default=256, check=between(1, 4096))
    max_new_tokens: int = option("most tokens of a caption", default=2048, check=between(1, 1_000_000))
    max_window: int = option("most draft tokens in one target pass", default=64, check=between(1, 1024))
    max_prompt_chars: int = option("longest prompt, in characters", default=8192, check=between(1, 1_000_000))
    default_prompt: str = option("asked when a request asks nothing", default="Describe this video in detail.")
    default_frames: int = option("frames sampled when a request does not say", default=64, check=between(1, 4096))
    default_new_tokens: int = option(
        "token limit when a request does not say", default=512, check=between(1, 1_000_000)
    )
    default_window: int = option("window limit when a request does not say", default=24, check=between(1, 1024))
    default_alpha: float = option("pruned share when a request does not say", default=0.9, check=between(0, 1))
    request_timeout_s: float = option("longest time for one caption", default=3600.0, check=between(1, 86400))
    draft_timeout_s: float = option(
        "a draft that owes tokens and is silent for so long is dropped", default=1.0, check=between(0.01, 3600)
    )
    start_timeout_s: float = option(
        "how long to wait for the target at start", default=600.0, check=between(0.1, 86400)
    )
    log_level: str = option("least severe log event", default="info", check=one_of(*LEVELS))
