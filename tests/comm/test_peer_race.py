"""Ranks as threads under ThreadSanitizer, and the CPU's form of the protocol made wrong."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from needs import needs_cxx

from jitkern.compilers.sources import CSRC, include_dirs

pytestmark = needs_cxx
HERE = Path(__file__).resolve().parent
CPU = "comm/peer_reduce_by_cpu.cc"


@dataclass(frozen=True)
class Mutant:
    mistake: str
    old: str
    new: str

    def apply(self, csrc: Path) -> None:
        text = (csrc / CPU).read_text()
        assert text.count(self.old) == 1, f"{self.old!r} is not once in {CPU}"
        (csrc / CPU).write_text(text.replace(self.old, self.new))


PUBLISH = "__atomic_store_n(&control->epochs[0], epoch, __ATOMIC_RELEASE);"
MUTANTS = (
    Mutant("stores that are not atomic", PUBLISH, "control->epochs[0] = epoch;"),
    Mutant("stores that order nothing", PUBLISH, PUBLISH.replace("RELEASE", "RELAXED")),
    Mutant("one half", "epoch % 2 * half_bytes", "0"),
)


def race(folder: Path, csrc: Path) -> subprocess.CompletedProcess[str]:
    program = folder / "race"
    flags = ("-std=c++17", "-O1", "-g1", "-fsanitize=thread", "-pthread")
    cxx = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    sources = [str(HERE / "peer_race.cc"), str(csrc / CPU)]
    includes = [f"-I{path}" for path in include_dirs(csrc)]
    command = [*cxx, *flags, *includes, *sources, "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=97:atexit_sleep_ms=0"}
    return subprocess.run([str(program)], env=env, capture_output=True, text=True, timeout=100)


def test_no_races(tmp_path: Path) -> None:
    done = race(tmp_path, CSRC)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.mistake.replace(" ", "-"))
def test_what_is_wrong_is_noticed(tmp_path: Path, mutant: Mutant) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    mutant.apply(csrc)
    done = race(tmp_path, csrc)
    assert done.returncode != 0, f"nobody noticed: {mutant.old} -> {mutant.new}"
    assert "FAILED:" in done.stderr or "ThreadSanitizer" in done.stderr, done.stderr
