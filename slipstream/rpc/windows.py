"""Sampling parameters, windows and verdicts on the wire."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.errors import ProtocolViolation
from slipstream.rpc.v1 import common_pb2, target_pb2
from slipstream.sampling.params import Proposal, SamplingParams
from slipstream.speculation.acceptance import FinishReason, TokenTree, Verdict
from slipstream.speculation.actions import JudgeWindow

# -- sampling ---------------------------------------------------------------------------------------------------------

# Sampling parameters and proposals on the wire. Part of the codec; imports no torch.


def sampling_message(params: SamplingParams) -> common_pb2.Sampling:
    """How tokens are chosen, for target and draft."""
    return common_pb2.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        rule=params.rule,
        stop=params.stop,
    )


def read_sampling(message: common_pb2.Sampling) -> SamplingParams:
    """How tokens are to be chosen; an empty message is greedy. Raises `InvalidRequest` for values out of range."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p or 1.0,
        repetition_penalty=message.repetition_penalty or 1.0,
        seed=message.seed,
        rule=message.rule or SamplingParams.rule,
        stop=tuple(message.stop),
    ).check()


def proposal_messages(proposals: Iterable[Proposal]) -> list[common_pb2.Proposal]:
    """What draft tokens were drawn from."""
    return [
        common_pb2.Proposal(token_ids=proposal.token_ids, probabilities=proposal.probabilities)
        for proposal in proposals
    ]


def read_proposals(messages: Sequence[common_pb2.Proposal]) -> tuple[Proposal, ...]:
    """What draft tokens were drawn from, unjudged: a proposal without sense is the sampler's business."""
    return tuple(Proposal(tuple(message.token_ids), tuple(message.probabilities)) for message in messages)


# -- windows ----------------------------------------------------------------------------------------------------------

MAX_PASSES = 1_000_000
MAX_SELF_DRAFT = 1024
_FINISH_REASONS = {
    FinishReason.STOP: target_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: target_pb2.FINISH_REASON_LENGTH,
    None: target_pb2.FINISH_REASON_UNSPECIFIED,
}


@dataclass(frozen=True)
class JudgeRequest:
    """Passes to run: the first over the window, the others over nothing; or each over tokens drafted for it here."""

    window: tuple[int, ...] = ()
    num_passes: int = 1
    proposals: tuple[Proposal, ...] = ()
    """What each token of the window was drawn from, where the sampling rule needs it."""
    tree: TokenTree | None = None
    """The window, where it branches."""
    self_draft: int = 0


@dataclass(frozen=True)
class PassFacts:
    """What a pass was: its seconds, and the tokens that were drafted for it here, with the seconds of that."""

    pass_s: float
    num_drafted: int = 0
    draft_s: float = 0.0


def judge_message(action: JudgeWindow, proposals: Sequence[common_pb2.Proposal] = ()) -> target_pb2.TargetRequest:
    """Asks for passes."""
    judge = target_pb2.Judge(
        window=action.window,
        num_passes=action.num_passes,
        proposals=proposals,
        parents=action.parents,
        self_draft=action.self_draft,
    )
    return target_pb2.TargetRequest(judge=judge)


def read_judge(message: target_pb2.Judge) -> JudgeRequest:
    """What was asked for. Raises `ProtocolViolation` for what no target could do."""
    if not 0 < message.num_passes <= MAX_PASSES:
        raise ProtocolViolation(f"a request asks for 1 to {MAX_PASSES} passes, not {message.num_passes}")
    if message.self_draft > MAX_SELF_DRAFT or (message.self_draft and message.window):
        raise ProtocolViolation(f"self-drafting takes no window, and at most {MAX_SELF_DRAFT} tokens")
    tree = None
    if message.parents:
        try:
            tree = TokenTree(tuple(message.window), tuple(message.parents))
        except ValueError as error:
            raise ProtocolViolation(f"the window is no tree: {error}") from None
    proposals = read_proposals(message.proposals)
    return JudgeRequest(tuple(message.window), message.num_passes, proposals, tree, message.self_draft)


def verdict_message(verdict: Verdict, pieces: Sequence[str], facts: PassFacts) -> target_pb2.TargetEvent:
    """A verdict with the text of its tokens."""
    message = target_pb2.Verdict(
        num_accepted=verdict.num_accepted,
        own_token=verdict.own_token,
        pieces=pieces,
        finish_reason=finish_reason_number(verdict.finish_reason),
        pass_s=facts.pass_s,
        stop_string=verdict.stop_string,
        path=verdict.path,
        drafted=verdict.drafted,
        num_drafted=facts.num_drafted,
        draft_s=facts.draft_s,
    )
    return target_pb2.TargetEvent(verdict=message)


def read_verdict(message: target_pb2.Verdict) -> Verdict:
    """What the target decided. Raises `ProtocolViolation` for a path or drafted tokens of another number."""
    own_token = message.own_token if message.HasField("own_token") else None
    for tokens in (message.path, message.drafted):
        if len(tokens) not in (0, message.num_accepted):
            raise ProtocolViolation("the target accepted another number of tokens than it names")
    reasons = {number: reason for reason, number in _FINISH_REASONS.items()}
    return Verdict(
        message.num_accepted,
        own_token,
        reasons.get(message.finish_reason),
        message.stop_string,
        tuple(message.path),
        tuple(message.drafted),
    )


def finish_reason_number(reason: FinishReason | None) -> "target_pb2.FinishReason":
    """The wire's number for why a text ended."""
    return _FINISH_REASONS[reason]
