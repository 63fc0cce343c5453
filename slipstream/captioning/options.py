"""What one caption was asked to be: the wire's options with defaults filled in, every value checked."""

import math
import uuid
from dataclasses import dataclass

from slipstream.captioning.config import GatewayConfig
from slipstream.errors import InvalidConfig, InvalidRequest, LimitExceeded
from slipstream.rpc.codec import GUIDANCE_KINDS
from slipstream.rpc.v1 import gateway_pb2
from slipstream.sampling.params import SamplingParams
from slipstream.speculation.methods import ATTENTION_PRUNERS, PRUNERS, Drafter, Lossy, Method, Shape, get_method
from slipstream.speculation.pacing import POLICIES

POSITIONS = ("original", "compact")
MAX_ID_CHARS = 128
DEFAULT_LOSSY_KEEP = 0.5


@dataclass(frozen=True)
class CaptionOptions:
    """A request, complete and valid. Field meanings are those of `CaptionOptions` in gateway.proto."""

    request_id: str
    path: str
    prompt: str
    method: str
    num_frames: int
    max_new_tokens: int
    pruner: str
    alpha: float
    policy: str
    max_window: int
    guidance: str
    positions: str
    seed: int
    sampling: SamplingParams
    gate: bool
    drafter: Drafter
    shape: Shape
    gamma: int | None
    lossy: Lossy | None
    trace: bool

    @property
    def speculative(self) -> bool:
        """A draft takes part."""
        return self.drafter is Drafter.DRAFT

    @property
    def drafts_itself(self) -> bool:
        """The target drafts with a part of its own cache."""
        return self.drafter is Drafter.SELF

    @property
    def sends_proposals(self) -> bool:
        """The draft tells what it drew from. Trees are judged by equality with the target's own choice."""
        return self.sampling.sends_proposals and self.shape is Shape.CHAIN

    @property
    def with_attention(self) -> bool:
        """The draft's pruner ranks by the target's attention."""
        return self.speculative and self.pruner in ATTENTION_PRUNERS


def resolve_options(message: gateway_pb2.CaptionOptions, config: GatewayConfig) -> CaptionOptions:
    """Fills in defaults and checks every value. Raises `InvalidRequest` or `LimitExceeded` naming the option."""

    def given(name: str, default: object) -> object:
        return getattr(message, name) if message.HasField(name) else default

    default_method = "slipstream" if config.draft else "autoregressive"
    method = _method(message, get_method(str(given("method", default_method))), config)
    options = CaptionOptions(
        request_id=message.request_id or uuid.uuid4().hex,
        path=message.path,
        prompt=str(given("prompt", config.default_prompt)),
        method=method.name,
        drafter=method.drafter,
        shape=method.shape,
        gamma=method.gamma,
        num_frames=_count(
            "num_frames", given("num_frames", min(config.default_frames, config.max_frames)), config.max_frames
        ),
        max_new_tokens=_count(
            "max_new_tokens",
            given("max_new_tokens", min(config.default_new_tokens, config.max_new_tokens)),
            config.max_new_tokens,
        ),
        pruner=_choice("pruner", method.pruner, PRUNERS),
        alpha=_share("alpha", given("alpha", config.default_alpha)),
        policy=_choice("policy", method.policy, POLICIES),
        max_window=_count(
            "max_window", given("max_window", min(config.default_window, config.max_window)), config.max_window
        ),
        guidance=_guidance(message, method.pruner),
        positions=_choice("positions", given("positions", "original"), POSITIONS),
        seed=message.seed,
        sampling=_sampling(message),
        gate=method.gate,
        lossy=_lossy(message, method),
        trace=message.trace,
    )
    if (
        len(options.request_id) > MAX_ID_CHARS
        or not options.request_id.isprintable()
        or not options.request_id.isascii()
    ):
        raise InvalidRequest(f"request_id must be at most {MAX_ID_CHARS} printable ASCII characters")
    if not options.prompt.strip():
        raise InvalidRequest("the prompt is empty; leave it out for the default, or ask something")
    if len(options.prompt) > config.max_prompt_chars:
        raise LimitExceeded(f"the prompt has {len(options.prompt)} characters; at most {config.max_prompt_chars} fit")
    if options.speculative and not config.draft:
        raise InvalidConfig(
            f"method {options.method!r} needs a draft, and this gateway has none; ask for 'autoregressive'"
        )
    return options


def _method(message: gateway_pb2.CaptionOptions, method: Method, config: GatewayConfig) -> Method:
    """The method with the parts that the request changes."""
    gamma = _count("gamma", message.gamma, config.max_window) if message.HasField("gamma") else None
    pruner, policy, shape, gate = (
        getattr(message, name) if message.HasField(name) else None for name in ("pruner", "policy", "shape", "gate")
    )
    return method.changed(pruner, policy, shape, gate, gamma)


def _guidance(message: gateway_pb2.CaptionOptions, pruner: str) -> str:
    default = "scores" if pruner in ATTENTION_PRUNERS else "hidden_states"
    guidance = _choice("guidance", message.guidance or default, tuple(GUIDANCE_KINDS))
    if pruner in ATTENTION_PRUNERS and guidance != "scores":
        raise InvalidRequest(f"pruner {pruner!r} ranks by attention, which comes as guidance 'scores'")
    return guidance


def _lossy(message: gateway_pb2.CaptionOptions, method: Method) -> Lossy | None:
    if not message.lossy:
        return None
    if method.drafter is not Drafter.NONE:
        raise InvalidRequest("lossy pruning is a baseline of plain decoding: ask for method 'autoregressive' with it")
    return Lossy(message.lossy, message.lossy_keep if message.HasField("lossy_keep") else DEFAULT_LOSSY_KEEP).check()


def _sampling(message: gateway_pb2.CaptionOptions) -> SamplingParams:
    """The sampling options; those that are left out keep their defaults. A given 0 is a 0, also for `top_p`."""
    names = {"temperature", "top_k", "top_p", "repetition_penalty", "seed"}
    given = {name: getattr(message, name) for name in names if message.HasField(name)}
    if message.HasField("sampling_rule"):
        given["rule"] = message.sampling_rule
    return SamplingParams(**given, stop=tuple(message.stop)).check()


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise InvalidRequest(f"{name} {value!r} is unknown; choose one of {', '.join(choices)}")
    return str(value)


def _count(name: str, value: object, limit: int) -> int:
    count = int(str(value))
    if count < 1:
        raise InvalidRequest(f"{name} must be at least 1")
    if count > limit:
        raise LimitExceeded(f"{name} {count} is more than this server's limit of {limit}")
    return count


def _share(name: str, value: object) -> float:
    share = float(str(value))
    if math.isnan(share) or not 0.0 <= share <= 1.0:
        raise InvalidRequest(f"{name} must be between 0 and 1, not {share}")
    return share
