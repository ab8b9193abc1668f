"""Caches in places that cannot be written: read-only, full, somebody else's, no directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
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


def assert_degrades(report: dict[str, Any]) -> None:
    assert report["compiles"] == 1
    (warning,) = report["warnings"]
    assert "keeps what it compiles in" in warning
    private = Path(warning.partition("keeps what it compiles in ")[2].partition(" until")[0])
    assert private.parent == Path(tempfile.gettempdir())
    assert not private.exists()  # it ended with the process


@needs_nvrtc
@needs_cxx
def test_a_read_only_cache_works_warm_and_cold(
    children: Children, sources: Path, cache_dir: Path, mount: Callable[..., Path]
) -> None:
    mount(cache_dir, "size=4m")
    children.run(sources / "tiny.cu")
    subprocess.run(["mount", "-o", "remount,ro", str(cache_dir)], check=True)
    warm = children.run(sources / "tiny.cu")
    assert (warm["cached"], warm["compiles"], warm["warnings"]) == (1, 0, [])
    assert_degrades(children.run(sources / "tiny.cu", n=5))
    cold = children.run(sources / "tiny.cc")
    assert cold["value"] == 1
    assert_degrades(cold)


@needs_nvrtc
@pytest.mark.parametrize("what", ["below a file", "proc"])
def test_a_place_that_is_no_directory(
    children: Children, sources: Path, cache_dir: Path, what: str
) -> None:
    cache_dir.write_text("not a directory")
    # /proc is there, and nothing can be made in it.
    place = cache_dir / "x" if what == "below a file" else Path("/proc/nowhere")
    report = children.run(sources / "tiny.cu", env={"JITKERN_CACHE_DIR": str(place)})
    assert_degrades(report)
    assert cache_dir.read_text() == "not a directory"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that other users can enter: pytest's own are closed to them."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    library = find_nvrtc().path
    for path in (library, *library.parents):
        if not path.stat().st_mode & (0o001 if path.is_dir() else 0o004):
            pytest.skip(f"{path} is closed to others, as NVRTC is that umask 077 installed")
    folder = Path(tempfile.mkdtemp(prefix="jitkern-test-"))
    folder.chmod(0o755)
    before = os.umask(0o022)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


@needs_nvrtc
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_directory_of_somebody_else(children: Children, open_folder: Path, mode: int) -> None:
    write_sources(open_folder / "sources")
    cache_dir = open_folder / "cache"
    children.run(open_folder / "sources" / "tiny.cu", env={"JITKERN_CACHE_DIR": str(cache_dir)})
    if mode == 0o755:
        subprocess.run(
            ["chmod", "-R", "a+rX", str(cache_dir)], check=True
        )  # as docs/security.md says
    file = open_folder / "sources" / "tiny.cu"
    strange: dict[str, Any] = {"become": 54321, "env": {"JITKERN_CACHE_DIR": str(cache_dir)}}
    warm = children.run(file, **strange)
    if mode == 0o755:
        assert (warm["cached"], warm["compiles"], warm["warnings"]) == (1, 0, [])
        assert_degrades(children.run(file, n=5, **strange))
    else:
        assert_degrades(warm)
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
@pytest.mark.parametrize("free_kb", [0, 8])
def test_a_full_disk_leaves_nothing_damaged(
    children: Children,
    sources: Path,
    cache_dir: Path,
    mount: Callable[..., Path],
    free_kb: int,
) -> None:
    mount(cache_dir, "size=64k")
    filler = cache_dir / "filler"
    filler.write_bytes(bytes((64 - free_kb) * 1024))
    report = children.run(sources / "tiny.cu", n=SLOW)  # an image of 9 KB
    assert report["elf"]
    assert_degrades(report)
    assert sound(cache_dir)
    assert list(cache_dir.glob("v1/.staging/*")) == []
    filler.unlink()
    assert children.run(sources / "tiny.cu")["compiles"] == 1
    assert children.run(sources / "tiny.cu")["compiles"] == 0
