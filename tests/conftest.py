"""Fixtures of all tests: devices, one kernel cache for the session, empty caches on request."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from leftovers import temporary_folder
from shared_gpu import IS_SHARED

from jitkern.env import settings

ROOT = Path(__file__).resolve().parent.parent

pytest_plugins = ["children", "fake_toolkit", "headers", "tiny"]  # fixtures
collect_ignore = ["toy_op"]  # an op that tests/test_table.py adds to a copy of the tree

# Equal examples in every run; `--hypothesis-profile thorough` looks for new ones.
_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
hypothesis_settings.register_profile("quick", max_examples=200, derandomize=True, **_COMMON)
hypothesis_settings.register_profile("thorough", max_examples=2000, **_COMMON)
hypothesis_settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds", type=float, default=5.0, help="how long test_fuzz.py goes on (default 5)"
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="where test_fuzz.py starts")


def pytest_configure(config: pytest.Config) -> None:
    """Keep all temporary files of the run in one folder; ``--basetemp`` keeps those of pytest."""
    # Inductor compiles in this process: each process of its pool would import torch.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = temporary_folder()
        if config.option.basetemp is None:
            config.option.basetemp = str(folder / "pytest")


@functools.cache
def gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU when they are about to run: collecting touches no driver."""
    if item.get_closest_marker("cuda") and gpu_count() < 1:
        pytest.skip("needs a CUDA GPU")
    several = item.get_closest_marker("multigpu")
    if several and gpu_count() < (1 if IS_SHARED and several.kwargs else 2):
        pytest.skip("needs two CUDA GPUs")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the ops run on."""
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def session_cache(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Path]:
    """One cache for the whole run and all its workers: each kernel is compiled once.

    Code of inductor is kept for the next run. The user's JITKERN_ settings are removed, except the
    choice of an NVRTC.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / "jitkern-cache"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("JITKERN_")]:
            if name != "JITKERN_NVRTC":
                patch.delenv(name)
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and hasattr(pytestconfig, "cache"):
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(pytestconfig.cache.mkdir("inductor")))
        patch.setenv("JITKERN_CACHE_DIR", str(directory))
        settings.cache_clear()
        yield directory
    settings.cache_clear()


@pytest.fixture(scope="session")
def host_module(session_cache: Path) -> None:
    """Build the host module in the session's cache, not once more in a test's empty one."""
    from jitkern.host.library import module

    module()


@pytest.fixture(scope="session")
def wheel(session_cache: Path) -> Path:
    """The wheel of this tree, built once for all workers: it compiles the host module."""
    from children import pip

    out = session_cache.parent / "wheel"
    with FileLock(f"{out}.lock"):
        if not out.exists():
            pip("wheel", ROOT, "--no-build-isolation", "-w", out)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new cache directory, for this process and the processes it starts."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("JITKERN_CACHE_DIR", str(directory))
    settings.cache_clear()
    return directory
