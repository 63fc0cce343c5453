"""The part `put` finds a store without conditions, and a compactor that writes over what is there."""

from pathlib import Path

import obstore
import pytest

from bench.archive_put import OBJECTS, _other_bytes, _race
from bench.spill_roles import Given
from slipstream.objects.store import ObjectStore, ObjectUrl
from slipstream.stack.redis_server import EmbeddedServer


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that writes whatever is there."""

    async def put_new(store: ObjectStore, url: ObjectUrl, data: bytes) -> bool:
        await obstore.put_async(store._store, url.key, data)
        return True

    monkeypatch.setattr(ObjectStore, "put_new", put_new)


async def test_of_many_who_put_an_object_one_does(tmp_path: Path) -> None:
    assert await _race(f"file://{tmp_path}", seed=1) == 0


@pytest.mark.usefixtures("careless")
async def test_a_store_without_conditions_is_found(tmp_path: Path) -> None:
    assert await _race(f"file://{tmp_path}", seed=1) == OBJECTS


async def there(tmp_path: Path) -> dict[str, int]:
    async with EmbeddedServer(tmp_path / "redis") as server:
        return await _other_bytes(Given(server.url, f"file://{tmp_path}/results", 16 << 20, 1 << 20))


async def test_a_name_that_is_taken_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    assert not any((await there(tmp_path)).values())


@pytest.mark.usefixtures("careless")
async def test_what_is_written_over_is_found(tmp_path: Path) -> None:
    found = await there(tmp_path)
    assert found["overwritten"] and found["error_unnamed"]
