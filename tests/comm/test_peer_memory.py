"""Memory of other ranks: real processes, on the CPU and on a driver that shares for real."""

from __future__ import annotations

import pytest
from peer_ranks import Ranks, together

PIECE = 2 << 20

# -- together --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_sees_what_every_other_writes(any_ranks: Ranks, size: int) -> None:
    processes = any_ranks.meet(size)
    for rank, process in enumerate(processes):
        for other in range(size):
            process.ask(f"write({other}, {8 * rank}, {rank + 1}, {other + 1})")
    together(processes, "peers.barrier()")
    for process in processes:
        for other in range(size):
            found = process.ask(f"read({other}, 0, {8 * size})")
            assert found[::8] == [1, 2, 3, 4][:size]
            assert found[1::8] == [other + 1] * size


def test_the_memory_of_all_is_one_table(any_ranks: Ranks) -> None:
    """At one distance in every rank, so that rank r's rows are rows r * n of one tensor."""
    processes = any_ranks.meet(4, str(2 * PIECE))
    for rank, process in enumerate(processes):
        process.ask(f"peers.tensor((2, {PIECE}), torch.uint8).fill_({rank + 1})")
        addresses = process.ask("peers.addresses")
        assert [one - addresses[0] for one in addresses] == [2 * PIECE * r for r in range(4)]
        assert addresses[0] % PIECE == 0
    together(processes, "peers.barrier()")
    for rank, process in enumerate(processes):
        shape = f"table = peers.whole((8, {PIECE}), torch.uint8)"
        process.ask(shape)
        assert process.ask("table[:, -1].tolist()") == [1, 1, 2, 2, 3, 3, 4, 4]
        assert process.ask("table.data_ptr() == peers.addresses[0]")
        process.ask(f"table[2, {rank}] = 90 + {rank}")  # of rank 1
    together(processes, "peers.barrier()")
    assert processes[1].ask("peers.tensor(4, torch.uint8).tolist()") == [90, 91, 92, 93]


def test_it_begins_as_zeros_to_its_end(any_ranks: Ranks) -> None:
    """That of a GPU holds what was there before; the proof that all see the same is cleared."""
    for process in any_ranks.meet(2, str(3 * PIECE)):
        assert process.ask("peers.share_bytes") == 3 * PIECE
        assert process.ask(f"peers.whole({6 * PIECE}, torch.uint8).count_nonzero().item()") == 0


@pytest.mark.parametrize("num_bytes", [1, PIECE - 1, PIECE, PIECE + 1])
def test_a_share_is_whole_pages(cpu_ranks: Ranks, num_bytes: int) -> None:
    (one,) = cpu_ranks.meet(1, str(num_bytes))
    share = PIECE * (1 + (num_bytes > PIECE))
    assert one.ask("[peers.rank, peers.size, peers.num_bytes]") == [0, 1, num_bytes]
    assert one.ask("[peers.share_bytes, str(peers.device)]") == [share, "cpu"]
    one.ask(f"write(0, {num_bytes - 1}, 7)")
    said = one.refuses(f"peers.whole({num_bytes}, torch.uint8)") if num_bytes != share else ""
    if num_bytes != share:
        expected = f"leaves gaps between the ranks, expected whole pages; {share} is the next"
        assert said == f"ValueError: PeerMemory.whole: num_bytes: {num_bytes} {expected}"


def test_over_a_process_group(cpu_ranks: Ranks) -> None:
    """Which says rank and size, and of which there may be several."""
    processes = cpu_ranks.start(2)
    init = "import torch.distributed as dist; dist.init_process_group('gloo', store=store, "
    init = "store = FileStore(os.environ['TEST_FOLDER'] + '/gloo', 2); " + init
    for rank, process in enumerate(processes):
        process.tell(init + f"rank={rank}, world_size=2)")
    for process in processes:
        process.value()
    for group in ("None", "dist.new_group(backend='gloo')"):
        together(processes, f"peers = PeerMemory(64, {group}, timeout_s=30)")
        for rank, process in enumerate(processes):
            assert process.ask("[peers.rank, peers.size]") == [rank, 2]
            process.ask(f"write({1 - rank}, 3, {rank + 5})")
        together(processes, "peers.barrier()")
        assert [process.ask("read(peers.rank, 3)") for process in processes] == [[6], [5]]
    said = processes[0].refuses("PeerMemory(64, None, rank=1)")
    assert "rank 1 of size 2, expected rank 0 of size 2 as in the group" in said


def test_tensors_say_that_they_are_on_the_gpu_that_uses_them(gpu_ranks: Ranks) -> None:
    """Not on that where they lie, as PyTorch would say of a pointer."""
    for rank, process in enumerate(gpu_ranks.meet(4, str(PIECE))):
        process.ask("[peers.remote(r, 8, torch.int64) for r in range(4)]")
        process.ask("[peers.whole(1, torch.int8), peers.tensor((0, 3), torch.int8)]")
        assert set(process.ask("seen_devices")) == {f"cuda:{rank}"}
        assert process.ask("str(peers.device)") == f"cuda:{rank}"


# -- barriers --------------------------------------------------------------------------------------


def test_a_barrier_waits_for_all(any_ranks: Ranks) -> None:
    processes = any_ranks.meet(3)
    for process in processes[:2]:
        process.tell("peers.barrier()")
    processes[2].ask("time.sleep(0.4)")
    processes[2].tell("peers.barrier()")
    answers = [process.answer() for process in processes]
    assert answers[0]["seconds"] > 0.3 and answers[1]["seconds"] > 0.3
    together(processes, "[peers.barrier() for _ in range(20)]")


def test_a_barrier_that_some_do_not_come_to(any_ranks: Ranks) -> None:
    processes = any_ranks.meet(3)
    together(processes, "peers.barrier()")
    processes[0].tell("peers.barrier(timeout_s=0.5)")
    answer = processes[0].answer()
    assert answer["error"].startswith("CommTimeoutError: barrier: call 2 on rank 0 of 3"), answer
    assert answer["missing"] == [1, 2] and answer["seconds"] < 5
    assert f"rank 2 (process {processes[2].pid} on " in answer["error"]
    assert "make a new one" in processes[0].refuses("peers.barrier()")
    together(processes[1:], "peers.barrier()")  # rank 0 has come to that, and has given up
    for process in processes[1:]:
        process.tell("peers.barrier()")
    for process in processes[1:]:
        answer = process.answer()
        assert answer["seconds"] < 5 and answer["missing"] == [0], answer
        assert "has failed: barrier: call 2 on rank 0" in answer["error"], answer
    assert processes[0].ask("read(1, 0)") == [0]  # the memory is there


# -- lifetime --------------------------------------------------------------------------------------


def test_a_tensor_keeps_the_memory(any_ranks: Ranks) -> None:
    mine, other = any_ranks.meet(2)
    mine.ask("tensor = peers.remote(1, 8, torch.uint8)[2:6]; peers.close(); peers.close()")
    other.ask("write(1, 4, 44)")
    assert mine.ask("tensor.tolist()") == [0, 0, 44, 0]
    assert mine.ask("left()")["mappings"] == 2
    mine.ask("del tensor")
    assert mine.ask("left()")["mappings"] == 0
    other.ask("write(0, 0, 1)")  # whose rank has gone
    assert other.ask("read(0, 0)") == [1]
    other.ask("del peers")  # as good as closed
    assert other.ask("left()")["mappings"] == 0


def test_nothing_is_left(any_ranks: Ranks) -> None:
    """Descriptors, mappings, handles: after a first time, which opens what lives on."""
    processes = any_ranks.meet(2)
    before = []
    for turn in range(6):
        if turn:
            any_ranks.tell_make(processes)
            for process in processes:
                process.value()
        together(processes, "read(0, 0)")
        together(processes, "peers.close()")
        together(processes, "del peers")
        before.append(together(processes, "left()"))
    assert before[1] == before[-1]
    for counts in before[-1]:
        assert all(count == 0 for name, count in counts.items() if name != "descriptors")


def test_while_it_is_open_no_descriptor_is(any_ranks: Ranks) -> None:
    """The mappings are enough."""
    for process in any_ranks.meet(2):
        held = process.ask("[os.path.realpath(f) for f in Path('/proc/self/fd').iterdir()]")
        assert held and not [one for one in held if "memfd" in one], held


def test_after_close(any_ranks: Ranks) -> None:
    (one,) = any_ranks.meet(1)
    one.ask("peers.close()")
    for call in ("tensor(1, torch.int8)", "remote(0, 1, torch.int8)", "addresses", "barrier()"):
        said = one.refuses(f"peers.{call}")
        assert said == f"RuntimeError: PeerMemory.{call.partition('(')[0]}: the memory is closed"
    assert one.ask("repr(peers)").endswith(", closed)")


def test_who_has_closed_it_is_named(any_ranks: Ranks) -> None:
    mine, other = any_ranks.meet(2)
    other.ask("peers.close()")
    mine.tell("peers.barrier()")
    answer = mine.answer()
    assert "rank 1" in answer["error"] and "has closed it" in answer["error"], answer
    assert answer["seconds"] < 5


def test_a_context_manager_closes(any_ranks: Ranks) -> None:
    (one,) = any_ranks.meet(1)
    one.ask("with peers: write(0, 0, 1)")
    assert "closed" in one.refuses("read(0, 0)")


# -- forks -----------------------------------------------------------------------------------------


def test_a_forked_child_has_no_part_of_it(any_ranks: Ranks) -> None:
    mine, other = any_ranks.meet(2)
    text = "a forked child has no part of its parent's memory; make one of its own"
    for call in ("tensor(1, torch.int8)", "addresses", "barrier()", "whole(1, torch.int8)"):
        said = mine.ask(f"fork({f'peers.{call}'!r})")
        expected = f"RuntimeError: PeerMemory.{call.partition('(')[0]}: {text}"
        assert said == expected or "whole: num_bytes" in said
    mine.ask("tensor = peers.tensor(4, torch.uint8)")
    assert mine.ask("fork('peers.close(), tensor.shape, globals().pop(\"tensor\") is None')")
    other.ask("write(0, 1, 9)")
    assert mine.ask("tensor.tolist()") == [0, 9, 0, 0]
    together([mine, other], "peers.barrier()")


def test_what_a_child_touches_is_not_there(cpu_ranks: Ranks) -> None:
    """So that it does not keep the memory of ranks that have ended."""
    mine, _ = cpu_ranks.meet(2)
    mine.ask("tensor = peers.remote(1, 4, torch.uint8)")
    assert mine.ask("fork('tensor.tolist()')") == "SIGSEGV"
    assert mine.ask("fork('left()')").count("'mappings': 0") == 1
    assert mine.ask("fork('del tensor, peers')") == "None"
