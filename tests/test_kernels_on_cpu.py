"""The kernels, compiled for the CPU, on buffers of exact size under Address- and UBSan.

Row sizes of 1 to 700 bytes and large ones, vector widths, alignments, padding, indices out of
range, several orders of threads; then kernels that are wrong, of which each is noticed. See
tests/emulate. All of a driver runs again if a source of it has changed: see proved.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from emulate.mutants import Mutant, mutants_of
from emulate.runner import CSRC, Sweep, build, compiler, drivers, run, sources_of, sweeps_of
from proved import unproved

MISTAKES = {
    "read behind a row": "AddressSanitizer",
    "read behind the indices": "AddressSanitizer",
    "write inside a row": "rows: row 2, byte 3 is ",
    "unaligned vector": "misaligned address",
    "unaligned acquire": "misaligned address",
    "signed overflow": "signed integer overflow",
    "barrier not for all": "not every thread came to",
    "lane missing": "not every thread came to",
    "lane outside mask": "leaves out the calling lane",
    "shuffle outside mask": "shuffles from lane 5 outside its mask",
    "cluster barrier not for a block": "not every thread came to",
    "arrived twice": "arrives twice at a barrier of its cluster",
    "block has returned": "heap-use-after-free",
    "block has not begun": "use-after-poison",
    "not in shared memory": "not in own_shared",
    "write behind shared memory": "heap-buffer-overflow",
    "fault not written": "fault word: state 0",
    "fault overwritten": "expected no change",
}
# Noticed by a check, not by a crash of something else.
NOTICED = ("FAILED:", "AddressSanitizer", "runtime error:", "emulate:")
# A thread that is to meet a kernel has no turn now and then on a busy machine.
TRIES = {"race": 8}

_files, _facts = sources_of("self_test")
of_self_test = unproved("kernels self_test", *_files, "tests/test_kernels_on_cpu.py", also=_facts)
SWEEPS, MUTANTS = [], []
for _driver in drivers():
    _files, _facts = sources_of(_driver)
    _mutants = mutants_of(_driver)
    _mark = unproved(f"kernels {_driver}", *_files, also=(_facts, _mutants))
    SWEEPS += [pytest.param(one, marks=_mark, id=str(one)) for one in sweeps_of(_driver)]
    # What mutants are tried on, where that is not one of the sweeps.
    _few = {one.sweep for one in _mutants} - {*sweeps_of(_driver)}
    SWEEPS += [pytest.param(one, marks=_mark, id=f"{one}-few") for one in _few]
    MUTANTS += [pytest.param(one, marks=_mark, id=f"{_driver}-{one.old}") for one in _mutants]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def self_test(folder: Path) -> Path:
    return build(Sweep("self_test"), folder)


@of_self_test
def test_emulation_works(self_test: Path) -> None:
    done = run(self_test)
    assert done.returncode == 0, done.stderr


@of_self_test
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(self_test: Path, mistake: str) -> None:
    done = run(self_test, mistake)
    assert done.returncode != 0
    assert MISTAKES[mistake] in done.stderr


@pytest.mark.parametrize("sweep", SWEEPS)
def test_sweep(folder: Path, sweep: Sweep) -> None:
    done = run(build(sweep, folder))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(folder: Path, tmp_path: Path, mutant: Mutant) -> None:
    csrc = shutil.copytree(CSRC, tmp_path / "csrc")
    mutant.apply(csrc)
    program = build(mutant.sweep, folder, csrc)
    for _ in range(TRIES.get(mutant.driver, 1)):
        done = run(program)
        if done.returncode != 0:
            break
    program.unlink()
    assert done.returncode != 0, f"nobody noticed: {mutant.old} -> {mutant.new}"
    assert any(text in done.stderr for text in NOTICED), done.stderr


def test_every_mutant_still_applies() -> None:
    """Also those that this run does not make."""
    for driver in drivers():
        for mutant in mutants_of(driver):
            assert (CSRC / mutant.file).read_text().count(mutant.old) == mutant.of, mutant
            assert mutant.new != mutant.old


def test_sources_of_a_driver_are_what_it_includes() -> None:
    files = sources_of("store")[0]
    ours = {"csrc/ops/store.cu", "csrc/include/jitkern/copy.cuh", "tests/emulate/fibers.cc"}
    assert all(any(path.endswith(name) for path in files) for name in ours)
    assert not any("unpack" in path for path in files)
