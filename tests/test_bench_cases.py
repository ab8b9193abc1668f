"""Cases and pairs: what is timed, how, and what a bad file of cases is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from guard import GOOD
from hypothesis import given
from hypothesis import strategies as st
from stems import ON_GPU

from jitkern.bench import Context, case, ci, pairs
from jitkern.bench.case import CaseError, cases_of
from jitkern.bench.cases import builtin_cases

CPU = Context("cpu")


# ------------------------------------------------------------------------------------------- pairs


def test_samples_take_turns_in_changing_order() -> None:
    order: list[str] = []

    def sampler(name: str, us: float) -> Callable[[], float]:
        def sample() -> float:
            order.append(name)
            return us

        return sample

    found = pairs.time_pairs(sampler("a", 3.0), sampler("b", 2.0), budget_s=0.0)
    assert "".join(order[:10]) == "ababbaabba"
    assert len(found.ours_us) == len(found.reference_us) == pairs.MIN_PAIRS
    assert found.ratio_min == found.ratio_median == 1.5


@given(
    st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=30),
    st.floats(1.1, 10.0),
)
def test_ratios_scale_with_the_slowdown(samples: list[tuple[float, float]], factor: float) -> None:
    ours, reference = zip(*samples, strict=True)
    before = pairs.Pairs(ours, reference)
    after = pairs.Pairs(tuple(us * factor for us in ours), reference)
    assert after.ratio_min == pytest.approx(before.ratio_min * factor)
    assert after.ratio_median == pytest.approx(before.ratio_median * factor)


def test_garbage_is_not_collected_while_pairs_are_timed() -> None:
    import gc

    seen: list[bool] = []

    def sample() -> float:
        seen.append(gc.isenabled())
        return 1.0

    pairs.time_pairs(sample, sample, budget_s=0.0)
    assert not any(seen)
    assert gc.isenabled()


def test_a_sample_is_short_and_holds_several_calls() -> None:
    calls: list[int] = []
    sample = pairs.host_sampler(CPU, lambda: calls.append(1))
    calls.clear()
    assert sample() > 0
    assert len(calls) > 100  # an append takes 0.05 us, a sample 250


# ------------------------------------------------------------------------------------------- cases


def test_every_builtin_case_computes_the_right_thing() -> None:
    found = list(builtin_cases(CPU))
    assert len({one.key for one in found}) == len(found)
    copies = [one for one in found if one.outputs(one.make(0))]
    assert len(copies) >= 9
    for one in copies:
        buffers = one.make(0)
        ci.check(CPU, one, one.ours(), one.ours().build(), buffers, ci.expected_of(one, buffers))


def test_every_op_has_a_case_for_its_checks() -> None:
    keys = {one.key for one in builtin_cases(CPU)}
    for op in ON_GPU:
        assert {f"{op}: call, checks only", f"{op}: call, 1 row"} <= keys


def test_cases_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bench_mine.py"
    file.write_text(GOOD + "\n@case('second')\ndef second(ctx):\n    return len, len\n")
    found = cases_of(file, CPU)
    assert [one.key for one in found] == ["bench_mine: copy", "bench_mine: second"]
    assert found[0].reference_impl().name == "clone"


def test_a_function_may_return_cases(tmp_path: Path) -> None:
    file = tmp_path / "bench_mine.py"
    file.write_text(
        "from jitkern.bench import Case, Impl\n"
        "def cases(ctx):\n"
        "    for n in (1, 2):\n"
        "        impls = [Impl('a', 'ours', lambda: print), Impl('b', 'peer', lambda: print),\n"
        "                 Impl('c', 'floor', lambda: print)]\n"
        "        yield Case('mine', f'{n} rows', impls, yardstick='c')\n"
    )
    found = cases_of(file, CPU)
    assert [one.key for one in found] == ["mine: 1 rows", "mine: 2 rows"]
    assert found[0].reference_impl().name == "c"


def test_a_case_of_another_device_is_left_out() -> None:
    made = case("x", device="cuda")(lambda ctx: (int, int))
    assert made.cases(CPU) == []
    assert len(made.cases(Context("cuda"))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file of cases"),
        ("x = 1\n", "no function under @jitkern.bench.case and no cases(ctx)"),
        ("import nothing_of_that_name\n", "ModuleNotFoundError: No module named"),
        ("def f(:\n", "SyntaxError"),
        (
            "def cases(ctx):\n    return [1]\n",
            "cases(): 1, expected Case objects with two Impl each",
        ),
        ("def cases(ctx):\n    raise ValueError('bad size')\n", "ValueError: bad size"),
    ],
)
def test_a_bad_file_of_cases_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "bench_mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CaseError) as raised:
        cases_of(file, CPU)
    assert message in str(raised.value)
    assert str(file) in str(raised.value)


def test_a_case_has_to_return_two_callables() -> None:
    (made,) = case("x")(lambda ctx: 5).cases(CPU)  # type: ignore[arg-type,return-value]
    with pytest.raises(CaseError, match="x: returned 5, expected two callables"):
        made.ours().build()
