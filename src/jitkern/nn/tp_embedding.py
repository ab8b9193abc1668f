"""``TPEmbedding``: an embedding whose vocabulary is split over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from jitkern.args import choice_arg, dtype_arg, int_arg, seconds_arg, type_text
from jitkern.comm.args import communicator_arg
from jitkern.comm.peer_memory import PAGE_BYTES, PeerMemory, PeerMemoryOf
from jitkern.comm.protocol import Communicator
from jitkern.errors import EarlierFault, UnsupportedError
from jitkern.ops import dispatch
from jitkern.ops.index import indexing

OP = "TPEmbedding"

EmbeddingAlgorithm = Literal["auto", "peer", "all_reduce"]
_SMALL_BYTES = 16 << 20  # whole pages may take this, or twice the bytes of a rank's rows


class TPEmbedding(torch.nn.Module):
    """``torch.nn.Embedding`` with its rows split over the ranks of a communicator, for inference.

    Every rank gets the rows of the table bit for bit, NaN payloads and -0.0 included, by one of two
    algorithms:

    ``"all_reduce"``: all ranks look up the same ids. Each rank contributes the rows that it holds,
    and zeros for all others. The result is their sum over the ranks, computed on integers. After
    vLLM's ``VocabParallelEmbedding``.

    ``"peer"``: each rank reads every row from the ``comm.PeerMemory`` of the rank that holds it. A
    look-up is one launch and not collective: ranks may look up different ids at different times.
    Making the module, ``load_full``, ``load_state_dict`` and ``fence`` are collective.

    Added tokens have the ids ``vocab_size`` to ``vocab_size + num_added - 1``. ``"all_reduce"``
    splits the vocabulary evenly, and separately the added tokens. ``"peer"`` assigns ids to ranks
    in order, in whole pages of memory. The last ranks may hold fewer rows, or none.

    Parameters
    ----------
    vocab_size, hidden_size : int
        Rows of the whole table without added tokens, and elements per row.
    comm : Communicator
        The module uses its rank, world size and ``all_reduce`` (int32 or uint8, "sum", in place).
    dtype, device : torch.dtype and torch.device, optional
        A floating dtype, and the communicator's device; by default PyTorch's default dtype and
        device, as for the modules of ``torch.nn``.
    num_added : int
        Number of tokens that were added to the vocabulary.
    algorithm : "auto", "peer" or "all_reduce"
        ``"auto"`` selects ``"peer"`` if `group` is given, all ranks support peer memory, and
        rounding to whole pages wastes little of it. With one rank it is ``"all_reduce"``, and
        nothing is sent.
    group : torch.distributed.ProcessGroup or torch.distributed.Store, optional
        Required for peer memory: a group or store of the ranks of `comm`, as for
        ``comm.PeerMemory``.
    timeout_s : float
        Seconds for each step of allocating peer memory, and for each wait for the other ranks.

    Attributes
    ----------
    weight : torch.nn.Parameter
        This rank's rows: those of ``vocab_range``, then those of ``added_range``, then zeros. All
        are zeros until they are loaded. Does not require grad. With ``"peer"``, other ranks read
        it: write to it only between two calls of ``fence``.
    num_embeddings, embedding_dim, full_shape : int, int, (int, int)
        Rows of the whole table, added tokens included; elements per row; and both.
    vocab_range, added_range : (int, int)
        ``(start, length)`` of the ids that this rank holds.
    algorithm : "peer" or "all_reduce"
        The algorithm in use.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        comm: Communicator,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        num_added: int = 0,
        algorithm: EmbeddingAlgorithm = "auto",
        group: Any = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self.vocab_size: int = int_arg(OP, "vocab_size", vocab_size, 1)
        self.hidden_size: int = int_arg(OP, "hidden_size", hidden_size, 1)
        self.num_added: int = int_arg(OP, "num_added", num_added, 0)
        self.embedding_dim = hidden_size = self.hidden_size
        self.num_embeddings: int = self.vocab_size + self.num_added
        self.full_shape: tuple[int, int] = self.num_embeddings, hidden_size
        self.comm: Communicator = communicator_arg(OP, comm)
        choice_arg(OP, "algorithm", algorithm, get_args(EmbeddingAlgorithm))
        if comm.world_size > 1 and group is None and algorithm == "peer":
            expected = "expected the ranks' gloo group or store for algorithm='peer'"
            raise ValueError(f"{OP}: group: None, {expected}")
        timeout_s = seconds_arg(OP, timeout_s)
        if dtype is not None:
            dtype_arg(OP, dtype)
        try:
            like = torch.empty(0, hidden_size, dtype=dtype, device=device)
        except (RuntimeError, TypeError) as error:
            expected = "a device of PyTorch that is here"
            raise ValueError(f"{OP}: device: {device}, expected {expected}") from error
        if not like.dtype.is_floating_point:
            raise TypeError(f"{OP}: dtype: {str(like.dtype)[6:]}, expected a floating dtype")
        self._is_split, peers = comm.world_size > 1, None
        if self._is_split and group is not None and algorithm != "all_reduce":
            peers = _peer_memory(like, self.num_embeddings, comm, algorithm, group, timeout_s)
        self._peers = peers
        self.algorithm: EmbeddingAlgorithm = "peer" if peers else "all_reduce"
        each = peers.num_bytes // (hidden_size * like.dtype.itemsize) if peers else None
        self._part = part_of(self.vocab_size, self.num_added, comm.rank, comm.world_size, each)
        self.vocab_range: tuple[int, int] = self._part.vocab_range
        self.added_range: tuple[int, int] = self._part.added_range
        shape = self._part.num_rows, hidden_size
        rows = like.new_zeros(shape) if peers is None else peers.tensor(shape, like.dtype)
        self.weight = torch.nn.Parameter(rows, requires_grad=False)
        # The weight and all ranks' rows. In a tuple: the module does not register it again.
        self._shared: tuple[Tensor, Tensor] | None = None
        if peers is not None:
            whole = peers.whole((shape[0] * comm.world_size, hidden_size), like.dtype)
            self._shared = self.weight, whole[: self.num_embeddings]

    @classmethod
    def from_pretrained(cls, embeddings: Any, *, comm: Communicator, **options: Any) -> TPEmbedding:
        """Return a module with this table, like ``torch.nn.Embedding.from_pretrained``.

        ``embeddings`` is the whole table, as for ``load_full``; added tokens are its last rows. If
        it is a tensor, its dtype and device are the defaults of the module's. ``options`` are the
        other arguments of the module.
        """
        shape = _shape_of(embeddings, "embeddings")
        if len(shape) != 2:
            raise ValueError(f"{OP}: embeddings: shape {[*shape]}, expected 2 dimensions")
        num_rows, hidden_size = shape
        if isinstance(embeddings, Tensor):
            options = {"dtype": embeddings.dtype, "device": embeddings.device, **options}
        vocab_size = num_rows - options.get("num_added", 0)
        module = cls(vocab_size, hidden_size, comm=comm, **options)
        module.load_full(embeddings)
        return module

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`: ``[*ids.shape, hidden_size]``. On the current stream.

        ``ids`` are int32 or int64, of any shape, on the device of ``weight``. A negative id gives
        zeros. An id of ``num_embeddings`` or more is an IndexError, as in ``indexing``. If
        ``weight`` requires grad and gradients are enabled, RuntimeError.

        With ``"all_reduce"`` the call is collective, and all ranks pass the same ids.
        ``torch.compile`` breaks its graph around the call; other tracers raise RuntimeError.
        """
        weight: Tensor = self.weight
        table: Tensor | None = None
        if weight.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{OP}: weight: requires a gradient, expected none: it is for inference; train "
                "with torch.nn.functional.embedding, or call under torch.no_grad()"
            )
        if not self._is_split:
            table = weight
        # torch.func.functional_call may have put another tensor in the place of the weight, which
        # other ranks cannot read.
        elif self._shared is not None and weight is self._shared[0]:
            table = self._shared[1]
        if table is not None:
            try:
                return indexing(table, ids)
            except (TypeError, ValueError, IndexError) as error:
                _name_ids(error, weight, ids, self.num_embeddings)
                raise
        return look_up(weight, ids, self._part, self.num_embeddings, self.comm)

    def load_full(self, weight: Any) -> None:
        """Copy this rank's rows of the whole table into ``weight``; other rows are not read.

        ``weight`` is a tensor of any device and dtype, such as one mapped from a file, or an object
        with the same slicing: ``safetensors.safe_open(...).get_slice(name)``. Collective for
        ``"peer"``, like ``load_state_dict``. Addresses stay the same, so CUDA graphs stay valid.
        After a CommTimeoutError this module can load no more: make a new one.
        """
        shape = _shape_of(weight, "weight")
        if shape != self.full_shape:
            raise ValueError(f"{OP}: weight: shape {[*shape]}, expected {[*self.full_shape]}")
        parts = _parts_of(weight, self._part)
        with self._fenced():
            _write(self.weight, parts)

    def fence(self) -> None:
        """Wait for this rank's GPU, then for all ranks. Collective; no-op for ``"all_reduce"``.

        Call it before and after you write to ``weight``, except by ``load_full`` and
        ``load_state_dict``. Not during a stream capture.
        """
        if self._peers is None:
            return
        if self._peers.device.type == "cuda":
            torch.cuda.synchronize(self._peers.device)
        self._peers.barrier()

    def extra_repr(self) -> str:
        """Return the text of the module for ``print``."""
        sizes = f"{self.vocab_size}, {self.hidden_size}, num_added={self.num_added}"
        ranks = f"rank={self.comm.rank}, world_size={self.comm.world_size}"
        return f"{sizes}, algorithm={self.algorithm!r}, {ranks}"

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, *more: Any
    ) -> None:
        """Take the whole table, or this rank's rows."""
        key = f"{prefix}weight"
        value = state_dict.get(key)
        shape = self.weight.shape
        if isinstance(value, Tensor) and value.shape == self.full_shape != shape:
            whole, value = value, value.new_empty(shape)
            _write(value, _parts_of(whole, self._part))
            state_dict = {**state_dict, key: value}
        if self._peers is not None and isinstance(value, Tensor) and value.shape == shape:
            # Not by PyTorch: with assign=True it would replace `weight` by another tensor.
            with self._fenced():
                _write(self.weight, [value])
            state_dict = {name: entry for name, entry in state_dict.items() if name != key}
            missing = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *more)

    def _apply(self, fn: Any, recurse: bool = True) -> TPEmbedding:
        if self._peers is None:
            return cast("TPEmbedding", super()._apply(fn, recurse))  # type: ignore[no-untyped-call]
        before = self.weight.new_empty(0)
        after = fn(before)
        if (after.dtype, after.device) != (before.dtype, before.device):
            came, expected = (f"{str(x.dtype)[6:]} on {x.device}" for x in (after, before))
            raise RuntimeError(
                f"{OP}: weight: {came}, expected {expected}: it is in memory that other ranks "
                "read; make a new module with dtype= and device="
            )
        return self

    @contextmanager
    def _fenced(self) -> Iterator[None]:
        """Write to ``weight`` while no rank reads it."""
        self.fence()
        yield
        self.fence()  # a rank that has failed does not come to it: the others then raise too


# -- a look-up that sums over ranks ----------------------------------------------------------------


@dispatch.untraced
def look_up(weight: Tensor, ids: Tensor, part: Part, num_ids: int, comm: Communicator) -> Tensor:
    """Return the rows of all ranks: collective. `weight` holds this rank's `part` of them."""
    dispatch.refuse_tracing(OP)
    ranges: dict[str, Any] = {"vocab_range": part.vocab_range, "added_range": part.added_range}
    earlier: EarlierFault | None = None
    while True:
        try:
            rows = indexing(weight, ids, **ranges, vocab_size=num_ids)
            break
        except EarlierFault as error:
            # Ranks hear of an earlier fault at different calls. This call makes its sum all the
            # same: otherwise this rank's next sum would meet the others' sum of this call.
            earlier = earlier or error
        except (TypeError, ValueError, IndexError) as error:
            _name_ids(error, weight, ids, num_ids)
            raise
    _add_up(rows, comm)
    if earlier is not None:
        raise earlier
    return rows


def _name_ids(error: Exception, weight: Tensor, ids: Any, num_ids: int) -> None:
    """Raise an error that names the ids, if `error` of ``indexing`` is about them."""
    if isinstance(error, EarlierFault):
        return
    if not isinstance(ids, Tensor):
        raise TypeError(f"{OP}: ids: {type_text(ids)}, expected a tensor") from error
    if ids.dtype not in (torch.int32, torch.int64):
        came = f"dtype {str(ids.dtype)[6:]}"
        raise TypeError(f"{OP}: ids: {came}, expected int32 or int64") from error
    if ids.device != weight.device:
        expected = f"on {weight.device} as weight"
        raise ValueError(f"{OP}: ids: on {ids.device}, expected {expected}") from error
    if isinstance(error, IndexError):  # on the CPU
        flat = ids.reshape(-1)
        position = int((flat >= num_ids).nonzero()[0])
        came = f"index {int(flat[position])} at position {position}"
        raise IndexError(f"{OP}: ids: {came}, expected below {num_ids}") from error


def _add_up(rows: Tensor, comm: Communicator) -> None:
    """Sum over ranks, at most one of which has bits other than zero: exact for any bits.

    A sum of floats would turn -0.0 into 0.0 and change NaNs. NCCL and gloo both sum int32 and
    uint8, and not int16.
    """
    if rows.numel() > 0:  # on every rank
        flat = rows.view(-1)
        comm.all_reduce(flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8))


# -- which rows a rank holds -----------------------------------------------------------------------


class Part(NamedTuple):
    """The rows of one rank: ids of the vocabulary, then added ones, then zeros."""

    num_rows: int  # the same on all ranks
    vocab_range: tuple[int, int]  # (start, length)
    added_range: tuple[int, int]


def part_of(
    vocab_size: int, num_added: int, rank: int, world_size: int, rows_per_rank: int | None = None
) -> Part:
    """Return a rank's part. Without ``rows_per_rank``, added ids are split separately."""

    def range_of(first: int, count: int, begin: int, end: int) -> tuple[int, int]:
        start = min(max(first, begin), end)
        return start, max(min(first + count, end) - start, 0)

    num_ids = vocab_size + num_added
    if rows_per_rank is not None:
        held = rank * rows_per_rank, rows_per_rank
        ranges = range_of(*held, 0, vocab_size), range_of(*held, vocab_size, num_ids)
        return Part(rows_per_rank, *ranges)
    base, added = -(-vocab_size // world_size), -(-num_added // world_size)
    return Part(
        base + added,
        range_of(rank * base, base, 0, vocab_size),
        range_of(vocab_size + rank * added, added, vocab_size, num_ids),
    )


def _parts_of(whole: Any, part: Part) -> list[Tensor]:
    """Return a rank's rows of the whole table, those of each range that is not empty."""
    parts = [whole[start : start + n] for start, n in (part.vocab_range, part.added_range) if n]
    for rows in parts:
        if not isinstance(rows, Tensor):
            raise TypeError(f"{OP}: weight: slices are {type_text(rows)}, expected tensors")
    return parts


def _write(to: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy `parts` to the first rows of `to`, and zero the rest."""
    with torch.no_grad():
        row = 0
        for rows in parts:
            to[row : row + len(rows)].copy_(rows)
            row += len(rows)
        to[row:].zero_()


# -- memory in which ranks read each other's rows --------------------------------------------------


def rows_in_pages(num_rows: int, world_size: int, row_bytes: int) -> int:
    """Return the rows of each rank, whose memory is whole pages."""
    unit = PAGE_BYTES // math.gcd(PAGE_BYTES, row_bytes)
    return -(-num_rows // (world_size * unit)) * unit


def _peer_memory(
    like: Tensor, num_rows: int, comm: Communicator, algorithm: str, group: Any, timeout_s: float
) -> PeerMemory | None:
    """Return memory for rows as `like`, or None on all ranks if "auto" finds none: collective."""
    row_bytes, held = like.shape[1] * like.dtype.itemsize, -(-num_rows // comm.world_size)
    num_bytes = rows_in_pages(num_rows, comm.world_size, row_bytes) * row_bytes
    is_wasteful = num_bytes > max(2 * held * row_bytes, _SMALL_BYTES)
    if algorithm == "auto" and (is_wasteful or like.device.type not in ("cpu", "cuda")):
        return None
    ranks: dict[str, Any] = {"rank": comm.rank, "world_size": comm.world_size}
    try:
        options = {"device": like.device, "timeout_s": timeout_s}
        return PeerMemoryOf(OP, {}, num_bytes, group=group, **ranks, **options)
    except UnsupportedError:  # on all ranks
        if algorithm == "peer":
            raise
        return None


def _shape_of(weight: Any, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor, or of a slice of safetensors."""
    try:
        return tuple(weight.shape if hasattr(weight, "shape") else weight.get_shape())
    except (AttributeError, TypeError):
        raise TypeError(f"{OP}: {name}: {type_text(weight)}, expected a tensor") from None
