"""What does not become a PeerMemory: one kind of error in all ranks, in time, and nothing left."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest
from children import wait_until
from ranks import LATE_S, Pool, Rank, all_do, errors

INSTEAD = "use init_pynccl's all_reduce between them"
GPU = "GPU-66616b65-2047-5055-0000-00000000000"
HERE = socket.gethostname()


def all_say(texts: list[str], kind: str, *parts: str) -> None:
    for text in texts:
        assert text.startswith(f"{kind}: PeerMemory: "), text
        assert all(part in text for part in parts), text


def told(pool: Pool, ranks: list[Rank], args: str = "") -> list[str]:
    """What each says when it makes a memory."""
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
    """By its uid, which the kernel knows."""
    ranks, texts = fail_at(pool, "", "setattr(descriptors, 'peer_uid', lambda end: 12345)")
    came = f"rank 0 (process {ranks[0].pid} on {HERE}) is of uid 12345"
    all_say(texts, "CommError", came, f"expected uid {os.geteuid()} as this process")
    assert texts[0].startswith("CommError: PeerMemory: on rank 1: rank 0 (")


STRANGER = """
import socket
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
exchange, real, uids = rendezvous.Rendezvous.exchange, descriptors.peer_uid, [0, 12345]
def knock(self, key, *args, **how):
    if key == 'listen':
        stranger.connect(args[0])
    return exchange(self, key, *args, **how)
setattr(rendezvous.Rendezvous, 'exchange', knock)
setattr(descriptors, 'peer_uid', lambda end: (uids and uids.pop(0)) or real(end))
"""


def test_a_process_of_another_user_gets_nothing(pool: Pool) -> None:
    """It has connected first, and is passed over."""
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
    one = "device=torch.device('cuda', 0)"
    fake_vmm.share(ranks, one)
    ranks[0].ask("write(1, 0, 5)")
    assert ranks[1].ask("read(1, 0)") == [5]
    all_do(ranks, "peers.close(); os.environ.update(FAKE_APART='0,1')")
    for rank, text in enumerate(told(fake_vmm, ranks, one)):
        first, other = (f"cuda:0 of rank {n} ({GPU}{n})" for n in (rank, 1 - rank))
        came = f"{first} cannot address the memory of {other}: cuMemSetAccess: ERROR"
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
    """Though reads are right."""
    _, texts = fail_at(hosts, "", WRITES_NOTHING, "")
    for rank in (0, 2):
        assert "peer access gives wrong data: what " in texts[rank]
        assert re.findall(r"of (rank \d)", texts[rank]) == ["rank 1", f"rank {rank}"]
    all_say(texts, "UnsupportedError", INSTEAD)


@pytest.mark.parametrize(
    ("env", "kind", "text"),
    [
        ("FAKE_NO_VMM='1'", "UnsupportedError", f"cuda:1 of rank 1 ({GPU}1) has no memory that ot"),
        ("FAKE_GPU_MIB='1'", "MemoryError", "GPU 1 has no 2097152 bytes left; torch.cuda.empty_ca"),
        ("FAKE_WRONG_IMPORT='1'", "UnsupportedError", "peer access gives wrong data: "),
    ],
)
def test_a_driver_that_has_none(fake_vmm: Pool, env: str, kind: str, text: str) -> None:
    _, texts = fail_at(fake_vmm, "", f"os.environ.update({env})")
    all_say(texts, kind, text)


def test_a_gpu_that_hangs(fake_vmm: Pool) -> None:
    ranks = fake_vmm.start(2)
    ranks[1].ask("ctypes.CDLL('libcuda.so.1').fake_now(ctypes.c_double(-1))")
    texts = told(fake_vmm, ranks, "timeout_s=1")
    all_say(texts, "RuntimeError", "GPU 1 has not done a copy within the deadline: it hangs")
    # Its own memory is kept: the GPU may write it at any time.
    assert [one.ask("left()")["mapped"] for one in ranks] == [0, 1]
    ranks[1].kill()


@pytest.mark.parametrize("step", ["make", "connect", "take", "clear"])
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
        found = [one.ask("left()") for one in alive]
        return [n for one in found for name, n in one.items() if name != "descriptors"]

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


@pytest.mark.parametrize("step", ["listen", "write"])
def test_a_rank_that_is_stopped(pool: Pool, step: str) -> None:
    ranks = pool.start(2)
    ranks[0].ask(f"at_step({step!r}, lambda: end(signal.SIGSTOP))")
    pool.tell_share(ranks, "timeout_s=0.5")
    (answer,) = errors(ranks[1:], 0.5 + LATE_S)
    assert answer["missing"] == [0], answer
    # When it goes on, it hears that it is too late.
    ranks[0].kill(signal.SIGCONT)
    error = ranks[0].error()["error"]
    assert "PeerMemory: " in error and f"rank 1 (process {ranks[1].pid} on " in error
    assert ranks[0].ask("left()")["mappings"] == 0


def test_a_rank_that_is_interrupted(pool: Pool) -> None:
    """By Ctrl-C: the others hear of it at once."""
    ranks = pool.start(2)
    ranks[1].ask(
        "def interrupt(*_): raise KeyboardInterrupt\nsetattr(peer_memory, '_map', interrupt)"
    )
    texts = told(pool, ranks)
    assert texts[1].startswith("KeyboardInterrupt")
    assert texts[0].startswith("CommTimeoutError: PeerMemory")
    assert "has failed: interrupted by KeyboardInterrupt" in texts[0]
    assert [one.ask("left()")["mappings"] for one in ranks] == [0, 0]
