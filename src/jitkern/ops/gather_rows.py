"""``gather_rows``: rows of a KV cache in an engine's format, as bf16, fp16 or fp32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.lazy import torch
from jitkern.ops import dispatch, formats
from jitkern.ops._ops import FormatName, TorchOverload, no_result
from jitkern.ops.dispatch import inference_mode
from jitkern.ops.formats import NUMBERS
from jitkern.ops.store_rows import as_tuple, by_name, one_or_two

host.builds("gather_rows", partial(formats.kernel, "gather_rows"))


def kernels(format: str) -> list[DeviceModule]:  # noqa: A002 - the option --format of `warm`
    """Return the kernels for contiguous bf16 rows in a format."""
    return formats.kernels("gather_rows", format)


_gather_rows = host.Function("gather_rows")


def _through_torch(
    cache: torch.Tensor | Sequence[torch.Tensor],
    indices: torch.Tensor,
    outputs: torch.Tensor | Sequence[torch.Tensor],
    *,
    format: str,  # noqa: A002 - see gather_rows
    scales: torch.Tensor | Sequence[torch.Tensor] | None = None,
    count: torch.Tensor | None = None,
) -> None:
    dispatch.refuse_transformed("gather_rows", cache=cache, outputs=outputs, scales=scales)
    output, second = one_or_two("gather_rows", "outputs", outputs)
    dispatch.through_torch(
        "gather_rows",
        cache=list(as_tuple(cache)),
        indices=indices,
        output=output,
        second=second,
        format=format,
        scales=list(as_tuple(scales)),
        count=count,
    )


@dispatch.traced_as(_through_torch)
def gather_rows(
    cache: torch.Tensor | Sequence[torch.Tensor],
    indices: torch.Tensor,
    outputs: torch.Tensor | Sequence[torch.Tensor],
    *,
    format: FormatName,  # noqa: A002 - the engines' word
    scales: torch.Tensor | Sequence[torch.Tensor] | None = None,
    count: torch.Tensor | None = None,
) -> None:
    """Write the values of row ``indices[i]`` of a cache to row ``i`` of `outputs`.

    The inverse of ``store_rows``: each value is the payload times its scale, in fp32, rounded to
    the dtype of the output; the rest of a row is copied. Asynchronous on the current stream;
    allocates nothing. One launch, or two if K and V differ in shape. A CUDA graph may capture any
    call, also the first. After vLLM's
    ``cp_gather_and_upconvert_fp8_kv_cache``.

    Parameters
    ----------
    cache : Tensor, or two
        As in ``store_rows``. May lie in pinned host memory with ``indices`` on a GPU: the rows are
        read in place, so that the fetch and the conversion are one pass. Keep it allocated and
        unchanged until the stream has passed the call.
    indices : Tensor
        ``[num_rows]``, int32 or int64, contiguous. A negative index gives zeros.
    outputs : Tensor, or two
        As `parts` of ``store_rows``: views of one tensor ``[num_rows, 576]`` for values and the
        rest of a row, or K and V. fp32, fp16 or bf16, on the device of ``indices``.
    format : str
        See ``store_rows``.
    scales : Tensor, or two, optional
        As in ``store_rows``; read.
    count : Tensor, optional
        int32 or int64, 1 element on the device of ``indices``: the number of indices that are used.
        The other rows stay as they are.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, device, shape, stride or format; memory that overlaps or is not pinned.
        Nothing was written.
    RuntimeError
        An argument requires grad, or an output is an inference tensor outside of inference mode.
    IndexError
        An index of ``num_slots`` or more. On the CPU at once, with nothing written. On CUDA its row
        is zeros, and the next jitkern call on the device or ``check`` raises.
    """
    call = _gather_rows.call
    try:
        number = NUMBERS[format]
    except (KeyError, TypeError):
        number = formats.number_of("gather_rows", format)
    written = as_tuple(outputs)
    if inference_mode.is_enabled() or dispatch.is_plain(
        written, as_tuple(cache) + as_tuple(scales)
    ):
        try:
            if not call(cache, indices, outputs, number, scales, count):
                dispatch.bump_versions(written)
                return
        except dispatch.UNREADABLE as error:
            named = by_name(cache=cache, indices=indices, outputs=outputs, scales=scales)
            dispatch.require_wrapper(error, "gather_rows", **named, count=count)
    _through_torch(cache, indices, outputs, format=format, scales=scales, count=count)


# -- for PyTorch -----------------------------------------------------------------------------------

_now = host.Function("gather_rows_now")


def _run(
    cache: list[torch.Tensor],
    indices: torch.Tensor,
    output: torch.Tensor,
    second: torch.Tensor | None,
    format: str,  # noqa: A002
    scales: list[torch.Tensor],
    count: torch.Tensor | None,
) -> None:
    outputs = (output,) if second is None else (output, second)
    number = formats.number_of("gather_rows", format)
    _now(cache, indices, outputs, number, scales, count)


def _one_by_one(
    cache: list[torch.Tensor],
    indices: torch.Tensor,
    output: torch.Tensor,
    second: torch.Tensor,
    scales: list[torch.Tensor],
    **rest: Any,
) -> None:
    """Gather into `output`, and into `second` by way of a copy."""
    copy = second.clone()  # rows past the count stay
    _through_torch(cache, indices, (output, copy), scales=scales or None, **rest)
    second.copy_(copy)


OVERLOADS = (
    TorchOverload(
        "gather_rows(Tensor[] cache, Tensor indices, Tensor(a!) output, Tensor(b!)? second, *, "
        "str format, Tensor[] scales, Tensor? count=None) -> ()",
        run=_run,
        fake=no_result,
        one_by_one=_one_by_one,
    ),
)
