"""A batch's requests as they are read, and what they are about, where gateways can open it."""

import base64
import errno
import io
import json
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slipstream.archive.messages import BatchItem, JobKind
from slipstream.service_info import GatewayInfo
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.batch_lines import BadLine, BatchLine, ItemMaker, read_lines
from slipstream.services.front.config import FrontConfig
from slipstream.services.front.file_store import FileStore, new_file_id
from slipstream.services.front.json_body import JsonBody
from tests.front.conftest import jpeg, png, webp
from tests.support.front import CHAT, PROMPT, batch_line

MODEL = "big"
VIDEO = b"a long film"


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    return FileStore(FrontConfig(listen="", gateway="", data=str(tmp_path)))


def item_of(maker: ItemMaker, number: int, part: Mapping[str, Any], **own: Any) -> BatchItem:
    """That of a request about this part."""
    content = [{"type": "text", "text": PROMPT}, part]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "slipstream": own}
    with JsonBody(10**6, 10**6) as fed:
        fed.feed(json.dumps(body).encode())
        return maker.item(BatchLine(number, str(number), fed.value(), fed))


def sources_of(
    files: FileStore, folder: Path, num_lines: int, data: bytes = VIDEO, reads_documents: bool = False
) -> list[Path]:
    """What gateways open of a batch whose requests all are about one file."""
    with files.new("") as file:
        file.write(data)
        kept = file.keep(new_file_id(), "a.mp4", "user_data", None)
    maker = ItemMaker(GatewayInfo(reads_documents=reads_documents), MODEL, "", files, folder)
    part = {"type": "file", "file": {"file_id": kept.file_id}}
    found = [Path(item_of(maker, number, part).source) for number in range(1, num_lines + 1)]
    files.delete("", kept.file_id)
    return found


@pytest.mark.parametrize("start", [b"", BOM_UTF8, BOM_UTF8 + b"\r\n", b"\n"])
def test_a_file_may_begin_with_the_mark_of_utf_8(start: bytes) -> None:
    """There alone: before another line it is no JSON."""
    line = batch_line("a", {}).encode()
    with read_lines(io.BytesIO(start + line + b"\n" + BOM_UTF8 + line), CHAT, 10**6, 10**6) as lines:
        first, second = lines
    assert isinstance(first, BatchLine) and first.custom_id == "a" and first.number == 1 + start.count(b"\n")
    assert isinstance(second, BadLine) and second.code == "invalid_json"


def test_a_field_of_a_line_that_is_null_asks_for_nothing() -> None:
    """It failed the batch as a whole."""
    line, other = ({"custom_id": name, "method": "POST", "url": CHAT, "body": {}} for name in "ab")
    written = [json.dumps(line | {"id": None}).encode(), json.dumps(other | {"id": "x"}).encode()]
    with read_lines(io.BytesIO(b"\n".join(written)), CHAT, 10**6, 10**6) as lines:
        good, bad = lines
    assert isinstance(good, BatchLine)
    assert isinstance(bad, BadLine) and "'id' is not supported" in bad.message


def test_a_file_of_many_requests_is_on_disk_once(files: FileStore, tmp_path: Path) -> None:
    """And stays there for them when its owner deletes it."""
    sources = sources_of(files, tmp_path / "media", 3)
    assert len({source.stat().st_ino for source in sources}) == 1 and sources[0].stat().st_nlink == len(sources) == 3
    assert sources[0].read_bytes() == VIDEO


def test_a_line_about_a_file_that_is_not_there_names_its_field(files: FileStore, tmp_path: Path) -> None:
    maker = ItemMaker(GatewayInfo(), MODEL, "", files, tmp_path / "media")
    with pytest.raises(ApiError, match="there is no file") as refusal:
        item_of(maker, 1, {"type": "file", "file": {"file_id": "file-none"}})
    assert (refusal.value.status, refusal.value.param) == (404, "messages[0].content[1].file.file_id")


def test_no_request_is_about_a_films_segments(files: FileStore) -> None:
    """As none is that is answered at once. An answer of several texts would hide which segment has none."""
    maker = ItemMaker(GatewayInfo(), MODEL, "", files, None)
    part = {"type": "video_url", "video_url": {"url": "file:///videos/a.mp4"}}
    assert item_of(maker, 1, part, duplicates="share", segments="none").caption["duplicates"] == "share"
    with pytest.raises(ApiError, match="segments must be left out") as refusal:
        item_of(maker, 1, part, segments="fixed:10s")
    assert (refusal.value.status, refusal.value.param) == (400, "slipstream.segments")


@pytest.mark.parametrize("name", ["trace", "want_kept"])
def test_what_is_told_beside_a_text_is_refused(files: FileStore, name: str) -> None:
    """No job keeps it; it was left out without a word."""
    maker, clip = (
        ItemMaker(GatewayInfo(), MODEL, "", files, None),
        {"type": "video_url", "video_url": {"url": "file:///a.mp4"}},
    )
    assert item_of(maker, 1, clip, **{name: False}).source == "/a.mp4"
    with pytest.raises(ApiError, match="not supported in batches") as refused:
        item_of(maker, 1, clip, **{name: True})
    assert refused.value.param == f"slipstream.{name}"


def test_a_line_that_is_handed_in_again_finds_its_file(files: FileStore, tmp_path: Path) -> None:
    for _ in range(2):
        (source,) = sources_of(files, tmp_path / "media", 1)
        assert source.read_bytes() == VIDEO and list(source.parent.iterdir()) == [source]


def test_media_in_another_file_system_are_copies(
    files: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)
    sources = sources_of(files, tmp_path / "media", 2)
    assert [source.read_bytes() for source in sources] == [VIDEO] * 2 and sources[0].stat().st_nlink == 1


@pytest.mark.parametrize("picture", [jpeg, png, webp])
def test_a_picture_that_was_uploaded_is_a_video_where_nobody_reads_it(
    files: FileStore, tmp_path: Path, picture: Callable[[int], bytes]
) -> None:
    data = picture(9)
    for _ in range(2):
        (video,) = sources_of(files, tmp_path / "a", 1, data)
        assert video.read_bytes()[8:12] == b"AVI "
    (page,) = sources_of(files, tmp_path / "b", 1, data, reads_documents=True)
    assert page.read_bytes() == data


def test_a_document_is_told_by_its_mark_which_other_bytes_may_stand_before(files: FileStore, tmp_path: Path) -> None:
    pdf = BOM_UTF8 + b"%PDF-1.7"
    with files.new("") as file:
        file.write(pdf)
        kept = file.keep(new_file_id(), "a.pdf", "user_data", None)
    maker = ItemMaker(GatewayInfo(reads_documents=True), MODEL, "", files, tmp_path / "media")
    by_value = {"file_data": "data:application/pdf;base64," + base64.b64encode(pdf).decode()}
    for number, said in enumerate(({"file_id": kept.file_id}, by_value), 1):
        item = item_of(maker, number, {"type": "file", "file": said})
        assert item.kind is JobKind.DOCUMENT and Path(item.source).read_bytes() == pdf
