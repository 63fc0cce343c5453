"""Gathers the commands, and ends every failure with one line on stderr and its exit status."""

import errno
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import typer

from slipstream import __version__
from slipstream.cli.archive.commands import archive_app
from slipstream.cli.caption import caption_command
from slipstream.cli.common import token_command
from slipstream.cli.demo import demo_command
from slipstream.cli.read import read_command
from slipstream.cli.up import info_command, up_command
from slipstream.cli.views import printable
from slipstream.errors import InvalidConfig, SlipstreamError, with_notes

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it."""

_LOGGER = logging.getLogger("slipstream.cli")

app = typer.Typer(
    help="Captions videos with a big Video-LLM and a small one that writes ahead of it: the same text, sooner.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up")(up_command)
app.command("caption")(caption_command)
app.command("read")(read_command)
app.add_typer(archive_app, name="archive")
app.command("demo")(demo_command)
app.command("info")(info_command)
app.command("token")(token_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    if debug:
        _LOGGER.addHandler(logging.StreamHandler())
        _LOGGER.setLevel(logging.DEBUG)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


class BrokenStdout(OSError):
    """Stdout takes no more: its disk is full, or whoever read it has gone."""


class _Stdout(io.FileIO):
    """Stdout's descriptor, whose errors cannot be taken for those of another file."""

    is_given_up: ClassVar[bool] = False
    """The failure has been told; what is still buffered is dropped, lest the interpreter tells it again at its end."""

    def write(self, data: Any, /) -> int:
        try:
            return len(data) if self.is_given_up else super().write(data)
        except OSError as error:
            raise BrokenStdout(error.errno, error.strerror) from None


class _Stderr(io.FileIO):
    """Stderr's descriptor. Where it takes no more, as when Ctrl-C also ends `tee`, work goes on unheard: results and
    exit statuses do not depend on it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or len(data)  # None where it would block
        except OSError:
            return len(data)


def guard_streams() -> None:
    """For a process that is this command line: errors of stdout are named, those of stderr end nothing."""
    if (given := sys.stdout) is not None:
        results = io.BufferedWriter(_Stdout(given.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(results, given.encoding, given.errors, line_buffering=given.isatty())
    if (given := sys.stderr) is not None:
        words = io.BufferedWriter(_Stderr(given.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(words, given.encoding, given.errors, line_buffering=True)
    else:  # closed by the shell: 2>&-. To `print` and others no stream is stdout, where results go
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (as long as the process lives)


def run(args: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    command = typer.main.get_command(app)
    try:
        status: int = command.main(args=args, prog_name="slipstream", standalone_mode=False) or 0
        if sys.stdout is not None:  # closed by the shell: >&-
            sys.stdout.flush()
        return status
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenStdout as error:
        _Stdout.is_given_up = True
        if error.errno == errno.EPIPE:  # whoever read it wants no more: nothing to be told
            return SlipstreamError.exit_code
        typer.echo(f"slipstream: cannot write to stdout: {error.strerror}", err=True)
        return InvalidConfig.exit_code
    except Exception as error:
        _LOGGER.debug("command.failed", exc_info=True)
        message, exit_code = _describe(error)
        typer.echo(f"slipstream: {printable(message)}", err=True)
        return exit_code


def _describe(error: Exception) -> tuple[str, int]:
    if isinstance(error, SlipstreamError):
        return with_notes(error), error.exit_code
    if isinstance(error, UnicodeEncodeError) and error.encoding.replace("_", "-") != "utf-8":
        it_lacks = f"{error.encoding}, which has no {error.object[error.start : error.start + 1]!a}"
        return f"stdout is {it_lacks}: set PYTHONIOENCODING=utf-8", InvalidConfig.exit_code
    if isinstance(error, UnicodeEncodeError):  # a shell hands over any bytes
        return f"{ascii(error.object)[:80]} is not UTF-8", InvalidConfig.exit_code
    usage_message = getattr(error, "format_message", None)  # typer's own errors; their base class moved over versions
    if usage_message is not None:
        return f"{usage_message()} (see --help)", 2
    if isinstance(error, OSError) and error.strerror:
        what = error.strerror if error.filename is None else f"{error.strerror}: {error.filename!r}"
        return f"{what} (--debug shows where)", InvalidConfig.exit_code
    return f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1
