"""Calls as users' type checkers see them. ``make lint`` gives this file to mypy; nothing runs it.

mypy reports an assertion that is wrong, and a ``type: ignore`` where it sees no mistake.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import assert_type

import jitkern


def merges(x: Tensor, lse: Tensor) -> None:
    assert_type(jitkern.merge_state(x, lse, x, lse), tuple[Tensor, Tensor])
    assert_type(jitkern.merge_state(x, lse, x, lse, output=x, lse=lse), tuple[Tensor, Tensor])
    assert_type(jitkern.merge_state(x, lse, x, lse, lse=False), tuple[Tensor, None])
    assert_type(jitkern.merge_states([x], [lse], lse=lse), tuple[Tensor, Tensor])
    assert_type(jitkern.merge_states(x, lse, lse=False), tuple[Tensor, None])
    jitkern.merge_states(x, lse, lse=True)  # type: ignore[call-overload]


def loads() -> None:
    kernels = [("scale", "Scale<256>")]
    module = jitkern.load_jit("scale", "256", device_files=["a.cu"], device_wrappers=kernels)
    assert_type(module, jitkern.DeviceModule)
    module = jitkern.load_jit(
        "scale",
        device_files=["a.cu"],
        device_wrappers=[("scale", "Scale<256>", "float* data")],
        cpp_files=["a.cc"],
        cpp_wrappers=[("scale", "scale")],
    )
    library: Any = jitkern.load_jit("add", cpp_files=["a.cc"], cpp_wrappers=[("add", "add<4>")])
    library.add(10)
    jitkern.load_jit("a", device_files=["a.cu"])  # type: ignore[call-overload]


def names() -> None:
    assert_type(jitkern.offload.PinnedPool.__name__, str)
    assert_type(jitkern.nn.TPEmbedding.__name__, str)
    assert_type(jitkern.comm.PeerMemory.__name__, str)
    _ = jitkern.stor_cache  # type: ignore[attr-defined]
    _ = jitkern.offlod  # type: ignore[attr-defined]
    _ = jitkern.offload.PinedPool  # type: ignore[attr-defined]
