"""ResidencyMap: exact LRU slot for slot, fetches of rows of any layout, faults, wrong arguments."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from ops.buffers import INT_DTYPES, Buffer, out_of_range, strided_buffer, synchronize
from pipelines import no_synchronisation
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jitkern import BlockBuffers, copy_blocks, h2d_gather
from jitkern.offload import MissPlan, ResidencyMap, ResidencyStats

STATES, SLOTS, ROWS = 3, 12, 40
UNWRITTEN = 77


def many(draw: random.Random, rows: int, length: int) -> list[int]:
    return [draw.randrange(rows) for _ in range(length)]


class Reference:
    """One state: the row in each slot, and the slots, the least recently used first."""

    def __init__(self, num_slots: int, num_pinned: int = 0) -> None:
        self.rows, self.order = [-1] * num_slots, list(range(num_slots - num_pinned))

    def step(self, asked: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the slot of each row, and the misses as (row, slot)."""
        held = {row: slot for slot, row in enumerate(self.rows) if row >= 0}
        used = {held[row] for row in asked if row in held}
        missing = [row for row in dict.fromkeys(asked) if row >= 0 and row not in held]
        unused = [slot for slot in self.order if slot not in used]
        victims, unused = unused[: len(missing)], unused[len(missing) :]
        self.order = unused + victims + [slot for slot in self.order if slot in used]
        misses = list(zip(missing, victims, strict=True))
        for row, slot in misses:
            self.rows[slot] = row
        held |= dict(misses)
        return [held.get(row, -1) for row in asked], misses

    def forget(self, row: int) -> None:
        self.rows = [-1 if held == row else held for held in self.rows]


class Side:
    """Rows of bytes, in a tensor or in a list of layers; `page` rows are neighbours."""

    def __init__(
        self, rows: int, *sizes: int, page: int = 1, gap: int = 0, offset: int = 0, **how: Any
    ) -> None:
        self.buffers = [
            strided_buffer((rows // page, page, size), (page * size + gap, size, 1), torch.uint8,
                           offset=offset, **how) for size in sizes
        ]  # fmt: skip
        self.row_bytes, self.page = sum(sizes), page
        views = [buffer.view for buffer in self.buffers]
        self.list = BlockBuffers(views, num_block_dims=2)
        self.is_list = page > 1 or len(sizes) > 1
        self.argument = self.list if self.is_list else views[0]

    def row(self, buffer: Buffer, row: int) -> Tensor:
        return buffer.view[row // self.page, row % self.page]


# Sizes, and what else is said, of the host's side and the cache's.
LAYOUTS: dict[str, list[tuple[Sequence[int], dict[str, int]]]] = {
    **{f"{size} B": [([size], {})] * 2 for size in (7, 24, 656, 1152)},
    "strided": [([656], {"gap": 8, "offset": 8}), ([656], {"gap": 24})],
    "odd strides": [([24], {"gap": 1, "offset": 3}), ([24], {"gap": 5})],
    "3 KB, off the lines": [([3008], {"offset": 48}), ([3008], {"offset": 16})],
    "layers": [([64, 64, 64], {"gap": 16}), ([64, 64, 64], {})],
    "layers of different sizes": [([656, 8, 2048], {"gap": 8}), ([656, 8, 2048], {})],
    "pages on the host": [([576, 40], {"page": 4, "gap": 24}), ([576, 40], {})],
    "pages in the cache": [([96], {}), ([96], {"page": 6, "gap": 16})],
    "1 MB": [([1 << 20], {}), ([1 << 20], {"gap": 16})],
}


class World:
    """A map, its two sides, and what they should hold."""

    def __init__(
        self, device: torch.device, layout: str = "24 B", *, states: int = STATES,
        slots: int = SLOTS, rows: int = ROWS, pinned: int = 0, page: int = 0,
    ) -> None:  # fmt: skip
        self.device, self.slots, self.pinned = device, slots, pinned
        self.map = ResidencyMap(states, slots, rows, device=device, num_pinned=pinned)
        self.states = [Reference(slots, pinned) for _ in range(states)]
        (host, of_host), (cache, of_cache) = LAYOUTS[layout]
        self.host = Side(rows, *host, device="cpu", pinned=device.type == "cuda", **of_host)
        self.cache = Side(states * slots, *cache, device=device, seed=1, **of_cache)
        self.sides = (self.host.argument, self.cache.argument)
        self.wanted = [Buffer(one.whole.cpu(), one.view).twin() for one in self.cache.buffers]
        self.counts = [0, 0, 0]
        # A state's pages lie anywhere among the host's, one of them several times.
        draw, count = random.Random(rows), rows // page if page else 0
        self.page, self.pages = page, [many(draw, count, count) for _ in range(states)]

    def host_row(self, state: int, row: int) -> int:
        if not self.page:
            return row
        return self.pages[state][row // self.page] * self.page + row % self.page

    def ints(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def outputs(self, rows: Tensor) -> tuple[Tensor, MissPlan]:
        plan = MissPlan.like(rows)
        for output in (plan.pairs, plan.counts):
            output.fill_(UNWRITTEN)
        return torch.full_like(rows, UNWRITTEN), plan

    def expect(
        self, lists: list[list[int]], states: Sequence[int] | None = None, count: int | None = None,
        refused: Collection[int] = (), call: str = "swap_in",
    ) -> list[Any]:  # fmt: skip
        """Take a step; return slots, pairs and counts of misses."""
        result: list[Any] = [[], [], []]
        for i, asked in enumerate(lists):
            state = i if states is None else states[i]
            slots, misses = [-1] * len(asked), []
            if state >= 0 and i not in refused and (count is None or i < count):
                slots, misses = self.states[state].step(asked)
                self.counts[0] += sum(row >= 0 for row in asked) - len(misses)
                self.counts[1] += len(misses)
                self.counts[2] += len(misses) * self.cache.row_bytes * (call == "swap_in")
            base = state * self.slots
            pairs = [[self.host_row(state, row), base + slot] for row, slot in misses]
            for buffer, wanted in zip(self.host.buffers, self.wanted, strict=True):
                for row, slot in pairs:
                    self.cache.row(wanted, slot).copy_(self.host.row(buffer, row))
            result[0].append([base + slot if slot >= 0 else -1 for slot in slots])
            result[1].append(pairs + [[-1, -1]] * (len(asked) - len(pairs)))
            result[2].append(len(pairs))
        return result

    def compare(self, slots_out: Tensor, plan: MissPlan, expected: list[Any]) -> None:
        self.compare_state()
        if slots_out.numel():
            assert slots_out.flatten(1).tolist() == expected[0]
            assert plan.pairs.flatten(1, -2).tolist() == expected[1]
        assert plan.counts.tolist() == expected[2]

    def compare_state(self) -> None:
        synchronize(self.device)
        for i, state in enumerate(self.states):
            assert self.map.lru_order[i].tolist() == state.order
            assert self.map.row_of_slot[i].tolist() == state.rows
            self.map.check(i)  # slot_of_row is the inverse
        for buffer, wanted in zip(self.cache.buffers, self.wanted, strict=True):
            assert wanted.same(buffer)
        assert self.map.stats() == ResidencyStats(*self.counts)

    def step(
        self, lists: list[list[int]], *, shape: Sequence[int] | None = None, text: str = "",
        refused: Collection[int] = (), states: Sequence[int] | None = None,
        count: int | None = None, call: str = "swap_in", dtypes: Sequence[torch.dtype] = INT_DTYPES,
    ) -> None:  # fmt: skip
        """Run a call, and compare everything. `refused` lists end in the IndexError `text`."""
        rows = self.ints(lists, dtypes[1])
        rows = rows if shape is None else rows.view(*shape)
        slots_out, plan = self.outputs(rows)
        how: dict[str, Any] = {"plan": plan}
        how |= {} if states is None else {"states": self.ints(states, dtypes[0])}
        how |= {} if count is None else {"count": self.ints([count], dtypes[0])}
        how |= {"pages": self.ints(self.pages, dtypes[0])} if self.page else {}

        def run() -> None:
            sides = self.sides if call == "swap_in" else ()
            getattr(self.map, call)(*sides, rows, slots_out, **how)

        if not text:
            run()
        else:
            with out_of_range(self.device, f"ResidencyMap.{call}: {text}"):
                run()
            if self.device.type == "cpu":  # nothing was written
                outputs = (slots_out, plan.pairs, plan.counts)
                assert all(bool((out == UNWRITTEN).all()) for out in outputs)
                return self.compare_state()
        expected = self.expect(lists, states, count, refused, call)
        if call == "resolve" and (self.host.is_list or self.cache.is_list):
            copy_blocks(self.host.list, self.cache.list, plan.pairs)
        elif call == "resolve":
            h2d_gather(*self.sides, plan.pairs)
        return self.compare(slots_out, plan, expected)

    def pin(self, states: list[int], rows: list[int], slots: list[int]) -> None:
        self.map.pin(self.ints(states), self.ints(rows, torch.int32), self.ints(slots))
        for state, row, slot in zip(states, rows, slots, strict=True):
            if min(state, row, slot) >= 0:
                self.states[state].forget(row)
                self.states[state].rows[slot] = row

    def invalidate(self, states: list[int], rows: list[int]) -> None:
        self.map.invalidate(self.ints(states, torch.int32), self.ints(rows))
        for state, row in zip(states, rows, strict=True):
            if state >= 0 and row >= 0:
                self.states[state].forget(row)

    def reset(self, states: list[int] | None = None) -> None:
        self.map.reset(None if states is None else self.ints(states))
        for state in range(len(self.states)) if states is None else states:
            self.states[state] = Reference(self.slots, self.pinned)


@pytest.mark.parametrize(("dtypes", "page"), [(INT_DTYPES, 5), (INT_DTYPES[::-1], 0)], ids=str)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "1 MB"])
def test_random_steps(
    device: torch.device, layout: str, dtypes: Sequence[torch.dtype], page: int
) -> None:
    """Lists with repeats and padding, pins, and rows that are forgotten."""
    draw = random.Random(f"{layout} {dtypes}")
    world = World(device, layout, pinned=2, page=page)
    for _ in range(8):
        length, lists = draw.randint(1, SLOTS - 2), draw.randint(1, STATES)
        states = [draw.choice((state, state, -1)) for state in draw.sample(range(STATES), lists)]
        world.step(
            [[draw.choice((-1, draw.randrange(ROWS), draw.randrange(12))) for _ in range(length)]
             for _ in range(lists)],
            states=draw.choice((None, states)), dtypes=dtypes,
            count=draw.choice((None, None, -1, 0, 1, lists, 99)),
            call=draw.choice(("swap_in", "swap_in", "resolve")),
        )  # fmt: skip
        some = many(draw, STATES, draw.randint(0, 4)) * 2  # each twice
        world.invalidate(some, many(draw, ROWS, len(some) // 2) * 2)
        some = draw.sample(range(STATES), draw.randint(0, STATES))
        slots = [SLOTS - draw.randint(1, 2) for _ in some]
        world.pin(some, many(draw, ROWS, len(some)), slots)
        if draw.random() < 0.2:
            world.reset(draw.choice((None, some)))
        world.compare_state()


FULL = [*range(SLOTS)]
CASES: dict[str, list[dict[str, Any]]] = {
    "all misses, then all hits": [{"lists": [[3, 1, 2]]}, {"lists": [[2, 3, 1]]}],
    "repeats are hits": [{"lists": [[5, 5, -1, 5, 2, 2], [-1] * 6]}],
    "as many as slots": [{"lists": [FULL]}, {"lists": [FULL[::-1]]}, {"lists": [[*range(11, 23)]]}],
    "no rows": [{"lists": [[4]]}, {"lists": [[], [], []], "shape": (3, 0)}],
    "no lists": [{"lists": [], "shape": (0, 5)}],
    "lists without a state": [{"lists": [[1], [2], [3], [4]], "states": [-1, 2, -7, -(2**31)]}],
    "shrinking batch": [{"lists": [[1, 2], [3, 4], [5, 6]], "count": n} for n in (3, 2, 0, 3)],
    "past the count": [{"lists": [[1], [99], [2]], "states": [0, 99, 0], "count": 1}],
    "speculative steps": [
        {"lists": [[1, 2, 3, 2, 3, 4, -1, 4, 5], [7] * 9], "shape": (2, 3, 3)},
        {"lists": [[6, 1, 6, 8], [7, 7, 7, 9]], "shape": (2, 1, 2, 2)},
    ],
    "negative rows": [{"lists": [[-1, -(2**31), -5, -(2**63), -(2**32), 4]]}],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_steps(device: torch.device, name: str) -> None:
    world = World(device)
    for step in CASES[name]:
        world.step(**step)


# Layout, slots, rows, lists: a number is the length of a random one. A block holds 2,048 slots in
# registers, and looks for victims in the first 1,024 of the order.
LARGE: dict[str, tuple[str, int, int, Sequence[int | list[int]]]] = {
    "long order": ("7 B", 20_000, 30_000, (8192, 50, 8192, 3000)),
    "long lists": ("7 B", 8193, 20_000, (8192, 8192, 1)),
    **{f"{n} slots": ("7 B", n, 5000, (n, 3, n * 2 // 3, n // 2)) for n in (1024, 2048, 2049)},
    # At the front of the order are slots that the step uses.
    **{f"{n} hits": ("7 B", 4096, 5000, ([*range(4096)], [*range(n), *range(4200, 4296)],
                                         [*range(1, n, 2), *range(4100, 4196)]))
       for n in (1000, 1024, 3000)},
    "large rows": ("1 MB", 3, 6, ([0, 5], [5, 1], [4, 3])),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_large(device: torch.device, name: str) -> None:
    layout, slots, rows, lists = LARGE[name]
    draw = random.Random(name)
    world = World(device, layout, states=1, slots=slots, rows=rows)
    for some in lists:
        world.step([many(draw, rows, some) if isinstance(some, int) else some])


def test_pins(device: torch.device) -> None:
    world = World(device, pinned=3)
    world.step([[1, 2, 3]] * STATES)
    world.pin([0, 2], [2, 20], [9, 11])  # a row that another slot held, and a new one
    world.step([[2, 20, 1]] * STATES)
    world.step([[20, *range(30, 38)]] * STATES)
    world.pin([0, 0, 2], [21, 2, 22], [9, 10, 11])  # over an old row; to another slot
    world.pin([-1, 0, 1], [5, -1, 3], [9, 9, -1])  # padding
    world.step([[2, 20, 21, 22]] * STATES)
    world = World(device, slots=4, pinned=4)
    world.pin([0], [7], [2])
    world.step([[7, -1, 7]])
    world.step([[7, 8]], refused=[0], text=too_long(0, 1, 0))


def test_rows_that_are_forgotten(device: torch.device) -> None:
    world = World(device)
    world.step([FULL] * STATES)
    world.invalidate([1, 1, 1, 2, 0], [3, 3, 39, 0, 3])  # twice, and one that is not held
    world.step([[3, 4]] * STATES)
    world.invalidate([-1, 0, 0], [3, -1, 4])
    world.step([[3, 4]] * STATES)
    for states in ([1], [], None):
        world.reset(states)
        world.step([[4, 3]] * STATES)


def too_long(place: int, missed: int, most: int) -> str:
    text = f"rows: list {place} misses {missed} rows, expected at most the {most} slots"
    return text + " that it does not use"


FAULTS: dict[str, dict[str, Any]] = {
    too_long(1, 13, 12): {"lists": [[1] * 13, [*range(4, 17)]], "refused": [1]},
    too_long(0, 11, 10): {"lists": [[1, 2, *range(20, 31)], [3] * 13], "refused": [0]},
    "rows: index 40 at position 2, expected below 40": {"lists": [[1, 4], [40, 1]], "refused": [1]},
    **{f"rows: index {row} at position 1, expected below 40": {
        "lists": [[1, row], [4, 7]], "refused": [0]} for row in (2**31, 2**32 + 1, 2**63 - 1)},
    "states: index 3 at position 1, expected below 3": {
        "lists": [[8], [9]], "states": [1, 3], "refused": [1]},
    f"states: index {2**32} at position 0, expected below 3": {
        "lists": [[8], [9]], "states": [2**32, 0], "refused": [0], "dtypes": INT_DTYPES[::-1]},
    "states: state 2 at positions ": {
        "lists": [[4], [5], [6], [7]], "states": [2, 0, 2, -1], "refused": [0, 2]},
}  # fmt: skip


@pytest.mark.parametrize("call", ["swap_in", "resolve"])
@pytest.mark.parametrize("text", FAULTS)
def test_a_list_that_is_not_served(device: torch.device, text: str, call: str) -> None:
    world = World(device)
    world.step([[1, 2, 3], [3, 2, 1]])
    world.step(**FAULTS[text], text=text, call=call)
    world.step([[3, 5, 1], [4, 2, 3], [1, 1, 1]])


@pytest.mark.parametrize("page", [ROWS // 5, 2**33, -1])
def test_a_page_that_the_host_has_not(device: torch.device, page: int) -> None:
    """Rows that a slot holds are not looked up."""
    world = World(device, page=5)
    dtypes = INT_DTYPES[::-1]
    world.step([[11, 1], [12, 13], [1, 2]], dtypes=dtypes)
    world.pages[1][2] = page
    world.step([[11, 1], [12, 13]], dtypes=dtypes)
    text = f"pages: page {page} at position 10, of which a row is asked for, expected one of the "
    text += "host's 8 pages"
    world.step([[3, 4], [12, 14], [10, 11]], text=text, refused=[1], dtypes=dtypes)
    world.step([[3, 4], [12, 1], [10, 11]], dtypes=dtypes)


@pytest.mark.cuda
@pytest.mark.parametrize("slots", [SLOTS, 2500])
def test_replays_with_other_rows_and_a_shrinking_batch(slots: int) -> None:
    draw = random.Random(slots)
    world = World(torch.device("cuda"), "656 B", slots=slots)
    world.step([[0, 1]])  # compiles
    rows, count = world.ints([[-1] * 9] * STATES), world.ints([0], torch.int32)
    slots_out, plan = world.outputs(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.map.swap_in(*world.sides, rows, slots_out, count=count, plan=plan)
    for used in (3, 3, 2, 1, 0, 3):
        lists = [many(draw, ROWS, 9) for _ in range(STATES)]
        rows.copy_(world.ints(lists))
        count.fill_(used)
        with no_synchronisation():
            graph.replay()
            world.map.stats()
        world.compare(slots_out, plan, world.expect(lists, count=used))


@pytest.mark.cuda
def test_states_on_streams_of_their_own() -> None:
    draw = random.Random(4)
    world = World(torch.device("cuda"), "656 B", slots=2500, rows=3000)
    world.step([[1]])  # compiles
    streams, calls = [torch.cuda.Stream() for _ in range(STATES)], []
    for i in range(10 * STATES):
        rows, states = world.ints([many(draw, 3000, 600)]), world.ints([i % STATES])
        calls.append((rows, states, *world.outputs(rows)))
    torch.cuda.synchronize()
    for i, (rows, states, slots_out, plan) in enumerate(calls):
        with torch.cuda.stream(streams[i % STATES]):
            world.map.swap_in(*world.sides, rows, slots_out, states=states, plan=plan)
    torch.cuda.synchronize()
    expected = [world.expect(rows.tolist(), states.tolist()) for rows, states, *_ in calls]
    for (*_, slots_out, plan), wanted in zip(calls, expected, strict=True):
        world.compare(slots_out, plan, wanted)


def test_a_state_that_is_put_back(device: torch.device) -> None:
    world, other = World(device), World(device)
    world.step([[1, 2, 3], [4, 5, 6]])
    for name in ("slot_of_row", "row_of_slot", "lru_order"):
        getattr(other.map, name).copy_(getattr(world.map, name).cpu())
    other.states = copy.deepcopy(world.states)
    for each in (world, other):
        each.step([[7, 1, 8], [6, 9, 4]], call="resolve")


def test_a_state_that_is_not_sound_does_no_harm(device: torch.device) -> None:
    """Slots and rows out of range are no hits and no victims."""
    world = World(device)
    world.map.lru_order[0, :4] = world.ints([-1, SLOTS, 2**31 - 1, -(2**31)], torch.int32)
    world.map.row_of_slot[0, 4], world.map.slot_of_row[0, 5] = 2**31 - 1, SLOTS
    rows = world.ints([[5, 6, 5]])
    slots_out, plan = world.outputs(rows)
    world.map.swap_in(*world.sides, rows, slots_out, plan=plan)
    assert slots_out.tolist() == [[4, 5, 4]] and plan.counts.tolist() == [2]


CORRUPTIONS = {
    "order is no permutation of the slots": (
        *(("lru_order", 3, 2), ("lru_order", 3, -1), ("lru_order", 0, SLOTS)),
    ),
    "slot_of_row and row_of_slot hold different rows": (
        *(("row_of_slot", 7, 9), ("row_of_slot", 7, 31), ("row_of_slot", 0, -1)),
        *(("row_of_slot", 0, -2), ("row_of_slot", 0, ROWS)),
        *(("slot_of_row", 9, 7), ("slot_of_row", 30, -1)),
    ),
    "slot_of_row is not the inverse of row_of_slot": (
        *(("slot_of_row", 30, 1), ("slot_of_row", 30, SLOTS), ("slot_of_row", 30, -2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", CORRUPTIONS)
def test_check_finds(device: torch.device, text: str) -> None:
    for name, at, value in CORRUPTIONS[text]:
        world = World(device)
        world.step([[30, 31, 32]] * STATES)
        getattr(world.map, name)[1, at] = value
        world.map.check(0)
        with pytest.raises(RuntimeError, match=f"^ResidencyMap: state 1: {text}$"):
            world.map.check(1)


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode(device: torch.device, inside: bool) -> None:
    """A map that is made inside is used outside, and the other way round; a cache is not."""
    with torch.inference_mode(inside):
        world = World(device, pinned=1)
    world.wanted = [buffer.twin() for buffer in world.wanted]  # PyTorch writes to these
    with torch.inference_mode(not inside):
        if inside:
            with pytest.raises(
                RuntimeError, match=r"^ResidencyMap.swap_in: cache: made in inference"
            ):
                world.step([[1, 2]])
            with torch.inference_mode(False):
                world = World(device, pinned=1)
        world.step([[1, 2]])
        world.pin([0], [1], [SLOTS - 1])
        world.invalidate([0], [2])
        world.reset([1])
        world.step([[2, 1]])


def test_versions_and_modes() -> None:
    world = World(torch.device("cpu"))
    rows = world.ints([[1, 2]])
    slots_out, plan = world.outputs(rows)
    written = (world.cache.argument, slots_out)
    before = [tensor._version for tensor in written]
    world.map.swap_in(*world.sides, rows, slots_out)
    assert [tensor._version for tensor in written] == [version + 1 for version in before]
    for call, sides in (("swap_in", world.sides), ("resolve", ())):
        text = f"^ResidencyMap.{call}: cannot run inside torch.jit.trace or a TorchDispatchMode"
        with TorchDispatchMode(), pytest.raises(RuntimeError, match=text):
            getattr(world.map, call)(*sides, rows, slots_out, plan=plan)
    assert repr(world.map) == "ResidencyMap(3 states of 12 slots, 40 rows, on cpu)"


@pytest.mark.cuda
def test_mistakes_on_a_gpu() -> None:
    world = World(torch.device("cuda"))
    (host, cache), rows = world.sides, world.ints([[1, 2]])
    slots_out, _ = world.outputs(rows)
    for wrong, text in (
        ((host.clone(), cache, rows), "host: pageable host memory"),
        ((host, cache, rows.cpu()), "rows: device cpu, expected cuda:0, as the map"),
        ((host, cache.cpu(), rows), "cache: device cpu, expected cuda:0, as the map"),
    ):
        with pytest.raises(ValueError, match=f"^ResidencyMap.swap_in: {text}"):
            world.map.swap_in(*wrong, slots_out)
    large, long = ResidencyMap(1, 2**20, 100), torch.zeros(1, 8192, dtype=torch.int64).cuda()
    with pytest.raises(
        ValueError, match=r"^ResidencyMap.resolve: rows: lists of 8192 rows and 1048576 slots"
    ):
        large.resolve(long, long.clone(), plan=MissPlan.like(long))
    world.step([[1, 2]])
