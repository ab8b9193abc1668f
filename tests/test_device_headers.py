"""The headers of the kernels that NVRTC alone can prove: what they say in PTX is PTX."""

from __future__ import annotations

from pathlib import Path

import pytest
from headers import load
from needs import needs_nvrtc

from jitkern.arch import Arch

pytestmark = needs_nvrtc


@pytest.mark.parametrize("major", [8, 9, 10])
def test_clusters(tmp_path: Path, empty_cache: Path, major: int) -> None:
    body = """
      using namespace jitkern;
      struct Shared { u32 value; u64 sums[33]; };
      Shared& own = own_shared<Shared>();
      if (threadIdx.x == 0) own.value = cluster_rank() + cluster_size();
      cluster_sync();
      if (threadIdx.x == 1) of_block(own.sums[3], cluster_size() - 1) = 5;
      cluster_arrive();
      *p.out = of_block(own, 0).value;
      cluster_wait()
    """
    image = load(tmp_path, '"ops/cluster.cuh"', body=body).image(Arch(major, 0))
    assert image.startswith(b"\x7fELF")


@pytest.mark.parametrize("major", [8, 9])
def test_memory_that_others_write(tmp_path: Path, empty_cache: Path, major: int) -> None:
    body = """
      using namespace jitkern;
      u64* word = reinterpret_cast<u64*>(p.out);
      const u64 begin = nanoseconds();
      while (load_acquire(word) == 0 && nanoseconds() - begin < 1000) continue;
      const uint4 values = load_fresh(reinterpret_cast<const uint4*>(p.out) + 1);
      store_release(word, values.x + values.w + load_fresh(reinterpret_cast<u32*>(p.out) + 9))
    """
    module = load(tmp_path, '"ops/system_memory.cuh"', body=body)
    assert module.image(Arch(major, 0)).startswith(b"\x7fELF")
