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
from children import MALLORY, SLOW, Children, needs_root, sound, wait_until, write_sources
from needs import needs_cxx, needs_nvrtc

from jitkern.cache.lock import read_holder


def reports_of(count: int, children: Children, file: Path) -> list[dict[str, Any]]:
    """Have `count` processes load a kernel at once."""
    go = file.with_name("go")
    processes = [children.start(file, n=SLOW, go=str(go)) for _ in range(count)]
    children.wait_ready(*processes)
    go.touch()
    return [children.report(process) for process in processes]


@needs_nvrtc
def test_four_processes_compile_once(children: Children, sources: Path) -> None:
    reports = reports_of(4, children, sources / "tiny.cu")
    assert sum(report["compiles"] for report in reports) == 1
    assert len({report["sha256"] for report in reports}) == 1
    assert [report["warnings"] for report in reports] == [[]] * 4


@pytest.mark.parametrize(
    ("source", "config", "moment_s"),
    [
        # The compile takes 0.3 s: from the first instruction to beyond the publication.
        *(pytest.param("tiny.cu", {"n": 100}, 0.18 * i, marks=needs_nvrtc) for i in range(2)),
        pytest.param("tiny.cc", {}, 0.1, marks=needs_cxx),  # 0.6 s
    ],
)
def test_killed_while_it_compiles(
    children: Children,
    sources: Path,
    cache_dir: Path,
    source: str,
    config: dict[str, Any],
    moment_s: float,
) -> None:
    """Kill -9, with another process that waits for it."""
    file = write_sources(sources, cost=800) / source
    victim = children.start(file, **config)
    children.wait_ready(victim)
    waiter = children.start(file, **config)
    time.sleep(moment_s + random.uniform(0, 0.18 if source == "tiny.cu" else 0.5))
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    report = children.report(waiter, timeout_s=30)
    assert "error" not in report
    after = children.run(file, **config)
    assert (after["compiles"], after["cached"]) == (0, 1)
    assert after["warnings"] == report["warnings"] == []
    assert sound(cache_dir)


@needs_nvrtc
def test_a_stopped_holder_is_named_and_passed(
    children: Children, sources: Path, cache_dir: Path
) -> None:
    holder = children.start(sources / "tiny.cu", n=SLOW)
    locks = cache_dir / "v1" / ".locks"
    wait_until(lambda: list(locks.glob("*.lock")))
    holder.send_signal(signal.SIGSTOP)
    try:
        (lock,) = locks.glob("*.lock")
        wait_until(lambda: read_holder(lock))
        waiter = children.start(sources / "tiny.cu", n=SLOW, env={"JITKERN_LOCK_TIMEOUT_S": "0.5"})
        report = children.report(waiter, timeout_s=30)
        assert (report["compiles"], report["waits"]) == (1, 1)
        (warning,) = report["warnings"]
        assert f"pid {holder.pid} on {os.uname().nodename} since " in warning
        # What it compiled privately is there for everyone: no further waiting.
        assert children.run(sources / "tiny.cu", n=SLOW)["seconds"] < 0.5
    finally:
        holder.send_signal(signal.SIGCONT)
    assert children.report(holder)["elf"]
    assert sound(cache_dir)


@needs_root
@needs_cxx
def test_a_cache_of_somebody_else_is_named_and_not_used(
    children: Children, sources: Path, cache_dir: Path
) -> None:
    """A library of anybody's was loaded into processes of root."""
    children.run(sources / "tiny.cc")
    subprocess.run(["chown", "-R", f"{MALLORY}:{MALLORY}", str(cache_dir)], check=True)
    before = [(path, path.lstat().st_mtime_ns) for path in sorted(cache_dir.rglob("*"))]
    report = children.run(sources / "tiny.cc")
    assert (report["cached"], report["compiles"]) == (0, 1)
    (warning,) = report["warnings"]
    assert f"{cache_dir}: it belongs to uid {MALLORY}; chown -R 0 {cache_dir} if all " in warning
    assert "what this process compiles is kept in memory " in warning
    # Neither locks nor times of use.
    assert [(path, path.lstat().st_mtime_ns) for path in sorted(cache_dir.rglob("*"))] == before


THREADS = """
import json, multiprocessing, sys
from concurrent.futures import ThreadPoolExecutor
from jitkern.arch import Arch
from jitkern.cache.stats import stats
from jitkern.jit.loader import load_jit

def load(n):
    wrappers = [("tiny", f"Tiny<{n}>")]
    module = load_jit("tiny", str(n), device_files=[sys.argv[1]], device_wrappers=wrappers)
    return module.image(Arch(9, 0))

def in_child(n, queue):
    before = stats().compiles
    load(n)
    queue.put(stats().compiles - before)

if __name__ == "__main__":
    pool = ThreadPoolExecutor(32)
    images = set(pool.map(load, [4, 5] * 16))
    compiles = [len(images), stats().compiles]
    busy = pool.submit(load, 150)  # fork while another thread holds the locks of a compile
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        for n in (4, 7):
            child = context.Process(target=in_child, args=(n, queue))
            child.start()
            child.join(60)
            assert child.exitcode == 0, f"{method}: {child.exitcode}, None: it hangs"
            compiles.append(queue.get(timeout=5))
    busy.result()
    print(json.dumps(compiles))
"""


@needs_nvrtc
def test_threads_fork_and_spawn(children: Children, sources: Path, tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text(THREADS)
    command = [sys.executable, str(script), str(sources / "tiny.cu")]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, env=children.env, **how)
    assert done.returncode == 0, done.stderr
    # Images and compiles of the threads; compiles of two forked and of two spawned processes.
    assert json.loads(done.stdout) == [2, 2, 0, 1, 0, 0]
