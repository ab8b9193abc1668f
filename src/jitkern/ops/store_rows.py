"""``store_rows``: rows of parts, and rows in the formats of engines, into a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import jitkern.ops.store  # noqa: F401 - registers the builder of kernels without a format
from jitkern.args import not_a_tensor
from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.lazy import torch
from jitkern.ops import dispatch, formats
from jitkern.ops._ops import FormatName, TorchOverload, no_result
from jitkern.ops.dispatch import inference_mode
from jitkern.ops.formats import NO_FORMAT, NUMBERS

ScaleRule = Literal["pow2", "fp32"]
WRITES_SCALES = {"fp8_per_token_head", "int8_per_token_head"}

host.builds("store_rows", partial(formats.kernel, "store_rows"))


def kernels(format: str) -> list[DeviceModule]:  # noqa: A002 - the option --format of `warm`
    """Return the kernels for contiguous bf16 rows in a format."""
    return formats.kernels("store_rows", format)


_store_rows = host.Function("store_rows")
_NUMBERS = {None: NO_FORMAT, **NUMBERS}


def _through_torch(
    cache: torch.Tensor | Sequence[torch.Tensor],
    indices: torch.Tensor,
    parts: torch.Tensor | Sequence[torch.Tensor],
    *,
    format: str | None = None,  # noqa: A002 - see store_rows
    scales: torch.Tensor | Sequence[torch.Tensor] | None = None,
    scale_rule: str | None = None,
    skip: int | None = None,
) -> None:
    dispatch.refuse_transformed("store_rows", cache=cache, parts=parts, scales=scales)
    k_cache, v_cache = one_or_two("store_rows", "cache", cache)
    scale, v_scale = one_or_two("store_rows", "scales", [None] if scales is None else scales)
    dispatch.through_torch(
        "store_rows",
        "scales" if format in WRITES_SCALES else "default",
        cache=k_cache,
        v_cache=v_cache,
        indices=indices,
        parts=list(as_tuple(parts)),
        format=format,
        scale=scale,
        v_scale=v_scale,
        scale_rule=scale_rule,
        skip=skip,
    )


@dispatch.traced_as(_through_torch)
def store_rows(
    cache: torch.Tensor | Sequence[torch.Tensor],
    indices: torch.Tensor,
    parts: torch.Tensor | Sequence[torch.Tensor],
    *,
    format: FormatName | None = None,  # noqa: A002 - the engines' word
    scales: torch.Tensor | Sequence[torch.Tensor] | None = None,
    scale_rule: ScaleRule | None = None,
    skip: int | None = None,
) -> None:
    """Store row ``i`` of each part in row ``indices[i]`` of a cache, as it is or in a format.

    Asynchronous on the current stream; allocates nothing. One launch, or two if K and V, or parts
    in pages that lie apart, differ in shape. A CUDA graph may capture any call, also the first.
    Without a format bytes are copied, as in ``store_cache``. With one, values
    are scaled in groups and rounded to 8 bits: the same bytes on every device. After vLLM's
    ``concat_and_cache_mla`` and ``reshape_and_cache_flash``, and sglang's ``set_mla_kv_buffer``.

    - ``fp8_ds_mla``: e4m3 values, an fp32 scale for each 128 of them, then the second part as it is
      (656 bytes in DeepSeek V3.2). The scale is max(amax / 448, 1e-4), rounded up to a power of
      two; with ``scale_rule="fp32"`` it is amax / 448, and 1 for zeros.
    - ``fp8_index_k``: pages; all e4m3 values of a page, then an fp32 scale for each 128:
      max(amax, 1e-4) / 448, with ``scale_rule="pow2"`` rounded up to a power of two.
    - ``fp8_ds_v41``: e4m3 values, then a ue8m0 scale for each 32: max(amax / 448, 1e-4), rounded up
      to a power of two. ``fp8_ds_v41_paged``: the scales after all values of a page.
    - ``fp8``: e4m3 values, divided by a scale that is given, one for all or one for each head.
    - ``fp8_per_token_head``, ``int8_per_token_head``: 8-bit values of each head, and its scale in a
      tensor of its own: max(amax / 448, 1e-6), for int8 max(amax / 127, 1e-6).

    Numbers beyond the largest payload (448 or 127) become that number. A NaN does not change its
    group's scale, and becomes NaN (int8: 0). With an infinite value the group's scale is infinite
    (ue8m0: 255), its infinite values NaN (int8: 0) and its finite ones 0.

    Parameters
    ----------
    cache : Tensor, or two
        ``[num_slots, ...]`` or pages ``[num_blocks, page, ...]``, of one dimension more than the
        first part, as in ``store_cache``. With a format of one byte an item, such as uint8, and in
        pages ``[num_blocks, page, row_bytes]``, or ``[num_blocks, page, heads, dim]`` for the last
        three formats. Two: K and V, of as many slots.
    indices : Tensor
        ``[num_rows]``, int32 or int64, contiguous, on the caches' device. A negative index skips
        its row.
    parts : Tensor, or two
        ``[num_rows, ...]``. For one cache: parts of a row, side by side, such as ``kv_c`` and
        ``k_pe``; for two: the rows of each. With a format the values are fp32, fp16 or bf16,
        ``[num_rows, dim]`` or ``[num_rows, heads, dim]``.
    format : str, optional
        See above. Default: bytes as they are.
    scales : Tensor, or two, optional
        fp32, one for each cache. ``fp8``: 1 element, or one for each head; values are divided by
        it. Per token and head: ``[num_slots, heads]`` or ``[num_blocks, page, heads]``, written.
    scale_rule : {"pow2", "fp32"}, optional
        How a computed scale is rounded: see above. Default: as the format has it.
    skip : int, optional
        One more index whose rows are not stored, as in ``store_cache``.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, device, shape, stride, format or rule; memory that overlaps. Nothing was
        written.
    RuntimeError
        An argument requires grad, or a written one is an inference tensor outside of inference
        mode.
    IndexError
        An index of ``num_slots`` or more: as in ``store_cache``.
    """
    call = _store_rows.call
    try:
        number = _NUMBERS[format]
    except (KeyError, TypeError):
        number = formats.number_of("store_rows", format)
    written = as_tuple(cache)
    if scales is not None and format in WRITES_SCALES:
        written += as_tuple(scales)
    if inference_mode.is_enabled() or dispatch.is_plain(
        written, as_tuple(parts) + as_tuple(scales)
    ):
        try:
            if not call(cache, indices, parts, number, scales, scale_rule, skip):
                dispatch.bump_versions(written)
                return
        except dispatch.UNREADABLE as error:
            named = by_name(cache=cache, indices=indices, parts=parts, scales=scales)
            dispatch.require_wrapper(error, "store_rows", **named)
    _through_torch(
        cache,
        indices,
        parts,
        format=format,
        scales=scales,
        scale_rule=scale_rule,
        skip=skip,
    )


def as_tuple(tensors: Any) -> tuple[Any, ...]:
    """Return the tensors of a list, a tensor alone, or nothing for None."""
    match tensors:  # tells a list by a flag of its type: isinstance takes 0.1 us
        case None:
            return ()
        case [*_]:
            return tuple(tensors)
        case _:
            return (tensors,)


def one_or_two(op: str, name: str, tensors: Any) -> tuple[Any, Any]:
    """Return the tensors of a list as two arguments of an operator."""
    items = as_tuple(tensors)
    if len(items) not in (1, 2):
        expected = "a tensor, or a list of one or two"
        raise ValueError(f"{op}: {name}: a list of {len(items)}, expected {expected}")
    given = {key: item for key, item in by_name(**{name: tensors}).items() if item is not None}
    if (wrong := not_a_tensor(op, **given)) is not None:
        raise wrong
    return items[0], items[1] if len(items) == 2 else None


def by_name(**arguments: Any) -> dict[str, Any]:
    """Return tensors by their names in errors, such as ``indices`` or ``parts[1]``."""
    named: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, (tuple, list)):
            named |= {f"{name}[{i}]": item for i, item in enumerate(value)}
        else:
            named[name] = value
    return named


# -- for PyTorch -----------------------------------------------------------------------------------

_now = host.Function("store_rows_now")


def _run(
    cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    indices: torch.Tensor,
    parts: list[torch.Tensor],
    format: str | None,  # noqa: A002
    scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    scale_rule: str | None,
    skip: int | None,
) -> None:
    caches = (cache,) if v_cache is None else (cache, v_cache)
    scales = tuple(tensor for tensor in (scale, v_scale) if tensor is not None)
    number = formats.number_of("store_rows", format)
    _now(caches, indices, parts, number, scales, scale_rule, skip)


def _one_by_one(
    cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    indices: torch.Tensor,
    parts: list[torch.Tensor],
    scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    **rest: Any,
) -> None:
    """Store K, then V; the scales of one cache by way of a copy."""
    if v_cache is None:
        written = cast("torch.Tensor", scale)  # the cache shares its allocation with it
        copy = written.clone()
        _through_torch(cache, indices, parts, scales=copy, **rest)
        written.copy_(copy)
        return
    _through_torch(cache, indices, parts[0], scales=scale, **rest)
    _through_torch(v_cache, indices, parts[1], scales=v_scale, **rest)


_SCHEMA = (
    "store_rows{}(Tensor(a!) cache, Tensor(b!)? v_cache, Tensor indices, Tensor[] parts, *, "
    "str? format=None, Tensor{}? scale=None, Tensor{}? v_scale=None, str? scale_rule=None, "
    "SymInt? skip=None) -> ()"
)
OVERLOADS = (
    TorchOverload(_SCHEMA.format("", "", ""), _run, no_result, _one_by_one),
    TorchOverload(_SCHEMA.format(".scales", "(c!)", "(d!)"), _run, no_result, _one_by_one),
)
