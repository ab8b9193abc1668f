"""``ResidencyMap``: which rows of a table in host memory a cache on the GPU holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitkern.args import device_arg, int_arg, optional_arg, type_text
from jitkern.errors import UNREADABLE, name_unreadable
from jitkern.host import library as host
from jitkern.ops import dispatch
from jitkern.ops.block_buffers import BlockBuffers
from jitkern.ops.dispatch import inference_mode
from jitkern.ops.residency import HELD_SLOTS

MOST_ROWS, MOST_SLOTS = 2**31 - 2, 2**20


_swap_in, _resolve = host.Function("swap_in"), host.Function("resolve")


@dataclass(frozen=True, eq=False)
class MissPlan:
    """The misses of a call, as other layers, ranks or streams fetch them.

    ``h2d_gather(host, cache, plan.pairs)`` and ``peer_gather`` take the pairs as they are: negative
    ones are skipped.
    """

    pairs: Tensor
    """``[num_lists, ..., 2]``: (row, row of the cache) for each miss of a list, in the order of the
    list, then -1; dtype of the lists."""
    counts: Tensor
    """``[num_lists]``, int32: the number of misses of each list."""

    @classmethod
    def like(cls, rows: Tensor) -> MissPlan:
        """Return a plan for lists of this shape and dtype."""
        pairs = torch.full((*rows.shape, 2), -1, dtype=rows.dtype, device=rows.device)
        return cls(pairs, torch.zeros(rows.shape[0], dtype=torch.int32, device=rows.device))


@dataclass(frozen=True)
class ResidencyStats:
    """What ``ResidencyMap.stats`` returns: totals since the map was made."""

    hits: int
    """Rows that were in the cache."""
    misses: int
    """Rows that were fetched, or that a plan has."""
    moved_bytes: int
    """Bytes that ``swap_in`` has fetched."""


class ResidencyMap:
    """Finds rows of a table in a cache of slots; fetches those that are missing.

    For caches on a GPU of a table in pinned host memory, of which a step needs some rows: sparse
    attention over a KV cache, experts of a mixture, embeddings. A state is a cache of its own, such
    as a request's: `num_slots` rows, and the order in which they were used. `swap_in` is one
    launch. It gives the row's slot for each row of a list, and replaces the least recently used
    slots by the missing rows: exact LRU, the same on every device.

    After a step a state's slots are in this order: those that the step did not use, in their old
    order; the missing rows, in the order of the list; the hits, in their old order. The first is
    replaced next. Slots without a row are replaced in the same order.

    After sglang's and vLLM's HiSparse kernels.

    Parameters
    ----------
    num_states : int
        Number of states. Slot ``s`` of state ``i`` is row ``i * num_slots + s`` of the cache.
    num_slots : int
        Slots per state, up to 2**20.
    num_rows : int
        Rows of the table, below 2**31.
    device : torch.device, str or int, optional
        Where the cache is. Default: the current GPU, or the CPU if there is none.
    num_pinned : int, optional
        The last slots of each state are pinned: they are found, and never replaced. See ``pin``.

    Attributes
    ----------
    slot_of_row : Tensor
        ``[num_states, num_rows]``, int32: the slot of each row, -1 for none.
    row_of_slot : Tensor
        ``[num_states, num_slots]``, int32: the row in each slot, -1 for none.
    lru_order : Tensor
        ``[num_states, num_slots - num_pinned]``, int32: slots, the least recently used first. The
        three are the whole state: copy them to save it, or to give it to another rank.

    Examples
    --------
    >>> import torch, jitkern
    >>> table = torch.arange(1000.0).view(1000, 1).expand(-1, 8).contiguous()
    >>> cache = torch.zeros(2 * 64, 8)
    >>> residency = jitkern.offload.ResidencyMap(2, 64, 1000, device="cpu")
    >>> rows = torch.tensor([[7, 999, 7], [5, -1, 3]])
    >>> slots = torch.empty_like(rows)
    >>> residency.swap_in(table, cache, rows, slots)
    >>> slots.tolist(), cache[slots[0, 1], 0].item()
    ([[0, 1, 0], [64, -1, 65]], 999.0)
    """

    def __init__(
        self,
        num_states: int,
        num_slots: int,
        num_rows: int,
        *,
        device: torch.device | str | int | None = None,
        num_pinned: int = 0,
    ) -> None:
        name = "ResidencyMap"
        self.num_states: int = int_arg(name, "num_states", num_states, 1, 2**31 - 1)
        self.num_slots: int = int_arg(name, "num_slots", num_slots, 1, MOST_SLOTS)
        self.num_rows: int = int_arg(name, "num_rows", num_rows, 1, MOST_ROWS)
        self.num_pinned: int = int_arg(name, "num_pinned", num_pinned, 0, num_slots)
        self.device: torch.device = device_arg(name, "device", device)
        on_gpu = self.device.type == "cuda"
        num_evictable = num_slots - num_pinned
        with torch.inference_mode(False):
            # Each has one more item, which padding of pin() and invalidate() writes.
            self._slots = self._filled(num_states * num_rows + 1)
            self._rows = self._filled(num_states * num_slots + 1)
            self.slot_of_row: Tensor = self._slots[:-1].view(num_states, num_rows)
            self.row_of_slot: Tensor = self._rows[:-1].view(num_states, num_slots)
            self.lru_order: Tensor = self._filled(num_states, num_evictable)
            spare = num_states if on_gpu and num_evictable > HELD_SLOTS else 0
            next_order = self._filled(spare, num_evictable)
            counts = torch.zeros(num_states, 3, dtype=torch.int64, device=self.device)
            self._counts = torch.zeros(
                num_states, 3, dtype=torch.int64, device="cpu", pin_memory=on_gpu
            )
            self.reset()
        if on_gpu:
            torch.cuda.current_stream(self.device).synchronize()  # other streams may use the map
        tables = (self.slot_of_row, self.row_of_slot, self.lru_order, next_order)
        self._handle: Any = host.module()["make_residency"](*tables, counts, self._counts)

    def _filled(self, *shape: int) -> Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=self.device)

    def swap_in(
        self,
        host: Tensor | BlockBuffers,
        cache: Tensor | BlockBuffers,
        rows: Tensor,
        slots_out: Tensor,
        *,
        states: Tensor | None = None,
        count: Tensor | None = None,
        pages: Tensor | None = None,
        plan: MissPlan | None = None,
    ) -> None:
        """Find the rows of each list, and fetch the missing ones into its state's slots.

        Asynchronous on the current stream; allocates nothing. One launch, which a CUDA graph can
        capture. Calls on one state must not overlap: one stream, or events between them.

        Parameters
        ----------
        host : Tensor or BlockBuffers
            ``[num_rows, ...]``, with ``pages`` any number of rows, in pinned memory. Rows are
            contiguous, at any distance. A list: K and V, or all layers of a group, which are
            fetched together. Keep it allocated until the stream has passed the call.
        cache : Tensor or BlockBuffers
            ``[num_states * num_slots, ...]``, the rows of ``host`` on the map's device.
        rows : Tensor
            ``[num_lists, ...]``, int32 or int64, contiguous: a list for each state, of up to 8,192
            rows. Several lists of one state, such as those of speculative steps, are further
            dimensions: ``[num_lists, steps, k]``. -1 is padding. A row that is asked for twice is
            fetched once.
        slots_out : Tensor
            The shape and dtype of ``rows``; written: the row of ``cache`` for each of them, -1 for
            padding.
        states : Tensor, optional
            ``[num_lists]``, int32 or int64: the state of each list, each once; -1: padding, whose
            slots are all -1. Default: list ``i`` asks for state ``i``.
        count : Tensor, optional
            1 element, int32 or int64, on the device of ``rows``: the lists that are used. The
            others are padding.
        pages : Tensor, optional
            ``[num_states, num_pages]``, int32 or int64, on the device of ``rows``: a block table.
            Page ``p`` of a state is page ``pages[state, p]`` of ``host``; a page has ``num_rows /
            num_pages`` rows. So rows are positions of a request whose pages lie anywhere in a pool.
            Default: row ``r`` is row ``r`` of ``host``.
        plan : MissPlan, optional
            Written: the misses.

        Raises
        ------
        TypeError, ValueError
            A wrong dtype, device, shape or stride; memory that overlaps or is not pinned. Nothing
            was written.
        IndexError
            A row of ``num_rows`` or more; more missing rows than slots that the step does not use;
            a state of ``num_states`` or more, or one that is asked for twice; a page that ``host``
            has not. On the CPU at once, with nothing written. On CUDA the list gets slots of -1 and
            its state stays, and the next jitkern call on the device or ``jitkern.check`` raises.
        """
        call = "ResidencyMap.swap_in"
        dispatch.refuse_tracing(call)
        pairs, counts = _plan_arg(call, plan)
        written = (slots_out, cache) if plan is None else (slots_out, cache, pairs, counts)
        if not (inference_mode.is_enabled() or dispatch.is_plain(written, (host,))):
            outputs = {"slots_out": slots_out, "cache": cache}
            dispatch.refuse(call, outputs, {"host": host})
        try:
            _swap_in.call(
                self._handle, host, cache, rows, slots_out, states, count, pages, pairs, counts
            )
        except UNREADABLE as error:
            name_unreadable(
                error, call, host=host, cache=cache, rows=rows, slots_out=slots_out,
                states=states, count=count, pages=pages,
            )  # fmt: skip
        dispatch.bump_versions(written)

    def resolve(
        self,
        rows: Tensor,
        slots_out: Tensor,
        *,
        plan: MissPlan,
        states: Tensor | None = None,
        count: Tensor | None = None,
        pages: Tensor | None = None,
    ) -> None:
        """Find rows and replace slots as ``swap_in`` does, but fetch nothing.

        Others fetch the rows of ``plan`` before the next call. Arguments and errors are those of
        ``swap_in``.
        """
        call = "ResidencyMap.resolve"
        dispatch.refuse_tracing(call)
        if plan is None:
            raise TypeError(f"{call}: plan: None, expected a MissPlan")
        pairs, counts = _plan_arg(call, plan)
        try:
            _resolve.call(self._handle, rows, slots_out, states, count, pages, pairs, counts)
        except UNREADABLE as error:
            tensors = {"rows": rows, "slots_out": slots_out, "states": states}
            tensors |= {"count": count, "pages": pages}
            name_unreadable(error, call, **tensors)
        dispatch.bump_versions((slots_out, pairs, counts))

    def pin(self, states: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Give pinned slots to rows that the caller has written there, such as the newest token.

        Asynchronous, by a few launches, as ``invalidate`` and ``reset``; a graph can capture them.

        Parameters
        ----------
        states, rows, slots : Tensor
            ``[n]``, int32 or int64, on the map's device: slot ``slots[i]`` of state ``states[i]``
            holds ``rows[i]``. Slots are ``num_slots - num_pinned`` to ``num_slots - 1``. An entry
            with a negative number is padding.

        Raises
        ------
        TypeError, ValueError
            A wrong dtype, device or shape.
        IndexError
            A state, row or slot past the end, or a slot that is not pinned: on the CPU. On CUDA the
            entry is ignored.
        """
        call = "ResidencyMap.pin"
        first = self.num_slots - self.num_pinned
        states = _index_arg(call, "states", states, self.num_states, self.device)
        rows = _index_arg(call, "rows", rows, self.num_rows, self.device, states)
        slots = _index_arg(call, "slots", slots, self.num_slots, self.device, states, first)
        is_pin = _is_inside(states, self.num_states) & _is_inside(rows, self.num_rows)
        is_pin &= (slots >= first) & (slots < self.num_slots)
        of_row = torch.where(is_pin, states * self.num_rows + rows, -1)
        of_slot = torch.where(is_pin, states * self.num_slots + slots, -1)
        self._leave(states, of_row)
        old_rows = self._rows[of_slot].long()
        self._slots[torch.where(old_rows < 0, -1, states * self.num_rows + old_rows)] = -1
        self._slots[of_row] = torch.where(is_pin, slots, -1).int()
        self._rows[of_slot] = torch.where(is_pin, rows, -1).int()

    def invalidate(self, states: Tensor, rows: Tensor) -> None:
        """Forget rows, such as those whose memory in the table is written again.

        Parameters
        ----------
        states, rows : Tensor
            ``[n]``, int32 or int64, on the map's device: row ``rows[i]`` of state ``states[i]``. An
            entry with a negative number is padding. Errors are those of ``pin``.
        """
        call = "ResidencyMap.invalidate"
        states = _index_arg(call, "states", states, self.num_states, self.device)
        rows = _index_arg(call, "rows", rows, self.num_rows, self.device, states)
        is_row = _is_inside(states, self.num_states) & _is_inside(rows, self.num_rows)
        self._leave(states, torch.where(is_row, states * self.num_rows + rows, -1))

    def _leave(self, states: Tensor, of_row: Tensor) -> None:
        """Take rows out of their slots; -1 is the item that nobody reads."""
        slots = self._slots[of_row].long()
        self._rows[torch.where(slots < 0, -1, states * self.num_slots + slots)] = -1
        self._slots[of_row] = -1

    def reset(self, states: Tensor | None = None) -> None:
        """Forget all rows of some states, such as those of requests that have ended.

        Parameters
        ----------
        states : Tensor, optional
            ``[n]`` on the map's device, 0 or more. Default: all.
        """
        slots = torch.arange(self.lru_order.shape[1], dtype=torch.int32, device=self.device)
        if states is None:
            self._slots.fill_(-1)
            self._rows.fill_(-1)
            self.lru_order.copy_(slots.expand_as(self.lru_order))
            return
        states = _index_arg("ResidencyMap.reset", "states", states, self.num_states, self.device)
        self.slot_of_row[states] = -1
        self.row_of_slot[states] = -1
        self.lru_order[states] = slots

    def check(self, state: int) -> None:
        """Raise RuntimeError if a state is inconsistent. Synchronises.

        In a consistent one the order is a permutation of the slots that are not pinned, and
        ``slot_of_row`` is the inverse of ``row_of_slot``.
        """
        state = int_arg(
            "ResidencyMap.check", "state", state, 0, self.num_states - 1, error=IndexError
        )
        order, rows = self.lru_order[state].cpu(), self.row_of_slot[state].cpu()
        slots = self.slot_of_row[state].cpu()
        wrong = ""
        if not torch.equal(order.sort().values.long(), torch.arange(len(order), device="cpu")):
            wrong = "order is no permutation of the slots"
        held = torch.nonzero(rows != -1).flatten()
        if not torch.equal(torch.nonzero(slots != -1).flatten(), rows[held].long().sort().values):
            wrong = "slot_of_row and row_of_slot hold different rows"
        elif not torch.equal(slots[rows[held].long()].long(), held):
            wrong = "slot_of_row is not the inverse of row_of_slot"
        if wrong:
            raise RuntimeError(f"ResidencyMap: state {state}: {wrong}")

    def stats(self) -> ResidencyStats:
        """Return the numbers of hits, misses and fetched bytes so far.

        They are read without a synchronisation: a call counts when its kernel has ended. A row that
        is asked for twice in a call is a miss and a hit.
        """
        return ResidencyStats(*self._counts.sum(0).tolist())

    def __repr__(self) -> str:
        size = f"{self.num_states} states of {self.num_slots} slots"
        return f"ResidencyMap({size}, {self.num_rows} rows, on {self.device})"


def _index_arg(
    call: str,
    name: str,
    value: Any,
    bound: int,
    device: torch.device,
    like: Tensor | None = None,
    least: int = 0,
) -> Tensor:
    """Return a vector of indices as int64. IndexError for one past the end, on the CPU only."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{call}: {name}: {type_text(value)}, expected a tensor")
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{call}: {name}: dtype {value.dtype}, expected torch.int32 or torch.int64")
    if value.device.type != device.type:
        raise ValueError(f"{call}: {name}: device {value.device}, expected {device}, as the map")
    shape = list(value.shape)
    if value.ndim != 1 or (like is not None and value.shape != like.shape):
        expected = "[n]" if like is None else f"{list(like.shape)}, as states"
        raise ValueError(f"{call}: {name}: shape {shape}, expected {expected}")
    if device.type == "cpu":
        for position, index in enumerate(value.tolist()):
            if index >= bound or 0 <= index < least:
                expected = f"below {bound}"
                if least > 0:
                    expected = f"a pinned slot, {least} to {bound - 1}"
                if least == bound:
                    expected = "a pinned slot; the map has none: num_pinned is 0"
                raise IndexError(
                    f"{call}: {name}: index {index} at position {position}, expected {expected}; "
                    "nothing was written"
                )
    return value.long()


def _is_inside(numbers: Tensor, bound: int) -> Tensor:
    return (numbers >= 0) & (numbers < bound)


def _plan_arg(call: str, plan: MissPlan | None) -> tuple[Any, Any]:
    optional_arg(call, "plan", plan, MissPlan)
    return (None, None) if plan is None else (plan.pairs, plan.counts)
