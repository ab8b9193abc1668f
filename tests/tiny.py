"""Small kernels that the loader's tests compile, and the folder they lie in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jitkern.arch import Arch
from jitkern.cache import get
from jitkern.cache.stats import stats
from jitkern.env import settings
from jitkern.jit.loader import DeviceModule, load_jit
from jitkern.jit.record import Specialisation, record

SM_90 = Arch(9, 0)
Use = Callable[..., None]  # of the fixture below

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
    """Nothing of a test's environment is left: this one ends after `monkeypatch`."""
    yield
    settings.cache_clear()
    get._frozen = ""


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


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Sets variables, as another process would have them."""

    def put(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(f"JITKERN_{name}", str(value))
        settings.cache_clear()

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return put


def tiny(n: int = 4, **kwargs: Any) -> DeviceModule:
    wrappers = [("tiny", f"Tiny<{n}>")]
    return load_jit("tiny", str(n), device_files=["tiny.cu"], device_wrappers=wrappers, **kwargs)


def compiles() -> int:
    return stats().compiles


def write_lines(file: Path, *lines: object) -> Path:
    """Write a record by hand, which nobody else may write to."""
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    file.chmod(0o644)
    return file


def put(file: Path, name: str, *sources: Path) -> None:
    """Record a library `name` of these sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JITKERN_RECORD", str(file))
        settings.cache_clear()
        options = {"cpp_files": list(map(str, sources))}
        record(Specialisation("load_jit", (name,), options, ""))
    settings.cache_clear()
