"""Process configuration: flags over environment over defaults, and every mistake named."""

from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.captioning.config import GatewayConfig
from slipstream.config import between, one_of, option, parse_config
from slipstream.errors import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    where: str = option("a place")
    max_things: int = option("a number, 100% of it", default=3, check=between(1, 10))
    share: float = option("a share", default=0.5, check=between(0, 1))
    colour: str = option("a word", default="red", check=one_of("red", "blue"))


def parse(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    return parse_config(Config, "tool", argv, environ or {})


def test_defaults() -> None:
    config = parse(["--where", "here"])
    assert config == Config(where="here", max_things=3, share=0.5, colour="red")
    with pytest.raises(FrozenInstanceError):
        config.where = "there"  # type: ignore[misc]


def test_bounds_are_told_in_full() -> None:
    assert between(1024**2, 2**40)(1) == "must be between 1048576 and 1099511627776"
    assert between(0.01, 1)(2.0) == "must be between 0.01 and 1"


def test_a_flag_wins_over_the_environment() -> None:
    environ = {
        "SLIPSTREAM_TOOL_WHERE": "there",
        "SLIPSTREAM_TOOL_MAX_THINGS": "7",
        "SLIPSTREAM_OTHER_MAX_THINGS": "many",
        "SLIPSTREAM_PARENT_PID": "1",
        "PATH": "/bin",
    }
    assert parse(environ=environ) == Config(where="there", max_things=7)
    assert parse(["--where=here", "--max-things", "9"], environ) == Config(where="here", max_things=9)


@pytest.mark.parametrize(
    ("argv", "environ", "complaint"),
    [
        ([], {}, r"--where \(or SLIPSTREAM_TOOL_WHERE\) is needed: a place"),
        (["--were", "x"], {}, "unrecognized arguments: --were x; see --help"),
        (["--max", "4"], {}, "unrecognized arguments"),
        (["--where"], {}, "expected one argument"),
        (["here"], {}, "unrecognized arguments: here"),
        (["--max-things", "0"], {}, "--max-things: '0' must be between 1 and 10"),
        (["--max-things", "2.5"], {}, "--max-things: '2.5' is no int"),
        (["--max-things", ""], {}, "--max-things: '' is no int"),
        (["--share", "nan"], {}, "--share: 'nan' is no float"),
        (["--share", "inf"], {}, "--share: 'inf' is no float"),
        (["--share", "1.01"], {}, "--share: '1.01' must be between 0 and 1"),
        (["--colour", "green"], {}, "--colour: 'green' must be one of red, blue"),
        ([], {"SLIPSTREAM_TOOL_SHARE": "much"}, "--share: 'much' is no float"),
        (
            [],
            {"SLIPSTREAM_TOOL_SPEED": "9"},
            "SLIPSTREAM_TOOL_SPEED is no option of tool; known: colour, max_things, share, where",
        ),
    ],
)
def test_mistakes_are_named(argv: list[str], environ: dict[str, str], complaint: str) -> None:
    where = [] if "needed" in complaint or argv[:1] in (["--where"], ["--were"]) else ["--where", "x"]
    with pytest.raises(InvalidConfig, match=complaint):
        parse([*where, *argv], environ)


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(flag in told for flag in ("--where", "--max-things", "--share", "--colour", "100% of it", "needed"))


@given(st.integers())
def test_numbers_are_taken_as_they_are_or_refused(number: int) -> None:
    if 1 <= number <= 10:
        assert parse(["--where", "x", f"--max-things={number}"]).max_things == number
    else:
        with pytest.raises(InvalidConfig, match="must be between 1 and 10"):
            parse(["--where", "x", f"--max-things={number}"])


def test_the_gateways_roots() -> None:
    config = parse_config(
        GatewayConfig, "gateway", ["--listen", "a", "--target", "b", "--video-roots", "/a:/b c::"], {}
    )
    assert [str(root) for root in config.roots] == ["/a", "/b c"]
