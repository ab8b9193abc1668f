"""The sweeps of test_kernels_on_cpu.py, held to kernels that are wrong: they see each mistake.

All mutants of what has changed since they were proved, some of the others: see emulate/proof.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from emulate import proof
from emulate.mutant import Mutant
from emulate.runner import Runner, Sweep, compiler

MUTANTS = proof.mutants()


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest) -> Path:
    try:
        compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    return Path(request.config.cache.mkdir("kernels_on_cpu"))


@pytest.mark.parametrize("sweep", dict.fromkeys(mutant.sweep for mutant in MUTANTS), ids=str)
def test_right_kernels_pass(store: Path, sweep: Sweep) -> None:
    done = Runner(store).run(sweep)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{Path(mutant.file).stem}-{mutant.mistake}"
)
def test_mutant_is_caught(store: Path, mutant: Mutant) -> None:
    caught, said = proof.is_caught(mutant, store)
    assert caught, said


@pytest.mark.parametrize("module", proof.modules(), ids=lambda module: module.__name__)
def test_every_mutant_still_applies(module: object) -> None:
    """Also those that this run does not make."""
    for mutant in module.MUTANTS:
        text = (proof.CSRC / mutant.file).read_text()
        assert text.count(mutant.old) == mutant.of, mutant
        assert mutant.new != mutant.old


@contextmanager
def longer(named: str) -> Iterator[None]:
    """As if there were one more line in the files of this name."""
    pattern = re.compile(rf"/{re.escape(named)}$")
    read = Path.read_bytes, Path.read_text

    def read_bytes(path: Path) -> bytes:
        return read[0](path) + (b"\n// more" if pattern.search(str(path)) else b"")

    def read_text(path: Path, *args: object, **options: object) -> str:
        text = read[1](path, *args, **options)
        return text + ("\n// more" if pattern.search(str(path)) else "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_bytes)
        patch.setattr(Path, "read_text", read_text)
        yield


HOST = {"threads", "slot_order", "ring"}


@pytest.mark.parametrize(
    ("named", "asks"),
    [
        ("csrc/host/staging.cc", HOST),
        ("threads/program.py", HOST),
        ("threads/staging.cc", {"threads"}),
        ("tests/fake_driver.c", {"slot_order"}),
        ("offload/pipeline.py", {"slot_order"}),
        ("offload/rings.py", {"ring"}),
        ("offload/ring_child.py", set()),
    ],
)
def test_a_change_of_the_host_asks_for_a_new_proof(named: str, asks: set[str]) -> None:
    before = {name: proof.digest_of_host(name) for name in HOST}
    with longer(named):
        assert {name for name in HOST if proof.digest_of_host(name) != before[name]} == asks


def test_a_change_asks_for_a_new_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel, of what it includes, of a driver, of a table: not of another op's."""
    digests = {module.__name__: proof.digest_of(module) for module in proof.modules()}
    of_sweeps = {name: proof.digest_of_sweeps(name) for name in ("store", "unpack")}

    def changed(named: str) -> set[str]:
        with longer(named):
            now = {module.__name__: proof.digest_of(module) for module in proof.modules()}
            swept = {name for name, one in of_sweeps.items() if proof.digest_of_sweeps(name) != one}
        found = {name.rpartition(".")[2] for name in now if now[name] != digests[name]}
        assert swept == found & {*of_sweeps}
        return found

    assert changed("ops/store.cu") == {"store", "race"}
    assert changed("emulate/unpack.cc") == {"unpack"}
    for of_all in ("emulate/fibers.cc", "emulate/runner.py"):
        assert changed(of_all) == {one.__name__.split(".")[1] for one in proof.modules()}
    assert {"store", "index", "pair_copy"} <= changed("jitkern/copy.cuh")
    (store,) = (module for module in proof.modules() if module.__name__ == "emulate.store")
    monkeypatch.setattr(store, "MUTANTS", store.MUTANTS[1:])
    assert proof.digest_of(store) != digests["emulate.store"]
