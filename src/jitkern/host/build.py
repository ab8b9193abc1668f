"""Building the host module: for the wheel, or where none is shipped that fits."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from jitkern.cache import search
from jitkern.cache.entry import Key
from jitkern.cache.get import BuildOutput
from jitkern.compilers import cxx
from jitkern.compilers.identity import toolchain_id
from jitkern.compilers.load import platform_abi
from jitkern.compilers.sources import include_closure, include_dirs
from jitkern.env import compiler_environment, settings
from jitkern.errors import CacheError, ToolchainError
from jitkern.fs import digest, scratch_folder, write_whole

_log = logging.getLogger("jitkern")

PRECOMPILED = "precompiled.h"

# For the wheel. libstdc++ is the user's own, which torch needs too; a static one wants glibc 2.36.
PORTABLE_LDFLAGS = ("-s",)


def build(key: Key, csrc: Path, *, ldflags: Sequence[str] = ()) -> BuildOutput:
    """Compile and link every ``.cc`` below `csrc`. Raises as `cxx.build`."""
    import tvm_ffi

    start = time.perf_counter()
    variant = f"{toolchain_id()}+tvm-ffi-{tvm_ffi.__version__}"
    environment = environment_id()
    if environment:
        variant += f"+env-{environment}"
    kept = _kept(csrc, [variant, key.describe["cflags"], platform_abi()[0]])
    with scratch_folder("build") as folder:
        built = cxx.build(
            key.name,
            sources=sorted(csrc.rglob("*.cc")),
            compiled={source: made for source, made in kept.items() if made.exists()},
            directory=folder,
            cflags=key.describe["cflags"],
            ldflags=("-pthread", *ldflags),  # before glibc 2.34 threads are a library of their own
            include_paths=include_dirs(csrc),
            precompiled=csrc / "host" / PRECOMPILED,
        )
        library = built.path.read_bytes()
        for source, made in kept.items():
            if not made.exists():
                write_whole(made, built.objects[source].read_bytes())
    notes = {
        "tvm_ffi": tvm_ffi.__version__,
        "libc": platform_abi()[1],
        "environment": environment,
        "build_ms": round((time.perf_counter() - start) * 1e3, 3),
        "built_unix_s": round(time.time(), 3),
    }
    return BuildOutput(variant, {f"{key.name}.so": library}, notes)


def environment_id() -> str:
    """Name the flags and headers that the environment brings (CPATH and the like); empty if none.

    They are in no key, which is that of what the wheel ships.
    """
    found = compiler_environment()
    return digest(found)[:12] if found else ""


def _kept(csrc: Path, by: Sequence[object]) -> dict[Path, Path]:
    """Return where JITKERN_HOST_OBJECTS keeps what each source is compiled to, there or not yet.

    A name is the content of the source and of its headers, and how they are compiled.
    """
    store = settings().host_objects
    if store is None:
        return {}

    def name(source: Path) -> str:
        # As the compiler sees it: what comes first in all, and quoted names beside the source.
        text = f'#include "host/{PRECOMPILED}"\n{source.read_text()}'
        closure = include_closure(text, include_dirs=[source.parent, *include_dirs(csrc)])
        return f"{source.stem}-{digest([*by, closure.digest])}.o"

    return {source: store / name(source) for source in sorted(csrc.rglob("*.cc"))}


def announce_and_build(key: Key, csrc: Path) -> BuildOutput:
    """Build, after a line of log that says why; ToolchainError if that cannot be."""
    import tvm_ffi

    shipped = _shipped_tvm_ffi(key)
    if shipped is not None:
        against = f"built against apache-tvm-ffi {shipped}, installed is {tvm_ffi.__version__}"
    damaged = any(search.SHIPPED.glob(f"v1/{key.name}-*"))
    if not toolchain_id():
        if shipped is not None:
            raise ToolchainError(
                f"the shipped host module was {against}, and there is no C++ compiler to build "
                f"another; pip install apache-tvm-ffi=={shipped}"
            )
        reason = "is damaged or was built from other sources" if damaged else "is not shipped"
        raise ToolchainError(
            f"the host module {reason} and there is no C++ compiler to build it; "
            "install g++ (apt install g++) or a jitkern wheel"
        )
    if shipped is not None:
        why = f"the shipped one was {against}"
    elif damaged:
        why = "the shipped one is damaged or was built from other sources"
    else:
        why = "a source checkout ships none"
    # A warning, which Python shows where nobody has configured logging: it takes long.
    _log.warning("jitkern: building the host module with c++ (once per machine): %s", why)
    return build(key, csrc)


def _shipped_tvm_ffi(key: Key) -> str | None:
    """Version that a shipped library of these very sources was built against."""
    try:
        entry = search.shipped_cache().lookup(key)
    except CacheError:
        return None  # others can have written it, which has been said
    return None if entry is None else str(entry.meta.get("tvm_ffi"))
