"""The kernels of ``PeerReducer``: what is compiled, and how it is launched."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from jitkern.host import module as host
from jitkern.jit.device import DeviceModule, load_own, record_hint
from jitkern.jit.template import KernelConfig, make_cpp_args

if TYPE_CHECKING:
    import torch

MOST_RANKS = 8
"""kMostPeers of csrc/comm/peer_reduce.h."""
TYPES = ("f32", "f16", "bf16")
"""As FloatType of csrc/ops/floats.h begins."""
WAYS = ("one_shot", "two_shot", "scatter", "meet")
"""PeerWay of csrc/comm/peer_reduce.h, in its order."""

CONFIG = KernelConfig(num_threads=512, max_occupancy=1, use_pdl=True)

# -- what is to be tuned on GPUs -------------------------------------------------------------------

# Up to so many bytes of each part (of the message, in one shot): blocks, and threads of each. All
# ranks launch the same. 8 KiB of two H200s: 2.31 us with 4 blocks of 128 threads.
SHAPES = (
    (2 << 10, 1, 128),
    (4 << 10, 2, 128),
    (8 << 10, 4, 128),
    (16 << 10, 8, 128),
    (32 << 10, 16, 128),
    (64 << 10, 32, 128),
    (128 << 10, 64, 128),
    (256 << 10, 64, 256),
    (1 << 62, 64, 512),
)
# Up to so many bytes "auto" is one shot, by the number of ranks. Of two GPUs `jitkern calibrate`
# finds its own; the default and what it comes from are in csrc/host/tuning.cc.
ONE_SHOT_BYTES = {
    2: 2 << 20,
    3: 256 << 10,
    4: 256 << 10,
    5: 128 << 10,
    6: 128 << 10,
    7: 128 << 10,
    8: 128 << 10,
}
# Vectors of each rank that a thread waits for at once: some 32 registers in all.
IN_FLIGHT = {2: 4, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1}


def measured_one_shot_bytes(ranks: int, device: torch.device) -> int:
    """Return that limit as this machine was calibrated; ranks are to compare theirs."""
    if ranks != 2 or device.type == "cpu":
        return ONE_SHOT_BYTES[ranks]
    return int(host.module()["figures"](device.index)["one_shot_bytes"])


@cache
def kernel(dtype: int, ranks: int, access_bytes: int, way: int, several: int) -> DeviceModule:
    """Return the device module of one dtype, number of ranks, alignment and algorithm.

    With `several` a thread has more than one vector, and some of them in flight.
    """
    in_flight = IN_FLIGHT[ranks] if several else 1
    args = make_cpp_args(dtype, ranks, access_bytes, way, CONFIG, in_flight)
    name = f"jitkern_peer_{WAYS[way]}_v{access_bytes}_r{ranks}_n{in_flight}_{TYPES[dtype]}"
    module = load_own(
        "peer_reduce",
        *args,
        device_files=["comm/peer_reduce.cu"],
        device_wrappers=[(name, f"jitkern::PeerReduce<{args}>")],
    )
    module.hint = record_hint  # no `jitkern warm` names it: it is no op of one device
    return module.launched_with(CONFIG, in_flight=in_flight)


host.builds("peer_reduce", kernel)
