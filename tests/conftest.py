"""What every test of the suite gets: the backend's name, a compiler without memory, seeds, caches of its own.

The suite also runs in a clone that was never installed (a GPU machine's own Python): the entry points of
pyproject.toml are then published from a folder on the path, so that `backend="moepdl"` and `TORCH_LOGS=moepdl` work,
in child processes too.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent

# Derandomised: a failure on one machine is a failure on all. No deadline: the first example may pay for a compile.
settings.register_profile("moepdl", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("moepdl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write the golden files instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module, hence before torch is imported and reads entry points and cache folders."""
    session = Path(tempfile.mkdtemp(prefix="moepdl-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(session, ignore_errors=True))
    # One compile cache for the session, never the user's: results cannot depend on what was compiled before it. The
    # processes of pytest-xdist are started with the environment that is set here, and share it.
    if not hasattr(config, "workerinput"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(session / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(session / "triton")
    # A pool of compile workers is a process more for every process that imports Inductor, and each imports torch.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    for key in [k for k in os.environ if k.startswith("MOEPDL_") and k != "MOEPDL_VENV"]:
        del os.environ[key]
    path = [str(ROOT)]
    if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="moepdl"):
        path.append(str(_publish_entry_points(session / "installed")))
    for folder in reversed(path):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])


def _publish_entry_points(folder: Path) -> Path:
    """Write the metadata that an editable install would leave; returns the folder for sys.path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "moepdl-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moepdl\nVersion: 0.0.0\n")
    lines = []
    for group, entries in {**project["entry-points"], "console_scripts": project["scripts"]}.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Leave all that was imported out of the collector's runs: it stays, and to visit it takes long each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish() -> None:
    """Let the interpreter free everything at its end, or the bindings of triton's compiler speak of leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    """Fixed seeds before each test, no compiled code left over after it. Caches on disk stay: they are by content."""
    random.seed(0)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        import torch._dynamo

        torch._dynamo.reset()


@pytest.fixture
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Inductor cache folder for this test alone: every pass runs, no compiled result is found."""
    folder = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """`golden(name, text)` compares text with tests/golden/name; `pytest --accept` writes it there."""

    def check(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--accept"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"no {path.relative_to(ROOT)}: run pytest --accept and read what it wrote"
        assert text == path.read_text(), f"differs from {path.relative_to(ROOT)}: if it is meant, run pytest --accept"

    return check
