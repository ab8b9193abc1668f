"""How much memory is free, and how many compiles that allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitkern import fs, warming

GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(fs, "_CGROUP", tmp_path)
    monkeypatch.setattr(fs, "_MEMBERSHIP", tmp_path / "cgroup")


def of_machine(folder: Path, gib: int) -> None:
    text = f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:   {gib << 20} kB\nBuffers: 1 kB\n"
    (folder / "meminfo").write_text(text)


def of_group(folder: Path, limit: str, used_gib: int, cached_gib: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used_gib * GIB}\n")
    stat = f"anon 1\nactive_file 1\ninactive_file {cached_gib * GIB}\nslab 1\n"
    (folder / "memory.stat").write_text(stat)


def of_group_1(folder: Path, limit_gib: int, used_gib: int, cached_gib: int) -> None:
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit_gib * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used_gib * GIB}\n")
    (folder / "memory.stat").write_text(
        f"inactive_file 1\ntotal_inactive_file {cached_gib * GIB}\n"
    )


def test_of_a_container(tmp_path: Path) -> None:
    assert fs.free_bytes() is None  # Linux says nothing
    assert warming.default_threads() >= 1
    of_machine(tmp_path, 100)
    of_group(tmp_path, "max", 90, 0)
    assert fs.free_bytes() == 100 * GIB
    of_group(tmp_path, f"{8 * GIB}", 5, 0)
    assert fs.free_bytes() == 3 * GIB
    of_machine(tmp_path, 2)
    assert fs.free_bytes() == 2 * GIB
    (tmp_path / "cgroup").write_text("0::/../../other\n")  # a group that a container does not see
    of_group(tmp_path, f"{8 * GIB}", 7, 0)
    assert fs.free_bytes() == 1 * GIB


def test_files_that_a_container_has_read_count_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux drops them; once a container that had read a model's weights compiled one at a time."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    of_machine(tmp_path, 100)
    of_group(tmp_path, f"{8 * GIB}", 8, 7)
    assert fs.free_bytes() == 7 * GIB
    assert warming.default_threads() == 8
    of_group(tmp_path, f"{8 * GIB}", 8, 0)
    assert fs.free_bytes() == 0
    assert warming.default_threads() == 1
    of_group_1(tmp_path / "memory", 8, 7, 4)
    of_group(tmp_path, "max", 8, 0)
    assert fs.free_bytes() == 5 * GIB


@pytest.mark.parametrize("line", ["0::/user/job", "4:cpu,memory:/job"])
def test_of_the_own_group_and_those_above_it(tmp_path: Path, line: str) -> None:
    """A pool of 3 GiB in a group of 1 GiB was once made, and the process killed."""
    of_machine(tmp_path, 100)
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/x\n{line}\n")
    if "memory" in line:
        of_group_1(tmp_path / "memory" / "job", 1, 0, 0)
    else:
        of_group(tmp_path / "user" / "job", f"{4 * GIB}", 0, 0)
        of_group(tmp_path / "user", f"{3 * GIB}", 2, 0)
    assert fs.free_bytes() == 1 * GIB
