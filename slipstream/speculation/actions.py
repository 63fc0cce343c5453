"""What the protocol's state machine tells its driver to do, and what a draft that joins must be told. Pure data."""

from dataclasses import dataclass

from slipstream.speculation.acceptance import FinishReason


@dataclass(frozen=True)
class JudgeWindow:
    """Run `num_passes` target passes: the first over `window`, the others over nothing."""

    window: tuple[int, ...]
    num_passes: int
    parents: tuple[int, ...] = ()
    """Of a window that is a tree, see `tree.TokenTree`."""
    self_draft: int = 0
    """Tokens that the target drafts itself for every pass; the window is empty then."""


@dataclass(frozen=True)
class RestartLine:
    """The draft keeps its first `keep` output tokens, appends `suffix` and writes until `write_until` (exclusive).

    A line that may not write at all (`write_until` is where it starts) costs the draft nothing: it rests.
    """

    epoch: int
    keep: int
    suffix: tuple[int, ...]
    write_until: int
    first_chunk: int

    @property
    def may_write(self) -> bool:
        """Whether the draft has anything to do."""
        return self.write_until > self.keep + len(self.suffix)


@dataclass(frozen=True)
class AdvanceLine:
    """The line lives; the draft may write until `write_until` (exclusive)."""

    epoch: int
    write_until: int


@dataclass(frozen=True)
class Commit:
    """These tokens are text from now on; the first `num_from_draft` were the draft's."""

    tokens: tuple[int, ...]
    num_from_draft: int


@dataclass(frozen=True)
class Finish:
    """The text is complete."""

    reason: FinishReason


Action = JudgeWindow | RestartLine | AdvanceLine | Commit | Finish


@dataclass(frozen=True)
class JoinPoint:
    """What a draft that joins must be told: where its first line starts and how far it may go."""

    epoch: int
    committed: tuple[int, ...]
    write_until: int
    first_chunk: int
