"""``indexing``: gather rows of a table, such as an embedding or one rank's part of it."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops import dispatch, pairs
from jitkern.ops.common import INDEX_BYTES, entry_name, load_entries, not_a_tensor, widest_vec_bytes
from jitkern.ops.register import OVERLOADS, TorchOverload

if TYPE_CHECKING:
    from torch import Tensor

# On an H200 1 to 2 % faster than 256 threads, and than 4 vectors of a row per lane.
CONFIG = KernelConfig(num_threads=128, max_occupancy=8, use_pdl=True)
IN_FLIGHT = 4  # vectors that a lane moves at a time, of several rows where they are short
VECS_PER_SPLIT = 2 * 32  # two for each lane of a warp
_NOT_CONTIGUOUS = 2  # Outcome of csrc/ops/index.cc
TABLE_IN_FLIGHT = 8  # of a table in host memory, as for h2d_gather


@cache
def kernel(
    row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int = -1, large: int = 1
) -> DeviceModule:
    """Return the device module of one row size, vector width and index type.

    With ``line_aligned``, 0 or 1: of large calls on a table in host memory. Small calls run the
    same kernel on host and device memory.
    """
    if line_aligned < 0:
        splits = -(-row_bytes // (VECS_PER_SPLIT * vec_bytes))  # parts of a row, a warp each
        args = make_cpp_args(row_bytes, splits, *CONFIG, vec_bytes, index_bytes, IN_FLIGHT)
        name = entry_name("index", row_bytes, vec_bytes, index_bytes)
        entry = (name, f"IndexKernel<{args}>", CONFIG)
        return load_entries("index", "ops/index.cu", [entry], args, IN_FLIGHT, splits=splits)
    spec = (row_bytes, vec_bytes, index_bytes, line_aligned, large)
    name = entry_name("index", row_bytes, vec_bytes, index_bytes, kind="table")
    args = pairs.pair_copy_args(*spec, TABLE_IN_FLIGHT)
    list_args = make_cpp_args(*spec[:3], *pairs.LIST_CONFIG[:2])
    listed = f"jitkern_index_pairs_i{8 * index_bytes}", f"PairsOfIndices<{list_args}>"
    entries = [(name, f"H2DGather<{args}>", pairs.pair_config(large)), (*listed, pairs.LIST_CONFIG)]
    return load_entries("index", "ops/index.cu", entries, args, TABLE_IN_FLIGHT)


shared_kernels = partial(pairs.list_kernels, host_target=0)  # of tables in host memory


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments that rows of ``row_bytes`` need."""
    vec_bytes = widest_vec_bytes(row_bytes)
    tables = [spec for spec in pairs.specialisations(row_bytes) if spec[-1]]
    return [*((row_bytes, vec_bytes, index_bytes) for index_bytes in INDEX_BYTES), *tables]


host.builds("indexing", kernel)
_index, _index_now = host.Function("indexing"), host.Function("indexing_now")


def _through_torch(
    weights: Tensor, indices: Tensor, *, output: Tensor | None = None, **ranges: Any
) -> Tensor:
    import torch

    ranges = {"vocab_range": None, "added_range": None, "vocab_size": None, **ranges}
    # The dispatcher's texts would differ. In a graph the op raises when it runs: torch.compile
    # replaces an error that is raised while it traces.
    if not torch.compiler.is_dynamo_compiling():
        wrong = not_a_tensor("indexing", weights=weights, indices=indices)
        if wrong is not None and output is None:
            raise wrong
        _check_ranges(ranges["vocab_range"], ranges["added_range"])
    given = {"weights": weights, "indices": indices, **ranges}
    if output is None:
        return cast("Tensor", dispatch.through_torch("indexing", **given))
    dispatch.through_torch("indexing", "out", output=output, **given)
    return output


@dispatch.traced_as(_through_torch)
def indexing(
    weights: Tensor,
    indices: Tensor,
    *,
    output: Tensor | None = None,
    vocab_range: tuple[int, int] | None = None,
    added_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Return ``weights[indices]``, with zeros where an index is outside of this part of the table.

    Asynchronous on the current stream. Bit-exact for every dtype: bytes are copied as they lie in
    memory, so resolve lazy conj and neg views first. A CUDA graph may capture any call, also
    the first. After ``torch.nn.functional.embedding``, which has a gradient, and vLLM's
    vocab-parallel embedding.

    Parameters
    ----------
    weights : Tensor
        ``[num_rows, ...]``; rows contiguous, row stride free, 1 byte or more. May lie in pinned
        host memory, larger than the GPU's, with ``indices`` on a GPU: each row asked for crosses
        the link once, in the table's order if that is faster (see ``h2d_gather``). Keep it
        allocated and unchanged until the stream has passed the call. Large calls then take scratch
        memory from PyTorch's caching allocator.
    indices : Tensor
        Any shape, int32 or int64, on the device of ``weights``, or on a GPU for a table in host
        memory. A negative index gives zeros. A tensor that is not contiguous is copied.
    output : Tensor, optional
        ``[*indices.shape, *weights.shape[1:]]``, dtype of ``weights``, on the device of
        ``indices``, rows contiguous and equally spaced; overlaps no row of ``weights``. Returned.
    vocab_range : (int, int), optional
        ``(start, length)``: ``weights`` holds rows ``start`` to ``start + length - 1`` of a table
        split over ranks. Other indices give zeros, so that a sum over ranks is the whole row.
    added_range : (int, int), optional
        ``(start, length)``: a second range, such as added tokens. Its rows follow those of
        ``vocab_range`` in ``weights``. The two share no index.
    vocab_size : int, optional
        With ``vocab_range``: the number of indices over all ranks. Larger ones raise as they do
        without ``vocab_range``; without it they are zeros.

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
    if dispatch.in_inference_mode() or (
        not dispatch.wants_gradient(weights)
        if output is None
        else dispatch.may_write((output,), (weights,))
    ):
        more = None if added_range is None and vocab_size is None else (added_range, vocab_size)
        result = output
        try:
            if result is None:
                result = _new_output(weights, indices)
            outcome = _index.call(weights, indices, result, vocab_range, more)
            if not outcome:
                if output is not None:
                    dispatch.wrote(output)
                return result
            if outcome == _NOT_CONTIGUOUS and not hasattr(indices, "contiguous"):
                _index_now(weights, indices, result, vocab_range, more)  # raises
        except TypeError:
            _check_ranges(vocab_range, added_range)
            raise
        except dispatch.UNREADABLE as error:
            # The new output, too: under torch.func.grad of something else it is a wrapper.
            tensors = {"weights": weights, "indices": indices, "output": result}
            ints = {"vocab_size": vocab_size}
            for name, given in (("vocab_range", vocab_range), ("added_range", added_range)):
                if isinstance(given, (list, tuple)):
                    ints |= {f"{name}[{i}]": one for i, one in enumerate(given)}
            expected = dict.fromkeys(ints, "an int")
            dispatch.require_wrapper(error, "indexing", expected, **tensors, **ints)
    ranges = {"vocab_range": vocab_range, "added_range": added_range, "vocab_size": vocab_size}
    return _through_torch(weights, indices, output=output, **ranges)


def _new_output(weights: Tensor, indices: Tensor) -> Tensor:
    # Not in C++, which would be 1.5 us faster: a tensor that comes through DLPack is not the
    # allocator's own, so that record_stream() on it does nothing and resize_() is refused.
    try:
        # Sizes one by one, which PyTorch reads in a third less time than a tuple of them, but it
        # wants one: of a single number an empty tuple.
        sizes = (*indices.shape, *weights.shape[1:]) or ((),)
        if weights.is_cuda or not indices.is_cuda:
            return weights.new_empty(*sizes)
        return weights.new_empty(*sizes, device=indices.device)
    except (AttributeError, TypeError) as error:  # not tensors
        raise not_a_tensor("indexing", weights=weights, indices=indices) or error from None


def _check_ranges(vocab_range: Any, added_range: Any) -> None:
    """Raise TypeError for what is no range, as it was given. C++, which checks too, cannot say."""
    for name, value in (("vocab_range", vocab_range), ("added_range", added_range)):
        if value is None:
            continue
        try:
            start, length = value
        except (TypeError, ValueError):
            raise TypeError(f"indexing: {name}: {value!r}, expected (start, length)") from None
        if start is None or length is None:
            raise TypeError(f"indexing: {name}: {value!r}, expected two ints")


# -- for PyTorch -----------------------------------------------------------------------------------


def _new(weights: Tensor, indices: Tensor, **rest: Any) -> Tensor:
    output = _new_output(weights, indices)
    _into(weights, indices, output=output, **rest)
    return output


def _into(
    weights: Tensor,
    indices: Tensor,
    *,
    output: Tensor,
    vocab_range: Any = None,
    added_range: Any = None,
    vocab_size: Any = None,
) -> None:
    # The dispatcher has made lists of the tuples: error messages quote what was given.
    first, added = (given and tuple(given) for given in (vocab_range, added_range))
    _check_ranges(first, added)
    more = (added, vocab_size)
    _index_now(weights, indices.contiguous(), output, first, more)


_REST = "SymInt[]? vocab_range=None, SymInt[]? added_range=None, SymInt? vocab_size=None"

OVERLOADS["indexing"] = [
    TorchOverload(
        f"indexing(Tensor weights, Tensor indices, *, {_REST}) -> Tensor",
        _new,
        lambda weights, indices, **_: _new_output(weights, indices),
    ),
    # Not `-> Tensor(a!)`: functionalization refuses to return what is written to.
    TorchOverload(
        f"indexing.out(Tensor weights, Tensor indices, *, Tensor(a!) output, {_REST}) -> ()",
        _into,
    ),
]
