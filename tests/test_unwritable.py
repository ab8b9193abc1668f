"""Caches in places that cannot be written: read-only, full, somebody else's, no directory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import SLOW, Children, sound, write_sources
from needs import needs_cxx, needs_nvrtc

from jitkern.compilers.find import find_nvrtc


@pytest.fixture
def mount() -> Iterator[Callable[..., Path]]:
    """Mount a tmpfs of ours with the given options; skips where that is not permitted."""
    mounted: list[Path] = []

    def do_mount(path: Path, options: str) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"mode=0755,{options}", "jitkern-test", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"cannot mount a tmpfs: {error}")
        if done.returncode != 0:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield do_mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def assert_warm(report: dict[str, Any]) -> None:
    assert (report["cached"], report["compiles"], report["warnings"]) == (1, 0, [])


def assert_degrades(report: dict[str, Any]) -> None:
    assert report["compiles"] == 1
    (warning,) = report["warnings"]
    assert warning.endswith("; what this process compiles is kept in memory until it ends")


@needs_nvrtc
@needs_cxx
def test_a_read_only_cache_works_warm_and_cold(
    children: Children, sources: Path, cache_dir: Path, mount: Callable[..., Path]
) -> None:
    mount(cache_dir, "size=4m")
    children.run(sources / "tiny.cu")
    subprocess.run(["mount", "-o", "remount,ro", str(cache_dir)], check=True)
    assert_warm(children.run(sources / "tiny.cu"))
    assert_degrades(children.run(sources / "tiny.cu", n=5))
    cold = children.run(sources / "tiny.cc")
    assert cold["value"] == 1
    assert_degrades(cold)


@pytest.fixture
def open_folder(open_place: Path) -> Iterator[Path]:
    """A directory that other users can enter, and an NVRTC that they can read."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    library = find_nvrtc().path
    for path in (library, *library.parents):
        if not path.stat().st_mode & (0o001 if path.is_dir() else 0o004):
            pytest.skip(f"{path} is closed to others, as NVRTC is that umask 077 installed")
    before = os.umask(0o022)
    yield open_place
    os.umask(before)


@needs_nvrtc
def test_a_directory_of_somebody_else(children: Children, open_folder: Path) -> None:
    file = write_sources(open_folder / "sources") / "tiny.cu"
    cache_dir = open_folder / "cache"
    env = {"JITKERN_CACHE_DIR": str(cache_dir)}
    children.run(file, env=env)
    assert_degrades(children.run(file, become=54321, env=env))
    subprocess.run(["chmod", "-R", "a+rX", str(cache_dir)], check=True)  # as docs/security.md says
    assert_warm(children.run(file, become=54321, env=env))
    assert_degrades(children.run(file, n=5, become=54321, env=env))
    assert sound(cache_dir)


@needs_nvrtc
def test_no_home_directory(children: Children, open_folder: Path) -> None:
    write_sources(open_folder / "sources")
    for name in ("HOME", "XDG_CACHE_HOME", "JITKERN_CACHE_DIR"):
        children.env.pop(name, None)
    report = children.run(open_folder / "sources" / "tiny.cu", become=54321)
    assert_degrades(report)
    assert "no home directory" in report["warnings"][0]
    assert not Path("/~").exists()


@needs_nvrtc
def test_a_full_disk_leaves_nothing_damaged(
    children: Children, sources: Path, cache_dir: Path, mount: Callable[..., Path]
) -> None:
    mount(cache_dir, "size=64k")
    filler = cache_dir / "filler"
    filler.write_bytes(bytes(56 * 1024))
    report = children.run(sources / "tiny.cu", n=SLOW)  # an image of 9 KB
    assert report["elf"]
    assert_degrades(report)
    assert sound(cache_dir)
    assert list(cache_dir.glob("v1/.staging/*")) == []
    filler.unlink()
    assert children.run(sources / "tiny.cu")["compiles"] == 1
    assert children.run(sources / "tiny.cu")["compiles"] == 0
