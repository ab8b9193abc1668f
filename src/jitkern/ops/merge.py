"""``merge_state`` and ``merge_states``: partial results of attention, merged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, overload

from jitkern.args import not_a_tensor, type_text
from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.lazy import torch
from jitkern.ops import dispatch
from jitkern.ops._ops import TorchOverload, no_result
from jitkern.ops.common import load_entries, widest_vec_bytes
from jitkern.ops.dispatch import inference_mode

LseBase = Literal["e", "2"]
LseLayout = Literal["tokens_heads", "heads_tokens"]
Results = tuple["torch.Tensor", "torch.Tensor | None"]

_NAMES = {
    "merge_state": ("partial_a", "lse_a", "partial_b", "lse_b"),
    "merge_states": ("partials", "lses"),
}

# FloatType of csrc/ops/floats.h, in its order.
_TYPES = ("f32", "f16", "bf16", "e4m3")
_F32, _F16, _BF16 = range(3)
CAPACITIES = (2, 4, 8)  # partials of a kernel; csrc/ops/merge.cc merges more in groups of 8
# Threads of a small block, and of a large one: csrc/ops/merge.cc has the figures.
SMALL_THREADS = 128
MOST_TIMES = 4
MOST_THREADS = 512
THREADS_OF_SM = 1024  # each has 64 registers


class BlockShape(NamedTuple):
    """How the threads of a block share rows."""

    row_threads: int
    rows: int  # rows of a small block
    times: int  # small blocks in a large one

    @classmethod
    def of(cls, num_vecs: int) -> BlockShape:
        """Return the shape for rows of `num_vecs` vectors that leaves the fewest lanes idle."""
        steps = -(-num_vecs // MOST_THREADS)
        row_threads = -(-num_vecs // steps)

        def cost(rows: int) -> tuple[float, int]:
            threads = row_threads * rows
            return (-threads % 32) / threads, SMALL_THREADS - threads

        rows = min(range(1, max(1, SMALL_THREADS // row_threads) + 1), key=cost)
        times = max(1, min(MOST_TIMES, MOST_THREADS // (row_threads * rows)))
        return cls(row_threads, rows, times)

    @property
    def num_threads(self) -> int:
        """The threads of a large block."""
        return self.row_threads * self.rows * self.times


class MergeShape(NamedTuple):
    """The ints that the launch in csrc/ops/merge.cc takes from here."""

    times: int  # small blocks in a large one
    rows: int  # rows of a small block


@cache
def kernel(
    dim: int, vec_elems: int, in_type: int, out_type: int, capacity: int, plain: int
) -> DeviceModule:
    """Return the device module of one dim, vector, choice of types and number of partials.

    `plain`: all partials are present, with equally spaced rows and the same layout. A plain kernel
    of two partials has 30 % fewer instructions, and is as fast as a copy.
    """
    shape = BlockShape.of(dim // vec_elems)
    warps = -(-shape.num_threads // 32)
    occupancy = max(1, THREADS_OF_SM // (32 * warps))
    config = KernelConfig(num_threads=shape.num_threads, max_occupancy=occupancy, use_pdl=True)
    spec = (dim, vec_elems, in_type, out_type, capacity)
    args = make_cpp_args(*spec, bool(plain), *config, shape.row_threads)
    name = f"jitkern_merge_v{vec_elems}_d{dim}_n{capacity}_{_TYPES[in_type]}"
    if out_type != in_type:
        name += f"_to_{_TYPES[out_type]}"
    if not plain:
        name += "_any_strides"
    entry = (name, f"Merge<{args}>", config)
    merge_shape = MergeShape(shape.times, shape.rows)
    return load_entries("merge", "ops/merge.cu", [entry], args, merge_shape)


host.builds("merge", kernel)


def kernels(head_dim: int) -> list[DeviceModule]:
    """Return the kernels of the most common calls on heads of this dim."""
    return [kernel(*spec) for spec in _common_specs(head_dim)]


def _common_specs(head_dim: int) -> list[tuple[int, ...]]:
    """Return the arguments of `kernel` for contiguous bf16 or fp16 partials.

    Any number is merged into their own type; more than 8 by the kernels of groups, into fp32 and
    out of it. Two may have any strides, such as those of an lse of [heads, tokens].
    """
    elems = widest_vec_bytes(2 * head_dim) // 2
    fp32_elems = widest_vec_bytes(4 * head_dim) // 4
    most = CAPACITIES[-1]
    specs: list[tuple[int, ...]] = []
    for dtype in (_BF16, _F16):
        specs += [(head_dim, elems, dtype, dtype, capacity, 1) for capacity in CAPACITIES]
        specs += [(head_dim, elems, dtype, dtype, 2, 0)]
        specs += [(head_dim, elems, dtype, _F32, most, 1)]
        specs += [(head_dim, fp32_elems, _F32, dtype, most, 1)]
    return specs


_FUNCTIONS = {name: host.Function(name) for name in _NAMES}


@overload
def merge_state(
    partial_a: torch.Tensor,
    lse_a: torch.Tensor,
    partial_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    lse: Literal[False],
    base: LseBase = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> tuple[torch.Tensor, None]: ...


@overload
def merge_state(
    partial_a: torch.Tensor,
    lse_a: torch.Tensor,
    partial_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    base: LseBase = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@dispatch.traced_as(lambda a, b, c, d, **rest: _through_torch("merge_state", (a, b, c, d), **rest))
def merge_state(
    partial_a: torch.Tensor,
    lse_a: torch.Tensor,
    partial_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | Literal[False] | None = None,
    base: LseBase = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Merge two partial results of attention: one over some of the keys, one over the others.

    The same as ``merge_states`` of two. See there for dtypes, memory, stream, results, empty
    partials and errors, and for `output`, `lse`, `base`, `lse_layout` and `scale`. After vLLM's
    ``merge_attn_states`` and FlashInfer's ``merge_state``.

    Parameters
    ----------
    partial_a, partial_b : Tensor
        ``[tokens, heads, dim]``: the partial outputs.
    lse_a, lse_b : Tensor
        fp32 ``[tokens, heads]``, or ``[heads, tokens]`` with ``lse_layout="heads_tokens"``.
    prefill_tokens_with_context : int, optional
        Only the first N tokens have a partial `a`. For the other tokens, `output` and `lse` are
        copies of `partial_b` and `lse_b`.
    """
    states = (partial_a, lse_a, partial_b, lse_b)
    options = (base, lse_layout, scale, prefill_tokens_with_context)
    return _merge("merge_state", states, states, output, lse, *options)


@overload
def merge_states(
    partials: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    lse: Literal[False],
    base: LseBase = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]: ...


@overload
def merge_states(
    partials: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    base: LseBase = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@dispatch.traced_as(
    lambda partials, lses, **rest: _through_torch("merge_states", (partials, lses), **rest)
)
def merge_states(
    partials: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | Literal[False] | None = None,
    base: LseBase = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Merge results of attention over parts of the keys into the result over all keys.

    For each token and head, with ``w_i = exp(lse_i - max)``, the result is ``sum(w_i * partial_i) /
    sum(w_i)`` and its LSE is ``max + log(sum(w_i))``. Sums are computed in fp32, in the order of
    the partials, so that all ranks get the same bits. Asynchronous on the current stream. A CUDA
    graph can capture any call. Returns the result and its LSE.

    One launch merges up to 8 partials. More are merged on a GPU in groups of 8 into fp32 scratch
    memory of torch's allocator; then the results of the groups are merged.

    An LSE of -inf (FlashAttention 2 and vLLM: +inf) means no keys: that partial is ignored, even if
    its values are NaN. If all are ignored, the result is zeros, its LSE -inf. A NaN LSE gives NaN.

    Parameters
    ----------
    partials : sequence of Tensor, or Tensor
        The outputs: 1 to 64 tensors ``[tokens, heads, dim]`` of one dtype (fp32, fp16 or bf16),
        `dim` contiguous, other strides free. Or one tensor ``[n, tokens, heads, dim]``. All on one
        device; if the result is on a GPU, some may be in pinned host memory.
    lses : sequence of Tensor, or Tensor
        The same number of tensors ``[tokens, heads]``, fp32, any strides: the logarithm of the sum
        of the exponentials of the scores. Or one tensor ``[n, tokens, heads]``.
    output : Tensor, optional
        ``[tokens, heads, dim]``, fp32, fp16, bf16 or float8_e4m3fn, `dim` contiguous. May be one of
        `partials`; otherwise it overlaps none. Default: a new tensor of their dtype.
    lse : Tensor or False, optional
        Receives the LSE of the result, fp32. May be one of `lses`. Default: a new tensor. False:
        it is not computed, and None is returned for it.
    base : {"e", "2"}
        Base of the exponentials. FlashInfer uses "2"; FlashAttention, PyTorch and vLLM use "e".
    lse_layout : {"tokens_heads", "heads_tokens"}
        The order of dimensions of `lses` and `lse`. vLLM uses ``[heads, tokens]``.
    scale : Tensor, optional
        For a float8 `output`: one fp32 on its device. The result is divided by `scale` and clamped
        to +-448.

    Raises
    ------
    TypeError, ValueError
        Wrong or mixed dtypes, shapes or devices; `dim` not contiguous; no or more than 64 partials;
        pageable memory; memory that overlaps; a float8 `output` without `scale`. Nothing was
        written.
    RuntimeError
        An argument requires grad, or `output` or `lse` is an inference tensor outside of inference
        mode.
    """
    states = (_as_list("partials", partials), _as_list("lses", lses))
    read = (*states[0], *states[1])
    return _merge("merge_states", states, read, output, lse, base, lse_layout, scale, None)


def _as_list(name: str, stack: Any) -> Sequence[torch.Tensor]:
    if isinstance(stack, (list, tuple)):
        return stack
    if getattr(stack, "ndim", 0) > 0 and hasattr(stack, "unbind"):
        tensors: Sequence[torch.Tensor] = stack.unbind(0)
        return tensors
    expected = "a list of tensors, or one stacked tensor"
    raise TypeError(f"merge_states: {name}: {type_text(stack)}, expected {expected}")


def _merge(
    op: str,
    states: tuple[Any, ...],  # partial_a, lse_a, partial_b, lse_b; or partials, lses
    read: tuple[Any, ...],  # the tensors in `states`
    output: Any,
    lse: Any,
    base: Any,
    lse_layout: Any,
    scale: Any,
    prefill: Any,
) -> Results:
    call = _FUNCTIONS[op].call
    written = () if output is None else (output,)
    if lse is not None and lse is not False:
        written += (lse,)
    if scale is not None:
        read = (*read, scale)
    if inference_mode.is_enabled() or dispatch.is_plain(written, read):
        options = _packed(base, lse_layout, scale, prefill)
        out, out_lse = output, None if lse is False else lse
        try:
            if output is None and (like := _first(states[0])) is not None:
                out = _new_out(like)
            if lse is None and (like := _first(states[1])) is not None:
                out_lse = _new_lse(like)
            if not call(*states, out, out_lse, options):
                if written:
                    dispatch.bump_versions(written)
                return out, out_lse
        except (AttributeError, TypeError) as error:
            raise not_a_tensor(op, **_named(op, states)) or error from None
        except dispatch.UNREADABLE as error:
            rest = {"output": out, "lse": out_lse, "scale": scale}
            dispatch.require_wrapper(error, op, **_named(op, states), **rest)
    how = {"base": base, "lse_layout": lse_layout, "scale": scale}
    how |= {"prefill_tokens_with_context": prefill}
    return _through_torch(op, states, output=output, lse=lse, **how)


def _packed(base: Any, lse_layout: Any, scale: Any, prefill: Any) -> Any:
    """Return all options as one argument, since each takes 50 ns on its way; None for defaults."""
    if scale is None and prefill is None and base == "e" and lse_layout == "tokens_heads":
        return None
    return base, lse_layout, scale, prefill


def _first(tensors: Any) -> Any:
    """Return the first tensor of a list, None if it is empty, which C++ refuses; or the tensor."""
    if isinstance(tensors, (list, tuple)):
        return tensors[0] if tensors else None
    return tensors


# Not in C++: see _new_output of jitkern.ops.index.
def _new_out(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(*like.shape or ((),))


def _new_lse(like: torch.Tensor) -> torch.Tensor:
    if like.dtype is torch.float32:
        return like.new_empty(*like.shape or ((),))
    return like.new_empty(*like.shape or ((),), dtype=torch.float32)


def _named(op: str, states: tuple[Any, ...]) -> dict[str, Any]:
    """Return tensors by their names, such as ``partial_a`` or ``partials[3]``."""
    if op == "merge_state":
        return dict(zip(_NAMES[op], states, strict=True))
    lists = zip(_NAMES[op], states, strict=True)
    return {f"{name}[{i}]": tensor for name, tensors in lists for i, tensor in enumerate(tensors)}


# -- for PyTorch -----------------------------------------------------------------------------------


def _through_torch(
    function: str,
    states: tuple[Any, ...],
    *,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | bool | None = None,
    scale: torch.Tensor | None = None,
    **options: Any,
) -> Results:
    if function == "merge_states":
        states = tuple(map(_as_list, _NAMES[function], states))
    named = _named(function, states)
    if (wrong := not_a_tensor(function, **named)) is not None:
        raise wrong
    dispatch.refuse_transformed(function, **named)
    lists = (states[::2], states[1::2]) if function == "merge_state" else states
    partials, lses = map(list, lists)
    options = {"partials": partials, "lses": lses, **options}
    if output is None and scale is None and (lse is None or lse is False):
        merged, merged_lse = dispatch.through_torch("merge_states", **options)
        return merged, None if lse is False else merged_lse
    out = _new_out(partials[0]) if output is None else output
    out_lse: Any = _new_lse(lses[0]) if lse is None else None if lse is False else lse
    options = {"output": out, "lse": out_lse, "scale": scale, **options}
    dispatch.through_torch("merge_states", "out", **options)
    return out, out_lse


_merge_state_now = host.Function("merge_state_now")
_merge_states_now = host.Function("merge_states_now")


def _run_out(
    partials: list[torch.Tensor],
    lses: list[torch.Tensor],
    output: torch.Tensor,
    lse: torch.Tensor | None,
    base: str,
    lse_layout: str,
    scale: torch.Tensor | None,
    prefill: int | None,
) -> None:
    options = _packed(base, lse_layout, scale, prefill)
    if prefill is None:
        _merge_states_now(partials, lses, output, lse, options)
    else:
        _merge_state_now(partials[0], lses[0], partials[1], lses[1], output, lse, options)


def _run(
    partials: list[torch.Tensor],
    lses: list[torch.Tensor],
    base: str,
    lse_layout: str,
    prefill: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = _fake(partials, lses)
    _run_out(partials, lses, output, lse, base, lse_layout, None, prefill)
    return output, lse


def _fake(partials: list[Any], lses: list[Any], *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_out(partials[0]), _new_lse(lses[0])


OVERLOADS = (
    TorchOverload(
        'merge_states(Tensor[] partials, Tensor[] lses, *, str base="e", '
        'str lse_layout="tokens_heads", int? prefill_tokens_with_context=None) '
        "-> (Tensor, Tensor)",
        run=_run,
        fake=_fake,
    ),
    TorchOverload(
        "merge_states.out(Tensor[] partials, Tensor[] lses, *, Tensor(a!) output, Tensor(b!)? lse, "
        'str base="e", str lse_layout="tokens_heads", Tensor? scale=None, '
        "int? prefill_tokens_with_context=None) -> ()",
        run=_run_out,
        fake=no_result,
    ),
)
