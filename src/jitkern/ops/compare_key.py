"""``fast_compare_key``: the length of the common prefix of two token sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jitkern.args import type_text
from jitkern.errors import UNREADABLE, name_unreadable
from jitkern.host import library as host
from jitkern.lazy import torch
from jitkern.ops import dispatch

_compare = host.Function("compare_key")


@dispatch.untraced
def fast_compare_key(
    x: torch.Tensor, y: torch.Tensor, *, start: int = 0, page_size: int = 1
) -> int:
    """Return how many leading items of ``x[start:]`` and ``y`` are equal, in whole pages.

    One step down a radix tree of cached prefixes: ``x`` holds the tokens of the request, of which
    the first ``start`` are already matched; ``y`` is the key of the node. The result does not
    include ``start``. Synchronous, on the CPU. After mini-sglang.

    Parameters
    ----------
    x, y : Tensor
        ``[x_length]`` and ``[y_length]``, both int32 or both int64, contiguous, in CPU memory. A
        read-only NumPy array is copied first.
    start : int
        The first item of ``x`` to compare: 0 to ``x_length``.
    page_size : int
        The result is rounded down to a multiple of this; 1 or more.

    Raises
    ------
    TypeError, ValueError
        ``x`` or ``y`` has a wrong dtype, device, shape or stride; an int is out of range.
    """
    call: Callable[[Any, Any, int, int], int] = _compare.call
    try:
        return call(x, y, start, page_size)
    except TypeError:
        for name, key in (("x", x), ("y", y)):
            if not hasattr(key, "__dlpack__"):
                text = f"{type_text(key)}, expected a tensor"
                raise TypeError(f"fast_compare_key: {name}: {text}") from None
        raise
    except UNREADABLE as error:
        keys = [_writable(key) for key in (x, y)]
        if keys[0] is x and keys[1] is y:
            name_unreadable(error, "fast_compare_key", x=x, y=y)
        return call(keys[0], keys[1], start, page_size)


def _writable(key: Any) -> Any:
    """Return a copy of a read-only NumPy array, which DLPack does not export."""
    return key if getattr(getattr(key, "flags", None), "writeable", True) else key.copy()
