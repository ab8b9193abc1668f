"""`jitkern.warm()` and `jitkern warm`: what they return, say, write, and leave alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_toolkit import calls
from needs import needs_cxx, needs_nvrtc
from tiny import SM_90, compiles, tiny

import jitkern
from jitkern.arch import Arch, target_archs
from jitkern.cache import get
from jitkern.cache.store import Cache
from jitkern.cli import main
from jitkern.env import settings
from jitkern.errors import CacheError, FrozenError, WarmError
from jitkern.host import module as host
from jitkern.jit import native
from jitkern.jit.loader import load_aot, load_jit
from jitkern.warming import Outcome

Capture = pytest.CaptureFixture[str]

TWICE = """\
#include <cstdint>
struct Any { int32_t type_index; int32_t padding; int64_t value; };
extern "C" __attribute__((visibility("default")))
int __tvm_ffi_twice(void*, const Any* args, int32_t, Any* result) {
  *result = {1, 0, args->value * 2};
  return 0;
}
"""


@pytest.fixture(scope="module", autouse=True)
def host_module(session_cache: Path) -> None:
    """Build the host module in the session's cache, not once more in each test's empty one."""
    host.module()


@pytest.fixture
def record(folder: Path, tmp_path: Path, use: Callable[..., None]) -> Path:
    """A kernel and a library, recorded; the cache is empty again, and none of it in memory."""
    file = tmp_path / "run.jsonl"
    (folder / "twice.cc").write_text(TWICE)
    use(CACHE_DIR=tmp_path / "recorded", RECORD=file)
    tiny().image(SM_90)
    load_aot("twice", cpp_files=["twice.cc"])
    file.chmod(0o644)
    use(CACHE_DIR=tmp_path / "cache", RECORD="")
    return file


def rows(outcomes: list[Outcome]) -> list[tuple[str, str, str, str]]:
    assert outcomes[0].name == "host module"
    return [(one.name, one.parameters, one.arch, one.source) for one in outcomes[1:]]


def run(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    status = main(["warm", *map(str, argv)])
    out, err = capsys.readouterr()
    return status, out, err


# -- from Python -----------------------------------------------------------------------------------


@needs_nvrtc
def test_warm_returns_what_became_of_each(empty_cache: Path) -> None:
    told: list[tuple[str, int, int]] = []
    how: dict[str, Any] = {"element_sizes": [60424], "archs": ["9.0", Arch(8, 0), "sm_90"]}
    found = jitkern.warm(
        ["store_cache", "store"], **how, progress=lambda job, *n: told.append((str(job), *n))
    )
    assert {(one.name, one.arch, one.source) for one in found[1:]} == {
        ("store", "9.0", "compiled"),
        ("store", "8.0", "compiled"),
    }
    assert all(one.parameters.startswith("60424, ") for one in found[1:])
    assert all(one.ms and one.bytes and one.error is None for one in found[1:])
    assert [(done, of) for _, done, of in told] == [(n + 1, 4) for n in range(4)]
    assert all(name.startswith("store<60424, ") for name, _, _ in told)
    assert {one.source for one in jitkern.warm(["store"], **how)[1:]} == {"memo"}
    assert len(Cache(empty_cache).entries()) == 4


def test_warm_with_nothing_else_is_the_host_module(capsys: Capture, empty_cache: Path) -> None:
    """A FrozenError advises `jitkern warm`, which was a usage error."""
    (found,) = jitkern.warm()
    assert (found.name, found.arch, found.parameters) == ("host module", "", "")
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    assert re.search(r"^host module .* (compiled|cached|shipped) ", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"ops": ["frob"]}, ValueError, "warm: ops: 'frob', expected one of store_cache, store, "),
        ({"ops": "store"}, TypeError, "warm: ops: 'store', expected a list, such as ['store']"),
        ({"ops": ["store"]}, ValueError, "warm: ops: 'store', expected along with element_sizes, "),
        (
            {"ops": ["merge_state", "store_cache"], "element_sizes": [656]},
            ValueError,
            "warm: ops: 'merge_state', expected along with head_dims, elements of a head",
        ),
        (
            {"ops": ["store"], "element_sizes": [656], "head_dims": [64]},
            ValueError,
            "warm: head_dims: [64], expected an op of merge_states, merge_state, merge",
        ),
        ({"element_sizes": 656}, TypeError, "warm: element_sizes: 656, expected a list, such as "),
        ({"element_sizes": [0]}, ValueError, "warm: element_sizes: 0, expected bytes of a row, 1 "),
        ({"out": 5}, TypeError, "warm: out: 5, expected a path"),
        ({"head_dims": [True]}, ValueError, "warm: head_dims: True, expected elements of a head, "),
        ({"archs": "9.0"}, TypeError, "warm: archs: '9.0', expected a list, such as ['9.0']"),
        ({"archs": ["99"]}, ValueError, "warm: archs: '99', expected one of 7.5, "),
        ({"files": [5]}, TypeError, "warm: files: 5, expected a path"),
        ({"files": ["no.jsonl"]}, FileNotFoundError, "[Errno 2] warm: files: no.jsonl: No such "),
        ({"files": [__file__]}, ValueError, f"warm: files: {__file__}:1: not a recorded spec"),
        ({"threads": 0}, ValueError, "warm: threads: 0, expected 1 or more"),
        ({"check": True, "out": "x"}, ValueError, "warm: out: given along with check, which write"),
        ({"element_sizes": [656]}, ValueError, "warm: archs: none is given, JITKERN_ARCH is not s"),
    ],
)
def test_arguments_that_make_no_sense(
    empty_cache: Path, use: Callable[..., None], how: dict[str, Any], error: type, says: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(says)}"):
        jitkern.warm(**how)
    assert not empty_cache.exists()


@needs_nvrtc
@needs_cxx
def test_a_failure_carries_what_became_of_all(
    folder: Path, record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    settings.cache_clear()
    with pytest.raises(WarmError) as caught:
        jitkern.warm(files=[record], archs=["8.0"], out=tmp_path / "out")
    assert str(caught.value).startswith(
        "1 of 3 failed: twice: CXX: '/nowhere/c++' was not found; install g++"
    )
    assert rows(caught.value.outcomes) == [
        ("tiny", "4", "8.0", "compiled"),
        ("twice", "", "", "failed"),
    ]
    failed = caught.value.outcomes[2]
    assert (failed.ms, failed.bytes, str(failed.error)[:4]) == (None, None, "CXX:")
    assert "tiny" in {entry.key.op for entry in Cache(tmp_path / "out").entries()}


# -- looking only ----------------------------------------------------------------------------------


@needs_nvrtc
@needs_cxx
def test_check_lists_what_is_missing_and_compiles_nothing(
    capsys: Capture, record: Path, tmp_path: Path, use: Callable[..., None]
) -> None:
    before = compiles()
    status, out, err = run(capsys, "--replay", record, "--check")
    assert status == 1
    assert re.findall(r"^(tiny|twice) .* missing ", out, re.MULTILINE) == ["tiny", "twice"]
    assert "host module" not in out  # it is there
    assert err == ("jitkern: error: 2 of 3 missing; the same without --check compiles them\n")
    assert rows(jitkern.warm(files=[record], check=True)) == [
        ("tiny", "4", "9.0", "missing"),
        ("twice", "", "", "missing"),
    ]
    assert compiles() == before
    assert not (tmp_path / "cache").exists()

    assert run(capsys, "--replay", record)[0] == 0
    before = compiles()
    for nvrtc in ("", "/nowhere/libnvrtc.so"):  # without a compiler, code by any counts
        use(NVRTC=nvrtc)
        status, out, err = run(capsys, "--replay", record, "--check")
        assert (status, err) == (0, "")
        assert "missing" not in out
    assert run(capsys, "--replay", record, "--check", "--arch", "8.0")[0] == 1
    assert compiles() == before


# -- JSON ------------------------------------------------------------------------------------------


@needs_nvrtc
def test_json(capsys: Capture, empty_cache: Path, tmp_path: Path) -> None:
    argv = ("--element-size", "60456", "--op", "store_cache", "--arch", "9.0", "--json")
    status, out, err = run(capsys, *argv, "--check")
    assert status == 1
    assert {job["source"] for job in json.loads(out)["jobs"][1:]} == {"missing"}
    status, out, err = run(capsys, *argv)
    assert (status, err) == (0, "")
    value = json.loads(out)
    assert (value["version"], value["cache"]) == (1, str(empty_cache))
    assert value.keys() == {"version", "cache", "seconds", "jobs"}
    _, first, second = value["jobs"]
    assert first.keys() == {"name", "parameters", "arch", "source", "ms", "bytes", "error"}
    for job in (first, second):
        assert (job["name"], job["arch"], job["source"]) == ("store", "9.0", "compiled")
        assert job["bytes"] > 1000
        assert job["error"] is None


# -- what is written -------------------------------------------------------------------------------


@needs_nvrtc
@needs_cxx
def test_out_has_the_libraries_too(
    capsys: Capture, record: Path, tmp_path: Path, use: Callable[..., None]
) -> None:
    """Only kernels were copied: a server with that directory compiled its libraries."""
    status, out, err = run(capsys, "--replay", record, "--out", tmp_path / "out")
    assert (status, err) == (0, "")
    names = sorted(entry.key.op for entry in Cache(tmp_path / "out").entries())
    assert names == ["jitkern_host", "tiny", "twice"]
    assert f"\n3 entries in {tmp_path / 'out'}; use them with JITKERN_CACHE_PATH=" in out
    use(CACHE_DIR=tmp_path / "another", CACHE_PATH=tmp_path / "out")
    before = compiles()
    tiny().image(SM_90)
    assert load_aot("twice", cpp_files=["twice.cc"])["twice"](4) == 8
    assert compiles() == before


@needs_nvrtc
@needs_cxx
def test_a_hit_is_a_hit_where_nothing_can_be_written(
    capsys: Capture, record: Path, tmp_path: Path, use: Callable[..., None]
) -> None:
    """With everything there, the status was 1: "cannot be written"."""
    jitkern.warm(files=[record])
    use(CACHE_PATH=tmp_path / "cache", CACHE_DIR="/proc/version/cache")
    status, out, err = run(capsys, "--replay", record)
    assert (status, err) == (0, "")
    assert len(re.findall(r" cached ", out)) >= 2
    status, _, err = run(capsys, "--replay", record, "--arch", "8.0")
    assert status == 1
    assert err == (
        "jitkern: error: /proc/version/cache: cannot be written: Not a directory; set "
        "JITKERN_CACHE_DIR to a directory of yours\n"
    )
    with pytest.raises(CacheError, match="cannot be written"):
        jitkern.warm(files=[record], archs=["8.0"])


@needs_nvrtc
@needs_cxx
def test_a_frozen_process_says_what_is_the_case(
    capsys: Capture, record: Path, use: Callable[..., None]
) -> None:
    """It advised the very command that was run."""
    use(FREEZE="1")
    status, out, err = run(capsys, "--replay", record)
    assert (status, out) == (1, "")
    assert err == (
        "jitkern: error: warm: tiny<4> for 9.0 and 1 more: missing, and JITKERN_FREEZE=1 is set, "
        "which forbids to compile: warm without it\n"
    )
    jitkern.freeze()
    use(FREEZE="warn")
    with pytest.raises(FrozenError, match=r"missing, and jitkern\.freeze\(\) was called, which"):
        jitkern.warm(files=[record])
    get._frozen = ""
    with pytest.warns(RuntimeWarning, match="frozen to warn"):  # which forbids nothing
        jitkern.warm(files=[record])
    use(FREEZE="1")
    assert run(capsys, "--replay", record)[0] == 0


# -- names -----------------------------------------------------------------------------------------


# -- for which GPU ---------------------------------------------------------------------------------


def test_a_gpu_that_is_there_goes_before_the_variable(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library for another GPU would not run on it."""
    use(ARCH="9.0, 10.0, sm_90")
    assert target_archs() == (Arch(9, 0), Arch(10, 0))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert target_archs() == (Arch(8, 0),)


@needs_cxx
def test_cuda_files_are_built_for_each_of_the_variable(
    folder: Path,
    empty_cache: Path,
    use: Callable[..., None],
    fake_nvcc: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the first one's library was built, and nobody said so."""
    text = TWICE.replace("args->value * 2", "FAKE_ARCH")
    (folder / "which.cu").write_text(text)
    use(ARCH="9.0,10.0")
    loaded: list[Path] = []
    real = native.load_library

    def load_library(name: str, artefact: Path, **options: Any) -> Any:
        loaded.append(artefact)
        return real(name, artefact, **options)

    monkeypatch.setattr(native, "load_library", load_library)
    assert load_jit("which", cuda_files=["which.cu"])["twice"](0) == 90
    assert calls(fake_nvcc) == 2
    assert len(loaded) == 1  # static initialisers of the others have no business here
    use(ARCH="10.0")
    assert load_jit("which", cuda_files=["which.cu"])["twice"](0) == 100
    assert calls(fake_nvcc) == 2
    assert sorted(entry.key.arch for entry in Cache(empty_cache).entries()) == ["10.0", "9.0"]


@pytest.mark.cuda
def test_warm_for_the_gpu_here(empty_cache: Path) -> None:
    here = {str(arch) for arch in target_archs()}
    found = jitkern.warm(["store_cache"], [60472])
    assert here <= {one.arch for one in found[1:]}
    assert {one.source for one in found[1:]} == {"compiled"}
