"""A record replays where nothing of the recording machine is, and its cache is the app's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_toolkit import calls
from needs import needs_cxx, needs_nvcc, needs_nvrtc
from recorded_app import App, Capture, warm
from tiny import compiles, tiny

from jitkern.cache.store import Cache
from jitkern.env import settings
from jitkern.host import module as host
from jitkern.jit.loader import load_jit


@pytest.fixture(scope="module", autouse=True)
def host_module(session_cache: Path) -> None:
    """Build the host module in the session's cache, not once more in each test's empty one."""
    host.module()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Goes to another machine: no app, another current directory, another cache."""

    def go() -> Path:
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        monkeypatch.chdir(folder)
        (tmp_path / "home").rename(tmp_path / "gone")
        monkeypatch.delenv("JITKERN_RECORD")
        monkeypatch.setenv("JITKERN_CACHE_DIR", str(tmp_path / "other"))
        settings.cache_clear()
        return folder

    return go


def back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: App) -> None:
    """The app again, with what the other machine has brought into its cache."""
    (tmp_path / "gone").rename(tmp_path / "home")
    monkeypatch.chdir(app.root)


def entries(cache: Path) -> set[str]:
    return {path.parent.name for path in Cache(cache).root.glob("v1/*-*/*/")}


@needs_nvrtc
@needs_cxx
@pytest.mark.parametrize("archs", ["", "8.0,9.0"])
def test_all_routes_replay_where_nothing_of_the_app_is(
    *,
    capsys: Capture,
    tmp_path: Path,
    use: Callable[..., None],
    app: App,
    elsewhere: Callable[[], Path],
    fake_nvcc: Path,
    monkeypatch: pytest.MonkeyPatch,
    archs: str,
) -> None:
    """Libraries were built for no other arch, sources were looked for here, the app compiled."""
    record = tmp_path / "run.jsonl"
    use(CACHE_DIR=tmp_path / "cache", RECORD=record, ARCH="9.0")
    run = (app.kernel, app.own, app.library, app.cuda)
    for part in run:
        part()
    recorded = entries(tmp_path / "cache")
    assert len(recorded) == 4
    record.chmod(0o644)
    assert str(tmp_path) not in record.read_text()

    here = elsewhere()
    wanted = archs.split(",") if archs else ["9.0"]
    names = [("tiny", True), ("store", True), ("scale", False), ("single", True)]
    rows = [(name, arch) for name, cuda in names for arch in (wanted if cuda else [""])]
    option = ["--arch", archs] if archs else []
    for source, seen in (("compiled", len(wanted)), ("cached", 0)):
        before = calls(fake_nvcc)
        status, found, err = warm(capsys, "--replay", record, *option)
        assert (status, err) == (0, "")
        assert found == [(name, arch, source) for name, arch in rows]
        assert calls(fake_nvcc) - before == seen
    assert os.listdir(here) == []
    assert recorded <= entries(tmp_path / "other")

    back(tmp_path, monkeypatch, app)
    compiled = compiles()
    for part in run:
        part()
    assert compiles() == compiled


def link(inside: str, target: str) -> Callable[[Path], None]:
    """A layout in which `inside` is a link to what was there, `target`."""

    def make(root: Path) -> None:
        (root / target).parent.mkdir(exist_ok=True)
        shutil.move(root / inside, root / target)
        (root / inside).symlink_to(root / target)

    return make


@needs_nvrtc
@needs_cxx
@pytest.mark.parametrize(
    "arrange",
    [
        link("more/deep.h", "store/deep-1.2.h"),
        link("more", "store/more-1.2"),
        link("src/half.cuh", "store/half"),
        link("inc", "store/inc-1"),
        link("src/scale.cc", "store/scale-1.cc"),
    ],
    ids=["header", "include directory", "beside", "by dots", "source"],
)
def test_what_is_found_by_a_link(
    *,
    capsys: Capture,
    tmp_path: Path,
    use: Callable[..., None],
    app: App,
    elsewhere: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
    arrange: Callable[[Path], None],
) -> None:
    arrange(app.root)
    record = tmp_path / "run.jsonl"
    use(CACHE_DIR=tmp_path / "cache", RECORD=record)
    app.kernel()
    app.library()
    record.chmod(0o644)
    elsewhere()
    status, found, err = warm(capsys, "--replay", record)
    assert (status, err) == (0, "")
    assert found == [("tiny", "9.0", "compiled"), ("scale", "", "compiled")]
    back(tmp_path, monkeypatch, app)
    compiled = compiles()
    app.kernel()
    app.library()
    assert compiles() == compiled


@needs_cxx
def test_the_build_directory_is_not_written_again(
    capsys: Capture, tmp_path: Path, use: Callable[..., None], app: App
) -> None:
    record = tmp_path / "run.jsonl"
    use(CACHE_DIR=tmp_path / "cache", RECORD=record)
    app.library(build_directory="build")
    shutil.rmtree(app.root / "build")
    record.chmod(0o644)
    assert warm(capsys, "--replay", record)[:2] == (0, [("scale", "", "cached")])
    assert warm(capsys, "--replay", record, "--load")[:2] == (0, [("scale", "", "cached")])
    assert not (app.root / "build").exists()


@pytest.mark.cuda
@needs_nvrtc
@needs_nvcc
def test_what_is_replayed_runs(
    capsys: Capture, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def run() -> None:
        x = torch.zeros(100, device="cuda")
        wrappers = [("launch", "AddKernel<2>::run")]
        load_jit("add", "2", cuda_files=["single.cu"], cuda_wrappers=wrappers).launch(x)
        assert x.eq(2).all()
        out = torch.zeros(32, dtype=torch.int32, device="cuda")
        tiny(8).launch("tiny", out, grid=1)
        assert out.eq(4).all()

    record = tmp_path / "run.jsonl"
    monkeypatch.setenv("JITKERN_RECORD", str(record))
    settings.cache_clear()
    run()
    record.chmod(0o644)
    monkeypatch.setenv("JITKERN_RECORD", "")
    monkeypatch.setenv("JITKERN_CACHE_DIR", str(tmp_path / "other"))
    settings.cache_clear()
    status, found, err = warm(capsys, "--replay", record)
    assert (status, err) == (0, "")
    assert [(name, source) for name, _, source in found] == [
        ("add", "compiled"),
        ("tiny", "compiled"),
    ]
    compiled = compiles()
    run()
    assert compiles() == compiled
