"""The one table of caption options: name, type, range, help, default, and who receives it.

Command-line flags, the wire's `CaptionOptions`, JSON, manifest fields, Python keywords, receipts and summaries are made
from the fields of `CaptionOptions`; a test holds them to `gateway.proto`. A new option is a field here and one there.
"""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from slipstream.config import UINT32_MAX, check_unicode, check_value, own_number
from slipstream.errors import InvalidRequest, LimitExceeded
from slipstream.option_specs import BOTH, THINKING, UNSET, Receiver, keywords_help, spec_of
from slipstream.option_specs import option as _option
from slipstream.sampling.params import MAX_MIN_NEW_TOKENS, MAX_TOP_K, MOST_TOLD, RULES, STRUCTURES, SamplingParams
from slipstream.speculation.hints.tolerance import ToleranceRule
from slipstream.speculation.methods import LOSSY_METHODS, METHODS, PRUNERS, GuidanceKind, Positions, Shape
from slipstream.speculation.pacing import POLICIES
from slipstream.video.film_cuts import parse_segments
from slipstream.video.marks import MARKS

SEED_MAX, MAX_FPS = 2**63 - 1, 1000.0
MAX_PREDICTION_BYTES = 1024**2
"""Of all predictions of one caption together, in UTF-8, and of all its turns: both hold answers of any length."""
OF_FILMS = ("segments", "duplicates", "skip_marked", "prompts", "summary", "summary_prompt")
"""Options that mean nothing to a page or a text; duplicates and marks also mean something to a whole video."""
TOLD_BESIDE = ("trace", "want_kept", "logprobs", "top_logprobs")
"""Options that ask what else is told, and say nothing of the text."""
MAX_PROMPTS, MAX_TURNS = 16, 64
DEFAULT_SUMMARY_PROMPT = (
    "These are captions of the parts of one video, in order, each behind its times. Sum up the whole video in one"
    " paragraph."
)


@dataclass(frozen=True)
class CaptionOptions:
    """What to ask of a video, and how. What is left out takes the gateway's default.

    Raises:
        InvalidRequest: a value of the wrong type, out of range or unknown; it names the option and what is allowed.
        LimitExceeded: predictions or turns of more than `MAX_PREDICTION_BYTES`.
    """

    prompt: str = _option(
        "What to ask of the video.",
        "common",
        to=BOTH,
        flag="",
        gateway_default="default_prompt",
        kw_only=False,
    )
    num_frames: int = _option(
        "Frames to sample, evenly in time.",
        "common",
        low=1,
        high=UINT32_MAX,
        flag="frames",
        gateway_default="default_frames",
        gateway_limit="max_frames",
    )
    fps: float = _option(
        "Sample so many frames of each second, and no more than num_frames; 0: num_frames, however long it is.",
        "common",
        default="0",
        low=0,
        high=MAX_FPS,
    )
    max_new_tokens: int = _option(
        "Most tokens of the caption.",
        "common",
        to=BOTH,
        low=1,
        high=UINT32_MAX,
        gateway_default="default_new_tokens",
        gateway_limit="max_new_tokens",
    )
    method: str = _option(
        "How to decode: autoregressive is the target alone.",
        "common",
        default="slipstream, or autoregressive without a draft",
        choices=tuple(METHODS),
    )
    segments: str = _option(
        "Caption segments of the video, each with its times: fixed:10s (or other seconds), shots, or none.",
        "common",
        default="none",
    )
    duplicates: str = _option(
        "Share a near-duplicate's caption, or draft from it.", "common", default="off", choices=("off", "hint", "share")
    )
    skip_marked: str = _option(
        "No text for what is black; or frozen, too; or static.", "common", default="none", choices=("none", *MARKS)
    )
    prompts: Sequence[str] = _option(
        "What to ask of the video; of segments several questions, each answered for every one of them.",
        "common",
        default="the gateway's",
        flag="prompt",
    )
    summary: bool = _option(
        "With segments: also sum up their captions in a text about the whole.", "common", default="no"
    )
    summary_prompt: str = _option(
        "What to ask of the segments' captions for it.",
        "common",
        default="to sum up the video in one paragraph",
        of="summary",
    )
    system: str = _option(
        "What the model is told beforehand, as its chat template has it.",
        "common",
        default="what the template says",
        to=BOTH,
    )
    turns: Sequence[str] = _option(
        "Earlier questions about the video and their answers, in turns, from which the prompt goes on.",
        "common",
        default="none",
        to=BOTH,
        flag="turn",
    )
    thinking: str = _option(
        "Whether a model that can think first does.",
        "common",
        to=BOTH,
        choices=THINKING,
        gateway_default="default_thinking",
    )
    temperature: float = _option("0: the likeliest token; above: sample.", "sampling", default="0", low=0, fallback=0.0)
    top_k: int = _option(
        "Sample from the k likeliest tokens; 0: all.", "sampling", default="0", low=0, high=MAX_TOP_K, fallback=0
    )
    top_p: float = _option(
        "Sample from the likeliest tokens that make up this probability.", "sampling", default="1", high=1, fallback=1.0
    )
    min_p: float = _option("Sample no token below this share of the likeliest.", "sampling", default="0", fallback=0.0)
    repetition_penalty: float = _option("Above 1: repeat less.", "sampling", default="1", fallback=1.0)
    presence_penalty: float = _option("Above 0: repeat less of the text.", "sampling", default="0", fallback=0.0)
    frequency_penalty: float = _option("The same, by how often.", "sampling", default="0", fallback=0.0)
    seed: int = _option(
        "Names the random numbers of sampling and of random pruners: same seed, same text.",
        "sampling",
        default="0",
        to=("draft",),
        low=0,
        high=SEED_MAX,
        fallback=0,
    )
    sampling_rule: str = _option(
        "How draft tokens are judged when sampling.", "sampling", default="coupled", choices=RULES, fallback="coupled"
    )
    stop: Sequence[str] = _option(
        "End before this text; there may be several.", "sampling", default="none", fallback=()
    )
    min_new_tokens: int = _option(
        "No end but by stop before so many.", "sampling", default="0", low=0, high=MAX_MIN_NEW_TOKENS, fallback=0
    )
    json_schema: str | Mapping[str, Any] = _option(
        "The text is JSON of this schema.", "common", default="none", is_file=True, fallback=""
    )
    regex: str = _option("The whole text matches this regular expression.", "common", default="none", fallback="")
    choice: Sequence[str] = _option(
        "The text is one of these; there are several.", "common", default="any text", fallback=()
    )
    pruner: str = _option("Chooses the video tokens that the draft keeps.", to=("draft",), choices=PRUNERS)
    alpha: float = _option(
        "Share of the video tokens that the draft drops.",
        to=("draft",),
        low=0,
        high=1,
        gateway_default="default_alpha",
    )
    guidance: str = _option(
        "What the draft prunes by.", default="what the pruner wants", to=("draft",), choices=tuple(GuidanceKind)
    )
    positions: str = _option(
        "Position ids of the kept video tokens.",
        default="original",
        to=("draft",),
        choices=tuple(Positions),
        fallback="original",
    )
    policy: str = _option("When the target starts a pass.", choices=POLICIES)
    max_window: int = _option(
        "Most draft tokens in one target pass.",
        low=1,
        high=UINT32_MAX,
        gateway_default="default_window",
        gateway_limit="max_window",
    )
    gamma: int = _option("Window of fixed and sequential pacing.", low=1, high=UINT32_MAX, gateway_limit="max_window")
    shape: str = _option("Of a window.", choices=tuple(Shape))
    gate: bool = _option("Decode without the draft while that is faster.")
    trace: bool = _option("Also tell what models did and when, for timelines.", default="no", flag="", fallback=False)
    want_kept: bool = _option(
        "Also tell which video tokens the draft keeps.", default="no", to=("draft",), flag="", fallback=False
    )
    logprobs: bool = _option(
        "Also tell how likely the target found each token.", default="no", to=("target",), flag="", fallback=False
    )
    top_logprobs: int = _option(
        "And of so many rivals.", default="0", to=("target",), low=0, high=MOST_TOLD, flag="", fallback=0, of="logprobs"
    )
    prediction: Sequence[str] = _option(
        "Text that the caption may be like, such as an old one; there may be several.",
        default="none",
        flag="prediction-file",
        is_file=True,
        fallback=(),
    )
    tolerance: float = _option(
        "tau of hierarchical speculative decoding (hsd): below 1 what a prediction has is taken if nearly as likely.",
        "baselines",
        default="1",
        low=0,
        high=1,
    )
    tolerance_rule: str = _option(
        "How the paper's eq. 10 is read.",
        "baselines",
        default="log_ratio",
        choices=tuple(ToleranceRule),
        of="tolerance",
    )
    lossy: str = _option(
        "Prunes the target itself, which changes the text: for comparison.",
        "baselines",
        default="none",
        choices=LOSSY_METHODS,
    )
    lossy_keep: float = _option(
        "Share of the video tokens that lossy keeps.", "baselines", default="0.5", low=0, high=1, of="lossy"
    )

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            if (frozen := _frozen(name, value)) is not value:
                object.__setattr__(self, name, value := frozen)
            check_unicode(name, value)
            spec = OPTIONS_BY_NAME[name]
            if spec.group != "sampling" and not spec.repeated:  # those are checked together, and by what they are of
                check_value(name, value, spec.kind, spec.choices, spec.low, spec.high)
        _ = self.sampling  # checks those options together
        _check_texts("prediction", self.get("prediction", ()))
        _check_prompts(self.get("prompts", ()))
        _check_turns(self.get("turns", ()))
        if self.in_segments:
            parse_segments(self.segments)

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "CaptionOptions":
        """From JSON or a manifest: names to values. Raises `InvalidRequest`, also for a name that there is not."""
        if unknown := [name for name in values if name not in OPTIONS_BY_NAME]:
            raise InvalidRequest(f"{unknown[0]!r} is no option; known: {', '.join(OPTIONS_BY_NAME)}")
        return cls(**values)  # type: ignore[arg-type]

    def given(self) -> dict[str, Any]:
        """The options that have a value, in the table's order."""
        values = {spec.name: getattr(self, spec.name) for spec in OPTIONS}
        return {name: value for name, value in values.items() if value is not UNSET}

    def get(self, name: str, default: Any) -> Any:
        """The value of one option, or `default` where it was not given."""
        value = getattr(self, name)
        return default if value is UNSET else value

    def over(self, defaults: "CaptionOptions") -> "CaptionOptions":
        """These options, and those of `defaults` where these say nothing. A structure takes the place of any other, and
        so does an empty one, which asks for free text."""
        given, others = self.given(), defaults.given()
        if not given.keys().isdisjoint(STRUCTURES):
            others = {name: value for name, value in others.items() if name not in STRUCTURES or not value}
        return CaptionOptions(**others | given)

    @property
    def in_segments(self) -> bool:
        """The video is cut, and each segment has a caption of its own."""
        return bool(self.get("segments", "none") != "none")

    @property
    def questions(self) -> tuple[str, ...]:
        """What is asked of every segment: one prompt, or several."""
        return self.get("prompts", ()) or (self.prompt,)

    def with_questions(self, default: str) -> "CaptionOptions":
        """These options with the question that was asked where an earlier one was left out, as a prompt may be."""
        turns = tuple(text or ("" if number % 2 else default) for number, text in enumerate(self.get("turns", ())))
        return CaptionOptions(turns=turns).over(self) if turns else self

    def without(self, *names: str) -> "CaptionOptions":
        """These options but for some."""
        return CaptionOptions(**{name: value for name, value in self.given().items() if name not in names})

    def sent_to(self, receiver: Receiver) -> dict[str, Any]:
        """The values that a model service is told, by name, of the options that are given."""
        return {name: value for name, value in self.given().items() if receiver in OPTIONS_BY_NAME[name].to}

    @property
    def sampling(self) -> SamplingParams:
        """The sampling options as one, greedy where nothing was given. Raises `InvalidRequest`."""
        names = {field.name: field.name for field in dataclasses.fields(SamplingParams)} | {"rule": "sampling_rule"}
        given = self.given()
        return SamplingParams(**{part: given[name] for part, name in names.items() if name in given}).check()


_KINDS = get_type_hints(CaptionOptions)
OPTIONS = tuple(spec_of(field, _KINDS[field.name]) for field in dataclasses.fields(CaptionOptions))
"""The table, in the order of the help."""
OPTIONS_BY_NAME = {spec.name: spec for spec in OPTIONS}


def _frozen(name: str, value: object) -> object:
    """A list as a tuple, a number of NumPy's as Python's, and a schema as its text where it is an object."""
    if name == "json_schema" and isinstance(value, Mapping):
        try:
            return json.dumps(dict(value), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"json_schema is no JSON: {error}") from None
    return tuple(value) if isinstance(value, list) else own_number(value)


def _check_texts(name: str, texts: object) -> None:
    """Raises for texts that no gateway would take."""
    if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{name} must be texts, in a list or a tuple")
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_PREDICTION_BYTES:
        raise LimitExceeded(f"{name} has {num_bytes} bytes; at most {MAX_PREDICTION_BYTES} are taken together")


def _check_prompts(prompts: object) -> None:
    """Raises for questions that no gateway would take."""
    if not isinstance(prompts, tuple) or not all(isinstance(prompt, str) and prompt.strip() for prompt in prompts):
        raise InvalidRequest("prompts must be texts that ask something, in a list or a tuple")
    if len(prompts) > MAX_PROMPTS:
        raise LimitExceeded(f"there are {len(prompts)} prompts; at most {MAX_PROMPTS} are asked of a segment")


def _check_turns(turns: object) -> None:
    """Raises for a conversation that no gateway would take."""
    _check_texts("turns", turns)
    assert isinstance(turns, tuple)
    if len(turns) % 2:
        raise InvalidRequest(f"turns are questions and their answers, so there cannot be {len(turns)} of them")
    if len(turns) > MAX_TURNS:
        raise LimitExceeded(f"there are {len(turns)} turns; at most {MAX_TURNS} are taken")


# -- as keywords of methods --------------------------------------------------------------------------------------------

KeywordsP = ParamSpec("KeywordsP")
OwnerT = TypeVar("OwnerT")
SubjectT = TypeVar("SubjectT")
CallT = TypeVar("CallT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class CallOptions(CaptionOptions):
    """What a caller says: the options of the table one by one, or as one."""

    options: CaptionOptions | None = field(default=None, kw_only=True)
    """For what the keywords do not say."""

    def asked(self) -> CaptionOptions:
        """The options, of both. Raises `InvalidRequest`."""
        if not isinstance(self.options, CaptionOptions | None):
            raise InvalidRequest("options must be CaptionOptions; CaptionOptions.from_mapping makes them of a dict")
        return self.over(self.options or CaptionOptions())


def keywords_of(
    make_call: Callable[KeywordsP, CallT], others: Mapping[str, str]
) -> Callable[
    [Callable[[OwnerT, SubjectT, CallT], ResultT]], Callable[Concatenate[OwnerT, SubjectT, KeywordsP], ResultT]
]:
    """Gives a method that takes one thing and a `CallOptions` the keywords of the latter, for readers, type checkers
    and `help`. `others` are the keywords that are not in the table, with their help."""

    def decorate(
        method: Callable[[OwnerT, SubjectT, CallT], ResultT],
    ) -> Callable[Concatenate[OwnerT, SubjectT, KeywordsP], ResultT]:
        @functools.wraps(method)
        def called(owner: OwnerT, subject: SubjectT, /, *args: KeywordsP.args, **kwargs: KeywordsP.kwargs) -> ResultT:
            return method(owner, subject, make_call(*args, **kwargs))

        plain = inspect.signature(method)
        ours = [one.replace(kind=one.POSITIONAL_ONLY) for one in plain.parameters.values()][:2]
        theirs = inspect.signature(make_call).parameters.values()
        called.__signature__ = plain.replace(parameters=[*ours, *theirs])  # type: ignore[attr-defined]
        called.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\n{keywords_help(OPTIONS, others)}"
        return called

    return decorate
