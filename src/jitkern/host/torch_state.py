"""Where PyTorch keeps what it knows of a thread, for C++ that is built without PyTorch."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

# How many dispatch modes are active, and the state of torch.jit.trace: the same in torch 2.8 to
# 2.13. Where PyTorch has them no more every call goes through its dispatcher: right, but slower.
# The current stream, of PyTorch's stable C interface; only a build with CUDA has it.
_SYMBOLS = (
    ("libc10.so", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"),
    ("libtorch_cpu.so", "_ZN5torch3jit6tracer15getTracingStateEv"),
    ("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"),
)


@cache
def torch_state() -> tuple[int, ...]:
    """Return the addresses of PyTorch's functions, 0 for one that it does not have."""
    import torch

    folder = Path(torch.__file__).parent / "lib"
    return tuple(_address(folder / library, symbol) for library, symbol in _SYMBOLS)


def _address(library: Path, symbol: str) -> int:
    try:
        # Only what PyTorch has loaded: a second copy would know nothing of its threads.
        loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return ctypes.cast(getattr(loaded, symbol), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
