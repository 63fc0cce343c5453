"""A real S3 for tests: moto's server as a process, and before it a relay that counts bytes, and can fail."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import obstore
from obstore.store import S3Store

from tests.support.processes import free_ports

BUCKET = "films"
KEYS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
FORBIDDEN = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: 53\r\nConnection: close\r\n\r\n"
    b"<Error><Code>AccessDenied</Code><Message/></Error>   "
)
START_S = 60.0


@dataclass
class ObjectServer:
    """A store of one bucket. `given` counts what it has sent; bodies and headers, of all requests."""

    address: str
    """Of the relay, which a gateway is told."""
    store: S3Store
    """For the test itself, past the relay."""
    given: int = 0
    forbids: bool = False
    pause_after: int | None = None
    """Once so many bytes more were given, it says nothing any more."""
    keeps_back: bytes = b""
    """The first PUT of an object whose name has this word takes effect, and nobody hears of it."""
    kept_back: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when such an answer has come."""
    is_cut_off: bool = False
    """Nobody gets an answer."""
    _clients: set[asyncio.StreamWriter] = field(default_factory=set)
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def environment(self) -> dict[str, str]:
        """For a gateway that reads from it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.address, "AWS_ALLOW_HTTP": "true"}

    def put(self, key: str, data: bytes) -> str:
        """Its address."""
        obstore.put(self.store, key, data)
        return f"s3://{BUCKET}/{key}"

    def get(self, key: str) -> bytes:
        """What lies there."""
        return bytes(obstore.get(self.store, key).bytes())

    def resume(self) -> None:
        """It answers again."""
        self.pause_after = None
        self._resumed.set()
        self._resumed, self._stopped = asyncio.Event(), asyncio.Event()

    def cut_off(self) -> None:
        """Ends every connection, in the middle of whatever is read; takes none until `is_cut_off` is false again."""
        self.is_cut_off = True
        for client in self._clients:
            client.transport.abort()

    async def paused(self) -> None:
        """Returns once it says nothing any more."""
        async with asyncio.timeout(START_S):
            await self._stopped.wait()

    async def relay(self, upstream: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client."""
        self._clients.add(writer)
        with contextlib.suppress(OSError):
            if self.is_cut_off:
                writer.transport.abort()
            elif self.forbids:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(FORBIDDEN)
                await writer.drain()
            else:
                there, back = await asyncio.open_connection("127.0.0.1", upstream)
                is_kept_back = asyncio.Event()
                await asyncio.gather(self._ask(reader, back, is_kept_back), self._answer(there, writer, is_kept_back))
        self._clients.discard(writer)
        writer.close()

    async def _ask(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, is_kept_back: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(64 * 1024):
                names = data.startswith(b"PUT") and self.keeps_back in data.partition(b"\r\n")[0]
                if self.keeps_back and names and not self.kept_back.is_set():
                    is_kept_back.set()
                to.write(data)
                await to.drain()
        to.close()

    async def _answer(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, is_kept_back: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(64 * 1024):
                if is_kept_back.is_set():
                    self.kept_back.set()
                    continue
                await self._count(len(data))
                to.write(data)
                await to.drain()
        to.close()

    async def _count(self, num_bytes: int) -> None:
        self.given += num_bytes
        if self.pause_after is not None:
            self.pause_after -= num_bytes
            if self.pause_after < 0:
                self._stopped.set()
                await self._resumed.wait()


@contextlib.asynccontextmanager
async def object_server() -> AsyncIterator[ObjectServer]:
    """Serves until the context is left."""
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)),
        env={**os.environ, **KEYS},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await _wait_listening(port)
        await _make_bucket(port)
        direct = {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1"}
        keys = {"access_key_id": KEYS["AWS_ACCESS_KEY_ID"], "secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"]}
        store = S3Store(BUCKET, client_options={"allow_http": True}, **direct, **keys)
        served = ObjectServer("", store)
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(served.relay(port, reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        relay = await asyncio.start_server(accept, "127.0.0.1", 0)
        served.address = f"http://127.0.0.1:{relay.sockets[0].getsockname()[1]}"
        try:
            yield served
        finally:
            relay.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        process.kill()
        await process.wait()


async def _wait_listening(port: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


async def _make_bucket(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"PUT /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    )
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer
