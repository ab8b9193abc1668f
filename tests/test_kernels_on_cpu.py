"""The kernels, compiled for the CPU, on buffers of exact size under Address- and UBSan.

Row sizes of 1 to 700 bytes and large ones, vector widths, alignments, padding, indices out of
range, several orders of threads; then kernels that are wrong, of which each is noticed. See
tests/emulate. All are slow: run those of an op by ``-k NAME`` after a change of its kernel.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from emulate.mutants import RACE, Mutant, mutants_of
from emulate.runner import CSRC, Sweep, build, compiler, drivers, run, sweeps_of

MISTAKES = {
    "read behind a row": "AddressSanitizer",
    "read behind the indices": "AddressSanitizer",
    "write inside a row": "rows: row 2, byte 3 is ",
    "unaligned vector": "misaligned address",
    "unaligned fresh load": "misaligned address",
    "signed overflow": "signed integer overflow",
    "barrier not for all": "not every thread came to",
    "lane missing": "not every thread came to",
    "lane outside mask": "leaves out the calling lane",
    "shuffle outside mask": "shuffles from lane 5 outside its mask",
    "fault not written": "fault word: state 0",
    "fault overwritten": "expected no change",
}
# Noticed by a check, not by a crash of something else.
NOTICED = ("FAILED:", "AddressSanitizer", "runtime error:", "emulate:")
RACE_TRIES = 8  # now and then the other thread has no turn on a busy machine
RACED = ("store", "index", "pair_copy", "pair_lists")

SWEEPS, MUTANTS = [], []
for _driver in drivers():
    SWEEPS += [pytest.param(sweep, id=str(sweep)) for sweep in sweeps_of(_driver)]
    # Sweeps that only mutants run have to pass without a mutation.
    _few = {mutant.sweep for mutant in mutants_of(_driver)} - {*sweeps_of(_driver)}
    _few |= {Sweep(_driver, RACE)} if _driver in RACED else set()
    SWEEPS += [pytest.param(sweep, id=f"{sweep}-few") for sweep in sorted(_few, key=str)]
    MUTANTS += [
        pytest.param(mutant, id=f"{_driver}-{mutant.old}") for mutant in mutants_of(_driver)
    ]


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


@pytest.mark.slow
def test_emulation_works(self_test: Path) -> None:
    done = run(self_test)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(self_test: Path, mistake: str) -> None:
    done = run(self_test, mistake)
    assert done.returncode != 0
    assert MISTAKES[mistake] in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sweep", SWEEPS)
def test_sweep(folder: Path, sweep: Sweep) -> None:
    done = run(build(sweep, folder))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(folder: Path, tmp_path: Path, mutant: Mutant) -> None:
    csrc = shutil.copytree(CSRC, tmp_path / "csrc")
    mutant.apply(csrc)
    program = build(mutant.sweep, folder, csrc)
    for _ in range(RACE_TRIES if mutant.is_race else 1):
        done = run(program)
        if done.returncode != 0:
            break
    program.unlink()
    assert done.returncode != 0, f"nobody noticed: {mutant.old} -> {mutant.new}"
    assert any(text in done.stderr for text in NOTICED), done.stderr


def test_every_mutant_still_applies() -> None:
    for driver in drivers():
        for mutant in mutants_of(driver):
            assert (CSRC / mutant.file).read_text().count(mutant.old) == mutant.of, mutant
            assert mutant.new != mutant.old
