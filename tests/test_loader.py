"""load_jit, load_aot and what surrounds them: routes, messages, freeze, record, stats, speed."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs_cxx, needs_nvcc, needs_nvrtc

from jitkern.env import settings
from jitkern.errors import CompileError, FrozenError, ToolchainError
from jitkern.jit import resolve
from jitkern.jit.cache import Cache
from jitkern.jit.loader import (
    DeviceModule,
    freeze,
    load_aot,
    load_jit,
    load_recorded,
    replay,
    stats,
)
from jitkern.jit.toolchain import Arch, find_nvcc, find_nvrtc

SM_90 = Arch(9, 0)
Fresh = Callable[..., "subprocess.CompletedProcess[str]"]

TINY = """\
#include "half.cuh"
template <int N> struct Tiny {
  struct Params { int* out; };
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) { p.out[threadIdx.x] = half(N); }
};
"""

# As in mini-sglang: templates with a host function, exported by wrappers.
SCALE_CC = """\
template <int N> int64_t scale(int64_t x) { return x * N; }
int64_t rows(tvm::ffi::TensorView x) { return x.size(0); }
"""

# A single source with kernel and host code: the style of mini-sglang's own files.
SINGLE_CU = """\
#include <cuda_runtime.h>
template <int N> __global__ void add_kernel(float* x, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) x[i] += N;
}
template <int N> struct AddKernel {
  static void run(tvm::ffi::TensorView x) {
    const int64_t n = x.size(0);
    auto stream = static_cast<cudaStream_t>(
        TVMFFIEnvGetStream(x.device().device_type, x.device().device_id));
    add_kernel<N><<<(n + 255) / 256, 256, 0, stream>>>(static_cast<float*>(x.data_ptr()), n);
  }
};
"""


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    resolve._frozen = False


@pytest.fixture
def folder(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current directory with the sources above, and an empty cache."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "tiny.cu").write_text(TINY)
    (folder / "half.cuh").write_text("__device__ inline int half(int n) { return n / 2; }\n")
    (folder / "scale.cc").write_text(SCALE_CC)
    (folder / "single.cu").write_text(SINGLE_CU)
    monkeypatch.chdir(folder)
    return folder


def tiny(n: int = 4, **kwargs: Any) -> DeviceModule:
    wrappers = [("tiny", f"Tiny<{n}>")]
    return load_jit("tiny", str(n), device_files=["tiny.cu"], device_wrappers=wrappers, **kwargs)


def compiles() -> int:
    return stats().compiles.count


# -- the device route ------------------------------------------------------------------------------


@needs_nvrtc
def test_device_route_compiles_when_asked_and_once(folder: Path, empty_cache: Path) -> None:
    before = compiles()
    module = tiny()
    assert not empty_cache.exists()
    first = module.lookup(SM_90)
    assert (first.source, compiles() - before) == ("compiled", 1)
    assert first.path is not None
    assert first.path.is_relative_to(empty_cache)
    assert module.lookup(SM_90).source == "memo"
    again = tiny().lookup(SM_90)
    assert (again.source, again.bytes, again.path) == ("cached", first.bytes, first.path)
    assert module.image(SM_90).startswith(b"\x7fELF")
    assert module.image(Arch(8, 0)) != module.image(SM_90)
    assert compiles() - before == 2
    meta = module.entry(SM_90).meta
    assert meta["toolchain"] == find_nvrtc().id
    assert meta["describe"]["args"] == ["4"]
    assert meta["kind"] == "cubin"
    assert module.name == "tiny_4"


@needs_nvrtc
@pytest.mark.parametrize(
    "compiler",
    [pytest.param("nvrtc", marks=needs_nvrtc), pytest.param("nvcc", marks=needs_nvcc)],
)
def test_a_kernel_may_have_the_name_of_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("JITKERN_COMPILER", compiler)
    settings.cache_clear()
    (folder / "scale.cu").write_text((folder / "tiny.cu").read_text())
    module = load_jit(
        "scale", device_files=[str(folder / "scale.cu")], device_wrappers=[("scale", "Tiny<8>")]
    )
    assert module.image(SM_90).startswith(b"\x7fELF")


def test_other_toolchains_entry_counts_only_where_there_is_none(
    folder: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = tiny().entry(SM_90)
    assert entry.path is not None
    key = tiny().key(SM_90)
    foreign = type(key)(key.route, key.name, key.family, "nvrtc-99.9", key.describe)
    Cache(empty_cache).clear()
    Cache(empty_cache).publish(foreign, {"tiny.cubin": b"foreign"})
    assert tiny().lookup(SM_90).source == "compiled"
    Cache(empty_cache).prune(0, keep=Cache(empty_cache).lookup(foreign).path)  # type: ignore[union-attr]

    def missing() -> None:
        raise ToolchainError("no NVRTC; install one")

    monkeypatch.setattr("jitkern.jit.device.find_nvrtc", missing)
    assert tiny().image(SM_90) == b"foreign"
    monkeypatch.setattr("jitkern.jit.nvrtc.find_nvrtc", missing)
    with pytest.raises(ToolchainError, match="install one"):
        tiny(5).image(SM_90)


@needs_nvcc
@needs_nvrtc
def test_nvcc_makes_the_same_kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITKERN_COMPILER", "nvcc")
    settings.cache_clear()
    entry = tiny().entry(SM_90)
    assert entry.data.startswith(b"\x7fELF")
    assert entry.meta["toolchain"] == find_nvcc().id
    assert b"tiny" in entry.data


@needs_nvrtc
def test_places_in_order(
    folder: Path, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tiny().image(SM_90)
    shared = tmp_path / "shared"
    empty_cache.rename(shared)
    monkeypatch.setenv("JITKERN_CACHE_PATH", f"{tmp_path / 'nothing'}:{shared}")
    settings.cache_clear()
    found = tiny().lookup(SM_90)
    assert found.source == "cached"
    assert found.path is not None
    assert found.path.is_relative_to(shared)
    assert not empty_cache.exists()

    monkeypatch.delenv("JITKERN_CACHE_PATH")
    monkeypatch.setattr(resolve, "SHIPPED", shared)
    settings.cache_clear()
    resolve._places.cache_clear()
    before = stats().shipped.count
    assert tiny().lookup(SM_90).source == "shipped"
    assert tiny().image(SM_90) == image
    assert stats().shipped.count == before + 2
    resolve._places.cache_clear()


@needs_nvrtc
def test_a_bundle_serves_a_machine_without_compilers(
    folder: Path, empty_cache: Path, tmp_path: Path, fresh_python: Fresh
) -> None:
    images = {arch: tiny().image(Arch.parse(arch)) for arch in ("8.0", "9.0")}
    bundle = tmp_path / "kernels.jkb"
    assert Cache(empty_cache).export_bundle(bundle) == 2
    code = """
import hashlib, sys
from pathlib import Path
from jitkern.errors import ToolchainError
import jitkern.jit.device as device
from jitkern.jit.resolve import user_cache
from jitkern.jit.loader import load_jit, stats
def missing(): raise ToolchainError("none")
device.find_nvrtc = missing  # as on a machine where there is none
assert user_cache().import_bundle(Path(sys.argv[1])) == 2
m = load_jit("tiny", "4", device_files=[sys.argv[2]], device_wrappers=[("tiny", "Tiny<4>")])
for arch in sys.argv[3:]:
    print(hashlib.sha256(m.image(device.Arch.parse(arch))).hexdigest())
assert stats().compiles.count == 0
"""
    env = {"JITKERN_CACHE_DIR": str(tmp_path / "elsewhere"), "PATH": "/nonexistent"}
    done = fresh_python(code, str(bundle), str(folder / "tiny.cu"), *images, env=env)
    expected = [hashlib.sha256(image).hexdigest() for image in images.values()]
    assert done.stdout.split() == expected


@needs_nvrtc
def test_a_kernel_that_does_not_compile(folder: Path) -> None:
    (folder / "half.cuh").write_text("__device__ inline int half(int n) { return nonsense; }\n")
    with pytest.raises(CompileError, match="nonsense") as caught:
        tiny().image(SM_90)
    assert "-arch=sm_90" in caught.value.command
    assert "Tiny<4>::run" in str(caught.value.source)
    with pytest.raises(CompileError) as again:
        tiny().image(SM_90)
    assert str(again.value) == str(caught.value)


@needs_nvrtc
def test_threads_of_one_module(folder: Path) -> None:
    before = compiles()
    module = tiny(6)
    images: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: images.append(module.image(SM_90))) for _ in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(images) == 32
    assert len(set(images)) == 1
    assert compiles() - before == 1


WARM = """
import subprocess, sys, time
sys.modules["torch"] = None
import tvm_ffi  # imports cuda.bindings itself where it is installed
theirs = set(sys.modules)
import jitkern
import jitkern.jit.loader
from jitkern.jit.toolchain import Arch

def forbidden(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.exec", "os.posix_spawn", "os.system"):
        raise RuntimeError(f"{event} {args}")
sys.addaudithook(forbidden)
start = time.perf_counter()
for n in range(4, 12):
    module = jitkern.load_jit("tiny", str(n), device_files=[sys.argv[1]],
                              device_wrappers=[("tiny", f"Tiny<{n}>")])
    assert module.lookup(Arch(9, 0)).source == "cached"
ms = (time.perf_counter() - start) * 1e3 / 8
ours = set(sys.modules) - theirs
names = [name for name in ours if name.partition(".")[0] in ("cuda", "ninja", "filelock", "torch")]
maps = open("/proc/self/maps").read()
print(ms, "libnvrtc" in maps, *names)
"""


@needs_nvrtc
def test_a_warm_load_is_fast_and_starts_nothing(folder: Path, fresh_python: Fresh) -> None:
    for n in range(4, 12):
        tiny(n).image(SM_90)
    done = [fresh_python(WARM, str(folder / "tiny.cu")).stdout.split() for _ in range(3)]
    for _, loaded, *names in done:
        assert (loaded, names) == ("False", [])
    assert min(float(ms) for ms, *_ in done) < 2.0  # the best: the machine is shared


# -- the C++ and CUDA routes -----------------------------------------------------------------------


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
    assert (entry.name, entry.args, entry.route) == ("scale", "4", "cxx")
    assert list(folder.glob("*.so")) == []  # nothing is left beside the sources


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
    assert (entry.route, entry.arch) == ("cuda", "9.0")
    assert entry.toolchain.startswith("nvcc-")
    recorded = json.loads((entry.path / "meta.json").read_text())["depends"]["files"]
    assert list(recorded) == ["0:single.cu"]  # the toolkit's headers go by its version


@pytest.mark.cuda
@needs_nvcc
def test_a_single_source_cu_runs(folder: Path) -> None:
    import torch

    x = torch.arange(1000, device="cuda", dtype=torch.float32)
    wrappers = [("launch", "AddKernel<2>::run")]
    module = load_jit("add", "2", cuda_files=["single.cu"], cuda_wrappers=wrappers)
    module.launch(x)
    assert torch.equal(x, torch.arange(1000, device="cuda", dtype=torch.float32) + 2)


@pytest.mark.cuda
@needs_nvrtc
def test_launch_of_a_users_kernel(folder: Path) -> None:
    import torch

    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    tiny(10).launch("tiny", out, grid=1, block=32)
    assert out.tolist() == [5] * 32


BACKWARDS = """
struct Backwards {
  struct Params { int* out; long long count; };
  static constexpr int kNumThreads = 256, kMinBlocks = 1;
  static __device__ void run(const Params& p) {
    extern __shared__ int items[];
    for (int i = threadIdx.x; i < p.count; i += 256) items[i] = i;
    __syncthreads();
    for (int i = threadIdx.x; i < p.count; i += 256) p.out[i] = items[p.count - 1 - i];
  }
};
"""


@pytest.mark.cuda
@needs_nvrtc
def test_launch_with_much_shared_memory(folder: Path) -> None:
    import torch

    (folder / "backwards.cu").write_text(BACKWARDS)
    module = load_jit(
        "backwards", device_files=["backwards.cu"], device_wrappers=[("backwards", "Backwards")]
    )
    most_bytes = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for count in (100, most_bytes // 4):
        out = torch.zeros(count, dtype=torch.int32, device="cuda")
        module.launch("backwards", out, count, grid=1, block=256, shared_bytes=4 * count)
        assert torch.equal(out.cpu(), torch.arange(count, dtype=torch.int32).flip(0))
    with pytest.raises(
        ValueError,
        match=rf"launch: shared_bytes: {most_bytes + 4}, expected at most {most_bytes} on this GPU",
    ):
        module.launch("backwards", out, 1, grid=1, block=256, shared_bytes=most_bytes + 4)


# -- wrong arguments -------------------------------------------------------------------------------


def test_a_missing_file_is_named_with_the_places(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'nope\.cu' does not exist, tried .*csrc.* and "):
        load_jit("x", device_files=["nope.cu"], device_wrappers=[("x", "X")])
    with pytest.raises(FileNotFoundError, match=r"'/nope\.cc' does not exist, tried /nope\.cc$"):
        load_aot("x", cpp_files=["/nope.cc"])


def test_wrong_arguments(folder: Path) -> None:
    with pytest.raises(TypeError, match="args: empty"):
        load_jit()
    with pytest.raises(TypeError, match=r"args\[1\]: int, expected str"):
        load_jit("x", 656)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="cpp_files, cuda_files: both empty"):
        load_jit("x")
    with pytest.raises(ValueError, match="device_wrappers: empty"):
        load_jit("x", device_files=["tiny.cu"], device_wrappers=[])
    with pytest.raises(ValueError, match="cpp_files: given along with device_files"):
        load_jit("x", device_files=["tiny.cu"], cpp_files=["scale.cc"])  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="expected a C identifier"):
        load_jit("x", cpp_files=["scale.cc"], cpp_wrappers=[("a b", "scale<4>")])
    with pytest.raises(ValueError, match="expected extra_include_paths"):
        tiny(extra_cuda_cflags=["-I/usr/include"]).image(SM_90)


def test_no_gpu_and_no_arch_names_the_cure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match=r"JITKERN_ARCH=9\.0"):
        load_jit("x", cuda_files=["single.cu"])


def test_an_export_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ValueError, match="'nope', expected one of tiny"):
        tiny().launch("nope", grid=1, block=1)


# -- freeze, record, log ---------------------------------------------------------------------------


@needs_nvrtc
def test_frozen_misses_name_what_to_warm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tiny().image(SM_90)
    freeze()
    assert tiny().image(SM_90) == kept
    with pytest.raises(FrozenError, match=r"tiny_5-.*jitkern warm --replay FILE --arch 9\.0"):
        tiny(5).image(SM_90)
    store = load_jit(
        "store", "656", device_files=["ops/store.cu"], device_wrappers=[("store", "K<656>")]
    )
    with pytest.raises(
        FrozenError, match=r"jitkern warm --op store --element-size 656 --arch 9\.0$"
    ):
        store.image(SM_90)
    resolve._frozen = False
    monkeypatch.setenv("JITKERN_FREEZE", "1")
    settings.cache_clear()
    with pytest.raises(FrozenError):
        tiny(5).image(SM_90)


@needs_nvrtc
def test_frozen_takes_an_entry_of_another_compiler_rather_than_none(
    folder: Path, empty_cache: Path
) -> None:
    key = tiny().key(SM_90)
    foreign = type(key)(key.route, key.name, key.family, "nvrtc-99.9", key.describe)
    Cache(empty_cache).publish(foreign, {"tiny.cubin": b"foreign"})
    freeze()
    assert tiny().image(SM_90) == b"foreign"


@needs_nvrtc
@needs_cxx
def test_record_and_replay(
    folder: Path, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "used.jsonl"
    monkeypatch.setenv("JITKERN_RECORD", str(file))
    settings.cache_clear()
    for n in (4, 5, 4):
        module = tiny(n, extra_cuda_cflags=["-lineinfo"])
        module.image(SM_90)
        module.image(SM_90)
    module.image(Arch(8, 0))
    load_jit("scale", "4", cpp_files=["scale.cc"], cpp_wrappers=[("scale", "scale<4>")])
    used = replay(file)
    assert [str(one) for one in used] == [
        "tiny<4> for 9.0",
        "tiny<5> for 9.0",
        "tiny<4> for 8.0",
        "scale<4>",
    ]
    before = compiles()
    for one in used:
        loaded = load_recorded(one)
        if isinstance(loaded, DeviceModule):
            assert loaded.lookup(Arch.parse(one.arch)).source == "cached"
    assert compiles() == before

    with file.open("a") as out:
        out.write("{}\n")
    with pytest.raises(ValueError, match=r"used\.jsonl:5: not a recorded"):
        replay(file)


@needs_nvrtc
def test_many_processes_record_into_one_file(
    folder: Path, empty_cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "used.jsonl"
    code = """
import sys
from jitkern.jit.loader import load_jit
from jitkern.jit.toolchain import Arch
for n in range(4, 8):
    load_jit("tiny", str(n), device_files=["tiny.cu"],
             device_wrappers=[("tiny", f"Tiny<{n}>")]).image(Arch(9, 0))
"""
    import os

    source = str(Path(resolve.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": source, "JITKERN_RECORD": str(file)}
    children = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    assert {str(one) for one in replay(file)} == {f"tiny<{n}> for 9.0" for n in range(4, 8)}


@needs_nvrtc
def test_log_has_one_line_per_lookup(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JITKERN_LOG", "1")
    settings.cache_clear()
    with caplog.at_level(logging.INFO, logger="jitkern"):
        tiny().image(SM_90)
        tiny().image(SM_90)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("jitkern: tiny_4-")
    assert ": compiled, " in lines[0]
    assert ": cached, " in lines[1]
    assert " ms (" in lines[1]


@needs_nvrtc
def test_log_goes_to_stderr_where_nobody_configured_logging(
    folder: Path, fresh_python: Fresh
) -> None:
    code = """
from jitkern.jit.loader import load_jit
from jitkern.jit.toolchain import Arch
load_jit("tiny", "4", device_files=["tiny.cu"], device_wrappers=[("tiny", "Tiny<4>")]).image(
    Arch(9, 0))
"""
    assert "compiled" in fresh_python(code, env={"JITKERN_LOG": "1"}).stderr
    assert fresh_python(code).stderr == ""
