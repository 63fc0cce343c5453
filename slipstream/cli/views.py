"""How a caption is shown: live on a terminal, as plain lines in a pipe, or as one JSON object a video."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import Any, Protocol

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from slipstream.messages import Caption, CaptionEvent, CommittedText, CommittedToken, StageChange
from slipstream.speculation.protocol import FinishReason

# -- figures ----------------------------------------------------------------------------------------------------------


def closing_line(caption: Caption) -> str:
    """The caption's figures on one line."""
    speculation = caption.speculation
    facts = [
        f"{caption.num_tokens} tokens",
        f"{caption.decoding_rate:.1f} tokens/s",
        f"{speculation.passes} passes",
        f"first token after {caption.timings.first_token_s:.2f} s",
    ]
    if predicted := speculation.accepted_prediction_tokens:
        facts.append(f"{predicted} tokens from hints")
    if speculation.judged:
        facts.insert(2, f"tau {speculation.tau:.2f}")
    if speculation.drafts_lost:
        facts.append(f"draft lost {speculation.drafts_lost} time(s)")
    if speculation.gate_closings:
        facts.append(f"{speculation.gated_tokens} tokens decoded plainly by the gate")
    if speculation.gate_start == "rest":
        facts.append(f"no draft: {speculation.gate_reason}")
    if caption.stop_string:
        facts.append(f"ended before {caption.stop_string!r}")
    if caption.finish_reason is FinishReason.LENGTH:
        facts.append("cut at the token limit")
    return printable(", ".join([*caption.lossy_facts, *facts, *caption.video.warnings]))


def spared_line(caption: Caption) -> str:
    """Why it was not made from the video's own frames; empty: it was."""
    if caption.shared is not None:
        source = caption.shared
        whose = f"segment {source.segment}" + (f" of job {source.job_id}" if source.job_id else "")
        return f"the caption of {whose}, a near-duplicate at distance {source.distance:g}; not made from these frames"
    return f"{caption.skipped}, so not captioned" if caption.skipped else ""


def caption_dict(caption: Caption) -> dict[str, Any]:
    """All of a caption but its single tokens, for JSON: its options stand beside its text."""
    fields = asdict(replace(caption, tokens=()))
    del fields["tokens"]
    for name in ("regions", "shared", "skipped", "avg_logprob"):
        if fields[name] in (None, ""):
            del fields[name]
    fields["finish_reason"] = caption.finish_reason.name.lower() if caption.finish_reason else "unspecified"
    options: dict[str, Any] = fields.pop("options")
    return fields | options


# -- view -------------------------------------------------------------------------------------------------------------

DRAFT_STYLE = "green"
REFRESHES_PER_S = 12

ShowEvent = Callable[[CaptionEvent], None]


class View(Protocol):
    """Shows captions one after the other."""

    def caption(self, video: str) -> AbstractContextManager[ShowEvent]:
        """Opens the display of one video; gives the function that takes its events."""

    def fail(self, video: str, message: str) -> None:
        """Tells that there is no (whole) caption of this video."""


def choose_view(as_json: bool, num_videos: int) -> View:
    """The view that fits the request and what stdout is."""
    if as_json:
        return JsonView()
    console = Console()
    return LiveView(console) if console.is_terminal else PlainView(with_names=num_videos > 1)


def printable(text: str) -> str:
    """Text that cannot steer the terminal: control characters, above all escape, become a visible mark."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def complain(video: str, message: str) -> None:
    """One line on stderr."""
    typer.echo(f"slipstream: {printable(video)}: {printable(message)}", err=True)


class JsonView:
    """One JSON object a video on stdout and nothing else there."""

    @contextmanager
    def caption(self, video: str) -> Iterator[ShowEvent]:
        """Prints the caption when it is finished."""

        def show(event: CaptionEvent) -> None:
            if isinstance(event, Caption):
                typer.echo(json.dumps({"file": video} | caption_dict(event)))

        yield show

    def fail(self, video: str, message: str) -> None:
        """The object of this video holds the message that stderr gets."""
        typer.echo(json.dumps({"file": video, "error": message}))
        complain(video, message)


class PlainView:
    """Text as it comes, without any escape code."""

    def __init__(self, with_names: bool) -> None:
        self._with_names = with_names

    @contextmanager
    def caption(self, video: str) -> Iterator[ShowEvent]:
        """Streams the text, then the closing line."""
        line_is_open = False

        def show(event: CaptionEvent) -> None:
            nonlocal line_is_open
            if isinstance(event, CommittedText):
                typer.echo(printable(str(event)), nl=False)
                line_is_open = True
            elif isinstance(event, Caption):
                typer.echo(f"\n[{closing_line(event)}]")
                line_is_open = False

        if self._with_names:
            typer.echo(f"{printable(video)}:")
        try:
            yield show
        finally:
            if line_is_open:
                typer.echo()

    def fail(self, video: str, message: str) -> None:
        """One line on stderr."""
        complain(video, message)


class LiveView:
    """A progress line, then the growing text with the draft's tokens marked."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def caption(self, video: str) -> Iterator[ShowEvent]:
        """Redraws while events come; text and closing line stay on the screen."""
        screen = _Screen()
        self._console.print(Text(printable(video), style="bold"))
        with Live(screen.layout, console=self._console, refresh_per_second=REFRESHES_PER_S) as live:

            def show(event: CaptionEvent) -> None:
                screen.apply(event)
                live.update(screen.layout)

            try:
                yield show
            finally:
                live.update(screen.finished_layout)

    def fail(self, video: str, message: str) -> None:
        """One line on stderr."""
        complain(video, message)


class _Screen:
    """What the live view shows of one caption."""

    def __init__(self) -> None:
        self._text = Text()
        self._closing = Text(style="dim")
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task("connect", total=None)

    @property
    def layout(self) -> RenderableType:
        return Group(self._text, self._progress) if self._text else self._progress

    @property
    def finished_layout(self) -> RenderableType:
        return Group(self._text, self._closing) if self._closing else self._text

    def apply(self, event: CaptionEvent) -> None:
        match event:
            case StageChange():
                self._show_stage(event)
            case CommittedText():
                self._append(event.tokens)
            case Caption():
                self._closing.append(closing_line(event))

    def _show_stage(self, change: StageChange) -> None:
        label = change.stage.replace("_", " ") + (f": {change.detail}" if change.detail else "")
        total = change.total or None
        self._progress.update(self._task, description=printable(label), completed=change.done, total=total)

    def _append(self, tokens: Iterable[CommittedToken]) -> None:
        for token in tokens:
            self._text.append(printable(token.piece), style=DRAFT_STYLE if token.from_draft else None)
