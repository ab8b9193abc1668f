"""``TPEmbedding``: an embedding whose vocabulary is split over ranks, as a module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from jitkern.comm.args import communicator_arg, seconds_arg
from jitkern.errors import UnsupportedError
from jitkern.host.faults import is_of_earlier_call
from jitkern.ops import dispatch
from jitkern.ops.common import type_text
from jitkern.ops.index import indexing

if TYPE_CHECKING:
    from jitkern.comm.peer_memory import PeerMemory
    from jitkern.comm.protocol import Communicator

OP = "TPEmbedding"

Method = Literal["auto", "peer", "all_reduce"]
_METHODS = ("auto", "peer", "all_reduce")
# What whole pages may cost: a rank's memory is at most twice what its rows take, or this.
_SMALL_BYTES = 16 << 20


class TPEmbedding(torch.nn.Module):
    """``torch.nn.Embedding`` with its rows split over the ranks of a communicator.

    Every rank looks up the same ids and has the table's rows bit for bit, NaN payloads and -0.0
    included. There are two ways to the rows of other ranks:

    ``"all_reduce"``: each rank has zeros for what others hold, and the result is the sum over them.
    The sum is taken of integers: all ranks but one add zero bits.

    ``"peer"``: the weights lie in a :class:`jitkern.comm.PeerMemory`, and each rank reads each row
    from the rank that holds it. That is one launch and no collective: ranks need not come to it
    together, nor with the same ids. Making the module, ``load_full``, ``load_state_dict``,
    ``reset_parameters`` and ``fence`` are collective there. Where a gradient is wanted, the rows
    are summed as in the other way.

    Added tokens, ids ``vocab_size`` to ``vocab_size + num_added - 1``, lie behind the others in
    ``weight``. For ``"all_reduce"`` each rank holds ``ceil(vocab_size / size)`` rows, ``size`` the
    communicator's, and added ones are split likewise. For ``"peer"`` the ids follow one another
    through the ranks, in whole pages of memory. Either way the last ranks may have fewer, or none,
    and zeros behind them.

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
        looked up as any other. A negative one counts from the end, that of the added ids.
    num_added : int, default 0
        How many tokens were added to the vocabulary.
    method : "auto", "peer" or "all_reduce"
        ``"auto"``: by peer memory where there is a `group` and the ranks can have such memory, else
        by sums; all ranks alike. With one rank it is ``"all_reduce"``, and nothing is sent.
    group : torch.distributed.ProcessGroup or torch.distributed.Store, optional
        How the ranks make their memory, as for :class:`jitkern.comm.PeerMemory`: a gloo group, or a
        store that is this module's own, of the ranks of `comm`.
    timeout_s : float
        Seconds that each step of making the memory, and each meeting of the ranks, may take.

    Attributes
    ----------
    weight : torch.nn.Parameter
        ``[rows_per_rank, hidden_size]``: this rank's rows, those of ``vocab_range`` first, then
        those of ``added_range``, then zeros. For ``"peer"`` other ranks read it: write to it
        between two calls of :meth:`fence`.
    vocab_range, added_range : (int, int)
        ``(start, length)`` of the ids that this rank holds. ``length`` is 0 where it holds none.
    method : "peer" or "all_reduce"
        What it is.

    Raises
    ------
    TypeError, ValueError
        A size below 1, ``num_added`` below 0, a ``padding_idx`` that is no id, a dtype that is not
        floating, no communicator, or no such method. For ``"peer"``: no group, a device that is
        neither a GPU nor the CPU, or rows that waste memory, of which whole pages would take more
        than twice their bytes, and more than 16 MiB.
    UnsupportedError
        For ``"peer"``: ranks on several hosts, or GPUs that cannot address each other's memory.
    CommTimeoutError, CommError, MemoryError, RuntimeError
        As of :class:`jitkern.comm.PeerMemory`, where it is made.

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
        method: Method = "auto",
        group: Any = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self.vocab_size: int = _int_arg("vocab_size", vocab_size, at_least=1)
        self.hidden_size: int = _int_arg("hidden_size", hidden_size, at_least=1)
        self.num_added: int = _int_arg("num_added", num_added, at_least=0)
        self.comm: Communicator = communicator_arg(OP, comm)
        self.padding_idx: int | None = _padding_arg(padding_idx, vocab_size + num_added)
        rank, size = comm.rank, comm.size
        asked = _method_arg(method, group, size)
        timeout_s = seconds_arg(OP, timeout_s)
        like = torch.empty(0, hidden_size, dtype=dtype, device=device)
        if not like.dtype.is_floating_point:
            raise TypeError(f"{OP}: dtype: {str(like.dtype)[6:]}, expected a floating dtype")
        self._is_split = size > 1
        self._peers = _peer_memory(like, self.full_shape[0], comm, asked, group, timeout_s)
        self.method: Method = "all_reduce" if self._peers is None else "peer"
        each = None if self._peers is None else self._peers.num_bytes // _row_bytes(like)
        self._part = part_of(vocab_size, num_added, rank, size, each)
        self.vocab_range: tuple[int, int] = self._part.vocab_range
        self.added_range: tuple[int, int] = self._part.added_range
        shape = self._part.num_rows, hidden_size
        self.weight: torch.nn.Parameter
        if self._peers is None:
            self._table = self._shared = None
            self.weight = torch.nn.Parameter(like.new_empty(shape))
        else:
            # No buffer: the table is all ranks' weights, of which this one's are a parameter.
            whole = self._peers.whole((shape[0] * size, hidden_size), like.dtype)
            self._table = whole[: self.full_shape[0]]
            self.weight = torch.nn.Parameter(self._peers.tensor(shape, like.dtype))
            self._shared = (self.weight,)  # in a tuple, which a module takes for no parameter
        self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls, embeddings: Any, freeze: bool = True, *, comm: Communicator, **options: Any
    ) -> TPEmbedding:
        """Return the module of a whole table, as :meth:`torch.nn.Embedding.from_pretrained` does.

        ``embeddings`` is what :meth:`load_full` takes; its dtype and device are the module's, if it
        is a tensor and ``options``, the other arguments of the module, have no others. Added tokens
        (``num_added``) are its last rows. With ``freeze`` the weight requires no gradient.
        """
        num_rows, hidden_size = _shape_of(embeddings)
        if isinstance(embeddings, Tensor):
            options = {"dtype": embeddings.dtype, "device": embeddings.device, **options}
        vocab_size = num_rows - options.get("num_added", 0)
        made = cls(vocab_size, hidden_size, comm=comm, **options)
        made.load_full(embeddings)
        made.weight.requires_grad_(not freeze)
        return made

    @property
    def num_embeddings(self) -> int:
        """Rows of the whole table, added ones included."""
        return self.vocab_size + self.num_added

    @property
    def embedding_dim(self) -> int:
        """Elements of a row: ``hidden_size``."""
        return self.hidden_size

    @property
    def full_shape(self) -> tuple[int, int]:
        """Of the whole table: ``(num_embeddings, embedding_dim)``."""
        return self.num_embeddings, self.embedding_dim

    def reset_parameters(self) -> None:
        """Draw the rows from a normal distribution, that of ``padding_idx`` excepted: zeros.

        As many numbers are drawn as the whole table has: ranks of one seed have different rows, and
        their generators are alike afterwards. Collective for ``"peer"``, as :meth:`load_full` is.
        """
        with self._fenced(), torch.no_grad():
            # Not every floating dtype can be drawn: float8 is rounded.
            small = self.weight.dtype.itemsize == 1
            drawn = torch.empty_like(self.weight, dtype=torch.float32 if small else None)
            for rank in range(self.comm.size):
                drawn.normal_()
                if rank == self.comm.rank:
                    self.weight.copy_(drawn)
            self.weight[self._num_held :].zero_()
            row = self._row_of_padding()
            if row is not None:
                self.weight[row].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`.

        Runs on the current stream. Differentiable in ``weight``: every rank has the gradient of its
        own rows, if all have that of the result.

        With several ranks every rank calls it with the same ids, and a graph of ``torch.compile``
        ends here and begins again behind it; what else traces is refused. For ``"peer"`` that is so
        where a gradient is wanted: gradients are enabled and ``weight`` requires one, on all ranks
        or on none. Else each rank calls it when it likes, and it is in the graph.

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
            With several ranks and a sum over them: under ``torch.export``, ``make_fx``,
            ``torch.jit.trace``, ``torch.func``, or with a tangent of forward-mode AD.
        CommError
            The communicator's.
        """
        if isinstance(ids, Tensor) and not ids.is_contiguous():
            ids = ids.contiguous()
        weight = self.weight
        if not self._is_split:
            found = indexing(weight, ids)
        elif self._reads_peers(weight):
            return indexing(cast("Tensor", self._table), ids)
        else:
            call = weight, ids, self._part, self.full_shape[0], self.comm
            if torch.compiler.is_dynamo_compiling():
                # A collective of ranks has no place in a graph: it ends before, and begins again.
                untraced: Any = torch.compiler.disable(look_up)  # type: ignore[no-untyped-call]
                found = cast("Tensor", untraced(*call))
            else:
                found = look_up(*call)
        if self.padding_idx is None or not (found.requires_grad and torch.is_grad_enabled()):
            return found
        return torch.where((ids == self.padding_idx).unsqueeze(-1), found.detach(), found)

    def load_full(self, weight: Any) -> None:
        """Copy this rank's rows of the whole table into ``weight``, and read no others.

        For ``"peer"`` all ranks call it, as they do ``load_state_dict``: they meet before anything
        is written, when each one's GPU is done with the old rows, and once all is there. Memory
        stays where it is, and so do CUDA graphs.

        Parameters
        ----------
        weight : Tensor or slice
            ``[vocab_size + num_added, hidden_size]``, any device and dtype: a tensor, also one
            that is mapped from a file, or what is sliced as a tensor, such as
            ``safetensors.safe_open(...).get_slice(name)``.

        Raises
        ------
        TypeError, ValueError
            Another shape, or what is neither. Nothing was written, and no rank was met.
        CommTimeoutError
            Some ranks did not come within ``timeout_s``, or have ended; it names them. ``weight``
            cannot be loaded any more: make a new module.
        """
        shape = _shape_of(weight)
        if shape != self.full_shape:
            raise ValueError(f"{OP}: weight: shape {[*shape]}, expected {[*self.full_shape]}")
        parts = self._parts_of(weight)
        with self._fenced():
            _write(self.weight, parts)

    def fence(self) -> None:
        """Wait for this rank's GPU, then for all ranks to have come: nothing for ``"all_reduce"``.

        To write to ``weight`` by other means than ``load_full``, such as an optimizer whose module
        is then used without gradients, call it before, so that no rank still reads the old rows,
        and behind, so that none reads before all is written. Collective; it is not for a stream
        that is being captured.

        Raises
        ------
        CommTimeoutError, CommError
            As for :meth:`jitkern.comm.PeerMemory.barrier`.
        """
        if self._peers is None:
            return
        if self._peers.device.type == "cuda":
            torch.cuda.synchronize(self._peers.device)
        self._peers.barrier()

    def extra_repr(self) -> str:
        """Return what ``print`` shows of the module."""
        text = f"{self.vocab_size}, {self.hidden_size}"
        if self.num_added:
            text += f", num_added={self.num_added}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        if self.method == "peer":
            text += ", method='peer'"
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
        wrong, is_whole = None, False
        if isinstance(value, Tensor) and value.shape != self.weight.shape:
            is_whole = tuple(value.shape) == self.full_shape
            if not is_whole:
                wrong = (
                    f"shape {[*value.shape]}, expected {[*self.full_shape]}, the whole table, or "
                    f"{[*self.weight.shape]}, the rows of rank {self.comm.rank}"
                )
        elif self._peers is not None and key in state_dict and not isinstance(value, Tensor):
            wrong = f"{type_text(value)}, expected a tensor"
        if wrong is not None:
            error_msgs.append(f"{OP}: {key}: {wrong}")
            return
        lacking = missing_keys
        if self._peers is None and is_whole:
            part = cast("Tensor", value).new_empty(self.weight.shape)
            _write(part, self._parts_of(value))
            state_dict = {**state_dict, key: part}
        elif self._peers is not None and isinstance(value, Tensor):
            # Not by PyTorch, which with assign=True puts another tensor in the place of `weight`.
            parts = self._parts_of(value) if is_whole else [value[: self._num_held]]
            with self._fenced():
                _write(self.weight, parts)
            state_dict = {name: one for name, one in state_dict.items() if name != key}
            lacking = []
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            lacking,
            unexpected_keys,
            error_msgs,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> TPEmbedding:
        if self._peers is None:
            return cast("TPEmbedding", super()._apply(fn, recurse))  # type: ignore[no-untyped-call]
        like = self.weight.new_empty(0)
        made = fn(like)
        if (made.dtype, made.device) != (like.dtype, like.device):
            came = f"{str(made.dtype)[6:]} on {made.device}"
            raise RuntimeError(
                f"{OP}: weight: {came}, expected {str(like.dtype)[6:]} on {like.device}: it is in "
                "memory that other ranks read; make a new module with dtype= and device="
            )
        return self  # to move it within its device would be to take it from the others

    def __getstate__(self) -> dict[str, Any]:
        if self._peers is not None:
            raise TypeError(
                f"{OP}: weight: in memory that other ranks read, of which copy and pickle make no "
                "other; save state_dict(), and load it into a new module"
            )
        return self.__dict__

    # -- inside ------------------------------------------------------------------------------------

    def _reads_peers(self, weight: Tensor) -> bool:
        """Tell whether rows are read where they lie, and not summed."""
        if self._shared is None or weight is not self._shared[0]:
            return False  # torch.func.functional_call, or a user, has put another in its place
        return not (torch.is_grad_enabled() and weight.requires_grad)

    @contextmanager
    def _fenced(self) -> Iterator[None]:
        """Write to ``weight`` while no rank reads it.

        A rank that fails does not come to the second meeting: the others are told so by that, and
        use no table of which a part is lacking.
        """
        self.fence()
        yield
        self.fence()

    def _parts_of(self, whole: Any) -> list[Tensor]:
        return _parts_of(whole, self._part, self.hidden_size)

    @property
    def _num_held(self) -> int:
        return self.vocab_range[1] + self.added_range[1]

    def _row_of_padding(self) -> int | None:
        """Return which row of ``weight`` is that of ``padding_idx``, if it is here."""
        row = 0
        for start, length in (self.vocab_range, self.added_range):
            if self.padding_idx is not None and 0 <= self.padding_idx - start < length:
                return row + self.padding_idx - start
            row += length
        return None


# -- a look-up that sums over ranks ----------------------------------------------------------------


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


def look_up(weight: Tensor, ids: Tensor, part: Part, num_ids: int, comm: Communicator) -> Tensor:
    """Return the rows of all ranks: collective. `weight` holds this rank's `part` of them."""
    earlier: Exception | None = None
    while True:
        try:
            rows = indexing(
                weight,
                ids,
                vocab_range=part.vocab_range,
                added_range=part.added_range,
                vocab_size=num_ids,
            )
            break
        except Exception as error:
            if not is_of_earlier_call(error):
                raise
            # Forgotten now. Ranks come to hear of it at different calls: one that left out its sum
            # would have its next one met by this one of the others.
            earlier = earlier or error
    _refuse_tracers(rows)
    if dispatch.wants_gradient(rows):
        rows = cast("Tensor", _SumOverRanks.apply(rows, comm))  # type: ignore[no-untyped-call]
    else:
        _add_up(rows, comm)
    if earlier is not None:
        raise earlier
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
            f"{OP}: ids: traced or transformed, expected a plain call: the sum over ranks has no "
            "place in torch.export, make_fx, torch.jit.trace and torch.func; torch.compile ends a "
            "graph here"
        )


# -- which rows a rank holds -----------------------------------------------------------------------


class Part(NamedTuple):
    """What one rank holds: ids of the vocabulary, added ones behind them, zeros behind those."""

    num_rows: int  # the same on all ranks
    vocab_range: tuple[int, int]  # (start, length)
    added_range: tuple[int, int]


def part_of(
    vocab_size: int, num_added: int, rank: int, size: int, rows_of_each: int | None = None
) -> Part:
    """Return a rank's part: the last ranks may have less than others, or none.

    With ``rows_of_each`` the ids follow one another through all ranks, so many on each, and the
    ranks' memory in a row is the table. Without, vocabulary and added ids are split by themselves.
    """
    end = vocab_size + num_added
    if rows_of_each is None:
        base, added = -(-vocab_size // size), -(-num_added // size)
        start = vocab_size + rank * added
        return Part(
            base + added,
            _clip(rank * base, (rank + 1) * base, 0, vocab_size),
            _clip(start, start + added, vocab_size, end),
        )
    first, last = rank * rows_of_each, (rank + 1) * rows_of_each
    return Part(
        rows_of_each,
        _clip(first, last, 0, vocab_size),
        _clip(first, last, vocab_size, end),
    )


def _clip(first: int, last: int, begin: int, end: int) -> tuple[int, int]:
    """Return (start, length) of what lies in both; a length of 0 has a start that is in range."""
    start = min(max(first, begin), end)
    return start, max(min(last, end) - start, 0)


def _parts_of(whole: Any, part: Part, hidden_size: int) -> list[Tensor]:
    """Return a rank's rows of the whole table, those of each range that is not empty."""
    found = []
    for start, length in (part.vocab_range, part.added_range):
        if length == 0:
            continue
        one = whole[start : start + length]
        if not isinstance(one, Tensor):
            raise TypeError(f"{OP}: weight: slices are {type_text(one)}, expected tensors")
        if one.shape != (length, hidden_size):
            came = f"a slice of {length} rows has shape {[*one.shape]}"
            raise ValueError(f"{OP}: weight: {came}, expected {[length, hidden_size]}")
        found.append(one)
    return found


def _write(to: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy `parts` to `to`, one after the other, and write zeros after them."""
    with torch.no_grad():
        row = 0
        for one in parts:
            to[row : row + len(one)].copy_(one)
            row += len(one)
        to[row:].zero_()


# -- memory that ranks read each other's rows in ---------------------------------------------------


def _row_bytes(like: Tensor) -> int:
    return like.shape[1] * like.dtype.itemsize


def rows_in_pages(num_rows: int, size: int, row_bytes: int, page_bytes: int) -> int:
    """Return how many rows each rank holds where its memory is to be whole pages."""
    unit = page_bytes // math.gcd(page_bytes, row_bytes)
    return -(-num_rows // (size * unit)) * unit


def _peer_memory(
    like: Tensor, num_rows: int, comm: Communicator, method: Method, group: Any, timeout_s: float
) -> PeerMemory | None:
    """Return memory for a table's rows, as many on each rank as fill whole pages: collective.

    None on all ranks, where `method` is "all_reduce", or "auto" and there can be none. `like` has
    the row's size, dtype and device. Raises as PeerMemory; UnsupportedError for "peer" only.
    """
    if method == "all_reduce":
        return None
    from jitkern.comm.peer_memory import HOST_PIECE_BYTES, PeerMemory

    wrong: Exception | None = None
    # Not this GPU's pages: all ranks decide alike, of which one may have another GPU.
    row_bytes, held = _row_bytes(like), -(-num_rows // comm.size)
    num_bytes = rows_in_pages(num_rows, comm.size, row_bytes, HOST_PIECE_BYTES) * row_bytes
    if like.device.type not in ("cpu", "cuda"):
        expected = "a GPU or the CPU for method='peer'"
        wrong = ValueError(f"{OP}: device: {like.device}, expected {expected}")
    elif num_bytes > max(2 * held * row_bytes, _SMALL_BYTES):
        wrong = ValueError(
            f"{OP}: hidden_size: {like.shape[1]} of {str(like.dtype)[6:]}, rows of {row_bytes} "
            f"bytes: {held} on each rank take {num_bytes} bytes of whole pages, expected at most "
            "twice their own; use method='all_reduce', or a hidden_size with more factors of 2"
        )
    if wrong is None:
        try:
            peers = PeerMemory(
                *(num_bytes, group),
                rank=comm.rank, size=comm.size, device=like.device, timeout_s=timeout_s,
            )  # fmt: skip
        except UnsupportedError as error:  # on all ranks
            wrong = error
        else:
            if peers.share_bytes == num_bytes:
                return peers
            peers.close()  # on all ranks: the largest of their pages
            wrong = UnsupportedError(
                f"{OP}: memory of one of the ranks comes in other pages than of 2 MiB: "
                f"{peers.share_bytes} bytes for {num_bytes}; use method='all_reduce'"
            )
    if method == "peer":
        raise wrong
    return None


# -- arguments -------------------------------------------------------------------------------------


def _int_arg(name: str, value: Any, *, at_least: int) -> int:
    if type(value) is not int:
        raise TypeError(f"{OP}: {name}: {type_text(value)}, expected an int")
    if value < at_least:
        raise ValueError(f"{OP}: {name}: {value}, expected at least {at_least}")
    return value


def _padding_arg(value: Any, num_ids: int) -> int | None:
    """Return an id, counted from the front, or None."""
    if value is None:
        return None
    if type(value) is not int:
        raise TypeError(f"{OP}: padding_idx: {type_text(value)}, expected an int")
    if not -num_ids <= value < num_ids:
        expected = f"expected {-num_ids} to {num_ids - 1}"
        raise ValueError(f"{OP}: padding_idx: {value}, {expected}")
    return value % num_ids


def _method_arg(value: Any, group: Any, size: int) -> Method:
    """Return how rows are to come from other ranks; ``"auto"`` only where that is open."""
    if not isinstance(value, str):
        raise TypeError(f"{OP}: method: {type_text(value)}, expected a str")
    if value not in _METHODS:
        expected = ", ".join(map(repr, _METHODS[:-1])) + f" or {_METHODS[-1]!r}"
        raise ValueError(f"{OP}: method: {value!r}, expected {expected}")
    if size == 1:
        return "all_reduce"  # there is nobody to read from
    if group is None and value == "peer":
        raise ValueError(
            f"{OP}: group: None, expected the ranks' gloo group or store for method='peer'"
        )
    return cast("Method", "all_reduce" if group is None else value)


def _shape_of(weight: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of a slice of safetensors."""
    try:
        return tuple(weight.shape if hasattr(weight, "shape") else weight.get_shape())
    except (AttributeError, TypeError):
        raise TypeError(f"{OP}: weight: {type_text(weight)}, expected a tensor") from None
