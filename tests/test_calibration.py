"""``calibrate``: the figures that follow from what was measured, and the file that keeps them."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fake_gpu import checks_of, needs_fake_gpu, run_checks

from jitkern import calibration
from jitkern.calibration import Machine
from jitkern.cli import calibrate as command
from jitkern.cli import main
from jitkern.env import settings
from jitkern.errors import CacheError, UnsupportedError
from jitkern.host import module as host

CHILD = Path(__file__).with_name("calibration_child.py")

# As an H200 with 16 cores had them on 2026-11-22, shortened.
CURVES: dict[str, list[tuple[float, float]]] = {
    "as they come": [
        *((0.25, 47.4), (0.5, 47.4), (1, 44.8)),
        *((2, 29.8), (4, 23.0), (8, 20.1), (16, 18.7)),
    ],
    "in order": [(0.25, 47.4), (1, 47.0), (4, 46.3), (8, 41.0), (16, 34.4)],
    "small": [(0.25, 24.0), (0.5, 26.0), (1, 36.9), (2, 59.0), (4, 102.0), (8, 191.6)],
    "large": [(0.25, 25.2), (0.5, 28.4), (1, 38.0), (2, 59.4), (4, 104.1), (8, 190.7)],
    "blocks by SMs": [(16, 51.0), (64, 51.3), (128, 51.4), (256, 51.4), (1024, 51.4)],
    "blocks by the engine": [(16, 24.6), (64, 51.1), (128, 52.8), (256, 54.2), (1024, 55.2)],
    "blocks to the host by SMs": [(16, 51.8), (64, 52.0), (256, 52.5), (1024, 52.5)],
    "blocks to the host by the engine": [(16, 22.3), (64, 45.4), (256, 50.9), (1024, 54.6)],
    "both ways, of threads": [(1, 20.4), (4, 34.1), (8, 41.6), (16, 39.6)],
    "scatter, in order": [(4, 37.0), (8, 33.4), (16, 28.0)],
    "scatter by the CPU": [(4, 34.8), (8, 38.0), (16, 37.8)],
    "scatter by the CPU, of threads": [(1, 7.0), (4, 18.6), (8, 31.3), (16, 37.7)],
    "one shot": [(1, 8.5), (2, 11.9), (4, 22.7)],
    "two shots": [(1, 8.9), (2, 14.9), (4, 21.6)],
}  # fmt: skip
MACHINE = Machine("Fake GPU", "580.1", "A processor", 16)
FIGURES = {"reach_bytes": 1 << 30, "both_threads": 4}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache, behind one of the image; afterwards the environment is as before."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("JITKERN_CACHE_DIR", str(folder))
    monkeypatch.setenv("JITKERN_CACHE_PATH", str(tmp_path / "image"))
    monkeypatch.setattr(calibration, "machine_with", lambda gpu, cuda: replace(MACHINE, gpu=gpu))
    settings.cache_clear()
    yield folder
    monkeypatch.undo()
    settings.cache_clear()


def test_figures_of_an_h200() -> None:
    """Those that C++ has for a machine on which nothing was measured are of the same size."""
    figures = calibration.figures_of(CURVES)
    assert 1.0 < figures.pop("reach_bytes") / (1 << 30) < 1.4
    assert 1000 < figures.pop("page_miss_bytes") < 1300
    assert figures == {
        "small_call_bytes": 1 << 20,
        "sm_piece_bytes": 16 << 10,
        "sm_piece_bytes_to_host": 64 << 10,
        "paced_to_host_mb_s": 32_025,
        "both_threads": 8,
        "cpu_scatter_span_bytes": int(0.95 * 8 * (1 << 30)),
        "cpu_scatter_threads": 8,
        "one_shot_bytes": 2 << 20,
    }


def test_a_link_that_never_misses() -> None:
    flat = [(gib, 47.0) for gib, _ in CURVES["as they come"]]
    figures = calibration.figures_of({**CURVES, "as they come": flat})
    assert figures["reach_bytes"] > 1 << 50


def test_a_point_that_other_work_slowed() -> None:
    """It misses more than all rows would: once -0.7 GB came of it."""
    slowed = [(gib, 9.0 if gib == 1 else speed) for gib, speed in CURVES["as they come"]]
    figures = calibration.figures_of({**CURVES, "as they come": slowed})
    assert figures["reach_bytes"] == slowed[0][0] * (1 << 30)


def test_a_pool_too_small_to_tell() -> None:
    """What was not seen is left to the figures of an H200."""
    near = {"as they come": CURVES["as they come"][:4], "in order": [(0.25, 47.0), (4, 46.0)]}
    scatters = {
        "scatter, in order": [(4, 37.0)],
        "scatter by the CPU": [(4, 34.8)],
    }
    figures = calibration.figures_of({**CURVES, **near, **scatters})
    assert "reach_bytes" not in figures
    assert "page_miss_bytes" not in figures


def test_a_way_that_never_wins_waits_for_more_than_was_measured() -> None:
    slow = {
        "scatter by the CPU": [(gib, 5.0) for gib in (4, 8, 16)],
        "both ways, of threads": [(n, 5.0) for n in (1, 4, 8, 16)],
    }
    figures = calibration.figures_of({**CURVES, **slow})
    assert figures["cpu_scatter_span_bytes"] > 16 << 30
    assert figures["both_threads"] == 32


# -- the file --------------------------------------------------------------------------------------


def test_what_is_saved_is_found(cache: Path) -> None:
    assert calibration.find("Fake GPU", 13000) is None
    assert host._measured("Fake GPU", 13000) == {}
    before = os.umask(0o002)  # under which the group's members could write a cache
    try:
        file = calibration.save(MACHINE, FIGURES, curves=CURVES)
    finally:
        os.umask(before)
    assert (file.parent, cache.stat().st_mode & 0o777) == (cache, 0o700)
    found = calibration.find("Fake GPU", 13000)
    assert found is not None
    assert found[0] == file
    assert found[1]["figures"] == FIGURES
    assert calibration.measured_figures("Fake GPU", 13000) == FIGURES
    assert host._measured("Fake GPU", 13000) == FIGURES


def test_another_machine_has_another_file(cache: Path) -> None:
    calibration.save(MACHINE, FIGURES)
    for changed in ({"gpu": "Other"}, {"driver": "580.2"}, {"cpu": "Another"}, {"num_cores": 8}):
        other = replace(MACHINE, **changed)
        assert other.file_name != MACHINE.file_name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calibration.find("Other GPU", 13000) is None


def _of_other(file: Path) -> None:
    content = json.loads(file.read_text())
    content["machine"]["gpu"] = "Other GPU"
    file.write_text(json.dumps(content))


def _with_figures(value: object) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        content = json.loads(file.read_text())
        content["figures"] = value
        file.write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:40]), ""),
        (lambda file: file.write_text('{"format": 2}'), "not of format 1"),
        (_of_other, "of another machine"),
        (_with_figures({"reach_bytes": -1}), "figures are positive ints"),
        (_with_figures({"reach_bytes": True}), "figures are positive ints"),
        (lambda file: file.chmod(0o666), "its mode, 0666, lets .+ write it"),
    ],
)
def test_what_is_damaged_is_ignored_with_a_warning(
    cache: Path, damage: Callable[[Path], object], reason: str
) -> None:
    file = calibration.save(MACHINE, FIGURES)
    damage(file)
    with pytest.warns(RuntimeWarning, match=f"{file.name} is not used: .*{reason}.*calibrate"):
        assert calibration.measured_figures("Fake GPU", 13000) == {}


def test_the_machine_is_described() -> None:
    machine = calibration.machine_with("Fake GPU", 12080)
    assert machine.gpu == "Fake GPU"
    assert machine.num_cores == len(os.sched_getaffinity(0))
    assert machine.driver == (calibration.kernel_driver() or "for CUDA 12.8")
    assert machine.cpu


# -- who asks for it -------------------------------------------------------------------------------

CHECKS = checks_of([CHILD], "check_")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("fake")
    return run_checks(CHILD, folder, "check_", JITKERN_CACHE_DIR=str(folder / "cache"))


@needs_fake_gpu[0]
@needs_fake_gpu[1]
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_fake_gpu(failed: dict[str, str], name: str) -> None:
    assert failed[name] == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedError, match="calibrate: no GPU; run it where the ops will run"):
        calibration.calibrate()
    assert main(["calibrate"]) == 1
    assert "calibrate: no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "says"), [(0o777, "lets others write it"), (None, "cannot be written: ")]
)
def test_a_cache_that_would_not_do_is_refused_before_anything_is_measured(
    cache: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None, says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if mode is None:
        cache.write_bytes(b"a file in its place")
    else:
        (cache / "v1").mkdir(parents=True)
        cache.chmod(mode)
    with pytest.raises(CacheError, match=says):
        calibration.calibrate()


def test_a_plot_that_cannot_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ModuleType("matplotlib.backends.backend_agg")
    backend.FigureCanvasAgg = SimpleNamespace(  # type: ignore[attr-defined]
        get_supported_filetypes=lambda: {"png": "", "svg": ""}
    )
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    (tmp_path / "file").touch()
    for plot, status, says in (
        ("x.foo", 2, "calibrate: --plot: x.foo, expected a name such as x.png"),
        ("x", 2, "calibrate: --plot: x, expected a name such as x.png"),
        (tmp_path / "file" / "x.PNG", 1, "file: cannot be written: "),
    ):
        assert main(["calibrate", "--plot", str(plot)]) == status
        assert says in capsys.readouterr().err
    command._check_plot(tmp_path / "made" / "x.svg")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o755  # for others to look at


def test_too_little_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(calibration, "free_bytes", lambda: 15 << 30)
    says = "calibrate: 15.0 GiB of host memory are free, expected 16 or more, .+; end what takes it"
    with pytest.raises(UnsupportedError, match=says):
        calibration.calibrate()


@pytest.mark.parametrize(
    ("free_gib", "pool_gib"), [(16, 4), (31, 4), (32, 8), (127, 16), (128, 32), (2000, 32)]
)
def test_the_pool_is_a_quarter_of_what_is_free(free_gib: int, pool_gib: int) -> None:
    assert calibration._pool_gib(free_gib << 30) == pool_gib


@pytest.mark.cuda
def test_calibrate(cache: Path, tmp_path: Path) -> None:
    """On a GPU: in use at once, and by the next process."""
    said: list[str] = []
    found = calibration.calibrate(said.append)
    assert found.file.parent == cache
    assert len(said) == 5
    assert found.took_s < 120
    names = set(calibration.module()["figures"](0))
    assert set(found.figures) <= {str(name) for name in names}
    in_use = {str(k): int(v) for k, v in calibration.module()["figures"](0).items()}
    assert found.figures.items() <= in_use.items()
    content = json.loads(found.file.read_text())
    assert content["figures"] == dict(found.figures)
