"""DeviceModule.launch on a GPU: what users' kernels get of it. Without one: test_fake_driver.py."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs_nvrtc

from jitkern import load_jit, make_cpp_args

pytestmark = [needs_nvrtc, pytest.mark.cuda]

FILL = """
struct Fill {
  struct Params { int* out; };
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) { p.out[threadIdx.x] = 5; }
};
"""


def module_of(folder: Path, source: str, **exports: str) -> Any:
    file = folder / "kernel.cu"
    file.write_text(source)
    return load_jit("users", device_files=[str(file)], device_wrappers=[*exports.items()])


SHARED = """
__device__ int counter;
struct Add {
  struct Params { int amount; };
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) { if (threadIdx.x == 0) counter += p.amount; }
};
struct Read {
  struct Params { int* out; };
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) { *p.out = counter; }
};
"""


def test_exports_share_device_variables(tmp_path: Path) -> None:
    module = module_of(tmp_path, SHARED, add="Add", read="Read")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        module.launch("add", ctypes.c_int(14), grid=1)  # no tensor says the stream
    module.launch("read", out, grid=1)
    assert out.item() == 42
    module.launch("add", -2, grid=1)  # an int becomes the struct's
    module.launch("read", out, grid=1)
    assert out.item() == 40


CLUSTER = """
struct Ranks {
  struct Params { int* out; };
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) {
    unsigned rank, size;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) p.out[blockIdx.x] = rank + 100 * size;
  }
};
"""


@pytest.mark.parametrize("size", [2, 8, 16])
def test_launch_of_a_cluster(tmp_path: Path, size: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    module = module_of(tmp_path, CLUSTER, ranks="Ranks")
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    module.launch("ranks", out, grid=32, cluster=size)
    assert out.tolist() == [100 * size + rank % size for rank in range(32)]
    module.launch("ranks", out, grid=32)
    assert out.tolist() == [100] * 32


TOGETHER = """
struct Together {
  struct Params { unsigned* arrived; int* out; };
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) {
    if (threadIdx.x != 0) return;
    atomicAdd(p.arrived, 1u);
    while (atomicAdd(p.arrived, 0u) < gridDim.x) {}
    p.out[blockIdx.x] = 1;
  }
};
"""


def test_cooperative_launch(tmp_path: Path) -> None:
    """All blocks are there at once; too many are refused and not waited for in vain."""
    module = module_of(tmp_path, TOGETHER, together="Together")
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.zeros(blocks, dtype=torch.int32, device="cuda")
    module.launch("together", arrived, out, grid=blocks, cooperative=True)
    assert out.sum().item() == blocks
    with pytest.raises(RuntimeError, match="TOO_LARGE"):
        module.launch("together", arrived, out, grid=1 << 20, cooperative=True)


DEPENDENT = """
#include <jitkern/pdl.cuh>
template <bool kUsePdl>
struct Next {
  struct Params { int* data; long long count; };
  static constexpr int kNumThreads = 128, kMinBlocks = 1;
  static __device__ void run(const Params& p) {
    jitkern::wait_for_earlier_kernels<kUsePdl>();
    const long long i = blockIdx.x * 128ll + threadIdx.x;
    if (i < p.count) p.data[p.count + i] = p.data[i] + 1;
    if (i < p.count) p.data[i] = p.data[p.count + i];
    jitkern::let_next_kernel_start<kUsePdl>();
  }
};
"""


@pytest.mark.parametrize("use_pdl", [False, True])
def test_dependent_launches_of_users(tmp_path: Path, use_pdl: bool) -> None:
    module = module_of(tmp_path, DEPENDENT, next=f"Next<{make_cpp_args(use_pdl)}>")
    data = torch.zeros(2 * 100_000, dtype=torch.int32, device="cuda")
    for _ in range(50):
        module.launch("next", data, 100_000, grid=782, use_pdl=use_pdl)
    assert data[:100_000].tolist() == [50] * 100_000


def test_launch_takes_the_current_stream(tmp_path: Path) -> None:
    """Whoever says it: a tensor of torch, or nobody."""
    module = module_of(tmp_path, FILL, fill="Fill")
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # an error where it is not on the stream
        module.launch("fill", out, grid=1)
        module.launch("fill", ctypes.c_void_p(out.data_ptr()), grid=1)
    graph.replay()
    assert out.tolist() == [5] * 32
