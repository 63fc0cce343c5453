"""The event loop of services: what it says, and how often."""

import asyncio
import os
import resource
import socket

import pytest

from slipstream.process_life import ServiceLoop


def test_connections_that_find_no_descriptor_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Python says it of each that might wait, each second anew: a megabyte."""
    held, taken = resource.getrlimit(resource.RLIMIT_NOFILE), asyncio.Event()

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        taken.set()

    async def serve() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as caller:
            caller.setblocking(False)
            server = await asyncio.start_server(take, sock=listening, backlog=500)
            os.close(first_free := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, held[1]))
            try:
                await asyncio.get_running_loop().sock_connect(caller, listening.getsockname())
                while not caplog.records:  # noqa: ASYNC110 (the loop itself says it)
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, held)
            await asyncio.wait_for(taken.wait(), 60)
            said = [record.message.split("\n")[0] for record in caplog.records]
            assert said == ["socket.accept() out of system resource"]
            server.close()  # Python may still have begun anew for some of them, of which it tells then
            await server.wait_closed()

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        runner.run(serve())
