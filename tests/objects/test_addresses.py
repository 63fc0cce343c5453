"""Addresses of objects and files, as text and as what they name."""

import errno
import tempfile
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.messages import JobKind, kind_of
from slipstream.client.batch_handles import is_url
from slipstream.errors import InvalidConfig, InvalidRequest
from slipstream.objects.blocking import local_path, open_file, writing_bytes
from slipstream.objects.store import ObjectUrl, check_scheme, is_remote_object, path_at

NAMES = st.text(st.sampled_from("ab%20é?# ~"), min_size=1)


@given(st.sampled_from(["s3://films", "gs://films", "az://account/films", "file://"]), NAMES)
def test_what_is_written_is_read_again(root: str, name: str) -> None:
    url = ObjectUrl(root, f"deep/{name}")
    assert ObjectUrl.parse(str(url)) == url


@given(NAMES)
def test_a_file_has_the_path_that_its_uri_says(name: str) -> None:
    path = Path("/films") / name
    assert local_path(path.as_uri()) == local_path(str(path)) == path


@pytest.mark.parametrize(
    ("text", "root"),
    [("S3://films/a.PDF", "s3://films"), ("Az://me/films/a.PDF", "az://me/films"), ("FILE:///a.PDF", "file://")],
)
def test_a_scheme_may_be_in_capitals(text: str, root: str) -> None:
    assert ObjectUrl.parse(text) == ObjectUrl(root, "a.PDF")
    assert is_url(text) and is_remote_object(text) == (root != "file://")
    assert is_url("HTTPS://films.example/a.pdf") and kind_of("HTTPS://films.example/a.pdf?of=1") is JobKind.DOCUMENT
    assert path_at("File:///a%20b.mp4") == "/a b.mp4"
    with pytest.raises(InvalidRequest, match="an address begins with"):
        check_scheme("HTTP://films.example/a.mp4")


def test_only_addresses_of_files_have_bytes_by_number() -> None:
    assert ObjectUrl.parse("file:///a%20b/%2520").key == "a b/%20"
    assert ObjectUrl.parse("s3://films/a%20b").key == "a%20b"
    assert path_at("/a%20b") == "/a%20b" and path_at("file:///100%.mp4") == "/100%.mp4"


@pytest.mark.parametrize("text", ["file:///a/%2e%2E/b", "file:///a%00b", "file:///a%1Bb", "file://%2Fa", "file:///%2e"])
def test_numbers_hide_nothing(text: str) -> None:
    with pytest.raises(InvalidRequest):
        ObjectUrl.parse(text)


def test_a_full_disk_before_the_store_is_not_the_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A big object is kept on this machine until it is whole."""
    full = MagicMock()
    full.__enter__.return_value.write.side_effect = OSError(errno.ENOSPC, "No space left on device")
    full.__exit__.return_value = False
    monkeypatch.setattr(tempfile, "TemporaryFile", Mock(return_value=full))
    url = ObjectUrl.parse(f"file://{tmp_path}/whole.jsonl")
    refused = pytest.raises(InvalidConfig, match=r"whole.jsonl is kept in .* No space left on device; set TMPDIR")
    with refused, writing_bytes(url) as content:
        content.write(b"x")
    assert not [*tmp_path.iterdir()]


def test_an_export_by_its_uri(tmp_path: Path) -> None:
    path = tmp_path / "10% of it é.jsonl"
    path.write_bytes(b"{}")
    with open_file(path.as_uri()) as file:
        assert file.read() == b"{}"
    with pytest.raises(InvalidRequest, match="cannot read"):
        open_file("file:///a%00b")
