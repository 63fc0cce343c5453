"""The run over damaged videos: repeatable files, and a verdict that sees what was left behind."""

from bench.faults.mutated_files import SOUND, mutated, mutated_files
from tests.support.media import make_clip


def test_a_file_is_its_seed_and_number() -> None:
    sound = [make_clip(spec) for spec in list(SOUND.values())[:2]]
    files = [mutated(3, number, sound) for number in range(40)]
    assert files == [mutated(3, number, sound) for number in range(40)]
    assert len(set(files)) > 35
    assert files != [mutated(4, number, sound) for number in range(40)]


async def test_a_short_run_passes() -> None:
    found = await mutated_files(count=24, seed=1)
    assert found["passed"], found
    assert sum(found["outcomes"].values()) == found["files"] == 24
