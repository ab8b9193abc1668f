"""The host module: all of jitkern's own C++ as one library that checks, computes and launches.

It needs no CUDA to build and none to load. The wheel ships it; a source checkout builds it in
``build/`` there, when it is first used.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jitkern.arch import Arch
from jitkern.cache import get
from jitkern.cache.entry import Entry, Key
from jitkern.cache.get import Buildable, Lookup, get_or_build
from jitkern.cache.store import EXACT, NO_USE
from jitkern.compilers.load import load_library, platform_abi
from jitkern.compilers.sources import CSRC
from jitkern.env import settings
from jitkern.errors import EarlierIndexError, EarlierRuntimeError, JitkernError
from jitkern.fs import ForkLocal, digest, sha256

if TYPE_CHECKING:
    from tvm_ffi import Module

NAME = "jitkern_host"
CFLAGS = ("-std=c++17", "-O3", "-fvisibility=hidden")  # no -march=native: the cache may be shared

Builder = Callable[..., Any]  # returns the DeviceModule of a specialisation of an op

_guard = ForkLocal(threading.RLock)
_found: Lookup[Module] | None = None
_builders: dict[str, Builder] = {}


def module() -> Module:
    """Return the host module, loaded and initialised; build it first if necessary.

    Raises CompileError if it does not compile, ToolchainError if there is no compiler.
    """
    return find().loaded


def find() -> Lookup[Module]:
    """Return the host module and where it was found. Raises as ``module``."""
    if _found is None:
        with _guard.value:
            if _found is None:
                return _initialised(get_or_build(HostModule(CSRC)))
    return _found


def find_built() -> Lookup[Module] | None:
    """As ``find``, but None if it would have to be built."""
    with _guard.value:
        found = _found or get.find(HostModule(CSRC))
        return found if found is None or found is _found else _initialised(found)


def op(name: str, builder: Builder | None = None) -> Callable[..., Any]:
    """Return the exported C++ function of the op `name`.

    `builder` makes its kernels: it is called with the ints of a specialisation, by name, when a
    call on a GPU first needs it. The function returns true and does nothing if a mode or a tracer
    of PyTorch has to see the call.
    """
    if builder is not None:
        _builders[name] = builder
    module()["set_torch_state"](*torch_state())
    return module()[name]


def builds(name: str, builder: Builder) -> None:
    """Register `builder` for the kernels that C++ requests by `name`, for several ops."""
    _builders[name] = builder


@cache
def op_now(name: str, builder: Builder) -> Callable[..., Any]:
    """As ``op``, but for calls of PyTorch's dispatcher: the function always runs."""
    _builders[name] = builder
    return module()[f"{name}_now"]


def takes_big_ints(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a C++ function name the argument that is an int beyond 64 bits, under any tvm-ffi.

    Before 0.1.15 tvm-ffi raises an OverflowError that names no argument. There the call is repeated
    with an object in the place of each such int: 0.06 us a call for the wrapper.
    """
    if _passes_big_ints():
        return function

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except OverflowError:
            return function(*map(_without_big_ints, args))

    return call


@cache
def _passes_big_ints() -> bool:
    import tvm_ffi

    return _release(tvm_ffi.__version__) >= (0, 1, 15)


def _without_big_ints(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_without_big_ints(item) for item in value]
    is_big = isinstance(value, int) and not -(2**63) <= value < 2**63
    return module()["big_int"]() if is_big else value


class _BigIntModule:
    """The host module, each of whose functions `takes_big_ints`."""

    def __init__(self, loaded: Module) -> None:
        self._loaded = loaded

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return takes_big_ints(self._loaded[name])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self[name]


class HostModule(Buildable["Module"]):
    """The library of the sources in `csrc`. The key leaves out the compiler: any will do."""

    def __init__(self, csrc: Path) -> None:
        self._csrc = csrc
        content = {
            "route": "cxx",
            "name": NAME,
            "sources": _source_digests(str(csrc)),
            "cflags": CFLAGS,
            "processor": platform_abi()[0],
        }
        self.key = Key("cxx", NAME, digest(content), {"op": NAME, "cflags": list(CFLAGS)})

    def rank(self, meta: Mapping[str, Any]) -> int:
        """tvm-ffi keeps its C ABI within 0.x: a build against an older patch release works."""
        import tvm_ffi

        is_ours = fits(str(meta.get("tvm_ffi", "")), tvm_ffi.__version__)
        return EXACT if is_ours else NO_USE

    def load(self, entry: Entry) -> Module:
        return cast("Module", _BigIntModule(load_library(NAME, entry.artefact or entry.data)))

    def build(self) -> Entry:
        # Imported here: few processes build it.
        from jitkern.host.build import announce_and_build

        built = announce_and_build(self.key, self._csrc)
        if HostModule(self._csrc).key.digest != self.key.digest:
            raise JitkernError(f"{NAME}: a source changed while it was built; call it again")
        return built

    def hint(self) -> str:
        return "build it beforehand with: jitkern warm"


def _source_digests(csrc: str) -> dict[str, str]:
    """Return the digest of each C++ source and header below `csrc`, by its path there."""
    # Not Path.rglob and relative_to: with them a warm load takes 4 ms instead of 2.
    found = {}
    for folder, _, names in os.walk(csrc):
        for name in names:
            if name.endswith((".cc", ".h")):
                file = f"{folder}/{name}"
                with open(file, "rb", buffering=0) as source:
                    found[file[len(csrc) + 1 :]] = sha256(source.read())
    return found


def fits(built_against: str, installed: str) -> bool:
    """Tell whether a library built against one version of tvm-ffi runs with another."""
    built, have = _release(built_against), _release(installed)
    return bool(built) and built[:2] == have[:2] and built <= have


def _release(version: str) -> tuple[int, ...]:
    """Return (0, 1, 15) for "0.1.15.post2"; empty if it is no version."""
    match = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?![^.])", version, re.ASCII)
    return tuple(map(int, match.groups())) if match else ()


def _initialised(found: Lookup[Module]) -> Lookup[Module]:
    """Give the host module its callbacks and settings, and keep it for this process."""
    global _found
    from tvm_ffi.error import register_error

    for error in (ThroughCpp, EarlierIndexError, EarlierRuntimeError):
        register_error(f"jitkern.{error.__name__}", error)
    found.loaded["set_resolver"](_resolve)
    found.loaded["set_fault_handler"](_FAULT_HANDLERS[settings().faults])
    _found = found
    return found


# Functions of PyTorch on the state of a thread, for C++ that is built without PyTorch: the number
# of active dispatch modes, the state of torch.jit.trace, and the current stream (stable C
# interface, CUDA builds only). The first two are the same in torch 2.8 to 2.13. If a later version
# lacks them, every call goes through PyTorch's dispatcher, which is correct but slower.
_TORCH_SYMBOLS = (
    ("libc10.so", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"),
    ("libtorch_cpu.so", "_ZN5torch3jit6tracer15getTracingStateEv"),
    ("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"),
)


@cache
def torch_state() -> tuple[int, ...]:
    """Return the addresses of PyTorch's functions, 0 for one that it does not have."""
    import torch

    def address(library: str, symbol: str) -> int:
        path = os.path.join(os.path.dirname(torch.__file__), "lib", library)
        try:
            # Only the copy that PyTorch has loaded: another would have a state of its own.
            loaded = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return ctypes.cast(getattr(loaded, symbol), ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            return 0

    return tuple(address(library, symbol) for library, symbol in _TORCH_SYMBOLS)


# Called with the message of a fault; None: C++ raises it.
_FAULT_HANDLERS: dict[str, Callable[[str], None] | None] = {
    "raise": None,
    "warn": lambda message: warnings.warn(message, RuntimeWarning, stacklevel=2),
    "ignore": lambda _: None,
}


class ThroughCpp(RuntimeError):  # noqa: N818 - it is never seen
    """Carries a jitkern exception through C++, which keeps only kind and message.

    The exception itself, with its log and command, waits here and comes back in its place.
    """

    waiting: ClassVar[dict[str, JitkernError]] = {}

    def __new__(cls, message: str) -> Any:
        return cls.waiting.pop(message, None) or super().__new__(cls, message)


@contextmanager
def through_cpp() -> Iterator[None]:
    """Carry a jitkern exception of this function through C++ unharmed."""
    try:
        yield
    except JitkernError as error:
        # The id, since two threads may fail with the same message.
        message = f"{type(error).__name__}: {error} [{id(error)}]"
        carrier = ThroughCpp(message)
        ThroughCpp.waiting[message] = error
        raise carrier from error


@through_cpp()
def _resolve(
    op_name: str, names: Sequence[str], values: Sequence[int], arch: int
) -> tuple[Any, ...]:
    """Return image, entry points and launch configuration of one specialisation.

    Called from C++ at its first launch on a device. The values have names, so a builder with other
    parameters, or in another order, is an error and not another kernel.
    """
    spec = {str(name): int(value) for name, value in zip(names, values, strict=True)}
    kernels = _builders[op_name](**spec)
    image = kernels.image(Arch(*divmod(arch, 10)))
    return image, tuple(kernels.exports), tuple(kernels.launch_config)
