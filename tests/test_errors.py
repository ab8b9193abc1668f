"""Exceptions carry everything, also from one process to another."""

from __future__ import annotations

import pickle

from jitkern import errors


def make() -> errors.CompileError:
    return errors.CompileError(
        "store.cu: NVRTC failed", command="-arch=sm_90", log="line 2: no such type\n", source="a\nb"
    )


def test_compile_error_text_holds_all_of_it() -> None:
    text = str(make())
    assert text.splitlines() == [
        "store.cu: NVRTC failed",
        "command: -arch=sm_90",
        "log:",
        "line 2: no such type",
        "source:",
        "   1  a",
        "   2  b",
    ]


def test_what_no_compiler_has_seen_is_told_in_a_line() -> None:
    error = errors.CompileError("a.cu: no such option", command="-x", log="", source="a\nb")
    assert str(error) == "a.cu: no such option\ncommand: -x"
    assert error.source == "a\nb"


def test_compile_error_survives_pickling() -> None:
    """One rank's failure is handed to the ranks that waited for it."""
    error = make()
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.CompileError
    assert str(copy) == str(error)
    assert copy.source == error.source


def test_one_base_class() -> None:
    here = vars(errors).values()
    classes = [
        kind for kind in here if isinstance(kind, type) and kind.__module__ == errors.__name__
    ]
    assert len(classes) > 4
    assert all(issubclass(kind, errors.JitkernError) for kind in classes)


def test_a_timeout_survives_pickling() -> None:
    error = errors.CommTimeoutError("late", op="all_reduce", number=3, rank=0, missing=[2, 1])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.CommTimeoutError and isinstance(copy, TimeoutError)
    assert (str(copy), copy.op, copy.number, copy.rank) == ("late", "all_reduce", 3, 0)
    assert copy.missing == (2, 1)
