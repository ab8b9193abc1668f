"""``indexing``: gather rows of a table, such as an embedding or one rank's part of it."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from jitkern.args import not_a_tensor
from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.lazy import torch
from jitkern.ops import dispatch
from jitkern.ops._ops import TorchOverload, no_result
from jitkern.ops.common import INDEX_BYTES, RowShape, entry_name, load_entries, widest_vec_bytes
from jitkern.ops.dispatch import inference_mode

# On an H200 1 to 2 % faster than 256 threads, and than 4 vectors of a row per lane.
CONFIG = KernelConfig(num_threads=128, max_occupancy=8, use_pdl=True)
IN_FLIGHT = 4  # vectors per lane; short rows are moved several at a time
VECS_PER_SPLIT = 2 * 32  # two vectors per lane of a warp


@cache
def kernel(
    row_bytes: int,
    vec_bytes: int,
    index_bytes: int,
    paged: int = 0,
    head_bytes: int | None = None,
) -> DeviceModule:
    """Return the device module of one row size, vector width and index type.

    ``paged``, ``head_bytes``: see ``jitkern.ops.store.kernel``.
    """
    splits = -(-row_bytes // (VECS_PER_SPLIT * vec_bytes))
    head = row_bytes if head_bytes is None else head_bytes
    pages, kind = ((True, head), f"pages_h{head}") if paged else ((), "")
    args = make_cpp_args(row_bytes, splits, *CONFIG, vec_bytes, index_bytes, IN_FLIGHT, *pages)
    name = entry_name("index", row_bytes, vec_bytes, index_bytes, kind=kind)
    entry = (name, f"IndexKernel<{args}>", CONFIG)
    return load_entries("index", "ops/index.cu", [entry], args, RowShape(IN_FLIGHT, splits))


host.builds("indexing", kernel)


def kernels(row_bytes: int) -> list[DeviceModule]:
    """Return the kernels for contiguous rows of ``row_bytes``."""
    vec_bytes = widest_vec_bytes(row_bytes)
    return [kernel(row_bytes, vec_bytes, index_bytes) for index_bytes in INDEX_BYTES]


_index, _index_now = host.Function("indexing"), host.Function("indexing_now")


def _through_torch(
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    vocab_range: Any = None,
    added_range: Any = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    ranges = {"vocab_range": vocab_range, "added_range": added_range, "vocab_size": vocab_size}
    table: dict[str, Any] = {"weights": weights, "indices": indices}
    if output is None:
        return cast("torch.Tensor", dispatch.through_torch("indexing", **table, **ranges))
    dispatch.through_torch("indexing", "out", **table, output=output, **ranges)
    return output


@dispatch.traced_as(_through_torch)
def indexing(
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    vocab_range: tuple[int, int] | None = None,
    added_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Return ``weights[indices]``; with ``vocab_range``, zeros for rows that other ranks hold.

    Asynchronous on the current stream. Bytes are copied, so the result is bit-exact for every
    dtype; lazy views of conj() and neg() are refused. A CUDA graph can capture any call, also the
    first. After ``torch.nn.functional.embedding`` (without its gradient) and vLLM's vocab-parallel
    embedding.

    Parameters
    ----------
    weights : Tensor
        ``[num_rows, ...]``. Rows are contiguous, of 1 byte or more; the row stride is free. With
        ``output``, also pages ``[num_blocks, page, ...]`` as in ``store_cache``. With
        ``indices`` on a GPU, ``weights`` may be in pinned host memory and larger than GPU memory:
        the kernel reads the rows in place. Keep it allocated and unchanged until the stream has
        passed the call.
    indices : Tensor
        Any shape, int32 or int64, on the device of ``weights``, or on a GPU if ``weights`` is in
        host memory. A negative index gives zeros. A tensor that is not contiguous is copied first.
    output : Tensor, optional
        ``[*indices.shape, *weights.shape[1:]]``, dtype of ``weights``, on the device of
        ``indices``. Rows are contiguous, equally spaced, and must not overlap rows of ``weights``.
        Returned.
    vocab_range : (int, int), optional
        ``(start, length)``: ``weights`` holds rows ``start`` to ``start + length - 1`` of a table
        that is split over ranks. Other indices give zeros, so a sum over ranks gives all rows.
    added_range : (int, int), optional
        ``(start, length)``: a second range, such as added tokens. Its rows follow those of
        ``vocab_range`` in ``weights``. The ranges must not overlap.
    vocab_size : int, optional
        With ``vocab_range``: the number of indices over all ranks. An index of ``vocab_size`` or
        more then raises. If it is not given, such an index gives zeros.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, device, shape, stride or range; memory that overlaps. Nothing was written.
    RuntimeError
        ``weights`` requires grad, or ``output`` is an inference tensor outside of inference mode.
    IndexError
        An index of ``num_rows`` or more (with ``vocab_range``: of ``vocab_size`` or more). On the
        CPU at once, with nothing written. On CUDA its row is zeros, and the next jitkern call on
        the device or ``check`` raises.
    """
    call = _index.call
    written = () if output is None else (output,)
    if inference_mode.is_enabled() or dispatch.is_plain(written, (weights,)):
        result = output
        try:
            if result is None:
                result = _new_output(weights, indices)
            more = None if added_range is None and vocab_size is None else (added_range, vocab_size)
            if not call(weights, indices, result, vocab_range, more):
                if written:
                    dispatch.bump_versions(written)
                return result
        except dispatch.UNREADABLE as error:
            # Inside torch.func.grad a new output is a wrapper, even if the arguments are not.
            tensors = {"weights": weights, "indices": indices, "output": result}
            dispatch.require_wrapper(error, "indexing", **tensors)
    return _through_torch(
        weights,
        indices,
        output=output,
        vocab_range=vocab_range,
        added_range=added_range,
        vocab_size=vocab_size,
    )


def _new_output(weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    # C++ would be 1.5 us faster, but its tensor would come through DLPack: record_stream() does
    # nothing on it, and resize_() is refused.
    try:
        # PyTorch parses separate sizes in a third less time than a tuple. A scalar has no sizes,
        # and needs an empty tuple.
        sizes = (*indices.shape, *weights.shape[1:]) or ((),)
        if weights.is_cuda or not indices.is_cuda:
            return weights.new_empty(*sizes)
        return weights.new_empty(*sizes, device=indices.device)
    except (AttributeError, TypeError) as error:
        raise not_a_tensor("indexing", weights=weights, indices=indices) or error from None


# -- for PyTorch -----------------------------------------------------------------------------------


def _run(weights: torch.Tensor, indices: torch.Tensor, *ranges: Any) -> torch.Tensor:
    output = _new_output(weights, indices)
    _run_out(weights, indices, output, *ranges)
    return output


def _run_out(
    weights: torch.Tensor,
    indices: torch.Tensor,
    output: torch.Tensor,
    vocab_range: list[int] | None,
    added_range: list[int] | None,
    vocab_size: int | None,
) -> None:
    _index_now(weights, indices.contiguous(), output, vocab_range, (added_range, vocab_size))


def _fake(weights: torch.Tensor, indices: torch.Tensor, *ranges: Any) -> torch.Tensor:
    return _new_output(weights, indices)


OVERLOADS = (
    TorchOverload(
        "indexing(Tensor weights, Tensor indices, *, SymInt[]? vocab_range=None, "
        "SymInt[]? added_range=None, SymInt? vocab_size=None) -> Tensor",
        run=_run,
        fake=_fake,
    ),
    # Not `-> Tensor(a!)`: functionalization refuses operators that return a written argument.
    TorchOverload(
        "indexing.out(Tensor weights, Tensor indices, *, Tensor(a!) output, "
        "SymInt[]? vocab_range=None, SymInt[]? added_range=None, SymInt? vocab_size=None) -> ()",
        run=_run_out,
        fake=no_result,
    ),
)
