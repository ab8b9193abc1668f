"""Ranks as threads under ThreadSanitizer, by the CPU's form of the protocol."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from needs import needs_cxx

from jitkern.compilers.sources import CSRC, include_dirs


@needs_cxx
def test_no_races(tmp_path: Path) -> None:
    program = tmp_path / "race"
    flags = ("-std=c++17", "-O1", "-g1", "-fsanitize=thread", "-pthread")
    cxx = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    sources = [str(Path(__file__).with_name("peer_race.cc")), f"{CSRC}/comm/peer_reduce_by_cpu.cc"]
    includes = [f"-I{path}" for path in include_dirs(CSRC)]
    command = [*cxx, *flags, *includes, *sources, "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=97:atexit_sleep_ms=0"}
    done = subprocess.run([str(program)], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
