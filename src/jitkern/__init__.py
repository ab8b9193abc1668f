"""JIT-compiled CUDA kernels that move data in LLM inference, and the loader that compiles them.

Importing this package does nothing else: torch, tvm-ffi, CUDA, compilers and the disk come into
play when a public name is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from jitkern.gate import gate as _gate
from jitkern.ops._ops import OPS as _OPS
from jitkern.version import __version__ as __version__

if TYPE_CHECKING:
    from jitkern import comm as comm
    from jitkern import integrations as integrations
    from jitkern import nn as nn
    from jitkern import offload as offload
    from jitkern import typing as typing
    from jitkern.arch import Arch as Arch
    from jitkern.cache.get import freeze as freeze
    from jitkern.cache.get import unfreeze as unfreeze
    from jitkern.cache.stats import stats as stats
    from jitkern.errors import CacheError as CacheError
    from jitkern.errors import CommError as CommError
    from jitkern.errors import CommTimeoutError as CommTimeoutError
    from jitkern.errors import CompileError as CompileError
    from jitkern.errors import FrozenError as FrozenError
    from jitkern.errors import JitkernError as JitkernError
    from jitkern.errors import PoolShareError as PoolShareError
    from jitkern.errors import ToolchainError as ToolchainError
    from jitkern.errors import UnsupportedError as UnsupportedError
    from jitkern.errors import WarmError as WarmError
    from jitkern.host.faults import check as check
    from jitkern.jit.device import DeviceModule as DeviceModule
    from jitkern.jit.loader import load_aot as load_aot
    from jitkern.jit.loader import load_jit as load_jit
    from jitkern.jit.template import KernelConfig as KernelConfig
    from jitkern.jit.template import make_cpp_args as make_cpp_args
    from jitkern.ops.block_buffers import BlockBuffers as BlockBuffers
    from jitkern.ops.block_buffers import LayerSignals as LayerSignals
    from jitkern.ops.compare_key import fast_compare_key as fast_compare_key
    from jitkern.ops.copy_blocks import copy_blocks as copy_blocks
    from jitkern.ops.d2h_scatter import d2h_scatter as d2h_scatter
    from jitkern.ops.gather_rows import gather_rows as gather_rows
    from jitkern.ops.h2d_gather import h2d_gather as h2d_gather
    from jitkern.ops.index import indexing as indexing
    from jitkern.ops.memcpy_2d import memcpy_2d_async as memcpy_2d_async
    from jitkern.ops.merge import merge_state as merge_state
    from jitkern.ops.merge import merge_states as merge_states
    from jitkern.ops.store import store_cache as store_cache
    from jitkern.ops.store_rows import store_rows as store_rows
    from jitkern.ops.unpack import unpack as unpack
    from jitkern.perf import compare_memory_kernel_perf as compare_memory_kernel_perf
    from jitkern.perf import perf_cpu as perf_cpu
    from jitkern.perf import perf_cuda as perf_cuda
    from jitkern.warming import warm as warm

# pip installs the wheel into free-threaded Python too. NVRTC is called through ctypes, which is not
# thread-safe in 3.13t (cuda-python#1177); nothing has run under 3.14t.
if hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled():
    raise ImportError(
        f"jitkern: Python {sys.version_info[0]}.{sys.version_info[1]} without the GIL, expected "
        "the GIL: use the regular build of Python, or set PYTHON_GIL=1"
    )

# The public names by the module that defines them. The imports above say the same to a type
# checker, which cannot read a table; tests/test_package.py proves that the two agree.
_PUBLIC = {
    **{f"jitkern.ops.{op.stem}": (op.function, *op.more) for op in _OPS},
    "jitkern.ops.block_buffers": ("BlockBuffers", "LayerSignals"),
    "jitkern.host.faults": ("check",),
    "jitkern.perf": ("compare_memory_kernel_perf", "perf_cpu", "perf_cuda"),
    "jitkern.warming": ("warm",),
    "jitkern.jit.loader": ("load_aot", "load_jit"),
    "jitkern.jit.device": ("DeviceModule",),
    "jitkern.arch": ("Arch",),
    "jitkern.cache.get": ("freeze", "unfreeze"),
    "jitkern.cache.stats": ("stats",),
    "jitkern.jit.template": ("KernelConfig", "make_cpp_args"),
    "jitkern.errors": (
        *("CacheError", "CommError", "CommTimeoutError", "CompileError", "FrozenError"),
        *("JitkernError", "PoolShareError", "ToolchainError", "UnsupportedError", "WarmError"),
    ),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
_PACKAGES = ("comm", "integrations", "nn", "offload", "typing")

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # a type checker would take every name for one of the package

    def __getattr__(name: str) -> object:
        home = f"jitkern.{name}" if name in _PACKAGES else _HOME.get(name)
        if home is None:
            from jitkern.names import no_attribute

            raise no_attribute(__name__, name)
        with _gate:
            module = import_module(home)
        value = module if name in _PACKAGES else getattr(module, name)
        globals()[name] = value  # the next access is a plain dictionary look-up
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
