"""The memory that ranks read each other's rows in, where they can have one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitkern.errors import UnsupportedError
from jitkern.nn import layout
from jitkern.nn.args import OP, Method

if TYPE_CHECKING:
    from torch import Tensor

    from jitkern.comm.peer_memory import PeerMemory
    from jitkern.comm.protocol import Communicator


def memory_of(
    like: Tensor, num_rows: int, comm: Communicator, method: Method, group: Any, timeout_s: float
) -> PeerMemory | None:
    """Return memory for a table's rows, as many on each rank as fill whole pages: collective.

    None on all ranks, where `method` is "all_reduce", or "auto" and there can be none. `like` has
    the row's size, dtype and device.

    Raises
    ------
    ValueError
        For "peer": another device, or whole pages would take far more than the rows.
    Exception
        As of PeerMemory; UnsupportedError for "peer" only.
    """
    if method == "all_reduce":
        return None
    from jitkern.comm.peer_memory import HOST_PIECE_BYTES, PeerMemory

    if like.device.type not in ("cpu", "cuda"):
        if method == "auto":
            return None
        expected = "a GPU or the CPU for method='peer'"
        raise ValueError(f"{OP}: device: {like.device}, expected {expected}")
    # Not this GPU's pages: all ranks decide alike, of which one may have another GPU.
    page_bytes, row_bytes = HOST_PIECE_BYTES, _row_bytes(like)
    wasteful = _wasteful(like, num_rows, comm.size, page_bytes)
    if wasteful is not None:
        if method == "auto":
            return None
        raise wasteful
    try:
        peers = PeerMemory(
            layout.rows_in_pages(num_rows, comm.size, row_bytes, page_bytes) * row_bytes,
            group,
            rank=comm.rank,
            size=comm.size,
            device=like.device,
            timeout_s=timeout_s,
        )
    except UnsupportedError:  # on all ranks
        if method == "peer":
            raise
        return None
    if peers.share_bytes == peers.num_bytes:
        return peers
    peers.close()  # on all ranks: the largest of their pages
    if method == "auto":
        return None
    raise UnsupportedError(
        f"{OP}: memory of one of the ranks comes in other pages than of 2 MiB: {peers.share_bytes} "
        f"bytes for {peers.num_bytes}; use method='all_reduce'"
    )


def rows_of(peers: PeerMemory, like: Tensor) -> int:
    """Return how many rows there are in each rank's memory."""
    return peers.num_bytes // _row_bytes(like)


def _wasteful(like: Tensor, num_rows: int, size: int, page_bytes: int) -> ValueError | None:
    """Return the error for rows that fill no whole pages without much else, if they do not."""
    hidden_size, item_bytes, row_bytes = like.shape[1], like.dtype.itemsize, _row_bytes(like)
    if not layout.is_wasteful(num_rows, size, row_bytes, page_bytes):
        return None
    fits = layout.next_hidden_size(num_rows, size, hidden_size, item_bytes, page_bytes)
    taken_bytes = layout.rows_in_pages(num_rows, size, row_bytes, page_bytes) * row_bytes
    return ValueError(
        f"{OP}: hidden_size: {hidden_size} of {str(like.dtype)[6:]}, rows of {row_bytes} bytes: "
        f"{-(-num_rows // size)} on each rank take {taken_bytes} bytes of whole pages, expected at "
        f"most twice their own; hidden_size={fits} has them, or use method='all_reduce'"
    )


def _row_bytes(like: Tensor) -> int:
    return like.shape[1] * like.dtype.itemsize
