"""A model of the protocol of csrc/comm/peer_reduce.h, all of whose orders of events can be tried.

Kernels are threads, and a thread is a list of steps. What it stores lands word by word, at any time
and in any order, but for what a fence or the end of its kernel says. There are two kinds of events
that somebody chooses: a word lands, and a thread takes what it waits for. All else happens as soon
as it can: a later moment would be that of a later landing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNWRITTEN = None


class WrongError(Exception):
    """The protocol is wrong: what happened."""


@dataclass(frozen=True)
class Call:
    """One call, of all ranks: so many vectors, of each part where there are two shots."""

    vectors: int
    blocks: int = 1
    two_shot: bool = False


@dataclass(frozen=True)
class Rules:
    """What makes it right; each of them can be left out."""

    parities: int = 2
    clears: bool = True
    reads_first: bool = True  # in front of clearing
    counts: bool = True
    waits_first: bool = True  # in front of sending: for the kernel in front
    escapes: bool = True
    sees_all_words: bool = True
    own_slots: bool = True  # one for each writer
    barrier: bool = True  # between epochs of one kernel
    fence: bool = True


@dataclass(frozen=True)
class Setting:
    """Who calls what.

    ``slot`` is the vectors of a slot; with ``pdl`` a kernel begins when the one in front lets it,
    as by programmatic dependent launch, and not when that has ended.
    """

    ranks: int
    calls: tuple[Call, ...]
    threads: int = 1
    slot: int = 1
    words: int = 1
    pdl: bool = True
    rules: Rules = field(default_factory=Rules)


class Place(NamedTuple):
    """A word of a slot."""

    rank: int
    stage: int
    parity: int
    block: int
    writer: int
    vector: int
    word: int


class Store(NamedTuple):
    owner: int  # a thread
    place: Place
    value: Any


class Thread(NamedTuple):
    """What it is: of which rank, call and block; ``number`` in its block."""

    rank: int
    call: int
    block: int
    number: int


def shares(total: int, num: int) -> list[range]:
    """As PeerShares: as equal as can be, longer ones first."""
    each, longer = divmod(total, num)
    ends = [i * each + min(i, longer) for i in range(num + 1)]
    return [range(ends[i], ends[i + 1]) for i in range(num)]


def chunks(call: Call, block: int, slot: int) -> list[range]:
    """What a block does in each epoch of a call."""
    span = shares(call.vectors, call.blocks)[block]
    parts = shares(len(span), max(1, -(-len(span) // slot)))
    return [range(span[0] + part.start, span[0] + part.stop) for part in parts]


class Model:
    """One run; ``choices`` are what may happen next, ``choose`` has one of them happen."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.threads = [
            Thread(rank, number, block, thread)
            for rank in range(setting.ranks)
            for number, call in enumerate(setting.calls)
            for block in range(call.blocks)
            for thread in range(setting.threads)
        ]
        self.programs = [self._program(thread) for thread in self.threads]
        self.kernels: dict[tuple[int, int], list[int]] = {}
        for i, one in enumerate(self.threads):
            self.kernels.setdefault((one.rank, one.call), []).append(i)
        self.at = [0] * len(self.threads)
        self.epoch = [0] * len(self.threads)  # that it has read
        self.memory: dict[Place, Any] = {}
        self.pending: list[Store] = []
        most = max(call.blocks for call in setting.calls)
        self.epochs = {(rank, block): 0 for rank in range(setting.ranks) for block in range(most)}
        self._settle()

    def copy(self) -> Model:
        new = object.__new__(Model)
        new.__dict__.update(self.__dict__)
        new.at, new.epoch = self.at.copy(), self.epoch.copy()
        new.memory, new.pending = self.memory.copy(), self.pending.copy()
        new.epochs = self.epochs.copy()
        return new

    def state(self) -> Any:
        """What the future depends on."""
        order: dict[tuple[int, Place], int] = {}
        pending = set()
        for store in self.pending:
            count = order[store[:2]] = order.get(store[:2], 0) + 1
            pending.add((store, count))
        words = frozenset(self.memory.items())
        return tuple(self.at), tuple(self.epoch), words, frozenset(pending), *self.epochs.values()

    # -- programs ----------------------------------------------------------------------------------

    def _program(self, thread: Thread) -> list[tuple[Any, ...]]:
        """Steps, each a name and what belongs to it."""
        setting, rules = self.setting, self.setting.rules
        call = setting.calls[thread.call]
        parts = chunks(call, thread.block, setting.slot)
        waits: list[tuple[Any, ...]] = [("wait",)]
        steps: list[tuple[Any, ...]] = [("start",), *(waits * rules.waits_first)]
        steps += [("let",), ("read",)]
        for number, part in enumerate(parts):
            if number > 0:
                steps += [("barrier", number)] * rules.barrier + [("fence",)] * rules.fence
            own = [
                (vector, vector - part.start)
                for vector in part
                if (vector - part.start) % setting.threads == thread.number
            ]
            others = [rank for rank in range(setting.ranks) if rank != thread.rank]
            steps += [("send", number, 0, *one, to) for one in own for to in others]
            if number == 0:
                steps += [("barrier", 0), ("count", len(parts))]
                steps += waits * (not rules.waits_first)
            for one in own:
                steps += self._takes(number, 0, one, others)
                if call.two_shot:
                    steps += [("send", number, 1, *one, to) for to in others]
            if call.two_shot:
                for one in own:
                    steps += self._takes(number, 1, one, others)
        return [*steps, ("end",)]

    def _takes(
        self, number: int, stage: int, one: tuple[int, int], others: list[int]
    ) -> Iterator[tuple[Any, ...]]:
        rules = self.setting.rules
        for writer in others:
            clear = [("clear", number, stage, *one, writer)] * rules.clears
            take = [("take", number, stage, *one, writer)]
            yield from take + clear if rules.reads_first else clear + take

    def _place(self, rank: int, i: int, writer: int, step: tuple[Any, ...], word: int) -> Place:
        _, number, stage, _, at, _ = step
        parity = (self.epoch[i] + number) % self.setting.rules.parities
        slot = writer if self.setting.rules.own_slots else 0
        return Place(rank, stage, parity, self.threads[i].block, slot, at, word)

    def _value(self, call: int, writer: int, stage: int, vector: int, word: int) -> Any:
        """What is sent: all values are different, and some of them are all ones."""
        if not self.setting.rules.escapes and (call + writer + vector + word) % 3 == 0:
            return UNWRITTEN
        return (call, writer, stage, vector, word)

    # -- steps -------------------------------------------------------------------------------------

    def _has_ended(self, rank: int, call: int) -> bool:
        kernel = self.kernels[rank, call]
        if any(self.at[i] < len(self.programs[i]) for i in kernel):
            return False
        return not any(store.owner in kernel for store in self.pending)

    def _passed(self, rank: int, call: int, name: str) -> bool:
        return all(self.at[i] > self.programs[i].index((name,)) for i in self.kernels[rank, call])

    def _block_of(self, i: int) -> list[int]:
        thread = self.threads[i]
        kernel = self.kernels[thread.rank, thread.call]
        return [j for j in kernel if self.threads[j].block == thread.block]

    def _can(self, i: int, step: tuple[Any, ...]) -> bool:
        thread = self.threads[i]
        name = step[0]
        if name == "start" and thread.call > 0:
            if self.setting.pdl:
                # A grid begins when those in front of the one in front have ended, at least.
                ended = thread.call < 2 or self._has_ended(thread.rank, thread.call - 2)
                return ended and self._passed(thread.rank, thread.call - 1, "let")
            return self._has_ended(thread.rank, thread.call - 1)
        if name == "wait" and thread.call > 0:
            return self._has_ended(thread.rank, thread.call - 1)
        if name == "barrier":
            return all(self.at[j] >= self.programs[j].index(step) for j in self._block_of(i))
        if name == "fence":
            block = self._block_of(i)
            return not any(store.owner in block for store in self.pending)
        if name == "take":
            seen = range(self.setting.words if self.setting.rules.sees_all_words else 1)
            places = [self._place(thread.rank, i, step[5], step, word) for word in seen]
            return all(self.memory.get(place) is not UNWRITTEN for place in places)
        return True

    def _do(self, i: int, step: tuple[Any, ...]) -> None:
        thread = self.threads[i]
        name = step[0]
        words = range(self.setting.words)
        if name == "read":
            self.epoch[i] = self.epochs[thread.rank, thread.block]
        elif name == "count" and thread.number == 0 and self.setting.rules.counts:
            self.epochs[thread.rank, thread.block] = self.epoch[i] + step[1]
        elif name == "send":
            _, _, stage, vector, _, to = step
            for word in words:
                value = self._value(thread.call, thread.rank, stage, vector, word)
                place = self._place(to, i, thread.rank, step, word)
                self.pending.append(Store(i, place, value))
        elif name == "clear":
            for word in words:
                place = self._place(thread.rank, i, step[5], step, word)
                self.pending.append(Store(i, place, UNWRITTEN))
        elif name == "take":
            _, _, stage, vector, _, writer = step
            for word in words:
                value = self.memory.get(self._place(thread.rank, i, writer, step, word))
                expected = self._value(thread.call, writer, stage, vector, word)
                if value != expected:
                    raise WrongError(f"{thread} takes {value}, expected {expected}")
        self.at[i] += 1

    def _settle(self) -> None:
        """Do all that nobody chooses."""
        moved = True
        while moved:
            moved = False
            for i, program in enumerate(self.programs):
                while self.at[i] < len(program):
                    step = program[self.at[i]]
                    if step[0] == "take" or not self._can(i, step):
                        break
                    self._do(i, step)
                    moved = True

    def _land(self, store: Store) -> None:
        before = self.memory.get(store.place)
        if store.value is not UNWRITTEN and before is not UNWRITTEN:
            raise WrongError(f"{store} overwrites {before}, which is not read")
        if store.value is UNWRITTEN and before is UNWRITTEN and self.setting.rules.escapes:
            raise WrongError(f"{store} makes unwritten what is not there")
        self.pending.remove(store)
        if store.value is UNWRITTEN:
            self.memory.pop(store.place, None)
        else:
            self.memory[store.place] = store.value

    # -- choices -----------------------------------------------------------------------------------

    def choices(self) -> list[Any]:
        """Stores that may land, and threads that may take."""
        found: list[Any] = []
        first: set[tuple[int, Place]] = set()
        for store in self.pending:
            if store[:2] not in first:
                first.add(store[:2])
                found.append(store)
        for i, program in enumerate(self.programs):
            if self.at[i] < len(program):
                step = program[self.at[i]]
                if step[0] == "take" and self._can(i, step):
                    found.append(i)
        return found

    def choose(self, choice: Any) -> None:
        if isinstance(choice, Store):
            self._land(choice)
        else:
            self._do(choice, self.programs[choice][self.at[choice]])
        self._settle()

    def check_end(self) -> None:
        """Nothing can happen any more: all have to be done, and all places as new ones."""
        for i, program in enumerate(self.programs):
            if self.at[i] < len(program):
                raise WrongError(f"{self.threads[i]} waits for ever at {program[self.at[i]]}")
        if self.memory:
            raise WrongError(f"{len(self.memory)} words are left behind")


def explore(setting: Setting, most: int = 1_000_000) -> int:
    """Try every order; return how many states there are. Raises WrongError."""
    begin = Model(setting)
    seen = {begin.state()}
    stack = [begin]
    while stack:
        model = stack.pop()
        choices = model.choices()
        if not choices:
            model.check_end()
        for choice in choices:
            following = model.copy()
            following.choose(choice)
            state = following.state()
            if state not in seen:
                seen.add(state)
                stack.append(following)
        assert len(seen) <= most, "too large to be explored"
    return len(seen)


def run(setting: Setting, seed: int) -> int:
    """Try one order, in which some threads are slow; return how many events there were."""
    rng = random.Random(seed)
    model = Model(setting)
    slow = {i for i in range(len(model.threads)) if rng.random() < 0.3}
    events = 0
    while choices := model.choices():
        quick = [one for one in choices if _owner(one) not in slow]
        among: Sequence[Any] = quick if quick and rng.random() < 0.9 else choices
        model.choose(rng.choice(among))
        events += 1
    model.check_end()
    return events


def _owner(choice: Any) -> int:
    return choice.owner if isinstance(choice, Store) else int(choice)
