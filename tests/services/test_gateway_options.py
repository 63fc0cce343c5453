"""What a request's sampling options become, without any service."""

import pytest

from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.options import resolve_options
from slipstream.errors import InvalidRequest
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions
from slipstream.sampling.params import SamplingParams
from slipstream.speculation.methods import METHODS, Lossy

CONFIG = GatewayConfig(listen="", target="t:1", draft="d:1")


def test_what_is_left_out_is_greedy_and_gated() -> None:
    options = resolve_options(CaptionOptions(), CONFIG)
    assert options.sampling == SamplingParams()
    assert options.gate and options.seed == 0


def test_everything_that_is_given_arrives() -> None:
    asked = CaptionOptions(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        repetition_penalty=1.5,
        sampling_rule="rejection",
        seed=2**63 - 1,
        stop=["the end", "\n"],
        gate=False,
    )
    options = resolve_options(asked, CONFIG)
    assert options.sampling == SamplingParams(0.5, 7, 0.25, 1.5, 2**63 - 1, "rejection", ("the end", "\n"))
    assert options.seed == 2**63 - 1 and not options.gate


@pytest.mark.parametrize("method", [name for name in METHODS if name != "autoregressive"])
def test_a_lossy_baseline_is_of_plain_decoding(method: str) -> None:
    with pytest.raises(InvalidRequest, match="ask for method 'autoregressive'"):
        resolve_options(CaptionOptions(method=method, lossy="fastv"), CONFIG)
    options = resolve_options(CaptionOptions(method="autoregressive", lossy="fastv"), CONFIG)
    assert options.lossy == Lossy("fastv", 0.5)
    for keep in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(InvalidRequest, match="lossy_keep"):
            resolve_options(CaptionOptions(method="autoregressive", lossy="fastv", lossy_keep=keep), CONFIG)


def test_a_given_zero_is_not_a_default() -> None:
    for name in ("top_p", "repetition_penalty"):
        with pytest.raises(InvalidRequest, match=f"{name} must be above 0"):
            resolve_options(CaptionOptions(**{name: 0.0}), CONFIG)
