"""Which of several variants is used where any will do."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from tiny import SM_90, Use, tiny

import jitkern
from jitkern.arch import Arch
from jitkern.cache import get
from jitkern.cache.entry import new_entry
from jitkern.cache.store import Cache
from jitkern.errors import ToolchainError
from jitkern.jit import device as jit_device

OLD, NEW = "nvrtc-12.9", "nvrtc-13.1"


@pytest.fixture(autouse=True)
def variants(folder: Path, empty_cache: Path) -> Cache:
    """A cache that machines with drivers of CUDA 12 and 13 share; the newest build is of 13."""
    cache = Cache(empty_cache)
    publish(cache, OLD, 1e9)
    publish(cache, NEW, 2e9)
    return cache


def publish(
    cache: Cache, variant: str, built_unix_s: float, kind: str = "cubin", arch: Arch = SM_90
) -> None:
    notes = {"kind": kind, "built_unix_s": built_unix_s}
    files = {f"tiny.{kind}": variant.encode()}
    cache.publish(new_entry(tiny()._key(arch), variant, files, notes))


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ToolchainError("no NVRTC; install one")
    monkeypatch.setattr(jit_device, "compiler_id", Mock(side_effect=missing))


def taken() -> str:
    found = tiny()._find(SM_90)
    assert found is not None
    assert tiny()._lookup(SM_90).loaded == found.loaded
    return found.loaded.decode()


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ("nvrtc-12.4", OLD),  # the newest was taken, which a driver for CUDA 12 does not load
        ("nvrtc-12.9", OLD),
        ("nvrtc-13.5", NEW),
        ("other", NEW),
    ],
)
def test_frozen(monkeypatch: pytest.MonkeyPatch, ours: str, expected: str) -> None:
    monkeypatch.setattr(jit_device, "compiler_id", lambda: ours)
    jitkern.freeze()
    assert taken() == expected


def test_without_a_compiler_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    assert taken() == NEW


def test_ptx_may_be_too_new_for_the_driver(
    variants: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(variants, "nvrtc-13.3", 3e9, kind="ptx")
    monkeypatch.setattr(jit_device, "compiler_id", lambda: "nvrtc-13.5")
    jitkern.freeze()
    assert taken() == NEW


# -- cubins for a lower minor version of the arch --------------------------------------------------

SM_80, SM_89 = Arch(8, 0), Arch(8, 9)


@pytest.mark.parametrize(
    ("arch", "lower"),
    [
        ("7.5", []),
        ("8.0", []),
        ("8.6", ["8.0"]),
        ("8.7", []),  # Tegra
        ("8.9", ["8.6", "8.0"]),
        ("9.0", []),
        ("9.0a", []),
        ("10.3", ["10.0"]),
        ("10.3f", []),
        ("12.0", []),
        ("12.1", ["12.0"]),
    ],
)
def test_whose_cubins_run_on_an_arch(arch: str, lower: list[str]) -> None:
    assert list(map(str, Arch.parse(arch)._lower_minors)) == lower


def loaded(arch: Arch) -> tuple[str, str, bytes] | None:
    """Source, arch of the entry, and code; None if it would have to be compiled."""
    found = tiny()._find(arch)
    return None if found is None else (found.source, found.entry.key.arch, found.loaded)


def test_without_a_compiler_a_lower_minor_serves(
    variants: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(variants, OLD, 1e9, arch=SM_80)
    publish(variants, NEW, 1e9, arch=Arch(8, 6), kind="ptx")  # the driver would compile it
    publish(variants, OLD, 1e9, arch=Arch(12, 0, "a"))
    monkeypatch.setattr(jit_device, "compiler_id", lambda: NEW)
    assert loaded(SM_89) is None  # it is compiled: a kernel may have code for 8.9 only
    without_compiler(monkeypatch)
    assert loaded(SM_89) == ("cached", "8.0", OLD.encode())
    assert tiny().image(SM_89) == OLD.encode()
    assert loaded(Arch(8, 7)) is loaded(Arch(12, 1)) is loaded(Arch(10, 3)) is None
    assert loaded(SM_90) == ("cached", "9.0", NEW.encode())
    publish(variants, OLD, 0, arch=SM_89)
    assert loaded(SM_89) == ("cached", "8.9", OLD.encode())


def test_after_freeze_a_lower_minor_serves(
    variants: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(variants, NEW, 1e9, arch=SM_80)
    monkeypatch.setattr(jit_device, "compiler_id", lambda: NEW)
    jitkern.freeze()
    assert tiny()._lookup(SM_89).entry.key.arch == "8.0"


@pytest.mark.parametrize("wheel_has", [OLD, NEW])
def test_a_lower_minor_of_a_wheel_is_not_compiled_anew(
    variants: Cache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    use: Use,
    wheel_has: str,
) -> None:
    wheel = Cache(tmp_path / "wheel")
    publish(wheel, wheel_has, 1e9, arch=SM_80)
    monkeypatch.setattr(get, "SHIPPED", wheel.root)
    get._caches.cache_clear()
    monkeypatch.setattr(jit_device, "compiler_id", lambda: NEW)
    use(LOG=1)
    assert loaded(SM_89) == ("shipped", "8.0", wheel_has.encode())
    assert f"/{wheel_has} for 8.0: shipped, " in caplog.text
    assert loaded(SM_90) == ("cached", "9.0", NEW.encode())
    get._caches.cache_clear()
