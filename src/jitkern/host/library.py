"""The host module: jitkern's own C++ as one library that checks, computes and launches.

It needs no CUDA to build and none to load. The wheel ships it; a source checkout builds it in its
``build/`` folder at the first use.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jitkern.arch import Arch
from jitkern.cache import get
from jitkern.cache.entry import Entry, Key, new_entry
from jitkern.cache.get import Buildable, Lookup, get_or_build
from jitkern.cache.lock import build_folder
from jitkern.cache.store import EXACT, NO_USE
from jitkern.compilers import cxx
from jitkern.compilers.load import load_library, platform_abi
from jitkern.compilers.sources import CSRC, include_dirs
from jitkern.env import CXX_HEADERS, settings
from jitkern.errors import EarlierIndexError, EarlierRuntimeError, JitkernError, ToolchainError
from jitkern.fs import ForkLocal, digest, sha256
from jitkern.gate import gate

if TYPE_CHECKING:
    from tvm_ffi import Module

NAME = "jitkern_host"
# -O1: a call takes 1 % more instructions than with -O3, the build 62 s of CPU time instead of 98.
# Files with loops to vectorise ask for -O3. No -march=native: the cache may be shared.
CFLAGS = ("-std=c++17", "-O1", "-fvisibility=hidden")

Builder = Callable[..., Any]  # returns the DeviceModule of a specialisation

_log = logging.getLogger("jitkern")
_guard = ForkLocal(threading.RLock)
_lookup: Lookup[Module] | None = None
_builders: dict[str, Builder] = {}


def module() -> Module:
    """Return the host module, loaded and initialised; build it first if necessary.

    Raises CompileError if it does not compile, ToolchainError if there is no compiler.
    """
    return find().loaded


def find() -> Lookup[Module]:
    """Return the host module and where it was found. Raises the same as ``module``."""
    if _lookup is None:
        with _guard.value:
            if _lookup is None:
                _import_tvm_ffi()
                return _initialised(get_or_build(HostModule(CSRC)))
    return _lookup


def find_built() -> Lookup[Module] | None:
    """Return the same as ``find``, but None if it would have to be built."""
    with _guard.value:
        _import_tvm_ffi()
        lookup = _lookup or get.find(HostModule(CSRC))
        return lookup if lookup is None or lookup is _lookup else _initialised(lookup)


def _import_tvm_ffi() -> None:
    with gate:
        import tvm_ffi  # noqa: F401 - imports torch too


# -- functions of the host module ------------------------------------------------------------------


class Function:
    """An exported C++ function that may ask for PyTorch's state, looked up at its first call.

    From then on ``call`` is the C++ function itself. Ops bind it to a local name and call that: a
    wrapper takes 60 ns, and ``function.call(...)`` 15 ns in Python 3.11.
    """

    __slots__ = ("_name", "call")

    def __init__(self, name: str) -> None:
        self._name = name
        self.call: Callable[..., Any] = self._look_up_and_call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def _look_up_and_call(self, *args: Any) -> Any:
        loaded = module()
        loaded["set_torch_state"](*torch_state())
        self.call = loaded[self._name]
        return self.call(*args)


def builds(name: str, builder: Builder) -> None:
    """Register the builder of the kernels that C++ requests by `name`.

    It is called with the ints of a specialisation, by name, when a call on a GPU first needs it.
    """
    _builders[name] = builder


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


# -- building and loading --------------------------------------------------------------------------


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
        """Log why it is built, and build it; ToolchainError without a compiler."""
        import tvm_ffi

        why = f"is not shipped for these sources and apache-tvm-ffi {tvm_ffi.__version__}"
        if not cxx.toolchain_id():
            raise ToolchainError(
                f"the host module {why}, and there is no C++ compiler to build it; "
                "install g++ (apt install g++) or a jitkern wheel"
            )
        # A warning, which Python shows without any logging setup: the build takes long.
        _log.warning("jitkern: building the host module with c++, once, in up to 120 s: it %s", why)
        entry = self.compile(folder=self._checkout_folder())
        if HostModule(self._csrc).key.digest != self.key.digest:
            raise JitkernError(f"{NAME}: a source changed while it was built; call it again")
        return entry

    def hint(self) -> str:
        return "build it beforehand with: jitkern warm"

    def compile(self, *, ldflags: Sequence[str] = (), folder: Path | None = None) -> Entry:
        """Compile and link every ``.cc`` below `csrc`. Raises as `cxx.build`.

        `folder` keeps the objects for the next build.
        """
        import tvm_ffi

        with build_folder(folder) as directory:
            library = cxx.build(
                NAME,
                sources=sorted(self._csrc.rglob("*.cc")),
                directory=directory,
                cflags=self.key.describe["cflags"],
                ldflags=("-pthread", *ldflags),  # a library of its own before glibc 2.34
                include_paths=include_dirs(self._csrc),
                precompiled=self._csrc / "host" / "precompiled.h",
                unset=CXX_HEADERS,  # they would bring headers that are in no key
            ).read_bytes()
        notes = {"tvm_ffi": tvm_ffi.__version__, "libc": platform_abi()[1]}
        variant = f"{cxx.toolchain_id()}+tvm-ffi-{tvm_ffi.__version__}"
        return new_entry(self.key, variant, {f"{NAME}.so": library}, notes)

    def _checkout_folder(self) -> Path | None:
        """Return the folder in a checkout's ``build/`` for ninja; None outside a checkout.

        Its name holds what ninja does not check: the versions of the compiler and of tvm-ffi.
        """
        import tvm_ffi

        root = self._csrc.parents[2]
        headers = [str(path) for path in cxx.tvm_ffi_include_dirs()]
        is_checkout = (root / "hatch_build.py").is_file() and os.access(root, os.W_OK)
        unchecked = [cxx.toolchain_id(), tvm_ffi.__version__, headers, self.key.describe]
        name = f"host-{digest(unchecked)[:12]}"
        return root / "build" / name if is_checkout else None


def _source_digests(csrc: str) -> dict[str, str]:
    """Return the digest of each C++ source and header below `csrc`, by its path there."""
    # With Path.rglob and relative_to a warm load would take 4 ms instead of 2.
    digests = {}
    for folder, _, names in os.walk(csrc):
        for name in names:
            if name.endswith((".cc", ".h")):
                file = f"{folder}/{name}"
                with open(file, "rb", buffering=0) as source:
                    digests[file[len(csrc) + 1 :]] = sha256(source.read())
    return digests


def fits(built_against: str, installed: str) -> bool:
    """Tell whether a library built against one version of tvm-ffi runs with another."""
    built, have = _release(built_against), _release(installed)
    return bool(built) and built[:2] == have[:2] and built <= have


def _release(version: str) -> tuple[int, ...]:
    """Return (0, 1, 15) for "0.1.15.post2"; empty if it is no version."""
    match = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?![^.])", version, re.ASCII)
    return tuple(map(int, match.groups())) if match else ()


# -- callbacks of C++ ------------------------------------------------------------------------------


def _initialised(lookup: Lookup[Module]) -> Lookup[Module]:
    """Give the host module its callbacks and settings, and keep it for this process."""
    global _lookup
    from tvm_ffi.error import register_error

    for error in (ThroughCpp, EarlierIndexError, EarlierRuntimeError):
        register_error(f"jitkern.{error.__name__}", error)
    lookup.loaded["set_resolver"](_resolve)
    lookup.loaded["set_fault_handler"](_FAULT_HANDLERS[settings().faults])
    if settings().record is not None:
        atexit.register(_warn_of_no_record)
    _lookup = lookup
    return lookup


def _warn_of_no_record() -> None:
    file = settings().record
    if file is not None and not file.exists():
        reason = "nothing was recorded: calls on the CPU need no kernels"
        _log.warning("jitkern: JITKERN_RECORD: %s: %s", file, reason)


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
    with gate:
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


_in_cpp = threading.local()  # .error: the exception that is passing through C++ on this thread


class ThroughCpp(RuntimeError):  # noqa: N818 - it is never seen
    """Stands for a jitkern exception inside C++, which keeps only the kind and the message.

    When tvm-ffi creates it again for Python, the original exception takes its place, with its log
    and command.
    """

    def __new__(cls, *args: Any) -> Any:
        return _in_cpp.__dict__.pop("error", None) or super().__new__(cls, *args)


@contextmanager
def through_cpp() -> Iterator[None]:
    """Let a jitkern exception of a callback pass through C++ unchanged."""
    try:
        yield
    except JitkernError as error:
        carrier = ThroughCpp(str(error))
        _in_cpp.error = error
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
    return image, tuple(kernels.exports), tuple(kernels._launch_config)
