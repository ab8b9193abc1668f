"""``calibrate``: the figures that follow from what was measured, and the file that keeps them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jitkern import calibration
from jitkern.calibration import Machine
from jitkern.env import settings
from jitkern.errors import CacheError, UnsupportedError
from jitkern.host import module as host

# As an H200 with 16 cores had them on 2026-11-22, shortened.
CURVES: dict[str, list[tuple[float, float]]] = {
    "as they come": [(0.25, 47.4), (0.5, 47.4), (1, 43.8), (1.5, 34.5), (2, 29.8), (16, 18.7)],
    "small": [(0.25, 11.2), (0.5, 20.7), (1, 28.3), (2, 35.5), (4, 41.2), (8, 44.0)],
    "large": [(0.25, 10.4), (0.5, 18.4), (1, 27.6), (2, 35.3), (4, 40.2), (8, 44.1)],
    "blocks by SMs": [(16, 51.0), (64, 51.3), (128, 51.4), (256, 51.4), (1024, 51.4)],
    "blocks by the engine": [(16, 24.6), (64, 51.1), (128, 52.8), (256, 54.2), (1024, 55.2)],
    "blocks to the host by SMs": [(16, 51.8), (64, 52.0), (256, 52.5), (1024, 52.5)],
    "blocks to the host by the engine": [(16, 22.3), (64, 45.4), (256, 50.9), (1024, 54.6)],
    "in order": [(16, 34.4)],
    "both ways, of threads": [(1, 20.4), (4, 34.1), (8, 41.6), (16, 39.6)],
}
MACHINE = Machine("Fake GPU", "580.1", "A processor", 16)
FIGURES = {"reach_bytes": 1 << 30, "both_threads": 4}


@pytest.fixture
def cache(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, after one of the image."""
    monkeypatch.setenv("JITKERN_CACHE_PATH", str(tmp_path / "image"))
    monkeypatch.setattr(calibration, "machine_with", lambda gpu, cuda: replace(MACHINE, gpu=gpu))
    settings.cache_clear()
    return empty_cache


def test_figures_of_an_h200() -> None:
    """Those that C++ has for a machine without a calibration are of the same size."""
    assert calibration.figures_of(CURVES) == {
        "reach_bytes": 1 << 30,
        "small_call_bytes": 1 << 20,
        "sm_piece_bytes": 16 << 10,
        "sm_piece_bytes_to_host": 64 << 10,
        "paced_to_host_mb_s": 32_025,
        "both_threads": 8,
    }


@pytest.mark.parametrize(
    ("name", "curve", "figure", "expected"),
    [
        ("as they come", [(gib, 47.0) for gib in (0.25, 4, 16)], "reach_bytes", 1 << 60),
        ("as they come", [(0.25, 47.0), (1, 9.0), (4, 47.0)], "reach_bytes", 1 << 28),  # disturbed
        ("both ways, of threads", [(1, 5.0), (16, 5.0)], "both_threads", 32),
        ("small", [(0.25, 1.0), *CURVES["small"][1:]], "small_call_bytes", 1 << 17),
    ],
)
def test_a_way_that_always_or_never_wins(
    name: str, curve: list[tuple[float, float]], figure: str, expected: int
) -> None:
    assert calibration.figures_of({**CURVES, name: curve})[figure] == expected


def test_what_is_saved_is_found_for_this_machine_only(cache: Path) -> None:
    for changed in ({"gpu": "Other"}, {"driver": "580.2"}, {"cpu": "Another"}, {"num_cores": 8}):
        assert replace(MACHINE, **changed).file_name != MACHINE.file_name
    assert calibration.find("Fake GPU", 13000) is None
    assert host._measured("Fake GPU", 13000) == {}
    before = os.umask(0o002)  # under which the group's members could write a cache
    try:
        file = calibration.save(MACHINE, FIGURES, curves=CURVES)
    finally:
        os.umask(before)
    assert (file.parent, cache.stat().st_mode & 0o777) == (cache, 0o700)
    assert calibration.find("Fake GPU", 13000) == (file, FIGURES)
    assert host._measured("Fake GPU", 13000) == FIGURES
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calibration.find("Other GPU", 13000) is None


def _with(name: str, value: object) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:40]), ""),
        (_with("figures", {"reach_bytes": -1}), "figures are positive ints"),
        (_with("figures", {"reach_bytes": True}), "figures are positive ints"),
        (lambda file: file.chmod(0o666), "its mode, 0666, lets .+ write it"),
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(
    cache: Path, damage: Callable[[Path], object], reason: str
) -> None:
    file = calibration.save(MACHINE, FIGURES)
    damage(file)
    with pytest.warns(RuntimeWarning, match=f"{file.name} is not used: .*{reason}.*calibrate"):
        assert calibration.find("Fake GPU", 13000) is None


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_measured(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cache.write_bytes(b"a file in its place")
    with pytest.raises(CacheError, match="cannot be written: "):
        calibration.calibrate()
    cache.unlink()
    (cache / "v1").mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(CacheError, match="lets others write it"):
        calibration.calibrate()


def test_the_pool_is_a_quarter_of_the_free_memory() -> None:
    pools = {16: 4, 31: 4, 32: 8, 127: 16, 128: 32, 2000: 32}
    assert {free: calibration._pool_gib(free << 30) for free in pools} == pools
    says = "calibrate: 15.0 GiB of host memory are free, expected 16 or more, .+; end what takes it"
    with pytest.raises(UnsupportedError, match=says):
        calibration._pool_gib(15 << 30)


@pytest.mark.cuda
def test_calibrate(cache: Path) -> None:
    """On a GPU: in use at once, and by the next process."""
    topics: list[str] = []
    found = calibration.calibrate(topics.append)
    assert topics[0].startswith("pinning ") and len(topics) == 5
    in_use = {str(k): int(v) for k, v in host.module()["figures"](0).items()}
    assert found.figures.items() <= in_use.items()
    assert found.file.parent == cache
    assert json.loads(found.file.read_text())["figures"] == dict(found.figures)
