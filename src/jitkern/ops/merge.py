"""``merge_state`` and ``merge_states``: partial results of attention, merged in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jitkern import hints
from jitkern.host import module as host
from jitkern.jit.device import DeviceModule, load_own
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops import dispatch
from jitkern.ops.common import TorchOverload, not_a_tensor, type_text, widest_vec_bytes

if TYPE_CHECKING:
    from torch import Tensor

Base = Literal["e", "2"]
LseLayout = Literal["tokens_heads", "heads_tokens"]

# FloatType of csrc/ops/floats.h, in its order.
_TYPES = ("f32", "f16", "bf16", "e4m3")
_ITEM_BYTES = (4, 2, 2, 1)
_F32, _F16, _BF16, _ = range(4)
CAPACITIES = (2, 4, 8, 16, 32, 64)
"""Partials that kernels are made for: of fewer the next larger."""
STATES_OF_THREAD = 8  # kStatesOfThread of csrc/ops/merge.h
# Threads of a block, as far as rows are whole: of one for few rows, and at most how many times as
# many where there are more rows; csrc/ops/merge.cc has the figures.
SMALL_THREADS = 128
MOST_TIMES = 4
MOST_THREADS = 512
# For so many threads an SM has registers, 64 or 80 each, of one team and of several.
THREADS_OF_SM = (1024, 768)


class BlockShape(NamedTuple):
    """How the threads of a block share rows.

    Attributes
    ----------
    row_threads
        Threads of a row, in each team.
    rows
        Rows of a small block.
    times
        How many small blocks a large one is.
    """

    row_threads: int
    rows: int
    times: int

    @classmethod
    def of(cls, num_vecs: int, num_teams: int) -> BlockShape:
        """Return the shape for rows of so many vectors: few lanes of a last warp are left over."""
        steps = -(-num_vecs * num_teams // MOST_THREADS)
        row_threads = -(-num_vecs // steps)
        one = row_threads * num_teams
        wanted = SMALL_THREADS if num_teams == 1 else MOST_THREADS // 2

        def cost(rows: int) -> tuple[float, int]:
            return (-one * rows % 32) / (one * rows), wanted - one * rows

        rows = min(range(1, max(1, wanted // one) + 1), key=cost)
        # Teams have their threads at fixed places.
        times = 1 if num_teams > 1 else max(1, min(MOST_TIMES, MOST_THREADS // (one * rows)))
        return cls(row_threads, rows, times)


@cache
def kernel(
    dim: int,
    vec_elems: int,
    in_type: int,
    out_type: int,
    lse_type: int,
    capacity: int,
    plain: int,
) -> DeviceModule:
    """Return the device module of one dim, vector, choice of types and number of partials.

    A plain one is for partials that all count and lie in one way, in which rows follow each other:
    without what the others need a kernel of two partials is 30 % shorter, and as fast as a copy.
    """
    num_teams = max(1, capacity // STATES_OF_THREAD)
    row_threads, rows, times = BlockShape.of(dim // vec_elems, num_teams)
    num_threads = row_threads * rows * num_teams * times
    occupancy = max(1, THREADS_OF_SM[num_teams > 1] // num_threads)
    config = KernelConfig(num_threads=num_threads, max_occupancy=occupancy, use_pdl=True)
    args = make_cpp_args(
        dim, vec_elems, in_type, out_type, lse_type, capacity, bool(plain), *config, row_threads
    )
    types = [_TYPES[in_type]]
    types += [f"to_{_TYPES[out_type]}"] * (out_type != in_type)
    types += [f"lse_{_TYPES[lse_type]}"] * (lse_type != _F32)
    types += ["any_strides"] * (not plain)
    name = "_".join(["jitkern_merge", f"v{vec_elems}", f"d{dim}", f"n{capacity}", *types])
    wrappers = [(name, f"jitkern::Merge<{args}>")]
    module = load_own("merge", *args, device_files=["ops/merge.cu"], device_wrappers=wrappers)
    module.hint = hints.replay
    return module.launched_with(config, in_flight=times, splits=rows)


def specialisations(head_dim: int) -> list[tuple[int, ...]]:
    """Return the template arguments of heads of this dim: the 16-bit types, of contiguous tensors.

    Of any number of partials, merged into their own type, with an fp32 lse; of two at any strides,
    too, such as those of an lse of [heads, tokens].
    """
    elems = widest_vec_bytes(2 * head_dim) // 2
    return [
        (head_dim, elems, of_type, of_type, _F32, *which)
        for of_type in (_BF16, _F16)
        for which in (*((capacity, 1) for capacity in CAPACITIES), (2, 0))
    ]


@cache
def _op() -> Callable[..., Any]:
    return host.op("merge_state", kernel)


@cache
def _op_of_many() -> Callable[..., Any]:
    return host.op("merge_states", kernel)


host.builds("merge", kernel)


def _through_torch(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    out: Tensor | None = None,
    lse: Tensor | bool | None = None,
    base: str = "e",
    lse_layout: str = "tokens_heads",
    scale: Tensor | None = None,
    num_valid: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    op, rest = "merge_states", {"base": base, "lse_layout": lse_layout, "num_valid": num_valid}
    prefill = {"prefill_tokens_with_context": prefill_tokens_with_context}
    if out is None and scale is None and (lse is None or lse is False):
        merged, merged_lse = dispatch.through_torch(
            op, outs=list(outs), lses=list(lses), **rest, **prefill
        )
        return merged, None if lse is False else merged_lse
    if out is None:
        out = _new_out(outs[0])
    to_lse = _new_lse(lses[0]) if lse is None else None if lse is False else lse
    arguments = {"out": out, "lse": to_lse, "scale": scale, **rest, **prefill}
    dispatch.through_torch(op, "out", outs=list(outs), lses=list(lses), **arguments)
    return out, to_lse  # type: ignore[return-value]


def _two_through_torch(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    wrong = not_a_tensor("merge_state", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if wrong is not None:
        raise wrong
    return _through_torch((out_a, out_b), (lse_a, lse_b), **rest)


def _many_through_torch(
    outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor, **rest: Any
) -> tuple[Tensor, Tensor | None]:
    wrong = _not_tensors(outs=outs, lses=lses)
    if wrong is not None:
        raise wrong
    return _through_torch(_unstacked("outs", outs), _unstacked("lses", lses), **rest)


def _unstacked(name: str, many: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    if not isinstance(many, (list, tuple)):
        many = many.unbind(0) if many.ndim > 0 else ()  # type: ignore[union-attr]
    if len(many) == 0:
        raise ValueError(f"merge_states: {name}: a list of 0, expected 1 to 64 partial results")
    return many


@dispatch.traced_as(_two_through_torch)
def merge_state(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | bool | None = None,
    base: Base = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merge two partial results of attention: one over some of the keys, one over the others.

    What :func:`merge_states` does, of two. See there for dtypes, memory, empty partials, errors.

    Parameters
    ----------
    out_a, out_b : Tensor
        ``[tokens, heads, dim]``: partial results.
    lse_a, lse_b : Tensor
        ``[tokens, heads]``, or ``[heads, tokens]`` with ``lse_layout="heads_tokens"``: for each of
        their rows the logarithm of the sum of exponentials of all scores.
    out, lse, base, lse_layout, scale
        As for :func:`merge_states`.
    prefill_tokens_with_context : int, optional
        Only so many tokens, the first ones, have a partial result `a`, as in a batch of prefills of
        which the others have no context yet. The rest of `out` is `out_b`, and of `lse` `lse_b`;
        of `out_a` and `lse_a` it is not read.

    Returns
    -------
    (Tensor, Tensor or None)
        The merged result and its lse; None with ``lse=False``.

    Examples
    --------
    >>> out_a, out_b = torch.ones(1, 1, 4), torch.zeros(1, 1, 4)
    >>> lse_a, lse_b = torch.tensor([[0.0]]), torch.tensor([[0.0]])
    >>> out, lse = jitkern.merge_state(out_a, lse_a, out_b, lse_b)
    >>> out.tolist(), round(lse.item(), 4)
    ([[[0.5, 0.5, 0.5, 0.5]]], 0.6931)
    """
    given = _given(out, lse)
    if dispatch.in_inference_mode() or dispatch.may_write(given, (out_a, lse_a, out_b, lse_b)):
        to, to_lse = out, lse
        is_base_2 = base != "e" and _is_second("merge_state", _BASE, base)
        heads_first = lse_layout != "tokens_heads" and _is_second(
            "merge_state", _LAYOUT, lse_layout
        )
        try:
            if to is None:
                to = _new_out(out_a)
            if to_lse is None:
                to_lse = _new_lse(lse_a)
            elif to_lse is False:
                to_lse = None
            if not _op()(
                out_a, lse_a, out_b, lse_b, to, to_lse, is_base_2, heads_first, scale,
                prefill_tokens_with_context,
            ):  # fmt: skip
                if given:
                    dispatch.wrote(*given)
                return to, to_lse  # type: ignore[return-value]
        except (AttributeError, TypeError) as error:
            named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
            raise not_a_tensor("merge_state", **named) or error from None
        except (RuntimeError, ValueError) as error:
            named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
            dispatch.require_wrapper(error, "merge_state", **named, out=to, lse=to_lse, scale=scale)
    return _two_through_torch(
        out_a,
        lse_a,
        out_b,
        lse_b,
        out=out,
        lse=lse,
        base=base,
        lse_layout=lse_layout,
        scale=scale,
        prefill_tokens_with_context=prefill_tokens_with_context,
    )


@dispatch.traced_as(_many_through_torch)
def merge_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | bool | None = None,
    base: Base = "e",
    lse_layout: LseLayout = "tokens_heads",
    scale: Tensor | None = None,
    num_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Merge partial results of attention over parts of the keys into the result over all.

    Of each token and head, with ``w_i = exp(lse_i - max)``, the result is ``sum(w_i * out_i) /
    sum(w_i)`` and its lse ``max + log(sum(w_i))``: in one launch, on the current stream and without
    a synchronisation, each partial read once. It is computed in fp32, and added up in the order of
    the partials, whatever the number of tokens: ranks that merge the same get the same bits. A CUDA
    graph can capture the call, also the first one. Differentiable in `outs` and `lses`, unless
    `out` or a tensor as `lse` is given.

    Parameters
    ----------
    outs : sequence of Tensor, or Tensor
        1 to 64 tensors ``[tokens, heads, dim]``, fp32, fp16 or bf16, all of one dtype: `dim`
        contiguous, other strides free, each tensor's its own. Or one tensor ``[n, tokens, heads,
        dim]``. On one device; beside a result on a GPU some may lie in pinned host memory, and stay
        allocated and unchanged until the stream has come past the call.
    lses : sequence of Tensor, or Tensor
        As many ``[tokens, heads]``, fp32, fp16 or bf16, of one dtype, any strides: the logarithm of
        the sum of exponentials of the scores that each row of `outs` is the result of. Or one
        tensor ``[n, tokens, heads]``.
    out : Tensor, optional
        ``[tokens, heads, dim]``, fp32, fp16, bf16 or float8_e4m3fn, `dim` contiguous. It may be one
        of `outs` itself, and else shares no memory with them. By default a new tensor of their
        dtype, on the device of the first.
    lse : Tensor or False, optional
        Where the merged lse goes: fp32, fp16 or bf16, of the shape of `lses`. It may be one of
        `lses` itself. By default a new fp32 tensor; with False it is left out.
    base : "e" or "2"
        What the exponentials are of. FlashInfer's kernels give sums of powers of 2.
    lse_layout : "tokens_heads" or "heads_tokens"
        The order of dimensions of `lses` and `lse`, each of which may be ``[heads, tokens]``, as in
        vLLM. It is never guessed: with as many tokens as heads both would fit.
    scale : Tensor, optional
        For a float8 `out`: fp32, 1 element, on its device. `out` is the result divided by it,
        clamped to 448.
    num_valid : Tensor, optional
        int32 or int64, on the device of `out`, 1 element or one for each token: only so many of the
        partials count, the first ones, the others are not read. Below 0 it means 0, above their
        number all.

    Returns
    -------
    (Tensor, Tensor or None)
        The merged result and its lse; None with ``lse=False``.

    Notes
    -----
    A partial whose lse is -inf, over no keys, counts nothing, whatever its values, NaN included.
    Where all are, the result is zeros and the lse -inf. An lse of +inf is all there is: the result
    is that partial's, or the mean of several. NaN in an lse gives NaN.

    Raises
    ------
    TypeError, ValueError
        Wrong or mixed dtypes, shapes or devices, a `dim` that is not contiguous, no partial or more
        than 64, pageable host memory, memory that would be written and read, a float8 `out` without
        `scale`. Nothing was launched or written.
    RuntimeError
        `out` or `lse` is given, and with gradients enabled an argument requires one, or outside of
        inference mode it was made in it. Nothing was written.

    Examples
    --------
    >>> outs = [torch.full((1, 1, 2), float(i)) for i in range(3)]
    >>> lses = [torch.zeros(1, 1), torch.zeros(1, 1), torch.full((1, 1), -torch.inf)]
    >>> out, lse = jitkern.merge_states(outs, lses, base="2")
    >>> out.tolist(), lse.tolist()
    ([[[0.5, 0.5]]], [[1.0]])
    """
    is_list = isinstance(outs, (list, tuple))
    read = (*outs, *lses) if is_list and isinstance(lses, (list, tuple)) else (outs, lses)
    given = _given(out, lse)
    if dispatch.in_inference_mode() or dispatch.may_write(given, read):
        to, to_lse = out, lse
        is_base_2 = base != "e" and _is_second("merge_states", _BASE, base)
        heads_first = lse_layout != "tokens_heads" and _is_second(
            "merge_states", _LAYOUT, lse_layout
        )
        try:
            if to is None and (like := _first(outs)) is not None:
                to = _new_out(like)
            if to_lse is None:
                to_lse = None if (like := _first(lses)) is None else _new_lse(like)
            elif to_lse is False:
                to_lse = None
            if not _op_of_many()(outs, lses, to, to_lse, is_base_2, heads_first, scale, num_valid):
                if given:
                    dispatch.wrote(*given)
                return to, to_lse  # type: ignore[return-value]
        except (AttributeError, TypeError) as error:
            raise _not_tensors(outs=outs, lses=lses) or error from None
        except (RuntimeError, ValueError) as error:
            named = {"out": to, "lse": to_lse, "scale": scale, "num_valid": num_valid}
            dispatch.require_wrapper(error, "merge_states", **_named(outs=outs, lses=lses), **named)
    return _many_through_torch(
        outs,
        lses,
        out=out,
        lse=lse,
        base=base,
        lse_layout=lse_layout,
        scale=scale,
        num_valid=num_valid,
    )


_BASE = ("base", "e", "2")
_LAYOUT = ("lse_layout", "tokens_heads", "heads_tokens")


def _is_second(op: str, words: tuple[str, str, str], value: Any) -> bool:
    """Tell which of two words an argument is. Not in C++: a str on its way there takes 60 ns."""
    name, *known = words
    if isinstance(value, str) and value in known:
        return value == known[1]
    expected = f'expected "{known[0]}" or "{known[1]}"'
    if isinstance(value, str):
        raise ValueError(f'{op}: {name}: "{value}", {expected}')
    raise TypeError(f"{op}: {name}: {type_text(value)}, {expected}")


def _given(out: Any, lse: Any) -> tuple[Any, ...]:
    if lse is None or lse is False:
        return () if out is None else (out,)
    return (lse,) if out is None else (out, lse)


def _first(many: Any) -> Any:
    try:
        return many[0]
    except LookupError:
        return None  # C++ says what is wrong with them


# Not in C++: see _new_output of jitkern.ops.index.
def _new_out(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _new_lse(like: Tensor) -> Tensor:
    import torch

    if like.dtype is torch.float32:
        return like.new_empty(like.shape)
    return like.new_empty(like.shape, dtype=torch.float32)


def _named(**lists: Any) -> dict[str, Any]:
    """Return tensors of lists by their names, such as ``outs[3]``."""
    found: dict[str, Any] = {}
    for name, value in lists.items():
        if isinstance(value, (list, tuple)):
            found |= {f"{name}[{i}]": one for i, one in enumerate(value)}
        else:
            found[name] = value
    return found


def _not_tensors(**lists: Any) -> TypeError | None:
    import torch

    for name, value in lists.items():
        if not isinstance(value, (list, tuple, torch.Tensor)):
            expected = "a list of tensors, or one stacked tensor"
            return TypeError(f"merge_states: {name}: {type_text(value)}, expected {expected}")
    return not_a_tensor("merge_states", **_named(**lists))


# -- for PyTorch -----------------------------------------------------------------------------------


def _now(
    outs: list[Tensor],
    lses: list[Tensor],
    *,
    out: Tensor,
    lse: Tensor | None,
    base: str = "e",
    lse_layout: str = "tokens_heads",
    scale: Tensor | None = None,
    num_valid: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> None:
    words = _is_second("merge_states", _BASE, base), _is_second("merge_states", _LAYOUT, lse_layout)
    if prefill_tokens_with_context is None:
        many = host.op_now("merge_states", kernel)
        many(outs, lses, out, lse, *words, scale, num_valid)
    else:
        call, pairs = host.op_now("merge_state", kernel), zip(outs, lses, strict=True)
        two = [one for pair in pairs for one in pair]
        call(*two, out, lse, *words, scale, prefill_tokens_with_context)


def _new(
    outs: list[Tensor], lses: list[Tensor], *, prefill_tokens_with_context: Any = None, **rest: Any
) -> tuple[Tensor, Tensor]:
    made = _fake(outs, lses)
    rest["prefill_tokens_with_context"] = prefill_tokens_with_context
    _now(outs, lses, out=made[0], lse=made[1], **rest)
    return made


def _differentiable(operator: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    from jitkern.ops.merge_gradient import differentiable

    return differentiable(operator)


def _fake(outs: list[Tensor], lses: list[Tensor], **_: Any) -> tuple[Tensor, Tensor]:
    return _new_out(outs[0]), _new_lse(lses[0])


_REST = (
    'str base="e", str lse_layout="tokens_heads", {}Tensor? num_valid=None, '
    "int? prefill_tokens_with_context=None"
)

TORCH_OVERLOADS = (
    TorchOverload(
        f"merge_states(Tensor[] outs, Tensor[] lses, *, {_REST.format('')}) -> (Tensor, Tensor)",
        _new,
        _fake,
        _differentiable,
    ),
    TorchOverload(
        "merge_states.out(Tensor[] outs, Tensor[] lses, *, Tensor(a!) out, Tensor(b!)? lse, "
        f"{_REST.format('Tensor? scale=None, ')}) -> ()",
        _now,
    ),
)
