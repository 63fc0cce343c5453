"""The wheel in an environment without the checkout: what it holds, and that it captions from any folder."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy
import pytest

from slipstream import __version__
from tests.support.clips import make_colour_clip

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "models", "services", "slipstream")
MAX_WEIGHTS_MB = 45
"""All shipped weights together, now and later."""
TIMEOUT_S = 240


def run(*argv: object, cwd: Path = Path("/")) -> subprocess.CompletedProcess[str]:
    """The command in `cwd`, with nothing in its environment that leads to the checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLIPSTREAM"))}
    return subprocess.run(list(map(str, argv)), cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves its own files where it builds."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    built = run(
        sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", folder, cwd=source
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment that has the wheel, and its dependencies from the one that runs this test."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    done = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stderr
    where = run(python, "-c", "import slipstream; print(slipstream.__file__, slipstream.__version__)")
    assert where.stdout.split() == [str(packages / "slipstream" / "__init__.py"), __version__]
    return folder / "bin"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("videos") / "clip.mp4"
    path.write_bytes(make_colour_clip(5))
    return path


def test_the_source_distribution_has_no_tests(tmp_path: Path) -> None:
    asked = f"from setuptools import setup; setup(script_args=['--quiet', 'egg_info', '--egg-base', {str(tmp_path)!r}])"
    listed = run(sys.executable, "-c", asked, cwd=ROOT)
    assert listed.returncode == 0, listed.stderr
    names = (tmp_path / "slipstream.egg-info" / "SOURCES.txt").read_text().split()
    assert "slipstream/services/front/__main__.py" in names and "slipstream/archive/lua/take.lua" in names
    assert not [name for name in names if name.startswith("tests")]


def test_one_top_level_name_with_all_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        top = {name.partition("/")[0] for name in names}
        assert top == {"slipstream", f"slipstream-{__version__}.dist-info"}
        assert f"slipstream-{__version__}.dist-info/licenses/LICENSE" in names
        packed = {name.removeprefix("slipstream/") for name in names}
        expected = [path for path in (ROOT / "slipstream").rglob("*") if path.suffix in (".py", ".lua", ".typed")]
        assert {str(path.relative_to(ROOT / "slipstream")) for path in expected} <= packed
        for name in ("target", "draft", "gateway"):
            assert f"services/{name}/__main__.py" in packed
        for path in (ROOT / "services" / "front" / "web").iterdir():
            assert f"services/front/web/{path.name}" in packed
        for pair in ("pocket", "pocket-qwen"):
            for role in ("target", "draft"):
                assert archive.getinfo(f"slipstream/checkpoints/{pair}/{role}/model.safetensors").file_size > 1e6
        assert archive.getinfo("slipstream/checkpoints/pocket-reader/model.safetensors").file_size > 1e6


def test_shipped_weights_are_small() -> None:
    weights = [path for path in (ROOT / "models").rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in weights) <= MAX_WEIGHTS_MB * 1e6


@pytest.mark.long
def test_it_captions_in_a_shell(installed: Path, clip: Path) -> None:
    done = run(installed / "slipstream", "caption", clip, "--json", "--frames", "8", "--max-new-tokens", "24")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["text"] and summary["num_tokens"] == 24
    assert summary["speculation"]["kept_tokens"] > 0, "with the budgets that services take by themselves, it is drafted"
    assert done.stderr.count("know only moving shapes") == 1


def test_the_demo_says_that_it_needs_a_checkout(installed: Path) -> None:
    done = run(installed / "slipstream", "demo")
    assert done.returncode == 2 and "in a checkout" in done.stderr


THREE_LINES = """
import slipstream, sys
with slipstream.Captioner() as captioner:
    print(captioner.caption(sys.argv[1], "What happens?", num_frames=8, max_new_tokens=24).text)
"""


def test_it_captions_in_three_lines_of_python(installed: Path, clip: Path) -> None:
    done = run(installed / "python", "-c", THREE_LINES, clip)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
