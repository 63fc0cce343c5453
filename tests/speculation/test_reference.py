"""The plain loop that everything else is compared with."""

from slipstream.speculation.protocol import FinishReason, StopRule
from tests.support.plain_decoding import decode_plain


def test_the_end_token_is_the_last_token() -> None:
    assert decode_plain(lambda output: 3 - len(output), StopRule((0,), 10)) == ([3, 2, 1, 0], FinishReason.STOP)


def test_the_limit_ends_the_text() -> None:
    assert decode_plain(len, StopRule((99,), 4)) == ([0, 1, 2, 3], FinishReason.LENGTH)


def test_a_limit_of_one_is_one_token() -> None:
    assert decode_plain(lambda _: 7, StopRule((0,), 1)) == ([7], FinishReason.LENGTH)
