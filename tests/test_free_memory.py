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
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used_gib * GIB}\n")
    stat = f"anon 1\nactive_file 1\ninactive_file {cached_gib * GIB}\nslab 1\n"
    (folder / "memory.stat").write_text(stat)


def test_where_linux_says_nothing() -> None:
    assert fs.free_bytes() is None
    assert warming.default_threads() >= 1


def test_of_a_container_of_cgroup_1(tmp_path: Path) -> None:
    of_machine(tmp_path, 100)
    of_group(tmp_path, "max", 90, 0)
    assert fs.free_bytes() == 100 * GIB
    group = tmp_path / "memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(f"{8 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{7 * GIB}\n")
    (group / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {4 * GIB}\n")
    assert fs.free_bytes() == 5 * GIB


def test_of_a_container(tmp_path: Path) -> None:
    of_machine(tmp_path, 100)
    of_group(tmp_path, f"{8 * GIB}", 5, 0)
    assert fs.free_bytes() == 3 * GIB
    of_machine(tmp_path, 2)
    assert fs.free_bytes() == 2 * GIB


def test_files_that_a_container_has_read_are_not_in_the_way(
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


@pytest.mark.parametrize(
    ("line", "group"), [("0::/user/job", "user/job"), ("4:cpu,memory:/job", "memory/job")]
)
def test_of_the_own_group_and_those_above_it(tmp_path: Path, line: str, group: str) -> None:
    """A pool of 3 GiB in a group of 1 GiB was once made, and the process killed."""
    of_machine(tmp_path, 100)
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/x\n{line}\n")
    (tmp_path / group).mkdir(parents=True)
    if group.startswith("memory"):
        (tmp_path / group / "memory.limit_in_bytes").write_text(f"{1 * GIB}\n")
        (tmp_path / group / "memory.usage_in_bytes").write_text("0\n")
    else:
        of_group(tmp_path / group, f"{4 * GIB}", 0, 0)
        of_group(tmp_path / "user", f"{3 * GIB}", 2, 0)
    assert fs.free_bytes() == 1 * GIB


def test_a_group_that_a_container_does_not_see(tmp_path: Path) -> None:
    of_machine(tmp_path, 100)
    (tmp_path / "cgroup").write_text("0::/../../other\n")
    of_group(tmp_path, f"{8 * GIB}", 5, 0)
    assert fs.free_bytes() == 3 * GIB
