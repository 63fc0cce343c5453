"""`python -m slipstream.rpc.probe ADDRESS [SERVICE]`: exit status 0 when the service there says that it serves.

For health checks of containers and supervisors.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.errors import SlipstreamError
from slipstream.rpc.calls import open_channel
from slipstream.rpc.tls import PeerSecurity, make_peer_security

TIMEOUT_S = 3.0


async def probe(
    address: str, service: str = "", security: PeerSecurity | None = None, timeout_s: float = TIMEOUT_S
) -> str:
    """The service's own word, such as SERVING, or the name of the status that the call ended with."""
    async with open_channel(address, security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the answer; exits with 0 for SERVING, 2 when an option is wrong, and 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.rpc.probe", description="Is the service serving?")
    parser.add_argument("address", help="HOST:PORT or unix:/path")
    parser.add_argument("service", nargs="?", default="", help="full name of a gRPC service; none: the server as such")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    parser.add_argument("--ca", default="", help="PEM file of the server's authority; without it the call is plaintext")
    parser.add_argument("--cert", default="", help="PEM file of a certificate to show, where the server asks for one")
    parser.add_argument("--key", default="", help="PEM file of that certificate's private key")
    parser.add_argument("--name", default="", help="name in the server's certificate, where it is not the host")
    given = parser.parse_args(argv)
    try:
        security = make_peer_security(("--ca", given.ca), ("--cert", given.cert), ("--key", given.key), given.name)
        answer = asyncio.run(probe(given.address, given.service, security, given.timeout_s))
    except SlipstreamError as error:
        parser.error(str(error))
    sys.stdout.write(answer + "\n")
    sys.exit(0 if answer == "SERVING" else 1)


if __name__ == "__main__":
    main()
