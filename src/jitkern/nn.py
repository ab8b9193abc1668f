"""``TPEmbedding``: an embedding whose vocabulary is split over ranks, as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from jitkern.ops import dispatch
from jitkern.ops.common import type_text
from jitkern.ops.index import indexing

if TYPE_CHECKING:
    from jitkern.comm.protocol import Communicator

_OP = "TPEmbedding"


class TPEmbedding(torch.nn.Module):
    """``torch.nn.Embedding`` with its rows split over the ranks of a communicator.

    Each rank holds ``ceil(vocab_size / size)`` rows, ``size`` the communicator's; the last ranks
    may have fewer, or none, and zeros behind them. Added tokens, ids ``vocab_size`` to
    ``vocab_size + num_added - 1``, are split likewise and lie behind the others in ``weight``. All
    ranks look up the same ids, with zeros for what others hold, and the sum over them is the
    result, on every rank. The sum is taken of integers: all ranks but one add zero bits, so that
    it is the table's row bit for bit, NaN payloads and -0.0 included.

    Parameters
    ----------
    vocab_size : int
        Rows of the whole table, without added ones.
    hidden_size : int
        Elements of a row.
    comm : Communicator
        Of its size, rank and ``all_reduce`` (of int32 or uint8, "sum", in place) the module makes
        use.
    dtype : torch.dtype, optional
        A floating one, by default PyTorch's.
    device : torch.device, optional
        That of the communicator.
    padding_idx : int, optional
        As in ``torch.nn.Embedding``: an id whose row is made of zeros and has no gradient; it is
        looked up as any other. A negative one counts from the end of the vocabulary.
    num_added : int, default 0
        How many tokens were added to the vocabulary.

    Attributes
    ----------
    weight : torch.nn.Parameter
        ``[rows_per_rank, hidden_size]``: this rank's rows, those of ``vocab_range`` first, then
        those of ``added_range``, then zeros.
    vocab_range, added_range : (int, int)
        ``(start, length)`` of the ids that this rank holds. ``length`` is 0 where it holds none.

    Raises
    ------
    TypeError, ValueError
        A size below 1, ``num_added`` below 0, a ``padding_idx`` that is no id, a dtype that is not
        floating, or no communicator.

    Examples
    --------
    >>> comm = jitkern.comm.TorchCommunicator()  # doctest: +SKIP
    >>> embedding = TPEmbedding(128256, 4096, comm=comm, device="cuda")  # doctest: +SKIP
    >>> embedding.load_full(table)  # doctest: +SKIP
    >>> embedding(ids).shape  # doctest: +SKIP
    torch.Size([2, 512, 4096])
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        comm: Communicator,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        padding_idx: int | None = None,
        num_added: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size = _int_of("vocab_size", vocab_size, at_least=1)
        self.hidden_size = _int_of("hidden_size", hidden_size, at_least=1)
        self.num_added = _int_of("num_added", num_added, at_least=0)
        self.comm = _communicator(comm)
        self.padding_idx = _padding_of(padding_idx, vocab_size + num_added)
        rank, size = comm.rank, comm.size
        self.vocab_range = _part(vocab_size, rank, size)
        start, length = _part(num_added, rank, size)
        self.added_range = (vocab_size + start, length)
        self._is_split = size > 1
        rows = _each(vocab_size, size) + _each(num_added, size)
        made = torch.empty(rows, hidden_size, dtype=dtype, device=device)
        if not made.dtype.is_floating_point:
            raise TypeError(f"{_OP}: dtype: {str(made.dtype)[6:]}, expected a floating dtype")
        self.weight = torch.nn.Parameter(made)
        self.reset_parameters()

    @property
    def full_shape(self) -> tuple[int, int]:
        """Of the whole table: ``(vocab_size + num_added, hidden_size)``."""
        return self.vocab_size + self.num_added, self.hidden_size

    def reset_parameters(self) -> None:
        """Draw the rows from a normal distribution, that of ``padding_idx`` excepted: zeros.

        As many numbers are drawn as the whole table has: ranks of one seed have different rows, and
        their generators are alike afterwards.
        """
        with torch.no_grad():
            # Not every floating dtype can be drawn: float8 is rounded.
            small = self.weight.dtype.itemsize == 1
            drawn = torch.empty_like(self.weight, dtype=torch.float32 if small else None)
            for rank in range(self.comm.size):
                drawn.normal_()
                if rank == self.comm.rank:
                    self.weight.copy_(drawn)
            self._zero_behind()
            row = self._row_of_padding()
            if row is not None:
                self.weight[row].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, the same on every rank.

        Runs on the current stream; every rank calls it with the same ids. Differentiable in
        ``weight``: every rank has the gradient of its own rows, if all have that of the result.
        With several ranks a graph of ``torch.compile`` ends here and begins again behind it; what
        else traces is refused.

        Parameters
        ----------
        ids : Tensor
            Any shape, int32 or int64, on the device of ``weight``. A negative id gives zeros.

        Returns
        -------
        Tensor
            ``[*ids.shape, hidden_size]``, dtype of ``weight``.

        Raises
        ------
        TypeError, ValueError
            Wrong dtype or device. No rank has sent anything, as the ids of all are wrong.
        IndexError
            An id of ``vocab_size + num_added`` or more: as :func:`jitkern.indexing` does, on the
            CPU at once and on CUDA by the next call or :func:`jitkern.check`.
        RuntimeError
            With several ranks: under ``torch.export``, ``make_fx``, ``torch.jit.trace``,
            ``torch.func``, or with a tangent of forward-mode AD.
        CommError
            The communicator's.
        """
        if isinstance(ids, Tensor) and not ids.is_contiguous():
            ids = ids.contiguous()
        if not self._is_split:
            rows = indexing(self.weight, ids)
        elif torch.compiler.is_dynamo_compiling():
            from jitkern import untraced

            rows = cast("Tensor", untraced.call(_look_up, self, ids))
        else:
            rows = _look_up(self, ids)
        if self.padding_idx is None or not (rows.requires_grad and torch.is_grad_enabled()):
            return rows
        return torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)

    def load_full(self, weight: Any) -> None:
        """Copy this rank's rows of the whole table into ``weight``, and read no others.

        Parameters
        ----------
        weight : Tensor or slice
            ``[vocab_size + num_added, hidden_size]``, any device and dtype: a tensor, also one
            that is mapped from a file, or what is sliced as a tensor, such as
            ``safetensors.safe_open(...).get_slice(name)``.

        Raises
        ------
        TypeError, ValueError
            Another shape, or what is neither. Nothing was written.
        """
        shape = _shape_of(weight)
        if shape != self.full_shape:
            raise ValueError(f"{_OP}: weight: shape {[*shape]}, expected {[*self.full_shape]}")
        self._fill(self.weight, weight)

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the module."""
        text = f"{self.vocab_size}, {self.hidden_size}"
        if self.num_added:
            text += f", num_added={self.num_added}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        return f"{text}, rank={self.comm.rank}, size={self.comm.size}"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        value = state_dict.get(key)
        if isinstance(value, Tensor) and value.shape != self.weight.shape:
            if tuple(value.shape) != self.full_shape:
                error_msgs.append(
                    f"{_OP}: {key}: shape {[*value.shape]}, expected {[*self.full_shape]}, the "
                    f"whole table, or {[*self.weight.shape]}, the rows of rank {self.comm.rank}"
                )
                return
            part = value.new_empty(self.weight.shape)
            self._fill(part, value)
            state_dict = {**state_dict, key: part}
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def _fill(self, rows: Tensor, whole: Any) -> None:
        """Write this rank's rows of the whole table to `rows`, once all are read."""
        parts = []
        for start, length in (self.vocab_range, self.added_range):
            if length == 0:
                continue
            part = whole[start : start + length]
            if not isinstance(part, Tensor):
                raise TypeError(f"{_OP}: weight: slices are {type_text(part)}, expected tensors")
            if part.shape != (length, self.hidden_size):
                came = f"a slice of {length} rows has shape {[*part.shape]}"
                expected = [length, self.hidden_size]
                raise ValueError(f"{_OP}: weight: {came}, expected {expected}")
            parts.append(part)
        with torch.no_grad():
            row = 0
            for part in parts:
                rows[row : row + len(part)].copy_(part)
                row += len(part)
            rows[row:].zero_()

    def _zero_behind(self) -> None:
        self.weight[self.vocab_range[1] + self.added_range[1] :].zero_()

    def _row_of_padding(self) -> int | None:
        """Return which row of ``weight`` is that of ``padding_idx``, if it is here."""
        row = 0
        for start, length in (self.vocab_range, self.added_range):
            if self.padding_idx is not None and 0 <= self.padding_idx - start < length:
                return row + self.padding_idx - start
            row += length
        return None


class _SumOverRanks(torch.autograd.Function):
    """In place. Every rank has the gradient of the sum, which is that of its own rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Communicator) -> Tensor:
        _add_up(rows, comm)
        ctx.mark_dirty(rows)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _look_up(module: TPEmbedding, ids: Tensor) -> Tensor:
    """Return the rows of all ranks."""
    rows = indexing(
        module.weight,
        ids,
        vocab_range=module.vocab_range,
        added_range=module.added_range,
        vocab_size=module.full_shape[0],
    )
    _refuse_tracers(rows)
    if dispatch.wants_gradient(rows):
        return cast("Tensor", _SumOverRanks.apply(rows, module.comm))  # type: ignore[no-untyped-call]
    _add_up(rows, module.comm)
    return rows


def _add_up(rows: Tensor, comm: Communicator) -> None:
    """Sum over ranks, of which one at most has bits that are not zero: exact for any bits.

    A sum of floats would make 0.0 of -0.0, and another NaN of some. NCCL and gloo both have sums of
    int32 and uint8, and neither of int16.
    """
    if rows.numel() == 0:
        return  # on every rank
    flat = rows.detach().view(-1)
    comm.all_reduce(flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8))


def _refuse_tracers(rows: Tensor) -> None:
    """Raise where the sum would be dropped from what is traced, or be of what is no memory."""
    if (
        type(rows).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or torch._C._functorch.is_functorch_wrapped_tensor(rows)
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or torch._C._get_tracing_state() is not None
    ):
        raise RuntimeError(
            f"{_OP}: ids: traced or transformed, expected a plain call: the sum over ranks has no "
            "place in torch.export, make_fx, torch.jit.trace and torch.func; torch.compile ends a "
            "graph here"
        )


def _each(count: int, size: int) -> int:
    return -(-count // size)


def _part(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return (start, length) of a rank's part of `count`: the last ranks may have less, or none."""
    each = _each(count, size)
    start = min(rank * each, count)
    return start, min(each, count - start)


def _int_of(name: str, value: Any, *, at_least: int) -> int:
    if type(value) is not int:
        raise TypeError(f"{_OP}: {name}: {type_text(value)}, expected an int")
    if value < at_least:
        raise ValueError(f"{_OP}: {name}: {value}, expected at least {at_least}")
    return value


def _padding_of(value: Any, num_ids: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise TypeError(f"{_OP}: padding_idx: {type_text(value)}, expected an int")
    if not -num_ids <= value < num_ids:
        expected = f"expected {-num_ids} to {num_ids - 1}"
        raise ValueError(f"{_OP}: padding_idx: {value}, {expected}")
    return value % num_ids


def _communicator(value: Any) -> Communicator:
    lacking = [name for name in ("rank", "size", "all_reduce") if not hasattr(value, name)]
    if lacking:
        raise TypeError(
            f"{_OP}: comm: {type_text(value)} without {', '.join(lacking)}, expected a Communicator"
        )
    if not 0 <= value.rank < value.size:
        came = f"rank {value.rank} of {value.size}"
        raise ValueError(f"{_OP}: comm: {came}, expected a rank of 0 to size - 1")
    return cast("Communicator", value)


def _shape_of(weight: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of a slice of safetensors."""
    try:
        return tuple(weight.shape if hasattr(weight, "shape") else weight.get_shape())
    except (AttributeError, TypeError):
        raise TypeError(f"{_OP}: weight: {type_text(weight)}, expected a tensor") from None
