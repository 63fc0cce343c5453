"""A bucket of moto's server, which speaks S3's protocol, and a relay before it that can keep back an answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping

import boto3  # type: ignore[import-untyped]
from moto.server import ThreadedMotoServer

BUCKET = "archive"
REGION = "us-east-1"


@contextlib.contextmanager
def bucket_served() -> Iterator[Mapping[str, str]]:
    """The environment in which its objects are `s3://archive/...`."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        environment = environment_of(host, port)
        names = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": REGION}
        client = boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"], **names)
        client.create_bucket(Bucket=BUCKET)
        yield environment
    finally:
        server.stop()


def environment_of(host: str, port: int) -> dict[str, str]:
    """Of a server there."""
    address = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": REGION}
    return address | {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}


class Relay:
    """Passes all on, but the answer to the first PUT of an object whose name has `word`: that took effect."""

    def __init__(self, upstream: str, word: bytes) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = host, int(port)
        self._word = word
        self.held = asyncio.Event()
        """Set when such an answer has come."""

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Mapping[str, str]]:
        """The environment of those who come through here."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield environment_of(host, port)
        finally:
            server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until its client ends it."""
        there, back = await asyncio.open_connection(*self._upstream)
        is_put = asyncio.Event()

        async def answer() -> None:
            while data := await there.read(1 << 16):
                if is_put.is_set():
                    self.held.set()
                    return
                writer.write(data)

        answering = asyncio.create_task(answer())
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if data.startswith(b"PUT") and self._word in data.partition(b"\r\n")[0] and not self.held.is_set():
                    is_put.set()
                back.write(data)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        for end in (writer, back):
            end.close()
