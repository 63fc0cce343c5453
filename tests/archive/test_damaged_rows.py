"""Whatever the store holds, a row of it becomes a record or one of our errors. Other parsers: tests/faults."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.queue import DamagedRecord, JobState
from slipstream.archive.redis_rows import batch_from, damage_in, job_from, lease_from, part_from, parts_state_from
from slipstream.errors import InvalidConfig
from slipstream.rpc.security import TokenFile
from tests.support.fuzzing import fuzzing

CELLS = st.binary(max_size=12) | st.sampled_from(
    [b"", b"0", b"-1", b"1e9", b"nan", b"9" * 5000, b"\xff", b"null", b"[]", b"[" * 3000, b'{"a": 1}', b"suspects 1-0"]
)
NAMES = (
    st.sampled_from([b"owner", b"metadata", b"options", b"created", b"ended", b"n:queued", b"t:x", b"sealed"]) | CELLS
)
ROWS = st.lists(CELLS | st.integers(), max_size=20)
READERS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], object]]] = {
    "lease": (ROWS | st.lists(CELLS, min_size=12, max_size=12), lambda row: lease_from("w", row)),
    "job": (
        ROWS | st.lists(CELLS | st.sampled_from([state.encode() for state in JobState]), min_size=18, max_size=18),
        lambda row: job_from("batch", row),
    ),
    "batch": (
        st.dictionaries(NAMES, CELLS).map(lambda pairs: [word for pair in pairs.items() for word in pair]) | ROWS,
        lambda pairs: batch_from("batch", pairs),
    ),
    "part": (ROWS | st.tuples(st.integers(), CELLS | st.binary(min_size=30, max_size=40)), part_from),
    "parts": (ROWS | st.tuples(CELLS, CELLS | st.integers(), ROWS | CELLS), parts_state_from),
    "digest": (st.lists(CELLS, min_size=12, max_size=12), damage_in),
}


@pytest.mark.parametrize("name", READERS)
def test_a_record_or_our_error(name: str) -> None:
    rows, read = READERS[name]

    @fuzzing(200)
    @given(rows)
    def attack(row: Any) -> None:
        with contextlib.suppress(DamagedRecord):
            read(row)

    attack()


WORDS = st.sampled_from(
    ["alice", "0" * 64, "max-waiting=", "max-captions=7", "high=yes", "high=no", "9" * 30, "#", "="]
)


@fuzzing(150)
@given(content=st.lists(WORDS | st.sampled_from([" ", "\n", "\0", "\u2028", "\u0663"]), max_size=14).map("".join))
def test_a_tokens_file_with_rights(content: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "tokens"
    path.write_text(content)
    with contextlib.suppress(InvalidConfig):
        assert TokenFile(str(path)).owner("nobody's") is None
