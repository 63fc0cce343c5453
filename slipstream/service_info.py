"""What services say of themselves: a model, a gateway, its archive, its advice."""

from dataclasses import dataclass

from slipstream.errors import InvalidConfig, ModelNotUsable, VersionMismatch
from slipstream.frame_size import ANY_SIZE, FrameSize
from slipstream.sampling.params import CAME_LATER, NO_DEFAULTS, SamplingDefaults, SamplingParams

PROTOCOL_VERSION = LEAST_PROTOCOL_VERSION = 2
"""What this release speaks with its peers, and the oldest that it works with. 2: sessions have capabilities."""


@dataclass(frozen=True)
class ModelInfo:
    """What a model service serves; constant for the life of its process."""

    model_id: str = ""
    """Directory or hub id that the weights were loaded from."""
    model_type: str = ""
    """`model_type` of the checkpoint's configuration, such as "llava_onevision"."""
    dtype: str = ""
    device: str = ""
    tokenizer_digest: str = ""
    """SHA-256 over everything that decides token ids. Target and draft must be equal."""
    vocab_size: int = 0
    """Width of the logits; may exceed the tokenizer's vocabulary."""
    hidden_size: int = 0
    num_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    """Stays in the service's process."""
    max_context: int = 0
    """Positions that the model was made for: prompt, video and output together."""
    tokens_per_frame: int = 0
    """Video tokens that one sampled frame of usual size becomes, rounded up where frames count differently."""
    max_frames: int = 0
    """Frames of usual size that fit the context together with an empty prompt."""
    revision: str = ""
    """SHA-256 over the digests of the checkpoint's files: the same revision is the same model."""
    frame_size: FrameSize = ANY_SIZE
    """What the checkpoint's own processor resizes frames to."""
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    gpu_uuids: tuple[str, ...] = ()
    """Of the GPUs that hold the weights: two services may know one GPU by other numbers."""
    surface: str = ""
    """How it writes what it reads of a page, one of `slipstream.documents.surfaces.SURFACES`; empty: not known."""
    keeps_structure: bool = False
    """It can keep texts to a JSON schema, a regular expression or a choice."""
    tells_logprobs: bool = False
    """It tells how likely tokens were."""
    honours: tuple[str, ...] = ()
    """What it does not ignore of `slipstream.sampling.params.CAME_LATER`, and thinking."""
    uses_mps: bool = False
    """CUDA's MPS lets processes run on these GPUs at the same time; else they take turns."""
    protocol_version: int = PROTOCOL_VERSION
    """What the service speaks, and the least that it understands; 0, which old releases leave, is 1."""
    least_protocol_version: int = LEAST_PROTOCOL_VERSION


@dataclass(frozen=True)
class ServiceLoad:
    """How full a model service was when it was asked. All 0: one of a release that does not say."""

    sessions: int = 0
    max_sessions: int = 0
    queued: int = 0
    kv_bytes: int = 0
    """Promised to sessions."""
    kv_budget_bytes: int = 0


@dataclass(frozen=True)
class PeerInfo:
    """One of several targets or drafts of a gateway."""

    role: str = ""
    number: int = 0
    """From 1, as the option names them."""
    left_out: str = ""
    """Why it takes nothing now; empty: it does."""
    load: ServiceLoad = ServiceLoad()
    placed: int = 0
    """Captions that this gateway has sent there."""


@dataclass(frozen=True)
class Placement:
    """One draft beside so many targets of one caption each, as measured captions foresee it: at least and at most,
    where the draft's passes were never seen with so many captions."""

    targets: int = 0
    decoding_at_least: float = 0.0
    decoding_at_most: float = 0.0
    """Tokens a second of each target, over its own plain decoding."""
    devices_at_least: float = 0.0
    devices_at_most: float = 0.0
    """Captions an hour of all these devices, over as many devices with plain targets; prefills are included."""


@dataclass(frozen=True)
class ArchiveInfo:
    """A gateway's part in the archive."""

    takes_writes: bool = False
    """Whether the queue's store took a write when it was tried last."""
    worker: str = ""
    """As in `Job`; empty at a gateway that runs no jobs."""
    jobs: int = 0
    max_jobs: int = 0
    """Those that the worker has, and may have."""
    lease_age_s: float = 0.0
    """Since its leases were renewed; without a job: since it was last heard of. After `lease_s` they are lost."""
    lease_s: float = 0.0


@dataclass(frozen=True)
class GatewayInfo:
    """What a gateway serves, and its limits."""

    version: str = ""
    target_model: str = ""
    draft_model: str = ""
    """Empty while no draft is connected."""
    tokens_per_frame: int = 0
    max_frames: int = 0
    max_new_tokens: int = 0
    max_window: int = 0
    max_video_bytes: int = 0
    default_prompt: str = ""
    accepts_paths: bool = False
    """False: videos are uploaded; the gateway has no roots."""
    reads_documents: bool = False
    placements: tuple[Placement, ...] = ()
    """For 1, 2 and 4 targets; none while no caption with a draft has been measured."""
    gates_open: int = 0
    gates_closed: int = 0
    """Kinds of captions that begin with a draft, and those that have none for now."""
    archive: ArchiveInfo | None = None
    peers: tuple[PeerInfo, ...] = ()
    """Among which captions are placed; none where there is one target and one draft."""
    target_revision: str = ""
    target_dtype: str = ""
    draft_revision: str = ""
    draft_dtype: str = ""
    """As in `ModelInfo`, for receipts that a caller writes; empty: a gateway of an older release."""
    surface: str = ""
    """Of documents where nothing else is asked; empty: of a gateway of an older release, which takes "markdown"."""


# -- which work together ----------------------------------------------------------------------------------------------


def check_protocol(role: str, model: ModelInfo, other_role: str, other: ModelInfo) -> None:
    """Raises `VersionMismatch` when one service is too old for the other; says which, and what each speaks."""
    for old, old_role, new, new_role in ((model, role, other, other_role), (other, other_role, model, role)):
        speaks = old.protocol_version or 1
        if speaks < new.least_protocol_version:
            raise VersionMismatch(
                f"the {old_role} speaks protocol version {speaks}, and the {new_role} needs at least version "
                f"{new.least_protocol_version}: upgrade the {old_role}"
            )


def take_turns(target: ModelInfo, draft: ModelInfo) -> bool:
    """Whether both are on one GPU that runs one of them at a time, so that T_p and T_q add up."""
    return bool(set(target.gpu_uuids) & set(draft.gpu_uuids)) and not (target.uses_mps and draft.uses_mps)


def check_pair(target: ModelInfo, draft: ModelInfo) -> None:
    """Raises `ModelNotUsable` or `VersionMismatch` when the two do not fit each other."""
    check_protocol("draft", draft, "target", target)
    if target.tokenizer_digest != draft.tokenizer_digest:
        raise ModelNotUsable(
            f"target {target.model_id!r} and draft {draft.model_id!r} have different tokenizers; "
            "take a draft of the same family, or ask for method 'autoregressive'"
        )
    if target.tokens_per_frame != draft.tokens_per_frame:
        raise ModelNotUsable(
            f"the target makes {target.tokens_per_frame} tokens of a frame and the draft {draft.tokens_per_frame}; "
            "guidance needs them equal"
        )
    if target.frame_size.is_known and draft.frame_size.is_known and target.frame_size != draft.frame_size:
        raise ModelNotUsable(
            f"target {target.model_id!r} and draft {draft.model_id!r} want frames of different sizes; give both the"
            " same settings of the video processor"
        )


def check_honours(target: ModelInfo, sampling: SamplingParams, *, thinking: str, logprobs: bool) -> None:
    """Raises `InvalidConfig` for a target that would ignore what is asked: how tokens are chosen, whether it thinks
    first (`on` or `off`), that a text is kept to a structure, or that logprobs are told."""
    asked = {name: getattr(sampling, name) for name in CAME_LATER} | {"thinking": thinking in ("on", "off")}
    for name, value in asked.items():
        if value and name not in target.honours:
            raise InvalidConfig(f"the target is of an older release, which knows no {name}")
    if logprobs and not target.tells_logprobs:
        raise InvalidConfig("the target is of an older release, which tells no logprobs")
    if sampling.is_structured and not target.keeps_structure:
        raise InvalidConfig(
            "the target can keep no text to a json_schema, regex or choice: it is of an older release, or lacks"
            " llguidance (pip install 'slipstream[structured]')"
        )
