"""Exceptions carry everything, also from one process to another."""

from __future__ import annotations

import pickle

from jitkern import errors


def test_a_compile_error_holds_all_of_it_also_after_pickling() -> None:
    """One rank's failure is handed to the ranks that waited for it."""
    error = errors.CompileError(
        "store.cu: NVRTC failed", command="-arch=sm_90", log="line 2: no such type\n", source="a\nb"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.CompileError and copy.source == error.source
    assert str(copy).splitlines() == [
        *("store.cu: NVRTC failed", "command: -arch=sm_90", "log:", "line 2: no such type"),
        *("source:", "   1  a", "   2  b"),
    ]
    unseen = errors.CompileError("a.cu: no such option", command="-x", log="", source="a\nb")
    assert str(unseen) == "a.cu: no such option\ncommand: -x"  # no compiler has seen the source


def test_one_base_class() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    ours = [kind for kind in kinds if kind.__module__ == errors.__name__]
    assert len(ours) > 4 and all(issubclass(kind, errors.JitkernError) for kind in ours)


def test_a_timeout_survives_pickling() -> None:
    error = errors.CommTimeoutError("late", op="all_reduce", number=3, rank=0, missing=[2, 1])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.CommTimeoutError and isinstance(copy, TimeoutError)
    assert (str(copy), copy.op, copy.number, copy.rank) == ("late", "all_reduce", 3, 0)
    assert copy.missing == (2, 1)
