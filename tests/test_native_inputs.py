"""What a C++ library is made of besides its own sources: headers, archives, a compiler.

Each of these, changed, gives a new key: else the library of before would be loaded.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from needs import needs_cxx
from tiny import compiles

from jitkern.cache.get import freeze
from jitkern.compilers import cxx
from jitkern.env import settings
from jitkern.errors import CompileError, FrozenError, JitkernError
from jitkern.jit import native
from jitkern.jit.loader import load_aot
from jitkern.jit.record import replay

# By the C ABI, which takes 0.03 s to compile, where the header for C++ takes 1.5.
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


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load(file: str = "own.cc", **options: Any) -> Any:
    return load_aot("v", cpp_files=[file], **options)


@needs_cxx
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
    folder: Path, place: str, options: dict[str, Any], forked_python: Any
) -> None:
    put(folder / "own.cc", HEADER_CC)
    if place == "deep/z.h":
        put(folder / "more/x.h", '#include "../deep/z.h"\n')
    elif place == "more/y.h":
        put(folder / "x.h", "")
    before = compiles()
    for built, value in enumerate((3, 5, 3), start=1):
        put(folder / place, f"#define VALUE {value}\n")
        for _ in range(2):
            assert (load(**options).value(), compiles() - before) == (value, min(built, 2))


@needs_cxx
def test_headers_of_torch_go_by_its_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 5000, which take 3 s to read."""
    put(folder / "own.cc", f"#include <ATen/ATen.h>\n{OWN_CC}long own() {{ return VALUE; }}\n")
    put(folder / "torch/ATen/ATen.h", "#define VALUE 3\n")
    options = {"extra_include_paths": ["torch"]}
    before = compiles()
    assert load(**options).value() == 3
    put(folder / "torch/ATen/ATen.h", "#define VALUE 4\n")
    assert load(**options).value() == 3
    monkeypatch.setattr(native, "_torch_version", lambda: "torch 99")
    assert load(**options).value() == 4
    assert compiles() - before == 2


@needs_cxx
def test_a_header_that_a_macro_names_is_compiled(folder: Path) -> None:
    put(folder / "own.cc", f'#define X "x.h"\n#include X\n{OWN_CC}long own() {{ return VALUE; }}\n')
    put(folder / "x.h", "#define VALUE 3\n")
    assert load().value() == 3


@needs_cxx
def test_a_source_that_changes_during_the_build_is_not_published(
    folder: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder / "own.cc", HEADER_CC)
    put(folder / "x.h", "#define VALUE 3\n")
    real = cxx.build

    def build_and_edit(*args: Any, **options: Any) -> Path:
        library = real(*args, **options)
        put(folder / "x.h", "#define VALUE 5\n")
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
    put(folder / "own.cc", f"{OWN_CC}long own() {{ return __GNUC__ * 0 + VERSION; }}\n")
    script = folder / "tools/g++"

    def use(version: int) -> None:
        says = f"if [ $1 = --version ]; then echo g++ {version}.1.0; exit; fi"
        put(script, f'#!/bin/sh\n{says}\nexec {shutil.which("c++")} -DVERSION={version} "$@"\n')
        script.chmod(0o755)

    monkeypatch.setenv("CXX", "tools/g++")
    settings.cache_clear()
    for version in (12, 13):
        use(version)
        assert load().value() == version
    script.unlink()
    assert load().value() in (12, 13)
    use(14)
    freeze()
    assert load().value() in (12, 13)
    put(folder / "own.cc", f"{OWN_CC}long own() {{ return 1; }}\n")
    with pytest.raises(FrozenError):
        load()


# -- libraries -------------------------------------------------------------------------------------


def archive(path: Path, body: str) -> None:
    """Make a static library anew."""
    path.parent.mkdir(exist_ok=True)
    source = put(path.with_suffix(".cc"), f"{body}\n")
    compiled = path.with_suffix(".o")
    subprocess.run(["c++", "-fPIC", "-c", source, "-o", compiled], check=True)
    path.unlink(missing_ok=True)
    subprocess.run(["ar", "rc", path, compiled], check=True)


@needs_cxx
@pytest.mark.parametrize(
    "ldflags",
    [
        ["{folder}/libs/libown.a"],
        ["libs/libown.o"],
        ["-Llibs -lown"],
        ["-L.", "-L libs", "-l:libown.a"],
        ["-Wl,--whole-archive,libs/libown.a,--no-whole-archive"],
    ],
)
def test_an_archive_that_is_built_again_is_noticed(folder: Path, ldflags: list[str]) -> None:
    """Relative ones are relative to this directory, and not to that of the build."""
    given = [word.format(folder=folder) for word in ldflags]
    put(folder / "own.cc", OWN_CC)
    before = compiles()
    for built, value in enumerate((3, 5), start=1):
        archive(folder / "libs/libown.a", f"long own() {{ return {value}; }}")
        for _ in range(2):
            assert (load(extra_ldflags=given).value(), compiles() - before) == (value, built)


@needs_cxx
def test_a_link_that_failed_is_tried_again_with_another_archive(folder: Path) -> None:
    put(folder / "own.cc", OWN_CC)
    flags = ["-Wl,-z,defs,-z,now", "libs/libown.a"]
    archive(folder / "libs/libown.a", "long other() { return 3; }")
    with pytest.raises(CompileError, match="own"):
        load(extra_ldflags=flags)
    archive(folder / "libs/libown.a", "long own() { return 5; }")
    assert load(extra_ldflags=flags).value() == 5


@needs_cxx
def test_a_record_brings_headers_and_names_archives_by_their_whole_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive lies where it lies: a record brings sources. Replay may run in any directory."""
    record = tmp_path / "run.jsonl"
    monkeypatch.setenv("JITKERN_RECORD", str(record))
    settings.cache_clear()
    put(folder / "own.cc", f'#include "x.h"\n{OWN_CC}')
    put(folder / "x.h", "")
    archive(folder / "libown.a", "long own() { return 3; }")
    load(extra_ldflags=["libown.a"])
    record.chmod(0o600)
    (one,) = replay(record)
    assert one.used.options["extra_ldflags"] == [f"{folder}/libown.a"]
    assert sorted(one.files) == ["./own.cc", "./x.h"]


def test_which_words_of_the_linker_name_files(folder: Path) -> None:
    for name in ("a.o", "libb.a", "now", "exports.map", "libs/libd.a", "libs/libe.so", "more.txt"):
        put(folder / name, "")
    given = ["a.o", "gone.o", "-z", "now", "-Wl,--version-script=exports.map,-rpath,libs", "-lm"]
    given += ["-L=/usr/lib", "-Llibs", "-ld", "-le", "libs/libe.so", "@more.txt", "-pthread"]
    flags, files = native._linked(given)
    assert flags == [
        f"{folder}/a.o",
        "gone.o",
        *("-z", "now"),
        f"-Wl,--version-script={folder}/exports.map,-rpath,libs",
        "-lm",
        "-L=/usr/lib",
        f"-L{folder}/libs",
        *("-ld", "-le"),
        f"{folder}/libs/libe.so",
        f"@{folder}/more.txt",
        "-pthread",
    ]
    names = ["a.o", "exports.map", "more.txt", "libs/libd.a"]
    assert sorted(files) == sorted(folder / name for name in names)
    assert native._linked(flags) == (flags, files)
