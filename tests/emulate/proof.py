"""What has been seen to pass, and which mutants to be caught, by the content that decides it.

That is proved.json. All sweeps and all mutants take twenty minutes on two cores. So CI does what
has changed since it was proved: kernel, driver or table. Of the kernels' other mutants it makes one
in `_SAMPLE`, beside the right kernels, so that what makes and runs them is seen to work. ``python
tests/emulate/proof.py`` does all that is not proved, and writes down what it has seen; TEST_ALL=1
has the tests do everything, which the workflow does once a week.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from emulate.mutant import Mutant
from emulate.runner import CSRC, FLAGS, HERE, SUPPORT, Runner, Sweep, facts_of
from emulate.runner import sweeps as all_sweeps

from jitkern.compilers.sources import include_closure, include_dirs

T = TypeVar("T")

FILE = HERE / "proved.json"
_SAMPLE = 96

# Tables of mistakes in the host's C++: their tests, and what these use beside csrc.
_ROOT = HERE.parent.parent
_OF_THE_HOST = {
    "threads": ("tests/test_threads.py", "tests/threads/*"),
    "slot_order": (
        *("tests/offload/test_slot_order.py", "tests/offload/slot_*.py", "tests/fake_driver.c"),
        "tests/threads/program.py",
        *(f"src/jitkern/offload/{name}.py" for name in ("pipeline", "monitor", "depth")),
    ),
    "ring": (
        *("tests/offload/test_ring_producer.py", "tests/offload/ring_race.cc"),
        *("tests/offload/rings.py", "tests/threads/program.py", "examples/ring_producer.cc"),
    ),
}
# What compiles and runs the kernels; not the compiler's version, which differs between machines.
_MEANS = (HERE / "runner.py", HERE / "mutant.py")

# A thread that is to meet a kernel has no turn now and then on a busy machine.
_TRIES = {"race": 8}

# Noticed by a check, not by a crash of something else.
NOTICED = ("FAILED:", "AddressSanitizer", "runtime error:", "emulate:")


def modules() -> list[ModuleType]:
    """Return the modules here that have mutants."""
    found = [import_module(f"emulate.{path.stem}") for path in sorted(HERE.glob("*.py"))]
    return [module for module in found if getattr(module, "MUTANTS", ())]


def mutants() -> list[Mutant]:
    """Return those that a run of the tests makes."""
    proved: list[Mutant] = []
    unproved: list[Mutant] = []
    for module in modules():
        is_proved = _is_proved(_name(module), digest_of(module))
        (proved if is_proved else unproved).extend(module.MUTANTS)
    return unproved + proved[::_SAMPLE]


def unproved_of_the_host(name: str, cases: Sequence[T]) -> Sequence[T]:
    """Return all of them, or none where that name is proved."""
    return [] if _is_proved(name, digest_of_host(name)) else cases


def sweeps() -> list[Sweep]:
    """Return those that a run of the tests makes: of what is not proved or has no mutants."""
    have_mutants = {mutant.sweep.driver for module in modules() for mutant in module.MUTANTS}
    proved = [name for name in have_mutants if _is_proved(f"sweep-{name}", digest_of_sweeps(name))]
    return [sweep for sweep in all_sweeps() if sweep.driver not in proved]


def _is_proved(name: str, digest: str) -> bool:
    return not os.environ.get("TEST_ALL") and json.loads(FILE.read_text()).get(name) == digest


def digest_of(module: ModuleType) -> str:
    """Return a digest of the kernels, the drivers, and what is done to them."""
    table: Sequence[Mutant] = module.MUTANTS
    sources = {driver: _sources_of(driver) for driver in {mutant.sweep.driver for mutant in table}}
    return _digest([sources, FLAGS, list(map(repr, table))])


def digest_of_sweeps(driver: str) -> str:
    """Return a digest of a driver, its kernels, and what it is compiled for."""
    own = [str(sweep.defines) for sweep in all_sweeps() if sweep.driver == driver]
    return _digest([_sources_of(driver), FLAGS, own])


def _sources_of(driver: str) -> list[str]:
    texts = [(HERE / name).read_text() for name in (f"{driver}.cc", *SUPPORT)]
    closure = include_closure(
        "\n".join(['#include "cuda_on_cpu.h"', *texts]),
        include_dirs=[HERE, *include_dirs(CSRC)],
    )
    return [closure.digest, *facts_of(driver), *(path.read_text() for path in _MEANS)]


def digest_of_host(name: str) -> str:
    """Return a digest of the host's C++, of its tests of this name, and what these use."""
    files = [path for path in CSRC.rglob("*") if path.suffix in (".cc", ".h")]
    for given in _OF_THE_HOST[name]:
        found = [path for path in _ROOT.glob(given) if path.is_file()]
        assert found, given
        files += found
    texts = {path.relative_to(_ROOT).as_posix(): path.read_text() for path in files}
    return _digest(texts)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]


def is_caught(mutant: Mutant, store: Path) -> tuple[bool, str]:
    """Make a mutant and run its driver; tell whether that notices it, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        csrc = Path(folder) / "csrc"
        shutil.copytree(CSRC, csrc)
        mutant.apply(csrc)
        runner = Runner(store, csrc)
        program = runner.build(mutant.sweep)
        for _ in range(_TRIES.get(mutant.sweep.driver, 1)):
            done = runner.start(program)
            if done.returncode != 0:
                break
        program.unlink()
    if done.returncode == 0:
        return False, f"nobody noticed: {mutant.old} -> {mutant.new}"
    return any(text in done.stderr for text in NOTICED), done.stderr


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def main() -> int:
    proved = json.loads(FILE.read_text()) if FILE.exists() else {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        store = Path(folder)
        for driver in dict.fromkeys(sweep.driver for sweep in all_sweeps()):
            digest = digest_of_sweeps(driver)
            if proved.get(f"sweep-{driver}") == digest:
                continue
            own = [sweep for sweep in all_sweeps() if sweep.driver == driver]
            wrong = [done for done in pool.map(Runner(store).run, own) if done.returncode != 0]
            print(f"{driver}: {len(own) - len(wrong)} of {len(own)} sweeps passed", flush=True)
            for found in wrong:
                print(found.stderr[-2000:], flush=True)
            failed += len(wrong)
            if not wrong:
                _write(proved, f"sweep-{driver}", digest)
        for module in modules():
            digest = digest_of(module)
            if proved.get(_name(module)) == digest:
                continue
            done = list(pool.map(lambda mutant: is_caught(mutant, store), module.MUTANTS))
            missed = [m for m, (caught, _) in zip(module.MUTANTS, done, strict=True) if not caught]
            print(f"{_name(module)}: {len(done) - len(missed)} of {len(done)} caught", flush=True)
            for mutant in missed:
                print(f"  {mutant.mistake}", flush=True)
            failed += len(missed)
            if not missed:
                _write(proved, _name(module), digest)
    for name, (tests, *_) in _OF_THE_HOST.items():
        digest = digest_of_host(name)
        if proved.get(name) != digest:
            command = [sys.executable, "-m", "pytest", "-q", str(_ROOT / tests)]
            done = subprocess.run(command, env={**os.environ, "TEST_ALL": "1"})
            failed += done.returncode
            if done.returncode == 0:
                _write(proved, name, digest)
    return 1 if failed else 0


def _write(proved: dict[str, str], name: str, digest: str) -> None:
    proved[name] = digest
    FILE.write_text(json.dumps(proved, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
