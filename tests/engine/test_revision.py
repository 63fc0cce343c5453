"""A checkpoint's revision: which files it stands for, and that it is the same wherever they lie."""

import hashlib
import json
import shutil
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from slipstream.engine import checkpoint as checkpoint_module
from slipstream.engine import load_model
from slipstream.engine.checkpoint import Checkpoint
from slipstream.errors import ModelNotUsable
from tests.engine.conftest import Pair


def test_the_revision_is_the_digest_of_names_and_digests(pair: Pair) -> None:
    names = sorted(
        path.name for path in pair.path.iterdir() if path.suffix in (".json", ".jinja", ".txt", ".safetensors")
    )
    lines = [f"{name} {hashlib.sha256((pair.path / name).read_bytes()).hexdigest()}\n" for name in names]
    assert "model.safetensors" in names and "config.json" in names and "tokenizer.json" in names
    assert pair.ours.info.revision == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_it_changes_with_any_file_and_not_with_the_folder(pair: Pair, tmp_path: Path) -> None:
    copy = shutil.copytree(pair.path, tmp_path / "copy")
    (copy / "README.md").write_text("a note")
    assert Checkpoint.open(str(copy)).revision() == pair.ours.info.revision
    with (copy / "model.safetensors").open("ab") as weights:
        weights.write(b"\0")
    assert Checkpoint.open(str(copy)).revision() != pair.ours.info.revision


def test_blobs_of_the_hubs_cache_are_trusted_by_their_names(pair: Pair, tmp_path: Path) -> None:
    """A large file is named by its SHA-256 there; small ones by a Git hash, which says nothing."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    shutil.copytree(pair.path, snapshot)
    digest = hashlib.sha256((snapshot / "model.safetensors").read_bytes()).hexdigest()
    for name, blob in (("model.safetensors", digest), ("config.json", "a" * 40)):
        (snapshot / name).rename(blobs / blob)
        (snapshot / name).symlink_to(blobs / blob)
    checkpoint = Checkpoint.open(str(snapshot))
    assert checkpoint.revision() == pair.ours.info.revision
    (blobs / digest).write_bytes(b"not read")
    assert checkpoint.revision() == pair.ours.info.revision


def test_a_checkpoint_that_cannot_be_loaded_is_not_digested_to_its_end(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would take minutes for a large one, before anybody is told what is wrong with it."""
    copy = Path(shutil.copytree(pair.path, tmp_path / "copy"))
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer | {"model": {}}))
    digested = list[Exception]()
    digest = checkpoint_module._file_digest

    def slow(told: threading.Event, path: Path) -> str:
        assert told.wait(60), "the load has failed by then"
        try:
            return digest(told, path)
        except CancelledError as error:
            digested.append(error)
            raise

    monkeypatch.setattr(checkpoint_module, "_file_digest", slow)
    with pytest.raises(ModelNotUsable, match="cannot be loaded"):
        load_model(str(copy))
    assert digested
