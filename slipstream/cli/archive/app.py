"""Gathers the commands of `slipstream archive`."""

import typer

from slipstream.cli.archive.commands import (
    cancel_command,
    export_command,
    retry_command,
    status_command,
    watch_command,
)
from slipstream.cli.archive.submit_command import submit_command

archive_app = typer.Typer(help="Caption whole folders in the background: each video once, whatever fails meanwhile.")
archive_app.command("submit")(submit_command)
archive_app.command("status")(status_command)
archive_app.command("watch")(watch_command)
archive_app.command("cancel")(cancel_command)
archive_app.command("retry")(retry_command)
archive_app.command("export")(export_command)
