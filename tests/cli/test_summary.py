"""The closing line of a caption."""

from slipstream.cli.views import closing_line
from slipstream.messages import Caption, Speculation


def test_it_tells_what_ended_the_text_and_what_the_gate_did() -> None:
    caption = Caption("", 9, None, stop_string="\x1b.", speculation=Speculation(gate_closings=1, gated_tokens=7))
    line = closing_line(caption)
    assert "7 tokens decoded plainly by the gate" in line
    assert "ended before '\\x1b.'" in line


def test_it_says_first_that_the_text_is_not_the_targets_own() -> None:
    line = closing_line(Caption("", 9, None, options={"lossy": "fastv", "lossy_keep": 0.5}))
    assert line.startswith("lossy: fastv keeps 50%, 9 tokens")
    tolerant = {"tolerance": 0.75, "tolerance_rule": "ratio", "lossy": "", "lossy_keep": 0.0}
    assert closing_line(Caption("", 9, None, options=tolerant)).startswith("lossy: hints within a tolerance of 0.75 (r")
    assert not Caption("", 9, None, options=tolerant | {"tolerance": 1.0}).lossy_facts
    assert "lossy" not in closing_line(Caption("", 9, None))
