"""What commands share: bundles of options, the connection to a gateway, and a clean end at every signal."""

import asyncio
import functools
import inspect
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from slipstream.client.caption_client import RemotePath
from slipstream.client.connection import GatewayAddress
from slipstream.errors import InvalidConfig
from slipstream.objects.store import is_object_url
from slipstream.rpc.security import TOKEN_VARIABLE, new_token
from slipstream.stack.local import DOWNLOAD_S, LOAD_S, POCKET_DIR, PRIVATE_GRACE_S, StackOptions

# -- bundles of options -----------------------------------------------------------------------------------------------

# Command-line options that several commands share, written once.

ResultT = TypeVar("ResultT")


def bundled(**bundles: Callable[..., Any]) -> Callable[[Callable[..., ResultT]], Callable[..., ResultT]]:
    """Gives a command the options of `bundles` too, for typer to see.

    Each bundle is a function whose parameters are options; the command takes what it returns under the bundle's name.
    """

    def decorate(command: Callable[..., ResultT]) -> Callable[..., ResultT]:
        parameters = {name: inspect.signature(bundle).parameters for name, bundle in bundles.items()}
        every: list[inspect.Parameter] = []
        for name, item in inspect.signature(command).parameters.items():  # --help keeps their order
            every += parameters[name].values() if name in bundles else [item]

        @functools.wraps(command)
        def run(**values: Any) -> ResultT:
            for name, bundle in bundles.items():
                values[name] = bundle(**{option: values.pop(option) for option in parameters[name]})
            return command(**values)

        keyword_only = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in every]
        run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in every}
        return run

    return decorate


# -- connection -------------------------------------------------------------------------------------------------------

CONNECTION_PANEL = "Connection"
MAX_TOKEN_FILE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """What a user said of the connection to the gateway. `token_file` wins over the environment."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None

    def token(self, environ: Mapping[str, str]) -> str:
        """'' without one. Raises `InvalidConfig` when the file cannot be used."""
        if self.token_file is None:
            return environ.get(TOKEN_VARIABLE, "").strip()
        try:
            with self.token_file.open("rb") as file:
                token = file.read(MAX_TOKEN_FILE_BYTES).decode().strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise InvalidConfig(f"--token-file: cannot read {str(self.token_file)!r}: {reason}") from None
        if not token:
            raise InvalidConfig(f"--token-file: {str(self.token_file)!r} is empty")
        return token

    def gateway(self, address: str) -> GatewayAddress:
        """How to call the gateway there. Raises `InvalidConfig` when the token's file cannot be used."""
        return GatewayAddress(address, self.token(os.environ), self.ca, self.cert, self.key, option_prefix="--")


def connection_options(
    ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authority of the gateway's certificate: use TLS.", rich_help_panel=CONNECTION_PANEL
        ),
    ] = None,
    cert: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the certificate to show, where one is asked for.", rich_help_panel=CONNECTION_PANEL
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(help="PEM file of that certificate's private key.", rich_help_panel=CONNECTION_PANEL),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token to send.", show_default=f"${TOKEN_VARIABLE}", rich_help_panel=CONNECTION_PANEL
        ),
    ] = None,
) -> ConnectionOptions:
    """For `bundled(connection=connection_options)`."""
    return ConnectionOptions(ca=ca, cert=cert, key=key, token_file=token_file)


def token_command(owner: Annotated[str, typer.Argument(help="Who will use it: a name without spaces.")]) -> None:
    """Make a token: for its user the token, for the gateway's --tokens file the line that accepts it."""
    token, line = new_token(owner)
    typer.echo(f"token, to be kept by {owner} and shown only now:\n{token}")
    typer.echo(f"line for the gateway's --tokens file:\n{line}")


# -- the models of a stack of one's own --------------------------------------------------------------------------------

MODELS_PANEL = "Models"
NO_DRAFT = "none"
POCKET_NOTICE = (
    "these are the pocket models, which know only moving shapes. For real videos name real models, each a folder or "
    "OWNER/NAME on the hub: --target llava-hf/llava-onevision-qwen2-7b-ov-hf "
    "--draft llava-hf/llava-onevision-qwen2-0.5b-ov-hf"
)
READER_NOTICE = (
    "this is the pocket reader, which knows only synthetic pages of large print. For real documents name a model that "
    "reads pages, a folder or OWNER/NAME on the hub, such as --target Qwen/Qwen2.5-VL-7B-Instruct"
)


def model_options(
    target: Annotated[
        str,
        typer.Option(help="The target: a folder, or OWNER/NAME on the hub.", show_default="the pocket target"),
    ] = str(POCKET_DIR / "target"),
    draft: Annotated[
        str,
        typer.Option(help=f"The draft, likewise; `{NO_DRAFT}`: decode without one.", show_default="the pocket draft"),
    ] = str(POCKET_DIR / "draft"),
    device: Annotated[str, typer.Option(help="Torch device of both models, such as cpu or cuda:0.")] = "cpu",
    draft_device: Annotated[
        str | None, typer.Option(help="Torch device of the draft, if it is another.", rich_help_panel=MODELS_PANEL)
    ] = None,
    target_gpus: Annotated[
        str,
        typer.Option(
            help="Numbers of GPUs that share the target, such as 0,1,2,3.",
            show_default="--device alone",
            rich_help_panel=MODELS_PANEL,
        ),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="Torch dtype of the weights; auto: bfloat16 on CUDA, float32 elsewhere.", rich_help_panel=MODELS_PANEL
        ),
    ] = "auto",
    start_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Seconds in which each model has to be ready.",
            show_default=f"{LOAD_S:g}; {DOWNLOAD_S:g} with one on the hub",
            rich_help_panel=MODELS_PANEL,
        ),
    ] = None,
) -> StackOptions:
    """For `bundled(stack_options=model_options)`: a stack of these models, private to its user."""
    return StackOptions(
        target_model=target,
        draft_model=None if draft == NO_DRAFT else draft,
        device=device,
        draft_device=draft_device,
        target_gpus=target_gpus,
        dtype=dtype,
        start_timeout_s=start_timeout,
        stop_grace_s=PRIVATE_GRACE_S,
    )


def video_at(word: str) -> Path | RemotePath:
    """A file here, or an object that the gateway opens."""
    return RemotePath(word) if "://" in word and is_object_url(word) else Path(word)


def check_no_models(options: StackOptions, flag: str) -> None:
    """Raises `InvalidConfig` for models that nobody would load because of the flag that was given beside them."""
    if options != model_options():
        raise InvalidConfig(
            "--target, --draft and what else says how models are loaded are for a stack of this command's own:"
            f" leave them out, or {flag}"
        )


def tell_models(options: StackOptions) -> None:
    """Says on stderr what a user of this pair should know before it is loaded."""
    if options.is_pocket:
        typer.echo(f"slipstream: {READER_NOTICE if options.is_pocket_reader else POCKET_NOTICE}", err=True)
    if options.needs_hub:
        typer.echo("slipstream: models of the hub that are not on this machine are downloaded first", err=True)


# -- signals ----------------------------------------------------------------------------------------------------------

# Runs a command's coroutine so that every signal that ends the command also lets it clean up.


def run_async(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run`, with SIGTERM and SIGHUP cancelling the command as Ctrl-C does."""
    return asyncio.run(_run_cancellable(main))


async def _run_cancellable(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP: leave it so
            loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise typer.Exit(128 + received[0]) from None
        raise
