"""The kernels, compiled for the CPU, on buffers of exact size under Address- and UBSan.

Every row size of 1 to 700 bytes and large ones, vector widths, alignments, padding, indices out of
range, several orders of threads; see tests/emulate. ``python tests/emulate/runner.py --all`` runs
all combinations. Those of what has changed since they were proved: see emulate/proof.py.
"""

from __future__ import annotations

import json

import pytest
from emulate import proof
from emulate.runner import Runner, Sweep, compiler, forget_old

MISTAKES = {
    "read behind a row": "AddressSanitizer",
    "read behind the buffer": "AddressSanitizer",
    "write behind a row": "AddressSanitizer",
    "write inside a row": "rows: row 2, byte 3 is ",
    "read behind the indices": "AddressSanitizer",
    "unaligned vector": "misaligned address",
    "signed overflow": "signed integer overflow",
    "barrier not for all": "not every thread came to",
    "lane missing": "not every thread came to",
    "lane outside mask": "leaves out the calling lane",
    "shuffle outside mask": "shuffles from lane 5 outside its mask",
    "barrier without fibers": "started without fibers",
    "cluster barrier not for a block": "not every thread came to",
    "cluster barrier not for a thread": "not every thread came to",
    "second cluster barrier not for all": "not every thread came to",
    "arrived twice": "arrives twice at a barrier of its cluster",
    "waits without having arrived": "waits at a barrier that it has not come to",
    "half a cluster": "not of whole clusters",
    "block has returned": "heap-use-after-free",
    "asked of a block that has returned": "heap-use-after-free",
    "block has not begun": "use-after-poison",
    "no such block": "a block that the cluster has not",
    "not in shared memory": "not in own_shared",
    "write behind shared memory": "heap-buffer-overflow",
    "unaligned shared memory": "misaligned address",
    "shared memory without fibers": "started without fibers",
    "unaligned fresh load": "misaligned address",
    "unaligned acquire": "misaligned address",
    "unaligned release": "misaligned address",
    "unaligned claim": "misaligned address",
    "fresh load behind a row": "AddressSanitizer",
    "acquire behind the buffer": "AddressSanitizer",
    "fault not written": "fault word: state 0",
    "fault overwritten": "expected no change",
}


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest) -> Runner:
    try:
        compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    store = request.config.cache.mkdir("kernels_on_cpu")
    forget_old(store)
    return Runner(store)


def test_emulation_works(runner: Runner) -> None:
    done = runner.run(Sweep("self_test"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(runner: Runner, mistake: str) -> None:
    done = runner.run(Sweep("self_test"), mistake)
    assert done.returncode != 0
    assert MISTAKES[mistake] in done.stderr


@pytest.mark.parametrize("sweep", proof.sweeps(), ids=str)
def test_sweep(runner: Runner, sweep: Sweep, record_property: pytest.RecordProperty) -> None:
    done = runner.run(sweep)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["runs"] > 0
    for name, value in said.items():
        record_property(name, value)
