"""The way to a launch, on the driver of fake_driver.c; run by test_fake_driver.py.

Prints which of its checks failed, as JSON. PyTorch has no GPU here: tensors only say that they are
on one.
"""

from __future__ import annotations

import ctypes
from unittest.mock import patch

import launch_users
import torch
from fake_gpu import report_checks
from launch_fake import STREAM, cuda, driver, log, module_of, pinned, refused

import jitkern
from jitkern.host import library as host
from jitkern.jit import device as launch
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig
from jitkern.ops import index, pairs, store


def store_call(row_items: int) -> str:
    cache, rows = cuda(16, row_items), cuda(3, row_items)
    jitkern.store_cache(cache, cuda(16, row_items), cuda(3, dtype=torch.int32), rows, rows)
    return log()


def check_pdl_is_launched_as_it_was_compiled() -> None:
    """What the builder says, the template arguments and the launch are the same."""
    for use_pdl in (True, False):
        store.CONFIG = KernelConfig(64, 4, use_pdl)
        store.kernel.cache_clear()
        items = 164 if use_pdl else 165  # another specialisation: the last one is kept
        said = store_call(items)
        module = store.kernel(row_bytes=4 * items, vec_bytes=16 if use_pdl else 4, index_bytes=4)
        assert module.args[1:4] == ("64", "4", "true" if use_pdl else "false"), module.args
        assert "block 64,1,1" in said, said
        assert (" 6=1 " in said) is use_pdl, said


def check_store_is_launched_in_its_shape() -> None:
    store.CONFIG = KernelConfig(128, 8, True)
    store.kernel.cache_clear()
    said = store_call(2)  # 8 bytes: one lane, two rows in flight
    assert "jitkern_store_8B_v8_i32 of" in said and "grid 1,2,1 block 128,1,1" in said, said
    cache, rows, slots = cuda(1000, 512), cuda(1000, 512), cuda(1000, dtype=torch.int64)
    longer, shorter = (cuda(1000, 512), rows), (cuda(1000, 4), cuda(1000, 4))  # two splits, none
    for v, grid in ((longer, "500,2,1"), ((None, None), "500,1,1"), (shorter, "504,1,1")):
        jitkern.store_cache(cache, v[0], slots, rows, v[1])
        assert f"grid {grid}" in log(), grid


def check_indexing_takes_its_splits_from_python() -> None:
    for row_bytes, splits in ((16, 1), (656, 1), (1024, 1), (1040, 2), (8192, 8)):
        kernel = index.kernel(row_bytes, 16, 4)
        assert kernel.args[:2] == (str(row_bytes), str(splits))
        assert kernel._launch_config == (128, 1, 4, splits)
    table, output = cuda(50, 2048), cuda(100, 2048)
    jitkern.indexing(table, cuda(100, dtype=torch.int32), output=output)
    assert "grid 200,1,1 block 128,1,1" in log()  # 100 rows, 8 warps each


def check_h2d_gather_small_and_large() -> None:
    src, dst = pinned(torch.zeros(64, 4096)), cuda(64, 4096)
    pairs_ = cuda(32, 2, dtype=torch.int64)
    jitkern.h2d_gather(src, dst, pairs_)
    small = log()
    assert "block 256,1,1" in small and " 6=" not in small, small
    jitkern.h2d_gather(src, dst, pairs_, num_sms=2)
    assert "grid 2,1,1 block 1024,1,1" in (said := log()), said
    text = "h2d_gather: src: pageable .*"
    refused(ValueError, text, jitkern.h2d_gather, torch.zeros(64, 4096), dst, pairs_)
    jitkern.d2h_scatter(cuda(64, 4096), src, pairs_, num_sms=3)
    said = log()
    assert "jitkern_d2h_scatter_16384B_v16_i64_large of" in said, said
    assert "grid 3,1,1 block 1024,1,1" in said, said
    assert pairs.pair_config(1).num_threads == 1024


def check_wrong_facts_are_errors() -> None:
    """Threads that it was not compiled for, a configuration that lacks one, another struct."""

    def bad(text: str, items: int) -> None:
        table, output, rows = cuda(50, items), cuda(1, items), cuda(1, dtype=torch.int32)
        refused(RuntimeError, text, jitkern.indexing, table, rows, output=output)

    not_compiled = "indexing: launched as it was not compiled"
    driver.fake_kernel(b"jitkern_index_36B_v4_i32", ctypes.c_uint64(0), 32)
    bad(not_compiled, 9)
    driver.fake_kernel(b"jitkern_index_36B_v4_i32", ctypes.c_uint64(8), 128)
    bad("jitkern: a kernel's parameters are 8 bytes on the device and 144 on the host", 9)
    kernel = index.kernel(44, 4, 4)
    kernel._launch_config = ()
    with patch.dict(host._builders, {"indexing": lambda **_: kernel}):
        bad(not_compiled, 11)


def old_pdl_is_for_gpus_that_know_it() -> None:
    """Before 9.0 nothing waits for it, and nothing is launched with it."""
    assert " 6=" not in store_call(2)
    module_of("how").launch("how", cuda(1), grid=1, block=1, use_pdl=True)
    assert " 6=" not in log()


def old_clusters_are_refused() -> None:
    text = r"launch: cluster: given, expected None on a GPU before compute capability 9\.0"
    refused(ValueError, text, module_of("c").launch, "c", cuda(1), grid=2, block=1, cluster=2)


def old_without_parameter_sizes_all_is_launched() -> None:
    module_of("any").launch("any", cuda(1), 1, 2, 3, grid=1, block=1)
    assert "grid 1,1,1" in log()


if __name__ == "__main__":
    DeviceModule.image = lambda self, arch: f"image of {self.name}".encode()  # type: ignore[method-assign]
    launch.device_and_stream = lambda number: (1 if number < 0 else number, STREAM)
    report_checks({**globals(), **vars(launch_users)}, log)
