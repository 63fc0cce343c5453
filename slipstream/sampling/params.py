"""What a request may ask of sampling, checked; and what a draft says of a token it drew. Imports no torch."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.errors import InvalidRequest

RULES = ("coupled", "rejection")
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31
MOST_TOLD = 20
"""Of the likeliest tokens in one place; as OpenAI's protocol has it."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.001, 100.0
"""What logits are divided by: much smaller ones would take them out of fp32."""
MAX_COUNT_PENALTY = 2.0
"""As OpenAI's protocol has it, and its negative."""
MAX_MIN_NEW_TOKENS = 2**31
MAX_STOPS = 16
MAX_STOP_CHARS = 256
STRUCTURES = ("json_schema", "regex", "choice")
"""Parameters of which one may be given: tokens with which no text of that structure goes on are not chosen."""
MAX_STRUCTURE_CHARS = 2**16
"""Of a JSON schema, of a regular expression, and of all choices together."""
CAME_LATER = ("min_p", "presence_penalty", "frequency_penalty", "min_new_tokens")
"""Parameters, 0 where nothing is asked, that a model of an older release would ignore."""
_UPSTREAMS_TOP_K = 50


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Field meanings are those of `Sampling` in common.proto; the defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    rule: str = "coupled"
    stop: tuple[str, ...] = ()
    json_schema: str = ""
    regex: str = ""
    choice: tuple[str, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0

    @property
    def greedy(self) -> bool:
        """No randomness: the likeliest token is chosen, and top_k, top_p, min_p, seed and rule have no effect."""
        return self.temperature == 0.0

    @property
    def takes_largest(self) -> bool:
        """The token of the largest of the logits is chosen, whatever was written before."""
        is_adjusted = self.repetition_penalty != 1.0 or self.counts or self.min_new_tokens > 0 or self.is_structured
        return self.greedy and not is_adjusted

    @property
    def counts(self) -> bool:
        """How likely a token is depends on how often the text has it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_structured(self) -> bool:
        """Some tokens cannot come next, as no text of the structure that is asked for goes on with them."""
        return bool(self.json_schema or self.regex or self.choice)

    @property
    def draws_from_all(self) -> bool:
        """A token is drawn from all of them by their own probabilities, and nobody is told of these."""
        keeps_all = self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0
        return keeps_all and not self.greedy and not self.sends_proposals

    @property
    def sends_proposals(self) -> bool:
        """The draft says what each of its tokens was drawn from."""
        return not self.greedy and self.rule == "rejection"

    def check(self) -> "SamplingParams":
        """Returns itself. Raises `InvalidRequest` that names the option, as the gateway calls it, and its range."""
        self._check_numbers()
        if not 0 <= _whole("min_new_tokens", self.min_new_tokens) <= MAX_MIN_NEW_TOKENS:
            raise InvalidRequest(f"min_new_tokens must be between 0 and 2^31, not {self.min_new_tokens}")
        if self.rule not in RULES:
            raise InvalidRequest(f"sampling_rule {self.rule!r} is unknown; choose one of {', '.join(RULES)}")
        _check_strings("stop", self.stop)
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are allowed")
        for stop in self.stop:
            if not 0 < len(stop) <= MAX_STOP_CHARS:
                raise InvalidRequest(f"stop strings must have 1 to {MAX_STOP_CHARS} characters; one has {len(stop)}")
        self._check_structure()
        return self

    def _check_numbers(self) -> None:
        if not 0.0 <= _number("temperature", self.temperature) <= MAX_TEMPERATURE:
            raise InvalidRequest(f"temperature must be between 0 and {MAX_TEMPERATURE:g}, not {self.temperature}")
        if not 0 <= _whole("top_k", self.top_k) <= MAX_TOP_K:
            raise InvalidRequest(f"top_k must be between 0 (all tokens) and 2^31, not {self.top_k}")
        if not 0.0 < _number("top_p", self.top_p) <= 1.0:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0.0 <= _number("min_p", self.min_p) <= 1.0:
            raise InvalidRequest(f"min_p must be between 0 and 1, not {self.min_p}")
        penalty = _number("repetition_penalty", self.repetition_penalty)
        if not MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
            limit = f"between {MIN_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g}"
            raise InvalidRequest(f"repetition_penalty must be {limit}, not {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            if not -MAX_COUNT_PENALTY <= _number(name, penalty) <= MAX_COUNT_PENALTY:
                limit = f"between -{MAX_COUNT_PENALTY:g} and {MAX_COUNT_PENALTY:g}"
                raise InvalidRequest(f"{name} must be {limit}, not {penalty}")
        if not 0 <= _whole("seed", self.seed) < 2**63:
            raise InvalidRequest(f"seed {self.seed} is out of range; give one from 0 to below 2^63")

    def _check_structure(self) -> None:
        """As far as no tokenizer is needed for it."""
        _check_strings("choice", self.choice)
        given = {name: getattr(self, name) for name in STRUCTURES if getattr(self, name)}
        if given and self.min_new_tokens:
            raise InvalidRequest(f"min_new_tokens cannot be asked for together with {next(iter(given))}, which ends it")
        if len(given) > 1:
            raise InvalidRequest(f"{' and '.join(given)} cannot be asked for together; give one of them")
        for name, value in given.items():
            if (num_chars := sum(map(len, value))) > MAX_STRUCTURE_CHARS:
                raise InvalidRequest(f"{name} has {num_chars} characters; at most {MAX_STRUCTURE_CHARS} are allowed")
        if not all(self.choice):
            raise InvalidRequest("choice has an empty text; each must have at least one character")
        if self.json_schema:
            _check_schema(self.json_schema)


GREEDY = SamplingParams()


@dataclass(frozen=True)
class SamplingDefaults:
    """What a checkpoint's own generation_config.json says of sampling; 0: nothing. See `SamplingParams`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    repetition_penalty: float = 0.0
    min_p: float = 0.0

    @classmethod
    def of(cls, config: Any) -> "SamplingDefaults":
        """Of a generation config of transformers, whose own defaults hold where it samples and leaves something out."""
        penalty = config.repetition_penalty or 0.0
        if not config.do_sample:
            return cls(repetition_penalty=penalty)
        return cls(
            temperature=1.0 if config.temperature is None else config.temperature,
            top_k=_UPSTREAMS_TOP_K if config.top_k is None else config.top_k,
            top_p=config.top_p or 0.0,
            repetition_penalty=penalty,
            min_p=config.min_p or 0.0,
        )

    def given(self) -> dict[str, Any]:
        """What it says, by name."""
        return {name: value for name, value in asdict(self).items() if value}


NO_DEFAULTS = SamplingDefaults()


@dataclass(frozen=True)
class Proposal:
    """The sparse distribution q that one draft token was drawn from: every token of probability > 0."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]


def _number(name: str, value: float) -> float:
    # a whole number that no float can hold is compared, as it cannot be converted
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
        raise InvalidRequest(f"{name} must be a finite number, not {value!r}")
    return value


def _check_strings(name: str, texts: object) -> None:
    if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{name} must be a list of strings")


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f'json_schema must be a JSON object, such as {{"type": "object"}}, not {text[:40]!r}')


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {value!r}")
    return value
