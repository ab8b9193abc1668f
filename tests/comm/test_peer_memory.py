"""PeerMemory: tensors and lifetime, and what fails: in time, in all ranks, with nothing left."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import wait_until
from ranks import LATE_S, Pool, Rank, all_do, all_tell, errors
from ref import refusals
from rows_ranks import memories
from torch.distributed import HashStore

from jitkern.comm import PeerMemory
from jitkern.errors import CommError

PAGE = 2 << 20
CPU = torch.device("cpu")


@pytest.fixture
def pair() -> list[PeerMemory]:
    return memories(1024, [CPU] * 2)


def test_tensors_of_any_dtype_and_shape(pair: list[PeerMemory]) -> None:
    mine, other = pair
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.int64, torch.complex128):
        item = dtype.itemsize
        numbers = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(dtype)
        there = mine.remote(1, [4, 6], dtype, 5 * item)
        there.copy_(numbers)
        assert there.dtype == dtype and there.shape == (4, 6) and there.is_contiguous()
        assert there.data_ptr() == mine.addresses[1] + 5 * item
        view = other.tensor((4, 6), dtype, offset_bytes=5 * item)
        assert torch.equal(view.view(torch.uint8), numbers.view(torch.uint8))
    for shape, sizes in ((7, (7,)), ((), ()), (torch.Size([2, 1, 3]), (2, 1, 3))):
        assert mine.tensor(shape, torch.int32).shape == sizes
    assert mine.tensor([0, 3], torch.int32, 1024).shape == (0, 3)
    assert mine.tensor(1, torch.uint8, 1023).item() == 0


@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, PAGE + 1])
def test_a_share_is_whole_pages(num_bytes: int) -> None:
    (memory,) = memories(num_bytes, [CPU])
    share = PAGE * (1 + (num_bytes > PAGE))
    assert (memory.num_bytes, memory.share_bytes, memory.device.type) == (num_bytes, share, "cpu")
    assert memory.addresses == (memory.tensor(1, torch.int8).data_ptr(),)
    if num_bytes != share:
        expected = f"leaves gaps between the ranks, expected whole pages; {share} is the next"
        with pytest.raises(ValueError, match=f"whole: num_bytes: {num_bytes} {expected}"):
            memory.whole(num_bytes, torch.uint8)


REFUSED: list[tuple[Callable[[PeerMemory], Any], type[Exception], str]] = [
    (lambda m: m.tensor(257, torch.int32), ValueError, "tensor: shape: [257] of torch.int32 from"),
    (lambda m: m.remote(1, 256, torch.float32, 4), ValueError, "remote: shape: [256] of"),
    (lambda m: m.tensor(1, torch.float32, 2), ValueError, "tensor: offset_bytes: 2, expected"),
    (lambda m: m.tensor([2, -1], torch.uint8), ValueError, "tensor: shape: [2, -1] of"),
    (lambda m: m.tensor(1, torch.uint8, -1), ValueError, "tensor: offset_bytes: -1, expected at"),
    (lambda m: m.tensor("12", torch.uint8), TypeError, "tensor: shape: str, expected an int or"),
    (lambda m: m.tensor(1, "int8"), TypeError, "tensor: dtype: str, expected a torch.dtype"),
    (lambda m: m.remote(2, 1, torch.uint8), ValueError, "remote: rank: 2, expected 0 to 1"),
    (lambda m: m.remote(True, 1, torch.uint8), TypeError, "remote: rank: bool, expected an int"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_wrong_calls(
    pair: list[PeerMemory], call: Callable[[PeerMemory], Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=f"^PeerMemory.{re.escape(text)}"):
        call(pair[0])


test_wrong_arguments = refusals(
    PeerMemory,
    {"num_bytes": 64, "group": HashStore(), "rank": 0, "world_size": 1, "device": "cpu"},
    ({"num_bytes": 0}, ValueError, "num_bytes: 0, expected 1 to 70368744177664"),
    ({"num_bytes": True}, TypeError, "num_bytes: bool, expected an int"),
    ({"timeout_s": 0}, ValueError, "timeout_s: 0, expected above 0 and at most 1e+06 s"),
    ({"rank": None}, TypeError, "rank: None, expected an int"),
    ({"device": "meta"}, ValueError, "device: 'meta', expected 'cpu', 'cuda' or 'cuda:N'"),
    ({"group": None, "rank": None}, CommError, "group: torch.distributed is not initialised; call"),
    ({"group": 1}, TypeError, "group: int, expected a ProcessGroup, a Store or None"),
)


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:jitkern-peers")


@pytest.mark.parametrize("are_closed", [True, False])
def test_the_last_tensor_keeps_its_rank_s_mapping(are_closed: bool) -> None:
    before, descriptors = mappings(), len(os.listdir("/proc/self/fd"))
    made = memories(64, [CPU] * 4)
    assert mappings() == before + 4 * 4
    assert len(os.listdir("/proc/self/fd")) == descriptors
    last = made[3].remote(1, 8, torch.int8)[3:].view(5)
    if are_closed:
        for memory in made:
            memory.close()
            memory.close()
        assert repr(made[0]).endswith("rank 0 of 4 on cpu, closed)")
        for call in (lambda memory: memory.tensor(1, torch.int8), lambda memory: memory.addresses):
            with pytest.raises(RuntimeError, match=r"^PeerMemory.\w+: the memory is closed$"):
                call(made[3])
        del memory
    del made
    assert mappings() == before + 4
    last.fill_(3)
    del last
    assert mappings() == before


def test_the_memory_of_all_is_one_table_of_zeros(hosts: Pool) -> None:
    """At one distance in every rank; what each rank writes to any other, all see."""
    ranks = hosts.share(3, str(2 * PAGE))
    for rank in ranks:
        addresses = rank.ask("peers.addresses")
        assert [address - addresses[0] for address in addresses] == [2 * PAGE * r for r in range(3)]
        rank.ask(f"table = peers.whole((6, {PAGE}), torch.uint8)")
        assert rank.ask("table.data_ptr() == peers.addresses[0]")
        assert rank.ask("table.count_nonzero().item()") == 0
    all_do(ranks, "peers.barrier()")
    for number, rank in enumerate(ranks):
        rank.ask(f"peers.tensor((2, {PAGE}), torch.uint8)[:, -1] = {number + 1}")
        for other in range(3):
            rank.ask(f"write({other}, {8 * number}, {number + 1}, {other + 1})")
    all_do(ranks, "peers.barrier()")
    for rank in ranks:
        assert rank.ask("table[:, -1].tolist()") == [1, 1, 2, 2, 3, 3]
        for other in range(3):
            values = rank.ask(f"read({other}, 0, 24)")
            assert values[::8] == [1, 2, 3] and values[1::8] == [other + 1] * 3
    if hosts.kind != "cpu":  # tensors are on the GPU that uses them, whose name PyTorch is told
        assert all_do(ranks, "sorted(set(seen_devices))") == [[f"cuda:{r}"] for r in range(3)]


def test_over_a_process_group(pool: Pool) -> None:
    ranks = pool.join(2)
    for group in ("None", "dist.new_group(backend='gloo')"):
        all_do(ranks, f"peers = PeerMemory(64, {group}, timeout_s=30)")
        assert all_do(ranks, "[peers.rank, peers.world_size]") == [[0, 2], [1, 2]]
        all_do(ranks, "write(1 - {rank}, 3, {rank} + 5)")
        all_do(ranks, "peers.barrier()")
        assert all_do(ranks, "read(peers.rank, 3)") == [[6], [5]]
    error = ranks[0].refuses("PeerMemory(64, None, rank=1)")
    assert "rank 1 of 2, expected rank 0 of 2 as in the group" in error


def test_a_barrier_waits_for_all(hosts: Pool) -> None:
    ranks = hosts.share(3)
    all_tell(ranks[:2], "[peers.barrier(), read(0, 0)]")
    ranks[2].ask("[time.sleep(0.2), write(0, 0, 7)]")
    ranks[2].tell("peers.barrier()")
    assert [rank.answer()["value"] for rank in ranks] == [[None, [7]]] * 2 + [None]


def test_a_rank_that_has_closed_it_is_named_and_its_memory_stays(hosts: Pool) -> None:
    mine, other = hosts.share(2)
    mine.ask("tensor = peers.remote(1, 8, torch.uint8)[2:6]; peers.close()")
    other.ask("[write(1, 4, 44), write(0, 0, 1)]")
    assert mine.ask("tensor.tolist()") == [0, 0, 44, 0]
    assert other.ask("read(0, 0)") == [1]
    assert mine.ask("left()")["mappings"] == 2
    mine.ask("del tensor")
    assert mine.ask("left()")["mappings"] == 0
    error = other.refuses("peers.barrier()")
    assert "rank 0" in error and "has closed it" in error
    other.ask("with peers: write(0, 0, 1)")
    assert other.refuses("read(0, 0)") == "RuntimeError: PeerMemory.remote: the memory is closed"


def test_a_forked_child_has_no_part_of_it(hosts: Pool) -> None:
    """So that it does not keep the memory of ranks that have ended."""
    mine, other = hosts.share(2)
    for call in ("tensor(1, torch.int8)", "addresses", "barrier()"):
        error = mine.ask(f"fork({f'peers.{call}'!r})")
        text = "a forked child has no part of its parent's memory; make one of its own"
        assert error == f"RuntimeError: PeerMemory.{call.partition('(')[0]}: {text}"
    mine.ask("tensor = peers.tensor(4, torch.uint8)")
    if hosts.kind == "cpu":
        assert mine.ask("fork('tensor.tolist()')") == "SIGSEGV"
        assert "'mappings': 0" in mine.ask("fork('left()')")
    assert mine.ask("fork('[peers.close(), globals().pop(\"tensor\")] is None')") == "False"
    other.ask("write(0, 1, 9)")
    assert mine.ask("tensor.tolist()") == [0, 9, 0, 0]
    all_do([mine, other], "peers.barrier()")


INSTEAD = "use init_pynccl's all_reduce between them"
HERE = socket.gethostname()


def all_say(texts: list[str], kind: str, *parts: str) -> None:
    for text in texts:
        assert text.startswith(f"{kind}: PeerMemory: "), text
        assert all(part in text for part in parts), text


def told(pool: Pool, ranks: list[Rank], args: str = "") -> list[str]:
    pool.tell_share(ranks, args)
    return [answer["error"] for answer in errors(ranks)]


def fail_at(pool: Pool, *codes: str, args: str = "") -> tuple[list[Rank], list[str]]:
    """Each rank's error if each has run its code before; and nothing is left."""
    ranks = pool.share(len(codes))  # once as it should be: what is opened once stays open
    all_do(ranks, "peers.close()")
    before = all_do(ranks, "left()")
    for rank, code in zip(ranks, codes, strict=True):
        rank.ask(code)
    texts = told(pool, ranks, args)
    wait_until(lambda: all_do(ranks, "left()") == before, timeout_s=10)  # threads end late
    return ranks, texts


def test_a_process_of_another_user_gives_nothing(pool: Pool) -> None:
    ranks, texts = fail_at(pool, "", "setattr(descriptors, 'peer_uid', lambda end: 12345)")
    came = f"rank 0 (process {ranks[0].pid} on {HERE}) is of uid 12345"
    all_say(texts, "CommError", came, f"expected uid {os.geteuid()} as this process")
    assert texts[0].startswith("CommError: PeerMemory: on rank 1: rank 0 (")


STRANGER = """
import socket
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
exchange, real, uids = rendezvous.Rendezvous.exchange, descriptors.peer_uid, [0, 12345]
def knock(self, key, *args, **options):
    if key == 'listen':
        stranger.connect(args[0])
    return exchange(self, key, *args, **options)
setattr(rendezvous.Rendezvous, 'exchange', knock)
setattr(descriptors, 'peer_uid', lambda end: (uids and uids.pop(0)) or real(end))
"""


def test_a_process_of_another_user_gets_nothing(pool: Pool) -> None:
    ranks = pool.start(2)
    ranks[0].ask(STRANGER)
    pool.share(ranks)
    ranks[0].ask("write(1, 0, 7)")
    assert ranks[1].ask("read(1, 0)") == [7]
    assert ranks[0].ask("uids + [stranger.recvmsg(9, 99)[:2]]") == [["b''", []]]


def test_gpus_without_peer_access(fake_vmm: Pool) -> None:
    """Each process sees its own as cuda:0; whether they reach each other the mapping shows."""
    ranks = fake_vmm.start(2)
    all_do(ranks, "os.environ.update(FAKE_GPUS='1', FAKE_FIRST_GPU='{rank}')")
    device = "device=torch.device('cuda', 0)"
    fake_vmm.share(ranks, device)
    ranks[0].ask("write(1, 0, 5)")
    assert ranks[1].ask("read(1, 0)") == [5]
    all_do(ranks, "peers.close(); os.environ.update(FAKE_APART='0,1')")
    for rank, text in enumerate(told(fake_vmm, ranks, device)):
        came = f"cuda:0 of rank {rank} cannot address the memory of cuda:0 of rank {1 - rank}: cu"
        all_say([text], "UnsupportedError", came, INSTEAD, "CUDA_VISIBLE_DEVICES")


WRITES_NOTHING = """
real = peer_memory.namespace
def make(functions):
    made = real(functions)
    write = made.write
    made.write = lambda at, *more: write(at, *more) if at >> 21 == 1 else None
    return made
setattr(peer_memory, 'namespace', make)
"""


def test_writes_that_do_not_arrive(hosts: Pool) -> None:
    _, texts = fail_at(hosts, "", WRITES_NOTHING, "")
    for rank in (0, 2):
        assert "peer access gives wrong data: what " in texts[rank]
        assert re.findall(r"of (rank \d)", texts[rank]) == ["rank 1", f"rank {rank}"]
    all_say(texts, "UnsupportedError", INSTEAD)


@pytest.mark.parametrize(
    ("env", "kind", "text"),
    [
        ("FAKE_NO_VMM='1'", "UnsupportedError", "cuda:1 of rank 1 has no memory that other"),
        ("FAKE_GPU_MIB='1'", "MemoryError", "GPU 1 has no 2097152 bytes left; torch.cuda.empty_ca"),
    ],
)
def test_a_driver_that_has_none(fake_vmm: Pool, env: str, kind: str, text: str) -> None:
    _, texts = fail_at(fake_vmm, "", f"os.environ.update({env})")
    all_say(texts, kind, text)


@pytest.mark.parametrize("step", ["make", "take", "clear"])
def test_a_rank_that_is_killed(hosts: Pool, step: str) -> None:
    ranks = hosts.start(3)
    ranks[1].ask(f"at_step({step!r}, end)")
    hosts.tell_share(ranks)
    alive = [ranks[0], ranks[2]]
    for answer in errors(alive, LATE_S):
        assert answer["error"].startswith("CommTimeoutError: PeerMemory"), answer
        assert 1 in answer["missing"], answer  # the other may have failed of it before
        assert f"rank 1 (process {ranks[1].pid} on {HERE}) has ended" in answer["error"]

    def counts() -> list[int]:
        lefts = [rank.ask("left()") for rank in alive]
        return [n for left in lefts for name, n in left.items() if name != "descriptors"]

    wait_until(lambda: not any(counts()))


def test_a_rank_whose_memory_does_not_come(pool: Pool) -> None:
    """Though it says that it has sent it: a process of this user may have taken it."""
    ranks = pool.start(3)
    ranks[2].ask("import socket; setattr(socket, 'send_fds', lambda *_: None)")
    pool.tell_share(ranks, "timeout_s=1")
    for answer in errors(ranks[:2], LATE_S):
        assert answer["missing"] == [2], answer
        assert f"rank 2 (process {ranks[2].pid} on {HERE}) did not send" in answer["error"]
    assert "did not send its memory" in ranks[2].error()["error"]


def test_a_rank_that_is_stopped(pool: Pool) -> None:
    ranks = pool.start(2)
    ranks[0].ask("at_step('write', lambda: end(signal.SIGSTOP))")
    pool.tell_share(ranks, "timeout_s=0.5")
    (answer,) = errors(ranks[1:], 0.5 + LATE_S)
    assert answer["missing"] == [0], answer
    # When it goes on, it hears that it is too late.
    ranks[0].kill(signal.SIGCONT)
    error = ranks[0].error()["error"]
    assert "PeerMemory: " in error and f"rank 1 (process {ranks[1].pid} on " in error
    assert ranks[0].ask("left()")["mappings"] == 0
