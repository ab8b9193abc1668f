"""What does not become a PeerMemory: one kind of error in all ranks, in time, and nothing left."""

from __future__ import annotations

import os
import re
import signal
import socket
from typing import Any

import pytest
from children import wait_until
from peer_ranks import Rank, Ranks, together

STEPS = ["make", "listen", "give", "take", "map", "nonce", "compare", "clear"]
INSTEAD = "use init_pynccl's all_reduce between them"


def all_say(texts: list[str], kind: str, *parts: str) -> None:
    for text in texts:
        assert text.startswith(f"{kind}: PeerMemory: "), text
        assert all(part in text for part in parts), text


def nothing_is_left(processes: list[Rank], before: list[dict[str, int]]) -> None:
    """Threads take a moment to end."""
    wait_until(lambda: together(processes, "left()") == before, timeout_s=10)


def fail_at(ranks: Ranks, size: int, *codes: str, args: str = "") -> tuple[list[Rank], list[str]]:
    """What all say where each rank has run its code before; and that nothing is left."""
    processes = ranks.start(size)
    ranks.tell_make(processes)  # once as it should be: what is opened once stays open
    for process in processes:
        process.value()
    together(processes, "peers.close()")
    before = together(processes, "left()")
    for process, code in zip(processes, codes, strict=True):
        process.ask(code)
    texts = ranks.errors(processes, args)
    nothing_is_left(processes, before)
    return processes, texts


# -- ranks that do not fit -------------------------------------------------------------------------


def test_sizes_that_differ(any_ranks: Ranks) -> None:
    codes = ["size = 4096", "size = 8192", "size = 4096"]
    processes, texts = fail_at(any_ranks, 3, *codes, args="num_bytes=size")
    for text in texts:
        assert text.startswith("CommError: PeerMemory: num_bytes: differs, expected the same"), text
        for rank, size in enumerate([4096, 8192, 4096]):
            line = next(one for one in text.splitlines() if f"rank {rank} " in one)
            assert str(size) in line and str(processes[rank].pid) in line


def test_a_rank_on_the_cpu_and_one_on_a_gpu(gpu_ranks: Ranks) -> None:
    codes = ["where = torch.device('cuda', 0)", "where = torch.device('cpu')"]
    _, texts = fail_at(gpu_ranks, 2, *codes, args="device=where")
    all_say(texts, "CommError", "device: differs")


def test_two_hosts(any_ranks: Ranks) -> None:
    rename = "socket.gethostname = lambda: 'node-b'; os.uname = lambda: None"
    there = f"import platform; {rename}; platform.node = socket.gethostname; "
    there += "peer_memory._machine = lambda: 'another'"
    _, texts = fail_at(any_ranks, 3, "", there, "")
    here = socket.gethostname()
    came = f"ranks 0, 2 are on {here} and rank 1 is on "
    all_say(texts, "UnsupportedError", came, "expected all on one host; between hosts use init_py")


def test_two_network_namespaces(cpu_ranks: Ranks) -> None:
    other = """
real, other = os.stat, os.stat_result([0, 7, *[0] * 8])
os.stat = lambda path, **how: other if 'ns/net' in str(path) else real(path, **how)
"""
    _, texts = fail_at(cpu_ranks, 3, "", other, "")
    said = "2 network namespaces, expected one: ranks 0, 2 are in one and rank 1 is in one"
    all_say(texts, "UnsupportedError", said)


def test_a_process_of_another_user_takes_nothing(cpu_ranks: Ranks) -> None:
    """Linux says whose it is."""
    pretend = "descriptors.peer_uid = lambda end: 12345"
    processes, texts = fail_at(cpu_ranks, 2, "", pretend)
    said = f"rank 0 (process {processes[0].pid} on {socket.gethostname()}) is of uid 12345"
    all_say(texts, "CommError", said, f"expected uid {os.geteuid()} as this process")
    assert texts[0].startswith("CommError: PeerMemory: on rank 1: rank 0 (")


@pytest.mark.parametrize("is_of_another_user", [True, False])
def test_strangers_at_the_door(cpu_ranks: Ranks, is_of_another_user: bool) -> None:
    """What they send is dropped, by whom it is though it has the right word, or for its word."""
    processes = cpu_ranks.start(2)
    knock = f"""
import tempfile
strange = []
real_uid, real_take, real_give = descriptors.peer_uid, descriptors._take, descriptors._give
descriptors.peer_uid = lambda end: 12345 if strange and strange.pop() else real_uid(end)
def take(end, words, fds):
    for word in [*words] if {is_of_another_user} else ['', 'guess', 'x' * 65]:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ends[0], ends[1], tempfile.TemporaryFile() as other:
            os.ftruncate(other.fileno(), 2 << 20)
            socket.send_fds(ends[0], [word.encode() or b'-'], [other.fileno()])
            strange[:] = [1] * {is_of_another_user}
            real_take(ends[1], words, fds)
    real_take(end, {{word: rank for word, rank in words.items() if rank not in fds}}, fds)
descriptors._take = take
"""
    processes[1].ask(knock)
    before = processes[1].ask("left()")["descriptors"]
    cpu_ranks.tell_make(processes)
    for process in processes:
        process.value()
    processes[0].ask("write(0, 0, 7)")
    assert processes[1].ask("read(0, 0)") == [7]
    together(processes, "peers.close()")
    together(processes, "globals().pop('peers') and None")
    wait_until(lambda: processes[1].ask("left()")["descriptors"] <= before + 1)


# -- GPUs ------------------------------------------------------------------------------------------


def test_gpus_without_peer_access(gpu_ranks: Ranks) -> None:
    """Of all processes that see both, the driver is asked; the third rank hears of it."""
    apart = "os.environ['FAKE_APART'] = '0,2'"
    _, texts = fail_at(gpu_ranks, 3, apart, apart, apart)
    gpu = "GPU-66616b65-2047-5055-0000-00000000000"
    one, other = f"cuda:0 of rank 0 ({gpu}0)", f"cuda:2 of rank 2 ({gpu}2)"
    why = f"the driver has no peer access between them; {INSTEAD}"
    all_say(texts[:1], "UnsupportedError", f"{one} cannot address the memory of {other}: {why}")
    all_say(texts[2:], "UnsupportedError", f"{other} cannot address the memory of {one}: {why}")
    all_say(texts[1:2], "UnsupportedError", f"on rank 0: {one} cannot address", why)


def test_a_gpu_that_this_process_does_not_see(gpu_ranks: Ranks) -> None:
    """Each sees its own, as cuda:0; then the mapping is the answer."""
    hidden = [f"os.environ.update(FAKE_GPUS='1', FAKE_FIRST_GPU='{rank}')" for rank in range(2)]
    processes = gpu_ranks.start(2)
    for process, code in zip(processes, hidden, strict=True):
        process.ask(code)
    one = "device=torch.device('cuda', 0)"
    gpu_ranks.tell_make(processes, one)
    for process in processes:
        process.value()
    processes[0].ask("write(1, 0, 5)")
    assert processes[1].ask("read(1, 0)") == [5]
    together(processes, "peers.close(); os.environ.update(FAKE_APART='0,1')")
    before = together(processes, "left()")
    texts = gpu_ranks.errors(processes, one)
    nothing_is_left(processes, before)
    for rank, text in enumerate(texts):
        said = f"cuda:0 of rank {rank} (GPU-66616b65-2047-5055-0000-00000000000{rank}) cannot"
        all_say([text], "UnsupportedError", said, "cuMemSetAccess: ERROR", "CUDA_VISIBLE_DEVICES")
        assert INSTEAD in text


def test_wrong_data(gpu_ranks: Ranks) -> None:
    """Rank 2 maps other memory for the second that it imports."""
    wrong = "os.environ['FAKE_WRONG_IMPORT'] = '4'"  # two were right when all met before
    _, texts = fail_at(gpu_ranks, 3, "", "", wrong)
    said = ["peer access gives wrong data: cuda:2 of rank 2 (GPU-", "of cuda:", INSTEAD]
    all_say(texts, "UnsupportedError", *said)
    assert texts[0].startswith("UnsupportedError: PeerMemory: on rank 2: peer access gives")


def test_wrong_data_on_the_cpu(cpu_ranks: Ranks) -> None:
    """One rank's last byte is not what it has written."""
    wrong = """
real = peer_memory.Proof.write
def write(self, mine):
    real(self, mine)
    self.made.write((mine.rank + 1) * self.share_bytes - 1, b'!', -1, 1.0)
peer_memory.Proof.write = write
"""
    _, texts = fail_at(cpu_ranks, 2, "", wrong)
    for rank, text in enumerate(texts):
        said = f"the CPU of rank {rank} reads in the memory of the CPU of rank 1"
        all_say([text], "UnsupportedError", said)


def test_wrong_data_from_another_rank(any_ranks: Ranks) -> None:
    """Reads are right, and one rank's writes do not arrive."""
    wrong = """
real = peer_memory.Proof.compare
def compare(self, mine, peers):
    self = self._replace(made=self.made._replace(write=lambda *_: None))
    real(self, mine, peers)
peer_memory.Proof.compare = compare
"""
    _, texts = fail_at(any_ranks, 3, "", wrong, "")
    for rank in (0, 2):
        assert "peer access gives wrong data: what " in texts[rank]
        assert re.findall(r"of (rank \d)", texts[rank]) == ["rank 1", f"rank {rank}"]
    all_say(texts, "UnsupportedError", INSTEAD)


def test_a_driver_without_such_memory(gpu_ranks: Ranks) -> None:
    _, texts = fail_at(gpu_ranks, 2, "", "os.environ['FAKE_NO_VMM'] = '1'")
    said = "cuda:1 of rank 1 (GPU-66616b65-2047-5055-0000-000000000001) has no memory that other"
    all_say(texts, "UnsupportedError", said)


def test_no_memory_is_left(gpu_ranks: Ranks) -> None:
    _, texts = fail_at(gpu_ranks, 2, "", "os.environ['FAKE_GPU_MIB'] = '1'")
    all_say(texts, "MemoryError", "GPU 1 has no 2097152 bytes left; torch.cuda.empty_cache()")


def test_a_gpu_that_hangs(gpu_ranks: Ranks) -> None:
    processes = gpu_ranks.start(2)
    processes[1].ask("ctypes.CDLL('libcuda.so.1').fake_now(ctypes.c_double(-1))")
    texts = gpu_ranks.errors(processes, "timeout_s=1")
    all_say(texts, "RuntimeError", "GPU 1 has not done a copy within the deadline: it hangs")
    # Its own memory is kept: the GPU may write it at any time.
    assert processes[1].ask("left()")["mapped"] == 2
    assert processes[0].ask("left()")["mapped"] == 0


# -- ranks that go away ----------------------------------------------------------------------------


def check_in_time(ranks: Ranks, processes: list[Rank], timeout_s: float) -> list[dict[str, Any]]:
    """Errors of these ranks, each within the deadline and 5 s."""
    answers = [process.answer() for process in processes]
    for answer in answers:
        assert answer["seconds"] < timeout_s + 5, answer
        assert answer["error"].startswith("CommTimeoutError: PeerMemory"), answer
    return answers


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_is_killed(cpu_ranks: Ranks, step: str) -> None:
    processes = cpu_ranks.start(3)
    processes[1].ask(f"at_step({step!r}, end)")
    cpu_ranks.tell_make(processes, "timeout_s=3")
    alive = [processes[0], processes[2]]
    for answer in check_in_time(cpu_ranks, alive, 3):
        assert 1 in answer["missing"], answer  # the other may have failed of it before
        assert f"rank 1 (process {processes[1].pid} on " in answer["error"]
        assert "has ended" in answer["error"]
    wait_until(lambda: all(one.ask("left()")["mappings"] == 0 for one in alive))


@pytest.mark.parametrize("step", ["make", "map", "clear"])
def test_a_rank_on_a_gpu_that_is_killed(gpu_ranks: Ranks, step: str) -> None:
    processes = gpu_ranks.start(2)
    processes[0].ask(f"at_step({step!r}, end)")
    gpu_ranks.tell_make(processes, "timeout_s=3")
    (answer,) = check_in_time(gpu_ranks, processes[1:], 3)
    assert answer["missing"] == [0], answer
    counts = processes[1].ask("left()")
    assert counts["mapped"] == counts["handles"] == counts["reserved"] == counts["mappings"] == 0


def test_a_rank_whose_memory_does_not_come(cpu_ranks: Ranks) -> None:
    """Though it says that it has sent it: a stranger at the other's door, or a full one."""
    processes = cpu_ranks.start(3)
    processes[2].ask("descriptors._give = lambda *_: None")
    cpu_ranks.tell_make(processes, "timeout_s=1")
    said = f"rank 2 (process {processes[2].pid} on {socket.gethostname()}) did not send its"
    for process in processes[:2]:
        answer = process.answer()
        assert answer["missing"] == [2] and answer["seconds"] < 6, answer
        assert said in answer["error"]
    assert "did not send its memory" in processes[2].error()


def test_a_rank_that_is_killed_while_others_send_to_it(cpu_ranks: Ranks) -> None:
    processes = cpu_ranks.start(3)
    processes[2].ask("descriptors._give = lambda *_: end()")
    cpu_ranks.tell_make(processes, "timeout_s=2")
    for answer in check_in_time(cpu_ranks, processes[:2], 2):
        assert 2 in answer["missing"], answer


@pytest.mark.parametrize("step", ["listen", "map", "compare"])
def test_a_rank_that_is_stopped(cpu_ranks: Ranks, step: str) -> None:
    processes = cpu_ranks.start(2)
    processes[0].ask(f"at_step({step!r}, lambda: end(signal.SIGSTOP))")
    cpu_ranks.tell_make(processes, "timeout_s=1")
    (answer,) = check_in_time(cpu_ranks, processes[1:], 1)
    assert answer["missing"] == [0], answer
    # When it goes on, it hears that it is too late.
    os.kill(processes[0].pid, signal.SIGCONT)
    answer = processes[0].answer()
    assert "PeerMemory: " in answer["error"], answer
    assert f"rank 1 (process {processes[1].pid} on " in answer["error"], answer
    assert processes[0].ask("left()")["mappings"] == 0


def test_a_rank_that_never_comes(any_ranks: Ranks) -> None:
    one, _ = any_ranks.start(2)
    any_ranks.tell_make([one], "")
    one.value()  # alone: its size was 1
    any_ranks.tell_make([], "")
    one.tell("make(0, 2, timeout_s=1)")
    answer = one.answer()
    assert answer["missing"] == [1] and answer["seconds"] < 6, answer
    assert answer["error"].startswith("CommTimeoutError: PeerMemory: the set-up on rank 0 of 2")


def test_a_rank_that_is_interrupted(cpu_ranks: Ranks) -> None:
    """By Ctrl-C: the others hear of it at once."""
    processes = cpu_ranks.start(2)
    interrupt = "def interrupt(*_): raise KeyboardInterrupt\npeer_memory._map = interrupt"
    processes[1].ask(interrupt)
    texts = cpu_ranks.errors(processes)
    assert texts[1].startswith("KeyboardInterrupt")
    assert texts[0].startswith("CommTimeoutError: PeerMemory")
    assert "has failed: interrupted by KeyboardInterrupt" in texts[0]
    assert [one.ask("left()")["mappings"] for one in processes] == [0, 0]


def test_any_other_failure_of_one_rank(cpu_ranks: Ranks) -> None:
    """In it as it is; in the others as one of jitkern's."""
    _, texts = fail_at(cpu_ranks, 2, "", "descriptors._give = lambda *_: 1 // 0")
    assert texts[1].startswith("ZeroDivisionError: ")
    assert texts[0].startswith("CommError: PeerMemory: on rank 1: "), texts
