"""The host module: all of jitkern's own C++ as one library that checks, computes and launches.

It needs no CUDA to build and none to load. The wheel ships it; a source checkout builds it once per
machine, when it is first used.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jitkern.env import settings
from jitkern.errors import CompileError, JitkernError, ToolchainError
from jitkern.jit import compilers, cxx
from jitkern.jit.cache import Cache
from jitkern.jit.entry import Entry, Key, digest
from jitkern.jit.library import LOAD_ERRORS, load_library, platform_abi
from jitkern.jit.resolve import SHIPPED, Built, obtain
from jitkern.jit.sources import CSRC
from jitkern.jit.toolchain import Arch

if TYPE_CHECKING:
    from tvm_ffi import Module

NAME = "jitkern_host"
CFLAGS = ("-std=c++17", "-O3", "-fvisibility=hidden")  # no -march=native: the cache may be shared
# For the wheel. libstdc++ is the user's own, which torch needs too; a static one wants glibc 2.36.
PORTABLE_LDFLAGS = ("-s",)
_FAULT_MODES = {"raise": 0, "warn": 1, "ignore": 2}


class Kernels(Protocol):
    """What an op's builder returns: an image per arch, its entry points, how they are launched."""

    @property
    def exports(self) -> Sequence[str]:
        """Names of the kernels in the image."""
        ...

    @property
    def launch_config(self) -> Sequence[int]:
        """Threads and PDL of each kernel, then vectors in flight and splits of a row."""
        ...

    def image(self, arch: Arch) -> bytes:
        """Return the code for `arch`."""
        ...


Builder = Callable[..., Kernels]

_guard = threading.RLock()
_module: Module | None = None
_builders: dict[str, Builder] = {}


def _renew_guard() -> None:
    global _guard
    _guard = threading.RLock()


os.register_at_fork(after_in_child=_renew_guard)


def module() -> Module:
    """Return the host module, loaded and initialised; built first if it has to be.

    Raises
    ------
    CompileError
        It does not compile.
    ToolchainError
        It has to be built and there is no C++ compiler; the message says what to install.
    """
    global _module
    if _module is None:
        with _guard:
            if _module is None:
                loaded = _load()
                _initialise(loaded)
                _module = loaded
    return _module


def op(name: str, builder: Builder) -> Callable[..., Any]:
    """Return the exported C++ function `name`, its kernels made by `builder`.

    Parameters
    ----------
    name
        Name of the exported function and of the op in the C++ source.
    builder
        Called with the ints of a specialisation, by name, when a call on a GPU first needs it.

    Examples
    --------
    >>> store = op("store", kernel)  # doctest: +SKIP
    >>> store(k_cache, v_cache, indices, k, v)  # doctest: +SKIP
    """
    _builders[name] = builder
    function: Callable[..., Any] = module()[name]
    return function


def launcher(exports: Sequence[str], image: Callable[[Arch], bytes]) -> Callable[..., Any]:
    """Return the C++ function that launches the kernels of one image; see csrc/host/user_launch.cc.

    Parameters
    ----------
    exports
        Names of the kernels in the image.
    image
        Called at the first launch on a GPU.
    """

    def resolve(_op: str, _names: Any, _values: Any, arch: int) -> tuple[Any, ...]:
        return _relayed(lambda: (image(Arch(*divmod(arch, 10))), tuple(exports), ()))

    made: Callable[..., Any] = module()["make_launch"](resolve)
    return made


def build_host_module(out_dir: Path) -> Path:
    """Build the host module as an entry below `out_dir`, for the wheel; return the library's path.

    Needs a C++ compiler, ninja and the tvm-ffi package; neither torch nor CUDA.
    """
    key = _key()
    with tempfile.TemporaryDirectory(prefix="jitkern-build-") as folder:
        built = _build(key, Path(folder), PORTABLE_LDFLAGS)
    return Cache(Path(out_dir)).publish(built.key, built.files, built.meta).artefact


# -- loading ---------------------------------------------------------------------------------------


def _load() -> Module:
    loaded: list[Module] = []

    def verify(staged: Path) -> None:
        try:
            loaded.append(load_library(staged / f"{NAME}.so"))
        except LOAD_ERRORS as error:
            raise CompileError(
                f"{NAME}: built but does not load", command=f"dlopen {NAME}.so", log=str(error)
            ) from error

    def find(accept: Callable[[Mapping[str, Any]], bool]) -> Entry:
        # No compiler is asked for its version: a library made by any of them is as good.
        return obtain(
            _key(),
            _announce_and_build,
            accept=accept,
            verify=verify,
            cure="build it beforehand with: jitkern warm",
        ).entry

    entry = find(_is_compatible)
    if not loaded:
        try:
            loaded.append(load_library(entry.artefact))
        except LOAD_ERRORS:
            # Made on a machine with newer system libraries, or evicted a moment ago.
            find(lambda _meta: False)
    return loaded[0]


def _key() -> Key:
    sources = {
        path.relative_to(CSRC).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(CSRC.rglob("*"))
        if path.suffix in (".cc", ".h")
    }
    family = digest(
        {
            "route": "cxx",
            "name": NAME,
            "sources": sources,
            "cflags": CFLAGS,
            "processor": platform_abi()[0],
        }
    )
    return Key("cxx", NAME, family, "", {"op": NAME, "cflags": list(CFLAGS)})


def _is_compatible(meta: Mapping[str, Any]) -> bool:
    """tvm-ffi keeps its C ABI within 0.x: what was built against an older patch release runs."""
    import tvm_ffi

    return _fits(str(meta.get("tvm_ffi", "")), tvm_ffi.__version__)


def _fits(built_against: str, installed: str) -> bool:
    built, have = _release(built_against), _release(installed)
    return len(built) == 3 and built[:2] == have[:2] and built <= have


def _release(version: str) -> tuple[int, ...]:
    """(0, 1, 15) of "0.1.15.post2"."""
    parts = version.split(".")[:3]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


# -- building --------------------------------------------------------------------------------------


def _announce_and_build() -> Built:
    key = _key()
    if not compilers.toolchain_id("cxx"):
        raise ToolchainError(_no_compiler())
    sys.stderr.write(f"jitkern: building the host module with c++ (once per machine): {_why()}\n")
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="jitkern-build-") as folder:
        return _build(key, Path(folder), ())


def _why() -> str:
    import tvm_ffi

    built_against = _shipped_tvm_ffi()
    if built_against is not None:
        return (
            f"the shipped one was built against apache-tvm-ffi {built_against}, "
            f"installed is {tvm_ffi.__version__}"
        )
    if _ships_some():
        return "the shipped one is damaged or was built from other sources"
    return "a source checkout ships none"


def _no_compiler() -> str:
    import tvm_ffi

    wanted = _shipped_tvm_ffi()
    if wanted is not None:
        return (
            f"the shipped host module was built against apache-tvm-ffi {wanted}, installed is "
            f"{tvm_ffi.__version__}, and there is no C++ compiler to build another; "
            f"pip install apache-tvm-ffi=={wanted}"
        )
    reason = "is damaged or was built from other sources" if _ships_some() else "is not shipped"
    return (
        f"the host module {reason} and there is no C++ compiler to build it; "
        "install g++ (apt install g++) or a jitkern wheel"
    )


def _shipped_tvm_ffi() -> str | None:
    """Version that a shipped library of these very sources was built against."""
    entry = Cache(SHIPPED, read_only=True).lookup(_key(), accept=lambda _meta: True)
    return None if entry is None else str(entry.meta.get("tvm_ffi"))


def _ships_some() -> bool:
    return any(SHIPPED.glob(f"v1/{NAME}-*"))


def _build(key: Key, folder: Path, ldflags: Sequence[str]) -> Built:
    import tvm_ffi

    start = time.perf_counter()
    built = cxx.build(
        NAME,
        sources=sorted(CSRC.rglob("*.cc")),
        directory=folder,
        cflags=CFLAGS,
        ldflags=ldflags,
        include_paths=[CSRC / "include", CSRC],
    )
    meta = {
        "tvm_ffi": tvm_ffi.__version__,
        "libc": platform_abi()[1],
        "build_ms": round((time.perf_counter() - start) * 1e3, 3),
    }
    toolchain = f"{compilers.toolchain_id('cxx')}+tvm-ffi-{tvm_ffi.__version__}"
    files = {f"{NAME}.so": built.library.read_bytes()}
    return Built(replace(key, toolchain=toolchain), files, meta)


# -- wiring ----------------------------------------------------------------------------------------


def _initialise(loaded: Module) -> None:
    """Give the C++ side what it needs of Python and the settings, where it takes it."""
    _register_relay()
    for name, argument in (
        ("set_resolver", lambda: _resolve),
        ("set_fault_mode", lambda: _FAULT_MODES[settings().faults]),
        ("set_warner", lambda: _warn),
    ):
        if loaded.implements_function(name):
            loaded[name](argument())


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _resolve(
    op_name: str, names: Sequence[str], values: Sequence[int], arch: int
) -> tuple[Any, ...]:
    """Return image, entry points and launch configuration of one specialisation.

    Called from C++ at its first launch on a device. C++ names what it asks for, so that a builder
    with other parameters, or in another order, is an error and not another kernel.
    """

    def resolved() -> tuple[Any, ...]:
        spec = {str(name): int(value) for name, value in zip(names, values, strict=True)}
        kernels = _builders[op_name](**spec)
        image = kernels.image(Arch(*divmod(arch, 10)))
        return image, tuple(kernels.exports), tuple(kernels.launch_config)

    return _relayed(resolved)


def _relayed(call: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what `call` does, for C++; a jitkern exception passes through it unharmed."""
    try:
        return call()
    except JitkernError as error:
        # Only kind and message survive the way through C++. The exception itself, with its log
        # and command, is kept here and comes back in _Relay.__new__.
        message = f"{type(error).__name__}: {error}"
        relay = _Relay(message)
        _Relay.pending[message] = error
        raise relay from error


class _Relay(RuntimeError):  # noqa: N818 - it is never seen
    """Stands for a jitkern exception while it passes through C++."""

    pending: dict[str, JitkernError] = {}  # noqa: RUF012

    def __new__(cls, message: str) -> Any:
        original = cls.pending.pop(message, None)
        return original if original is not None else super().__new__(cls, message)


def _register_relay() -> None:
    from tvm_ffi.error import register_error

    register_error("jitkern.Relay", _Relay)
