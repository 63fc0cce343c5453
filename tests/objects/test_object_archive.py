"""`slipstream archive` over a bucket: folders, manifests of all kinds, outputs, and items that are not there."""

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import pytest_asyncio

from slipstream.archive.quality import words_of
from slipstream.cli.archive.sources import Sources
from slipstream.client.archive_estimate import stratified
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from tests.support.films import make_noise_film
from tests.support.forked_services import command
from tests.support.gateway_client import caption
from tests.support.object_store import ObjectServer, object_server
from tests.support.processes import logged
from tests.support.variants import some
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 6, "max_new_tokens": 24}
OPTIONS = ("--prompt", PROMPT, "--frames", "6", "--max-new-tokens", "24")
SEGMENTED = ("--segments", "fixed:4s", "--frames", "4")
SHA = "0" * 64
SIZED = [("a.mp4", ', "size": 1000'), ("deep/b.mp4", "")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def objects(world: World) -> AsyncIterator[ObjectServer]:
    async with object_server() as served:
        served.put("shown/a.mp4", world.clips[0])
        served.put("shown/deep/b.mp4", world.clips[1])
        served.put("shown/deep/.hidden.mp4", world.clips[1])
        served.put("shown/notes.txt", b"no video")
        served.put("shown/large.mov", make_noise_film(200))
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def archive(
    objects: ObjectServer, world: World, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    options = replace(
        world.stack_options(),
        draft_model=None,
        archive=True,
        data=tmp_path_factory.mktemp("archive"),
        object_roots=("s3://films/shown",),
        env=objects.environment,
    )
    async with Stack(options) as stack:
        yield stack


async def run(stack: Stack, objects: ObjectServer, *words: str) -> tuple[int, str]:
    """Exit status and stderr of one command, which reads and writes the bucket itself."""
    ended = await command("archive", *words, "--gateway", stack.gateway_address, **objects.environment)
    return ended.status, ended.errors


async def estimated(stack: Stack, objects: ObjectServer, source: str) -> tuple[int, dict[str, Any]]:
    """Exit status and facts of an estimate."""
    words = ("estimate", source, "--json", *OPTIONS, "--gateway", stack.gateway_address)
    ended = await command("archive", *words, **objects.environment)
    return ended.status, json.loads(ended.output)


def lines_of(objects: ObjectServer, key: str) -> dict[str, dict[str, Any]]:
    lines = map(json.loads, objects.get(key).decode().splitlines())
    return {line["custom_id"]: line for line in lines}


async def test_a_folder_of_a_bucket_becomes_an_object(archive: Stack, objects: ObjectServer, world: World) -> None:
    output = "s3://films/out/captions.jsonl"
    status, errors = await run(archive, objects, "submit", "s3://films/shown/", "--output", output, *OPTIONS)
    assert (status, "3 added" in errors) == (0, True), errors
    lines = lines_of(objects, "out/captions.jsonl")
    assert sorted(lines) == ["a.mp4", "deep/b.mp4", "large.mov"]
    async with open_channel(archive.gateway_address) as channel:
        for name, clip in (("a.mp4", world.clips[0]), ("deep/b.mp4", world.clips[1])):
            assert lines[name]["text"] == (await caption(channel, clip, **SMALL)).text
            assert lines[name]["source"] == f"s3://films/shown/{name}"
    assert len(lines["a.mp4"]["receipt"]["video_sha256"]) == 64
    assert lines["large.mov"]["receipt"]["video_sha256"].startswith("object-")
    before = objects.get("out/captions.jsonl")
    status, errors = await run(archive, objects, "submit", "s3://films/shown/", "--output", output, *OPTIONS)
    assert (status, "0 added, 3 known" in errors) == (0, True), errors
    assert objects.get("out/captions.jsonl") == before


ROWS: list[dict[str, Any]] = [
    {"source": "s3://films/shown/a.mp4", "custom_id": "a", "num_frames": 4, "sha256": None},
    {"source": "s3://films/shown/none.mp4", "custom_id": "none", "num_frames": None, "sha256": None},
    {"source": "s3://films/hidden/a.mp4", "custom_id": "hidden", "num_frames": None, "sha256": None},
    {"source": "s3://films/shown/large.mov", "custom_id": "large", "num_frames": None, "sha256": SHA},
    {"source": "shown/deep/b.mp4", "custom_id": "b", "num_frames": None, "sha256": None},
]


def as_jsonl() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in _given()).encode()


def as_csv() -> bytes:
    cells = [[str(row[name]) if row[name] is not None else "" for name in ROWS[0]] for row in ROWS]
    return "".join(",".join(row) + "\n" for row in ([*ROWS[0]], *cells)).encode()


def as_parquet() -> bytes:
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), content, row_group_size=2)
    return content.getvalue()


def _given() -> list[dict[str, Any]]:
    return [{name: cell for name, cell in row.items() if cell is not None} for row in ROWS]


@pytest.mark.parametrize("form", some(["jsonl", "csv", "parquet"], keep=("parquet",)))
async def test_a_manifest_in_a_bucket_says_what_is_captioned(archive: Stack, objects: ObjectServer, form: str) -> None:
    content = {"jsonl": as_jsonl, "csv": as_csv, "parquet": as_parquet}[form]()
    manifest = objects.put(f"list.{form}", content)
    output = f"s3://films/out/{form}.jsonl"
    status, errors = await run(archive, objects, "submit", manifest, "--output", output, *OPTIONS)
    assert (status, "5 added" in errors) == (5, True), errors
    assert sorted(lines_of(objects, f"out/{form}.jsonl")) == ["a", "b"]
    failed = lines_of(objects, f"out/{form}.jsonl.errors.jsonl")
    assert {name: line["error_code"] for name, line in failed.items()} == {
        "none": "NOT_FOUND",
        "hidden": "PERMISSION_DENIED",
        "large": "INVALID_ARGUMENT",
    }
    assert all(line["attempts"] <= 1 for line in failed.values()) and "SHA-256" in failed["large"]["error"]


async def test_subtitles_go_below_a_folder_of_a_bucket(archive: Stack, objects: ObjectServer) -> None:
    words = ("submit", "s3://films/shown/deep/", "--name", "vtt", "--output", "s3://films/subs", "--format", "vtt")
    status, errors = await run(archive, objects, *words, *OPTIONS)
    assert status == 0, errors
    assert objects.get("subs/b.mp4.vtt").startswith(b"WEBVTT")


@pytest.mark.long
async def test_an_estimate_is_stratified_by_what_the_listing_says(archive: Stack, objects: ObjectServer) -> None:
    status, facts = await estimated(archive, objects, "s3://films/shown/")
    assert (status, facts["items"], facts["sampled"], facts["without_size"]) == (0, 3, 3, 0)
    manifest = objects.put(
        "sizes.jsonl", b"".join(f'{{"source": "s3://films/shown/{name}"{size}}}\n'.encode() for name, size in SIZED)
    )
    status, facts = await estimated(archive, objects, manifest)
    assert (status, facts["items"], facts["without_size"]) == (0, 2, 1)


async def test_a_listing_tells_strata_and_nothing_is_fetched(
    objects: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same sizes and suffixes are the same strata, in a bucket and in a folder."""
    for name, value in objects.environment.items():
        monkeypatch.setenv(name, value)
    for number in range(40):
        name, size = f"many/{number:02}.{'mov' if number % 3 else 'mp4'}", 10 + 7919 * number % 1000
        objects.put(name, b"x" * size)
        (tmp_path / "many").mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    there = await asyncio.to_thread(list, Sources(["s3://films/many/"]))
    assert [item.num_bytes for item in there] == [10 + 7919 * number % 1000 for number in range(40)]
    here = list(Sources([str(tmp_path / "many")]))
    assert [item.custom_id for item in here] == [item.custom_id for item in there]
    assert stratified(there).tolist() == stratified(here).tolist() and len(set(stratified(there).tolist())) == 5


@pytest.mark.parametrize(
    ("segments", "num_parts"),
    [((), 0), pytest.param(SEGMENTED, 2, marks=pytest.mark.long)],
    ids=["whole", "segments"],
)
async def test_results_of_a_bucket_are_made_again_for_an_audit(
    archive: Stack, objects: ObjectServer, tmp_path: Path, segments: tuple[str, ...], num_parts: int
) -> None:
    """Of a film that was read by ranges nobody has a digest."""
    name = f"audited {num_parts}"
    objects.put("shown/audited/a.mov", objects.get("shown/large.mov"))
    words = ("submit", "s3://films/shown/audited/", "--name", name, "--output", str(tmp_path / "out.jsonl"))
    status, errors = await run(archive, objects, *words, *OPTIONS, *segments)
    assert status == 0, errors
    (record,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert record["receipt"]["video_sha256"].startswith("object-") and len(record.get("parts", ())) == num_parts
    status, findings = await audited(archive, objects, name)
    assert (status, findings[-1]["passed"], findings[-1]["replayed"]) == (0, True, 1), findings

    holder = record["parts"][1] if segments else record
    holder["text"] = "planted"
    holder["receipt"]["text_sha256"] = hashlib.sha256(b"planted").hexdigest()
    if segments:
        record["text"] = "\n\n".join(part["text"] for part in record["parts"])
    (tmp_path / "forged.jsonl").write_text(json.dumps(record) + "\n")
    status, findings = await audited(archive, objects, str(tmp_path / "forged.jsonl"))
    assert (status, findings[0]["verdict"], findings[0]["text"]) == (1, "differs", "planted"), findings

    objects.put("shown/audited/a.mov", make_noise_film(202))
    status, findings = await audited(archive, objects, name)
    assert (status, findings[0]["verdict"]) == (1, "failed") and "another one now" in findings[0]["reason"], findings


@pytest.mark.parametrize("segments", [(), pytest.param(SEGMENTED, marks=pytest.mark.long)], ids=["whole", "segments"])
async def test_an_object_that_changes_while_it_is_read_is_captioned_as_it_is_now(
    archive: Stack, objects: ObjectServer, tmp_path: Path, segments: tuple[str, ...]
) -> None:
    """Nothing is lost, and nothing is of both: all texts are those of the new one alone."""
    key, name = f"shown/changing/{len(segments)}.mov", f"changing {len(segments)}"
    address = objects.put(key, make_noise_film(200))

    def words(name: str) -> tuple[str, ...]:
        return ("submit", address, "--name", name, "--output", str(tmp_path / f"{name}.jsonl"), *OPTIONS, *segments)

    objects.pause_after = 800_000
    handed_in = asyncio.create_task(run(archive, objects, *words(name)))
    try:
        await objects.paused()
        objects.put(key, make_noise_film(240, key_every=10))
    finally:
        objects.resume()
    status, errors = await handed_in
    assert status == 0, errors
    status, errors = await run(archive, objects, *words("afresh " + name), "--seed", "5")
    assert status == 0, errors
    changed, afresh = (json.loads((tmp_path / f"{name}.jsonl").read_text()) for name in (name, f"afresh {name}"))
    assert changed["receipt"]["video_sha256"] == afresh["receipt"]["video_sha256"]
    assert changed["receipt"]["video_bytes"] == len(objects.get(key))
    assert [part["text"] for part in changed.get("parts", [changed])] == [
        part["text"] for part in afresh.get("parts", [afresh])
    ]
    assert (changed["receipt"]["runs"], afresh["receipt"]["runs"]) == (2, 1), "that there was another run is told"
    (retried,) = logged(archive.processes["gateway"].log_path, "job.retried", job_id=changed["job_id"])
    assert (retried["cause"], retried["counted"]) == ("ObjectChanged", True)


async def test_a_bucket_without_rights_is_said_to_be_one(
    archive: Stack, objects: ObjectServer, world: World, tmp_path: Path
) -> None:
    """Of a folder, a manifest and an output; and nothing that is done is lost."""
    manifest = objects.put("closed.jsonl", b'{"source": "s3://films/shown/a.mp4"}\n')
    local = world.folder / "rights.mp4"
    local.write_bytes(world.clips[0])
    output = "s3://films/out/rights.jsonl"
    objects.forbids = True
    try:
        for source in ("s3://films/shown/", manifest):
            status, errors = await run(archive, objects, "submit", source, "--name", "closed", *OPTIONS)
            assert (status, "Traceback" in errors) == (2, False), errors
            assert f"the credentials of this command do not open {source.rstrip('/')}" in errors
        status, errors = await run(archive, objects, "status", "closed")
        assert status == 3, "nothing was handed in"
        words = ("submit", str(local), "--name", "rights", "--output", output, *OPTIONS)
        status, errors = await run(archive, objects, *words)
        assert status == 2 and f"the credentials of this command do not open {output}" in errors, errors
        assert "secret" not in errors and "tester" not in errors
    finally:
        objects.forbids = False
    status, errors = await run(archive, objects, *words)
    assert (status, "0 added, 1 known" in errors) == (0, True), errors
    assert lines_of(objects, "out/rights.jsonl")["rights.mp4"]["receipt"]["runs"] == 1, "it was captioned once"


async def test_a_bucket_that_is_none_is_not_found(archive: Stack, objects: ObjectServer) -> None:
    for source in ("s3://nowhere/", "s3://nowhere/a.jsonl"):
        status, errors = await run(archive, objects, "submit", source, *OPTIONS)
        assert status == 3 and "there is no " in errors and "s3://nowhere/" in errors, errors


@pytest.mark.long
async def test_exports_in_a_bucket_are_searched_cut_and_audited(
    archive: Stack, objects: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    export = "s3://films/out/cut.jsonl"
    words = ("submit", "s3://films/shown/large.mov", "--name", "cut", "--output", export, *OPTIONS, *SEGMENTED)
    status, errors = await run(archive, objects, *words)
    assert status == 0, errors
    (line,) = lines_of(objects, "out/cut.jsonl").values()
    parts = line["parts"]
    word = max(words_of(parts[1]["text"]), key=len)
    clips = tmp_path / "clips"
    for _ in range(2):  # the second time the index is there
        status, said = await told(objects, "search", word, "--in", export, "--clip", str(clips), "--json")
        assert status == 0
        found = {one["start_s"]: one for one in map(json.loads, said)}
        assert found[4.0]["text"] == parts[1]["text"]
        assert {str(path): path.stat().st_size for path in clips.rglob("*.mkv")}[found[4.0]["clip"]] > 100_000
    (index,) = (tmp_path / "cache" / "slipstream" / "search").iterdir()
    status, said = await told(objects, "index", export, "--output", str(tmp_path / "all.index"))
    assert status == 0 and "2 texts" in said[0]
    status, findings = await audited(archive, objects, export)
    assert (status, findings[-1]["passed"], findings[-1]["same"]) == (0, True, 2)
    objects.put("out/all.index", index.read_bytes())
    for name, code in (("all.index", 2), ("none.jsonl", 3)):
        status, said = await told(objects, "search", word, "--in", f"s3://films/out/{name}")
        assert (status, said) == (code, [])


@pytest.mark.long
async def test_hints_may_lie_in_a_bucket(archive: Stack, objects: ObjectServer, world: World, tmp_path: Path) -> None:
    folder = world.folder / "hinted"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(world.clips[0])
    words = ("submit", str(folder), *OPTIONS)
    status, errors = await run(archive, objects, *words, "--output", "s3://films/out/old.jsonl")
    assert status == 0, errors
    hinted = ("--hints-from", "s3://films/out/old.jsonl", "--output", str(tmp_path / "new.jsonl"))
    status, errors = await run(archive, objects, *words, *hinted)
    assert (status, "1 of 1 items have hints" in errors) == (0, True), errors
    status, errors = await run(archive, objects, *words, "--hints-from", "s3://films/out/none.jsonl")
    assert status == 3 and "there is no object s3://films/out/none.jsonl" in errors, errors


async def told(objects: ObjectServer, *words: str) -> tuple[int, list[str]]:
    """Exit status and stdout of a command that needs no gateway."""
    ended = await command("archive", *words, **objects.environment)
    return ended.status, ended.output.splitlines()


async def audited(stack: Stack, objects: ObjectServer, batch: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status, and what was found of all results."""
    words = ("audit", batch, "--share", "100%", "--json", "--gateway", stack.gateway_address)
    ended = await command("archive", *words, **objects.environment)
    return ended.status, [json.loads(line) for line in ended.output.splitlines()]


@pytest.mark.long
async def test_bad_rows_are_named_before_anything_is_handed_in(archive: Stack, objects: ObjectServer) -> None:
    rows = [b'{"source": "s3://films/shown/a.mp4"}\n', *([b"no JSON\n"] * 12)]
    manifest = objects.put("bad.jsonl", b"".join(rows))
    status, errors = await run(archive, objects, "submit", manifest, "--name", "bad", *OPTIONS)
    assert status == 2 and f"{manifest} line 2: " in errors and "2 more rows" in errors
    status, errors = await run(archive, objects, "status", "bad")
    assert status == 3, errors
    status, errors = await run(archive, objects, "submit", "s3://films/none.csv", *OPTIONS)
    assert status == 3 and "no object s3://films/none.csv" in errors
