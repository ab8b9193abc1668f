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

INSTEAD = "use init_pynccl's all_reduce between them"
GPU = "GPU-66616b65-2047-5055-0000-00000000000"
HERE = socket.gethostname()


def all_say(texts: list[str], kind: str, *parts: str) -> None:
    for text in texts:
        assert text.startswith(f"{kind}: PeerMemory: "), text
        assert all(part in text for part in parts), text


def fail_at(ranks: Ranks, *codes: str, args: str = "") -> tuple[list[Rank], list[str]]:
    """Each rank's error if each has run its code before; and nothing is left."""
    processes = ranks.meet(len(codes))  # once as it should be: what is opened once stays open
    together(processes, "peers.close()")
    before = together(processes, "left()")
    for process, code in zip(processes, codes, strict=True):
        process.ask(code)
    texts = ranks.errors(processes, args)
    wait_until(lambda: together(processes, "left()") == before, timeout_s=10)  # threads end late
    return processes, texts


# -- ranks that do not fit -------------------------------------------------------------------------


def test_sizes_that_differ(any_ranks: Ranks) -> None:
    processes, texts = fail_at(any_ranks, "size = 4096", "size = 8192", args="num_bytes=size")
    for text in texts:
        assert text.startswith("CommError: PeerMemory: num_bytes: differs, expected the same"), text
        for rank, size in enumerate([4096, 8192]):
            line = next(one for one in text.splitlines() if f"rank {rank} " in one)
            assert str(size) in line and str(processes[rank].pid) in line


@pytest.mark.parametrize(
    "other",
    [
        "peer_memory._machine = lambda: 'another'",
        "real, other = os.stat, os.stat_result([0, 7, *[0] * 8]); "
        "os.stat = lambda path, **how: other if 'ns/net' in str(path) else real(path, **how)",
    ],
)
def test_two_hosts_or_network_namespaces(cpu_ranks: Ranks, other: str) -> None:
    _, texts = fail_at(cpu_ranks, "", other, "")
    came = f"rank 0, 2 is on {HERE} and rank 1 is on {HERE}, expected all on one host and in one "
    all_say(texts, "UnsupportedError", came, "between hosts use init_pynccl or TorchCommunicator")


def test_a_process_of_another_user_gets_nothing(cpu_ranks: Ranks) -> None:
    """By its uid, which the kernel knows."""
    pretend = "descriptors.peer_uid = lambda end: 12345"
    processes, texts = fail_at(cpu_ranks, "", pretend)
    came = f"rank 0 (process {processes[0].pid} on {HERE}) is of uid 12345"
    all_say(texts, "CommError", came, f"expected uid {os.geteuid()} as this process")
    assert texts[0].startswith("CommError: PeerMemory: on rank 1: rank 0 (")


@pytest.mark.parametrize("is_of_another_user", [True, False])
def test_what_strangers_send_is_dropped(cpu_ranks: Ranks, is_of_another_user: bool) -> None:
    """Of another user even as a rank that is missing, of this one as no rank."""
    processes = cpu_ranks.start(2)
    knock = f"""
import tempfile
strange = []
real_uid, real_take = descriptors.peer_uid, descriptors._take
descriptors.peer_uid = lambda end: 12345 if strange and strange.pop() else real_uid(end)
def take(end, missing, fds):
    for word in map(str, missing) if {is_of_another_user} else ['', '9', 'x' * 65]:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ends[0], ends[1], tempfile.TemporaryFile() as other:
            os.ftruncate(other.fileno(), 2 << 20)
            socket.send_fds(ends[0], [word.encode() or b'-'], [other.fileno()])
            strange[:] = [1] * {is_of_another_user}
            real_take(ends[1], missing, fds)
    real_take(end, [one for one in missing if one not in fds], fds)
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
    """The driver is asked for GPUs that the process sees; the third rank hears of it."""
    apart = "os.environ['FAKE_APART'] = '0,2'"
    _, texts = fail_at(gpu_ranks, apart, apart, apart)
    one, other = f"cuda:0 of rank 0 ({GPU}0)", f"cuda:2 of rank 2 ({GPU}2)"
    why = f"the driver has no peer access between them; {INSTEAD}"
    all_say(texts[:1], "UnsupportedError", f"{one} cannot address the memory of {other}: {why}")
    all_say(texts[2:], "UnsupportedError", f"{other} cannot address the memory of {one}: {why}")
    all_say(texts[1:2], "UnsupportedError", f"on rank 0: {one} cannot address", why)


def test_gpus_that_other_processes_do_not_see(gpu_ranks: Ranks) -> None:
    """Each process sees its own as cuda:0; whether they reach each other the mapping shows."""
    processes = gpu_ranks.start(2)
    for rank, process in enumerate(processes):
        process.ask(f"os.environ.update(FAKE_GPUS='1', FAKE_FIRST_GPU='{rank}')")
    one = "device=torch.device('cuda', 0)"
    gpu_ranks.tell_make(processes, one)
    for process in processes:
        process.value()
    processes[0].ask("write(1, 0, 5)")
    assert processes[1].ask("read(1, 0)") == [5]
    together(processes, "peers.close(); os.environ.update(FAKE_APART='0,1')")
    for rank, text in enumerate(gpu_ranks.errors(processes, one)):
        came = f"cuda:0 of rank {rank} ({GPU}{rank}) cannot"
        all_say([text], "UnsupportedError", came, "cuMemSetAccess: ERROR", "CUDA_VISIBLE_DEVICES")


def test_wrong_data_of_an_import(gpu_ranks: Ranks) -> None:
    """Rank 2 maps other memory for the second that it imports."""
    wrong = "os.environ['FAKE_WRONG_IMPORT'] = '4'"  # two were right when all met before
    _, texts = fail_at(gpu_ranks, "", "", wrong)
    parts = ["peer access gives wrong data: cuda:2 of rank 2 (GPU-", "of cuda:", INSTEAD]
    all_say(texts, "UnsupportedError", *parts)
    assert texts[0].startswith("UnsupportedError: PeerMemory: on rank 2: peer access gives")


def test_writes_that_do_not_arrive(any_ranks: Ranks) -> None:
    """Though reads are right."""
    wrong = """
real = peer_memory._Check.compare
def compare(self):
    real(self._replace(range=self.range._replace(write=lambda *_: None)))
peer_memory._Check.compare = compare
"""
    _, texts = fail_at(any_ranks, "", wrong, "")
    for rank in (0, 2):
        assert "peer access gives wrong data: what " in texts[rank]
        assert re.findall(r"of (rank \d)", texts[rank]) == ["rank 1", f"rank {rank}"]
    all_say(texts, "UnsupportedError", INSTEAD)


def test_a_driver_without_such_memory(gpu_ranks: Ranks) -> None:
    _, texts = fail_at(gpu_ranks, "", "os.environ['FAKE_NO_VMM'] = '1'")
    all_say(texts, "UnsupportedError", f"cuda:1 of rank 1 ({GPU}1) has no memory that other")


def test_no_memory_left(gpu_ranks: Ranks) -> None:
    _, texts = fail_at(gpu_ranks, "", "os.environ['FAKE_GPU_MIB'] = '1'")
    all_say(texts, "MemoryError", "GPU 1 has no 2097152 bytes left; torch.cuda.empty_cache()")


def test_a_gpu_that_hangs(gpu_ranks: Ranks) -> None:
    processes = gpu_ranks.start(2)
    processes[1].ask("ctypes.CDLL('libcuda.so.1').fake_now(ctypes.c_double(-1))")
    texts = gpu_ranks.errors(processes, "timeout_s=1")
    all_say(texts, "RuntimeError", "GPU 1 has not done a copy within the deadline: it hangs")
    # Its own memory is kept: the GPU may write it at any time.
    assert [one.ask("left()")["mapped"] for one in processes] == [0, 1]


# -- ranks that go away ----------------------------------------------------------------------------


def late_errors(processes: list[Rank]) -> list[dict[str, Any]]:
    answers = [process.answer() for process in processes]
    for answer in answers:
        assert answer["error"].startswith("CommTimeoutError: PeerMemory"), answer
    return answers


@pytest.mark.parametrize("step", ["make", "listen", "take", "map", "receive"])
def test_a_rank_that_is_killed(cpu_ranks: Ranks, step: str) -> None:
    processes = cpu_ranks.start(3)
    processes[1].ask(f"at_step({step!r}, end)")
    cpu_ranks.tell_make(processes, "timeout_s=3")
    alive = [processes[0], processes[2]]
    for answer in late_errors(alive):
        assert 1 in answer["missing"], answer  # the other may have failed of it before
        assert f"rank 1 (process {processes[1].pid} on {HERE}) has ended" in answer["error"]
    wait_until(lambda: all(one.ask("left()")["mappings"] == 0 for one in alive))


@pytest.mark.parametrize("step", ["map", "receive"])
def test_a_rank_on_a_gpu_that_is_killed(gpu_ranks: Ranks, step: str) -> None:
    processes = gpu_ranks.start(2)
    processes[0].ask(f"at_step({step!r}, end)")
    gpu_ranks.tell_make(processes, "timeout_s=3")
    (answer,) = late_errors(processes[1:])
    assert answer["missing"] == [0], answer
    counts = processes[1].ask("left()")
    assert counts["mapped"] == counts["handles"] == counts["reserved"] == counts["mappings"] == 0


def test_a_rank_whose_memory_does_not_come(cpu_ranks: Ranks) -> None:
    """Though it says that it has sent it: a stranger may have taken its place."""
    processes = cpu_ranks.start(3)
    processes[2].ask("descriptors._give = lambda *_: None")
    cpu_ranks.tell_make(processes, "timeout_s=1")
    for process in processes[:2]:
        answer = process.answer()
        assert answer["missing"] == [2], answer
        assert f"rank 2 (process {processes[2].pid} on {HERE}) did not send" in answer["error"]
    assert "did not send its memory" in processes[2].error()


@pytest.mark.parametrize("step", ["listen", "map"])
def test_a_rank_that_is_stopped(cpu_ranks: Ranks, step: str) -> None:
    processes = cpu_ranks.start(2)
    processes[0].ask(f"at_step({step!r}, lambda: end(signal.SIGSTOP))")
    cpu_ranks.tell_make(processes, "timeout_s=1")
    (answer,) = late_errors(processes[1:])
    assert answer["missing"] == [0], answer
    # When it goes on, it hears that it is too late.
    os.kill(processes[0].pid, signal.SIGCONT)
    error = processes[0].error()
    assert "PeerMemory: " in error and f"rank 1 (process {processes[1].pid} on " in error
    assert processes[0].ask("left()")["mappings"] == 0


def test_a_rank_that_is_interrupted(cpu_ranks: Ranks) -> None:
    """By Ctrl-C: the others hear of it at once."""
    processes = cpu_ranks.start(2)
    processes[1].ask("def interrupt(*_): raise KeyboardInterrupt\npeer_memory._map = interrupt")
    texts = cpu_ranks.errors(processes)
    assert texts[1].startswith("KeyboardInterrupt")
    assert texts[0].startswith("CommTimeoutError: PeerMemory")
    assert "has failed: interrupted by KeyboardInterrupt" in texts[0]
    assert [one.ask("left()")["mappings"] for one in processes] == [0, 0]
