"""``PeerReducer``: all_reduce of small tensors over memory that ranks write into each other's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from jitkern.comm import peer_kernel
from jitkern.comm.args import deadline_arg, device_arg
from jitkern.errors import CommError, CommTimeoutError, name_unreadable
from jitkern.host import module as host
from jitkern.host.faults import is_of_earlier_call
from jitkern.ops import dispatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Algorithm = Literal["auto", "one_shot", "two_shot"]
_WAYS = {"auto": -1, "one_shot": 0, "two_shot": 1}


class PeerReducer:
    """all_reduce and reduce_scatter of ranks of one host, by one kernel, without NCCL.

    For tensors so small that what counts is the trip. Every rank has a workspace that all ranks can
    write: on GPUs memory that is mapped on all of them, over NVLink or PCIe; on the CPU memory that
    processes share. A call is one launch on the current stream: each rank writes its values into
    the others' workspaces, waits until theirs have come, adds them up in fp32 in the order of
    ranks, and rounds once. So all ranks have the same bits, whichever the algorithm; of numbers
    they are those of the plain sum in that order, infinities, subnormals and the sign of zero
    included, and a NaN stays one.

    Every rank makes the same calls in the same order, with tensors of the same dtype and number of
    items, and the same algorithm. A CUDA graph can capture them; eager calls and replays may take
    turns. Calls must not run at the same time: a call on another stream than the one before comes
    behind it, but that a replay comes behind what went before, and before what follows, is up to
    the caller, as is that the stream of the last call still exists. One thread at a time.

    Parameters
    ----------
    addresses
        Where the workspace of each rank lies as this rank sees it, its own included: 2 to 8.
    rank, size
        This rank, and how many there are.
    workspace_bytes
        Of each workspace, the same on all ranks; see :meth:`workspace_bytes_for`. All its bytes are
        0xFF when the first rank makes a call: see :meth:`reset`.
    device
        This rank's GPU, or the CPU.
    deadline_s
        Seconds that a kernel waits for other ranks; ``math.inf``: for ever. When they are over, it
        gives up, and the workspace is broken: later calls do nothing, and raise.
    one_shot_bytes
        Up to so many bytes "auto" is one shot, the same on all ranks. By default as measured on two
        H100s, not as `jitkern calibrate` has found: ranks could have read different files.
    owner
        What keeps the workspaces mapped; kept as long as the reducer.

    Attributes
    ----------
    rank, size : int
    device : torch.device
    deadline_s : float

    Raises
    ------
    TypeError, ValueError
        A wrong argument.

    Examples
    --------
    >>> reducer = PeerReducer(addresses, 0, 2, num_bytes, device=device)  # doctest: +SKIP
    >>> reducer.all_reduce(x)  # doctest: +SKIP
    """

    def __init__(
        self,
        addresses: Sequence[int],
        rank: int,
        size: int,
        workspace_bytes: int,
        *,
        device: torch.device | str = "cuda",
        deadline_s: float = 10.0,
        one_shot_bytes: int | None = None,
        owner: Any = None,
    ) -> None:
        import torch

        _check(addresses, rank, size)
        self.device: torch.device = device_arg("PeerReducer", "device", device)
        self.rank: int = rank
        self.size: int = size
        self.deadline_s: float = deadline_arg("PeerReducer", "deadline_s", deadline_s)
        self._owner = owner
        _register_errors()
        ordinal = -1 if self.device.type == "cpu" else self.device.index
        deadline_ns = 0 if math.isinf(self.deadline_s) else max(1, round(self.deadline_s * 1e9))
        shapes = [number for shape in peer_kernel.SHAPES for number in shape]
        limit = peer_kernel.ONE_SHOT_BYTES[size] if one_shot_bytes is None else one_shot_bytes
        make = host.op("make_peer_reducer")
        functions = make(
            ordinal, list(addresses), rank, workspace_bytes, deadline_ns, shapes, limit
        )
        self._all_reduce: Callable[..., int] = functions[0]
        self._reduce_scatter: Callable[..., int] = functions[1]
        self._reset: Callable[[], None] = functions[2]
        self._device_barrier: Callable[[Tensor], None] = functions[3]
        self._word = torch.zeros(1, dtype=torch.int32, device=self.device)
        # What kernels that barriers guard are given: one, and where the word is by which they see
        # that an earlier one was given up.
        self.barrier_in_cpp: tuple[Any, int] = (functions[3], int(functions[4]()))

    @staticmethod
    def workspace_bytes_for(size: int, max_bytes: int = 2 << 20) -> int:
        """Return the bytes of a workspace in which messages up to ``max_bytes`` take one round.

        Larger ones take several, one behind the other, in the same call.
        """
        if size not in peer_kernel.ONE_SHOT_BYTES:
            raise ValueError(f"workspace_bytes_for: size: {size!r}, expected 2 to 8 ranks")
        if not isinstance(max_bytes, int) or max_bytes < 1:
            raise ValueError(f"workspace_bytes_for: max_bytes: {max_bytes!r}, expected 1 or more")
        one_shot = peer_kernel.ONE_SHOT_BYTES[size]
        parts = (min(max_bytes, one_shot), -(-max_bytes // size))  # of one shot and of two
        slots = [
            -(-min(part, most) // blocks)
            for part in parts
            for most, blocks, _ in peer_kernel.SHAPES
        ]
        return int(host.module()["peer_workspace_bytes"](size, max(slots) + 15))

    def all_reduce(
        self, x: Tensor, *, out: Tensor | None = None, algorithm: Algorithm = "auto"
    ) -> Tensor:
        """Add up ``x`` over all ranks; in place, unless ``out`` is given. Return the sum.

        Parameters
        ----------
        x : Tensor
            fp32, fp16 or bf16, contiguous, of any number of items. What is aligned to 16 bytes is
            read by vectors of as many, else by the widest that it is aligned to.
        out : Tensor, optional
            As many items of the same dtype: ``x`` itself, or memory of its own.
        algorithm : "auto", "one_shot" or "two_shot"
            In one shot every rank sends all to all others: one trip. In two shots each adds up one
            part and sends the sum: less is sent, in two trips. By default as the size asks for. The
            bits are the same.

        Raises
        ------
        TypeError, ValueError
            A wrong argument; nothing was sent.
        CommTimeoutError
            Ranks did not come to an earlier call, or on the CPU to this one, in time; it names
            them. Every call raises this from then on, until :meth:`reset`.
        IndexError
            An earlier op on this GPU has found an index out of range. This call was made all the
            same, so that ranks, which hear of such at different calls, stay in step.
        RuntimeError
            The call, and the one before on another stream, are part of one capture; or PyTorch
            would have to see it, for a gradient or a trace.
        """
        try:
            way = _WAYS[algorithm]
        except (KeyError, TypeError):
            raise ValueError(
                f"all_reduce: algorithm: {algorithm!r}, expected 'auto', 'one_shot' or 'two_shot'"
            ) from None
        if out is None:
            out = x
        # Each tensor that C++ is given takes 0.2 us, each that is asked for a gradient 0.1.
        read = () if out is x else (x,)
        if not dispatch.in_inference_mode() and not dispatch.may_write((out,), read):
            dispatch.refuse("all_reduce", {"out": out}, {"x": x})
        try:
            is_traced = self._all_reduce(x, out if read else None, way)
        except Exception as error:
            _raise(error, "all_reduce", out, x=x, out=out)
        if is_traced:
            raise traced_error("all_reduce")
        dispatch.wrote(out)
        return out

    def reduce_scatter(self, output: Tensor, x: Tensor) -> None:
        """Add up ``x`` over all ranks, and write part ``rank`` of ``size`` of it to ``output``.

        As :meth:`all_reduce` in two shots without the second. ``output`` may be this rank's part of
        ``x``.
        """
        if not dispatch.in_inference_mode() and not dispatch.may_write((output,), (x,)):
            dispatch.refuse("reduce_scatter", {"output": output}, {"x": x})
        try:
            is_traced = self._reduce_scatter(output, x)
        except Exception as error:
            _raise(error, "reduce_scatter", output, output=output, x=x)
        if is_traced:
            raise traced_error("reduce_scatter")
        dispatch.wrote(output)

    def device_barrier(self) -> None:
        """Have the current stream wait for all ranks' streams to come to it; the host waits not.

        What a rank's GPU wrote in front of it, into memory of any rank, all see behind it. One
        launch, as of the other calls, with their deadline; in a CUDA graph as well. On the CPU the
        caller waits.

        Raises
        ------
        CommTimeoutError
            As :meth:`all_reduce`.
        """
        self._device_barrier(self._word)  # which has C++ know the current stream

    def reset(self) -> None:
        """Make this rank's workspace as a new one, 0xFF all over, and forget that it was broken.

        It waits for the GPU. Every rank does it while none is in a call, of which a GPU's may have
        some queued, and makes its next call when all have: there is :meth:`synchronize` and a
        barrier of the caller's before it, and a barrier behind.
        """
        self._reset()

    def synchronize(self) -> None:
        """Wait for what this rank's GPU was given to do."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _raise(error: Exception, op: str, written: Any, **tensors: Any) -> NoReturn:
    """Raise what C++ has raised, which names no argument that it could not read."""
    if is_of_earlier_call(error):  # and this one was made
        dispatch.wrote(written)
        raise error
    name_unreadable(error, op, **tensors)


def traced_error(op: str) -> RuntimeError:
    """Return what is raised where PyTorch traces a call that it cannot see."""
    return RuntimeError(
        f"{op}: called while a tracer or a dispatch mode of PyTorch is active, expected neither: "
        "it would see nothing of the call"
    )


def _check(addresses: Sequence[int], rank: int, size: int) -> None:
    if not isinstance(size, int) or size not in peer_kernel.ONE_SHOT_BYTES:
        raise ValueError(f"PeerReducer: size: {size!r}, expected 2 to {peer_kernel.MOST_RANKS}")
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise ValueError(f"PeerReducer: rank: {rank!r}, expected 0 to {size - 1}")
    if len(addresses) != size:
        raise ValueError(f"PeerReducer: addresses: {len(addresses)} of them, expected {size}")
    for address in addresses:
        if not isinstance(address, int) or address <= 0 or address % 16 != 0:
            raise ValueError(
                f"PeerReducer: addresses: {address!r}, expected multiples of 16 bytes, not 0"
            )


# -- errors ----------------------------------------------------------------------------------------

_LATE = re.compile(r"(\w+): call (\d+) of rank (\d+): ranks? ([\d, ]+) did not come in time")


class _PeersLateError(RuntimeError):
    """What C++ raises, which carries a kind and a text only: it becomes a CommTimeoutError."""

    def __new__(cls, message: str) -> Any:
        found = _LATE.match(message)
        if found is None:
            return super().__new__(cls, message)
        op, number, rank, missing = found.groups()
        return CommTimeoutError(
            message,
            op=op,
            number=int(number),
            rank=int(rank),
            missing=[int(one) for one in missing.split(", ")],
        )


@cache
def _register_errors() -> None:
    from tvm_ffi.error import register_error

    register_error("jitkern.PeersLate", _PeersLateError)
    register_error("jitkern.PeersBroken", CommError)
