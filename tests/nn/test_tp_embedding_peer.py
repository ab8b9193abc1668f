"""TPEmbedding in peer memory: each row is read from the rank that holds it, between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comm_ranks import LATE_S, Rank, everywhere
from nccl_ranks import all_do
from needs import needs_cxx

pytestmark = needs_cxx

# dtype, hidden size, vocabulary, added. Of wide rows a page is few: 8, 16, 16; then 16384; and
# rows of 6 bytes, of which one rank has all.
TABLES: list[tuple[str, int, int, int]] = [
    ("float32", 65536, 19, 4),
    ("bfloat16", 65536, 37, 5),
    ("float8_e4m3fn", 131072, 37, 0),
    ("float32", 32, 20_001, 3),
    ("float16", 3, 11, 2),
]
SMALL = {"vocab": 9, "hidden": 65536}  # of two pages


@pytest.fixture
def two(make_ranks: Callable[[int], list[Rank]]) -> list[Rank]:
    return make_ranks(2)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table[0]}-{table[1]}")
def test_any_row(make_ranks: Callable[[int], list[Rank]], table: tuple[str, int, int, int]) -> None:
    dtype, hidden, vocab, added = table
    ranks = make_ranks(3)
    made = all_do(ranks, "make", vocab=vocab, hidden=hidden, dtype=dtype, num_added=added)
    held = []
    for method, rows, (start, length), (first, more) in made:
        assert method == "peer" and rows == made[0][1] >= length + more
        held += [*range(start, start + length), *range(first, first + more)]
    assert held == list(range(vocab + added))  # in the order of ranks, and each in one
    all_do(ranks, "look_up")


def test_an_id_that_no_rank_has(two: list[Rank]) -> None:
    all_do(two, "make", **SMALL, num_added=2)
    for rank in two:  # one of them alone, as it is no collective call
        code = "torch.no_grad()(module)(torch.tensor([10, 11], device=device))"
        if rank.evaluate("device.type == 'cuda'"):  # which has to be done with it
            code = f"[{code}, torch.cuda.synchronize(), jitkern.check(device)]"
        rank.tell("evaluate", code=code)
        error = rank.error()["error"]
        assert error.startswith("IndexError: ")
        assert "index 11 at position 1, expected below 11" in error


def test_a_gradient_comes_by_the_communicator(two: list[Rank]) -> None:
    all_do(two, "make", vocab=19, hidden=65536, num_added=4, padding_idx=8)
    all_do(two, "gradient")


def test_another_weight_in_its_place(two: list[Rank]) -> None:
    """It is looked up as it is, by a sum: what others would read is not it."""
    all_do(two, "make", **SMALL)
    call = "torch.func.functional_call(module, {'weight': torch.ones_like(module.weight)}, (ids,))"
    code = f"(lambda ids: {call}.unique().tolist())(torch.arange(9, device=device))"
    assert everywhere(two, f"torch.no_grad()(lambda: {code})()") == [[1.0], [1.0]]
    assert everywhere(two, "comm.num_sums") == [1, 1]


def test_it_is_in_a_full_graph(two: list[Rank]) -> None:
    all_do(two, "make", **SMALL, padding_idx=3)
    all_do(two, "compiled", backend="aot_eager")


def test_padding_is_zeros_at_first(two: list[Rank]) -> None:
    all_do(two, "make", **SMALL, padding_idx=-1)  # of the second rank
    code = "torch.no_grad()(lambda: module(torch.arange(9, device=device)).any(1).tolist())()"
    assert everywhere(two, code) == [[True] * 8 + [False]] * 2


# -- loading ---------------------------------------------------------------------------------------

WAYS = ["load_full", "load_state_dict", "reset_parameters", "fence"]


def test_state_dicts(two: list[Rank]) -> None:
    all_do(two, "make", vocab=19, hidden=65536, num_added=4)
    all_do(two, "state_dicts")


@pytest.mark.parametrize("by", WAYS)
def test_nobody_writes_while_another_reads(two: list[Rank], by: str) -> None:
    all_do(two, "make", **SMALL)
    all_do(two, "load", value=1)
    two[0].tell("load", value=2, by=by)
    assert two[1].ask("load_late", value=2, by=by, wait_s=0.4) == [1]
    assert two[0].value() == [2]


def test_nobody_reads_before_all_is_written(two: list[Rank]) -> None:
    all_do(two, "make", **SMALL)
    two[0].tell("load", value=3)
    assert two[1].ask("load_slowly", value=3, wait_s=0.3) == [3]
    assert two[0].value() == [3]


def test_a_rank_ends_before_others_load(two: list[Rank]) -> None:
    all_do(two, "make", **SMALL)
    all_do(two, "load", value=1)
    two[1].kill()
    two[0].tell("load", value=2)
    error = two[0].error()
    assert error["error"].startswith("CommTimeoutError: barrier:") and error["missing"] == [1]
    assert two[0].evaluate("rows()") == [1.0]  # also what the other has held
    two[0].tell("load", value=2)
    assert "make a new one" in two[0].error()["error"]


def test_a_rank_does_not_come_to_load(two: list[Rank]) -> None:
    all_do(two, "make", **SMALL, timeout_s=1)
    two[0].tell("load", value=2)
    error = two[0].error(1 + LATE_S)
    assert error["error"].startswith("CommTimeoutError: barrier:") and error["missing"] == [1]


def test_a_rank_fails_to_write(two: list[Rank]) -> None:
    """The others do not go on with a table of which a part is lacking."""
    all_do(two, "make", **SMALL, timeout_s=1)
    two[0].tell("load", value=2)
    two[1].tell("fail_to_write")
    assert two[1].error()["error"] == "OSError: no rows"
    assert two[0].error(1 + LATE_S)["missing"] == [1]


WRONG_TABLES = [
    ("module.load_full(torch.zeros(8, 65536))",
     "ValueError: TPEmbedding: weight: shape [8, 65536], expected [9, 65536]"),
    ("module.load_state_dict({'weight': torch.zeros(7, 65536)})", "size mismatch for weight"),
    ("module.load_state_dict({'weight': [1]})", "expected torch.Tensor or Tensor-like object"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "text"), WRONG_TABLES)
def test_a_wrong_table_is_refused_before_ranks_meet(two: list[Rank], code: str, text: str) -> None:
    all_do(two, "make", **SMALL)
    two[0].tell("evaluate", code=code)  # the other has not come
    assert text in two[0].error(LATE_S)["error"]
    assert all_do(two, "load", value=5) == [[5.0], [5.0]]


# -- what it is ------------------------------------------------------------------------------------


def test_it_stays_where_it_is(two: list[Rank]) -> None:
    all_do(two, "make", **SMALL)
    all_do(two, "load", value=4)
    at = "module.weight.data_ptr() - module._table.data_ptr()"
    same = (
        "module.float()",
        "module.to(device)",
        "module.to_empty(device=device)",
        "module.eval()",
    )
    for code in same:
        assert everywhere(two, f"{code} is module and {at}") == [0, 2 << 20]
    for code in ("module.half()", "module.to('meta')", "torch.nn.Sequential(module).double()"):
        two[0].tell("evaluate", code=code)
        error = two[0].error()["error"]
        assert error.startswith("RuntimeError: TPEmbedding: weight: ")
        assert error.endswith("make a new module with dtype= and device=")
    for code in ("copy.deepcopy(module)", "copy.copy(module)", "pickle.dumps(module)",
                 "torch.save(module, io.BytesIO())"):  # fmt: skip
        two[0].tell("evaluate", code=code)
        error = two[0].error()["error"]
        assert error.startswith("TypeError: TPEmbedding: weight: in memory that other ranks read")
    assert everywhere(two, "rows()") == [[4.0], [4.0]]
    assert two[0].evaluate("repr(module)") == (
        "TPEmbedding(9, 65536, num_added=0, method='peer', rank=0, size=2)"
    )


def test_a_module_takes_its_memory_along(two: list[Rank]) -> None:
    mappings = "open('/proc/self/maps').read().count('jitkern-peers')"
    if two[0].evaluate("device.type == 'cuda'"):
        pytest.skip("of host memory, which can be counted")
    before = everywhere(two, mappings)
    all_do(two, "make", **SMALL)
    assert everywhere(two, mappings) > before
    everywhere(two, "[globals().update(module=None), gc.collect()] and None")
    assert everywhere(two, mappings) == before


@pytest.mark.parametrize("options", [{"group": None}, {"method": "all_reduce"}])
def test_by_sums(two: list[Rank], options: dict[str, Any]) -> None:
    made = all_do(two, "make", **SMALL, **options)
    assert made == [["all_reduce", 5, [0, 5], [9, 0]], ["all_reduce", 5, [5, 4], [9, 0]]]
    assert all_do(two, "load", value=4) == [[4.0], [4.0]]
    assert everywhere(two, "[module.fence(), comm.num_sums]") == [[None, 1]] * 2
    for dtype, hidden in (("float32", 8), ("bfloat16", 6), ("float16", 3)):
        all_do(two, "make", vocab=97, hidden=hidden, dtype=dtype, num_added=4, **options)
        all_do(two, "sums")


def test_of_a_store(two: list[Rank], tmp_path: Any) -> None:
    group = f"dist.FileStore({str(tmp_path / 'ranks')!r})"
    assert everywhere(two, f"make(9, 65536, group={group}).method") == ["peer", "peer"]
    assert all_do(two, "load", value=4) == [[4.0], [4.0]]


def test_where_there_can_be_none(two: list[Rank]) -> None:
    """All ranks sum, or all raise, though one alone is elsewhere."""
    two[1].ask("be_elsewhere", where="the moon")
    assert [one[0] for one in all_do(two, "make", **SMALL)] == ["all_reduce", "all_reduce"]
    assert all_do(two, "load", value=4) == [[4.0], [4.0]]
    for rank in two:
        rank.tell("make", **SMALL, method="peer")
    for rank in two:
        error = rank.error()["error"]
        assert error.startswith("UnsupportedError: PeerMemory: rank 0 is on ")
        assert "expected all on one host" in error


def test_wasteful_rows(two: list[Rank]) -> None:
    """131 * 2 bytes: whole pages are of 2**20 rows."""
    wasteful: dict[str, Any] = {"vocab": 1000, "hidden": 131, "dtype": "bfloat16"}
    assert [one[0] for one in all_do(two, "make", **wasteful)] == ["all_reduce", "all_reduce"]
    two[0].tell("make", **wasteful, method="peer")  # before ranks meet
    assert two[0].error()["error"] == (
        "ValueError: TPEmbedding: hidden_size: 131 of bfloat16, rows of 262 bytes: 500 on each "
        "rank take 274726912 bytes of whole pages, expected at most twice their own; "
        "use method='all_reduce', or a hidden_size with more factors of 2"
    )
    made = all_do(two, "make", vocab=1000, hidden=160, dtype="bfloat16", method="peer")
    assert made[0][0] == "peer"


def test_ranks_that_ask_for_different_tables(two: list[Rank]) -> None:
    two[0].tell("make", vocab=9, hidden=65536)
    two[1].tell("make", vocab=19, hidden=65536)
    for rank in two:
        assert "num_bytes: differs, expected the same in all ranks" in rank.error()["error"]
