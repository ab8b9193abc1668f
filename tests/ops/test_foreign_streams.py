"""Which stream a call goes to where no argument is PyTorch's. Without a GPU see test_faults.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import tvm_ffi
from torch import Tensor

import jitkern

pytestmark = pytest.mark.cuda


class Foreign:
    """A tensor that says no more than DLPack does, and orders no streams."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: object) -> Any:
        return torch.utils.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()


def stored(cache: Any, indices: Any, rows: Any) -> None:
    jitkern.store_cache(cache, None, indices, rows)


def looked_up(cache: Any, indices: Any, rows: Any) -> None:
    jitkern.indexing(rows, indices, output=cache)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("call", [stored, looked_up])
@pytest.mark.parametrize("kind", [lambda one: one, tvm_ffi.from_dlpack], ids=["dlpack", "ffi"])
def test_it_is_torch_s_current_one(
    kind: Callable[[Any], Any],
    call: Callable[..., None],
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    with mode():
        rows, cache = torch.zeros(5, 8, device="cuda"), torch.zeros(5, 8, device="cuda")
        indices = torch.arange(5, device="cuda")
        given = [kind(Foreign(one)) for one in (cache, indices, rows)]
        call(*given)  # compiles
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # cycles, of some 2 GHz
            rows.fill_(3)
            call(*given)
            found = cache.clone()
        stream.synchronize()
        assert torch.equal(found, torch.full_like(found, 3))
