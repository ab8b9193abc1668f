"""load_jit and load_aot on the C++ and CUDA routes, and what is part of a library's key."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from headers import put
from needs import needs_cxx, needs_nvcc
from tiny import Use, compiles

from jitkern.arch import Arch
from jitkern.cache.get import freeze
from jitkern.cache.store import EXACT, NO_USE, Cache
from jitkern.compilers import cxx
from jitkern.env import settings
from jitkern.errors import CompileError, FrozenError, JitkernError
from jitkern.jit import native
from jitkern.jit.loader import checked, load_aot, load_jit
from jitkern.jit.native import NativeLibrary
from jitkern.jit.record import read_record

# By the C ABI, which takes 0.03 s to compile; the header for C++ takes 1.5 s.
OWN_CC = """\
#include <tvm/ffi/c_api.h>
long own();
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_value(
    void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = own();
  return 0;
}
"""
HEADER_CC = f'#include "x.h"\n{OWN_CC}long own() {{ return VALUE; }}\n'


def load(**options: Any) -> Any:
    return load_aot("v", cpp_files=["own.cc"], **options)


@needs_cxx
def test_cpp_files_with_wrappers(folder: Path, empty_cache: Path) -> None:
    import torch

    before = compiles()

    def scale(n: int) -> Any:
        wrappers = [("scale", f"scale<{n}>"), ("rows", "rows")]
        return load_jit(
            "scale", str(n), cpp_files=["scale.cc"], cpp_wrappers=wrappers, build_directory="build"
        )

    assert scale(4)["scale"](10) == 40
    assert scale(4).rows(torch.zeros(3, 2)) == 3
    assert compiles() - before == 1
    (entry,) = Cache(empty_cache).entries()
    assert (entry.key.op, entry.key.args, entry.key.route) == ("scale", ("4",), "cxx")
    build = folder / "build"
    assert {"build.ninja", "main.cc", "scale_4.so"} <= {path.name for path in build.iterdir()}
    (build / "scale_4.so").unlink()
    assert scale(4)["scale"](2) == 8  # from the cache, and put there again
    assert (build / "scale_4.so").exists()
    assert list(folder.glob("*.so")) == []  # nothing is left beside the sources


@pytest.mark.slow
@needs_nvcc
@needs_cxx
def test_a_single_source_cu_loads_as_in_mini_sglang(
    folder: Path, empty_cache: Path, use: Use
) -> None:
    use(ARCH="9.0")
    wrappers = [("launch", "AddKernel<2>::run")]
    before = compiles()
    for _ in range(2):
        module = load_jit("add", "2", cuda_files=["single.cu"], cuda_wrappers=wrappers)
        assert callable(module.launch)
    assert compiles() - before == 1
    (entry,) = Cache(empty_cache).entries()
    assert (entry.key.route, entry.key.arch) == ("cuda", "9.0")
    assert entry.variant.startswith("nvcc-")
    data = next(empty_cache.rglob("*.so")).read_bytes()
    assert b"sm_90" in data and b"libcudart.so." in data  # the runtime by its plain name
    assert os.fsencode(folder) not in data
    (folder / "single.cu").write_text("__global__ void k() { missing_name(); }\n")
    with pytest.raises(CompileError, match="missing_name") as caught:
        load_jit("bad", cuda_files=["single.cu"])
    assert "compute_90" in caught.value.command


@pytest.mark.cuda
@needs_nvcc
def test_a_single_source_cu_runs(folder: Path) -> None:
    import torch

    x = torch.arange(1000, device="cuda", dtype=torch.float32)
    wrappers = [("launch", "AddKernel<2>::run")]
    module = load_jit("add", "2", cuda_files=["single.cu"], cuda_wrappers=wrappers)
    module.launch(x)
    assert torch.equal(x, torch.arange(1000, device="cuda", dtype=torch.float32) + 2)


def key(file: str = "own.cc", arch: Arch | None = None, **options: Any) -> str:
    kind = "cuda_files" if arch else "cpp_files"
    return str(NativeLibrary(checked("load_aot", ["v"], {kind: [file], **options}), arch).key)


@pytest.mark.parametrize(
    ("variable", "counts_for"),
    [
        ("CPATH", {"c++", "linked", "cuda"}),
        ("CPLUS_INCLUDE_PATH", {"c++", "linked", "cuda"}),
        ("LIBRARY_PATH", {"linked"}),
        ("NVCC_APPEND_FLAGS", {"cuda"}),
        ("SOURCE_DATE_EPOCH", set()),
    ],
)
def test_which_variables_are_part_of_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, counts_for: set[str]
) -> None:
    """What CPATH=a had built was loaded under CPATH=b, and where it could not be built at all."""

    def keys() -> dict[str, str]:
        linked = key("scale.cc", extra_ldflags=["-lz"])
        return {"c++": key("scale.cc"), "linked": linked, "cuda": key("single.cu", Arch(9, 0))}

    monkeypatch.delenv(variable, raising=False)
    unset = keys()
    monkeypatch.setenv(variable, "")
    assert keys() == unset
    seen = [unset]
    for value in ("/a", "/b\udcff"):
        monkeypatch.setenv(variable, value)
        seen.append(keys())
    for name in unset:
        assert len({one[name] for one in seen}) == (3 if name in counts_for else 1), name


def test_every_flag_is_part_of_the_key(folder: Path, use: Use, monkeypatch: Any) -> None:
    """Also those in CXX. No test failed when flags were left out of it."""
    put("own.cc", OWN_CC)
    options: list[dict[str, Any]] = [{}, {"extra_cflags": ["-DX"]}, {"extra_ldflags": ["-lm"]}]
    options += [{"extra_cuda_cflags": ["-DX"]}, {"extra_cflags": ["-DX", "-DY"]}]
    keys = {key(**one) for one in options}
    for value in (3, 5):
        monkeypatch.setenv("CXX", f"c++ -DVALUE={value}")
        use()
        keys.add(key())
    assert len(keys) == len(options) + 2


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("x.h", {}),
        ("more/x.h", {"extra_include_paths": ["more"]}),
        ("more/x.h", {"extra_cflags": ["-Imore"]}),
        ("more/x.h", {"extra_cflags": ["-isystem more"]}),
        ("more/y.h", {"extra_cflags": ["-include", "more/y.h"]}),
        ("more/y.h", {"extra_cflags": ["-Imore -include y.h"]}),
        ("deep/z.h", {"extra_cflags": ["-Imore"]}),
    ],
)
def test_a_header_that_changes_is_noticed(
    folder: Path, place: str, options: dict[str, Any]
) -> None:
    put("own.cc", HEADER_CC)
    put("more/x.h", '#include "../deep/z.h"\n')
    keys = []
    for value in (3, 5, 3):
        put(place, f"#define VALUE {value}\n")
        keys.append(key(**options))
    assert keys[0] == keys[2] != keys[1]


@needs_cxx
def test_headers_are_found_as_the_key_says(folder: Path) -> None:
    """By flags and by include paths, which are one key; by a macro, which none knows."""
    put("own.cc", f"#define X <x.h>\n#include X\n{OWN_CC}long own() {{ return VALUE; }}\n")
    put("more/x.h", "#define VALUE 3 * FACTOR\n")
    before = compiles()
    for how in (
        {"extra_cflags": ["-DFACTOR=2"], "extra_include_paths": ["more"]},
        {"extra_cflags": ["-DFACTOR=2", f"-I{folder}/more"]},
    ):
        assert load(**how).value() == 6
    assert compiles() - before == 1


def test_headers_of_torch_go_by_its_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 5000, which take 3 s to read."""
    put("own.cc", "#include <ATen/ATen.h>\n")
    put("torch/ATen/ATen.h", "#define VALUE 3\n")
    options = {"extra_include_paths": ["torch"]}
    before = key(**options)
    put("torch/ATen/ATen.h", "#define VALUE 4\n")
    assert key(**options) == before
    monkeypatch.setattr(native, "version", lambda name: "99")
    assert key(**options) != before


@pytest.mark.parametrize(
    "ldflags",
    [
        ["{folder}/libs/libown.a"],
        ["libs/libown.a"],
        ["-Llibs -lown"],
        ["-L.", "-L libs", "-l:libown.a"],
        ["-Wl,--whole-archive,libs/libown.a,--no-whole-archive"],
    ],
)
def test_an_archive_that_is_built_again_is_noticed(folder: Path, ldflags: list[str]) -> None:
    """Relative ones are relative to this directory, and not to that of the build."""
    put("own.cc", OWN_CC)
    given = [word.format(folder=folder) for word in ldflags]
    keys = []
    for text in ("one", "two"):
        put("libs/libown.a", text)
        keys += [key(extra_ldflags=given)] * 2
    assert len(set(keys)) == 2


@needs_cxx
def test_a_source_that_changes_during_the_build_is_not_published(
    folder: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("own.cc", HEADER_CC)
    put("x.h", "#define VALUE 3\n")
    real = cxx.build

    def build_and_edit(*args: Any, **options: Any) -> Path:
        library = real(*args, **options)
        put("x.h", "#define VALUE 5\n")
        return library

    with monkeypatch.context() as patch:
        patch.setattr(cxx, "build", build_and_edit)
        with pytest.raises(JitkernError, match="a source changed while it was built; load it ag"):
            load()
    assert not list(empty_cache.rglob("*.so"))
    assert load().value() == 5


@needs_cxx
def test_another_compiler_is_another_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, or frozen, that of any compiler is good."""
    put("own.cc", f"{OWN_CC}long own() {{ return VERSION; }}\n")

    def use(version: int) -> None:
        says = f"if [ $1 = --version ]; then echo g++ {version}.1.0; exit; fi"
        compiler = shutil.which("c++")
        text = f'#!/bin/sh\n{says}\nexec {compiler} -DVERSION={version} "$@"\n'
        put(f"tools-{version}/g++", text).chmod(0o755)
        monkeypatch.setenv("CXX", f"tools-{version}/g++")
        settings.cache_clear()

    for version in (12, 13):
        use(version)
        assert load().value() == version
    Path("tools-13/g++").unlink()
    assert load().value() in (12, 13)
    use(14)
    freeze()
    assert load().value() in (12, 13)
    put("own.cc", f"{OWN_CC}long own() {{ return 1; }}\n")
    with pytest.raises(FrozenError):
        load()


@needs_cxx
def test_a_cache_in_a_directory_that_is_not_utf8(
    folder: Path, tmp_path: Path, use: Use, caplog: pytest.LogCaptureFixture
) -> None:
    """Libraries were built anew in each process, and did not load."""
    caplog.set_level(logging.CRITICAL, "jitkern")  # pytest-xdist can send no log of this path
    put("own.cc", f"{OWN_CC}long own() {{ return 3; }}\n")
    use(CACHE_DIR=os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    before = compiles()
    assert [load().value(), load().value()] == [3, 3]
    assert compiles() - before == 1


@needs_cxx
def test_a_library_that_was_edited_has_statics_of_its_own(folder: Path) -> None:
    """GNU's unique symbols bound the new library to the old one's."""
    for start in (10, 20):
        body = f"static int k = {start}; return a + k;"
        source = f"template <int N> int t(int a) {{ {body} }}\ninline int v = {start};\n"
        put("own.cc", f"{OWN_CC}{source}long own() {{ return t<1>(1) + v; }}\n")
        assert load().value() == 2 * start + 1


@needs_cxx
@pytest.mark.parametrize("by", ["a flag", "CXX"])
def test_native_code_is_for_this_processor(
    folder: Path, use: Use, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Another machine that shared the cache got SIGILL."""
    put("own.cc", OWN_CC)
    flags = ["-march=native"] if by == "a flag" else []
    if by == "CXX":
        monkeypatch.setenv("CXX", "c++ -march=native")
        use()

    def library() -> NativeLibrary:
        options = {"cpp_files": ["own.cc"], "extra_cflags": flags}
        return NativeLibrary(checked("load_aot", ["v"], options), None)

    here = library().variant
    assert "+native-" in here and library().rank({"toolchain": here}) == EXACT
    with monkeypatch.context() as patch:
        patch.setattr(cxx, "output_of", lambda *_: "#define __AVX9__ 1")
        assert library().rank({"toolchain": here}) == NO_USE
    monkeypatch.setenv("CXX", "/nowhere/c++")  # any variant will do then, but not this one
    use()
    assert library().rank({"toolchain": here}) == NO_USE


@needs_cxx
def test_a_record_names_archives_by_their_whole_path(
    folder: Path, tmp_path: Path, use: Use
) -> None:
    """Replay may run in any directory."""
    record = tmp_path / "run.jsonl"
    use(RECORD=record)
    put("own.cc", f"{OWN_CC}long own() {{ return 3; }}\n")
    put("exports.map", "{ global: __tvm_ffi_*; };\n")
    load(extra_ldflags=["-Wl,--version-script=exports.map"])
    record.chmod(0o600)
    (used,) = read_record(record)
    assert used.options["extra_ldflags"] == [f"-Wl,--version-script={folder}/exports.map"]
    assert used.options["cpp_files"] == [f"{folder}/own.cc"]
