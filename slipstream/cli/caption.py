"""`slipstream caption`: captions video files through a gateway, or through a stack of its own."""

import inspect
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream.cli.common import (
    CONNECTION_PANEL,
    ConnectionOptions,
    bundled,
    check_no_models,
    connection_options,
    model_options,
    run_async,
    tell_models,
    video_at,
)
from slipstream.cli.film import caption_film, check_subtitles
from slipstream.cli.views import View, choose_view
from slipstream.client.async_captioner import AsyncCaptioner
from slipstream.client.caption_client import CAPTION_TIMEOUT_S, check_video
from slipstream.client.film_client import FILM_TIMEOUT_S
from slipstream.errors import InvalidRequest, LimitExceeded, SlipstreamError, with_notes
from slipstream.option_specs import OptionSpec
from slipstream.options import MAX_PREDICTION_BYTES, OPTIONS, CaptionOptions
from slipstream.stack.local import Stack, StackOptions

# -- caption options --------------------------------------------------------------------------------------------------

# What to ask of a video, as command-line options that `caption` and `archive submit` share: the table's, one flag each.

_PANELS = {
    "common": "What to ask, and how",
    "sampling": "Sampling",
    "speculation": "Speculation: changes the speed",
    "baselines": "Baselines, for comparison: change the text",
}
LARGE = 2**31
"""Limits from here on say nothing to a reader of the help. `CaptionOptions` checks them."""


def caption_options(**values: Any) -> CaptionOptions:
    """The options that were given; the gateway's defaults stand for the others."""
    given = {name: value for name, value in values.items() if value is not None and value != []}
    for spec in OPTIONS:
        if spec.is_file and spec.name in given:
            paths = given[spec.name]
            texts = [_read_text(spec, Path(path)) for path in (paths if spec.repeated else [paths])]
            if not (spec.repeated or texts[0]):
                raise InvalidRequest(f"--{spec.flag}: {str(paths)!r} is empty, which would ask for nothing")
            given[spec.name] = texts if spec.repeated else texts[0]
    if given.get("regex") == "":  # as of a variable that is not set
        raise InvalidRequest("--regex: it is empty, which would ask for nothing")
    if len(given.get("prompts", ())) == 1:
        (given["prompt"],) = given.pop("prompts")
    return CaptionOptions.from_mapping(given)


def _read_text(spec: OptionSpec, path: Path) -> str:
    """A file's text. Raises `InvalidRequest` or `LimitExceeded` naming the flag and the file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PREDICTION_BYTES + 1)
        if len(content) > MAX_PREDICTION_BYTES:
            raise LimitExceeded(f"--{spec.flag}: {str(path)!r} has more than {MAX_PREDICTION_BYTES} bytes")
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequest(f"--{spec.flag}: cannot read {str(path)!r}: {reason}") from None


def flags(*, hidden: Collection[str] = ()) -> inspect.Signature:
    """Of all options, for typer; the help is silent about the hidden ones."""
    return inspect.Signature([_parameter(spec, spec.name in hidden) for spec in OPTIONS if spec.flag])


def _parameter(spec: OptionSpec, hidden: bool) -> inspect.Parameter:
    """The flag of one row of the table."""
    flag = f"--{spec.flag}/--no-{spec.flag}" if spec.kind is bool else f"--{spec.flag}"
    flag = typer.Option(
        flag,
        help=spec.description,
        show_default=spec.default,
        rich_help_panel=_PANELS[spec.group],
        min=spec.low,
        max=spec.high if spec.high is None or spec.high < LARGE else None,
        metavar="FILE" if spec.is_file else None,
        hidden=hidden,
    )
    kind: Any = list[spec.kind] if spec.repeated else spec.kind  # type: ignore[name-defined]
    return inspect.Parameter(
        spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, flag]
    )


caption_options.__signature__ = flags()  # type: ignore[attr-defined]


# -- caption ----------------------------------------------------------------------------------------------------------


@bundled(stack_options=model_options, options=caption_options, connection=connection_options)
def caption_command(
    *,
    videos: Annotated[
        list[str], typer.Argument(help="Video files, or objects that the gateway opens.", show_default=False)
    ],
    options: CaptionOptions,
    stack_options: StackOptions,
    gateway: Annotated[
        str | None, typer.Option(help="Address of a running gateway.", show_default="a stack of its own")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a video, or a segment.")] = False,
    subtitles: Annotated[
        Path | None, typer.Option(help="With --segments: also write a .vtt or .srt file.", show_default="none")
    ] = None,
    connection: ConnectionOptions,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Seconds that one caption may take, or with --segments one film.",
            show_default=f"{CAPTION_TIMEOUT_S:g}; of a film {FILM_TIMEOUT_S:g}",
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = None,
) -> None:
    """Caption video files. What is not given is the gateway's default; without --gateway a private stack is run."""
    if gateway is not None:
        check_no_models(stack_options, "--gateway")
    if subtitles is not None:
        check_subtitles(subtitles, options, len(videos))
    view = choose_view(as_json, len(videos))
    timeout_s = timeout or (FILM_TIMEOUT_S if options.in_segments else CAPTION_TIMEOUT_S)

    async def run() -> int:
        usable, exit_codes = _check_videos(videos, view)
        if usable:
            async with (
                open_gateway(gateway, stack_options) as address,
                AsyncCaptioner(gateway=connection.gateway(address)) as captioner,
            ):
                for video in usable:
                    if options.in_segments:
                        exit_codes.append(await caption_film(captioner, video, options, timeout_s, as_json, subtitles))
                    else:
                        exit_codes.append(await _caption_one(captioner, video, options, timeout_s, view))
        return next(filter(None, exit_codes), 0)

    raise typer.Exit(run_async(run()))


def _check_videos(videos: Sequence[str], view: View) -> tuple[list[str], list[int]]:
    """The files that look usable, and the exit statuses of the others: no model is loaded for a mistyped name."""
    usable, exit_codes = [], []
    for video in videos:
        try:
            check_video(video_at(video))
        except SlipstreamError as error:
            view.fail(video, with_notes(error))
            exit_codes.append(error.exit_code)
        else:
            usable.append(video)
    return usable, exit_codes


@asynccontextmanager
async def open_gateway(address: str | None, options: StackOptions) -> AsyncIterator[str]:
    """The address of the given gateway, or of one that lives as long as this context."""
    if address is not None:
        yield address
        return
    tell_models(options)
    async with AsyncExitStack() as exits:
        with Console(stderr=True).status("loading the models"):
            stack = await exits.enter_async_context(Stack(options))
        yield stack.gateway_address


async def _caption_one(
    captioner: AsyncCaptioner, video: str, options: CaptionOptions, timeout_s: float, view: View
) -> int:
    """Shows one caption; returns the exit status that this video asks for."""
    try:
        with view.caption(video) as show:
            async with captioner.events(video_at(video), options=options, timeout_s=timeout_s) as events:
                async for event in events:
                    show(event)
    except SlipstreamError as error:
        view.fail(video, with_notes(error))
        return error.exit_code
    return 0
