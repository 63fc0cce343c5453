"""What a gateway can be told at start: about captions, about videos, about the archive."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from slipstream.captioning.fetch import check_hosts, parse_hosts
from slipstream.config import between, one_of, option
from slipstream.errors import InvalidConfig
from slipstream.option_specs import THINKING
from slipstream.rpc.pools import split_addresses
from slipstream.rpc.security import TokenOptions
from slipstream.rpc.service_options import Callers, ServiceOptions
from slipstream.video.formats import DEFAULT_TIER, TIERS

# -- media options ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """Options of receiving and decoding videos."""

    video_roots: str = option(
        "directories that request paths may lie below, separated by ':'; a folder {owner} in one is each owner's own",
        default="",
    )
    url_hosts: str = option(
        "hosts that archive videos may be fetched from over https, as HOST or HOST:PORT, separated by ','; empty: none",
        default="",
        check=check_hosts,
    )
    url_timeout_s: float = option("longest time for fetching one video", default=600.0, check=between(0.1, 86400))
    object_roots: str = option(
        "buckets or folders in them, as s3://BUCKET/PREFIX, gs:// or az://ACCOUNT/CONTAINER, that videos and documents"
        " may be opened below, separated by ','; a step {owner} is each owner's own; empty: none",
        default="",
    )
    object_timeout_s: float = option(
        "longest time for reading one range of an object", default=30.0, check=between(0.1, 3600)
    )
    object_cache_mb: int = option(
        "MiB of memory for what was read of objects, shared by all captions", default=128, check=between(1, 2**20)
    )
    max_video_bytes: int = option("largest video file", default=2 * 1024**3, check=between(1, 2**50))
    max_ranged_bytes: int = option(
        "largest object whose frames are read by ranges; one that must be fetched whole is a video file",
        default=64 * 1024**3,
        check=between(1, 2**50),
    )
    file_timeout_s: float = option(
        "longest time for one call to the file system of a video, such as opening it",
        default=30.0,
        check=between(0.1, 3600),
    )
    max_uploads: int = option(
        "videos that are uploaded at once; more wait a moment, and are refused then", default=32, check=between(1, 4096)
    )
    max_upload_bytes: int = option(
        "most bytes of all uploaded videos that are not decoded yet", default=4 * 1024**3, check=between(1, 2**50)
    )
    upload_idle_s: float = option("longest pause within an upload", default=10.0, check=between(0.01, 3600))
    min_upload_rate: int = option(
        "fewest bytes a second of an upload, on average; 0 for any", default=16 * 1024, check=between(0, 2**40)
    )
    decode_workers: int = option("videos decoded at once, each in a process", default=2, check=between(1, 256))
    formats: str = option(
        "which containers and codecs are decoded: modern; archive, old ones too; or all that libav decodes",
        default=DEFAULT_TIER,
        check=one_of(*TIERS),
    )
    decode_timeout_s: float = option("longest time for decoding one video", default=120.0, check=between(0.1, 86400))
    decode_memory_mb: int = option(
        "most memory of one decoder in MiB, sampled frames apart", default=2048, check=between(64, 2**20)
    )
    frames_budget_mb: int = option(
        "MiB for the sampled frames of all captions; 0 takes a share of the memory that is available at start",
        default=0,
        check=between(0, 2**30),
    )
    frames_timeout_s: float = option(
        "seconds that a caption may wait for room for its frames", default=60.0, check=between(0.01, 86_400)
    )

    @property
    def roots(self) -> tuple[Path, ...]:
        """Directories that request paths may lie below."""
        return tuple(Path(root) for root in self.video_roots.split(":") if root)

    @property
    def allowed_hosts(self) -> frozenset[tuple[str, int]]:
        """Those of the https servers that videos may be fetched from."""
        return parse_hosts(self.url_hosts)


@dataclass(frozen=True, kw_only=True)
class DocumentServing:
    """Options of reading documents."""

    reader: str = option("address of the reader service; empty: this gateway reads no documents", default="")
    documents_at_once: int = option(
        "documents read at once; more wait. No more than the reader's --max-documents", default=2, check=between(1, 256)
    )
    pages_at_once: int = option("pages of one document that the target reads at once", default=2, check=between(1, 64))
    regions_at_once: int = option(
        "regions of pages, of all documents, that the target reads at once in stage region+page; fewer than its"
        " --max-sessions",
        default=8,
        check=between(1, 256),
    )
    max_document_bytes: int = option("largest document", default=64 * 1024**2, check=between(1, 2**31))
    max_page_pixels: int = option(
        "most pixels of a page, for models that take frames of many sizes",
        default=4_000_000,
        check=between(10_000, 64_000_000),
    )
    reader_wait_s: float = option(
        "how long a document that lost its reader waits for one to go on with; 0: it ends",
        default=30.0,
        check=between(0, 3600),
    )
    reader_silence_s: float = option(
        "seconds of silence after which a reader that owes a page is lost", default=120.0, check=between(0.1, 3600)
    )


# -- archive ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions:
    """Options of the archive. Those of the queue must be the same at every gateway that shares it."""

    redis: str = option(
        "URL of the Redis that holds the archive's queue, or sentinel://HOST:PORT,HOST:PORT/NAME; empty: no archive",
        default="",
    )
    redis_wait: int = option(
        "replicas of that Redis that have what is acknowledged, at least; too few: it is refused",
        default=0,
        check=between(0, 16),
    )
    redis_unsafe: bool = option(
        "whether to take a Redis that may lose accepted jobs, by a late log, none, or evicting them: true or false",
        default=False,
    )
    redis_password_file: str = option("file with the password of that Redis, if it is not in the URL", default="")
    redis_queue: str = option("name of the queue within that Redis", default="slipstream")
    scaler_listen: str = option(
        "address to tell KEDA at how much there is to do: HOST:PORT or unix:/path; empty: nowhere", default=""
    )
    scaler_client_ca: str = option(
        "PEM file of the authority whose certificates KEDA must have, in place of a token, which it cannot send",
        default="",
    )
    archive_slots: int = option("archive captions at once; 0 only takes batches in", default=2, check=between(0, 256))
    archive_ahead: int = option("archive videos decoded ahead of the models", default=2, check=between(0, 256))
    archive_drain_s: float = option(
        "how long running archive captions may go on after SIGTERM; what remains is run elsewhere",
        default=5.0,
        check=between(0, 86_400),
    )
    max_batch_items: int = option(
        "most items of one submit; this package's clients hand in 500 at a time",
        default=1_000_000,
        check=between(1, 10**8),
    )
    lease_s: float = option(
        "seconds of silence after which a gateway has lost its jobs", default=15.0, check=between(1, 3600)
    )
    max_attempts: int = option("counted failures after which a job is dead", default=4, check=between(1, 100))
    max_crashes: int = option("deaths of whatever ran it after which a job is dead", default=3, check=between(1, 100))
    max_backlog: int = option("jobs that may wait", default=1_000_000, check=between(1, 100_000_000))
    owner_max_waiting: int = option(
        "jobs of one owner that may wait, unless the tokens file says otherwise; 0: half of --max-backlog",
        default=0,
        check=between(0, 100_000_000),
    )
    owner_high: bool = option(
        "whether owners may use the priority high, unless the tokens file says otherwise: true or false", default=False
    )
    owner_max_watches: int = option(
        "batches that one owner may watch at once, at this gateway", default=64, check=between(1, 100_000)
    )
    share_results: bool = option(
        "whether owners take over each other's results of the same video and options: true or false", default=False
    )
    duplicates_kept: int = option(
        "captions that near-duplicates are looked up among, of one owner and set of options; some 2 kB of Redis each",
        default=10_000,
        check=between(1, 1_000_000),
    )
    redis_connections: int = option(
        "connections to Redis for what callers ask, at most; workers have their own", default=32, check=between(1, 4096)
    )
    retention_s: float = option(
        "how long a batch is kept after its last job ended", default=30 * 86_400.0, check=between(1, 10 * 365 * 86_400)
    )
    results_to: str = option(
        "folder of objects that results leave the queue for: s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER;"
        " empty: they stay in Redis",
        default="",
    )
    queue_bytes: int = option(
        "bytes that jobs may take in Redis, with --results-to; later jobs wait outside",
        default=128 * 1024**2,
        check=between(1024**2, 2**40),
    )
    result_file_bytes: int = option(
        "bytes that finished jobs of a batch take in Redis before they are written to a file",
        default=64 * 1024**2,
        check=between(1, 2**30),
    )
    result_file_age_s: float = option(
        "seconds after which finished jobs are written to a file, however few", default=300.0, check=between(0, 86_400)
    )

    @property
    def redis_url(self) -> str:
        """`redis` with the password of the file. Raises `InvalidConfig` where it cannot be read."""
        if not self.redis_password_file:
            return self.redis
        try:
            password = Path(self.redis_password_file).read_text().strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise InvalidConfig(f"--redis-password-file: cannot read {self.redis_password_file!r}: {reason}") from None
        scheme, mark, rest = self.redis.partition("://")
        authority, slash, path = rest.partition("/")
        user, _, host = authority.rpartition("@")
        if not password or not mark or ":" in user:
            raise InvalidConfig("--redis-password-file: it is empty, or --redis is no URL or has a password of its own")
        return f"{scheme}://{user}:{quote(password, safe='')}@{host}{slash}{path}"


# -- gateway ----------------------------------------------------------------------------------------------------------


def _check_addresses(told: str) -> str | None:
    addresses = split_addresses(told)
    if not all(addresses):
        return "names an empty address"
    twice = next((address for address in addresses if addresses.count(address) > 1), None)
    return f"names {twice!r} twice" if twice else None


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(MediaOptions, DocumentServing, ArchiveOptions, ServiceOptions, TokenOptions):
    """Options of the gateway service."""

    target: str = option(
        "address of the target service; several, separated by ',', or a name that leads to several: captions go to the"
        " one with the most free memory",
        check=_check_addresses,
    )
    draft: str = option(
        "address of the draft service, or several, of which captions go to the one with the least work; empty for"
        " plain decoding only",
        default="",
        check=lambda told: _check_addresses(told) if told else None,
    )
    max_captions: int = option("captions in work at once; more are refused", default=16, check=between(1, 4096))
    owner_share: float = option(
        "share of captions, uploads, calls and watchers that one owner, or one address without an owner, may have;"
        " who calls from this machine without an owner may have all",
        default=0.25,
        check=between(0, 1),
    )
    max_frames: int = option("most frames of a request", default=256, check=between(1, 4096))
    generation_config: str = option(
        "what a request gets that says nothing of sampling: plain, the likeliest tokens; or model, what the target's"
        " generation_config.json says, as transformers does",
        default="plain",
        check=one_of("plain", "model"),
    )
    max_frame_pixels: int = option(
        "most pixels of a frame, for models that take frames of many sizes; more pixels are more video tokens",
        default=768 * 28 * 28,
        check=between(64 * 64, 8192 * 4320),
    )
    max_new_tokens: int = option("most tokens of a caption", default=2048, check=between(1, 1_000_000))
    max_window: int = option("most draft tokens in one target pass", default=64, check=between(1, 1024))
    max_prompt_chars: int = option("longest prompt, in characters", default=8192, check=between(1, 1_000_000))
    default_prompt: str = option("asked when a request asks nothing", default="Describe this video in detail.")
    default_frames: int = option(
        "frames sampled when a request does not say; fewer where the target's context has no room for them",
        default=64,
        check=between(1, 4096),
    )
    default_new_tokens: int = option(
        "token limit when a request does not say", default=512, check=between(1, 1_000_000)
    )
    default_thinking: str = option(
        "whether models think first when a request does not say: as their chat template has it, on or off; for those"
        " whose template asks (enable_thinking)",
        default="template",
        check=one_of(*THINKING),
    )
    default_window: int = option("window limit when a request does not say", default=24, check=between(1, 1024))
    default_alpha: float = option("pruned share when a request does not say", default=0.9, check=between(0, 1))
    request_timeout_s: float = option("longest time for one caption", default=3600.0, check=between(1, 86400))
    gate_memory: bool = option(
        "whether captions of a kind that the draft has slowed down so far begin without it; else each finds out itself",
        default=True,
    )
    draft_timeout_s: float = option(
        "seconds of silence after which a draft that owes tokens is dropped", default=1.0, check=between(0.01, 3600)
    )
    draft_away_s: float = option(
        "seconds that a draft is left alone after it broke the protocol three times; 0: it is tried again at once",
        default=60.0,
        check=between(0, 86400),
    )
    resume_wait_s: float = option(
        "how long an interactive caption that lost its target waits for one to go on at; 0: it ends",
        default=30.0,
        check=between(0, 3600),
    )
    start_timeout_s: float = option(
        "how long to wait for the target at start", default=600.0, check=between(0.1, 86400)
    )
    lame_duck: ClassVar[bool] = True

    @property
    def callers(self) -> Callers:
        """Its users."""
        return Callers(self.tokens, self.owner_share)

    @property
    def max_held_videos(self) -> int:
        """Videos whose frames this gateway may hold or want at once: of captions, of jobs decoded ahead, and of regions
        of pages. A film holds some segments, and as many ahead."""
        num_regions = self.regions_at_once if self.reader else 0
        return 2 * (self.max_captions + self.archive_slots + self.archive_ahead) + num_regions
