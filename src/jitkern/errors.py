"""The exceptions of jitkern. Wrong arguments are ValueError, TypeError or IndexError instead."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from typing import Any, NoReturn


class JitkernError(Exception):
    """Base class of jitkern's own exceptions."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross processes, and the default cannot pass keyword-only arguments.
        new: Any = copyreg.__newobj__  # type: ignore[attr-defined]
        state = {**vars(self), "args": self.args}
        # Set by tvm-ffi on errors that come through C++. 0.1.11 cannot pickle it.
        state.pop("__tvm_ffi_error__", None)
        return (new, (type(self),), state)


class CompileError(JitkernError):
    """A source did not compile.

    `message` is one line: what was compiled, by what. `command` is the command line, or the options
    given to a compiler library, `log` the whole log of the compiler, `source` the translation unit
    if jitkern rendered it.
    """

    def __init__(self, message: str, *, command: str, log: str, source: str | None = None) -> None:
        self.message = message
        self.command = command
        self.log = log
        self.source = source
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.message, f"command: {self.command}"]
        if self.log.strip():  # else no compiler has seen the source
            # Numbered, since the compiler's log speaks of lines.
            lines = enumerate((self.source or "").splitlines(), 1)
            parts += [f"log:\n{self.log.rstrip()}", *(["source:"] if self.source else [])]
            parts += [f"{number:4d}  {line}" for number, line in lines]
        return "\n".join(parts)


class CacheError(JitkernError):
    """The kernel cache cannot do what was asked of it."""


class WarmError(JitkernError):
    """Some jobs of ``warm`` failed; `outcomes` has the result of every job."""

    def __init__(self, message: str, outcomes: Sequence[Any] = ()) -> None:
        self.outcomes: list[Any] = list(outcomes)
        super().__init__(message)


class UnsupportedError(JitkernError, RuntimeError):
    """This machine, driver or build cannot do what was asked of it."""


class FrozenError(JitkernError):
    """A kernel was missing after `freeze()`; the message names what to warm."""


class ToolchainError(JitkernError):
    """Something needed to compile is not installed; the message ends with what to install."""


class PoolShareError(JitkernError):
    """Ranks did not all arrive at a shared pool; the message says which rank did what."""


class CommError(JitkernError):
    """A communicator cannot be used, or has failed; the message says which rank did what."""


class CommTimeoutError(CommError, TimeoutError):
    """Ranks did not arrive at a call in time, or no longer can.

    `op` is the call, such as ``"all_reduce"``, and `number` counts this communicator's calls from
    1; 0 is the set-up. `rank` is this rank. `missing` are the ranks that have not arrived; empty if
    all have, and their GPUs are not done.
    """

    def __init__(
        self, message: str, *, op: str, number: int, rank: int, missing: Sequence[int]
    ) -> None:
        self.op = op
        self.number = number
        self.rank = rank
        self.missing: tuple[int, ...] = tuple(missing)
        super().__init__(message)


class EarlierFault(Exception):  # noqa: N818 - its subclasses are errors
    """A call found a fault that the kernel of an earlier call has recorded."""


class EarlierIndexError(EarlierFault, IndexError):
    """An IndexError of an earlier call's kernel."""


class EarlierRuntimeError(EarlierFault, RuntimeError):
    """A RuntimeError of an earlier call's kernel."""


UNREADABLE = (RuntimeError, ValueError, BufferError)
"""Exceptions that C++ raises for an argument whose memory it cannot read."""


def name_unreadable(error: Exception, op: str, /, **arguments: Any) -> NoReturn:
    """Raise ValueError naming the argument whose memory C++ cannot read; else `error`.

    A tensor that is meta, sparse, quantised, nested or inside vmap fails with PyTorch's words and
    no argument's name, a read-only array with NumPy's. Called after a call has failed.
    """
    import tvm_ffi

    for name, value in arguments.items():
        if not hasattr(value, "__dlpack__"):
            continue
        try:
            tvm_ffi.from_dlpack(value)
        except Exception as refusal:
            raise ValueError(f"{op}: {name}: {_what_is_unreadable(value, refusal)}") from error
    raise error


def _what_is_unreadable(value: Any, refusal: Exception) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return f"layout {str(value.layout).removeprefix('torch.')}, expected strided"
        if value.device.type not in ("cpu", "cuda"):
            return f"device {value.device}, expected cpu or cuda"
    elif not getattr(getattr(value, "flags", None), "writeable", True):
        return "a read-only array, expected a writable one; .copy() one that is only read"
    reason = str(refusal).strip().partition("\n")[0]
    return f"a tensor without readable memory ({reason}), expected a plain tensor"
