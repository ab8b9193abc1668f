"""Which of several variants is taken where any will do: first one that loads on this machine."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from needs import needs_cxx
from tiny import SM_90, tiny

import jitkern
from jitkern.cache.entry import new_entry
from jitkern.cache.store import Cache
from jitkern.errors import ToolchainError
from jitkern.host import module as host
from jitkern.jit import device as jit_device

OLD, NEW = "nvrtc-12.9", "nvrtc-13.1"


@pytest.fixture(autouse=True)
def variants(folder: Path, empty_cache: Path) -> Cache:
    """A cache that machines with drivers of CUDA 12 and 13 share; the newest build is of 13."""
    cache = Cache(empty_cache)
    publish(cache, OLD, 1e9)
    publish(cache, NEW, 2e9)
    return cache


def publish(cache: Cache, variant: str, built_unix_s: float, kind: str = "cubin") -> None:
    notes = {"kind": kind, "built_unix_s": built_unix_s}
    files = {f"tiny.{kind}": variant.encode()}
    cache.publish(new_entry(tiny().key(SM_90), variant, files, notes))


def without_compiler(monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int] | None) -> None:
    missing = ToolchainError("no NVRTC; install one")
    monkeypatch.setattr(jit_device, "compiler_id", Mock(side_effect=missing))
    if driver is not None:
        monkeypatch.setattr(jit_device, "_driver_version", lambda: driver)


def taken() -> str:
    found = tiny().find(SM_90)
    assert found is not None
    assert tiny().lookup(SM_90).loaded == found.loaded
    return found.loaded.decode()


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ("nvrtc-12.4", OLD),  # the newest was taken, which a driver for CUDA 12 does not load
        ("nvrtc-12.9", OLD),
        ("nvrtc-13.5", NEW),
        ("nvcc-12.4.131", OLD),
        ("nvcc-13.0.88", NEW),
        ("other", NEW),
    ],
)
def test_frozen(monkeypatch: pytest.MonkeyPatch, ours: str, expected: str) -> None:
    monkeypatch.setattr(jit_device, "compiler_id", lambda: ours)
    jitkern.freeze()
    assert taken() == expected


@pytest.mark.parametrize(
    ("driver", "expected"),
    [((12, 4), OLD), ((13, 0), NEW), ((14, 0), NEW), ((11, 8), NEW), ((0, 0), NEW)],
)
def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int], expected: str
) -> None:
    """The driver says what it loads; where nothing suits it, or there is none, the newest."""
    without_compiler(monkeypatch, driver)
    assert taken() == expected


def test_ptx_is_for_drivers_as_new_as_its_compiler(
    variants: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(variants, "nvrtc-13.3", 3e9, kind="ptx")
    for driver, expected in (((13, 2), NEW), ((13, 3), "nvrtc-13.3"), ((12, 9), OLD)):
        with monkeypatch.context() as patch:
            without_compiler(patch, driver)
            assert taken() == expected


@needs_cxx
def test_the_driver_is_asked_through_the_host_module(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch, None)
    monkeypatch.setattr(host, "_found", None)
    monkeypatch.setattr(host, "find_built", lambda: None)  # not built, and not for this
    assert taken() == NEW
    for answer, expected in ((12040, (12, 4)), (13010, (13, 1)), (0, (0, 0))):
        loaded = {"driver_version": lambda answer=answer: answer}
        lookup = host.Lookup("memo", 0.0, None, loaded)  # type: ignore[arg-type]
        monkeypatch.setattr(host, "find_built", lambda lookup=lookup: lookup)
        assert jit_device._driver_version() == expected

    failing = Mock(side_effect=ModuleNotFoundError("tvm_ffi"))
    monkeypatch.setattr(host, "find_built", failing)
    assert jit_device._driver_version() == (0, 0)
