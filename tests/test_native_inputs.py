"""What a C++ library is made of besides its own sources: packages' headers, archives, a compiler.

Each of these, changed, was not noticed: the library of before was loaded.
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
from jitkern.compilers import depends, find, find_cuda
from jitkern.compilers.identity import toolchain_directories
from jitkern.env import settings
from jitkern.errors import CompileError
from jitkern.fs import sha256
from jitkern.jit.loader import load_aot, load_jit
from jitkern.jit.record import replay

WRAPPERS = [("value", "value")]
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


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def use_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str, cxx: str = "") -> Path:
    """Have CXX name a script in the project, as for a build in a container."""
    words = " ".join([str(shutil.which("c++")), *flags])
    script = put(folder / "tools/g++", f'#!/bin/sh\nexec {words} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", cxx or str(script))
    settings.cache_clear()
    return script


# --------------------------------------------------------------------------------------- headers


@needs_cxx
@pytest.mark.parametrize("cxx", ["", "tools/g++"])
def test_headers_of_a_project_that_brings_its_compiler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cxx: str
) -> None:
    """All below the parent of the compiler's directory was left out; a relative one not found."""
    use_compiler(monkeypatch, folder, cxx=cxx)
    source = put(
        folder / "src/a.cc", '#include "../common/x.h"\nint64_t value() { return VALUE; }\n'
    )
    for value in (3, 5):
        put(folder / "common/x.h", f"#define VALUE {value}\n")
        module = load_jit("value", cpp_files=[source], cpp_wrappers=WRAPPERS)
        assert module.value() == value


@needs_cxx
def test_headers_of_packages_are_part_of_what_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /usr/include/fmt, which was left out."""
    system = tmp_path / "machine/usr/include"
    use_compiler(monkeypatch, folder, f"-isystem {system}")
    source = put(folder / "a.cc", "#include <fmt/x.h>\nint64_t value() { return VALUE; }\n")
    record = tmp_path / "run.jsonl"
    monkeypatch.setenv("JITKERN_RECORD", str(record))
    settings.cache_clear()

    def value() -> int:
        module = load_jit("value", cpp_files=[source], cpp_wrappers=WRAPPERS)
        return int(module.value())

    for number in (3, 5):
        put(system / "fmt/x.h", f"#define VALUE {number}\n")
        assert value() == number
    record.chmod(0o600)
    assert [list(one.files) for one in replay(record)] == [["./a.cc"]]  # a package is installed

    shutil.rmtree(system)
    with pytest.raises(CompileError, match=r"fmt/x\.h"):
        value()
    freeze()
    assert value() in (3, 5)  # a machine without the package's headers: nothing else could be had


@needs_cxx
def test_no_whole_system_is_left_out() -> None:
    left_out, system = toolchain_directories()
    packages = [Path("/usr/include/fmt/core.h"), Path("/usr/lib/x86_64-linux-gnu/include/x.h")]
    assert not [one for one in left_out for path in packages if path.is_relative_to(one)]
    read = subprocess.run(
        ["c++", "-M", "-x", "c++", "-include", "vector", "/dev/null"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    paths = [Path(word) for word in read.replace("\\\n", " ").split()[1:] if word != "/dev/null"]
    assert len(paths) > 50
    own = depends.HeaderDirectories(left_out, system)
    assert depends.manifest(paths, [Path("/nowhere")], own)["files"] == {}


def test_headers_of_the_c_library_are_left_out(tmp_path: Path) -> None:
    """A key has its version; and there are a hundred in each library."""
    include, more = tmp_path / "usr/include", tmp_path / "usr/include/x86_64-linux-gnu"
    put(include / "stdio.h", "/* This file is part of the GNU C Library. */\n")
    own = [include / "linux/errno.h", more / "bits/types.h", more / "asm/errno.h"]
    own += [include / "syscall.h", more / "sys/errno.h"]
    packages = [include / "fmt/core.h", more / "curl/curl.h", include / "fmt/bits/x.h"]
    for path in (*own, *packages):
        put(path, path.name)
    root = tmp_path / "project"
    vendored = put(root / "getopt.h", "/* This file is part of the GNU C Library. */\n")

    directories = depends.HeaderDirectories([], [include, more])
    read = [include / "stdio.h", *own, *packages, vendored]
    made = depends.manifest(read, [root], directories)
    expected = {f"0:{path}": sha256(path.name.encode()) for path in packages}
    assert made["files"] == {"0:getopt.h": sha256(vendored.read_bytes()), **expected}
    assert depends.sources(made, [root]) == [str(vendored)]

    packages[0].unlink()
    assert not depends.holds(made, [root])
    assert depends.holds(made, [root], lambda: True)
    put(packages[0], "another")
    assert not depends.holds(made, [root], lambda: True)


def test_what_is_found_by_a_relative_path_is_found_in_any_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build runs in a directory of its own: "tools/g++: not found"."""
    for name in ("tools/g++", "tools/ninja", "cuda/bin/nvcc"):
        put(folder / name, "").chmod(0o755)
    for name in ("cuda/include/cuda_runtime.h", "cuda/lib64/libcudart.so"):
        put(folder / name, "")
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setenv("PATH", "tools:cuda/bin")
    settings.cache_clear()
    assert find.cxx_command() == [f"{folder}/tools/g++"]
    assert find_cuda.find_cuda_home().nvcc == folder / "cuda/bin/nvcc"
    monkeypatch.setattr(find.sysconfig, "get_path", lambda _: "/nowhere")
    ninja = find._find_ninja.__wrapped__("tools", "/nowhere/python", ())
    assert ninja == f"{folder}/tools/ninja"
    monkeypatch.setenv("CXX", "tools/g++ -m64")
    settings.cache_clear()
    assert find.cxx_command() == [f"{folder}/tools/g++", "-m64"]


# ------------------------------------------------------------------------------------- libraries


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
        ["./libown.a"],
        ["-Llibs -lown"],
        ["-L.", "-L libs", "-l:libown.a"],
        ["@flags.txt"],
    ],
)
def test_an_archive_that_is_built_again_is_noticed(
    folder: Path, forked_python: Any, ldflags: list[str]
) -> None:
    """Relative ones were looked for in the build's own directory."""
    given = [word.format(folder=folder) for word in ldflags]
    put(folder / "flags.txt", f"{folder}/libs/libown.a\n")
    put(folder / "own.cc", OWN_CC)

    def load() -> Any:
        return load_aot("v", cpp_files=["own.cc"], extra_ldflags=given)

    before = compiles()
    for built, value in enumerate((3, 5), start=1):
        archive(folder / "libs/libown.a", f"long own() {{ return {value}; }}")
        if ldflags == ["./libown.a"]:
            shutil.copy(folder / "libs/libown.a", folder)
        if ldflags == ["@flags.txt"]:  # what is named in it is not followed
            put(folder / "flags.txt", f"{folder}/libs/libown.a -Wl,-z,now{' ' * built}\n")
        for _ in range(2):
            assert (load().value(), compiles() - before) == (value, built)
    code = f"""
from jitkern import load_aot
from jitkern.cache.stats import stats
module = load_aot("v", cpp_files=["own.cc"], extra_ldflags={given})
print(module.value(), stats().compiles.count)
"""
    assert forked_python(code).stdout.split() == ["5", "0"]


@needs_cxx
def test_a_link_that_failed_is_tried_again_with_another_archive(folder: Path) -> None:
    put(folder / "own.cc", OWN_CC)

    def load() -> Any:
        flags = ["-Wl,-z,defs,-z,now", "libs/libown.a"]
        return load_aot("v", cpp_files=["own.cc"], extra_ldflags=flags)

    archive(folder / "libs/libown.a", "long other() { return 3; }")
    with pytest.raises(CompileError, match="own"):
        load()
    archive(folder / "libs/libown.a", "long own() { return 5; }")
    assert load().value() == 5


@needs_cxx
def test_an_archive_in_an_earlier_directory_is_another_library(folder: Path) -> None:
    put(folder / "own.cc", OWN_CC)
    for place, value in (("second", 3), ("first", 5)):
        archive(folder / place / "libown.a", f"long own() {{ return {value}; }}")
        flags = ["-Lfirst", "-Lsecond", "-lown"]
        module = load_aot("v", cpp_files=["own.cc"], extra_ldflags=flags)
        assert module.value() == value


@needs_cxx
def test_a_record_names_archives_by_their_whole_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie where they lie: it brings sources. The replay may run in any directory."""
    record = tmp_path / "run.jsonl"
    monkeypatch.setenv("JITKERN_RECORD", str(record))
    settings.cache_clear()
    put(folder / "own.cc", OWN_CC)
    archive(folder / "libown.a", "long own() { return 3; }")
    load_aot("v", cpp_files=["own.cc"], extra_ldflags=["libown.a"])
    record.chmod(0o600)
    (one,) = replay(record)
    assert one.used.options["extra_ldflags"] == [f"{folder}/libown.a"]
    assert list(one.files) == ["./own.cc"]


def test_which_words_of_the_linker_name_files(folder: Path) -> None:
    for name in ("a.o", "libb.a", "now", "exports.map", "libs/libd.a", "libs/libe.so", "more.txt"):
        put(folder / name, "")
    given = ["a.o", "gone.o", "-z", "now", "-Wl,--version-script=exports.map,-rpath,libs", "-lm"]
    given += ["-L=/usr/lib", "-Llibs", "-ld", "-le", "libs/libe.so", "@more.txt", "-pthread"]
    found = depends.linked(given)
    assert found.flags == [
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
    assert found.files == [folder / name for name in names]
    assert depends.linked(found.flags) == found
