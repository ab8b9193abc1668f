"""load_jit and load_aot on the C++ and CUDA routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from needs import needs_cxx, needs_nvcc
from tiny import compiles

from jitkern.arch import Arch
from jitkern.cache.store import Cache
from jitkern.env import settings
from jitkern.errors import CompileError
from jitkern.jit.loader import load_aot, load_jit, native_library
from jitkern.jit.record import Specialisation


@needs_cxx
def test_cpp_files_with_wrappers(folder: Path, empty_cache: Path) -> None:
    import torch

    before = compiles()

    def load(n: int) -> Any:
        wrappers = [("scale", f"scale<{n}>"), ("rows", "rows")]
        return load_jit("scale", str(n), cpp_files=["scale.cc"], cpp_wrappers=wrappers)

    assert load(4)["scale"](10) == 40
    assert load(4).rows(torch.zeros(3, 2)) == 3
    assert compiles() - before == 1
    (entry,) = Cache(empty_cache).entries()
    assert (entry.key.op, entry.key.args, entry.key.route) == ("scale", ("4",), "cxx")
    assert list(folder.glob("*.so")) == []  # nothing is left beside the sources


@needs_cxx
def test_flags_in_cxx_are_part_of_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was built with others was loaded."""
    Path("value.cc").write_text("int64_t value() { return VALUE; }\n")
    for value in (3, 5):
        monkeypatch.setenv("CXX", f"c++ -DVALUE={value}")
        settings.cache_clear()
        module = load_jit("value", cpp_files=["value.cc"], cpp_wrappers=[("value", "value")])
        assert module.value() == value


@needs_cxx
def test_headers_of_the_environment_are_part_of_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CPATH=a had built was loaded under CPATH=b, and where it could not be built at all."""
    Path("value.cc").write_text("#include <outside.h>\nint64_t value() { return VALUE; }\n")
    for name in "ab":
        (folder / name).mkdir()
        (folder / name / "outside.h").write_text(f"#define VALUE {ord(name)}\n")

    def value() -> int:
        module = load_jit("value", cpp_files=["value.cc"], cpp_wrappers=[("value", "value")])
        return int(module.value())

    with pytest.raises(CompileError, match=r"outside\.h"):
        value()
    before = compiles()
    for name, built in (("a", 1), ("b", 2), ("a", 2)):
        monkeypatch.setenv("CPATH", str(folder / name))  # at any time: it is no setting
        assert (value(), compiles() - before) == (ord(name), built)
    monkeypatch.delenv("CPATH")
    with pytest.raises(CompileError, match=r"outside\.h"):
        value()


def used(ldflags: list[str] | None = None, **files: list[str]) -> Specialisation:
    kind = "cuda" if "cuda_files" in files else "cpp"
    options: dict[str, Any] = {f"{kind}_wrappers": [["value", "value"]]}
    options |= {
        name: [str(Path(file).absolute()) for file in given] for name, given in files.items()
    }
    return Specialisation("load_jit", ("value",), {**options, "extra_ldflags": ldflags or []}, "")


@pytest.mark.parametrize(
    ("variable", "counts_for"),
    [
        ("CPATH", {"c++", "linked", "cuda"}),
        ("CPLUS_INCLUDE_PATH", {"c++", "linked", "cuda"}),
        ("LIBRARY_PATH", {"linked"}),
        ("NVCC_APPEND_FLAGS", {"cuda"}),
        ("PTXAS_FLAGS", {"cuda"}),
        ("SOURCE_DATE_EPOCH", set()),
    ],
)
def test_which_variables_are_part_of_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, counts_for: set[str]
) -> None:
    def keys() -> dict[str, str]:
        made = {
            "c++": native_library(used(cpp_files=["scale.cc"]), None),
            "linked": native_library(used(["-lz"], cpp_files=["scale.cc"]), None),
            "cuda": native_library(used(cuda_files=["single.cu"]), Arch(9, 0)),
        }
        return {name: str(library.key) for name, library in made.items()}

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


@pytest.mark.parametrize("argument", ["extra_cflags", "extra_cuda_cflags", "extra_ldflags"])
def test_an_open_quote_is_named(folder: Path, argument: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_jit(
            "scale",
            cpp_files=["scale.cc"],
            cpp_wrappers=[("scale", "scale<4>")],
            **{argument: ["-g", '-DX="a']},
        )
    assert str(caught.value) == (
        f"load_jit: {argument}: '-DX=\"a': No closing quotation, "
        "expected words quoted as in a shell"
    )


@needs_cxx
def test_load_aot_and_its_flags(folder: Path) -> None:
    (folder / "own.cc").write_text(
        "#include <tvm/ffi/function.h>\n#include <extra.h>\n"
        "TVM_FFI_DLL_EXPORT_TYPED_FUNC(twice, [](int64_t x) { return x * FACTOR + EXTRA; });\n"
    )
    (folder / "more").mkdir()
    (folder / "more" / "extra.h").write_text("#define EXTRA 1\n")
    for how in (
        {"extra_cflags": ["-DFACTOR=2"], "extra_include_paths": ["more"]},
        {"extra_cflags": ["-DFACTOR=2", f"-I{folder}/more"]},
    ):
        before = compiles()
        module = load_aot("own", cpp_files=[str(folder / "own.cc")], **how)
        assert module["twice"](10) == 21
        assert compiles() - before <= 1
    assert before == compiles()  # an -I flag is an include path: the same key


@needs_cxx
def test_build_directory_keeps_the_files(folder: Path) -> None:
    build = folder / "build"
    wrappers = [("scale", "scale<3>")]

    def load() -> Any:
        return load_jit(
            "scale", "3", cpp_files=["scale.cc"], cpp_wrappers=wrappers, build_directory=build
        )

    assert load()["scale"](2) == 6
    assert {"build.ninja", "main.cc", "scale_3.so"} <= {path.name for path in build.iterdir()}
    (build / "scale_3.so").unlink()
    assert load()["scale"](2) == 6  # from the cache, and put there again
    assert (build / "scale_3.so").exists()


@needs_cxx
def test_errors_of_the_cpp_route(folder: Path) -> None:
    (folder / "scale.cc").write_text("int broken( { }\n")
    with pytest.raises(CompileError, match=r"scale\.cc:1") as caught:
        load_jit("scale", cpp_files=["scale.cc"])
    assert "c++" in caught.value.command or "g++" in caught.value.command
    (folder / "scale.cc").write_text(
        "extern int nowhere();\n"
        'extern "C" int __tvm_ffi_f(void*, const void*, int, void*) { return nowhere(); }\n'
    )
    with pytest.raises(CompileError, match="nowhere"):
        load_aot("scale", cpp_files=["scale.cc"], extra_ldflags=["-Wl,-z,now"])


@needs_nvcc
@needs_cxx
def test_a_single_source_cu_loads_as_in_mini_sglang(
    folder: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITKERN_ARCH", "9.0")
    settings.cache_clear()

    def load() -> Any:
        return load_jit(
            "add", "2", cuda_files=["single.cu"], cuda_wrappers=[("launch", "AddKernel<2>::run")]
        )

    before = compiles()
    assert callable(load().launch)
    assert callable(load().launch)
    assert compiles() - before == 1
    (entry,) = Cache(empty_cache).entries()
    assert (entry.key.route, entry.key.arch) == ("cuda", "9.0")
    assert entry.variant.startswith("nvcc-")


@pytest.mark.cuda
@needs_nvcc
def test_a_single_source_cu_runs(folder: Path) -> None:
    import torch

    x = torch.arange(1000, device="cuda", dtype=torch.float32)
    wrappers = [("launch", "AddKernel<2>::run")]
    module = load_jit("add", "2", cuda_files=["single.cu"], cuda_wrappers=wrappers)
    module.launch(x)
    assert torch.equal(x, torch.arange(1000, device="cuda", dtype=torch.float32) + 2)
