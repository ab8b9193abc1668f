"""Calls of several launches, and which figures they decide by; run by test_fake_driver.py.

The fault of an earlier call is raised once, before or after all launches; their memory is allocated
before them. PyTorch has no GPU here: tensors only say that they are on one.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import tvm_ffi
from fake_gpu import address_of, report_checks
from launch_fake import STREAM, Fault, cuda, driver, log, params, raises

import jitkern
from jitkern.comm import PeerReducer
from jitkern.errors import CommTimeoutError, EarlierFault, EarlierIndexError
from jitkern.host import library as host
from jitkern.host.library import torch_state
from jitkern.jit.device import DeviceModule
from jitkern.ops import store  # noqa: F401 - registers its kernels

PARAMS = "=QQq qqqIIIxxxx QqqqqqqqIxxxxQ"  # of IndexParams, CacheStrides among it
driver.fake_kernel(b"jitkern_index_20B_v4_i64", ctypes.c_uint64(struct.calcsize(PARAMS)), 1024)
BAD = 2, 0, 7, 900, 900


def indices(count: int = 3) -> Any:
    return cuda(count, dtype=torch.int64)


def record() -> Fault:
    """Of GPU 0: a kernel is told where it is."""
    log()
    jitkern.indexing(cuda(10, 5), indices(), output=cuda(3, 5))
    *_, address = struct.unpack(PARAMS, params(log().strip()))
    return Fault.from_address(address)


def num_launches() -> int:
    return log().count("grid")


def raised(call: Callable[..., object], *args: Any, **how: Any) -> Exception | None:
    try:
        call(*args, **how)
    except Exception as error:
        return error
    return None


def is_raised_once(fault: Fault) -> None:
    check = host.module()["check_faults"]
    error = raised(check, 0)
    assert isinstance(error, EarlierIndexError) and "index 900 at position 7" in str(error), error
    assert raised(check, 0) is None and fault.state == 0


def check_the_second_half_of_a_store_raises_nothing() -> None:
    """PyTorch took the call apart, and K is stored by then."""
    fault = record()
    first, store_v = (host.Function(f"store_{n}cache_now") for n in ("", "v_"))
    for items in (5, 6):
        fault.be(*BAD)
        store_v(cuda(10, items), indices(), cuda(3, items), None)
        assert num_launches() == 1
        is_raised_once(fault)
    fault.be(*BAD)
    assert isinstance(
        raised(first, cuda(10, 5), None, indices(), cuda(3, 5), None, None), IndexError
    )
    assert num_launches() == 0


def pinned(*shape: int) -> Any:
    """Another library's: one of PyTorch would bring PyTorch's allocator."""
    tensor = torch.zeros(*shape)
    address, count = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(tensor.nbytes)
    driver.fake_memory(address, count, 1, 0)
    return tvm_ffi.from_dlpack(tensor)


SET_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
ALLOCATE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, SET_ERROR
)
num_left = [0]  # allocations that are not refused


@ALLOCATE
def allocate(like: int, out: int, context: int, set_error: Any) -> int:
    num_left[0] -= 1
    if num_left[0] < 0:
        set_error(context, b"RuntimeError", b"out of memory")
        return -1
    arguments = (ctypes.c_void_p(like), ctypes.c_void_p(out), ctypes.c_void_p(context), None)
    status: int = driver.fake_allocate(*arguments)
    return status


def allow(count: int) -> None:
    """Allocate `count` times from here on, and fail afterwards."""
    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    library.TVMFFIEnvSetDLPackManagedTensorAllocator(allocate, 1, None)
    num_left[0] = count
    log()


def check_a_large_call_has_its_memory_before_it_writes() -> None:
    table, output, pairs = pinned(500, 256), cuda(3000, 256), cuda(3000, 2, dtype=torch.int64)
    allow(1)
    jitkern.h2d_gather(table, output, pairs, order="sorted")
    said = log()
    assert said.count("allocate") == 1 and said.count("grid") == 4, said
    allow(0)
    error = raised(jitkern.h2d_gather, table, output, pairs, order="sorted")
    assert isinstance(error, RuntimeError) and "out of memory" in str(error), error
    assert num_launches() == 0


BEFORE_COPY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
driver.fake_now.argtypes = [ctypes.c_double]
driver.fake_work.argtypes = [ctypes.c_void_p, ctypes.c_double]


def gather(pairs: torch.Tensor, before_copy: Callable[[int, int], None]) -> None:
    """Gather by pairs on the host; `before_copy` sees the memory that they are uploaded from."""
    count = len(pairs)
    allow(10)
    driver.fake_before_h2d(hook := BEFORE_COPY(before_copy))
    jitkern.h2d_gather(pinned(count, 1), cuda(count, 1), tvm_ffi.from_dlpack(pairs))
    driver.fake_before_h2d(None)
    del hook


def check_an_upload_waits_until_the_gpu_has_read_its_memory() -> None:
    """The first uploads of this process: the ring is empty."""
    pairs = torch.full((500_000, 2), -1)
    addresses: list[int] = []

    def upload() -> None:
        gather(pairs, lambda host, num_bytes: addresses.append(host))

    driver.fake_work(None, 1.0)
    driver.fake_now(0.0)  # the GPU has not begun
    for _ in range(4):  # of 4 MB: they fit into the ring
        upload()
    fifth = threading.Thread(target=upload)
    fifth.start()
    fifth.join(0.2)
    waits = fifth.is_alive()
    driver.fake_now(1e30)
    fifth.join()
    assert waits and addresses[4] == addresses[0] and len(set(addresses)) == 4


def check_pairs_are_checked_when_they_are_uploaded() -> None:
    """Another thread writes pairs of the second block after all were checked."""
    count = 1_200_000  # a block has 1,048,576 pairs
    pairs = torch.arange(count).repeat(2, 1).T.contiguous()
    wanted = pairs.int()
    wanted[1_100_000:] = -1
    uploaded: list[torch.Tensor] = []

    def before_copy(host: int, num_bytes: int) -> None:
        block = (ctypes.c_int32 * (num_bytes // 4)).from_address(host)
        uploaded.append(torch.frombuffer(block, dtype=torch.int32).clone())
        pairs[1_100_000:] = count + 5

    gather(pairs, before_copy)
    assert len(uploaded) == 2 and torch.equal(torch.cat(uploaded).view(-1, 2), wanted)


MERGE_TARGET = "=QQqqqqQ?xxxi"  # the first fields of MergeTarget
MERGE_STATE = struct.Struct("=QQqqqq")  # PartialState
MERGE_STATES_AT = 96
MERGE_KERNEL = "jitkern_merge_v4_d8_n8_f32"
driver.fake_kernel(
    MERGE_KERNEL.encode(), ctypes.c_uint64(MERGE_STATES_AT + 8 * MERGE_STATE.size), 512
)


def merge_launch(line: str) -> tuple[Any, ...]:
    """Return what a launch writes, and the addresses of its partials."""
    out, lse, *_, in_place, count = struct.unpack_from(MERGE_TARGET, params(line))
    assert not in_place
    places = [
        MERGE_STATE.unpack_from(params(line), MERGE_STATES_AT + i * MERGE_STATE.size)[:2]
        for i in range(count)
    ]
    return (out, lse), places


def check_more_than_8_partials_are_merged_in_groups() -> None:
    outs = [cuda(5, 2, 8) for _ in range(17)]
    lses = [cuda(5, 2) for _ in range(17)]
    partials = [(address_of(out), address_of(lse)) for out, lse in zip(outs, lses, strict=True)]
    allow(2)
    jitkern.merge_states(outs, lses, output=outs[16], lse=lses[3])  # partials of two groups
    launched = [line for line in log().splitlines() if "grid" in line]
    assert [line.split()[0] for line in launched] == [MERGE_KERNEL] * 4
    *groups, last = map(merge_launch, launched)
    for number, (_, places) in enumerate(groups):
        assert places == partials[8 * number : 8 * number + 8]
    in_place = partials[16][0], partials[3][1]
    assert last == (in_place, [written for written, _ in groups])
    assert len(set(last[1]) | set(partials)) == 3 + 17
    for some in (0, 1):
        allow(some)
        error = raised(jitkern.merge_states, outs, lses, output=outs[16], lse=lses[3])
        assert isinstance(error, RuntimeError) and "out of memory" in str(error), error
        assert num_launches() == 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
def current_stream(ordinal: int, stream: Any) -> int:
    """As aoti_torch_get_current_cuda_stream; there is no GPU 1."""
    stream[0] = STREAM + 1
    return ordinal


def check_without_a_tensor_of_torch_its_stream_is_asked_for() -> None:

    def store_on(gpu: int) -> None:
        on = partial(cuda, number=gpu)
        jitkern.store_cache(on(10, 5), None, on(3, dtype=torch.int64), on(3, 5))

    def index_on(gpu: int) -> None:
        on = partial(cuda, number=gpu)
        jitkern.indexing(on(10, 5), on(3, dtype=torch.int64), output=on(3, 5))

    calls = store_on, index_on
    for call in calls:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                call(0), call(1)
    set_torch_state = host.module()["set_torch_state"]
    address = ctypes.cast(current_stream, ctypes.c_void_p).value
    log()
    for known, streams in ((address, (STREAM + 1, 0)), (0, (0, 0))):
        set_torch_state(*torch_state()[:2], known)
        for call in calls:
            for number, stream in enumerate(streams):
                call(number)
                assert f" stream {stream} " in (said := log()), said
            with torch.inference_mode():
                call(0)
                assert f" stream {streams[0]} " in (said := log()), said
            with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), STREAM):
                call(0)
                assert f" stream {STREAM} " in (said := log()), said
    set_torch_state(*torch_state())


# -- ranks in step: what a PeerReducer's calls launch over faults and streams ----------------------

kept: list[Any] = []
PEER_PARAMS = "=QQq4I2I2I8QQIIQQ"  # the layout of PeerReduceParams
PEER_BYTES = ctypes.c_uint64(struct.calcsize(PEER_PARAMS))
driver.fake_kernel(b"jitkern_peer_one_shot_v16_r2_n1_f32", PEER_BYTES, 1024)
driver.fake_trace.restype = ctypes.c_char_p


class Reducer:
    """One of two ranks, without the tensor that PyTorch would put on a GPU."""

    def __init__(self) -> None:
        num_bytes = PeerReducer.workspace_bytes_for(2, 64)
        memory = torch.full((2, num_bytes), 0xFF, dtype=torch.uint8)
        kept.append(memory)
        places = [part.data_ptr() for part in memory]
        functions = host.Function("make_peer_reducer")(0, places, 0, num_bytes, 10**9, 1 << 20)
        self._all_reduce, self.reset = functions["all_reduce"], functions["reset"]
        self._barrier = functions["device_barrier"]

    def all_reduce(self, stream: int = STREAM, items: int = 8) -> list[list[str]]:
        """Make a call; return the driver calls that order streams."""
        x = cuda(items)
        driver.fake_trace()
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
            self._all_reduce(x, x, -1)
        return [line.split()[:2] for line in bytes(driver.fake_trace()).decode().splitlines()]

    def barrier(self, word: Any) -> None:
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), STREAM):
            self._barrier(word)


class Failing(Reducer):
    def __init__(self) -> None:
        super().__init__()
        log()
        self.all_reduce()
        *_, self.site, failure, fault = struct.unpack(PEER_PARAMS, params(log().strip()))
        self.failure, self.fault = map(Fault.from_address, (failure, fault))
        assert self.failure.state == self.fault.state == 0


def check_a_sum_is_made_and_then_the_fault_raised() -> None:
    reducer = Failing()
    for call in (reducer.all_reduce, lambda: reducer.barrier(cuda(1))):
        reducer.fault.be(2, 0, 7, 900, 900)
        error = raises(IndexError, ".*index 900 at position 7.*", call)
        assert isinstance(error, EarlierFault)
        assert num_launches() == 1 and reducer.fault.state == 0
        call()
        assert num_launches() == 1


def check_a_failure_is_raised_by_later_sums_and_by_no_other_op() -> None:
    """Until reset, which forgets no other fault."""
    reducer = Failing()
    late = 2, reducer.site, 0b10, 1, 0
    reducer.failure.be(*late)
    reducer.fault.be(*late)
    for _ in range(2):
        error = raises(CommTimeoutError, ".*", reducer.all_reduce)
        assert error.missing == (1,), error
        assert num_launches() == 0 and reducer.fault.state == 0
    reducer.fault.be(*late)
    reducer.reset()
    assert reducer.failure.state == reducer.fault.state == 0
    reducer.failure.be(*late)
    reducer.fault.be(2, 0, 7, 900, 900)
    reducer.reset()
    assert reducer.failure.state == 0 and reducer.fault.state == 2
    reducer.barrier(None)  # inside another call it raises no fault
    assert num_launches() == 1 and reducer.fault.state == 2
    raises(IndexError, ".*", reducer.all_reduce)
    assert num_launches() == 1


def check_a_late_sum_that_another_call_finds_has_its_facts() -> None:
    reducer = Failing()
    reducer.fault.be(2, reducer.site, 0b110, 5, 0)
    error = raises(CommTimeoutError, ".*found by an earlier call.*", jitkern.check, 0)
    assert isinstance(error, EarlierFault)
    assert (error.op, error.number, error.rank) == ("all_reduce", 5, 0)
    assert error.missing == (1, 2)


def check_another_stream_waits_for_the_last_one() -> None:
    """Also if that is the default stream, or calls without items, of no stream, were in between."""
    reducer = Reducer()
    assert reducer.all_reduce(7) == reducer.all_reduce(7) == []
    assert reducer.all_reduce(8, items=0) == reducer.all_reduce(7) == []
    assert reducer.all_reduce(8) == [["record", "7"], ["wait", "8"]]
    assert reducer.all_reduce(8) == []
    for num_empty in (0, 1, 2):
        reducer = Reducer()
        for _ in range(num_empty):
            assert reducer.all_reduce(0, items=0) == []
        assert reducer.all_reduce(0) == []
        assert reducer.all_reduce(8) == [["record", "0"], ["wait", "8"]], num_empty


if __name__ == "__main__":
    torch.cuda.device_count = lambda: 1
    DeviceModule.image = lambda self, arch: f"image of {self.name}".encode()  # type: ignore[method-assign]
    report_checks(globals(), log)
