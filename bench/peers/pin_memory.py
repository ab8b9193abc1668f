"""Pins memory in one way after the other, in this process; prints what each took, and says of it.

``python -m bench.peers.pin_memory 32 touched PinnedPool cuMemHostAlloc``
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable

import torch

from jitkern.offload import PinnedPool

GIB = 1 << 30


said: list[str] = []  # of a way by itself


def touched(num_bytes: int) -> Callable[[], object]:
    """Have the machine back as much memory, and give it back: no later way pays for that."""
    pool = PinnedPool(num_bytes)
    return pool.close


def pool(num_bytes: int) -> Callable[[], object]:
    made = PinnedPool(num_bytes)
    said.append(str(made))
    return made.close


def host_alloc(num_bytes: int) -> Callable[[], object]:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p()
    error = driver.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(num_bytes), 0)
    assert error == 0, error
    return lambda: driver.cuMemFreeHost(pointer)


def from_torch(num_bytes: int) -> Callable[[], object]:
    kept = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)]
    return kept.clear


WAYS: dict[str, Callable[[int], Callable[[], object]]] = {
    "touched": touched,
    "PinnedPool": pool,
    "cuMemHostAlloc": host_alloc,
    "torch, pin_memory=True": from_torch,
}


def main() -> None:
    num_bytes = int(float(sys.argv[1]) * GIB)
    torch.zeros(1, device="cuda")
    results = []
    for name in sys.argv[2:]:
        said.clear()
        started = time.perf_counter()
        free = WAYS[name](num_bytes)
        results.append([time.perf_counter() - started, " ".join(said)])
        free()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
