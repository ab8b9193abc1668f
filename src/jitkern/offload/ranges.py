"""Ranges in NVIDIA's profilers for what a pipeline does on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jitkern.errors import UnsupportedError


class Ranges:
    """Numbers the ranges of each kind. Raises UnsupportedError where torch has no NVTX."""

    def __init__(self) -> None:
        import torch

        self._nvtx: Any = torch.cuda.nvtx
        self._counts: dict[str, int] = {}
        try:
            self._nvtx.range_push("jitkern")
            self._nvtx.range_pop()
        except RuntimeError as error:
            raise UnsupportedError(
                "SlotPipeline: nvtx: this torch has no NVTX; install a CUDA build of torch"
            ) from error

    @contextmanager
    def range(self, kind: str) -> Iterator[None]:
        """Make what is below it a range, such as ``compute 3``."""
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        self._nvtx.range_push(f"{kind} {number}")
        try:
            yield
        finally:
            self._nvtx.range_pop()

    def around(self, kind: str, copy: Callable[..., object] | None) -> Any:
        """Return `copy` as a function that is a range."""
        if copy is None:
            return None

        def ranged(*args: Any) -> None:
            with self.range(kind):
                copy(*args)

        return ranged
