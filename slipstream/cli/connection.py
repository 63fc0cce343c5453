"""How the command line reaches a gateway: TLS, a client certificate, a token. Knows no command but `token`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
import typer

from slipstream.errors import InvalidConfig
from slipstream.rpc.authorized import open_authorized_channel
from slipstream.rpc.security import make_peer_security
from slipstream.rpc.tokens import new_token

TOKEN_VARIABLE = "SLIPSTREAM_TOKEN"
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


def connection_options(
    ca: Annotated[
        Path | None, typer.Option("--ca", help="PEM file of the authority of the gateway's certificate: use TLS.")
    ] = None,
    cert: Annotated[
        Path | None, typer.Option("--cert", help="PEM file of the certificate to show, where one is asked for.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="PEM file of that certificate's private key.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the token to send.", show_default=f"${TOKEN_VARIABLE}"),
    ] = None,
) -> ConnectionOptions:
    """For `bundled(connection=connection_options)`."""
    return ConnectionOptions(ca=ca, cert=cert, key=key, token_file=token_file)


def open_gateway_channel(address: str, options: ConnectionOptions | None = None) -> grpc.aio.Channel:
    """A channel to a gateway, as its user wants it. Raises `InvalidConfig` naming the option that is wrong."""
    options = options or ConnectionOptions()
    security = make_peer_security(
        ("--ca", str(options.ca or "")), ("--cert", str(options.cert or "")), ("--key", str(options.key or ""))
    )
    return open_authorized_channel(address, security, options.token(os.environ))


def token_command(owner: Annotated[str, typer.Argument(help="Who will use it: a name without spaces.")]) -> None:
    """Make a token: for its user the token, for the gateway's --tokens file the line that accepts it."""
    token, line = new_token(owner)
    typer.echo(f"token, to be kept by {owner} and shown only now:\n{token}")
    typer.echo(f"line for the gateway's --tokens file:\n{line}")
