"""What goes wrong on real machines, really done: kills, stops, damage, edits, threads and forks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from children import SLOW, Children, sound, wait_until, write_sources
from needs import needs_cxx, needs_nvrtc

from jitkern.cache.entry import META_NAME
from jitkern.cache.lock import read_holder
from jitkern.cache.store import Cache

# -- races -----------------------------------------------------------------------------------------


@needs_nvrtc
def test_eight_processes_compile_once(children: Children, sources: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    processes = [children.start(sources / "tiny.cu", n=SLOW, go=str(go)) for _ in range(8)]
    children.wait_ready(*processes)
    go.touch()
    reports = [children.report(process) for process in processes]
    assert sum(report["compiles"] for report in reports) == 1
    assert len({report["sha256"] for report in reports}) == 1
    assert [report["warnings"] for report in reports] == [[]] * 8


@needs_nvrtc
def test_four_ranks_report_one_failure(children: Children, sources: Path, tmp_path: Path) -> None:
    text = (sources / "tiny.cu").read_text()
    (sources / "tiny.cu").write_text(text + "template <int N> __device__ float bad = Nonsense;\n")
    go = tmp_path / "go"
    processes = [children.start(sources / "tiny.cu", n=SLOW, go=str(go)) for _ in range(4)]
    children.wait_ready(*processes)
    go.touch()
    reports = [children.report(process) for process in processes]
    assert sum(report["attempts"] for report in reports) == 1
    assert len({report["error"] for report in reports}) == 1
    assert "Nonsense" in reports[0]["error"]
    builder = next(report for report in reports if report["attempts"])
    # 0.3 s for the scheduling of four processes on a busy machine of two cores.
    assert max(report["seconds"] for report in reports) <= 1.5 * builder["seconds"] + 0.3

    (sources / "tiny.cu").write_text(text)  # mended: built at once
    assert children.run(sources / "tiny.cu", n=4)["compiles"] == 1


@needs_cxx
def test_a_failure_in_cxx_ends_when_its_header_is_mended(children: Children, sources: Path) -> None:
    (sources / "value.h").write_text("#define VALUE nonsense\n#define COST 1\n")
    first = children.run(sources / "tiny.cc")
    assert "nonsense" in first["error"]
    second = children.run(sources / "tiny.cc")
    assert second["error"] == first["error"]
    assert (first["attempts"], second["attempts"]) == (1, 0)
    write_sources(sources, value=7)
    assert children.run(sources / "tiny.cc")["value"] == 7


def kill_and_wait(children: Children, file: Path, delay_s: float, **config: Any) -> None:
    """Kill -9 a compiling process after `delay_s`, with a waiter, and see that all goes on."""
    victim = children.start(file, **config)
    children.wait_ready(victim)
    waiter = children.start(file, **config)
    time.sleep(delay_s)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    report = children.report(waiter, timeout_s=30)
    assert "error" not in report
    after = children.run(file, **config)
    assert after["compiles"] == 0
    assert after["cached"] == 1
    assert after["warnings"] == report["warnings"] == []
    wait_until(lambda: children.alive() == [], timeout_s=10)


@needs_nvrtc
@pytest.mark.parametrize("moment", range(8))
def test_killed_while_nvrtc_compiles(
    children: Children, sources: Path, cache_dir: Path, moment: int
) -> None:
    # The compile takes 0.3 s: from the first instruction to beyond the publication.
    delay_s = 0.045 * moment + random.uniform(0, 0.05)
    kill_and_wait(children, sources / "tiny.cu", delay_s, n=100)
    assert sound(cache_dir)


@needs_cxx
@pytest.mark.parametrize("moment", range(4))
def test_killed_while_cxx_compiles(
    children: Children, sources: Path, cache_dir: Path, moment: int
) -> None:
    write_sources(sources, cost=800)
    delay_s = 0.18 * moment + random.uniform(0, 0.18)  # the build takes 0.6 s
    kill_and_wait(children, sources / "tiny.cc", delay_s)
    assert sound(cache_dir)


@needs_nvrtc
def test_a_stopped_holder_is_named_and_passed(
    children: Children, sources: Path, cache_dir: Path
) -> None:
    holder = children.start(sources / "tiny.cu", n=SLOW)
    locks = cache_dir / "v1" / ".locks"
    wait_until(lambda: list(locks.glob("*.holder")))
    holder.send_signal(signal.SIGSTOP)
    try:
        (lock,) = locks.glob("*.lock")
        wait_until(lambda: read_holder(lock))
        waiter = children.start(sources / "tiny.cu", n=SLOW, env={"JITKERN_LOCK_TIMEOUT_S": "0.5"})
        report = children.report(waiter, timeout_s=30)
        assert report["compiles"] == 1
        assert report["waits"] == 1
        (warning,) = report["warnings"]
        assert f"pid {holder.pid} on {os.uname().nodename} since " in warning
        # What it compiled privately is there for everyone: no further waiting.
        assert children.run(sources / "tiny.cu", n=SLOW)["seconds"] < 0.5
    finally:
        holder.send_signal(signal.SIGCONT)
    assert children.report(holder)["elf"]
    assert sound(cache_dir)


# -- damage ----------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :])


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@needs_nvrtc
@needs_cxx
@pytest.mark.parametrize("source", ["tiny.cu", "tiny.cc"])
def test_a_damaged_entry_is_rebuilt_silently(
    children: Children, sources: Path, cache_dir: Path, source: str
) -> None:
    """Cut or flipped, artefact or meta: tests/test_cache.py has all of them, in one process."""
    good = children.run(sources / source)
    (entry,) = Cache(cache_dir).paths()
    for file in entry.iterdir():
        for damage in (halve, flip):
            damage(file)
            report = children.run(sources / source)  # a SIGBUS would be its exit status
            assert (report["compiles"], report["warnings"]) == (1, [])
            assert report.get("value") == good.get("value")
            assert report.get("sha256") == good.get("sha256")
    assert children.run(sources / source)["compiles"] == 0
    assert sound(cache_dir)


# -- nothing stale, nothing twice ------------------------------------------------------------------


@needs_nvrtc
def test_edits_flags_and_archs_find_their_way_back(children: Children, sources: Path) -> None:
    def load(**config: Any) -> tuple[str, int]:
        report = children.run(sources / "tiny.cu", **config)
        return report["sha256"], report["compiles"]

    first, compiles = load()
    assert compiles == 1
    write_sources(sources, value=2)
    os.utime(sources / "value.cuh", (1, 1))  # older than all that was built
    edited, compiles = load()
    assert (edited != first, compiles) == (True, 1)
    flagged, compiles = load(flags=["-lineinfo"])
    assert (flagged != edited, compiles) == (True, 1)
    other, compiles = load(arch="8.0")
    assert (other != edited, compiles) == (True, 1)
    # And back, without a compile.
    assert load(flags=["-lineinfo"]) == (flagged, 0)
    assert load() == (edited, 0)
    write_sources(sources, value=1)
    assert load() == (first, 0)


@needs_cxx
def test_headers_of_cxx_sources_are_part_of_the_key(
    children: Children, sources: Path, tmp_path: Path
) -> None:
    (sources / "value.h").write_text('#include "real.h"\n#define COST 1\n')
    real = tmp_path / "include" / "real.h"
    real.parent.mkdir()
    paths = [str(tmp_path / "first"), str(real.parent)]

    def load(**config: Any) -> tuple[int, int]:
        report = children.run(sources / "tiny.cc", include_paths=paths, **config)
        return report["value"], report["compiles"]

    real.write_text("#define VALUE 10\n")
    assert load() == (10, 1)
    assert load() == (10, 0)
    real.write_text("#define VALUE 20\n")
    os.utime(real, (1, 1))
    assert load() == (20, 1)
    assert load(flags=["-O1"]) == (20, 1)
    real.write_text("#define VALUE 10\n")
    assert load() == (10, 0)
    # A file that would be found first appears.
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "real.h").write_text("#define VALUE 30\n")
    assert load() == (30, 1)
    assert load() == (30, 0)
    (tmp_path / "first" / "real.h").unlink()
    assert load() == (10, 0)


@needs_nvrtc
@needs_cxx
def test_two_checkouts_share_one_entry(children: Children, tmp_path: Path, cache_dir: Path) -> None:
    one = write_sources(tmp_path / "alice" / "checkout")
    other = write_sources(tmp_path / "bob" / "work" / "deep" / "copy")
    for name in ("tiny.cu", "tiny.cc"):
        assert children.run(one / name)["compiles"] == 1
        assert children.run(other / name)["compiles"] == 0
    assert len(Cache(cache_dir).entries()) == 2
    for meta in cache_dir.glob(f"v1/[!.]*/*/{META_NAME}"):
        assert str(tmp_path) not in meta.read_text()


# -- processes and threads -------------------------------------------------------------------------

THREADS = """
import json, multiprocessing, os, sys, threading
from jitkern.cache.stats import stats
from jitkern.jit.loader import load_jit
from jitkern.arch import Arch

def load(n):
    module = load_jit("tiny", str(n), device_files=[sys.argv[1]],
                      device_wrappers=[("tiny", f"Tiny<{n}>")])
    return module.image(Arch(9, 0))

def in_child(n, queue):
    before = stats().compiles.count
    queue.put((len(load(n)), stats().compiles.count - before))

if __name__ == "__main__":
    images = []
    start = threading.Barrier(32)
    def work(n):
        start.wait()
        images.append((n, load(n)))
    threads = [threading.Thread(target=work, args=(4 + i % 2,)) for i in range(32)]
    [t.start() for t in threads]; [t.join() for t in threads]
    result = {"images": len(set(images)), "compiles": stats().compiles.count}

    # Fork while another thread holds the locks of a compile.
    busy = threading.Thread(target=load, args=(150,))
    busy.start()
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        for n in (4, 7):
            child = context.Process(target=in_child, args=(n, queue))
            child.start()
            result[f"{method} {n}"] = queue.get(timeout=60)[1]
            child.join(60)
            result["exit"] = result.get("exit", 0) or child.exitcode
    busy.join()
    print(json.dumps(result))
"""


@needs_nvrtc
def test_threads_fork_and_spawn(children: Children, sources: Path, tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text(THREADS)
    done = subprocess.run(
        [sys.executable, str(script), str(sources / "tiny.cu")],
        env=children.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "images": 2,
        "compiles": 2,
        "fork 4": 0,
        "fork 7": 1,
        "spawn 4": 0,
        "spawn 7": 0,
        "exit": 0,
    }
