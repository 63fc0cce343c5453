"""What one caption is to be: options with defaults filled in and limits checked; what that asks of the models."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.captioning.config import GatewayConfig
from slipstream.errors import InvalidConfig, InvalidRequest, LimitExceeded
from slipstream.option_specs import UNSET, OptionSpec
from slipstream.options import DEFAULT_SUMMARY_PROMPT, MAX_PREDICTION_BYTES, OF_FILMS, OPTIONS, CaptionOptions
from slipstream.sampling.params import STRUCTURES, SamplingDefaults, SamplingParams
from slipstream.session_messages import DraftStart, SessionKey, TargetStart
from slipstream.speculation.caption_book import Opening
from slipstream.speculation.gate import Gate
from slipstream.speculation.hints.tolerance import Hints, Tolerance
from slipstream.speculation.methods import (
    ATTENTION_PRUNERS,
    HINT_DEPTH,
    HINT_ROWS,
    METHODS,
    SPARSE_GAMMA,
    TOLERANT_METHOD,
    Drafter,
    Lossy,
    Method,
    Shape,
    get_method,
)
from slipstream.speculation.pacing import CostModel, get_policy
from slipstream.speculation.pipeline import UNDRAFTED_PASSES, Pipeline
from slipstream.speculation.trees.confidence import Confident, TreeCosts
from slipstream.speculation.trees.growth import Growth
from slipstream.video.messages import SampledVideo

MAX_ID_CHARS = 128
DEFAULT_LOSSY_KEEP = 0.5
_METHOD_PARTS = ("pruner", "policy", "shape", "gate", "gamma")


@dataclass(frozen=True)
class CaptionPlan:
    """A request, complete and valid."""

    request_id: str
    """Names the request in every log."""
    path: str
    """A file below one of the gateway's roots; empty: the video is uploaded."""
    options: CaptionOptions
    """With a value for each option but `gamma`, `lossy` and `lossy_keep`, which may be left out."""
    method: Method
    """With the parts that the request changes."""
    sampling: SamplingParams
    lossy: Lossy | None
    asked: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of the options that the request itself gives."""
    owner: str = ""
    """Whose caption it is; what decodes its video has seen no other owner's."""
    delivered: tuple[int, ...] = ()
    """Tokens that the caller has of an earlier call: only what follows is sent."""
    in_background: bool = field(default=False, compare=False)
    """Nobody waits for the text."""
    has_video: bool = True
    """False: the prompt is all there is, and no draft prunes anything."""

    def named(self, ending: str) -> "CaptionPlan":
        """The same for a part of what was asked: its name ends so."""
        return replace(self, request_id=self.request_id[: MAX_ID_CHARS - len(ending)] + ending)

    def asking(self, prompt: str) -> "CaptionPlan":
        """The same with one prompt in the place of several."""
        options = CaptionOptions(prompt=prompt).over(self.options).without("prompts")
        return replace(self, options=options)

    def about_text(self, prompt: str) -> "CaptionPlan":
        """The same for a prompt about no video, in free text. The baselines that prune are left out: nothing is."""
        options = self.asking(prompt).options.without(*OF_FILMS, *STRUCTURES, "lossy", "lossy_keep")
        return replace(self, options=options, sampling=options.sampling, lossy=None, has_video=False)

    @property
    def resumable(self) -> bool:
        """The text is a function of video, options and seed, and each of its tokens the target's own choice. Under the
        rule "rejection" it depends on the draft too, and below a tolerance of 1 on the prediction."""
        return not (self.speculative and self.sends_proposals) and not self.is_tolerant

    @property
    def speculative(self) -> bool:
        """A draft takes part."""
        return self.method.drafter is Drafter.DRAFT

    @property
    def is_sparing(self) -> bool:
        """The caption need not be made where the video has a near-duplicate, or shows nothing."""
        asked = self.options.get("duplicates", "off"), self.options.get("skip_marked", "none")
        return asked != ("off", "none")

    @property
    def gated(self) -> bool:
        """Whether a draft takes part depends on captions before this one. Where hints hang beside the draft's windows,
        plain decoding is not what a draft competes with, and the gate knows its own caption alone."""
        return self.method.gate and self.speculative and not self.method.is_hybrid

    @property
    def undrafted(self) -> "CaptionPlan":
        """The same caption without a draft."""
        return replace(self, method=replace(self.method, drafter=Drafter.NONE))

    @property
    def drafts_itself(self) -> bool:
        """The target drafts its windows itself, with the method's `local_drafter`."""
        return self.method.drafter is Drafter.SELF

    @property
    def tolerance(self) -> Tolerance:
        """What is taken of a prediction beside the target's own choices."""
        given = self.options.given()
        return Tolerance(given.get("tolerance", 1.0), given.get("tolerance_rule", Tolerance.rule))

    @property
    def is_tolerant(self) -> bool:
        """Tokens of a prediction are taken that the target would not have chosen itself."""
        return "tolerance" in self.options.given() and self.tolerance.is_lossy

    @property
    def hints(self) -> Hints | None:
        """For a drafter at the target that makes trees of texts."""
        if self.method.is_hybrid:
            return Hints(tuple(self.options.prediction), HINT_ROWS)
        if self.method.max_window is None:
            return None
        return Hints(tuple(self.options.prediction), self.options.max_window, self.tolerance)

    def hinted(self, texts: Sequence[str]) -> "CaptionPlan":
        """The same with more texts to draft from, as many as there is room for, for a method that takes any."""
        taken = list(self.options.prediction)
        left = MAX_PREDICTION_BYTES - sum(len(text.encode()) for text in taken)
        for text in texts:
            if (num_bytes := len(text.encode())) <= left:
                taken.append(text)
                left -= num_bytes
        return replace(self, options=CaptionOptions(prediction=tuple(taken)).over(self.options))

    @property
    def sends_proposals(self) -> bool:
        """The draft tells what it drew from. Trees are judged by equality with the target's own choice."""
        return self.sampling.sends_proposals and self.method.shape is Shape.CHAIN and not self.method.is_hybrid

    @property
    def with_attention(self) -> bool:
        """The draft's pruner ranks by the target's attention."""
        return self.speculative and self.has_video and self.options.pruner in ATTENTION_PRUNERS

    def with_defaults(self, defaults: SamplingDefaults) -> "CaptionPlan":
        """The same with a model's own sampling where the request says nothing. Raises `InvalidRequest`."""
        taken = {name: value for name, value in defaults.given().items() if name not in self.asked}
        options = CaptionOptions(**taken).over(self.options)
        plan = replace(self, options=options, sampling=options.sampling)
        _check_delivered(plan)
        return plan


def make_plan(
    asked: CaptionOptions,
    config: GatewayConfig,
    *,
    path: str = "",
    request_id: str = "",
    owner: str = "",
    delivered: Sequence[int] = (),
) -> CaptionPlan:
    """Fills in defaults, makes an id where none is given, and checks limits. Raises `InvalidRequest` or `LimitExceeded`
    naming the option."""
    _check_limits(asked, config)
    asked = asked.with_questions(config.default_prompt)
    method = get_method(asked.get("method", _default_method(asked, config)))
    method = method.changed(*(asked.get(name, None) for name in _METHOD_PARTS))
    defaults = _defaults(asked, method, config)
    options = asked.over(CaptionOptions(**defaults))
    plan = CaptionPlan(
        request_id=_checked_id(request_id),
        path=path,
        options=options,
        method=method,
        sampling=options.sampling,
        lossy=_lossy(options, method),
        asked=frozenset(asked.given()),
        owner=owner,
        delivered=tuple(delivered),
    )
    _check_delivered(plan)
    _check_hints(plan)
    _check_together(asked)
    of_summary = (options.get("summary_prompt", DEFAULT_SUMMARY_PROMPT),) * options.get("summary", False)
    for prompt in (*options.questions, *of_summary):
        _check_prompt(prompt, config)
    _check_length("system", options.get("system", ""), config)
    for question in options.get("turns", ())[::2]:
        _check_length("turns: a question", question, config)
    if plan.speculative and not config.draft:
        raise InvalidConfig(
            f"method {method.name!r} needs a draft, and this gateway has none; ask for 'autoregressive'"
        )
    return plan


def _default_method(asked: CaptionOptions, config: GatewayConfig) -> str:
    if asked.get("prediction", ()):
        return "hints"
    if asked.get("duplicates", "off") == "hint":
        return "hints_draft" if config.draft else "hints"
    return "slipstream" if config.draft else "autoregressive"


def _defaults(asked: CaptionOptions, method: Method, config: GatewayConfig) -> dict[str, Any]:
    """A value for every option that has one without being asked for: the gateway's, the method's, or the table's."""
    values = {spec.name: spec.fallback for spec in OPTIONS if spec.fallback is not UNSET}
    values |= {spec.name: _gateway_default(spec, config) for spec in OPTIONS if spec.gateway_default}
    values |= {name: getattr(method, name) for name in _METHOD_PARTS if getattr(method, name) is not None}
    values |= {"method": method.name, "guidance": _guidance(asked, method.pruner)}
    if method.max_window is not None:
        values["max_window"] = min(method.max_window, config.max_window)
    if "tolerance" in asked.given():
        values["tolerance_rule"] = Tolerance.rule
    return values | ({"lossy_keep": DEFAULT_LOSSY_KEEP} if "lossy" in asked.given() else {})


def _gateway_default(spec: OptionSpec, config: GatewayConfig) -> Any:
    value = getattr(config, spec.gateway_default)
    return min(value, getattr(config, spec.gateway_limit)) if spec.gateway_limit else value


def _guidance(asked: CaptionOptions, pruner: str) -> str:
    guidance: str = asked.get("guidance", "scores")
    if pruner in ATTENTION_PRUNERS and guidance != "scores":
        raise InvalidRequest(f"pruner {pruner!r} ranks by attention, which comes as guidance 'scores'")
    return guidance


def _lossy(options: CaptionOptions, method: Method) -> Lossy | None:
    if "lossy" not in options.given():
        return None
    if method.drafter is not Drafter.NONE:
        raise InvalidRequest("lossy pruning is a baseline of plain decoding: ask for method 'autoregressive' with it")
    return Lossy(options.lossy, options.lossy_keep).check()


def _check_limits(asked: CaptionOptions, config: GatewayConfig) -> None:
    for spec in OPTIONS:
        if not spec.gateway_limit:
            continue
        value, limit = asked.get(spec.name, 0), getattr(config, spec.gateway_limit)
        if value > limit:
            raise LimitExceeded(f"{spec.name} {value} is more than this server's limit of {limit}")


def _check_delivered(plan: CaptionPlan) -> None:
    limit = plan.options.max_new_tokens
    if len(plan.delivered) > limit:
        raise InvalidRequest(f"resume_after has {len(plan.delivered)} tokens, and the caption at most {limit}")
    if plan.delivered and not plan.resumable:
        why = (
            "with a tolerance below 1 depends on its hints"
            if plan.is_tolerant
            else "that is sampled by the rule 'rejection' depends on its draft"
        )
        raise InvalidRequest(f"a text {why} and cannot be resumed; ask for it anew")


def _check_hints(plan: CaptionPlan) -> None:
    """Raises `InvalidRequest` for texts that the method would not look at, and for a tolerance that it cannot have."""
    takers = ", ".join(name for name, method in METHODS.items() if method.takes_hints)
    if plan.options.prediction and not plan.method.takes_hints:
        raise InvalidRequest(
            f"method {plan.method.name!r} drafts from no prediction; leave it out, or ask for {takers}"
        )
    if plan.options.get("duplicates", "off") == "hint" and not plan.method.takes_hints:
        raise InvalidRequest(
            f"method {plan.method.name!r} drafts from no hints; ask for duplicates 'share', or for {takers}"
        )
    if "tolerance" not in plan.asked or not plan.tolerance.check().is_lossy:
        return
    if plan.method.name != TOLERANT_METHOD or not plan.sampling.greedy:
        raise InvalidRequest(
            f"tolerance below 1 changes the text, and one method takes it: ask for method {TOLERANT_METHOD!r} and "
            "temperature 0"
        )


def _check_together(asked: CaptionOptions) -> None:
    """Raises `InvalidRequest` for what would change nothing without another option."""
    given = asked.given()
    if alone := next((spec for spec in OPTIONS if spec.name in given and spec.of and spec.of not in given), None):
        raise InvalidRequest(f"{alone.name} is for {alone.of}: give that, too, or leave it out")
    of_segments = [name for name in ("prompts", "summary") if asked.get(name, ())]
    if of_segments and not asked.in_segments:
        raise InvalidRequest(f"{of_segments[0]} is for a film's segments: say segments, too, or ask for one text")
    if asked.in_segments and asked.get("turns", ()):
        raise InvalidRequest("turns are about a video as a whole: leave out turns, or segments")


def _checked_id(request_id: str) -> str:
    """The id, made where none is given."""
    request_id = request_id or uuid.uuid4().hex
    if len(request_id) > MAX_ID_CHARS or not request_id.isprintable() or not request_id.isascii():
        raise InvalidRequest(f"request_id must be at most {MAX_ID_CHARS} printable ASCII characters")
    return request_id


def _check_prompt(prompt: str, config: GatewayConfig) -> None:
    if not prompt.strip():
        raise InvalidRequest("prompt is empty; leave it out for the default, or ask something")
    _check_length("prompt", prompt, config)


def _check_length(name: str, text: str, config: GatewayConfig) -> None:
    if len(text) > config.max_prompt_chars:
        raise LimitExceeded(f"{name} has {len(text)} characters; at most {config.max_prompt_chars} fit")


# -- what a plan asks of the models -----------------------------------------------------------------------------------


def target_start(plan: CaptionPlan, key: SessionKey, video: SampledVideo, tokens_per_frame: int) -> TargetStart:
    """To the target. The share `alpha` of the video is also what a target that drafts for itself leaves out."""
    num_kept = max(round((1 - plan.options.alpha) * len(video.frames) * tokens_per_frame), 1)
    return TargetStart(
        session_id=key.session_id,
        guidance_capability=key.guidance_capability if plan.speculative or plan.method.takes_hints else b"",
        with_guidance=plan.speculative and plan.has_video,
        with_attention=plan.with_attention,
        lossy=plan.lossy,
        local_drafter=plan.method.name if plan.method.local_drafter else "",
        self_draft_kept=num_kept if plan.drafts_itself and plan.hints is None else 0,
        hints=plan.hints,
        **_session(plan, video),
        **plan.options.sent_to("target") | {"logprobs": plan.options.logprobs or plan.in_background},
    )


def draft_start(
    plan: CaptionPlan, key: SessionKey, video: SampledVideo, guidance_address: str, vocab_size: int
) -> DraftStart:
    """To the draft, which pulls guidance at that address, of a target with so wide a vocabulary."""
    growth = growth_of(plan)
    return DraftStart(
        session_id=key.session_id,
        guidance_capability=key.guidance_capability,
        guidance_address=guidance_address,
        tree=plan.method.shape is Shape.TREE,
        vocab_size=vocab_size,
        width=growth.width if growth else 0,
        max_rows=growth.rows if growth else 0,
        least_chance=growth.least_chance if growth else 0.0,
        **_session(plan, video),
        **plan.options.sent_to("draft"),
    )


def _session(plan: CaptionPlan, video: SampledVideo) -> dict[str, Any]:
    """What both are told alike."""
    return {
        "request_id": plan.request_id,
        "sampling": plan.sampling,
        "seconds_per_frame": video.duration_s / max(len(video.frames), 1),  # they are sampled evenly
        "times_s": video.timestamps_s,
        "has_video": plan.has_video,
        "in_background": plan.in_background,
    }


def growth_of(plan: CaptionPlan) -> Growth | None:
    """How lines branch; None: they are no dynamic trees."""
    growth = plan.method.growth
    return growth if growth is None or plan.sampling.greedy else growth.of_sampled_text


def new_costs(plan: CaptionPlan) -> CostModel:
    """What a process knows of such captions before their first."""
    return CostModel() if plan.method.growth is None else TreeCosts()


def make_pipeline(plan: CaptionPlan, opening: Opening, vocab_size: int) -> Pipeline:
    """The protocol's state machine as the plan wants it, with what captions before this one have taught."""
    method, options, costs = plan.method, plan.options, opening.costs
    has_own_gate = method.gate and plan.speculative
    return Pipeline(
        get_policy(method.policy, method.gamma) if method.growth is None else Confident(),
        costs,
        max_window=options.max_window,
        vocab_size=vocab_size,
        gate=opening.gate or (Gate(costs) if has_own_gate else None),
        undrafted_passes=UNDRAFTED_PASSES if plan.speculative else options.max_new_tokens,
        shape=method.shape,
        growth=growth_of(plan),
        self_draft=(method.gamma or SPARSE_GAMMA) if plan.drafts_itself else 0,
        hint_depth=HINT_DEPTH if method.is_hybrid else 0,
        committed=plan.delivered,
    )
