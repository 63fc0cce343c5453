"""Sampling parameters and proposals on the wire. Part of the codec; imports no torch."""

from collections.abc import Iterable, Sequence

from slipstream.rpc.v1 import common_pb2
from slipstream.sampling.params import Proposal, SamplingParams


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
