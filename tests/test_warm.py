"""`jitkern.warm()` and `jitkern warm`: what they return, say, write, and leave alone."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest
from fake_toolkit import calls
from needs import needs_cxx, needs_nvrtc
from tiny import SM_90, Use, compiles, tiny, write_lines

import jitkern
from jitkern.arch import Arch, target_archs
from jitkern.cache import get
from jitkern.cache.store import Cache
from jitkern.cli import main
from jitkern.env import settings
from jitkern.errors import CacheError, FrozenError, WarmError
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
# A library whose constructor leaves a mark: it runs when the library is loaded.
MARKING = """\
#include <cstdio>
__attribute__((constructor)) static void mark() {
  if (std::FILE* file = std::fopen(MARK, "w")) std::fclose(file);
}
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int __tvm_ffi_nothing(void*, const void*, int, void*) { return 0; }
"""


pytestmark = pytest.mark.usefixtures("host_module")


@pytest.fixture
def record(folder: Path, tmp_path: Path, use: Use) -> Path:
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


def sized(outcomes: list[Outcome]) -> set[tuple[str, str]]:
    """Each op and its first parameter."""
    return {(one.name, one.parameters.partition(",")[0]) for one in outcomes[1:]}


def run(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    status = main(["warm", *map(str, argv)])
    return status, *capsys.readouterr()


@needs_nvrtc
def test_warm_returns_the_source_of_each(empty_cache: Path) -> None:
    told: list[tuple[str, int, int]] = []
    how: dict[str, Any] = {"row_bytes": [60424], "archs": ["9.0", Arch(8, 0), "sm_90"]}
    found = jitkern.warm(
        ["store_cache", "store"], **how, progress=lambda one, *n: told.append((str(one), *n))
    )
    assert {(one.name, one.arch, one.source) for one in found[1:]} == {
        ("store", "9.0", "compiled"),
        ("store", "8.0", "compiled"),
    }
    assert all(one.parameters.startswith("60424, ") for one in found[1:])
    assert all(one.elapsed_ms and one.num_bytes and one.error is None for one in found[1:])
    assert [(done, of) for _, done, of in told] == [(n + 1, 4) for n in range(4)]
    assert all(name.startswith("jitkern_store_60424B_v8_i") for name, _, _ in told)
    assert {one.source for one in jitkern.warm(["store"], **how)[1:]} == {"memo"}
    assert len(Cache(empty_cache).entries()) == 4


def test_warm_with_nothing_else_is_the_host_module(empty_cache: Path) -> None:
    """A FrozenError advises `jitkern warm`, which was a usage error."""
    (found,) = jitkern.warm()
    assert (found.name, found.arch, found.parameters) == ("host module", "", "")
    assert main(["warm"]) == 0


NO_ARCHS = (
    "warm: archs: none given, JITKERN_ARCH is not set, and there is no GPU to ask; expected one, "
    "such as 9.0"
)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"ops": ["frob"]}, ValueError, "warm: ops: 'frob', expected one of store_cache, indexi"),
        ({"ops": "store"}, TypeError, "warm: ops: 'store', expected a list, such as ['store']"),
        (
            {"ops": ["merge_state", "store_cache"], "row_bytes": [656]},
            ValueError,
            "warm: head_dims: not given, expected for 'merge_state', such as 64",
        ),
        (
            {"ops": ["store"], "row_bytes": [656], "head_dims": [64]},
            ValueError,
            "warm: head_dims: 64 fits none of the ops store; add merge_states",
        ),
        (
            {"row_bytes": [0]},
            ValueError,
            "warm: row_bytes: 0, expected bytes per row, 1 or more and under 1 GiB",
        ),
        (
            {"formats": ["fp8", 656]},
            ValueError,
            "warm: formats: 656, expected fp8_ds_mla, fp8_index_k, ",
        ),
        ({"archs": ["99"]}, ValueError, "warm: archs: '99', expected one of 8.0, "),
        ({"replays": ["no.jsonl"]}, FileNotFoundError, "[Errno 2] No such file or dir"),
        ({"replays": [__file__]}, ValueError, f"warm: replays: {__file__}:1: not a recorded spec"),
        ({"out": 5}, TypeError, "warm: out: 5, expected the path of a directory"),
        ({"check": True, "out": "x"}, ValueError, "warm: out: 'x', expected none: a ch"),
        ({"row_bytes": [656]}, ValueError, NO_ARCHS),
    ],
)
def test_a_wrong_argument_is_named(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], error: type, says: str
) -> None:
    monkeypatch.setattr("jitkern.warming.gpu_archs", list)
    with pytest.raises(error, match=f"^{re.escape(says)}"):
        jitkern.warm(**how)
    assert not empty_cache.exists()


@needs_nvrtc
@needs_cxx
def test_a_failure_carries_the_outcomes_of_all(
    folder: Path, record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    settings.cache_clear()
    text = r"^1 of 3 failed: twice: CXX: '/nowhere/c\+\+' was not found; install g\+\+"
    with pytest.raises(WarmError, match=text) as caught:
        jitkern.warm(replays=[record], archs=["8.0"], out=tmp_path / "out")
    expected = [("tiny", "4", "8.0", "compiled"), ("twice", "", "", "failed")]
    assert rows(caught.value.outcomes) == expected
    failed = caught.value.outcomes[2]
    assert (failed.elapsed_ms, failed.num_bytes, str(failed.error)[:4]) == (None, None, "CXX:")
    assert "tiny" in {entry.key.op for entry in Cache(tmp_path / "out").entries()}


def test_ops_without_a_size_are_not_built(empty_cache: Path) -> None:
    how: dict[str, Any] = {"archs": ["9.0"], "check": True}
    by_rows = sized(jitkern.warm(row_bytes=[60488], **how))
    by_dim = sized(jitkern.warm(head_dims=[120, 136], **how))
    assert by_rows >= {("store", "60488"), ("index", "60488")}
    assert by_dim == {("merge", "120"), ("merge", "136")}
    by_format = sized(jitkern.warm(formats=["fp8_ds_v41"], **how))
    assert by_format == {("store_rows", "2"), ("gather_rows", "2")}
    sizes: dict[str, Any] = {"row_bytes": iter([60488]), "head_dims": iter([120])}
    some = sized(jitkern.warm(iter(["store", "merge_state"]), **sizes, **how))  # type: ignore[arg-type]
    assert some == {("store", "60488"), ("merge", "120")}


@needs_nvrtc
@needs_cxx
def test_check_compiles_nothing(capsys: Capture, record: Path, tmp_path: Path, use: Use) -> None:
    before = compiles()
    status, out, err = run(capsys, "--replay", record, "--check")
    assert status == 1
    assert re.findall(r"^(tiny|twice)\b.* missing ", out, re.MULTILINE) == ["tiny", "twice"]
    assert "host module" not in out  # it is there
    assert err == "jitkern: error: 2 of 3 missing; run without --check to compile them\n"
    missing = [("tiny", "4", "9.0", "missing"), ("twice", "", "", "missing")]
    assert rows(jitkern.warm(replays=[record], check=True)) == missing
    assert compiles() == before
    assert not (tmp_path / "cache").exists()

    assert run(capsys, "--replay", record)[0] == 0
    before = compiles()
    for nvrtc in ("", "/nowhere/libnvrtc.so"):  # without a compiler, code by any counts
        use(NVRTC=nvrtc)
        status, out, err = run(capsys, "--replay", record, "--check")
        assert (status, err, "missing" in out) == (0, "", False)
    assert run(capsys, "--replay", record, "--check", "--arch", "8.0")[0] == 1
    assert compiles() == before


@needs_nvrtc
@pytest.mark.usefixtures("empty_cache")
def test_what_cannot_be_kept_is_a_failure(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk `jitkern warm` ended with 0 and had kept nothing: the server then failed."""

    def write_new(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jitkern.cache.store.write_new", write_new)
    argv = ("--row-bytes", "60456", "--op", "store", "--arch", "9.0")
    status, out, err = run(capsys, *argv)
    assert status == 1 and "No space left on device" in err
    assert re.findall(r"^jitkern_store_60456B_\w+ .* failed ", out, re.MULTILINE)
    assert "cannot be written: compiled, and not kept" in err
    monkeypatch.undo()
    assert run(capsys, *argv, "--check")[0] == 1


@needs_nvrtc
@needs_cxx
def test_out_has_the_libraries_too(capsys: Capture, record: Path, tmp_path: Path, use: Use) -> None:
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
def test_a_hit_needs_no_cache_that_can_be_written(
    capsys: Capture, record: Path, tmp_path: Path, use: Use
) -> None:
    """With everything there, the status was 1: "cannot be written"."""
    jitkern.warm(replays=[record])
    use(CACHE_PATH=tmp_path / "cache", CACHE_DIR="/proc/version/cache")
    assert {one.source for one in jitkern.warm(replays=[record])[1:]} == {"cached"}
    with pytest.raises(CacheError, match="/proc/version/cache: cannot be written: Not a directory"):
        jitkern.warm(replays=[record], archs=["8.0"])


@needs_nvrtc
@needs_cxx
def test_a_frozen_process_says_so(capsys: Capture, record: Path, use: Use) -> None:
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
        jitkern.warm(replays=[record])
    get._frozen = ""
    with pytest.warns(RuntimeWarning, match="frozen to warn"):  # which forbids nothing
        jitkern.warm(replays=[record])
    use(FREEZE="1")
    assert run(capsys, "--replay", record)[0] == 0


@needs_cxx
def test_replay_builds_and_does_not_load(
    capsys: Capture, empty_cache: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "marking.cc").write_text(MARKING)
    line = {
        "record": 3,
        "function": "load_aot",
        "args": ["marking"],
        "options": {"cpp_files": ["marking.cc"], "extra_cflags": [f"-DMARK='\"{mark}\"'"]},
        "arch": "",
    }
    recording = write_lines(tmp_path / "used.jsonl", line)
    for source in ("compiled", "cached"):
        status, out, err = run(capsys, "--replay", recording)
        assert (status, err) == (0, "")
        assert re.search(rf"^marking .* {source} ", out, re.MULTILINE)
        assert not mark.exists()


def test_a_gpu_that_is_there_goes_before_the_variable(
    use: Use, monkeypatch: pytest.MonkeyPatch
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
    use: Use,
    fake_nvcc: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the first one's library was built, and nobody said so."""
    (folder / "which.cu").write_text(TWICE.replace("args->value * 2", "FAKE_ARCH"))
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
