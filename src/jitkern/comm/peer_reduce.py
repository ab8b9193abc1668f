"""``PeerReducer``: small all_reduce and reduce_scatter, by memory that ranks write directly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from tvm_ffi.error import register_error

from jitkern.args import choice_arg, device_arg, int_arg, seconds_arg
from jitkern.comm.args import call_cpp, namespace
from jitkern.errors import CommError, CommTimeoutError, EarlierFault
from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops.common import RowShape, load_entries

AllReduceAlgorithm = Literal["auto", "one_shot", "two_shot"]
ALGORITHMS = {"auto": -1, "one_shot": 0, "two_shot": 1}

MAX_RANKS = 8
"""kMostPeers of csrc/comm/peer_reduce.h."""
WAYS = ("one_shot", "two_shot", "scatter", "meet")
"""PeerWay of csrc/comm/peer_reduce.h, in its order."""
_TYPES = ("f32", "f16", "bf16")  # FloatType of csrc/ops/floats.h
_CONFIG = KernelConfig(num_threads=512, max_occupancy=1, use_pdl=True)

# "auto" is one shot up to this many bytes, by the number of ranks. Two H100s with NVLink, 1 / 2 / 4
# MiB: 8.5 / 11.9 / 22.7 us in one shot, 8.9 / 14.9 / 21.6 in two.
ONE_SHOT_BYTES = {
    2: 2 << 20,
    **dict.fromkeys((3, 4), 256 << 10),
    **dict.fromkeys((5, 6, 7, 8), 128 << 10),
}
# Vectors of each rank that a thread waits for at once: some 32 registers in all.
IN_FLIGHT = {2: 4, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1}


@cache
def kernel(dtype: int, ranks: int, access_bytes: int, way: int, several: int) -> DeviceModule:
    """Return the device module; with `several` a thread has more than one vector."""
    in_flight = IN_FLIGHT[ranks] if several else 1
    args = make_cpp_args(dtype, ranks, access_bytes, way, _CONFIG, in_flight)
    name = f"jitkern_peer_{WAYS[way]}_v{access_bytes}_r{ranks}_n{in_flight}_{_TYPES[dtype]}"
    entries = [(name, f"PeerReduce<{args}>", _CONFIG)]
    shape = RowShape(in_flight)
    return load_entries("peer_reduce", "comm/peer_reduce.cu", entries, args, shape)


host.builds("peer_reduce", kernel)


class PeerReducer:
    """all_reduce and reduce_scatter for the ranks of one host, in one kernel, without NCCL.

    For small tensors, where latency matters most. A call is one launch on the current stream. Each
    rank writes its values to the workspaces of the others, waits for theirs, sums in fp32 in rank
    order, and rounds once. So all ranks get the same bits, with each algorithm. NaN stays NaN.
    After vLLM's custom all-reduce.

    All ranks make the same calls in the same order, with the same dtype, size and algorithm. CUDA
    graphs can capture calls. Calls must not overlap. A call on another stream waits for the
    previous one, whose stream must still exist; order replays of graphs yourself. Only one thread
    at a time may use a reducer.

    Parameters
    ----------
    addresses
        The address in this process of each rank's workspace, its own included: 2 to 8 ints.
    rank, world_size
        This rank and the number of ranks.
    workspace_bytes
        Bytes of each workspace, the same on all ranks; see ``workspace_bytes_for``. Call ``reset``
        before the first call, or set all bytes to 0xFF.
    device : torch.device, str or int, optional
        By default the current GPU, or the CPU if there is none.
    device_timeout_s
        Seconds that a kernel waits for other ranks; ``math.inf``: forever. After a timeout, later
        calls copy nothing and raise, until ``reset``.
    owner
        An object that keeps the workspaces mapped; the reducer keeps a reference to it.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        rank: int,
        world_size: int,
        workspace_bytes: int,
        *,
        device: torch.device | str | int | None = None,
        device_timeout_s: float = 10.0,
        owner: Any = None,
    ) -> None:
        call = "PeerReducer"
        self.world_size: int = int_arg(call, "world_size", world_size, 2, MAX_RANKS)
        self.rank: int = int_arg(call, "rank", rank, 0, self.world_size - 1)
        if len(addresses) != self.world_size or any(at <= 0 or at % 16 for at in addresses):
            expected = f"{self.world_size} multiples of 16 bytes, not 0"
            raise ValueError(f"{call}: addresses: {[*addresses]}, expected {expected}")
        self.device: torch.device = device_arg(call, "device", device)
        timeout_s = seconds_arg(call, device_timeout_s, "device_timeout_s", math.inf)
        self.device_timeout_s: float = timeout_s
        self._owner = owner
        ordinal = -1 if self.device.type == "cpu" else self.device.index
        one_shot_bytes = ONE_SHOT_BYTES[self.world_size]
        deadline_ns = 0 if math.isinf(timeout_s) else max(1, round(timeout_s * 1e9))
        self._cpp = namespace(
            host.Function("make_peer_reducer")(
                ordinal, list(addresses), self.rank, workspace_bytes, deadline_ns, one_shot_bytes
            )
        )
        self._word = torch.zeros(1, dtype=torch.int32, device=self.device)
        # C++ guards its own kernels with the barrier, and with the address of the word that says
        # whether an earlier barrier has timed out.
        self._barrier_in_cpp: tuple[Any, int] = self._cpp.device_barrier, int(self._cpp.intact())

    @staticmethod
    def workspace_bytes_for(world_size: int, max_bytes: int = 2 << 20) -> int:
        """Return the workspace bytes with which a tensor of ``max_bytes`` takes a single round."""
        world_size = int_arg("workspace_bytes_for", "world_size", world_size, 2, MAX_RANKS)
        max_bytes = int_arg("workspace_bytes_for", "max_bytes", max_bytes, 1)
        one_shot_bytes = ONE_SHOT_BYTES[world_size]
        return int(host.module()["peer_workspace_bytes"](world_size, max_bytes, one_shot_bytes))

    def all_reduce(
        self,
        x: Tensor,
        op: Literal["sum"] = "sum",
        *,
        output: Tensor | None = None,
        algorithm: AllReduceAlgorithm = "auto",
    ) -> None:
        """Sum ``x`` over all ranks, in place unless ``output`` is given.

        Parameters
        ----------
        x : Tensor
            fp32, fp16 or bf16, contiguous, any number of elements. Fastest if aligned to 16 bytes.
        output : Tensor, optional
            Same dtype and number of elements. Either ``x`` itself, or memory that does not overlap
            it.
        algorithm : "auto", "one_shot" or "two_shot"
            "one_shot": each rank sends all of ``x`` to all others, in one step. "two_shot": each
            rank sums a part and sends the result, which is fewer bytes in two steps. "auto" selects
            by size; on the CPU, one shot.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            An argument is wrong or requires grad; the call is traced; another stream than the
            current one is being captured. Nothing was sent.
        CommTimeoutError
            Ranks did not arrive in an earlier call, or on the CPU in this one; it names them. All
            later calls raise it, until ``reset``.
        IndexError
            An earlier op on this GPU found an index out of range. The sum has been queued
            nevertheless.
        """
        if op != "sum":
            choice_arg("all_reduce", "op", op, ["sum"])
        way = ALGORITHMS.get(algorithm)
        if way is None:
            choice_arg("all_reduce", "algorithm", algorithm, [*ALGORITHMS])
        if output is None or output is x:  # each tensor argument of C++ takes 0.2 us
            call_cpp("all_reduce", self._cpp.all_reduce, (x, None, way), "x", (x,))
        else:
            args = x, output, way
            call_cpp("all_reduce", self._cpp.all_reduce, args, "output x", (output,), (x,))

    def reduce_scatter(self, output: Tensor, x: Tensor, op: Literal["sum"] = "sum") -> None:
        """Sum ``x`` and write part ``rank`` of ``world_size`` to ``output``.

        ``output`` may be in ``x``.
        """
        if op != "sum":
            choice_arg("reduce_scatter", "op", op, ["sum"])
        args = output, x
        call_cpp("reduce_scatter", self._cpp.reduce_scatter, args, "output x", (output,), (x,))

    def device_barrier(self) -> None:
        """Make the current stream wait for those of all ranks. On GPUs, the host does not wait.

        After it, all ranks see what the GPU of any rank wrote before it. One launch, with the
        timeout of the other calls; CUDA graphs can capture it. Raises as ``all_reduce``.
        """
        self._cpp.device_barrier(self._word)  # a tensor: the FFI then tells C++ the current stream

    def reset(self) -> None:
        """Prepare this rank's workspace again after a timeout. Waits for the GPU.

        No rank may be in a call: call ``synchronize`` and a barrier before, and a barrier after.
        """
        self._cpp.reset()

    def _synchronize(self) -> None:
        """Wait for this rank's GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _late_call() -> dict[str, Any]:
    """Return the facts of the late call that C++ has raised last on this thread."""
    op, number, rank, missing = host.module()["last_late_call"]()
    ranks = [peer for peer in range(MAX_RANKS) if missing >> peer & 1]
    return {"op": str(op), "number": number, "rank": rank, "missing": ranks}


class _PeersLate(RuntimeError):  # noqa: N818 - it becomes a CommTimeoutError
    """Called by tvm-ffi with the text of a C++ error, which is all that it passes."""

    def __new__(cls, message: str) -> Any:
        return CommTimeoutError(message, **_late_call())


class EarlierCommTimeoutError(EarlierFault, CommTimeoutError):
    """A late call that another op on the device has found."""

    def __init__(self, message: str) -> None:
        super().__init__(message, **_late_call())


register_error("jitkern.PeersLate", _PeersLate)
register_error("jitkern.EarlierPeersLate", EarlierCommTimeoutError)
register_error("jitkern.PeersBroken", CommError)
