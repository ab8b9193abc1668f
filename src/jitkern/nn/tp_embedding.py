"""``TPEmbedding``: an embedding whose vocabulary is split over ranks, as a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from jitkern.comm.args import communicator_arg, seconds_arg
from jitkern.nn import args, layout, memory, rows
from jitkern.nn.args import OP, Method
from jitkern.nn.look_up import look_up
from jitkern.ops.common import type_text
from jitkern.ops.index import indexing

if TYPE_CHECKING:
    from jitkern.comm.protocol import Communicator


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
        self.vocab_size: int = args.int_arg("vocab_size", vocab_size, at_least=1)
        self.hidden_size: int = args.int_arg("hidden_size", hidden_size, at_least=1)
        self.num_added: int = args.int_arg("num_added", num_added, at_least=0)
        self.comm: Communicator = communicator_arg(OP, comm)
        self.padding_idx: int | None = args.padding_arg(padding_idx, vocab_size + num_added)
        rank, size = comm.rank, comm.size
        asked = args.method_arg(method, group, size)
        timeout_s = seconds_arg(OP, timeout_s)
        like = torch.empty(0, hidden_size, dtype=dtype, device=device)
        if not like.dtype.is_floating_point:
            raise TypeError(f"{OP}: dtype: {str(like.dtype)[6:]}, expected a floating dtype")
        self._is_split = size > 1
        self._peers = memory.memory_of(like, self.full_shape[0], comm, asked, group, timeout_s)
        self.method: Method = "all_reduce" if self._peers is None else "peer"
        each = None if self._peers is None else memory.rows_of(self._peers, like)
        self._part = layout.part_of(vocab_size, num_added, rank, size, each)
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

    @property
    def full_shape(self) -> tuple[int, int]:
        """Of the whole table: ``(vocab_size + num_added, hidden_size)``."""
        return self.vocab_size + self.num_added, self.hidden_size

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
                from jitkern import untraced

                found = cast("Tensor", untraced.call(look_up, *call))
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
        shape = args.shape_of(weight)
        if shape != self.full_shape:
            raise ValueError(f"{OP}: weight: shape {[*shape]}, expected {[*self.full_shape]}")
        parts = self._parts_of(weight)
        with self._fenced():
            rows.write(self.weight, parts)

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
            rows.write(part, self._parts_of(value))
            state_dict = {**state_dict, key: part}
        elif self._peers is not None and isinstance(value, Tensor):
            # Not by PyTorch, which with assign=True puts another tensor in the place of `weight`.
            parts = self._parts_of(value) if is_whole else [value[: self._num_held]]
            with self._fenced():
                rows.write(self.weight, parts)
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
        return rows.parts_of(whole, self._part, self.hidden_size)

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
