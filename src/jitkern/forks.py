"""What a forked child makes anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that a forked child makes anew.

    A lock that a thread of the parent holds would never be released in the child, and a directory
    of the parent's own goes when the parent ends.

    Parameters
    ----------
    make
        Makes the value, here and in each child.

    Examples
    --------
    >>> guard = PerProcess(threading.RLock)  # doctest: +SKIP
    >>> with guard.value:  # doctest: +SKIP
    ...     pass
    """

    value: T

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.value = self._make()
