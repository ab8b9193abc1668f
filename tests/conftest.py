"""What every test shares: the devices, one kernel cache for the session, empty ones on request."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forks
import pytest
import torch
from built_wheel import wheel  # noqa: F401
from children import cache_dir, children, sources  # noqa: F401
from fake_toolkit import fake_nvcc  # noqa: F401
from headers import bare_machine  # noqa: F401
from host_stand_in import built, shipped, stand_in  # noqa: F401
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from owned import cache_root, no_private_groups  # noqa: F401
from paths import python_path
from recorded_app import app, use  # noqa: F401
from shared_gpu import IS_SHARED
from strangers import open_place  # noqa: F401
from tiny import folder, thawed  # noqa: F401

from jitkern.env import settings

ROOT = Path(__file__).resolve().parent.parent

collect_ignore = ["toy_op"]  # an op that tests/test_table.py adds to a copy of the tree

# The same examples in every run; `--hypothesis-profile thorough` looks for new ones.
_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
hypothesis_settings.register_profile("quick", max_examples=200, derandomize=True, **_COMMON)
hypothesis_settings.register_profile("thorough", max_examples=2000, **_COMMON)
hypothesis_settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds", type=float, default=5.0, help="how long test_fuzz.py goes on (default 5)"
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="where test_fuzz.py starts")


@functools.cache
def gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU when the test is about to run: collecting touches no driver."""
    if item.get_closest_marker("cuda") and gpu_count() < 1:
        pytest.skip("needs a CUDA GPU")
    several = item.get_closest_marker("multigpu")
    if several and gpu_count() < (1 if IS_SHARED and several.kwargs else 2):
        pytest.skip("needs two CUDA GPUs")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the ops run on; one test body serves both."""
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def session_cache(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Path]:
    """One cache for the whole run, all its workers included: each kernel is compiled once.

    The host module is built for the tree, its wheel, its sdist and copies of it: each of its
    sources is compiled once, and kept for the next run. The user's own JITKERN_ settings are set
    aside, but for the choice of an NVRTC and of that place.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / "jitkern-cache"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("JITKERN_")]:
            if name not in ("JITKERN_NVRTC", "JITKERN_HOST_OBJECTS"):
                patch.delenv(name)
        if "JITKERN_HOST_OBJECTS" not in os.environ and hasattr(pytestconfig, "cache"):
            objects = pytestconfig.cache.mkdir("host_objects")
            patch.setenv("JITKERN_HOST_OBJECTS", str(objects))
        patch.setenv("JITKERN_CACHE_DIR", str(directory))
        settings.cache_clear()
        yield directory
    settings.cache_clear()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory of this test's own, for this process and the ones it starts."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("JITKERN_CACHE_DIR", str(directory))
    settings.cache_clear()
    yield directory
    monkeypatch.undo()
    settings.cache_clear()


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def fresh_python() -> Run:
    """Run a snippet in a new interpreter: ``fresh_python(code, *argv, env={...})``, checked."""

    def run(code: str, *argv: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *argv]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    return functools.partial(_checked, run)


@pytest.fixture
def forked_python() -> Run:
    """Do what `fresh_python` does, for what may find PyTorch imported: two seconds less."""
    return functools.partial(_checked, forks.run)


def _checked(
    run: Run, code: str, *argv: str, env: dict[str, str | None] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    merged = {**os.environ, "PYTHONPATH": python_path(), **(env or {})}
    given = {name: value for name, value in merged.items() if value is not None}
    done = run(code, *argv, env=given)
    if check and done.returncode != 0:
        pytest.fail(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
